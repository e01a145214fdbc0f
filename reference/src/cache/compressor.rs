//! Pools tokens into compressed entries (inference 6, training 9).
//!
//! With `C = kv`, `Z = gate` and t the position of a token in its sequence,
//!
//! ```text
//! S[t] = Z[t] + ape[t mod ratio]
//! p    = softmax over the entry's slots, of each channel apart         u = sum over slots of p C
//! y    = norm_weight u r            r = 1 / sqrt(mean(u^2) + eps)
//! z    = y with its last rope_dim channels rotated by position j ratio
//! ```
//!
//! Entry j has the slots of its own group of tokens, `[j ratio, (j + 1) ratio)`. Where the width is
//! twice head_dim, groups overlap. The own group then gives the last slots, with the second half of
//! each token. The tokens of group j - 1 come before them, with their first half; entry 0 has no
//! such slots. An incomplete group makes no entry. Row `cu_entries[i] + j` is entry j of sequence
//! i. Rows without an entry are zero, and an entry without a row is skipped.
//!
//! ```text
//! g  = dy norm_weight        du = r (g - u r^2 mean(g u))        dnorm_weight = sum over entries of dy u r
//! dC = p du                  dZ = dS = dC (C - u)                dape = sum over entries of dS
//! ```
//!
//! A half of a token that no entry pools has gradients of zero. The result of an [`Epilogue`] has
//! no gradient.
//!
//! # Rounding points
//!
//! Scores, exponentials, sums and their quotient are fp32. u is rounded to the type of the entries
//! before the norm, y before the rotation. The backward uses the rounded u in the norm, and the
//! unrounded u in `C - u`. With an epilogue, z is rounded likewise before it. Its transform is
//! rounded before it is quantized, and the quantized values are rounded to codes.

use candle_core::{D, Tensor};

use crate::error::{Result, require, require_that, wrong_shape};
use crate::format::Format;
use crate::named::Named;
use crate::precision::Rounding;
use crate::select::{max_or_nan, select, spread};
use crate::{formats::hadamard, projections::rms_norm, projections::rope, quantize};

/// Inputs of the operator.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, width]`, stored in f32; the width is head_dim, or twice that where groups
    /// overlap.
    pub kv: Tensor,
    /// As `kv`.
    pub gate: Tensor,
    /// `[ratio, width]`, stored in f32.
    pub ape: Tensor,
    /// First token of each sequence, and the end of the last one: tokens after it are padding.
    pub cu_seqlens: Vec<i32>,
    /// First row of each sequence's entries, and the end of the last one's.
    pub cu_entries: Vec<i32>,
    /// Rows of `entries`.
    pub num_entries: usize,
    /// Norm and rotation.
    pub finish: Finish,
}

/// The storage format of entries (inference 5.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// Unchanged.
    None,
    /// The channels without rotation become what e4m3 codes with scales of 64 decode to.
    Fp8,
    /// All 128 channels are transformed ([`crate::formats::hadamard`]) and become what e2m1 codes
    /// with scales of 32 decode to.
    HadamardFp4,
}

impl Epilogue {
    /// The epilogue's result for z `[num_entries, head_dim]`, whose last `rope_dim` channels are
    /// rotated, stored as `stored`.
    ///
    /// # Errors
    /// A transform of a number of channels other than 128.
    pub fn of(
        self,
        z: &Tensor,
        rope_dim: usize,
        stored: Format,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let leading = z.dim(1)? - rope_dim;
        match self {
            Self::None => Ok(z.clone()),
            Self::Fp8 if leading == 0 => Ok(z.clone()),
            Self::Fp8 => {
                let z = rounding.to(stored, z)?;
                let simulated =
                    quantize::simulated(&z.narrow(1, 0, leading)?, 64, Format::E4M3, rounding)?;
                Ok(Tensor::cat(&[simulated, z.narrow(1, leading, rope_dim)?], 1)?)
            }
            Self::HadamardFp4 => {
                let z = Named::new().with("x", rounding.to(stored, z)?);
                let y =
                    hadamard::forward(&z, hadamard::Stored::Values, rounding)?.tensor("y")?.clone();
                quantize::simulated(&rounding.to(stored, &y)?, 32, Format::E2M1, rounding)
            }
        }
    }
}

