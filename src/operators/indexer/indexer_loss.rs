//! `indexer_loss` (training 6, stage 1 of training 7): `kernels/cuda/indexer/indexer_loss.cu` and
//! `indexer_loss_sum.cu` against `reference/src/indexer/indexer_loss.rs`.

use dsv4_kernels::indexer::indexer_loss::{self as launcher, Form, Reduction};
use dsv4_reference::indexer::indexer_loss as reference;
use rand::seq::SliceRandom;

use crate::case::permutation;
use crate::operator::benchmarks::Whole;
use crate::operator::declaration::TensorSpec;
use crate::operator::fields::{elements, tensor};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::indexer::ranking::{self, Arrangement, RankedKeys};
use crate::operators::lists::{self, IndexClass, Lengths, distinct};

/// The operator.
pub struct IndexerLoss;

/// The logits of valid slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogitClass {
    /// Normal values.
    Drawn,
    /// Log-probabilities: one is 0, and the others are alternately above and below -100. The lse is
    /// given.
    AtTheClip,
}

/// The shape of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetClass {
    /// Every slot has a share.
    Soft,
    /// One slot has nearly all, and most have none.
    Peaked,
    /// The lower the logit, the larger the share: mass where the prediction is clipped.
    OnLowLogits,
    /// Every second row is 0, and so is its `l1`.
    EmptyRows,
}

/// The contents of unused data: invalid slots, and padding rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Masked {
    /// Logits are -infinity, targets are 0.
    Clean,
    /// NaN.
    Nan,
    /// NaN, infinities and large values.
    Garbage,
}

/// A case: which slots are valid, definition of the loss, requested outputs, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerLossCase {
    /// Sizes, lists, limits and sequences.
    #[serde(flatten)]
    pub keys: RankedKeys,
    /// Which definition of the divergence.
    pub form: Form,
    /// The divisor of the sum over the rows.
    pub reduction: Reduction,
    /// Multiplies the loss; may be 0.
    pub loss_coeff: f32,
    /// Whether every third row is padding.
    pub row_mask: bool,
    /// Whether each row's divergence is written.
    pub with_kl: bool,
    /// Whether the lse is given, or computed by the forward and stored for the backward.
    pub lse_given: bool,
    /// Whether value and gradient come from one launch.
    pub together: bool,
    /// Where the gradient is stored: in a separate tensor, or over logits (dense) or target
    /// (sparse). Of `together`.
    pub aliasing: Aliasing,
    /// The logits of valid slots.
    pub logits: LogitClass,
    /// Standard deviation of drawn logits.
    pub logit_deviation: f64,
    /// The shape of the target.
    pub target: TargetClass,
    /// Dense scores and their sums are 2^this times as large. Window and sink then take nearly all
    /// of a row, far below 1.
    pub score_exponent: i32,
    /// The contents of unused data.
    pub masked: Masked,
}

/// Rows of a mask: every third is padding.
fn is_padding(row: usize) -> bool {
    row % 3 == 1
}

/// The approximate sum of a dense row's scores: the number of heads.
const HEADS: f64 = 64.0;

impl IndexerLossCase {
    fn of(keys: RankedKeys) -> Self {
        Self {
            keys,
            form: Form::ClippedLog,
            reduction: Reduction::MeanOfRows,
            loss_coeff: 0.3,
            row_mask: false,
            with_kl: true,
            lse_given: false,
            together: false,
            aliasing: Aliasing::OutOfPlace,
            logits: LogitClass::Drawn,
            logit_deviation: 2.0,
            target: TargetClass::Soft,
            score_exponent: 0,
            masked: Masked::Nan,
        }
    }

    fn sparse(num_tokens: usize, num_keys: usize, topk: usize) -> Self {
        Self::of(RankedKeys::selected(num_tokens, num_keys, topk))
    }

    fn dense(num_tokens: usize, num_keys: usize, ratio: usize) -> Self {
        Self::of(RankedKeys::causal(num_tokens, num_keys, ratio))
    }

    /// The device counts the rows.
    fn counts(&self) -> bool {
        self.reduction == Reduction::MeanOfRealRows
    }

    /// `[num_tokens, slots]`.
    fn rows(&self) -> [usize; 2] {
        [self.keys.num_tokens, self.keys.slots()]
    }

