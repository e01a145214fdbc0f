//! Rows of tokens and rows of experts (inference 11.3): the fields, maps and random data that
//! `moe_expand` and `moe_reduce` share.

use dsv4_kernels::experts::moe_expand::MAX_TOPK;

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::fields::{elements, extent};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::experts::moe_map::{Experts, MoeMapCase};
use crate::operators::lists::Hostile;

/// Sizes, slots and types: fields that are flattened into cases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeRows {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Slots of a token, up to 32.
    pub topk: usize,
    /// Experts, up to 512.
    pub num_experts: usize,
    /// The alignment of an expert's rows.
    pub alignment: usize,
    /// Positions beyond the necessary rows.
    pub spare_positions: usize,
    /// Rows that this rank received, the first ones: the slots of all others have no row here.
    /// Absent: all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<usize>,
    /// The experts in the slots.
    pub experts: Experts,
    /// Channels.
    pub hidden_size: usize,
    /// Type of all rows.
    pub dtype: Float,
    /// The given rows.
    #[serde(flatten)]
    pub data: Data,
}

impl MoeRows {
    /// bf16, with slots without a row and rows without a slot.
    pub(crate) fn plain([num_tokens, topk, num_experts]: [usize; 3], hidden_size: usize) -> Self {
        let (experts, dtype, data) = (Experts::Hostile, Float::Bf16, Data::normal(1.0));
        Self {
            num_tokens,
            topk,
            num_experts,
            alignment: 4,
            spare_positions: 3,
            received: None,
            experts,
            hidden_size,
            dtype,
            data,
        }
    }

    pub(crate) fn strategy(profile: Profile) -> BoxedStrategy<Self> {
        let [tokens, channels] = profile.of([[24usize, 600], [60, 1500], [300, 8000]]);
        let topk = prop_oneof![3 => Just(6usize), 2 => 1..=9usize, 1 => 1..=MAX_TOPK];
        let extents =
            (extent(tokens, 4), topk, 1..=24usize, select(vec![1usize, 4, 8, 37]), 0..200usize);
        let channels = prop_oneof![2 => extent(channels, 128), 2 => 1..=80usize];
        // Of 16 ranks one has no row, and two have some.
        let received =
            prop_oneof![13 => Just(None), 1 => Just(Some(0)), 2 => (1..40usize).prop_map(Some)];
        (
            extents,
            (select(Experts::ALL.to_vec()), received),
            channels,
            Float::strategy(),
            Data::strategy(-20..=20),
        )
            .prop_map(
                |(
                    (num_tokens, topk, num_experts, alignment, spare_positions),
                    (experts, received),
                    hidden_size,
                    dtype,
                    data,
                )| {
                    let all = Self {
                        num_tokens,
                        topk,
                        num_experts,
                        alignment,
                        spare_positions,
                        received: None,
                        experts,
                        hidden_size,
                        dtype,
                        data,
                    };
                    let received = received.filter(|&rows| rows <= all.num_positions());
                    Self { received, ..all }
                },
            )
            .boxed()
    }

    /// Layouts, paths and edge cases that both operators have.
    pub(crate) fn edge_cases() -> Vec<Self> {
        let with = |experts, rows| Self { experts, ..rows };
        vec![
            Self::plain([0, 6, 8], 64),
            with(Experts::Distinct, Self::plain([1, 6, 8], 128)),
            with(Experts::None, Self::plain([3, 2, 4], 40)),
            with(Experts::One, Self::plain([9, 3, 5], 33)),
            // Several pieces of a row, with either kind of access; more slots than a thread has in
            // flight.
            Self::plain([3, 6, 4], 1032),
            Self { dtype: Float::F32, ..Self::plain([3, 6, 4], 261) },
            with(Experts::Repeated, Self::plain([4, 17, 5], 72)),
            // Rows without a slot after the last expert: more than a block reads.
            Self { spare_positions: 300, alignment: 37, ..Self::plain([4, 2, 6], 16) },
            // Ranks with tokens, of which one received no row and one the first few.
            Self { received: Some(0), ..with(Experts::Distinct, Self::plain([5, 3, 8], 24)) },
            Self { received: Some(0), dtype: Float::F32, ..Self::plain([5, 3, 8], 9) },
            Self {
                received: Some(6),
                dtype: Float::F32,
                ..with(Experts::Repeated, Self::plain([7, 3, 4], 40))
            },
        ]
    }