/// The steps from a pooled entry to a stored one.
#[derive(Debug, Clone)]
pub struct Finish {
    /// `[head_dim]`, stored in f32.
    pub norm_weight: Tensor,
    /// `[table_rows, rope_dim / 2]`, stored in f32; see [`rope::Inputs`].
    pub cos: Tensor,
    /// As `cos`.
    pub sin: Tensor,
    /// Added to the mean square.
    pub eps: f64,
    /// The type in which entries, and u before the norm, are stored: bf16 or f32.
    pub stored: Format,
    /// The storage format of entries.
    pub epilogue: Epilogue,
}

impl Finish {
    /// The stored entries of u `[num_entries, head_dim]` at these positions.
    pub(crate) fn entries(
        &self,
        u: &Tensor,
        positions: Vec<i64>,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let stored = rounding.to(self.stored, u)?;
        let normed = Named::new().with("x", stored).with("weight", self.norm_weight.clone());
        let y = rms_norm::forward(&normed, self.eps, rounding)?.tensor("y")?.clone();
        let rotation = self.rotation(rounding.to(self.stored, &y)?, positions)?;
        let turned = rope::forward(&rotation, rounding)?.y.squeeze(1)?;
        // Channels without rotation are rounded once.
        let (head_dim, rope_dim) = (u.dim(1)?, 2 * self.cos.dim(1)?);
        let leading = head_dim - rope_dim;
        let z = Tensor::cat(&[y.narrow(1, 0, leading)?, turned.narrow(1, leading, rope_dim)?], 1)?;
        self.epilogue.of(&z, rope_dim, self.stored, rounding)
    }

    /// The rotation of entries `[num_entries, head_dim]`.
    fn rotation(&self, x: Tensor, positions: Vec<i64>) -> Result<rope::Inputs> {
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        Ok(rope::Inputs {
            x: x.unsqueeze(1)?,
            cos,
            sin,
            positions: Some(positions),
            inverse: false,
        })
    }
}

/// An entry that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its row.
    pub row: usize,
    /// The first token of its own group.
    pub token: usize,
    /// The position of that token in its sequence.
    pub position: usize,
}

/// The entries of packed sequences, in the order of their rows.
pub fn entries_of(cu_seqlens: &[i32], cu_entries: &[i32], ratio: usize) -> Vec<Entry> {
    let sequences = cu_seqlens.windows(2).zip(cu_entries.windows(2));
    let of_sequence = |(tokens, rows): (&[i32], &[i32])| {
        let extent = |ends: &[i32]| usize::try_from(ends[1] - ends[0]).unwrap_or(0);
        let (first_token, first_row) = (tokens[0] as usize, rows[0] as usize);
        let count = (extent(tokens) / ratio).min(extent(rows));
        (0..count).map(move |j| Entry {
            row: first_row + j,
            token: first_token + j * ratio,
            position: j * ratio,
        })
    };
    sequences.flat_map(of_sequence).collect()
}

/// `entries` `[num_entries, head_dim]` and `pooled`, u of the same shape; both stored as the inputs
/// define.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Named> {
    let dims = inputs.check()?;
    let entries = dims.entries(inputs);
    let all_rows = |rows: &Tensor| {
        scattered(rows, entries.iter().map(|entry| entry.row).zip(0..), inputs.num_entries)
    };
    if entries.is_empty() {
        let none = Tensor::zeros((0, dims.head_dim), inputs.kv.dtype(), inputs.kv.device())?;
        return Ok(Named::new().with("entries", all_rows(&none)?).with("pooled", all_rows(&none)?));
    }
    let u = Pooling::of(inputs, &dims, &entries, rounding)?.pooled;
    let z = inputs.finish.entries(&u, positions(&entries), rounding)?;
    Ok(Named::new().with("entries", all_rows(&z)?).with("pooled", all_rows(&u)?))
}

