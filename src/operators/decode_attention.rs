//! `decode_attention` (inference 8 to 8.4): `kernels/cuda/decode_attention.cu` against
//! `reference/src/decode_attention.rs`.

use dsv4_kernels::decode_attention as launcher;
use dsv4_kernels::kv_cache as launched;
use dsv4_kernels::runtime::{
    Contract, DType, Device, DeviceArena, Environment, HostTensor, Role, RuntimeError, TensorView,
};
use dsv4_reference::decode_attention as reference;
use dsv4_reference::kv_cache::{RowFormat, SCALE_BYTES, SCALE_GROUP};
use dsv4_reference::precision::{Precision, Rounding};
use half::bf16;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::sparse_attention::{IndexClass, Lengths, Sinks};
use super::{Implementation, deterministic, layout, oracle_error, oracle_tensor, permuted, scaled, widened};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    ExpectedTensor, GoldenCase, KernelRun, Law, ModuleSpecification, Operator, OracleTensor, Prepared, Profile,
    Relation, Side,
};
use crate::record::OperatorRecord;

const NAME: &str = "decode_attention";

/// The operator.
pub struct DecodeAttention;

/// A store of rows and the width of the lists that point into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreCase {
    /// Slots of a list; 0 is legal.
    pub topk: usize,
    /// Pages; 0 is legal.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthsOf {
    /// Window and compressed entries.
    #[default]
    Both,
    /// The window alone.
    Window,
    /// The compressed entries alone.
    Compressed,
}

/// A case: extents, stores, lists, sinks, scale, layout, schedule, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeAttentionCase {
    /// Requests; 0 is legal.
    pub batch: usize,
    /// Tokens of a request.
    pub s_q: usize,
    /// Query heads.
    pub num_heads: usize,
    /// e4m3 channels of a row: a multiple of 64; 0 is a cache of bf16.
    pub nope_dim: usize,
    /// bf16 channels of a row. With the others a multiple of 16 up to 512.
    pub rope_dim: usize,
    /// Raw rows.
    pub window: StoreCase,
    /// Compressed entries.
    pub compressed: Option<StoreCase>,
    /// What the lists look like.
    pub indices: IndexClass,
    /// How many slots of a request's lists count.
    pub lengths: Lengths,
    /// Whose lists have lengths, where there are any; both in lines written before there was a choice.
    #[serde(default)]
    pub lengths_of: LengthsOf,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Added to every logit.
    pub logit_shift: f64,
    /// Size of the rows: what the scales have to carry.
    pub row_magnitude: f64,
    /// Blocks that the work is spread over.
    pub num_blocks: usize,
    /// Elements after each row of q and out, which belong to nobody; a multiple of 8.
    pub padding: usize,
    /// Bytes after each page beyond those that round it up; a multiple of 16.
    pub page_padding: usize,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether rows that no valid slot names are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run; portable in lines written before there was a choice.
    #[serde(default)]
    pub implementation: Implementation,
    /// Seed of the data.
    pub seed: u64,
}

const MODEL: launched::RowFormat = launched::RowFormat::MODEL;
const SMALL: launched::RowFormat = launched::RowFormat { nope_dim: 64, rope_dim: 64 };
/// bf16 channels whose 16-byte pieces in a warp's rows are no multiple of its lanes.
const ODD: launched::RowFormat = launched::RowFormat { nope_dim: 128, rope_dim: 48 };