    fn options(&self) -> launcher::Options {
        launcher::Options {
            num_keys: self.keys.num_keys,
            global: self.keys.global,
            ratio: self.keys.ratio,
            form: self.form,
            reduction: self.reduction,
            loss_coeff: self.loss_coeff,
            lse_given: self.lse_given,
        }
    }
}

/// The oracle's name of a definition of the loss.
pub(crate) fn of_oracle(form: Form) -> reference::Form {
    match form {
        Form::Exact => reference::Form::Exact,
        Form::ClippedLog => reference::Form::ClippedLog,
    }
}

/// The oracle's name for the divisor of the sum over the rows.
pub(crate) fn reduction_of_oracle(reduction: Reduction) -> reference::Reduction {
    match reduction {
        Reduction::MeanOfRows => reference::Reduction::MeanOfRows,
        Reduction::MeanOfRealRows => reference::Reduction::MeanOfRealRows,
        Reduction::Sum => reference::Reduction::Sum,
    }
}

impl Operator for IndexerLoss {
    type Case = IndexerLossCase;
    const SUM_LANES: usize = 64;

    const ABOUT: About = About {
        name: "indexer_loss",
        family: Family::Indexer,
        summary: "the indexer's distillation loss, KL(target || prediction), sparse or dense, and its score gradient",
        specification: &["training 6", "training 7"],
        paths: &[
            "indexer_loss_vector",
            "indexer_loss_scalar",
            "indexer_loss_streamed",
            "indexer_loss_count",
            "indexer_loss_sum",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &IndexerLossCase) -> Specs {
        let (tokens, selected) = (axis("num_tokens", c.keys.num_tokens), c.keys.is_selected());
        let (rows, one) = ([tokens, axis(c.keys.slot_axis(), c.keys.slots())], [axis("one", 1)]);
        let overwritten = if selected { "target" } else { "logits" };
        let lse = match c.lse_given {
            true => input("idx_lse", DType::F32, &[tokens]),
            false => output("idx_lse", DType::F32, &[tokens]),
        };
        let given = [
            input("logits", DType::F32, &rows)
                .rows()
                .drawn(Distribution::Normal, c.logit_deviation),
            input("target", DType::F32, &rows).rows().when(selected),
            input("scores", DType::F32, &rows).rows().when(!selected),
            input("l1", DType::F32, &[tokens]).when(!selected),
            input("row_mask", DType::U8, &[tokens]).when(c.row_mask),
        ];
        let written = [
            lse,
            output("real_rows", DType::I32, &one).exact().when(c.counts()),
            output("loss", DType::F32, &one),
            output("kl", DType::F32, &[tokens]).when(c.with_kl),
        ];
        let gradients: [TensorSpec; 2] = match c.together {
            true => [
                input("grad_loss", DType::F32, &one).drawn(Distribution::Normal, 1.0),
                output("dlogits", DType::F32, &rows).rows().placed(c.aliasing, overwritten),
            ],
            false => [
                upstream("grad_loss", "loss"),
                gradient("dlogits", "logits", DType::F32).may_be(overwritten),
            ],
        };
        let tensors = given.into_iter().chain(c.keys.tensors()).chain(written).chain(gradients);
        let specs = Specs::new(c.keys.seed, tensors).finite("loss_coeff", c.loss_coeff);
        specs
            .positive("logit_deviation", c.logit_deviation)
            .shift_of_logits("logit_deviation", c.logit_deviation)
    }

    fn check(c: &IndexerLossCase) -> Result<(), Refused> {
        if !(-100..=60).contains(&c.score_exponent) {
            return refuse("score_exponent", format!("{} must be -100 to 60", c.score_exponent));
        }
        if c.counts() && !c.row_mask {
            return refuse("row_mask", "false: a mean over real rows needs one");
        }
        if c.aliasing != Aliasing::OutOfPlace
            && (!c.together || c.aliasing == Aliasing::Interleaved)
        {
            return refuse(
                "aliasing",
                "a gradient lies apart or, of one launch with the value, over what it is made of",
            );
        }
        if c.logits == LogitClass::AtTheClip && !c.lse_given {
            return refuse(
                "lse_given",
                "false: logits at the clip are log-probabilities of a given lse",
            );
        }
        c.keys.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerLossCase> {
        let keys =
            RankedKeys::strategy(profile.of([[9, 300, 300], [16, 2000, 1500], [60, 9000, 5000]]));
        let form = select(vec![Form::Exact, Form::ClippedLog]);
        let reduction =
            select(vec![Reduction::MeanOfRows, Reduction::MeanOfRealRows, Reduction::Sum]);
        let asked = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
        let data = (
            prop_oneof![4 => Just(LogitClass::Drawn), 1 => Just(LogitClass::AtTheClip)],
            // Deviations of 15 and 100 spread a row's logits over 60 and 400.
            select(vec![0.25, 2.0, 15.0, 100.0]),
            select(vec![
                TargetClass::Soft,
                TargetClass::Peaked,
                TargetClass::OnLowLogits,
                TargetClass::EmptyRows,
            ]),
            prop_oneof![3 => Just(0), 1 => Just(-60), 1 => select(vec![-90, 60])],
            select(vec![Masked::Clean, Masked::Nan, Masked::Garbage]),
        );
        let loss_coeff = prop_oneof![4 => Just(0.3f32), 1 => Just(1.0), 1 => Just(0.0)];
        (keys, form, reduction, loss_coeff, asked, data)
            .prop_map(|(keys, form, reduction, loss_coeff, asked, data)| {
                let (logits, logit_deviation, target, score_exponent, masked) = data;
                let (row_mask, with_kl, lse_given, together, in_place) = asked;
                IndexerLossCase {
                    form,
                    reduction,
                    loss_coeff,
                    row_mask: row_mask || reduction == Reduction::MeanOfRealRows,
                    with_kl,
                    lse_given: lse_given || logits == LogitClass::AtTheClip,
                    together,
                    aliasing: if together && in_place {
                        Aliasing::InPlace
                    } else {
                        Aliasing::OutOfPlace
                    },
                    logits,
                    logit_deviation,
                    target,
                    score_exponent,
                    masked,
                    ..IndexerLossCase::of(keys)
                }
            })
            .boxed()
    }

    fn typical() -> Vec<IndexerLossCase> {
        let (sparse, dense) = (IndexerLossCase::sparse, IndexerLossCase::dense);
        let within = |case: IndexerLossCase| {
            let keys = RankedKeys { lengths: Lengths::Within, packed: true, ..case.keys };
            IndexerLossCase { keys, ..case }
        };
        vec![
            sparse(7, 60, 24)
                .with(|case| {
                    case.reduction = Reduction::MeanOfRealRows;
                    case.row_mask = true;
                })
                .then(within),
            dense(5, 33, 2).with(|case| {
                case.form = Form::Exact;
                case.with_kl = false;
            }),
            dense(6, 28, 1).with(|case| {
                case.together = true;
                case.lse_given = true;
            }),
            sparse(4, 21, 19).with(|case| case.together = true),
        ]
    }

    fn edge_cases(_: Profile) -> Vec<IndexerLossCase> {
        let (sparse, dense) = (IndexerLossCase::sparse, IndexerLossCase::dense);
        let keys = |case: IndexerLossCase, change: fn(RankedKeys) -> RankedKeys| IndexerLossCase {
            keys: change(case.keys.clone()),
            ..case
        };
        let low = |case| IndexerLossCase { target: TargetClass::OnLowLogits, ..case };
        let wide = |logit_deviation| {
            move |case| low(case).with(|case| case.logit_deviation = logit_deviation)
        };
        let exact = |case| IndexerLossCase { form: Form::Exact, ..case };
        let at_the_clip = |case| {
            low(case).with(|case| {
                case.logits = LogitClass::AtTheClip;
                case.lse_given = true;
            })
        };
        let in_place =
            |case| IndexerLossCase { together: true, aliasing: Aliasing::InPlace, ..case };
        let empty = |case| IndexerLossCase { target: TargetClass::EmptyRows, ..case };
        let real =
            |case| IndexerLossCase { reduction: Reduction::MeanOfRealRows, row_mask: true, ..case };
        let sum = |case| IndexerLossCase { reduction: Reduction::Sum, ..case };
        let whole = |case| keys(case, |keys| RankedKeys { indices: IndexClass::Valid, ..keys });
        let garbage = |case| IndexerLossCase { masked: Masked::Garbage, ..case };
        vec![
            sparse(0, 9, 5),
            dense(0, 9, 4).then(real).then(garbage),
            sparse(3, 0, 7),
            dense(3, 0, 4),
            sparse(2, 11, 0).then(sum),
            dense(1, 1, 1),
            keys(sparse(7, 40, 70), |keys| RankedKeys { indices: IndexClass::EmptyRows, ..keys }),
            keys(sparse(9, 60, 65).then(real).then(garbage), |keys| RankedKeys {
                packed: true,
                lengths: Lengths::Within,
                ..keys
            }),
            keys(sparse(9, 60, 64).then(sum), |keys| RankedKeys {
                packed: true,
                global: true,
                ..keys
            }),
            keys(sparse(7, 23, 70), |keys| RankedKeys { lengths: Lengths::Hostile, ..keys }),
            keys(dense(11, 90, 4).then(exact).then(real).then(garbage), |keys| RankedKeys {
                packed: true,
                ..keys
            }),
            keys(dense(13, 9, 3).then(exact), |keys| RankedKeys { q_off: false, ..keys }),
            // Keys after the last column.
            keys(dense(11, 90, 1), |keys| RankedKeys { packed: true, left_out: 40, ..keys }),
            sparse(3, 60, 128).then(wide(15.0)),
            dense(4, 128, 1).then(wide(100.0)),
            sparse(4, 90, 128).then(in_place).then(wide(100.0)).then(exact),
            dense(6, 40, 1).then(at_the_clip),
            sparse(5, 40, 64).then(in_place).then(at_the_clip),
            dense(5, 50, 1).then(exact).with(|case| {
                case.target = TargetClass::Peaked;
                case.masked = Masked::Clean;
            }),
            dense(6, 33, 1).then(empty),
            sparse(6, 33, 40).then(empty).then(exact),
            dense(5, 64, 1).then(in_place),
            // Sums that are the quotient's operands directly, and sums that are first scaled
            // towards 1.
            dense(5, 40, 1).with(|case| case.score_exponent = -60),
            dense(5, 40, 1).with(|case| case.score_exponent = -90),
            dense(5, 40, 1).with(|case| case.score_exponent = 60),
            sparse(4, 30, 33).with(|case| case.loss_coeff = 0.0),
            dense(4, 32, 1).then(in_place).with(|case| case.loss_coeff = 0.0),
            sparse(5, 70, 96).with(|case| {
                case.with_kl = false;
                case.row_mask = true;
                case.lse_given = true;
            }),
            // More rows than threads of the sum, and more than these load at once.
            sparse(1100, 9, 4).with(|case| case.row_mask = true),
            sparse(4200, 9, 4).then(real),
            // Blocks of each size, rows that just fit, and rows that no block holds.
            sparse(3, 900, 600),
            sparse(2, 3000, 1025).then(garbage),
            dense(2, 1500, 1).then(garbage),
            dense(2, 4100, 1).with(|case| case.together = true),
            // Warps whose slots are all valid, with and without clipped or raised entries, and next
            // to other warps.
            sparse(3, 900, 512).then(whole),
            sparse(2, 1100, 1024).then(whole).then(exact),
            sparse(2, 1100, 1024).then(whole).then(wide(60.0)),
            sparse(2, 1100, 1024).then(whole).then(in_place).then(at_the_clip),
            sparse(2, 1100, 1024).then(whole).with(|case| {
                case.target = TargetClass::Peaked;
                case.masked = Masked::Clean;
            }),
            keys(sparse(5, 1100, 1024).then(whole).then(garbage), |keys| RankedKeys {
                lengths: Lengths::Within,
                ..keys
            }),
            dense(3, 1024, 1).then(wide(60.0)),
            sparse(1, 900, 8192),
            dense(1, 8193, 1).then(exact),
            sparse(1, 900, 8200).then(in_place),
        ]
    }

    fn amend(c: &IndexerLossCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.keys.amend(tensors);
        if c.row_mask {
            let mark = |row: usize| if is_padding(row) { 0 } else { 1 + (row % 2) as u8 * 254 };
            let marks: Vec<u8> = (0..c.keys.num_tokens).map(mark).collect();
            tensors.put(
                "row_mask",
                HostTensor { dtype: DType::U8, shape: vec![marks.len()], bytes: marks },
            );
        }
        let valid = valid_slots(c, tensors);
        set_logits(c, &valid, tensors);
        set_target(c, &valid, tensors);
        if c.lse_given {
            let garbage = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3.0];
            let inputs = reference::Inputs { lse: None, ..inputs(c, &Bound::new(tensors))? };
            let mut lse = elements(&reference::forward(&inputs, &mut Rounding::exact())?.lse)?;
            let rows = valid.chunks(c.keys.slots().max(1)).enumerate();
            rows.filter(|(_, slots)| !slots.contains(&true))
                .for_each(|(row, _)| lse[row] = garbage[row % 4]);
            tensors.set("idx_lse", &lse);
        }
        Ok(())
    }

    fn forward(c: &IndexerLossCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let inputs = inputs(c, t)?;
        let outputs = reference::forward(&inputs, rounding)?;
        let real_rows = tensor(vec![outputs.real_rows as f64], &[1])?;
        let named = Named::new().with("loss", outputs.loss);
        let named = named.maybe("idx_lse", (!c.lse_given).then_some(outputs.lse));
        let named = named
            .maybe("kl", c.with_kl.then_some(outputs.kl))
            .maybe("real_rows", c.counts().then_some(real_rows));
        if !c.together {
            return Ok(named);
        }
        Ok(named.with("dlogits", reference::backward(&inputs, &t.f64("grad_loss")?, rounding)?))
    }

    fn backward(
        c: &IndexerLossCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.together {
            return Ok(Named::new());
        }
        Ok(Named::new()
            .with("dlogits", reference::backward(&inputs(c, t)?, &t.f64("grad_loss")?, rounding)?))
    }

    fn workspaces(
        c: &IndexerLossCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let bytes = launcher::workspace_bytes(c.keys.num_tokens);
        Ok((!c.with_kl).then_some(("workspace", bytes)).into_iter().collect())
    }

    fn launch(c: &IndexerLossCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        // Without row divergences, the value is the output.
        let value = if c.together { v.clone() } else { v.without(&["grad_loss", "dlogits"]) };
        run.launch(|device| launcher::forward(device, &value, c.options()))
    }

    fn launch_backward(
        c: &IndexerLossCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::backward(device, v, c.options()))
    }

