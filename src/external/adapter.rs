//! Conventions that differ: a TOML file that declares how another kernel's tensors relate to ours.
//!
//! ```toml
//! rounding = "specification"                # it rounds where the specification requires, and is
//!                                           # judged by runs that do
//! where = "head_dim = 512 and topk % 128 = 0"   # which cases it takes; see `crate::case::condition`
//! lanes = 32                                # it adds the values of a row in at least this many
//!                                           # lanes, and the lanes as a tree
//! bitwise = false                           # of every tensor that does not say otherwise, below
//! hostile = false                           # no case with hostile lists or pages
//! conventions = ["scale_divided"]           # what it does otherwise than the specification; `parity
//!                                           # ops NAME` lists those of an operator
//!
//! [[order]]                                 # slots of a row may be in any order, the same in all
//! tensors = ["topk_indices", "topk_weights"]    # of these: by the first, which has numbers
//!
//! [[kernel]]                                # the worker must name this kernel in its answer: it
//! name = "sm90_sparse"                      # did not fall back to another
//! where = "head_dim = 512"                  # for these cases; all if absent
//!
//! [tensor.lse]                              # a table for each tensor, under its name here
//! rename = "softmax_lse"                    # its name there
//! base = 2                                  # a logarithm to this base: ours = theirs · ln 2
//! fill = { ours = inf, theirs = -inf }      # the value in rows without keys
//! permute = [1, 0]                          # axis i there is axis permute[i] here
//! dtype = "F64"                             # its type there
//!
//! [tensor.dq]
//! scale = 0.5                               # ours = scale · theirs
//! negate = true                             # ours = -theirs
//! bitwise = false                           # equal values may round unlike: judged by the budget
//!
//! [tensor.indices]
//! sentinel = 2147483647                     # what -1 is there
//!
//! [tensor.max_logits]
//! absent = true                             # the kernel does not return it; counted as a skip
//! ```
//!
//! Everything applies in both directions: inputs are written as the other kernel expects them,
//! outputs and gradients are read back. An input that its type there cannot hold exactly is
//! rejected, unless a scale makes rounding unavoidable. The oracle must see what the kernel sees.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use dsv4_reference::conventions::{self, Conventions};
use dsv4_runtime::{DType, HostTensor};
use serde::Deserialize;

use super::wire::{WireTensor, WireType};
use crate::case::Case;
use crate::case::condition::Condition;
use crate::operator::{Arithmetic, RoundingPoints};
use crate::record::figures;

/// The conventions of another kernel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// By the tensor's name in this project.
    #[serde(default)]
    tensor: BTreeMap<String, Convention>,
    /// Where the kernel rounds.
    #[serde(default)]
    rounding: RoundingPoints,
    /// In how many lanes it adds the values of a row.
    lanes: Option<usize>,
    /// Which cases it takes.
    #[serde(rename = "where")]
    condition: Option<Condition>,
    /// Whether equal values must be equal bits, for tensors that do not declare it.
    bitwise: Option<bool>,
    /// Whether cases with hostile lists run.
    hostile: Option<bool>,
    /// What it does otherwise than the specification.
    #[serde(default)]
    conventions: Vec<String>,
    /// Tensors whose rows have their slots in any order.
    #[serde(default)]
    order: Vec<Tied>,
    /// Kernels that answers must name.
    #[serde(default)]
    kernel: Vec<Demanded>,
    /// The file's text: a different text is a different adapter.
    #[serde(skip)]
    text: String,
}

/// A kernel that must have run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Demanded {
    name: String,
    #[serde(rename = "where")]
    condition: Option<Condition>,
}

/// Tensors of one shape whose rows have slots in the same order, whichever it is.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tied {
    /// The first has the numbers by which slots are known.
    tensors: Vec<String>,
}

/// How one tensor differs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Convention {
    rename: Option<String>,
    dtype: Option<WireType>,
    permute: Option<Vec<usize>>,
    base: Option<f64>,
    scale: Option<f64>,
    negate: bool,
    sentinel: Option<i32>,
    fill: Option<Fill>,
    bitwise: Option<bool>,
    absent: bool,
}

