//! `indexer_logits` (inference 7, 7.1; training 1): `kernels/cuda/indexer/indexer_logits.cu` and
//! `indexer_logits_hopper.cu` against `reference/src/indexer/indexer_logits.rs`.

use dsv4_kernels::indexer::indexer_logits::{self as launcher, HEAD_DIM, MAX_HEADS, Operands};
use dsv4_reference::Format;
use dsv4_reference::indexer::indexer_logits::{self as reference, GROUP, Keys};
use dsv4_reference::indexer::ranking::Sequences;
use dsv4_reference::precision::Accumulator;
use dsv4_reference::quantize::quantize;
use rand::Rng;
use rand::seq::SliceRandom;

use crate::case::permutation;
use crate::operator::benchmarks::Whole;
use crate::operator::declaration::observed;
use crate::operator::fields::{Implementation, extent, tensor};
use crate::operator::prelude::*;
use crate::operator::tensors::{apart, permuted_along};
use crate::operators::indexer::ranking::{self, draw_offsets, draw_sequences};
use crate::operators::lists::{Hostile, Lengths};
use crate::record::Operands as Multiplied;

/// The operator.
pub struct IndexerLogits;

/// How the keys of a token are addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Addressing {
    /// A range of rows for each token: prefill.
    Ranges,
    /// A causal limit: the dense form of training.
    Causal,
    /// A block table and a length for each token: decoding.
    Paged,
}

/// The contents of e4m3 and e2m1 codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codes {
    /// Codes of drawn values, quantized.
    Quantized,
    /// Any codes with finite values, with different scales.
    Any,
}

/// A case: sizes, addressing, operands, what is written, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerLogitsCase {
    /// How the keys of a token are addressed.
    pub addressing: Addressing,
    /// Queries; 0 is allowed. Of ranges and causal limits.
    pub num_tokens: usize,
    /// Requests; 0 is allowed. Of pages.
    pub batch: usize,
    /// Tokens of a request. Of pages.
    pub next_n: usize,
    /// Query heads: at most 64.
    pub num_heads: usize,
    /// Rows of k; 0 is allowed. Of ranges and causal limits.
    pub num_keys: usize,
    /// Pages; 0 is allowed. Of pages.
    pub num_pages: usize,
    /// Pages that the table of a request names; 0 is allowed. Of pages.
    pub table_pages: usize,
    /// Entries of a page: 32 or 64.
    pub page_size: usize,
    /// Columns of the logits.
    pub columns: usize,
    /// The storage type of q and k.
    pub operands: Operands,
    /// The contents of their codes, if they have codes.
    pub codes: Codes,
    /// Type of w: f32 with e4m3.
    pub weights: Float,
    /// Ranges, or lengths of contexts: all keys, some keys, or invalid ones.
    pub lengths: Lengths,
    /// Tokens that a key covers. Of causal limits.
    pub ratio: usize,
    /// Whether the sequences' first queries have positions other than 0. Of causal limits.
    pub q_off: bool,
    /// Packed sequences, some without tokens or keys, followed by extra tokens and keys.
    /// Of causal limits.
    pub packed: bool,
    /// Whether columns that a token does not see are set to -infinity. Otherwise they are
    /// undefined.
    pub clean_logits: bool,
    /// Multiplies the logits.
    pub sm_scale: f32,
    /// Whether keys that no token scores are NaN.
    pub poison_unseen: bool,
    /// Which kernels run.
    pub implementation: Implementation,
    /// q and k where they are bf16, w and the scales of keys.
    #[serde(flatten)]
    pub data: Data,
}

fn flat(
    num_tokens: usize,
    num_heads: usize,
    num_keys: usize,
    operands: Operands,
) -> IndexerLogitsCase {
    IndexerLogitsCase {
        addressing: Addressing::Ranges,
        num_tokens,
        batch: 0,
        next_n: 0,
        num_heads,
        num_keys,
        num_pages: 0,
        table_pages: 0,
        page_size: 64,
        columns: num_keys,
        operands,
        codes: Codes::Quantized,
        weights: Float::F32,
        lengths: Lengths::Within,
        ratio: 1,
        q_off: false,
        packed: false,
        clean_logits: true,
        sm_scale: 0.3,
        poison_unseen: true,
        implementation: Implementation::Portable,
        data: Data::normal(1.0),
    }
}

fn causal(
    num_tokens: usize,
    num_heads: usize,
    num_keys: usize,
    operands: Operands,
    ratio: usize,
) -> IndexerLogitsCase {
    let addressing = Addressing::Causal;
    IndexerLogitsCase {
        addressing,
        ratio,
        q_off: true,
        ..flat(num_tokens, num_heads, num_keys, operands)
    }
}

/// Requests with contexts of up to `columns` entries, on twice as many pages as they need.
fn paged(
    batch: usize,
    next_n: usize,
    num_heads: usize,
    columns: usize,
    operands: Operands,
) -> IndexerLogitsCase {
    let page_size = 64;
    let table_pages = columns.div_ceil(page_size);
    IndexerLogitsCase {
        addressing: Addressing::Paged,
        batch,
        next_n,
        num_pages: 2 * batch * table_pages,
        table_pages,
        page_size,
        columns,
        ..flat(0, num_heads, 0, operands)
    }
}

impl IndexerLogitsCase {
    fn is_paged(&self) -> bool {
        self.addressing == Addressing::Paged
    }

    /// Tokens of all requests.
    fn tokens(&self) -> usize {
        if self.is_paged() { self.batch.saturating_mul(self.next_n) } else { self.num_tokens }
    }

    /// Rows of k, or of all pages.
    fn rows(&self) -> usize {
        if self.is_paged() { self.num_pages.saturating_mul(self.page_size) } else { self.num_keys }
    }

    fn options(&self) -> launcher::Options {
        launcher::Options {
            operands: self.operands,
            ratio: self.ratio,
            page_size: self.page_size,
            sm_scale: self.sm_scale,
            clean_logits: self.clean_logits,
            implementation: self.implementation.launcher(),
        }
    }

    /// The accumulator type of the kernel's products.
    fn accumulator(&self) -> Accumulator {
        match (self.implementation, self.operands) {
            (Implementation::Hopper, Operands::E4m3) => Accumulator::HOPPER_E4M3,
            _ => Accumulator::F32,
        }
    }

