//! `decode_attention` (inference 8 to 8.4): `kernels/cuda/attention/decode_attention.cu` against
//! `reference/src/attention/decode_attention.rs`.

use dsv4_kernels::attention::decode_attention as launcher;
use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_reference::attention::decode_attention as reference;
use dsv4_runtime::{Device, HostTensor};
use half::bf16;
use rand::seq::SliceRandom;

use crate::case::Draw;
use crate::case::permutation;
use crate::operator::Relation;
use crate::operator::benchmarks::Rate;
use crate::operator::declaration::TensorSpec;
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operator::tensors::apart;
use crate::operators::attention::sinks::Sinks;
use crate::operators::cache::paged::{
    check_nope_dim, oracle, page_bytes, page_gap, pages_of, rows_of,
};
use crate::operators::head::logits::DEVIATIONS;
use crate::operators::lists::{IndexClass, Lengths, compact, distinct, gathered};

/// The operator.
pub struct DecodeAttention;

/// A store of rows and the width of the lists that index it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreCase {
    /// Slots of a list; 0 is allowed.
    pub topk: usize,
    /// Pages; 0 is allowed.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
}

impl StoreCase {
    fn num_slots(self) -> usize {
        self.num_pages * self.page_size
    }
}

/// The stores whose lists have lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthsOf {
    /// Window and compressed entries.
    Both,
    /// Only the window.
    Window,
    /// Only the compressed entries.
    Compressed,
}

/// A case: sizes, stores, lists, sinks, scale, layout, schedule, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeAttentionCase {
    /// Requests; 0 is allowed.
    pub batch: usize,
    /// Tokens of a request.
    pub s_q: usize,
    /// Query heads.
    pub num_heads: usize,
    /// e4m3 channels of a row: a multiple of 64; 0 is a cache of bf16.
    pub nope_dim: usize,
    /// bf16 channels of a row. The total of both kinds is a multiple of 16 up to 512.
    pub rope_dim: usize,
    /// Raw rows.
    pub window: StoreCase,
    /// Compressed entries.
    pub compressed: Option<StoreCase>,
    /// What the lists look like.
    pub indices: IndexClass,
    /// How many slots of a request's lists count.
    pub lengths: Lengths,
    /// Which stores have lists with lengths, if any.
    pub lengths_of: LengthsOf,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Added to every logit.
    pub logit_shift: f64,
    /// Magnitude of the rows: the range that the scales must cover.
    pub row_magnitude: f64,
    /// Blocks that share the work.
    pub num_blocks: usize,
    /// Bytes after each page beyond its rounding up; a multiple of 16.
    pub page_padding: usize,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether rows that no valid slot references are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run.
    pub implementation: Implementation,
    /// Heads of a work unit and the cuts of each one's list, for some requests of a larger case. A
    /// benchmark's sample, which no JSON line can select.
    #[serde(skip)]
    cuts: Option<(usize, Vec<Vec<usize>>)>,
    /// Seed of the data.
    pub seed: u64,
}

/// The largest number of slots in a list: lengths beyond it still fit an i32.
const MOST_SLOTS: usize = 1 << 30;
/// More blocks than any batch has tiles of keys.
const ANY_BATCH: usize = 1 << 24;
const MODEL: RowFormat = RowFormat::MODEL;
const SMALL: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
/// bf16 channels whose 16-byte pieces in a warp's rows are not a multiple of its lanes.
const ODD: RowFormat = RowFormat { nope_dim: 128, rope_dim: 48 };

/// Lists with slots that are not valid, over a window and compressed entries of small pages.
fn plain(
    batch: usize,
    s_q: usize,
    num_heads: usize,
    format: RowFormat,
    num_blocks: usize,
) -> DecodeAttentionCase {
    let RowFormat { nope_dim, rope_dim } = format;
    DecodeAttentionCase {
        batch,
        s_q,
        num_heads,
        nope_dim,
        rope_dim,
        window: StoreCase { topk: 70, num_pages: 3, page_size: 16 },
        compressed: Some(StoreCase { topk: 130, num_pages: 20, page_size: 2 }),
        indices: IndexClass::Hostile,
        lengths: Lengths::Absent,
        lengths_of: LengthsOf::Both,
        sinks: Sinks::Normal,
        softmax_scale: (format.head_dim() as f32).sqrt().recip(),
        logit_deviation: 2.0,
        logit_shift: 0.0,
        row_magnitude: 1.0,
        num_blocks,
        page_padding: 0,
        distribution: Distribution::Normal,
        poison_unreferenced: true,
        implementation: Implementation::Portable,
        cuts: None,
        seed: 1,
    }
}

impl DecodeAttentionCase {
    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn options(&self) -> launcher::Options {
        launcher::Options {
            format: self.format(),
            window_page_size: self.window.page_size,
            compressed_page_size: self.compressed.map_or(1, |store| store.page_size),
            softmax_scale: self.softmax_scale,
            num_blocks: self.num_blocks,
            implementation: self.implementation.launcher(),
        }
    }

    fn tokens(&self) -> usize {
        self.batch * self.s_q
    }

    /// Whether the blocks are as many as the tiles of any batch: then every list is divided alike.
    fn has_a_block_for_each_tile(&self) -> bool {
        self.num_blocks >= ANY_BATCH
    }

    fn head_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// The stores that the case has, with the names of their tensors.
    fn stores(&self) -> impl Iterator<Item = (StoreNames, StoreCase)> {
        let both = [Some((WINDOW, self.window)), self.compressed.map(|store| (COMPRESSED, store))];
        both.into_iter().flatten()
    }

    /// Each store in sequence, mutable.
    fn stores_mut(&mut self) -> impl Iterator<Item = (StoreNames, &mut StoreCase)> {
        let both = [
            Some((WINDOW, &mut self.window)),
            self.compressed.as_mut().map(|store| (COMPRESSED, store)),
        ];
        both.into_iter().flatten()
    }
}

