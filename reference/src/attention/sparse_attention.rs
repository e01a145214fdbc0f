//! Sparse attention with a sink over gathered keys (inference 8, training 3 and 4).
//!
//! Every token t has a list of `topk` slots; slot j names key row `indices[t, j]`. A slot is
//! *valid* when `j < clamp(topk_length[t], 0, topk)` and `0 <= indices[t, j] < num_keys`. All heads
//! share the keys and the list. Over the valid slots j of a token, each counted as often as it
//! occurs,
//!
//! ```text
//! z[h, j] = softmax_scale * q[t, h] . k[indices[t, j]]
//! M[h]    = max_j z                                max_logits; -inf when no slot is valid
//! lse[h]  = M + ln(sum_j exp(z - M))               natural, WITHOUT the sink; +inf when no slot is valid
//! out[h]  = sum_j exp(z - M) v[indices[t, j]] / (sum_j exp(z - M) + exp(sink[h] - M))
//! ```
//!
//! and 0 when no slot is valid. The sink is a logit that is not scaled and has no value row.
//! `sink = +inf` makes `out` 0 and does not change `lse`; `sink = -inf` means no sink. The value
//! row v of a key is the key row itself, its first `v_dim` channels, or a row of a separate tensor.
//!
//! Backward, with `L = ln(exp(lse) + exp(sink))` (`+inf` when no slot is valid):
//!
//! ```text
//! P[h, j]  = exp(z - L)
//! dP[h, j] = dout[t, h] . v[indices[t, j]]
//! delta[h] = out[t, h] . dout[t, h]
//! dS[h, j] = P (dP - delta) + exp(z - lse) dlse
//! dq[t, h] = softmax_scale * sum_j dS k[indices[t, j]]
//! dk[i]    = softmax_scale * sum over (t, h, j) with indices[t, j] = i of dS q[t, h]
//! dv[i]    = sum over the same of P dout[t, h]
//! dsink[h] = - sum_t exp(sink - L) delta
//! ```
//!
//! When values are key rows, dv is added to the first `v_dim` columns of dk. A row without valid
//! slots has a dq of exactly 0 and adds nothing to the other gradients.
//!
//! # Rounding points
//!
//! * every matrix product and sum accumulates in fp32; z, exponents and exponentials are fp32;
//! * `exp(z - M)` is rounded to bf16 before the product with v, after it was summed unrounded.
//!   Kernels that work in tiles subtract the running maximum instead of M, so the kernel decides
//!   the scale at which it is rounded;
//! * backward reads the stored `out` (bf16) and `lse` (fp32); z is recomputed;
//! * P and dS are rounded to bf16 before their products. dS is **without** `softmax_scale`, which
//!   multiplies the fp32 accumulators of dq and dk, never dv;
//! * dk and dv are fp32 sums over all (t, h, j) of a key; with shared storage both kinds of terms
//!   share one sum.
//!
//! Invalid slots read an extra row of zeros after the last key and get the logit `-inf` by a
//! select. So nothing is read through an invalid index, and no NaN of an unreferenced row can pass.

use candle_core::{DType, Device, Tensor, Var};

use crate::error::{Error, Result, require, require_f64, wrong_shape, wrong_value};
use crate::precision::{Rounding, values};
use crate::select::{max_or_nan, select, spread};

/// Where the value rows are stored.
#[derive(Debug, Clone)]
pub enum Value {
    /// The value row is the key row; `v_dim = head_dim`.
    Shared,
    /// The value row is the first `v_dim` channels of the key row.
    Prefix {
        /// Channels of a value, at most `head_dim`.
        v_dim: usize,
    },
    /// The value rows are a separate tensor, `[num_keys, v_dim]`, stored in bf16.
    Separate(Tensor),
}

/// Inputs of the attention, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// `[num_keys, head_dim]`, stored in bf16. `num_keys` may be 0.
    pub k: Tensor,
    /// The value rows.
    pub value: Value,
    /// `[num_heads]`, stored in f32: a logit (not scaled) in natural units. Any value, infinities
    /// included.
    pub sink: Option<Tensor>,
    /// `[num_tokens, topk]` in row-major order: the key row of each slot. Any value.
    pub indices: Vec<i32>,
    /// Slots per token; may be 0.
    pub topk: usize,
    /// `[num_tokens]`: leading slots that count. Any value; clamped to `0 ..= topk`.
    pub topk_length: Option<Vec<i32>>,
    /// Multiplies the dot products; finite.
    pub softmax_scale: f64,
}

/// Outputs of the attention.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[num_tokens, num_heads, v_dim]`, stored in bf16.
    pub out: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32: natural logarithm, without the sink; `+inf` for
    /// empty rows.
    pub lse: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32: natural units, without the sink; `-inf` for empty
    /// rows.
    pub max_logits: Tensor,
}

/// Upstream gradients.
#[derive(Debug, Clone)]
pub struct Upstream {
    /// `[num_tokens, num_heads, v_dim]`, stored in bf16.
    pub dout: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32: gradient of `lse`. Ignored on empty rows.
    pub dlse: Option<Tensor>,
}

/// What a forward saves for its backward, as stored.
#[derive(Debug, Clone)]
pub struct Saved {
    /// `[num_tokens, num_heads, v_dim]`, stored in bf16.
    pub out: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32.
    pub lse: Tensor,
}

/// Gradients with respect to [`Inputs`].
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub dq: Tensor,
    /// `[num_keys, head_dim]`, stored in bf16 or f32. Includes dv unless the values are a separate
    /// tensor.
    pub dk: Tensor,
    /// `[num_keys, v_dim]`, stored as `dk`; present when the values are a separate tensor.
    pub dv: Option<Tensor>,
    /// `[num_heads]`, stored in f32; present with a sink.
    pub dsink: Option<Tensor>,
}

/// `out`, `lse` and `max_logits`.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let dims = inputs.check()?;
    if dims.has_no_rows() {
        return Outputs::empty(&dims);
    }
    let mut gathered = Gathered::new(inputs, &dims)?;
    let z = gathered.logits(inputs, rounding)?;
    let softmax = Softmax::new(&gathered, z, rounding)?;
    let lse = gathered.select_rows(&softmax.lse, f64::INFINITY)?;
    let max_logits = gathered.select_rows(&softmax.max, f64::NEG_INFINITY)?;
    Ok(Outputs {
        out: output(inputs, &gathered, &softmax, rounding)?,
        lse: lse.squeeze(2)?,
        max_logits: max_logits.squeeze(2)?,
    })
}

/// The gradients by the formulas of the module documentation. What the forward pass would have
/// saved is computed here and rounded as stored.
pub fn backward(
    inputs: &Inputs,
    upstream: &Upstream,
    rounding: &mut Rounding,
) -> Result<Gradients> {
    let dims = inputs.check()?;
    upstream.check(&dims)?;
    if dims.has_no_rows() {
        return Gradients::zeros(inputs, &dims);
    }
    let mut gathered = Gathered::new(inputs, &dims)?;
    let z = gathered.logits(inputs, rounding)?;
    let softmax = Softmax::new(&gathered, z, rounding)?;
    let out = output(inputs, &gathered, &softmax, rounding)?;
    let saved_out = rounding.bf16(&out)?;
    let saved_lse = rounding.f32(&softmax.lse)?;

    let z = gathered.logits(inputs, rounding)?;
    let normaliser = Normaliser::new(inputs, &gathered, &saved_lse, rounding)?;
    // Invalid slots and empty rows have z = -inf: the exponential is 0 without a multiplication.
    let p = rounding.f32(&z.broadcast_sub(&normaliser.l)?)?;
    let p = rounding.exp_f32(&p)?;
    let dp = rounding.matmul_f32(&upstream.dout, &gathered.v.transpose(1, 2)?)?;
    let delta = delta(&gathered, &saved_out, &upstream.dout, rounding)?;
    // dS = P (dP - delta) + exp(z - lse) dlse
    let ds = rounding.f32(&dp.broadcast_sub(&delta)?)?;
    let mut ds = rounding.f32(&(&p * ds)?)?;
    if let Some(dlse) = &upstream.dlse {
        let dlse = gathered.select_rows(&dlse.unsqueeze(2)?, 0.0)?;
        let exponent = rounding.f32(&z.broadcast_sub(&saved_lse)?)?;
        let term = rounding.exp_f32(&exponent)?.broadcast_mul(&dlse)?;
        let term = rounding.f32(&term)?;
        ds = rounding.f32(&(ds + term)?)?;
    }
    let ds = rounding.bf16(&ds)?;
    let p = rounding.bf16(&p)?;

    let dq = rounding.matmul_f32_of(&ds, &gathered.k, &gathered.num_valid)?;
    let dq = rounding.f32(&(dq * inputs.softmax_scale)?)?;
    let (dk, dv) = key_gradients(inputs, upstream, &dims, &gathered, &p, &ds, rounding)?;
    let dsink = sink_gradient(&normaliser, &delta, rounding)?;
    Ok(Gradients { dq, dk, dv, dsink })
}

