//! Values that no distribution generates: limits and their neighbours, NaN and infinities, rows
//! that no kernel may read. An operator declares their inputs ([`TensorSpec::clamped`],
//! [`TensorSpec::with_zeros`], [`TensorSpec::marks_padding`]). This layer makes sure that every
//! pair of them occurs, in edge cases and in drawn ones. It also puts a single NaN or infinity in
//! each given tensor, where results depend on it. Operators declare nothing for that.

use dsv4_reference::Format;
use dsv4_runtime::DType;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::declaration::{Part, Specs, TensorSpec};
use super::format_of;
use super::tensors::Tensors;
use crate::case::Draw;

/// What inputs hold instead of values from their distribution.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Special {
    /// In clamped inputs all pairs of both limits, their neighbours, values far beyond them, and
    /// 0 of either sign.
    AtTheLimit,
    /// In clamped inputs all pairs of NaN, both infinities and 1.
    NotFinite,
    /// One NaN in the tensor of this name.
    NanIn(String),
    /// One infinity in the tensor of this name.
    InfinityIn(String),
    /// The tensor of this name times the largest power of two that keeps every intermediate within
    /// fp32's range.
    Large(String),
    /// The same with the smallest power of two.
    Small(String),
    /// The tensor of this name times the power of two that makes its largest value, and so all of
    /// them, subnormal.
    Subnormal(String),
    /// Every upstream gradient but that of this name is zero. Terms that others would hide are then
    /// compared within their own rounding errors.
    Alone(String),
}

impl Special {
    /// The choices for clamped inputs.
    pub const OF_CLAMPS: [Self; 2] = [Self::AtTheLimit, Self::NotFinite];

    /// A NaN in each tensor that can hold one, an infinity in each that is not an upstream
    /// gradient. Also each tensor as large and as small as fp32 allows, and subnormal, and each
    /// upstream gradient without the others.
    pub fn of_each_tensor(specs: &Specs) -> Vec<Self> {
        let kinds: [fn(String) -> Self; 6] =
            [Self::NanIn, Self::InfinityIn, Self::Large, Self::Small, Self::Subnormal, Self::Alone];
        let of = |kind: fn(String) -> Self| {
            specs.present().map(move |spec| (spec, kind(spec.name.into())))
        };
        let wanted = |(spec, special): &(&TensorSpec, Self)| {
            special.fits(specs)
                && (spec.part == Part::Input || !matches!(special, Self::InfinityIn(_)))
        };
        kinds.into_iter().flat_map(of).filter(wanted).map(|(_, special)| special).collect()
    }

    /// Whether a case of these tensors can have such values.
    pub fn fits(&self, specs: &Specs) -> bool {
        match self {
            Self::AtTheLimit | Self::NotFinite => {
                specs.present().any(|spec| spec.clamped.is_some())
            }
            Self::Alone(name) => {
                specs.upstreams().count() > 1
                    && specs.upstreams().any(|(_, upstream)| upstream.name == name)
            }
            Self::NanIn(name) => specs.find(name).is_some_and(|spec| can_hold(spec, f64::NAN)),
            Self::InfinityIn(name) => specs
                .find(name)
                .is_some_and(|spec| can_hold(spec, f64::INFINITY) && !spec.never_infinite),
            Self::Subnormal(name) => {
                specs.find(name).is_some_and(|spec| can_hold(spec, f64::INFINITY))
            }
            Self::Large(name) | Self::Small(name) => specs.find(name).is_some_and(can_scale),
        }
    }

    /// Why a case cannot have it, where its tensors do not fit.
    pub(super) fn why_not(&self) -> String {
        match self {
            Self::AtTheLimit | Self::NotFinite => "no tensor of the case is clamped".into(),
            Self::NanIn(name) => format!("no tensor `{name}` of the case can hold a NaN"),
            Self::InfinityIn(name) => {
                format!("no tensor `{name}` of the case can hold an infinity")
            }
            Self::Subnormal(name) => {
                format!("no tensor `{name}` of the case can hold subnormal numbers")
            }
            Self::Large(name) | Self::Small(name) => {
                format!("no tensor `{name}` of the case may have any size")
            }
            Self::Alone(name) => {
                format!("the case has no upstream gradient `{name}` beside others")
            }
        }
    }