    fn sequences(&self) -> Option<Sequences> {
        self.packed.then(|| draw_sequences(self.data.seed, self.num_tokens, self.num_keys))
    }

    fn format(&self) -> Format {
        if self.operands == Operands::E4m3 { Format::E4M3 } else { Format::E2M1 }
    }
}

impl Operator for IndexerLogits {
    type Case = IndexerLogitsCase;
    // A lane adds every fourth pair of heads.
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "indexer_logits",
        family: Family::Indexer,
        summary: "the indexer's logits: weighted sums over the heads of positive products, of ranges of keys, causal or paged",
        specification: &["inference 7", "inference 7.1", "training 1"],
        paths: &[
            "indexer_logits<bf16, 16>",
            "indexer_logits<bf16, 32>",
            "indexer_logits<bf16, 64>",
            "indexer_logits<e4m3, 16>",
            "indexer_logits<e4m3, 32>",
            "indexer_logits<e4m3, 64>",
            "indexer_logits<e2m1, 16>",
            "indexer_logits<e2m1, 32>",
            "indexer_logits<e2m1, 64>",
            "indexer_logits_hopper<bf16, 32, 2>",
            "indexer_logits_hopper<bf16, 32, 4>",
            "indexer_logits_hopper<bf16, 64, 1>",
            "indexer_logits_hopper<bf16, 64, 2>",
            "indexer_logits_hopper<e4m3, 32, 2>",
            "indexer_logits_hopper<e4m3, 32, 4>",
            "indexer_logits_hopper<e4m3, 64, 1>",
            "indexer_logits_hopper<e4m3, 64, 2>",
            "indexer_logits_hopper<e2m1, 32, 2>",
            "indexer_logits_hopper<e2m1, 32, 4>",
            "indexer_logits_hopper<e2m1, 64, 1>",
            "indexer_logits_hopper<e2m1, 64, 2>",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "keys of head_dim 64, and logits in bf16",
        "the model has 128, and its top-k reads fp32",
    )];

    fn tensors(c: &IndexerLogitsCase) -> Specs {
        let (paged, operands) = (c.is_paged(), c.operands);
        let (e4m3, e2m1) = (operands == Operands::E4m3, operands == Operands::E2m1);
        let tokens = match paged {
            true => vec![axis("batch", c.batch), axis("next_n", c.next_n).not_empty()],
            false => vec![axis("num_tokens", c.num_tokens)],
        };
        let of_tokens = |more: &[_]| [&tokens[..], more].concat();
        let heads = axis("num_heads", c.num_heads).multiples(1, MAX_HEADS);
        let [row, groups] =
            [axis("row_elements", operands.row_elements()), axis("num_groups", HEAD_DIM / GROUP)];
        let (keys, columns) = (axis("num_keys", c.num_keys), axis("columns", c.columns));
        let pages =
            [axis("num_pages", c.num_pages), axis("page_bytes", operands.page_bytes(c.page_size))];
        let ends = axis("num_sequences_and_one", c.sequences().map_or(0, |s| s.cu_q.len()));
        let sequences = axis("num_sequences", ends.extent.max(2) - 1);
        let causal = c.addressing == Addressing::Causal;
        let joined = |spec: crate::operator::declaration::TensorSpec| {
            if paged { spec.joined() } else { spec }
        };
        // The case draws codes. Values of bf16, weights and scales may have any magnitude.
        let drawn = |name, axes: &[_]| match operands {
            Operands::Bf16 => input(name, DType::Bf16, axes).drawn_as(c.data).of_any_size(),
            _ => input(name, DType::U8, axes),
        };
        let integers = |name, axes: &[_]| input(name, DType::I32, axes);
        let weights = input("w", c.weights.dtype(), &of_tokens(&[heads]))
            .rows()
            .drawn_as(c.data)
            .of_any_size();
        let logits = of_tokens(&[columns]);
        let tensors = [
            joined(drawn("q", &of_tokens(&[heads, row])).aligned_rows()),
            input("q_scale_bytes", DType::U8, &of_tokens(&[heads, groups])).when(e2m1),
            joined(weights),
            drawn("k", &[keys, row]).aligned_rows().when(!paged),
            input("k_scales", DType::F32, &[keys]).of_any_size().when(e4m3 && !paged),
            input("k_scale_bytes", DType::U8, &[keys, groups]).when(e2m1 && !paged),
            input("pages", DType::U8, &pages).aligned_rows().when(paged),
            integers("block_table", &[axis("batch", c.batch), axis("table_pages", c.table_pages)])
                .rows()
                .when(paged),
            integers("context_lens", &tokens).when(paged),
            integers("ks", &tokens).when(c.addressing == Addressing::Ranges),
            integers("ke", &tokens).when(c.addressing == Addressing::Ranges),
            integers("cu_q", &[ends]).when(c.packed && causal),
            integers("cu_k", &[ends]).when(c.packed && causal),
            integers("q_off", &[sequences]).when(c.q_off && causal),
            joined(output("logits", DType::F32, &logits).rows().partly_undefined(!c.clean_logits)),
            observed("seen_logits", DType::F32, &logits).when(!c.clean_logits),
        ];
        Specs::new(c.data.seed, tensors).positive("sm_scale", c.sm_scale)
    }

    fn check(c: &IndexerLogitsCase) -> Result<(), Refused> {
        let of_others = match c.is_paged() {
            true => [
                ("num_tokens", c.num_tokens),
                ("num_keys", c.num_keys),
                ("num_keys", 0),
                ("num_keys", 0),
            ],
            false => [
                ("batch", c.batch),
                ("next_n", c.next_n),
                ("num_pages", c.num_pages),
                ("table_pages", c.table_pages),
            ],
        };
        if let Some((field, extent)) = of_others.into_iter().find(|(_, extent)| *extent > 0) {
            return refuse(field, format!("{extent}: keys that are addressed so have none"));
        }
        if !launcher::PAGE_SIZES.contains(&c.page_size) {
            return refuse("page_size", format!("{} must be 32 or 64", c.page_size));
        }
        if c.ratio == 0 {
            return refuse("ratio", "0: a key covers at least one token");
        }
        if c.operands == Operands::E4m3 && c.weights != Float::F32 {
            return refuse("weights", "bf16: a scale that is folded into w would be rounded");
        }
        if c.packed && c.addressing != Addressing::Causal {
            return refuse("packed", "true: keys that are addressed so have no sequences");
        }
        c.data.check()
    }

    fn cannot_run(c: &IndexerLogitsCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    /// Every token with every key and head, before and after the sum.
    fn oracle_elements(c: &IndexerLogitsCase) -> u128 {
        let (tokens, rows) = (c.tokens() as u128, c.rows() as u128);
        3 * tokens.saturating_mul(rows).saturating_mul(c.num_heads as u128)
            + rows * HEAD_DIM as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerLogitsCase> {
        let [tokens, keys] = profile.of([[9usize, 260], [14, 400], [40, 1500]]);
        let heads = prop_oneof![1 => Just(64usize), 1 => Just(32usize), 3 => 1..=64usize];
        let shape = (
            extent(tokens, 4),
            heads,
            extent(keys, 64),
            prop_oneof![2 => Just(0usize), 1 => 1..=90usize],
        );
        let addressing = select(vec![Addressing::Ranges, Addressing::Causal, Addressing::Paged]);
        let operands = (
            select(Operands::ALL.to_vec()),
            select(vec![Codes::Quantized, Codes::Any]),
            Float::strategy(),
        );
        let lengths = select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]);
        let limit = (select(vec![1usize, 4, 128, 3]), any::<bool>(), any::<bool>());
        let scale = select(vec![1.0f32, 0.088_388_35, 0.3, 0.125]);
        let written = (
            prop_oneof![2 => Just(true), 1 => Just(false)],
            scale,
            any::<bool>(),
            select(vec![32usize, 64]),
        );
        let implementation = select(vec![Implementation::Portable, Implementation::Hopper]);
        let data = (implementation, Data::strategy(-20..=20));
        (shape, addressing, operands, lengths, limit, written, data)
            .prop_map(
                |(shape, addressing, operands, lengths, limit, written, (implementation, data))| {
                    let (num_tokens, num_heads, num_keys, fewer) = shape;
                    let (operands, codes, weights) = operands;
                    let (ratio, q_off, packed) = limit;
                    let (clean_logits, sm_scale, poison_unseen, page_size) = written;
                    let weights = if operands == Operands::E4m3 { Float::F32 } else { weights };
                    let base = match addressing {
                        Addressing::Paged => {
                            let next_n = 1 + num_tokens % 3;
                            let case = paged(
                                num_tokens.div_ceil(next_n),
                                next_n,
                                num_heads,
                                num_keys,
                                operands,
                            );
                            let table_pages = num_keys.div_ceil(page_size);
                            IndexerLogitsCase {
                                table_pages,
                                num_pages: 2 * case.batch * table_pages,
                                ..case
                            }
                        }
                        Addressing::Causal => IndexerLogitsCase {
                            q_off,
                            packed,
                            ..causal(num_tokens, num_heads, num_keys, operands, ratio)
                        },
                        Addressing::Ranges => flat(num_tokens, num_heads, num_keys, operands),
                    };
                    IndexerLogitsCase {
                        // The numbers of columns and keys may differ.
                        columns: if fewer % 2 == 0 {
                            base.columns + fewer
                        } else {
                            base.columns.saturating_sub(fewer).max(1)
                        },
                        page_size,
                        codes,
                        weights,
                        lengths,
                        clean_logits,
                        sm_scale,
                        poison_unseen,
                        implementation,
                        data,
                        ..base
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<IndexerLogitsCase> {
        let unclean = |case| IndexerLogitsCase { clean_logits: false, ..case };
        vec![
            flat(5, 5, 70, Operands::E4m3),
            causal(9, 17, 90, Operands::Bf16, 2).with(|case| case.packed = true),
            paged(2, 2, 3, 100, Operands::E2m1).then(unclean),
            paged(2, 1, 40, 70, Operands::E4m3).then(hopper),
            flat(3, 33, 66, Operands::E2m1).then(unclean).then(hopper),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerLogitsCase> {
        let of = |lengths| move |case: IndexerLogitsCase| IndexerLogitsCase { lengths, ..case };
        let any = |case| IndexerLogitsCase { codes: Codes::Any, ..case };
        let [bf16, e4m3, e2m1] = Operands::ALL;
        let mut cases = vec![
            flat(0, 4, 9, bf16),
            flat(3, 4, 0, e4m3),
            paged(0, 2, 4, 70, e4m3),
            paged(2, 1, 4, 70, e4m3).with(|case| case.num_pages = 0),
            flat(3, 4, 9, bf16).with(|case| case.columns = 0),
            flat(1, 1, 1, e4m3),
            // All keys, of every operand type; empty ranges, ranges beyond the keys and beyond the
            // columns.
            flat(5, 64, 200, e4m3).then(of(Lengths::Absent)).then(any),
            flat(5, 64, 200, e2m1).then(of(Lengths::Absent)).then(any),
            flat(5, 64, 200, bf16).then(of(Lengths::Absent)),
            flat(13, 20, 140, e4m3).then(of(Lengths::Hostile)),
            flat(13, 9, 140, bf16).then(of(Lengths::Hostile)).with(|case| case.columns = 75),
            flat(7, 20, 140, e2m1).then(of(Lengths::Hostile)).with(|case| {
                case.columns = 300;
                case.clean_logits = false;
            }),
            // Limits that cross a tile between the tokens of one block.
            causal(33, 8, 140, bf16, 1),
            causal(14, 32, 300, bf16, 4).with(|case| {
                case.packed = true;
                case.weights = Float::Bf16;
            }),
            causal(13, 5, 9, e4m3, 3).with(|case| {
                case.q_off = false;
                case.clean_logits = false;
            }),
            causal(9, 64, 200, e2m1, 2).with(|case| case.columns = 64),
            // More tokens than keys in a sequence, whose ends may be outside the tensor.
            causal(8, 64, 1, bf16, 1).with(|case| {
                case.packed = true;
                case.q_off = false;
                case.clean_logits = false;
            }),
            // Pages of both sizes, a separate length for each token, lengths beyond the table.
            paged(2, 3, 64, 150, e4m3).then(of(Lengths::Hostile)),
            paged(3, 1, 33, 150, e2m1).then(of(Lengths::Absent)).with(|case| case.table_pages = 1),
            paged(3, 2, 8, 150, e4m3)
                .with(|case| {
                    case.page_size = 32;
                    case.table_pages = 5;
                })
                .then(any),
            paged(3, 2, 64, 140, e2m1).with(|case| {
                case.page_size = 32;
                case.table_pages = 5;
                case.clean_logits = false;
            }),
            paged(2, 2, 12, 100, bf16),
            // One work tile of many tiles: each consumer reuses its stages. Work tiles of which
            // some have no keys.
            flat(2, 64, 5200, e4m3).then(of(Lengths::Absent)).then(any).then(hopper),
            flat(2, 64, 2600, bf16).then(of(Lengths::Absent)).then(hopper),
            flat(2, 33, 1200, e2m1).then(of(Lengths::Absent)).then(any).then(hopper),
            causal(33, 64, 140, bf16, 4).with(|case| case.packed = true).then(hopper),
            causal(33, 17, 140, e4m3, 3).with(|case| case.q_off = false).then(hopper),
            flat(13, 20, 140, e2m1).then(of(Lengths::Hostile)).then(hopper),
            // More work tiles than blocks, with decoded codes.
            causal(33, 64, 300, e2m1, 1).with(|case| case.packed = true).then(hopper),
            flat(23, 20, 140, e2m1).then(of(Lengths::Absent)).then(hopper),
            flat(9, 32, 200, bf16)
                .then(of(Lengths::Hostile))
                .with(|case| case.clean_logits = false)
                .then(hopper),
            // One token and two, of both widths and every type.
            paged(3, 1, 64, 150, bf16).then(of(Lengths::Hostile)).then(hopper),
            paged(3, 1, 20, 150, bf16).then(of(Lengths::Absent)).then(hopper),
            paged(3, 2, 64, 150, e4m3).then(of(Lengths::Hostile)).then(hopper),
            paged(3, 2, 32, 150, e4m3)
                .with(|case| {
                    case.page_size = 32;
                    case.table_pages = 5;
                })
                .then(any)
                .then(hopper),
            paged(3, 1, 64, 150, e2m1)
                .with(|case| {
                    case.page_size = 32;
                    case.table_pages = 5;
                })
                .then(any)
                .then(hopper),
            paged(2, 1, 8, 100, e2m1).then(hopper),
        ];
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases
    }

    /// Contexts of more than 8,192 columns, of which every seventh page is absent: more tiles than
    /// a pipeline has stages, and a work tile longer than any other case's. Ranges as long.
    fn long_cases() -> Vec<IndexerLogitsCase> {
        let [bf16, e4m3, e2m1] = Operands::ALL;
        let all = |case| IndexerLogitsCase { lengths: Lengths::Absent, ..case };
        let absent = |next_n: usize, columns: usize, operands| {
            let case = all(paged(1, next_n, 2, columns, operands));
            IndexerLogitsCase { num_pages: case.table_pages * 7 / 8, ..case }
        };
        vec![
            absent(1, 8300, e4m3),
            all(flat(2, 2, 8300, bf16)),
            hopper(absent(1, 8300, e4m3)),
            hopper(absent(2, 2300, e2m1)),
        ]
    }

    fn amend(c: &IndexerLogitsCase, tensors: &mut Tensors) -> OracleResult<()> {
        draw_operands(c, tensors);
        match c.addressing {
            Addressing::Ranges => {
                let [ks, ke] = draw_ranges(c);
                tensors.set_i32s("ks", &ks);
                tensors.set_i32s("ke", &ke);
            }
            Addressing::Causal => {
                let sequences = c.sequences();
                if c.q_off {
                    tensors.set_i32s(
                        "q_off",
                        &draw_offsets(c.data.seed, c.ratio, c.num_keys, sequences.as_ref()),
                    );
                }
                if let Some(Sequences { cu_q, cu_k }) = sequences {
                    tensors.set_i32s("cu_q", &cu_q);
                    tensors.set_i32s("cu_k", &cu_k);
                }
            }
            Addressing::Paged => {
                tensors.set_i32s("block_table", &draw_table(c));
                tensors.set_i32s("context_lens", &draw_lengths(c));
            }
        }
        if c.poison_unseen {
            poison_unseen(c, tensors);
        }
        Ok(())
    }

    fn forward(
        c: &IndexerLogitsCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let logits = reference::forward(&inputs(c, t)?, c.accumulator(), rounding)?;
        let shape = match c.is_paged() {
            true => vec![c.batch, c.next_n, c.columns],
            false => vec![c.num_tokens, c.columns],
        };
        Ok(Named::new().with("logits", logits.reshape(shape)?))
    }

    fn launch(
        c: &IndexerLogitsCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, &c.options()))
    }

    /// The part of logits that a consumer with ranges reads, where they are not clean. The rest is
    /// -infinity.
    fn observe(
        c: &IndexerLogitsCase,
        given: &Tensors,
        written: &Tensors,
        _: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        if c.clean_logits {
            return Vec::new();
        }
        let logits = written.tensor("logits");
        let seen = keys(c, given).rows(c.tokens(), c.rows(), c.columns).into_iter().flatten();
        let values = logits.to_f64().into_iter().zip(seen);
        let values: Vec<f64> =
            values.map(|(x, key)| if key.is_some() { x } else { f64::NEG_INFINITY }).collect();
        vec![("seen_logits", HostTensor::from_f64(DType::F32, &logits.shape, &values))]
    }

    fn invariant(_: &IndexerLogitsCase, _: bool) -> &'static [BatchAxis] {
        &[
            BatchAxis::Company,
            BatchAxis::Buckets,
            BatchAxis::Verification,
            BatchAxis::Chunks,
            BatchAxis::Cache,
            BatchAxis::Forms,
        ]
    }

    fn batches(c: &IndexerLogitsCase, batches: &mut Batches<'_, Self>) {
        match c.addressing {
            Addressing::Ranges => batches.rows("num_tokens"),
            Addressing::Paged => {
                batches.rows("batch");
                page_batch(c, batches);
                verification(c, batches);
            }
            Addressing::Causal if c.packed => {
                batches.skip(BatchAxis::Chunks, "its sequences are packed");
            }
            Addressing::Causal => {
                let first = batches.tensors().maybe_i32s("q_off").map_or(0, |offsets| offsets[0]);
                let same = batches.along("num_tokens", &batches.every("num_tokens"));
                batches.run(BatchAxis::Forms, "causal limits against ranges", |v| {
                    make_ranges(c, v);
                    same
                });
                batches.chunks("num_tokens", |v, from, tokens| {
                    (v.case.num_tokens, v.case.q_off) = (tokens, true);
                    v.tensors.put("q_off", HostTensor::from_i32(&[1], &[first + from as i32]));
                });
            }
        }
    }

    fn laws(c: &IndexerLogitsCase, laws: &mut Laws<'_, Self>) {
        if c.tokens() == 0 {
            return;
        }
        let equal = laws.all(Relation::Times(1.0));
        laws.exchange("sm_scale counts once", "w", "sm_scale", |case| &mut case.sm_scale, equal);
        let twice: Vec<_> = laws.compared().into_iter().map(|name| (name, 2.0)).collect();
        // Doubling is exact where halving subnormal values is not.
        laws.scale("weights count once", "w", 2.0, &twice);
        laws.scale("scales of keys count once", "k_scales", 2.0, &twice);
        match c.addressing {
            Addressing::Ranges => laws.separate("num_tokens", "tokens may be permuted"),
            Addressing::Causal => {
                if c.packed {
                    let equal = laws.all(Relation::Times(1.0));
                    ranking::ends_law(laws, c.num_keys, equal);
                }
                laws.independent("num_tokens");
                range_law(c, laws);
            }
            Addressing::Paged => {
                laws.separate("batch", "requests may be permuted");
                page_law(c, laws);
            }
        }
        head_law(c, laws);
    }

    /// Prefill, decoding and training in the model's shapes.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let fastest = Implementation::fastest_on(environment);
        if !on_gpu(environment) {
            return vec![
                timed(prefill(8, 128), fastest),
                timed(decode(2, 128), fastest),
                timed(training(64, 16), fastest),
            ];
        }
        let mut cases = vec![prefill(4096, 16_384), prefill(4096, 32_768), training(8192, 2048)];
        for context in [8192, 65_536] {
            cases.extend([1, 32, 128].map(|batch| decode(batch, context)));
        }
        let portable = timed(training(8192, 2048), Implementation::Portable);
        let name = format!("{}{}", portable.name, Implementation::suffix(true));
        let timed = cases.into_iter().map(|case| timed(case, fastest));
        timed.chain([Benchmark { name, ..portable }]).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["e4m3 prefill q4096 k16384 H64"],
                json!({"num_tokens": 11, "num_heads": 5, "num_keys": 90, "columns": 90}),
                json!({"num_tokens": 2}),
            ),
            Reduced::forward(
                &["bf16 dense q8192 k2048 ratio 4 H64"],
                json!({"num_tokens": 40, "num_heads": 5, "num_keys": 10, "columns": 10}),
                json!({"num_tokens": 2}),
            ),
            Reduced::forward(
                &["e4m3 paged batch 128 context 8192 H64"],
                json!({"batch": 5, "num_heads": 5, "columns": 100, "num_pages": 10, "table_pages": 2}),
                json!({"batch": 2, "num_pages": 4}),
            ),
        ]
    }
}

