//! `moe_map` (inference 11.3): `kernels/cuda/experts/moe_map.cu` against
//! `reference/src/experts/moe_map.rs`.
//!
//! Integers with one right result: every one must equal the oracle's.

use dsv4_kernels::experts::moe_map as launcher;
use dsv4_reference::experts::moe_map as reference;
use rand::Rng;

use crate::operator::fields::{extent, tensor};
use crate::operator::prelude::*;
use crate::operators::lists::Hostile;

/// The operator.
pub struct MoeMap;

/// The experts in the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Experts {
    /// Any experts, distinct within a token if enough exist.
    Distinct,
    /// Any experts, also repeated within a token.
    Repeated,
    /// Some are -1, beyond the experts, `i32::MIN` or `i32::MAX`. Between others are whole tokens
    /// of -1.
    Hostile,
    /// All slots have the same expert.
    One,
    /// Mostly the first expert; most other slots have none.
    Skewed,
    /// No expert in any slot.
    None,
}

impl Experts {
    /// All of them.
    pub(crate) const ALL: [Self; 6] =
        [Self::Distinct, Self::Repeated, Self::Hostile, Self::One, Self::Skewed, Self::None];
}

/// A case: sizes and data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeMapCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Slots of a token, up to 32.
    pub topk: usize,
    /// Experts, up to 512.
    pub num_experts: usize,
    /// The alignment of an expert's rows, up to 1024.
    pub alignment: usize,
    /// Positions beyond the necessary rows.
    pub spare_positions: usize,
    /// The experts in the slots.
    pub experts: Experts,
    /// Seed of the data.
    pub seed: u64,
}

fn plain(num_tokens: usize, topk: usize, num_experts: usize, alignment: usize) -> MoeMapCase {
    let experts = Experts::Hostile;
    MoeMapCase { num_tokens, topk, num_experts, alignment, spare_positions: 5, experts, seed: 1 }
}

impl MoeMapCase {
    pub(crate) fn check_alignment(alignment: usize) -> Result<(), Refused> {
        match alignment {
            1..=launcher::MAX_ALIGNMENT => Ok(()),
            other => {
                refuse("alignment", format!("{other} must be 1 to {}", launcher::MAX_ALIGNMENT))
            }
        }
    }

    fn num_slots(&self) -> usize {
        self.num_tokens.saturating_mul(self.topk)
    }

    pub(crate) fn num_positions(&self) -> usize {
        launcher::positions(self.num_slots(), self.num_experts, self.alignment)
            .saturating_add(self.spare_positions)
    }
}

impl Operator for MoeMap {
    type Case = MoeMapCase;

