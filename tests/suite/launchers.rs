//! What launchers reject, argument by argument, beyond what [`refusals`] derives for every
//! operator: scalars, workspaces and the rules between arguments. Also what the deterministic sums
//! of sparse attention guarantee for chunks.
//!
//! [`refusals`]: dsv4_parity::operator::refusals

use dsv4_kernels::{
    attention::attention_combine, attention::sparse_attention, indexer::score_recompute,
    projections::rms_norm, projections::rope,
};
use dsv4_runtime::arena::Layout;
use dsv4_runtime::{
    Contract, DType, Device, DeviceArena, HostTensor, Result, Role, RuntimeError, TensorView, Views,
};

use crate::support;

/// The launcher must reject `argument` with a message that contains `needle`.
pub fn assert_refused<T: std::fmt::Debug>(result: Result<T>, argument: &str, needle: &str) {
    match result {
        Err(RuntimeError::Argument { argument: found, reason, .. }) => {
            assert_eq!(found, argument, "{reason}");
            assert!(reason.contains(needle), "{argument}: `{needle}` is not in `{reason}`");
        }
        other => panic!("{argument} ({needle}): expected a refusal, not {other:?}"),
    }
}

/// Places dense tensors of zeros; a rejected call never writes them.
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

/// A view of the same memory with another shape, dense.
fn shaped(view: &TensorView, shape: &[usize]) -> TensorView {
    TensorView { shape: shape.to_vec(), strides: Layout::dense(shape).strides, ..view.clone() }
}

fn strided(view: &TensorView, strides: &[i64]) -> TensorView {
    TensorView { strides: strides.to_vec(), ..view.clone() }
}

fn typed(view: &TensorView, dtype: DType) -> TensorView {
    TensorView { dtype, ..view.clone() }
}

/// The same view, that many bytes further.
pub fn shifted(view: &TensorView, bytes: i64) -> TensorView {
    TensorView { address: view.address.wrapping_add_signed(bytes), ..view.clone() }
}

/// `view`'s layout at `other`'s address.
fn at(view: &TensorView, other: &TensorView) -> TensorView {
    TensorView { address: other.address, ..view.clone() }
}

