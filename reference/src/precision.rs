//! Exact evaluation, or evaluation at the precision of a kernel: dithered rounding and fp32 sums.
//!
//! # Rounding
//!
//! Let the neighbours of `x` in a type be a gap `g` apart. Rounding `x` to that type errs by at
//! most `g/2`. The size of the error depends on everything that the kernel computed before. A
//! `Working` run therefore rounds on a grid displaced by a random *phase* `p`:
//! ```text
//! error = (round(x/g + p) - (x/g + p)) g        uniform in [-g/2, g/2] over the phases, for every x
//! ```
//!
//! The mean of the error is zero. Its variance is `g^2/12`, as for rounding to nearest. Values of
//! the type itself, zeros, infinities and NaN do not change.
//!
//! **Values that are close round alike.** A kernel rounds by a rule. The slots of one key therefore
//! have one probability and one rounding error, which adds up over the slots instead of averaging
//! out. The probabilities of nearly equal logits have nearly the same error. Here all values of a
//! rounding point have one phase. Errors are then a continuous function of the values, except for
//! the wrap at half a gap. They are alike for close values, and independent for values that spread
//! over many gaps.
//!
//! **Values whose differences matter** are the exception, such as the logits of a softmax. What all
//! of them have in common, such as an offset of 80, cancels, and so does the common part of their
//! errors. Let two of them be d gaps apart, whole gaps not counted. With one phase, the errors of
//! both differ by d gaps with probability 1 - d, and by 1 - d gaps with probability d. For small d
//! the second case is almost a whole gap, which no run shows, but the kernel's rounding may be that
//! case. There each value has a separate phase ([`Rounding::f32_apart`]). The variance of a
//! difference is then `g^2/6` for every d, which is the mean of `d (1 - d) g^2` over all d.
//!
//! A `Nearest` run rounds to narrow types as the hardware does (phase 0, ties to even). It shows
//! what a rule does to the exact values of a case, such as a P just below 1 in every row. Its
//! errors in fp32 have random phases too, because the compiler decides whether a product is rounded
//! before it is added.
//!
//! # fp32 accumulation
//!
//! A kernel accumulates a sum of n terms `t_1 .. t_n` in fp32. The model is a sequential sum in
//! random order, rounded stochastically after every addition. Write `S = sum t_j`, `Q = sum t_j^2`,
//! and `S_j` for the sum of the first j terms of the random order. For j of n terms, chosen without
//! replacement,
//!
//! ```text
//! E[S_j]   = (j/n) S
//! Var(S_j) = j (n - j) / (n (n - 1)) * (Q - S^2/n)
//! sum_j j^2 = n (n+1) (2n+1) / 6        sum_j j (n - j) = n (n^2 - 1) / 6
//!
//! sum_j E[S_j^2] = S^2 (n+1)(2n+1) / (6n)  +  (n+1)/6 * (Q - S^2/n)
//!                = (n + 1) (S^2/3 + Q/6)
//! ```
//!
//! The first partial sum is included although adding a term to zero is exact. It accounts for the
//! rounding of the term itself, which a product of two fp32 values needs and a product of two bf16
//! values does not.
//!
//! One rounding of `S_j = m 2^e`, `1 <= m < 2`, to a type with unit roundoff `u = 2^-24` happens on
//! a grid of gap `g = 2u 2^e`. Stochastic rounding at a uniformly distributed position in the gap
//! has the variance `E[f (1 - f)] g^2 = g^2/6`. Significands m are distributed as 1/m. For these,
//! `E[1/m^2] = (1/ln 2) * integral_1^2 m^-3 dm = 3 / (8 ln 2)`, so that
//!
//! ```text
//! variance of one rounding = (4u^2 / 6) * 3/(8 ln 2) * S_j^2 = u^2 S_j^2 / (4 ln 2)
//! sigma^2 of the whole sum = u^2 / (4 ln 2) * (n + 1) (S^2/3 + Q/6)
//! ```
//!
//! This is twice the variance of rounding to nearest, `g^2/12`, because the order of the terms is
//! unknown too. With `m` between 1 and 2, consider a kernel that adds sequentially and rounds to
//! nearest. Its root mean square error is between `sqrt(ln 2 / 3) = 0.48` and
//! `sqrt(4 ln 2 / 3) = 0.96` of sigma, for any sums. The model is therefore generous, by at most a
//! factor of about two. The many roundings are independent, so the error is one normal random
//! number of standard deviation sigma, added to the exact sum.
//!
//! **Lanes.** A kernel that declares lanes ([`Rounding::with_lanes`]) adds a row in `L` lanes of
//! `m = ceil(n/L)` terms each, one after the other, and then adds the lanes as a tree. Let
//! `V = Q - S^2/n`, and let a partial sum have j random terms as above. Each of the L lanes is a
//! chain of m additions. Level l of the tree has `L/2^l` sums of `b = m 2^l` terms. Together they
//! have
//!
//! ```text
//! sum of E[partial^2] = L sum_(j<=m) v(j) + sum_(l<=log2 L) L/2^l v(min(m 2^l, n)),    v(j) = (j/n)^2 S^2 + j (n-j)/(n (n-1)) V
//! ```
//!
//! which replaces `(n + 1) (S^2/3 + Q/6)`. A sum of 4096 values of one sign in 32 lanes has a sigma
//! 5 times smaller than in one lane.
//!
//! # Truncation in matrix products
//!
//! After a block of [`Accumulator::block_terms`] products, tensor cores truncate their accumulator
//! instead of rounding it to nearest. Each truncation reduces the magnitude by `g/2 = u 2^e` on
//! average, which is `u |S_j| E[1/m] = u |S_j| / (2 ln 2)` with the significands distributed as
//! above. These errors have one sign. They cancel neither among the blocks of one sum nor among the
//! elements of one product. A softmax over many keys averages the noise above away, but not this
//! bias. The kernel decides the order of the terms. Where the large terms come first, every partial
//! sum is as large as S:
//!
//! ```text
//! bias of a sum = ceil(n / block_terms) * u |S| / (2 ln 2)
//! ```
//!
//! A `Working` run adds or subtracts this bias, with one random sign for the whole product. The
//! spread of several runs around `Exact` then contains it in full.
//!
//! # Narrow accumulators
//!
//! With e4m3 operands, Hopper's `wgmma` aligns every product with the accumulator before it adds,
//! and keeps [`Accumulator::fraction_bits`] = 13 bits below the leading one. On an H100 a product
//! `2^p` was measured to be lost when the accumulator holds `2^(p+14)`. Here `u = 2^-14`, and each
//! product is truncated separately (`block_terms = 1`). The errors therefore have the signs of the
//! products: `-sign(t_j)` times a loss that is uniform in the gap. Partial sums are no larger than
//! the whole sum where terms have one sign, and `S_j` where terms cancel:
//!
//! ```text
//! A^2      = S^2 + Q/6
//! bias     = D * u A / (2 ln 2)                    D = sum_j sign(t_j),  |bias| <= sqrt(n Q) >= sum |t_j|
//! variance = twice that of rounding:  E[loss^2] = g^2/3 where rounding stochastically has g^2/6
//! ```
//!
//! The model is generous for products of e4m3 values: these have eight bits, and often none of them
//! is below the gap. (A test below measures a factor of up to 7 for mixed signs, and up to 30 for
//! one sign.)
//!
//! With products of one sign D is n, and the bias is that of n truncations. Where signs are mixed,
//! D is about `sqrt(n)`. Kernels therefore promote. After [`Accumulator::promote_every`] terms the
//! accumulator is added to a sum in fp32 and starts again from zero. Each piece then has the errors
//! of its own sums, and the sum of the pieces has those of an fp32 sum.
//!
//! An example that can be computed by hand: `2^14` followed by 7167 ones. The sum is 23551. Without
//! promotion every one is lost, and the result is 16384. With promotion every 128 terms, only the
//! 127 ones after the large term are lost: 23424.

use candle_core::{CpuStorage, D, Layout, Tensor};

use crate::conventions::Conventions;
use crate::error::{Result, require, require_f64, wrong_value};
use crate::format::{Format, power_of_two};
use crate::products::Products;
use crate::wide::wide;

/// Relative error of the special function units. The PTX ISA bounds that of `ex2.approx.f32` by
/// 2^-22 and that of `rsqrt.approx.f32` by 2^-22.9.
const APPROXIMATE_ERROR_EXPONENT: i32 = -22;

/// The accumulator of a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accumulator {
    /// Products that are added before the accumulator is truncated; 1 where each product is
    /// truncated separately.
    pub block_terms: usize,
    /// Bits that the accumulator keeps below its leading one.
    pub fraction_bits: i32,
    /// Terms after which the accumulator is added to a sum in fp32 and starts again from zero;
    /// `None` where all terms stay in it.
    pub promote_every: Option<usize>,
}

impl Accumulator {
    /// fp32, truncated after 16 products: the k of `mma.m16n8k16` for bf16.
    pub const F32: Self =
        Self { block_terms: 16, fraction_bits: Format::F32.fraction_bits, promote_every: None };

    /// The accumulator of Hopper's `wgmma` with e4m3 operands (module documentation).
    pub const HOPPER_E4M3: Self = Self { block_terms: 1, fraction_bits: 13, promote_every: None };

    /// The same accumulator, promoted to fp32 after this number of terms.
    pub const fn promoted_every(self, terms: usize) -> Self {
        Self { promote_every: Some(terms), ..self }
    }

    /// Whether each product is truncated separately, so that its sign decides the direction.
    fn truncates_products(self) -> bool {
        self.block_terms <= 1
    }

    fn unit_roundoff(self) -> f64 {
        power_of_two(-self.fraction_bits - 1)
    }
}

impl Default for Accumulator {
    fn default() -> Self {
        Self::F32
    }
}

/// How an oracle computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// f64 throughout, no rounding point.
    Exact,
    /// Every rounding point of the kernel has a random error, within half a gap. Equal seeds give
    /// equal results.
    Working {
        /// Seed of the phases.
        seed: u64,
    },
    /// As `Working`, but rounding to a type narrower than fp32 is to nearest, ties to even, as in a
    /// kernel. What remains random is what a kernel is free to choose: the order of its sums,
    /// products that it adds without rounding them, and the tiles over which it takes its running
    /// maximum ([`Rounding::bf16_of_any_scale`]).
    Nearest {
        /// Seed of the accumulation noise, and the number of the choice. The first [`CHOICES`]
        /// seeds have no noise. They model kernels in which every fp32 result is the nearest value,
        /// and which break ties as no other run does.
        seed: u64,
    },
}

