//! What launchers refuse, argument by argument, beyond what [`refusals`] derives for every operator: scalars, workspaces and
//! the rules between arguments; and what the deterministic sums of sparse attention promise of chunks.
//!
//! [`refusals`]: dsv4_parity::operator::refusals

use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{
    Contract, DType, Device, DeviceArena, HostTensor, Result, Role, RuntimeError, TensorView, Views,
};
use dsv4_kernels::{rms_norm, rope, sparse_attention};

use crate::support;

/// The launcher must refuse `argument`, in words that contain `needle`.
pub fn assert_refused<T: std::fmt::Debug>(result: Result<T>, argument: &str, needle: &str) {
    match result {
        Err(RuntimeError::Argument { argument: found, reason, .. }) => {
            assert_eq!(found, argument, "{reason}");
            assert!(reason.contains(needle), "{argument}: `{needle}` is not in `{reason}`");
        }
        other => panic!("{argument} ({needle}): expected a refusal, not {other:?}"),
    }
}

/// Places dense tensors of zeros, none of which is ever written by a refused call.
struct Placed {
    arena: DeviceArena<'static>,
}

impl Placed {
    fn new() -> Self {
        Self { arena: DeviceArena::new(support::device(), Contract::NAN) }
    }

    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> TensorView {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
        let host = HostTensor { dtype, shape: shape.to_vec(), bytes };
        self.arena.upload(name, &host, &Layout::dense(shape), Role::InPlace).unwrap()
    }
}

/// A view of the same memory with another shape, densely laid out.
fn shaped(view: &TensorView, shape: &[usize]) -> TensorView {
    TensorView { shape: shape.to_vec(), strides: Layout::dense(shape).strides, ..view.clone() }
}

fn strided(view: &TensorView, strides: &[i64]) -> TensorView {
    TensorView { strides: strides.to_vec(), ..view.clone() }
}

fn typed(view: &TensorView, dtype: DType) -> TensorView {
    TensorView { dtype, ..view.clone() }
}

/// The same view, so many bytes further.
pub fn shifted(view: &TensorView, bytes: i64) -> TensorView {
    TensorView { address: view.address.wrapping_add_signed(bytes), ..view.clone() }
}

/// `view`'s layout at `other`'s address.
fn at(view: &TensorView, other: &TensorView) -> TensorView {
    TensorView { address: other.address, ..view.clone() }
}

/// The same tensors, with `change` of the one called `name` in its place.
fn changed(views: &Views, name: &'static str, change: impl FnOnce(&TensorView) -> TensorView) -> Views {
    views.clone().with(name, &change(&views[name]))
}

/// The tensors of both directions of rms_norm.
fn norm(placed: &mut Placed) -> Views {
    let mut views = Views::new();
    for (name, dtype, shape) in [
        ("x", DType::Bf16, &[4, 64][..]),
        ("y", DType::Bf16, &[4, 64]),
        ("dy", DType::Bf16, &[4, 64]),
        ("dx", DType::Bf16, &[4, 64]),
        ("weight", DType::F32, &[64]),
        ("rstd", DType::F32, &[4]),
        ("dweight", DType::F32, &[64]),
        ("workspace", DType::U8, &[rms_norm::workspace_bytes(support::device(), DType::Bf16, 4, 64)]),
    ] {
        views.put(name, placed.tensor(name, dtype, shape));
    }
    views
}

