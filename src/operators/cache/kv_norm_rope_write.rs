//! `kv_norm_rope_write` (inference 3, 4, 5.1, 5.4, 8.3, 13.2):
//! `kernels/cuda/cache/kv_norm_rope_write.cu` against `reference/src/cache/kv_norm_rope_write.rs`.
//!
//! The rows that a prefill attends to are compared with the formula. The cache must hold the same
//! rows: what each byte decodes to is checked, and all other bytes must keep their values.

use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::cache::kv_norm_rope_write::{self as launcher, MAX_HEAD_DIM};
use dsv4_reference::cache::kv_cache::SCALE_GROUP;
use dsv4_reference::cache::kv_norm_rope_write as reference;
use rand::Rng;

use crate::operator::Pooling;
use crate::operator::benchmarks::Whole;
use crate::operator::declaration::{observed, state};
use crate::operator::fields::tensor;
use crate::operator::prelude::*;
use crate::operators::cache::paged::{
    SlotClass, check_nope_dim, cut_slots, oracle, page_bytes, page_gap, pages_of,
};
use crate::operators::projections::rms_norm::sizes_of_rows;
use crate::operators::projections::rope::{TableForm, Turning, turned_by};

/// The operator.
pub struct KvNormRopeWrite;

/// A case: sizes, format, rotation, slots, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvNormRopeWriteCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// e4m3 channels: a multiple of 64, not 0.
    pub nope_dim: usize,
    /// bf16 channels, which rotate: a multiple of 8. Both kinds together are at most 512.
    pub rope_dim: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Pages of the cache; 0 is allowed.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// The slots that tokens are written to.
    pub slots: SlotClass,
    /// Least number of unused bytes after each page; with the page's own a
    /// multiple of 16.
    pub page_padding: usize,
    /// Where y is stored.
    pub aliasing: Aliasing,
    /// x.
    #[serde(flatten)]
    pub data: Data,
}

const SMALL: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
const MIDDLE: RowFormat = RowFormat { nope_dim: 128, rope_dim: 32 };

/// Slots that do not exist; a row of the table for each token.
fn plain(
    num_tokens: usize,
    format: RowFormat,
    num_pages: usize,
    page_size: usize,
) -> KvNormRopeWriteCase {
    KvNormRopeWriteCase {
        num_tokens,
        nope_dim: format.nope_dim,
        rope_dim: format.rope_dim,
        eps: 1e-6,
        table: TableForm::RowPerToken,
        table_rows: 0,
        num_pages,
        page_size,
        slots: SlotClass::Hostile,
        page_padding: page_gap(format, page_size),
        aliasing: Aliasing::OutOfPlace,
        data: Data::normal(1.0),
    }
}

impl KvNormRopeWriteCase {
    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }

    fn num_slots(&self) -> usize {
        self.num_pages.saturating_mul(self.page_size)
    }

    /// Slots, and the number of groups in each of their rows.
    fn observed(&self) -> [usize; 2] {
        [self.num_slots(), self.nope_dim / SCALE_GROUP]
    }
}

/// Whether such rows, and pages of them, are valid.
pub(crate) fn check_format(format: RowFormat, page_size: usize) -> Result<(), Refused> {
    let RowFormat { nope_dim, rope_dim } = format;
    check_nope_dim(nope_dim)?;
    if nope_dim == 0 || nope_dim.saturating_add(rope_dim) > MAX_HEAD_DIM {
        return refuse(
            "nope_dim",
            format!("{nope_dim} must not be 0, and with rope_dim at most 512"),
        );
    }
    if rope_dim == 0 || !rope_dim.is_multiple_of(8) {
        return refuse("rope_dim", format!("{rope_dim} must be a multiple of 8, at least 8"));
    }
    page_bytes(format, page_size).map(|_| ()).or_else(|reason| refuse("page_size", reason))
}

/// Sets `cache` to any bytes, and `slots`.
pub(crate) fn set_cache(
    format: RowFormat,
    [num_pages, page_size]: [usize; 2],
    class: SlotClass,
    seed: u64,
    tensors: &mut Tensors,
) {
    let (mut draw, num_slots) = (Draw::new(seed, "before"), num_pages * page_size);
    let before: Vec<u8> =
        (0..num_slots * format.row_bytes()).map(|_| draw.rng().random()).collect();
    let shape = tensors.tensor("cache").shape.clone();
    let bytes = pages_of(oracle(format).bytes(), page_size, &before);
    tensors.put("cache", HostTensor { dtype: DType::U8, shape, bytes });
    let num_tokens = tensors.tensor("slots").elements();
    tensors.set_i32s("slots", &class.draw(seed, num_tokens, num_slots));
}