fn hopper(case: IndexerLogitsCase) -> IndexerLogitsCase {
    IndexerLogitsCase { implementation: Implementation::Hopper, ..case }
}

/// The model's heads with as many tokens and keys as the oracle can compute.
fn production_cases() -> Vec<IndexerLogitsCase> {
    let [bf16, e4m3, e2m1] = Operands::ALL;
    vec![
        flat(24, 64, 3000, e4m3),
        flat(24, 64, 3000, e2m1),
        causal(64, 64, 1100, bf16, 4),
        IndexerLogitsCase { packed: true, ..causal(64, 64, 1100, bf16, 4) },
        paged(5, 2, 64, 2000, e4m3),
        paged(5, 2, 64, 2000, e2m1),
        hopper(flat(24, 64, 3000, e4m3)),
        hopper(flat(24, 64, 3000, e2m1)),
        hopper(causal(64, 64, 1100, bf16, 4)),
        hopper(paged(5, 2, 64, 2000, e4m3)),
        hopper(paged(5, 1, 64, 4000, e4m3)),
        hopper(paged(5, 1, 64, 2000, e2m1)),
    ]
}

// ---------------------------------------------------------------- what the oracle sees

/// The values of rows of operands: codes with their scales decoded.
fn operand(c: &IndexerLogitsCase, rows: &HostTensor, scale_bytes: Option<&HostTensor>) -> Vec<f64> {
    match c.operands {
        Operands::Bf16 => rows.to_f64(),
        _ => reference::numbers(&rows.bytes, scale_bytes.map(|bytes| &bytes.bytes[..]), c.format()),
    }
}

