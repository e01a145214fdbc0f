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
//! The gate has no lower clamp. Only a value that exceeds the limit is clamped: equality passes the
//! gradient on, and so does NaN. Padding rows are zero in y and in every gradient, whatever they
//! hold.
//!
//! # Rounding points
//!
//! Each product, sum and difference is an fp32 value. The exponential and the quotient are
//! approximated in fp32, and dweight is summed in fp32. Results are rounded once to the type in
//! which they are stored.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;
use crate::select::{clamp, unless};

/// `y` `[num_rows, width]`, stored in the type of `gate`, for these inputs:
///
/// - `gate`, `up` `[num_rows, width]`, stored in bf16 or f32, clamped by the positive `limit`;
/// - `weight` `[num_rows]`, stored in f32: the routing weight; absent for the shared expert;
/// - `pos_to_token_topk` `[num_rows]`, stored in i32: negative for a padding row; absent where no
///   row is padding.
pub fn forward(inputs: &Named, limit: f64, rounding: &mut Rounding) -> Result<Named> {
    let [_, b, _, silu, weight] = terms(inputs, limit, rounding)?;
    let y = rounding.f32(&(silu * b)?)?;
    Ok(Named::new().with("y", rounding.f32(&y.broadcast_mul(&weight)?)?))
}

/// `dgate`, `dup` and, where a weight is present, `dweight`. Each has the shape of its operand; the
/// first two are stored in the type of `gate`, the last in f32. The inputs are those of [`forward`]
/// and `dy`, of the shape and type of y.
pub fn backward(inputs: &Named, limit: f64, rounding: &mut Rounding) -> Result<Named> {
    let [a, b, s, silu, weight] = terms(inputs, limit, rounding)?;
    let dy = without_padding(inputs, inputs.tensor("dy")?)?;
    let g = rounding.f32(&dy.broadcast_mul(&weight)?)?;
    let rising = rounding.f32(&s.affine(-1.0, 1.0)?)?;
    let rising = rounding.f32(&(a * rising)?)?;
    let rising = rounding.f32(&(rising + 1.0)?)?;
    let slope = rounding.f32(&(s * rising)?)?;
    let dgate = rounding.f32(&(&g * &b)?)?;
    let dgate = rounding.f32(&(dgate * slope)?)?;
    let dgate = unless(&inputs.tensor("gate")?.gt(limit)?, &dgate, 0.0)?;
    let dup = rounding.f32(&(g * &silu)?)?;
    let dup = unless(&inputs.tensor("up")?.abs()?.gt(limit)?, &dup, 0.0)?;
    let activation = rounding.f32(&(silu * b)?)?;
    let terms = rounding.f32(&(dy * activation)?)?;
    let dweight = inputs.get("weight").map(|_| rounding.sum_f32(&terms, 1)).transpose()?;
    Ok(Named::new().with("dgate", dgate).with("dup", dup).maybe("dweight", dweight))
}

/// Values that both directions compute: a, b, s and a s `[num_rows, width]` and the weight
/// `[num_rows, 1]`; 0 in padding rows.
fn terms(inputs: &Named, limit: f64, rounding: &mut Rounding) -> Result<[Tensor; 5]> {
    let rows = ["num_rows", "width"];
    let tensors: [(&[_], &[_]); 2] =
        [(&["gate", "up", "dy"], &rows), (&["weight", "pos_to_token_topk"], &rows[..1])];
    let [_, width] = inputs.extents(rows, &tensors)?;
    require_that("width", width, width > 0, "a row has at least one channel")?;
    require_that(
        "limit",
        limit,
        limit > 0.0 && limit.is_finite(),
        "it must be positive and finite",
    )?;
    let a = clamp(&without_padding(inputs, inputs.tensor("gate")?)?, f64::NEG_INFINITY, limit)?;
    let b = clamp(&without_padding(inputs, inputs.tensor("up")?)?, -limit, limit)?;
    let s = rounding.sigmoid_f32(&a)?;
    let silu = rounding.f32(&(&a * &s)?)?;
    let weight =
        inputs.get("weight").map_or_else(|| a.narrow(1, 0, 1)?.ones_like(), |w| w.unsqueeze(1))?;
    Ok([a, b, s, silu, without_padding(inputs, &weight)?])
}