impl DecodeAttentionCase {
    fn plain(batch: usize, s_q: usize, num_heads: usize, format: launched::RowFormat, num_blocks: usize) -> Self {
        let launched::RowFormat { nope_dim, rope_dim } = format;
        Self {
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
            padding: 0,
            page_padding: 0,
            distribution: Distribution::Normal,
            poison_unreferenced: true,
            implementation: Implementation::Portable,
            seed: 1,
        }
    }

    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn launched_format(&self) -> launched::RowFormat {
        launched::RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn tokens(&self) -> usize {
        self.batch * self.s_q
    }

    fn head_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if !self.nope_dim.is_multiple_of(SCALE_GROUP) || self.nope_dim > SCALE_GROUP * SCALE_BYTES {
            return refuse("nope_dim", format!("{} must be a multiple of 64 up to 512", self.nope_dim));
        }
        if self.rope_dim == 0 || !self.head_dim().is_multiple_of(16) || self.head_dim() > 512 {
            let reason =
                format!("{}: a head of {} channels is no multiple of 16 up to 512", self.rope_dim, self.head_dim());
            return refuse("rope_dim", reason);
        }
        if self.s_q == 0 || self.num_heads == 0 || self.num_blocks == 0 {
            let reason = format!("{}, {} heads, {} blocks: none may be 0", self.s_q, self.num_heads, self.num_blocks);
            return refuse("s_q", reason);
        }
        for positive in [f64::from(self.softmax_scale), self.logit_deviation, self.row_magnitude] {
            if !(positive.is_finite() && positive > 0.0 && self.logit_shift.is_finite()) {
                return refuse("softmax_scale", format!("{positive} must be finite and above 0"));
            }
        }
        let hopper = self.head_dim() == 512 && [0, 448].contains(&self.nope_dim);
        if self.implementation == Implementation::Hopper && !hopper {
            let reason =
                format!("hopper takes 448 + 64 channels or 512 in bf16, not {} + {}", self.nope_dim, self.rope_dim);
            return refuse("implementation", reason);
        }
        if !self.padding.is_multiple_of(8) || !self.page_padding.is_multiple_of(16) {
            let reason = format!("{} and {}: rows and pages are 16-byte aligned", self.padding, self.page_padding);
            return refuse("padding", reason);
        }
        for (field, store) in [("window", Some(self.window)), ("compressed", self.compressed)] {
            let Some(store) = store else { continue };
            if store.page_size == 0 {
                return refuse(field, "a page of 0 rows".into());
            }
            let rows = store.num_pages.saturating_mul(store.page_size).max(self.tokens().saturating_mul(store.topk));
            if rows.saturating_mul(self.head_dim()) > 1 << 31 {
                return refuse(field, "the case has more than 2^31 elements in one tensor".into());
            }
        }
        if self.tokens().saturating_mul(self.num_heads).saturating_mul(self.head_dim()) > 1 << 31 {
            return refuse("batch", "the case has more than 2^31 elements in one tensor".into());
        }
        Ok(())
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] =
    &["decode_attention<16>", "decode_attention<64>", "decode_attention_hopper", "decode_attention_combine"];

impl Operator for DecodeAttention {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "attention of decoded tokens over two stores of a paged cache, with a sink per head".into(),
            specification: list(&["inference 8", "inference 8.1", "inference 8.2", "inference 8.3", "inference 8.4"]),
            kernel_file: "kernels/cuda/decode_attention.cu".into(),
            oracle_file: "reference/src/decode_attention.rs".into(),
            dtypes: list(&[
                "q, out bf16",
                "rows e4m3 with e8m0 scales and bf16, or bf16",
                "lse, sink f32",
                "indices i32",
            ]),
            axes: list(&[
                "extents",
                "row format",
                "stores and page sizes",
                "page stride",
                "tokens of a request",
                "index classes",
                "lengths",
                "sinks",
                "scale",
                "logit size",
                "size of the rows",
                "number of blocks",
                "strides",
                "distribution",
                "unreferenced NaN",
            ]),
            has_backward: false,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let lists = (
            prop::sample::select(vec![
                IndexClass::Valid,
                IndexClass::Duplicates,
                IndexClass::Hostile,
                IndexClass::LeadingMasked,
                IndexClass::EmptyRows,
            ]),
            prop::sample::select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]),
            prop::sample::select(vec![LengthsOf::Both, LengthsOf::Both, LengthsOf::Window, LengthsOf::Compressed]),
            prop::sample::select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]),
        );
        let scale = prop::sample::select(vec![0.044_194_174f32, 0.125, 0.3, 1.0]);
        let logits = (
            scale,
            prop::sample::select(vec![0.5, 2.0, 4.0]),
            prop_oneof![4 => Just(0.0), 1 => Just(-200.0)],
            prop::sample::select(vec![1.0, 1.0, 0.001, 300.0, 40000.0]),
        );
        let data = (
            prop_oneof![3 => Just(0usize), 1 => Just(24usize)],
            prop_oneof![2 => Just(0usize), 1 => Just(32usize)],
            prop::sample::select(vec![Distribution::Normal, Distribution::Uniform, Distribution::RowScaled]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 2 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape_strategy(profile), stores_strategy(profile), lists, logits, data)
            .prop_map(|(shape, (window, compressed), lists, logits, data)| {
                let (batch, s_q, num_heads, format, num_blocks) = shape;
                let (indices, lengths, lengths_of, sinks) = lists;
                let (softmax_scale, logit_deviation, logit_shift, row_magnitude) = logits;
                let (padding, page_padding, distribution, poison_unreferenced, implementation, seed) = data;
                // Hopper's formats are few; the others have the portable kernel only.
                let hopper = format.head_dim() == 512 && [0, 448].contains(&format.nope_dim);
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // Rows of unlike size scale logits by as much: they start smaller.
                let logit_deviation = if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                let case = DecodeAttentionCase {
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
                    padding,
                    page_padding,
                    distribution,
                    poison_unreferenced,
                    implementation,
                    seed,
                    ..DecodeAttentionCase::plain(batch, s_q, num_heads, format, num_blocks)
                };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let plain = DecodeAttentionCase::plain;
        let store = |topk, num_pages, page_size| StoreCase { topk, num_pages, page_size };
        let mut cases = vec![
            plain(0, 1, 4, SMALL, 3),
            // No slot at all; rows but no list; a list but no rows.
            DecodeAttentionCase { window: store(0, 0, 64), compressed: None, ..plain(2, 1, 5, SMALL, 4) },
            DecodeAttentionCase {
                window: store(0, 2, 4),
                compressed: Some(store(9, 0, 2)),
                ..plain(2, 2, 5, SMALL, 1)
            },
            // One block, one tile a block, and more blocks than tiles.
            plain(2, 2, 5, SMALL, 1),
            plain(1, 2, 20, SMALL, 8),
            DecodeAttentionCase { window: store(60, 3, 64), ..plain(2, 1, 3, ODD, 40) },
            DecodeAttentionCase { lengths: Lengths::Hostile, sinks: Sinks::Extreme, ..plain(11, 1, 7, SMALL, 5) },
            // More requests than a warp has lanes, and blocks that begin behind the first 32.
            DecodeAttentionCase { lengths: Lengths::Within, ..plain(37, 1, 2, SMALL, 20) },
            // Without sinks, where a unit is whole and where it is cut.
            DecodeAttentionCase { sinks: Sinks::Absent, ..plain(1, 1, 5, SMALL, 1) },
            DecodeAttentionCase { sinks: Sinks::Absent, ..plain(1, 1, 5, SMALL, 3) },
            hopper(DecodeAttentionCase { sinks: Sinks::Absent, ..plain(1, 1, 5, MODEL, 1) }),
            // Lengths for one store alone: the other one's lists are full.
            DecodeAttentionCase {
                lengths: Lengths::Within,
                lengths_of: LengthsOf::Compressed,
                ..plain(5, 1, 5, SMALL, 4)
            },
            DecodeAttentionCase {
                lengths: Lengths::Hostile,
                lengths_of: LengthsOf::Window,
                ..plain(5, 1, 5, SMALL, 4)
            },
            // 17 units of two tiles on two blocks: nine and eight whole units, not 17 tiles each.
            DecodeAttentionCase {
                window: store(60, 3, 64),
                compressed: Some(store(60, 3, 64)),
                ..plain(17, 1, 5, SMALL, 2)
            },
            DecodeAttentionCase { indices: IndexClass::LeadingMasked, logit_shift: -200.0, ..plain(2, 1, 5, SMALL, 3) },
            DecodeAttentionCase { indices: IndexClass::EmptyRows, ..plain(3, 4, 6, SMALL, 7) },
            plain(1, 2, 5, MODEL, 3),
            DecodeAttentionCase { row_magnitude: 300.0, ..plain(1, 1, 17, MODEL, 2) },
            plain(1, 2, 5, launched::RowFormat::bf16(512), 3),
            hopper(plain(1, 2, 5, MODEL, 3)),
            hopper(DecodeAttentionCase { row_magnitude: 300.0, ..plain(1, 1, 66, MODEL, 2) }),
            // Rows of few weights: the largest is exactly 1 and rounds nothing.
            hopper(DecodeAttentionCase { logit_deviation: 8.0, ..plain(1, 1, 17, MODEL, 1) }),
            hopper(DecodeAttentionCase {
                lengths: Lengths::Hostile,
                sinks: Sinks::Extreme,
                ..plain(8, 1, 7, MODEL, 5)
            }),
            hopper(plain(2, 2, 5, launched::RowFormat::bf16(512), 3)),
            // Units of one tile, one after another through one block.
            hopper(DecodeAttentionCase { window: store(5, 1, 64), compressed: None, ..plain(9, 1, 1, MODEL, 1) }),
            // A head that stands alone among its warp's rows, over eight tiles.
            hopper(DecodeAttentionCase { window: store(300, 6, 64), ..plain(1, 1, 17, MODEL, 1) }),
        ];
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases.iter().map(|case| Case::new(NAME, case)).collect()
    }

    fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Quick => 12,
            Profile::Ci => 36,
            Profile::Full => 100,
        }
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn cannot_run(&self, case: &Case, environment: &Environment) -> Option<String> {
        // A case that is not understood is no skip: to prepare it will say what is wrong.
        let case: DecodeAttentionCase = case.fields().ok()?;
        case.implementation.launcher().cannot_run_on(environment)
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: DecodeAttentionCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)))
    }

    /// The golden attention, its window in one store and its compressed entries in the other, both in bf16: the golden
    /// set's implementation has no FP8 rows. The lists are cut, so that the merge is held to it as well.
    fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        if file.operator != "attn_core" {
            return Ok(Vec::new());
        }
        golden_case(file).map(|case| vec![case]).map_err(CaseError::Malformed)
    }
}

