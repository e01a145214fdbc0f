//! Basics of the operators of the paged cache: launchers that name the argument that they reject,
//! and the conversion of pairs of codes.

use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::{
    attention::attention_combine, attention::decode_attention, cache::kv_cache_write,
};
use dsv4_reference::cache::kv_cache::e4m3_value;
use dsv4_runtime::params::Params;
use dsv4_runtime::{
    Contract, DType, DeviceArena, LaunchConfig, Result, RuntimeError, TensorView, Views,
};

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

fn placed(arena: &mut DeviceArena<'_>, tensors: &[(&'static str, DType, &[usize])]) -> Views {
    let placed =
        tensors.iter().map(|&(name, dtype, shape)| (name, place(arena, name, dtype, shape)));
    placed.fold(Views::new(), |views, (name, view)| views.with(name, &view))
}

fn shaped(view: &TensorView, shape: &[usize]) -> TensorView {
    let strides = dsv4_runtime::tensor::dense_strides(shape);
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
    let write = |kv: &TensorView,
                 slots: &TensorView,
                 format: RowFormat,
                 pages: &TensorView,
                 page_size: usize| {
        let views = Views::from([("kv", kv), ("slots", slots), ("cache", pages)]);
        kv_cache_write::forward(support::device(), &views, format, page_size)
    };
    write(&kv, &slots, FORMAT, &pages, PAGE_SIZE).expect("the unchanged arguments are accepted");
    assert_refused(
        write(&shaped(&kv, &[3, 64]), &slots, FORMAT, &pages, PAGE_SIZE),
        "kv",
        "[3, 64] must be [3, 128]",
    );
    assert_refused(write(&typed(&kv, DType::F32), &slots, FORMAT, &pages, PAGE_SIZE), "kv", "f32");
    assert_refused(write(&kv, &shaped(&slots, &[2]), FORMAT, &pages, PAGE_SIZE), "slots", "[2]");
    assert_refused(
        write(&kv, &typed(&slots, DType::F32), FORMAT, &pages, PAGE_SIZE),
        "slots",
        "f32",
    );
    assert_refused(write(&kv, &slots, FORMAT, &pages, 3), "cache", "must be [4, ");
    assert_refused(write(&kv, &slots, FORMAT, &pages, 0), "cache", "0 rows");
    assert_refused(
        write(&kv, &slots, FORMAT, &typed(&pages, DType::I32), PAGE_SIZE),
        "cache",
        "i32",
    );
    let shifted = TensorView { address: pages.address + 8, ..pages.clone() };
    assert_refused(write(&kv, &slots, FORMAT, &shifted, PAGE_SIZE), "cache", "16 bytes");
    assert_refused(
        write(&kv, &slots, FORMAT, &at(&pages, &kv), PAGE_SIZE),
        "cache",
        "overlaps `kv`",
    );
    let wide = RowFormat { nope_dim: 65, rope_dim: 63 };
    assert_refused(write(&kv, &slots, wide, &pages, PAGE_SIZE), "format", "nope_dim 65");
    let ragged = RowFormat { nope_dim: 64, rope_dim: 60 };
    assert_refused(write(&kv, &slots, ragged, &pages, PAGE_SIZE), "format", "rope_dim 60");
}

