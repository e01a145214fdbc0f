//! How long the attention of several ranks takes, next to its kernels alone and to its collectives
//! alone (training 10).
//!
//! Each rank has a part of the tokens, zigzag, and the lists of a causal prefill. Six pieces of
//! work are timed, each recorded as a graph where the device can: the step of ranks, forward and
//! backward; the attention's kernels alone, on the same queries with all keys in place; the
//! all-gather of keys and the reduce-scatter of their fp32 gradient alone. A sample is the time of
//! the slowest rank. The step's results must have the bits of the kernels alone.

use std::time::Duration;

use dsv4_kernels::attention::sparse_attention::{self, KeyGradients};
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::memory::Memory;
use dsv4_kernels::model::tap::Untapped;
use dsv4_kernels::parallel::attention::{self as step, Keys};
use dsv4_kernels::parallel::{Partition, Shards};
use dsv4_runtime::{DType, Device, Result, RuntimeError, TensorView, Views, World};
use half::bf16;
use rand::Rng as _;
use serde::Serialize;

use crate::case::Draw;
use crate::record::Spread;

/// Width of queries and keys: that of the model.
pub const HEAD_DIM: usize = 512;
/// Random values of a tensor; longer ones repeat them.
const VALUES: usize = 1 << 20;
/// Replays of a sample, where work is recorded.
const REPLAYS: u32 = 10;
/// Rows whose bits are compared.
const COMPARED: usize = 64;
const NAME: &str = "ranks";

/// What is timed.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Shape {
    /// Ranks.
    pub ranks: usize,
    /// Tokens of all ranks together: queries, and as many keys.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Slots of a list.
    pub topk: usize,
}

/// The times of no sample.
const UNTIMED: Spread =
    Spread { median_us: f64::NAN, least_us: f64::NAN, most_us: f64::NAN, samples: 0 };

/// One direction of the attention of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `forward` or `backward`.
    pub direction: &'static str,
    /// What is timed.
    pub shape: Shape,
    /// The step of ranks.
    pub step: Spread,
    /// The attention's kernels alone, of a rank's queries.
    pub kernels: Spread,
    /// The large collectives of the step alone.
    pub collectives: Spread,
    /// Bytes of them that a rank receives.
    pub received: u64,
}

impl Row {
    /// Time of the step over that of its kernels.
    pub fn ratio(&self) -> f64 {
        self.step.median_us / self.kernels.median_us
    }

    /// The share of the collectives' time that the step does not take on top of its kernels.
    pub fn hidden(&self) -> f64 {
        let beyond = self.step.median_us - self.kernels.median_us;
        (1.0 - beyond / self.collectives.median_us).clamp(0.0, 1.0)
    }

    /// Bytes a second that a rank receives in the collectives alone.
    pub fn rate(&self) -> f64 {
        self.received as f64 / (self.collectives.median_us * 1e-6)
    }
}

/// Both directions, and what is wrong.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The times.
    pub rows: [Row; 2],
    /// A text for each result of a step that has other bits than the kernels alone.
    pub differences: Vec<String>,
}

/// Times both directions.
///
/// # Errors
/// A shape that the attention rejects, more ranks than the world takes, a device without memory.
pub fn measure(device: &Device, shape: Shape, samples: usize) -> Result<Measured> {
    let of_ranks = device.on_ranks(shape.ranks, None, |device| of_rank(device, shape, samples))?;
    let (of_ranks, differences): (Vec<Samples>, Vec<_>) = of_ranks.into_iter().unzip();
    let slowest = |work: usize| {
        let of = |sample: usize| {
            let times = of_ranks.iter().map(|rank| rank[work][sample]);
            times.max().unwrap_or_default().as_secs_f64() * 1e6
        };
        Spread::of((0..samples).map(of)).unwrap_or(UNTIMED)
    };
    let [forward, attention, gather, backward, gradients, scatter] =
        [0, 1, 2, 3, 4, 5].map(slowest);
    let received = (shape.tokens * HEAD_DIM) as u64 * (shape.ranks as u64 - 1) / shape.ranks as u64;
    let rows = [
        Row {
            direction: "forward",
            shape,
            step: forward,
            kernels: attention,
            collectives: gather,
            received: 2 * received,
        },
        Row {
            direction: "backward",
            shape,
            step: backward,
            kernels: gradients,
            collectives: scatter,
            received: 6 * received,
        },
    ];
    Ok(Measured { rows, differences: differences.concat() })
}

/// The samples of each piece of work.
type Samples = Vec<Vec<Duration>>;

