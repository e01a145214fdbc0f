//! The calls of a run.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use dsv4_kernels::model::config::Config;
use dsv4_kernels::model::tap::{Site, Tap};
use dsv4_runtime::tensor::dense_strides;
use dsv4_runtime::{Device, HostTensor, Result, TensorView};
use serde::Serialize;

use super::cases::{self, Fields};
use super::numbers;
use crate::operator::actual::{Actual, ByName};
use crate::operators::registry;

/// Where a call is in its model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Place {
    /// Its number in the run.
    pub number: usize,
    /// The layer; `None` before and after the layers.
    pub layer: Option<usize>,
    /// The operator.
    pub operator: String,
    /// What it computes there.
    pub name: String,
}

/// A tensor of a call, in memory of the run.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its elements.
    pub tensor: HostTensor,
    /// Where they lie, if the run told.
    pub view: Option<TensorView>,
}

/// A call of a run.
#[derive(Clone, Debug)]
pub struct Called {
    /// Where.
    pub place: Place,
    /// Its tensors before it, by name. Those that it writes are among them.
    pub before: BTreeMap<String, Held>,
    /// The same after it.
    pub after: ByName,
    /// The fields of its case that no tensor tells.
    pub fields: Fields,
}

/// Records the calls of a model.
struct Recorder {
    config: Config,
    calls: Rc<RefCell<Vec<Called>>>,
}

/// A tap that records calls, and the calls.
pub fn recorder(config: &Config) -> (Box<dyn Tap>, Rc<RefCell<Vec<Called>>>) {
    let calls = Rc::new(RefCell::new(Vec::new()));
    (Box::new(Recorder { config: config.clone(), calls: calls.clone() }), calls)
}

/// Scratch memory holds nothing that a call reads.
const SCRATCH: &str = "workspace";

impl Tap for Recorder {
    fn around(
        &mut self,
        device: &Device,
        site: Site<'_>,
        run: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let views = || site.views.iter().filter(|(name, _)| *name != SCRATCH);
        device.backend().synchronize()?;
        let mut before = BTreeMap::new();
        for (name, view) in views() {
            let tensor = downloaded(device, view)?;
            before.insert(name.to_owned(), Held { tensor, view: Some(view.clone()) });
        }
        run()?;
        device.backend().synchronize()?;
        let mut after = ByName::new();
        for (name, view) in views() {
            after.insert(name.to_owned(), downloaded(device, view)?);
        }
        let mut calls = self.calls.borrow_mut();
        let place = Place {
            number: calls.len(),
            layer: site.layer,
            operator: site.operator.to_owned(),
            name: site.name.to_owned(),
        };
        let fields = numbers::of(&self.config, site.operator, site.layer, &after);
        calls.push(Called { place, before, after, fields });
        Ok(())
    }
}

/// Offsets of the first elements of rows that are contiguous, and the elements of such a row.
pub(super) fn rows(view: &TensorView) -> (Vec<i64>, usize) {
    let dense = dense_strides(&view.shape);
    // The trailing axes without gaps.
    let apart = (0..view.shape.len())
        .rev()
        .find(|&axis| view.shape[axis] > 1 && view.strides[axis] != dense[axis]);
    let outer = apart.map_or(0, |axis| axis + 1);
    let length = view.shape[outer..].iter().product();
    let mut offsets = vec![0];
    for axis in 0..outer {
        let steps = (0..view.shape[axis] as i64).map(|at| at * view.strides[axis]);
        let steps: Vec<i64> = steps.collect();
        offsets = offsets.iter().flat_map(|&from| steps.iter().map(move |at| from + at)).collect();
    }
    (offsets, length)
}

/// The elements of a tensor on a device, densely.
fn downloaded(device: &Device, view: &TensorView) -> Result<HostTensor> {
    let size = view.dtype.size();
    let mut bytes = vec![0; view.elements() * size];
    let (offsets, length) = rows(view);
    if length > 0 {
        for (row, offset) in bytes.chunks_mut(length * size).zip(offsets) {
            let address = view.address.wrapping_add_signed(offset * size as i64);
            device.backend().download(address, row)?;
        }
    }
    Ok(HostTensor { dtype: view.dtype, shape: view.shape.clone(), bytes })
}

impl Called {
    /// The operator's case of this call, with its tensors.
    ///
    /// # Errors
    /// Why no case of the operator has these tensors and fields.
    pub fn actual(&self) -> std::result::Result<Actual, String> {
        let operator = registry::find(&self.place.operator).map_err(|error| error.to_string())?;
        let tensors = self.before.iter().map(|(name, held)| (name.clone(), held.tensor.clone()));
        let tensors = tensors.collect();
        let call = cases::find(operator, &tensors, &self.fields)?;
        call.actual(&tensors).map_err(|error| error.to_string())
    }
}