#[test]
fn the_launcher_of_attention_combine_names_the_argument_that_it_refuses() {
    let mut arena = arena();
    let all = placed(
        &mut arena,
        &[
            ("partial_out", DType::F32, &[2, 3, 4, 64]),
            ("partial_lse", DType::F32, &[2, 3, 4]),
            ("sink", DType::F32, &[4]),
            ("out", DType::Bf16, &[3, 4, 64]),
            ("lse", DType::F32, &[3, 4]),
        ],
    );
    attention_combine::forward(support::device(), &all)
        .expect("the unchanged arguments are accepted");
    attention_combine::forward(support::device(), &all.without(&["sink"]))
        .expect("without a sink as well");
    let refused =
        |name: &'static str, needle: &str, changed: &dyn Fn(&TensorView) -> TensorView| {
            let views = all.clone().with(name, &changed(&all[name]));
            assert_refused(attention_combine::forward(support::device(), &views), name, needle);
        };
    refused("partial_out", "v_dim 60", &|view| shaped(view, &[2, 3, 4, 60]));
    refused("partial_out", "bf16", &|view| typed(view, DType::Bf16));
    refused("partial_out", "3 axes", &|view| shaped(view, &[6, 4, 64]));
    refused("partial_lse", "[2, 4, 3]", &|view| shaped(view, &[2, 4, 3]));
    refused("sink", "[3]", &|view| shaped(view, &[3]));
    refused("out", "[4, 3, 64]", &|view| shaped(view, &[4, 3, 64]));
    refused("out", "overlaps `partial_out`", &|view| at(view, &all["partial_out"]));
    refused("lse", "bf16", &|view| typed(view, DType::Bf16));
    refused("lse", "overlaps `out`", &|view| at(view, &all["out"]));
    let without = attention_combine::forward(support::device(), &all.without(&["lse"]));
    assert_refused(without, "lse", "must be present");
}

/// Two requests of two tokens over one store of 8 rows, in both of its roles.
#[derive(Clone)]
struct Decode {
    views: Views,
    options: decode_attention::Options,
}

impl Decode {
    fn new(arena: &mut DeviceArena<'_>) -> Self {
        let views = placed(
            arena,
            &[
                ("q", DType::Bf16, &[2, 2, 4, 128]),
                ("window", DType::U8, &[4, PAGE_SIZE * FORMAT.row_bytes()]),
                ("window_indices", DType::I32, &[2, 2, 5]),
                ("window_length", DType::I32, &[2]),
                ("sink", DType::F32, &[4]),
                ("out", DType::Bf16, &[2, 2, 4, 128]),
                ("lse", DType::F32, &[2, 2, 4]),
                ("workspace", DType::U8, &[1 << 17]),
            ],
        );
        let roles = [
            ("window", "compressed"),
            ("window_indices", "compressed_indices"),
            ("window_length", "compressed_length"),
        ];
        let views =
            roles.iter().fold(views.clone(), |all, (one, other)| all.with(other, &views[one]));
        let options = decode_attention::Options {
            format: FORMAT,
            window_page_size: PAGE_SIZE,
            compressed_page_size: PAGE_SIZE,
            softmax_scale: 0.125,
            num_blocks: 3,
            implementation: decode_attention::Implementation::Portable,
        };
        Self { views, options }
    }

    fn with(&self, name: &'static str, change: impl FnOnce(&TensorView) -> TensorView) -> Self {
        Self { views: self.views.clone().with(name, &change(&self.views[name])), ..self.clone() }
    }

    fn told(&self, change: impl FnOnce(&mut decode_attention::Options)) -> Self {
        let mut told = self.clone();
        change(&mut told.options);
        told
    }

    fn forward(&self) -> Result<Vec<String>> {
        decode_attention::forward(support::device(), &self.views, &self.options)
    }
}