/// The rows of pages, and the scales of each row, which follow them.
fn rows_of_pages(c: &IndexerLogitsCase, pages: &[u8]) -> [HostTensor; 2] {
    let (row, scale) = (c.operands.row_bytes(), c.operands.scale_bytes());
    let (mut rows, mut scales) = (Vec::new(), Vec::new());
    for page in pages.chunks(c.operands.page_bytes(c.page_size)) {
        let (data, behind) = page.split_at(c.page_size * row);
        rows.extend_from_slice(data);
        scales.extend_from_slice(behind);
    }
    let of = |dtype: DType, width: usize, bytes: Vec<u8>| HostTensor {
        dtype,
        shape: vec![c.rows(), width],
        bytes,
    };
    let scale_type = if c.operands == Operands::E4m3 { DType::F32 } else { DType::U8 };
    [
        of(c.operands.dtype(), c.operands.row_elements(), rows),
        of(scale_type, scale / scale_type.size(), scales),
    ]
}

/// The pages of rows and their scales: the inverse of [`rows_of_pages`].
fn pages_of(c: &IndexerLogitsCase, rows: &[u8], scales: &[u8]) -> Vec<u8> {
    let (row, scale) =
        (c.page_size * c.operands.row_bytes(), c.page_size * c.operands.scale_bytes());
    let page =
        |page: usize| [&rows[page * row..][..row], &scales[page * scale..][..scale]].concat();
    (0..c.num_pages).flat_map(page).collect()
}