    fn invariant(_: &IndexerLossCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Chunks]
    }

    fn batches(c: &IndexerLossCase, batches: &mut Batches<'_, Self>) {
        // The loss is a mean over the tokens.
        batches.except(&["dlogits"]);
        ranking::batches(&c.keys, batches, |case| &mut case.keys);
    }

    fn laws(c: &IndexerLossCase, laws: &mut Laws<'_, Self>) {
        if c.keys.num_tokens == 0 {
            return;
        }
        let factor = |name: &str| if name == "loss" { 0.25 } else { 1.0 };
        let once = laws.compared().into_iter().map(|name| (name, Relation::Times(factor(name))));
        laws.exchange(
            "loss_coeff counts once",
            "grad_loss",
            "loss_coeff",
            |case| &mut case.loss_coeff,
            once,
        );
        let linear = [("dlogits", 4.0), ("loss", 1.0), ("kl", 1.0)];
        laws.scale("grad_loss counts once", "grad_loss", 4.0, &linear);
        if c.keys.packed {
            let equal = laws.all(Relation::Times(1.0));
            ranking::ends_law(laws, c.keys.num_keys, equal);
        }
        laws.independent("num_tokens");
        if c.keys.is_selected() && !c.keys.packed {
            row_law(c, laws);
        }
        if c.keys.is_selected() && c.keys.topk > 1 {
            slot_law(c, laws);
        }
    }

    /// The formula takes lse as a function of the logits, but a given lse is not. Masked slots must
    /// not be infinite, because the rounding of a difference is undefined there.
    fn is_smooth(c: &IndexerLossCase) -> bool {
        !c.lse_given && c.masked == Masked::Nan && c.rows().iter().product::<usize>() <= 1 << 12
    }

    /// A softmax bends over 1, and a clipped row at its clip.
    fn bends_over(c: &IndexerLossCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        if input != "logits" {
            return None;
        }
        let inputs = inputs(c, &Bound::new(tensors)).ok()?;
        let lse = elements(&reference::forward(&inputs, &mut Rounding::exact()).ok()?.lse).ok()?;
        let (valid, slots) = (valid_slots(c, tensors), c.keys.slots());
        let logits = tensors.values("logits");
        let to_the_clip =
            |at: usize| if valid[at] { (logits[at] - lse[at / slots] + 100.0).abs() } else { 1.0 };
        let of_row =
            |row: usize| (row * slots..(row + 1) * slots).map(to_the_clip).fold(1.0, f64::min);
        let clipped = c.form == Form::ClippedLog;
        let rows = (0..c.keys.num_tokens).map(|row| if clipped { of_row(row) } else { 1.0 });
        Some(rows.flat_map(|scale| std::iter::repeat_n(scale, slots)).collect())
    }

    /// The score gradient with the value, for 4096 queries: lists of the model's two lengths, and
    /// dense rows up to the diagonal.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let form = |case: IndexerLossCase| IndexerLossCase {
            keys: RankedKeys {
                indices: IndexClass::Valid,
                global: true,
                q_off: false,
                ..case.keys
            },
            // The divisor of a row's gradient does not depend on how many rows a sample has.
            reduction: Reduction::Sum,
            together: true,
            ..case
        };
        let (sparse, dense) = (IndexerLossCase::sparse, IndexerLossCase::dense);
        let cases = match on_gpu(environment) {
            true => vec![sparse(4096, 8192, 512), sparse(4096, 8192, 1024), dense(4096, 4096, 1)],
            false => vec![sparse(8, 64, 32), dense(8, 64, 1)],
        };
        let together = cases.clone().into_iter().map(|case| timed(form(case), Direction::Forward));
        let apart =
            |case| timed(IndexerLossCase { together: false, ..form(case) }, Direction::Backward);
        together.chain(cases.into_iter().map(apart)).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::both(
                &["q4096 topk512"],
                json!({"num_tokens": 7, "num_keys": 90, "topk": 40}),
                json!({"num_tokens": 2}),
            ),
            Reduced::both(
                &["q4096 dense k4096"],
                json!({"num_tokens": 9, "num_keys": 30}),
                json!({"num_tokens": 2}),
            ),
        ]
    }
}