#[test]
fn the_launcher_of_rms_norms_forward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let norm = norm(&mut placed);
    let forward = |views: &Views, eps| rms_norm::forward(support::device(), views, eps);
    forward(&norm, 1e-6).expect("the unchanged arguments are accepted");
    forward(&changed(&norm, "y", |y| at(y, &norm["x"])), 1e-6).expect("in place is accepted");
    forward(&norm.only(&["x", "y"]), 1e-6).expect("weight and rstd may be absent");
    for (name, needle, view) in [
        ("x", "1 axes", shaped(&norm["x"], &[256])),
        ("x", "i32", typed(&norm["x"], DType::I32)),
        ("x", "width 0", shaped(&norm["x"], &[4, 0])),
        ("x", "width 32769", shaped(&norm["x"], &[1, 32769])),
        ("x", "overlaps itself", strided(&norm["x"], &[63, 1])),
        ("x", "overlaps itself", strided(&norm["x"], &[-64, 1])),
        ("x", "contiguous", strided(&norm["x"], &[128, 2])),
        ("y", "[4, 32]", shaped(&norm["y"], &[4, 32])),
        ("y", "f32", typed(&norm["y"], DType::F32)),
        ("y", "overlaps `x`", shifted(&norm["x"], 128)),
        ("y", "overlaps `weight`", at(&norm["y"], &norm["weight"])),
        ("weight", "[63]", shaped(&norm["weight"], &[63])),
        ("weight", "i32", typed(&norm["weight"], DType::I32)),
        ("weight", "dense", strided(&norm["weight"], &[2])),
        ("rstd", "[5]", shaped(&norm["rstd"], &[5])),
        ("rstd", "bf16", typed(&norm["rstd"], DType::Bf16)),
        ("rstd", "overlaps `x`", at(&norm["rstd"], &norm["x"])),
        ("rstd", "overlaps `y`", at(&norm["rstd"], &norm["y"])),
    ] {
        assert_refused(forward(&norm.clone().with(name, &view), 1e-6), name, needle);
    }
    for (eps, needle) in [(0.0, "0"), (-1.5, "-1.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        assert_refused(forward(&norm, eps), "eps", needle);
    }
}

#[test]
fn a_tensor_that_is_needed_and_absent_is_refused_and_so_is_one_that_nobody_knows() {
    let mut placed = Placed::new();
    let norm = norm(&mut placed);
    assert_refused(rms_norm::forward(support::device(), &norm.without(&["y"]), 1e-6), "y", "must be present");
    assert_refused(rms_norm::backward(support::device(), &norm.without(&["rstd"])), "rstd", "must be present");
    let misspelt = norm.renamed(&[("weight", "wieght")]);
    assert_refused(rms_norm::forward(support::device(), &misspelt, 1e-6), "wieght", "no argument of this name");
}

#[test]
fn the_launcher_of_rms_norms_backward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let norm = norm(&mut placed);
    let backward = |views: &Views| rms_norm::backward(support::device(), views);
    backward(&norm).expect("the unchanged arguments are accepted");
    let bytes = norm["workspace"].elements();
    let short = format!("{} bytes; it must have {bytes}", bytes - 1);
    for (name, needle, view) in [
        ("dy", "[3, 64]", shaped(&norm["dy"], &[3, 64])),
        ("dx", "f32", typed(&norm["dx"], DType::F32)),
        ("rstd", "[4, 1]", shaped(&norm["rstd"], &[4, 1])),
        ("dx", "overlaps `dy`", shifted(&norm["dy"], 128)),
        ("dx", "overlaps `x`", norm["x"].clone()),
        ("dweight", "[32]", shaped(&norm["dweight"], &[32])),
        ("workspace", &short, shaped(&norm["workspace"], &[bytes - 1])),
        ("workspace", "overlaps", at(&norm["workspace"], &norm["dx"])),
        ("dweight", "overlaps", at(&norm["dweight"], &norm["x"])),
    ] {
        assert_refused(backward(&norm.clone().with(name, &view)), name, needle);
    }
    assert_refused(backward(&norm.without(&["dweight"])), "dweight", "present exactly");
    assert_refused(backward(&norm.without(&["weight"])), "dweight", "present exactly");
    assert_refused(backward(&norm.without(&["workspace"])), "workspace", "present exactly");
}

