//! The fields of a case that is to declare given tensors: words and numbers of the caller or of the
//! model, words that decide types, and sizes.

use serde_json::Value;

use super::fields::{leaves, set};
use super::observed::Sizes;
use super::signature::{Field, Kind, Signature, Site, Template};
use super::solve::{Given, Options};
use crate::case::Case;
use crate::operator::call::Call;

/// The sizes that values decide: the caller's, or those of given tensors.
pub(super) fn free_sizes(
    signature: &Signature,
    call: &Call,
    given: &[Given],
    options: &Options,
) -> Sizes {
    let size = |axis: &&'static str| {
        let asked = options.get(*axis).and_then(Value::as_u64).map(|size| size as usize);
        let of_given = || {
            given.iter().find_map(|tensor| {
                let at = call.specs().find(&tensor.name)?.axis(axis)?;
                tensor.shape.get(at).copied()
            })
        };
        Some((*axis, asked.or_else(of_given)?))
    };
    signature.free.iter().filter_map(size).collect()
}

/// Sets words and numbers: the caller's, or the model's.
pub(super) fn set_options(
    signature: &Signature,
    case: &mut Case,
    given: &[Given],
    options: &Options,
) {
    for field in &signature.fields {
        let value = match (options.get(&field.keyword), field.is_implementation()) {
            (Some(value), _) => Some(value.clone()),
            (None, true) => Some(slowest(field)),
            (None, false) if field.kind == Kind::Mode => None,
            (None, false) => field.default.clone(),
        };
        let Some(value) = value else { continue };
        let mut changed = case.clone();
        set(&mut changed, &field.path, &value);
        let is_asked = options.contains_key(&field.keyword) || field.is_implementation();
        let is_there = leaves(case).get(&field.path).is_some_and(|value| value.as_u64() != Some(0));
        // What the model has must not contradict the given tensors.
        let fits = || misfits(signature, &changed, given) <= misfits(signature, case, given);
        if is_asked || is_there && fits() {
            *case = changed;
        }
    }
}

/// The kernels that run everywhere; [`Call::fastest`] replaces them.
pub(super) fn slowest(field: &Field) -> Value {
    if field.path.ends_with("library") { false.into() } else { "portable".into() }
}

/// How many of the given tensors a case does not have, or has with another type.
fn misfits(signature: &Signature, case: &Case, given: &[Given]) -> usize {
    let Ok(call) = signature.operator.call(case) else { return usize::MAX };
    let misfit = |tensor: &&Given| {
        call.specs()
            .find(&tensor.name)
            .is_none_or(|spec| (spec.dtype, spec.axes.len()) != (tensor.dtype, tensor.shape.len()))
    };
    given.iter().filter(misfit).count()
}

/// Sets a word that the caller did not give, where the case's tensors have other types than the
/// given ones, and another value of the word has fewer of them.
pub(super) fn set_modes(
    signature: &Signature,
    case: &mut Case,
    given: &[Given],
    options: &Options,
) {
    let mut least = misfits(signature, case, given);
    let words = signature.fields.iter().filter(|field| {
        matches!(field.kind, Kind::Mode | Kind::Choice) && !options.contains_key(&field.keyword)
    });
    for field in words {
        for value in &field.values {
            if least == 0 {
                return;
            }
            let mut other = case.clone();
            if !set(&mut other, &field.path, value) {
                continue;
            }
            let misfits = misfits(signature, &other, given);
            if misfits < least {
                (least, *case) = (misfits, other);
            }
        }
    }
}

/// The numbers that neither the caller, nor the given tensors, nor the model tell.
pub(super) fn open_numbers<'s>(
    signature: &'s Signature,
    case: &Case,
    given: &[Given],
    options: &Options,
) -> Vec<&'s Field> {
    let leaves = leaves(case);
    let is_open = |field: &&Field| {
        let told = match &field.kind {
            Kind::Number => false,
            Kind::Size(sites) => sites.iter().any(|site| is_given(given, site.tensor)),
            _ => true,
        };
        let told = told || field.default.is_some() || options.contains_key(&field.keyword);
        !told && leaves.contains_key(&field.path)
    };
    signature.fields.iter().filter(is_open).collect()
}

/// Reads sizes off the given tensors: first those that are a field, then multiples of others.
pub(super) fn set_sizes(
    signature: &Signature,
    template: &Template,
    case: &mut Case,
    given: &[Given],
    options: &Options,
) {
    for scaled in [false, true] {
        for field in &signature.fields {
            let Kind::Size(sites) = &field.kind else { continue };
            if options.contains_key(&field.keyword) {
                continue;
            }
            // In the order in which the operator declares its tensors.
            let told = given.iter().flat_map(|tensor| {
                sites
                    .iter()
                    .filter(|site| site.tensor == tensor.name)
                    // A tensor may have an axis of another name in another case.
                    .filter(|site| axis_of(template, site).is_some())
                    .map(move |site| (tensor, site))
            });
            let told: Vec<_> = told.collect();
            let is_told = told.iter().any(|(_, site)| !site.scaled);
            if scaled && is_told {
                continue;
            }
            let sizes = told.into_iter().filter(|(_, site)| site.scaled == scaled);
            let mut sizes = sizes.filter_map(|(tensor, site)| {
                let size = *tensor.shape.get(axis_of(template, site)?)?;
                if scaled { unscaled(signature, case, field, site, size) } else { Some(size) }
            });
            if let Some(size) = sizes.next() {
                set(case, &field.path, &size.into());
            }
        }
    }
}

/// Sets the space between rows that the strides of given tensors have. It may include what fills up
/// a row.
pub(super) fn set_gaps(
    signature: &Signature,
    template: &Template,
    case: &mut Case,
    given: &[Given],
) {
    for seen in &template.observed.tensors {
        let tensor = given.iter().find(|tensor| tensor.name == seen.spec.name);
        let (Some(name), Some(tensor)) = (seen.spec.gap_of, tensor) else { continue };
        let gap = match (&tensor.shape[..], &tensor.strides[..]) {
            ([.., row], [.., stride, _]) => u64::try_from(stride - *row as i64).unwrap_or(0),
            _ => 0,
        };
        let leaves = leaves(case);
        let Some((path, value)) = leaves.iter().find(|(path, _)| path.ends_with(name)) else {
            continue;
        };
        let call = signature.operator.call(case);
        let declared =
            call.ok().and_then(|call| Some(call.specs().find(&tensor.name)?.minimum_gap));
        let filling = declared
            .map_or(0, |declared| (declared as u64).saturating_sub(value.as_u64().unwrap_or(0)));
        set(case, path, &gap.saturating_sub(filling).into());
    }
}

/// The index of a site's axis in such a case.
fn axis_of(template: &Template, site: &Site) -> Option<usize> {
    let seen = template.observed.tensors.iter().find(|seen| seen.spec.name == site.tensor)?;
    seen.spec.axis(site.axis)
}

/// The field of which the size of an axis is a multiple, as it is in this case.
fn unscaled(
    signature: &Signature,
    case: &Case,
    field: &Field,
    site: &Site,
    size: usize,
) -> Option<usize> {
    let call = signature.operator.call(case).ok()?;
    let spec = call.specs().find(site.tensor)?;
    let declared = spec.axes[spec.axis(site.axis)?].extent;
    let value = leaves(case).get(&field.path)?.as_u64()? as usize;
    (declared > 0 && (size * value).is_multiple_of(declared)).then(|| size * value / declared)
}

fn is_given(given: &[Given], name: &str) -> bool {
    given.iter().any(|tensor| tensor.name == name)
}