/// The same tensors, with `change` applied to the one called `name`.
fn changed(
    views: &Views,
    name: &'static str,
    change: impl FnOnce(&TensorView) -> TensorView,
) -> Views {
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
        (
            "workspace",
            DType::U8,
            &[rms_norm::workspace_bytes(support::device(), DType::Bf16, 4, 64)],
        ),
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
    assert_refused(
        rms_norm::forward(support::device(), &norm.without(&["y"]), 1e-6),
        "y",
        "must be present",
    );
    assert_refused(
        rms_norm::backward(support::device(), &norm.without(&["rstd"])),
        "rstd",
        "must be present",
    );
    let misspelt = norm.renamed(&[("weight", "wieght")]);
    assert_refused(
        rms_norm::forward(support::device(), &misspelt, 1e-6),
        "wieght",
        "no argument of this name",
    );
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

/// The tensors of a call, and its other arguments.
#[derive(Clone)]
struct Call<O> {
    views: Views,
    options: O,
}

impl<O: Clone> Call<O> {
    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn set(&mut self, name: &'static str, change: impl FnOnce(&TensorView) -> TensorView) {
        let changed = change(&self.views[name]);
        self.views.put(name, changed);
    }

    fn reshape(&mut self, name: &'static str, shape: &[usize]) {
        self.set(name, |view| shaped(view, shape));
    }

    fn retype(&mut self, name: &'static str, dtype: DType) {
        self.set(name, |view| typed(view, dtype));
    }

    /// Moves a tensor to another one's address.
    fn put_at(&mut self, name: &'static str, other: &str) {
        let other = self.views[other].clone();
        self.set(name, |view| at(view, &other));
    }

    fn remove(&mut self, name: &'static str) {
        self.views = self.views.without(&[name]);
    }
}

/// Attention over 6 keys: 2 tokens, 4 heads of 64 channels, 5 slots.
type Attention = Call<sparse_attention::Options>;

impl Attention {
    fn new(placed: &mut Placed) -> Self {
        Self::summed(placed, sparse_attention::KeyGradients::Atomic)
    }

    fn summed(placed: &mut Placed, key_gradients: sparse_attention::KeyGradients) -> Self {
        let mut views = Views::new();
        let tensors: [(DType, &[usize], &[&'static str]); 6] = [
            (DType::Bf16, &[2, 4, 64], &["q", "out", "dout", "dq"]),
            (DType::Bf16, &[6, 64], &["k", "dk"]),
            (DType::F32, &[2, 4], &["lse", "max_logits", "dlse"]),
            (DType::F32, &[4], &["sink", "dsink"]),
            (DType::I32, &[2, 5], &["indices"]),
            (DType::I32, &[2], &["topk_length"]),
        ];
        for (dtype, shape, names) in tensors {
            names.iter().for_each(|name| views.put(name, placed.tensor(name, dtype, shape)));
        }
        let implementation = sparse_attention::Implementation::Auto;
        let options = sparse_attention::Options {
            v_dim: Some(64),
            softmax_scale: 0.125,
            implementation,
            key_gradients,
        };
        let mut attention = Self { views, options };
        let workspace = placed.tensor("workspace", DType::U8, &[attention.workspace_bytes()]);
        attention.views.put("workspace", workspace);
        attention
    }

    fn workspace_bytes(&self) -> usize {
        sparse_attention::workspace_bytes(&self.views, self.options, DType::Bf16).unwrap()
    }

    /// With a separate tensor of values, which `change` makes from the keys.
    fn separate(&mut self, change: impl FnOnce(&TensorView) -> TensorView) {
        self.views.put("v", change(&self.views["k"]));
        self.options.v_dim = None;
    }

    fn forward(&self) -> Result<String> {
        sparse_attention::forward(support::device(), &self.views, self.options)
    }

    fn backward(&self) -> Result<Vec<String>> {
        sparse_attention::backward(support::device(), &self.views, self.options)
    }
}

#[test]
fn the_launcher_of_attentions_forward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let attention = Attention::new(&mut placed);
    attention.forward().expect("the unchanged arguments are accepted");
    attention
        .with(|a| a.separate(TensorView::clone))
        .forward()
        .expect("values of their own are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).forward(), argument, needle);
    };
    refused("q", "2 axes", &|a| a.reshape("q", &[8, 64]));
    refused("q", "f32", &|a| a.retype("q", DType::F32));
    refused("q", "head_dim 24", &|a| a.reshape("q", &[2, 4, 24]));
    refused("q", "head_dim 592", &|a| a.reshape("q", &[2, 4, 592]));
    refused("q", "multiples of 16", &|a| a.set("q", |view| shifted(view, 2)));
    refused("k", "[6, 48]", &|a| a.reshape("k", &[6, 48]));
    refused("k", "multiples of 16", &|a| a.set("k", |view| strided(view, &[68, 1])));
    refused("v", "v_dim 80", &|a| a.options.v_dim = Some(80));
    refused("v", "v_dim 0", &|a| a.options.v_dim = Some(0));
    refused("v", "v_dim 24", &|a| a.options.v_dim = Some(24));
    refused("v", "[7, 64]", &|a| a.separate(|k| shaped(k, &[7, 64])));
    refused("v", "f32", &|a| a.separate(|k| typed(k, DType::F32)));
    refused("v", "must be absent where v_dim 64", &|a| a.views.put("v", a.views["k"].clone()));
    refused("v", "must be present", &|a| a.options.v_dim = None);
    refused("v", "v_dim 24", &|a| a.separate(|k| shaped(k, &[6, 24])));
    refused("k", "must be present", &|a| a.remove("k"));
    refused("window", "no argument of this name", &|a| a.views.put("window", a.views["k"].clone()));
    refused("indices", "[3, 5]", &|a| a.reshape("indices", &[3, 5]));
    refused("indices", "f32", &|a| a.retype("indices", DType::F32));
    refused("sink", "[5]", &|a| a.reshape("sink", &[5]));
    refused("sink", "bf16", &|a| a.retype("sink", DType::Bf16));
    refused("topk_length", "[3]", &|a| a.reshape("topk_length", &[3]));
    for (scale, needle) in [(f32::NAN, "NaN"), (0.0, "0"), (-0.5, "-0.5"), (f32::INFINITY, "inf")] {
        refused("softmax_scale", needle, &|a| a.options.softmax_scale = scale);
    }
    refused("out", "[2, 4, 32]", &|a| a.reshape("out", &[2, 4, 32]));
    refused("out", "overlaps `q`", &|a| a.put_at("out", "q"));
    refused("out", "multiples of 16", &|a| a.set("out", |view| shifted(view, 8)));
    refused("lse", "bf16", &|a| a.retype("lse", DType::Bf16));
    refused("max_logits", "overlaps `lse`", &|a| a.put_at("max_logits", "lse"));
}

#[test]
fn the_launcher_of_attentions_backward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let attention = Attention::new(&mut placed);
    attention.backward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).backward(), argument, needle);
    };
    let bytes = attention.views["workspace"].elements();
    refused("softmax_scale", "NaN", &|a| a.options.softmax_scale = f32::NAN);
    refused("dout", "[2, 4, 32]", &|a| a.reshape("dout", &[2, 4, 32]));
    refused("dq", "[1, 4, 64]", &|a| a.reshape("dq", &[1, 4, 64]));
    refused("lse", "[8]", &|a| a.reshape("lse", &[8]));
    refused("dlse", "[4, 2]", &|a| a.reshape("dlse", &[4, 2]));
    refused("dk", "i32", &|a| a.retype("dk", DType::I32));
    refused("dk", "[5, 64]", &|a| a.reshape("dk", &[5, 64]));
    refused("dv", "present exactly", &|a| a.views.put("dv", a.views["dk"].clone()));
    refused("dsink", "present exactly", &|a| a.remove("dsink"));
    refused("dsink", "present exactly", &|a| a.remove("sink"));
    let short = format!("{} bytes", bytes - 1);
    refused("workspace", &short, &|a| a.reshape("workspace", &[bytes - 1]));
    refused("workspace", "16-byte aligned", &|a| a.set("workspace", |view| shifted(view, 8)));
    refused("dq", "overlaps `q`", &|a| a.put_at("dq", "q"));
    refused("dk", "overlaps `k`", &|a| a.put_at("dk", "k"));
    refused("dk", "overlaps `dq`", &|a| a.put_at("dk", "dq"));
    refused("workspace", "overlaps `dout`", &|a| a.put_at("workspace", "dout"));
}

