//! `refusals::OPERATOR`: every argument of its launchers, made invalid in every way that its
//! declaration defines.

use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;
use libtest_mimic::Trial;

use crate::{Extent, shared};

/// One in this many operators is in the smoke test.
const SMOKE: usize = 8;

pub fn trial(operator: &'static AnyOperator, extent: Extent) -> Option<Trial> {
    // The launchers of a chain belong to its operators.
    let own = operator.chain().is_empty();
    own.then(|| {
        crate::trial(format!("refusals::{}", operator.name()), move || run(operator, extent))
    })
}

fn run(operator: &AnyOperator, extent: Extent) -> Result<String, String> {
    if extent == Extent::Commit
        && !is_in_smoke_test(operator)
        && !shared::concerned()?.contains(operator.name())
    {
        return Ok("left out: the commit changed none of its files".to_owned());
    }
    shared::compiled(operator)?;
    let refusals =
        shared::on_device(|device| operator.refusals(device)).map_err(|error| error.to_string())?;
    let wrong: Vec<String> = refusals
        .iter()
        .filter_map(|refusal| {
            refusal.problem.as_ref().map(|problem| format!("{}: {problem}", refusal.what))
        })
        .collect();
    match (refusals.len(), wrong.is_empty()) {
        (0, _) => Err("no argument was corrupted".to_owned()),
        (count, true) => Ok(format!("{count} bad arguments refused by name")),
        (count, false) => {
            Err(format!("{} of {count} bad arguments:\n{}", wrong.len(), wrong.join("\n")))
        }
    }
}

fn is_in_smoke_test(operator: &AnyOperator) -> bool {
    let place = registry::OPERATORS.iter().position(|other| other.name() == operator.name());
    place.is_some_and(|place| place.is_multiple_of(SMOKE))
}
