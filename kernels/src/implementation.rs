//! The choice between an operator's portable kernels and those for one GPU generation.

use crate::runtime::{BackendKind, Device};

/// Which of an operator's implementations runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Implementation {
    /// [`Self::Hopper`] where device and shape permit and it is the faster one, otherwise [`Self::Portable`].
    #[default]
    Auto,
    /// `NAME.cu`: `mma.sync` and `cp.async`, sm_80 and later, every shape.
    Portable,
    /// `NAME_hopper*.cu`: `wgmma` and mbarriers, sm_90a and the emulator. What shapes it takes the operator says; others
    /// are refused.
    Hopper,
}

/// Why kernels for sm_90a cannot run on a device, if they cannot.
pub(crate) fn not_sm_90a(device: &Device) -> Option<String> {
    let environment = device.environment();
    let runs = environment.backend == BackendKind::Emulator || environment.target == "sm_90a";
    (!runs).then(|| format!("the Hopper kernels need sm_90a, and this device is {}", environment.target))
}