#[test]
fn the_launcher_of_the_deterministic_backward_refuses_one_byte_less_and_no_chunk() {
    let mut placed = Placed::new();
    let atomic = Attention::new(&mut placed).workspace_bytes();
    let attention = Attention::summed(&mut placed, chunks_of(1));
    attention.backward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Attention)| {
        assert_refused(attention.with(change).backward(), argument, needle);
    };
    // 4 heads are one block: a row of 64 floats for each of 5 slots of at least one token.
    let bytes = attention.views["workspace"].elements();
    assert!(bytes >= atomic + 5 * 64 * 4, "{bytes} bytes, {atomic} with atomics");
    let short = format!("{} bytes", bytes - 1);
    refused("workspace", &short, &|a| a.reshape("workspace", &[bytes - 1]));
    let held = format!("{bytes} bytes");
    refused("workspace", &held, &|a| a.options.key_gradients = chunks_of(2));
    refused("key_gradients", "chunk_tokens 0", &|a| a.options.key_gradients = chunks_of(0));
    let options = sparse_attention::Options { key_gradients: chunks_of(0), ..attention.options };
    let none = sparse_attention::workspace_bytes(&attention.views, options, DType::Bf16);
    assert_refused(none, "key_gradients", "chunk_tokens 0");
}

fn chunks_of(chunk_tokens: usize) -> sparse_attention::KeyGradients {
    sparse_attention::KeyGradients::Deterministic { chunk_tokens }
}

#[test]
fn more_tokens_in_a_chunk_than_there_are_need_no_more_memory() {
    let mut placed = Placed::new();
    let whole = Attention::summed(&mut placed, chunks_of(2));
    let more = whole.with(|a| a.options.key_gradients = chunks_of(usize::MAX));
    assert_eq!(more.workspace_bytes(), whole.workspace_bytes());
    assert_eq!(sparse_attention::default_chunk_tokens(&whole.views, whole.options).unwrap(), 2);
}

