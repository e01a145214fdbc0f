//! `indexer_distillation` (training 1, 2, 5, 6, 7): a step of the indexer's training. Its operators
//! run in sequence on one arena, and are compared with one oracle.
//!
//! ```text
//! forward    logits           = indexer_logits(index_q, index_k, index_w)      dense, up to the causal limit, -inf beyond
//!            indices, values  = topk(logits)                                   frozen: the backward reads them
//!            target           = score_recompute(q, k, lse, indices)            frozen
//!            loss, kl, idx_lse = indexer_loss(values, target, indices)
//! backward   dvalues          = indexer_loss_backward(values, target, idx_lse, grad_loss)
//!            dindex_q, dindex_k, dindex_w = indexer_backward(index_q, index_k, index_w, dvalues, indices)
//! ```
//!
//! Each operator may be correct by itself, and still the whole may be wrong. A scale that the
//! forward applies twice leaves the lists and every operator's own gradient right (FM-01). A row
//! with fewer keys than slots passes -infinity from one kernel to the next. There a term that is
//! masked too late is infinite or NaN (FM-02).
//!
//! Lists are compared one by one. Operands of the logits are on a grid on which fp32 holds all
//! their sums. So the order of sums never decides which key is listed.

use dsv4_kernels::implementation::Implementation as Kernels;
use dsv4_kernels::indexer::indexer_logits::{HEAD_DIM, MAX_HEADS, Operands};
use dsv4_kernels::indexer::indexer_loss::{Form, Reduction};
use dsv4_kernels::{
    indexer::indexer_backward, indexer::indexer_logits, indexer::indexer_loss,
    indexer::score_recompute, indexer::topk,
};
use dsv4_reference::indexer::indexer_distillation as reference;
use dsv4_reference::indexer::score_recompute::{self as attention, Normaliser};

use crate::operator::fields::{elements, extent};
use crate::operator::prelude::*;
use crate::operators::indexer::indexer_loss::{of_oracle, reduction_of_oracle};
use crate::operators::indexer::ranking::{self, RankedKeys};

/// The operators in sequence.
pub struct IndexerDistillation;

/// A case: sizes, heads, scales, which loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerDistillationCase {
    /// Tokens, keys, causal limit and sequences; lists are those of the case.
    #[serde(flatten)]
    pub keys: RankedKeys,
    /// Keys of a list.
    pub listed: usize,
    /// The indexer's heads: at most 64.
    pub index_heads: usize,
    /// The attention's heads: at most 128.
    pub num_heads: usize,
    /// Width of the attention's q and k.
    pub head_dim: usize,
    /// Multiplies the indexer's logits.
    pub sm_scale: f32,
    /// Which definition of the divergence.
    pub form: Form,
    /// The divisor of the sum over the rows.
    pub reduction: Reduction,
    /// Multiplies the loss.
    pub loss_coeff: f32,
}

/// The values of the indexer's operands. Those of q and k are odd multiples of 1/2 up to 3/2, and
/// those of w multiples of 1/2 up to 2. Products are multiples of 1/4. Their sums over 128 channels
/// need 11 bits, and those over 64 heads with their weights 20. A key's first channel is 0. A sum
/// of 127 odd values is not 0, so rounding never decides whether a product is above 0.
fn on_grid(name: &str, x: f64) -> f64 {
    if name == "index_w" {
        (2.0 * x).round().clamp(-4.0, 4.0) / 2.0
    } else {
        x.floor().clamp(-2.0, 1.0) + 0.5
    }
}

/// A step with few heads.
pub(crate) fn of(keys: RankedKeys, listed: usize) -> IndexerDistillationCase {
    IndexerDistillationCase {
        keys,
        listed,
        index_heads: 4,
        num_heads: 5,
        head_dim: 64,
        // For 128 channels and 64 heads, as in the model: 128^-1/2 64^-1/2.
        sm_scale: 0.011_048_543,
        form: Form::ClippedLog,
        reduction: Reduction::MeanOfRows,
        loss_coeff: 0.3,
    }
}

