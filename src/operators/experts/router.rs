//! `router` (inference 10, training 11.4): `kernels/cuda/experts/router.cu` against
//! `reference/src/experts/router.rs`.
//!
//! The choice of a learned router depends on scores that kernels round. So the inputs are drawn
//! such that chosen and rejected scores differ by more than any rounding, or are equal bit for bit.
//! Then the ids have one right answer, ties included.

use dsv4_kernels::experts::router as launcher;
use dsv4_reference::experts::router as reference;
use rand::Rng;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::lists::Hostile;

/// The operator.
pub struct Router;

/// The source of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// The largest biased scores.
    Learned,
    /// A table, by token id. Entries and ids are valid, and an expert may occur twice in a row.
    Hashed,
    /// A table where some entries are not an expert, and some ids are beyond it.
    HashedHostile,
}

/// The contents of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// Values of the case's distribution and magnitude.
    Drawn,
    /// A few small integers: nearly all are ties.
    Ties,
    /// From -20 down to -200; for some tokens all below -100, and occasionally 100.
    Far,
    /// Some are NaN or infinite. For every fifth token all are NaN, or all -infinity.
    NotFinite,
}

/// The contents of the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// Zeros.
    Zero,
    /// Normal values with the magnitude of scores.
    Drawn,
    /// -10 for all: every biased score is negative.
    Negative,
    /// 50 for every expert from the 256th on, if these exist: only these are chosen.
    Last,
    /// Some are NaN or infinite.
    NotFinite,
}

/// A case: sizes, source of the experts, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Experts, up to 512.
    pub num_experts: usize,
    /// Slots of a token, up to 32; for a learned router at most the number of experts.
    pub topk: usize,
    /// The source of a token's experts.
    pub routing: Routing,
    /// Rows of the table. Of a hashed router.
    pub vocab_size: usize,
    /// Whether every third token is padding.
    pub padding_tokens: bool,
    /// The contents of the logits.
    pub logits: Logits,
    /// The contents of the bias. Of a learned router.
    pub bias: Bias,
    /// The sum of a token's weights.
    pub route_scale: f32,
    /// The generated logits.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, num_experts: usize, topk: usize) -> RouterCase {
    RouterCase {
        num_tokens,
        num_experts,
        topk,
        routing: Routing::Learned,
        vocab_size: 0,
        padding_tokens: true,
        logits: Logits::Drawn,
        bias: Bias::Drawn,
        route_scale: 2.5,
        data: Data::normal(3.0),
    }
}

fn hashed(num_tokens: usize, num_experts: usize, topk: usize) -> RouterCase {
    RouterCase {
        routing: Routing::HashedHostile,
        vocab_size: 29,
        ..plain(num_tokens, num_experts, topk)
    }
}

impl RouterCase {
    fn is_learned(&self) -> bool {
        self.routing == Routing::Learned
    }

    fn has_ids(&self) -> bool {
        self.padding_tokens || !self.is_learned()
    }
}

impl Operator for Router {
    type Case = RouterCase;

    const ABOUT: About = About {
        name: "router",
        family: Family::Experts,
        summary: "the experts of each token, by biased scores or by a table, and their weights",
        specification: &["inference 10", "training 11.4"],
        paths: &[
            "router_learned_vector",
            "router_learned_scalar",
            "router_learned_few",
            "router_hashed",
            "router_backward_vector",
            "router_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::SumPlusFloor];

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "sigmoid or softmax scores, and groups of experts",
        "the model scores by the root of softplus and has no groups",
    )];