/// Number of choices for what a kernel is free to choose. Runs take them round-robin: run `seed`
/// takes choice `seed % CHOICES`.
pub const CHOICES: usize = MAXIMA.len();

/// The maximum by which a kernel scales the values that it rounds. Runs take these round-robin, by
/// their seeds.
#[derive(Debug, Clone, Copy)]
enum Maximum {
    /// The maximum of the whole row.
    Row,
    /// The maximum of all slots up to the end of the tile of this many slots.
    Running(usize),
    /// The maximum of only the tile of this many slots: a part of a row that was split off starts
    /// again.
    Tile(usize),
}

const MAXIMA: [Maximum; 4] =
    [Maximum::Row, Maximum::Running(64), Maximum::Running(32), Maximum::Tile(64)];

/// The rounding points of one oracle run. Pass the same one to every operator of the run. It is not
/// `Clone`: two copies of one run would number their requests alike, and use the noise of one
/// quantity for another.
#[derive(Debug)]
pub struct Rounding {
    noise: Option<Noise>,
    products: Option<Products>,
    /// Number of quantities that only scale noise and were requested so far. Those of the exact run
    /// are taken in this order.
    noise_scales: usize,
    /// Lanes over which sums are spread.
    lanes: usize,
    /// Whether the scales at which the kernel rounds are unknown.
    unknown_scales: bool,
    conventions: Conventions,
    watch: Option<Watch>,
}

/// What a watching run observed.
#[derive(Debug, Clone, Copy, Default)]
struct Watch {
    points: u64,
    digest: u64,
}

impl Watch {
    /// Records the values at which fp32 is coarser than its significand, or close to that range: a
    /// kernel's own intermediates differ from these by their roundings. A value smaller than
    /// [`ALWAYS_ZERO`] is zero in every kernel.
    fn see(&mut self, tensor: &Tensor) -> Result<()> {
        const ALWAYS_ZERO: i32 = -160;
        const ROOM: i32 = 6;
        let inexact = power_of_two(ALWAYS_ZERO)..power_of_two(Format::F32.min_exponent + ROOM);
        let overflowing = power_of_two(-Format::F32.min_exponent - ROOM)..f64::INFINITY;
        self.points += 1;
        for (index, x) in values(tensor)?.into_iter().enumerate() {
            if inexact.contains(&x.abs()) || overflowing.contains(&x.abs()) {
                self.digest = scramble(
                    scramble(scramble(self.digest ^ self.points) ^ index as u64) ^ x.to_bits(),
                );
            }
        }
        Ok(())
    }
}

impl Rounding {
    /// Starts a run. `Working` runs with equal seeds that make the same calls are bit-equal.
    pub fn new(precision: Precision) -> Self {
        let noise = match precision {
            Precision::Exact => None,
            Precision::Working { seed } => Some(Noise::new(seed, false)),
            Precision::Nearest { seed } => Some(Noise::new(seed, true)),
        };
        Self {
            noise,
            products: None,
            noise_scales: 0,
            lanes: 1,
            unknown_scales: false,
            conventions: Conventions::default(),
            watch: None,
        }
    }

    /// The same run for a kernel that adds the values of a row (along the last axis) in this many
    /// lanes, and adds the lanes as a tree (module documentation). Use 1 where the kernel's order
    /// is unknown.
    #[must_use]
    pub fn with_lanes(self, lanes: usize) -> Self {
        Self { lanes: lanes.max(1), ..self }
    }

    /// As [`Self::new`], for one of several runs of one oracle on the same inputs. Products of
    /// operands that do not differ between the runs are computed once for all of them. So is
    /// everything that only scales noise ([`Self::noise_scale`]). The exact run comes first; the
    /// other runs compare their operands with those of the exact run.
    pub fn sharing(precision: Precision, products: &Products) -> Self {
        let rounding = Self { products: Some(products.clone()), ..Self::new(precision) }
            .with_lanes(products.lanes())
            .with_conventions(products.conventions());
        if products.has_unknown_scales() { rounding.with_unknown_scales() } else { rounding }
    }

    /// The same run for a kernel whose rounding scales are unknown ([`Self::bf16_of_any_scale`]).
    #[must_use]
    pub fn with_unknown_scales(self) -> Self {
        Self { unknown_scales: true, ..self }
    }

    /// The same run for a kernel with these conventions.
    #[must_use]
    pub fn with_conventions(self, conventions: Conventions) -> Self {
        Self { conventions, ..self }
    }

    /// The conventions of the kernel.
    pub fn conventions(&self) -> Conventions {
        self.conventions
    }

    /// The run without rounding.
    pub fn exact() -> Self {
        Self::new(Precision::Exact)
    }

    /// The run without rounding that also records the values outside of fp32's range:
    /// [`Self::outside_f32`].
    pub fn watching() -> Self {
        Self { watch: Some(Watch::default()), ..Self::exact() }
    }

    /// A digest of the intermediates of a watching run that fp32 holds coarsely, or not at all:
    /// subnormal values and values that overflow. Scaling by a power of two is exact for all
    /// others. Take two runs on inputs that differ by powers of two. If both have one digest, a
    /// kernel's results differ by powers of two, bit for bit.
    pub fn outside_f32(&self) -> u64 {
        self.watch.map_or(0, |watch| watch.digest)
    }

    fn see(&mut self, tensor: &Tensor) -> Result<()> {
        self.watch.as_mut().map_or(Ok(()), |watch| watch.see(tensor))
    }

    /// Whether this run evaluates the formula without rounding.
    pub fn is_exact(&self) -> bool {
        self.noise.is_none()
    }

    /// A quantity that only scales noise, such as a sum of squares. Where this is one of several
    /// runs of one oracle, it is the quantity of the exact run; all runs request the same ones in
    /// the same order. Otherwise it is computed here. `None` in an exact run, which has no noise.
    ///
    /// # Errors
    /// Those of `compute`.
    pub fn noise_scale(
        &mut self,
        compute: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let number = self.noise_scales;
        self.noise_scales += 1;
        match (&self.noise, &self.products) {
            (None, None) => Ok(None),
            (None, Some(products)) => {
                products.keep_noise_scale(number, compute()?);
                Ok(None)
            }
            (Some(_), None) => Ok(Some(compute()?)),
            (Some(_), Some(products)) => match products.noise_scale(number) {
                Some(scale) => Ok(Some(scale)),
                None => Ok(Some(compute()?)),
            },
        }
    }

    /// A tensor stored in `format`, or used as an operand of a matrix product of that format. Not
    /// for values whose decision is part of the result (codes that are compared exactly). Those are
    /// [`Format::nearest`] in every run.
    pub fn to(&mut self, format: Format, tensor: &Tensor) -> Result<Tensor> {
        require_f64("tensor", tensor)?;
        self.see(tensor)?;
        let Some(noise) = &mut self.noise else {
            return Ok(tensor.clone());
        };
        let fine = format == Format::F32;
        let (phase, to_nearest) =
            (noise.next().phase(), if fine { noise.is_ideal() } else { noise.to_nearest });
        each_changed(tensor, |numbers| match to_nearest {
            true => format.round_all(numbers),
            false => format.dither_all(numbers, phase),
        })
    }

    /// A tensor stored in bf16, or used as an operand of a bf16 matrix product.
    pub fn bf16(&mut self, tensor: &Tensor) -> Result<Tensor> {
        self.to(Format::BF16, tensor)
    }

    /// As [`Self::bf16`], for rows (the last axis) of non-negative values that an implementation
    /// holds at a scale of its choice when it rounds them. An example is the weights `exp(z - m)`
    /// of a running maximum m that is not yet the final one. The bits that remain of a value below
    /// its last bit depend on that scale. Runs take the usual choices round-robin, by their seeds.
    /// Where the kernel is unknown ([`Self::with_unknown_scales`]), every other row of a `Working`
    /// run has the scale `2^u` with u uniform in [0, 1).
    pub fn bf16_of_any_scale(&mut self, tensor: &Tensor) -> Result<Tensor> {
        require_f64("tensor", tensor)?;
        let unknown = self.unknown_scales;
        let Some(noise) = &mut self.noise else {
            return Ok(tensor.clone());
        };
        let toss = noise.next();
        let choice = MAXIMA[noise.seed as usize % MAXIMA.len()];
        let row_len = tensor.dim(D::Minus1)?.max(1);
        let scales_of = |(number, row): (usize, &[f64])| -> Vec<f64> {
            let u = 2.0 * toss.uniform(number as f64 + 1.0) - 1.0;
            let factor = if unknown && u > 0.0 { u.exp2() } else { 1.0 };
            scales_by(row, choice).into_iter().map(|scale| scale * factor).collect()
        };
        let scales: Vec<f64> =
            values(tensor)?.chunks(row_len).enumerate().flat_map(scales_of).collect();
        let scales = Tensor::from_vec(scales, tensor.shape(), tensor.device())?;
        let rounded = self.bf16(&(tensor * &scales)?)?;
        Ok((rounded / scales)?)
    }

    /// An intermediate held in fp32: a product, a quotient, a difference, a stored statistic.
    pub fn f32(&mut self, tensor: &Tensor) -> Result<Tensor> {
        self.to(Format::F32, tensor)
    }

    /// As [`Self::f32`], for values whose differences matter, such as the logits of a softmax
    /// (module documentation): each has a separate phase. Equal values still have one error.
    pub fn f32_apart(&mut self, tensor: &Tensor) -> Result<Tensor> {
        require_f64("tensor", tensor)?;
        let Some(noise) = self.noise.as_mut().filter(|noise| !noise.is_ideal()) else {
            return self.f32(tensor);
        };
        let toss = noise.next();
        each_changed(tensor, |numbers| {
            numbers.iter_mut().for_each(|x| *x = Format::F32.dithered(*x, toss.uniform(*x)));
        })
    }

