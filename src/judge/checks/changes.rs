//! What the variant of a law changed, in words. It follows from the two sets of inputs, so that no
//! operator writes it down.

use std::collections::HashMap;

use dsv4_runtime::HostTensor;

use crate::judge::agreement::unflatten;
use crate::operator::{Given, PreparedCase};
use crate::record::figures;

/// Longest order of entries that is written out.
const MOST_NAMED: usize = 8;
/// Most different changes that are named.
const MOST_CHANGES: usize = 4;

/// What the inputs of `variant` have that those of `case` have not.
pub(super) fn change(case: &dyn PreparedCase, variant: &dyn PreparedCase) -> String {
    let (own, other) = (case.given(), variant.given());
    let mut changes = fields(case, variant);
    let mut of_tensors: Vec<(String, Vec<&str>)> = Vec::new();
    let mut add = |what: String, name| match of_tensors.iter_mut().find(|(known, _)| *known == what)
    {
        Some((_, names)) => names.push(name),
        None => of_tensors.push((what, vec![name])),
    };
    for given in &other {
        match own.iter().find(|own| own.name == given.name) {
            Some(own) => {
                if let Some(what) = of_tensor(own, given.tensor) {
                    add(what, given.name);
                }
            }
            None => add("present".into(), given.name),
        }
    }
    for given in own.iter().filter(|own| other.iter().all(|other| other.name != own.name)) {
        add("absent".into(), given.name);
    }
    changes
        .extend(of_tensors.into_iter().map(|(what, names)| format!("{} {what}", names.join(", "))));
    let beyond = changes.len().saturating_sub(MOST_CHANGES);
    changes.truncate(MOST_CHANGES);
    if beyond > 0 {
        changes.push(format!("and {beyond} more changes"));
    }
    if changes.is_empty() { "the same inputs, otherwise placed".into() } else { changes.join("; ") }
}

/// Fields of the case that differ.
fn fields(case: &dyn PreparedCase, variant: &dyn PreparedCase) -> Vec<String> {
    let (Some(own), Some(other)) = (case.case(), variant.case()) else { return Vec::new() };
    let differs =
        |(name, value): &(&String, &serde_json::Value)| own.fields.get(*name) != Some(*value);
    let text = |(name, value): (&String, &serde_json::Value)| match own.fields.get(name) {
        Some(own) => format!("{name} {value} for {own}"),
        None => format!("{name} {value}"),
    };
    other.fields.iter().filter(differs).map(text).collect()
}

/// How a tensor of the variant follows from the case's; `None` if it is the same.
fn of_tensor(own: &Given<'_>, other: &HostTensor) -> Option<String> {
    let of = own.tensor;
    if of.shape != other.shape || of.dtype != other.dtype {
        return Some(format!("of shape {:?} for {:?}", other.shape, of.shape));
    }
    if of.bytes == other.bytes {
        return None;
    }
    let (a, b) = (of.to_f64(), other.to_f64());
    factor(&a, &b)
        .or_else(|| (0..of.shape.len()).find_map(|axis| order(own, other, axis)))
        .or_else(|| (0..of.shape.len()).find_map(|axis| entry(own, other, axis)))
        .or_else(|| Some(elements(&a, &b, &of.shape)))
}

/// The number by which all values are multiplied.
fn factor(a: &[f64], b: &[f64]) -> Option<String> {
    let is_number = |x: f64| x.is_finite() && x != 0.0;
    let at = (0..a.len()).find(|&i| is_number(a[i]) && is_number(b[i]))?;
    let factor = b[at] / a[at];
    let scaled = |(x, y): (&f64, &f64)| x * factor == *y || x.is_nan() && y.is_nan();
    a.iter().zip(b).all(scaled).then(|| format!("times {}", figures::element(factor)))
}