/// Tensor names of a store.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StoreNames {
    /// The pages, and the random stream of their rows.
    pages: &'static str,
    indices: &'static str,
    length: &'static str,
    /// Axes of the pages, and slots of a list.
    axes: [&'static str; 3],
    /// The case in which only this store has lengths.
    alone: LengthsOf,
}

const WINDOW: StoreNames = StoreNames {
    pages: "window",
    indices: "window_indices",
    length: "window_length",
    axes: ["window_num_pages", "window_page_bytes", "window_topk"],
    alone: LengthsOf::Window,
};
const COMPRESSED: StoreNames = StoreNames {
    pages: "compressed",
    indices: "compressed_indices",
    length: "compressed_length",
    axes: ["compressed_num_pages", "compressed_page_bytes", "compressed_topk"],
    alone: LengthsOf::Compressed,
};

impl StoreNames {
    /// The pages, the lists and the lengths of a store. All are absent where the case does not have
    /// the store.
    fn tensors(self, c: &DecodeAttentionCase, store: Option<StoreCase>) -> [TensorSpec; 3] {
        let StoreCase { topk, num_pages, page_size } =
            store.unwrap_or(StoreCase { topk: 0, num_pages: 0, page_size: 1 });
        let (format, [pages, bytes, slots]) = (c.format(), self.axes);
        let lengths =
            c.lengths != Lengths::Absent && [LengthsOf::Both, self.alone].contains(&c.lengths_of);
        let gap = page_gap(format, page_size).saturating_add(c.page_padding);
        let pages = [axis(pages, num_pages), axis(bytes, page_size * format.row_bytes())];
        let lists = [axis("batch", c.batch), axis("s_q", c.s_q), axis(slots, topk)];
        [
            input(self.pages, DType::U8, &pages)
                .aligned_rows()
                .with_gap("page_padding", gap)
                .when(store.is_some()),
            input(self.indices, DType::I32, &lists).rows().joined().when(store.is_some()),
            input(self.length, DType::I32, &lists[..1]).when(store.is_some() && lengths),
        ]
    }
}