fn hopper(case: DecodeAttentionCase) -> DecodeAttentionCase {
    DecodeAttentionCase { implementation: Implementation::Hopper, ..case }
}

/// Heads, stores and pages of the two production models, with as many requests as the oracle can bear.
fn production_cases() -> Vec<DecodeAttentionCase> {
    let plain = DecodeAttentionCase::plain;
    let window = StoreCase { topk: 128, num_pages: 4, page_size: 256 };
    let compressed = |topk| Some(StoreCase { topk, num_pages: 48, page_size: 64 });
    let model = DecodeAttentionCase { window, compressed: compressed(1024), ..plain(3, 2, 128, MODEL, 132) };
    vec![
        hopper(DecodeAttentionCase { window, compressed: compressed(512), ..plain(4, 2, 64, MODEL, 132) }),
        hopper(DecodeAttentionCase { lengths: Lengths::Within, ..model.clone() }),
        hopper(model),
        DecodeAttentionCase { window, compressed: compressed(512), ..plain(4, 2, 64, MODEL, 132) },
        DecodeAttentionCase { window, compressed: compressed(1024), ..plain(3, 2, 128, MODEL, 132) },
        DecodeAttentionCase { window, compressed: compressed(1024), ..plain(1, 1, 128, MODEL, 132) },
        DecodeAttentionCase {
            window,
            compressed: Some(StoreCase { topk: 1024, num_pages: 700, page_size: 2 }),
            lengths: Lengths::Within,
            ..plain(5, 1, 64, launched::RowFormat::bf16(512), 50)
        },
    ]
}