/// dsink, `[num_heads]`, computed from the `out` and `lse` that a forward saved: the errors of
/// these are not errors of dsink. `None` without a sink.
pub fn sink_gradient_of_saved(
    inputs: &Inputs,
    saved: &Saved,
    dout: &Tensor,
    rounding: &mut Rounding,
) -> Result<Option<Tensor>> {
    let dims = inputs.check()?;
    if dims.has_no_rows() {
        return inputs.sink.as_ref().map(|s| Ok(s.zeros_like()?)).transpose();
    }
    let mut gathered = Gathered::new(inputs, &dims)?;
    let lse = saved.lse.unsqueeze(2)?;
    // A forward marks a row without a weighted slot by this value.
    gathered.only_rows(&lse.ne(f64::INFINITY)?)?;
    let normaliser = Normaliser::new(inputs, &gathered, &lse, rounding)?;
    let delta = delta(&gathered, &saved.out, dout, rounding)?;
    sink_gradient(&normaliser, &delta, rounding)
}

/// `delta = sum_d out dout`, of rows that have an output; `[num_tokens, num_heads, 1]`.
fn delta(
    gathered: &Gathered,
    out: &Tensor,
    dout: &Tensor,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let delta = rounding.f32(&(out * dout)?)?;
    let delta = rounding.sum_keepdim_f32(&delta, 2)?;
    gathered.select_rows(&delta, 0.0)
}

/// `dsink = - sum_t exp(sink - L) delta`, `[num_tokens, num_heads, 1] -> [num_heads]`.
fn sink_gradient(
    normaliser: &Normaliser,
    delta: &Tensor,
    rounding: &mut Rounding,
) -> Result<Option<Tensor>> {
    let Some(probability) = &normaliser.sink_probability else { return Ok(None) };
    let terms = rounding.f32(&(probability * delta)?)?;
    Ok(Some(rounding.sum_f32(&terms, 0)?.squeeze(1)?.neg()?))
}

/// The same gradients by automatic differentiation of the exact [`forward`]. Indices get none.
pub fn backward_autograd(inputs: &Inputs, upstream: &Upstream) -> Result<Gradients> {
    let dims = inputs.check()?;
    upstream.check(&dims)?;
    if dims.has_no_rows() {
        return Gradients::zeros(inputs, &dims);
    }
    // A variable without elements has no gradient.
    let variable = |tensor: &Tensor| Var::from_tensor(tensor);
    let (q, k) = (variable(&inputs.q)?, variable(&inputs.k)?);
    let v = match &inputs.value {
        Value::Separate(v) => Some(variable(v)?),
        _ => None,
    };
    let sink = inputs.sink.as_ref().map(variable).transpose()?;
    let variables = Inputs {
        q: q.as_tensor().clone(),
        k: k.as_tensor().clone(),
        value: match &v {
            Some(v) => Value::Separate(v.as_tensor().clone()),
            None => inputs.value.clone(),
        },
        sink: sink.as_ref().map(|s| s.as_tensor().clone()),
        ..inputs.clone()
    };

    let rounding = &mut Rounding::exact();
    let mut gathered = Gathered::new(&variables, &dims)?;
    let z = gathered.logits(&variables, rounding)?;
    let softmax = Softmax::new(&gathered, z, rounding)?;
    let out = output(&variables, &gathered, &softmax, rounding)?;
    let mut objective = (out * &upstream.dout)?.sum_all()?;
    if let Some(dlse) = &upstream.dlse {
        // Both factors of an empty row are selected: 0 * inf and 0 * NaN would be NaN.
        let lse = gathered.select_rows(&softmax.lse, 0.0)?.squeeze(2)?;
        let dlse = gathered.select_rows(&dlse.unsqueeze(2)?, 0.0)?.squeeze(2)?;
        objective = (objective + (lse * dlse)?.sum_all()?)?;
    }
    let gradients = objective.backward()?;
    let of = |variable: &Var| match gradients.get(variable) {
        Some(gradient) => Ok(gradient.clone()),
        None => variable.zeros_like(),
    };
    Ok(Gradients {
        dq: of(&q)?,
        dk: of(&k)?,
        dv: v.as_ref().map(of).transpose()?,
        dsink: sink.as_ref().map(of).transpose()?,
    })
}

#[derive(Debug, Clone, Copy)]
struct Dims {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    v_dim: usize,
    num_keys: usize,
}

impl Dims {
    fn has_no_rows(&self) -> bool {
        self.num_tokens == 0 || self.num_heads == 0
    }
}

impl Inputs {
    fn check(&self) -> Result<Dims> {
        require_f64("q", &self.q)?;
        let &[num_tokens, num_heads, head_dim] = self.q.dims() else {
            return Err(wrong_shape("q", "[num_tokens, num_heads, head_dim]", &self.q));
        };
        let &[num_keys, _] = self.k.dims() else {
            return Err(wrong_shape("k", "[num_keys, head_dim]", &self.k));
        };
        require("k", &self.k, &[num_keys, head_dim])?;
        if head_dim == 0 {
            return Err(wrong_value("head_dim", head_dim, "a head needs channels"));
        }
        let v_dim = self.check_value(num_keys, head_dim)?;
        if let Some(sink) = &self.sink {
            require("sink", sink, &[num_heads])?;
        }
        self.check_lists(num_tokens)?;
        if !self.softmax_scale.is_finite() {
            return Err(wrong_value("softmax_scale", self.softmax_scale, "it must be finite"));
        }
        Ok(Dims { num_tokens, num_heads, head_dim, v_dim, num_keys })
    }

    /// The width of the value rows.
    fn check_value(&self, num_keys: usize, head_dim: usize) -> Result<usize> {
        let v_dim = match &self.value {
            Value::Shared => head_dim,
            Value::Prefix { v_dim } => *v_dim,
            Value::Separate(v) => {
                let &[_, v_dim] = v.dims() else {
                    return Err(wrong_shape("v", "[num_keys, v_dim]", v));
                };
                require("v", v, &[num_keys, v_dim])?;
                v_dim
            }
        };
        if v_dim == 0 {
            return Err(wrong_value("v_dim", v_dim, "a value row needs channels"));
        }
        if matches!(self.value, Value::Prefix { .. }) && v_dim > head_dim {
            return Err(wrong_value("v_dim", v_dim, "a prefix cannot be longer than the key row"));
        }
        Ok(v_dim)
    }

    fn check_lists(&self, num_tokens: usize) -> Result<()> {
        if num_tokens.checked_mul(self.topk) != Some(self.indices.len()) {
            return Err(Error::Shape {
                argument: "indices",
                expected: format!("[{num_tokens}, {}]", self.topk),
                actual: vec![self.indices.len()],
            });
        }
        match &self.topk_length {
            Some(lengths) if lengths.len() != num_tokens => Err(Error::Shape {
                argument: "topk_length",
                expected: format!("[{num_tokens}]"),
                actual: vec![lengths.len()],
            }),
            _ => Ok(()),
        }
    }
}

impl Upstream {
    fn check(&self, dims: &Dims) -> Result<()> {
        let (tokens, heads) = (dims.num_tokens, dims.num_heads);
        require("dout", &self.dout, &[tokens, heads, dims.v_dim])?;
        match &self.dlse {
            Some(dlse) => require("dlse", dlse, &[tokens, heads]),
            None => Ok(()),
        }
    }
}

impl Outputs {
    fn empty(dims: &Dims) -> Result<Self> {
        let (tokens, heads) = (dims.num_tokens, dims.num_heads);
        let statistic = Tensor::zeros((tokens, heads), DType::F64, &Device::Cpu)?;
        Ok(Self {
            out: Tensor::zeros((tokens, heads, dims.v_dim), DType::F64, &Device::Cpu)?,
            lse: statistic.clone(),
            max_logits: statistic,
        })
    }
}

impl Gradients {
    fn zeros(inputs: &Inputs, dims: &Dims) -> Result<Self> {
        let rows = |width: usize| Tensor::zeros((dims.num_keys, width), DType::F64, &Device::Cpu);
        Ok(Self {
            dq: inputs.q.zeros_like()?,
            dk: rows(dims.head_dim)?,
            dv: match inputs.value {
                Value::Separate(_) => Some(rows(dims.v_dim)?),
                _ => None,
            },
            dsink: inputs.sink.as_ref().map(|s| s.zeros_like()).transpose()?,
        })
    }
}