    /// The result of a hardware approximation in fp32 (exponential, reciprocal square root,
    /// logarithm). This is not a rounding: the result errs by up to its bound everywhere, also at a
    /// value that fp32 can hold. Half of the bound has one sign for all values of a run, because a
    /// table may be too large throughout. The other half is separate for each value. Whether
    /// subnormal results are flushed to zero depends on the form of the expression and on the
    /// compiler's flags. Of the choices of `Nearest` runs, every other one flushes.
    pub fn approximate_f32(&mut self, tensor: &Tensor) -> Result<Tensor> {
        require_f64("tensor", tensor)?;
        self.see(tensor)?;
        let Some(noise) = &mut self.noise else {
            return Ok(tensor.clone());
        };
        let (toss, bound) =
            (noise.next(), noise.unless_ideal(power_of_two(APPROXIMATE_ERROR_EXPONENT)));
        let (common, flushes) = (toss.phase(), noise.flushes());
        let least = power_of_two(Format::F32.min_exponent);
        let approximated = each_changed(tensor, |numbers| {
            wide(
                #[inline(always)]
                || {
                    for x in numbers {
                        let y = *x * (1.0 + bound * (common + toss.uniform(*x) - 1.0));
                        *x = if flushes && y.abs() < least { 0.0 } else { y };
                    }
                },
            )
        })?;
        self.f32(&approximated)
    }

    /// `exp(x)` by an exponent in base two: `x log2 e`, held in fp32, and then the approximated
    /// `2^x`.
    pub fn exp_f32(&mut self, tensor: &Tensor) -> Result<Tensor> {
        if self.is_exact() {
            let power = tensor.exp()?;
            self.see(&power)?;
            return Ok(power);
        }
        let binary_exponent = self.f32(&(tensor * std::f64::consts::LOG2_E)?)?;
        self.approximate_f32(&(binary_exponent * std::f64::consts::LN_2)?.exp()?)
    }

    /// The exponent `x` as kernels convert it to base two, in natural units. `log2 e` is one
    /// constant in fp32, and its product with `x` is rounded to fp32. A large x therefore shifts
    /// its exponential, or a small difference from another one.
    pub fn in_base_two(&mut self, x: &Tensor) -> Result<Tensor> {
        if self.is_exact() {
            return Ok(x.clone());
        }
        let log2_e = self.constant_f32(std::f64::consts::LOG2_E);
        let exponent = self.f32(&(x * log2_e)?)?;
        Ok((exponent * std::f64::consts::LN_2)?)
    }

    /// `1 / (1 + exp(-x))` as kernels evaluate it, with approximated exponential and quotient. The
    /// exponential is that of `-|x|`, which never overflows and has a finite derivative everywhere.
    /// Kernels that use `exp(-x)` get zero where it overflows, at x below -88.7, and a subnormal
    /// result just above. One of the choices of `Nearest` runs does the same.
    pub fn sigmoid_f32(&mut self, tensor: &Tensor) -> Result<Tensor> {
        let negative = tensor.lt(0.0)?;
        let exponent = self.in_base_two(&negative.where_cond(tensor, &tensor.neg()?)?)?;
        let power = self.exp_f32(&exponent)?;
        let numerator = negative.where_cond(&power, &power.ones_like()?)?;
        let denominator = self.f32(&(power + 1.0)?)?;
        let quotient = self.approximate_f32(&(numerator / denominator)?)?;
        if !self.noise.as_ref().is_some_and(Noise::overflows) {
            return Ok(quotient);
        }
        let overflows = tensor.lt(-f64::from(f32::MAX).ln())?;
        Ok(overflows.where_cond(&quotient.zeros_like()?, &quotient)?)
    }

    /// `s (1 - s)`, the slope of `s = sigmoid(x)`. Working runs subtract the rounded `s` from 1, as the
    /// specification writes it, which keeps few digits where `s` is near 1. A kernel may instead
    /// compute `1 - s` as `sigmoid(-x)`, which keeps all; nothing demands that.
    pub fn sigmoid_slope_f32(&mut self, s: &Tensor, x: &Tensor) -> Result<Tensor> {
        let rest = if self.is_exact() {
            self.sigmoid_f32(&x.neg()?)?
        } else {
            self.f32(&(s.neg()? + 1.0)?)?
        };
        self.f32(&(s * rest)?)
    }

    /// `sum` over dimension `dim` with fp32 accumulation; the dimension disappears.
    pub fn sum_f32(&mut self, terms: &Tensor, dim: usize) -> Result<Tensor> {
        let sum = self.sum_keepdim_f32(terms, dim)?;
        Ok(sum.squeeze(dim)?)
    }

    /// `sum` over dimension `dim` with fp32 accumulation; the dimension stays, with size 1.
    pub fn sum_keepdim_f32(&mut self, terms: &Tensor, dim: usize) -> Result<Tensor> {
        require_f64("terms", terms)?;
        if self.is_exact() {
            let sum = terms.sum_keepdim(dim)?;
            self.see(&sum)?;
            return Ok(sum);
        }
        let (sum, sum_of_squares) = sums(terms, dim)?;
        let num_terms = (sum.ones_like()? * terms.dim(dim)? as f64)?;
        // Lanes share a row. What is added over rows, by blocks or atomics, is added one after the
        // other.
        let lanes = if dim + 1 == terms.rank() { self.lanes } else { 1 };
        self.accumulated(&sum, &sum_of_squares, &num_terms, Accumulator::F32, lanes)
    }

    /// `a @ b` with fp32 accumulation of all its terms. `a` `[.., m, k]`, `b` `[.., k, n]` ->
    /// `[.., m, n]`.
    pub fn matmul_f32(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.matmul(a, b, Accumulator::F32)
    }

    /// `a @ b` in a given accumulator. `a` `[.., m, k]`, `b` `[.., k, n]` -> `[.., m, n]`.
    ///
    /// # Errors
    /// Promotion after zero terms; operands that are not f64, or whose shapes do not match.
    pub fn matmul(&mut self, a: &Tensor, b: &Tensor, accumulator: Accumulator) -> Result<Tensor> {
        require_f64("a", a)?;
        let terms = a.dim(D::Minus1)?;
        match accumulator.promote_every {
            Some(0) => Err(wrong_value(
                "promote_every",
                0,
                "a promoted accumulator holds one term at least",
            )),
            Some(every) if every < terms => self.promoted_matmul(a, b, accumulator, every),
            _ => self.matmul_of(a, b, &Tensor::new(terms as f64, a.device())?, accumulator),
        }
    }

    /// `a @ b` where all but `num_terms` (broadcast against the result) of the k terms are zero by
    /// construction: adding a zero rounds nothing.
    pub fn matmul_f32_of(&mut self, a: &Tensor, b: &Tensor, num_terms: &Tensor) -> Result<Tensor> {
        self.matmul_of(a, b, num_terms, Accumulator::F32)
    }

    /// Pieces of `every` terms, each accumulated separately, then added in fp32.
    fn promoted_matmul(
        &mut self,
        a: &Tensor,
        b: &Tensor,
        accumulator: Accumulator,
        every: usize,
    ) -> Result<Tensor> {
        require_f64("b", b)?;
        let terms = a.dim(D::Minus1)?;
        if self.is_exact() {
            for from in (0..terms).step_by(every) {
                let length = every.min(terms - from);
                let (a, b) =
                    (a.narrow(D::Minus1, from, length)?, b.narrow(D::Minus2, from, length)?);
                self.keep_scales_of_product(&a, &b, accumulator)?;
            }
            let product = a.matmul(b)?;
            self.see(&product)?;
            return Ok(product);
        }
        self.matmul_of_pieces(a, b, accumulator.promoted_every(every), |_, piece, _| Ok(piece))
    }

    /// `a @ b` in a promoted accumulator, where each piece is `scaled`, by its number, before it is
    /// added to the sum in fp32. This is for products of groups that have scales. Without promotion
    /// there is one piece.
    ///
    /// # Errors
    /// As [`Self::matmul`], and those of `scaled`.
    pub fn matmul_of_pieces(
        &mut self,
        a: &Tensor,
        b: &Tensor,
        accumulator: Accumulator,
        scaled: impl Fn(usize, Tensor, &mut Self) -> Result<Tensor>,
    ) -> Result<Tensor> {
        require_f64("a", a)?;
        require_f64("b", b)?;
        let terms = a.dim(D::Minus1)?;
        let every = accumulator.promote_every.unwrap_or(terms.max(1));
        if every == 0 {
            return Err(wrong_value(
                "promote_every",
                0,
                "a promoted accumulator holds one term at least",
            ));
        }
        // The pieces of one kernel truncate alike: one random sign for all of them.
        let sign = self.truncation_sign();
        let mut pieces: Option<(Tensor, Tensor)> = None;
        for (number, from) in (0..terms).step_by(every).enumerate() {
            let length = every.min(terms - from);
            let (a, b) = (a.narrow(D::Minus1, from, length)?, b.narrow(D::Minus2, from, length)?);
            let piece = if self.is_exact() {
                self.keep_scales_of_product(&a, &b, accumulator)?;
                let piece = a.matmul(&b)?;
                self.see(&piece)?;
                piece
            } else {
                let count = Tensor::new(length as f64, a.device())?;
                self.accumulated_product(&a, &b, &count, accumulator, sign)?
            };
            let piece = scaled(number, piece, self)?;
            let square = piece.sqr()?;
            pieces = Some(match pieces {
                None => (piece, square),
                Some((sum, squares)) => ((sum + piece)?, (squares + square)?),
            });
        }
        let Some((sum, squares)) = pieces else { return Ok(a.matmul(b)?) };
        let count = (sum.ones_like()? * terms.div_ceil(every) as f64)?;
        self.accumulated_f32(&sum, &squares, &count)
    }

    fn matmul_of(
        &mut self,
        a: &Tensor,
        b: &Tensor,
        num_terms: &Tensor,
        accumulator: Accumulator,
    ) -> Result<Tensor> {
        require_f64("a", a)?;
        require_f64("b", b)?;
        if self.is_exact() {
            let product = match &self.products {
                Some(products) => products.remember(a, b)?,
                None => a.matmul(b)?,
            };
            self.keep_scales_of_product(a, b, accumulator)?;
            self.see(&product)?;
            return Ok(product);
        }
        self.accumulated_product(a, b, num_terms, accumulator, None)
    }