fn timed(case: IndexerLossCase, direction: Direction) -> Benchmark<IndexerLoss> {
    let RankedKeys { num_tokens, num_keys, topk, .. } = case.keys;
    let selected = case.keys.is_selected();
    let rows = if selected { format!("topk{topk}") } else { format!("dense k{num_keys}") };
    // Slots that count: in a causal row those up to the diagonal. A list gives the index of each
    // slot.
    let visible = if selected {
        num_tokens * topk
    } else {
        (1..=num_tokens).map(|row| row.min(num_keys)).sum()
    };
    let read = visible * if selected { 12 } else { 8 };
    let slots = num_tokens * case.keys.slots();
    let name = format!("q{num_tokens} {rows}");
    let benchmark = Benchmark::new(direction, name, case, "num_tokens");
    Benchmark {
        bytes: (read + 4 * slots + 4 * num_tokens * 3) as f64,
        // Quotient, exponential, logarithm, and a dozen sums and products.
        flops: 20.0 * visible as f64,
        amend: |c, tensors| {
            if c.keys.is_selected() {
                let RankedKeys { num_tokens, topk, num_keys, seed, .. } = c.keys;
                let lists = distinct((seed, "indices"), [num_tokens, topk, num_keys], |_| 0);
                tensors.put("indices", HostTensor::from_i32(&[num_tokens, topk], &lists));
            } else {
                let (logits, scores) =
                    (tensors.tensor("logits").clone(), tensors.tensor("scores").clone());
                // Rows of the drawn case see less of what a later row sees, so none of it may be
                // garbage.
                let usable = |x: f64| if x.is_finite() && x.abs() < 1e3 { x } else { 0.5 };
                let kept = |tensor: &HostTensor| {
                    let values: Vec<f64> = tensor.to_f64().into_iter().map(usable).collect();
                    HostTensor::from_f64(DType::F32, &tensor.shape, &values)
                };
                tensors.put("logits", kept(&logits));
                tensors.put("scores", kept(&scores));
            }
        },
        sampled: |whole, c, tensors| {
            if !c.keys.is_selected() {
                set_apart(whole, c, tensors);
            }
        },
        ..benchmark
    }
}

