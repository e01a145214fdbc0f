//! SwiGLU with clamps and an optional row weight (inference 11.1, training 11.2). With
//!
//! ```text
//! a = min(gate, limit)      b = max(min(up, limit), -limit)      s = 1 / (1 + exp(-a))
//!
//! y     = w (a s b)                                        w = 1 where there is no weight
//! dgate = [gate <= limit] w dy b s (1 + a (1 - s))         dup = [|up| <= limit] w dy (a s)
//! dweight = sum over the row of dy (a s b)
//! ```
//!
//! The gate has no lower clamp. Only what exceeds the limit is clamped: equality passes the gradient on, and so does NaN.
//! Padding rows are zero in y and in every gradient, whatever they hold.
//!
//! # Rounding points
//!
//! Each product, sum and difference is an fp32 number, the power and the quotient are approximated in fp32, and dweight is
//! summed in fp32. Results are rounded once to the type in which they are stored.

use candle_core::Tensor;

use crate::error::{Result, extents, require, require_that};
use crate::precision::Rounding;
use crate::select::{clamp, unless};

/// What SwiGLU reads, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_rows, width]`, stored in bf16 or f32.
    pub gate: Tensor,
    /// `[num_rows, width]`, stored in the type of `gate`.
    pub up: Tensor,
    /// `[num_rows]`, stored in f32: the routing weight; absent for the shared expert.
    pub weight: Option<Tensor>,
    /// `[num_rows]`, stored in i32: where a row comes from; negative for a padding row. Absent where no row is padding.
    pub pos_to_token_topk: Option<Tensor>,
    /// Where gate and up are clamped; positive.
    pub limit: f64,
}

