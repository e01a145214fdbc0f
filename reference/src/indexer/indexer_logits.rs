//! Logits of the indexer (inference 7, 7.1; training 1).
//!
//! ```text
//! d[t,h,k]    = q[t,h] . k[k]
//! logits[t,c] = sm_scale * s[k] * sum_h w[t,h] * max(d[t,h,k], 0)       k: the c-th key that token t scores
//! ```
//!
//! A column after the last key that a token scores is -infinity, and so is a key whose page does
//! not exist. `s` is a key's scale, which only e4m3 has (that of q is folded into w); the scales of
//! e2m1 stay with the values ([`numbers`]). max keeps NaN. A token scores the first `columns` of
//! its keys:
//!
//! * ranges: rows `ks .. ke`, as far as they exist;
//! * causal: the keys j of its sequence whose last token, `j * ratio + ratio - 1`, is not after the
//!   token's own position, `q_off` + t, t counted within the sequence; without a sequence, none;
//! * selected: the keys that its list names ([`crate::indexer::ranking`]);
//! * paged: the first `context_lens` entries of its request: entry i is row `i % page_size` of page
//!   `block_table[i / page_size]`. A negative page number, or one beyond the store, names a page
//!   that does not exist; its entries are not scored.
//!
//! # Rounding points
//!
//! * products accumulate in the accumulator that the caller names: fp32, or that of e4m3 on Hopper;
//! * the sum over the heads is fp32, in the lanes that the kernel declares;
//! * `s`, then `sm_scale` multiply the sum, and each product is fp32.
//!
//! This module computes no gradient: the gradient of the logits is a separate operator.

use candle_core::{Device, Tensor};

use crate::error::{Error, Result, require, require_f64, wrong_shape, wrong_value};
use crate::format::{Format, unpack_nibbles};
use crate::indexer::ranking::{RankedKeys, Ranking, Sequences};
use crate::precision::{Accumulator, Rounding, values};
use crate::select::unless;

/// Values of e2m1 that share a scale.
pub const GROUP: usize = 32;

/// The keys that tokens score.
#[derive(Debug, Clone)]
pub enum Keys {
    /// Rows of `k`.
    Ranges {
        /// `[num_tokens]`: the first row. Any value.
        ks: Vec<i32>,
        /// `[num_tokens]`: the row after the last. Any value.
        ke: Vec<i32>,
    },
    /// The keys of the token's sequence, up to a causal limit.
    Causal {
        /// Tokens that one key covers, at least 1.
        ratio: usize,
        /// `[num_sequences]`: position of each sequence's first query. Any value.
        q_off: Option<Vec<i32>>,
        /// `None` is one sequence of all tokens and keys.
        sequences: Option<Sequences>,
    },
    /// The keys that a list of the token names.
    Selected {
        /// The lists: [`Ranking::Selected`].
        ranking: Ranking,
        /// `None` is one sequence of all tokens and keys.
        sequences: Option<Sequences>,
    },
    /// Entries of pages.
    Paged {
        /// `[batch, table_pages]` in row-major order. Any value.
        block_table: Vec<i32>,
        /// Pages of a request.
        table_pages: usize,
        /// `[batch, next_n]`: entries that count. Any value.
        context_lens: Vec<i32>,
        /// Entries of a page.
        page_size: usize,
    },
}

/// Inputs of the operator, widened to f64; codes are decoded.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`.
    pub q: Tensor,
    /// `[num_tokens, num_heads]`.
    pub w: Tensor,
    /// `[num_keys, head_dim]`; for pages row after row.
    pub k: Tensor,
    /// `[num_keys]`.
    pub k_scales: Option<Tensor>,
    /// The keys of each token.
    pub keys: Keys,
    /// Columns of the result.
    pub columns: usize,
    /// Multiplies the logits.
    pub sm_scale: f64,
}

/// The values of rows of codes: one code per byte in `format`, or e2m1 in nibbles with an e8m0 byte
/// for each [`GROUP`] of them. A product of e2m1 with its scale is a bf16 value, or infinite beyond
/// the bf16 range.
pub fn numbers(codes: &[u8], scale_bytes: Option<&[u8]>, format: Format) -> Vec<f64> {
    let Some(scale_bytes) = scale_bytes else {
        return codes.iter().map(|&code| format.value(code.into())).collect();
    };
    let scale = |at: usize| Format::E8M0.value(scale_bytes[at / GROUP].into());
    let codes = unpack_nibbles(codes).into_iter().enumerate();
    codes.map(|(at, code)| Format::BF16.nearest(format.value(code.into()) * scale(at))).collect()
}