    /// What scales the noise of a product, in the order in which [`Self::accumulated_product`]
    /// requests it.
    fn keep_scales_of_product(
        &mut self,
        a: &Tensor,
        b: &Tensor,
        accumulator: Accumulator,
    ) -> Result<()> {
        self.noise_scale(|| squares_of_terms(a, b))?;
        if accumulator.truncates_products() {
            self.noise_scale(|| signs_of_terms(a, b))?;
        }
        Ok(())
    }

    /// The product with the errors of its accumulator. Its truncation has the sign `sign`, or a new
    /// random one.
    fn accumulated_product(
        &mut self,
        a: &Tensor,
        b: &Tensor,
        num_terms: &Tensor,
        accumulator: Accumulator,
        sign: Option<f64>,
    ) -> Result<Tensor> {
        let sum = match &self.products {
            Some(products) => products.of(a, b)?,
            None => a.matmul(b)?,
        };
        let sum_of_squares = self.required_scale(|| squares_of_terms(a, b))?;
        let signs = match accumulator.truncates_products() {
            true => Some(self.required_scale(|| signs_of_terms(a, b))?),
            false => None,
        };
        let num_terms = num_terms.broadcast_as(sum.shape())?;
        let rounded = self.accumulated(&sum, &sum_of_squares, &num_terms, accumulator, 1)?;
        let sign = sign.or_else(|| self.truncation_sign()).unwrap_or(0.0);
        let unit = accumulator.unit_roundoff() / (2.0 * std::f64::consts::LN_2);
        let bias = match signs {
            None => {
                let block_terms = accumulator.block_terms as f64;
                let of = |(sum, terms): (f64, f64)| {
                    // No gap is smaller than that of subnormal numbers.
                    let of_one = if sum == 0.0 {
                        0.0
                    } else {
                        (unit * sum.abs()).max(SUBNORMAL_GAP / 2.0).copysign(sum)
                    };
                    sign * of_one * (terms / block_terms).ceil()
                };
                let biases = values(&sum)?.into_iter().zip(values(&num_terms)?).map(of);
                Tensor::from_iter(biases, sum.device())?.reshape(sum.shape())?
            }
            Some(signs) => {
                let size = (sum.sqr()? + (&sum_of_squares / 6.0)?)?.sqrt()?;
                // The loss cannot exceed the sum itself.
                let bound = (num_terms * &sum_of_squares)?.sqrt()?;
                (size * signs)?.affine(sign * unit, 0.0)?.minimum(&bound)?.maximum(&bound.neg()?)?
            }
        };
        // Not where the sum is not finite: its bias would be NaN.
        let bias = bias.abs()?.lt(f64::MAX)?.where_cond(&bias, &bias.zeros_like()?)?;
        Ok((rounded + bias)?)
    }

    /// [`Self::noise_scale`] of a run that has noise.
    fn required_scale(&mut self, compute: impl Fn() -> Result<Tensor>) -> Result<Tensor> {
        match self.noise_scale(&compute)? {
            Some(scale) => Ok(scale),
            None => compute(),
        }
    }

    /// The direction of the truncation of a product in this run; `None` in the exact run.
    fn truncation_sign(&mut self) -> Option<f64> {
        let sign = |noise: &mut Noise| if noise.next().uniform(1.0) < 0.5 { -1.0 } else { 1.0 };
        self.noise.as_mut().map(|noise| {
            let sign = sign(noise);
            noise.unless_ideal(sign)
        })
    }

    /// A constant that every element is multiplied by, rounded to f32 once for all of them.
    pub fn constant_f32(&mut self, constant: f64) -> f64 {
        match &mut self.noise {
            None => constant,
            Some(noise) if noise.is_ideal() => Format::F32.nearest(constant),
            Some(noise) => Format::F32.dithered(constant, noise.next().phase()),
        }
    }

    /// Adds to exact sums the error of their fp32 accumulation (module documentation). All three
    /// tensors have one shape; `num_terms` counts the terms of each sum.
    pub fn accumulated_f32(
        &mut self,
        sum: &Tensor,
        sum_of_squares: &Tensor,
        num_terms: &Tensor,
    ) -> Result<Tensor> {
        self.accumulated(sum, sum_of_squares, num_terms, Accumulator::F32, 1)
    }

    fn accumulated(
        &mut self,
        sum: &Tensor,
        sum_of_squares: &Tensor,
        num_terms: &Tensor,
        accumulator: Accumulator,
        lanes: usize,
    ) -> Result<Tensor> {
        self.see(sum)?;
        require("sum_of_squares", sum_of_squares, sum.dims())?;
        require("num_terms", num_terms, sum.dims())?;
        let Some(noise) = &mut self.noise else {
            return Ok(sum.clone());
        };
        let (toss, is_ideal) = (noise.next(), noise.is_ideal());
        let squares = values(sum_of_squares)?;
        let counts = values(num_terms)?;
        let mut sums = values(sum)?;
        // Powers of two, and 1 for fp32. Truncation of each product has twice the variance of
        // rounding.
        let wider = accumulator.unit_roundoff() / Accumulator::F32.unit_roundoff();
        let wider =
            if accumulator.block_terms > 1 { wider } else { wider * std::f64::consts::SQRT_2 };
        let ideal = is_ideal.then(|| {
            let mut rounded = sums.clone();
            Format::F32.round_all(&mut rounded);
            rounded
        });
        let mut from = 0;
        for same in counts.chunk_by(|n, next| n == next) {
            let range = from..from + same.len();
            from = range.end;
            let error = AccumulationError::of(same[0], lanes);
            let (sums, squares) = (&mut sums[range.clone()], &squares[range.clone()]);
            // An overflowing or NaN sum stays as it is; noise would turn an infinity into NaN.
            let errs = |sigma: f64| sigma > 0.0 && sigma.is_finite();
            if let Some(rounded) = &ideal {
                for ((s, q), rounded) in sums.iter_mut().zip(squares).zip(&rounded[range]) {
                    *s = if errs(error.sigma(*s, *q)) { *rounded } else { *s };
                }
                continue;
            }
            wide(
                #[inline(always)]
                || {
                    for (s, q) in sums.iter_mut().zip(squares) {
                        let sigma = wider * error.sigma(*s, *q);
                        let moved = *s + sigma * toss.normal(*s, *q);
                        *s = if errs(sigma) { moved } else { *s };
                    }
                },
            );
        }
        Ok(Tensor::from_vec(sums, sum.shape(), sum.device())?)
    }
}

/// Between two subnormal fp32 numbers: 2^-149.
const SUBNORMAL_GAP: f64 = f64::from_bits((1023 - 149) << 52);

/// Of fp32: 2^-24.
const UNIT_ROUNDOFF: f64 = f64::from_bits((1023 - 24) << 52);

/// Standard deviation of the error of an fp32 sum of `n` terms with sum `s` and sum of squares `q`,
/// in this many lanes. In one lane it is `u sqrt((n + 1) (s^2/3 + q/6) / (4 ln 2))`, `u = 2^-24`.
/// Zero when there is nothing to add.
pub fn accumulation_sigma(s: f64, q: f64, n: f64, lanes: usize) -> f64 {
    AccumulationError::of(n, lanes).sigma(s, q)
}

/// [`accumulation_sigma`] of sums of `n` terms.
#[derive(Debug, Clone, Copy)]
struct AccumulationError {
    n: f64,
    /// The expected squares of all partial sums are that many times `s^2`,
    of_sum: f64,
    /// and that many times the scatter of the terms.
    of_scatter: f64,
    one_lane: bool,
}

impl AccumulationError {
    /// Lanes add one term after the other, and a tree adds the lanes (module documentation).
    fn of(n: f64, lanes: usize) -> Self {
        let one_lane = lanes == 1;
        let lanes = lanes as f64;
        let chain = (n / lanes).ceil();
        // sum_j j and sum_j j^2 over the terms of a chain.
        let (first, second) =
            (chain * (chain + 1.0) / 2.0, chain * (chain + 1.0) * (2.0 * chain + 1.0) / 6.0);
        let chains = lanes.min(n);
        let (mut of_sum, mut of_scatter) =
            (chains * second / (n * n), chains * (n * first - second));
        let (mut terms, mut sums) = (chain, lanes);
        while sums > 1.0 {
            (terms, sums) = ((2.0 * terms).min(n), (sums / 2.0).ceil());
            let sums = sums.min((n / terms).ceil());
            of_sum += sums * (terms / n).powi(2);
            of_scatter += sums * terms * (n - terms);
        }
        Self { n, of_sum, of_scatter, one_lane }
    }

    #[inline(always)]
    fn sigma(self, s: f64, q: f64) -> f64 {
        let Self { n, of_sum, of_scatter, one_lane } = self;
        if n < 1.0 {
            return 0.0;
        }
        let sequential = (n + 1.0) * (s * s / 3.0 + q / 6.0);
        let squared_partial_sums = if one_lane {
            sequential
        } else {
            let scatter = if n > 1.0 { ((q - s * s / n) / (n * (n - 1.0))).max(0.0) } else { 0.0 };
            (of_sum * (s * s) + of_scatter * scatter).min(sequential)
        };
        // A term that is cut off at the gap g of subnormal numbers errs by g^2/3; their sums are
        // exact.
        let subnormal =
            if s == 0.0 && q == 0.0 { 0.0 } else { n * SUBNORMAL_GAP * SUBNORMAL_GAP / 3.0 };
        (UNIT_ROUNDOFF * UNIT_ROUNDOFF * squared_partial_sums / (4.0 * std::f64::consts::LN_2)
            + subnormal)
            .sqrt()
    }
}

/// Sums of the squares of the terms of `a @ b`. The terms of an element are `a_ik b_kj`, so this
/// is a product of squares.
fn squares_of_terms(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.sqr()?.matmul(&b.sqr()?)?)
}

/// Sums of the signs of the terms of `a @ b`.
fn signs_of_terms(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.sign()?.matmul(&b.sign()?)?)
}