/// A value that has the same meaning on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fill {
    ours: f64,
    theirs: f64,
}

fn same(a: f64, b: f64) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

impl Convention {
    /// `ours = factor · theirs`.
    fn factor(&self) -> f64 {
        let sign = if self.negate { -1.0 } else { 1.0 };
        sign * self.base.map_or(1.0, f64::ln) * self.scale.unwrap_or(1.0)
    }

    fn scales(&self) -> bool {
        self.base.is_some() || self.scale.is_some()
    }

    fn changes_values(&self) -> bool {
        self.scales() || self.negate || self.sentinel.is_some() || self.fill.is_some()
    }

    fn check(&self) -> Result<(), String> {
        let refuse = |field: &str, reason: String| Err(format!("field `{field}`: {reason}"));
        if self.rename.as_deref() == Some("") {
            return refuse("rename", "a tensor must have a name".into());
        }
        if let Some(base) =
            self.base.filter(|&base| !(base.is_finite() && base > 0.0 && base != 1.0))
        {
            return refuse("base", format!("{base} must be finite, above 0 and not 1"));
        }
        if let Some(scale) = self.scale.filter(|&scale| !(scale.is_finite() && scale != 0.0)) {
            return refuse("scale", format!("{scale} must be finite and not 0"));
        }
        if let Some(permute) = &self.permute
            && (0..permute.len()).any(|axis| !permute.contains(&axis))
        {
            return refuse("permute", format!("{permute:?} does not name every axis from 0 once"));
        }
        if let (Some(sentinel), true) = (self.sentinel, self.scales() || self.negate) {
            return refuse(
                "sentinel",
                format!("{sentinel} belongs to indices, which have no scale"),
            );
        }
        Ok(())
    }

    fn check_against(&self, tensor: &HostTensor) -> Result<(), String> {
        let integer = WireType::of(tensor.dtype).is_integer();
        if integer && (self.scales() || self.negate) {
            return Err(format!(
                "it is of type {}, which has no base, scale or sign to change",
                tensor.dtype
            ));
        }
        if integer && self.bitwise == Some(false) {
            return Err(format!("it is of type {}, which has no rounding to vary", tensor.dtype));
        }
        if let (Some(sentinel), false) = (self.sentinel, integer) {
            return Err(format!(
                "sentinel {sentinel} is for indices, and it is of type {}",
                tensor.dtype
            ));
        }
        if let Some(dtype) = self.dtype.filter(|dtype| dtype.is_integer() != integer) {
            return Err(format!("dtype {dtype} cannot stand for {}", tensor.dtype));
        }
        match &self.permute {
            Some(permute) if permute.len() != tensor.shape.len() => {
                Err(format!("permute {permute:?} does not fit its shape {:?}", tensor.shape))
            }
            _ => Ok(()),
        }
    }

    fn value_to_theirs(&self, ours: f64) -> f64 {
        match (self.fill, self.sentinel) {
            (Some(fill), _) if same(ours, fill.ours) => fill.theirs,
            (_, Some(sentinel)) if ours == -1.0 => f64::from(sentinel),
            _ => ours / self.factor(),
        }
    }

    fn value_to_ours(&self, theirs: f64) -> f64 {
        match (self.fill, self.sentinel) {
            (Some(fill), _) if same(theirs, fill.theirs) => fill.ours,
            (_, Some(sentinel)) if theirs == f64::from(sentinel) => -1.0,
            _ => theirs * self.factor(),
        }
    }
}

/// The places of a row's slots from the lowest number up, negative ones last.
fn order_of(row: &[f64]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..row.len()).collect();
    places.sort_by(|&a, &b| {
        (row[a] < 0.0, row[a]).partial_cmp(&(row[b] < 0.0, row[b])).unwrap_or(Ordering::Equal)
    });
    places
}

