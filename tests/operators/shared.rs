//! The devices of the tests: an emulator for each thread, since a schedule is a setting of the device, and since a device
//! compiles one module at a time.

use std::cell::OnceCell;

use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions};

use crate::support;

thread_local! {
    static EMULATOR: OnceCell<Device> = const { OnceCell::new() };
}

/// Does `work` on the device under test: a GPU is shared by all threads.
pub fn on_device<R>(work: impl FnOnce(&Device) -> R) -> R {
    match support::backend() {
        BackendKind::Emulator => on_emulator(work),
        _ => work(support::device()),
    }
}

/// Does `work` on this thread's emulator, whatever is under test.
pub fn on_emulator<R>(work: impl FnOnce(&Device) -> R) -> R {
    let open = || {
        Device::open(BackendKind::Emulator, DeviceOptions::default())
            .unwrap_or_else(|error| panic!("no device to test on: {error}"))
    };
    EMULATOR.with(|device| work(device.get_or_init(open)))
}