    /// Whether gradients of the oracle can be compared with finite differences.
    pub(super) fn is_finite(&self) -> bool {
        !matches!(self, Self::NotFinite | Self::NanIn(_) | Self::InfinityIn(_))
    }

    fn numbers(&self, spec: &TensorSpec, [low, high]: [f64; 2]) -> Vec<f64> {
        let limit = if high.is_finite() { high } else { low.abs() };
        let step = format_of(spec.dtype).map_or(0.0, |format| 2f64.powi(-format.fraction_bits));
        match self {
            Self::AtTheLimit => {
                let sizes = [1.0, 1.0 + step, 1.0 - step, 20.0, 0.0].map(|size| size * limit);
                sizes.into_iter().flat_map(|size| [size, -size]).collect()
            }
            _ => vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0],
        }
    }
}

/// The power of two by which the largest of these values becomes the largest subnormal power of two
/// of fp32 and bf16. 1 where all are zero.
pub(super) fn to_subnormal(values: &[f64]) -> f64 {
    let largest = values
        .iter()
        .filter(|value| value.is_finite())
        .fold(0.0, |largest: f64, value| largest.max(value.abs()));
    if largest > 0.0 {
        2f64.powi(Format::F32.min_exponent - 1 - largest.log2().floor() as i32)
    } else {
        1.0
    }
}

fn can_scale(spec: &TensorSpec) -> bool {
    can_hold(spec, f64::INFINITY) && (spec.any_size || matches!(spec.part, Part::Upstream { .. }))
}

/// Whether a tensor is given and can hold such a value. Its bytes depend on the operator: a NaN's
/// bytes are NaN as codes of e4m3, as scales of e8m0 and as bf16.
fn can_hold(spec: &TensorSpec, number: f64) -> bool {
    let holds = match spec.dtype {
        DType::Bf16 | DType::F32 => true,
        DType::U8 => number.is_nan(),
        _ => false,
    };
    holds && spec.is_given() && spec.elements() > 1
}

/// Offsets that are tried for a single value until results depend on it. A value that is never read
/// tests nothing.
const PLACES: usize = 256;

/// Tensors with the single value at one offset after another, in an order that follows from the
/// seed. Offsets without a finite value are skipped.
pub(super) fn corrupted(
    spec: &TensorSpec,
    seed: u64,
    number: f64,
    tensors: &Tensors,
) -> impl Iterator<Item = Tensors> {
    // Bytes are not decoded to values yet.
    let values = if spec.dtype == DType::U8 { Vec::new() } else { tensors.values(spec.name) };
    let mut places: Vec<usize> = (0..spec.elements()).collect();
    places.shuffle(Draw::new(seed, "special").rng());
    places.retain(|&at| values.get(at).is_none_or(|value| value.is_finite()));
    let at = move |place: usize| {
        let mut tensors = tensors.clone();
        match tensors.bytes_mut(spec.name) {
            Some(bytes) if spec.dtype == DType::U8 => {
                bytes[place / 2 * 2..].iter_mut().take(2).for_each(|x| *x = 0xff)
            }
            _ => tensors.edit(spec.name, |x| x[place] = number),
        }
        tensors
    };
    places.into_iter().take(PLACES).map(at)
}

/// Draws a choice for a case; shrinks towards none.
pub(super) fn strategy() -> BoxedStrategy<Option<Special>> {
    let special = |special: Special| Just(Some(special));
    prop_oneof![4 => Just(None), 1 => special(Special::AtTheLimit), 1 => special(Special::NotFinite)].boxed()
}

/// Sets special values, then NaN in padding rows.
pub(super) fn apply(specs: &Specs, special: Option<&Special>, tensors: &mut Tensors) {
    match special {
        Some(special @ (Special::AtTheLimit | Special::NotFinite)) => {
            set_pairs(specs, special, tensors)
        }
        Some(Special::Alone(name)) => {
            let others = specs.upstreams().filter(|(_, upstream)| upstream.name != name);
            others.for_each(|(_, upstream)| tensors.edit(upstream.name, |x| x.fill(0.0)));
        }
        // The offset of a single value, and the limits of fp32, need all other tensors first.
        Some(_) | None => {}
    }
    for marker in specs.present().filter(|spec| spec.marks_padding) {
        pad(specs, marker, tensors);
    }
}