/// The slots of each row in this order.
fn reorder(tensor: &mut HostTensor, slots: usize, places: &[Vec<usize>]) {
    let size = tensor.dtype.size();
    let rows = tensor.bytes.chunks(slots * size).zip(places);
    tensor.bytes = rows
        .flat_map(|(row, places)| {
            places.iter().flat_map(move |&at| &row[at * size..(at + 1) * size])
        })
        .copied()
        .collect();
}

/// Offset of element `i` of the permuted tensor in the other kernel's tensor: axis `a` there is
/// axis `permute[a]` here.
fn permuted_offsets(shape: &[usize], permute: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let mut offsets = vec![0];
    for &axis in permute {
        let (extent, stride) = (shape[axis], strides[axis]);
        offsets =
            offsets.iter().flat_map(|&base| (0..extent).map(move |i| base + i * stride)).collect();
    }
    offsets
}

impl Adapter {
    /// Reads the text of an adapter file.
    ///
    /// # Errors
    /// The parser's message, or the tensor and field that is invalid.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut adapter: Self =
            toml::from_str(text).map_err(|e| e.to_string().trim().replace('\n', " "))?;
        text.clone_into(&mut adapter.text);
        if adapter.lanes == Some(0) {
            return Err("field `lanes`: 0: a sum needs one at least".into());
        }
        for name in &adapter.conventions {
            if conventions::Convention::ALL.iter().all(|way| way.name() != name) {
                let known =
                    conventions::Convention::ALL.map(conventions::Convention::name).join(", ");
                return Err(format!("field `conventions`: `{name}` is none of {known}"));
            }
        }
        if adapter.order.iter().any(|tied| tied.tensors.is_empty()) {
            return Err("field `order`: `tensors` is empty".into());
        }
        let mut names = BTreeSet::new();
        for (name, convention) in &adapter.tensor {
            convention.check().map_err(|reason| format!("tensor `{name}`: {reason}"))?;
            let theirs = adapter.their_name(name);
            if !names.insert(theirs) {
                return Err(format!(
                    "tensor `{name}`: field `rename`: another tensor is called `{theirs}`, too"
                ));
            }
        }
        Ok(adapter)
    }

    /// Which cases the kernel takes, if it does not take all.
    pub fn condition(&self) -> Option<&Condition> {
        self.condition.as_ref()
    }

    /// The text that it was read from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the kernel declares about its arithmetic.
    pub fn arithmetic(&self) -> Arithmetic {
        let has =
            |way: &conventions::Convention| self.conventions.iter().any(|name| name == way.name());
        let conventions = Conventions::of(conventions::Convention::ALL.into_iter().filter(has));
        Arithmetic { points: self.rounding, lanes: self.lanes.unwrap_or(1), conventions }
    }

    /// Names of what the kernel does otherwise than the specification.
    pub fn conventions(&self) -> impl Iterator<Item = &str> {
        self.conventions.iter().map(String::as_str)
    }

    /// Names of the tensors that it has entries for.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensor.keys().map(String::as_str).chain(self.in_any_order())
    }

    /// Names of the tensors whose rows have their slots in any order.
    pub fn in_any_order(&self) -> impl Iterator<Item = &str> {
        self.order.iter().flat_map(|tied| &tied.tensors).map(String::as_str)
    }

    /// Puts the slots of rows in our order: by the numbers of the first of tied tensors, from the
    /// lowest up; negative ones, which name nothing, come last.
    ///
    /// # Errors
    /// Tied tensors of unlike shapes, or a first one that has no numbers.
    pub fn put_in_order(&self, outputs: &mut [(&'static str, HostTensor)]) -> Result<(), String> {
        for Tied { tensors } in &self.order {
            let is_tied = |(name, _): &&(&'static str, HostTensor)| tensors[0] == *name;
            let Some((_, first)) = outputs.iter().find(is_tied) else { continue };
            if first.dtype != DType::I32 && first.dtype != DType::I64 {
                let (name, dtype) = (&tensors[0], first.dtype);
                return Err(format!("tensor `{name}`: {dtype}: slots are known by whole numbers"));
            }
            let (shape, numbers) = (first.shape.clone(), first.to_f64());
            let slots = shape.last().copied().unwrap_or(1).max(1);
            let places: Vec<Vec<usize>> = numbers.chunks(slots).map(order_of).collect();
            for (name, tensor) in
                outputs.iter_mut().filter(|(name, _)| tensors.iter().any(|tied| tied == name))
            {
                if tensor.shape != shape {
                    let found = &tensor.shape;
                    return Err(format!("tensor `{name}`: {found:?} is tied to {shape:?}"));
                }
                reorder(tensor, slots, &places);
            }
        }
        Ok(())
    }

    /// A tensor's name in the other kernel.
    pub fn their_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.tensor.get(name).and_then(|convention| convention.rename.as_deref()).unwrap_or(name)
    }

    /// Whether the kernel does not return this tensor.
    pub fn is_absent(&self, name: &str) -> bool {
        self.tensor.get(name).is_some_and(|convention| convention.absent)
    }

    /// Whether equal values of this tensor must be equal bits. An adapter declares that they need
    /// not for a sum whose order depends on its length, or on timing.
    pub fn is_bitwise(&self, name: &str) -> bool {
        let own = self.tensor.get(name).and_then(|convention| convention.bitwise);
        own.or(self.bitwise).unwrap_or(true)
    }

    /// Whether cases with hostile lists run.
    pub fn takes_hostile(&self) -> bool {
        self.hostile != Some(false)
    }

    /// Holds the kernel that ran a case against the one that must have.
    ///
    /// # Errors
    /// Another one ran, or none is named; a condition that cannot be evaluated on the case.
    pub fn hold_kernel(&self, case: &Case, ran: Option<&str>) -> Result<(), String> {
        for Demanded { name, condition } in &self.kernel {
            let applies = condition.as_ref().map_or(Ok(true), |condition| condition.holds(case))?;
            if applies && ran != Some(name) {
                let ran = ran.map_or("the worker names none".into(), |ran| format!("`{ran}` ran"));
                return Err(format!("the adapter demands the kernel `{name}`, and {ran}"));
            }
        }
        Ok(())
    }

    /// Type and shape that a tensor of ours has in the other kernel.
    ///
    /// # Errors
    /// A convention that does not fit the tensor.
    pub fn their_form(
        &self,
        name: &str,
        tensor: &HostTensor,
    ) -> Result<(WireType, Vec<usize>), String> {
        let own = WireType::of(tensor.dtype);
        let Some(convention) = self.tensor.get(name) else {
            return Ok((own, tensor.shape.clone()));
        };
        convention
            .check_against(tensor)
            .map_err(|reason| format!("adapter: tensor `{name}`: {reason}"))?;
        let shape = match &convention.permute {
            Some(permute) => permute.iter().map(|&axis| tensor.shape[axis]).collect(),
            None => tensor.shape.clone(),
        };
        Ok((convention.dtype.unwrap_or(own), shape))
    }

    /// A tensor of ours as the other kernel expects it.
    ///
    /// # Errors
    /// A convention that does not fit the tensor, or a value that its type there does not have.
    pub fn to_theirs(&self, name: &str, tensor: &HostTensor) -> Result<WireTensor, String> {
        let (dtype, shape) = self.their_form(name, tensor)?;
        let own = WireTensor::from(tensor);
        let Some(convention) = self.tensor.get(name) else { return Ok(own) };
        let mut values = own.dtype.decode(&own.bytes);
        if let Some(permute) = &convention.permute {
            values =
                permuted_offsets(&tensor.shape, permute).into_iter().map(|at| values[at]).collect();
        } else if dtype == own.dtype && !convention.changes_values() {
            return Ok(own);
        }
        values.iter_mut().for_each(|value| *value = convention.value_to_theirs(*value));
        let refused = |reason: String| format!("adapter: tensor `{name}`: {reason}");
        let bytes = dtype.encode(&values).map_err(refused)?;
        let lost = dtype
            .decode(&bytes)
            .into_iter()
            .zip(&values)
            .find(|(stored, value)| !same(*stored, **value));
        match lost {
            Some((_, value)) if !convention.scales() => {
                Err(refused(format!("{dtype} cannot hold {} exactly", figures::element(*value))))
            }
            _ => Ok(WireTensor { dtype, shape, bytes }),
        }
    }

    /// A tensor of the other kernel as one of ours, in the type and shape of `like`;
    /// [`Self::their_form`] defines the form that it must have.
    ///
    /// # Errors
    /// A convention that does not fit the tensor, or a value that our type does not have.
    pub fn to_ours(
        &self,
        name: &str,
        tensor: &WireTensor,
        like: &HostTensor,
    ) -> Result<HostTensor, String> {
        let (dtype, shape) = self.their_form(name, like)?;
        if (dtype, &shape) != (tensor.dtype, &tensor.shape) {
            return Err(format!("`{name}` is {tensor:?}, not {dtype} {shape:?}"));
        }
        let own = WireType::of(like.dtype);
        let whole = |bytes: Vec<u8>| HostTensor { bytes, ..like.clone() };
        let Some(convention) = self.tensor.get(name) else {
            return Ok(whole(tensor.bytes.clone()));
        };
        let mut values = dtype.decode(&tensor.bytes);
        values.iter_mut().for_each(|value| *value = convention.value_to_ours(*value));
        if let Some(permute) = &convention.permute {
            let mut back = values.clone();
            permuted_offsets(&like.shape, permute)
                .into_iter()
                .zip(&values)
                .for_each(|(at, value)| back[at] = *value);
            values = back;
        } else if dtype == own && !convention.changes_values() {
            return Ok(whole(tensor.bytes.clone()));
        }
        own.encode(&values)
            .map(whole)
            .map_err(|reason| format!("adapter: tensor `{name}`: {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::DType;

    use super::*;

    fn adapter(text: &str) -> Adapter {
        Adapter::parse(text).unwrap()
    }

    fn f32_tensor(shape: &[usize], values: &[f64]) -> HostTensor {
        HostTensor::from_f64(DType::F32, shape, values)
    }

    /// What the other side gets, after a check that it comes back unchanged.
    fn there_and_back(text: &str, tensor: &HostTensor) -> WireTensor {
        let adapter = adapter(&format!("[tensor.t]\n{text}"));
        let theirs = adapter.to_theirs("t", tensor).unwrap();
        assert_eq!(adapter.to_ours("t", &theirs, tensor).unwrap(), *tensor, "{text}");
        assert_eq!(adapter.their_form("t", tensor).unwrap(), (theirs.dtype, theirs.shape.clone()));
        theirs
    }

    fn values(tensor: &WireTensor) -> Vec<f64> {
        tensor.dtype.decode(&tensor.bytes)
    }

    #[test]
    fn without_a_convention_every_bit_stays() {
        let nan = HostTensor { dtype: DType::F32, shape: vec![1], bytes: vec![1, 2, 0xff, 0x7f] };
        for text in ["", "rename = 'u'", "dtype = 'F32'"] {
            assert_eq!(there_and_back(text, &nan).bytes, nan.bytes);
        }
    }

    #[test]
    fn a_logarithm_to_another_base_is_scaled_there_and_back() {
        let theirs = there_and_back("base = 2\ndtype = 'F64'", &f32_tensor(&[2], &[1.0, -3.0]));
        assert!((values(&theirs)[0] - std::f64::consts::LOG2_E).abs() < 1e-12);
    }

    #[test]
    fn scale_sign_and_fill_hold_in_both_directions() {
        let ours = f32_tensor(&[3], &[6.0, f64::INFINITY, -1.0]);
        assert_eq!(values(&there_and_back("scale = 2", &ours)), [3.0, f64::INFINITY, -0.5]);
        assert_eq!(values(&there_and_back("negate = true", &ours)), [-6.0, f64::NEG_INFINITY, 1.0]);
        let fill = "fill = { ours = inf, theirs = nan }";
        let theirs = values(&there_and_back(fill, &ours));
        assert!(theirs[0] == 6.0 && theirs[1].is_nan() && theirs[2] == -1.0);
    }

    #[test]
    fn a_sentinel_stands_for_minus_one_alone() {
        let ours = HostTensor::from_i32(&[4], &[-1, 0, 7, i32::MIN]);
        let theirs = there_and_back("sentinel = 2147483647\ndtype = 'I64'", &ours);
        assert_eq!(values(&theirs), [f64::from(i32::MAX), 0.0, 7.0, f64::from(i32::MIN)]);
    }

    #[test]
    fn axes_are_permuted_there_and_back() {
        let ours = f32_tensor(&[2, 3, 2], &(0..12).map(f64::from).collect::<Vec<_>>());
        let theirs = there_and_back("permute = [1, 2, 0]", &ours);
        assert_eq!(theirs.shape, [3, 2, 2]);
        // Element [i, j, k] there is [k, i, j] here.
        assert_eq!(values(&theirs), [0.0, 6.0, 1.0, 7.0, 2.0, 8.0, 3.0, 9.0, 4.0, 10.0, 5.0, 11.0]);
        assert_eq!(there_and_back("permute = [1, 0]", &f32_tensor(&[0, 3], &[])).shape, [3, 0]);
    }

    #[test]
    fn an_input_that_its_type_there_would_round_is_refused() {
        let error = adapter("[tensor.t]\ndtype = 'BF16'")
            .to_theirs("t", &f32_tensor(&[1], &[1.001]))
            .unwrap_err();
        assert!(error.contains("`t`") && error.contains("BF16"), "{error}");
    }

    #[test]
    fn outputs_of_a_wider_type_are_rounded_to_ours() {
        let like = HostTensor::from_f64(DType::Bf16, &[1], &[0.0]);
        let theirs = WireTensor {
            dtype: WireType::F32,
            shape: vec![1],
            bytes: 1.001f32.to_le_bytes().into(),
        };
        assert_eq!(
            adapter("[tensor.t]\ndtype = 'F32'").to_ours("t", &theirs, &like).unwrap().to_f64(),
            [1.0]
        );
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_name() {
        for (text, needles) in [
            ("[tensor.t]\nspeed = 3", ["speed", "unknown"]),
            ("where = 'head_dim = '", ["where", "at character 11"]),
            ("[tensors.t]", ["tensors", "unknown"]),
            ("[tensor.t]\nbase = 1", ["`t`", "base"]),
            ("[tensor.t]\nscale = 0", ["`t`", "scale"]),
            ("[tensor.t]\npermute = [0, 2]", ["`t`", "[0, 2]"]),
            ("[tensor.t]\npermute = [0, 0]", ["`t`", "[0, 0]"]),
            ("[tensor.t]\nrename = ''", ["`t`", "rename"]),
            ("[tensor.t]\nrename = 'u'\n[tensor.u]", ["`u`", "rename"]),
            ("[tensor.t]\nsentinel = 5\nscale = 2", ["`t`", "sentinel"]),
            ("[tensor.t]\ndtype = 'F8'", ["F8", "unknown"]),
        ] {
            let error = Adapter::parse(text).unwrap_err();
            assert!(needles.iter().all(|needle| error.contains(needle)), "{text}: {error}");
        }
        let (float, index) = (f32_tensor(&[2], &[1.0, 2.0]), HostTensor::from_i32(&[2], &[1, 2]));
        for (text, tensor) in [
            ("sentinel = 5", &float),
            ("base = 2", &index),
            ("negate = true", &index),
            ("bitwise = false", &index),
            ("dtype = 'I64'", &float),
            ("dtype = 'F32'", &index),
            ("permute = [1, 0]", &float),
        ] {
            let error = adapter(&format!("[tensor.t]\n{text}")).to_theirs("t", tensor).unwrap_err();
            assert!(error.contains("`t`"), "{text}: {error}");
        }
    }
}