    /// Only the slots.
    fn map(&self) -> MoeMapCase {
        let Self { num_tokens, topk, num_experts, alignment, spare_positions, experts, .. } = *self;
        MoeMapCase {
            num_tokens,
            topk,
            num_experts,
            alignment,
            spare_positions,
            experts,
            seed: self.data.seed,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Refused> {
        if !(1..=512).contains(&self.num_experts) {
            return refuse("num_experts", format!("{} must be 1 to 512", self.num_experts));
        }
        MoeMapCase::check_alignment(self.alignment)?;
        let all = self.map().num_positions();
        match self.received {
            Some(rows) if rows > all => {
                refuse("received", format!("{rows} is more than all {all} rows"))
            }
            _ => Ok(()),
        }
    }

    /// Rows of experts on this rank.
    fn num_positions(&self) -> usize {
        self.received.unwrap_or_else(|| self.map().num_positions())
    }

    pub(crate) fn of_tokens(&self) -> [Axis; 2] {
        [axis("num_tokens", self.num_tokens), axis("hidden_size", self.hidden_size).not_empty()]
    }

    pub(crate) fn of_positions(&self) -> [Axis; 2] {
        [axis("num_positions", self.num_positions()), self.of_tokens()[1]]
    }

    pub(crate) fn of_slots(&self) -> [Axis; 2] {
        [self.of_tokens()[0], axis("topk", self.topk).multiples(1, MAX_TOPK)]
    }

    /// The maps.
    pub(crate) fn tensors(&self) -> [TensorSpec; 2] {
        [
            input("token_topk_to_pos", DType::I32, &self.of_slots()).rows(),
            input("pos_to_token", DType::I32, &self.of_positions()[..1]),
        ]
    }

    /// Sets the maps, and NaN in what no kernel may read. These are the rows of `rows` without a
    /// slot, and the values of `slots` without a row. Hostile slots use every encoding of "no
    /// expert".
    pub(crate) fn amend(
        &self,
        tensors: &mut Tensors,
        rows: &'static str,
        slots: &'static str,
    ) -> OracleResult<()> {
        self.set_maps(tensors)?;
        let (tokens, positions) = (tensors.i32s("pos_to_token"), tensors.i32s("token_topk_to_pos"));
        let width = self.hidden_size.max(1);
        tensors.edit(rows, |all| {
            let unused = all.chunks_mut(width).zip(&tokens).filter(|(_, token)| **token < 0);
            unused.for_each(|(row, _)| row.fill(f64::NAN));
        });
        tensors.edit(slots, |all| {
            let unused = all.iter_mut().zip(&positions).filter(|(_, position)| **position < 0);
            unused.for_each(|(number, _)| *number = f64::NAN);
        });
        if self.experts == Experts::Hostile {
            let values = [-1, tokens.len() as i32, i32::MIN, i32::MAX];
            let mut nowhere = Hostile::new(self.data.seed, "token_topk_to_pos", &values);
            tensors.edit_i32s("token_topk_to_pos", |all| {
                let unused = all.iter_mut().filter(|position| **position < 0);
                unused.for_each(|position| *position = nowhere.take());
            });
        }
        Ok(())
    }

    /// Replaces the maps of a smaller case by those of this case.
    pub(crate) fn set_maps(&self, tensors: &mut Tensors) -> OracleResult<()> {
        let (maps, rows) = (self.map().maps()?, self.num_positions());
        let numbers = |name| -> OracleResult<Vec<i32>> {
            let numbers = elements(maps.tensor(name)?)?;
            Ok(numbers.into_iter().map(|number| number as i32).collect())
        };
        let (mut positions, mut tokens) = (numbers("token_topk_to_pos")?, numbers("pos_to_token")?);
        tokens.truncate(rows);
        let elsewhere = |position: &&mut i32| **position >= rows as i32;
        positions.iter_mut().filter(elsewhere).for_each(|position| *position = -1);
        let slots = [self.num_tokens, self.topk];
        tensors.put("token_topk_to_pos", HostTensor::from_i32(&slots, &positions));
        tensors.put("pos_to_token", HostTensor::from_i32(&[rows], &tokens));
        Ok(())
    }

    /// Whether other batches can be made of the case: where a rank received some of the rows, a
    /// larger batch may need more.
    pub(crate) fn is_whole(&self) -> bool {
        self.received.is_none_or(|rows| rows == 0)
    }

    /// Rows of experts for the tokens of a cut: those of each token, in another order. `rows` are
    /// the given rows, none if empty. Returns pairs of a row of the case and its row of the batch.
    pub(crate) fn cut(
        &self,
        tensors: &mut Tensors,
        rows: &'static str,
        cut: &Cut,
    ) -> Vec<(usize, usize)> {
        let batch = Self { num_tokens: cut.order.len(), ..self.clone() };
        let count = batch.num_positions();
        let old = tensors.i32s("pos_to_token").len();
        let (mut tokens, mut sources) = (vec![-1; count], vec![0; count]);
        let (mut next, mut pairs) = (0, Vec::new());
        let topk = self.topk.max(1);
        tensors.edit_i32s("token_topk_to_pos", |slots| {
            for (slot, position) in slots.iter_mut().enumerate() {
                let Some(source) = usize::try_from(*position).ok().filter(|&at| at < old) else {
                    // Beyond the case's rows, but not beyond those of a larger batch.
                    *position = -1;
                    continue;
                };
                (tokens[next], sources[next]) = ((slot / topk) as i32, source);
                if !cut.is_padding(slot / topk) {
                    pairs.push((source, next));
                }
                *position = next as i32;
                next += 1;
            }
        });
        tensors.put("pos_to_token", HostTensor::from_i32(&[count], &tokens));
        if let Some(tensor) = tensors.get(rows).filter(|_| old > 0) {
            let gathered = permuted_along(tensor, 0, &sources);
            tensors.put(rows, gathered);
        }
        pairs
    }

    /// The model's shapes, or a small one for the emulator: tokens, slots, experts, channels.
    pub(crate) fn benchmarks(environment: &Environment) -> Vec<Self> {
        let large = [([32_768, 6, 256], 7168), ([32_768, 6, 256], 4096), ([4096, 6, 384], 7168)];
        let gpu = [&large[..], &[([128, 6, 384], 7168), ([1, 6, 384], 7168)]].concat();
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[([8, 6, 8], 256)] };
        let alignment = if on_gpu(environment) { 128 } else { 4 };
        let rows = |&(extents, hidden_size): &([usize; 3], usize)| {
            let plain = Self::plain(extents, hidden_size);
            Self { alignment, spare_positions: 0, experts: Experts::Distinct, ..plain }
        };
        shapes.iter().map(rows).collect()
    }

    /// The name of a benchmark.
    pub(crate) fn name(&self) -> String {
        format!(
            "{}x{} to {} of {} experts bf16",
            self.num_tokens, self.hidden_size, self.topk, self.num_experts
        )
    }

    /// Bytes of the rows without a slot where every slot has a row, as in a benchmark. No kernel
    /// reads them.
    pub(crate) fn unread_bytes(&self) -> f64 {
        let rows = self.num_positions() - self.num_tokens * self.topk;
        (rows * self.hidden_size * self.dtype.dtype().size()) as f64
    }

    /// The same with at most as many tokens as a benchmark draws.
    pub(crate) fn shortened(&self) -> Self {
        let tokens = (DRAWN / self.hidden_size.max(1) / self.topk.max(1)).max(1);
        Self { num_tokens: self.num_tokens.min(tokens), ..self.clone() }
    }
}