#[test]
fn the_launcher_of_rope_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let mut rotation = Views::new();
    for (name, dtype, shape) in [
        ("x", DType::Bf16, &[3, 2, 64][..]),
        ("y", DType::Bf16, &[3, 2, 64]),
        ("cos", DType::F32, &[5, 16]),
        ("sin", DType::F32, &[5, 16]),
        ("positions", DType::I32, &[3]),
    ] {
        rotation.put(name, placed.tensor(name, dtype, shape));
    }
    let forward = |views: &Views| rope::forward(support::device(), views, false);
    let tables = |shape: &[usize]| {
        let cos = changed(&rotation, "cos", |cos| shaped(cos, shape));
        changed(&cos, "sin", |sin| shaped(sin, shape))
    };
    forward(&rotation).expect("the unchanged arguments are accepted");
    forward(&changed(&rotation, "y", |y| at(y, &rotation["x"]))).expect("in place is accepted");
    forward(&rotation.without(&["positions"])).expect("positions may be absent");
    for (name, needle, view) in [
        ("x", "2 axes", shaped(&rotation["x"], &[6, 64])),
        ("x", "i32", typed(&rotation["x"], DType::I32)),
        ("x", "overlaps itself", strided(&rotation["x"], &[64, 64, 1])),
        ("y", "[3, 1, 64]", shaped(&rotation["y"], &[3, 1, 64])),
        ("y", "f32", typed(&rotation["y"], DType::F32)),
        ("y", "without being the same tensor", shifted(&rotation["x"], 128)),
        ("y", "overlaps `cos`", at(&rotation["y"], &rotation["cos"])),
        ("cos", "bf16", typed(&rotation["cos"], DType::Bf16)),
        ("sin", "[4, 16]", shaped(&rotation["sin"], &[4, 16])),
        ("sin", "axis 0 overlaps itself", strided(&rotation["sin"], &[15, 1])),
        ("positions", "[4]", shaped(&rotation["positions"], &[4])),
        ("positions", "f32", typed(&rotation["positions"], DType::F32)),
    ] {
        assert_refused(forward(&rotation.clone().with(name, &view)), name, needle);
    }
    assert_refused(forward(&tables(&[5, 0])), "cos", "0 columns");
    assert_refused(forward(&tables(&[1, 33])), "cos", "66 channels of 64");
    forward(&tables(&[2, 16])).expect("positions may reach fewer rows than there are tokens");
    let without = tables(&[2, 16]).without(&["positions"]);
    assert_refused(forward(&without), "cos", "2 rows must cover 3 tokens");
}

#[test]
fn the_launcher_of_ropes_table_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let mut table = Views::new();
    for (name, dtype, shape) in [
        ("inv_freq", DType::F32, &[16][..]),
        ("positions", DType::I32, &[5]),
        ("cos", DType::F32, &[5, 16]),
        ("sin", DType::F32, &[5, 16]),
    ] {
        table.put(name, placed.tensor(name, dtype, shape));
    }
    let launch = |views: &Views| rope::table(support::device(), views);
    launch(&table).expect("the unchanged arguments are accepted");
    for (name, needle, view) in [
        ("inv_freq", "bf16", typed(&table["inv_freq"], DType::Bf16)),
        ("positions", "f32", typed(&table["positions"], DType::F32)),
        ("cos", "[4, 16]", shaped(&table["cos"], &[4, 16])),
        ("sin", "overlaps `cos`", table["cos"].clone()),
        ("cos", "overlaps `inv_freq`", at(&table["cos"], &table["inv_freq"])),
    ] {
        assert_refused(launch(&table.clone().with(name, &view)), name, needle);
    }
}

/// Attention over 6 keys: 2 tokens, 4 heads of 64 channels, 5 slots.
#[derive(Clone)]
struct Attention {
    q: TensorView,
    k: TensorView,
    v: Option<TensorView>,
    v_dim: usize,
    sink: Option<TensorView>,
    indices: TensorView,
    topk_length: Option<TensorView>,
    softmax_scale: f32,
    out: TensorView,
    lse: TensorView,
    max_logits: TensorView,
    dout: TensorView,
    dlse: Option<TensorView>,
    dq: TensorView,
    dk: TensorView,
    dv: Option<TensorView>,
    dsink: Option<TensorView>,
    key_gradients: sparse_attention::KeyGradients,
    workspace: TensorView,
}

