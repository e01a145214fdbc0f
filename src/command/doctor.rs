//! `parity doctor`.

use dsv4_kernels::runtime::emulator::EmulatorOptions;
use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions, cuda};

use super::Exit;

/// Says which backends work here; succeeds when one does.
pub fn execute() -> Exit {
    let cuda_works = match cuda::probe() {
        Ok(found) => {
            println!("cuda      works: {found}");
            true
        }
        Err(reason) => {
            println!("cuda      does not work: {reason}");
            false
        }
    };
    let options = DeviceOptions { emulator: EmulatorOptions::default(), ..DeviceOptions::default() };
    let emulator_works = match Device::open(BackendKind::Emulator, options) {
        Ok(device) => {
            let environment = device.environment();
            println!(
                "emulator  works: {} on {} ({} cores)",
                environment.compiler, environment.device, environment.processors
            );
            true
        }
        Err(reason) => {
            println!("emulator  does not work: {reason}");
            false
        }
    };
    if cuda_works || emulator_works { Exit::Agreed } else { Exit::BackendMissing }
}