/// Each sampled row becomes a separate sequence with all keys.
fn set_apart(whole: &Whole<'_, IndexerLoss>, c: &mut IndexerLossCase, tensors: &mut Tensors) {
    (c.keys.arrangement, c.keys.q_off) = (Arrangement::Apart, true);
    c.keys.num_keys = whole.case.keys.num_keys * whole.rows.len();
    let offsets: Vec<i32> = whole.rows.iter().map(|&row| row as i32).collect();
    tensors.put("q_off", HostTensor::from_i32(&[offsets.len()], &offsets));
    if let Some(sequences) = c.keys.sequences() {
        tensors.put("cu_q", HostTensor::from_i32(&[sequences.cu_q.len()], &sequences.cu_q));
        tensors.put("cu_k", HostTensor::from_i32(&[sequences.cu_k.len()], &sequences.cu_k));
    }
}

fn inputs(c: &IndexerLossCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let host = t.host();
    let teacher = if c.keys.is_selected() {
        reference::Teacher::Target(t.f64("target")?)
    } else {
        reference::Teacher::Scores { scores: t.f64("scores")?, l1: t.f64("l1")? }
    };
    Ok(reference::Inputs {
        logits: t.f64("logits")?,
        teacher,
        ranking: c.keys.reference(host),
        num_keys: c.keys.num_keys,
        sequences: c.keys.sequences(),
        row_mask: host.get("row_mask").map(|mask| mask.bytes.clone()),
        lse: if c.lse_given { t.maybe("idx_lse")? } else { None },
        form: of_oracle(c.form),
        reduction: reduction_of_oracle(c.reduction),
        loss_coeff: t.scalar("loss_coeff", f64::from(c.loss_coeff)),
    })
}

