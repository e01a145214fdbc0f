//! Operators as functions of a caller's tensors: the case of a call is found from its tensors.

use dsv4_parity::calls::observed::{Observer, hopper};
use dsv4_parity::calls::signature::{Kind, Signature};
use dsv4_parity::calls::solve::{self, Given, Options};
use dsv4_parity::operators::registry;
use dsv4_runtime::DType;
use rayon::prelude::*;
use serde_json::json;

/// The most cases of each operator that are solved again.
const CASES: usize = 6;

fn signature(operator: &str) -> Signature {
    Signature::of(registry::find(operator).expect("an operator"))
}

fn given(name: &str, dtype: DType, shape: &[usize]) -> Given {
    let strides = dsv4_runtime::tensor::dense_strides(shape);
    Given { name: name.to_owned(), dtype, shape: shape.to_vec(), strides }
}

#[test]
fn the_cases_of_every_operator_are_found_again_from_their_tensors_and_options() {
    let all = std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all");
    let most = if all { usize::MAX } else { CASES };
    let wrong: Vec<String> = registry::functions()
        .collect::<Vec<_>>()
        .par_iter()
        .flat_map_iter(|operator| {
            let signature = Signature::of(operator);
            assert!(signature.has(0), "{} launches nothing", operator.name());
            solve::rediscover(&signature, &Observer::new(hopper()), most)
        })
        .collect();
    assert_eq!(wrong, [""; 0]);
}

#[test]
fn fields_about_data_are_no_arguments_and_numbers_have_the_models_values() {
    let signature = signature("rms_norm");
    let kinds: Vec<_> =
        signature.fields.iter().map(|field| (field.keyword.as_str(), &field.kind)).collect();
    for data in ["seed", "distribution", "magnitude", "zero_rows", "aliasing"] {
        assert!(kinds.iter().all(|(name, _)| *name != data), "{data}: {kinds:?}");
    }
    let eps = signature.fields.iter().find(|field| field.keyword == "eps").expect("eps");
    assert_eq!((&eps.kind, &eps.default), (&Kind::Number, &Some(json!(1e-6))));
}

/// Axes of NVFP4 codes have half of the field's size, where other formats have the field itself.
#[test]
fn sizes_of_nvfp4_products_are_found_from_their_codes() {
    let observer = Observer::new(hopper());
    let number = |name: &str, shape: &[usize]| given(name, DType::F32, shape);
    let bytes = |name: &str, shape: &[usize]| given(name, DType::U8, shape);
    let list = |name: &str, shape: &[usize]| given(name, DType::I32, shape);
    let linear = [
        bytes("x", &[5, 32]),
        bytes("w", &[8, 32]),
        bytes("x_scales", &[5, 4]),
        bytes("w_scales", &[8, 4]),
        number("x_global_scale", &[1]),
        number("w_global_scale", &[1]),
    ];
    let grouped = [
        bytes("x", &[5, 32]),
        bytes("w", &[2, 8, 32]),
        bytes("x_scales", &[5, 4]),
        bytes("w_scales", &[2, 8, 4]),
        list("counts", &[2]),
        list("expert_offsets", &[3]),
        number("x_global_scale", &[1]),
        number("w_global_scale", &[2]),
    ];
    for (name, tensors, more) in [
        ("linear", &linear[..], json!({})),
        ("grouped_linear", &grouped, json!({"expected_rows": 2})),
    ] {
        let mut options = Options::from_iter([("weights".to_owned(), json!("nvfp4"))]);
        options.extend(more.as_object().expect("an object").clone());
        let solved = solve::solve(&signature(name), 0, tensors, &options, &observer);
        let solved = solved.unwrap_or_else(|misfit| panic!("{}", misfit.message(name)));
        let fields = solved.call.line().fields;
        let of = |field: &str| fields[field].clone();
        assert_eq!([of("in_features"), of("out_features"), of("group")], [64, 8, 16], "{name}");
    }
}

#[test]
fn a_misfit_names_the_argument_the_value_and_the_rule() {
    let (signature, observer) = (signature("rms_norm"), Observer::new(hopper()));
    let x = given("x", DType::F32, &[3, 8]);
    let refused = |tensors: &[Given], options: Options| match solve::solve(
        &signature, 0, tensors, &options, &observer,
    ) {
        Ok(solved) => panic!("not refused: {}", solved.call.line().line()),
        Err(misfit) => misfit.message("rms_norm"),
    };
    let weight = given("weight", DType::F32, &[7]);
    assert_eq!(
        refused(&[x.clone(), weight], Options::new()),
        "rms_norm: argument `weight`: shape [7] must be [8] (width)"
    );
    let negative = Options::from([("eps".to_owned(), json!(-1.0))]);
    assert_eq!(
        refused(std::slice::from_ref(&x), negative),
        "rms_norm: argument `eps`: -1 must be finite and above 0"
    );
    let word = Options::from([("eps".to_owned(), json!("a"))]);
    assert_eq!(refused(&[x], word), "rms_norm: argument `eps`: \"a\" must be a number");
    assert_eq!(
        refused(&[given("x", DType::I32, &[3, 8])], Options::new()),
        "rms_norm: argument `x`: element type i32 must be bf16 or f32"
    );
    assert_eq!(refused(&[], Options::new()), "rms_norm: argument `x`: it must be present");
}

#[test]
fn a_number_that_no_tensor_tells_must_be_given() {
    let (signature, observer) = (signature("topk"), Observer::new(hopper()));
    let scores = [given("scores", DType::F32, &[3, 70])];
    let solve = |options| solve::solve(&signature, 0, &scores, &options, &observer);
    let misfit = solve(Options::new()).err().expect("topk is not known");
    assert_eq!(misfit.message("topk"), "topk: argument `topk`: it must be given");
    let solved = solve(Options::from([("topk".to_owned(), json!(9))])).expect("a call");
    let written: Vec<_> = solved.observed.written(0).map(|seen| seen.spec.shape()).collect();
    assert_eq!(written, [[3, 9]]);
}