impl IndexerDistillationCase {
    /// `head_dim^-1/2`.
    pub(crate) fn softmax_scale(&self) -> f32 {
        (self.head_dim.max(1) as f32).sqrt().recip()
    }
}

fn inputs(c: &IndexerDistillationCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    Ok(reference::Inputs {
        index_q: t.f64("index_q")?,
        index_k: t.f64("index_k")?,
        index_w: t.f64("index_w")?,
        ratio: c.keys.ratio,
        q_off: t.host().maybe_i32s("q_off"),
        sequences: c.keys.sequences(),
        columns: c.keys.columns(),
        topk: c.listed,
        sm_scale: t.scalar("sm_scale", f64::from(c.sm_scale)),
        q: t.f64("q")?,
        k: t.f64("k")?,
        softmax_scale: f64::from(c.softmax_scale()),
        normaliser: Normaliser { lse: t.f64("lse")?, sink: None },
        form: of_oracle(c.form),
        reduction: reduction_of_oracle(c.reduction),
        loss_coeff: t.scalar("loss_coeff", f64::from(c.loss_coeff)),
    })
}

impl Operator for IndexerDistillation {
    type Case = IndexerDistillationCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "indexer_distillation",
        family: Family::Indexer,
        summary: "a step of the indexer's training: logits, lists, target, loss, and the gradients of its queries, keys and weights",
        specification: &["training 1", "training 2", "training 5", "training 6", "training 7"],
        paths: &[
            "indexer_logits<bf16, 16>",
            "indexer_logits<bf16, 32>",
            "indexer_logits<bf16, 64>",
            "topk",
            "score_recompute<16, selected>",
            "score_recompute<64, selected>",
            "score_recompute<128, selected>",
            "indexer_loss_vector",
            "indexer_loss_scalar",
            "indexer_loss_sum",
            "backward indexer_loss_vector",
            "backward indexer_loss_scalar",
            "backward indexer_backward_zero",
            "backward indexer_backward<selected>",
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] =
        &["indexer_logits", "topk", "score_recompute", "indexer_loss", "indexer_backward"];

    fn tensors(c: &IndexerDistillationCase) -> Specs {
        specs(c, true)
    }

    fn check(c: &IndexerDistillationCase) -> Result<(), Refused> {
        if c.keys.is_selected() {
            return refuse("ranking", "selected: the lists are those of the step's own logits");
        }
        if c.reduction == Reduction::MeanOfRealRows {
            return refuse("reduction", "mean_of_real_rows: no row of a step is padding");
        }
        if c.listed == 0 || c.listed > topk::MAX_TOPK {
            return refuse("listed", format!("{} must be 1 to {}", c.listed, topk::MAX_TOPK));
        }
        not_empty("num_keys", c.keys.columns())?;
        if c.num_heads == 0 || c.num_heads > 128 {
            return refuse("num_heads", format!("{} must be 1 to 128", c.num_heads));
        }
        if c.head_dim == 0 || !c.head_dim.is_multiple_of(16) || c.head_dim > 576 {
            return refuse(
                "head_dim",
                format!("{} must be a multiple of 16, up to 576", c.head_dim),
            );
        }
        c.keys.check()
    }

