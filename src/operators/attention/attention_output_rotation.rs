//! `attention_output_rotation` (training 4 and 8): attention, the inverse rotation of its output,
//! and the backward of both. They are composed as in a training step, where one operator may
//! corrupt what another saved.
//!
//! Values are key rows, so each attended value carries its key's rotation. Rotating the output back
//! by the query's position leaves only the relative rotation:
//!
//! ```text
//! forward    out, lse = attention(q, k, v, sink)      out is saved for the backward
//!            y        = R^-1 out                      R turns token t to its position p_t
//! backward   dout     = R dy                          the gradient of R^-1, a rotation, is its transpose
//!            dq, dk, dv, dsink = attention_backward(…, out, lse, dout)
//! ```
//!
//! The attention backward reads the saved `out` in `delta = sum_d out dout`, in the frame of
//! `dout`. An in-place rotation on that buffer leaves `y` right. It also leaves right everything
//! that depends only on P and `dout` (`dv`). But `dq`, `dk` and `dsink`, which contain `delta`, are
//! wrong (FM-03). No case of either operator sees it, because each of the two kernels is correct by
//! itself.

use dsv4_kernels::projections::rope as launcher;
use dsv4_reference::projections::rope::{self as reference, YarnParameters};

use crate::operator::fields::elements;
use crate::operator::prelude::*;
use crate::operators::attention::sinks::Sinks;
use crate::operators::attention::sparse_attention::{
    self, SparseAttention, SparseAttentionCase, Values,
};
use crate::operators::lists::Lengths;

/// Where the sequence of queries starts. At position 0 the rotation would be the identity.
const FIRST_POSITION: i64 = 4096;
/// Distance between positions of adjacent queries. Odd, so that no power of two of a frequency
/// repeats.
const POSITION_STEP: i64 = 37;

/// Tensors that the attention does not have.
const OF_THE_ROTATION: [&str; 4] = ["cos", "sin", "y", "dy"];

/// The paths of the rotation, inverse and forward.
const ROTATIONS: [&str; 4] = [
    "rope_forward",
    "rope_forward_scalar",
    "backward rope_forward",
    "backward rope_forward_scalar",
];

const PATHS: [&str; sparse_attention::PATHS.len() + ROTATIONS.len()] = {
    let (mut all, mut at) = ([""; sparse_attention::PATHS.len() + ROTATIONS.len()], 0);
    while at < all.len() {
        let attention = sparse_attention::PATHS.len();
        all[at] =
            if at < attention { sparse_attention::PATHS[at] } else { ROTATIONS[at - attention] };
        at += 1;
    }
    all
};

/// The operators in sequence. With `IN_PLACE` the rotation overwrites the saved `out`, which is the
/// bug that the chain must detect. The registry's entry is without it, and no case can select it.
pub struct AttentionOutputRotation<const IN_PLACE: bool = false>;

/// A case: that of the attention, and how many channels of its output rotate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionOutputRotationCase {
    /// The attention. Its distribution is also that of `dy`, the gradient in the inversely rotated
    /// frame.
    pub attention: SparseAttentionCase,
    /// The last channels of `out` rotate: even, 2 to `v_dim`.
    pub rope_dim: usize,
}

fn plain(attention: SparseAttentionCase, rope_dim: usize) -> AttentionOutputRotationCase {
    AttentionOutputRotationCase { attention, rope_dim }
}

/// cos and sin of the queries' positions, `[num_tokens, rope_dim / 2]`, before rounding to f32.
fn table(
    c: &AttentionOutputRotationCase,
) -> OracleResult<(candle_core::Tensor, candle_core::Tensor)> {
    let frequencies = reference::inv_freq_f32(&YarnParameters {
        rope_dim: c.rope_dim,
        ..YarnParameters::compress()
    })?;
    let tokens = 0..c.attention.num_tokens as i64;
    let positions: Vec<i64> = tokens.map(|token| FIRST_POSITION + POSITION_STEP * token).collect();
    reference::table(&frequencies, &positions)
}