/// The keys and values of every slot.
struct Gathered {
    /// Key row of each slot, `[num_tokens * slots]`; `num_keys`, the row of zeros, when invalid.
    rows: Tensor,
    /// 1 where the slot is valid, `[num_tokens, num_heads, slots]`.
    valid: Tensor,
    /// 1 where the row has a valid slot, `[num_tokens, num_heads, 1]`.
    has_valid: Tensor,
    /// The same where a valid slot has a logit above `-inf`, or NaN; `has_valid` before the logits
    /// are computed.
    has_weight: Tensor,
    /// Valid slots of each token, `[num_tokens, 1, 1]`.
    num_valid: Tensor,
    /// `[num_tokens, slots, head_dim]`.
    k: Tensor,
    /// `[num_tokens, slots, v_dim]`.
    v: Tensor,
}

impl Gathered {
    fn new(inputs: &Inputs, dims: &Dims) -> Result<Self> {
        let (tokens, heads) = (dims.num_tokens, dims.num_heads);
        // An empty list is one invalid slot, so that no tensor is empty.
        let slots = inputs.topk.max(1);
        let null_row = dims.num_keys as i64;
        let mut rows = vec![null_row; tokens * slots];
        for token in 0..tokens {
            let list = &inputs.indices[token * inputs.topk..][..inputs.topk];
            let length = match &inputs.topk_length {
                Some(lengths) => usize::try_from(lengths[token]).unwrap_or(0),
                None => inputs.topk,
            };
            for (slot, &index) in list.iter().enumerate().take(length) {
                if 0 <= index && i64::from(index) < null_row {
                    rows[token * slots + slot] = i64::from(index);
                }
            }
        }
        let valid: Vec<u8> = rows.iter().map(|&row| u8::from(row != null_row)).collect();
        let num_valid: Vec<f64> =
            valid.chunks(slots).map(|list| list.iter().map(|&v| f64::from(v)).sum()).collect();
        let device = &Device::Cpu;
        let rows = Tensor::from_vec(rows, tokens * slots, device)?;
        let valid = Tensor::from_vec(valid, (tokens, 1, slots), device)?;
        let num_valid = Tensor::from_vec(num_valid, (tokens, 1, 1), device)?;
        let gather = |source: &Tensor| -> Result<Tensor> {
            let extended = with_null_row(source)?;
            let gathered = extended.index_select(&rows, 0)?;
            Ok(gathered.reshape((tokens, slots, source.dim(1)?))?)
        };
        let k = gather(&inputs.k)?;
        let v = match &inputs.value {
            Value::Shared => k.clone(),
            Value::Prefix { v_dim } => k.narrow(2, 0, *v_dim)?,
            Value::Separate(v) => gather(v)?,
        };
        let has_valid = spread(&num_valid.gt(0.0)?, (tokens, heads, 1))?;
        Ok(Self {
            has_weight: has_valid.clone(),
            has_valid,
            valid: spread(&valid, (tokens, heads, slots))?,
            num_valid,
            rows,
            k,
            v,
        })
    }

    /// `z = softmax_scale q . k`, `[num_tokens, num_heads, slots]`; `-inf` for invalid slots.
    fn logits(&mut self, inputs: &Inputs, rounding: &mut Rounding) -> Result<Tensor> {
        let products = rounding.matmul_f32(&inputs.q, &self.k.transpose(1, 2)?)?;
        let scale = base_two_scale(inputs.softmax_scale, rounding);
        let z = rounding.f32(&(products * scale)?)?;
        let z = select(&self.valid, &z, f64::NEG_INFINITY)?;
        self.only_rows(&max_or_nan(&z.detach(), 2)?.ne(f64::NEG_INFINITY)?)?;
        Ok(z)
    }

    /// Restricts the rows with a weight to those that have a valid slot and for which this mask is
    /// not 0.
    fn only_rows(&mut self, has_weight: &Tensor) -> Result<()> {
        self.has_weight = (&self.has_valid * has_weight)?;
        Ok(())
    }

    /// `per_row` `[num_tokens, num_heads, ..]`, but `otherwise` in the rows in which no slot has a
    /// weight.
    fn select_rows(&self, per_row: &Tensor, otherwise: f64) -> Result<Tensor> {
        select(&self.has_weight.broadcast_as(per_row.shape())?, per_row, otherwise)
    }

    /// The same in the rows without a valid slot. Other rows may be NaN, where a weight of 0
    /// multiplies a value that is not finite.
    fn select_valid_rows(&self, per_row: &Tensor, otherwise: f64) -> Result<Tensor> {
        select(&self.has_valid.broadcast_as(per_row.shape())?, per_row, otherwise)
    }
}

/// The scale as kernels apply it: `softmax_scale * log2 e` is one fp32 constant, and another,
/// `ln 2`, converts results back to natural units. Their rounding shifts all logits together.
fn base_two_scale(softmax_scale: f64, rounding: &mut Rounding) -> f64 {
    let log2_e = rounding.constant_f32(std::f64::consts::LOG2_E);
    let ln_2 = rounding.constant_f32(std::f64::consts::LN_2);
    let to_base_two = rounding.constant_f32(softmax_scale * log2_e);
    if rounding.is_exact() { softmax_scale } else { to_base_two * ln_2 }
}

/// `source` with one row of zeros after its last.
fn with_null_row(source: &Tensor) -> Result<Tensor> {
    let null_row = Tensor::zeros((1, source.dim(1)?), DType::F64, source.device())?;
    if source.dim(0)? == 0 {
        return Ok(null_row);
    }
    Ok(Tensor::cat(&[source, &null_row], 0)?)
}

/// The softmax without sink; all statistics `[num_tokens, num_heads, 1]`.
struct Softmax {
    /// `M = max_j z`, but 0 in empty rows so that `z - M` is `-inf` and not NaN.
    max: Tensor,
    /// `exp(z - M)`, `[num_tokens, num_heads, slots]`.
    weights: Tensor,
    /// `sum_j exp(z - M)`.
    sum: Tensor,
    /// `M + ln(sum)`, but 0 in empty rows.
    lse: Tensor,
}

impl Softmax {
    fn new(gathered: &Gathered, z: Tensor, rounding: &mut Rounding) -> Result<Self> {
        // M cancels in every result, so it is a constant for differentiation.
        let max = gathered.select_rows(&max_or_nan(&z.detach(), 2)?, 0.0)?;
        let exponents = rounding.f32(&z.broadcast_sub(&max)?)?;
        let weights = rounding.exp_f32(&exponents)?;
        let sum = rounding.sum_keepdim_f32(&weights, 2)?;
        let logarithm = gathered.select_rows(&sum, 1.0)?.log()?;
        let lse = (&max + rounding.approximate_f32(&logarithm)?)?;
        Ok(Self { max, weights, sum, lse })
    }
}

/// `out = sum_j exp(z - M) v / (sum_j exp(z - M) + exp(sink - M))`, `[num_tokens, num_heads,
/// v_dim]`.
///
/// Numerator and denominator are multiplied by `exp(M - m)` with `m = max(M, sink)`: 1 unless the
/// sink is the larger, in which case `exp(sink - M)` could overflow.
fn output(
    inputs: &Inputs,
    gathered: &Gathered,
    softmax: &Softmax,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let weights = rounding.bf16_of_any_scale(&softmax.weights)?;
    let weighted = rounding.matmul_f32_of(&weights, &gathered.v, &gathered.num_valid)?;
    let Some(sink) = &inputs.sink else {
        let denominator = gathered.select_rows(&softmax.sum, 1.0)?;
        let reciprocal = rounding.f32(&denominator.recip()?)?;
        let out = rounding.f32(&weighted.broadcast_mul(&reciprocal)?)?;
        return gathered.select_valid_rows(&out, 0.0);
    };
    let rows = softmax.max.shape();
    let sink = rounding.in_base_two(&sink.reshape((1, (), 1))?)?.broadcast_as(rows)?;
    let takes_all = sink.eq(f64::INFINITY)?;
    let finite_sink = takes_all.where_cond(&sink.zeros_like()?, &sink)?;
    let m = softmax.max.maximum(&finite_sink.detach())?;
    let shrink = rounding.f32(&(&softmax.max - &m)?)?;
    let shrink = rounding.exp_f32(&shrink)?;
    let sink_weight = rounding.f32(&(finite_sink - &m)?)?;
    let sink_weight = rounding.exp_f32(&sink_weight)?;
    let denominator = rounding.f32(&((&softmax.sum * &shrink)? + sink_weight)?)?;
    let denominator = gathered.select_rows(&denominator, 1.0)?;
    let reciprocal = rounding.f32(&(shrink / denominator)?)?;
    let out = rounding.f32(&weighted.broadcast_mul(&reciprocal)?)?;
    let out = gathered.select_valid_rows(&out, 0.0)?;
    let takes_all = takes_all.broadcast_as(out.shape())?;
    Ok(takes_all.where_cond(&out.zeros_like()?, &out)?)
}