/// dk in f32, of 5 tokens, 70 heads (two blocks), 7 keys, and 19 slots a token, some of them
/// invalid.
fn summed_key_gradient(
    device: &Device,
    key_gradients: sparse_attention::KeyGradients,
) -> HostTensor {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let mut input = |name: &str, shape: &[usize], step: usize| {
        let values: Vec<f64> = (0..shape.iter().product::<usize>())
            .map(|i| (i * step % 1009) as f64 / 504.0 - 1.0)
            .collect();
        arena.input(name, &HostTensor::from_f64(DType::Bf16, shape, &values)).unwrap()
    };
    let given: [(&'static str, &[usize], usize); 3] =
        [("q", &[5, 70, 64], 37), ("k", &[7, 64], 53), ("dout", &[5, 70, 64], 71)];
    let mut views = Views::new();
    given.into_iter().for_each(|(name, shape, step)| views.put(name, input(name, shape, step)));
    let slots: Vec<i32> = (0..5 * 19).map(|slot| slot * 5 % 9 - 1).collect();
    views.put("indices", arena.input("indices", &HostTensor::from_i32(&[5, 19], &slots)).unwrap());
    for name in ["out", "dq"] {
        views.put(name, arena.output(name, DType::Bf16, &[5, 70, 64]).unwrap());
    }
    for name in ["lse", "max_logits"] {
        views.put(name, arena.output(name, DType::F32, &[5, 70]).unwrap());
    }
    views.put("dk", arena.output("dk", DType::F32, &[7, 64]).unwrap());
    let implementation = sparse_attention::Implementation::Portable;
    let options = sparse_attention::Options {
        v_dim: Some(64),
        softmax_scale: 0.125,
        implementation,
        key_gradients,
    };
    let bytes = sparse_attention::workspace_bytes(&views, options, DType::F32).unwrap();
    views.put("workspace", arena.workspace("workspace", bytes).unwrap());
    let violations = arena.run(|device| {
        sparse_attention::forward(device, &views, options)?;
        sparse_attention::backward(device, &views, options).map(|_| ())
    });
    assert!(violations.unwrap().is_empty());
    arena.download(&views["dk"]).unwrap()
}

#[test]
fn the_deterministic_sum_of_key_gradients_has_the_same_bits_for_every_chunk() {
    let device = support::device();
    let whole = summed_key_gradient(device, chunks_of(5));
    for chunk_tokens in [1, 2, 3, 4] {
        assert!(
            summed_key_gradient(device, chunks_of(chunk_tokens)) == whole,
            "chunks of {chunk_tokens} tokens"
        );
    }
    assert!(
        whole.to_f64().iter().all(|value| value.is_finite() && *value != 0.0),
        "a sum of something: {whole:?}"
    );
}

/// Scores of 6 keys in two sequences: 3 tokens, 2 heads of 64 channels, lists of 5 slots.
type Recompute = Call<score_recompute::Options>;

impl Recompute {
    fn new(placed: &mut Placed) -> Self {
        let mut views = Views::new();
        let tensors: [(&'static str, DType, &[usize]); 13] = [
            ("q", DType::Bf16, &[3, 2, 64]),
            ("k", DType::Bf16, &[6, 64]),
            ("indices", DType::I32, &[3, 5]),
            ("topk_length", DType::I32, &[3]),
            ("cu_q", DType::I32, &[3]),
            ("cu_k", DType::I32, &[3]),
            ("lse", DType::F32, &[3, 2]),
            ("lse_beside", DType::F32, &[3, 2]),
            ("sink", DType::F32, &[2]),
            ("target", DType::F32, &[3, 5]),
            ("scores", DType::F32, &[3, 4]),
            ("l1", DType::F32, &[3]),
            ("shift", DType::F32, &[3]),
        ];
        tensors
            .into_iter()
            .for_each(|(name, dtype, shape)| views.put(name, placed.tensor(name, dtype, shape)));
        let implementation = score_recompute::Implementation::Auto;
        Self {
            views,
            options: score_recompute::Options {
                global: false,
                ratio: 4,
                softmax_scale: 0.125,
                implementation,
            },
        }
    }

    /// With the causal ranking instead of lists.
    fn causal(&self) -> Self {
        Self { views: self.views.without(&["indices", "topk_length"]), options: self.options }
    }

    fn target(&self) -> Result<String> {
        score_recompute::target(support::device(), &self.views, self.options)
    }

    fn scores(&self) -> Result<String> {
        score_recompute::scores(support::device(), &self.views, self.options)
    }

    fn lse(&self) -> Result<String> {
        score_recompute::lse(support::device(), &self.views, self.options)
    }
}

#[test]
fn the_launchers_of_score_recompute_refuse_tensors_of_the_other_ranking_and_name_them() {
    let mut placed = Placed::new();
    let selected = Recompute::new(&mut placed);
    let q_off = placed.tensor("q_off", DType::I32, &[2]);
    let causal = selected.causal().with(|r| r.views.put("q_off", q_off.clone()));
    selected.target().expect("lists are accepted");
    causal.scores().expect("the causal ranking is accepted");
    for either in [&selected, &causal] {
        either.lse().expect("either ranking is accepted");
    }
    assert_refused(causal.target(), "indices", "must be present");
    assert_refused(selected.scores(), "indices", "must be absent");
    let with_q_off = selected.with(|r| r.views.put("q_off", q_off.clone()));
    let with_lengths =
        causal.with(|r| r.views.put("topk_length", selected.views["topk_length"].clone()));
    for (offsets, lengths) in
        [(with_q_off.target(), with_lengths.scores()), (with_q_off.lse(), with_lengths.lse())]
    {
        assert_refused(offsets, "q_off", "must be absent");
        assert_refused(lengths, "topk_length", "must be absent");
    }
}

#[test]
fn the_launchers_of_score_recompute_name_the_argument_that_they_refuse() {
    let mut placed = Placed::new();
    let selected = Recompute::new(&mut placed);
    let causal = selected.causal();
    let refused = |argument, needle, change: &dyn Fn(&mut Recompute)| {
        assert_refused(causal.with(change).scores(), argument, needle);
    };
    refused("cu_k", "present exactly when `cu_q` is", &|r| r.remove("cu_k"));
    refused("cu_k", "present exactly when `cu_q` is", &|r| r.remove("cu_q"));
    refused("cu_q", "an entry more", &|r| {
        ["cu_q", "cu_k"].into_iter().for_each(|name| r.reshape(name, &[0]))
    });
    // One sequence has a column for each key.
    refused("scores", "[3, 4] must be [3, 6]", &|r| r.views = r.views.without(&["cu_q", "cu_k"]));
    refused("ratio", "0 must be at least 1", &|r| r.options.ratio = 0);
    refused("ratio", "must fit 32 bits", &|r| r.options.ratio = 1 << 31);
    for (scale, needle) in [(f32::NAN, "NaN"), (0.0, "0"), (-0.5, "-0.5"), (f32::INFINITY, "inf")] {
        refused("softmax_scale", needle, &|r| r.options.softmax_scale = scale);
    }
    refused("lse", "must be present", &|r| r.remove("lse"));
    refused("shift", "overlaps `l1`", &|r| r.put_at("shift", "l1"));
    assert_refused(selected.with(|r| r.remove("target")).target(), "target", "must be present");
    // A launch's tensors may overlap only tensors that the launch does not get.
    assert_refused(
        selected.with(|r| r.put_at("lse", "lse_beside")).lse(),
        "lse",
        "overlaps `lse_beside`",
    );
    selected
        .with(|r| r.put_at("lse", "lse_beside"))
        .target()
        .expect("the target is not given `lse_beside`");
}

#[test]
fn more_rows_to_merge_than_32_bits_count_are_refused() {
    // Nothing is read or written before the rejection: the tensors have no memory.
    let (tokens, heads) = (1 << 24, 1 << 7);
    let shaped =
        |address, dtype, shape: &[usize]| TensorView::dense("nowhere", address, dtype, shape);
    let views = Views::from([
        ("partial_out", &shaped(1 << 40, DType::F32, &[1, tokens, heads, 8])),
        ("partial_lse", &shaped(1 << 50, DType::F32, &[1, tokens, heads])),
        ("out", &shaped(1 << 51, DType::Bf16, &[tokens, heads, 8])),
        ("lse", &shaped(1 << 52, DType::F32, &[tokens, heads])),
    ]);
    assert_refused(
        attention_combine::forward(support::device(), &views),
        "partial_out",
        "2147483648 must fit 32 bits",
    );
}
