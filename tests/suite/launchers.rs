//! What launchers refuse, argument by argument, beyond what [`refusals`] derives for every operator: scalars, workspaces and
//! the rules between arguments; and what the deterministic sums of sparse attention promise of chunks.
//!
//! [`refusals`]: dsv4_parity::operator::refusals

use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{
    Contract, DType, Device, DeviceArena, HostTensor, Result, Role, RuntimeError, TensorView, Views,
};
use dsv4_kernels::{rms_norm, rope, score_recompute, sparse_attention};

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

#[derive(Clone)]
struct Norm {
    x: TensorView,
    weight: Option<TensorView>,
    y: TensorView,
    rstd: TensorView,
    eps: f32,
    dy: TensorView,
    dx: TensorView,
    dweight: Option<TensorView>,
    workspace: Option<TensorView>,
}

impl Norm {
    fn new(placed: &mut Placed) -> Self {
        let mut rows = |name: &str| placed.tensor(name, DType::Bf16, &[4, 64]);
        let [x, y, dy, dx] = ["x", "y", "dy", "dx"].map(&mut rows);
        let workspace = rms_norm::workspace_bytes(support::device(), DType::Bf16, 4, 64);
        Self {
            x,
            y,
            dy,
            dx,
            weight: Some(placed.tensor("weight", DType::F32, &[64])),
            rstd: placed.tensor("rstd", DType::F32, &[4]),
            eps: 1e-6,
            dweight: Some(placed.tensor("dweight", DType::F32, &[64])),
            workspace: Some(placed.tensor("workspace", DType::U8, &[workspace])),
        }
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn forward(&self) -> Result<&'static str> {
        let arguments = rms_norm::Forward {
            x: &self.x,
            weight: self.weight.as_ref(),
            y: &self.y,
            rstd: Some(&self.rstd),
            eps: self.eps,
        };
        rms_norm::forward(support::device(), &arguments)
    }

    fn backward(&self) -> Result<Vec<&'static str>> {
        let arguments = rms_norm::Backward {
            dy: &self.dy,
            x: &self.x,
            weight: self.weight.as_ref(),
            rstd: &self.rstd,
            dx: &self.dx,
            dweight: self.dweight.as_ref(),
            workspace: self.workspace.as_ref(),
        };
        rms_norm::backward(support::device(), &arguments)
    }
}

#[test]
fn the_launcher_of_rms_norms_forward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let norm = Norm::new(&mut placed);
    norm.forward().expect("the unchanged arguments are accepted");
    norm.with(|n| n.y = at(&n.y, &n.x)).forward().expect("in place is accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Norm)| {
        assert_refused(norm.with(change).forward(), argument, needle);
    };
    refused("x", "1 axes", &|n| n.x = shaped(&n.x, &[256]));
    refused("x", "i32", &|n| n.x = typed(&n.x, DType::I32));
    refused("x", "width 0", &|n| n.x = shaped(&n.x, &[4, 0]));
    refused("x", "width 32769", &|n| n.x = shaped(&n.x, &[1, 32769]));
    refused("x", "overlaps itself", &|n| n.x = strided(&n.x, &[63, 1]));
    refused("x", "overlaps itself", &|n| n.x = strided(&n.x, &[-64, 1]));
    refused("x", "contiguous", &|n| n.x = strided(&n.x, &[128, 2]));
    refused("y", "[4, 32]", &|n| n.y = shaped(&n.y, &[4, 32]));
    refused("y", "f32", &|n| n.y = typed(&n.y, DType::F32));
    refused("y", "overlaps `x`", &|n| n.y = shifted(&n.x, 128));
    refused("y", "overlaps `weight`", &|n| n.y = at(&n.y, n.weight.as_ref().unwrap()));
    refused("weight", "[63]", &|n| n.weight = Some(shaped(n.weight.as_ref().unwrap(), &[63])));
    refused("weight", "i32", &|n| n.weight = Some(typed(n.weight.as_ref().unwrap(), DType::I32)));
    refused("weight", "dense", &|n| n.weight = Some(strided(n.weight.as_ref().unwrap(), &[2])));
    refused("rstd", "[5]", &|n| n.rstd = shaped(&n.rstd, &[5]));
    refused("rstd", "bf16", &|n| n.rstd = typed(&n.rstd, DType::Bf16));
    refused("rstd", "overlaps `x`", &|n| n.rstd = at(&n.rstd, &n.x));
    refused("rstd", "overlaps `y`", &|n| n.rstd = at(&n.rstd, &n.y));
    for (eps, needle) in [(0.0, "0"), (-1.5, "-1.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        refused("eps", needle, &|n| n.eps = eps);
    }
}