/// `slot_holds` and `scale_is_least` for the rows and the cache that were written.
pub(crate) fn holds(
    format: RowFormat,
    page_size: usize,
    given: &Tensors,
    [rows, cache]: [&HostTensor; 2],
    conventions: Conventions,
) -> Vec<(&'static str, HostTensor)> {
    let (before, slots) = (&given.tensor("cache").bytes, given.i32s("slots"));
    let pages = [&before[..], &cache.bytes[..]];
    let [holds, least] = reference::rows_that_hold(
        oracle(format),
        page_size,
        pages,
        &slots,
        &rows.to_f64(),
        conventions,
    );
    let [num_slots, num_groups] = [holds.len(), format.nope_dim / SCALE_GROUP];
    let flags = |shape: &[usize], flags: Vec<bool>| {
        let bytes = flags.into_iter().map(u8::from).collect();
        HostTensor { dtype: DType::U8, shape: shape.to_vec(), bytes }
    };
    let least = flags(&[num_slots, num_groups], least);
    vec![("slot_holds", flags(&[num_slots], holds)), ("scale_is_least", least)]
}

impl Operator for KvNormRopeWrite {
    type Case = KvNormRopeWriteCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "kv_norm_rope_write",
        family: Family::Cache,
        summary: "rows of K = V normed, turned by position, quantized and scattered to the paged cache, in one pass",
        specification: &[
            "inference 3",
            "inference 4",
            "inference 5.1",
            "inference 5.4",
            "inference 8.3",
            "inference 13.2",
        ],
        paths: &["kv_norm_rope_write"],
        modules: launcher::modules,
        cases: [16, 40, 100],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::ScaleFloor];

    fn tensors(c: &KvNormRopeWriteCase) -> Specs {
        let rows = [axis("num_tokens", c.num_tokens), axis("head_dim", c.format().head_dim())];
        let page_bytes = c.page_size.saturating_mul(c.format().row_bytes());
        let pages = [axis("num_pages", c.num_pages), axis("page_bytes", page_bytes)];
        let [num_slots, num_groups] = c.observed();
        let of_slots = [axis("num_slots", num_slots), axis("num_groups", num_groups)];
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("x", DType::Bf16, &rows).aligned_rows().drawn_as(c.data).of_any_size(),
            input("weight", DType::F32, &rows[1..]).drawn(Distribution::Normal, 1.0).aligned_rows(),
            cos,
            sin,
            positions,
            input("slots", DType::I32, &rows[..1]),
            output("y", DType::Bf16, &rows)
                .aligned_rows()
                .placed(c.aliasing, "x")
                .pooled(Pooling::Group(SCALE_GROUP)),
            state("cache", DType::U8, &pages)
                .aligned_rows()
                .with_gap("page_padding", c.page_padding),
            observed("slot_holds", DType::U8, &of_slots[..1]).exact(),
            observed("scale_is_least", DType::U8, &of_slots).exact(),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &KvNormRopeWriteCase) -> Result<(), Refused> {
        check_format(c.format(), c.page_size)?;
        let page =
            page_bytes(c.format(), c.page_size).or_else(|reason| refuse("page_size", reason))?;
        if !c.page_padding.saturating_add(page).is_multiple_of(16) {
            let reason =
                format!("{} and a page's {page} bytes must be a multiple of 16", c.page_padding);
            return refuse("page_padding", reason);
        }
        c.turning().check()?;
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<KvNormRopeWriteCase> {
        let [tokens, pages] = profile.of([[20, 6], [60, 12], [400, 30usize]]);
        let format = select(vec![RowFormat::MODEL, SMALL, MIDDLE]);
        let shape = (0..=tokens, format, 1..=pages, select(vec![1usize, 2, 3, 7, 32]));
        let table =
            select(vec![TableForm::RowPerToken, TableForm::Positions, TableForm::HostilePositions]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)];
        let aliasing = prop_oneof![3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace)];
        let slots = select(SlotClass::ALL.to_vec());
        (shape, (table, 1..200usize), eps, (slots, aliasing), Data::strategy(-18..=18))
            .prop_map(
                |(
                    (num_tokens, format, num_pages, page_size),
                    (table, rows),
                    eps,
                    (slots, aliasing),
                    data,
                )| {
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let plain = plain(num_tokens, format, num_pages, page_size);
                    KvNormRopeWriteCase { table, table_rows, eps, slots, aliasing, data, ..plain }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<KvNormRopeWriteCase> {
        let positions =
            |case| KvNormRopeWriteCase { table: TableForm::Positions, table_rows: 9, ..case };
        vec![plain(7, SMALL, 3, 4), plain(5, MIDDLE, 2, 4).then(positions)]
    }

    fn edge_cases(profile: Profile) -> Vec<KvNormRopeWriteCase> {
        let model = RowFormat::MODEL;
        let sized = |exponent| {
            move |case| KvNormRopeWriteCase {
                data: Data { magnitude: 2f64.powi(exponent), ..Data::normal(1.0) },
                ..case
            }
        };
        let mut cases = vec![
            plain(0, model, 2, 4),
            plain(5, model, 0, 64),
            plain(11, model, 7, 2).with(|case| case.slots = SlotClass::Scattered),
            plain(9, SMALL, 3, 4).with(|case| case.slots = SlotClass::Consecutive),
            plain(5, MIDDLE, 3, 2).with(|case| case.aliasing = Aliasing::InPlace),
            plain(11, SMALL, 3, 4).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
            // So small that eps determines the norm, and the floor determines the scales.
            plain(5, SMALL, 2, 4).then(sized(-24)),
        ];
        if profile == Profile::Full {
            cases.push(plain(2000, model, 40, 64));
        }
        cases
    }

    fn amend(c: &KvNormRopeWriteCase, tensors: &mut Tensors) -> OracleResult<()> {
        set_cache(c.format(), [c.num_pages, c.page_size], c.slots, c.data.seed, tensors);
        c.turning().amend(tensors)
    }

    fn forward(
        c: &KvNormRopeWriteCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let rotation = turned_by(t, t.f64("x")?.unsqueeze(1)?, false)?;
        let rows = reference::forward(
            &rotation,
            &t.f64("weight")?,
            oracle(c.format()),
            c.eps.into(),
            rounding,
        )?;
        let [num_slots, num_groups] = c.observed();
        let named = Named::new()
            .with("y", rows)
            .with("slot_holds", tensor(vec![1.0; num_slots], &[num_slots])?);
        Ok(named.with(
            "scale_is_least",
            tensor(vec![1.0; num_slots * num_groups], &[num_slots, num_groups])?,
        ))
    }

    fn launch(
        c: &KvNormRopeWriteCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.format(), c.page_size, c.eps))
    }

    /// Whether the cache holds the rows that the kernels wrote. The oracle returns these tensors
    /// directly.
    fn observe(
        c: &KvNormRopeWriteCase,
        given: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let (Some(y), Some(cache)) = (written.get("y"), written.get("cache")) else {
            return Vec::new();
        };
        holds(c.format(), c.page_size, given, [y, cache], conventions)
    }

    fn invariant(_: &KvNormRopeWriteCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &KvNormRopeWriteCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            let [num_slots, _] = c.observed();
            cut_slots(tensors, num_slots, &["slot_holds", "scale_is_least"], cut)
        });
    }

    fn laws(_: &KvNormRopeWriteCase, laws: &mut Laws<'_, Self>) {
        laws.separate("num_tokens", "tokens may be permuted");
    }

    fn bends_over(c: &KvNormRopeWriteCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        (input == "x")
            .then(|| sizes_of_rows(&tensors.values("x"), c.format().head_dim(), c.eps.into()))
    }

    /// The rows of a long prefill and of decoding, scattered over a cache with exactly that many
    /// rows.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(1, 64), (128, 64), (4096, 64), (65536, 64)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(64, 16)] };
        let benchmark = |&(num_tokens, page_size): &(usize, usize)| {
            let plain =
                plain(num_tokens, RowFormat::MODEL, num_tokens.div_ceil(page_size), page_size);
            let case = KvNormRopeWriteCase { slots: SlotClass::Scattered, ..plain };
            let name = format!("{num_tokens}x{} page {page_size}", RowFormat::MODEL.head_dim());
            Benchmark {
                amend: |c: &KvNormRopeWriteCase, tensors| {
                    let slots = c.slots.draw(c.data.seed, c.num_tokens, c.num_slots());
                    tensors.put("slots", HostTensor::from_i32(&[c.num_tokens], &slots));
                },
                sampled: without_the_cache,
                // A square, its sum, two products; a magnitude, a product, a rounding and a product
                // back.
                ..Benchmark::new(Direction::Forward, name, case, "num_tokens").streaming(&[], 8.0)
            }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["65536x512 page 64"],
                json!({"num_tokens": 32, "num_pages": 2, "page_size": 16, "page_padding": 64}),
                json!({"num_tokens": 8}),
            ),
            // One token, whose slot in the cache is part of the comparison.
            Reduced::forward(&["1x512 page 64"], json!({}), json!({})),
        ]
    }
}

/// Only the rows of sampled tokens, if some are not sampled: their slots are spread over all pages.
fn without_the_cache(
    whole: &Whole<'_, KvNormRopeWrite>,
    c: &mut KvNormRopeWriteCase,
    tensors: &mut Tensors,
) {
    if c.num_tokens == whole.case.num_tokens {
        return;
    }
    tensors.set_i32s("slots", &vec![-1; c.num_tokens]);
    c.slots = SlotClass::Hostile;
}