type Shape = (usize, usize, usize, launched::RowFormat, usize);

/// Requests, tokens of each, heads, format, blocks. The formats are few because each is a module of its own.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let heads = |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let small = prop::sample::select(vec![SMALL, ODD, launched::RowFormat::bf16(64)]);
    let wide = prop::sample::select(vec![MODEL, launched::RowFormat::bf16(512)]);
    let blocks = || prop_oneof![1 => Just(1usize), 4 => 1..=12usize];
    let few = (1..=5usize, 1..=3usize, heads(24), small.clone(), blocks());
    match profile {
        Profile::Quick => few.boxed(),
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

/// The window's store and, mostly, one of compressed entries.
fn stores_strategy(profile: Profile) -> BoxedStrategy<(StoreCase, Option<StoreCase>)> {
    let (topk, rows): (usize, usize) = match profile {
        Profile::Quick | Profile::Ci => (150, 60),
        Profile::Full => (600, 900),
    };
    let store =
        move || {
            let slots = prop_oneof![1 => Just(0usize), 2 => Just(64usize), 1 => Just(1usize), 6 => 1..=topk];
            (slots, prop::sample::select(vec![1usize, 2, 7, 64]), 1..=rows)
                .prop_map(|(topk, page_size, rows)| StoreCase { topk, num_pages: rows.div_ceil(page_size), page_size })
        };
    (store(), prop::option::weighted(0.8, store())).boxed()
}

/// A store with its rows and lists.
#[derive(Clone)]
struct StoreInputs {
    case: StoreCase,
    /// Slot by slot: data, then scales.
    rows: Vec<u8>,
    /// `[batch, s_q, topk]`.
    indices: Vec<i32>,
    /// `[batch]`.
    length: Option<Vec<i32>>,
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: DecodeAttentionCase,
    q: HostTensor,
    window: StoreInputs,
    compressed: Option<StoreInputs>,
    sink: Option<HostTensor>,
    /// The oracle's scale: what the kernel gets, or the unrounded one of a golden file.
    softmax_scale: f64,
}

impl StoreInputs {
    fn draw(case: &DecodeAttentionCase, store: StoreCase, of: LengthsOf) -> Self {
        let name = if of == LengthsOf::Window { "window" } else { "compressed" };
        let format = case.format();
        let width = format.head_dim();
        let rows = Draw::new(case.seed, name).values(case.distribution, store.num_slots(), width, case.row_magnitude);
        let mut bytes = Vec::with_capacity(store.num_slots() * case.launched_format().row_bytes());
        for row in rows.chunks(width) {
            let mut row: Vec<f64> = row.iter().map(|&x| bf16::from_f64(x).to_f64()).collect();
            if case.logit_shift != 0.0 {
                // Through a channel that is not quantised.
                row[width - 1] = shift_size(case) * case.row_magnitude;
            }
            let (data, scales) = format.encode(&row);
            bytes.extend(data.into_iter().chain(scales));
        }
        let list = format!("{name} indices");
        let mut inputs = Self {
            case: store,
            rows: bytes,
            indices: case.indices.draw(case.seed, &list, case.tokens(), store.topk, store.num_slots()),
            length: case
                .lengths
                .draw(case.seed, &format!("{name} length"), case.batch, store.topk)
                .filter(|_| case.lengths_of == LengthsOf::Both || case.lengths_of == of),
        };
        if case.poison_unreferenced {
            inputs.poison_unreferenced(case.launched_format().row_bytes(), case.s_q);
        }
        inputs
    }

    fn length_of(&self, request: usize) -> usize {
        self.length.as_ref().map_or(self.case.topk, |l| l[request].clamp(0, self.case.topk as i32) as usize)
    }

    /// Every byte of a row that no valid slot names becomes 0xff: NaN in e4m3, in bf16 and as a scale.
    fn poison_unreferenced(&mut self, row_bytes: usize, s_q: usize) {
        let mut referenced = vec![false; self.case.num_slots()];
        for (token, list) in self.indices.chunks(self.case.topk.max(1)).enumerate() {
            for &index in &list[..self.length_of(token / s_q)] {
                if let Some(row) = usize::try_from(index).ok().and_then(|index| referenced.get_mut(index)) {
                    *row = true;
                }
            }
        }
        for (row, _) in self.rows.chunks_mut(row_bytes).zip(referenced).filter(|(_, referenced)| !referenced) {
            row.fill(0xff);
        }
    }

    /// The pages, one behind the other.
    fn pages(&self, format: RowFormat) -> Vec<u8> {
        let mut pages = vec![0; self.rows.len()];
        let row_bytes = format.data_bytes() + format.scale_bytes();
        for (slot, row) in self.rows.chunks(row_bytes).enumerate() {
            let (data, scales) = row.split_at(format.data_bytes());
            let (data_at, scales_at) = format.place(slot, self.case.page_size);
            pages[data_at..data_at + data.len()].copy_from_slice(data);
            pages[scales_at..scales_at + scales.len()].copy_from_slice(scales);
        }
        pages
    }

    fn reference(&self, format: RowFormat) -> reference::Store {
        reference::Store {
            pages: self.pages(format),
            page_size: self.case.page_size,
            indices: self.indices.clone(),
            topk: self.case.topk,
            length: self.length.clone(),
        }
    }

    /// The same rows in pages of one, in another order.
    fn relocated(&self, seed: u64, row_bytes: usize) -> Self {
        let slots = self.case.num_slots();
        let order = permutation(seed, slots);
        let mut place = vec![0; slots];
        order.iter().enumerate().for_each(|(to, &from)| place[from] = to as i32);
        let moved = |&index: &i32| match usize::try_from(index).ok().and_then(|index| place.get(index)) {
            Some(&to) => to,
            None => index,
        };
        Self {
            case: StoreCase { num_pages: slots, page_size: 1, ..self.case },
            rows: order.iter().flat_map(|&from| self.rows[from * row_bytes..(from + 1) * row_bytes].to_vec()).collect(),
            indices: self.indices.iter().map(moved).collect(),
            length: self.length.clone(),
        }
    }

    fn shuffle_slots(&mut self, seed: u64, s_q: usize) {
        for token in 0..self.indices.len() / self.case.topk.max(1) {
            let length = self.length_of(token / s_q);
            let list = &mut self.indices[token * self.case.topk..][..length];
            list.shuffle(Draw::new(seed + token as u64, "slots").rng());
        }
    }

    /// Lists with invalid slots behind their end. A length beyond the old list would reach them: it stays clamped.
    fn lengthened(&mut self) {
        let (topk, num_slots) = (self.case.topk, self.case.num_slots() as i32);
        let extra = [-1, num_slots, i32::MIN, i32::MAX, -1].repeat(14);
        let tokens = self.indices.len().checked_div(topk).unwrap_or(0);
        let lists = (0..tokens).map(|token| &self.indices[token * topk..(token + 1) * topk]);
        self.indices = lists.flat_map(|list| list.iter().chain(&extra).copied()).collect();
        self.case.topk = topk + extra.len();
        self.length = self.length.as_ref().map(|all| all.iter().map(|&l| l.clamp(0, topk as i32)).collect());
    }
}

/// What the last channel of q and, times the rows' size, of the rows holds to move all logits by `logit_shift`.
fn shift_size(case: &DecodeAttentionCase) -> f64 {
    (case.logit_shift.abs() / (f64::from(case.softmax_scale) * case.row_magnitude)).sqrt()
}

impl Inputs {
    fn draw(case: DecodeAttentionCase) -> Self {
        let (tokens, width) = (case.tokens(), case.head_dim());
        let scale = f64::from(case.softmax_scale);
        let size = case.logit_deviation / (scale * (width as f64).sqrt() * case.row_magnitude);
        let mut q = Draw::new(case.seed, "q").values(case.distribution, tokens * case.num_heads, width, size);
        if case.logit_shift != 0.0 {
            let shift = shift_size(&case) * case.logit_shift.signum();
            q.chunks_mut(width).for_each(|head| head[width - 1] = shift);
        }
        Self {
            q: HostTensor::from_f64(DType::Bf16, &[case.batch, case.s_q, case.num_heads, width], &q),
            window: StoreInputs::draw(&case, case.window, LengthsOf::Window),
            compressed: case.compressed.map(|store| StoreInputs::draw(&case, store, LengthsOf::Compressed)),
            sink: case.sinks.draw(case.seed, case.num_heads, case.logit_shift),
            softmax_scale: scale,
            case,
        }
    }

    fn stores(&self) -> impl Iterator<Item = &StoreInputs> {
        [Some(&self.window), self.compressed.as_ref()].into_iter().flatten()
    }

    fn stores_mut(&mut self) -> impl Iterator<Item = &mut StoreInputs> {
        [Some(&mut self.window), self.compressed.as_mut()].into_iter().flatten()
    }

    /// Where the kernel's schedule cuts the lists: all tiles of all units, one behind the other, in equal stretches.
    fn split(&self) -> reference::Split {
        let case = &self.case;
        let topk: Vec<usize> = self.stores().map(|store| store.case.topk).collect();
        let spread = launcher::spread(
            [case.batch, case.s_q, case.num_heads],
            &topk,
            case.num_blocks,
            case.implementation.launcher(),
        );
        let tiles = |request: usize| -> usize {
            let of_store = |store: &StoreInputs| store.length_of(request).div_ceil(launcher::TILE_SLOTS);
            self.stores().map(of_store).sum::<usize>().max(1)
        };
        let units = case.s_q * case.num_heads.div_ceil(spread.heads_per_block);
        let total: usize = (0..case.batch).map(|request| units * tiles(request)).sum();
        let lengths = self.stores().any(|store| store.length.is_some());
        let stretch = launcher::stretch(total, (!lengths).then(|| tiles(0)), spread.num_blocks);
        let mut cuts = Vec::new();
        let mut before = 0;
        for request in 0..case.batch {
            let tiles = tiles(request);
            for _ in 0..units {
                cuts.push((1..tiles).filter(|tile| (before + tile).is_multiple_of(stretch)).collect());
                before += tiles;
            }
        }
        reference::Split { tile_slots: launcher::TILE_SLOTS, unit_heads: spread.heads_per_block, cuts }
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let format = self.case.format();
        let inputs = reference::Inputs {
            q: widened(&self.q)?,
            format,
            window: self.window.reference(format),
            compressed: self.compressed.as_ref().map(|store| store.reference(format)),
            sink: self.sink.as_ref().map(widened).transpose()?,
            softmax_scale: self.softmax_scale,
            split: self.split(),
        };
        let outputs = reference::forward(&inputs, &mut Rounding::new(precision))?;
        Ok(vec![oracle_tensor("out", Side::Forward, &outputs.out)?, oracle_tensor("lse", Side::Forward, &outputs.lse)?])
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }

    fn both(relation: impl Fn() -> Relation) -> Vec<(&'static str, Relation)> {
        vec![("out", relation()), ("lse", relation())]
    }

    /// `(a q) · k · (scale / a)` is the same logit: the scale is applied once.
    fn scale_law(&self) -> Law {
        let variant = self.with(|v| {
            v.q = scaled(&self.q, 4.0);
            v.case.softmax_scale /= 4.0;
            v.softmax_scale /= 4.0;
        });
        Law { name: "softmax_scale counts once", variant, relations: Self::both(|| Relation::Times(1.0)) }
    }

    /// Where a row lies, and in pages of what size, changes no bit.
    fn place_law(&self) -> Law {
        let row_bytes = self.case.launched_format().row_bytes();
        let variant = self.with(|v| {
            for (number, store) in v.stores_mut().enumerate() {
                *store = store.relocated(self.case.seed + number as u64, row_bytes);
            }
        });
        Law { name: "rows may lie anywhere", variant, relations: Self::both(|| Relation::Times(1.0)) }
    }

    /// The work may be split differently.
    fn split_law(&self) -> Law {
        let other = if self.case.num_blocks > 1 { 1 } else { 7 };
        let variant = self.with(|v| v.case.num_blocks = other);
        Law { name: "work may be split differently", variant, relations: Self::both(|| Relation::WithinBothBudgets) }
    }

    /// The order of the slots does not matter. Slots beyond a length stay beyond it.
    fn slot_law(&self) -> Law {
        let variant =
            self.with(|v| v.stores_mut().for_each(|store| store.shuffle_slots(self.case.seed, self.case.s_q)));
        Law { name: "slots may be permuted", variant, relations: Self::both(|| Relation::WithinBothBudgets) }
    }

    /// Both stores are attended to alike.
    fn exchange_law(&self) -> Option<Law> {
        let compressed = self.compressed.as_ref()?;
        // A variant has the inputs that its case has: that is all a kernel in another process is told.
        if self.window.length.is_some() != compressed.length.is_some() {
            return None;
        }
        let variant = self.with(|v| {
            (v.window, v.compressed) = (compressed.clone(), Some(self.window.clone()));
        });
        Some(Law { name: "stores may change places", variant, relations: Self::both(|| Relation::WithinBothBudgets) })
    }

    /// Invalid slots at the end of the lists add nothing. They are tiles, so that more blocks than one share them
    /// otherwise, and so do the two warpgroups of a Hopper block, which take the second store's tiles in turn behind
    /// the first's.
    fn padding_law(&self) -> Law {
        let variant = self.with(|v| v.stores_mut().for_each(StoreInputs::lengthened));
        let in_turn = self.case.implementation == Implementation::Hopper && self.compressed.is_some();
        let one = self.case.num_blocks == 1 && !in_turn;
        let relation = || if one { Relation::Times(1.0) } else { Relation::WithinBothBudgets };
        Law { name: "invalid slots add nothing", variant, relations: Self::both(relation) }
    }

    /// Another query and lists for one token change no other token's row.
    fn independence_law(&self) -> Law {
        let (heads, middle) = (self.case.num_heads, self.case.tokens() / 2);
        let variant = self.with(|v| {
            let row = heads * self.case.head_dim() * 2;
            // The sign bit of every bf16 of the token's query.
            v.q.bytes[middle * row..(middle + 1) * row].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            for store in v.stores_mut() {
                let topk = store.case.topk;
                store.indices[middle * topk..(middle + 1) * topk].reverse();
            }
        });
        let relations = vec![
            ("out", Relation::EqualRows(Box::new(move |row| row / heads != middle))),
            ("lse", Relation::EqualRows(Box::new(move |row| row != middle))),
        ];
        Law { name: "independence", variant, relations }
    }

    /// Requests in another order, where no block's share depends on it.
    fn permutation_law(&self) -> Law {
        let (s_q, heads) = (self.case.s_q, self.case.num_heads);
        let order = permutation(self.case.seed, self.case.batch);
        let variant = self.with(|v| {
            v.q = permuted(&self.q, &order);
            for store in v.stores_mut() {
                let row = s_q * store.case.topk;
                let lists = order.iter().flat_map(|&from| store.indices[from * row..(from + 1) * row].to_vec());
                store.indices = lists.collect();
                store.length = store.length.as_ref().map(|all| order.iter().map(|&from| all[from]).collect());
            }
        });
        let tokens: Vec<usize> = order.iter().flat_map(|&from| (0..s_q).map(move |t| from * s_q + t)).collect();
        let by_head = tokens.iter().flat_map(|&token| (0..heads).map(move |h| token * heads + h)).collect();
        let relations = vec![("out", Relation::PermutedRows(by_head)), ("lse", Relation::PermutedRows(tokens))];
        Law { name: "requests may be permuted", variant, relations }
    }
}

/// A store on the device.
struct DeviceStore {
    pages: TensorView,
    page_size: usize,
    indices: TensorView,
    length: Option<TensorView>,
}

impl DeviceStore {
    fn upload(
        arena: &mut DeviceArena<'_>,
        case: &DecodeAttentionCase,
        name: &str,
        store: &StoreInputs,
    ) -> Result<Self, RuntimeError> {
        let format = case.launched_format();
        let StoreCase { topk, num_pages, page_size } = store.case;
        let shape = vec![num_pages, page_size * format.row_bytes()];
        let padding = format.page_stride(page_size).next_multiple_of(16) - shape[1] + case.page_padding;
        let pages = HostTensor { dtype: DType::U8, shape, bytes: store.pages(case.format()) };
        let indices = HostTensor::from_i32(&[case.batch, case.s_q, topk], &store.indices);
        let length = store.length.as_ref().map(|all| HostTensor::from_i32(&[case.batch], all));
        Ok(Self {
            pages: arena.upload(name, &pages, &layout(&pages.shape, padding), Role::Input)?,
            page_size,
            indices: arena.input(&format!("{name} indices"), &indices)?,
            length: length.map(|length| arena.input(&format!("{name} length"), &length)).transpose()?,
        })
    }

    fn launcher(&self) -> launcher::Store<'_> {
        launcher::Store {
            cache: launched::Cache { pages: &self.pages, page_size: self.page_size },
            indices: &self.indices,
            length: self.length.as_ref(),
        }
    }
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    /// With the stores as they are here: a law's variant may have other lists and pages than the case that it varies.
    fn case(&self) -> Option<Case> {
        let compressed = self.compressed.as_ref().map(|store| store.case);
        Some(Case::new(NAME, &DecodeAttentionCase { window: self.window.case, compressed, ..self.case.clone() }))
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let case = &self.case;
        let mut arena = DeviceArena::new(device, contract);
        let padded = layout(&self.q.shape, case.padding);
        let q = arena.upload("q", &self.q, &padded, Role::Input)?;
        let window = DeviceStore::upload(&mut arena, case, "window", &self.window)?;
        let compressed = self.compressed.as_ref();
        let compressed =
            compressed.map(|store| DeviceStore::upload(&mut arena, case, "compressed", store)).transpose()?;
        let sink = self.sink.as_ref().map(|sink| arena.input("sink", sink)).transpose()?;
        let inputs = launcher::Inputs {
            q: &q,
            format: case.launched_format(),
            window: window.launcher(),
            compressed: compressed.as_ref().map(DeviceStore::launcher),
            sink: sink.as_ref(),
            softmax_scale: case.softmax_scale,
        };
        let out = arena.allocate("out", DType::Bf16, &self.q.shape, &padded, Role::Output)?;
        let lse = arena.output("lse", DType::F32, &self.q.shape[..3])?;
        let workspace = arena.workspace(
            "workspace",
            launcher::workspace_bytes(&inputs, case.num_blocks, case.implementation.launcher())?,
        )?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let arguments = launcher::Forward {
                inputs,
                num_blocks: case.num_blocks,
                implementation: case.implementation.launcher(),
                out: &out,
                lse: &lse,
                workspace: &workspace,
            };
            paths = launcher::forward(device, &arguments)?;
            Ok(())
        })?;
        let tensors = vec![deterministic("out", arena.download(&out)?), deterministic("lse", arena.download(&lse)?)];
        Ok(KernelRun { tensors, violations, paths })
    }

    fn laws(&self) -> Vec<Law> {
        let case = &self.case;
        if case.batch == 0 {
            return Vec::new();
        }
        let mut laws = vec![self.scale_law(), self.place_law(), self.split_law(), self.slot_law()];
        laws.extend(self.exchange_law());
        if self.stores().all(|store| store.case.topk > 0) {
            laws.push(self.padding_law());
        }
        if case.tokens() > 1 {
            laws.push(self.independence_law());
        }
        if case.num_blocks == 1 {
            laws.push(self.permutation_law());
        }
        laws
    }
}