/// Which slots of all rows are valid.
fn valid_slots(c: &IndexerLossCase, tensors: &Tensors) -> Vec<bool> {
    let (ranking, sequences) = (c.keys.reference(tensors), c.keys.sequences());
    let ranked = dsv4_reference::indexer::ranking::RankedKeys {
        ranking: &ranking,
        sequences: sequences.as_ref(),
        num_keys: c.keys.num_keys,
    };
    let real = |row: usize| !c.row_mask || !is_padding(row);
    let of_row =
        |row: usize| ranked.rows(row).into_iter().map(move |key| real(row) && key.is_some());
    (0..c.keys.num_tokens).flat_map(of_row).collect()
}

fn set_logits(c: &IndexerLossCase, valid: &[bool], tensors: &mut Tensors) {
    let slots = c.keys.slots().max(1);
    let garbage = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30];
    tensors.edit("logits", |logits| {
        for (row, valid) in logits.chunks_mut(slots).zip(valid.chunks(slots)) {
            let mut before = 0;
            for (at, (x, &valid)) in row.iter_mut().zip(valid).enumerate() {
                *x = match (valid, c.masked, c.logits) {
                    (false, Masked::Clean, _) => f64::NEG_INFINITY,
                    (false, Masked::Nan, _) => f64::NAN,
                    (false, Masked::Garbage, _) => garbage[at % garbage.len()],
                    (true, _, LogitClass::Drawn) => *x,
                    (true, _, LogitClass::AtTheClip) if before == 0 => 0.0,
                    (true, _, LogitClass::AtTheClip) => [-100.0, -100.5, -99.5][before % 3],
                };
                before += usize::from(valid);
            }
        }
    });
}