/// The inverse rotation of the attention's output, as the rotation stores and reads it.
fn rotation(
    c: &AttentionOutputRotationCase,
    t: &Bound<'_>,
    rounding: &mut Rounding,
) -> OracleResult<(Named, reference::Inputs)> {
    let attended = SparseAttention::forward(&c.attention, t, rounding)?;
    // The output that one kernel passes to the next is stored in bf16.
    let x = rounding.bf16(attended.tensor("out")?)?;
    let inputs = reference::Inputs {
        x,
        cos: t.f64("cos")?,
        sin: t.f64("sin")?,
        positions: None,
        inverse: true,
    };
    Ok((attended, inputs))
}

/// What the rotation of the tensor `x` into the tensor `y` needs.
fn rotated(v: &Views, x: &'static str, y: &'static str) -> Views {
    v.only(&[x, y, "cos", "sin"]).renamed(&[(x, "x"), (y, "y")])
}

impl<const IN_PLACE: bool> Operator for AttentionOutputRotation<IN_PLACE> {
    type Case = AttentionOutputRotationCase;

    const ABOUT: About = About {
        name: "attention_output_rotation",
        family: Family::Attention,
        summary: "sparse_attention, the inverse rope of its output, and the backward of both on what was saved",
        specification: &["training 4", "training 8"],
        paths: &PATHS,
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] = &["sparse_attention", "rope"];

    fn tensors(c: &AttentionOutputRotationCase) -> Specs {
        let table =
            [axis("num_tokens", c.attention.num_tokens), axis("half_rope_dim", c.rope_dim / 2)];
        let rotated =
            [table[0], axis("num_heads", c.attention.num_heads), axis("v_dim", c.attention.v_dim)];
        let aliasing = if IN_PLACE { Aliasing::InPlace } else { Aliasing::OutOfPlace };
        let own = [
            input("cos", DType::F32, &table).rows(),
            input("sin", DType::F32, &table).rows(),
            output("y", DType::Bf16, &rotated).rows().placed(aliasing, "out"),
            upstream("dy", "y").drawn(c.attention.distribution, 1.0),
            gradient("dout", "out", DType::Bf16),
        ];
        SparseAttention::tensors(&c.attention).with(own)
    }

    fn check(c: &AttentionOutputRotationCase) -> Result<(), Refused> {
        SparseAttention::check(&c.attention)?;
        if c.rope_dim == 0 || !c.rope_dim.is_multiple_of(2) || c.rope_dim > c.attention.v_dim {
            return refuse(
                "rope_dim",
                format!("{} must be even, 2 to v_dim {}", c.rope_dim, c.attention.v_dim),
            );
        }
        Ok(())
    }

