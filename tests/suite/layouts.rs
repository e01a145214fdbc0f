//! Every kernel takes each of its tensors in a layout of its own: rows at any distance, outer axes in any order. The
//! bits must be those of dense tensors, and gaps must stay untouched.

use dsv4_kernels::kv_cache::{Cache, RowFormat};
use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Result, Role, TensorView};
use dsv4_kernels::sparse_attention::{Implementation, KeyGradients, Value};
use dsv4_kernels::{attention_combine, decode_attention, kv_cache_write, rms_norm, rope};
use dsv4_kernels::{score_recompute, sparse_attention};

use crate::support;

/// Tensors of one call: all dense, or each with its outer axes reversed and gaps that no other has.
struct Tensors<'d> {
    arena: DeviceArena<'d>,
    reversed: bool,
    placed: usize,
    outputs: Vec<TensorView>,
}

impl<'d> Tensors<'d> {
    fn new(device: &'d Device, reversed: bool) -> Self {
        Self { arena: DeviceArena::new(device, Contract::NAN), reversed, placed: 0, outputs: Vec::new() }
    }

    /// The first axis lies closest to the rows; `keep` axes from there on are evenly spaced, in their order.
    fn layout(&mut self, shape: &[usize], keep: usize) -> Layout {
        self.placed += 1;
        if !self.reversed {
            return Layout::dense(shape);
        }
        let (last, outer) = shape.split_last().expect("an axis");
        let mut order: Vec<usize> = (0..outer.len()).collect();
        order[..keep].reverse();
        let mut strides = vec![1; shape.len()];
        let mut pitch = last + 16 * self.placed;
        for (step, &axis) in order.iter().enumerate() {
            strides[axis] = pitch as i64;
            pitch = pitch * outer[axis] + if step + 1 < keep { 0 } else { 16 * self.placed };
        }
        let reach: i64 = shape.iter().zip(&strides).map(|(&extent, stride)| (extent as i64 - 1) * stride).sum();
        Layout { offset: 0, strides, elements: reach as usize + 1 }
    }

    fn upload(&mut self, name: &str, tensor: &HostTensor, keep: usize) -> TensorView {
        let layout = self.layout(&tensor.shape, keep);
        self.arena.upload(name, tensor, &layout, Role::Input).expect("memory")
    }

    /// Numbers between -1 and 1 that differ from place to place.
    fn input(&mut self, name: &str, dtype: DType, shape: &[usize]) -> TensorView {
        self.upload(name, &numbers(name, dtype, shape), 0)
    }

    fn dense(&mut self, name: &str, shape: &[usize]) -> TensorView {
        self.arena.input(name, &numbers(name, DType::F32, shape)).expect("memory")
    }

    /// Slots of which some name none of `count` rows.
    fn indices(&mut self, name: &str, shape: &[usize], count: i32, keep: usize) -> TensorView {
        let slots = shape.iter().product::<usize>() as i32;
        let slots: Vec<i32> = (0..slots).map(|slot| (7 * slot + slot / 5) % (count + 1) - 1).collect();
        self.upload(name, &HostTensor::from_i32(shape, &slots), keep)
    }

    fn output(&mut self, name: &str, dtype: DType, shape: &[usize]) -> TensorView {
        self.output_in(name, dtype, shape, 0)
    }

    fn output_in(&mut self, name: &str, dtype: DType, shape: &[usize], keep: usize) -> TensorView {
        let layout = self.layout(shape, keep);
        self.outputs.push(self.arena.allocate(name, dtype, shape, &layout, Role::Output).expect("memory"));
        self.outputs[self.outputs.len() - 1].clone()
    }

    fn dense_output(&mut self, name: &str, shape: &[usize]) -> TensorView {
        self.outputs.push(self.arena.output(name, DType::F32, shape).expect("memory"));
        self.outputs[self.outputs.len() - 1].clone()
    }

