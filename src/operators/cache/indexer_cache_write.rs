//! `indexer_cache_write` (inference 5.4, 7, 7.1, 13.2):
//! `kernels/cuda/cache/indexer_cache_write.cu` against
//! `reference/src/cache/indexer_cache_write.rs`.
//!
//! The order of the transform's sums is part of its definition, so every byte must equal the
//! oracle's.

use std::rc::Rc;

use dsv4_kernels::cache::indexer_cache_write as launcher;
use dsv4_kernels::formats::hadamard::{DIM, Stored};
use dsv4_reference::cache::indexer_cache_write as reference;
use dsv4_reference::cache::kv_cache::RowBytes;
use dsv4_runtime::HostTensor;
use rand::Rng;

use crate::case::Draw;
use crate::operator::Relation;
use crate::operator::benchmarks::Whole;
use crate::operator::declaration::{Axis, observed, state};
use crate::operator::fields::{LARGEST_DRAWN, extent, tensor};
use crate::operator::prelude::*;
use crate::operators::cache::paged::{
    self, SlotClass, cut_slots, pages_of, parts_of, rows_of, turn_signs_of_bf16, writers,
};
use crate::operators::formats::hadamard::of_oracle;

/// The operator.
pub struct IndexerCacheWrite;

/// A case: sizes, how keys are stored, slots, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerCacheWriteCase {
    /// Keys to write; 0 is allowed.
    pub num_tokens: usize,
    /// How keys are stored: `e2m1` or `e4m3`.
    pub stored: Stored,
    /// Pages of the store; 0 is allowed.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// The slots that keys are written to.
    pub slots: SlotClass,
    /// Distribution of the keys.
    pub distribution: Distribution,
    /// Their scale.
    pub magnitude: f64,
    /// Least number of unused bytes after each page, as where several layers share the pages of a
    /// pool. With the page's own bytes a multiple of 16.
    pub page_padding: usize,
    /// Seed of the data.
    pub seed: u64,
}

/// Slots that do not exist, and another layer's bytes after each page.
fn plain(
    num_tokens: usize,
    stored: Stored,
    num_pages: usize,
    page_size: usize,
) -> IndexerCacheWriteCase {
    IndexerCacheWriteCase {
        num_tokens,
        stored,
        num_pages,
        page_size,
        slots: SlotClass::Hostile,
        distribution: Distribution::Normal,
        magnitude: 1.0,
        page_padding: page_gap(stored, page_size),
        seed: 1,
    }
}

/// Bytes that pad a page to a multiple of 16.
fn page_gap(stored: Stored, page_size: usize) -> usize {
    let bytes = page_size.saturating_mul(launcher::row_bytes(stored));
    bytes.next_multiple_of(16) - bytes
}

impl IndexerCacheWriteCase {
    fn bytes(&self) -> RowBytes {
        reference::row_bytes(of_oracle(self.stored))
    }

    fn num_slots(&self) -> usize {
        self.num_pages.saturating_mul(self.page_size)
    }

    /// The tensors that are observed from the rows: a name, and that many bytes of each row.
    fn observed(&self) -> [(&'static str, Axis); 2] {
        let codes = ("codes", axis("code_bytes", self.stored.code_bytes()));
        [codes, ("scales", axis("scale_bytes", launcher::SCALE_BYTES))]
    }
}

impl Operator for IndexerCacheWrite {
    type Case = IndexerCacheWriteCase;