/// Gradients with respect to [`Inputs`].
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[num_rows, width]`, stored in the type of `gate`.
    pub dgate: Tensor,
    /// `[num_rows, width]`, stored in the type of `gate`.
    pub dup: Tensor,
    /// `[num_rows]`, stored in f32; present when there is a weight.
    pub dweight: Option<Tensor>,
}

/// `y` `[num_rows, width]`, stored in the type of `gate`.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Tensor> {
    let Terms { b, silu, weight, .. } = Terms::new(inputs, rounding)?;
    let y = rounding.f32(&(silu * b)?)?;
    rounding.f32(&y.broadcast_mul(&weight)?)
}

/// The gradients for the upstream gradient `dy` `[num_rows, width]` (stored in the type of `gate`).
pub fn backward(inputs: &Inputs, dy: &Tensor, rounding: &mut Rounding) -> Result<Gradients> {
    let Terms { a, b, s, silu, weight } = Terms::new(inputs, rounding)?;
    require("dy", dy, inputs.gate.dims())?;
    let dy = inputs.without_padding(dy)?;
    let g = rounding.f32(&dy.broadcast_mul(&weight)?)?;
    let rising = rounding.f32(&s.affine(-1.0, 1.0)?)?;
    let rising = rounding.f32(&(a * rising)?)?;
    let rising = rounding.f32(&(rising + 1.0)?)?;
    let slope = rounding.f32(&(s * rising)?)?;
    let dgate = rounding.f32(&(&g * &b)?)?;
    let dgate = rounding.f32(&(dgate * slope)?)?;
    let dgate = unless(&inputs.gate.gt(inputs.limit)?, &dgate, 0.0)?;
    let dup = rounding.f32(&(g * &silu)?)?;
    let dup = unless(&inputs.up.abs()?.gt(inputs.limit)?, &dup, 0.0)?;
    let activation = rounding.f32(&(silu * b)?)?;
    let terms = rounding.f32(&(dy * activation)?)?;
    let dweight = inputs.weight.as_ref().map(|_| rounding.sum_f32(&terms, 1)).transpose()?;
    Ok(Gradients { dgate, dup, dweight })
}

/// What both directions compute: `[num_rows, width]`, weight `[num_rows, 1]`; 0 in padding rows.
struct Terms {
    a: Tensor,
    b: Tensor,
    s: Tensor,
    silu: Tensor,
    weight: Tensor,
}

impl Terms {
    fn new(inputs: &Inputs, rounding: &mut Rounding) -> Result<Self> {
        inputs.check()?;
        let a = clamp(&inputs.without_padding(&inputs.gate)?, f64::NEG_INFINITY, inputs.limit)?;
        let b = clamp(&inputs.without_padding(&inputs.up)?, -inputs.limit, inputs.limit)?;
        let s = rounding.sigmoid_f32(&a)?;
        let silu = rounding.f32(&(&a * &s)?)?;
        let weight = inputs.weight.as_ref().map_or_else(|| a.narrow(1, 0, 1)?.ones_like(), |w| w.unsqueeze(1))?;
        Ok(Self { a, b, s, silu, weight: inputs.without_padding(&weight)? })
    }
}

impl Inputs {
    fn without_padding(&self, rows: &Tensor) -> Result<Tensor> {
        let Some(positions) = &self.pos_to_token_topk else { return Ok(rows.clone()) };
        unless(&positions.lt(0.0)?.unsqueeze(1)?.broadcast_as(rows.shape())?, rows, 0.0)
    }

    fn check(&self) -> Result<()> {
        let rows = ["num_rows", "width"];
        let of_rows = [("weight", &self.weight), ("pos_to_token_topk", &self.pos_to_token_topk)];
        let of_rows = of_rows.map(|(name, tensor)| (name, tensor.as_ref(), &rows[..1]));
        let of_elements = [("gate", Some(&self.gate), &rows[..]), ("up", Some(&self.up), &rows[..])];
        let [_, width] = extents(rows, &[of_elements, of_rows].concat())?;
        require_that("width", width, width > 0, "a row has at least one channel")?;
        require_that("limit", self.limit, self.limit > 0.0 && self.limit.is_finite(), "it must be positive and finite")
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within, dot,
        dot_of_magnitudes, f64_tensor,
    };
    use crate::{Error, Precision};

    fn case(seed: u64, num_rows: usize, width: usize, weighted: bool) -> (Inputs, Tensor) {
        let mut draw = Draw::new(seed);
        let (gate, up) = (draw.bf16(&[num_rows, width], 2.0), draw.bf16(&[num_rows, width], 2.0));
        let weight = weighted.then(|| draw.bf16(&[num_rows], 1.0));
        let dy = draw.bf16(&[num_rows, width], 1.0);
        (Inputs { gate, up, weight, pos_to_token_topk: None, limit: 2.5 }, dy)
    }

    /// Automatic differentiation of the exact [`forward`].
    fn backward_autograd(inputs: &Inputs, dy: &Tensor) -> Result<Gradients> {
        let [gate, up] = [&inputs.gate, &inputs.up].map(|tensor| Var::from_tensor(tensor).expect("a variable"));
        let weight = inputs.weight.as_ref().map(Var::from_tensor).transpose()?;
        let variables = Inputs {
            gate: gate.as_tensor().clone(),
            up: up.as_tensor().clone(),
            weight: weight.as_ref().map(|weight| weight.as_tensor().clone()),
            ..inputs.clone()
        };
        let gradients = (forward(&variables, &mut Rounding::exact())? * dy)?.sum_all()?.backward()?;
        let of = |variable: &Var| gradients.get(variable).cloned().map_or_else(|| variable.zeros_like(), Ok);
        Ok(Gradients { dgate: of(&gate)?, dup: of(&up)?, dweight: weight.as_ref().map(of).transpose()? })
    }

    /// `count` roundings of f64 in each of two evaluations, relative to the magnitude of the largest intermediate.
    fn bound(magnitude: &Tensor, count: f64) -> Tensor {
        magnitude.abs().and_then(|t| t * (2.0 * UNIT_ROUNDOFF * count)).expect("scaling")
    }

    /// Of the gradients with every term by magnitude: `1 + |a| (1 - s)` instead of `1 + a (1 - s)`. An element takes
    /// fewer than 16 roundings, and dweight one more for each term of its sum.
    fn bounds(inputs: &Inputs, dy: &Tensor) -> Result<Gradients> {
        let Terms { a, b, s, silu, weight } = Terms::new(inputs, &mut Rounding::exact())?;
        let g = dy.broadcast_mul(&weight)?.abs()?;
        let slope = (&s * ((a.abs()? * s.affine(-1.0, 1.0)?)? + 1.0)?)?;
        let terms = ((dy * &silu)? * &b)?.abs()?.sum(1)?;
        Ok(Gradients {
            dgate: bound(&((&g * &b)? * slope)?, 16.0),
            dup: bound(&(g * silu)?, 16.0),
            dweight: Some(bound(&terms, 16.0 + a.dim(1)? as f64)),
        })
    }

    #[test]
    fn explicit_backward_equals_autograd_also_on_the_limit() -> Result<()> {
        for (seed, num_rows, width, weighted) in [(1, 1, 1, true), (2, 7, 37, true), (3, 5, 64, false)] {
            let (mut inputs, dy) = case(seed, num_rows, width, weighted);
            let mut gate = values(&inputs.gate)?;
            let mut up = values(&inputs.up)?;
            let special = [2.5, -2.5, 2.5 + 2f64.powi(-50), 2.5 - 2f64.powi(-50), -1000.0, 1000.0, 0.0];
            gate.iter_mut().step_by(3).enumerate().for_each(|(i, x)| *x = special[i % 7]);
            up.iter_mut().step_by(2).enumerate().for_each(|(i, x)| *x = special[i % 7]);
            inputs.gate = f64_tensor(&gate, &[num_rows, width]);
            inputs.up = f64_tensor(&up, &[num_rows, width]);
            let positions: Vec<f64> = (0..num_rows).map(|row| if row % 3 == 2 { -1.0 } else { 7.0 }).collect();
            inputs.pos_to_token_topk = Some(f64_tensor(&positions, &[num_rows]));
            let explicit = backward(&inputs, &dy, &mut Rounding::exact())?;
            let automatic = backward_autograd(&inputs, &dy)?;
            let bound = bounds(&inputs, &dy)?;
            assert_within("dgate", &explicit.dgate, &automatic.dgate, &bound.dgate);
            assert_within("dup", &explicit.dup, &automatic.dup, &bound.dup);
            assert_eq!(explicit.dweight.is_some(), weighted);
            if let (Some(a), Some(b)) = (&explicit.dweight, &automatic.dweight) {
                assert_within("dweight", a, b, &bound.dweight.unwrap());
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let (inputs, dy) = case(5, 6, 40, true);
        // Half way between two numbers of bf16: no element comes within a step of the limit, where the clamps bend.
        let inputs = Inputs { limit: 2.5 + 2f64.powi(-7), ..inputs };
        let gradients = backward(&inputs, &dy, &mut Rounding::exact())?;
        let mut draw = Draw::new(6);
        let [vgate, vup] = [draw.normal(&[6, 40], 1.0), draw.normal(&[6, 40], 1.0)];
        let vweight = draw.normal(&[6], 1.0);
        let weight = inputs.weight.clone().unwrap();
        let objective = |h: f64| -> Result<f64> {
            let (gate, up) = ((&inputs.gate + (&vgate * h)?)?, (&inputs.up + (&vup * h)?)?);
            let moved = Inputs { gate, up, weight: Some((&weight + (&vweight * h)?)?), ..inputs.clone() };
            Ok(dot(&forward(&moved, &mut Rounding::exact())?, &dy))
        };
        let y = forward(&inputs, &mut Rounding::exact())?;
        let noise = (16.0 + 240.0) * UNIT_ROUNDOFF * dot_of_magnitudes(&dy, &y);
        let claimed =
            dot(&gradients.dgate, &vgate) + dot(&gradients.dup, &vup) + dot(&gradients.dweight.unwrap(), &vweight);
        assert_directional_derivative("swiglu", objective, 1.0, noise, claimed)
    }

    /// One row of these gates and ups at limit 10, with `dy` of ones: y, dgate, dup.
    fn row(gate: &[f64], up: &[f64]) -> Result<[Vec<f64>; 3]> {
        let shape = [1, gate.len()];
        let (gate, up) = (f64_tensor(gate, &shape), f64_tensor(up, &shape));
        let inputs = Inputs { gate, up, weight: None, pos_to_token_topk: None, limit: 10.0 };
        let y = forward(&inputs, &mut Rounding::exact())?;
        let gradients = backward(&inputs, &y.ones_like()?, &mut Rounding::exact())?;
        Ok([values(&y)?, values(&gradients.dgate)?, values(&gradients.dup)?])
    }

    #[test]
    fn the_gate_is_clamped_from_above_only_and_equality_passes_the_gradient() -> Result<()> {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let slope = |x: f64| (1.0 + (-x).exp()).recip() * (1.0 + x * (1.0 + x.exp()).recip());
        let close = |a: f64, b: f64| (a - b).abs() <= 8.0 * f64::EPSILON * b.abs();
        let [y, dgate, dup] = row(&[10.0, 10.0625, -20.0, 3.0, 3.0, 3.0], &[1.0, 1.0, 1.0, 10.0, -10.0, -10.0625])?;
        let expected = [silu(10.0), silu(10.0), silu(-20.0), 10.0 * silu(3.0), -10.0 * silu(3.0), -10.0 * silu(3.0)];
        assert!(y.iter().zip(expected).all(|(&a, b)| close(a, b)), "{y:?} against {expected:?}");
        assert!(close(dgate[0], slope(10.0)) && dgate[1] == 0.0 && close(dgate[2], slope(-20.0)), "{dgate:?}");
        assert!(close(dup[3], silu(3.0)) && close(dup[4], silu(3.0)) && dup[5] == 0.0, "{dup:?}");
        Ok(())
    }

    #[test]
    fn infinities_are_clamped_and_nan_stays() -> Result<()> {
        let inf = f64::INFINITY;
        let [y, dgate, dup] = row(&[inf, 10.0, 10.0, f64::NAN, 1.0, -inf], &[10.0, inf, -inf, 1.0, f64::NAN, 1.0])?;
        let largest = 100.0 / (1.0 + (-10f64).exp());
        // Two orders of evaluation, each an exponential, a sum, a quotient and two products.
        let bound = 2.0 * 5.0 * UNIT_ROUNDOFF * largest;
        assert!((y[0] - largest).abs() <= bound && y[0] == y[1] && y[0] == -y[2], "{y:?}");
        assert!(dgate[0] == 0.0 && dup[1] == 0.0 && dup[2] == 0.0, "{dgate:?} {dup:?}");
        // The product -inf * 0 of the formula is NaN too.
        assert!((3..6).all(|i| y[i].is_nan() && dgate[i].is_nan()) && dup[3].is_nan());
        Ok(())
    }

    #[test]
    fn padding_rows_are_zero_whatever_they_hold() -> Result<()> {
        let nan = |shape: &[usize]| Tensor::full(f64::NAN, shape, &candle_core::Device::Cpu);
        let inputs = Inputs {
            gate: nan(&[2, 3])?,
            up: nan(&[2, 3])?,
            weight: Some(nan(&[2])?),
            pos_to_token_topk: Some(f64_tensor(&[-1.0, f64::from(i32::MIN)], &[2])),
            limit: 10.0,
        };
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let rounding = &mut Rounding::new(precision);
            assert_eq!(values(&forward(&inputs, rounding)?)?, [0.0; 6]);
            let Gradients { dgate, dup, dweight } = backward(&inputs, &nan(&[2, 3])?, rounding)?;
            assert_eq!((values(&dgate)?, values(&dup)?), (vec![0.0; 6], vec![0.0; 6]));
            assert_eq!(values(&dweight.unwrap())?, [0.0; 2]);
        }
        Ok(())
    }

    #[test]
    fn no_rows_are_a_legal_input_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let (inputs, dy) = case(7, 0, 8, true);
            let rounding = &mut Rounding::new(precision);
            assert_eq!(forward(&inputs, rounding)?.dims(), [0, 8]);
            assert_eq!(backward(&inputs, &dy, rounding)?.dweight.unwrap().dims(), [0]);
        }
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let (inputs, dy) = case(10, 2, 4, true);
        let exact = &mut Rounding::exact();
        let flat = Inputs { gate: inputs.gate.flatten_all().unwrap(), ..inputs.clone() };
        assert!(matches!(forward(&flat, exact), Err(Error::Shape { argument: "gate", .. })));
        let narrow = Inputs { up: inputs.up.narrow(1, 0, 3).unwrap(), ..inputs.clone() };
        assert!(matches!(forward(&narrow, exact), Err(Error::Shape { argument: "up", .. })));
        let scalar = Inputs { weight: Some(f64_tensor(&[1.0], &[1])), ..inputs.clone() };
        assert!(matches!(forward(&scalar, exact), Err(Error::Shape { argument: "weight", .. })));
        let short = Inputs { pos_to_token_topk: Some(f64_tensor(&[0.0], &[1])), ..inputs.clone() };
        assert!(matches!(forward(&short, exact), Err(Error::Shape { argument: "pos_to_token_topk", .. })));
        for limit in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let wrong = Inputs { limit, ..inputs.clone() };
            assert!(matches!(forward(&wrong, exact), Err(Error::Value { argument: "limit", .. })));
        }
        let empty = Inputs { gate: f64_tensor(&[], &[2, 0]), up: f64_tensor(&[], &[2, 0]), ..inputs.clone() };
        assert!(matches!(forward(&empty, exact), Err(Error::Value { argument: "width", .. })));
        let half = dy.narrow(0, 0, 1).unwrap();
        assert!(matches!(backward(&inputs, &half, exact), Err(Error::Shape { argument: "dy", .. })));
        let single = Inputs { gate: inputs.gate.to_dtype(candle_core::DType::F32).unwrap(), ..inputs };
        assert!(matches!(forward(&single, exact), Err(Error::DType { argument: "gate", .. })));
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let (inputs, dy) = case(11, 16, 24, true);
        let run = |precision| -> Result<[Tensor; 3]> {
            let rounding = &mut Rounding::new(precision);
            let y = forward(&inputs, rounding)?;
            let gradients = backward(&inputs, &dy, rounding)?;
            Ok([y, gradients.dgate, gradients.dweight.unwrap()])
        };
        let runs = (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        let exact = run(Precision::Exact)?;
        for (i, what) in ["y", "dgate", "dweight"].into_iter().enumerate() {
            let runs: Vec<Tensor> = runs.iter().map(|run| run[i].clone()).collect();
            // The rows share no intermediate but that of clamped gates.
            assert_unbiased(what, &exact[i], &runs, 16);
        }
        Ok(())
    }

    /// What an expert computes around SwiGLU, and its gradients with respect to hidden states and weight.
    struct Expert {
        out: Tensor,
        dhidden: Tensor,
        dgate_up: Tensor,
        dweight: Tensor,
    }

    /// `hidden` and `dout` are `[num_rows, channels]`, `gate_up` `[2 * width, channels]`, `down` `[channels, width]`.
    fn expert(
        hidden: &Tensor,
        gate_up: &Tensor,
        down: &Tensor,
        weight: &Tensor,
        dout: &Tensor,
        limit: f64,
    ) -> Result<Expert> {
        let width = down.dim(1)?;
        let both = hidden.matmul(&gate_up.t()?)?;
        let (gate, up) = (both.narrow(1, 0, width)?.contiguous()?, both.narrow(1, width, width)?.contiguous()?);
        let inputs = Inputs { gate, up, weight: Some(weight.clone()), pos_to_token_topk: None, limit };
        let y = forward(&inputs, &mut Rounding::exact())?;
        let gradients = backward(&inputs, &dout.matmul(down)?, &mut Rounding::exact())?;
        let dboth = Tensor::cat(&[&gradients.dgate, &gradients.dup], 1)?;
        Ok(Expert {
            out: y.matmul(&down.t()?)?,
            dhidden: dboth.matmul(gate_up)?,
            dgate_up: dboth.t()?.matmul(hidden)?,
            dweight: gradients.dweight.expect("there is a weight"),
        })
    }

    /// Agreement up to the roundings of sums of at most a few hundred terms of the tensor's own size, in f64.
    fn assert_close(what: &str, actual: &Tensor, golden: &Golden, key: &str) -> Result<()> {
        let expected = golden.f64(key);
        let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
        let allowed = ((golden.storage_error(key) * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
        assert_within(&format!("{what} {key}"), &actual.reshape(expected.shape())?, &expected, &allowed);
        Ok(())
    }

    #[test]
    fn golden_shared_experts_agree() -> Result<()> {
        for (name, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0)] {
            let golden = Golden::load(&format!("shared_expert__{name}"));
            let parameter = |which: &str| golden.f64(&format!("param.shared_experts.{which}_proj.weight"));
            let (gate, up, down) = (parameter("gate"), parameter("up"), parameter("down"));
            let channels = gate.dim(1)?;
            let rows = |key: &str| golden.f64(key).reshape(((), channels));
            let (hidden, dout) = (rows("in.hidden")?, rows("gout.y")?);
            let ones = hidden.narrow(1, 0, 1)?.squeeze(1)?.ones_like()?;
            let result = expert(&hidden, &Tensor::cat(&[&gate, &up], 0)?, &down, &ones, &dout, limit)?;
            assert_close(name, &result.out, &golden, "out.y")?;
            assert_close(name, &result.dhidden, &golden, "grad.in.hidden")?;
            for (number, which) in ["gate", "up"].into_iter().enumerate() {
                let part = result.dgate_up.narrow(0, number * gate.dim(0)?, gate.dim(0)?)?;
                assert_close(name, &part, &golden, &format!("grad.param.shared_experts.{which}_proj.weight"))?;
            }
        }
        Ok(())
    }

    #[test]
    fn golden_routed_experts_agree() -> Result<()> {
        for (name, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0), ("one", 1.0)] {
            let golden = Golden::load(&format!("experts__{name}"));
            let (hidden, dout) = (golden.f64("in.hidden"), golden.f64("gout.y"));
            let (gate_up, down) = (golden.f64("param.experts.gate_up_proj"), golden.f64("param.experts.down_proj"));
            let (topk, chosen) = (golden.raw("in.top_k_index").dim(1)?, values(&golden.f64("in.top_k_index"))?);
            let weights = golden.f64("in.top_k_weights").flatten_all()?;
            let (mut out, mut dhidden) = (hidden.zeros_like()?, hidden.zeros_like()?);
            let mut dweight = vec![0.0; chosen.len()];
            for (slot, &number) in chosen.iter().enumerate() {
                let (token, number) = (slot / topk, number as usize);
                let (row, drow) = (hidden.narrow(0, token, 1)?, dout.narrow(0, token, 1)?);
                let weight = weights.narrow(0, slot, 1)?;
                let result = expert(&row, &gate_up.get(number)?, &down.get(number)?, &weight, &drow, limit)?;
                let at = |sum: &Tensor, row: &Tensor| sum.slice_assign(&[token..token + 1, 0..row.dim(1)?], row);
                out = at(&out, &(out.narrow(0, token, 1)? + result.out)?)?;
                dhidden = at(&dhidden, &(dhidden.narrow(0, token, 1)? + result.dhidden)?)?;
                dweight[slot] = values(&result.dweight)?[0];
            }
            assert_close(name, &out, &golden, "out.y")?;
            assert_close(name, &dhidden, &golden, "grad.in.hidden")?;
            assert_close(name, &f64_tensor(&dweight, &[chosen.len()]), &golden, "grad.in.top_k_weights")?;
        }
        Ok(())
    }
}