    /// Runs the call; what it wrote.
    fn run(self, call: impl FnOnce(&Device) -> Result<()>) -> Vec<(String, HostTensor)> {
        let violations = self.arena.run(call).unwrap_or_else(|error| panic!("{error}"));
        assert!(violations.is_empty(), "{violations:?}");
        self.outputs.iter().map(|view| (view.name.clone(), self.arena.download(view).expect("a download"))).collect()
    }
}

fn numbers(name: &str, dtype: DType, shape: &[usize]) -> HostTensor {
    let start: usize = name.bytes().map(usize::from).sum();
    let values: Vec<f64> =
        (0..shape.iter().product()).map(|i: usize| ((start + i) * 7919 % 2003) as f64 / 1001.5 - 1.0).collect();
    HostTensor::from_f64(dtype, shape, &values)
}

/// `call` writes the same bits, whatever the layouts are.
fn assert_layouts_do_not_matter(what: &str, call: impl Fn(Tensors<'_>) -> Vec<(String, HostTensor)>) {
    let [dense, reversed] = [false, true].map(|reversed| call(Tensors::new(support::device(), reversed)));
    for ((name, dense), (_, reversed)) in dense.iter().zip(&reversed) {
        assert!(dense == reversed, "{what}: `{name}` depends on the layout");
        assert!(dense.dtype == DType::U8 || dense.to_f64().iter().any(|value| *value != 0.0), "{what}: `{name}` is 0");
    }
}

#[test]
fn rms_norm_takes_each_of_its_tensors_at_a_stride_of_its_own() {
    for (dtype, width) in [(DType::Bf16, 64), (DType::F32, 1536), (DType::Bf16, 37)] {
        assert_layouts_do_not_matter("rms_norm", |mut t| {
            let (x, dy) = (t.input("x", dtype, &[5, width]), t.input("dy", dtype, &[5, width]));
            let weight = t.dense("weight", &[width]);
            let (y, dx) = (t.output("y", dtype, &[5, width]), t.output("dx", dtype, &[5, width]));
            let (rstd, dweight) = (t.dense_output("rstd", &[5]), t.dense_output("dweight", &[width]));
            let bytes = rms_norm::workspace_bytes(support::device(), dtype, 5, width);
            let workspace = t.arena.workspace("workspace", bytes).expect("memory");
            t.run(|device| {
                let (weight, eps) = (Some(&weight), 1e-6);
                rms_norm::forward(device, &rms_norm::Forward { x: &x, weight, y: &y, rstd: Some(&rstd), eps })?;
                let (dweight, workspace) = (Some(&dweight), Some(&workspace));
                let (dy, x, rstd, dx) = (&dy, &x, &rstd, &dx);
                rms_norm::backward(device, &rms_norm::Backward { dy, x, weight, rstd, dx, dweight, workspace })?;
                Ok(())
            })
        });
    }
}

#[test]
fn rope_takes_heads_before_tokens_and_each_table_at_a_stride_of_its_own() {
    for (dtype, head_dim, rope_dim) in [(DType::Bf16, 64, 32), (DType::F32, 64, 32), (DType::Bf16, 38, 6)] {
        assert_layouts_do_not_matter("rope", |mut t| {
            let x = t.input("x", dtype, &[5, 3, head_dim]);
            let [cos, sin] = ["cos", "sin"].map(|name| t.input(name, DType::F32, &[7, rope_dim / 2]));
            let y = t.output("y", dtype, &[5, 3, head_dim]);
            let arguments = rope::Forward { x: &x, y: &y, cos: &cos, sin: &sin, positions: None, inverse: false };
            t.run(|device| rope::forward(device, &arguments).map(|_| ()))
        });
    }
}

#[test]
fn attention_combine_takes_parts_heads_and_tokens_in_any_order() {
    assert_layouts_do_not_matter("attention_combine", |mut t| {
        let partial_out = t.input("partial_out", DType::F32, &[3, 5, 4, 64]);
        let (partial_lse, sink) = (t.dense("partial_lse", &[3, 5, 4]), t.dense("sink", &[4]));
        let (out, lse) = (t.output("out", DType::Bf16, &[5, 4, 64]), t.dense_output("lse", &[5, 4]));
        let (partial_out, partial_lse, sink) = (&partial_out, &partial_lse, Some(&sink));
        let arguments = attention_combine::Forward { partial_out, partial_lse, sink, out: &out, lse: &lse };
        t.run(|device| attention_combine::forward(device, &arguments).map(|_| ()))
    });
}

#[test]
fn kv_cache_write_and_decode_take_rows_pages_and_lists_at_strides_of_their_own() {
    let formats = [
        (RowFormat { nope_dim: 64, rope_dim: 64 }, 4, Implementation::Portable),
        (RowFormat::MODEL, 20, Implementation::Hopper),
        (RowFormat::bf16(512), 20, Implementation::Hopper),
    ];
    for (format, num_heads, implementation) in formats {
        assert_layouts_do_not_matter("decode", |mut t| {
            let head_dim = format.head_dim();
            let kv = t.input("kv", DType::Bf16, &[12, head_dim]);
            let slots = HostTensor::from_i32(&[12], &[11, 3, 0, 7, 1, 2, 4, 10, 9, 8, 6, 5]);
            let slots = t.arena.input("slots", &slots).expect("memory");
            let pages = t.output("pages", DType::U8, &[3, 4 * format.row_bytes()]);
            let q = t.upload("q", &numbers("q", DType::Bf16, &[2, 3, num_heads, head_dim]), 2);
            let [window, compressed] = ["window", "compressed"].map(|name| t.indices(name, &[2, 3, 70], 12, 2));
            let out = t.output_in("out", DType::Bf16, &[2, 3, num_heads, head_dim], 2);
            let (lse, sink) = (t.dense_output("lse", &[2, 3, num_heads]), t.dense("sink", &[num_heads]));
            let cache = Cache { pages: &pages, page_size: 4 };
            let store = |indices| decode_attention::Store { cache, indices, length: None };
            let inputs = decode_attention::Inputs {
                q: &q,
                format,
                window: store(&window),
                compressed: Some(store(&compressed)),
                sink: Some(&sink),
                softmax_scale: 0.05,
            };
            let num_blocks = 5;
            let bytes = decode_attention::workspace_bytes(&inputs, num_blocks, implementation).expect("sound inputs");
            let workspace = t.arena.workspace("workspace", bytes).expect("memory");
            let (out, lse, workspace) = (&out, &lse, &workspace);
            t.run(|device| {
                kv_cache_write::forward(device, &kv_cache_write::Forward { kv: &kv, slots: &slots, format, cache })?;
                let call = decode_attention::Forward { inputs, num_blocks, implementation, out, lse, workspace };
                decode_attention::forward(device, &call).map(|_| ())
            })
        });
    }
}

#[test]
fn sparse_attention_takes_heads_before_tokens_each_tensor_at_strides_of_its_own() {
    let shapes = [
        (Implementation::Portable, 64, 32, true, 20),
        (Implementation::Portable, 64, 64, false, 5),
        (Implementation::Hopper, 512, 512, false, 20),
    ];
    for (implementation, head_dim, v_dim, separate, num_heads) in shapes {
        for gradient in [DType::Bf16, DType::F32] {
            assert_layouts_do_not_matter("sparse_attention", |mut t| {
                let q = t.input("q", DType::Bf16, &[3, num_heads, head_dim]);
                let (k, v) = (t.input("k", DType::Bf16, &[9, head_dim]), t.input("v", DType::Bf16, &[9, v_dim]));
                let dout = t.input("dout", DType::Bf16, &[3, num_heads, v_dim]);
                let (sink, dlse) = (t.dense("sink", &[num_heads]), t.dense("dlse", &[3, num_heads]));
                let indices = t.indices("indices", &[3, 70], 9, 0);
                let out = t.output("out", DType::Bf16, &[3, num_heads, v_dim]);
                let dq = t.output("dq", DType::Bf16, &[3, num_heads, head_dim]);
                let dk = t.output("dk", gradient, &[9, head_dim]);
                let dv = separate.then(|| t.output("dv", gradient, &[9, v_dim]));
                let [lse, max_logits] = ["lse", "max_logits"].map(|name| t.dense_output(name, &[3, num_heads]));
                let dsink = t.dense_output("dsink", &[num_heads]);
                let inputs = sparse_attention::Inputs {
                    q: &q,
                    k: &k,
                    value: if separate { Value::Separate(&v) } else { Value::Prefix { v_dim } },
                    sink: Some(&sink),
                    indices: &indices,
                    topk_length: None,
                    softmax_scale: 0.05,
                };
                // Two chunks of tokens: what begins behind the first one begins at the tensor's own stride.
                let key_gradients = KeyGradients::Deterministic { chunk_tokens: 2 };
                let bytes = sparse_attention::workspace_bytes(&inputs, gradient, key_gradients).expect("sound inputs");
                let workspace = t.arena.workspace("workspace", bytes).expect("memory");
                let (out, lse, max_logits) = (&out, &lse, &max_logits);
                let forward = sparse_attention::Forward { inputs, implementation, out, lse, max_logits };
                let backward = sparse_attention::Backward {
                    inputs,
                    implementation,
                    key_gradients,
                    out,
                    lse,
                    dout: &dout,
                    dlse: Some(&dlse),
                    dq: &dq,
                    dk: &dk,
                    dv: dv.as_ref(),
                    dsink: Some(&dsink),
                    workspace: &workspace,
                };
                t.run(|device| {
                    sparse_attention::forward(device, &forward)?;
                    sparse_attention::backward(device, &backward).map(|_| ())
                })
            });
        }
    }
}

#[test]
fn score_recompute_takes_heads_before_tokens_each_tensor_at_strides_of_its_own() {
    use score_recompute::{Inputs, Lse, Normaliser, Ranking, Scores, Target};
    for (implementation, num_heads) in [(Implementation::Portable, 5), (Implementation::Hopper, 20)] {
        assert_layouts_do_not_matter("score_recompute", |mut t| {
            let q = t.input("q", DType::Bf16, &[6, num_heads, 64]);
            let k = t.input("k", DType::Bf16, &[9, 64]);
            let indices = t.indices("indices", &[6, 70], 9, 0);
            let given = t.dense("given", &[6, num_heads]);
            let (target, scores) = (t.output("target", DType::F32, &[6, 70]), t.output("scores", DType::F32, &[6, 9]));
            let lse = t.dense_output("lse", &[6, num_heads]);
            let (l1, shift) = (t.dense_output("l1", &[6]), t.arena.output("shift", DType::F32, &[6]).expect("memory"));
            let inputs = |ranking| Inputs { q: &q, k: &k, ranking, sequences: None, softmax_scale: 0.1 };
            let selected = inputs(Ranking::Selected { indices: &indices, topk_length: None, global: true });
            let causal = inputs(Ranking::Causal { ratio: 1, q_off: None });
            let normaliser = Normaliser { lse: &given, sink: None };
            let (target, scores, l1, shift, lse) = (&target, &scores, &l1, &shift, &lse);
            t.run(|device| {
                score_recompute::target(device, &Target { inputs: selected, normaliser, implementation, target })?;
                let dense = Scores { inputs: causal, normaliser, implementation, scores, l1, shift };
                score_recompute::scores(device, &dense)?;
                score_recompute::lse(device, &Lse { inputs: selected, lse_beside: None, lse }).map(|_| ())
            })
        });
    }
}