/// `dkv` and `dgate`, of the shape of `kv`, `dape` and `dnorm_weight`, all stored in f32, for the
/// gradient `dentries` of `entries`. `pooled` is what a forward stored; without it u is computed
/// and rounded as in a forward.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    inputs: &Inputs,
    dentries: &Tensor,
    pooled: Option<&Tensor>,
    rounding: &mut Rounding,
) -> Result<Named> {
    let dims = inputs.check()?;
    require("dentries", dentries, &[inputs.num_entries, dims.head_dim])?;
    let entries = dims.entries(inputs);
    if entries.is_empty() {
        let zeros = |of: &Tensor| of.zeros_like();
        let named =
            Named::new().with("dkv", zeros(&inputs.kv)?).with("dgate", zeros(&inputs.gate)?);
        return Ok(named
            .with("dape", zeros(&inputs.ape)?)
            .with("dnorm_weight", zeros(&inputs.finish.norm_weight)?));
    }
    let rows = indices(entries.iter().map(|entry| entry.row), inputs)?;
    let pooling = Pooling::of(inputs, &dims, &entries, rounding)?;
    let stored = match pooled {
        Some(pooled) => pooled.index_select(&rows, 0)?,
        None => rounding.to(inputs.finish.stored, &pooling.pooled)?,
    };
    let dz = dentries.index_select(&rows, 0)?;
    let dy = rope::backward(
        &inputs.finish.rotation(dz.clone(), positions(&entries))?,
        &dz.unsqueeze(1)?,
        rounding,
    )?
    .dx
    .squeeze(1)?;
    let normed = Named::new()
        .with("x", stored)
        .with("weight", inputs.finish.norm_weight.clone())
        .with("dy", dy);
    let normed = rms_norm::backward(&normed, inputs.finish.eps, rounding)?;
    let gradients = pooling.backward(normed.tensor("dx")?, rounding)?;
    let of_tokens = |of_slots: &Tensor| of_tokens(of_slots, &dims, &entries);
    let named = Named::new()
        .with("dkv", of_tokens(&gradients.value)?)
        .with("dgate", of_tokens(&gradients.score)?);
    let dape = select(&pooling.there, &gradients.score, 0.0)?;
    let dape = beside_each_other(&rounding.sum_f32(&dape, 0)?, &dims)?;
    Ok(named.with("dape", dape).with("dnorm_weight", normed.tensor("dweight")?.clone()))
}

struct Dims {
    num_tokens: usize,
    head_dim: usize,
    ratio: usize,
    overlaps: bool,
}

impl Dims {
    fn entries(&self, inputs: &Inputs) -> Vec<Entry> {
        entries_of(&inputs.cu_seqlens, &inputs.cu_entries, self.ratio)
    }

    fn slots(&self) -> usize {
        if self.overlaps { 2 * self.ratio } else { self.ratio }
    }

    /// The token of an entry's slot, and the start of its half; none where the token is before the
    /// sequence.
    fn slot(&self, entry: &Entry, slot: usize) -> Option<(usize, usize)> {
        match (self.overlaps, slot < self.ratio) {
            (false, _) => Some((entry.token + slot, 0)),
            (true, false) => Some((entry.token + slot - self.ratio, self.head_dim)),
            (true, true) if entry.position > 0 => Some((entry.token + slot - self.ratio, 0)),
            (true, true) => None,
        }
    }
}

impl Inputs {
    fn check(&self) -> Result<Dims> {
        let of = [("kv", &self.kv), ("gate", &self.gate), ("ape", &self.ape)];
        let named = of
            .into_iter()
            .fold(Named::new(), |named, (name, tensor)| named.with(name, tensor.clone()));
        let Finish { norm_weight, cos, sin, .. } = &self.finish;
        let named = named
            .with("norm_weight", norm_weight.clone())
            .with("cos", cos.clone())
            .with("sin", sin.clone());
        let axes = ["num_tokens", "width", "ratio", "head_dim"];
        let tensors: [(&[_], &[_]); 4] = [
            (&["kv", "gate"], &["num_tokens", "width"]),
            (&["ape"], &["ratio", "width"]),
            (&["norm_weight"], &["head_dim"]),
            (&["cos", "sin"], &["table_rows", "half_rope_dim"]),
        ];
        let [num_tokens, width, ratio, head_dim] = named.extents(axes, &tensors)?;
        require_that("ratio", ratio, ratio > 0, "a group has at least one token")?;
        require_that("head_dim", head_dim, head_dim > 0, "an entry without channels has no mean")?;
        if width != head_dim && width != 2 * head_dim {
            return Err(wrong_shape("kv", "[num_tokens, head_dim or 2 head_dim]", &self.kv));
        }
        let ends = self.cu_seqlens.len();
        require_that("cu_seqlens", ends, ends > 0, "it has an end")?;
        require_that(
            "cu_entries",
            self.cu_entries.len(),
            self.cu_entries.len() == ends,
            "one for each of cu_seqlens",
        )?;
        let ordered = |ends: &[i32], most: usize| {
            ends[0] >= 0 && ends.is_sorted() && ends.last().is_some_and(|&end| end as usize <= most)
        };
        let within = "ends do not decrease and stay within the tensor";
        require_that("cu_seqlens", ends, ordered(&self.cu_seqlens, num_tokens), within)?;
        require_that("cu_entries", ends, ordered(&self.cu_entries, self.num_entries), within)?;
        Ok(Dims { num_tokens, head_dim, ratio, overlaps: width > head_dim })
    }
}

