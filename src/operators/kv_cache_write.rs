//! `kv_cache_write` (inference 5.4, 8.3, 13.2): `kernels/cuda/kv_cache_write.cu` against
//! `reference/src/kv_cache_write.rs`.
//!
//! The bytes of a row follow from bf16 inputs without an intermediate rounding: the oracle's runs are all alike,
//! every budget is zero, and every byte must be the oracle's.

use dsv4_kernels::kv_cache as launched;
use dsv4_kernels::kv_cache_write as launcher;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Role, RuntimeError};
use dsv4_reference::kv_cache::{RowFormat, SCALE_BYTES, SCALE_GROUP, e4m3_value};
use dsv4_reference::kv_cache_write as reference;
use dsv4_reference::precision::Precision;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::{LARGEST_DRAWN, deterministic, extent, layout, magnitude, oracle_error, permuted, scaled, widened};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    GoldenCase, KernelRun, KernelTensor, Law, ModuleSpecification, Operator, OracleTensor, Prepared, Profile, Relation,
    Side,
};
use crate::record::OperatorRecord;

const NAME: &str = "kv_cache_write";
/// Where amax is lifted to (inference 5.4).
const AMAX_FLOOR: f64 = 1e-4;

/// The operator.
pub struct KvCacheWrite;

/// Where tokens are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotClass {
    /// Consecutive slots from 0 on: what a prefill writes.
    Consecutive,
    /// Distinct slots anywhere.
    Scattered,
    /// The same, every third token having none, or one beyond the cache, or `i32::MIN` or `i32::MAX`.
    Hostile,
}

/// What the rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contents {
    /// Numbers of the case's distribution and magnitude.
    Drawn,
    /// Numbers midway between two codes.
    Ties,
    /// Groups of zeros, of -0, below the floor, at and just above 448 times a power of two, of subnormal and of the
    /// largest bf16 numbers.
    Corners,
    /// Each group's largest is another bf16 number, spread over all of them.
    Amax,
    /// Some channels are NaN or infinite.
    NotFinite,
}

/// A case: extents, format, slots, contents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvCacheWriteCase {
    /// Rows to write; 0 is legal.
    pub num_tokens: usize,
    /// e4m3 channels: a multiple of 64 up to 512; 0 is a cache of bf16.
    pub nope_dim: usize,
    /// bf16 channels: a multiple of 8, at least 8.
    pub rope_dim: usize,
    /// Pages of the cache; 0 is legal.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Where tokens are written.
    pub slots: SlotClass,
    /// What the rows hold.
    pub contents: Contents,
    /// Distribution of drawn contents.
    pub distribution: Distribution,
    /// Scale of drawn contents.
    pub magnitude: f64,
    /// Elements after each row of kv, which belong to nobody; a multiple of 8.
    pub padding: usize,
    /// Bytes after each page, which belong to nobody; with the page's own a multiple of 16.
    pub page_padding: usize,
    /// Seed of the data.
    pub seed: u64,
}

