//! `decode_attention`: latency-bound at batch 1, compute-bound at batch 128; the lists of the two production models. A
//! call is both launches, the merge included.

use std::collections::BTreeMap;

use anyhow::Result;
use dsv4_kernels::decode_attention::{self as launcher, Implementation};
use dsv4_kernels::kv_cache::{Cache, RowFormat};
use dsv4_kernels::kv_cache_write;
use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, Role, RuntimeError, TensorView};
use dsv4_parity::case::Draw;
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::decode_attention as reference;
use dsv4_reference::kv_cache as rows;
use rand::Rng;

use crate::data::{Lab, Normal, normal_f32, sample, sets};
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepared, Rate};

/// Tokens and heads that are compared with the oracle after timing.
const SAMPLED_TOKENS: usize = 4;
const SAMPLED_HEADS: usize = 8;
/// Rows of a page of the window and of compressed entries.
const PAGE_SIZES: [usize; 2] = [256, 64];

/// One token a request, with a sink; every slot valid, the slots of a list distinct.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    num_heads: usize,
    /// Slots in the window and among the compressed entries.
    topk: [usize; 2],
    format: RowFormat,
    implementation: Implementation,
}

impl Shape {
    fn name(self) -> String {
        let Self { batch, num_heads, topk: [window, compressed], format, implementation } = self;
        let storage = if format.nope_dim > 0 { "fp8" } else { "bf16" };
        let portable = if implementation == Implementation::Portable { " portable" } else { "" };
        format!("b{batch} H{num_heads} w{window}+{compressed} {storage}{portable}")
    }

    fn head_dim(self) -> usize {
        self.format.head_dim()
    }

    fn softmax_scale(self) -> f32 {
        (self.head_dim() as f32).sqrt().recip()
    }

    /// Rows of a store: every request has its own window and, among the entries of its context, selected ones.
    fn num_slots(self, store: usize) -> usize {
        let of_request = if store == 0 { self.topk[0] } else { 4 * self.topk[1] };
        (self.batch * of_request).next_multiple_of(PAGE_SIZES[store])
    }

    /// Two products of 2·H·slots·D FLOP for each token. q, out, lse and the lists once; every listed row once.
    fn work(self) -> Work {
        let slots = self.batch * (self.topk[0] + self.topk[1]);
        let heads = self.batch * self.num_heads;
        Work {
            operator: "decode_attention".into(),
            bytes: (slots * (self.format.row_bytes() + 4) + heads * (4 * self.head_dim() + 4)) as f64,
            flops: 4.0 * (slots * self.num_heads * self.head_dim()) as f64,
        }
    }

    fn benchmark(self) -> Benchmark {
        Benchmark {
            group: "decode_attention_forward",
            name: self.name(),
            work: self.work(),
            rate: Rate::Flops,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self)?))),
        }
    }

    /// `[batch, 1, topk]`: distinct slots of the request's own stretch of the store, in random order.
    fn indices(self, store: usize, set: usize) -> Vec<i32> {
        let mut draw = Draw::new(set as u64, if store == 0 { "window indices" } else { "compressed indices" });
        let of_request = if store == 0 { self.topk[0] } else { 4 * self.topk[1] };
        let mut indices = Vec::with_capacity(self.batch * self.topk[store]);
        for request in 0..self.batch {
            let first = (request * of_request) as i32;
            let mut slots: Vec<i32> = (first..first + of_request as i32).collect();
            for slot in 0..self.topk[store] {
                slots.swap(slot, draw.rng().random_range(slot..of_request));
            }
            indices.extend_from_slice(&slots[..self.topk[store]]);
        }
        indices
    }
}

/// The lists of the two production models at three batches.
pub fn production() -> Vec<Benchmark> {
    let mut shapes = Vec::new();
    for (num_heads, compressed) in [(64, 512), (128, 1024)] {
        let model = |batch| Shape {
            batch,
            num_heads,
            topk: [128, compressed],
            format: RowFormat::MODEL,
            implementation: Implementation::Auto,
        };
        shapes.extend([1, 32, 128].map(model));
        shapes.push(Shape { format: RowFormat::bf16(512), ..model(128) });
        shapes.push(Shape { implementation: Implementation::Portable, ..model(128) });
    }
    shapes.into_iter().map(Shape::benchmark).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    let implementation = Implementation::Portable;
    vec![Shape { batch: 1, num_heads: 16, topk: [64, 64], format: RowFormat::MODEL, implementation }.benchmark()]
}

