//! What the operators of the paged cache stand on: launchers that name the argument that they refuse, and the
//! conversion of pairs of codes.

use dsv4_kernels::kv_cache::{Cache, RowFormat};
use dsv4_kernels::runtime::params::Params;
use dsv4_kernels::runtime::{Contract, DType, DeviceArena, LaunchConfig, Result, RuntimeError, TensorView};
use dsv4_kernels::{attention_combine, decode_attention, kv_cache_write};
use dsv4_reference::kv_cache::e4m3_value;

use crate::support;

const FORMAT: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
const PAGE_SIZE: usize = 2;

fn assert_refused<T: std::fmt::Debug>(result: Result<T>, argument: &str, needle: &str) {
    match result {
        Err(RuntimeError::Argument { argument: named, reason, .. }) => {
            assert_eq!(named, argument, "{reason}");
            assert!(reason.contains(needle), "`{reason}` does not say `{needle}`");
        }
        other => panic!("`{argument}` was not refused: {other:?}"),
    }
}

fn arena() -> DeviceArena<'static> {
    DeviceArena::new(support::device(), Contract::NAN)
}

fn place(arena: &mut DeviceArena<'_>, name: &str, dtype: DType, shape: &[usize]) -> TensorView {
    arena.output(name, dtype, shape).expect("memory")
}

fn shaped(view: &TensorView, shape: &[usize]) -> TensorView {
    let strides = dsv4_kernels::runtime::tensor::dense_strides(shape);
    TensorView { shape: shape.to_vec(), strides, ..view.clone() }
}

fn typed(view: &TensorView, dtype: DType) -> TensorView {
    TensorView { dtype, ..view.clone() }
}

fn at(view: &TensorView, other: &TensorView) -> TensorView {
    TensorView { address: other.address, ..view.clone() }
}

#[test]
fn every_pair_of_e4m3_codes_converts_to_the_values_of_both() {
    let mut arena = arena();
    let low = place(&mut arena, "low", DType::F32, &[65536]);
    let high = place(&mut arena, "high", DType::F32, &[65536]);
    let violations = arena.run(|device| {
        let kernel = device.kernel("selftest.cu", &[], "selftest_e4m3_pairs")?;
        let params = Params::new("selftest").ptr("low", &low).ptr("high", &high);
        kernel.launch(LaunchConfig::linear("selftest", "pairs", 16, 256)?, &params)
    });
    assert!(violations.expect("the launch").is_empty());
    for (view, shift) in [(&low, 0), (&high, 8)] {
        let values = arena.download(view).expect("a download").to_f64();
        for (pair, value) in values.iter().enumerate() {
            let expected = e4m3_value((pair >> shift) as u8);
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "pair {pair:#06x}: {value} is not {expected}");
        }
    }
}

#[test]
fn the_launcher_of_kv_cache_write_names_the_argument_that_it_refuses() {
    let mut arena = arena();
    let kv = place(&mut arena, "kv", DType::Bf16, &[3, 128]);
    let slots = place(&mut arena, "slots", DType::I32, &[3]);
    let pages = place(&mut arena, "cache", DType::U8, &[4, PAGE_SIZE * FORMAT.row_bytes()]);
    let write = |kv: &TensorView, slots: &TensorView, format: RowFormat, pages: &TensorView, page_size: usize| {
        let cache = Cache { pages, page_size };
        kv_cache_write::forward(support::device(), &kv_cache_write::Forward { kv, slots, format, cache })
    };
    write(&kv, &slots, FORMAT, &pages, PAGE_SIZE).expect("the unchanged arguments are accepted");
    assert_refused(write(&shaped(&kv, &[3, 64]), &slots, FORMAT, &pages, PAGE_SIZE), "kv", "width 64");
    assert_refused(write(&typed(&kv, DType::F32), &slots, FORMAT, &pages, PAGE_SIZE), "kv", "f32");
    assert_refused(write(&kv, &shaped(&slots, &[2]), FORMAT, &pages, PAGE_SIZE), "slots", "[2]");
    assert_refused(write(&kv, &typed(&slots, DType::F32), FORMAT, &pages, PAGE_SIZE), "slots", "f32");
    assert_refused(write(&kv, &slots, FORMAT, &pages, 3), "cache", "must be [4, ");
    assert_refused(write(&kv, &slots, FORMAT, &pages, 0), "cache", "0 rows");
    assert_refused(write(&kv, &slots, FORMAT, &typed(&pages, DType::I32), PAGE_SIZE), "cache", "i32");
    let shifted = TensorView { address: pages.address + 8, ..pages.clone() };
    assert_refused(write(&kv, &slots, FORMAT, &shifted, PAGE_SIZE), "cache", "16 bytes");
    assert_refused(write(&kv, &slots, FORMAT, &at(&pages, &kv), PAGE_SIZE), "cache", "overlaps `kv`");
    let wide = RowFormat { nope_dim: 65, rope_dim: 63 };
    assert_refused(write(&kv, &slots, wide, &pages, PAGE_SIZE), "format", "nope_dim 65");
    let ragged = RowFormat { nope_dim: 64, rope_dim: 60 };
    assert_refused(write(&kv, &slots, ragged, &pages, PAGE_SIZE), "format", "rope_dim 60");
}

