//! Cases as lines of JSON, and the checks before anything is computed: values, tensors, layouts,
//! and memory.

use dsv4_runtime::cuda::{MAPPED_GRANULE, RESERVED_PART};
use dsv4_runtime::{BackendKind, Environment};
use serde_json::Value;

use super::any::{AnyCase, Declaration, DeclaredCase};
use super::declaration::{Specs, TensorSpec};
use super::declared::{Refused, refuse};
use super::layouts::{self, Layouts, TensorLayout};
use super::size::{self, Limit};
use super::special::Special;
use crate::case::{Case, CaseError};

/// The tensors of a case, if its fields follow the rules.
///
/// # Errors
/// The field, its value and the rule.
pub(super) fn checked(case: &dyn DeclaredCase) -> Result<Specs, Refused> {
    bound_numbers(&Value::Object(case.line().fields), "")?;
    case.check()?;
    let specs = case.tensors();
    specs.check()?;
    Ok(specs)
}

/// Largest whole number of a case except its seed. The sum of two fits an i32 and the product of
/// two fits 64 bits, so operators need no overflow checks.
const LARGEST_NUMBER: u64 = (1 << 30) - 1;

/// Fields that may hold any number of 64 bits.
const SEED: &str = "seed";

/// Smallest and largest size of a real number of a case other than 0: those of fp32. Data drawn with
/// a larger scale are infinities, and with a smaller one all zeros.
const REALS: [f64; 2] = [f32::from_bits(1) as f64, f32::MAX as f64];