fn keys(c: &IndexerLogitsCase, given: &Tensors) -> Keys {
    match c.addressing {
        Addressing::Ranges => Keys::Ranges { ks: given.i32s("ks"), ke: given.i32s("ke") },
        Addressing::Causal => {
            let sequences = given.maybe_i32s("cu_q").zip(given.maybe_i32s("cu_k"));
            // Kernels also receive ends beyond the keys. Bounded here by the tensor.
            let last = i32::try_from(c.rows()).unwrap_or(i32::MAX);
            let bounded = |ends: Vec<i32>| ends.into_iter().map(|end| end.clamp(0, last)).collect();
            let sequences = sequences.map(|(cu_q, cu_k)| Sequences { cu_q, cu_k: bounded(cu_k) });
            Keys::Causal { ratio: c.ratio, q_off: given.maybe_i32s("q_off"), sequences }
        }
        Addressing::Paged => Keys::Paged {
            block_table: given.i32s("block_table"),
            table_pages: c.table_pages,
            context_lens: given.i32s("context_lens"),
            page_size: c.page_size,
        },
    }
}

fn inputs(c: &IndexerLogitsCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let (host, tokens) = (t.host(), c.tokens());
    let of_pages = host.get("pages").map(|pages| rows_of_pages(c, &pages.bytes));
    let (rows, scales) = match &of_pages {
        Some([rows, scales]) => (rows, Some(scales)),
        None => (host.tensor("k"), host.get("k_scales").or_else(|| host.get("k_scale_bytes"))),
    };
    let (e2m1, e4m3) = (c.operands == Operands::E2m1, c.operands == Operands::E4m3);
    let of_rows = |values: Vec<f64>| tensor(values, &[c.rows(), HEAD_DIM]);
    let bf16 = c.operands == Operands::Bf16 && !c.is_paged();
    let k = if bf16 { t.f64("k")? } else { of_rows(operand(c, rows, scales.filter(|_| e2m1)))? };
    let q = match c.operands {
        Operands::Bf16 => t.f64("q")?.reshape((tokens, c.num_heads, HEAD_DIM))?,
        _ => tensor(
            operand(c, host.tensor("q"), host.get("q_scale_bytes")),
            &[tokens, c.num_heads, HEAD_DIM],
        )?,
    };
    Ok(reference::Inputs {
        q,
        w: t.f64("w")?.reshape((tokens, c.num_heads))?,
        k,
        k_scales: scales
            .filter(|_| e4m3)
            .map(|scales| tensor(scales.to_f64(), &[c.rows()]))
            .transpose()?,
        keys: keys(c, host),
        columns: c.columns,
        sm_scale: t.scalar("sm_scale", f64::from(c.sm_scale)),
    })
}