/// The samples of one rank, and its differences.
fn of_rank(device: &Device, shape: Shape, samples: usize) -> Result<(Samples, Vec<String>)> {
    let alone = || RuntimeError::argument(NAME, "device", "it is no rank of a world");
    let world = device.world().ok_or_else(alone)?;
    let mut memory = Memory::new(device);
    let rank = Tensors::new(&mut memory, world, shape)?;
    let timer = Timer { device, world, samples };
    let mut all = Vec::new();
    for work in rank.works() {
        all.push(timer.time(&|| work(device, world))?);
    }
    let mut differences = Vec::new();
    for [own, alone] in [["out", "out alone"], ["dq", "dq alone"]] {
        differences.extend(rank.difference(device, world, [own, alone])?);
    }
    Ok((all, differences))
}

/// A piece of work of a rank.
type Work<'w> = Box<dyn Fn(&Device, &(dyn World + 'static)) -> Result<()> + 'w>;

/// The tensors of a rank.
struct Tensors {
    views: Views,
    step: step::Options,
}

impl Tensors {
    fn new(memory: &mut Memory<'_>, world: &dyn World, shape: Shape) -> Result<Self> {
        let Shape { ranks, tokens, heads, topk } = shape;
        let shards = Shards::new(Partition::Zigzag, ranks, &[tokens])?;
        let (own, rows) = (shards.tokens(world.rank()), shards.rows());
        let queries = [own.len(), heads, HEAD_DIM];
        let per_head = [own.len(), heads];
        let mut views = Views::new();
        for (name, seed) in [("q", 1), ("dout", 2)] {
            views.put(name, random(memory, name, &queries, 10 * world.rank() as u64 + seed)?);
        }
        for name in ["out", "out alone", "dq", "dq alone"] {
            views.put(name, memory.tensor(name, DType::Bf16, &queries)?);
        }
        for name in ["lse", "max_logits"] {
            views.put(name, memory.tensor(name, DType::F32, &per_head)?);
        }
        let keys = random_bytes(tokens * HEAD_DIM, 3);
        let row = |at: i32| &keys[2 * HEAD_DIM * at.max(0) as usize..][..2 * HEAD_DIM];
        let positions = shards.positions(world.rank());
        let own_keys: Vec<u8> = positions.iter().flat_map(|&at| row(at).to_vec()).collect();
        views.put("k", memory.upload("k", DType::Bf16, &[rows, HEAD_DIM], &own_keys)?);
        views.put("all k", memory.upload("all k", DType::Bf16, &[tokens, HEAD_DIM], &keys)?);
        let (positions, lists) = (bytes(&positions), bytes(&causal_lists(own, topk)));
        views.put("positions", memory.upload("positions", DType::I32, &[rows], &positions)?);
        views.put("indices", memory.upload("indices", DType::I32, &[own.len(), topk], &lists)?);
        views.put("dk", memory.tensor("dk", DType::Bf16, &[rows, HEAD_DIM])?);
        views.put("all dk", memory.filled("all dk", DType::F32, &[rows * ranks, HEAD_DIM], 0)?);
        views.put("sum", memory.tensor("sum", DType::F32, &[rows, HEAD_DIM])?);
        views.put("gathered", memory.tensor("gathered", DType::Bf16, &[rows * ranks, HEAD_DIM])?);
        let attention = sparse_attention::Options {
            v_dim: Some(HEAD_DIM),
            softmax_scale: (HEAD_DIM as f32).sqrt().recip(),
            implementation: Implementation::Auto,
            key_gradients: KeyGradients::Atomic,
        };
        let step = step::Options { attention, num_keys: tokens, keys: Keys::Remapped };
        let needed = step::workspace_bytes(&views, &step, ranks)?;
        views.put("workspace", memory.tensor("workspace", DType::U8, &[needed])?);
        Ok(Self { views, step })
    }

    /// Tensors by the names of a launcher.
    fn only(&self, names: &[(&'static str, &'static str)]) -> Views {
        let mut views = self.views.only(&["q", "indices", "lse", "workspace"]);
        for (name, own) in names {
            views.put(name, self.views[own].clone());
        }
        views
    }

