//! Calls as files: a run of this model or of another stack.
//!
//! A dump is a folder:
//!
//! - `*.safetensors`: tensors named `NUMBER/LAYER/OPERATOR/NAME/TENSOR`. NUMBER orders the calls,
//!   LAYER is a number or `-` outside the layers, NAME is free text without `/` that tells calls of
//!   one operator in a layer apart, and TENSOR is the operator's name of the tensor (`parity ops
//!   OPERATOR`). A tensor that the call reads and writes has its value before the call under its
//!   name, and the one after it under `TENSOR:after`.
//! - `calls.json`, optional: for `NUMBER/LAYER/OPERATOR/NAME` an object of the fields of the
//!   operator's case that no tensor tells, such as `eps`.
//! - `config.json`, optional: the model's configuration, from which the fields of DeepSeek-V4's own
//!   calls follow.
//!
//! Each call is judged by itself, so a dump may hold some calls of a run only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dsv4_kernels::model::config::Config;
use dsv4_runtime::{DType, HostTensor};
use serde_json::Value;

use super::calls::{Called, Held, Place};
use super::cases::Fields;
use super::numbers;
use crate::external::wire::{self, WireTensor, WireTensors};
use crate::operator::actual::ByName;

/// After the name of a tensor: its value after the call.
const AFTER: &str = ":after";
/// The file of the fields.
const FIELDS: &str = "calls.json";
/// The extension of the files of tensors.
const TENSORS: &str = "safetensors";

fn key(place: &Place) -> String {
    let layer = place.layer.map_or_else(|| "-".to_owned(), |layer| layer.to_string());
    format!("{:06}/{layer}/{}/{}", place.number, place.operator, place.name)
}

/// Writes a run's calls to a folder, a file for each layer.
///
/// # Errors
/// Files that cannot be written.
pub fn write(folder: &Path, config: &Config, calls: &[Called]) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    let save = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("{}", path.display()))
    };
    let mut files: BTreeMap<Option<usize>, WireTensors> = BTreeMap::new();
    let mut fields: BTreeMap<String, &Fields> = BTreeMap::new();
    for call in calls {
        let (of, key) = (files.entry(call.place.layer).or_default(), key(&call.place));
        for (name, held) in &call.before {
            of.insert(format!("{key}/{name}"), (&held.tensor).into());
            let after = call.after.get(name).filter(|after| **after != held.tensor);
            if let Some(after) = after {
                of.insert(format!("{key}/{name}{AFTER}"), after.into());
            }
        }
        fields.insert(key, &call.fields);
    }
    for (layer, tensors) in files {
        let name = layer.map_or_else(|| "outside".to_owned(), |layer| format!("layer-{layer}"));
        let bytes = wire::to_bytes(&tensors).map_err(anyhow::Error::msg)?;
        save(&format!("{name}.{TENSORS}"), &bytes)?;
    }
    save(FIELDS, &serde_json::to_vec_pretty(&fields)?)?;
    save(dsv4_kernels::model::config::FILE, config.to_json().as_bytes())
}

/// The calls of a dump, in their order.
///
/// # Errors
/// Files that cannot be read, no tensors, names that are not of the form above, types that no
/// operator has.
pub fn read(folder: &Path) -> Result<(Vec<Called>, Option<Config>)> {
    let mut calls: BTreeMap<(usize, String), Called> = BTreeMap::new();
    let mut afters: Vec<((usize, String), String, HostTensor)> = Vec::new();
    for path in files(folder)? {
        let tensors = wire::read(&path, u64::MAX);
        let tensors = tensors.map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
        for (name, tensor) in tensors {
            let of = || format!("{}: `{name}`", path.display());
            let (place, tensor_name) = parsed(&name).with_context(of)?;
            let tensor = host(tensor).with_context(of)?;
            let id = (place.number, key(&place));
            let call = calls.entry(id.clone()).or_insert_with(|| Called {
                place,
                before: BTreeMap::new(),
                after: ByName::new(),
                fields: Fields::new(),
            });
            match tensor_name.strip_suffix(AFTER) {
                Some(own) => afters.push((id, own.to_owned(), tensor)),
                None => {
                    call.after.insert(tensor_name.clone(), tensor.clone());
                    call.before.insert(tensor_name, Held { tensor, view: None });
                }
            }
        }
    }
    for (id, name, tensor) in afters {
        if let Some(call) = calls.get_mut(&id) {
            call.before
                .entry(name.clone())
                .or_insert_with(|| Held { tensor: tensor.clone(), view: None });
            call.after.insert(name, tensor);
        }
    }
    let config = config(folder)?;
    let given = given_fields(folder)?;
    let mut calls: Vec<Called> = calls.into_values().collect();
    for call in &mut calls {
        if let Some(config) = &config {
            call.fields = numbers::of(config, &call.place.operator, call.place.layer, &call.after);
        }
        let own = given.get(&key(&call.place)).and_then(Value::as_object);
        call.fields.extend(own.cloned().unwrap_or_default());
    }
    Ok((calls, config))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = || format!("{}", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(read)? {
        let path = entry.with_context(read)?.path();
        if path.extension().is_some_and(|extension| extension == TENSORS) {
            files.push(path);
        }
    }
    if files.is_empty() {
        bail!("{}: there is no file of tensors (*.{TENSORS})", folder.display());
    }
    files.sort();
    Ok(files)
}

/// A file that may be absent.
fn optional(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{}", path.display())),
    }
}