#[test]
fn the_launcher_of_attention_combine_names_the_argument_that_it_refuses() {
    let mut arena = arena();
    let partial_out = place(&mut arena, "partial_out", DType::F32, &[2, 3, 4, 64]);
    let partial_lse = place(&mut arena, "partial_lse", DType::F32, &[2, 3, 4]);
    let sink = place(&mut arena, "sink", DType::F32, &[4]);
    let out = place(&mut arena, "out", DType::Bf16, &[3, 4, 64]);
    let lse = place(&mut arena, "lse", DType::F32, &[3, 4]);
    let merge = |[partial_out, partial_lse, sink, out, lse]: [&TensorView; 5]| {
        let arguments = attention_combine::Forward { partial_out, partial_lse, sink: Some(sink), out, lse };
        attention_combine::forward(support::device(), &arguments)
    };
    let all = [&partial_out, &partial_lse, &sink, &out, &lse];
    merge(all).expect("the unchanged arguments are accepted");
    let refused = |number: usize, changed: TensorView, argument: &str, needle: &str| {
        let mut arguments = all;
        arguments[number] = &changed;
        assert_refused(merge(arguments), argument, needle);
    };
    refused(0, shaped(&partial_out, &[2, 3, 4, 60]), "partial_out", "v_dim 60");
    refused(0, typed(&partial_out, DType::Bf16), "partial_out", "bf16");
    refused(0, shaped(&partial_out, &[6, 4, 64]), "partial_out", "3 axes");
    refused(1, shaped(&partial_lse, &[2, 4, 3]), "partial_lse", "[2, 4, 3]");
    refused(2, shaped(&sink, &[3]), "sink", "[3]");
    refused(3, shaped(&out, &[4, 3, 64]), "out", "[4, 3, 64]");
    refused(3, at(&out, &partial_out), "out", "overlaps `partial_out`");
    refused(4, typed(&lse, DType::Bf16), "lse", "bf16");
    refused(4, at(&lse, &out), "lse", "overlaps `out`");
}

/// Two requests of two tokens over one store of 8 rows, in both of its roles.
#[derive(Clone)]
struct Decode {
    q: TensorView,
    pages: TensorView,
    indices: TensorView,
    length: TensorView,
    sink: TensorView,
    softmax_scale: f32,
    num_blocks: usize,
    out: TensorView,
    lse: TensorView,
    workspace: TensorView,
}