impl KvCacheWriteCase {
    fn plain(num_tokens: usize, format: launched::RowFormat, num_pages: usize, page_size: usize) -> Self {
        let launched::RowFormat { nope_dim, rope_dim } = format;
        Self {
            num_tokens,
            nope_dim,
            rope_dim,
            num_pages,
            page_size,
            slots: SlotClass::Hostile,
            contents: Contents::Drawn,
            distribution: Distribution::Normal,
            magnitude: 1.0,
            padding: 0,
            page_padding: page_padding(format, page_size),
            seed: 1,
        }
    }

    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn launched_format(&self) -> launched::RowFormat {
        launched::RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn num_slots(&self) -> usize {
        self.num_pages * self.page_size
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if !self.nope_dim.is_multiple_of(SCALE_GROUP) || self.nope_dim > SCALE_GROUP * SCALE_BYTES {
            return refuse("nope_dim", format!("{} must be a multiple of 64 up to 512", self.nope_dim));
        }
        if self.rope_dim == 0 || !self.rope_dim.is_multiple_of(8) {
            return refuse("rope_dim", format!("{} must be a multiple of 8", self.rope_dim));
        }
        if self.page_size == 0 {
            return refuse("page_size", "0: a page needs rows".into());
        }
        if !(self.magnitude.is_finite() && self.magnitude > 0.0) {
            return refuse("magnitude", format!("{} must be finite and above 0", self.magnitude));
        }
        if !self.padding.is_multiple_of(8) {
            return refuse("padding", format!("{} must be a multiple of 8: rows are 16-byte aligned", self.padding));
        }
        let page = self.page_size.saturating_mul(self.launched_format().row_bytes());
        if !(page.saturating_add(self.page_padding)).is_multiple_of(16) {
            let reason = format!("{} and a page's {page} bytes must be a multiple of 16", self.page_padding);
            return refuse("page_padding", reason);
        }
        let bytes = self.num_pages.saturating_mul(page.saturating_add(self.page_padding));
        if bytes.max(self.num_tokens.saturating_mul(self.format().head_dim() + self.padding)) > 1 << 31 {
            return refuse("num_pages", "the case has more than 2^31 elements in one tensor".into());
        }
        Ok(())
    }
}

/// Bytes that bring a page to the stride of the model's caches, or of whole 16 bytes where the page's data are none.
fn page_padding(format: launched::RowFormat, page_size: usize) -> usize {
    format.page_stride(page_size).next_multiple_of(16) - page_size * format.row_bytes()
}

/// What a case's record may say that ran.
const PATHS: &[&str] = &["kv_cache_write"];

impl Operator for KvCacheWrite {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "quantises rows of K = V and scatters them to slots of the paged cache".into(),
            specification: list(&["inference 5.4", "inference 8.3", "inference 13.2"]),
            kernel_file: "kernels/cuda/kv_cache_write.cu".into(),
            oracle_file: "reference/src/kv_cache_write.rs".into(),
            dtypes: list(&["kv bf16", "codes e4m3", "scales e8m0", "slots i32"]),
            axes: list(&[
                "extents",
                "row format",
                "page size",
                "page stride",
                "slot classes",
                "ties and corners of the formats",
                "distribution",
                "magnitude",
                "strides",
            ]),
            has_backward: false,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let (tokens, pages): (usize, usize) = match profile {
            Profile::Quick => (40, 6),
            Profile::Ci => (90, 12),
            Profile::Full => (700, 40),
        };
        let format = prop::sample::select(vec![
            launched::RowFormat::MODEL,
            launched::RowFormat::bf16(512),
            launched::RowFormat { nope_dim: 64, rope_dim: 64 },
            launched::RowFormat { nope_dim: 128, rope_dim: 32 },
        ]);
        let page_size = prop::sample::select(vec![1usize, 2, 3, 7, 32, 64]);
        let shape = (extent(tokens, 8), format, 1..=pages, page_size);
        let slots = prop::sample::select(vec![SlotClass::Consecutive, SlotClass::Scattered, SlotClass::Hostile]);
        let contents = prop::sample::select(vec![
            Contents::Drawn,
            Contents::Drawn,
            Contents::Ties,
            Contents::Corners,
            Contents::Amax,
            Contents::NotFinite,
        ]);
        let paddings = (prop_oneof![2 => Just(0usize), 1 => Just(24usize)], prop_oneof![Just(0usize), Just(32usize)]);
        let data = (prop::sample::select(Distribution::ALL.to_vec()), magnitude(-40..=40), 0..1000u64);
        (shape, slots, contents, paddings, data)
            .prop_map(|(shape, slots, contents, (padding, more_page_padding), data)| {
                let (num_tokens, format, num_pages, page_size) = shape;
                let (distribution, magnitude, seed) = data;
                let num_pages = num_pages.min((LARGEST_DRAWN / (page_size * format.row_bytes())).max(1));
                let plain = KvCacheWriteCase::plain(num_tokens, format, num_pages, page_size);
                let page_padding = plain.page_padding + more_page_padding;
                let case =
                    KvCacheWriteCase { slots, contents, distribution, magnitude, padding, page_padding, seed, ..plain };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let plain = KvCacheWriteCase::plain;
        let model = launched::RowFormat::MODEL;
        let small = launched::RowFormat { nope_dim: 64, rope_dim: 64 };
        let mut cases = vec![
            plain(0, model, 2, 4),
            plain(5, model, 0, 64),
            KvCacheWriteCase { contents: Contents::Ties, ..plain(9, model, 3, 4) },
            KvCacheWriteCase { contents: Contents::Corners, slots: SlotClass::Scattered, ..plain(11, model, 7, 2) },
            KvCacheWriteCase { contents: Contents::NotFinite, ..plain(9, model, 12, 1) },
            KvCacheWriteCase { contents: Contents::Amax, slots: SlotClass::Consecutive, ..plain(885, small, 28, 32) },
            plain(17, launched::RowFormat::bf16(512), 2, 16),
        ];
        if profile == Profile::Full {
            cases.extend([plain(4000, model, 90, 64), plain(3000, launched::RowFormat::bf16(512), 20, 256)]);
        }
        cases.iter().map(|case| Case::new(NAME, case)).collect()
    }

    fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Quick => 16,
            Profile::Ci => 40,
            Profile::Full => 120,
        }
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: KvCacheWriteCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)))
    }

    /// None: the golden set's implementation keeps its cache unquantised and without pages.
    fn golden(&self, _: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        Ok(Vec::new())
    }
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: KvCacheWriteCase,
    kv: HostTensor,
    slots: Vec<i32>,
    /// What the rows held before, slot by slot: data, then scales.
    before: Vec<u8>,
}