    const ABOUT: About = About {
        name: "indexer_cache_write",
        family: Family::Cache,
        summary: "transforms and quantizes the indexer's keys and scatters them to slots of their paged store",
        specification: &["inference 5.4", "inference 7", "inference 7.1", "inference 13.2"],
        paths: &["indexer_cache_write"],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    fn tensors(c: &IndexerCacheWriteCase) -> Specs {
        let tokens = [axis("num_tokens", c.num_tokens), axis("head_dim", DIM)];
        let page_bytes = c.page_size.saturating_mul(launcher::row_bytes(c.stored));
        let pages = [axis("num_pages", c.num_pages), axis("page_bytes", page_bytes)];
        let num_slots = axis("num_slots", c.num_slots());
        let [codes, bytes_of_scales] =
            c.observed().map(|(name, bytes)| observed(name, DType::U8, &[num_slots, bytes]));
        // As a value, a NaN scale equals any NaN.
        let number = observed("scales", DType::F32, &[num_slots, axis("scale", 1)]);
        let scales = if c.stored == Stored::E4m3 { number } else { bytes_of_scales };
        let data = Data { distribution: c.distribution, magnitude: c.magnitude, seed: c.seed };
        let tensors = [
            input("k", DType::Bf16, &tokens).aligned_rows().drawn_as(data).of_any_size(),
            input("slots", DType::I32, &tokens[..1]),
            state("pages", DType::U8, &pages)
                .aligned_rows()
                .with_gap("page_padding", c.page_padding),
            codes.exact(),
            scales.exact(),
        ];
        Specs::new(c.seed, tensors).positive("magnitude", c.magnitude)
    }

    fn check(c: &IndexerCacheWriteCase) -> Result<(), Refused> {
        if c.stored == Stored::Values {
            return refuse("stored", "values: keys are stored as e2m1 or e4m3");
        }
        let page = c.page_size.saturating_mul(launcher::row_bytes(c.stored));
        if c.page_size == 0 || page > 1 << 31 {
            return refuse(
                "page_size",
                format!("{}: a page has rows, and 2^31 bytes at most", c.page_size),
            );
        }
        if !c.page_padding.saturating_add(page).is_multiple_of(16) {
            let reason =
                format!("{} and a page's {page} bytes must be a multiple of 16", c.page_padding);
            return refuse("page_padding", reason);
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerCacheWriteCase> {
        let [tokens, pages] = profile.of([[70, 6], [200, 12], [3000, 60usize]]);
        let stored = select(vec![Stored::E2m1, Stored::E4m3]);
        let page_size = select(vec![1usize, 2, 3, 7, 32, 64]);
        let shape =
            (extent(tokens, 16), stored, 1..=pages, page_size, select(SlotClass::ALL.to_vec()));
        let more_page_padding = prop_oneof![Just(0usize), Just(32usize), Just(19008usize)];
        (shape, more_page_padding, Data::strategy(-40..=40))
            .prop_map(
                |((num_tokens, stored, num_pages, page_size, slots), more_page_padding, data)| {
                    let num_pages = num_pages
                        .min((LARGEST_DRAWN / (page_size * launcher::row_bytes(stored))).max(1));
                    let page_padding = page_gap(stored, page_size) + more_page_padding;
                    let Data { distribution, magnitude, seed } = data;
                    let plain = plain(num_tokens, stored, num_pages, page_size);
                    IndexerCacheWriteCase {
                        slots,
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

    fn typical() -> Vec<IndexerCacheWriteCase> {
        vec![plain(9, Stored::E2m1, 3, 4), plain(9, Stored::E4m3, 3, 4)]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerCacheWriteCase> {
        let (e2m1, e4m3) = (Stored::E2m1, Stored::E4m3);
        let scattered = |case| IndexerCacheWriteCase { slots: SlotClass::Scattered, ..case };
        // A page of one layer among pages of others, with their bytes in between.
        let pooled = |case: IndexerCacheWriteCase| {
            let page_padding = case.page_padding + 19008 + 1152;
            IndexerCacheWriteCase { page_padding, ..case }
        };
        let mut cases = vec![
            plain(0, e2m1, 2, 4),
            plain(5, e4m3, 0, 64),
            plain(1, e4m3, 1, 1),
            // One more than a block takes, and one less.
            plain(33, e2m1, 2, 32).then(scattered),
            plain(31, e4m3, 2, 32).then(scattered),
            plain(40, e2m1, 3, 32).then(pooled),
            plain(40, e4m3, 3, 32).then(pooled),
            // Around the floors of the scales.
            plain(17, e2m1, 5, 7).then(scattered).with(|case| case.magnitude = 2f64.powi(-125)),
            plain(17, e4m3, 5, 7).then(scattered).with(|case| case.magnitude = 2f64.powi(-13)),
        ];
        if profile == Profile::Full {
            cases.extend([e2m1, e4m3].map(|stored| plain(30_000, stored, 1000, 32).then(pooled)));
        }
        cases
    }

    fn amend(c: &IndexerCacheWriteCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.seed, "before");
        let before: Vec<u8> =
            (0..c.num_slots() * c.bytes().page_bytes(1)).map(|_| draw.rng().random()).collect();
        let shape = tensors.tensor("pages").shape.clone();
        let bytes = pages_of(c.bytes(), c.page_size, &before);
        tensors.put("pages", HostTensor { dtype: DType::U8, shape, bytes });
        tensors.set_i32s("slots", &draw_slots(c));
        Ok(())
    }

    /// Codes and scales are fully determined: all precisions give one result.
    fn forward(c: &IndexerCacheWriteCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let pages = t.host().tensor("pages");
        let inputs = reference::Inputs {
            k: t.f64("k")?,
            slots: t.host().i32s("slots"),
            stored: of_oracle(c.stored),
            page_size: c.page_size,
            pages: pages.bytes.clone(),
        };
        let written = reference::forward(&inputs)?.into_iter().map(f64::from).collect();
        Ok(Named::new().with("pages", tensor(written, &pages.shape)?))
    }

    fn launch(
        c: &IndexerCacheWriteCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.stored, c.page_size))
    }

    /// The pages as tensors of bytes, each with a row for each slot.
    fn observe(
        c: &IndexerCacheWriteCase,
        _: &Tensors,
        written: &Tensors,
        _: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let mut parts =
            parts_of(c.bytes(), c.page_size, &c.observed(), &written.tensor("pages").bytes);
        if c.stored == Stored::E4m3 {
            let (_, scales) = &mut parts[1];
            (scales.dtype, scales.shape) = (DType::F32, vec![c.num_slots(), 1]);
        }
        parts
    }

    fn invariant(_: &IndexerCacheWriteCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &IndexerCacheWriteCase, batches: &mut Batches<'_, Self>) {
        let observed: Vec<&'static str> = batches.observed();
        batches.rows_with("num_tokens", |tensors, cut| {
            cut_slots(tensors, c.num_slots(), &observed, cut)
        });
    }

    fn laws(c: &IndexerCacheWriteCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 || c.num_slots() == 0 {
            return;
        }
        laws.permute("tokens may be permuted", "num_tokens");
        page_law(c, laws);
        if c.num_slots() > 1 {
            independence_law(c, laws);
        }
    }

    /// The keys of a long prefill, and those of a step of 128 sequences.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let shapes =
            if on_gpu(environment) { &[(1, 1), (128, 4), (32768, 1024)][..] } else { &[(64, 2)] };
        let of_shape = |&(num_tokens, num_pages): &(usize, usize)| {
            [Stored::E2m1, Stored::E4m3].map(|stored| benchmark(num_tokens, num_pages, stored))
        };
        shapes.iter().flat_map(of_shape).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["32768x128 page 32 e2m1", "32768x128 page 32 e4m3"],
            json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": 64}),
            json!({"num_tokens": 32, "num_pages": 2}),
        )]
    }
}

fn benchmark(num_tokens: usize, num_pages: usize, stored: Stored) -> Benchmark<IndexerCacheWrite> {
    let page_padding = 19008;
    let case = plain(num_tokens, stored, num_pages, 32);
    let case = IndexerCacheWriteCase { slots: SlotClass::Scattered, page_padding, ..case };
    let name = format!(
        "{num_tokens}x128 page 32 {}",
        if stored == Stored::E2m1 { "e2m1" } else { "e4m3" }
    );
    Benchmark {
        amend: |c: &IndexerCacheWriteCase, tensors| {
            tensors.put("slots", HostTensor::from_i32(&[c.num_tokens], &draw_slots(c)))
        },
        sampled: keep_writers,
        rows: 2,
        // Seven steps, a product, amax and rounding for each element.
        flops: (10 * num_tokens * DIM) as f64,
        ..Benchmark::new(Direction::Forward, name, case, "num_pages").streaming(&[], 0.0)
    }
}

fn draw_slots(c: &IndexerCacheWriteCase) -> Vec<i32> {
    c.slots.draw(c.seed, c.num_tokens, c.num_slots())
}

fn keep_writers(
    whole: &Whole<'_, IndexerCacheWrite>,
    c: &mut IndexerCacheWriteCase,
    tensors: &mut Tensors,
) {
    c.num_tokens = paged::keep_writers(whole.rows, c.page_size, "k", tensors);
}

/// All observed tensors are equal in the slots that the law binds.
fn equal_where(bound: impl Fn(usize) -> bool + Clone + 'static) -> [(&'static str, Relation); 2] {
    ["codes", "scales"].map(|name| (name, Relation::EqualRows(Rc::new(bound.clone()))))
}

/// Pages only determine where a key is stored.
fn page_law(c: &IndexerCacheWriteCase, laws: &mut Laws<'_, IndexerCacheWrite>) {
    let rows = rows_of(c.bytes(), c.page_size, &laws.tensors().tensor("pages").bytes);
    let shape = vec![c.num_slots(), c.bytes().page_bytes(1)];
    let pages = HostTensor { dtype: DType::U8, shape, bytes: pages_of(c.bytes(), 1, &rows) };
    let page_padding = page_gap(c.stored, 1);
    laws.law(
        "pages only place keys",
        |v| {
            v.case = IndexerCacheWriteCase {
                num_pages: c.num_slots(),
                page_size: 1,
                page_padding,
                ..c.clone()
            };
            v.tensors.put("pages", pages);
        },
        equal_where(|_| true),
    );
}

/// Other values in one key change no other key, and no slot that no token writes.
fn independence_law(c: &IndexerCacheWriteCase, laws: &mut Laws<'_, IndexerCacheWrite>) {
    let middle = c.num_tokens / 2;
    let writers = writers(c.num_slots(), &laws.tensors().i32s("slots"));
    laws.law(
        "independence",
        |v| turn_signs_of_bf16(&mut v.tensors, "k", DIM, middle),
        equal_where(move |slot| writers[slot] != Some(middle)),
    );
}