/// The target, or scores with the sums of their rows.
fn set_target(c: &IndexerLossCase, valid: &[bool], tensors: &mut Tensors) {
    let slots = c.keys.slots().max(1);
    let name = if c.keys.is_selected() { "target" } else { "scores" };
    let logits = tensors.values("logits");
    let mut draw = Draw::new(c.keys.seed, "target");
    let garbage = [f64::NAN, f64::INFINITY, -1.0, 1e30];
    let mut all = Vec::with_capacity(logits.len());
    for (row, (logits, valid)) in logits.chunks(slots).zip(valid.chunks(slots)).enumerate() {
        let weight = |(at, (&x, &valid)): (usize, (&f64, &bool))| {
            let soft = draw.normal().exp();
            match c.target {
                _ if !valid => 0.0,
                TargetClass::Soft => soft,
                TargetClass::Peaked if at % 4 != row % 4 => 0.0,
                TargetClass::Peaked => soft.powi(8),
                // The exponent's range, within a few deviations.
                TargetClass::OnLowLogits => soft * (-x / c.logit_deviation.max(20.0)).exp(),
                TargetClass::EmptyRows if row % 2 == 0 => 0.0,
                TargetClass::EmptyRows => soft,
            }
        };
        let weights: Vec<f64> = logits.iter().zip(valid).enumerate().map(weight).collect();
        let sum = weights.iter().sum::<f64>();
        let whole =
            if c.keys.is_selected() { 1.0 } else { HEADS * f64::from(c.score_exponent).exp2() };
        let share = |weight: f64| if sum > 0.0 { weight / sum * whole } else { 0.0 };
        all.extend(weights.into_iter().zip(valid).enumerate().map(|(at, (weight, &valid))| {
            match c.masked {
                Masked::Garbage if !valid => garbage[at % garbage.len()],
                Masked::Nan if !valid => f64::NAN,
                _ => share(weight),
            }
        }));
    }
    tensors.set(name, &all);
    if !c.keys.is_selected() {
        let stored = tensors.values("scores");
        let rows = stored.chunks(slots).zip(valid.chunks(slots));
        let of_row = |(row, valid): (&[f64], &[bool])| {
            row.iter().zip(valid).filter(|(_, valid)| **valid).map(|(a, _)| a).sum()
        };
        let mut sums: Vec<f64> = rows.map(of_row).collect();
        sums.resize(c.keys.num_tokens, 0.0);
        tensors.set("l1", &sums);
    }
}