impl Inputs {
    fn draw(case: KvCacheWriteCase) -> Self {
        let mut draw = Draw::new(case.seed, "before");
        let before = (0..case.num_slots() * case.launched_format().row_bytes()).map(|_| draw.rng().random()).collect();
        let kv = HostTensor::from_f64(DType::Bf16, &[case.num_tokens, case.format().head_dim()], &draw_rows(&case));
        Self { kv, slots: draw_slots(&case), before, case }
    }

    /// The pages before the write, one behind the other.
    fn pages(&self) -> Vec<u8> {
        let format = self.case.format();
        let data_bytes = format.data_bytes();
        let mut pages = vec![0; self.before.len()];
        for (slot, row) in self.before.chunks(self.case.launched_format().row_bytes()).enumerate() {
            let (data, scales) = row.split_at(data_bytes);
            let (data_at, scales_at) = format.place(slot, self.case.page_size);
            pages[data_at..data_at + data.len()].copy_from_slice(data);
            pages[scales_at..scales_at + scales.len()].copy_from_slice(scales);
        }
        pages
    }

    fn reference(&self) -> Result<reference::Inputs, candle_core::Error> {
        Ok(reference::Inputs {
            kv: widened(&self.kv)?,
            slots: self.slots.clone(),
            format: self.case.format(),
            page_size: self.case.page_size,
            pages: self.pages(),
        })
    }

    /// Pages as three tensors of bytes, each with a row for each slot.
    fn rows(&self, pages: &[u8]) -> Vec<KernelTensor> {
        let format = self.case.format();
        let (nope, data) = (format.nope_dim, format.data_bytes());
        let parts = [("codes", 0, nope), ("rope", nope, data - nope), ("scales", data, format.scale_bytes())];
        let present = parts.into_iter().filter(|&(_, _, bytes)| bytes > 0);
        let tensor = |(name, from, bytes): (&'static str, usize, usize)| {
            let row = |slot: usize| {
                let (data_at, scales_at) = format.place(slot, self.case.page_size);
                let start = if from < data { data_at + from } else { scales_at };
                &pages[start..start + bytes]
            };
            let all = (0..self.case.num_slots()).flat_map(|slot| row(slot).iter().copied()).collect();
            deterministic(name, HostTensor { dtype: DType::U8, shape: vec![self.case.num_slots(), bytes], bytes: all })
        };
        present.map(tensor).collect()
    }

    /// For each slot the token that is written there.
    fn writers(&self) -> Vec<Option<usize>> {
        let mut writers = vec![None; self.case.num_slots()];
        for (token, &slot) in self.slots.iter().enumerate() {
            if let Some(writer) = usize::try_from(slot).ok().and_then(|slot| writers.get_mut(slot)) {
                *writer = Some(token);
            }
        }
        writers
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }

    fn names(&self) -> Vec<&'static str> {
        if self.case.nope_dim > 0 { vec!["codes", "rope", "scales"] } else { vec!["rope"] }
    }

    fn equal_where(&self, bound: impl Fn(usize) -> bool + Clone + 'static) -> Vec<(&'static str, Relation)> {
        let relation = |name| (name, Relation::EqualRows(Box::new(bound.clone())));
        self.names().into_iter().map(relation).collect()
    }

    fn permutation_law(&self) -> Law {
        let order = permutation(self.case.seed, self.case.num_tokens);
        let variant = self.with(|v| {
            v.kv = permuted(&self.kv, &order);
            v.slots = order.iter().map(|&token| self.slots[token]).collect();
        });
        Law { name: "tokens may be permuted", variant, relations: self.equal_where(|_| true) }
    }

    /// Pages only say where a row is.
    fn page_law(&self) -> Law {
        let variant = self.with(|v| {
            v.case.num_pages = self.case.num_slots();
            v.case.page_size = 1;
            v.case.page_padding = page_padding(self.case.launched_format(), 1);
        });
        Law { name: "pages only place rows", variant, relations: self.equal_where(|_| true) }
    }

    /// Other numbers in one token change no other token's row.
    fn independence_law(&self) -> Law {
        let middle = self.case.num_tokens / 2;
        let variant = self.with(|v| {
            let row = self.kv.shape[1] * 2;
            // The sign bit of every bf16 of the token.
            v.kv.bytes[middle * row..(middle + 1) * row].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
        });
        let writers = self.writers();
        let relations = self.equal_where(move |slot| writers[slot] != Some(middle));
        Law { name: "independence", variant, relations }
    }

    /// Rows whose groups are scaled by what they hold, and stay numbers when they are four times as large: their
    /// codes do not change, since their scale does.
    fn scale_law(&self) -> Option<Law> {
        let nope = self.case.nope_dim;
        let width = self.case.format().head_dim();
        let kv = self.kv.to_f64();
        let free = |token: usize| {
            kv[token * width..token * width + nope].chunks(SCALE_GROUP).all(|group| {
                let amax = group.iter().map(|x| x.abs()).fold(0.0, f64::max);
                group.iter().all(|x| x.is_finite()) && amax >= AMAX_FLOOR && amax < 2f64.powi(125)
            })
        };
        let bound: Vec<bool> = self.writers().into_iter().map(|writer| writer.is_some_and(free)).collect();
        let law = |variant| Law {
            name: "a power of two moves the scale alone",
            variant,
            relations: vec![("codes", Relation::EqualRows(Box::new(move |slot| bound[slot])))],
        };
        let some = nope > 0 && self.writers().into_iter().flatten().any(free);
        some.then(|| law(self.with(|v| v.kv = scaled(&self.kv, 4.0))))
    }
}

fn draw_slots(case: &KvCacheWriteCase) -> Vec<i32> {
    let mut draw = Draw::new(case.seed, "slots");
    let num_slots = case.num_slots() as i32;
    let hostile = [-1, num_slots, i32::MIN, i32::MAX, num_slots.saturating_add(5), -num_slots.max(1)];
    let mut order: Vec<i32> = (0..num_slots).collect();
    if case.slots != SlotClass::Consecutive {
        order.shuffle(draw.rng());
    }
    let slot = |token: usize| {
        if case.slots == SlotClass::Hostile && token % 3 == 1 {
            hostile[token / 3 % hostile.len()]
        } else {
            order.get(token).copied().unwrap_or(-1)
        }
    };
    (0..case.num_tokens).map(slot).collect()
}

fn draw_rows(case: &KvCacheWriteCase) -> Vec<f64> {
    let format = case.format();
    let width = format.head_dim();
    let mut draw = Draw::new(case.seed, "kv");
    let mut rows = draw.values(case.distribution, case.num_tokens, width, case.magnitude);
    if case.contents == Contents::NotFinite {
        let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        for value in rows.iter_mut() {
            if draw.rng().random_ratio(1, 150) {
                *value = bad[draw.rng().random_range(0..bad.len())];
            }
        }
    }
    let mut number = 0;
    for row in rows.chunks_mut(width) {
        for group in row[..format.nope_dim].chunks_mut(SCALE_GROUP) {
            match case.contents {
                Contents::Ties => fill_with_ties(group, &mut draw),
                Contents::Corners => fill_with_corner(group, number),
                Contents::Amax => {
                    // The step is prime to the count of positive bf16: it reaches all of them, far apart.
                    let bits = ((number as u64 * 10007 + case.seed) % 0x7f80).max(1) as u32;
                    let amax = f64::from(f32::from_bits(bits << 16));
                    group.iter_mut().enumerate().for_each(|(i, x)| *x = -amax / (1 + i) as f64);
                }
                Contents::Drawn | Contents::NotFinite => {}
            }
            number += 1;
        }
    }
    rows
}