fn config(folder: &Path) -> Result<Option<Config>> {
    let path = folder.join(dsv4_kernels::model::config::FILE);
    let text = optional(&path)?;
    let parsed = text.map(|text| Config::parse(&text)).transpose();
    parsed.with_context(|| format!("{}", path.display()))
}

fn given_fields(folder: &Path) -> Result<Fields> {
    let path = folder.join(FIELDS);
    let Some(text) = optional(&path)? else { return Ok(Fields::new()) };
    serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
}

/// A call's place and the name of a tensor.
fn parsed(name: &str) -> Result<(Place, String)> {
    let rule = "must be NUMBER/LAYER/OPERATOR/NAME/TENSOR";
    let parts: Vec<&str> = name.split('/').collect();
    let [number, layer, operator, what, tensor] = parts[..] else { bail!("{rule}") };
    let number = number.parse().with_context(|| format!("NUMBER is `{number}`: {rule}"))?;
    let layer = match layer {
        "-" => None,
        layer => Some(layer.parse().with_context(|| format!("LAYER is `{layer}`: {rule}"))?),
    };
    let place = Place { number, layer, operator: operator.to_owned(), name: what.to_owned() };
    Ok((place, tensor.to_owned()))
}

fn host(tensor: WireTensor) -> Result<HostTensor> {
    let WireTensor { dtype, shape, bytes } = tensor;
    let known = DType::ALL.into_iter().find(|known| wire::WireType::of(*known) == dtype);
    let known = known.with_context(|| format!("its type is {dtype}, which no operator has"))?;
    Ok(HostTensor { dtype: known, shape, bytes })
}

/// How far a call's tensor is from the same one of another run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Divergence {
    /// The call.
    #[serde(flatten)]
    pub place: Place,
    /// The tensor that differs most.
    pub tensor: String,
    /// The distance of both, over the root mean square of the first.
    pub distance: f64,
    /// Whether the call read the same bits in both runs: then it is where they part.
    pub same_inputs: bool,
}

/// Calls of two runs that wrote other bits, in the order of the first run, and the calls of the
/// first that the second lacks. Calls are the same by layer, operator, name, and how often those
/// occurred before.
pub fn compare(one: &[Called], other: &[Called]) -> (Vec<Divergence>, Vec<Place>) {
    let mut known: BTreeMap<_, &Called> = BTreeMap::new();
    for (id, call) in numbered(other) {
        known.insert(id, call);
    }
    let (mut apart, mut missing) = (Vec::new(), Vec::new());
    for (id, call) in numbered(one) {
        let Some(same) = known.get(&id) else {
            missing.push(call.place.clone());
            continue;
        };
        let differs = |(name, tensor): (&String, &HostTensor)| {
            let theirs = same.after.get(name).filter(|theirs| *theirs != tensor)?;
            Some((name.clone(), distance(tensor, theirs)))
        };
        // What a call does not write is the same before and after it.
        let read = |call: &Called| -> BTreeMap<String, HostTensor> {
            let read = call
                .actual()
                .map(|actual| actual.inputs().map(|spec| spec.name.to_owned()).collect::<Vec<_>>());
            let is_read = |name: &String| read.as_ref().is_ok_and(|read| read.contains(name));
            let held = call.before.iter().filter(|(name, _)| is_read(name));
            held.map(|(name, held)| (name.clone(), held.tensor.clone())).collect()
        };
        let found = call.after.iter().filter_map(differs);
        if let Some((tensor, distance)) = found.max_by(|a, b| a.1.total_cmp(&b.1)) {
            let same_inputs = read(call) == read(same);
            apart.push(Divergence { place: call.place.clone(), tensor, distance, same_inputs });
        }
    }
    (apart, missing)
}

/// Calls with their layer, operator, name, and how often these occurred before.
fn numbered(
    calls: &[Called],
) -> impl Iterator<Item = ((Option<usize>, String, String, usize), &Called)> {
    let mut seen: BTreeMap<(Option<usize>, String, String), usize> = BTreeMap::new();
    calls.iter().map(move |call| {
        let Place { layer, operator, name, .. } = call.place.clone();
        let count = seen.entry((layer, operator.clone(), name.clone())).or_default();
        *count += 1;
        ((layer, operator, name, *count), call)
    })
}

fn distance(a: &HostTensor, b: &HostTensor) -> f64 {
    if a.shape != b.shape || a.dtype != b.dtype {
        return f64::INFINITY;
    }
    let (a, b) = (a.to_f64(), b.to_f64());
    let apart: f64 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = a.iter().map(|a| a * a).sum();
    if apart == 0.0 { 0.0 } else { (apart / size).sqrt() }
}