/// The divisor of the backward pass; `[num_tokens, num_heads, 1]`.
struct Normaliser {
    /// `L = ln(exp(lse) + exp(sink))`; `+inf` in empty rows and under an infinite sink.
    l: Tensor,
    /// `exp(sink - L)`: 1 in empty rows and under an infinite sink.
    sink_probability: Option<Tensor>,
}

impl Normaliser {
    fn new(
        inputs: &Inputs,
        gathered: &Gathered,
        lse: &Tensor,
        rounding: &mut Rounding,
    ) -> Result<Self> {
        let Some(sink) = &inputs.sink else {
            let l = gathered.select_rows(lse, f64::INFINITY)?;
            return Ok(Self { l, sink_probability: None });
        };
        let sink = rounding.in_base_two(&sink.reshape((1, (), 1))?)?.broadcast_as(lse.shape())?;
        let lse = &rounding.in_base_two(lse)?;
        // L = m + ln(exp(lse - m) + exp(sink - m)), m the larger of the two: nothing overflows. An
        // infinite sink gives inf - inf, which the select below replaces.
        let m = lse.maximum(&sink)?;
        let of_keys = rounding.f32(&(lse - &m)?)?;
        let of_keys = rounding.exp_f32(&of_keys)?;
        let of_sink = rounding.f32(&(&sink - &m)?)?;
        let of_sink = rounding.exp_f32(&of_sink)?;
        let both = rounding.f32(&(of_keys + of_sink)?)?;
        let logarithm = rounding.approximate_f32(&both.log()?)?;
        let l = rounding.f32(&(m + logarithm)?)?;

        let takes_all = sink.eq(f64::INFINITY)?;
        let infinity = Tensor::full(f64::INFINITY, l.shape(), l.device())?;
        let l = takes_all.where_cond(&infinity, &l)?;
        let l = gathered.select_rows(&l, f64::INFINITY)?;
        let probability = rounding.f32(&(sink - &l)?)?;
        let probability = rounding.exp_f32(&probability)?;
        let probability = takes_all.where_cond(&probability.ones_like()?, &probability)?;
        let probability = gathered.select_rows(&probability, 1.0)?;
        Ok(Self { l, sink_probability: Some(probability) })
    }
}

/// dk and, for separate values, dv.
fn key_gradients(
    inputs: &Inputs,
    upstream: &Upstream,
    dims: &Dims,
    gathered: &Gathered,
    p: &Tensor,
    ds: &Tensor,
    rounding: &mut Rounding,
) -> Result<(Tensor, Option<Tensor>)> {
    let scatter = Scatter { gathered, dims };
    let from_keys = scatter.terms(ds, &inputs.q, inputs.softmax_scale, rounding)?;
    let from_values = scatter.terms(p, &upstream.dout, 1.0, rounding)?;
    if let Value::Separate(_) = inputs.value {
        let dk = from_keys.accumulate(rounding)?;
        return Ok((dk, Some(from_values.accumulate(rounding)?)));
    }
    let from_values = from_values.widen(dims.head_dim - dims.v_dim)?;
    let both = SlotSums {
        sum: (from_keys.sum + from_values.sum)?,
        sum_of_squares: (from_keys.sum_of_squares + from_values.sum_of_squares)?,
        num_terms: (from_keys.num_terms + from_values.num_terms)?,
    };
    Ok((both.accumulate(rounding)?, None))
}

/// Sums over all (t, h, j) that name one key.
struct Scatter<'a> {
    gathered: &'a Gathered,
    dims: &'a Dims,
}

/// Per key row and channel `[num_keys, width]`: the sum, the sum of squares and the count of its
/// terms.
struct SlotSums {
    sum: Tensor,
    sum_of_squares: Tensor,
    num_terms: Tensor,
}

impl Scatter<'_> {
    /// The terms `scale * coefficients[t, h, j] * rows[t, h, :]` of key `indices[t, j]`.
    fn terms(
        &self,
        coefficients: &Tensor,
        rows: &Tensor,
        scale: f64,
        rounding: &mut Rounding,
    ) -> Result<SlotSums> {
        let sum = (self.scattered(coefficients, rows)? * scale)?;
        let squares =
            || Ok((self.scattered(&coefficients.sqr()?, &rows.sqr()?)? * (scale * scale))?);
        let (sum_of_squares, num_terms) = match rounding.noise_scale(squares)? {
            Some(squares) => (squares, spread(&self.counts()?, sum.shape())?),
            None => (sum.zeros_like()?, sum.zeros_like()?),
        };
        Ok(SlotSums { sum, sum_of_squares, num_terms })
    }

    /// `result[i, :] = sum over (t, h, j) with indices[t, j] = i of a[t, h, j] b[t, h, :]`.
    fn scattered(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let per_slot = a.transpose(1, 2)?.matmul(b)?.flatten_to(1)?;
        self.add_to_keys(&per_slot)
    }

    /// How many (t, h, j) name each key, `[num_keys, 1]`.
    fn counts(&self) -> Result<Tensor> {
        let slots = self.gathered.rows.elem_count();
        let heads = self.dims.num_heads as f64;
        self.add_to_keys(&Tensor::full(heads, (slots, 1), &Device::Cpu)?)
    }

    /// `[num_tokens * slots, width]`, summed over the slots of each key: `[num_keys, width]`.
    fn add_to_keys(&self, per_slot: &Tensor) -> Result<Tensor> {
        let shape = (self.dims.num_keys + 1, per_slot.dim(1)?);
        let zeros = Tensor::zeros(shape, DType::F64, per_slot.device())?;
        let sums = zeros.index_add(&self.gathered.rows, &per_slot.contiguous()?, 0)?;
        // The last row holds the invalid slots.
        Ok(sums.narrow(0, 0, self.dims.num_keys)?)
    }
}

impl SlotSums {
    /// The same sums with `extra` channels of zeros after them.
    fn widen(self, extra: usize) -> Result<Self> {
        Ok(Self {
            sum: self.sum.pad_with_zeros(1, 0, extra)?,
            sum_of_squares: self.sum_of_squares.pad_with_zeros(1, 0, extra)?,
            num_terms: self.num_terms.pad_with_zeros(1, 0, extra)?,
        })
    }

    fn accumulate(&self, rounding: &mut Rounding) -> Result<Tensor> {
        rounding.accumulated_f32(&self.sum, &self.sum_of_squares, &self.num_terms)
    }
}

/// A second oracle of the exact forward pass by another method: without gathering, masks or a
/// tensor library.
///
/// Every key takes part in the softmax of every token. The logarithm of its multiplicity is added
/// to its logit; it is `-inf` for keys that the token does not name:
///
/// ```text
/// e[h, i] = z[h, i] + ln(multiplicity[t, i])
/// L       = ln(exp(lse) + exp(sink)) = max(lse, sink) + ln(1 + exp(-|lse - sink|))
/// out[h]  = sum_i exp(e - L) v[i]
/// ```
///
/// A mistake in the treatment of invalid slots stays unseen only if both oracles make it, in two
/// different ways.
pub fn dense_forward(inputs: &Inputs) -> Result<Outputs> {
    let dims = inputs.check()?;
    let mut dense = Dense::new(inputs, dims)?;
    for token in 0..dims.num_tokens {
        let multiplicity = multiplicities(inputs, token, dims.num_keys);
        for head in 0..dims.num_heads {
            dense.row(token, head, &multiplicity);
        }
    }
    let shape = (dims.num_tokens, dims.num_heads);
    let device = &Device::Cpu;
    Ok(Outputs {
        out: Tensor::from_vec(dense.out, (shape.0, shape.1, dims.v_dim), device)?,
        lse: Tensor::from_vec(dense.lse, shape, device)?,
        max_logits: Tensor::from_vec(dense.max_logits, shape, device)?,
    })
}

/// How often each key occurs in the counted part of the list of one token.
fn multiplicities(inputs: &Inputs, token: usize, num_keys: usize) -> Vec<u32> {
    let mut counts = vec![0; num_keys];
    for slot in 0..inputs.topk {
        if let Some(lengths) = &inputs.topk_length
            && slot as i64 >= i64::from(lengths[token])
        {
            break;
        }
        let index = inputs.indices[token * inputs.topk + slot];
        let count = usize::try_from(index).ok().and_then(|i| counts.get_mut(i));
        if let Some(count) = count {
            *count += 1;
        }
    }
    counts
}

/// Plain row-major copies of the inputs, and the results so far.
struct Dense {
    dims: Dims,
    softmax_scale: f64,
    q: Vec<f64>,
    k: Vec<f64>,
    /// The value rows and the distance between them.
    v: (Vec<f64>, usize),
    sink: Vec<f64>,
    out: Vec<f64>,
    lse: Vec<f64>,
    max_logits: Vec<f64>,
}

