//! Fields of a line in addition to the operator's own, and the laws of a case.

use std::collections::BTreeSet;

use dsv4_parity::case::Case;
use dsv4_parity::judge::checks::{self, CheckOptions};
use dsv4_parity::judge::truths::Truths;
use dsv4_parity::operator::{PreparedCase, Profile};
use dsv4_parity::operators::registry;
use dsv4_reference::precision::Precision;

use crate::support;

const RMS_NORM: &str = r#"{"operator":"rms_norm","num_rows":4,"width":32,"dtype":"f32","weight":"f32","eps":1e-6,
    "aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":3}"#;

/// A case of swiglu without padding rows.
fn swiglu(fields: &str) -> String {
    format!(
        r#"{{"operator":"swiglu","num_rows":6,"width":64,"dtype":"f32","weighted":true,"padding_rows":false,
            "distribution":"powers_of_two","seed":1,{fields}}}"#
    )
}

fn prepare(line: &str) -> Result<Box<dyn PreparedCase>, String> {
    Case::parse(line).and_then(|case| registry::prepare(&case)).map_err(|error| error.to_string())
}

fn laws(line: &str) -> BTreeSet<&'static str> {
    prepare(line)
        .unwrap()
        .laws()
        .into_iter()
        .filter(|law| law.left_out.is_none())
        .map(|law| law.name)
        .collect()
}

#[test]
fn a_field_that_nobody_knows_is_refused_by_name_though_cases_share_fields() {
    assert!(prepare(RMS_NORM).is_ok());
    let error = prepare(&RMS_NORM.replacen("\"seed\"", "\"seeed\":1,\"seed\"", 1)).err().unwrap();
    assert!(
        error.contains("`seeed`") && error.contains("rms_norm") && error.contains("magnitude"),
        "{error}"
    );
    let error = prepare(&RMS_NORM.replace(",\"seed\":3", "")).err().unwrap();
    assert!(error.contains("missing field `seed`"), "{error}");
    let error =
        prepare(&RMS_NORM.replace("\"magnitude\":1.0", "\"magnitude\":-1.0")).err().unwrap();
    assert!(error.contains("`magnitude`") && error.contains("-1"), "{error}");
}

#[test]
fn special_numbers_are_refused_where_nothing_is_clamped_and_unknown_ones_everywhere() {
    let error = prepare(&RMS_NORM.replacen('{', "{\"special\":\"not_finite\",", 1)).err().unwrap();
    assert!(error.contains("`special`") && error.contains("clamped"), "{error}");
    for (special, why) in [
        (r#"{"nan_in":"positions"}"#, "`positions` of the case can hold a NaN"),
        (r#"{"infinity_in":"y"}"#, "`y` of the case can hold an infinity"),
        (r#"{"alone":"dy"}"#, "no upstream gradient `dy` beside others"),
    ] {
        let error = prepare(&RMS_NORM.replacen('{', &format!("{{\"special\":{special},"), 1))
            .err()
            .unwrap();
        assert!(error.contains("`special`") && error.contains(why), "{error}");
    }
    let error = prepare(&swiglu(r#""limit":1.0,"magnitude":1.0,"special":"odd""#)).err().unwrap();
    assert!(error.contains("`special`") && error.contains("odd"), "{error}");
}

#[test]
fn special_numbers_reach_the_oracle_and_are_among_the_corners_of_whoever_clamps() {
    let truth = |line: &str| {
        let case = Case::parse(line).unwrap();
        Truths::default().of(&case, &*registry::prepare(&case).unwrap()).unwrap()
    };
    let special = truth(&swiglu(r#""limit":1.0,"magnitude":1.0,"special":"not_finite""#));
    assert!(special.exact[0].values.iter().any(|value| value.is_nan()));
    let edge_cases = registry::find("swiglu").unwrap().edge_cases(Profile::Quick);
    let named: BTreeSet<_> =
        edge_cases.iter().filter_map(|case| case.fields.get("special")?.as_str()).collect();
    assert_eq!(named, ["at_the_limit", "not_finite"].into());
    let drawn = truth(&swiglu(r#""limit":1.0,"magnitude":1.0"#));
    assert!(drawn.exact[0].values.iter().all(|value| value.is_finite()));
}

#[test]
fn a_lone_nan_or_infinity_of_every_operator_stands_where_it_counts() {
    let results = |case: &Case| {
        let exact = registry::prepare(case).unwrap().oracle(Precision::Exact).unwrap();
        exact
            .iter()
            .flat_map(|tensor| &tensor.values)
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    // What a cache held before shows nowhere. A NaN disables a filter of the sampler, which shows
    // only where another id then wins. The sampler's own tests and planted bugs check that.
    let is_quiet = |special: &serde_json::Value| {
        let of = special.as_object().into_iter().flatten().map(|(_, tensor)| tensor.as_str());
        of.flatten().any(|tensor| ["cache", "top_p", "min_p"].contains(&tensor))
    };
    for name in registry::names() {
        let mut lone = 0;
        for case in registry::find(name).unwrap().edge_cases(Profile::Quick) {
            let Some(special) = case.fields.get("special").filter(|special| special.is_object())
            else {
                continue;
            };
            if special.get("alone").is_some() || is_quiet(special) {
                continue;
            }
            let mut without = case.clone();
            without.fields.remove("special");
            assert!(results(&case) != results(&without), "{name}: {special} counts nowhere");
            lone += 1;
        }
        // Integers have neither.
        let tensors = registry::find(name).unwrap().describe().tensors;
        let given = tensors.iter().filter(|tensor| tensor.part == "input");
        let has_numbers = given
            .flat_map(|tensor| &tensor.dtypes)
            .any(|dtype| ["bf16", "f32"].contains(&dtype.as_str()));
        assert!(lone > 1 || !has_numbers, "{name} has {lone} cases with a lone number");
    }
}

#[test]
fn scaling_is_a_law_where_fp32_scales_exactly_and_none_where_something_underflows() {
    let scaling: BTreeSet<_> = ["weight counts once", "upstreams scale the gradients once"].into();
    let of = |fields: &str| {
        laws(&swiglu(fields)).intersection(&scaling).copied().collect::<BTreeSet<_>>()
    };
    assert_eq!(of(r#""limit":10.0,"magnitude":8.0"#), scaling);
    // The sigmoid of the gate -200 is zero in fp32, scaled or not.
    assert_eq!(of(r#""limit":10.0,"magnitude":8.0,"special":"at_the_limit""#), scaling);
    assert_eq!(of(r#""limit":10.0,"magnitude":8.0,"special":"not_finite""#), scaling);
    // That of -88 is subnormal, and so is every product with it.
    assert_eq!(of(r#""limit":10.0,"magnitude":11.0"#), BTreeSet::new());
    // The other laws do not scale.
    let others: BTreeSet<_> =
        ["independence", "rows may be permuted", "channels may be permuted"].into();
    let subnormal = swiglu(r#""limit":10.0,"magnitude":11.0"#);
    assert_eq!(laws(&subnormal), others);
    // Skipped laws are counted.
    let options = CheckOptions::of_kernels(0);
    let outcome = checks::run(&*prepare(&subnormal).unwrap(), support::device(), options);
    let skipped: BTreeSet<_> =
        outcome.skips.iter().filter_map(|skip| skip.what.strip_prefix("law: ")).collect();
    assert_eq!(skipped, scaling);
}
