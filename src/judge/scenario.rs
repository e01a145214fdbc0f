//! Operators composed as a training step composes them, where one may spoil what another saved.
//!
//! [`OutputRotation`] is attention followed by the inverse rotation of its output, and the backward of both
//! (training 4 and 8). Values are key rows, so each attended value carries its key's rotation; turning the
//! output back by the query's position leaves the relative rotation only:
//!
//! ```text
//! forward    out, lse = attention(q, k, v, sink)      out is saved for the backward
//!            y        = R^-1 out                      R turns token t to its position p_t
//! backward   dout     = R dy                          the gradient of R^-1, a rotation, is its transpose
//!            dq, dk, dv, dsink = attention_backward(…, out, lse, dout)
//! ```
//!
//! The attention backward reads the saved `out` in `delta = sum_d out dout`, in the frame of `dout`. A rotation
//! that runs in place on that buffer leaves `y` right, and also everything that depends on P and `dout`
//! alone (`dv`); `dq`, `dk` and `dsink`, which contain `delta`, are wrong (FM-03). No operator's own cases see
//! it: each of the two kernels does what it was asked for.

use dsv4_kernels::runtime::arena::Violation;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Role, RuntimeError, TensorView};
use dsv4_kernels::{rope as rope_launcher, sparse_attention as attention_launcher};
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::rope::YarnParameters;
use dsv4_reference::{rope, sparse_attention as attention};

use crate::case::CaseError;
use crate::operator::{KernelRun, OracleTensor, Prepared, Side};
use crate::operators::sparse_attention::{DeviceInputs, DeviceOutputs, Inputs, SparseAttentionCase};
use crate::operators::{deterministic, elements, layout, oracle_error, oracle_tensor, widened};

const NAME: &str = "sparse_attention then rope";

/// Where the sequence of queries begins. At position 0 the rotation would be the identity.
const FIRST_POSITION: i64 = 4096;
/// Positions between one query and the next; odd, so that no power of two of a frequency repeats.
const POSITION_STEP: i64 = 37;

/// Attention, the inverse rotation of its output, and the backward of both: inputs, oracle and kernels.
///
/// Outputs: `out` and `y` bf16 `[num_tokens, num_heads, v_dim]`, `lse` f32 `[num_tokens, num_heads]`. Gradients:
/// `dout` bf16 like `out`, `dq` bf16 `[num_tokens, num_heads, head_dim]`, `dk` and (separate values) `dv` as the
/// case says, `dsink` f32 `[num_heads]`.
pub struct OutputRotation {
    /// The attention's inputs. Its `dout` is this scenario's `dy`: the gradient in the turned-back frame.
    attention: Inputs,
    /// `[num_tokens, rope_dim / 2]` f32: one row a query.
    cos: HostTensor,
    sin: HostTensor,
    in_place: bool,
}

impl OutputRotation {
    /// Draws the inputs of `case`; the last `rope_dim` channels of `out` turn. `in_place` makes the rotation
    /// write over the saved `out`, which is the bug that this scenario is for.
    ///
    /// # Errors
    /// A case that attention cannot take, or a `rope_dim` that is odd, 0 or above `v_dim`.
    pub fn new(case: SparseAttentionCase, rope_dim: usize, in_place: bool) -> Result<Self, CaseError> {
        case.check()?;
        if rope_dim == 0 || !rope_dim.is_multiple_of(2) || rope_dim > case.v_dim {
            let reason = format!("{rope_dim} must be even, 2 to v_dim {}", case.v_dim);
            return Err(CaseError::Field { operator: NAME, field: "rope_dim", reason });
        }
        let (cos, sin) = table(case.num_tokens, rope_dim).map_err(|e| oracle_error(NAME, e))?;
        Ok(Self { attention: Inputs::draw(case), cos, sin, in_place })
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let mut rounding = Rounding::new(precision);
        let (inputs, upstream) = self.attention.reference()?;
        let saved = attention::forward(&inputs, &mut rounding)?;
        // What one kernel hands to the next is stored in bf16.
        let x = rounding.bf16(&saved.out)?;
        let (cos, sin) = (widened(&self.cos)?, widened(&self.sin)?);
        let rotation = rope::Inputs { x, cos, sin, positions: None, inverse: true };
        let y = rope::forward(&rotation, &mut rounding)?.y;
        let dout = rope::backward(&rotation, &upstream.dout, &mut rounding)?.dx;
        let stored = attention::Upstream { dout: rounding.bf16(&dout)?, dlse: upstream.dlse };
        let gradients = attention::backward(&inputs, &stored, &mut rounding)?;
        let forward = [("out", Some(&saved.out)), ("lse", Some(&saved.lse)), ("y", Some(&y))];
        let backward = [
            ("dout", Some(&dout)),
            ("dq", Some(&gradients.dq)),
            ("dk", Some(&gradients.dk)),
            ("dv", gradients.dv.as_ref()),
            ("dsink", gradients.dsink.as_ref()),
        ];
        let forward = forward.map(|(name, tensor)| (name, Side::Forward, tensor));
        let backward = backward.map(|(name, tensor)| (name, Side::Gradient, tensor));
        let all = forward.into_iter().chain(backward);
        Ok(all
            .filter_map(|(name, side, tensor)| tensor.map(|tensor| oracle_tensor(name, side, tensor)))
            .collect::<Result<_, _>>()?)
    }