#[test]
fn the_launcher_of_rms_norms_backward_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let norm = Norm::new(&mut placed);
    norm.backward().expect("the unchanged arguments are accepted");
    let refused = |argument, needle, change: &dyn Fn(&mut Norm)| {
        assert_refused(norm.with(change).backward(), argument, needle);
    };
    let bytes = norm.workspace.as_ref().unwrap().elements();
    refused("dy", "[3, 64]", &|n| n.dy = shaped(&n.dy, &[3, 64]));
    refused("dx", "f32", &|n| n.dx = typed(&n.dx, DType::F32));
    refused("rstd", "[4, 1]", &|n| n.rstd = shaped(&n.rstd, &[4, 1]));
    refused("dx", "overlaps `dy`", &|n| n.dx = shifted(&n.dy, 128));
    refused("dx", "overlaps `x`", &|n| n.dx = n.x.clone());
    refused("dweight", "present exactly", &|n| n.dweight = None);
    refused("dweight", "present exactly", &|n| n.weight = None);
    refused("dweight", "[32]", &|n| n.dweight = Some(shaped(n.dweight.as_ref().unwrap(), &[32])));
    refused("workspace", "present exactly", &|n| n.workspace = None);
    let short = format!("{} bytes; it must have {bytes}", bytes - 1);
    refused("workspace", &short, &|n| n.workspace = Some(shaped(n.workspace.as_ref().unwrap(), &[bytes - 1])));
    refused("workspace", "overlaps", &|n| n.workspace = Some(at(n.workspace.as_ref().unwrap(), &n.dx)));
    refused("dweight", "overlaps", &|n| n.dweight = Some(at(n.dweight.as_ref().unwrap(), &n.x)));
}

#[derive(Clone)]
struct Rotation {
    x: TensorView,
    y: TensorView,
    cos: TensorView,
    sin: TensorView,
    positions: Option<TensorView>,
}

impl Rotation {
    fn new(placed: &mut Placed) -> Self {
        Self {
            x: placed.tensor("x", DType::Bf16, &[3, 2, 64]),
            y: placed.tensor("y", DType::Bf16, &[3, 2, 64]),
            cos: placed.tensor("cos", DType::F32, &[5, 16]),
            sin: placed.tensor("sin", DType::F32, &[5, 16]),
            positions: Some(placed.tensor("positions", DType::I32, &[3])),
        }
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn forward(&self) -> Result<&'static str> {
        let Self { x, y, cos, sin, positions } = self;
        rope::forward(
            support::device(),
            &rope::Forward { x, y, cos, sin, positions: positions.as_ref(), inverse: false },
        )
    }
}

#[test]
fn the_launcher_of_rope_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let rotation = Rotation::new(&mut placed);
    rotation.forward().expect("the unchanged arguments are accepted");
    rotation.with(|r| r.y = at(&r.y, &r.x)).forward().expect("in place is accepted");
    rotation.with(|r| r.positions = None).forward().expect("positions may be absent");
    let refused = |argument, needle, change: &dyn Fn(&mut Rotation)| {
        assert_refused(rotation.with(change).forward(), argument, needle);
    };
    refused("x", "2 axes", &|r| r.x = shaped(&r.x, &[6, 64]));
    refused("x", "i32", &|r| r.x = typed(&r.x, DType::I32));
    refused("x", "overlaps itself", &|r| r.x = strided(&r.x, &[64, 64, 1]));
    refused("y", "[3, 1, 64]", &|r| r.y = shaped(&r.y, &[3, 1, 64]));
    refused("y", "f32", &|r| r.y = typed(&r.y, DType::F32));
    refused("y", "without being the same tensor", &|r| r.y = shifted(&r.x, 128));
    refused("y", "overlaps `cos`", &|r| r.y = at(&r.y, &r.cos));
    refused("cos", "0 columns", &|r| (r.cos, r.sin) = (shaped(&r.cos, &[5, 0]), shaped(&r.sin, &[5, 0])));
    refused("cos", "66 channels of 64", &|r| (r.cos, r.sin) = (shaped(&r.cos, &[1, 33]), shaped(&r.sin, &[1, 33])));
    refused("cos", "bf16", &|r| r.cos = typed(&r.cos, DType::Bf16));
    refused("sin", "[4, 16]", &|r| r.sin = shaped(&r.sin, &[4, 16]));
    refused("sin", "axis 0 overlaps itself", &|r| r.sin = strided(&r.sin, &[15, 1]));
    refused("positions", "[4]", &|r| r.positions = Some(shaped(r.positions.as_ref().unwrap(), &[4])));
    refused("positions", "f32", &|r| r.positions = Some(typed(r.positions.as_ref().unwrap(), DType::F32)));
    let two_rows = |r: &mut Rotation| (r.cos, r.sin) = (shaped(&r.cos, &[2, 16]), shaped(&r.sin, &[2, 16]));
    rotation.with(two_rows).forward().expect("positions may reach fewer rows than there are tokens");
    refused("cos", "2 rows must cover 3 tokens", &|r| {
        two_rows(r);
        r.positions = None;
    });
}

