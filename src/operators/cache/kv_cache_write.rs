//! `kv_cache_write` (inference 5.4, 8.3, 13.2): `kernels/cuda/cache/kv_cache_write.cu` against
//! `reference/src/cache/kv_cache_write.rs`.
//!
//! The bytes of a row follow from bf16 inputs without an intermediate rounding. So the oracle's
//! runs are all equal, every budget is zero, and every byte must equal the oracle's.

use std::rc::Rc;

use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::cache::kv_cache_write as launcher;
use dsv4_reference::Format;
use dsv4_reference::cache::kv_cache::{RowBytes, SCALE_GROUP};
use dsv4_reference::cache::kv_cache_write as reference;
use dsv4_reference::quantize::{ScaleType, floor_of};
use dsv4_runtime::HostTensor;
use rand::Rng;

use crate::case::Draw;
use crate::operator::Relation;
use crate::operator::benchmarks::Whole;
use crate::operator::declaration::{Axis, observed, state};
use crate::operator::fields::{LARGEST_DRAWN, extent, magnitude, tensor};
use crate::operator::prelude::*;
use crate::operators::cache::paged::{
    self, SlotClass, check_nope_dim, cut_slots, oracle, page_bytes, page_gap, pages_of, parts_of,
    rows_of, turn_signs_of_bf16, writers,
};
use crate::operators::contents::{Contents, Groups};

const SMALL: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };

/// The operator.
pub struct KvCacheWrite;

/// A case: sizes, format, slots, contents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvCacheWriteCase {
    /// Rows to write; 0 is allowed.
    pub num_tokens: usize,
    /// e4m3 channels: a multiple of 64 up to 512; 0 is a cache of bf16.
    pub nope_dim: usize,
    /// bf16 channels: a multiple of 8, at least 8.
    pub rope_dim: usize,
    /// Pages of the cache; 0 is allowed.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// The slots that tokens are written to.
    pub slots: SlotClass,
    /// The contents of the rows.
    pub contents: Contents,
    /// Distribution of drawn contents.
    pub distribution: Distribution,
    /// Scale of drawn contents.
    pub magnitude: f64,
    /// Least number of unused bytes after each page; with the page's own a
    /// multiple of 16.
    pub page_padding: usize,
    /// Seed of the data.
    pub seed: u64,
}

/// Drawn values, and slots that do not exist.
fn plain(
    num_tokens: usize,
    format: RowFormat,
    num_pages: usize,
    page_size: usize,
) -> KvCacheWriteCase {
    let RowFormat { nope_dim, rope_dim } = format;
    KvCacheWriteCase {
        num_tokens,
        nope_dim,
        rope_dim,
        num_pages,
        page_size,
        slots: SlotClass::Hostile,
        contents: Contents::Drawn,
        distribution: Distribution::Normal,
        magnitude: 1.0,
        page_padding: page_gap(format, page_size),
        seed: 1,
    }
}

impl KvCacheWriteCase {
    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn stored(&self) -> RowBytes {
        oracle(self.format()).bytes()
    }

    fn num_slots(&self) -> usize {
        self.num_pages.saturating_mul(self.page_size)
    }

    /// The tensors that are observed from the rows: a name, and that many bytes of each row.
    fn observed(&self) -> [(&'static str, Axis); 3] {
        let codes = ("codes", axis("nope_dim", self.nope_dim));
        let rope = ("rope", axis("rope_bytes", 2 * self.rope_dim));
        [codes, rope, ("scales", axis("scale_bytes", self.format().scale_bytes()))]
    }
}

impl Operator for KvCacheWrite {
    type Case = KvCacheWriteCase;

    const ABOUT: About = About {
        name: "kv_cache_write",
        family: Family::Cache,
        summary: "quantizes rows of K = V and scatters them to slots of the paged cache",
        specification: &["inference 5.4", "inference 8.3", "inference 13.2"],
        paths: &["kv_cache_write"],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::ScaleFloor];