fn positions(entries: &[Entry]) -> Vec<i64> {
    entries.iter().map(|entry| entry.position as i64).collect()
}

/// A softmax over the slots of entries; all tensors but `pooled` and `inverse` are `[num_entries,
/// slots, head_dim]`.
pub(crate) struct Pooling {
    value: Tensor,
    /// exp(score - the largest of the channel).
    power: Tensor,
    /// One over the sum of the exponentials, `[num_entries, 1, head_dim]`.
    inverse: Tensor,
    /// u before it is rounded, `[num_entries, head_dim]`.
    pub pooled: Tensor,
    /// Whether a slot has a token.
    there: Tensor,
}

/// Gradients of [`Pooling`], `[num_entries, slots, head_dim]`.
struct PoolingGradients {
    value: Tensor,
    score: Tensor,
}

impl Pooling {
    fn of(
        inputs: &Inputs,
        dims: &Dims,
        entries: &[Entry],
        rounding: &mut Rounding,
    ) -> Result<Self> {
        let there = |entry: &Entry| {
            (0..dims.slots())
                .map(|slot| u8::from(dims.slot(entry, slot).is_some()))
                .collect::<Vec<_>>()
        };
        let there = entries.iter().flat_map(there).collect();
        let gate = gathered(&inputs.gate, dims, entries)?;
        let score = rounding.f32_apart(
            &gate.broadcast_add(&halves_below_each_other(&inputs.ape, dims.head_dim)?)?,
        )?;
        Self::of_slots(there, &gathered(&inputs.kv, dims, entries)?, &score, rounding)
    }

    /// Pools the values and the scores of slots, `[num_entries, slots, head_dim]`; any values where
    /// no token exists.
    pub fn of_slots(
        there: Vec<u8>,
        value: &Tensor,
        score: &Tensor,
        rounding: &mut Rounding,
    ) -> Result<Self> {
        let (entries, slots, head_dim) = value.dims3()?;
        let there = Tensor::from_vec(there, (entries, slots, 1), value.device())?;
        let there = spread(&there, (entries, slots, head_dim))?;
        let value = select(&there, value, 0.0)?;
        let score = select(&there, score, f64::NEG_INFINITY)?;
        // The weights do not depend on what is subtracted.
        let largest = max_or_nan(&score, 1)?.detach();
        let exponent = rounding.f32(&score.broadcast_sub(&largest)?)?;
        let exponent = rounding.in_base_two(&exponent)?;
        let power = rounding.exp_f32(&exponent)?;
        let total = rounding.sum_keepdim_f32(&power, 1)?;
        let inverse = rounding.f32(&total.recip()?)?;
        let sum = rounding.sum_keepdim_f32(&(&power * &value)?, 1)?;
        let pooled = rounding.f32(&(sum * &inverse)?)?.squeeze(1)?;
        Ok(Self { value, power, inverse, pooled, there })
    }

    fn backward(&self, dpooled: &Tensor, rounding: &mut Rounding) -> Result<PoolingGradients> {
        let weight = rounding.f32(&self.power.broadcast_mul(&self.inverse)?)?;
        let value = rounding.f32(&weight.broadcast_mul(&dpooled.unsqueeze(1)?)?)?;
        let difference = rounding.f32(&self.value.broadcast_sub(&self.pooled.unsqueeze(1)?)?)?;
        let score = rounding.f32(&(&value * difference)?)?;
        Ok(PoolingGradients { value, score })
    }
}

fn indices(list: impl Iterator<Item = usize>, inputs: &Inputs) -> Result<Tensor> {
    let list: Vec<i64> = list.map(|index| index as i64).collect();
    let count = list.len();
    Ok(Tensor::from_vec(list, count, inputs.kv.device())?)
}