impl Attention {
    fn new(placed: &mut Placed) -> Self {
        let [q, out, dout, dq] = ["q", "out", "dout", "dq"].map(|name| placed.tensor(name, DType::Bf16, &[2, 4, 64]));
        let [k, dk] = ["k", "dk"].map(|name| placed.tensor(name, DType::Bf16, &[6, 64]));
        let [lse, max_logits, dlse] =
            ["lse", "max_logits", "dlse"].map(|name| placed.tensor(name, DType::F32, &[2, 4]));
        let [sink, dsink] = ["sink", "dsink"].map(|name| Some(placed.tensor(name, DType::F32, &[4])));
        let mut attention = Self {
            indices: placed.tensor("indices", DType::I32, &[2, 5]),
            topk_length: Some(placed.tensor("topk_length", DType::I32, &[2])),
            // Until the inputs are there to say how much it needs.
            workspace: q.clone(),
            q,
            k,
            sink,
            out,
            lse,
            max_logits,
            dout,
            dq,
            dk,
            dsink,
            v: None,
            v_dim: 64,
            softmax_scale: 0.125,
            dlse: Some(dlse),
            dv: None,
            key_gradients: sparse_attention::KeyGradients::Atomic,
        };
        attention.workspace = placed.tensor("workspace", DType::U8, &[attention.workspace_bytes()]);
        attention
    }

    /// With dk and dv summed in one order, `chunk_tokens` tokens at a time.
    fn deterministic(placed: &mut Placed, chunk_tokens: usize) -> Self {
        let mut attention = Self::new(placed);
        attention.key_gradients = sparse_attention::KeyGradients::Deterministic { chunk_tokens };
        attention.workspace = placed.tensor("workspace", DType::U8, &[attention.workspace_bytes()]);
        attention
    }

    fn workspace_bytes(&self) -> usize {
        sparse_attention::workspace_bytes(&self.inputs(), DType::Bf16, self.key_gradients).unwrap()
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn inputs(&self) -> sparse_attention::Inputs<'_> {
        sparse_attention::Inputs {
            q: &self.q,
            k: &self.k,
            value: match &self.v {
                Some(v) => sparse_attention::Value::Separate(v),
                None => sparse_attention::Value::Prefix { v_dim: self.v_dim },
            },
            sink: self.sink.as_ref(),
            indices: &self.indices,
            topk_length: self.topk_length.as_ref(),
            softmax_scale: self.softmax_scale,
        }
    }

    fn forward(&self) -> Result<String> {
        let (out, lse, max_logits) = (&self.out, &self.lse, &self.max_logits);
        sparse_attention::forward(
            support::device(),
            &sparse_attention::Forward {
                inputs: self.inputs(),
                implementation: sparse_attention::Implementation::Auto,
                out,
                lse,
                max_logits,
            },
        )
    }

    fn backward(&self) -> Result<Vec<String>> {
        let arguments = sparse_attention::Backward {
            inputs: self.inputs(),
            implementation: sparse_attention::Implementation::Auto,
            key_gradients: self.key_gradients,
            out: &self.out,
            lse: &self.lse,
            dout: &self.dout,
            dlse: self.dlse.as_ref(),
            dq: &self.dq,
            dk: &self.dk,
            dv: self.dv.as_ref(),
            dsink: self.dsink.as_ref(),
            workspace: &self.workspace,
        };
        sparse_attention::backward(support::device(), &arguments)
    }
}