/// `attn_core`: the visible raw rows of a token are its window, the visible compressed entries its other list; the
/// tokens of a batch entry are one request.
fn golden_case(file: &GoldenFile) -> Result<GoldenCase, String> {
    let (q, kv, visible) = (file.tensor("in.q")?, file.tensor("in.kv")?, file.tensor("mid.visible")?);
    let [batch, heads, tokens, head_dim] = <[usize; 4]>::try_from(q.shape.as_slice()).map_err(|_| "in.q: 4 axes")?;
    let keys = kv.shape[2];
    let format = launched::RowFormat::bf16(head_dim);
    let heads_last = |values: &[f64]| -> Vec<f64> {
        let at = |b: usize, t: usize, h: usize| ((b * heads + h) * tokens + t) * head_dim;
        let rows = (0..batch).flat_map(|b| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (b, t, h))));
        rows.flat_map(|(b, t, h)| values[at(b, t, h)..at(b, t, h) + head_dim].iter().copied()).collect()
    };
    // Rows `range` of every batch entry, and which of them each token sees.
    let store = |range: std::ops::Range<usize>| {
        let width = range.len();
        let row = |b: usize, key: usize| &kv.values[(b * keys + key) * head_dim..(b * keys + key + 1) * head_dim];
        let slot = |b: usize, t: usize, key: usize| {
            let seen = visible.values[(b * tokens + t) * keys + key] != 0.0;
            if seen { (b * width + key - range.start) as i32 } else { -1 }
        };
        let of_tokens = (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t)));
        let all_rows = (0..batch).flat_map(|b| range.clone().map(move |key| (b, key)));
        StoreInputs {
            case: StoreCase { topk: width, num_pages: batch * width, page_size: 1 },
            rows: all_rows.flat_map(|(b, key)| row(b, key)).flat_map(|&x| bf16::from_f64(x).to_ne_bytes()).collect(),
            indices: of_tokens.flat_map(|(b, t)| range.clone().map(move |key| slot(b, t, key))).collect(),
            length: None,
        }
    };
    let (window, compressed) = (store(0..tokens), (keys > tokens).then(|| store(tokens..keys)));
    // Two blocks for every three tiles: lists are cut.
    let tiles =
        batch * tokens * (tokens.div_ceil(launcher::TILE_SLOTS) + (keys - tokens).div_ceil(launcher::TILE_SLOTS));
    let case = DecodeAttentionCase {
        window: window.case,
        compressed: compressed.as_ref().map(|store| store.case),
        softmax_scale: file.number("scale")? as f32,
        poison_unreferenced: false,
        ..DecodeAttentionCase::plain(batch, tokens, heads, format, (2 * tiles / 3).max(1))
    };
    let inputs = Inputs {
        q: HostTensor::from_f64(DType::Bf16, &[batch, tokens, heads, head_dim], &heads_last(&q.values)),
        window,
        compressed,
        sink: Some(HostTensor::from_f64(DType::F32, &[heads], &file.tensor("in.sinks")?.values)),
        softmax_scale: file.number("scale")?,
        case,
    };
    let stored = file.tensor("out.y")?;
    let expected = vec![ExpectedTensor {
        name: "out",
        stored_as: "out.y".to_owned(),
        values: stored.values.clone(),
        stored_f32: stored.stored_f32,
        computed_f32: false,
    }];
    let kernel_skip = (!head_dim.is_multiple_of(16))
        .then(|| format!("head_dim {head_dim} is no multiple of 16, which the kernel needs"));
    Ok(GoldenCase { prepared: Box::new(inputs), expected, kernel_skip })
}