    fn oracle_elements(c: &AttentionOutputRotationCase) -> u128 {
        SparseAttention::oracle_elements(&c.attention)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<AttentionOutputRotationCase> {
        // Multiples of 8 rotate whole vectors; the model's own is 64.
        let rope_dim = prop_oneof![2 => Just(64usize), 1 => Just(16), 1 => (1..=24usize).prop_map(|half| 2 * half)];
        (SparseAttention::strategy(profile), rope_dim)
            .prop_map(|(attention, rope_dim)| {
                let rope_dim = rope_dim.min(attention.v_dim);
                plain(attention, rope_dim)
            })
            .boxed()
    }

    fn typical() -> Vec<AttentionOutputRotationCase> {
        let base = SparseAttentionCase::plain(3, 5, 64, 23, 37)
            .with(|case| case.lengths = Lengths::Within);
        let separate = base.clone().with(|case| {
            case.values = Values::Separate;
            case.v_dim = 32;
            case.dlse = true;
            case.key_gradient = Float::F32;
        });
        vec![plain(base.with(|case| case.dlse = true), 64), plain(separate, 6)]
    }

    fn edge_cases(profile: Profile) -> Vec<AttentionOutputRotationCase> {
        let case = SparseAttentionCase::plain;
        let (summed, hopper) = (sparse_attention::summed, sparse_attention::hopper);
        let separate = |case| SparseAttentionCase { values: Values::Separate, v_dim: 32, ..case };
        let mut cases = vec![
            plain(case(0, 4, 64, 9, 5), 16),
            // No key: the rotation's input is zero.
            plain(case(3, 5, 64, 0, 7), 64),
            plain(
                case(5, 6, 64, 23, 37).with(|case| {
                    case.dlse = true;
                    case.sinks = Sinks::Extreme;
                }),
                16,
            ),
            plain(case(4, 20, 64, 40, 65).then(separate), 16),
            plain(summed(case(5, 6, 64, 23, 37).with(|case| case.sinks = Sinks::Absent)), 64),
            // The scalar rotation.
            plain(summed(case(4, 20, 64, 40, 65).then(separate)), 14),
            plain(hopper(case(2, 5, 512, 50, 70)), 64),
            plain(summed(hopper(case(2, 5, 512, 50, 70))), 64),
        ];
        if profile == Profile::Full {
            cases.push(plain(hopper(case(12, 64, 512, 4096, 640)), 64));
        }
        cases
    }

    /// No edge cases except those of the operators, which list them.
    fn fastest(
        c: &AttentionOutputRotationCase,
        environment: &Environment,
    ) -> AttentionOutputRotationCase {
        plain(SparseAttention::fastest(&c.attention, environment), c.rope_dim)
    }

    fn cannot_run(c: &AttentionOutputRotationCase, environment: &Environment) -> Option<String> {
        SparseAttention::cannot_run(&c.attention, environment)
    }

    fn amend(c: &AttentionOutputRotationCase, tensors: &mut Tensors) -> OracleResult<()> {
        SparseAttention::amend(&c.attention, tensors)?;
        let (cos, sin) = table(c)?;
        // Rounded as a kernel stores them.
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        Ok(())
    }

    fn forward(
        c: &AttentionOutputRotationCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let (attended, inputs) = rotation(c, t, rounding)?;
        Ok(attended.with("y", reference::forward(&inputs, rounding)?.y))
    }

    fn backward(
        c: &AttentionOutputRotationCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let (_, inputs) = rotation(c, t, rounding)?;
        let dout = reference::backward(&inputs, &t.f64("dy")?, rounding)?.dx;
        let handed = t.clone().with("dout", rounding.bf16(&dout)?);
        Ok(SparseAttention::backward(&c.attention, &handed, rounding)?.with("dout", dout))
    }

    fn backward_of_saved(
        c: &AttentionOutputRotationCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        SparseAttention::backward_of_saved(&c.attention, t, rounding)
    }

    fn workspaces(
        c: &AttentionOutputRotationCase,
        v: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        SparseAttention::workspaces(&c.attention, &v.without(&OF_THE_ROTATION), device)
    }

    fn launch(
        c: &AttentionOutputRotationCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        SparseAttention::launch(&c.attention, &v.without(&OF_THE_ROTATION), run)?;
        // What the attention's backward reads.
        run.freeze(&v["out"])?;
        run.freeze(&v["lse"])?;
        run.ran(launcher::forward(run.device(), &rotated(v, "out", "y"), true)?);
        Ok(())
    }

    fn launch_backward(
        c: &AttentionOutputRotationCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.ran(format!(
            "backward {}",
            launcher::backward(run.device(), &rotated(v, "dy", "dout"), true)?
        ));
        run.freeze(&v["dout"])?;
        SparseAttention::launch_backward(&c.attention, &v.without(&OF_THE_ROTATION), run)
    }

    fn invariant(_: &AttentionOutputRotationCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &AttentionOutputRotationCase, laws: &mut Laws<'_, Self>) {
        laws.permute("tokens may be permuted", "num_tokens");
        laws.independent("num_tokens");
    }

    fn is_smooth(c: &AttentionOutputRotationCase) -> bool {
        SparseAttention::is_smooth(&c.attention)
    }
}