impl Operator for DecodeAttention {
    type Case = DecodeAttentionCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "decode_attention",
        family: Family::Attention,
        summary: "attention of decoded tokens over two stores of a paged cache, with a sink per head",
        specification: &[
            "inference 8",
            "inference 8.1",
            "inference 8.2",
            "inference 8.3",
            "inference 8.4",
        ],
        paths: &[
            "decode_attention<16>",
            "decode_attention<64>",
            "decode_attention_hopper",
            "decode_attention_combine",
        ],
        modules: launcher::modules,
        cases: [12, 36, 100],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "rows of the V3.2 format: 512 e4m3 and 64 rotated values with fp32 scales",
        "the model stores 448 and 64 with scale bytes (inference 8.3)",
    )];

    const GOLDEN: &'static [&'static str] = &["attn_core"];

    fn tensors(c: &DecodeAttentionCase) -> Specs {
        let [batch, s_q] = [axis("batch", c.batch), axis("s_q", c.s_q).not_empty()];
        let num_heads = axis("num_heads", c.num_heads).not_empty();
        let heads = [batch, s_q, num_heads, axis("head_dim", c.head_dim()).multiples(16, 512)];
        let first = [
            input("q", DType::Bf16, &heads)
                .aligned_rows()
                .joined()
                .drawn(c.distribution, query_size(c)),
            input("sink", DType::F32, &[num_heads]).when(c.sinks != Sinks::Absent),
        ];
        let stores = [WINDOW.tensors(c, Some(c.window)), COMPRESSED.tensors(c, c.compressed)];
        let last = [
            output("out", DType::Bf16, &heads).aligned_rows().joined(),
            output("lse", DType::F32, &heads[..3]),
        ];
        Specs::new(c.seed, first.into_iter().chain(stores.into_iter().flatten()).chain(last))
            .positive("softmax_scale", c.softmax_scale)
            .positive("logit_deviation", c.logit_deviation)
            .shift_of_logits("logit_deviation", c.logit_deviation)
            .positive("row_magnitude", c.row_magnitude)
            .shift_of_logits("logit_shift", c.logit_shift)
    }

    fn check(c: &DecodeAttentionCase) -> Result<(), Refused> {
        check_nope_dim(c.nope_dim)?;
        if c.rope_dim == 0
            || c.rope_dim > 512
            || !c.head_dim().is_multiple_of(16)
            || c.head_dim() > 512
        {
            let reason = format!(
                "{}: with {} others it makes no multiple of 16 up to 512",
                c.rope_dim, c.nope_dim
            );
            return refuse("rope_dim", reason);
        }
        not_empty("num_blocks", c.num_blocks)?;
        if c.implementation == Implementation::Hopper
            && !launcher::HOPPER_FORMATS.contains(&c.format())
        {
            let reason = format!(
                "hopper takes 448 + 64 channels or 512 in bf16, not {} + {}",
                c.nope_dim, c.rope_dim
            );
            return refuse("implementation", reason);
        }
        if !c.page_padding.is_multiple_of(16) {
            return refuse(
                "page_padding",
                format!("{}: pages are 16-byte aligned", c.page_padding),
            );
        }
        for (names, store) in c.stores() {
            page_bytes(c.format(), store.page_size)
                .or_else(|reason| refuse(names.pages, reason))?;
            if store.topk > MOST_SLOTS {
                return refuse(
                    names.pages,
                    format!("lists of {} slots; {MOST_SLOTS} at most", store.topk),
                );
            }
        }
        Ok(())
    }

    fn oracle_elements(c: &DecodeAttentionCase) -> u128 {
        // The stores in bf16, slot by slot, and both lists of a token as one.
        let slots = c.stores().map(|(_, store)| store.num_slots() as u128).sum::<u128>();
        let topk = c.stores().map(|(_, store)| store.topk).sum();
        (slots * c.head_dim() as u128).saturating_add(gathered(
            c.tokens(),
            topk,
            c.head_dim(),
            c.num_heads,
        ))
    }

    fn strategy(profile: Profile) -> BoxedStrategy<DecodeAttentionCase> {
        let lists = (
            select(vec![
                IndexClass::Valid,
                IndexClass::Duplicates,
                IndexClass::Hostile,
                IndexClass::LeadingMasked,
                IndexClass::EmptyRows,
            ]),
            select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]),
            select(vec![
                LengthsOf::Both,
                LengthsOf::Both,
                LengthsOf::Window,
                LengthsOf::Compressed,
            ]),
            select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]),
        );
        let scale = select(vec![0.044_194_174f32, 0.125, 0.3, 1.0]);
        let logits = (
            scale,
            select(DEVIATIONS.to_vec()),
            prop_oneof![4 => Just(0.0), 1 => Just(-200.0)],
            select(vec![1.0, 1.0, 0.001, 300.0, 40000.0]),
        );
        let data = (
            prop_oneof![2 => Just(0usize), 1 => Just(32usize)],
            select(vec![Distribution::Normal, Distribution::Uniform, Distribution::RowScaled]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 2 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape_strategy(profile), stores_strategy(profile), lists, logits, data)
            .prop_map(|(shape, (window, compressed), lists, logits, data)| {
                let (batch, s_q, num_heads, format, num_blocks) = shape;
                let (indices, lengths, lengths_of, sinks) = lists;
                let (softmax_scale, logit_deviation, logit_shift, row_magnitude) = logits;
                let (page_padding, distribution, poison_unreferenced, implementation, seed) = data;
                // Hopper supports few formats; only the portable kernel supports the others.
                let hopper = launcher::HOPPER_FORMATS.contains(&format);
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // Rows of different magnitude scale logits by the same factor, so they start
                // smaller.
                let logit_deviation =
                    if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                DecodeAttentionCase {
                    window,
                    compressed,
                    indices,
                    lengths,
                    lengths_of,
                    sinks,
                    softmax_scale,
                    logit_deviation,
                    logit_shift,
                    row_magnitude,
                    page_padding,
                    distribution,
                    poison_unreferenced,
                    implementation,
                    seed,
                    ..plain(batch, s_q, num_heads, format, num_blocks)
                }
            })
            .boxed()
    }

    fn typical() -> Vec<DecodeAttentionCase> {
        let within = |case| DecodeAttentionCase { lengths: Lengths::Within, ..case };
        vec![
            plain(2, 2, 5, SMALL, 3).then(within),
            plain(2, 2, 18, SMALL, 1),
            plain(1, 2, 3, MODEL, 2).then(within).then(hopper),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<DecodeAttentionCase> {
        let store = |topk, num_pages, page_size| StoreCase { topk, num_pages, page_size };
        let mut cases = vec![
            plain(0, 1, 4, SMALL, 3),
            // No slots; rows but no list; a list but no rows.
            plain(2, 1, 5, SMALL, 4).with(|case| {
                case.window = store(0, 0, 64);
                case.compressed = None;
            }),
            plain(2, 2, 5, SMALL, 1).with(|case| {
                case.window = store(0, 2, 4);
                case.compressed = Some(store(9, 0, 2));
            }),
            // One block, one tile for each block, and more blocks than tiles.
            plain(2, 2, 5, SMALL, 1),
            plain(1, 2, 20, SMALL, 8),
            plain(2, 1, 3, ODD, 40).with(|case| case.window = store(60, 3, 64)),
            plain(11, 1, 7, SMALL, 5).with(|case| {
                case.lengths = Lengths::Hostile;
                case.sinks = Sinks::Extreme;
            }),
            // Lists that are divided alike in any batch: short ones, with lengths, of Hopper.
            plain(3, 2, 20, SMALL, ANY_BATCH),
            plain(5, 1, 7, SMALL, ANY_BATCH).with(|case| case.lengths = Lengths::Hostile),
            plain(2, 2, 5, MODEL, ANY_BATCH).then(hopper),
            // More requests than a warp has lanes, and blocks that start after the first 32.
            plain(37, 1, 2, SMALL, 20).with(|case| case.lengths = Lengths::Within),
            plain(37, 1, 2, MODEL, 20)
                .with(|case| {
                    case.window = store(9, 2, 4);
                    case.compressed = None;
                })
                .then(hopper),
            // Without sinks, for a whole work unit and for a cut one.
            plain(1, 1, 5, SMALL, 1).with(|case| case.sinks = Sinks::Absent),
            plain(1, 1, 5, SMALL, 3).with(|case| case.sinks = Sinks::Absent),
            plain(1, 1, 5, MODEL, 1).with(|case| case.sinks = Sinks::Absent).then(hopper),
            // Lengths for only one store: the other one's lists are full.
            plain(5, 1, 5, SMALL, 4).with(|case| {
                case.lengths = Lengths::Within;
                case.lengths_of = LengthsOf::Compressed;
            }),
            plain(5, 1, 5, SMALL, 4).with(|case| {
                case.lengths = Lengths::Hostile;
                case.lengths_of = LengthsOf::Window;
            }),
            // 17 work units of two tiles on two blocks: nine and eight whole units, not 17 tiles
            // each.
            plain(17, 1, 5, SMALL, 2).with(|case| {
                case.window = store(60, 3, 64);
                case.compressed = Some(store(60, 3, 64));
            }),
            plain(2, 1, 5, SMALL, 3).with(|case| {
                case.indices = IndexClass::LeadingMasked;
                case.logit_shift = -200.0;
            }),
            plain(3, 4, 6, SMALL, 7).with(|case| case.indices = IndexClass::EmptyRows),
            plain(1, 2, 5, MODEL, 3),
            plain(1, 1, 17, MODEL, 2).with(|case| case.row_magnitude = 300.0),
            plain(1, 2, 5, RowFormat::bf16(512), 3),
            plain(1, 2, 5, MODEL, 3).then(hopper),
            plain(1, 1, 66, MODEL, 2).with(|case| case.row_magnitude = 300.0).then(hopper),
            // Rows with few weights: the largest is exactly 1 and adds no rounding.
            plain(1, 1, 17, MODEL, 1).with(|case| case.logit_deviation = 8.0).then(hopper),
            plain(8, 1, 7, MODEL, 5)
                .with(|case| {
                    case.lengths = Lengths::Hostile;
                    case.sinks = Sinks::Extreme;
                })
                .then(hopper),
            plain(2, 2, 5, RowFormat::bf16(512), 3).then(hopper),
            // Units of one tile, in sequence through one block.
            plain(9, 1, 1, MODEL, 1)
                .with(|case| {
                    case.window = store(5, 1, 64);
                    case.compressed = None;
                })
                .then(hopper),
            // A head that is the only one among its warp's rows, over eight tiles.
            plain(1, 1, 17, MODEL, 1).with(|case| case.window = store(300, 6, 64)).then(hopper),
        ];
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases
    }

    fn fastest(c: &DecodeAttentionCase, environment: &Environment) -> DecodeAttentionCase {
        let fits = launcher::HOPPER_FORMATS.contains(&c.format());
        DecodeAttentionCase {
            implementation: Implementation::fastest_for(environment, c.num_heads, fits),
            num_blocks: (environment.processors as usize).max(1),
            ..c.clone()
        }
    }

    fn cannot_run(c: &DecodeAttentionCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn amend(c: &DecodeAttentionCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.logit_shift != 0.0 {
            let (width, shift) = (c.head_dim(), shift_size(c) * c.logit_shift.signum());
            tensors.edit("q", |q| q.chunks_mut(width).for_each(|head| head[width - 1] = shift));
        }
        if let Some(sink) = c.sinks.draw(c.seed, c.num_heads, c.logit_shift) {
            tensors.put("sink", sink);
        }
        c.stores().for_each(|(names, store)| names.draw(c, store, tensors));
        Ok(())
    }

    fn forward(
        c: &DecodeAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let inputs = reference::Inputs {
            q: t.f64("q")?,
            format: oracle(c.format()),
            window: WINDOW.reference(c.window, t.host()),
            compressed: c.compressed.map(|store| COMPRESSED.reference(store, t.host())),
            sink: t.maybe("sink")?,
            softmax_scale: t.scalar("softmax_scale", f64::from(c.softmax_scale)),
            split: split(c, t.host()),
        };
        let reference::Outputs { out, lse } = reference::forward(&inputs, rounding)?;
        Ok(Named::new().with("out", out).with("lse", lse))
    }

    fn workspaces(
        c: &DecodeAttentionCase,
        v: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", launcher::workspace_bytes(v, &c.options())?)])
    }

    fn launch(
        c: &DecodeAttentionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, &c.options()))
    }

    fn invariant(c: &DecodeAttentionCase, _: bool) -> &'static [BatchAxis] {
        // A request's tokens are divided as those of several requests are.
        const FREE: &[BatchAxis] = &[BatchAxis::Verification, BatchAxis::Cache];
        const WHOLE: &[BatchAxis] =
            &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Verification, BatchAxis::Cache];
        if c.has_a_block_for_each_tile() { WHOLE } else { FREE }
    }

    fn batches(c: &DecodeAttentionCase, batches: &mut Batches<'_, Self>) {
        batches.rows("batch");
        page_batch(c, batches);
        verification(c, batches);
    }

    fn laws(c: &DecodeAttentionCase, laws: &mut Laws<'_, Self>) {
        if c.batch == 0 {
            return;
        }
        scale_law(laws);
        place_law(c, laws);
        split_law(c, laws);
        slot_law(c, laws);
        exchange_law(c, laws);
        padding_law(c, laws);
        // Another query and lists for one request, and for one token of every request, change no
        // other's row.
        laws.independent("batch");
        laws.independent("s_q");
        if c.num_blocks == 1 {
            // The share of each block does not depend on the order.
            laws.permute("requests may be permuted", "batch");
        }
    }

    /// The golden attention, with its window in one store and its compressed entries in the other.
    /// Both are in bf16, because the golden set's implementation has no FP8 rows. The lists are
    /// cut, so that the comparison covers the merge as well.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<DecodeAttentionCase>>, String> {
        Ok(vec![golden_case(file)?])
    }

    /// The lists of the two production models at three batch sizes, one token for each request. A
    /// call is both launches.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let (fastest, portable) =
            (Implementation::fastest_on(environment), Implementation::Portable);
        let num_blocks = (environment.processors as usize).max(1);
        if !on_gpu(environment) {
            return vec![timed(1, 16, [64, 64], MODEL, portable, num_blocks)];
        }
        let of_model = |(num_heads, compressed)| {
            let model =
                move |batch| timed(batch, num_heads, [128, compressed], MODEL, fastest, num_blocks);
            let bf16 =
                timed(128, num_heads, [128, compressed], RowFormat::bf16(512), fastest, num_blocks);
            let portable = timed(128, num_heads, [128, compressed], MODEL, portable, num_blocks);
            let name = format!("{}{}", portable.name, Implementation::suffix(true));
            [1, 32, 128].map(model).into_iter().chain([bf16, Benchmark { name, ..portable }])
        };
        [(64, 512), (128, 1024)].into_iter().flat_map(of_model).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["b128 H64 w128+512 fp8", "b128 H64 w128+512 bf16", "b128 H64 w128+512 fp8 portable"],
            json!({"batch": 6, "num_heads": 20, "num_blocks": 5, "window": {"topk": 70, "num_pages": 27, "page_size": 16}, "compressed": {"topk": 70, "num_pages": 210, "page_size": 8}}),
            json!({"batch": 2, "window": {"topk": 70, "num_pages": 5, "page_size": 16}, "compressed": {"topk": 70, "num_pages": 9, "page_size": 8}}),
        )]
    }
}