    const GOLDEN: &'static [&'static str] = &["router_topk", "router_hash"];

    fn tensors(c: &RouterCase) -> Specs {
        let tokens = axis("num_tokens", c.num_tokens);
        let experts = axis("num_experts", c.num_experts).multiples(1, launcher::MAX_EXPERTS);
        let topk = axis("topk", c.topk).multiples(1, launcher::MAX_TOPK);
        let vocabulary = axis("vocab_size", c.vocab_size);
        let token_ids = input("token_ids", DType::I32, &[tokens]);
        let tensors = [
            input("logits", DType::F32, &[tokens, experts]).rows().drawn_as(c.data),
            input("bias", DType::F32, &[experts]).when(c.is_learned()),
            input("tid2eid", DType::I32, &[vocabulary, topk]).rows().when(!c.is_learned()),
            if c.padding_tokens { token_ids.marks_padding() } else { token_ids.when(c.has_ids()) },
            output("topk_indices", DType::I32, &[tokens, topk]).rows().exact(),
            output("topk_weights", DType::F32, &[tokens, topk]).rows(),
            upstream("dtopk_weights", "topk_weights"),
            gradient("dlogits", "logits", DType::F32),
        ];
        Specs::new(c.data.seed, tensors).positive("route_scale", c.route_scale)
    }

    fn check(c: &RouterCase) -> Result<(), Refused> {
        if c.is_learned() && c.topk > c.num_experts {
            return refuse(
                "topk",
                format!("{} of {} experts: there are not so many", c.topk, c.num_experts),
            );
        }
        match (c.is_learned(), c.vocab_size) {
            (true, 1..) => {
                refuse("vocab_size", format!("{}: a learned router has no table", c.vocab_size))
            }
            _ => Ok(()),
        }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<RouterCase> {
        let tokens = profile.of([24usize, 60, 300]);
        let experts = prop_oneof![3 => 1..=64usize, 2 => select(vec![256usize, 384]), 2 => 1..=launcher::MAX_EXPERTS];
        let topk = prop_oneof![2 => Just(6usize), 2 => 1..=8usize, 1 => 1..=launcher::MAX_TOPK];
        let routing = select(vec![
            Routing::Learned,
            Routing::Learned,
            Routing::Hashed,
            Routing::HashedHostile,
        ]);
        let logits = select(vec![
            Logits::Drawn,
            Logits::Drawn,
            Logits::Ties,
            Logits::Far,
            Logits::NotFinite,
        ]);
        let bias =
            select(vec![Bias::Zero, Bias::Drawn, Bias::Negative, Bias::Last, Bias::NotFinite]);
        let scale = select(vec![1.0f32, 1.5, 2.5]);
        let extents = (extent(tokens, 4), experts, topk, 1..80usize);
        (extents, routing, any::<bool>(), logits, bias, scale, Data::strategy(-6..=6))
            .prop_map(|(extents, routing, padding_tokens, logits, bias, route_scale, data)| {
                let (num_tokens, num_experts, topk, vocab_size) = extents;
                let learned = routing == Routing::Learned;
                let topk = if learned { topk.min(num_experts) } else { topk };
                let vocab_size = if learned { 0 } else { vocab_size };
                let plain = plain(num_tokens, num_experts, topk);
                RouterCase {
                    routing,
                    vocab_size,
                    padding_tokens,
                    logits,
                    bias,
                    route_scale,
                    data,
                    ..plain
                }
            })
            .boxed()
    }

    fn typical() -> Vec<RouterCase> {
        vec![
            plain(7, 40, 6),
            plain(5, 37, 3).with(|case| case.padding_tokens = false),
            hashed(8, 21, 4),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<RouterCase> {
        // More tokens than blocks with one token each, and fewer.
        let whole = |num_experts, logits, bias| {
            plain(11, num_experts, 6).with(|case| {
                case.logits = logits;
                case.bias = bias;
                case.padding_tokens = false;
            })
        };
        let few = |topk, num_experts, logits, bias| {
            plain(5, num_experts, topk).with(|case| {
                case.logits = logits;
                case.bias = bias;
            })
        };
        let mut cases = vec![
            plain(0, 16, 4),
            hashed(0, 16, 4),
            plain(1, 1, 1).with(|case| case.padding_tokens = false),
            plain(6, 6, 6),
            hashed(6, 9, 2).with(|case| case.vocab_size = 0),
            hashed(33, 384, 6).with(|case| {
                case.routing = Routing::Hashed;
                case.padding_tokens = false;
            }),
            // Warps that take one step of experts, and a second, a third and a fourth step.
            whole(128, Logits::Drawn, Bias::Drawn),
            whole(129, Logits::Drawn, Bias::Negative),
            whole(256, Logits::Ties, Bias::Zero),
            whole(257, Logits::Drawn, Bias::Last),
            whole(384, Logits::Drawn, Bias::Negative),
            whole(384, Logits::Drawn, Bias::Last),
            whole(511, Logits::NotFinite, Bias::NotFinite),
            whole(512, Logits::Ties, Bias::Negative),
            // As many slots as warps with experts; more equal candidates than a warp has lanes;
            // experts of the last warps.
            few(6, 192, Logits::Drawn, Bias::Drawn),
            few(16, 512, Logits::Drawn, Bias::Zero),
            few(6, 256, Logits::Ties, Bias::Zero),
            few(6, 384, Logits::Drawn, Bias::Negative),
            few(6, 511, Logits::Drawn, Bias::Last),
            few(8, 400, Logits::Far, Bias::Zero),
            few(6, 384, Logits::NotFinite, Bias::NotFinite),
            // As many slots as a warp has lanes.
            few(32, 512, Logits::Drawn, Bias::Drawn),
        ];
        let logits = [Logits::Ties, Logits::Far, Logits::NotFinite];
        cases.extend(logits.map(|logits| {
            plain(20, 24, 6).with(|case| {
                case.logits = logits;
                case.bias = Bias::Zero;
            })
        }));
        cases.extend(logits.map(|logits| hashed(20, 24, 6).with(|case| case.logits = logits)));
        cases.push(plain(9, 30, 6).with(|case| case.bias = Bias::NotFinite));
        if profile == Profile::Full {
            cases.extend([plain(2000, 256, 6), plain(2000, 384, 6), hashed(2000, 384, 6)]);
        }
        cases
    }

    fn amend(c: &RouterCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut padding = vec![false; c.num_tokens];
        tensors.edit_i32s("token_ids", |ids| padding = ids.iter().map(|&id| id < 0).collect());
        let mut logits = draw_logits(c, &tensors.values("logits"));
        if c.is_learned() {
            let bias = draw_bias(c);
            tensors.set("bias", &bias);
            // As stored, which is what the selection reads.
            tensors.set("logits", &logits);
            logits = tensors.values("logits");
            let bias = tensors.values("bias");
            let rows =
                logits.chunks_mut(c.num_experts).zip(&padding).filter(|(_, padding)| !**padding);
            rows.for_each(|(row, _)| make_clear(row, &bias, c.topk));
        } else {
            tensors.set_i32s("tid2eid", &draw_table(c));
            let ids = draw_ids(c, &padding);
            tensors.set_i32s("token_ids", &ids);
            hide_unused_upstreams(c, tensors);
            padding = ids
                .iter()
                .map(|&id| usize::try_from(id).is_ok_and(|id| id < c.vocab_size))
                .map(|real| !real)
                .collect();
        }
        let rows = logits.chunks_mut(c.num_experts).zip(padding).filter(|(_, padding)| *padding);
        rows.for_each(|(row, _)| row.fill(f64::NAN));
        tensors.set("logits", &logits);
        Ok(())
    }

    fn forward(c: &RouterCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(
            &t.named()?,
            c.topk,
            t.scalar("route_scale", c.route_scale.into()),
            rounding,
        )
    }

    fn backward(c: &RouterCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(
            &t.named()?,
            c.topk,
            t.scalar("route_scale", c.route_scale.into()),
            rounding,
        )
    }

    fn launch(c: &RouterCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.route_scale))
    }

    fn launch_backward(
        c: &RouterCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::backward(device, v, c.route_scale))
    }

    fn invariant(_: &RouterCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &RouterCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
        let unchanged = [("topk_indices", 1.0), ("topk_weights", 0.25), ("dlogits", 1.0)];
        let unchanged = unchanged.map(|(name, factor)| (name, Relation::Times(factor)));
        laws.exchange(
            "route_scale counts once",
            "dtopk_weights",
            "route_scale",
            |c| &mut c.route_scale,
            unchanged,
        );
    }

    /// Where a step of a logit changes no choice. Ties, which powers of two have, do not allow a
    /// step. The weight of a single slot is constant.
    fn is_smooth(c: &RouterCase) -> bool {
        let no_ties = c.logits == Logits::Drawn && c.data.distribution != Distribution::PowersOfTwo;
        let choices_stay = !c.is_learned() || no_ties && c.bias != Bias::NotFinite;
        choices_stay
            && c.topk > 1
            && c.logits != Logits::NotFinite
            && c.num_tokens * c.num_experts <= 4096
    }

    /// Scores bend over a distance of 1 (below, they are exponentials). A choice changes where the
    /// least chosen score and the largest rejected one swap; the derivatives there are below a
    /// half.
    fn bends_over(c: &RouterCase, tensors: &Tensors, _: &str) -> Option<Vec<f64>> {
        let (logits, bias) =
            (tensors.values("logits"), tensors.get("bias").map(|bias| bias.to_f64()));
        let distance = |row: &[f64]| match &bias {
            // A padding token's logits are NaN.
            Some(bias) if row.iter().all(|logit| logit.is_finite()) => {
                margin(row, bias, c.topk).clamp(2f64.powi(-18), 1.0)
            }
            _ => 1.0,
        };
        Some(
            logits
                .chunks(c.num_experts)
                .flat_map(|row| vec![distance(row); c.num_experts])
                .collect(),
        )
    }

    /// Logits are those of the files, in f32. The files order ids, and weights with them,
    /// differently.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<RouterCase>>, String> {
        let slots = ["tokens", "topk"];
        let logits = file.floats("out.logits", &["tokens", "experts"])?.to_vec();
        let indices = file.integers("out.indices", &slots)?;
        let dense = file.floats("gout.dense", &["tokens", "experts"])?;
        let (num_tokens, num_experts) = (file.extent("tokens")?, file.extent("experts")?);
        let (topk, route_scale) = (file.extent("topk")?, file.number("routed_scaling_factor")?);
        let hashed = file.kind() == "router_hash";
        let case = RouterCase {
            padding_tokens: false,
            route_scale: route_scale as f32,
            ..plain(num_tokens, num_experts, topk)
        };
        // The slots in this operator's order: for a table, in table order.
        let order = |row: usize| {
            let mut order: Vec<usize> = (row * topk..(row + 1) * topk).collect();
            if !hashed {
                order.sort_by_key(|&slot| indices[slot]);
            }
            order
        };
        let order: Vec<usize> = (0..num_tokens).flat_map(order).collect();
        let upstream = |&slot: &usize| {
            let expert = usize::try_from(indices[slot]).ok().filter(|&expert| expert < num_experts);
            let expert = expert
                .ok_or_else(|| format!("`out.indices`: there is no expert {}", indices[slot]))?;
            Ok(dense[slot / topk * num_experts + expert])
        };
        let upstreams = order.iter().map(upstream).collect::<Result<Vec<f64>, String>>()?;
        let golden = if hashed {
            let table = file.integers("param.gate.tid2eid", &["vocabulary", "topk"])?;
            let ids = file.integers("in.input_ids", &["..tokens"])?;
            let vocab_size = file.extent("vocabulary")?;
            let case = RouterCase { routing: Routing::Hashed, vocab_size, ..case };
            Golden::new(case).integers("tid2eid", table).integers("token_ids", ids)
        } else {
            let bias = file.floats("param.gate.e_score_correction_bias", &["experts"])?.to_vec();
            Golden::new(case).values("bias", bias)
        };
        let golden = golden
            .scalar("route_scale", route_scale)
            .values("logits", logits)
            .values("dtopk_weights", upstreams);
        let reordered = |weights: &[f64]| order.iter().map(|&slot| weights[slot]).collect();
        Ok(vec![
            golden
                .expect_reordered(file, "topk_weights", "out.weights", &slots, &reordered)?
                .computed_in_f32(),
        ])
    }

    /// The model's routers: for a prefill, for decode steps, and a hashed one.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu = [
            (Forward, 32_768, 256, false),
            (Forward, 32_768, 384, false),
            (Forward, 4096, 384, false),
            (Forward, 128, 384, false),
            (Forward, 1, 384, false),
            (Forward, 32_768, 384, true),
            (Backward, 32_768, 256, false),
            (Backward, 32_768, 384, false),
            (Backward, 4096, 384, false),
        ];
        let small = [(Forward, 16, 64, false), (Forward, 16, 64, true), (Backward, 16, 64, false)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &small };
        let benchmark =
            |&(direction, num_tokens, num_experts, from_table): &(_, usize, usize, bool)| {
                let plain =
                    RouterCase { padding_tokens: false, ..plain(num_tokens, num_experts, 6) };
                let case = match from_table {
                    true => RouterCase { routing: Routing::Hashed, vocab_size: 129_280, ..plain },
                    false => plain,
                };
                let kind = if from_table { " hashed" } else { "" };
                // Exponential, logarithm, root and four sums and products for each expert. A
                // table's router and the backward read six logits of a token, and the former also
                // six ids of the table.
                let name = format!("6 of {num_experts}, {num_tokens} tokens{kind}");
                let all_but_six =
                    |of: usize, rows: usize| 4.0 * (of * rows) as f64 - (4 * 6 * num_tokens) as f64;
                let unread = match (direction, from_table) {
                    (Forward, false) => 0.0,
                    (Backward, _) => all_but_six(num_experts, num_tokens),
                    (Forward, true) => {
                        all_but_six(num_experts, num_tokens) + all_but_six(6, case.vocab_size)
                    }
                };
                let streaming = Benchmark::new(direction, name, case, "num_tokens")
                    .streaming(&["topk_indices"], 7.0);
                Benchmark { bytes: streaming.bytes - unread, ..streaming }
            };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::both(
                &["6 of 256, 32768 tokens"],
                json!({"num_tokens": 21, "num_experts": 40}),
                json!({"num_tokens": 4}),
            ),
            Reduced::forward(
                &["6 of 384, 32768 tokens hashed"],
                json!({"num_tokens": 21, "num_experts": 40, "vocab_size": 30}),
                json!({"num_tokens": 4}),
            ),
        ]
    }
}

