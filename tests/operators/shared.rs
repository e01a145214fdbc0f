//! The devices of the tests: an emulator for each thread, since a schedule is a setting of the device, and since a device
//! compiles one module at a time.

use std::cell::OnceCell;
use std::time::Duration;

use dsv4_kernels::runtime::emulator::EmulatorOptions;
use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions};

use crate::support;

/// How long a launch of a mutant may take: some never end, and no case of theirs comes near it.
const LIMIT_OF_MUTANTS: Duration = Duration::from_secs(30);

thread_local! {
    static EMULATOR: OnceCell<Device> = const { OnceCell::new() };
    static OF_MUTANTS: OnceCell<Device> = const { OnceCell::new() };
}

fn emulator(options: EmulatorOptions) -> Device {
    Device::open(BackendKind::Emulator, DeviceOptions { emulator: options, ..DeviceOptions::default() })
        .unwrap_or_else(|error| panic!("no device to test on: {error}"))
}

/// Does `work` on the device under test: a GPU is shared by all threads.
pub fn on_device<R>(work: impl FnOnce(&Device) -> R) -> R {
    match support::backend() {
        BackendKind::Emulator => {
            EMULATOR.with(|device| work(device.get_or_init(|| emulator(EmulatorOptions::default()))))
        }
        _ => work(support::device()),
    }
}

/// Does `work` on this thread's emulator for mutants, whatever is under test.
pub fn on_emulator_for_mutants<R>(work: impl FnOnce(&Device) -> R) -> R {
    let options = EmulatorOptions { time_limit: LIMIT_OF_MUTANTS, ..EmulatorOptions::default() };
    OF_MUTANTS.with(|device| work(device.get_or_init(|| emulator(options))))
}