#[test]
fn the_launcher_of_ropes_table_names_the_argument_that_it_refuses() {
    let mut placed = Placed::new();
    let inv_freq = placed.tensor("inv_freq", DType::F32, &[16]);
    let positions = placed.tensor("positions", DType::I32, &[5]);
    let cos = placed.tensor("cos", DType::F32, &[5, 16]);
    let sin = placed.tensor("sin", DType::F32, &[5, 16]);
    fn launch(
        inv_freq: &TensorView,
        positions: &TensorView,
        cos: &TensorView,
        sin: &TensorView,
    ) -> Result<&'static str> {
        rope::table(support::device(), &rope::Table { inv_freq, positions, cos, sin })
    }
    launch(&inv_freq, &positions, &cos, &sin).expect("the unchanged arguments are accepted");
    assert_refused(launch(&typed(&inv_freq, DType::Bf16), &positions, &cos, &sin), "inv_freq", "bf16");
    assert_refused(launch(&inv_freq, &typed(&positions, DType::F32), &cos, &sin), "positions", "f32");
    assert_refused(launch(&inv_freq, &positions, &shaped(&cos, &[4, 16]), &sin), "cos", "[4, 16]");
    assert_refused(launch(&inv_freq, &positions, &cos, &cos), "sin", "overlaps `cos`");
    assert_refused(launch(&inv_freq, &positions, &at(&cos, &inv_freq), &sin), "cos", "overlaps `inv_freq`");
}

/// The tensors of a call, and what it is told beside them.
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

    /// Puts a tensor at another one's address.
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
        let options =
            sparse_attention::Options { v_dim: Some(64), softmax_scale: 0.125, implementation, key_gradients };
        let mut attention = Self { views, options };
        let workspace = placed.tensor("workspace", DType::U8, &[attention.workspace_bytes()]);
        attention.views.put("workspace", workspace);
        attention
    }

    fn workspace_bytes(&self) -> usize {
        sparse_attention::workspace_bytes(&self.views, self.options, DType::Bf16).unwrap()
    }

    /// With the first keys as values of their own.
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
    attention.with(|a| a.separate(TensorView::clone)).forward().expect("values of their own are accepted");
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
    // 4 heads are one block: a row of 64 floats for each of 5 slots of one token at least.
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

/// dk in f32, of 5 tokens, 70 heads (two blocks), 7 keys, and 19 slots a token of which some are invalid.
fn summed_key_gradient(device: &Device, key_gradients: sparse_attention::KeyGradients) -> HostTensor {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let mut input = |name: &str, shape: &[usize], step: usize| {
        let values: Vec<f64> =
            (0..shape.iter().product::<usize>()).map(|i| (i * step % 1009) as f64 / 504.0 - 1.0).collect();
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
    let options = sparse_attention::Options { v_dim: Some(64), softmax_scale: 0.125, implementation, key_gradients };
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
        assert!(summed_key_gradient(device, chunks_of(chunk_tokens)) == whole, "chunks of {chunk_tokens} tokens");
    }
    assert!(whole.to_f64().iter().all(|value| value.is_finite() && *value != 0.0), "a sum of something: {whole:?}");
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
        tensors.into_iter().for_each(|(name, dtype, shape)| views.put(name, placed.tensor(name, dtype, shape)));
        let implementation = score_recompute::Implementation::Auto;
        Self {
            views,
            options: score_recompute::Options { global: false, ratio: 4, softmax_scale: 0.125, implementation },
        }
    }

    /// With the causal ranking in place of lists.
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
    let with_lengths = causal.with(|r| r.views.put("topk_length", selected.views["topk_length"].clone()));
    for (offsets, lengths) in [(with_q_off.target(), with_lengths.scores()), (with_q_off.lse(), with_lengths.lse())] {
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
    refused("cu_q", "an entry more", &|r| ["cu_q", "cu_k"].into_iter().for_each(|name| r.reshape(name, &[0])));
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
    // What a launch writes alone may lie where another one's tensors do.
    assert_refused(selected.with(|r| r.put_at("lse", "lse_beside")).lse(), "lse", "overlaps `lse_beside`");
    selected.with(|r| r.put_at("lse", "lse_beside")).target().expect("the target is not given `lse_beside`");
}