fn draw_logits(c: &RouterCase, drawn: &[f64]) -> Vec<f64> {
    let mut draw = Draw::new(c.data.seed, "logits");
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let logit = |(at, &drawn): (usize, &f64)| {
        let token = at / c.num_experts;
        match c.logits {
            Logits::Drawn => drawn,
            Logits::Ties => [-1.0, 0.0, 1.0, 2.0][draw.rng().random_range(0..4)],
            Logits::Far if !token.is_multiple_of(3) && draw.rng().random_ratio(1, 40) => 100.0,
            Logits::Far if token % 3 == 2 => draw.rng().random_range(-200.0..-100.0),
            Logits::Far => draw.rng().random_range(-200.0..-20.0),
            Logits::NotFinite if token % 5 == 4 => bad[token / 5 % 2 * 2],
            Logits::NotFinite if draw.rng().random_ratio(1, 20) => {
                bad[draw.rng().random_range(0..3)]
            }
            Logits::NotFinite => drawn,
        }
    };
    drawn.iter().enumerate().map(logit).collect()
}

fn draw_bias(c: &RouterCase) -> Vec<f64> {
    let mut draw = Draw::new(c.data.seed, "bias");
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let number = |expert: usize| {
        let drawn = if c.logits == Logits::Ties {
            f64::from(draw.rng().random_range(0..2))
        } else {
            draw.normal()
        };
        match c.bias {
            Bias::Zero => 0.0,
            Bias::Drawn => drawn,
            Bias::Negative => -10.0,
            Bias::Last if expert >= 256 => 50.0,
            Bias::Last => 0.0,
            Bias::NotFinite if draw.rng().random_ratio(1, 4) => bad[draw.rng().random_range(0..3)],
            Bias::NotFinite => drawn,
        }
    };
    (0..c.num_experts).map(number).collect()
}