/// The factor of each value of a row that makes the maximum known at that point 1.
fn scales_by(row: &[f64], choice: Maximum) -> Vec<f64> {
    let (tile, begins_anew) = match choice {
        Maximum::Row => (row.len(), false),
        Maximum::Running(tile) => (tile, false),
        Maximum::Tile(tile) => (tile, true),
    };
    let mut largest = 0.0f64;
    let mut scales = Vec::with_capacity(row.len());
    for tile in row.chunks(tile.max(1)) {
        let before = if begins_anew { 0.0 } else { largest };
        largest = tile.iter().fold(before, |largest, &x| largest.max(x));
        let scale = if largest > 0.0 && largest.is_finite() { largest.recip() } else { 1.0 };
        // A tile may be so much smaller than the rest that its scale overflows. It holds zeros in
        // every format.
        scales.extend(std::iter::repeat_n(if scale.is_finite() { scale } else { 1.0 }, tile.len()));
    }
    scales
}

/// The sums of f64 terms, and of their squares, over a dimension, which stays with size 1.
fn sums(terms: &Tensor, dim: usize) -> Result<(Tensor, Tensor)> {
    // candle sums over another dimension than the last with two divisions for each element. Only its
    // own operations have derivatives.
    if dim + 1 == terms.rank() || terms.track_op() {
        return Ok((terms.sum_keepdim(dim)?, terms.sqr()?.sum_keepdim(dim)?));
    }
    let mut shape = terms.dims().to_vec();
    let rest: usize = shape[dim + 1..].iter().product();
    let count = std::mem::replace(&mut shape[dim], 1);
    let blocks: usize = shape[..dim].iter().product();
    let (mut of_terms, mut of_squares) = (vec![0.0; blocks * rest], vec![0.0; blocks * rest]);
    seen(terms, |terms| {
        wide(
            #[inline(always)]
            || {
                for (row, terms) in terms.chunks(rest.max(1)).enumerate() {
                    let at = row / count * rest;
                    let (sums, squares) =
                        (&mut of_terms[at..at + rest], &mut of_squares[at..at + rest]);
                    for ((sum, square), term) in sums.iter_mut().zip(squares).zip(terms) {
                        *sum += term;
                        *square += term * term;
                    }
                }
            },
        )
    })?;
    let device = terms.device();
    Ok((
        Tensor::from_vec(of_terms, shape.as_slice(), device)?,
        Tensor::from_vec(of_squares, shape, device)?,
    ))
}

/// All elements of an f64 tensor in row-major order.
///
/// # Errors
/// A tensor of another type.
pub fn elements(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    // candle's own copy of a transposed or broadcast tensor counts up all indices for each element,
    // which takes several times as long as what an oracle computes of them.
    let (storage, layout) = tensor.storage_and_layout();
    if let candle_core::Storage::Cpu(CpuStorage::F64(data)) = &*storage {
        return Ok(gathered(data, layout));
    }
    drop(storage);
    tensor.flatten_all()?.to_vec1()
}