// ---------------------------------------------------------------- what is drawn

/// Bytes of rows of codes, and of their scales: fp32 with e4m3, e8m0 with e2m1.
fn draw_codes(c: &IndexerLogitsCase, name: &str, count: usize) -> [Vec<u8>; 2] {
    let mut draw = Draw::new(c.data.seed, name);
    let e4m3 = c.operands == Operands::E4m3;
    let group = if e4m3 { HEAD_DIM } else { GROUP };
    let (codes, scale_bytes) = match c.codes {
        Codes::Quantized => {
            let numbers = draw.values(c.data.distribution, count, HEAD_DIM, 1.0);
            let quantized = quantize(&numbers, group, c.format());
            (quantized.codes, quantized.scale_bytes)
        }
        Codes::Any => {
            // All but the two of NaN.
            let number = |byte: u8| if e4m3 && byte & 0x7f == 0x7f { byte ^ 1 } else { byte };
            let codes = (0..count * HEAD_DIM).map(|_| number(draw.rng().random())).collect();
            (
                codes,
                (0..count * HEAD_DIM / group).map(|_| draw.rng().random_range(120..=133)).collect(),
            )
        }
    };
    if !e4m3 {
        let nibbles = codes.chunks(2).map(|pair| pair[0] & 15 | pair[1] << 4).collect();
        return [nibbles, scale_bytes];
    }
    // No power of two.
    let mut scale = |byte: u8| {
        Format::E8M0.value(byte.into()) * draw.rng().random_range(1.0..2.0) * c.data.magnitude
    };
    let scales =
        scale_bytes.into_iter().flat_map(|byte| (scale(byte) as f32).to_ne_bytes()).collect();
    [codes, scales]
}

fn draw_operands(c: &IndexerLogitsCase, tensors: &mut Tensors) {
    if c.operands == Operands::Bf16 {
        if let Some(pages) = tensors.bytes_mut("pages") {
            let mut draw = Draw::new(c.data.seed, "pages");
            let numbers = draw.values(c.data.distribution, c.rows(), HEAD_DIM, c.data.magnitude);
            pages.copy_from_slice(
                &HostTensor::from_f64(DType::Bf16, &[numbers.len()], &numbers).bytes,
            );
        }
        return;
    }
    let mut set = |name: &str, bytes: &[u8]| {
        if let Some(own) = tensors.bytes_mut(name) {
            own.copy_from_slice(bytes);
        }
    };
    let [q, q_scales] = draw_codes(c, "q", c.tokens() * c.num_heads);
    set("q", &q);
    set("q_scale_bytes", &q_scales);
    let [rows, scales] = draw_codes(c, "k", c.rows());
    if c.is_paged() {
        return set("pages", &pages_of(c, &rows, &scales));
    }
    set("k", &rows);
    set(if c.operands == Operands::E4m3 { "k_scales" } else { "k_scale_bytes" }, &scales);
}