/// The halves of a tensor `[rows, width]`, stacked vertically: `[halves * rows, head_dim]`.
pub(crate) fn halves_below_each_other(tensor: &Tensor, head_dim: usize) -> Result<Tensor> {
    if tensor.dim(D::Minus1)? == head_dim {
        return Ok(tensor.clone());
    }
    let half = |number: usize| tensor.narrow(D::Minus1, number * head_dim, head_dim);
    Ok(Tensor::cat(&[half(0)?, half(1)?], 0)?)
}

/// The inverse: stacked halves placed side by side.
fn beside_each_other(tensor: &Tensor, dims: &Dims) -> Result<Tensor> {
    if !dims.overlaps {
        return Ok(tensor.clone());
    }
    let rows = tensor.dim(0)? / 2;
    Ok(Tensor::cat(&[tensor.narrow(0, 0, rows)?, tensor.narrow(0, rows, rows)?], 1)?)
}

/// The half of each slot's token, `[num_entries, slots, head_dim]`; any values where no token
/// exists.
fn gathered(tensor: &Tensor, dims: &Dims, entries: &[Entry]) -> Result<Tensor> {
    let place = |(token, column): (usize, usize)| {
        (if column > 0 { dims.num_tokens + token } else { token }) as i64
    };
    let of_entry = |entry: &Entry| {
        (0..dims.slots()).map(|slot| dims.slot(entry, slot).map_or(0, place)).collect::<Vec<_>>()
    };
    let places: Vec<i64> = entries.iter().flat_map(of_entry).collect();
    let count = places.len();
    let places = Tensor::from_vec(places, count, tensor.device())?;
    let halves = halves_below_each_other(tensor, dims.head_dim)?.index_select(&places, 0)?;
    Ok(halves.reshape((entries.len(), dims.slots(), dims.head_dim))?)
}

/// Rows `[.., head_dim]` scattered into a tensor with `extent` rows, zero elsewhere: pairs of a
/// destination and a row.
pub(crate) fn scattered(
    rows: &Tensor,
    places: impl Iterator<Item = (usize, usize)>,
    extent: usize,
) -> Result<Tensor> {
    let (count, width) = rows.dims2()?;
    let mut sources = vec![count as i64; extent];
    places.for_each(|(place, row)| sources[place] = row as i64);
    let sources = Tensor::from_vec(sources, extent, rows.device())?;
    let zero = Tensor::zeros((1, width), rows.dtype(), rows.device())?;
    let extended = if count == 0 { zero } else { Tensor::cat(&[rows, &zero], 0)? };
    if extent == 0 {
        return Ok(Tensor::zeros((0, width), rows.dtype(), rows.device())?);
    }
    Ok(extended.index_select(&sources, 0)?)
}