fn set_pairs(specs: &Specs, special: &Special, tensors: &mut Tensors) {
    // Each tensor's values follow all values of the tensor before it.
    let mut run = 1;
    for spec in specs.present() {
        if let Some(limits) = spec.clamped {
            let numbers = special.numbers(spec, limits);
            tensors.edit(spec.name, |x| {
                x.iter_mut().enumerate().for_each(|(i, x)| *x = numbers[i / run % numbers.len()]);
            });
            run *= numbers.len();
        }
        if spec.zeros && *special == Special::AtTheLimit {
            tensors.edit(spec.name, |x| x.iter_mut().step_by(2).for_each(|x| *x = 0.0));
        }
    }
}

/// Whether an entry is padding: the second of every three.
fn is_padding(entry: usize) -> bool {
    entry % 3 == 1
}

/// Marks entries along the marker's axis as padding, and fills them with NaN in all given tensors
/// with that axis.
fn pad(specs: &Specs, marker: &TensorSpec, tensors: &mut Tensors) {
    let axis = marker.axes[0];
    let marks = (0..axis.extent)
        .map(|entry| if is_padding(entry) { -(entry as i32) } else { entry as i32 });
    tensors.set_i32s(marker.name, &marks.collect::<Vec<_>>());
    let numbers =
        |spec: &&TensorSpec| spec.is_given() && matches!(spec.dtype, DType::Bf16 | DType::F32);
    for spec in specs.present().filter(numbers) {
        let Some(at) = spec.axis(axis.name) else { continue };
        let inner: usize = spec.axes[at + 1..].iter().map(|axis| axis.extent).product();
        tensors.edit(spec.name, |x| {
            let entries = x.chunks_mut(inner.max(1)).enumerate();
            entries
                .filter(|(i, _)| is_padding(i % axis.extent))
                .for_each(|(_, entry)| entry.fill(f64::NAN));
        });
    }
}

