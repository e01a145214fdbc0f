//! The time of a case's kernels, for comparison with an external kernel on the same case.

use std::time::Duration;

use dsv4_runtime::{Contract, Device, Environment, RuntimeError};

use super::declared::Launches;
use super::inputs::Inputs;
use super::layouts::Layouts;
use super::lines::{Choices, checked};
use crate::record::Seconds;

/// Warm-up calls.
const WARM_UPS: usize = 3;
/// Timed calls, each timed separately. The median counts.
const CALLS: usize = 11;

/// The times of the forward and of the backward, where one exists.
pub(super) fn of(inputs: &Inputs, device: &Device) -> Result<Seconds, RuntimeError> {
    let inputs = at_best(inputs, device.environment());
    if inputs.case.operator().has_ranks() {
        // Their kernels run in other processes, on streams that this one does not see.
        return Ok(Seconds { forward: None, backward: None });
    }
    let specs = inputs.specs();
    let device = &*inputs.on(device);
    let placed = inputs.placed(device, Contract::NAN, &specs)?;
    // What is recorded may not compile, and the backward reads what a forward saved.
    inputs.launched(&specs, &placed)?;
    let forward =
        median(device, || inputs.case.launch(placed.views(), &mut Launches::timed(device)))?;
    let mut backward = None;
    if specs.gradients().next().is_some() {
        let call =
            || inputs.case.launch_backward(placed.backward_views(), &mut Launches::timed(device));
        backward = Some(median(device, call)?);
    }
    Ok(Seconds { forward: Some(forward), backward })
}

/// The same call with the fastest kernels for it, on dense tensors, as the external kernel gets
/// them. A case draws its kernels and layouts to find bugs, not for speed. The case itself where
/// that is not possible.
fn at_best(inputs: &Inputs, environment: &Environment) -> Inputs {
    let case = inputs.case.fastest(environment);
    if checked(&*case).is_err() || case.cannot_run(environment).is_some() {
        return inputs.clone();
    }
    let choices = Choices { layouts: Layouts::new(), ..inputs.choices.clone() };
    Inputs { case, choices, ..inputs.clone() }
}

fn median(
    device: &Device,
    mut call: impl FnMut() -> Result<(), RuntimeError>,
) -> Result<f64, RuntimeError> {
    for _ in 0..WARM_UPS {
        device.backend().time_recorded(&mut call)?;
    }
    let times = (0..CALLS).map(|_| device.backend().time_recorded(&mut call));
    let mut times = times.collect::<Result<Vec<Duration>, _>>()?;
    times.sort_unstable();
    Ok(times[CALLS / 2].as_secs_f64())
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::BackendKind;

    use super::*;
    use crate::operator::Profile;
    use crate::operator::any::any;
    use crate::operator::declared::Operator;
    use crate::operator::fields::Implementation;
    use crate::operators::attention::attention_output_rotation::AttentionOutputRotation;
    use crate::operators::attention::decode_attention::DecodeAttention;
    use crate::operators::attention::sparse_attention::SparseAttention;
    use crate::operators::indexer::score_recompute::ScoreRecompute;

    fn gpu() -> Environment {
        Environment {
            backend: BackendKind::Cuda,
            device: "a GPU".into(),
            driver: String::new(),
            compiler: String::new(),
            target: "sm_90a".into(),
            processors: 132,
            shared_bytes_per_block: 227 << 10,
        }
    }

    fn assert_the_same_call<K: Operator>() {
        let form = |case: &K::Case| -> Vec<_> {
            let specs = checked(&*any::<K>(case.clone()))
                .unwrap_or_else(|refused| panic!("{refused:?}: {case:?}"));
            specs.present().map(|spec| (spec.name, spec.shape(), spec.dtype)).collect()
        };
        for case in K::edge_cases(Profile::Quick) {
            let fastest = K::fastest(&case, &gpu());
            assert_eq!(form(&fastest), form(&case), "{case:?}");
            assert_eq!(K::cannot_run(&fastest, &gpu()), None);
        }
    }

    #[test]
    fn the_fastest_kernels_are_called_with_the_same_tensors() {
        assert_the_same_call::<AttentionOutputRotation>();
        assert_the_same_call::<DecodeAttention>();
        assert_the_same_call::<ScoreRecompute>();
        assert_the_same_call::<SparseAttention>();
    }

    #[test]
    fn ours_runs_on_all_sms_and_on_tensor_cores_where_heads_fill_them_whatever_the_case_says() {
        let mut chosen = Vec::new();
        for case in DecodeAttention::edge_cases(Profile::Quick) {
            let fastest = DecodeAttention::fastest(&case, &gpu());
            assert_eq!(fastest.num_blocks, 132);
            let hopper = [(448, 64), (0, 512)].contains(&(case.nope_dim, case.rope_dim))
                && case.num_heads > 16;
            assert_eq!(fastest.implementation == Implementation::Hopper, hopper, "{case:?}");
            chosen.push(hopper);
        }
        assert!(chosen.contains(&true) && chosen.contains(&false));
    }
}