fn timed(
    batch: usize,
    num_heads: usize,
    [window, compressed]: [usize; 2],
    format: RowFormat,
    implementation: Implementation,
    num_blocks: usize,
) -> Benchmark<DecodeAttention> {
    // Every request has a window of its own, and selected entries of its context.
    let store = |topk: usize, page_size: usize, own: usize| {
        let num_pages = (batch * own).div_ceil(page_size);
        StoreCase { topk, num_pages, page_size }
    };
    let case = DecodeAttentionCase {
        window: store(window, 256, OWN_SLOTS[0] * window),
        compressed: Some(store(compressed, 64, OWN_SLOTS[1] * compressed)),
        indices: IndexClass::Valid,
        logit_deviation: 1.0,
        poison_unreferenced: false,
        implementation,
        ..plain(batch, 1, num_heads, format, num_blocks)
    };
    let (slots, heads) = (batch * (window + compressed), batch * num_heads);
    let storage = if format.nope_dim > 0 { "fp8" } else { "bf16" };
    let name = format!("b{batch} H{num_heads} w{window}+{compressed} {storage}");
    let mut benchmark = Benchmark::<DecodeAttention>::new(Direction::Forward, name, case, "batch");
    for (_, store) in benchmark.drawn.stores_mut() {
        store.num_pages = store.num_pages.min(DRAWN / (store.page_size * format.head_dim()));
    }
    Benchmark {
        // q, out, lse and the lists once; every listed row once.
        bytes: (slots * (format.row_bytes() + 4) + heads * (4 * format.head_dim() + 4)) as f64,
        // Two GEMMs of 2·H·slots·D FLOP for each token.
        flops: 4.0 * (slots * num_heads * format.head_dim()) as f64,
        rate: Rate::Flops,
        amend: |c, tensors| {
            for ((names, store), own) in c.stores().zip(OWN_SLOTS) {
                // From the request's own part of the store.
                let (stream, own) = (names.stream("indices"), own * store.topk);
                let lists = distinct((c.seed, &stream), [c.tokens(), store.topk, own], |token| {
                    token / c.s_q * own
                });
                tensors.put(
                    names.indices,
                    HostTensor::from_i32(&[c.batch, c.s_q, store.topk], &lists),
                );
            }
        },
        sampled: |whole, c, tensors| {
            // The cut of a list depends on the index of its request among all requests.
            let reference::Split { unit_heads, cuts, .. } = split(whole.case, tensors);
            let units = cuts.len() / whole.case.batch;
            let cuts =
                whole.rows.iter().flat_map(|row| cuts[row * units..(row + 1) * units].to_vec());
            c.cuts = Some((unit_heads, cuts.collect()));
            for (names, store) in c.stores_mut() {
                store.num_pages = compact(tensors, names.indices, &[names.pages], store.page_size);
            }
        },
        ..benchmark
    }
}

