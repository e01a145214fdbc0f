//! Launches that are kept for calls on tensors elsewhere are those that a launcher would make
//! there.

use std::sync::Arc;

use dsv4_parity::calls::observed::hopper;
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operator::benchmarks::Direction;
use dsv4_parity::operator::call::Call;
use dsv4_parity::operators::registry;
use dsv4_runtime::kept::Kept;
use dsv4_runtime::recording::{AcceptedLaunch, RecordingBackend};
use dsv4_runtime::{Device, Environment, RuntimeError, TensorView, Views};
use rayon::prelude::*;

use crate::extent::left_out;

/// Between the tensors of a call, and between the first ones of two calls: bytes.
const BETWEEN: u64 = 1 << 40;

/// Cases of an operator that are tried: a share of all.
const TRIED: usize = 40;

type Named = Vec<(&'static str, TensorView)>;

/// A call's tensors and workspaces, at addresses of a room of their own. `odd` are at odd places.
fn tensors(call: &Call, device: &Device, room: u64, odd: bool) -> Option<Named> {
    let address = |number: usize| {
        let number = number as u64 + 1;
        room * (BETWEEN << 8) + number * BETWEEN + if odd { 8 * number } else { 0 }
    };
    let placed = call.placed(address).ok()?;
    let mut named: Named = placed.into_iter().map(|(spec, view)| (spec.name, view)).collect();
    let workspaces = call.workspaces(&views(&named), device).ok()?;
    for (number, (name, bytes)) in workspaces.into_iter().enumerate() {
        let at = address(200 + number) & !15;
        named.push((name, TensorView::dense(name, at, dsv4_runtime::DType::U8, &[bytes])));
    }
    Some(named)
}

fn views(named: &Named) -> Views {
    let mut views = Views::new();
    named.iter().for_each(|(name, view)| views.put(name, view.clone()));
    views
}

fn at(named: &Named, addresses: &[TensorView]) -> Named {
    named.iter().zip(addresses).map(|((name, _), view)| (*name, view.clone())).collect()
}

/// Of a direction of a call: kept here, launched there, compared with what the launcher does there.
struct Compared {
    kept: Vec<AcceptedLaunch>,
    launched: Vec<AcceptedLaunch>,
}

fn compared(
    call: &Call,
    direction: Direction,
    environment: &Environment,
    odd: bool,
) -> Option<Compared> {
    let backend = Arc::new(RecordingBackend::accepting(environment.clone()));
    let device = Device::of_accepting(backend.clone(), dsv4_kernels::sources());
    let (here, there) = (tensors(call, &device, 1, odd)?, tensors(call, &device, 3, odd)?);
    call.launch(direction, &views(&there), &device).ok()?;
    let launched = backend.take_accepted();
    let of_here: Vec<TensorView> = here.iter().map(|(_, view)| view.clone()).collect();
    let launch = |device: &Device, placed: &[TensorView]| -> Result<_, RuntimeError> {
        call.launch(direction, &views(&at(&here, placed)), device)
    };
    let (kept, _) = Kept::of(&device, &of_here, launch)?;
    assert!(backend.take_accepted().is_empty(), "watching launches nothing");
    let addresses: Vec<u64> = there.iter().map(|(_, view)| view.address).collect();
    let taken = kept.launch(&device, &addresses).expect("accepted");
    assert!(taken, "{}", call.line().line());
    Some(Compared { kept: backend.take_accepted(), launched })
}

/// How many directions of calls were compared, and how those differ that do.
fn differences(operator: &AnyOperator, environment: &Environment) -> (usize, Vec<String>) {
    let templates = operator.templates();
    let (mut count, mut found) = (0, Vec::new());
    for case in templates.iter().step_by(templates.len().div_ceil(TRIED)) {
        let Ok(call) = operator.call(case) else { continue };
        for call in [call.fastest(environment), call] {
            for direction in [Direction::Forward, Direction::Backward] {
                let backward = matches!(direction, Direction::Backward);
                if backward && !call.has_backward() {
                    continue;
                }
                for odd in [false, true] {
                    let Some(both) = compared(&call, direction, environment, odd) else { continue };
                    count += 1;
                    if both.kept != both.launched {
                        found.push(format!("{direction:?} {}", call.line().line()));
                    }
                }
            }
        }
    }
    (count, found)
}

#[test]
fn kept_launches_are_those_of_the_launcher_at_other_addresses_for_every_operator() {
    if left_out(&["kernels/src/", "kernels/runtime/src/"]) {
        return;
    }
    let of_operator = |operator: &&AnyOperator| (operator.name(), differences(operator, &hopper()));
    // Operators of ranks move tensors between them, which is more than launches.
    let operators: Vec<&AnyOperator> = registry::functions().collect();
    let all: Vec<_> = operators.par_iter().map(of_operator).collect();
    let differing: Vec<_> = all.iter().flat_map(|(_, (_, found))| found).collect();
    assert!(differing.is_empty(), "{differing:#?}");
    let none = all.iter().filter(|(_, (count, _))| *count == 0).map(|(name, _)| *name);
    let none: Vec<_> = none.collect();
    assert_eq!(none, [""; 0], "kept for no case");
}