/// The largest code, so that the scale is known, and midpoints of neighbouring codes.
fn fill_with_ties(group: &mut [f64], draw: &mut Draw) {
    let scale = 2f64.powi(draw.rng().random_range(-12..=12));
    for (channel, x) in group.iter_mut().enumerate() {
        let code: u8 = draw.rng().random_range(0..0x7e);
        let middle = (e4m3_value(code) + e4m3_value(code + 1)) / 2.0;
        let sign = if draw.rng().random() { 1.0 } else { -1.0 };
        *x = scale * if channel == 0 { 448.0 } else { sign * middle };
    }
}

/// Groups at the ends of the formats, in turn.
fn fill_with_corner(group: &mut [f64], number: usize) {
    let power = 2f64.powi(number as i32 % 20 - 10);
    match number % 9 {
        0 => group.fill(0.0),
        1 => group.fill(-0.0),
        // Below the floor; the least subnormal code of the floor's scale is 2^-31.
        2 => group.iter_mut().enumerate().for_each(|(i, x)| *x = 1e-5 * (-0.6f64).powi(i as i32)),
        3 => group[7] = -448.0 * power,
        // The bf16 number that follows 448.
        4 => group[9] = 450.0 * power,
        5 => group.iter_mut().enumerate().for_each(|(i, x)| *x = 2f64.powi(-133) * (i as f64 - 30.0)),
        6 => group[63] = f64::from(f32::from_bits(0xff7f_0000)),
        // The two bf16 numbers around the floor.
        7 => group.fill(f64::from(f32::from_bits(0x38d1_0000))),
        _ => group.fill(f64::from(f32::from_bits(0x38d2_0000))),
    }
    if matches!(number % 9, 3 | 4) {
        group.iter_mut().for_each(|x| *x = x.clamp(-450.0 * power, 450.0 * power));
    }
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    fn case(&self) -> Option<Case> {
        Some(Case::new(NAME, &self.case))
    }

    /// Nothing is rounded but the result itself: all precisions give one answer.
    fn oracle(&self, _: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        let run = || reference::forward(&self.reference()?);
        let pages = run().map_err(|e| oracle_error(NAME, e))?;
        let exact = |t: KernelTensor| OracleTensor {
            name: t.name,
            side: Side::Forward,
            shape: t.tensor.shape.clone(),
            values: t.tensor.to_f64(),
        };
        Ok(self.rows(&pages).into_iter().map(exact).collect())
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let case = &self.case;
        let mut arena = DeviceArena::new(device, contract);
        let kv = arena.upload("kv", &self.kv, &layout(&self.kv.shape, case.padding), Role::Input)?;
        let slots = arena.input("slots", &HostTensor::from_i32(&[case.num_tokens], &self.slots))?;
        let format = case.launched_format();
        let shape = vec![case.num_pages, case.page_size * format.row_bytes()];
        let before = HostTensor { dtype: DType::U8, shape, bytes: self.pages() };
        let pages = arena.upload("cache", &before, &layout(&before.shape, case.page_padding), Role::InPlace)?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let cache = launched::Cache { pages: &pages, page_size: case.page_size };
            let arguments = launcher::Forward { kv: &kv, slots: &slots, format, cache };
            paths.push(launcher::forward(device, &arguments)?.to_owned());
            Ok(())
        })?;
        Ok(KernelRun { tensors: self.rows(&arena.download(&pages)?.bytes), violations, paths })
    }

    fn laws(&self) -> Vec<Law> {
        if self.case.num_tokens == 0 || self.case.num_slots() == 0 {
            return Vec::new();
        }
        let mut laws = vec![self.permutation_law(), self.page_law()];
        if self.case.num_slots() > 1 {
            laws.push(self.independence_law());
        }
        laws.extend(self.scale_law());
        laws
    }
}