    fn tensors(c: &KvCacheWriteCase) -> Specs {
        let tokens = [axis("num_tokens", c.num_tokens), axis("head_dim", c.format().head_dim())];
        let page_bytes = c.page_size.saturating_mul(c.format().row_bytes());
        let pages = [axis("num_pages", c.num_pages), axis("page_bytes", page_bytes)];
        let [codes, rope, scales] = c.observed().map(|(name, bytes)| {
            observed(name, DType::U8, &[axis("num_slots", c.num_slots()), bytes])
                .exact()
                .when(bytes.extent > 0)
        });
        let tensors = [
            input("kv", DType::Bf16, &tokens).aligned_rows().of_any_size(),
            input("slots", DType::I32, &tokens[..1]),
            state("cache", DType::U8, &pages)
                .aligned_rows()
                .with_gap("page_padding", c.page_padding),
            codes,
            rope,
            scales,
        ];
        Specs::new(c.seed, tensors).positive("magnitude", c.magnitude)
    }

    fn check(c: &KvCacheWriteCase) -> Result<(), Refused> {
        check_nope_dim(c.nope_dim)?;
        if c.rope_dim == 0 || !c.rope_dim.is_multiple_of(8) || c.rope_dim > 1 << 24 {
            return refuse(
                "rope_dim",
                format!("{} must be a multiple of 8, 8 to 2^24", c.rope_dim),
            );
        }
        let page =
            page_bytes(c.format(), c.page_size).or_else(|reason| refuse("page_size", reason))?;
        if !c.page_padding.saturating_add(page).is_multiple_of(16) {
            let reason =
                format!("{} and a page's {page} bytes must be a multiple of 16", c.page_padding);
            return refuse("page_padding", reason);
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<KvCacheWriteCase> {
        let [tokens, pages] = profile.of([[40, 6], [90, 12], [700, 40usize]]);
        let format = select(vec![
            RowFormat::MODEL,
            RowFormat::bf16(512),
            SMALL,
            RowFormat { nope_dim: 128, rope_dim: 32 },
        ]);
        let page_size = select(vec![1usize, 2, 3, 7, 32, 64]);
        let shape = (extent(tokens, 8), format, 1..=pages, page_size);
        let slots = select(SlotClass::ALL.to_vec());
        let contents = select(vec![
            Contents::Drawn,
            Contents::Drawn,
            Contents::Ties,
            Contents::Corners,
            Contents::Amax,
            Contents::NotFinite,
        ]);
        let more_page_padding = prop_oneof![Just(0usize), Just(32usize)];
        let data = (select(Distribution::ALL.to_vec()), magnitude(-40..=40), 0..1000u64);
        (shape, slots, contents, more_page_padding, data)
            .prop_map(
                |(
                    (num_tokens, format, num_pages, page_size),
                    slots,
                    contents,
                    more_page_padding,
                    data,
                )| {
                    let (distribution, magnitude, seed) = data;
                    let num_pages =
                        num_pages.min((LARGEST_DRAWN / (page_size * format.row_bytes())).max(1));
                    let page_padding = page_gap(format, page_size) + more_page_padding;
                    let plain = plain(num_tokens, format, num_pages, page_size);
                    KvCacheWriteCase {
                        slots,
                        contents,
                        distribution,
                        magnitude,
                        page_padding,
                        seed,
                        ..plain
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<KvCacheWriteCase> {
        vec![plain(9, SMALL, 3, 4), plain(5, RowFormat::bf16(512), 3, 2)]
    }

    fn edge_cases(profile: Profile) -> Vec<KvCacheWriteCase> {
        let model = RowFormat::MODEL;
        let mut cases = vec![
            plain(0, model, 2, 4),
            plain(5, model, 0, 64),
            plain(9, model, 3, 4).with(|case| case.contents = Contents::Ties),
            plain(11, model, 7, 2).with(|case| {
                case.contents = Contents::Corners;
                case.slots = SlotClass::Scattered;
            }),
            plain(9, model, 12, 1).with(|case| case.contents = Contents::NotFinite),
            plain(885, SMALL, 28, 32).with(|case| {
                case.contents = Contents::Amax;
                case.slots = SlotClass::Consecutive;
            }),
            plain(17, RowFormat::bf16(512), 2, 16),
        ];
        if profile == Profile::Full {
            cases.extend([plain(4000, model, 90, 64), plain(3000, RowFormat::bf16(512), 20, 256)]);
        }
        cases
    }

    fn amend(c: &KvCacheWriteCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.seed, "before");
        let row_bytes = c.format().row_bytes();
        let before: Vec<u8> = (0..c.num_slots() * row_bytes).map(|_| draw.rng().random()).collect();
        let shape = tensors.tensor("cache").shape.clone();
        let bytes = pages_of(c.stored(), c.page_size, &before);
        tensors.put("cache", HostTensor { dtype: DType::U8, shape, bytes });
        tensors.set_i32s("slots", &draw_slots(c));
        tensors.set("kv", &draw_rows(c));
        Ok(())
    }

    /// Only the result is rounded: all precisions give one result.
    fn forward(
        c: &KvCacheWriteCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let cache = t.host().tensor("cache");
        let inputs = reference::Inputs {
            kv: t.f64("kv")?,
            slots: t.host().i32s("slots"),
            format: oracle(c.format()),
            page_size: c.page_size,
            pages: cache.bytes.clone(),
        };
        let pages = reference::forward_by(&inputs, rounding.conventions())?;
        let pages = pages.into_iter().map(f64::from).collect();
        Ok(Named::new().with("cache", tensor(pages, &cache.shape)?))
    }

    fn launch(c: &KvCacheWriteCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.format(), c.page_size))
    }

    /// The pages as three tensors of bytes, each with a row for each slot.
    fn observe(
        c: &KvCacheWriteCase,
        _: &Tensors,
        written: &Tensors,
        _: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let parts: Vec<_> =
            c.observed().into_iter().filter(|(_, bytes)| bytes.extent > 0).collect();
        parts_of(c.stored(), c.page_size, &parts, &written.tensor("cache").bytes)
    }

    fn invariant(_: &KvCacheWriteCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &KvCacheWriteCase, batches: &mut Batches<'_, Self>) {
        let observed: Vec<&'static str> = batches.observed();
        batches.rows_with("num_tokens", |tensors, cut| {
            cut_slots(tensors, c.num_slots(), &observed, cut)
        });
    }

    fn laws(c: &KvCacheWriteCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 || c.num_slots() == 0 {
            return;
        }
        laws.permute("tokens may be permuted", "num_tokens");
        page_law(c, laws);
        if c.num_slots() > 1 {
            independence_law(c, laws);
        }
        scale_law(c, laws);
    }

    /// The rows of a long prefill, scattered over a cache with exactly that many rows. Pages are
    /// sampled.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let (model, bf16) = (RowFormat::MODEL, RowFormat::bf16(512));
        let gpu = [
            (1, 64, model),
            (128, 64, model),
            (4096, 64, model),
            (65536, 64, model),
            (65536, 64, bf16),
        ];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(64, 16, model)] };
        let benchmark = |&(num_tokens, page_size, format): &(usize, usize, RowFormat)| {
            let plain = plain(num_tokens, format, num_tokens.div_ceil(page_size), page_size);
            let case = KvCacheWriteCase { slots: SlotClass::Scattered, ..plain };
            let rows = DRAWN / format.head_dim();
            let num_pages = case.num_pages.min(rows / page_size);
            let storage = if format.nope_dim > 0 { "fp8" } else { "bf16" };
            Benchmark {
                drawn: KvCacheWriteCase {
                    num_tokens: num_tokens.min(rows),
                    num_pages,
                    ..case.clone()
                },
                // Amax, product, rounding and a comparison for each quantized channel.
                flops: (4 * num_tokens * format.nope_dim) as f64,
                rows: 2,
                amend: |c: &KvCacheWriteCase, tensors| {
                    tensors.put("slots", HostTensor::from_i32(&[c.num_tokens], &draw_slots(c)))
                },
                sampled: keep_writers,
                ..Benchmark::new(
                    Direction::Forward,
                    format!("{num_tokens}x{} page {page_size} {storage}", format.head_dim()),
                    case,
                    "num_pages",
                )
                .streaming(&[], 0.0)
            }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["65536x512 page 64 fp8"],
                json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": 448}),
                json!({"num_tokens": 32, "num_pages": 2}),
            ),
            Reduced::forward(
                &["65536x512 page 64 bf16"],
                json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": 0}),
                json!({"num_tokens": 32, "num_pages": 2}),
            ),
        ]
    }
}