/// One store of a set: the rows before they were quantised, and the lists.
struct Store {
    kv: Normal,
    pages: TensorView,
    indices: Vec<i32>,
    indices_view: TensorView,
}

struct Set {
    q: Normal,
    stores: [Store; 2],
    out: TensorView,
    lse: TensorView,
}

struct Buffers<'d> {
    shape: Shape,
    sink: HostTensor,
    sink_view: TensorView,
    workspace: TensorView,
    num_blocks: usize,
    implementation: Implementation,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl Store {
    /// Rows of normal deviates, written by the operator that writes them in production.
    fn place<'d>(
        lab: &Lab<'d>,
        memory: &mut DeviceArena<'d>,
        shape: Shape,
        set: usize,
        store: usize,
    ) -> Result<Self, RuntimeError> {
        let (num_slots, page_size, format) = (shape.num_slots(store), PAGE_SIZES[store], shape.format);
        let kv = lab.normal(memory, ["window", "compressed"][store], set, &[num_slots, shape.head_dim()])?;
        let extents = [num_slots / page_size, page_size * format.row_bytes()];
        let padded = Layout::padded(&extents, format.page_stride(page_size) - extents[1]);
        let pages = memory.allocate("pages", DType::U8, &extents, &padded, Role::Output)?;
        let slots: Vec<i32> = (0..num_slots as i32).collect();
        let slots = lab.upload(memory, "slots", &HostTensor::from_i32(&[num_slots], &slots))?;
        let cache = Cache { pages: &pages, page_size };
        let arguments = kv_cache_write::Forward { kv: &kv.view, slots: &slots, format, cache };
        kv_cache_write::forward(lab.device, &arguments)?;
        let indices = shape.indices(store, set);
        let list = HostTensor::from_i32(&[shape.batch, 1, shape.topk[store]], &indices);
        Ok(Self { kv, pages, indices_view: lab.upload(memory, "indices", &list)?, indices })
    }
}

impl Set {
    fn place<'d>(lab: &Lab<'d>, memory: &mut DeviceArena<'d>, shape: Shape, set: usize) -> Result<Self, RuntimeError> {
        let heads = [shape.batch, 1, shape.num_heads, shape.head_dim()];
        Ok(Self {
            q: lab.normal(memory, "q", set, &heads)?,
            stores: [Store::place(lab, memory, shape, set, 0)?, Store::place(lab, memory, shape, set, 1)?],
            out: memory.output("out", DType::Bf16, &heads)?,
            lse: memory.output("lse", DType::F32, &heads[..3])?,
        })
    }

    fn inputs<'a>(&'a self, shape: Shape, sink: &'a TensorView) -> launcher::Inputs<'a> {
        let store = |number: usize| launcher::Store {
            cache: Cache { pages: &self.stores[number].pages, page_size: PAGE_SIZES[number] },
            indices: &self.stores[number].indices_view,
            length: None,
        };
        launcher::Inputs {
            q: &self.q.view,
            format: shape.format,
            window: store(0),
            compressed: Some(store(1)),
            sink: Some(sink),
            softmax_scale: shape.softmax_scale(),
        }
    }
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape) -> Result<Self> {
        let mut memory = lab.arena();
        let sink = normal_f32("sink", shape.num_heads, 0.0);
        let sink_view = lab.upload(&mut memory, "sink", &sink)?;
        let number = sets(lab.device, shape.work().bytes);
        let sets: Vec<Set> =
            (0..number).map(|set| Set::place(lab, &mut memory, shape, set)).collect::<Result<_, _>>()?;
        let num_blocks = launcher::natural_blocks(lab.device);
        let implementation = launcher::resolve(lab.device, shape.format, shape.num_heads, shape.implementation)?;
        let bytes = launcher::workspace_bytes(&sets[0].inputs(shape, &sink_view), num_blocks, implementation)?;
        let workspace = memory.workspace("workspace", bytes)?;
        Ok(Self { shape, sink, sink_view, workspace, num_blocks, implementation, sets, _memory: memory })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { out, lse, .. } = &self.sets[set];
        let inputs = self.sets[set].inputs(self.shape, &self.sink_view);
        let arguments = launcher::Forward {
            inputs,
            num_blocks: self.num_blocks,
            implementation: self.implementation,
            out,
            lse,
            workspace: &self.workspace,
        };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }

    /// Sampled heads of sampled tokens.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let Shape { batch, num_heads, .. } = self.shape;
        let (tokens, heads) = (sample(batch, SAMPLED_TOKENS), sample(num_heads, SAMPLED_HEADS));
        let all: Vec<usize> = tokens.iter().flat_map(|t| heads.iter().map(move |h| t * num_heads + h)).collect();
        let inputs = self.oracle_inputs(lab, set, &tokens, &heads, &all).map_err(|e| format!("{e:#}"))?;
        let Set { out, lse, .. } = &self.sets[set];
        let download = |view, inner| lab.download_rows(view, inner, &all).map_err(|e| e.to_string());
        let written = [
            Written { name: "out", stored: DType::Bf16, values: download(out, 1)? },
            Written { name: "lse", stored: DType::F32, values: download(lse, 0)? },
        ];
        agree(&written, |rounding| {
            let outputs = reference::forward(&inputs, rounding)?;
            Ok(vec![outputs.out, outputs.lse])
        })
    }
}