/// A table where each row may have an expert twice. In a hostile one every third slot has no
/// expert.
fn draw_table(c: &RouterCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "tid2eid");
    let experts = c.num_experts as i32;
    let values = [-1, experts, i32::MAX, i32::MIN, experts + 3];
    let mut hostile = Hostile::new(c.data.seed, "tid2eid", &values);
    let entry = |at: usize| {
        let drawn = draw.rng().random_range(0..experts);
        if c.routing == Routing::HashedHostile && at % 7 == 3 { hostile.take() } else { drawn }
    };
    (0..c.vocab_size * c.topk).map(entry).collect()
}

/// Ids of the table, and beyond it in hostile cases. Padding tokens' ids stay negative.
fn draw_ids(c: &RouterCase, padding: &[bool]) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "token_ids");
    let size = c.vocab_size as i32;
    let mut beyond = Hostile::new(c.data.seed, "token_ids", &[size, i32::MAX, size + 3]);
    let id = |(token, &padding): (usize, &bool)| match (padding, c.vocab_size) {
        (true, _) => -1 - token as i32,
        (false, 0) => beyond.take(),
        _ if c.routing == Routing::HashedHostile && token % 4 == 3 => beyond.take(),
        _ => draw.rng().random_range(0..size),
    };
    padding.iter().enumerate().map(id).collect()
}