#[test]
fn the_launcher_of_attentions_forward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let attention = Attention::new(&mut placed);
    attention.forward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).forward(), argument, needle);
    };
    refused("q", "2 axes", &|a| a.q = shaped(&a.q, &[8, 64]));
    refused("q", "f32", &|a| a.q = typed(&a.q, DType::F32));
    refused("q", "head_dim 24", &|a| a.q = shaped(&a.q, &[2, 4, 24]));
    refused("q", "head_dim 592", &|a| a.q = shaped(&a.q, &[2, 4, 592]));
    refused("q", "multiples of 16", &|a| a.q = shifted(&a.q, 2));
    refused("k", "[6, 48]", &|a| a.k = shaped(&a.k, &[6, 48]));
    refused("k", "multiples of 16", &|a| a.k = strided(&a.k, &[68, 1]));
    refused("v", "v_dim 80", &|a| a.v_dim = 80);
    refused("v", "v_dim 0", &|a| a.v_dim = 0);
    refused("v", "v_dim 24", &|a| a.v_dim = 24);
    refused("v", "[7, 64]", &|a| a.v = Some(shaped(&a.k, &[7, 64])));
    refused("v", "f32", &|a| a.v = Some(typed(&a.k, DType::F32)));
    refused("indices", "[3, 5]", &|a| a.indices = shaped(&a.indices, &[3, 5]));
    refused("indices", "f32", &|a| a.indices = typed(&a.indices, DType::F32));
    refused("sink", "[5]", &|a| a.sink = Some(shaped(a.sink.as_ref().unwrap(), &[5])));
    refused("sink", "bf16", &|a| a.sink = Some(typed(a.sink.as_ref().unwrap(), DType::Bf16)));
    refused("topk_length", "[3]", &|a| a.topk_length = Some(shaped(a.topk_length.as_ref().unwrap(), &[3])));
    for (scale, needle) in [(f32::NAN, "NaN"), (0.0, "0"), (-0.5, "-0.5"), (f32::INFINITY, "inf")] {
        refused("softmax_scale", needle, &|a| a.softmax_scale = scale);
    }
    refused("out", "[2, 4, 32]", &|a| a.out = shaped(&a.out, &[2, 4, 32]));
    refused("out", "overlaps `q`", &|a| a.out = at(&a.out, &a.q));
    refused("out", "multiples of 16", &|a| a.out = shifted(&a.out, 8));
    refused("lse", "bf16", &|a| a.lse = typed(&a.lse, DType::Bf16));
    refused("max_logits", "overlaps `lse`", &|a| a.max_logits = at(&a.max_logits, &a.lse));
}

#[test]
fn the_launcher_of_attentions_backward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let attention = Attention::new(&mut placed);
    attention.backward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).backward(), argument, needle);
    };
    let bytes = attention.workspace.elements();
    refused("softmax_scale", "NaN", &|a| a.softmax_scale = f32::NAN);
    refused("dout", "[2, 4, 32]", &|a| a.dout = shaped(&a.dout, &[2, 4, 32]));
    refused("dq", "[1, 4, 64]", &|a| a.dq = shaped(&a.dq, &[1, 4, 64]));
    refused("lse", "[8]", &|a| a.lse = shaped(&a.lse, &[8]));
    refused("dlse", "[4, 2]", &|a| a.dlse = Some(shaped(a.dlse.as_ref().unwrap(), &[4, 2])));
    refused("dk", "i32", &|a| a.dk = typed(&a.dk, DType::I32));
    refused("dk", "[5, 64]", &|a| a.dk = shaped(&a.dk, &[5, 64]));
    refused("dv", "present exactly", &|a| a.dv = Some(a.dk.clone()));
    refused("dsink", "present exactly", &|a| a.dsink = None);
    refused("dsink", "present exactly", &|a| a.sink = None);
    let short = format!("{} bytes", bytes - 1);
    refused("workspace", &short, &|a| a.workspace = shaped(&a.workspace, &[bytes - 1]));
    refused("workspace", "16-byte aligned", &|a| a.workspace = shifted(&a.workspace, 8));
    refused("dq", "overlaps `q`", &|a| a.dq = at(&a.dq, &a.q));
    refused("dk", "overlaps `k`", &|a| a.dk = at(&a.dk, &a.k));
    refused("dk", "overlaps `dq`", &|a| a.dk = at(&a.dk, &a.dq));
    refused("workspace", "overlaps `dout`", &|a| a.workspace = at(&a.workspace, &a.dout));
}

#[test]
fn the_launcher_of_the_deterministic_backward_refuses_one_byte_less_and_no_chunk() {
    let mut placed = Placed::new();
    let atomic = Attention::new(&mut placed).workspace_bytes();
    let attention = Attention::deterministic(&mut placed, 1);
    attention.backward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).backward(), argument, needle);
    };
    // 4 heads are one block: a row of 64 floats for each of 5 slots of one token at least.
    let bytes = attention.workspace.elements();
    assert!(bytes >= atomic + 5 * 64 * 4, "{bytes} bytes, {atomic} with atomics");
    let short = format!("{} bytes", bytes - 1);
    refused("workspace", &short, &|a| a.workspace = shaped(&a.workspace, &[bytes - 1]));
    let held = format!("{bytes} bytes");
    refused("workspace", &held, &|a| a.key_gradients = chunks_of(2));
    refused("key_gradients", "chunk_tokens 0", &|a| a.key_gradients = chunks_of(0));
    let none = sparse_attention::workspace_bytes(&attention.inputs(), DType::Bf16, chunks_of(0));
    assert_refused(none, "key_gradients", "chunk_tokens 0");
}

