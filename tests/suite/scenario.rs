//! Errors of a composition, which no kernel has. FM-03: an inverse rotation that runs in place on
//! the attention's saved output. And an attention layer that adds up its gradients wrongly, or
//! whose backward reads other keys than its forward.

use std::collections::BTreeSet;

use dsv4_parity::case::{Case, CaseError, Distribution};
use dsv4_parity::judge::checks::{self, CheckOptions, Outcome};
use dsv4_parity::operator::fields::{Float, Implementation};
use dsv4_parity::operator::{AnyOperator, PreparedCase};
use dsv4_parity::operators::attention::attention_layer::{
    AttentionLayer, KEYS_NOT_TURNED_IN_BACKWARD, TERM_OF_KEYS_TWICE, TERM_OF_QUERIES_MISSING,
};
use dsv4_parity::operators::attention::attention_output_rotation::{
    AttentionOutputRotation, AttentionOutputRotationCase,
};
use dsv4_parity::operators::attention::sinks::Sinks;
use dsv4_parity::operators::attention::sparse_attention::{
    KeyGradients, SparseAttentionCase, Values,
};
use dsv4_parity::operators::lists::{IndexClass, Lengths};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CheckRecord, Verdict};
use serde_json::json;

use crate::support::device;

const NAME: &str = "attention_output_rotation";

const OPTIONS: CheckOptions = CheckOptions::of_kernels(1);

/// Hostile lists, sinks of the magnitude of lse, a gradient of lse.
fn case(values: Values, v_dim: usize) -> SparseAttentionCase {
    SparseAttentionCase {
        num_tokens: 5,
        num_heads: 6,
        head_dim: 64,
        values,
        v_dim,
        num_keys: 23,
        topk: 37,
        indices: IndexClass::Hostile,
        lengths: Lengths::Within,
        sinks: Sinks::Normal,
        softmax_scale: 0.125,
        logit_deviation: 2.0,
        logit_shift: 0.0,
        key_gradient: Float::F32,
        key_gradients: KeyGradients::Atomic,
        dlse: true,
        distribution: Distribution::Normal,
        poison_unreferenced: true,
        implementation: Implementation::Portable,
        seed: 3,
    }
}

/// The chain on strided rows: the registry's chain, or one whose rotation runs in place.
fn prepare(
    attention: SparseAttentionCase,
    rope_dim: usize,
    in_place: bool,
) -> Result<Box<dyn PreparedCase>, CaseError> {
    let separate: &[_] = if attention.values == Values::Separate { &["v", "dv"] } else { &[] };
    let mut case = Case::new(NAME, &AttentionOutputRotationCase { attention, rope_dim });
    let mut layouts = serde_json::Map::new();
    for (names, last) in [
        (&["q", "k", "dq", "dk"][..], "head_dim"),
        (&["out", "y", "dout", "dy"], "v_dim"),
        (separate, "v_dim"),
        (&["cos", "sin"], "half_rope_dim"),
    ] {
        layouts.extend(names.iter().map(|&name| (name.to_owned(), json!({ "gaps": { last: 8 } }))));
    }
    case.fields.insert("layouts".into(), layouts.into());
    if in_place {
        AnyOperator::of::<AttentionOutputRotation<true>>().prepare(&case)
    } else {
        registry::prepare(&case)
    }
}

fn outcome(case: SparseAttentionCase, rope_dim: usize, in_place: bool) -> Outcome {
    let chain = prepare(case, rope_dim, in_place).expect("a case that attention takes");
    checks::run(&*chain, device(), OPTIONS)
}

/// `(check, tensor)` of everything that did not pass.
fn failed(outcome: &Outcome) -> BTreeSet<(&str, &str)> {
    outcome.failures().map(|check| (check.check.as_str(), check.tensor.as_str())).collect()
}

#[test]
fn out_of_place_rotation_agrees_everywhere() {
    for (values, v_dim, rope_dim) in
        [(Values::Shared, 64, 64), (Values::Shared, 64, 16), (Values::Separate, 32, 16)]
    {
        let outcome = outcome(case(values, v_dim), rope_dim, false);
        let failures: Vec<_> = outcome.failures().collect();
        assert!(outcome.passed(), "{values:?}, rope_dim {rope_dim}: {failures:?}");
        let gradients = outcome.checks.iter().filter(|check| check.check == "gradient");
        let seen: BTreeSet<&str> = gradients.map(|check| check.tensor.as_str()).collect();
        let expected = ["dk", "dout", "dq", "dsink"]
            .into_iter()
            .chain((values == Values::Separate).then_some("dv"));
        assert_eq!(seen, expected.collect());
    }
}