/// Slots of a benchmark's store that belong to one request, for each slot of its list: window,
/// compressed entries.
const OWN_SLOTS: [usize; 2] = [1, 4];

fn hopper(case: DecodeAttentionCase) -> DecodeAttentionCase {
    DecodeAttentionCase { implementation: Implementation::Hopper, ..case }
}

/// Heads, stores and pages of the two production models, with as many requests as the oracle can
/// compute.
fn production_cases() -> Vec<DecodeAttentionCase> {
    let window = StoreCase { topk: 128, num_pages: 4, page_size: 256 };
    let compressed = |topk| Some(StoreCase { topk, num_pages: 48, page_size: 64 });
    let model = DecodeAttentionCase {
        window,
        compressed: compressed(1024),
        ..plain(3, 2, 128, MODEL, 132)
    };
    vec![
        hopper(DecodeAttentionCase {
            window,
            compressed: compressed(512),
            ..plain(4, 2, 64, MODEL, 132)
        }),
        hopper(DecodeAttentionCase { lengths: Lengths::Within, ..model.clone() }),
        hopper(model),
        DecodeAttentionCase { window, compressed: compressed(512), ..plain(4, 2, 64, MODEL, 132) },
        DecodeAttentionCase {
            window,
            compressed: compressed(1024),
            ..plain(3, 2, 128, MODEL, 132)
        },
        DecodeAttentionCase {
            window,
            compressed: compressed(1024),
            ..plain(1, 1, 128, MODEL, 132)
        },
        DecodeAttentionCase {
            window,
            compressed: Some(StoreCase { topk: 1024, num_pages: 700, page_size: 2 }),
            lengths: Lengths::Within,
            ..plain(5, 1, 64, RowFormat::bf16(512), 50)
        },
    ]
}

type Shape = (usize, usize, usize, RowFormat, usize);

/// Requests, tokens of each, heads, format, blocks. Each format is a separate module, so the
/// choices are few.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let heads =
        |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let small = select(vec![SMALL, ODD, RowFormat::bf16(64)]);
    let wide = select(vec![MODEL, RowFormat::bf16(512)]);
    let blocks = || prop_oneof![1 => Just(1usize), 4 => 1..=12usize];
    let few = (1..=5usize, 1..=3usize, heads(24), small.clone(), blocks());
    match profile {
        Profile::Smoke | Profile::Quick => few.boxed(),
        Profile::Ci => {
            let wide = (1..=2usize, 1..=2usize, heads(18), wide, blocks());
            prop_oneof![4 => few, 1 => wide].boxed()
        }
        Profile::Full => {
            let many = (1..=40usize, 1..=4usize, heads(130), small, 1..=200usize);
            let wide = (1..=4usize, 1..=4usize, heads(130), wide, 1..=200usize);
            prop_oneof![1 => few, 2 => many, 2 => wide].boxed()
        }
    }
}

/// The window's store and, mostly, a store of compressed entries.
fn stores_strategy(profile: Profile) -> BoxedStrategy<(StoreCase, Option<StoreCase>)> {
    let (topk, rows): (usize, usize) = match profile {
        Profile::Smoke | Profile::Quick | Profile::Ci => (150, 60),
        Profile::Full => (600, 900),
    };
    let store = move || {
        let slots =
            prop_oneof![1 => Just(0usize), 2 => Just(64usize), 1 => Just(1usize), 6 => 1..=topk];
        (slots, select(vec![1usize, 2, 7, 64]), 1..=rows).prop_map(|(topk, page_size, rows)| {
            StoreCase { topk, num_pages: rows.div_ceil(page_size), page_size }
        })
    };
    (store(), prop::option::weighted(0.8, store())).boxed()
}

