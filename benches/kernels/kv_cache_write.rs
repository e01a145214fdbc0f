//! `kv_cache_write`: memory-bound; the rows of a long prefill, scattered over the cache.

use anyhow::Result;
use dsv4_kernels::kv_cache::{Cache, RowFormat};
use dsv4_kernels::kv_cache_write as launcher;
use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, Role, RuntimeError, TensorView};
use dsv4_parity::case::Draw;
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::kv_cache as reference;
use rand::seq::SliceRandom;

use crate::data::{Lab, Normal, sample, sets};
use crate::session::{Benchmark, Prepared, Rate};

/// Rows that are compared with the oracle after timing.
const SAMPLED_TOKENS: usize = 32;

/// `num_tokens` rows to distinct slots in random order of a cache that holds just as many.
#[derive(Clone, Copy)]
struct Shape {
    num_tokens: usize,
    page_size: usize,
    format: RowFormat,
}

impl Shape {
    fn name(self) -> String {
        let storage = if self.format.nope_dim > 0 { "fp8" } else { "bf16" };
        format!("{}x{} page {} {storage}", self.num_tokens, self.format.head_dim(), self.page_size)
    }

    /// Each row read in bf16 and written as it is stored, with its slot; amax, product, rounding and a comparison
    /// for each quantised channel.
    fn work(self) -> Work {
        let row = 2 * self.format.head_dim() + self.format.row_bytes() + 4;
        Work {
            operator: "kv_cache_write".into(),
            bytes: (self.num_tokens * row) as f64,
            flops: 4.0 * (self.num_tokens * self.format.nope_dim) as f64,
        }
    }

    fn benchmark(self) -> Benchmark {
        Benchmark {
            group: "kv_cache_write_forward",
            name: self.name(),
            work: self.work(),
            rate: Rate::Bytes,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self)?))),
        }
    }

    fn slots(self, set: usize) -> Vec<i32> {
        let mut slots: Vec<i32> = (0..self.num_tokens as i32).collect();
        slots.shuffle(Draw::new(set as u64, "slots").rng());
        slots
    }
}

/// Rows of a prefill, in the model's format and in bf16.
pub fn production() -> Vec<Benchmark> {
    let fp8 = |num_tokens| Shape { num_tokens, page_size: 64, format: RowFormat::MODEL };
    let shapes = [fp8(4096), fp8(65536), Shape { format: RowFormat::bf16(512), ..fp8(65536) }];
    shapes.into_iter().map(Shape::benchmark).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    vec![Shape { num_tokens: 64, page_size: 16, format: RowFormat::MODEL }.benchmark()]
}

struct Set {
    kv: Normal,
    slots: Vec<i32>,
    slots_view: TensorView,
    pages: TensorView,
}

struct Buffers<'d> {
    shape: Shape,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape) -> Result<Self> {
        let mut memory = lab.arena();
        let number = sets(lab.device, shape.work().bytes);
        let sets = (0..number).map(|set| Set::place(lab, &mut memory, shape, set)).collect::<Result<_, _>>()?;
        Ok(Self { shape, sets, _memory: memory })
    }
}

impl Set {
    fn place<'d>(lab: &Lab<'d>, memory: &mut DeviceArena<'d>, shape: Shape, set: usize) -> Result<Self, RuntimeError> {
        let Shape { num_tokens, page_size, format } = shape;
        let slots = shape.slots(set);
        let pages = [num_tokens / page_size, page_size * format.row_bytes()];
        let padded = Layout::padded(&pages, format.page_stride(page_size) - pages[1]);
        Ok(Self {
            kv: lab.normal(memory, "kv", set, &[num_tokens, format.head_dim()])?,
            slots_view: lab.upload(memory, "slots", &HostTensor::from_i32(&[num_tokens], &slots))?,
            slots,
            pages: memory.allocate("cache", DType::U8, &pages, &padded, Role::Output)?,
        })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { kv, slots_view, pages, .. } = &self.sets[set];
        let Shape { page_size, format, .. } = self.shape;
        let cache = Cache { pages, page_size };
        let arguments = launcher::Forward { kv: &kv.view, slots: slots_view, format, cache };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }

    /// Every byte of sampled rows.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let Set { kv, slots, pages, .. } = &self.sets[set];
        let Shape { num_tokens, page_size, format } = self.shape;
        let RowFormat { nope_dim, rope_dim } = format;
        let oracle = reference::RowFormat { nope_dim, rope_dim };
        let mut compared = 0;
        for token in sample(num_tokens, SAMPLED_TOKENS) {
            let row = lab.rows(kv, 1, &[token]).map_err(|e| e.to_string())?;
            let slot = slots[token] as usize;
            let page = pages.address + (slot / page_size) as u64 * pages.strides[0] as u64;
            let (data_at, scales_at) = oracle.place(slot % page_size, page_size);
            let (data, scales) = oracle.encode(&row);
            for (at, expected) in [(data_at, data), (scales_at, scales)] {
                let mut written = vec![0; expected.len()];
                let address = page + at as u64;
                lab.device.backend().download(address, &mut written).map_err(|e| e.to_string())?;
                if written != expected {
                    return Err(format!("the row of token {token} in slot {slot} is not the oracle's"));
                }
                compared += expected.len() as u64;
            }
        }
        Ok(compared)
    }
}