/// Rejects numbers beyond [`LARGEST_NUMBER`] and [`REALS`] anywhere in a case.
fn bound_numbers(value: &Value, path: &str) -> Result<(), Refused> {
    match value {
        Value::Object(fields) => {
            fields.iter().filter(|(name, _)| *name != SEED).try_for_each(|(name, value)| {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                bound_numbers(value, &path)
            })
        }
        Value::Array(values) => values.iter().try_for_each(|value| bound_numbers(value, path)),
        Value::Number(number) if number.as_u64().is_some_and(|number| number > LARGEST_NUMBER) => {
            Err(Refused {
                field: path.to_owned().into(),
                reason: format!("{number} is more than {LARGEST_NUMBER}"),
            })
        }
        Value::Number(number) => match number.as_f64() {
            Some(real) if real != 0.0 && !(REALS[0]..=REALS[1]).contains(&real.abs()) => {
                let size = format!("{number} is neither 0 nor of a size that fp32 has");
                Err(Refused { field: path.to_owned().into(), reason: size })
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// What this layer chooses for a case in addition to the operator's own fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Choices {
    pub layouts: Layouts,
    pub special: Option<Special>,
    /// SMs of the emulated device, where they are not those of `--sms`.
    pub sms: Option<u32>,
    /// Whether the launchers are asked for their invariant paths.
    pub invariant: bool,
}

/// The field of a case's line that holds layouts.
pub(super) const LAYOUTS: &str = "layouts";
/// The field that names the special values of the inputs.
const SPECIAL: &str = "special";
/// The field for the SMs of the emulated device. A GPU has the SMs that it has, and the field no
/// effect.
pub(super) const SMS: &str = "sms";
/// Most SMs that a case may ask for.
const MOST_SMS: u32 = 1024;
/// SMs by which cases vary the grids that launchers choose: each block of a launch takes all its
/// work tiles, two share them, and each tile has a block of its own, as on a large GPU. With the
/// default a block takes several.
pub(super) const SMS_OF_CASES: [u32; 3] = [1, 2, 132];

/// The field that asks the launchers for their invariant paths.
const INVARIANT: &str = "invariant";

/// Whether asking for invariant paths changes what the operator declares of such a case.
pub(super) fn has_invariant_path(case: &dyn DeclaredCase) -> bool {
    case.invariant(true) != case.invariant(false)
}

/// Converts the rejection of a field to a case's error.
pub(super) fn field_error(operator: &'static str, refused: Refused) -> CaseError {
    CaseError::Field { operator, field: refused.field, reason: refused.reason }
}

/// Converts the oracle's error to a case's.
pub(super) fn oracle_error(operator: &'static str, error: impl std::fmt::Display) -> CaseError {
    CaseError::Oracle { operator, reason: error.to_string() }
}

/// A case with what the layer chose, as a line of JSON.
pub(super) fn line(case: &dyn DeclaredCase, choices: &Choices) -> Case {
    let mut line = case.line();
    if let Some(special) = &choices.special {
        line.fields.insert(SPECIAL.to_owned(), serde_json::json!(special));
    }
    if choices.invariant {
        line.fields.insert(INVARIANT.to_owned(), true.into());
    }
    if !choices.layouts.is_empty() {
        line.fields.insert(LAYOUTS.to_owned(), serde_json::json!(choices.layouts));
    }
    if let Some(sms) = choices.sms {
        line.fields.insert(SMS.to_owned(), sms.into());
    }
    line
}

/// Reads a line.
pub(super) fn read(
    operator: &dyn Declaration,
    line: &Case,
) -> Result<(AnyCase, Choices), CaseError> {
    let mut line = line.clone();
    let layouts = line.fields.remove(LAYOUTS);
    let special = line.fields.remove(SPECIAL);
    let sms = line.fields.remove(SMS);
    let invariant = line.fields.remove(INVARIANT);
    let case = operator.parse(&line)?;
    no_unknown_field(&line, &*case)?;
    let field_error = |refused| field_error(case.name(), refused);
    let refused =
        |field: &'static str, reason: String| field_error(Refused { field: field.into(), reason });
    let specs = checked(&*case).map_err(field_error)?;
    bound_sizes(case.name(), &specs)?;
    let layouts = layouts
        .map(serde_json::from_value)
        .transpose()
        .map_err(|e| refused(LAYOUTS, e.to_string()))?;
    let layouts: Layouts = layouts.unwrap_or_default();
    check_layouts(&specs, &layouts).map_err(field_error)?;
    let special = special
        .map(serde_json::from_value)
        .transpose()
        .map_err(|e| refused(SPECIAL, e.to_string()))?;
    if let Some(special) = special.as_ref().filter(|special: &&Special| !special.fits(&specs)) {
        return Err(refused(SPECIAL, special.why_not()));
    }
    let sms = sms.map(serde_json::from_value::<u32>).transpose();
    let sms = sms.map_err(|e| refused(SMS, e.to_string()))?;
    if let Some(sms) = sms.filter(|sms| !(1..=MOST_SMS).contains(sms)) {
        return Err(refused(SMS, format!("{sms} is not in 1..={MOST_SMS}")));
    }
    let invariant = invariant
        .map(serde_json::from_value)
        .transpose()
        .map_err(|e| refused(INVARIANT, e.to_string()))?;
    let invariant: bool = invariant.unwrap_or_default();
    if invariant && !has_invariant_path(&*case) {
        return Err(refused(INVARIANT, "true: such a case has only one path".to_owned()));
    }
    Ok((case, Choices { layouts, special, sms, invariant }))
}

/// Cases that share fields flatten them, and serde cannot reject unknown fields there.
fn no_unknown_field(line: &Case, case: &dyn DeclaredCase) -> Result<(), CaseError> {
    let known = case.line().fields;
    match line.fields.keys().find(|field| !known.contains_key(*field)) {
        None => Ok(()),
        Some(field) => {
            let known: Vec<_> = known.keys().map(String::as_str).collect();
            let (name, known) = (case.name(), known.join(", "));
            Err(CaseError::Malformed(format!(
                "unknown field `{field}` in a case of `{name}`; it has {known}"
            )))
        }
    }
}

/// Largest tensor of a case, in elements.
const LARGEST_TENSOR: usize = 1 << 31;

fn bound_sizes(operator: &'static str, specs: &Specs) -> Result<(), CaseError> {
    let Some(large) = specs.present().find(|spec| spec.elements() > LARGEST_TENSOR) else {
        return Ok(());
    };
    let longest = large.axes.iter().max_by_key(|axis| axis.extent);
    Err(CaseError::Field {
        operator,
        field: longest.map_or("extents", |axis| axis.name).into(),
        reason: format!("`{}` {:?} has more than 2^31 elements", large.name, large.shape()),
    })
}

/// Rejects a case that takes more memory than the limit.
///
/// # Errors
/// The longest axis of the largest tensor, and what the case takes.
pub(super) fn within(
    case: &dyn DeclaredCase,
    specs: &Specs,
    layouts: &Layouts,
    limit: Limit,
) -> Result<(), Refused> {
    let bytes = size::bytes_of(specs, layouts, case.oracle_elements());
    if limit.allows(bytes) {
        return Ok(());
    }
    let largest = size::largest(specs);
    // Where the tensors would fit without gaps, the gaps between rows are too large.
    let dense =
        size::bytes_of(&specs.clone().without_gaps(), &Layouts::new(), case.oracle_elements());
    if limit.allows(dense) {
        let own = specs
            .present()
            .find(|spec| spec.gap_of.is_some() && spec.minimum_gap > 0)
            .and_then(|spec| spec.gap_of);
        let field = if layouts.is_empty() { own.unwrap_or(LAYOUTS) } else { LAYOUTS };
        let takes = [bytes, dense].map(size::in_words);
        let [takes, dense] = takes;
        let reason = format!(
            "the case takes up to {takes} of memory, dense {dense}; {limit} are allowed (--memory)"
        );
        return refuse(field, reason);
    }
    let longest = largest.and_then(|spec| spec.axes.iter().max_by_key(|axis| axis.extent));
    let takes = size::in_words(bytes);
    let shape = largest
        .map_or_else(String::new, |spec| format!(", with `{}` {:?}", spec.name, spec.shape()));
    refuse(
        longest.map_or("extents", |axis| axis.name),
        format!("the case takes up to {takes} of memory{shape}; {limit} are allowed (--memory)"),
    )
}

/// Rejects layouts that the case's tensors do not accept or no device can hold.
fn check_layouts(specs: &Specs, layouts: &Layouts) -> Result<(), Refused> {
    for name in layouts.keys() {
        if specs.find(name).is_none() {
            let names: Vec<_> = specs.present().map(|spec| spec.name).collect();
            return refuse(
                LAYOUTS,
                format!("no tensor `{name}`; the case has {}", names.join(", ")),
            );
        }
    }
    let mut addresses = 0usize;
    for spec in specs.present().filter(|spec| spec.is_stored()) {
        // A gap may also be the operator's own, set by another field.
        let field = spec.gap_of.filter(|_| !layouts.contains_key(spec.name)).unwrap_or(LAYOUTS);
        let placed =
            layout_of(spec, layouts).place(spec).and_then(|placed| layouts::bounded(spec, &placed));
        addresses = addresses.saturating_add(placed.or_else(|reason| refuse(field, reason))?);
    }
    let most = 4 * layouts::MOST_ADDRESSES;
    if addresses > most {
        return refuse(
            LAYOUTS,
            format!("they spread the case over {addresses} bytes; {most} at most"),
        );
    }
    Ok(())
}

/// Memory that the tensors of one case may take together on a GPU, where each distant row takes a
/// separate allocation. A GPU of 80 GB shared by a dozen processes has it, times [`RESERVED_PART`].
const LARGEST_CASE: usize = 24 << 30;

/// Why a case does not fit a GPU that many times over. Rows with huge steps between them each take
/// a separate part of its memory.
pub(super) fn too_large_on(
    environment: &Environment,
    specs: &Specs,
    layouts: &Layouts,
    times: usize,
) -> Option<String> {
    let total = buffers_on(environment, specs, layouts).fold(0usize, usize::saturating_add);
    (total.saturating_mul(times) > LARGEST_CASE).then(|| {
        format!(
            "its layouts take more than the {} GiB that a case may have on a GPU",
            LARGEST_CASE >> 30
        )
    })
}

/// Bytes of GPU memory that must be free so that a case gets all its buffers.
pub(super) fn room_on(environment: &Environment, specs: &Specs, layouts: &Layouts) -> u64 {
    let buffers: Vec<usize> = buffers_on(environment, specs, layouts).collect();
    // Calls in sequence have two sets of buffers. The largest buffer of the second set takes its
    // part of what the first set leaves.
    let of_largest = buffers.iter().copied().max().unwrap_or(0).saturating_mul(RESERVED_PART);
    buffers.into_iter().fold(of_largest, usize::saturating_add) as u64
}

/// GPU memory in bytes for the buffer of each tensor; empty on the emulator.
fn buffers_on(
    environment: &Environment,
    specs: &Specs,
    layouts: &Layouts,
) -> impl Iterator<Item = usize> {
    let bytes = |spec: &TensorSpec| {
        let layout = layout_of(spec, layouts).place(spec);
        let bytes = layout
            .map_or(0, |layout| layout.memory_bytes(&spec.shape(), spec.dtype, MAPPED_GRANULE));
        usize::try_from(bytes).unwrap_or(usize::MAX)
    };
    let on_gpu = environment.backend == BackendKind::Cuda;
    specs
        .present()
        .filter(move |spec| on_gpu && spec.is_stored() && spec.placed.is_none())
        .map(bytes)
}

pub(super) fn layout_of(spec: &TensorSpec, layouts: &Layouts) -> TensorLayout {
    layouts.get(spec.name).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::operators::registry;

    #[test]
    fn numbers_with_which_no_right_kernel_computes_are_refused_by_their_fields() {
        for (operator, field, value) in [
            ("mhc_head", "magnitude", 1e39),
            ("swiglu_quantize", "magnitude", 1e39),
            ("hadamard", "magnitude", 1e-46),
            ("rms_norm", "eps", 1e-46),
            ("sparse_attention", "logit_shift", 4294967297.0),
            ("sparse_attention", "logit_deviation", 1e30),
            ("decode_attention", "logit_shift", -1e5),
            ("score_recompute", "outside", 1e30),
            ("grouped_linear_swiglu", "magnitude", 1e36),
        ] {
            let operator = registry::find(operator).expect("an operator");
            let mut case = operator.example();
            operator.check(&case).expect("the example");
            case.fields.insert(field.to_owned(), value.into());
            let refused = operator.check(&case).expect_err(field).to_string();
            assert!(refused.contains(field), "{refused}");
        }
    }
}