    /// The pieces of work, in the order in which they are timed: a backward reads what the forward
    /// before it wrote.
    fn works(&self) -> [Work<'_>; 6] {
        let (options, attention) = (self.step, self.step.attention);
        let parts = [("k", "k"), ("positions", "positions"), ("out", "out")];
        let forward = self.only(&[&parts[..], &[("max_logits", "max_logits")]].concat());
        let gradients = [("dout", "dout"), ("dq", "dq"), ("dk", "dk")];
        let backward = self.only(&[&parts[..], &gradients].concat());
        let all = ("k", "all k");
        let alone = self.only(&[all, ("out", "out alone"), ("max_logits", "max_logits")]);
        let gradients = [("dout", "dout"), ("dq", "dq alone"), ("dk", "all dk keys")];
        let mut views = self.views.clone();
        let of_keys = |view: &TensorView| TensorView {
            shape: vec![options.num_keys, HEAD_DIM],
            ..view.clone()
        };
        views.put("all dk keys", of_keys(&self.views["all dk"]));
        let named = Self { views, step: options };
        let alone_backward = named.only(&[&[all, ("out", "out")][..], &gradients].concat());
        let v = &self.views;
        [
            Box::new(move |device, _| {
                step::forward(device, &forward, &options, &mut Untapped).map(drop)
            }),
            Box::new(move |device, _| {
                sparse_attention::forward(device, &alone, attention).map(drop)
            }),
            Box::new(|_, world| world.all_gather(&v["k"], &v["gathered"])),
            Box::new(move |device, _| {
                step::backward(device, &backward, &options, &mut Untapped).map(drop)
            }),
            Box::new(move |device, _| {
                sparse_attention::backward(device, &alone_backward, attention).map(drop)
            }),
            Box::new(|_, world| {
                world.all_gather(&v["k"], &v["gathered"])?;
                world.reduce_scatter(&v["all dk"], &v["sum"])
            }),
        ]
    }

    /// The first of some rows that has other bits in another tensor.
    fn difference(
        &self,
        device: &Device,
        world: &dyn World,
        [name, alone]: [&str; 2],
    ) -> Result<Option<String>> {
        let (own, alone) = (&self.views[name], &self.views[alone]);
        let tokens = own.shape[0];
        for token in (0..tokens).step_by(tokens.div_ceil(COMPARED).max(1)) {
            let [one, other] = [own, alone].map(|view| device.read(&view.narrow(0, token, 1)?));
            if one? != other? {
                let rank = world.rank();
                return Ok(Some(format!(
                    "`{name}` of token {token} of rank {rank} has other bits than without ranks"
                )));
            }
        }
        Ok(None)
    }
}

/// Times work on a rank; all ranks do the same at the same time.
struct Timer<'t> {
    device: &'t Device,
    world: &'t (dyn World + 'static),
    samples: usize,
}

impl Timer<'_> {
    fn time(&self, work: &dyn Fn() -> Result<()>) -> Result<Vec<Duration>> {
        let backend = self.device.backend();
        // Compiles, and connects the ranks: neither can be recorded.
        work()?;
        backend.synchronize()?;
        match self.device.graphs() {
            Some(recorder) => {
                let recorded = recorder.record(&mut || work())?;
                self.sample(REPLAYS, &|| recorded.launch())
            }
            None => self.sample(1, work),
        }
    }

    fn sample(&self, times: u32, launch: &dyn Fn() -> Result<()>) -> Result<Vec<Duration>> {
        let sample = |_| {
            self.world.barrier()?;
            // Ranks that started apart have met on the device when the clock starts.
            launch()?;
            let backend = self.device.backend();
            let time = backend.time(&mut || (0..times).try_for_each(|_| launch()))?;
            Ok(time / times)
        };
        (0..self.samples).map(sample).collect()
    }
}

/// A tensor of random values of about the size 1.
fn random(memory: &mut Memory<'_>, name: &str, shape: &[usize], seed: u64) -> Result<TensorView> {
    let view = memory.tensor(name, DType::Bf16, shape)?;
    let total = 2 * view.elements();
    let first = random_bytes(VALUES.min(view.elements()), seed);
    let backend = memory.device().backend();
    if !first.is_empty() {
        backend.upload(view.address, &first)?;
    }
    let mut done = first.len();
    while done < total {
        let bytes = done.min(total - done);
        backend.copy(view.address + done as u64, view.address, bytes)?;
        done += bytes;
    }
    Ok(view)
}

/// So many bf16 values; they repeat after [`VALUES`].
fn random_bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut draw = Draw::new(seed, NAME);
    let values: Vec<u8> =
        (0..count.min(VALUES)).flat_map(|_| bf16::from_f64(draw.normal()).to_le_bytes()).collect();
    values.into_iter().cycle().take(if count == 0 { 0 } else { 2 * count }).collect()
}

/// For each token `topk` keys up to its own position; -1 where there are fewer.
fn causal_lists(positions: &[i32], topk: usize) -> Vec<i32> {
    let mut draw = Draw::new(4, NAME);
    let list = |&position: &i32| -> Vec<i32> {
        let seen = position as usize + 1;
        let slot = |slot: usize| match seen <= topk {
            true => {
                if slot < seen {
                    slot as i32
                } else {
                    -1
                }
            }
            false => draw.rng().random_range(0..seen) as i32,
        };
        (0..topk).map(slot).collect()
    };
    positions.iter().flat_map(list).collect()
}

fn bytes(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}