    fn oracle_elements(c: &IndexerDistillationCase) -> u128 {
        let pairs = c.keys.num_tokens as u128 * c.keys.num_keys as u128;
        pairs * (c.index_heads + c.num_heads) as u128 * 4 + pairs * (HEAD_DIM + c.head_dim) as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerDistillationCase> {
        let keys = RankedKeys::strategy(profile.of([[9, 90, 1], [14, 300, 1], [24, 1200, 1]]));
        let listed = prop_oneof![2 => extent(40, 8), 1 => extent(profile.of([100, 200, 600]), 32)];
        let heads = (
            prop_oneof![1 => Just(64usize), 3 => 1..=20usize],
            prop_oneof![1 => Just(17usize), 3 => 1..=8usize],
        );
        let scale = select(vec![0.011_048_543f32, 0.088_388_35, 0.125]);
        let loss = (
            select(vec![Form::Exact, Form::ClippedLog]),
            select(vec![Reduction::MeanOfRows, Reduction::Sum]),
        );
        (keys, listed, heads, scale, loss, 1..=4usize)
            .prop_map(
                |(keys, listed, (index_heads, num_heads), sm_scale, (form, reduction), ratio)| {
                    let RankedKeys { num_tokens, num_keys, packed, q_off, seed, .. } = keys;
                    let mut keys = RankedKeys {
                        packed,
                        q_off,
                        seed,
                        ..RankedKeys::causal(num_tokens, num_keys, ratio)
                    };
                    // Sequences of few keys may all be empty, with no key to list.
                    keys.packed &= keys.columns() > 0;
                    IndexerDistillationCase {
                        index_heads,
                        num_heads,
                        sm_scale,
                        form,
                        reduction,
                        ..of(keys, listed)
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<IndexerDistillationCase> {
        let packed = RankedKeys { packed: true, ..RankedKeys::causal(9, 40, 1) };
        vec![
            of(RankedKeys::causal(6, 24, 2), 8),
            of(packed, 7).with(|case| {
                case.form = Form::Exact;
                case.reduction = Reduction::Sum;
                case.index_heads = 17;
            }),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerDistillationCase> {
        let causal = RankedKeys::causal;
        let mut cases = vec![
            of(causal(0, 9, 4), 5),
            of(causal(1, 1, 1), 1),
            // Rows that are all incomplete, and lists longer than the number of keys.
            of(RankedKeys { q_off: false, ..causal(13, 13, 1) }, 16),
            of(RankedKeys { q_off: false, ..causal(9, 40, 4) }, 48),
            of(RankedKeys { packed: true, ..causal(14, 150, 1) }, 33).with(|case| {
                case.index_heads = 64;
                case.num_heads = 17;
            }),
            of(causal(5, 70, 2), 32).with(|case| {
                case.index_heads = 32;
                case.num_heads = 66;
                case.form = Form::Exact;
            }),
        ];
        if profile == Profile::Full {
            cases.push(of(causal(16, 2048, 1), 512).with(|case| {
                case.index_heads = 64;
                case.num_heads = 64;
            }));
        }
        cases
    }

    fn amend(c: &IndexerDistillationCase, tensors: &mut Tensors) -> OracleResult<()> {
        for name in ["index_q", "index_k", "index_w"] {
            tensors.edit(name, |numbers| numbers.iter_mut().for_each(|x| *x = on_grid(name, *x)));
        }
        tensors.edit("index_k", |k| k.iter_mut().step_by(HEAD_DIM).for_each(|x| *x = 0.0));
        c.keys.amend(tensors);
        tensors.set("lse", &vec![0.0; c.keys.num_tokens * c.num_heads]);
        let inputs = inputs(c, &Bound::new(tensors))?;
        tensors.set_i32s("limits", &inputs.limits()?);
        // For all keys that a token sees; +inf if it sees none.
        let ranking = c.keys.reference(tensors);
        let (sequences, softmax_scale) = (c.keys.sequences(), f64::from(c.softmax_scale()));
        let ranked =
            attention::Inputs { q: inputs.q, k: inputs.k, ranking, sequences, softmax_scale };
        tensors.set("lse", &elements(&attention::lse(&ranked, None, &mut Rounding::exact())?)?);
        Ok(())
    }

    fn forward(
        c: &IndexerDistillationCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let outputs = reference::forward(&inputs(c, t)?, rounding)?;
        let lists = Named::new().with("logits", outputs.logits).with("indices", outputs.indices);
        let lists = lists.with("values", outputs.values).with("target", outputs.target);
        let loss = outputs.loss;
        Ok(lists.with("idx_lse", loss.lse).with("loss", loss.loss).with("kl", loss.kl))
    }

    fn backward(
        c: &IndexerDistillationCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let (dvalues, gradients) =
            reference::backward(&inputs(c, t)?, &t.f64("grad_loss")?, rounding)?;
        let named = Named::new().with("dvalues", dvalues).with("dindex_q", gradients.dq);
        Ok(named.with("dindex_k", gradients.dk).with("dindex_w", gradients.dw))
    }

    fn launch(
        c: &IndexerDistillationCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let scored = v.only(&["index_q", "index_k", "index_w", "cu_q", "cu_k", "q_off", "logits"]);
        let scored = scored.renamed(&[("index_q", "q"), ("index_k", "k"), ("index_w", "w")]);
        run.launch(|device| indexer_logits::forward(device, &scored, &logits_options(c)))?;
        let listed = v.only(&["logits", "limits", "indices", "values"]);
        let listed = listed.renamed(&[("logits", "scores"), ("limits", "lengths")]);
        run.launch(|device| topk::forward(device, &listed, 1))?;
        let attended = v.only(&["q", "k", "lse", "cu_q", "cu_k", "indices", "target"]);
        run.launch(|device| score_recompute::target(device, &attended, target_options(c)))?;
        let compared =
            v.only(&["values", "target", "cu_q", "cu_k", "indices", "idx_lse", "loss", "kl"]);
        let compared = compared.renamed(&[("values", "logits")]);
        run.launch(|device| indexer_loss::forward(device, &compared, loss_options(c)))?;
        // What the backward reads.
        ["indices", "values", "target", "idx_lse"]
            .into_iter()
            .try_for_each(|name| run.freeze(&v[name]))
    }

    fn launch_backward(
        c: &IndexerDistillationCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let compared = v.only(&[
            "values",
            "target",
            "cu_q",
            "cu_k",
            "indices",
            "idx_lse",
            "grad_loss",
            "dvalues",
        ]);
        let compared = compared.renamed(&[("values", "logits"), ("dvalues", "dlogits")]);
        run.ran(format!(
            "backward {}",
            indexer_loss::backward(run.device(), &compared, loss_options(c))?
        ));
        run.freeze(&v["dvalues"])?;
        let own = ["index_q", "index_k", "index_w", "dindex_q", "dindex_k", "dindex_w"];
        let gradients = v.only(&[&own[..], &["cu_q", "cu_k", "indices", "dvalues"]].concat());
        let gradients = gradients.renamed(&[
            ("index_q", "q"),
            ("index_k", "k"),
            ("index_w", "w"),
            ("dvalues", "dlogits"),
        ]);
        let gradients =
            gradients.renamed(&[("dindex_q", "dq"), ("dindex_k", "dk"), ("dindex_w", "dw")]);
        for ran in indexer_backward::backward(run.device(), &gradients, gradient_options(c))? {
            run.ran(format!("backward {ran}"));
        }
        Ok(())
    }

    fn invariant(_: &IndexerDistillationCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Chunks]
    }

    fn batches(c: &IndexerDistillationCase, batches: &mut Batches<'_, Self>) {
        // The loss is a mean over the tokens.
        batches.except(&["dvalues", "dindex_q", "dindex_w"]);
        ranking::batches(&c.keys, batches, |case| &mut case.keys);
    }

    fn laws(c: &IndexerDistillationCase, laws: &mut Laws<'_, Self>) {
        if c.keys.num_tokens == 0 {
            return;
        }
        laws.scale_upstreams();
    }

    /// Lists are discontinuous, unless all keys are listed.
    fn is_smooth(c: &IndexerDistillationCase) -> bool {
        c.listed >= c.keys.columns() && c.keys.num_tokens * c.index_heads <= 64
    }
}

/// The tensors of a step. `atomic`: whether the gradient of keys is summed by atomics.
pub(crate) fn specs(c: &IndexerDistillationCase, atomic: bool) -> Specs {
    let (tokens, keys) = (axis("num_tokens", c.keys.num_tokens), axis("num_keys", c.keys.num_keys));
    let index_heads = axis("index_heads", c.index_heads).multiples(1, MAX_HEADS);
    let (heads, width) = (axis("num_heads", c.num_heads), axis("head_dim", c.head_dim));
    let (columns, listed) = (axis("columns", c.keys.columns()), axis("topk", c.listed));
    let (index_dim, one) = (axis("index_head_dim", HEAD_DIM), [axis("one", 1)]);
    let normal = Distribution::Normal;
    let given = [
        input("index_q", DType::Bf16, &[tokens, index_heads, index_dim])
            .aligned_rows()
            .drawn(normal, 1.0),
        input("index_k", DType::Bf16, &[keys, index_dim]).aligned_rows().drawn(normal, 1.0),
        input("index_w", DType::F32, &[tokens, index_heads]).rows().drawn(normal, 1.0),
        input("q", DType::Bf16, &[tokens, heads, width]).aligned_rows().drawn(normal, 1.0),
        input("k", DType::Bf16, &[keys, width]).aligned_rows().drawn(normal, 1.0),
        input("lse", DType::F32, &[tokens, heads]),
        input("limits", DType::I32, &[tokens]),
    ];
    let lists = [tokens, listed];
    let written = [
        output("logits", DType::F32, &[tokens, columns]).rows(),
        output("indices", DType::I32, &lists).rows().exact(),
        output("values", DType::F32, &lists).rows(),
        output("target", DType::F32, &lists).rows(),
        output("idx_lse", DType::F32, &[tokens]),
        output("loss", DType::F32, &one),
        output("kl", DType::F32, &[tokens]),
        upstream("grad_loss", "loss"),
        gradient("dvalues", "values", DType::F32),
        gradient("dindex_q", "index_q", DType::Bf16).aligned_rows(),
        gradient("dindex_k", "index_k", DType::F32).aligned_rows().atomic_if(atomic),
        gradient("dindex_w", "index_w", DType::F32).rows(),
    ];
    // The lists come from the step itself.
    let limits = c
        .keys
        .tensors()
        .into_iter()
        .filter(|spec| !["indices", "topk_length"].contains(&spec.name));
    let specs = Specs::new(c.keys.seed, given.into_iter().chain(limits).chain(written));
    specs.positive("sm_scale", c.sm_scale).finite("loss_coeff", c.loss_coeff)
}

fn logits_options(c: &IndexerDistillationCase) -> indexer_logits::Options {
    indexer_logits::Options {
        operands: Operands::Bf16,
        ratio: c.keys.ratio,
        page_size: 64,
        sm_scale: c.sm_scale,
        clean_logits: true,
        implementation: Kernels::Portable,
    }
}

fn target_options(c: &IndexerDistillationCase) -> score_recompute::Options {
    let (ratio, softmax_scale) = (c.keys.ratio, c.softmax_scale());
    score_recompute::Options {
        global: false,
        ratio,
        softmax_scale,
        implementation: Kernels::Portable,
    }
}

fn loss_options(c: &IndexerDistillationCase) -> indexer_loss::Options {
    indexer_loss::Options {
        num_keys: c.keys.num_keys,
        global: false,
        ratio: c.keys.ratio,
        form: c.form,
        reduction: c.reduction,
        loss_coeff: c.loss_coeff,
        lse_given: false,
    }
}

fn gradient_options(c: &IndexerDistillationCase) -> indexer_backward::Options {
    let key_gradients = indexer_backward::KeyGradients::Atomic;
    indexer_backward::Options {
        global: false,
        ratio: c.keys.ratio,
        sm_scale: c.sm_scale,
        key_gradients,
    }
}