/// Sums of slots `[num_entries, slots, head_dim]` for each token `[num_tokens, width]`.
fn of_tokens(of_slots: &Tensor, dims: &Dims, entries: &[Entry]) -> Result<Tensor> {
    let rows = of_slots.reshape((entries.len() * dims.slots(), dims.head_dim))?;
    let half = |column: usize| {
        let places = entries.iter().enumerate().flat_map(|(number, entry)| {
            let of_half =
                move |slot: usize| dims.slot(entry, slot).filter(|&(_, from)| from == column);
            (0..dims.slots())
                .filter_map(move |slot| Some((of_half(slot)?.0, number * dims.slots() + slot)))
        });
        scattered(&rows, places, dims.num_tokens)
    };
    if !dims.overlaps {
        return half(0);
    }
    Ok(Tensor::cat(&[half(0)?, half(dims.head_dim)?], 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::unpack_nibbles;
    use crate::precision::{Precision, values};
    use crate::projections::rope::{YarnParameters, inv_freq_f32, table};
    use crate::quantize::Quantized;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_directional_derivative, assert_within, differentiated, dot,
        dot_of_magnitudes, f64_tensor,
    };

    /// Packed sequences of these lengths, with two tokens of padding and one unused row of entries.
    fn case(seed: u64, lengths: &[usize], ratio: usize, head_dim: usize, overlaps: bool) -> Inputs {
        let mut draw = Draw::new(seed);
        let width = if overlaps { 2 * head_dim } else { head_dim };
        let ends = |of: &dyn Fn(usize) -> usize| {
            let mut end = 0;
            std::iter::once(0)
                .chain(lengths.iter().map(|&length| {
                    end += of(length);
                    end as i32
                }))
                .collect::<Vec<_>>()
        };
        let (cu_seqlens, cu_entries) = (ends(&|length| length), ends(&|length| length / ratio));
        let (tokens, num_entries) =
            (lengths.iter().sum::<usize>() + 2, *cu_entries.last().unwrap() as usize + 1);
        let inv_freq =
            inv_freq_f32(&YarnParameters { rope_dim: 4, ..YarnParameters::compress() }).unwrap();
        let (cos, sin) = table(&inv_freq, &(0..64).collect::<Vec<_>>()).unwrap();
        Inputs {
            kv: draw.normal(&[tokens, width], 2.0),
            gate: draw.normal(&[tokens, width], 2.0),
            ape: draw.normal(&[ratio, width], 1.0),
            finish: Finish { norm_weight: draw.normal(&[head_dim], 1.0), cos, sin, ..finish() },
            cu_seqlens,
            cu_entries,
            num_entries,
        }
    }

    const LENGTHS: [usize; 6] = [9, 0, 3, 4, 7, 13];

    /// Without weights and without a table.
    fn finish() -> Finish {
        let none = f64_tensor(&[], &[0]);
        let (norm_weight, cos, sin) = (none.clone(), none.clone(), none);
        Finish { norm_weight, cos, sin, eps: 1e-6, stored: Format::BF16, epilogue: Epilogue::None }
    }

    fn named(inputs: &Inputs) -> Named {
        let named = Named::new().with("kv", inputs.kv.clone()).with("gate", inputs.gate.clone());
        named.with("ape", inputs.ape.clone()).with("norm_weight", inputs.finish.norm_weight.clone())
    }

    fn with(inputs: &Inputs, named: &Named) -> Inputs {
        let of = |name| named.tensor(name).expect("a tensor").clone();
        let finish = Finish { norm_weight: of("norm_weight"), ..inputs.finish.clone() };
        Inputs { kv: of("kv"), gate: of("gate"), ape: of("ape"), finish, ..inputs.clone() }
    }

    const GRADIENTS: [(&str, &str); 4] =
        [("kv", "dkv"), ("gate", "dgate"), ("ape", "dape"), ("norm_weight", "dnorm_weight")];

    fn exactly(inputs: &Inputs) -> Tensor {
        forward(inputs, &mut Rounding::exact()).unwrap().tensor("entries").unwrap().clone()
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (overlaps, ratio) in [(true, 4), (false, 3)] {
            let inputs = case(1, &LENGTHS, ratio, 12, overlaps);
            let dentries = Draw::new(2).normal(&[inputs.num_entries, 12], 1.0);
            let explicit = backward(&inputs, &dentries, None, &mut Rounding::exact())?;
            let automatic = differentiated(&named(&inputs), &GRADIENTS, |named| {
                Ok((exactly(&with(&inputs, named)) * &dentries)?)
            })?;
            for (_, name) in GRADIENTS {
                let (explicit, automatic) = (explicit.tensor(name)?, automatic.tensor(name)?);
                // A few dozen roundings of terms that are not larger than the largest of all
                // gradients.
                let largest =
                    values(automatic)?.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                let bound = Tensor::full(
                    512.0 * UNIT_ROUNDOFF * largest,
                    automatic.shape(),
                    automatic.device(),
                )?;
                assert_within(name, explicit, automatic, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(3, &LENGTHS, 4, 12, true);
        let dentries = Draw::new(4).normal(&[inputs.num_entries, 12], 1.0);
        let gradients = backward(&inputs, &dentries, None, &mut Rounding::exact())?;
        let mut draw = Draw::new(5);
        let directions: Vec<Tensor> = GRADIENTS
            .iter()
            .map(|(of, _)| draw.normal(named(&inputs).tensor(of).unwrap().dims(), 1.0))
            .collect();
        let objective = |h: f64| -> Result<f64> {
            let moved = GRADIENTS.iter().zip(&directions).try_fold(
                Named::new(),
                |moved, ((of, _), v)| -> Result<_> {
                    Ok(moved.with(of, (named(&inputs).tensor(of)? + (v * h)?)?))
                },
            )?;
            Ok(dot(&exactly(&with(&inputs, &moved)), &dentries))
        };
        let claimed: f64 = GRADIENTS
            .iter()
            .zip(&directions)
            .map(|((_, name), v)| dot(gradients.tensor(name).unwrap(), v))
            .sum();
        // Each entry is a few dozen roundings of values of its own size, and the sum has a hundred
        // terms.
        let noise = 256.0 * UNIT_ROUNDOFF * dot_of_magnitudes(&dentries, &exactly(&inputs));
        assert_directional_derivative("compressor", objective, 1.0, noise, claimed)
    }

    #[test]
    fn an_entry_is_the_softmax_of_each_channel_over_its_own_tokens_and_those_of_the_group_before()
    -> Result<()> {
        let inputs = case(6, &[12], 4, 6, true);
        let pooled = forward(&inputs, &mut Rounding::exact())?.tensor("pooled")?.clone();
        let [kv, gate, ape] =
            [&inputs.kv, &inputs.gate, &inputs.ape].map(|tensor| values(tensor).unwrap());
        for (entry, pooled) in values(&pooled.narrow(0, 0, 3)?)?.chunks(6).enumerate() {
            for (channel, pooled) in pooled.iter().enumerate() {
                let before =
                    (0..4).filter(|_| entry > 0).map(|row| (4 * entry + row - 4, row, channel));
                let slots: Vec<_> =
                    before.chain((0..4).map(|row| (4 * entry + row, row, 6 + channel))).collect();
                let power = |&(token, row, column): &(usize, usize, usize)| {
                    (gate[12 * token + column] + ape[12 * row + column]).exp()
                };
                let total: f64 = slots.iter().map(power).sum();
                let sum: f64 =
                    slots.iter().map(|slot| power(slot) * kv[12 * slot.0 + slot.2]).sum();
                assert!(
                    (sum / total - pooled).abs() <= 64.0 * UNIT_ROUNDOFF * 10.0,
                    "{entry} {channel}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn what_no_entry_pools_is_not_read_and_has_no_gradient() -> Result<()> {
        let inputs = case(7, &LENGTHS, 4, 8, true);
        let dentries = Draw::new(8).normal(&[inputs.num_entries, 8], 1.0);
        let of_pooled = backward(&inputs, &dentries, None, &mut Rounding::exact())?;
        let (expected, dkv) = (values(&exactly(&inputs))?, values(of_pooled.tensor("dkv")?)?);
        let corrupted: Vec<f64> = values(&inputs.kv)?
            .into_iter()
            .zip(&dkv)
            .map(|(kv, dkv)| if *dkv == 0.0 { f64::NAN } else { kv })
            .collect();
        assert!(corrupted.iter().filter(|x| x.is_nan()).count() > 16);
        let corrupted = Inputs { kv: f64_tensor(&corrupted, inputs.kv.dims()), ..inputs.clone() };
        assert_eq!(values(&exactly(&corrupted))?, expected);
        let rows = expected.chunks(8).map(|row| row.iter().all(|x| *x == 0.0)).collect::<Vec<_>>();
        // Entries of 9, 0, 3, 4, 7 and 13 tokens, and the row without an entry.
        assert_eq!(rows.iter().position(|&zero| zero), Some(2 + 1 + 1 + 3));
        Ok(())
    }

    fn with_epilogue(inputs: &Inputs, epilogue: Epilogue) -> Inputs {
        Inputs { finish: Finish { epilogue, ..inputs.finish.clone() }, ..inputs.clone() }
    }

    fn to_nearest(inputs: &Inputs) -> Vec<f64> {
        let mut rounding = Rounding::new(Precision::Nearest { seed: 0 });
        values(forward(inputs, &mut rounding).unwrap().tensor("entries").unwrap()).unwrap()
    }

    #[test]
    fn the_channels_that_do_not_turn_are_what_their_e4m3_codes_decode_to_and_the_others_stay()
    -> Result<()> {
        let plain = case(13, &LENGTHS, 4, 136, true);
        let stored: Vec<f64> =
            to_nearest(&plain).into_iter().map(|z| Format::BF16.nearest(z)).collect();
        let entries = to_nearest(&with_epilogue(&plain, Epilogue::Fp8));
        // Groups of 64, 64 and 4.
        for (z, entry) in stored.chunks(136).zip(entries.chunks(136)) {
            let (leading, turned) = z.split_at(132);
            let Quantized { codes, scale_bytes } = quantize::quantize(leading, 64, Format::E4M3);
            let scale = |channel: usize| Format::E8M0.value(scale_bytes[channel / 64].into());
            let decoded = codes
                .iter()
                .enumerate()
                .map(|(at, &code)| Format::E4M3.value(code.into()) * scale(at));
            assert_eq!(decoded.chain(turned.iter().copied()).collect::<Vec<_>>(), entry);
        }
        assert_ne!(stored, entries);
        Ok(())
    }

    #[test]
    fn an_entry_of_the_indexer_is_what_the_codes_of_its_transform_decode_to() -> Result<()> {
        let plain = case(14, &LENGTHS, 4, 128, true);
        let stored: Vec<f64> =
            to_nearest(&plain).into_iter().map(|z| Format::BF16.nearest(z)).collect();
        let entries = to_nearest(&with_epilogue(&plain, Epilogue::HadamardFp4));
        let x = Named::new().with("x", f64_tensor(&stored, &[stored.len() / 128, 128]));
        let coded = hadamard::forward(&x, hadamard::Stored::E2m1, &mut Rounding::exact())?;
        let bytes: Vec<u8> =
            values(coded.tensor("codes")?)?.into_iter().map(|byte| byte as u8).collect();
        let scales = values(coded.tensor("scale_bytes")?)?;
        let decoded = unpack_nibbles(&bytes).into_iter().enumerate().map(|(at, code)| {
            Format::E2M1.value(code.into()) * Format::E8M0.value(scales[at / 32] as u64)
        });
        assert_eq!(decoded.collect::<Vec<_>>(), entries);
        Ok(())
    }

    #[test]
    fn a_nan_makes_its_group_nan_and_the_transform_takes_it_to_all_groups() -> Result<()> {
        let z = f64_tensor(
            &(0..128).map(|at| if at == 70 { f64::NAN } else { 1.0 }).collect::<Vec<_>>(),
            &[1, 128],
        );
        let nan = |epilogue: Epilogue| -> Result<usize> {
            let entry = epilogue.of(&z, 4, Format::BF16, &mut Rounding::exact())?;
            Ok(values(&entry)?.iter().filter(|x| x.is_nan()).count())
        };
        assert_eq!(
            [nan(Epilogue::None)?, nan(Epilogue::Fp8)?, nan(Epilogue::HadamardFp4)?],
            [1, 60, 128]
        );
        let narrow = f64_tensor(&[1.0; 64], &[1, 64]);
        assert!(
            Epilogue::HadamardFp4.of(&narrow, 4, Format::BF16, &mut Rounding::exact()).is_err()
        );
        Ok(())
    }

    #[test]
    fn sequences_know_nothing_of_each_other() -> Result<()> {
        let packed = case(9, &[5, 9], 4, 8, true);
        let alone = Inputs {
            kv: packed.kv.narrow(0, 5, 9)?,
            gate: packed.gate.narrow(0, 5, 9)?,
            cu_seqlens: vec![0, 9],
            cu_entries: vec![0, 2],
            num_entries: 2,
            ..packed.clone()
        };
        assert_eq!(values(&exactly(&packed).narrow(0, 1, 2)?)?, values(&exactly(&alone))?);
        Ok(())
    }

    #[test]
    fn no_entry_and_no_token_are_legal_and_bad_inputs_are_refused_by_name() -> Result<()> {
        for lengths in [&[][..], &[0, 0], &[3, 2]] {
            let inputs = case(10, lengths, 4, 8, true);
            let outputs = forward(&inputs, &mut Rounding::exact())?;
            assert_eq!(values(outputs.tensor("entries")?)?, [0.0; 8]);
            let gradients =
                backward(&inputs, outputs.tensor("entries")?, None, &mut Rounding::exact())?;
            assert!(values(gradients.tensor("dkv")?)?.iter().all(|x| *x == 0.0));
        }
        let inputs = case(11, &[8], 4, 8, true);
        let refused =
            |inputs: Inputs| forward(&inputs, &mut Rounding::exact()).unwrap_err().to_string();
        assert!(
            refused(Inputs { cu_seqlens: vec![0, 99], ..inputs.clone() }).contains("cu_seqlens")
        );
        assert!(refused(Inputs { cu_entries: vec![0], ..inputs.clone() }).contains("cu_entries"));
        assert!(
            refused(Inputs {
                finish: Finish {
                    norm_weight: f64_tensor(&[1.0; 3], &[3]),
                    ..inputs.finish.clone()
                },
                ..inputs.clone()
            })
            .contains("kv")
        );
        assert!(refused(Inputs { gate: inputs.kv.narrow(0, 0, 1)?, ..inputs }).contains("gate"));
        Ok(())
    }
}