/// Slots without an expert have upstream gradients that are NaN: no kernel may read them.
fn hide_unused_upstreams(c: &RouterCase, tensors: &mut Tensors) {
    let (table, ids) = (tensors.i32s("tid2eid"), tensors.i32s("token_ids"));
    let names_expert = |slot: usize| {
        let row =
            usize::try_from(ids[slot / c.topk]).ok().and_then(|id| table.chunks(c.topk).nth(id));
        row.is_some_and(|row| (0..c.num_experts as i32).contains(&row[slot % c.topk]))
    };
    tensors.edit("dtopk_weights", |upstream| {
        let slots = upstream.iter_mut().enumerate().filter(|(slot, _)| !names_expert(*slot));
        slots.for_each(|(_, upstream)| *upstream = f64::NAN);
    });
}

/// The score of a choice, and the largest of its terms, which determines its rounding errors.
fn biased(logit: f64, bias: f64) -> (f64, f64) {
    let score = (logit.max(0.0) + (-logit.abs()).exp().ln_1p()).sqrt();
    let score = if logit.is_nan() { f64::NAN } else { score };
    let sum = score + bias;
    (if sum.is_nan() { f64::NEG_INFINITY } else { sum }, score.abs().max(bias.abs()))
}

/// Experts in the order of their choice.
fn in_order(logits: &[f64], bias: &[f64]) -> Vec<usize> {
    let mut experts: Vec<usize> = (0..logits.len()).collect();
    let of = |expert: usize| biased(logits[expert], bias[expert]).0;
    experts.sort_by(|&a, &b| of(b).total_cmp(&of(a)));
    experts
}