/// The distance from each value to the nearest limit of its clamp, and at most the distance over
/// which the oracle bends away from limits. `None` where the declaration has neither.
pub(super) fn bends_over(spec: &TensorSpec, values: &[f64]) -> Option<Vec<f64>> {
    let [low, high] = spec.clamped?;
    let most = spec.bends_over.unwrap_or(f64::INFINITY);
    Some(values.iter().map(|x| (x - low).abs().min((x - high).abs()).min(most)).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::declaration::{axis, input, output, upstream};
    use super::*;
    use crate::case::Distribution;
    use dsv4_reference::Format;

    fn specs(num_rows: usize) -> Specs {
        let rows = [axis("num_rows", num_rows), axis("width", 61)];
        let element = |name| input(name, DType::Bf16, &rows).drawn(Distribution::Normal, 1.0);
        Specs::new(
            1,
            [
                element("gate").clamped(f64::NEG_INFINITY, 10.0).of_any_size(),
                element("up").clamped(-10.0, 10.0).bends_over(1.0),
                input("weight", DType::F32, &rows[..1])
                    .drawn(Distribution::Normal, 1.0)
                    .with_zeros(),
                input("positions", DType::I32, &rows[..1]).marks_padding(),
                output("y", DType::Bf16, &rows),
                upstream("dy", "y"),
            ],
        )
    }

    #[test]
    fn every_pair_of_special_numbers_meets_outside_of_padding_rows() {
        let limits = [10.0, 10.0625, 9.9375, 200.0, 0.0].into_iter().flat_map(|x: f64| [x, -x]);
        let limits: BTreeSet<u64> = limits.map(|x| Format::BF16.nearest(x).to_bits()).collect();
        let others = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0].map(f64::to_bits).into();
        for (special, single) in [(Special::AtTheLimit, limits), (Special::NotFinite, others)] {
            let tensors = Tensors::draw(&specs(5), Some(&special));
            let (gate, up) = (tensors.values("gate"), tensors.values("up"));
            let rows = [0, 2, 3].into_iter().flat_map(|row| row * 61..(row + 1) * 61);
            let met: BTreeSet<_> = rows.map(|i| (gate[i].to_bits(), up[i].to_bits())).collect();
            let all: BTreeSet<_> =
                single.iter().flat_map(|&a| single.iter().map(move |&b| (a, b))).collect();
            assert_eq!(met, all, "{special:?}");
        }
        assert_eq!(Tensors::draw(&specs(5), Some(&Special::AtTheLimit)).values("weight")[2], 0.0);
        assert_ne!(Tensors::draw(&specs(5), Some(&Special::NotFinite)).values("weight")[2], 0.0);
    }

    #[test]
    fn padding_rows_are_negative_and_hold_nan_in_whatever_is_given_along_their_axis() {
        let tensors = Tensors::draw(&specs(5), None);
        assert_eq!(tensors.i32s("positions"), [0, -1, 2, 3, -4]);
        for name in ["gate", "up", "dy", "weight"] {
            let values = tensors.values(name);
            let padded: Vec<bool> =
                values.chunks(values.len() / 5).map(|row| row.iter().all(|x| x.is_nan())).collect();
            assert_eq!(padded, [false, true, false, false, true], "{name}");
            assert_eq!(
                values.iter().filter(|x| x.is_nan()).count(),
                2 * values.len() / 5,
                "{name}"
            );
        }
        assert_eq!(Tensors::draw(&specs(0), None).i32s("positions"), [0i32; 0]);
    }

    #[test]
    fn each_tensor_has_its_lone_number_and_each_upstream_gradient_its_turn_without_the_others() {
        let names = |specs: &Specs| {
            Special::of_each_tensor(specs)
                .into_iter()
                .map(|x| format!("{x:?}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            names(&specs(2)),
            r#"NanIn("gate") NanIn("up") NanIn("weight") NanIn("dy") InfinityIn("gate") InfinityIn("up") InfinityIn("weight") Large("gate") Large("dy") Small("gate") Small("dy") Subnormal("gate") Subnormal("up") Subnormal("weight") Subnormal("dy")"#
        );
        let rows = [axis("num_rows", 3)];
        let [a, b] = ["a", "b"].map(|name| output(name, DType::F32, &rows));
        let two = [a, b, upstream("da", "a").drawn(Distribution::Normal, 1.0), upstream("db", "b")];
        let two = Specs::new(1, two);
        assert_eq!(
            names(&two),
            r#"NanIn("da") NanIn("db") Large("da") Large("db") Small("da") Small("db") Subnormal("da") Subnormal("db") Alone("da") Alone("db")"#
        );
        let tensors = Tensors::draw(&two, Some(&Special::Alone("db".into())));
        assert_eq!(tensors.values("da"), [0.0; 3]);
        assert_ne!(Tensors::draw(&two, None).values("da"), [0.0; 3]);
    }

    #[test]
    fn a_lone_number_stands_in_one_place_after_another_and_never_where_no_number_was() {
        let specs = specs(5);
        let tensors = Tensors::draw(&specs, None);
        let corrupted: Vec<_> =
            corrupted(specs.find("weight").unwrap(), 1, f64::NAN, &tensors).collect();
        // Rows 1 and 4 are padding, and NaN already.
        let places: BTreeSet<usize> = corrupted
            .iter()
            .map(|t| t.values("weight").iter().position(|x| x.is_nan()).unwrap())
            .collect();
        assert_eq!(corrupted.len(), 3);
        let counts =
            corrupted.iter().map(|t| t.values("weight").iter().filter(|x| x.is_nan()).count());
        assert!(
            counts.clone().all(|count| count == 3) && places.is_subset(&[0, 1].into()),
            "{places:?}"
        );
        assert!(!Special::NanIn("positions".into()).fits(&specs), "an integer is always a number");
    }

    #[test]
    fn a_clamped_input_bends_over_the_distance_to_its_nearest_limit() {
        let specs = specs(1);
        let of = |name| bends_over(specs.find(name).unwrap(), &[-10.0, 9.5, 14.0, 0.0]);
        assert_eq!(of("gate"), Some(vec![20.0, 0.5, 4.0, 10.0]));
        assert_eq!(of("up"), Some(vec![0.0, 0.5, 1.0, 1.0]));
        assert_eq!(of("weight"), None);
    }
}