impl Dense {
    fn new(inputs: &Inputs, dims: Dims) -> Result<Self> {
        Ok(Self {
            dims,
            softmax_scale: inputs.softmax_scale,
            q: values(&inputs.q)?,
            k: values(&inputs.k)?,
            v: match &inputs.value {
                Value::Separate(v) => (values(v)?, dims.v_dim),
                _ => (values(&inputs.k)?, dims.head_dim),
            },
            sink: match &inputs.sink {
                Some(sink) => values(sink)?,
                None => vec![f64::NEG_INFINITY; dims.num_heads],
            },
            out: Vec::new(),
            lse: Vec::new(),
            max_logits: Vec::new(),
        })
    }

    /// Appends the results of one token and head.
    fn row(&mut self, token: usize, head: usize, multiplicity: &[u32]) {
        let width = self.dims.head_dim;
        let q = &self.q[(token * self.dims.num_heads + head) * width..][..width];
        let z: Vec<f64> = self.k.chunks(width).map(|k| self.softmax_scale * inner(q, k)).collect();
        let named: Vec<usize> = (0..z.len()).filter(|&i| multiplicity[i] > 0).collect();
        let max = named.iter().map(|&i| z[i]).fold(f64::NEG_INFINITY, f64::max);
        self.max_logits.push(max);
        if named.is_empty() {
            self.lse.push(f64::INFINITY);
            self.out.extend(std::iter::repeat_n(0.0, self.dims.v_dim));
            return;
        }
        let e = |i: usize| z[i] + f64::from(multiplicity[i]).ln();
        let lse = max + named.iter().map(|&i| (e(i) - max).exp()).sum::<f64>().ln();
        self.lse.push(lse);
        let sink = self.sink[head];
        let l = lse.max(sink) + (-(lse - sink).abs()).exp().ln_1p();
        for channel in 0..self.dims.v_dim {
            let terms = named.iter().map(|&i| (e(i) - l).exp() * self.v.0[i * self.v.1 + channel]);
            self.out.push(terms.sum());
        }
    }
}

fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within,
        dot, f64_tensor,
    };

    const TOKENS: usize = 9;
    const HEADS: usize = 5;
    const WIDTH: usize = 20;
    const KEYS: usize = 29;
    const TOPK: usize = 13;
    /// Rows of [`case`] that have no valid slot: all -1, length 0, a negative length.
    const EMPTY: [usize; 3] = [0, 1, 2];

    /// Logits of deviation 4, sinks that matter, lists with holes, duplicates and indices out of
    /// range. No token names the last three keys.
    fn case(seed: u64, kind: &str, sink: bool, dlse: bool) -> (Inputs, Upstream) {
        let mut draw = Draw::new(seed);
        let value = match kind {
            "shared" => Value::Shared,
            "prefix" => Value::Prefix { v_dim: 12 },
            _ => Value::Separate(draw.bf16(&[KEYS, 7], 1.0)),
        };
        let v_dim = match kind {
            "shared" => WIDTH,
            "prefix" => 12,
            _ => 7,
        };
        let outside = [-1, -7, KEYS as i32, i32::MAX, i32::MIN];
        let mut indices: Vec<i32> = (0..TOKENS * TOPK)
            .map(|_| match draw.below(4) {
                0 => outside[draw.below(outside.len())],
                _ => draw.below(KEYS - 3) as i32,
            })
            .collect();
        indices[..TOPK].fill(-1);
        // Token 4 names one key three times.
        indices[4 * TOPK..][..3].fill(6);
        let full = TOPK as i32;
        let lengths = vec![full, 0, -5, full + 9, full, 1 + full / 2, i32::MAX, full, full - 1];
        let inputs = Inputs {
            q: draw.bf16(&[TOKENS, HEADS, WIDTH], 4.0),
            k: draw.bf16(&[KEYS, WIDTH], 1.0),
            value,
            sink: sink.then(|| f64_tensor(&[-3.0, 0.0, 3.0, 6.5, -40.0], &[HEADS])),
            indices,
            topk: TOPK,
            topk_length: Some(lengths),
            softmax_scale: (WIDTH as f64).sqrt().recip(),
        };
        let upstream = Upstream {
            dout: draw.bf16(&[TOKENS, HEADS, v_dim], 1.0),
            dlse: dlse.then(|| draw.normal(&[TOKENS, HEADS], 1.0)),
        };
        (inputs, upstream)
    }

    fn cases() -> Vec<(String, Inputs, Upstream)> {
        let mut all = Vec::new();
        for (seed, kind) in ["shared", "prefix", "separate"].into_iter().enumerate() {
            for (sink, dlse) in [(false, false), (true, false), (true, true)] {
                let (inputs, upstream) = case(seed as u64, kind, sink, dlse);
                all.push((format!("{kind} sink {sink} dlse {dlse}"), inputs, upstream));
            }
        }
        all
    }

    fn exact(inputs: &Inputs) -> Result<Outputs> {
        forward(inputs, &mut Rounding::exact())
    }

    /// How far two f64 evaluations of one case may be apart.
    struct Bounds {
        out: Tensor,
        lse: Tensor,
        gradients: Gradients,
    }

    /// First-order error bounds: (relative error of a chain of roundings) * (the formula with every
    /// term replaced by its magnitude), doubled because both sides err. With u the unit roundoff:
    ///
    /// * z: head_dim products and sums and the scale, `(head_dim + 1) u Z`, `Z = max scale sum |q|
    ///   |k|`; M has the same error, the subtraction adds `2 u Z`: the exponent is off by at most
    ///   `(2 head_dim + 4) u Z`;
    /// * exp and the sum over topk relative `(topk + 2) u`; ln, M and the sink add `4 u (|L| +
    ///   1)`, `|L| <= Z + ln topk + |sink|`. P = exp(z - L) thus has the relative error `2 (2
    ///   head_dim + 4) u Z + (topk + 4) u + 5 u (|L| + 1)`;
    /// * dP and delta: `v_dim` terms, with delta through `out` `topk` more and the error of P;
    ///   three products and sums after that; `topk`, respectively all `num_tokens num_heads topk`,
    ///   terms of the last sum.
    fn bounds(inputs: &Inputs, upstream: &Upstream) -> Result<Bounds> {
        let dims = inputs.check()?;
        let rounding = &mut Rounding::exact();
        let mut gathered = Gathered::new(inputs, &dims)?;
        let z = gathered.logits(inputs, rounding)?;
        let softmax = Softmax::new(&gathered, z.clone(), rounding)?;
        let normaliser = Normaliser::new(inputs, &gathered, &softmax.lse, rounding)?;
        let p = z.broadcast_sub(&normaliser.l)?.exp()?;
        let (q, k, v) = (inputs.q.abs()?, gathered.k.abs()?, gathered.v.abs()?);
        let largest = |t: &Tensor| -> Result<f64> {
            let finite = values(t)?.into_iter().map(f64::abs).filter(|v| v.is_finite());
            Ok(finite.fold(0.0, f64::max))
        };
        let z_size = largest(&(q.matmul(&k.transpose(1, 2)?)? * inputs.softmax_scale)?)?;
        let sink_size = inputs.sink.as_ref().map(largest).transpose()?.unwrap_or(0.0);
        let slots = inputs.topk.max(1) as f64;
        let exponent = (2.0 * dims.head_dim as f64 + 4.0) * z_size;
        let l_size = z_size + slots.ln() + sink_size;
        let p_error = 2.0 * exponent + slots + 4.0 + 5.0 * (l_size + 1.0);
        let out_error = p_error + slots + 2.0;
        let ds_error = p_error + out_error + 2.0 * dims.v_dim as f64 + 3.0;
        let all = (dims.num_tokens * dims.num_heads) as f64 * slots;

        let out = p.matmul(&v)?;
        let dout = upstream.dout.abs()?;
        let delta = (&out * &dout)?.sum_keepdim(2)?;
        let mut ds = (&p * dout.matmul(&v.transpose(1, 2)?)?.broadcast_add(&delta)?)?;
        if let Some(dlse) = &upstream.dlse {
            let dlse = gathered.select_rows(&dlse.abs()?.unsqueeze(2)?, 0.0)?;
            ds = (ds + z.broadcast_sub(&softmax.lse)?.exp()?.broadcast_mul(&dlse)?)?;
        }
        let magnitudes = Inputs { q: q.clone(), ..inputs.clone() };
        let absolute = Upstream { dout, dlse: None };
        let (dk, dv) = key_gradients(&magnitudes, &absolute, &dims, &gathered, &p, &ds, rounding)?;
        let scaled = |t: Tensor, roundings: f64| t * (2.0 * UNIT_ROUNDOFF * roundings);
        let dsink = match &normaliser.sink_probability {
            Some(probability) => {
                let terms = (probability * delta)?.sum(0)?.squeeze(1)?;
                Some(scaled(terms, ds_error + dims.num_tokens as f64)?)
            }
            None => None,
        };
        Ok(Bounds {
            out: scaled(out, out_error)?,
            lse: scaled(
                softmax.lse.ones_like()?.squeeze(2)?,
                exponent + slots + 2.0 + 4.0 * (l_size + 1.0),
            )?,
            gradients: Gradients {
                dq: scaled((ds.matmul(&k)? * inputs.softmax_scale)?, ds_error + slots + 1.0)?,
                dk: scaled(dk, ds_error + all + 1.0)?,
                dv: dv.map(|dv| scaled(dv, p_error + all)).transpose()?,
                dsink,
            },
        })
    }

    fn assert_gradients(what: &str, actual: &Gradients, expected: &Gradients, bound: &Gradients) {
        assert_within(&format!("{what} dq"), &actual.dq, &expected.dq, &bound.dq);
        assert_within(&format!("{what} dk"), &actual.dk, &expected.dk, &bound.dk);
        let optional = [
            ("dv", &actual.dv, &expected.dv, &bound.dv),
            ("dsink", &actual.dsink, &expected.dsink, &bound.dsink),
        ];
        for (name, actual, expected, bound) in optional {
            assert_eq!(actual.is_some(), expected.is_some(), "{what} {name}");
            if let (Some(actual), Some(expected), Some(bound)) = (actual, expected, bound) {
                assert_within(&format!("{what} {name}"), actual, expected, bound);
            }
        }
    }

    fn all_finite(tensor: &Tensor) -> bool {
        values(tensor).unwrap().iter().all(|v| v.is_finite())
    }

    fn all_zero(tensor: &Tensor) -> bool {
        values(tensor).unwrap().iter().all(|&v| v == 0.0)
    }

    fn rows_of(tensor: &Tensor, rows: &[usize]) -> Vec<f64> {
        rows.iter().flat_map(|&row| values(&tensor.get(row).unwrap()).unwrap()).collect()
    }

    #[test]
    fn gathered_and_dense_oracle_agree() -> Result<()> {
        for (what, inputs, upstream) in cases() {
            let (gathered, dense) = (exact(&inputs)?, dense_forward(&inputs)?);
            let bound = bounds(&inputs, &upstream)?;
            assert_within(&what, &gathered.out, &dense.out, &bound.out);
            let full: Vec<usize> = (3..TOKENS).collect();
            for (a, b) in [(&gathered.lse, &dense.lse), (&gathered.max_logits, &dense.max_logits)] {
                let rows = |t: &Tensor| t.narrow(0, 3, TOKENS - 3);
                assert_within(&what, &rows(a)?, &rows(b)?, &rows(&bound.lse)?);
                assert!(rows_of(a, &full).iter().all(|v| v.is_finite()));
                assert_eq!(rows_of(a, &EMPTY), rows_of(b, &EMPTY));
            }
        }
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (what, inputs, upstream) in cases() {
            let explicit = backward(&inputs, &upstream, &mut Rounding::exact())?;
            let automatic = backward_autograd(&inputs, &upstream)?;
            let bound = bounds(&inputs, &upstream)?.gradients;
            assert_gradients(&what, &explicit, &automatic, &bound);
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        for (what, inputs, upstream) in cases() {
            let gradients = backward(&inputs, &upstream, &mut Rounding::exact())?;
            let mut draw = Draw::new(77);
            let mut direction = |t: &Tensor| draw.normal(t.dims(), 1.0);
            let (vq, vk) = (direction(&inputs.q), direction(&inputs.k));
            let vv = gradients.dv.as_ref().map(&mut direction);
            let vs = gradients.dsink.as_ref().map(&mut direction);
            let dlse = match &upstream.dlse {
                Some(dlse) => dlse.clone(),
                None => Tensor::zeros((TOKENS, HEADS), DType::F64, &Device::Cpu)?,
            };
            // Empty rows have an infinite lse that no gradient belongs to.
            let weighted_lse = |lse: &Tensor| -> Result<f64> {
                let full = |t: &Tensor| t.narrow(0, 3, TOKENS - 3);
                Ok(dot(&full(&dlse)?, &full(lse)?))
            };
            let objective = |h: f64| -> Result<f64> {
                let shifted = |t: &Tensor, v: &Tensor| t + (v * h)?;
                let moved = Inputs {
                    q: shifted(&inputs.q, &vq)?,
                    k: shifted(&inputs.k, &vk)?,
                    value: match (&inputs.value, &vv) {
                        (Value::Separate(v), Some(vv)) => Value::Separate(shifted(v, vv)?),
                        (other, _) => other.clone(),
                    },
                    sink: match (&inputs.sink, &vs) {
                        (Some(sink), Some(vs)) => Some(shifted(sink, vs)?),
                        _ => None,
                    },
                    ..inputs.clone()
                };
                let outputs = exact(&moved)?;
                Ok(dot(&outputs.out, &upstream.dout) + weighted_lse(&outputs.lse)?)
            };
            let mut claimed = dot(&gradients.dq, &vq) + dot(&gradients.dk, &vk);
            for (gradient, v) in [(&gradients.dv, &vv), (&gradients.dsink, &vs)] {
                if let (Some(gradient), Some(v)) = (gradient, v) {
                    claimed += dot(gradient, v);
                }
            }
            // The error of every output element, and of summing all of them.
            let bound = bounds(&inputs, &upstream)?;
            let outputs = exact(&inputs)?;
            let count = outputs.out.elem_count() as f64;
            let magnitude =
                dot(&outputs.out.abs()?, &upstream.dout.abs()?) + weighted_lse(&outputs.lse)?.abs();
            let noise = dot(&bound.out, &upstream.dout.abs()?)
                + dot(&bound.lse, &dlse.abs()?)
                + count * UNIT_ROUNDOFF * magnitude;
            assert_directional_derivative(&what, objective, 1.0, noise, claimed)?;
        }
        Ok(())
    }

    #[test]
    fn values_enter_linearly_and_dv_is_the_adjoint() -> Result<()> {
        let (inputs, upstream) = case(2, "separate", true, false);
        let gradients = backward(&inputs, &upstream, &mut Rounding::exact())?;
        let other = Draw::new(8).normal(&[KEYS, 7], 1.0);
        let moved = Inputs { value: Value::Separate(other.clone()), ..inputs };
        let out = exact(&moved)?.out;
        let dv = gradients.dv.unwrap();
        let error = (dot(&upstream.dout, &out) - dot(&dv, &other)).abs();
        let bound = bounds(&moved, &upstream)?;
        let allowed = dot(&bound.out, &upstream.dout.abs()?)
            + dot(&bound.gradients.dv.unwrap(), &other.abs()?)
            + (TOKENS * HEADS * 7) as f64 * UNIT_ROUNDOFF * dot(&out.abs()?, &upstream.dout.abs()?);
        assert!(error <= allowed, "{error:e} > {allowed:e}");
        Ok(())
    }

    #[test]
    fn a_sink_scales_the_output_by_a_sigmoid_and_leaves_the_statistics_alone() -> Result<()> {
        let (inputs, upstream) = case(3, "shared", true, false);
        let with = exact(&inputs)?;
        let without = exact(&Inputs { sink: None, ..inputs.clone() })?;
        let sink = inputs.sink.clone().unwrap().unsqueeze(0)?;
        // 1 / (1 + exp(sink - lse)); exp(-inf) = 0 on empty rows, whose output is 0 either way.
        let gate = (without.lse.broadcast_sub(&sink)?.neg()?.exp()? + 1.0)?.recip()?;
        let expected = without.out.broadcast_mul(&gate.unsqueeze(2)?)?;
        let bound = bounds(&inputs, &upstream)?.out;
        assert_within("out", &with.out, &expected, &(bound * 2.0)?);
        assert_eq!(values(&with.lse)?, values(&without.lse)?);
        assert_eq!(values(&with.max_logits)?, values(&without.max_logits)?);
        Ok(())
    }

    #[test]
    fn rows_without_valid_slots_are_zero_and_contribute_to_nothing() -> Result<()> {
        for (what, inputs, mut upstream) in cases() {
            if let Some(dlse) = &upstream.dlse {
                let bad = Tensor::full(f64::NAN, (3, HEADS), &Device::Cpu)?;
                upstream.dlse = Some(Tensor::cat(&[&bad, &dlse.narrow(0, 3, TOKENS - 3)?], 0)?);
            }
            for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
                let rounding = &mut Rounding::new(precision);
                let outputs = forward(&inputs, rounding)?;
                assert!(rows_of(&outputs.out, &EMPTY).iter().all(|&v| v == 0.0), "{what}");
                assert!(rows_of(&outputs.lse, &EMPTY).iter().all(|&v| v == f64::INFINITY));
                assert!(
                    rows_of(&outputs.max_logits, &EMPTY).iter().all(|&v| v == f64::NEG_INFINITY)
                );
                let gradients = backward(&inputs, &upstream, rounding)?;
                assert!(rows_of(&gradients.dq, &EMPTY).iter().all(|&v| v == 0.0));
                assert!(all_finite(&gradients.dq) && all_finite(&gradients.dk), "{what}");
                assert!(gradients.dsink.as_ref().is_none_or(all_finite));
                // No token names the last three keys.
                assert!(all_zero(&gradients.dk.narrow(0, KEYS - 3, 3)?));
            }
            let automatic = backward_autograd(&inputs, &upstream)?;
            assert!(rows_of(&automatic.dq, &EMPTY).iter().all(|&v| v == 0.0));
            assert!(all_finite(&automatic.dk) && automatic.dsink.as_ref().is_none_or(all_finite));
        }
        Ok(())
    }

    /// `tensor` with NaN or an infinity in all channels of the given rows.
    fn poisoned(tensor: &Tensor, rows: &[usize]) -> Tensor {
        let width = tensor.dim(1).unwrap();
        let mut numbers = values(tensor).unwrap();
        for &row in rows {
            let bad = if row % 2 == 0 { f64::NAN } else { f64::INFINITY };
            numbers[row * width..][..width].fill(bad);
        }
        f64_tensor(&numbers, tensor.dims())
    }

    #[test]
    fn nan_in_rows_that_a_token_does_not_name_cannot_reach_it() -> Result<()> {
        for kind in ["shared", "prefix", "separate"] {
            let (mut inputs, upstream) = case(4, kind, true, true);
            // A clamped index would read row 0 or the last row.
            let bad = [0, KEYS - 3, KEYS - 2, KEYS - 1];
            for index in &mut inputs.indices {
                if *index == 0 {
                    *index = -1;
                }
            }
            let dirty = Inputs {
                k: poisoned(&inputs.k, &bad),
                value: match &inputs.value {
                    Value::Separate(v) => Value::Separate(poisoned(v, &bad)),
                    other => other.clone(),
                },
                ..inputs.clone()
            };
            for precision in [Precision::Exact, Precision::Working { seed: 6 }] {
                let (a, b) = (&mut Rounding::new(precision), &mut Rounding::new(precision));
                let (clean_out, dirty_out) = (forward(&inputs, a)?, forward(&dirty, b)?);
                assert_eq!(values(&clean_out.out)?, values(&dirty_out.out)?);
                assert_eq!(values(&clean_out.lse)?, values(&dirty_out.lse)?);
                let (x, y) = (backward(&inputs, &upstream, a)?, backward(&dirty, &upstream, b)?);
                assert_eq!(values(&x.dq)?, values(&y.dq)?);
                assert_eq!(values(&x.dk)?, values(&y.dk)?);
                assert_eq!(
                    x.dsink.map(|t| values(&t).unwrap()),
                    y.dsink.map(|t| values(&t).unwrap())
                );
                assert_eq!(x.dv.map(|t| values(&t).unwrap()), y.dv.map(|t| values(&t).unwrap()));
            }
            let automatic = backward_autograd(&dirty, &upstream)?;
            assert_eq!(values(&automatic.dk)?, values(&backward_autograd(&inputs, &upstream)?.dk)?);
            assert_eq!(
                values(&exact(&dirty)?.out)?.len(),
                values(&dense_forward(&dirty)?.out)?.len()
            );
            assert!(all_finite(&dense_forward(&dirty)?.out));
        }
        Ok(())
    }

    #[test]
    fn infinite_and_huge_sinks_do_what_their_limits_do() -> Result<()> {
        let (base, upstream) = case(5, "shared", true, false);
        let sinks =
            [f64::INFINITY, f64::NEG_INFINITY, f64::from(2.4e38f32), f64::from(-2.4e38f32), 1.0];
        let inputs = Inputs { sink: Some(f64_tensor(&sinks, &[HEADS])), ..base.clone() };
        let plain = Inputs { sink: None, ..base };
        let head = |t: &Tensor, h: usize| values(&t.narrow(1, h, 1).unwrap()).unwrap();
        let dense = dense_forward(&inputs)?.out;
        for precision in [Precision::Exact, Precision::Working { seed: 2 }] {
            let outputs = forward(&inputs, &mut Rounding::new(precision))?;
            let sinkless = forward(&plain, &mut Rounding::new(precision))?;
            let gradients = backward(&inputs, &upstream, &mut Rounding::new(precision))?;
            assert!(
                all_finite(&outputs.out) && all_finite(&gradients.dq) && all_finite(&gradients.dk)
            );
            assert_eq!(values(&outputs.lse)?, values(&sinkless.lse)?);
            for all_to_the_sink in [0, 2] {
                assert!(head(&outputs.out, all_to_the_sink).iter().all(|&v| v == 0.0));
                assert!(head(&gradients.dq, all_to_the_sink).iter().all(|&v| v == 0.0));
            }
            let dsink = values(&gradients.dsink.unwrap())?;
            assert_eq!(dsink[..4], [0.0; 4]);
            assert!(dsink[4].is_finite() && dsink[4] != 0.0);
        }
        let outputs = exact(&inputs)?;
        let bound = bounds(&plain, &upstream)?.out;
        for (h, expected) in
            [(0, &dense), (2, &dense), (1, &exact(&plain)?.out), (3, &exact(&plain)?.out)]
        {
            let of = |t: &Tensor| t.narrow(1, h, 1);
            assert_within("head", &of(&outputs.out)?, &of(expected)?, &of(&bound)?);
        }
        let explicit = backward(&inputs, &upstream, &mut Rounding::exact())?;
        let automatic = backward_autograd(&inputs, &upstream)?;
        // The bounds of the case with ordinary sinks: the infinite ones have nothing to round.
        let bound = bounds(&plain, &upstream)?.gradients;
        assert_within("dq", &explicit.dq, &automatic.dq, &bound.dq);
        assert_within("dk", &explicit.dk, &automatic.dk, &bound.dk);
        assert!(all_finite(&automatic.dsink.unwrap()));
        Ok(())
    }

    #[test]
    fn an_infinite_sink_leaves_the_gradient_of_lse() -> Result<()> {
        let (base, mut upstream) = case(6, "prefix", true, true);
        let inputs =
            Inputs { sink: Some(f64_tensor(&[f64::INFINITY; HEADS], &[HEADS])), ..base.clone() };
        upstream.dlse = Some(Tensor::ones((TOKENS, HEADS), DType::F64, &Device::Cpu)?);
        let under_sink = backward(&inputs, &upstream, &mut Rounding::exact())?;
        let lse_only = Upstream { dout: upstream.dout.zeros_like()?, ..upstream.clone() };
        let plain = Inputs { sink: None, ..base };
        let expected = backward(&plain, &lse_only, &mut Rounding::exact())?;
        assert_eq!(values(&under_sink.dq)?, values(&expected.dq)?);
        assert!(!all_zero(&under_sink.dq));
        Ok(())
    }

    #[test]
    fn tensors_without_elements_are_legal() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 4 }] {
            for (tokens, keys, topk) in [(0, 3, 2), (2, 0, 3), (2, 3, 0), (0, 0, 0)] {
                let inputs = Inputs {
                    q: Draw::new(1).bf16(&[tokens, 2, 4], 1.0),
                    k: Draw::new(2).bf16(&[keys, 4], 1.0),
                    value: Value::Separate(Draw::new(3).bf16(&[keys, 3], 1.0)),
                    sink: Some(f64_tensor(&[0.5, -0.5], &[2])),
                    indices: vec![0; tokens * topk],
                    topk,
                    topk_length: None,
                    softmax_scale: 0.5,
                };
                let upstream = Upstream {
                    dout: Tensor::ones((tokens, 2, 3), DType::F64, &Device::Cpu)?,
                    dlse: Some(Tensor::ones((tokens, 2), DType::F64, &Device::Cpu)?),
                };
                let outputs = forward(&inputs, &mut Rounding::new(precision))?;
                assert_eq!(outputs.out.dims(), [tokens, 2, 3]);
                assert!(all_zero(&outputs.out));
                assert!(values(&outputs.lse)?.iter().all(|&v| v == f64::INFINITY));
                assert_eq!(dense_forward(&inputs)?.out.dims(), [tokens, 2, 3]);
                let explicit = backward(&inputs, &upstream, &mut Rounding::new(precision))?;
                for gradients in [explicit, backward_autograd(&inputs, &upstream)?] {
                    assert_eq!(
                        (gradients.dq.dims(), gradients.dk.dims()),
                        (&[tokens, 2, 4][..], &[keys, 4][..])
                    );
                    assert!(all_zero(&gradients.dq) && all_zero(&gradients.dk));
                    assert!(
                        all_zero(&gradients.dv.unwrap()) && all_zero(&gradients.dsink.unwrap())
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_power_of_two_moved_from_queries_to_the_scale_changes_nothing() -> Result<()> {
        let (inputs, upstream) = case(7, "shared", true, true);
        let moved = Inputs {
            q: (&inputs.q * 4.0)?,
            softmax_scale: inputs.softmax_scale / 4.0,
            ..inputs.clone()
        };
        assert_eq!(values(&exact(&inputs)?.out)?, values(&exact(&moved)?.out)?);
        let a = backward(&inputs, &upstream, &mut Rounding::exact())?;
        let b = backward(&moved, &upstream, &mut Rounding::exact())?;
        assert_eq!(values(&a.dk)?, values(&b.dk)?);
        assert_eq!(values(&a.dq)?, values(&(b.dq * 4.0)?)?);
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let (inputs, upstream) = case(8, "shared", true, true);
        let refused = |inputs: &Inputs| match forward(inputs, &mut Rounding::exact()) {
            Err(Error::Shape { argument, .. } | Error::Value { argument, .. }) => argument,
            other => panic!("expected a refusal, got {other:?}"),
        };
        let of = |change: fn(&mut Inputs)| {
            let mut changed = inputs.clone();
            change(&mut changed);
            refused(&changed)
        };
        assert_eq!(of(|i| i.q = i.q.flatten_all().unwrap()), "q");
        assert_eq!(of(|i| i.k = i.k.narrow(1, 0, 3).unwrap()), "k");
        assert_eq!(of(|i| i.sink = Some(f64_tensor(&[0.0], &[1]))), "sink");
        assert_eq!(of(|i| i.topk += 1), "indices");
        assert_eq!(of(|i| i.topk = usize::MAX), "indices");
        assert_eq!(of(|i| i.topk_length = Some(vec![])), "topk_length");
        assert_eq!(of(|i| i.softmax_scale = f64::NAN), "softmax_scale");
        assert_eq!(of(|i| i.value = Value::Prefix { v_dim: WIDTH + 1 }), "v_dim");
        assert_eq!(of(|i| i.value = Value::Separate(f64_tensor(&[1.0], &[1, 1]))), "v");
        let short = Upstream { dout: upstream.dout.narrow(2, 0, 1).unwrap(), dlse: None };
        let answer = backward(&inputs, &short, &mut Rounding::exact());
        assert!(matches!(answer, Err(Error::Shape { argument: "dout", .. })));
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let (inputs, upstream) = case(9, "shared", true, true);
        let dq = |precision| -> Result<Tensor> {
            Ok(backward(&inputs, &upstream, &mut Rounding::new(precision))?.dq)
        };
        let exact_run = dq(Precision::Exact)?;
        let runs = (0..48).map(|seed| dq(Precision::Working { seed }));
        let runs = runs.collect::<Result<Vec<_>>>()?;
        // Rows of different tokens or heads share no intermediate; the empty ones never err.
        let rows = (TOKENS - EMPTY.len()) * HEADS;
        assert_unbiased("dq", &exact_run, &runs, rows);

        let error = (&runs[0] - &exact_run)?;
        let relative = (dot(&error, &error) / dot(&exact_run, &exact_run)).sqrt();
        println!("relative error of one run: {relative:e}");
        // P, dS and out are rounded to bf16 (gaps 2^-8 to 2^-7): the error is neither zero nor
        // dominant.
        assert!(relative > 2f64.powi(-12) && relative < 2f64.powi(-6));
        Ok(())
    }

    #[test]
    fn golden_files_agree() -> Result<()> {
        for name in ["one", "small_window", "w128", "hca", "hd512"] {
            let golden = Golden::load(&format!("attn_core__{name}"));
            let (batch, _, _, head_dim) = golden.raw("in.q").dims4()?;
            let mut dsink_sum: Option<(Tensor, Tensor)> = None;
            for b in 0..batch {
                let one = |t: Tensor| t.get(b);
                // [heads, S, head_dim] -> [S, heads, head_dim]
                let tokens =
                    |t: Tensor| -> Result<Tensor> { Ok(one(t)?.transpose(0, 1)?.contiguous()?) };
                let visible: Vec<Vec<u8>> = golden.raw("mid.visible").get(b)?.get(0)?.to_vec2()?;
                let (indices, topk) = lists(&visible);
                let inputs = Inputs {
                    q: tokens(golden.f64("in.q"))?,
                    k: one(golden.f64("in.kv"))?.get(0)?,
                    value: Value::Shared,
                    sink: Some(golden.f64("in.sinks")),
                    indices,
                    topk,
                    topk_length: None,
                    // The module computes the power itself in f64.
                    softmax_scale: (head_dim as f64).powf(-0.5),
                };
                let upstream = Upstream { dout: one(golden.f64("gout.y"))?, dlse: None };
                let bound = bounds(&inputs, &upstream)?;
                let out_bound = (&bound.out + one(golden.storage_error("out.y"))?)?;
                assert_within(name, &exact(&inputs)?.out, &one(golden.f64("out.y"))?, &out_bound);
                assert_within(
                    name,
                    &dense_forward(&inputs)?.out,
                    &one(golden.f64("out.y"))?,
                    &out_bound,
                );

                let gradients = backward(&inputs, &upstream, &mut Rounding::exact())?;
                let allowed = (bound.gradients.dq + tokens(golden.storage_error("grad.in.q"))?)?;
                assert_within(name, &gradients.dq, &tokens(golden.f64("grad.in.q"))?, &allowed);
                let allowed =
                    (bound.gradients.dk + one(golden.storage_error("grad.in.kv"))?.get(0)?)?;
                assert_within(
                    name,
                    &gradients.dk,
                    &one(golden.f64("grad.in.kv"))?.get(0)?,
                    &allowed,
                );
                let dsink = (gradients.dsink.unwrap(), bound.gradients.dsink.unwrap());
                dsink_sum = Some(match dsink_sum {
                    Some((sum, bound)) => ((sum + dsink.0)?, (bound + dsink.1)?),
                    None => dsink,
                });
            }
            // The batch shares the sinks. Adding `batch` sums rounds less than the bound of one.
            let (dsink, bound) = dsink_sum.unwrap();
            let allowed = ((bound * 2.0)? + golden.storage_error("grad.in.sinks"))?;
            assert_within(name, &dsink, &golden.f64("grad.in.sinks"), &allowed);
        }
        Ok(())
    }

    /// The visible columns of each row, padded with -1 to the longest.
    fn lists(visible: &[Vec<u8>]) -> (Vec<i32>, usize) {
        let columns = |row: &Vec<u8>| -> Vec<i32> {
            (0..row.len()).filter(|&j| row[j] == 1).map(|j| j as i32).collect()
        };
        let mut rows: Vec<Vec<i32>> = visible.iter().map(columns).collect();
        let topk = rows.iter().map(Vec::len).max().unwrap_or(0);
        for row in &mut rows {
            row.resize(topk, -1);
        }
        (rows.concat(), topk)
    }

    #[test]
    fn a_case_with_the_widths_of_the_model_runs_in_both_precisions() -> Result<()> {
        let (tokens, heads, width, topk, keys) = (16, 16, 512, 70, 200);
        let mut draw = Draw::new(12);
        let inputs = Inputs {
            q: draw.bf16(&[tokens, heads, width], 1.0),
            k: draw.bf16(&[keys, width], 1.0),
            value: Value::Shared,
            sink: Some(draw.normal(&[heads], 1.0)),
            indices: (0..tokens * topk).map(|_| draw.below(keys) as i32).collect(),
            topk,
            topk_length: None,
            softmax_scale: (width as f64).sqrt().recip(),
        };
        let upstream = Upstream { dout: draw.bf16(&[tokens, heads, width], 1.0), dlse: None };
        let exact_run = exact(&inputs)?;
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let rounding = &mut Rounding::new(precision);
            let start = std::time::Instant::now();
            let outputs = forward(&inputs, rounding)?;
            let forward_time = start.elapsed();
            let gradients = backward(&inputs, &upstream, rounding)?;
            println!(
                "{precision:?}: forward {forward_time:.2?}, with backward {:.2?}",
                start.elapsed()
            );
            assert!(all_finite(&gradients.dq) && all_finite(&gradients.dk));
            // bf16 moves each weight by less than its gap, 2^-7 of itself, and the weights sum to
            // at most 1.
            let largest = values(&inputs.k)?.into_iter().map(f64::abs).fold(0.0, f64::max);
            let bound = Tensor::full(largest * 2f64.powi(-7), outputs.out.shape(), &Device::Cpu)?;
            assert_within("out", &outputs.out, &exact_run.out, &bound);
        }
        Ok(())
    }
}