/// `[num_tokens, columns]`, stored in f32.
///
/// # Errors
/// Inputs whose shapes do not match.
pub fn forward(
    inputs: &Inputs,
    accumulator: Accumulator,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let (tokens, heads, num_keys) = inputs.check()?;
    let some = tokens > 0 && heads > 0 && num_keys > 0;
    let all = some.then(|| inputs.all_logits(accumulator, rounding)).transpose()?;
    inputs.placed(all.as_ref())
}

impl Inputs {
    /// The logits of the keys that each token sees, `[num_tokens, columns]`, selected from the
    /// logits of all keys; `None` without any.
    pub(crate) fn placed(&self, all: Option<&Tensor>) -> Result<Tensor> {
        let (tokens, _, num_keys) = self.check()?;
        let mut logits = vec![f64::NEG_INFINITY; tokens * self.columns];
        if let Some(all) = all {
            let all = values(all)?;
            for (token, row) in self.keys.rows(tokens, num_keys, self.columns).iter().enumerate() {
                for (column, key) in row.iter().enumerate() {
                    if let Some(key) = key {
                        logits[token * self.columns + column] = all[token * num_keys + key];
                    }
                }
            }
        }
        Ok(Tensor::from_vec(logits, (tokens, self.columns), &Device::Cpu)?)
    }

    /// The logits of every token with every key, `[num_tokens, num_keys]`.
    pub(crate) fn all_logits(
        &self,
        accumulator: Accumulator,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let (tokens, heads, head_dim) = self.q.dims3()?;
        let num_keys = self.k.dim(0)?;
        let q = self.q.reshape((tokens * heads, head_dim))?;
        let products = rounding.matmul(&q, &self.k.t()?, accumulator)?;
        let rectified = unless(&products.le(0.0)?, &products, 0.0)?;
        // The heads are the last axis, over which lanes add.
        let rectified =
            rectified.reshape((tokens, heads, num_keys))?.transpose(1, 2)?.contiguous()?;
        let sums = rounding.sum_f32(&rectified.broadcast_mul(&self.w.unsqueeze(1)?)?, 2)?;
        let scaled = match &self.k_scales {
            Some(scales) => rounding.f32(&sums.broadcast_mul(scales)?)?,
            None => sums,
        };
        rounding.f32(&(scaled * self.sm_scale)?)
    }

    /// `(num_tokens, num_heads, num_keys)`.
    fn check(&self) -> Result<(usize, usize, usize)> {
        require_f64("q", &self.q)?;
        let &[tokens, heads, head_dim] = self.q.dims() else {
            return Err(wrong_shape("q", "[num_tokens, num_heads, head_dim]", &self.q));
        };
        let &[num_keys, _] = self.k.dims() else {
            return Err(wrong_shape("k", "[num_keys, head_dim]", &self.k));
        };
        require("k", &self.k, &[num_keys, head_dim])?;
        require("w", &self.w, &[tokens, heads])?;
        if let Some(scales) = &self.k_scales {
            require("k_scales", scales, &[num_keys])?;
        }
        if !(self.sm_scale.is_finite() && self.sm_scale > 0.0) {
            return Err(wrong_value("sm_scale", self.sm_scale, "it must be finite and above 0"));
        }
        self.keys.check(tokens, num_keys)?;
        Ok((tokens, heads, num_keys))
    }
}