fn keep_writers(whole: &Whole<'_, KvCacheWrite>, c: &mut KvCacheWriteCase, tensors: &mut Tensors) {
    c.num_tokens = paged::keep_writers(whole.rows, c.page_size, "kv", tensors);
}

/// All observed tensors are equal in the slots that the law binds.
fn equal_where(bound: impl Fn(usize) -> bool + Clone + 'static) -> [(&'static str, Relation); 3] {
    ["codes", "rope", "scales"].map(|name| (name, Relation::EqualRows(Rc::new(bound.clone()))))
}

/// Pages only determine where a row is stored.
fn page_law(c: &KvCacheWriteCase, laws: &mut Laws<'_, KvCacheWrite>) {
    let single_rows = |cache: &HostTensor| {
        let rows = rows_of(c.stored(), c.page_size, &cache.bytes);
        let shape = vec![c.num_slots(), c.format().row_bytes()];
        HostTensor { dtype: DType::U8, shape, bytes: pages_of(c.stored(), 1, &rows) }
    };
    let cache = single_rows(laws.tensors().tensor("cache"));
    let page_padding = page_gap(c.format(), 1);
    laws.law(
        "pages only place rows",
        |v| {
            v.case = KvCacheWriteCase {
                num_pages: c.num_slots(),
                page_size: 1,
                page_padding,
                ..c.clone()
            };
            v.tensors.put("cache", cache);
        },
        equal_where(|_| true),
    );
}