/// What a function makes of all elements of an f64 tensor, in row-major order. They are not copied
/// where they lie one after the other.
fn seen<R>(tensor: &Tensor, of: impl FnOnce(&[f64]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    if let (candle_core::Storage::Cpu(CpuStorage::F64(data)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    {
        return Ok(of(&data[start..end]));
    }
    drop(storage);
    Ok(of(&values(tensor)?))
}

/// Elements that a core's smallest cache holds, twice.
const NEAR: usize = 2048;

/// The tensor with each element changed, some thousand at a time: a copy of a large tensor as a
/// whole would be in memory, not in a cache, when it is changed.
fn each_changed(tensor: &Tensor, change: impl Fn(&mut [f64])) -> Result<Tensor> {
    let changed = seen(tensor, |elements| {
        let mut changed = Vec::with_capacity(elements.len());
        for some in elements.chunks(NEAR) {
            let from = changed.len();
            changed.extend_from_slice(some);
            change(&mut changed[from..]);
        }
        changed
    })?;
    Ok(Tensor::from_vec(changed, tensor.shape(), tensor.device())?)
}

/// [`elements`], for oracles.
pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(elements(tensor)?)
}

/// The elements of a layout, row by row along its last axis.
pub(crate) fn gathered<T: Copy>(data: &[T], layout: &Layout) -> Vec<T> {
    if let Some((start, end)) = layout.contiguous_offsets() {
        return data[start..end].to_vec();
    }
    let count = layout.shape().elem_count();
    let mut found = Vec::with_capacity(count);
    let (Some((&row, outer)), Some((&step, outer_steps))) =
        (layout.dims().split_last(), layout.stride().split_last())
    else {
        return found;
    };
    let mut index = vec![0; outer.len()];
    let mut at = layout.start_offset();
    while found.len() < count {
        match step {
            0 => found.resize(found.len() + row, data[at]),
            1 => found.extend_from_slice(&data[at..at + row]),
            _ => found.extend(data[at..].iter().step_by(step).take(row)),
        }
        for axis in (0..outer.len()).rev() {
            index[axis] += 1;
            at += outer_steps[axis];
            if index[axis] < outer[axis] {
                break;
            }
            at -= index[axis] * outer_steps[axis];
            index[axis] = 0;
        }
    }
    found
}

/// Random values of a run: one function of value for each rounding point.
#[derive(Debug, Clone)]
struct Noise {
    seed: u64,
    to_nearest: bool,
    rounding_points: u64,
}

impl Noise {
    fn new(seed: u64, to_nearest: bool) -> Self {
        Self { seed, to_nearest, rounding_points: 0 }
    }

    /// Whether this is the run of a kernel without noise.
    fn is_ideal(&self) -> bool {
        self.to_nearest && self.seed < CHOICES as u64
    }

    /// Whether subnormal results of approximations become zero.
    fn flushes(&self) -> bool {
        !self.to_nearest || (self.seed % CHOICES as u64).is_multiple_of(2)
    }

    /// Whether the exponential is taken where it may overflow. Of the choices that keep subnormal
    /// results, one does this.
    fn overflows(&self) -> bool {
        self.to_nearest && self.seed % CHOICES as u64 == CHOICES as u64 - 1
    }

    /// A size of errors, zero in the run of a kernel without noise.
    fn unless_ideal(&self, size: f64) -> f64 {
        if self.is_ideal() { 0.0 } else { size }
    }

    /// The function of the next rounding point.
    fn next(&mut self) -> Toss {
        self.rounding_points += 1;
        Toss { salt: scramble(scramble(self.seed) ^ self.rounding_points) }
    }
}

/// Random values that depend only on the rounding point and the values themselves.
#[derive(Debug, Clone, Copy)]
struct Toss {
    salt: u64,
}

impl Toss {
    /// Uniform in [0, 1), the same for all values.
    fn phase(self) -> f64 {
        unit(scramble(self.salt ^ 0x7068_6173_6500_0000))
    }

    /// Uniform in [0, 1).
    #[inline(always)]
    fn uniform(self, x: f64) -> f64 {
        unit(scramble(self.salt ^ key(x)))
    }

    /// Standard normal, but the tails end at `2 sqrt(6)`: a sum of eight uniform numbers. Errors of
    /// a sum of roundings are also such a sum. (The logarithm and cosine of Box and Muller took a
    /// twentieth of the time of a sweep.)
    #[inline(always)]
    fn normal(self, x: f64, y: f64) -> f64 {
        let bits = scramble(scramble(self.salt ^ key(x)).wrapping_add(key(y)));
        let pieces = |bits: u64| {
            (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48)
        };
        let sum = pieces(bits) + pieces(scramble(bits));
        // Eight numbers 0 to 65535, of mean 65535/2 and variance (65536^2 - 1)/12 each.
        (f64::from(sum as u32) - 4.0 * 65535.0)
            * f64::sqrt(12.0 / (8.0 * (65536.0 * 65536.0 - 1.0)))
    }
}

/// The leading 40 significand bits of a number, rounded, so that sums of the same terms in another
/// order give the same key.
#[inline(always)]
fn key(x: f64) -> u64 {
    x.to_bits().wrapping_add(1 << 11) >> 12
}

/// The mixing function of the SplitMix64 generator.
#[inline(always)]
fn scramble(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The leading 53 bits as a number in [0, 1).
#[inline(always)]
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use candle_core::IndexOp as _;

    use super::*;
    use crate::testing::{Draw, f64_tensor};

    fn working(seed: u64) -> Rounding {
        Rounding::new(Precision::Working { seed })
    }

    #[test]
    fn elements_of_any_layout_come_in_row_major_order() -> Result<()> {
        let numbers: Vec<f64> = (0..210).map(f64::from).collect();
        let x = f64_tensor(&numbers, &[5, 6, 7]);
        let one = f64_tensor(&[3.0], &[1]);
        let layouts = [
            x.clone(),
            x.transpose(0, 2)?,
            x.transpose(1, 2)?,
            x.permute((1, 0, 2))?,
            x.narrow(1, 2, 3)?,
            x.narrow(2, 6, 1)?,
            x.narrow(1, 2, 3)?.transpose(0, 1)?,
            x.narrow(2, 1, 1)?.broadcast_as((5, 6, 4))?,
            x.narrow(0, 4, 1)?.broadcast_as((3, 6, 7))?,
            x.i((.., 3, ..))?.t()?,
            one.broadcast_as((2, 3, 4))?,
            one.reshape(())?.broadcast_as((3,))?,
            x.narrow(0, 0, 0)?.transpose(0, 1)?,
            x.i((1, 2, 3))?,
        ];
        for layout in layouts {
            let of_candle: Vec<f64> = layout.flatten_all()?.to_vec1()?;
            assert_eq!(values(&layout)?, of_candle, "{:?}", layout.layout());
        }
        Ok(())
    }

    #[test]
    fn sums_over_any_dimension_have_the_bits_of_candle() -> Result<()> {
        let numbers: Vec<f64> = (0..210).map(|n| f64::from(n).sin()).collect();
        let x = f64_tensor(&numbers, &[5, 6, 7]);
        let tensors = [
            x.clone(),
            x.transpose(0, 2)?,
            x.narrow(1, 2, 3)?.broadcast_as((5, 3, 7))?,
            x.reshape((5, 42, 1))?,
            x.narrow(0, 0, 0)?,
            x.narrow(1, 0, 0)?,
            x.narrow(2, 0, 0)?,
        ];
        for tensor in tensors {
            for dim in 0..3 {
                let (sum, squares) = sums(&tensor, dim)?;
                let expected = [tensor.sum_keepdim(dim)?, tensor.sqr()?.sum_keepdim(dim)?];
                for (found, expected) in [sum, squares].into_iter().zip(expected) {
                    assert_eq!(found.dims(), expected.dims());
                    assert_eq!(values(&found)?, values(&expected)?, "{:?} {dim}", tensor.layout());
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_watching_run_sees_what_scaling_moves_out_of_the_range_of_f32_and_nothing_else() {
        let see = |numbers: &[f64]| {
            let mut rounding = Rounding::watching();
            let tensor = f64_tensor(numbers, &[numbers.len()]);
            assert_eq!(values(&rounding.f32(&tensor).unwrap()).unwrap(), numbers);
            rounding.outside_f32()
        };
        let nothing = see(&[]);
        assert_eq!(nothing, see(&[1.0, 0.0, -1e-30, 1e30, f64::INFINITY, 1e-60]));
        for outside in [1e-39, -1e-44, 1e38, 1e60] {
            assert_ne!(nothing, see(&[1.0, outside]));
            // The same value again does not change the digest; a scaled value does, and so does
            // another index.
            assert_eq!(see(&[4.0, outside]), see(&[1.0, outside]));
            assert_ne!(see(&[1.0, 4.0 * outside]), see(&[1.0, outside]));
            assert_ne!(see(&[outside, 1.0]), see(&[1.0, outside]));
        }
        assert_eq!(Rounding::exact().outside_f32(), 0);
    }

    #[test]
    fn sums_products_and_powers_are_watched_too() -> Result<()> {
        let tiny = f64_tensor(&[1e-20], &[1, 1]);
        let seen = |work: &dyn Fn(&mut Rounding) -> Result<Tensor>| -> Result<bool> {
            let mut rounding = Rounding::watching();
            work(&mut rounding)?;
            Ok(rounding.outside_f32() != 0)
        };
        assert!(seen(&|r| r.matmul_f32(&tiny, &tiny))?);
        assert!(seen(&|r| r.sum_f32(&tiny.sqr()?, 0))?);
        assert!(seen(&|r| r.exp_f32(&f64_tensor(&[-88.0], &[1])))?);
        assert!(seen(&|r| r.sigmoid_f32(&f64_tensor(&[-88.0], &[1])))?);
        assert!(!seen(&|r| r.sigmoid_f32(&f64_tensor(&[-70.0, 200.0, -200.0], &[3])))?);
        Ok(())
    }

    #[test]
    fn exact_runs_round_nothing() -> Result<()> {
        let x = Draw::new(1).normal(&[5, 7], 1.0);
        let mut exact = Rounding::exact();
        for y in [exact.bf16(&x)?, exact.f32(&x)?, exact.approximate_f32(&x)?] {
            assert_eq!(values(&y)?, values(&x)?);
        }
        assert_eq!(values(&exact.exp_f32(&x)?)?, values(&x.exp()?)?);
        Ok(())
    }

    #[test]
    fn values_of_the_type_and_exceptional_values_are_unchanged() -> Result<()> {
        let kept = [
            0.0,
            -0.0,
            1.0,
            -1.5,
            0.0078125,
            1.9921875,
            3.3895313892515355e38,
            2f64.powi(-133),
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
        ];
        let x = f64_tensor(&kept, &[kept.len()]);
        for seed in 0..20 {
            let y = values(&working(seed).bf16(&x)?)?;
            for (a, b) in kept.iter().zip(y) {
                assert_eq!(a.to_bits(), b.to_bits(), "{a} became {b}");
            }
        }
        Ok(())
    }

    #[test]
    fn every_f32_survives_rounding_to_f32() -> Result<()> {
        let widened: Vec<f64> =
            values(&Draw::new(3).normal(&[1000], 1e-3))?.iter().map(|&x| x as f32 as f64).collect();
        let x = f64_tensor(&widened, &[1000]);
        assert_eq!(values(&working(0).f32(&x)?)?, widened);
        Ok(())
    }

    #[test]
    fn rounding_errs_uniformly_within_half_a_gap_and_is_unbiased() -> Result<()> {
        // 1 + 3/8 of the bf16 gap 2^-7 above one, its mirror image, and a subnormal.
        let cases = [
            (1.0 + 0.375 / 128.0, 2f64.powi(-7)),
            (-1.0 - 0.375 / 128.0, 2f64.powi(-7)),
            (5.375 * 2f64.powi(-133), 2f64.powi(-133)),
        ];
        let trials = 20_000;
        for (x, gap) in cases {
            let tensor = f64_tensor(&[x], &[1]);
            let errors = (0..trials)
                .map(|seed| Ok((values(&working(seed as u64).bf16(&tensor)?)?[0] - x) / gap))
                .collect::<Result<Vec<_>>>()?;
            assert!(errors.iter().all(|error| error.abs() <= 0.5));
            let (mean, variance) = (errors.iter().sum::<f64>() / trials as f64, 1.0 / 12.0);
            let of_squares = errors.iter().map(|e| e * e).sum::<f64>() / trials as f64;
            // Five deviations fail once in 1.7 million runs. Squares of uniform errors deviate by
            // sqrt(4/5) of their mean.
            let deviations = 5.0 / (trials as f64).sqrt();
            assert!(mean.abs() < deviations * f64::sqrt(variance), "{mean}");
            assert!(
                (of_squares / variance - 1.0).abs() < deviations * f64::sqrt(0.8),
                "{of_squares}"
            );
        }
        Ok(())
    }

    #[test]
    fn overflow_becomes_an_infinity_of_the_same_sign() -> Result<()> {
        let x = f64_tensor(&[1e300, -1e300], &[2]);
        assert_eq!(values(&working(0).f32(&x)?)?, [f64::INFINITY, f64::NEG_INFINITY]);
        Ok(())
    }

    #[test]
    fn equal_seeds_give_equal_runs_and_other_seeds_do_not() -> Result<()> {
        let x = Draw::new(2).normal(&[64], 1.0);
        assert_eq!(values(&working(5).bf16(&x)?)?, values(&working(5).bf16(&x)?)?);
        assert_ne!(values(&working(5).bf16(&x)?)?, values(&working(6).bf16(&x)?)?);
        Ok(())
    }

    #[test]
    fn drawn_sum_errors_have_the_modelled_deviation_and_no_bias() -> Result<()> {
        let (rows, n) = (4000, 33);
        let terms = Draw::new(4).normal(&[1, n], 1.0);
        let exact = vec![values(&terms.sum(1)?)?[0]; rows];
        let noisy = (0..rows)
            .map(|seed| Ok(values(&working(seed as u64).sum_f32(&terms, 1)?)?[0]))
            .collect::<Result<Vec<_>>>()?;
        let errors: Vec<f64> = noisy.iter().zip(&exact).map(|(a, b)| a - b).collect();
        let q: f64 = values(&terms.get(0)?.sqr()?)?.iter().sum();
        let sigma = accumulation_sigma(exact[0], q, n as f64, 1);
        let mean = errors.iter().sum::<f64>() / rows as f64;
        let rms = (errors.iter().map(|e| e * e).sum::<f64>() / rows as f64).sqrt();
        // The mean of R normals deviates by sigma/sqrt(R), their rms by sigma/sqrt(2R).
        assert!(mean.abs() < 5.0 * sigma / (rows as f64).sqrt());
        assert!((rms / sigma - 1.0).abs() < 5.0 / (2.0 * rows as f64).sqrt());
        Ok(())
    }

    /// The root mean square error of fp32 sums of `n` terms around a mean, in random orders,
    /// divided by the model's value.
    fn real_errors_of_modelled(n: usize, mean: f64, trials: usize, lanes: usize) -> Result<f64> {
        let mut draw = Draw::new((n + lanes) as u64);
        let shifted = (draw.normal(&[n], 1.0) + mean)?;
        let mut terms: Vec<f32> = values(&shifted)?.iter().map(|&x| x as f32).collect();
        let s: f64 = terms.iter().map(|&t| f64::from(t)).sum();
        let q: f64 = terms.iter().map(|&t| f64::from(t).powi(2)).sum();
        let squared_error: f64 = (0..trials)
            .map(|_| {
                draw.shuffle(&mut terms);
                (f64::from(sum_in_lanes(&terms, lanes)) - s).powi(2)
            })
            .sum();
        let sigma = accumulation_sigma(s, q, n as f64, lanes);
        assert!(sigma <= accumulation_sigma(s, q, n as f64, 1), "lanes only help");
        Ok((squared_error / trials as f64).sqrt() / sigma)
    }

    #[test]
    fn real_random_order_f32_sums_err_by_what_the_model_says() -> Result<()> {
        let trials = 3000;
        let sampling = 5.0 / (2.0 * trials as f64).sqrt();
        for (n, mean) in [(16, 0.0), (512, 0.0), (512, 1.0), (4096, 0.1)] {
            let ratio = real_errors_of_modelled(n, mean, trials, 1)?;
            println!("n {n}, mean {mean}: real rms error / modelled sigma = {ratio:.3}");
            // Between sqrt(ln 2 / 3) and sqrt(4 ln 2 / 3) (module documentation). The terms are
            // fp32, so the first of the n + 1 modelled roundings does not happen. An addition that
            // cancels is exact.
            let charged = ((n as f64 - 1.0) / (n as f64 + 1.0)).sqrt();
            let (low, high) = ((2f64.ln() / 3.0).sqrt(), (4.0 * 2f64.ln() / 3.0).sqrt());
            assert!(ratio <= high * (1.0 + sampling) && ratio <= 1.0 + sampling);
            assert!(ratio >= low * charged * (1.0 - sampling));
        }
        Ok(())
    }

    #[test]
    fn real_sums_in_lanes_err_by_what_the_model_says() -> Result<()> {
        let trials = 1500;
        let sampling = 5.0 / (2.0 * trials as f64).sqrt();
        for (n, lanes, mean) in
            [(4096, 32, 1.0), (4096, 32, 0.0), (100, 4, 1.0), (1000, 128, 0.1), (7, 32, 1.0)]
        {
            let ratio = real_errors_of_modelled(n, mean, trials, lanes)?;
            println!(
                "n {n}, lanes {lanes}, mean {mean}: real rms error / modelled sigma = {ratio:.3}"
            );
            // As for a sequential sum; a chain's first addition, to zero, is exact but counted.
            assert!(ratio <= 1.0 + sampling && ratio >= 0.3, "n {n}, lanes {lanes}: {ratio}");
        }
        Ok(())
    }

    /// As in a warp: lane i takes terms i, i + lanes, .., then lanes are added in pairs.
    fn sum_in_lanes(terms: &[f32], lanes: usize) -> f32 {
        let of_lane =
            |lane: usize| terms.iter().skip(lane).step_by(lanes).fold(0.0f32, |sum, &t| sum + t);
        let mut sums: Vec<f32> = (0..lanes).map(of_lane).collect();
        while sums.len() > 1 {
            sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
        }
        sums[0]
    }

    #[test]
    fn a_run_to_nearest_scales_by_the_maximum_of_the_tiles_so_far() -> Result<()> {
        let row = [0.0, 0.25, 0.5, 0.125, 1.0, 0.0, 0.25, 0.125];
        assert_eq!(scales_by(&row, Maximum::Row), [1.0; 8]);
        assert_eq!(scales_by(&row, Maximum::Running(2)), [4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(scales_by(&row, Maximum::Tile(2)), [4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 4.0, 4.0]);
        assert_eq!(scales_by(&[0.0, 0.0, 0.5], Maximum::Running(2)), [1.0, 1.0, 2.0]);
        // 0.7 is rounded as 1 while no larger value was seen, and as itself after a 1.
        let row: Vec<f64> = (0..128).map(|i| if i == 100 { 1.0 } else { 0.7 }).collect();
        let of = |seed: u64| -> Result<Vec<f64>> {
            let rounded = Rounding::new(Precision::Nearest { seed })
                .bf16_of_any_scale(&f64_tensor(&row, &[1, 128]))?;
            values(&rounded)
        };
        let rounded = f64::from(half::bf16::from_f64(0.7));
        assert!(of(0)?.iter().all(|&x| x == rounded || x == 1.0));
        let running = of(1)?;
        // Scaled to 1 and back: two roundings in f64.
        assert!(
            running[..64].iter().all(|x| (x / 0.7 - 1.0).abs() <= 2.0 * f64::EPSILON)
                && running[64] == rounded
        );
        Ok(())
    }

    #[test]
    fn matrix_products_carry_the_noise_of_their_terms() -> Result<()> {
        let mut draw = Draw::new(8);
        let (a, b) = (draw.normal(&[2, 40, 24], 1.0), draw.normal(&[2, 24, 50], 1.0));
        let exact = a.matmul(&b)?;
        let noisy = working(3).matmul_f32(&a, &b)?;
        let squares = values(&a.sqr()?.matmul(&b.sqr()?)?)?;
        let (exact, noisy) = (values(&exact)?, values(&noisy)?);
        // 24 terms are two blocks, each of which truncates u |S| / (2 ln 2), with one sign for the
        // whole product.
        let truncated = 2.0 * power_of_two(-24) / (2.0 * std::f64::consts::LN_2);
        let normalised = |sign: f64| -> f64 {
            let drawn = exact.iter().zip(&noisy).zip(&squares);
            drawn
                .map(|((e, x), q)| {
                    ((x - e - sign * truncated * e) / accumulation_sigma(*e, *q, 24.0, 1)).powi(2)
                })
                .sum()
        };
        let count = exact.len() as f64;
        let deviation = |sign: f64| (normalised(sign) / count - 1.0).abs();
        assert!(deviation(1.0).min(deviation(-1.0)) < 5.0 * (2.0 / count).sqrt());
        Ok(())
    }

    /// The result of an accumulator that truncates each product, in groups of 32 that are aligned
    /// together, with promotion every `promote_every` terms.
    fn truncated_sum(terms: &[f64], fraction_bits: i32, promote_every: usize) -> f64 {
        let mut promoted = 0.0f32;
        for piece in terms.chunks(promote_every) {
            let mut sum = 0.0f64;
            for group in piece.chunks(32) {
                let largest = group.iter().fold(sum.abs(), |largest, t| largest.max(t.abs()));
                let gap = power_of_two(largest.log2().floor().max(-200.0) as i32 - fraction_bits);
                let aligned = |t: f64| (t / gap).trunc() * gap;
                sum = aligned(group.iter().fold(aligned(sum), |sum, &t| sum + aligned(t)));
            }
            promoted += sum as f32;
        }
        f64::from(promoted)
    }

    #[test]
    fn a_narrow_accumulator_loses_the_documented_ones_and_the_model_covers_it() -> Result<()> {
        let mut terms = vec![1.0; 7168];
        terms[0] = 16384.0;
        let (a, b) = (f64_tensor(&terms, &[1, 7168]), f64_tensor(&[1.0; 7168], &[7168, 1]));
        let narrow = Accumulator::HOPPER_E4M3;
        for (accumulator, every, documented) in
            [(narrow, 7168, 16384.0), (narrow.promoted_every(128), 128, 23424.0)]
        {
            assert_eq!(truncated_sum(&terms, 13, every), documented);
            let lost = 23551.0 - documented;
            let errors = (0..64)
                .map(|seed| Ok(values(&working(seed).matmul(&a, &b, accumulator)?)?[0] - 23551.0))
                .collect::<Result<Vec<_>>>()?;
            let rms = (errors.iter().map(|e| e * e).sum::<f64>() / 64.0).sqrt();
            println!("{documented}: lost {lost}, rms of the model {rms:.1}");
            assert!(lost < 2.0 * rms && rms < 4.0 * lost, "lost {lost}, rms of the model {rms}");
        }
        assert_eq!(
            values(&Rounding::exact().matmul(&a, &b, narrow.promoted_every(128))?)?,
            [23551.0]
        );
        // fp32 holds all of it.
        let wide = values(&working(0).matmul(&a, &b, Accumulator::F32)?)?[0];
        assert!((wide - 23551.0).abs() < 0.5);
        Ok(())
    }

    #[test]
    fn truncated_products_err_by_what_the_model_of_their_accumulator_says_and_those_of_e4m3_by_less()
    -> Result<()> {
        let (rows, k, columns) = (24, 1024, 24);
        let cases = [(0.0, 1024), (0.0, 128), (1.0, 1024), (1.0, 128)];
        for ((shift, every), e4m3) in
            cases.into_iter().flat_map(|case| [(case, false), (case, true)])
        {
            let stored = |x: f64| if e4m3 { Format::E4M3.nearest(x) } else { x };
            let mut draw = Draw::new(17);
            let mut operand = |shape: &[usize]| -> Result<Tensor> {
                let numbers: Vec<f64> =
                    values(&draw.normal(shape, 1.0))?.iter().map(|x| stored(x + shift)).collect();
                Ok(f64_tensor(&numbers, shape))
            };
            let (a, b) = (operand(&[rows, k])?, operand(&[k, columns])?);
            let exact = values(&a.matmul(&b)?)?;
            let (av, bv) = (values(&a)?, values(&b)?);
            let mut real = 0.0;
            for (i, e) in exact.iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let terms: Vec<f64> =
                    (0..k).map(|j| av[row * k + j] * bv[j * columns + column]).collect();
                real += (truncated_sum(&terms, 13, every) - e).powi(2);
            }
            let accumulator = Accumulator::HOPPER_E4M3.promoted_every(every);
            let mut modelled = 0.0;
            for seed in 0..8 {
                let noisy = values(&working(seed).matmul(&a, &b, accumulator)?)?;
                modelled +=
                    noisy.iter().zip(&exact).map(|(x, e)| (x - e).powi(2)).sum::<f64>() / 8.0;
            }
            let ratio = (real / modelled).sqrt();
            println!(
                "mean {shift}, promoted every {every}, e4m3 {e4m3}: real rms error / modelled = {ratio:.3}"
            );
            // Products of e4m3 values have eight bits, and often none below the gap.
            assert!(
                ratio < 1.0 && (e4m3 || ratio > 0.1),
                "mean {shift}, promoted every {every}: {ratio}"
            );
        }
        Ok(())
    }

    #[test]
    fn promotion_after_no_terms_is_refused_and_after_all_of_them_changes_nothing() -> Result<()> {
        let mut draw = Draw::new(18);
        let (a, b) = (draw.normal(&[3, 40], 1.0), draw.normal(&[40, 5], 1.0));
        let never = Accumulator::default().promoted_every(0);
        assert!(
            working(0).matmul(&a, &b, never).unwrap_err().to_string().contains("promote_every")
        );
        let whole = values(&working(1).matmul(&a, &b, Accumulator::F32.promoted_every(40))?)?;
        assert_eq!(whole, values(&working(1).matmul_f32(&a, &b)?)?);
        Ok(())
    }

    #[test]
    fn shared_products_are_multiplied_once_and_so_is_what_scales_noise() -> Result<()> {
        let mut draw = Draw::new(19);
        let (a, b) = (draw.bf16(&[2, 6, 32], 1.0), draw.bf16(&[2, 32, 7], 1.0));
        let products = Products::default();
        // The second product has an operand that is rounded, and differs from run to run.
        let run = |mut rounding: Rounding| -> Result<[Vec<f64>; 4]> {
            // As in an oracle: newly made tensors, and a view.
            let (a, b) = (a.copy()?, b.transpose(1, 2)?.contiguous()?.transpose(1, 2)?);
            let first = rounding.matmul_f32(&a, &b)?;
            let stored = rounding.bf16(&first)?;
            let narrow = rounding.matmul(&a, &b, Accumulator::HOPPER_E4M3)?;
            let last = rounding.matmul_f32(&stored, &b.transpose(1, 2)?)?;
            let squares = squares_of_terms(&stored, &b.transpose(1, 2)?)?;
            Ok([&first, &narrow, &last, &squares]
                .map(values)
                .into_iter()
                .collect::<Result<Vec<_>>>()?
                .try_into()
                .unwrap())
        };
        // The exact run multiplies what differs: two products, not counting what scales their
        // noise. Each other run multiplies only the product of what it rounded.
        let expected = [
            (Precision::Exact, 2),
            (Precision::Working { seed: 1 }, 3),
            (Precision::Nearest { seed: 2 }, 4),
        ];
        for (precision, multiplied) in expected {
            let (shared, alone) =
                (run(Rounding::sharing(precision, &products))?, run(Rounding::new(precision))?);
            assert_eq!(shared[..2], alone[..2], "{precision:?}");
            // The second product has noise of the exact run's scale instead of its own, and so
            // another random value.
            let apart: f64 = shared[2].iter().zip(&alone[2]).map(|(x, y)| (x - y).powi(2)).sum();
            let of_noise = |(s, q): (&f64, &f64)| 2.0 * accumulation_sigma(*s, *q, 7.0, 1).powi(2);
            let expected: f64 = alone[2].iter().zip(&alone[3]).map(of_noise).sum();
            // A sum of squares of this many normal values, within five deviations.
            assert!(
                apart <= expected * (1.0 + 5.0 * (2.0 / alone[2].len() as f64).sqrt()),
                "{precision:?}"
            );
            assert_eq!(products.multiplied(), multiplied, "{precision:?}");
        }
        Ok(())
    }

    /// A shorter scale tensor would leave all elements after its end without noise.
    #[test]
    fn what_scales_the_noise_of_sums_has_their_shape() -> Result<()> {
        let (sums, fewer) = (Draw::new(1).normal(&[3, 4], 1.0), Draw::new(2).normal(&[2, 4], 1.0));
        let mut rounding = Rounding::new(Precision::Working { seed: 1 });
        assert!(rounding.accumulated_f32(&sums, &sums.sqr()?, &sums.ones_like()?).is_ok());
        for [squares, counts] in [[&fewer, &sums], [&sums, &fewer]] {
            assert!(rounding.accumulated_f32(&sums, squares, counts).is_err());
        }
        Ok(())
    }

    #[test]
    fn rounding_to_nearest_is_that_of_the_type() -> Result<()> {
        let run = |seed: usize| Rounding::new(Precision::Nearest { seed: seed as u64 });
        let x = Draw::new(11).normal(&[1000], 1e-2);
        let nearest = values(&run(CHOICES).bf16(&x)?)?;
        assert!(
            values(&x)?.iter().zip(nearest).all(|(&x, y)| half::bf16::from_f64(x).to_f64() == y)
        );
        // In fp32 the kernel's free choices remain, except in the runs without noise.
        assert_ne!(values(&run(CHOICES).f32(&x)?)?, values(&run(CHOICES + 1).f32(&x)?)?);
        let ideal = |x: f64| f64::from(x as f32);
        for fine in [
            run(0).f32(&x)?,
            run(1).approximate_f32(&x)?,
            run(2).accumulated_f32(&x, &x.sqr()?, &x.ones_like()?)?,
        ] {
            assert!(values(&x)?.iter().zip(values(&fine)?).all(|(&x, y)| ideal(x) == y));
        }
        let ties = f64_tensor(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0], &[2]);
        let even = [1.0, 1.0 + 4.0 / 256.0];
        assert_eq!(values(&Rounding::new(Precision::Nearest { seed: 0 }).bf16(&ties)?)?, even);
        Ok(())
    }

    #[test]
    fn equal_numbers_round_equally() -> Result<()> {
        let x = 1.0 + 0.375 / 128.0;
        for seed in 0..64 {
            let rounded = values(&working(seed).bf16(&f64_tensor(&[x, 3.0, x], &[3]))?)?;
            assert_eq!(rounded[0], rounded[2]);
        }
        Ok(())
    }

    #[test]
    fn differences_of_numbers_that_are_rounded_apart_scatter_also_where_both_lie_equally_between_neighbours()
    -> Result<()> {
        // A gap is 2^-17 here. Both are 0.4 gaps above a value of the type, up to a hundredth of a
        // gap.
        let gap = power_of_two(-17);
        let (x, y) = (67.0 + 0.40 * gap, 76.0 + 0.41 * gap);
        let pair = f64_tensor(&[x, y, x], &[3]);
        const RUNS: u64 = 400;
        let mean_square = |round: &dyn Fn(&mut Rounding) -> Result<Tensor>| -> Result<f64> {
            let error = |seed| -> Result<f64> {
                let rounded = values(&round(&mut working(seed))?)?;
                assert_eq!(rounded[0], rounded[2], "equal numbers err equally");
                assert!((rounded[0] - x).abs() <= gap / 2.0 && (rounded[1] - y).abs() <= gap / 2.0);
                Ok(((rounded[1] - rounded[0]) - (y - x)) / gap)
            };
            let errors = (0..RUNS).map(error).collect::<Result<Vec<_>>>()?;
            Ok(errors.iter().map(|error| error * error).sum::<f64>() / RUNS as f64)
        };
        // Errors have a triangular density: 1/6, and the square scatters by sqrt(1/15 - 1/36).
        let apart = mean_square(&|rounding| rounding.f32_apart(&pair))?;
        let scatter = ((1.0 / 15.0 - 1.0 / 36.0) / RUNS as f64).sqrt();
        assert!((apart - 1.0 / 6.0).abs() < 5.0 * scatter, "{apart}");
        // With one phase: 0.01 (1 - 0.01), in a few of all runs.
        let together = mean_square(&|rounding| rounding.f32(&pair))?;
        assert!(together < 0.05, "{together}");
        let ideal = Rounding::new(Precision::Nearest { seed: 0 }).f32_apart(&pair)?;
        assert!(
            values(&ideal)?
                .iter()
                .zip([x, y, x])
                .all(|(rounded, x)| *rounded == f64::from(x as f32))
        );
        assert_eq!(values(&Rounding::exact().f32_apart(&pair)?)?, values(&pair)?);
        Ok(())
    }

    #[test]
    fn approximations_err_within_their_bound_also_on_numbers_that_fp32_holds() -> Result<()> {
        let x = f64_tensor(&[1.5], &[1]);
        let errors: Vec<f64> = (0..64)
            .map(|seed| Ok(values(&working(seed).approximate_f32(&x)?)?[0] / 1.5 - 1.0))
            .collect::<Result<_>>()?;
        // The bound, and half an ulp for the rounding of the result.
        let bound =
            power_of_two(APPROXIMATE_ERROR_EXPONENT) + power_of_two(-Format::F32.fraction_bits);
        assert!(errors.iter().all(|error| error.abs() <= bound));
        assert!(errors.iter().any(|&error| error > 0.0) && errors.iter().any(|&error| error < 0.0));
        Ok(())
    }

    #[test]
    fn small_sigmoids_are_flushed_kept_or_lost_to_an_overflow_by_choice() -> Result<()> {
        // e^-88 is subnormal and e^88 does not overflow; e^89 does.
        let x = f64_tensor(&[-87.0, -88.0, -89.0, 0.0, 200.0], &[5]);
        let is_zero = |precision| -> Result<Vec<bool>> {
            Ok(values(&Rounding::new(precision).sigmoid_f32(&x)?)?
                .iter()
                .map(|&s| s == 0.0)
                .collect())
        };
        let of_choice = |seed| is_zero(Precision::Nearest { seed });
        let (flushed, kept) = ([false, true, true, false, false], [false; 5]);
        assert_eq!(of_choice(0)?, flushed);
        assert_eq!(of_choice(1)?, kept);
        assert_eq!(of_choice(3)?, [false, false, true, false, false]);
        assert_eq!(of_choice(CHOICES as u64 + 3)?, of_choice(3)?, "with noise, by the same choice");
        assert_eq!(
            (is_zero(Precision::Working { seed: 3 })?, is_zero(Precision::Exact)?),
            (flushed.into(), kept.into())
        );
        Ok(())
    }

    #[test]
    fn the_slope_of_a_sigmoid_near_one_has_the_digits_that_one_minus_s_has() -> Result<()> {
        let x = f64_tensor(&[12.0, -12.0], &[2]);
        let slope = |precision| -> Result<Vec<f64>> {
            let mut rounding = Rounding::new(precision);
            let s = rounding.sigmoid_f32(&x)?;
            values(&rounding.sigmoid_slope_f32(&s, &x)?)
        };
        let exact = slope(Precision::Exact)?;
        let s = (1.0 / (1.0 + (-12f64).exp())) as f32;
        let [by_subtraction, true_slope] = [f64::from(s * (1.0 - s)), exact[0]];
        assert_eq!(exact[1], true_slope, "the slope is even");
        // The exponent is rounded to its own ulp, |x| ulps of the result; eight more for the rest.
        let all_digits = (12.0 + 8.0) * f64::from(f32::EPSILON);
        let lost = (by_subtraction / true_slope - 1.0).abs();
        assert!(lost > 100.0 * all_digits, "it loses two digits: {lost:e}");
        let (mut widest, mut of_small) = (0f64, 0f64);
        for seed in 0..32 {
            let [near_one, near_zero] = slope(Precision::Working { seed })?[..] else { panic!() };
            widest = widest.max((near_one - true_slope).abs());
            of_small = of_small.max((near_zero / true_slope - 1.0).abs());
        }
        assert!(widest >= (by_subtraction - true_slope).abs(), "{widest:e}");
        assert!(of_small < all_digits, "where s is small nothing is lost: {of_small:e}");
        Ok(())
    }

    #[test]
    fn approximations_flush_subnormal_results_to_zero_or_keep_them_by_choice() -> Result<()> {
        let x = f64_tensor(&[2f64.powi(-130), 2f64.powi(-125)], &[2]);
        let approximated = |precision| values(&Rounding::new(precision).approximate_f32(&x)?);
        let flushed =
            |seed| Ok::<_, crate::Error>(approximated(Precision::Nearest { seed })?[0] == 0.0);
        assert_eq!((0..4).map(flushed).collect::<Result<Vec<_>>>()?, [true, false, true, false]);
        assert_eq!(flushed(0)?, flushed(CHOICES as u64)?, "with noise, by the same choice");
        let approximated = approximated(Precision::Working { seed: 1 })?;
        assert!(approximated[0] == 0.0 && approximated[1] > 0.0);
        assert_eq!(values(&Rounding::exact().approximate_f32(&x)?)?, values(&x)?);
        Ok(())
    }

    #[test]
    fn sums_of_nothing_and_non_finite_sums_get_no_noise() -> Result<()> {
        let inf = f64::INFINITY;
        let terms = f64_tensor(&[inf, 1.0, f64::NAN, 1.0, 0.0, 0.0], &[3, 2]);
        let sums = values(&working(0).sum_f32(&terms, 1)?)?;
        assert_eq!(sums[0], inf);
        assert!(sums[1].is_nan());
        assert_eq!(sums[2], 0.0);
        assert_eq!(accumulation_sigma(1.0, 1.0, 0.0, 1), 0.0);
        Ok(())
    }
}