#[test]
fn the_launcher_of_decode_attention_names_the_argument_that_it_refuses() {
    let mut arena = arena();
    let decode = Decode::new(&mut arena);
    decode.forward().expect("the unchanged arguments are accepted");
    let bytes =
        decode_attention::workspace_bytes(&decode.views, &decode.options).expect("sound inputs");
    decode
        .with("workspace", |view| shaped(view, &[bytes]))
        .forward()
        .expect("so many bytes are enough");
    let refused = |name, needle: &str, change: &dyn Fn(&TensorView) -> TensorView| {
        assert_refused(decode.with(name, change).forward(), name, needle);
    };
    refused("q", "3 axes", &|view| shaped(view, &[4, 4, 128]));
    refused("q", "[2, 2, 4, 64] must be [2, 2, 4, 128]", &|view| shaped(view, &[2, 2, 4, 64]));
    refused("q", "i32", &|view| typed(view, DType::I32));
    refused("q", "evenly spaced", &|view| TensorView {
        strides: vec![1040, 512, 128, 1],
        ..view.clone()
    });
    for store in ["window", "compressed"] {
        refused(store, "must be [3, ", &|view| shaped(view, &[3, 5]));
    }
    for indices in ["window_indices", "compressed_indices"] {
        refused(indices, "[2, 1, 5]", &|view| shaped(view, &[2, 1, 5]));
        refused(indices, "f32", &|view| typed(view, DType::F32));
    }
    refused("window_length", "[4]", &|view| shaped(view, &[4]));
    refused("compressed_length", "[4]", &|view| shaped(view, &[4]));
    refused("sink", "[5]", &|view| shaped(view, &[5]));
    refused("out", "[2, 2, 4, 64]", &|view| shaped(view, &[2, 2, 4, 64]));
    refused("out", "overlaps `q`", &|view| at(view, &decode.views["q"]));
    refused("lse", "[4, 4]", &|view| shaped(view, &[4, 4]));
    refused("workspace", "it must have", &|view| shaped(view, &[bytes - 1]));
    refused("workspace", "overlaps `out`", &|view| at(view, &decode.views["out"]));
}

#[test]
fn the_launcher_of_decode_attention_names_the_option_that_it_refuses() {
    let mut arena = arena();
    let decode = Decode::new(&mut arena);
    let refused = |name, needle: &str, change: &dyn Fn(&mut decode_attention::Options)| {
        let told = decode.told(change);
        assert_refused(told.forward(), name, needle);
        assert_refused(decode_attention::workspace_bytes(&told.views, &told.options), name, needle);
    };
    refused("num_blocks", "0", &|options| options.num_blocks = 0);
    refused("window", "0 rows", &|options| options.window_page_size = 0);
    refused("compressed", "0 rows", &|options| options.compressed_page_size = 0);
    refused("compressed", "must be [4, ", &|options| options.compressed_page_size = 3);
    refused("format", "head_dim 72", &|options| options.format.rope_dim = 8);
    refused("format", "head_dim 528", &|options| options.format.rope_dim = 464);
    for (scale, needle) in [(0.0, "0"), (-1.5, "-1.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        refused("softmax_scale", needle, &|options| options.softmax_scale = scale);
    }
}

#[test]
fn a_store_of_compressed_entries_is_given_as_a_whole_or_not_at_all() {
    let mut arena = arena();
    let decode = Decode::new(&mut arena);
    let without = |names: &[&'static str]| {
        let mut left = Decode { views: decode.views.without(names), ..decode.clone() };
        left.options.compressed_page_size = 0;
        left.forward()
    };
    without(&["compressed", "compressed_indices", "compressed_length"])
        .expect("a layer that has none");
    assert_refused(
        without(&["compressed", "compressed_length"]),
        "compressed_indices",
        "exactly when `compressed`",
    );
    assert_refused(
        without(&["compressed", "compressed_indices"]),
        "compressed_length",
        "only when `compressed`",
    );
    let alone = Decode { views: decode.views.without(&["compressed_indices"]), ..decode.clone() };
    assert_refused(alone.forward(), "compressed_indices", "exactly when `compressed`");
    let full = Decode {
        views: decode.views.without(&["window_length", "compressed_length"]),
        ..decode.clone()
    };
    full.forward().expect("lists that all count");
}

#[test]
fn launchers_of_the_paged_cache_refuse_every_corrupted_tensor_and_name_it() {
    for (name, least) in [("kv_cache_write", 20), ("decode_attention", 100)] {
        let operator = dsv4_parity::operators::registry::find(name).expect("a registered operator");
        let refusals =
            operator.refusals(support::device()).expect("typical cases that run as they are");
        let wrong: Vec<_> = refusals.iter().filter(|refusal| refusal.problem.is_some()).collect();
        assert!(wrong.is_empty() && refusals.len() >= least, "of {}: {wrong:#?}", refusals.len());
    }
}