/// `rows` with padding rows set to zero.
fn without_padding(inputs: &Named, rows: &Tensor) -> Result<Tensor> {
    let Some(positions) = inputs.get("pos_to_token_topk") else { return Ok(rows.clone()) };
    unless(&positions.lt(0.0)?.unsqueeze(1)?.broadcast_as(rows.shape())?, rows, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within,
        differentiated, dot, dot_of_magnitudes, f64_tensor,
    };
    use crate::{Error, Precision};

    const LIMIT: f64 = 2.5;

    fn case(seed: u64, num_rows: usize, width: usize, weighted: bool) -> Named {
        let mut draw = Draw::new(seed);
        let gate = draw.bf16(&[num_rows, width], 2.0);
        let named = Named::new().with("gate", gate).with("up", draw.bf16(&[num_rows, width], 2.0));
        let named = named.maybe("weight", weighted.then(|| draw.bf16(&[num_rows], 1.0)));
        named.with("dy", draw.bf16(&[num_rows, width], 1.0))
    }

    /// Automatic differentiation of the exact [`forward`].
    fn backward_autograd(inputs: &Named) -> Result<Named> {
        differentiated(
            inputs,
            &[("gate", "dgate"), ("up", "dup"), ("weight", "dweight")],
            |inputs| {
                Ok((forward(inputs, LIMIT, &mut Rounding::exact())?.tensor("y")?
                    * inputs.tensor("dy")?)?)
            },
        )
    }

    /// `count` roundings of f64 in each of two evaluations, relative to the magnitude of the
    /// largest intermediate.
    fn bound(magnitude: &Tensor, count: f64) -> Tensor {
        magnitude.abs().and_then(|t| t * (2.0 * UNIT_ROUNDOFF * count)).expect("scaling")
    }

    /// Bounds of the gradients, with every term replaced by its magnitude: `1 + |a| (1 - s)`
    /// instead of `1 + a (1 - s)`. An element takes fewer than 16 roundings, and dweight one more
    /// for each term of its sum.
    fn bounds(inputs: &Named) -> Result<Named> {
        let [a, b, s, silu, weight] = terms(inputs, LIMIT, &mut Rounding::exact())?;
        let dy = inputs.tensor("dy")?;
        let g = dy.broadcast_mul(&weight)?.abs()?;
        let slope = (&s * ((a.abs()? * s.affine(-1.0, 1.0)?)? + 1.0)?)?;
        let terms = ((dy * &silu)? * &b)?.abs()?.sum(1)?;
        let dgate = bound(&((&g * &b)? * slope)?, 16.0);
        let dweight = bound(&terms, 16.0 + a.dim(1)? as f64);
        Ok(Named::new()
            .with("dgate", dgate)
            .with("dup", bound(&(g * silu)?, 16.0))
            .with("dweight", dweight))
    }

    #[test]
    fn explicit_backward_equals_autograd_also_on_the_limit() -> Result<()> {
        for (seed, num_rows, width, weighted) in
            [(1, 1, 1, true), (2, 7, 37, true), (3, 5, 64, false)]
        {
            let inputs = case(seed, num_rows, width, weighted);
            let mut gate = values(inputs.tensor("gate")?)?;
            let mut up = values(inputs.tensor("up")?)?;
            let special =
                [2.5, -2.5, 2.5 + 2f64.powi(-50), 2.5 - 2f64.powi(-50), -1000.0, 1000.0, 0.0];
            gate.iter_mut().step_by(3).enumerate().for_each(|(i, x)| *x = special[i % 7]);
            up.iter_mut().step_by(2).enumerate().for_each(|(i, x)| *x = special[i % 7]);
            let positions: Vec<f64> =
                (0..num_rows).map(|row| if row % 3 == 2 { -1.0 } else { 7.0 }).collect();
            let inputs = inputs.with("pos_to_token_topk", f64_tensor(&positions, &[num_rows]));
            let inputs = inputs.with("gate", f64_tensor(&gate, &[num_rows, width]));
            let inputs = inputs.with("up", f64_tensor(&up, &[num_rows, width]));
            let explicit = backward(&inputs, LIMIT, &mut Rounding::exact())?;
            let (automatic, bound) = (backward_autograd(&inputs)?, bounds(&inputs)?);
            assert_eq!(explicit.get("dweight").is_some(), weighted);
            for (name, gradient) in explicit.into_tensors() {
                assert_within(name, &gradient, automatic.tensor(name)?, bound.tensor(name)?);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(5, 6, 40, true);
        // Halfway between two bf16 values: no element comes within a step of the limit, where the
        // derivative of the clamps jumps.
        let limit = LIMIT + 2f64.powi(-7);
        let gradients = backward(&inputs, limit, &mut Rounding::exact())?;
        let mut draw = Draw::new(6);
        let shapes = [
            ("gate", "dgate", vec![6, 40]),
            ("up", "dup", vec![6, 40]),
            ("weight", "dweight", vec![6]),
        ];
        let directions =
            shapes.map(|(name, gradient, shape)| (name, gradient, draw.normal(&shape, 1.0)));
        let objective = |h: f64| -> Result<f64> {
            let moved = directions.iter().try_fold(
                inputs.clone(),
                |moved, (name, _, direction)| -> Result<_> {
                    Ok(moved.with(name, (inputs.tensor(name)? + (direction * h)?)?))
                },
            )?;
            Ok(dot(
                forward(&moved, limit, &mut Rounding::exact())?.tensor("y")?,
                inputs.tensor("dy")?,
            ))
        };
        let y = forward(&inputs, limit, &mut Rounding::exact())?;
        let noise = (16.0 + 240.0)
            * UNIT_ROUNDOFF
            * dot_of_magnitudes(inputs.tensor("dy")?, y.tensor("y")?);
        let along = |(_, gradient, direction): &(_, &'static str, Tensor)| {
            Ok(dot(gradients.tensor(gradient)?, direction))
        };
        let claimed = directions.iter().map(along).sum::<Result<f64>>()?;
        assert_directional_derivative("swiglu", objective, 1.0, noise, claimed)
    }

    /// One row of these gates and ups at limit 10, with `dy` of ones: y, dgate, dup.
    fn row(gate: &[f64], up: &[f64]) -> Result<[Vec<f64>; 3]> {
        let shape = [1, gate.len()];
        let inputs =
            Named::new().with("gate", f64_tensor(gate, &shape)).with("up", f64_tensor(up, &shape));
        let y = forward(&inputs, 10.0, &mut Rounding::exact())?;
        let y = y.tensor("y")?;
        let gradients = backward(&inputs.with("dy", y.ones_like()?), 10.0, &mut Rounding::exact())?;
        Ok([values(y)?, values(gradients.tensor("dgate")?)?, values(gradients.tensor("dup")?)?])
    }

    #[test]
    fn the_gate_is_clamped_from_above_only_and_equality_passes_the_gradient() -> Result<()> {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let slope = |x: f64| (1.0 + (-x).exp()).recip() * (1.0 + x * (1.0 + x.exp()).recip());
        let close = |a: f64, b: f64| (a - b).abs() <= 8.0 * f64::EPSILON * b.abs();
        let [y, dgate, dup] =
            row(&[10.0, 10.0625, -20.0, 3.0, 3.0, 3.0], &[1.0, 1.0, 1.0, 10.0, -10.0, -10.0625])?;
        let expected = [
            silu(10.0),
            silu(10.0),
            silu(-20.0),
            10.0 * silu(3.0),
            -10.0 * silu(3.0),
            -10.0 * silu(3.0),
        ];
        assert!(y.iter().zip(expected).all(|(&a, b)| close(a, b)), "{y:?} against {expected:?}");
        assert!(
            close(dgate[0], slope(10.0)) && dgate[1] == 0.0 && close(dgate[2], slope(-20.0)),
            "{dgate:?}"
        );
        assert!(close(dup[3], silu(3.0)) && close(dup[4], silu(3.0)) && dup[5] == 0.0, "{dup:?}");
        Ok(())
    }

    #[test]
    fn infinities_are_clamped_and_nan_stays() -> Result<()> {
        let inf = f64::INFINITY;
        let [y, dgate, dup] =
            row(&[inf, 10.0, 10.0, f64::NAN, 1.0, -inf], &[10.0, inf, -inf, 1.0, f64::NAN, 1.0])?;
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
        let inputs = Named::new()
            .with("gate", nan(&[2, 3])?)
            .with("up", nan(&[2, 3])?)
            .with("weight", nan(&[2])?);
        let inputs =
            inputs.with("pos_to_token_topk", f64_tensor(&[-1.0, f64::from(i32::MIN)], &[2]));
        let inputs = inputs.with("dy", nan(&[2, 3])?);
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let rounding = &mut Rounding::new(precision);
            assert_eq!(values(forward(&inputs, LIMIT, rounding)?.tensor("y")?)?, [0.0; 6]);
            let gradients = backward(&inputs, LIMIT, rounding)?;
            for (name, zeros) in [("dgate", 6), ("dup", 6), ("dweight", 2)] {
                assert_eq!(values(gradients.tensor(name)?)?, vec![0.0; zeros], "{name}");
            }
        }
        Ok(())
    }

    #[test]
    fn no_rows_are_a_legal_input_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let inputs = case(7, 0, 8, true);
            let rounding = &mut Rounding::new(precision);
            assert_eq!(forward(&inputs, LIMIT, rounding)?.tensor("y")?.dims(), [0, 8]);
            assert_eq!(backward(&inputs, LIMIT, rounding)?.tensor("dweight")?.dims(), [0]);
        }
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let inputs = case(10, 2, 4, true);
        let gate = inputs.tensor("gate").unwrap();
        for (argument, wrong) in [
            ("gate", gate.flatten_all().unwrap()),
            ("up", gate.narrow(1, 0, 3).unwrap()),
            ("weight", f64_tensor(&[1.0], &[1])),
            ("pos_to_token_topk", f64_tensor(&[0.0], &[1])),
            ("dy", gate.narrow(0, 0, 1).unwrap()),
        ] {
            let refused =
                backward(&inputs.clone().with(argument, wrong), LIMIT, &mut Rounding::exact());
            assert!(
                matches!(refused, Err(Error::Shape { argument: a, .. }) if a == argument),
                "{argument}: {refused:?}"
            );
        }
        let refused =
            |inputs: Named, limit| forward(&inputs, limit, &mut Rounding::exact()).unwrap_err();
        for limit in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(
                refused(inputs.clone(), limit),
                Error::Value { argument: "limit", .. }
            ));
        }
        let empty = Named::new()
            .with("gate", f64_tensor(&[], &[2, 0]))
            .with("up", f64_tensor(&[], &[2, 0]));
        assert!(matches!(refused(empty, LIMIT), Error::Value { argument: "width", .. }));
        let gate_alone = Named::new().with("gate", gate.clone());
        assert!(matches!(refused(gate_alone, LIMIT), Error::Value { argument: "up", .. }));
        let single = inputs.clone().with("gate", gate.to_dtype(candle_core::DType::F32).unwrap());
        assert!(matches!(refused(single, LIMIT), Error::DType { argument: "gate", .. }));
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let inputs = case(11, 16, 24, true);
        let run = |precision| -> Result<[Tensor; 3]> {
            let rounding = &mut Rounding::new(precision);
            let y = forward(&inputs, LIMIT, rounding)?.tensor("y")?.clone();
            let gradients = backward(&inputs, LIMIT, rounding)?;
            Ok([y, gradients.tensor("dgate")?.clone(), gradients.tensor("dweight")?.clone()])
        };
        let runs =
            (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        let exact = run(Precision::Exact)?;
        for (i, what) in ["y", "dgate", "dweight"].into_iter().enumerate() {
            let runs: Vec<Tensor> = runs.iter().map(|run| run[i].clone()).collect();
            // The rows share only the intermediate of clamped gates.
            assert_unbiased(what, &exact[i], &runs, 16);
        }
        Ok(())
    }

    /// The computation of an expert around SwiGLU, and its gradients with respect to hidden states
    /// and weight.
    struct Expert {
        out: Tensor,
        dhidden: Tensor,
        dgate_up: Tensor,
        dweight: Tensor,
    }

    /// `hidden` and `dout` are `[num_rows, channels]`, `gate_up` `[2 * width, channels]`, `down`
    /// `[channels, width]`.
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
        let (gate, up) =
            (both.narrow(1, 0, width)?.contiguous()?, both.narrow(1, width, width)?.contiguous()?);
        let inputs = Named::new().with("gate", gate).with("up", up).with("weight", weight.clone());
        let inputs = inputs.with("dy", dout.matmul(down)?);
        let y = forward(&inputs, limit, &mut Rounding::exact())?;
        let gradients = backward(&inputs, limit, &mut Rounding::exact())?;
        let dboth = Tensor::cat(&[gradients.tensor("dgate")?, gradients.tensor("dup")?], 1)?;
        Ok(Expert {
            out: y.tensor("y")?.matmul(&down.t()?)?,
            dhidden: dboth.matmul(gate_up)?,
            dgate_up: dboth.t()?.matmul(hidden)?,
            dweight: gradients.tensor("dweight")?.clone(),
        })
    }

    /// Agreement up to the roundings of sums of at most a few hundred terms of the tensor's own
    /// size, in f64.
    fn assert_close(what: &str, actual: &Tensor, golden: &Golden, key: &str) -> Result<()> {
        let expected = golden.f64(key);
        let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
        let allowed = ((golden.storage_error(key) * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
        assert_within(
            &format!("{what} {key}"),
            &actual.reshape(expected.shape())?,
            &expected,
            &allowed,
        );
        Ok(())
    }

    #[test]
    fn golden_shared_experts_agree() -> Result<()> {
        for (name, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0)] {
            let golden = Golden::load(&format!("shared_expert__{name}"));
            let parameter =
                |which: &str| golden.f64(&format!("param.shared_experts.{which}_proj.weight"));
            let (gate, up, down) = (parameter("gate"), parameter("up"), parameter("down"));
            let channels = gate.dim(1)?;
            let rows = |key: &str| golden.f64(key).reshape(((), channels));
            let (hidden, dout) = (rows("in.hidden")?, rows("gout.y")?);
            let ones = hidden.narrow(1, 0, 1)?.squeeze(1)?.ones_like()?;
            let result =
                expert(&hidden, &Tensor::cat(&[&gate, &up], 0)?, &down, &ones, &dout, limit)?;
            assert_close(name, &result.out, &golden, "out.y")?;
            assert_close(name, &result.dhidden, &golden, "grad.in.hidden")?;
            for (number, which) in ["gate", "up"].into_iter().enumerate() {
                let part = result.dgate_up.narrow(0, number * gate.dim(0)?, gate.dim(0)?)?;
                assert_close(
                    name,
                    &part,
                    &golden,
                    &format!("grad.param.shared_experts.{which}_proj.weight"),
                )?;
            }
        }
        Ok(())
    }

    #[test]
    fn golden_routed_experts_agree() -> Result<()> {
        for (name, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0), ("one", 1.0)] {
            let golden = Golden::load(&format!("experts__{name}"));
            let (hidden, dout) = (golden.f64("in.hidden"), golden.f64("gout.y"));
            let (gate_up, down) =
                (golden.f64("param.experts.gate_up_proj"), golden.f64("param.experts.down_proj"));
            let (topk, chosen) =
                (golden.raw("in.top_k_index").dim(1)?, values(&golden.f64("in.top_k_index"))?);
            let weights = golden.f64("in.top_k_weights").flatten_all()?;
            let (mut out, mut dhidden) = (hidden.zeros_like()?, hidden.zeros_like()?);
            let mut dweight = vec![0.0; chosen.len()];
            for (slot, &number) in chosen.iter().enumerate() {
                let (token, number) = (slot / topk, number as usize);
                let (row, drow) = (hidden.narrow(0, token, 1)?, dout.narrow(0, token, 1)?);
                let weight = weights.narrow(0, slot, 1)?;
                let result =
                    expert(&row, &gate_up.get(number)?, &down.get(number)?, &weight, &drow, limit)?;
                let at = |sum: &Tensor, row: &Tensor| {
                    sum.slice_assign(&[token..token + 1, 0..row.dim(1)?], row)
                };
                out = at(&out, &(out.narrow(0, token, 1)? + result.out)?)?;
                dhidden = at(&dhidden, &(dhidden.narrow(0, token, 1)? + result.dhidden)?)?;
                dweight[slot] = values(&result.dweight)?[0];
            }
            assert_close(name, &out, &golden, "out.y")?;
            assert_close(name, &dhidden, &golden, "grad.in.hidden")?;
            assert_close(
                name,
                &f64_tensor(&dweight, &[chosen.len()]),
                &golden,
                "grad.in.top_k_weights",
            )?;
        }
        Ok(())
    }
}