impl Keys {
    fn check(&self, tokens: usize, num_keys: usize) -> Result<()> {
        let length = |argument: &'static str, actual: usize, expected: usize| {
            let error = || Error::Shape {
                argument,
                expected: format!("[{expected}]"),
                actual: vec![actual],
            };
            if actual == expected { Ok(()) } else { Err(error()) }
        };
        match self {
            Self::Ranges { ks, ke } => {
                length("ks", ks.len(), tokens).and(length("ke", ke.len(), tokens))
            }
            Self::Causal { ratio: 0, .. } => {
                Err(wrong_value("ratio", 0, "a key covers at least one token"))
            }
            Self::Causal { q_off, sequences, .. } => {
                let ends = sequences.as_ref().map_or(2, |s| s.cu_q.len());
                length("cu_k", sequences.as_ref().map_or(2, |s| s.cu_k.len()), ends)?;
                q_off
                    .as_ref()
                    .map_or(Ok(()), |q_off| length("q_off", q_off.len(), ends.saturating_sub(1)))
            }
            Self::Selected { ranking, sequences } => {
                RankedKeys { ranking, sequences: sequences.as_ref(), num_keys }.check(tokens)
            }
            Self::Paged { page_size: 0, .. } => {
                Err(wrong_value("page_size", 0, "a page needs entries"))
            }
            Self::Paged { block_table, table_pages, context_lens, .. } => {
                length("context_lens", context_lens.len(), tokens)?;
                let requests = if *table_pages == 0 { 0 } else { block_table.len() / table_pages };
                length("block_table", block_table.len(), requests * table_pages)?;
                let divides = requests == 0 || tokens.is_multiple_of(requests);
                if divides { Ok(()) } else { length("block_table", requests, tokens) }
            }
        }
    }

    /// For each token and column the row of `k` that is scored there.
    pub fn rows(&self, tokens: usize, num_keys: usize, columns: usize) -> Vec<Vec<Option<usize>>> {
        (0..tokens).map(|token| self.rows_of(token, tokens, num_keys, columns)).collect()
    }

    fn rows_of(
        &self,
        token: usize,
        tokens: usize,
        num_keys: usize,
        columns: usize,
    ) -> Vec<Option<usize>> {
        let mut rows: Vec<Option<usize>> = match self {
            Self::Causal { ratio, q_off, sequences } => {
                let ranking = Ranking::Causal { ratio: *ratio, q_off: q_off.clone(), columns };
                let ranked =
                    RankedKeys { ranking: &ranking, sequences: sequences.as_ref(), num_keys };
                ranked.rows(token).into_iter().map(|row| row.map(|row| row as usize)).collect()
            }
            Self::Selected { ranking, sequences } => {
                let ranked = RankedKeys { ranking, sequences: sequences.as_ref(), num_keys };
                ranked.rows(token).into_iter().map(|row| row.map(|row| row as usize)).collect()
            }
            Self::Ranges { ks, ke } => {
                let range = i64::from(ks[token])..i64::from(ke[token]);
                let from = usize::try_from(range.start.max(0)).unwrap_or(0);
                (from..num_keys)
                    .take_while(|&key| range.contains(&(key as i64)))
                    .take(columns)
                    .map(Some)
                    .collect()
            }
            Self::Paged { block_table, table_pages, context_lens, page_size } => {
                let next_n =
                    (tokens * table_pages).checked_div(block_table.len()).unwrap_or(1).max(1);
                let table = block_table
                    .chunks(*table_pages.max(&1))
                    .nth(token / next_n)
                    .unwrap_or_default();
                let length = usize::try_from(context_lens[token]).unwrap_or(0).min(columns);
                let page_of = |page: i32| {
                    usize::try_from(page).ok().filter(|page| (page + 1) * page_size <= num_keys)
                };
                let entries = table.iter().flat_map(|&page| {
                    (0..*page_size)
                        .map(move |entry| page_of(page).map(|page| page * page_size + entry))
                });
                entries.take(length).collect()
            }
        };
        rows.resize(columns, None);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::testing::{Draw, Golden, assert_within, f64_tensor};

    const HEAD_DIM: usize = 6;

    fn inputs(tokens: usize, num_keys: usize, keys: Keys) -> Inputs {
        let mut draw = Draw::new(7);
        Inputs {
            q: draw.bf16(&[tokens, 3, HEAD_DIM], 1.0),
            w: draw.bf16(&[tokens, 3], 1.0),
            k: draw.bf16(&[num_keys, HEAD_DIM], 1.0),
            k_scales: Some(f64_tensor(
                &(0..num_keys).map(|k| 0.5 + k as f64).collect::<Vec<_>>(),
                &[num_keys],
            )),
            keys,
            columns: num_keys,
            sm_scale: 0.3,
        }
    }

    fn exact(inputs: &Inputs) -> Vec<f64> {
        values(&forward(inputs, Accumulator::F32, &mut Rounding::exact()).expect("it fits"))
            .expect("numbers")
    }

    fn everything(tokens: usize, keys: usize) -> Keys {
        Keys::Ranges { ks: vec![0; tokens], ke: vec![keys as i32; tokens] }
    }

    #[test]
    fn a_logit_is_the_sum_of_weighted_positive_products() {
        let inputs = inputs(2, 5, everything(2, 5));
        let [q, w, k] =
            [&inputs.q, &inputs.w, &inputs.k].map(|tensor| values(tensor).expect("numbers"));
        let product = |t: usize, h: usize, j: usize| -> f64 {
            (0..HEAD_DIM).map(|d| q[(t * 3 + h) * HEAD_DIM + d] * k[j * HEAD_DIM + d]).sum()
        };
        let expected = |t: usize, j: usize| {
            let sum: f64 = (0..3).map(|h| w[t * 3 + h] * product(t, h, j).max(0.0)).sum();
            0.3 * (0.5 + j as f64) * sum
        };
        for (at, logit) in exact(&inputs).into_iter().enumerate() {
            assert!((logit - expected(at / 5, at % 5)).abs() < 1e-12, "{at}: {logit}");
        }
    }

    #[test]
    fn ranges_are_cut_to_the_keys_and_the_columns_that_there_are_and_their_first_key_is_column_0() {
        let (ks, ke) = (vec![-2, 1, 3, 4, i32::MIN], vec![2, 4, 3, i32::MAX, i32::MAX]);
        let keys = Keys::Ranges { ks, ke };
        let rows = keys.rows(5, 5, 3);
        let some = |rows: &[usize]| {
            rows.iter().map(|&row| Some(row)).chain([None; 3]).take(3).collect::<Vec<_>>()
        };
        assert_eq!(
            rows,
            [some(&[0, 1]), some(&[1, 2, 3]), some(&[]), some(&[4]), some(&[0, 1, 2])]
        );
        let logits = exact(&Inputs { columns: 3, ..inputs(5, 5, keys) });
        let all = exact(&inputs(5, 5, everything(5, 5)));
        assert_eq!(logits[..3], [all[0], all[1], f64::NEG_INFINITY]);
        assert_eq!(logits[3..6], all[6..9]);
    }

    #[test]
    fn a_key_is_seen_from_the_last_token_that_it_covers_on_in_its_own_sequence() {
        let sequences = Some(Sequences { cu_q: vec![0, 3, 3, 5], cu_k: vec![0, 2, 3, 5] });
        let keys = Keys::Causal { ratio: 2, q_off: Some(vec![0, 0, 1]), sequences };
        let lengths = |rows: Vec<Vec<Option<usize>>>| {
            rows.into_iter().map(|row| row.into_iter().flatten().collect())
        };
        let seen: Vec<Vec<usize>> = lengths(keys.rows(6, 5, 2)).collect();
        assert_eq!(seen, [vec![], vec![0], vec![0], vec![3], vec![3], vec![]]);
        let one = Keys::Causal { ratio: 1, q_off: None, sequences: None };
        let seen: Vec<Vec<usize>> = lengths(one.rows(3, 2, 4)).collect();
        assert_eq!(seen, [vec![0], vec![0, 1], vec![0, 1]]);
    }

    #[test]
    fn pages_place_entries_and_one_that_is_not_there_is_scored_nowhere() {
        let keys = Keys::Paged {
            block_table: vec![2, 0, -1, 1, 3, 0],
            table_pages: 3,
            context_lens: vec![3, 9, -1, 5],
            page_size: 2,
        };
        let none = None;
        assert_eq!(
            keys.rows(4, 6, 5),
            [
                [Some(4), Some(5), Some(0), none, none],
                [Some(4), Some(5), Some(0), Some(1), none],
                [none; 5],
                [Some(2), Some(3), none, none, Some(0)],
            ]
        );
    }

    #[test]
    fn codes_decode_to_what_bf16_holds() {
        assert_eq!(numbers(&[0x38, 0xc0, 0x01], None, Format::E4M3), [1.0, -2.0, 2f64.powi(-9)]);
        let scales = [127, 254];
        let mut codes = vec![0x00; 32];
        (codes[0], codes[16]) = (0x71, 0x72);
        let decoded = numbers(&codes, Some(&scales), Format::E2M1);
        assert_eq!((decoded[0], decoded[1], decoded[32]), (0.5, 6.0, 2f64.powi(127)));
        assert_eq!(decoded[33], f64::INFINITY);
        assert!(numbers(&codes, Some(&[255, 0]), Format::E2M1)[2].is_nan());
    }

    #[test]
    fn nan_stays_and_infinities_are_rectified() {
        let mut of = inputs(1, 3, everything(1, 3));
        of.q = f64_tensor(&[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], &[1, 1, HEAD_DIM]);
        of.w = f64_tensor(&[2.0], &[1, 1]);
        let mut k = vec![0.0; 3 * HEAD_DIM];
        (k[0], k[HEAD_DIM], k[2 * HEAD_DIM]) = (f64::NAN, f64::NEG_INFINITY, f64::INFINITY);
        of.k = f64_tensor(&k, &[3, HEAD_DIM]);
        let logits = exact(&of);
        assert!(logits[0].is_nan());
        assert_eq!(logits[1..], [0.0, f64::INFINITY]);
    }

    #[test]
    fn what_an_accumulator_of_e4m3_loses_is_within_what_its_runs_scatter() -> Result<()> {
        let inputs = inputs(3, 4, everything(3, 4));
        let exact = forward(&inputs, Accumulator::F32, &mut Rounding::exact())?;
        let spread = |accumulator| -> Result<f64> {
            let mut largest = 0.0f64;
            for seed in 0..16 {
                let run =
                    forward(&inputs, accumulator, &mut Rounding::new(Precision::Working { seed }))?;
                let off = values(&(run - &exact)?.abs()?)?.into_iter().fold(0.0, f64::max);
                largest = largest.max(off);
            }
            Ok(largest)
        };
        let (f32, e4m3) = (spread(Accumulator::F32)?, spread(Accumulator::HOPPER_E4M3)?);
        assert!(f32 < 1e-5 && e4m3 > 100.0 * f32, "{f32:e} {e4m3:e}");
        let wide = f64_tensor(&[1e-5; 12], &[3, 4]);
        let run =
            forward(&inputs, Accumulator::F32, &mut Rounding::new(Precision::Working { seed: 1 }))?;
        assert_within("logits", &run, &exact, &wide);
        Ok(())
    }

    /// The files hold q and k with full precision, which bf16 would round. Instead of w they hold
    /// the factors of w. They are therefore compared with the formula here, and are not cases of
    /// the operator. Their scores are not masked.
    #[test]
    fn golden_files_agree() -> Result<()> {
        for name in ["a", "all", "long", "real_dim", "two_heads"] {
            let golden = Golden::load(&format!("indexer__{name}"));
            let (q, k) = (golden.f64("mid.scorer.q"), golden.f64("mid.scorer.k"));
            let (batch, tokens, heads, head_dim) = q.dims4()?;
            let num_keys = k.dim(1)?;
            let projection = golden.f64("param.indexer.scorer.weights_proj.weight");
            let w =
                golden.f64("in.hidden").reshape((batch * tokens, ()))?.matmul(&projection.t()?)?;
            let first = |token: usize| (token / tokens * num_keys) as i32;
            let range =
                |more: usize| (0..batch * tokens).map(|token| first(token) + more as i32).collect();
            let inputs = Inputs {
                q: q.reshape((batch * tokens, heads, head_dim))?,
                w,
                k: k.reshape((batch * num_keys, head_dim))?,
                k_scales: None,
                keys: Keys::Ranges { ks: range(0), ke: range(num_keys) },
                columns: num_keys,
                sm_scale: ((head_dim * heads) as f64).sqrt().recip(),
            };
            let logits = forward(&inputs, Accumulator::F32, &mut Rounding::exact())?;
            // q, k and the scores are each rounded once to fp32: two roundings of each term's
            // magnitude.
            let [q, w, k] = [inputs.q.abs()?, inputs.w.abs()?, inputs.k.abs()?];
            let magnitudes =
                forward(&Inputs { q, w, k, ..inputs }, Accumulator::F32, &mut Rounding::exact())?;
            let rounded = (magnitudes * f64::from(f32::EPSILON))?;
            let stored = golden.storage_error("out.scores").reshape((batch * tokens, num_keys))?;
            let expected = golden.f64("out.scores").reshape((batch * tokens, num_keys))?;
            assert_within(name, &logits, &expected, &(rounded + stored)?);
        }
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let refuse = |inputs: Inputs, name: &str| {
            let error =
                forward(&inputs, Accumulator::F32, &mut Rounding::exact()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        refuse(inputs(2, 3, Keys::Ranges { ks: vec![0], ke: vec![0; 2] }), "ks");
        refuse(inputs(2, 3, Keys::Causal { ratio: 0, q_off: None, sequences: None }), "ratio");
        let paged = |page_size, context_lens| Keys::Paged {
            block_table: vec![0; 2],
            table_pages: 1,
            context_lens,
            page_size,
        };
        refuse(inputs(2, 3, paged(0, vec![0; 2])), "page_size");
        refuse(inputs(2, 3, paged(1, vec![0; 3])), "context_lens");
        refuse(Inputs { sm_scale: 0.0, ..inputs(2, 3, everything(2, 3)) }, "sm_scale");
        refuse(Inputs { w: f64_tensor(&[0.0; 4], &[2, 2]), ..inputs(2, 3, everything(2, 3)) }, "w");
    }
}
