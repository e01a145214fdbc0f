//! How long a case's kernels take, beside somebody else's of the same case.

use std::time::Duration;

use dsv4_kernels::runtime::{Contract, Device, RuntimeError};

use super::declared::{Declared, Inputs, Launches};
use crate::record::Seconds;

/// Calls before those that are timed.
const WARM_UPS: usize = 3;
/// Calls that are timed, each by itself; the median counts.
const CALLS: usize = 11;

/// The times of the forward and of the backward, where there is one.
pub(super) fn of<K: Declared>(inputs: &Inputs<K>, device: &Device) -> Result<Seconds, RuntimeError> {
    let specs = inputs.specs();
    let placed = inputs.placed(device, Contract::NAN, &specs)?;
    // What is recorded may not compile, and the backward reads what a forward saved.
    inputs.launched(&specs, &placed)?;
    let forward = median(device, || K::launch(&inputs.case, placed.views(), &mut Launches::timed(device)))?;
    let mut backward = None;
    if specs.gradients().next().is_some() {
        let call = || K::launch_backward(&inputs.case, placed.backward_views(), &mut Launches::timed(device));
        backward = Some(median(device, call)?);
    }
    Ok(Seconds { forward: Some(forward), backward })
}

fn median(device: &Device, mut call: impl FnMut() -> Result<(), RuntimeError>) -> Result<f64, RuntimeError> {
    for _ in 0..WARM_UPS {
        device.backend().time_recorded(&mut call)?;
    }
    let times = (0..CALLS).map(|_| device.backend().time_recorded(&mut call));
    let mut times = times.collect::<Result<Vec<Duration>, _>>()?;
    times.sort_unstable();
    Ok(times[CALLS / 2].as_secs_f64())
}
