//! The devices of this process: the emulator, and GPUs in their primary contexts.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use dsv4_runtime::{BackendKind, Device, Environment};
use pyo3::PyResult;

use crate::errors;

/// Where tensors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In the memory of the host: kernels run on the emulator.
    Emulator,
    /// On the GPU with this number.
    Gpu(u32),
}

impl FromStr for Place {
    type Err = String;

    /// `emulator`, or `cuda:` and the number of a GPU.
    fn from_str(text: &str) -> Result<Self, String> {
        let gpu = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (text, gpu) {
            ("emulator", _) => Ok(Self::Emulator),
            (_, Some(number)) => Ok(Self::Gpu(number)),
            _ => Err(format!("place {text:?} must be `emulator` or `cuda:` and a number")),
        }
    }
}

type Devices = BTreeMap<Place, Arc<Device>>;

static OPEN: Mutex<Devices> = Mutex::new(Devices::new());

fn device(place: Place) -> PyResult<Arc<Device>> {
    let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(device) = open.get(&place) {
        return Ok(device.clone());
    }
    let options = dsv4_kernels::device_options();
    let opened = match place {
        Place::Emulator => Device::open(BackendKind::Emulator, options),
        Place::Gpu(number) => Device::open_gpu(number, options),
    };
    let device = Arc::new(opened.map_err(|error| errors::of_runtime(&error))?);
    open.insert(place, device.clone());
    Ok(device)
}

/// The emulator.
pub fn emulator() -> PyResult<Arc<Device>> {
    device(Place::Emulator)
}

/// Later calls open another emulator: an interrupted one may still be at work.
pub fn forget_emulator() {
    OPEN.lock().unwrap_or_else(|e| e.into_inner()).remove(&Place::Emulator);
}

/// A GPU.
pub fn gpu(number: u32) -> PyResult<Arc<Device>> {
    device(Place::Gpu(number))
}

/// The description of a device.
pub fn environment(place: Place) -> PyResult<Environment> {
    Ok(device(place)?.environment().clone())
}