/// Rows may come in another order. Their tensors follow it, and the loss stays the same except for
/// the order of its sum.
fn row_law(c: &IndexerLossCase, laws: &mut Laws<'_, IndexerLoss>) {
    if c.keys.num_tokens < 2 || c.row_mask {
        return;
    }
    let (specs, order) = (IndexerLoss::tensors(c), permutation(c.keys.seed, c.keys.num_tokens));
    let follows = |name| (name, Relation::PermutedAlong { axis: 0, order: order.clone() });
    let compared = laws.compared();
    let relations = ["kl", "idx_lse", "dlogits"]
        .map(follows)
        .into_iter()
        .chain([("loss", Relation::WithinBudget)]);
    let relations: Vec<_> = relations.filter(|(name, _)| compared.contains(name)).collect();
    laws.law(
        "rows may be permuted",
        |v| v.tensors.permute(&specs, "num_tokens", &order),
        relations,
    );
}

/// The order of the slots does not matter: each keeps its gradient. Slots beyond a length stay
/// beyond it.
fn slot_law(c: &IndexerLossCase, laws: &mut Laws<'_, IndexerLoss>) {
    let [num_tokens, topk] = c.keys.lists();
    let relations =
        laws.all(Relation::WithinBudget).into_iter().filter(|(name, _)| *name != "real_rows");
    let change = |v: &mut Variant<IndexerLoss>| {
        let (mut from, mut shown) = (Vec::new(), vec![0; num_tokens * topk]);
        for (token, length) in
            lists::within_lengths(&v.tensors, "topk_length", c.keys.lists()).into_iter().enumerate()
        {
            let mut order: Vec<usize> = (0..topk).collect();
            order[..length].shuffle(Draw::numbered(c.keys.seed, "slots", token).rng());
            order
                .iter()
                .enumerate()
                .for_each(|(slot, &from)| shown[token * topk + from] = token * topk + slot);
            from.extend(order.into_iter().map(|slot| token * topk + slot));
        }
        for name in ["logits", "target", "indices"] {
            let tensor = v.tensors.tensor(name).clone();
            let flat = HostTensor { shape: vec![num_tokens * topk], ..tensor.clone() };
            let HostTensor { bytes, .. } = permuted_along(&flat, 0, &from);
            v.tensors.put(name, HostTensor { bytes, ..tensor });
        }
        v.show("dlogits", &[num_tokens, topk], shown);
    };
    laws.law("slots may be permuted", change, relations);
}