impl StoreNames {
    /// Draws rows, lists and lengths.
    fn draw(self, c: &DecodeAttentionCase, store: StoreCase, tensors: &mut Tensors) {
        let lists = c.indices.draw(
            c.seed,
            &self.stream("indices"),
            c.tokens(),
            store.topk,
            store.num_slots(),
        );
        tensors.set_i32s(self.indices, &lists);
        if tensors.get(self.length).is_some() {
            let lengths = c.lengths.draw(c.seed, &self.stream("length"), c.batch, store.topk);
            lengths.into_iter().for_each(|lengths| tensors.set_i32s(self.length, &lengths));
        }
        let mut rows = self.draw_rows(c, store);
        if c.poison_unreferenced {
            let referenced = self.referenced(c, store, tensors);
            let rows = rows.chunks_mut(c.format().row_bytes());
            // NaN in e4m3, in bf16 and as a scale.
            rows.zip(referenced)
                .filter(|(_, referenced)| !referenced)
                .for_each(|(row, _)| row.fill(0xff));
        }
        self.put_rows(c, store, &rows, tensors);
    }

    /// The name of a random stream.
    fn stream(self, what: &str) -> String {
        format!("{} {what}", self.pages)
    }

    /// Slot by slot: data, then scales.
    fn draw_rows(self, c: &DecodeAttentionCase, store: StoreCase) -> Vec<u8> {
        let (format, width) = (oracle(c.format()), c.head_dim());
        let rows = Draw::new(c.seed, self.pages).values(
            c.distribution,
            store.num_slots(),
            width,
            c.row_magnitude,
        );
        let encoded = rows.chunks(width).flat_map(|row| {
            let mut row: Vec<f64> = row.iter().map(|&x| bf16::from_f64(x).to_f64()).collect();
            if c.logit_shift != 0.0 {
                // The shift goes through a channel that is not quantized.
                row[width - 1] = shift_size(c) * c.row_magnitude;
            }
            let (data, scales) = format.encode(&row);
            data.into_iter().chain(scales)
        });
        encoded.collect()
    }

    /// Copies rows, stored slot by slot, into the pages of the store.
    fn put_rows(
        self,
        c: &DecodeAttentionCase,
        store: StoreCase,
        rows: &[u8],
        tensors: &mut Tensors,
    ) {
        let shape = vec![store.num_pages, store.page_size * c.format().row_bytes()];
        let bytes = pages_of(oracle(c.format()).bytes(), store.page_size, rows);
        tensors.put(self.pages, HostTensor { dtype: DType::U8, shape, bytes });
    }

    /// Slots that count in a request's lists.
    fn length_of(self, store: StoreCase, tensors: &Tensors, request: usize) -> usize {
        let clamped = |length: i32| usize::try_from(length).unwrap_or(0).min(store.topk);
        tensors.maybe_i32s(self.length).map_or(store.topk, |lengths| clamped(lengths[request]))
    }

    /// For each slot of the store, whether a valid slot of a list references it.
    fn referenced(self, c: &DecodeAttentionCase, store: StoreCase, tensors: &Tensors) -> Vec<bool> {
        let mut referenced = vec![false; store.num_slots()];
        for (token, list) in tensors.i32s(self.indices).chunks(store.topk.max(1)).enumerate() {
            for &index in &list[..self.length_of(store, tensors, token / c.s_q)] {
                if let Some(row) =
                    usize::try_from(index).ok().and_then(|index| referenced.get_mut(index))
                {
                    *row = true;
                }
            }
        }
        referenced
    }

    fn reference(self, store: StoreCase, tensors: &Tensors) -> reference::Store {
        reference::Store {
            pages: tensors.tensor(self.pages).bytes.clone(),
            page_size: store.page_size,
            indices: tensors.i32s(self.indices),
            topk: store.topk,
            length: tensors.maybe_i32s(self.length),
        }
    }

    /// The same rows in pages of one, in another order.
    fn relocate(
        self,
        c: &DecodeAttentionCase,
        store: &mut StoreCase,
        seed: u64,
        tensors: &mut Tensors,
    ) {
        let (slots, row_bytes) = (store.num_slots(), c.format().row_bytes());
        let order = permutation(seed, slots);
        let mut place = vec![0; slots];
        order.iter().enumerate().for_each(|(to, &from)| place[from] = to as i32);
        let rows =
            rows_of(oracle(c.format()).bytes(), store.page_size, &tensors.tensor(self.pages).bytes);
        let moved = order
            .iter()
            .flat_map(|&from| rows[from * row_bytes..(from + 1) * row_bytes].iter().copied());
        *store = StoreCase { num_pages: slots, page_size: 1, ..*store };
        self.put_rows(c, *store, &moved.collect::<Vec<_>>(), tensors);
        tensors.edit_i32s(self.indices, |indices| {
            for index in indices {
                *index = usize::try_from(*index)
                    .ok()
                    .and_then(|from| place.get(from))
                    .copied()
                    .unwrap_or(*index);
            }
        });
    }

    /// Another order of the slots that count. Slots beyond a length stay beyond it.
    fn shuffle_slots(self, c: &DecodeAttentionCase, store: StoreCase, tensors: &mut Tensors) {
        let lengths: Vec<usize> =
            (0..c.batch).map(|request| self.length_of(store, tensors, request)).collect();
        tensors.edit_i32s(self.indices, |indices| {
            for (token, list) in indices.chunks_mut(store.topk.max(1)).enumerate() {
                list[..lengths[token / c.s_q]]
                    .shuffle(Draw::numbered(c.seed, "slots", token).rng());
            }
        });
    }

