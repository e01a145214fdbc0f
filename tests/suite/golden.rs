//! What the comparison with a golden file detects. Every operator's files have separate tests
//! (`tests/operators`).

use dsv4_parity::judge::golden_run;
use dsv4_parity::judge::truth::Truth;
use dsv4_parity::operator::golden_file::{self, GoldenFile};
use dsv4_parity::operator::{AnyOperator, GoldenCase};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CheckRecord, Verdict};

use crate::command_line::Parity;
use crate::support;

/// The first golden file about rms_norm, with the oracle's results.
fn first_file() -> (GoldenFile, GoldenCase, Truth) {
    let dir = support::fixtures().join("golden");
    let operator = registry::find("rms_norm").unwrap();
    let names = golden_run::files_about(&dir, &[operator]).unwrap();
    let file = golden_file::read(&dir.join(names.first().expect("a file about rms_norm"))).unwrap();
    let case = golden_run::cases_of(&file, &[operator]).unwrap().pop().expect("a case");
    let truth = Truth::of(&*case.prepared, case.prepared.arithmetic()).unwrap();
    (file, case, truth)
}

fn golden_check<'a>(checks: &'a [CheckRecord], tensor: &str) -> &'a CheckRecord {
    checks
        .iter()
        .find(|c| c.check == "golden" && c.tensor == tensor)
        .expect("a golden check of each tensor")
}

#[test]
fn a_golden_value_that_is_no_finite_number_is_noticed_where_the_oracle_has_one() {
    let (file, mut case, truth) = first_file();
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let original = std::mem::replace(&mut case.expected[0].values[5], value);
        let record = golden_run::run_by(&truth, &file, &case, None);
        let check = golden_check(&record.checks, case.expected[0].name);
        assert_ne!(check.verdict, Verdict::Pass, "{value} in {}", check.tensor);
        case.expected[0].values[5] = original;
    }
}

/// How many cases rms_norm makes of a file of this name with the tensors of `file`.
fn made_of(file: &GoldenFile, name: &str) -> Result<usize, String> {
    let operator = golden_file::kind_of(name).to_owned();
    let file = GoldenFile { name: name.to_owned(), operator, ..file.clone() };
    let cases =
        registry::find("rms_norm").unwrap().golden(&file).map_err(|error| error.to_string())?;
    Ok(cases.len())
}

#[test]
fn a_file_of_a_declared_kind_that_does_not_fit_is_an_error_and_one_of_another_kind_is_nothing() {
    let (file, ..) = first_file();
    assert_eq!(made_of(&file, "rmsnorm__again.safetensors"), Ok(1));
    assert_eq!(made_of(&file, "experts__a.safetensors"), Ok(0));
    let mut broken = file.clone();
    broken.tensors.remove("in.x");
    assert!(made_of(&broken, "rmsnorm__broken.safetensors").unwrap_err().contains("in.x"));
}

#[test]
fn a_golden_tensor_of_another_length_or_name_is_an_error() {
    let (file, mut case, truth) = first_file();
    case.expected[0].values.pop();
    let record = golden_run::run_by(&truth, &file, &case, None);
    assert_eq!(golden_check(&record.checks, case.expected[0].name).verdict, Verdict::Error);
    case.expected[0].name = "absent";
    let record = golden_run::run_by(&truth, &file, &case, None);
    assert_eq!(golden_check(&record.checks, "absent").verdict, Verdict::Error);
}

#[test]
fn a_golden_file_is_of_the_operators_that_declare_its_kind_and_of_no_other() {
    let dir = support::fixtures().join("golden");
    for name in golden_file::names_in(&dir).unwrap() {
        let file = golden_file::read(&dir.join(&name)).unwrap();
        let declares = |operator: &&&'static AnyOperator| {
            operator.golden_kinds().contains(&golden_file::kind_of(&name))
        };
        let makes = |operator: &&&'static AnyOperator| !operator.golden(&file).unwrap().is_empty();
        let names = |operators: Vec<&&'static AnyOperator>| {
            operators.into_iter().map(|o| o.name()).collect::<Vec<_>>()
        };
        let declared = names(registry::OPERATORS.iter().filter(declares).collect());
        assert_eq!(names(registry::OPERATORS.iter().filter(makes).collect()), declared, "{name}");
    }
}

#[test]
fn the_golden_files_of_an_operator_are_read_and_no_other() {
    let (dir, here) = (support::fixtures().join("golden"), tempfile::tempdir().unwrap());
    let all = golden_file::names_in(&dir).unwrap();
    all.iter().for_each(|name| std::fs::write(here.path().join(name), "no golden file").unwrap());
    let own = golden_run::files_about(here.path(), &[registry::find("rms_norm").unwrap()]).unwrap();
    assert!(!own.is_empty() && own.len() < all.len() / 2, "{own:?}");
    // The other files are not golden files: reading one would be an error.
    for name in &own {
        std::fs::copy(dir.join(name), here.path().join(name)).unwrap();
    }
    let folder = here.path().to_str().unwrap();
    let read =
        |ops: &[&str]| Parity::new(&[&["golden", folder, "--oracles-only"], ops].concat()).run();
    let output = read(&["--ops", "rms_norm"]);
    output.assert_code(0);
    assert!(output.stdout.contains(&format!("{} golden cases", own.len())), "{}", output.stdout);
    read(&[]).assert_code(2);
}