#[test]
fn in_place_rotation_of_the_saved_output_is_reported_as_an_overwritten_input_and_as_wrong_gradients()
 {
    for (values, v_dim, rope_dim) in [(Values::Shared, 64, 64), (Values::Separate, 32, 16)] {
        let outcome = outcome(case(values, v_dim), rope_dim, true);
        // Only delta = <out, dout> is corrupted: y, dout, and (by its absence here) dv, stay right.
        let wrong = ["dk", "dq", "dsink"];
        // The saved tensors are those that the forward left, and dsink no longer follows from them.
        let mut expected =
            BTreeSet::from([("inputs_unchanged", "out"), ("gradient_of_saved", "dsink")]);
        expected.extend(
            wrong
                .iter()
                .flat_map(|tensor| ["gradient", "bias", "precision"].map(|check| (check, *tensor))),
        );
        assert_eq!(failed(&outcome), expected, "{values:?}");
        let compared = |tensor: &str| {
            let passes =
                |check: &&CheckRecord| check.tensor == tensor && check.verdict == Verdict::Pass;
            outcome.checks.iter().filter(passes).map(|check| check.compared).sum::<u64>()
        };
        assert!(compared("y") > 0 && compared("dout") > 0);
        assert_eq!(compared("dv") > 0, values == Values::Separate);
    }
}

#[test]
fn a_rotation_that_fits_no_value_row_is_refused() {
    for rope_dim in [0, 15, 66] {
        let error = prepare(case(Values::Shared, 64), rope_dim, false)
            .err()
            .expect("a refusal")
            .to_string();
        assert!(error.contains("rope_dim") && error.contains(&rope_dim.to_string()), "{error}");
    }
}

#[test]
fn no_case_asks_for_the_rotation_in_place() {
    for field in ["in_place", "aliasing"] {
        let mut line = Case::new(
            NAME,
            &AttentionOutputRotationCase { attention: case(Values::Shared, 64), rope_dim: 16 },
        );
        line.fields.insert(field.into(), true.into());
        let error = registry::prepare(&line).err().expect("a refusal").to_string();
        assert!(error.contains(field), "{error}");
    }
}

/// What fails of a typical case of a layer over a window alone with this fault.
fn failed_of_layer<const FAULT: u8>() -> BTreeSet<(String, String)> {
    let layer = AnyOperator::of::<AttentionLayer<FAULT>>();
    let case = layer.typical_cases().swap_remove(1);
    let outcome = checks::run(&*layer.prepare(&case).expect("a case"), device(), OPTIONS);
    let failures = outcome.failures().filter(|check| check.check == "gradient");
    failures.map(|check| (check.check.as_str().to_owned(), check.tensor.clone())).collect()
}

#[test]
fn a_layer_whose_gradients_are_added_up_wrongly_or_of_other_keys_is_found_by_what_follows() {
    let gradients = |names: &[&str]| -> BTreeSet<(String, String)> {
        names.iter().map(|name| ("gradient".to_owned(), (*name).to_owned())).collect()
    };
    assert_eq!(failed_of_layer::<0>(), gradients(&[]));
    assert_eq!(failed_of_layer::<TERM_OF_QUERIES_MISSING>(), gradients(&["dh"]));
    assert_eq!(failed_of_layer::<TERM_OF_KEYS_TWICE>(), gradients(&["dh"]));
    // All that is computed of dq and dkv. The sink's follows from what the forward saved.
    let of_attention = [
        "dq", "dkeys", "dq_b", "dwq_b", "dqr", "dq_norm", "dq_a", "dwq_a", "dn", "dkv_norm",
        "dkv_a", "dwkv", "dh",
    ];
    assert_eq!(failed_of_layer::<KEYS_NOT_TURNED_IN_BACKWARD>(), gradients(&of_attention));
}