impl Decode {
    fn new(arena: &mut DeviceArena<'_>) -> Self {
        Self {
            q: place(arena, "q", DType::Bf16, &[2, 2, 4, 128]),
            pages: place(arena, "pages", DType::U8, &[4, PAGE_SIZE * FORMAT.row_bytes()]),
            indices: place(arena, "indices", DType::I32, &[2, 2, 5]),
            length: place(arena, "length", DType::I32, &[2]),
            sink: place(arena, "sink", DType::F32, &[4]),
            softmax_scale: 0.125,
            num_blocks: 3,
            out: place(arena, "out", DType::Bf16, &[2, 2, 4, 128]),
            lse: place(arena, "lse", DType::F32, &[2, 2, 4]),
            workspace: place(arena, "workspace", DType::U8, &[1 << 17]),
        }
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn inputs(&self) -> decode_attention::Inputs<'_> {
        let store = decode_attention::Store {
            cache: Cache { pages: &self.pages, page_size: PAGE_SIZE },
            indices: &self.indices,
            length: Some(&self.length),
        };
        decode_attention::Inputs {
            q: &self.q,
            format: FORMAT,
            window: store,
            compressed: Some(store),
            sink: Some(&self.sink),
            softmax_scale: self.softmax_scale,
        }
    }

    fn forward(&self) -> Result<Vec<String>> {
        let Self { out, lse, workspace, num_blocks, .. } = self;
        let arguments = decode_attention::Forward {
            inputs: self.inputs(),
            num_blocks: *num_blocks,
            implementation: decode_attention::Implementation::Portable,
            out,
            lse,
            workspace,
        };
        decode_attention::forward(support::device(), &arguments)
    }
}

#[test]
fn the_launcher_of_decode_attention_names_the_argument_that_it_refuses() {
    let mut arena = arena();
    let decode = Decode::new(&mut arena);
    decode.forward().expect("the unchanged arguments are accepted");
    let bytes = decode_attention::workspace_bytes(
        &decode.inputs(),
        decode.num_blocks,
        decode_attention::Implementation::Portable,
    )
    .expect("sound inputs");
    decode.with(|d| d.workspace = shaped(&d.workspace, &[bytes])).forward().expect("so many bytes are enough");
    let refused = |argument, needle: &str, change: &dyn Fn(&mut Decode)| {
        assert_refused(decode.with(change).forward(), argument, needle);
    };
    refused("q", "3 axes", &|d| d.q = shaped(&d.q, &[4, 4, 128]));
    refused("q", "head_dim 64", &|d| d.q = shaped(&d.q, &[2, 2, 4, 64]));
    refused("q", "i32", &|d| d.q = typed(&d.q, DType::I32));
    refused("q", "evenly spaced", &|d| d.q.strides[0] = 2048);
    refused("window", "must be [3, ", &|d| d.pages = shaped(&d.pages, &[3, 5]));
    refused("window_indices", "[2, 1, 5]", &|d| d.indices = shaped(&d.indices, &[2, 1, 5]));
    refused("window_indices", "f32", &|d| d.indices = typed(&d.indices, DType::F32));
    refused("window_length", "[4]", &|d| d.length = shaped(&d.length, &[4]));
    refused("sink", "[5]", &|d| d.sink = shaped(&d.sink, &[5]));
    refused("num_blocks", "0", &|d| d.num_blocks = 0);
    refused("out", "[2, 2, 4, 64]", &|d| d.out = shaped(&d.out, &[2, 2, 4, 64]));
    refused("out", "overlaps `q`", &|d| d.out = at(&d.out, &d.q));
    refused("lse", "[4, 4]", &|d| d.lse = shaped(&d.lse, &[4, 4]));
    refused("workspace", "it must have", &|d| d.workspace = shaped(&d.workspace, &[bytes - 1]));
    refused("workspace", "overlaps `out`", &|d| d.workspace = at(&d.workspace, &d.out));
    for (scale, needle) in [(0.0, "0"), (-1.5, "-1.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        refused("softmax_scale", needle, &|d| d.softmax_scale = scale);
    }
}

#[test]
fn launchers_of_the_paged_cache_refuse_every_spoilt_tensor_and_name_it() {
    for (name, least) in [("kv_cache_write", 20), ("decode_attention", 100)] {
        let operator = dsv4_parity::operator::registry::find(name).expect("a registered operator");
        let refusals = operator.refusals(support::device()).expect("typical cases that run unspoilt");
        let wrong: Vec<_> = refusals.iter().filter(|refusal| refusal.problem.is_some()).collect();
        assert!(wrong.is_empty() && refusals.len() >= least, "of {}: {wrong:#?}", refusals.len());
    }
}