fn chunks_of(chunk_tokens: usize) -> sparse_attention::KeyGradients {
    sparse_attention::KeyGradients::Deterministic { chunk_tokens }
}

#[test]
fn more_tokens_in_a_chunk_than_there_are_need_no_more_memory() {
    let mut placed = Placed::new();
    let whole = Attention::deterministic(&mut placed, 2);
    assert_eq!(
        Attention { key_gradients: chunks_of(usize::MAX), ..whole.clone() }.workspace_bytes(),
        whole.workspace_bytes()
    );
    assert_eq!(sparse_attention::default_chunk_tokens(&whole.inputs()).unwrap(), 2);
}

/// dk in f32, of 5 tokens, 70 heads (two blocks), 7 keys, and 19 slots a token of which some are invalid.
fn summed_key_gradient(device: &Device, key_gradients: sparse_attention::KeyGradients) -> HostTensor {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let mut input = |name: &str, shape: &[usize], step: usize| {
        let values: Vec<f64> =
            (0..shape.iter().product::<usize>()).map(|i| (i * step % 1009) as f64 / 504.0 - 1.0).collect();
        arena.input(name, &HostTensor::from_f64(DType::Bf16, shape, &values)).unwrap()
    };
    let (q, k, dout) = (input("q", &[5, 70, 64], 37), input("k", &[7, 64], 53), input("dout", &[5, 70, 64], 71));
    let slots: Vec<i32> = (0..5 * 19).map(|slot| slot * 5 % 9 - 1).collect();
    let indices = arena.input("indices", &HostTensor::from_i32(&[5, 19], &slots)).unwrap();
    let [out, dq] = ["out", "dq"].map(|name| arena.output(name, DType::Bf16, &[5, 70, 64]).unwrap());
    let [lse, max_logits] = ["lse", "max_logits"].map(|name| arena.output(name, DType::F32, &[5, 70]).unwrap());
    let dk = arena.output("dk", DType::F32, &[7, 64]).unwrap();
    let inputs = sparse_attention::Inputs {
        q: &q,
        k: &k,
        value: sparse_attention::Value::Prefix { v_dim: 64 },
        sink: None,
        indices: &indices,
        topk_length: None,
        softmax_scale: 0.125,
    };
    let bytes = sparse_attention::workspace_bytes(&inputs, DType::F32, key_gradients).unwrap();
    let workspace = arena.workspace("workspace", bytes).unwrap();
    let implementation = sparse_attention::Implementation::Portable;
    let violations = arena.run(|device| {
        let (out, lse, max_logits) = (&out, &lse, &max_logits);
        sparse_attention::forward(device, &sparse_attention::Forward { inputs, implementation, out, lse, max_logits })?;
        let backward = sparse_attention::Backward {
            inputs,
            implementation,
            key_gradients,
            out,
            lse,
            dout: &dout,
            dlse: None,
            dq: &dq,
            dk: &dk,
            dv: None,
            dsink: None,
            workspace: &workspace,
        };
        sparse_attention::backward(device, &backward).map(|_| ())
    });
    assert!(violations.unwrap().is_empty());
    arena.download(&dk).unwrap()
}

#[test]
fn the_deterministic_sum_of_key_gradients_has_the_same_bits_for_every_chunk() {
    let device = support::device();
    let whole = summed_key_gradient(device, chunks_of(5));
    for chunk_tokens in [1, 2, 3, 4] {
        assert!(summed_key_gradient(device, chunks_of(chunk_tokens)) == whole, "chunks of {chunk_tokens} tokens");
    }
    assert!(whole.to_f64().iter().all(|value| value.is_finite() && *value != 0.0), "a sum of something: {whole:?}");
}