/// The bytes of each entry along an axis.
fn entries(tensor: &HostTensor, axis: usize) -> Vec<Vec<&[u8]>> {
    let extent = tensor.shape[axis];
    let size = tensor.shape[axis + 1..].iter().product::<usize>() * tensor.dtype.size();
    let mut entries = vec![Vec::new(); extent];
    for (at, part) in tensor.bytes.chunks_exact(size.max(1)).enumerate() {
        entries[at % extent].push(part);
    }
    entries
}

/// The order in which the variant has the case's entries along an axis.
fn order(own: &Given<'_>, other: &HostTensor, axis: usize) -> Option<String> {
    let (a, b) = (entries(own.tensor, axis), entries(other, axis));
    let mut places: HashMap<&Vec<&[u8]>, Vec<usize>> = HashMap::new();
    a.iter().enumerate().rev().for_each(|(at, entry)| places.entry(entry).or_default().push(at));
    let order: Vec<usize> =
        b.iter().map(|entry| places.get_mut(entry)?.pop()).collect::<Option<_>>()?;
    let moved: Vec<usize> = (0..order.len()).filter(|&at| order[at] != at).collect();
    let name = own.axes[axis];
    if let [first, second] = moved[..] {
        return Some(format!("with entries {first} and {second} of {name} exchanged"));
    }
    let shown = order.iter().take(MOST_NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
    let rest = if order.len() > MOST_NAMED { ", …" } else { "" };
    Some(format!("with {name} in the order {shown}{rest}"))
}

/// The only entry along an axis in which the two differ.
fn entry(own: &Given<'_>, other: &HostTensor, axis: usize) -> Option<String> {
    let (a, b) = (entries(own.tensor, axis), entries(other, axis));
    let mut changed = (0..a.len()).filter(|&at| a[at] != b[at]);
    let (at, none) = (changed.next()?, changed.next());
    let is_one_of_many = none.is_none() && a.len() > 1;
    is_one_of_many.then(|| format!("with other values in entry {at} of {}", own.axes[axis]))
}

fn elements(a: &[f64], b: &[f64], shape: &[usize]) -> String {
    let differs = |&i: &usize| a[i].to_bits() != b[i].to_bits();
    let changed: Vec<usize> = (0..a.len()).filter(differs).collect();
    let Some(&first) = changed.first() else { return "with other bits".into() };
    format!(
        "with {} of {} elements changed, the first at {:?}: {} for {}",
        changed.len(),
        a.len(),
        unflatten(first, shape),
        figures::element(b[first]),
        figures::element(a[first])
    )
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::DType;

    use super::*;

    fn tensor(values: &[f64]) -> HostTensor {
        HostTensor::from_f64(DType::F32, &[3, 2], values)
    }

    fn changed(to: &[f64]) -> Option<String> {
        let own = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, f64::NAN]);
        let given = Given { name: "x", tensor: &own, axes: vec!["num_rows", "width"] };
        of_tensor(&given, &tensor(to))
    }

    #[test]
    fn a_change_is_named_by_the_simplest_that_it_is() {
        const NAN: f64 = f64::NAN;
        for (to, expected) in [
            ([1.0, 2.0, 3.0, 4.0, 5.0, NAN], None),
            ([4.0, 8.0, 12.0, 16.0, 20.0, NAN], Some("times 4")),
            ([5.0, NAN, 3.0, 4.0, 1.0, 2.0], Some("with entries 0 and 2 of num_rows exchanged")),
            ([3.0, 4.0, 5.0, NAN, 1.0, 2.0], Some("with num_rows in the order 1, 2, 0")),
            ([2.0, 1.0, 4.0, 3.0, NAN, 5.0], Some("with entries 0 and 1 of width exchanged")),
            ([1.0, 2.0, 7.0, -4.0, 5.0, NAN], Some("with other values in entry 1 of num_rows")),
            ([1.0, 9.0, 3.0, 8.0, 5.0, NAN], Some("with other values in entry 1 of width")),
            (
                [1.0, 9.0, 7.0, 4.0, 5.0, NAN],
                Some("with 2 of 6 elements changed, the first at [0, 1]: 9 for 2"),
            ),
        ] {
            assert_eq!(changed(&to).as_deref(), expected);
        }
    }
}
