//! What the tests share.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions};
use dsv4_parity::record::CaseRecord;
use dsv4_parity::sweep::Observer;

/// The backend that `PARITY_BACKEND` names; the emulator when it names none.
pub fn backend() -> BackendKind {
    match std::env::var("PARITY_BACKEND").as_deref() {
        Ok("cuda") => BackendKind::Cuda,
        Ok("emulator" | "auto" | "") | Err(_) => BackendKind::Emulator,
        Ok(other) => panic!("PARITY_BACKEND is `{other}`, not cuda or emulator"),
    }
}

/// The device under test, with the embedded kernels, shared by all tests of the process.
pub fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        Device::open(backend(), DeviceOptions::default())
            .unwrap_or_else(|error| panic!("no device to test on: {error}"))
    })
}

/// The `fixtures` folder: beside the sources, or `PARITY_FIXTURES` where the binary travelled without them.
pub fn fixtures() -> PathBuf {
    std::env::var_os("PARITY_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"), PathBuf::from)
}

/// Keeps what a sweep tells.
#[derive(Default)]
pub struct Collected {
    /// Cases of the last sweep that was planned.
    pub planned: usize,
    /// Every case that ran.
    pub records: Vec<CaseRecord>,
}

impl Observer for Collected {
    fn planned(&mut self, _operator: &str, cases: usize) {
        self.planned = cases;
    }

    fn done(&mut self, record: CaseRecord) {
        self.records.push(record);
    }
}