    /// Lists with invalid slots after their end. A length beyond the old list would reach them, so
    /// it stays clamped.
    fn lengthen(self, c: &DecodeAttentionCase, store: &mut StoreCase, tensors: &mut Tensors) {
        let (topk, num_slots) = (store.topk, store.num_slots() as i32);
        let extra = [-1, num_slots, i32::MIN, i32::MAX, -1].repeat(14);
        let lists = tensors.i32s(self.indices);
        let longer: Vec<i32> =
            lists.chunks(topk.max(1)).flat_map(|list| [list, &extra].concat()).collect();
        store.topk += extra.len();
        tensors.put(self.indices, HostTensor::from_i32(&[c.batch, c.s_q, store.topk], &longer));
        tensors.edit_i32s(self.length, |all| {
            all.iter_mut().for_each(|length| *length = (*length).clamp(0, topk as i32))
        });
    }
}

/// The magnitude of q that gives logits of the case's deviation.
fn query_size(case: &DecodeAttentionCase) -> f64 {
    let width = case.head_dim() as f64;
    case.logit_deviation / (f64::from(case.softmax_scale) * width.sqrt() * case.row_magnitude)
}

/// The value of the last channel in q and (times the rows' magnitude) in the rows. It moves all
/// logits by `logit_shift`.
fn shift_size(case: &DecodeAttentionCase) -> f64 {
    (case.logit_shift.abs() / (f64::from(case.softmax_scale) * case.row_magnitude)).sqrt()
}

/// Where the kernel's schedule cuts the lists: all tiles of all work units in sequence, in equal
/// parts.
fn split(c: &DecodeAttentionCase, tensors: &Tensors) -> reference::Split {
    if let Some((unit_heads, cuts)) = c.cuts.clone() {
        return reference::Split { tile_slots: launcher::TILE_SLOTS, unit_heads, cuts };
    }
    let topk: Vec<usize> = c.stores().map(|(_, store)| store.topk).collect();
    let extents = [c.batch, c.s_q, c.num_heads];
    let spread = launcher::spread(extents, &topk, c.num_blocks, c.implementation.launcher());
    let tiles = |request: usize| -> usize {
        let of_store = |(names, store): (StoreNames, StoreCase)| {
            names.length_of(store, tensors, request).div_ceil(launcher::TILE_SLOTS)
        };
        c.stores().map(of_store).sum::<usize>().max(1)
    };
    let units = c.s_q * c.num_heads.div_ceil(spread.heads_per_block);
    let total: usize = (0..c.batch).map(|request| units * tiles(request)).sum();
    let lengths = c.stores().any(|(names, _)| tensors.get(names.length).is_some());
    let stretch = launcher::stretch(total, (!lengths).then(|| tiles(0)), spread.num_blocks);
    let mut cuts = Vec::new();
    let mut before = 0;
    for request in 0..c.batch {
        let tiles = tiles(request);
        for _ in 0..units {
            cuts.push((1..tiles).filter(|tile| (before + tile).is_multiple_of(stretch)).collect());
            before += tiles;
        }
    }
    reference::Split { tile_slots: launcher::TILE_SLOTS, unit_heads: spread.heads_per_block, cuts }
}

/// `(a q) · k · (scale / a)` is the same logit: the scale is applied once.
fn scale_law(laws: &mut Laws<'_, DecodeAttention>) {
    laws.alike("softmax_scale counts once", Relation::Times(1.0), |v| {
        v.tensors.scale("q", 4.0);
        v.case.softmax_scale /= 4.0;
        v.tensors.scale_scalar("softmax_scale", 0.25);
    });
}

/// The slot of a row, and the page size, change no bit.
fn place_law(c: &DecodeAttentionCase, laws: &mut Laws<'_, DecodeAttention>) {
    laws.alike("rows may lie anywhere", Relation::Times(1.0), |v| {
        for (number, (names, store)) in v.case.stores_mut().enumerate() {
            names.relocate(c, store, c.seed.wrapping_add(number as u64), &mut v.tensors);
        }
    });
}

/// The rows in other slots, pages and page sizes.
fn page_batch(c: &DecodeAttentionCase, batches: &mut Batches<'_, DecodeAttention>) {
    let every: Vec<(usize, usize)> = (0..c.batch).map(|request| (request, request)).collect();
    let same = batches.along("batch", &every);
    batches.run(BatchAxis::Cache, "rows in other slots and pages", |v| {
        for (number, (names, store)) in v.case.stores_mut().enumerate() {
            names.relocate(c, store, c.seed.wrapping_add(number as u64), &mut v.tensors);
        }
        same
    });
}

/// The tokens of each request, each as a request of its own.
fn verification(c: &DecodeAttentionCase, batches: &mut Batches<'_, DecodeAttention>) {
    if c.s_q < 2 {
        return;
    }
    let tokens: Vec<(usize, usize)> = (0..c.tokens()).map(|token| (token, token)).collect();
    let same = ["out", "lse"].map(|name| Same::leading(name, [2, 2], &tokens));
    let specs = DecodeAttention::tensors(c);
    batches.run(BatchAxis::Verification, format!("s_q {} against 1", c.s_q), |v| {
        (v.case.batch, v.case.s_q) = (c.tokens(), 1);
        apart(&specs, &mut v.tensors, c.batch, c.s_q);
        same.to_vec()
    });
}

/// The work may be split differently.
fn split_law(c: &DecodeAttentionCase, laws: &mut Laws<'_, DecodeAttention>) {
    let other = if c.num_blocks > 1 { 1 } else { 7 };
    laws.alike("work may be split differently", Relation::WithinBothBudgets, |v| {
        v.case.num_blocks = other
    });
}

/// The order of the slots does not matter.
fn slot_law(c: &DecodeAttentionCase, laws: &mut Laws<'_, DecodeAttention>) {
    laws.alike("slots may be permuted", Relation::WithinBothBudgets, |v| {
        c.stores().for_each(|(names, store)| names.shuffle_slots(c, store, &mut v.tensors))
    });
}