/// Ranges of all keys, of some keys, or invalid ones.
fn draw_ranges(c: &IndexerLogitsCase) -> [Vec<i32>; 2] {
    let mut draw = Draw::new(c.data.seed, "ranges");
    let num_keys = c.num_keys as i32;
    let empty = [(5, 5), (7, 3)];
    let beyond = [(-4, 9), (0, num_keys + 1), (i32::MIN, i32::MAX), (num_keys, num_keys + 9)];
    let mut hostile = Hostile::new(c.data.seed, "ranges", &[&empty[..], &beyond].concat());
    let range = |token: usize| {
        let ends = [0; 2].map(|_| draw.rng().random_range(0..=num_keys));
        match (c.lengths, token % 2) {
            (Lengths::Absent, _) => (0, num_keys),
            (Lengths::Hostile, 0) => hostile.take(),
            _ => (ends[0].min(ends[1]), ends[0].max(ends[1])),
        }
    };
    let ranges: Vec<_> = (0..c.num_tokens).map(range).collect();
    [ranges.iter().map(|range| range.0).collect(), ranges.iter().map(|range| range.1).collect()]
}

/// Distinct pages in any order. Where lengths are hostile, or there are too few pages for the table,
/// every seventh does not exist.
fn draw_table(c: &IndexerLogitsCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "block_table");
    let mut pages: Vec<i32> = (0..c.num_pages as i32).collect();
    pages.shuffle(draw.rng());
    let beyond = c.num_pages as i32;
    let mut none = Hostile::new(c.data.seed, "block_table", &[-1, beyond, i32::MIN, i32::MAX]);
    let slots = c.batch * c.table_pages;
    let absent = c.lengths == Lengths::Hostile || c.num_pages < slots;
    let page = |at: usize| match pages.get(at) {
        Some(&page) if !absent || at % 7 != 3 => page,
        _ => none.take(),
    };
    (0..slots).map(page).collect()
}

fn draw_lengths(c: &IndexerLogitsCase) -> Vec<i32> {
    let (tokens, columns) = (c.tokens(), c.columns);
    c.lengths
        .draw(c.data.seed, "context_lens", tokens, columns)
        .unwrap_or_else(|| vec![columns as i32; tokens])
}

/// Sets every key that no token scores to NaN: its codes, or its scales where codes have no NaN.
fn poison_unseen(c: &IndexerLogitsCase, tensors: &mut Tensors) {
    let mut seen = vec![false; c.rows()];
    let rows = keys(c, tensors).rows(c.tokens(), c.rows(), c.columns);
    rows.into_iter().flatten().flatten().for_each(|key| seen[key] = true);
    let unseen: Vec<usize> = (0..c.rows()).filter(|&key| !seen[key]).collect();
    let fill = |bytes: Option<&mut [u8]>, width: usize| {
        let Some(bytes) = bytes else { return };
        unseen.iter().for_each(|key| bytes[key * width..(key + 1) * width].fill(0xff));
    };
    let (row, scale) = (c.operands.row_bytes(), c.operands.scale_bytes());
    fill(tensors.bytes_mut("k"), row);
    fill(tensors.bytes_mut("k_scales"), scale);
    fill(tensors.bytes_mut("k_scale_bytes"), scale);
    if let Some(pages) = tensors.bytes_mut("pages") {
        let [mut rows, mut scales] = rows_of_pages(c, pages);
        fill(Some(&mut rows.bytes), row);
        fill(Some(&mut scales.bytes), scale);
        pages.copy_from_slice(&pages_of(c, &rows.bytes, &scales.bytes));
    }
}

// ---------------------------------------------------------------- laws

type LogitLaws<'l> = Laws<'l, IndexerLogits>;

/// A causal limit is a range of rows for each token.
fn range_law(c: &IndexerLogitsCase, laws: &mut LogitLaws<'_>) {
    laws.alike("a causal limit is a range", Relation::Times(1.0), |v| make_ranges(c, v));
}

/// The keys that each token sees, as ranges.
fn make_ranges(c: &IndexerLogitsCase, v: &mut Variant<IndexerLogits>) {
    let rows = keys(c, &v.tensors).rows(c.num_tokens, c.num_keys, c.columns);
    let range = |row: &Vec<Option<usize>>| {
        let first = row.iter().flatten().min().copied().unwrap_or(0);
        (first as i32, (first + row.iter().flatten().count()) as i32)
    };
    let (ks, ke): (Vec<i32>, Vec<i32>) = rows.iter().map(range).unzip();
    ["cu_q", "cu_k", "q_off"].iter().for_each(|name| drop(v.tensors.remove(name)));
    v.case = IndexerLogitsCase { addressing: Addressing::Ranges, packed: false, ..c.clone() };
    v.tensors.put("ks", HostTensor::from_i32(&[c.num_tokens], &ks));
    v.tensors.put("ke", HostTensor::from_i32(&[c.num_tokens], &ke));
}

/// Pages only determine where a key is stored.
fn page_law(c: &IndexerLogitsCase, laws: &mut LogitLaws<'_>) {
    laws.alike("pages may lie anywhere", Relation::Times(1.0), |v| move_pages(c, v));
}

/// The pages in another order, with the tables that name them.
fn move_pages(c: &IndexerLogitsCase, v: &mut Variant<IndexerLogits>) {
    let order = permutation(c.data.seed, c.num_pages);
    let mut places = vec![0; c.num_pages];
    order.iter().enumerate().for_each(|(place, &page)| places[page] = place as i32);
    let moved = permuted_along(v.tensors.tensor("pages"), 0, &order);
    v.tensors.put("pages", moved);
    v.tensors.edit_i32s("block_table", |table| {
        for page in table {
            let place = usize::try_from(*page).ok().and_then(|page| places.get(page));
            *page = place.copied().unwrap_or(*page);
        }
    });
}

/// The entries in other pages.
fn page_batch(c: &IndexerLogitsCase, batches: &mut Batches<'_, IndexerLogits>) {
    if c.num_pages < 2 {
        return;
    }
    let every: Vec<(usize, usize)> = (0..c.batch).map(|request| (request, request)).collect();
    let same = batches.along("batch", &every);
    let extents = format!("{} pages in another order", c.num_pages);
    batches.run(BatchAxis::Cache, extents, |v| {
        move_pages(c, v);
        same
    });
}