/// The distance between the last chosen score and the first rejected one.
fn margin(logits: &[f64], bias: &[f64], topk: usize) -> f64 {
    let experts = in_order(logits, bias);
    let of = |expert: usize| biased(logits[expert], bias[expert]).0;
    if topk < experts.len() { of(experts[topk - 1]) - of(experts[topk]) } else { f64::INFINITY }
}

/// Moves the logits of a token whose choice depends on a kernel's rounding: all chosen ones, well
/// above the others.
fn make_clear(logits: &mut [f64], bias: &[f64], topk: usize) {
    // Eight times fp32's error of a score and of its sum with the bias.
    const RELATIVE: f64 = 1.0 / 262_144.0;
    let experts = in_order(logits, bias);
    let (chosen, others) = experts.split_at(topk);
    let unclear = chosen.iter().any(|&a| {
        let (score, size) = biased(logits[a], bias[a]);
        others.iter().any(|&b| {
            let (other, other_size) = biased(logits[b], bias[b]);
            let same = logits[a].to_bits() == logits[b].to_bits()
                && bias[a].to_bits() == bias[b].to_bits();
            let finite = score.is_finite() && other.is_finite();
            finite && !same && score - other <= RELATIVE * size.max(other_size)
        })
    });
    if unclear {
        chosen.iter().for_each(|&a| {
            logits[a] = if logits[a].is_finite() { logits[a].max(0.0) + 3.0 } else { logits[a] }
        });
    }
}