/// Attention treats both stores alike.
fn exchange_law(c: &DecodeAttentionCase, laws: &mut Laws<'_, DecodeAttention>) {
    let Some(compressed) = c.compressed else { return };
    let has = |name| laws.tensors().get(name).is_some();
    // A variant has the inputs of its case, which is all that a kernel in another process receives.
    if has(WINDOW.length) != has(COMPRESSED.length) {
        return;
    }
    laws.alike("stores may change places", Relation::WithinBothBudgets, |v| {
        (v.case.window, v.case.compressed) = (compressed, Some(c.window));
        let names = |store: StoreNames| [store.pages, store.indices, store.length];
        for (one, other) in names(WINDOW).into_iter().zip(names(COMPRESSED)) {
            let taken = [v.tensors.remove(one), v.tensors.remove(other)];
            taken.into_iter().zip([other, one]).for_each(|(tensor, name)| {
                tensor.into_iter().for_each(|tensor| v.tensors.put(name, tensor));
            });
        }
    });
}

/// Invalid slots at the end of the lists add nothing. They are tiles, so several blocks split them
/// differently. So do the two warpgroups of a Hopper block, which alternate over the second store's
/// tiles after the first's.
fn padding_law(c: &DecodeAttentionCase, laws: &mut Laws<'_, DecodeAttention>) {
    if c.stores().any(|(_, store)| store.topk == 0) {
        return;
    }
    let in_turn = c.implementation == Implementation::Hopper && c.compressed.is_some();
    let one = c.num_blocks == 1 && !in_turn;
    let relation = if one { Relation::Times(1.0) } else { Relation::WithinBothBudgets };
    laws.alike("invalid slots add nothing", relation, |v| {
        v.case.stores_mut().for_each(|(names, store)| names.lengthen(c, store, &mut v.tensors));
    });
}

/// `attn_core`: the visible raw rows of a token are its window, and the visible compressed entries
/// its other list. The tokens of a batch entry are one request.
fn golden_case(file: &mut Reading<'_>) -> Result<Golden<DecodeAttentionCase>, String> {
    let q = file.floats("in.q", &["batch", "heads", "tokens", "channels"])?;
    file.floats("in.kv", &OF_KV)?;
    let [batch, heads, tokens] =
        [file.extent("batch")?, file.extent("heads")?, file.extent("tokens")?];
    let [keys, head_dim] = [file.extent("keys")?, file.extent("channels")?];
    if keys < tokens {
        return Err("in.kv: a row for each token, and more".into());
    }
    let width = |range: &std::ops::Range<usize>| StoreCase {
        topk: range.len(),
        num_pages: batch * range.len(),
        page_size: 1,
    };
    let (raw, entries) = (0..tokens, (keys > tokens).then_some(tokens..keys));
    // Two blocks for every three tiles: lists are cut.
    let tiles = batch
        * tokens
        * (tokens.div_ceil(launcher::TILE_SLOTS) + (keys - tokens).div_ceil(launcher::TILE_SLOTS));
    let softmax_scale = file.number("scale")?;
    let of_width = |head_dim: usize| DecodeAttentionCase {
        window: width(&raw),
        compressed: entries.as_ref().map(width),
        softmax_scale: softmax_scale as f32,
        poison_unreferenced: false,
        ..plain(batch, tokens, heads, RowFormat::bf16(head_dim), (2 * tiles / 3).max(1))
    };
    let heads_last = |values: &[f64]| -> Vec<f64> {
        let at = |b: usize, t: usize, h: usize| ((b * heads + h) * tokens + t) * head_dim;
        let rows = (0..batch)
            .flat_map(|b| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (b, t, h))));
        rows.flat_map(|(b, t, h)| values[at(b, t, h)..at(b, t, h) + head_dim].iter().copied())
            .collect()
    };
    let skip = (!head_dim.is_multiple_of(16)).then(|| {
        let why = format!("head_dim {head_dim} is no multiple of 16, which the kernel needs");
        (why, of_width(head_dim.next_multiple_of(16)))
    });
    let mut golden = Golden::new(of_width(head_dim))
        .values("q", heads_last(q))
        .stored(file, "sink", "in.sinks", &["heads"])?
        .scalar("softmax_scale", softmax_scale)
        .kernel_skips(skip);
    for (names, range) in [(WINDOW, Some(raw)), (COMPRESSED, entries)] {
        let Some(range) = range else { continue };
        let (rows, lists) = golden_store(file, range)?;
        golden = golden.tensor(names.pages, rows).integers(names.indices, lists);
    }
    golden.expect(file, "out", "out.y", &["batch", "tokens", "heads", "channels"])
}

/// Axes of a golden file's rows: those of tokens, then compressed entries.
const OF_KV: [&str; 4] = ["batch", "1", "keys", "channels"];

/// Rows `range` of every batch entry, one for each page, and which of them each token sees.
fn golden_store(
    file: &mut Reading<'_>,
    range: std::ops::Range<usize>,
) -> Result<(HostTensor, Vec<i32>), String> {
    let kv = file.floats("in.kv", &OF_KV)?;
    let visible = file.mask("mid.visible", &["batch", "1", "tokens", "keys"])?;
    let [batch, tokens, keys] =
        [file.extent("batch")?, file.extent("tokens")?, file.extent("keys")?];
    let (head_dim, width) = (file.extent("channels")?, range.len());
    let row =
        |b: usize, key: usize| &kv[(b * keys + key) * head_dim..(b * keys + key + 1) * head_dim];
    let slot = |b: usize, t: usize, key: usize| {
        if visible[(b * tokens + t) * keys + key] {
            (b * width + key - range.start) as i32
        } else {
            -1
        }
    };
    let all_rows = (0..batch).flat_map(|b| range.clone().map(move |key| (b, key)));
    let bytes = all_rows
        .flat_map(|(b, key)| row(b, key))
        .flat_map(|&x| bf16::from_f64(x).to_ne_bytes())
        .collect();
    let of_tokens = (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t)));
    let lists =
        of_tokens.flat_map(|(b, t)| range.clone().map(move |key| slot(b, t, key))).collect();
    Ok((HostTensor { dtype: DType::U8, shape: vec![batch * width, 2 * head_dim], bytes }, lists))
}