    /// The forward; what it leaves for the backward is brought to the host.
    fn forward(&self, device: &Device, contract: Contract) -> Result<Saved, RuntimeError> {
        let mut arena = DeviceArena::new(device, contract);
        let read = DeviceInputs::upload(&mut arena, &self.attention)?;
        let written = DeviceOutputs::allocate(&mut arena, &self.attention, &read)?;
        let DeviceOutputs { out, lse, max_logits, .. } = &written;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let forward = attention_launcher::Forward {
                inputs: read.launcher(),
                implementation: attention_launcher::Implementation::Auto,
                out,
                lse,
                max_logits,
            };
            paths.push(attention_launcher::forward(device, &forward)?);
            Ok(())
        })?;
        Ok(Saved { out: arena.download(out)?, lse: arena.download(lse)?, violations, paths })
    }

    /// The rotation of the saved output and the backward of both, in one arena: there the saved tensors are
    /// inputs, which nobody may change.
    fn backward(&self, device: &Device, contract: Contract, saved: Saved) -> Result<KernelRun, RuntimeError> {
        let mut arena = DeviceArena::new(device, contract);
        let shape = &saved.out.shape;
        let padded = layout(shape, self.attention.case.padding);
        let out = arena.upload("saved out", &saved.out, &padded, Role::Input)?;
        let lse = arena.input("saved lse", &saved.lse)?;
        let y = match self.in_place {
            true => out.clone(),
            false => arena.allocate("y", DType::Bf16, shape, &padded, Role::Output)?,
        };
        let dy = arena.upload("dy", &self.attention.dout, &padded, Role::Input)?;
        let dout = arena.allocate("dout", DType::Bf16, shape, &padded, Role::Output)?;
        let (cos, sin) = (arena.input("cos", &self.cos)?, arena.input("sin", &self.sin)?);
        let dlse = self.attention.dlse.as_ref().map(|dlse| arena.input("dlse", dlse)).transpose()?;
        let read = DeviceInputs::upload(&mut arena, &self.attention)?;
        let written = DeviceOutputs::allocate(&mut arena, &self.attention, &read)?;
        let mut paths = saved.paths;
        let mut violations = saved.violations;
        violations.extend(arena.run(|device| {
            let rotation =
                rope_launcher::Forward { x: &out, y: &y, cos: &cos, sin: &sin, positions: None, inverse: true };
            paths.push(rope_launcher::forward(device, &rotation)?.to_owned());
            let gradient = rope_launcher::Forward { x: &dy, y: &dout, ..rotation };
            paths.push(format!("backward {}", rope_launcher::backward(device, &gradient)?));
            let backward = attention_backward(&read, &written, [&out, &lse, &dout], dlse.as_ref());
            paths.extend(attention_launcher::backward(device, &backward)?);
            Ok(())
        })?);
        let mut tensors = vec![deterministic("out", saved.out.clone()), deterministic("lse", saved.lse.clone())];
        for (name, view) in [("y", &y), ("dout", &dout)] {
            tensors.push(deterministic(name, arena.download(view)?));
        }
        let gradients = written.download(&arena)?;
        tensors.extend(gradients.into_iter().filter(|t| !["out", "lse", "max_logits"].contains(&t.name)));
        Ok(KernelRun { tensors, violations, paths })
    }
}

/// What the forward saved.
struct Saved {
    out: HostTensor,
    lse: HostTensor,
    violations: Vec<Violation>,
    paths: Vec<String>,
}

fn attention_backward<'a>(
    read: &'a DeviceInputs,
    written: &'a DeviceOutputs,
    [out, lse, dout]: [&'a TensorView; 3],
    dlse: Option<&'a TensorView>,
) -> attention_launcher::Backward<'a> {
    attention_launcher::Backward {
        inputs: read.launcher(),
        implementation: attention_launcher::Implementation::Auto,
        key_gradients: written.key_gradients,
        out,
        lse,
        dout,
        dlse,
        dq: &written.dq,
        dk: &written.dk,
        dv: written.dv.as_ref(),
        dsink: written.dsink.as_ref(),
        workspace: &written.workspace,
    }
}

/// cos and sin of the queries' positions, `[num_tokens, rope_dim / 2]`, as the table kernel stores them.
fn table(num_tokens: usize, rope_dim: usize) -> Result<(HostTensor, HostTensor), dsv4_reference::Error> {
    let frequencies = rope::inv_freq_f32(&YarnParameters { rope_dim, ..YarnParameters::compress() })?;
    let positions: Vec<i64> = (0..num_tokens as i64).map(|token| FIRST_POSITION + POSITION_STEP * token).collect();
    let (cos, sin) = rope::table(&frequencies, &positions)?;
    let shape = [num_tokens, frequencies.len()];
    Ok((
        HostTensor::from_f64(DType::F32, &shape, &elements(&cos)?),
        HostTensor::from_f64(DType::F32, &shape, &elements(&sin)?),
    ))
}

impl Prepared for OutputRotation {
    fn operator(&self) -> &'static str {
        NAME
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let saved = self.forward(device, contract)?;
        self.backward(device, contract, saved)
    }
}