impl Buffers<'_> {
    /// The sampled problem by itself: only its heads, and only the rows that its tokens name, quantised by the oracle.
    fn oracle_inputs(
        &self,
        lab: &Lab<'_>,
        set: usize,
        tokens: &[usize],
        heads: &[usize],
        all: &[usize],
    ) -> Result<reference::Inputs> {
        let RowFormat { nope_dim, rope_dim } = self.shape.format;
        let format = rows::RowFormat { nope_dim, rope_dim };
        let store = |number: usize| -> Result<reference::Store> {
            let Store { kv, indices, .. } = &self.sets[set].stores[number];
            let topk = self.shape.topk[number];
            let listed: Vec<usize> =
                tokens.iter().flat_map(|t| &indices[t * topk..(t + 1) * topk]).map(|&index| index as usize).collect();
            let mut place: BTreeMap<usize, i32> = listed.iter().map(|&slot| (slot, 0)).collect();
            place.values_mut().zip(0..).for_each(|(place, number)| *place = number);
            let slots: Vec<usize> = place.keys().copied().collect();
            let values = lab.rows(kv, 1, &slots)?;
            let encoded = values.chunks(format.head_dim()).map(|row| format.encode(row));
            let pages = encoded.flat_map(|(data, scales)| data.into_iter().chain(scales)).collect();
            let indices = listed.iter().map(|slot| place[slot]).collect();
            Ok(reference::Store { pages, page_size: 1, indices, topk, length: None })
        };
        let sinks = self.sink.to_f64();
        let sinks: Vec<f64> = heads.iter().map(|&head| sinks[head]).collect();
        let extents = [tokens.len(), 1, heads.len(), format.head_dim()];
        Ok(reference::Inputs {
            q: tensor(lab.rows(&self.sets[set].q, 1, all)?, &extents)?,
            format,
            window: store(0)?,
            compressed: Some(store(1)?),
            sink: Some(tensor(sinks, &[heads.len()])?),
            softmax_scale: f64::from(self.shape.softmax_scale()),
            split: self.split(tokens, heads),
        })
    }

    /// The schedule's cuts of the sampled tokens, head by head.
    fn split(&self, tokens: &[usize], heads: &[usize]) -> reference::Split {
        let Shape { batch, num_heads, topk, .. } = self.shape;
        let spread = launcher::spread([batch, 1, num_heads], &topk, self.num_blocks, self.implementation);
        let tiles: usize = topk.iter().map(|slots| slots.div_ceil(launcher::TILE_SLOTS)).sum();
        let blocks = num_heads.div_ceil(spread.heads_per_block);
        let stretch = (batch * blocks * tiles).div_ceil(spread.num_blocks);
        let cuts_of = |token: usize, head: usize| {
            let before = (token * blocks + head / spread.heads_per_block) * tiles;
            (1..tiles).filter(|tile| (before + tile).is_multiple_of(stretch)).collect()
        };
        let cuts = tokens.iter().flat_map(|&t| heads.iter().map(move |&h| cuts_of(t, h))).collect();
        reference::Split { tile_slots: launcher::TILE_SLOTS, unit_heads: 1, cuts }
    }
}