/// The tokens of each request, each as a request of its own.
fn verification(c: &IndexerLogitsCase, batches: &mut Batches<'_, IndexerLogits>) {
    if c.next_n < 2 {
        return;
    }
    let tokens: Vec<(usize, usize)> = (0..c.batch * c.next_n).map(|token| (token, token)).collect();
    let written = batches.along("batch", &[]);
    let same = written.iter().map(|same| Same::leading(same.tensors[0], [2, 2], &tokens)).collect();
    let extents = format!("next_n {} against 1", c.next_n);
    let specs = IndexerLogits::tensors(c);
    batches.run(BatchAxis::Verification, extents, |v| {
        (v.case.batch, v.case.next_n) = (c.batch * c.next_n, 1);
        apart(&specs, &mut v.tensors, c.batch, c.next_n);
        same
    });
}

/// The sum over the heads may come in another order, within its rounding.
fn head_law(c: &IndexerLogitsCase, laws: &mut LogitLaws<'_>) {
    let order = permutation(c.data.seed, c.num_heads);
    let specs = IndexerLogits::tensors(c);
    laws.alike("heads may be permuted", Relation::WithinBudget, |v| {
        v.tensors.permute(&specs, "num_heads", &order);
    });
}

// ---------------------------------------------------------------- benchmarks

fn plainly(case: IndexerLogitsCase) -> IndexerLogitsCase {
    IndexerLogitsCase {
        lengths: Lengths::Absent,
        clean_logits: false,
        poison_unseen: false,
        sm_scale: 1.0,
        ..case
    }
}

/// The last tokens of a sequence of that many keys.
fn prefill(num_tokens: usize, num_keys: usize) -> IndexerLogitsCase {
    plainly(flat(num_tokens, MAX_HEADS, num_keys, Operands::E4m3))
}

fn decode(batch: usize, context: usize) -> IndexerLogitsCase {
    let case = paged(batch, 1, MAX_HEADS, context, Operands::E4m3);
    plainly(IndexerLogitsCase { num_pages: batch * case.table_pages, ..case })
}

fn training(num_tokens: usize, num_keys: usize) -> IndexerLogitsCase {
    plainly(causal(num_tokens, MAX_HEADS, num_keys, Operands::Bf16, num_tokens / num_keys))
}

/// Keys that a token of a benchmark sees.
fn visible(c: &IndexerLogitsCase, token: usize) -> usize {
    match c.addressing {
        Addressing::Ranges => c.num_keys - c.num_tokens + token + 1,
        Addressing::Causal => (token + 1) / c.ratio,
        Addressing::Paged => c.columns,
    }
}

fn timed(case: IndexerLogitsCase, implementation: Implementation) -> Benchmark<IndexerLogits> {
    let case = IndexerLogitsCase { implementation, ..case };
    let tokens = case.tokens();
    let pairs: usize = (0..tokens).map(|token| visible(&case, token)).sum();
    let operands = ["bf16", "e4m3", "e2m1"][case.operands as usize];
    let name = match case.addressing {
        Addressing::Ranges => format!("{operands} prefill q{tokens} k{} H64", case.num_keys),
        Addressing::Causal => {
            format!("{operands} dense q{tokens} k{} ratio {} H64", case.num_keys, case.ratio)
        }
        Addressing::Paged => {
            format!("{operands} paged batch {tokens} context {} H64", case.columns)
        }
    };
    let flops = 2.0 * (pairs * case.num_heads * HEAD_DIM) as f64;
    let key = case.operands.row_bytes() + case.operands.scale_bytes();
    let heads = tokens * case.num_heads * (case.operands.row_bytes() + 4);
    let axis = if case.is_paged() { "batch" } else { "num_tokens" };
    let benchmark = Benchmark {
        bytes: (heads + case.rows() * key + 4 * pairs) as f64,
        rows: if case.is_paged() { 1 } else { 4 },
        amend: place_keys,
        sampled: set_apart,
        ..Benchmark::new(Direction::Forward, name, case.clone(), axis)
    };
    let benchmark =
        if case.is_paged() { benchmark.also_drawn_along("num_pages") } else { benchmark };
    let multiplied = match case.operands {
        Operands::Bf16 => Multiplied::Bf16,
        Operands::E4m3 | Operands::E2m1 => Multiplied::E4m3,
    };
    let benchmark = benchmark.multiplying(multiplied);
    if case.is_paged() { benchmark } else { benchmark.computing(flops) }
}

/// Causal ranges, no offsets, whole contexts on separate pages.
fn place_keys(c: &IndexerLogitsCase, tensors: &mut Tensors) {
    match c.addressing {
        Addressing::Ranges => {
            let ke: Vec<i32> = (0..c.num_tokens).map(|token| visible(c, token) as i32).collect();
            tensors.put("ks", HostTensor::from_i32(&[c.num_tokens], &vec![0; c.num_tokens]));
            tensors.put("ke", HostTensor::from_i32(&[c.num_tokens], &ke));
        }
        Addressing::Causal => tensors.set_i32s("q_off", &[0]),
        Addressing::Paged => {
            tensors.put(
                "block_table",
                HostTensor::from_i32(&[c.batch, c.table_pages], &draw_table(c)),
            );
            tensors.put(
                "context_lens",
                HostTensor::from_i32(&[c.batch, 1], &vec![c.columns as i32; c.batch]),
            );
        }
    }
}

/// A sampled token of the causal form gets the range that it saw. For pages, those that a sampled
/// request references are kept.
fn set_apart(whole: &Whole<'_, IndexerLogits>, c: &mut IndexerLogitsCase, tensors: &mut Tensors) {
    match c.addressing {
        Addressing::Ranges => {}
        Addressing::Causal => {
            tensors.remove("q_off");
            c.addressing = Addressing::Ranges;
            let ke: Vec<i32> =
                whole.rows.iter().map(|&token| visible(whole.case, token) as i32).collect();
            tensors.put("ks", HostTensor::from_i32(&[ke.len()], &vec![0; ke.len()]));
            tensors.put("ke", HostTensor::from_i32(&[ke.len()], &ke));
        }
        Addressing::Paged => {
            let named: Vec<usize> =
                tensors.i32s("block_table").into_iter().map(|page| page as usize).collect();
            let kept = permuted_along(tensors.tensor("pages"), 0, &named);
            tensors.put("pages", kept);
            c.num_pages = named.len();
            tensors.set_i32s("block_table", &(0..named.len() as i32).collect::<Vec<_>>());
        }
    }
}
