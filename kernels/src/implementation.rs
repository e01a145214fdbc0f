//! The choice between an operator's portable kernels and those for one GPU generation.

use crate::arguments::Arguments;
use dsv4_runtime::{BackendKind, Environment, Result};

/// Which of an operator's implementations runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Implementation {
    /// [`Self::Hopper`] where device and shape permit it and it is faster, otherwise
    /// [`Self::Portable`].
    #[default]
    Auto,
    /// `NAME.cu`: `mma.sync` and `cp.async`, sm_80 and later, every shape.
    Portable,
    /// `NAME_hopper*.cu`: `wgmma` and mbarriers, sm_90a and the emulator. The operator declares
    /// which shapes it takes; others are rejected.
    Hopper,
}

impl Implementation {
    /// The largest number of heads for which the portable kernels are faster. A block of the Hopper
    /// kernels takes 64 rows; with this few heads three quarters of its MMA work is wasted.
    pub const FEW_HEADS: usize = 16;

    /// Why these kernels cannot run on a device like this one, for any shape; `None` if they can.
    pub fn cannot_run_on(self, environment: &Environment) -> Option<String> {
        let other_gpu = environment.backend == BackendKind::Cuda && environment.target != "sm_90a";
        (self == Self::Hopper && other_gpu).then(|| {
            format!("the Hopper kernels need sm_90a, and this device is {}", environment.target)
        })
    }

    /// Whether an operator's Hopper kernels run for `num_heads` heads. `misfit` is the reason why
    /// they do not take the shape, if there is one.
    ///
    /// # Errors
    /// They are requested and cannot run.
    pub(crate) fn runs_hopper(
        self,
        arguments: Arguments,
        environment: &Environment,
        num_heads: usize,
        misfit: Option<String>,
    ) -> Result<bool> {
        match (self, Self::Hopper.cannot_run_on(environment).or(misfit)) {
            (Self::Portable, _) => Ok(false),
            (Self::Hopper, Some(reason)) => arguments.refuse("implementation", reason),
            (Self::Hopper, None) => Ok(true),
            (Self::Auto, refusal) => Ok(refusal.is_none() && num_heads > Self::FEW_HEADS),
        }
    }
}