/// Other values in one token change no other token's row, and no row that no token writes.
fn independence_law(c: &KvCacheWriteCase, laws: &mut Laws<'_, KvCacheWrite>) {
    let (width, middle) = (c.format().head_dim(), c.num_tokens / 2);
    let writers = writers(c.num_slots(), &laws.tensors().i32s("slots"));
    laws.law(
        "independence",
        |v| turn_signs_of_bf16(&mut v.tensors, "kv", width, middle),
        equal_where(move |slot| writers[slot] != Some(middle)),
    );
}

/// Rows whose groups have scales from their own values, and stay finite at four times the
/// magnitude. Their codes do not change, because their scale does.
fn scale_law(c: &KvCacheWriteCase, laws: &mut Laws<'_, KvCacheWrite>) {
    let (nope, width) = (c.nope_dim, c.format().head_dim());
    let kv = laws.tensors().values("kv");
    let free = |token: usize| {
        kv[token * width..token * width + nope].chunks(SCALE_GROUP).all(|group| {
            let amax = group.iter().map(|x| x.abs()).fold(0.0, f64::max);
            group.iter().all(|x| x.is_finite())
                && amax >= floor_of(Format::E4M3)
                && amax < 2f64.powi(125)
        })
    };
    let bound: Vec<bool> = writers(c.num_slots(), &laws.tensors().i32s("slots"))
        .into_iter()
        .map(|writer| writer.is_some_and(free))
        .collect();
    if bound.contains(&true) {
        let codes = Relation::EqualRows(Rc::new(move |slot| bound[slot]));
        laws.law(
            "a power of two moves the scale alone",
            |v| v.tensors.scale("kv", 4.0),
            [("codes", codes)],
        );
    }
}

fn draw_slots(case: &KvCacheWriteCase) -> Vec<i32> {
    case.slots.draw(case.seed, case.num_tokens, case.num_slots())
}

fn draw_rows(case: &KvCacheWriteCase) -> Vec<f64> {
    let format = case.format();
    let (width, seed) = (format.head_dim(), case.seed);
    let (codes, stored, scale) = (Format::E4M3, Format::BF16, ScaleType::E8m0);
    let groups =
        Groups { contents: case.contents, format: codes, stored, scale, group: SCALE_GROUP, seed };
    let mut draw = Draw::new(seed, "kv");
    let mut rows =
        groups.draw(&mut draw, [case.num_tokens, width], case.distribution, case.magnitude);
    let all = rows.chunks_mut(width).flat_map(|row| row[..format.nope_dim].chunks_mut(SCALE_GROUP));
    all.enumerate().for_each(|(number, group)| groups.fill(group, number, &mut draw));
    rows
}