    const ABOUT: About = About {
        name: "moe_map",
        family: Family::Experts,
        summary: "where each slot of the router goes when rows are sorted by expert, and back",
        specification: &["inference 11.3"],
        paths: &["moe_map_small", "moe_map_count", "moe_map_place"],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    fn tensors(c: &MoeMapCase) -> Specs {
        let tokens = axis("num_tokens", c.num_tokens);
        let topk = axis("topk", c.topk).multiples(1, launcher::MAX_TOPK);
        let experts = axis("num_experts", c.num_experts).multiples(1, launcher::MAX_EXPERTS);
        let ends = axis("num_experts_and_one", c.num_experts + 1);
        let positions = axis("num_positions", c.num_positions());
        let exact = |name, axes: &[_]| output(name, DType::I32, axes).exact();
        let tensors = [
            input("topk_indices", DType::I32, &[tokens, topk]).rows(),
            exact("counts", &[experts]),
            exact("expert_offsets", &[ends]),
            exact("token_topk_to_pos", &[tokens, topk]).rows(),
            exact("pos_to_expert", &[positions]),
            exact("pos_to_token", &[positions]),
            exact("pos_to_token_topk", &[positions]),
        ];
        Specs::new(c.seed, tensors)
    }

    fn check(c: &MoeMapCase) -> Result<(), Refused> {
        MoeMapCase::check_alignment(c.alignment)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MoeMapCase> {
        let tokens = profile.of([200usize, 900, 6000]);
        let topk = prop_oneof![2 => Just(6usize), 1 => 1..=8usize, 1 => 1..=launcher::MAX_TOPK];
        let num_experts = prop_oneof![2 => 1..=64usize, 1 => select(vec![256usize, 384, 512])];
        let alignment = select(vec![1usize, 2, 8, 16, 64, 128, 37]);
        let experts = select(Experts::ALL.to_vec());
        (extent(tokens, 8), topk, num_experts, alignment, 0..40usize, experts, 0..1000u64)
            .prop_map(
                |(num_tokens, topk, num_experts, alignment, spare_positions, experts, seed)| {
                    MoeMapCase {
                        num_tokens,
                        topk,
                        num_experts,
                        alignment,
                        spare_positions,
                        experts,
                        seed,
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MoeMapCase> {
        vec![plain(9, 3, 7, 4)]
    }

    fn edge_cases(profile: Profile) -> Vec<MoeMapCase> {
        let with = |experts| move |case| MoeMapCase { experts, ..case };
        let mut cases = vec![
            plain(0, 6, 8, 128),
            plain(1, 6, 256, 128).then(with(Experts::Distinct)),
            plain(70, 6, 5, 16).then(with(Experts::One)),
            plain(11, 2, 6, 8).then(with(Experts::None)),
            plain(100, 6, 384, 8).then(with(Experts::Skewed)),
            plain(40, 32, 512, 1).then(with(Experts::Repeated)),
            plain(5, 1, 3, 128).with(|case| case.spare_positions = 3000),
            // The most slots of one launch; one more; several rounds and chunks, the last one
            // partial.
            plain(2048, 2, 33, 2),
            plain(4097, 1, 33, 2),
            plain(700, 6, 3, 64).then(with(Experts::One)),
            plain(1500, 6, 512, 8),
            plain(1800, 6, 5, 16).then(with(Experts::Skewed)),
        ];
        if profile == Profile::Full {
            let model = plain(32_768, 6, 256, 128).then(with(Experts::Distinct));
            cases.extend([
                model,
                plain(50_000, 6, 384, 128),
                plain(60_000, 6, 384, 128).then(with(Experts::One)),
            ]);
        }
        cases
    }

    fn amend(c: &MoeMapCase, tensors: &mut Tensors) -> OracleResult<()> {
        tensors.set_i32s("topk_indices", &draw_experts(c));
        Ok(())
    }

    fn forward(c: &MoeMapCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, c.num_experts, c.alignment, c.num_positions())
    }

    fn workspaces(
        c: &MoeMapCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let bytes = launcher::workspace_bytes(c.num_slots(), c.num_experts);
        Ok(if bytes > 0 { vec![("workspace", bytes)] } else { Vec::new() })
    }

    fn launch(c: &MoeMapCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.alignment))
    }

    /// Where a row goes depends on all rows, by definition.
    fn batches(_: &MoeMapCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &MoeMapCase, laws: &mut Laws<'_, Self>) {
        let experts = c.num_experts as i32;
        if laws.tensors().i32s("topk_indices").iter().any(|expert| !(0..experts).contains(expert)) {
            let renamed = |expert: &mut i32| {
                *expert = if (0..experts).contains(expert) { *expert } else { i32::MIN }
            };
            let change = |v: &mut Variant<Self>| {
                v.tensors.edit_i32s("topk_indices", |all| all.iter_mut().for_each(renamed))
            };
            laws.law(
                "what names no expert may be any number",
                change,
                laws.all(Relation::Times(1.0)),
            );
        }
        if c.alignment > 1 && c.num_tokens > 0 {
            let counts = [("counts", Relation::Times(1.0))];
            laws.law("counts know nothing of the alignment", |v| v.case.alignment = 1, counts);
        }
    }

    /// The model's layers: for a prefill, and for decode steps.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(32_768, 256), (32_768, 384), (4096, 384), (128, 384), (1, 384)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(900, 64)] };
        let benchmark = |&(num_tokens, num_experts): &(usize, usize)| {
            let case = MoeMapCase {
                spare_positions: 0,
                experts: Experts::Distinct,
                ..plain(num_tokens, 6, num_experts, 128)
            };
            let name = format!("{num_tokens} tokens of {num_experts} experts");
            // A position depends on all tokens, so the sample is all of them.
            let benchmark =
                Benchmark::new(Direction::Forward, name, case, "num_tokens").streaming(&[], 0.0);
            Benchmark { rows: num_tokens, ..benchmark }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["32768 tokens of 256 experts"],
            json!({"num_tokens": 21, "num_experts": 40}),
            json!({}),
        )]
    }
}

impl MoeMapCase {
    /// The maps of its slots, computed by the oracle.
    pub(crate) fn maps(&self) -> OracleResult<Named> {
        let experts: Vec<f64> = draw_experts(self).into_iter().map(f64::from).collect();
        let slots =
            Named::new().with("topk_indices", tensor(experts, &[self.num_tokens, self.topk])?);
        reference::forward(&slots, self.num_experts, self.alignment, self.num_positions())
    }
}

/// The experts in the slots, for every kind.
pub(crate) fn draw_experts(c: &MoeMapCase) -> Vec<i32> {
    let mut draw = Draw::new(c.seed, "topk_indices");
    let experts = c.num_experts as i32;
    let values = [-1, experts, i32::MIN, i32::MAX, experts + 3, -7];
    let mut hostile = Hostile::new(c.seed, "topk_indices", &values);
    let one = draw.rng().random_range(0..experts);
    let mut of_token = 0;
    let slot = |slot: usize| {
        let (token, place) = (slot / c.topk, slot % c.topk);
        let drawn = draw.rng().random_range(0..experts);
        if place == 0 {
            of_token = drawn;
        }
        match c.experts {
            Experts::Distinct => (of_token + (place as i32 * 7) % experts.max(8)) % experts,
            Experts::Repeated => drawn,
            Experts::Hostile if token % 5 == 3 => -1,
            Experts::Hostile if draw.rng().random_ratio(1, 4) => hostile.take(),
            Experts::Hostile => drawn,
            Experts::One => one,
            Experts::Skewed if draw.rng().random_ratio(1, 20) => drawn,
            Experts::Skewed => 0,
            Experts::None => hostile.take(),
        }
    };
    (0..c.num_slots()).map(slot).collect()
}
