//! The memory layout of each tensor of a case, drawn by this layer for every operator.
//!
//! Every tensor has its own layout, independent of the others. A layout is dense, has gaps between
//! rows or after outer axes, or has axes in another order. It may also have strides so large that
//! offsets exceed 2^32 elements. Layouts that a kernel does not accept ([`Strides`]) are not drawn.
//! A separate check tests that its launcher rejects them ([`super::refusals`]).
//!
//! A kernel that accepts any row stride may use wide accesses where all rows allow it. Otherwise it
//! moves one element at a time. If each tensor had odd gaps, such kernels would use wide accesses
//! only for dense rows. So in every second case all gaps are whole accesses.

use std::collections::BTreeMap;

use dsv4_runtime::arena::Layout;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::{Deserialize, Serialize};

use super::declaration::{Specs, Strides, TensorSpec};

/// Offsets of a huge layout exceed this many elements, which no 32-bit integer can hold, signed or
/// unsigned.
const HUGE: usize = 1 << 32;

/// Elements of a tensor with gaps in every edge case of an operator. Many more would take longer to
/// fill and read back than all its other cases.
const MOST_WITH_GAPS: usize = 1 << 22;

/// Huge steps of a tensor. A GPU maps memory for each of them, which takes a millisecond, in every
/// run of a case.
const MOST_HUGE_STEPS: usize = 1 << 8;

/// Bytes that the tensors with huge steps take together in an edge case. A whole case, other
/// tensors included, must fit a GPU ([`super::declared`]).
const MOST_HUGE_BYTES: usize = 36 << 30;

/// Bytes from the first to the last of a tensor, and four times as many for all tensors of a case.
/// The address range that a device reserves holds them twice.
pub(super) const MOST_ADDRESSES: usize = 1 << 37;

/// Most elements before the first one of a tensor.
const MOST_OFFSET: usize = 256;

/// The widest access.
const VECTOR_BYTES: usize = 16;

/// That many elements of any type are a multiple of the 16 bytes of the widest access.
const WHOLE_VECTOR: usize = 16;

/// The memory layout of one tensor, by the names of its axes. The default is dense.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorLayout {
    /// Axes from the outermost in memory to the innermost; empty is the declared order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<String>,
    /// Elements after the end of an axis that belong to no tensor. They increase the stride of the
    /// next outer axis.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gaps: BTreeMap<String, usize>,
    /// Elements between an address that every kernel takes and the tensor's first element.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: usize,
}

fn is_zero(offset: &usize) -> bool {
    *offset == 0
}

/// Layouts by the names of tensors; dense where a tensor is missing.
pub type Layouts = BTreeMap<String, TensorLayout>;

impl TensorLayout {
    /// Only gaps.
    fn gap(axis: &str, elements: usize) -> Self {
        Self { gaps: [(axis.to_owned(), elements)].into(), ..Self::default() }
    }

    /// The layout in memory.
    ///
    /// # Errors
    /// An axis that the tensor does not have, an order that is not a permutation, an alignment that
    /// the kernel does not accept, sizes beyond what an address can hold.
    pub fn place(&self, spec: &TensorSpec) -> Result<Layout, String> {
        let order = self.axes_of(spec)?;
        let mut gaps = vec![0; spec.axes.len()];
        for (name, &gap) in &self.gaps {
            if gap > MOST_ADDRESSES {
                return Err(format!(
                    "`{}`: a gap of {gap} elements; at most {MOST_ADDRESSES}",
                    spec.name
                ));
            }
            gaps[spec.axis(name).ok_or_else(|| unknown(spec, name))?] = gap;
        }
        if let Some(last) = gaps.last_mut() {
            *last = last
                .checked_add(spec.minimum_gap)
                .ok_or_else(|| format!("`{}`: too large a gap", spec.name))?;
        }
        self.hold_to(spec, &order, &mut gaps)?;
        let layout = Layout::of(&spec.shape(), &order, &gaps)
            .map_err(|error| format!("`{}`: {error}", spec.name))?;
        self.shifted(spec, layout)
    }

    /// The layout behind [`Self::offset`] elements.
    fn shifted(&self, spec: &TensorSpec, layout: Layout) -> Result<Layout, String> {
        let (unit, offset) = (unit_of(spec), self.offset);
        if offset > MOST_OFFSET || !offset.is_multiple_of(unit) {
            return Err(format!(
                "`{}`: an offset of {offset} elements; it must be a multiple of {unit} up to {MOST_OFFSET}",
                spec.name
            ));
        }
        let elements = layout.elements.saturating_add(offset);
        Ok(Layout { offset: layout.offset + offset, elements, ..layout })
    }

    /// Indices of the axes, from the outermost in memory to the innermost.
    fn axes_of(&self, spec: &TensorSpec) -> Result<Vec<usize>, String> {
        if self.order.is_empty() {
            return Ok((0..spec.axes.len()).collect());
        }
        let order: Vec<usize> = self
            .order
            .iter()
            .map(|name| spec.axis(name).ok_or_else(|| unknown(spec, name)))
            .collect::<Result<_, _>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted != (0..spec.axes.len()).collect::<Vec<_>>() {
            return Err(format!(
                "`{}`: {:?} does not name each of its axes once",
                spec.name, self.order
            ));
        }
        Ok(order)
    }

    /// Checks the layout against what the kernel accepts. Where it accepts only aligned rows, an
    /// unaligned dense row gets a gap.
    fn hold_to(
        &self,
        spec: &TensorSpec,
        order: &[usize],
        gaps: &mut [usize],
    ) -> Result<(), String> {
        let declared_order = order.is_sorted();
        let (align, permutable) = match spec.strides {
            Strides::Dense if !self.gaps.is_empty() || !declared_order => {
                return Err(format!("`{}`: its kernel takes it dense only", spec.name));
            }
            Strides::Dense => return Ok(()),
            Strides::Rows { align } => (align, true),
            Strides::OrderedRows { align } => (align, false),
        };
        if !permutable && !declared_order || order.last() != Some(&(spec.axes.len() - 1)) {
            return Err(format!(
                "`{}`: its kernel does not take its axes in the order {:?}",
                spec.name, self.order
            ));
        }
        if spec.joined && (gaps[1] > 0 || !order.windows(2).any(|pair| pair == [0, 1])) {
            let [first, second] = [spec.axes[0].name, spec.axes[1].name];
            return Err(format!(
                "`{}`: its kernel takes {first} and {second} as one axis, evenly spaced",
                spec.name
            ));
        }
        let unit = (align / spec.dtype.size()).max(1);
        let mut reach = 1usize;
        for &at in order.iter().rev() {
            reach = reach.saturating_mul(spec.axes[at].extent).saturating_add(gaps[at]);
            let missing = (unit - reach % unit) % unit;
            if missing > 0 && self.gaps.contains_key(spec.axes[at].name) {
                return Err(format!(
                    "`{}`: a gap of {} elements behind {}: its rows must lie at multiples of {align} bytes",
                    spec.name, gaps[at], spec.axes[at].name
                ));
            }
            (gaps[at], reach) = (gaps[at].saturating_add(missing), reach.saturating_add(missing));
        }
        Ok(())
    }
}

/// Elements in the distance between two addresses that a tensor's kernel takes.
fn unit_of(spec: &TensorSpec) -> usize {
    match spec.strides {
        Strides::Dense => 1,
        Strides::Rows { align } | Strides::OrderedRows { align } => {
            (align / spec.dtype.size()).max(1)
        }
    }
}

/// The bytes over which a tensor is spread.
///
/// # Errors
/// More than [`MOST_ADDRESSES`].
pub(super) fn bounded(spec: &TensorSpec, layout: &Layout) -> Result<usize, String> {
    let bytes = layout.elements.saturating_mul(spec.dtype.size());
    if bytes <= MOST_ADDRESSES {
        return Ok(bytes);
    }
    Err(format!("`{}` is spread over {bytes} bytes; at most {MOST_ADDRESSES}", spec.name))
}

fn unknown(spec: &TensorSpec, axis: &str) -> String {
    let axes: Vec<_> = spec.axes.iter().map(|axis| axis.name).collect();
    format!("`{}` has no axis `{axis}`; it has {}", spec.name, axes.join(", "))
}

/// The random choice for one tensor. It becomes a [`TensorLayout`] when its axes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Dense.
    Dense,
    /// That many units of its alignment after each row.
    Padded(usize),
    /// That many units after the axis of this index (modulo the number of axes).
    Gap(usize, usize),
    /// Its outer axes rotated by that many positions, with a gap after each row.
    Turned(usize, usize),
    /// Strides beyond 2^32 elements along the axis of this index. The axis is the outermost in
    /// memory where allowed.
    Huge(usize),
}

/// The largest number of tensors that an operator declares.
pub const MOST_TENSORS: usize = 32;

/// Draws a choice for each of `count` tensors; shrinks towards dense ones.
pub fn strategy(count: usize) -> BoxedStrategy<Vec<Choice>> {
    let choice = prop_oneof![
        8 => Just(Choice::Dense),
        4 => (1..20usize).prop_map(Choice::Padded),
        3 => (0..4usize, 1..9usize).prop_map(|(axis, units)| Choice::Gap(axis, units)),
        3 => (1..4usize, 0..4usize).prop_map(|(places, units)| Choice::Turned(places, units)),
        1 => (0..4usize).prop_map(Choice::Huge),
    ];
    prop::collection::vec(choice, count).boxed()
}

/// The layouts that result from choices, one for each declared tensor, in a case. A choice that a
/// tensor cannot have becomes dense. All gaps are whole accesses where the case's seed is even.
///
/// In one of eight cases every tensor starts one unit after an address that all kernels take.
pub fn resolve(specs: &Specs, choices: &[Choice]) -> Layouts {
    let layouts = lay_out(specs, specs.seed.is_multiple_of(2), choices);
    if specs.seed % 8 == 5 { offset_by_one(specs, layouts) } else { layouts }
}

/// Dense tensors, each at an address off by one: rows that 16-byte accesses fit, but for where they
/// start.
pub fn dense_off_by_one(specs: &Specs) -> Layouts {
    offset_by_one(specs, Layouts::new())
}

/// The layouts with every tensor one unit off: an element, or what its kernel aligns rows to. A
/// kernel that takes no rows but those of whole vectors, such as one for Hopper, may take no other
/// address of a dense tensor either.
fn offset_by_one(specs: &Specs, mut layouts: Layouts) -> Layouts {
    let bytes = |spec: &TensorSpec| unit_of(spec) * spec.dtype.size();
    let least = specs.present().map(bytes).filter(|bytes| *bytes >= VECTOR_BYTES).min();
    for spec in specs.present().filter(|spec| spec.placed.is_none() && spec.takes_offsets()) {
        let least = least.map_or(1, |bytes| bytes / spec.dtype.size());
        layouts.entry(spec.name.to_owned()).or_default().offset = unit_of(spec).max(least);
    }
    layouts
}

fn lay_out(specs: &Specs, whole_vectors: bool, choices: &[Choice]) -> Layouts {
    let chosen =
        specs.all().iter().zip(choices).filter(|(spec, _)| spec.present && spec.placed.is_none());
    chosen
        .filter_map(|(spec, &choice)| {
            let layout = resolve_one(spec, choice, whole_vectors)?;
            let placed = layout.place(spec).ok()?;
            bounded(spec, &placed).ok().map(|_| (spec.name.to_owned(), layout))
        })
        .collect()
}

/// The axes of a tensor except its last one, as a layout permutes them. Joined axes are one place,
/// so that no gap comes between them and they move together.
struct Places {
    joined: usize,
    count: usize,
}

impl Places {
    /// `None` where the tensor has only its last axis.
    fn of(spec: &TensorSpec) -> Option<Self> {
        let joined = usize::from(spec.joined);
        let count = spec.axes.len().checked_sub(1 + joined).filter(|&count| count > 0)?;
        Some(Self { joined, count })
    }

    /// The axes of a place.
    fn axes(&self, place: usize) -> std::ops::Range<usize> {
        if place == 0 { 0..1 + self.joined } else { place + self.joined..place + self.joined + 1 }
    }
}

fn resolve_one(spec: &TensorSpec, choice: Choice, whole_vectors: bool) -> Option<TensorLayout> {
    let (align, permutable) = match spec.strides {
        Strides::Dense => return None,
        Strides::Rows { align } => (align, true),
        Strides::OrderedRows { align } => (align, false),
    };
    let unit = if whole_vectors { WHOLE_VECTOR } else { (align / spec.dtype.size()).max(1) };
    let places = Places::of(spec)?;
    let outer = spec.axes.len() - 1;
    let name = |at: usize| spec.axes[at].name;
    match choice {
        Choice::Dense => None,
        Choice::Padded(units) => Some(TensorLayout::gap(name(outer), units * unit)),
        Choice::Gap(axis, units) => {
            Some(TensorLayout::gap(name(places.axes(axis % places.count).end), units * unit))
        }
        Choice::Turned(by, units) if permutable && places.count > 1 => {
            let turned =
                (0..places.count).map(|at| (at + 1 + (by - 1) % (places.count - 1)) % places.count);
            let turned = turned.flat_map(|place| places.axes(place)).chain([outer]);
            let gaps = (units > 0).then(|| (name(outer).to_owned(), units * unit));
            Some(TensorLayout {
                order: turned.map(|at| name(at).to_owned()).collect(),
                gaps: gaps.into_iter().collect(),
                offset: 0,
            })
        }
        Choice::Turned(..) => None,
        Choice::Huge(axis) => huge(spec, &places, axis % places.count, permutable, unit),
    }
}

/// Strides of a place beyond [`HUGE`] elements. `None` where it has one entry, which needs no
/// stride, or more than [`MOST_HUGE_STEPS`]. The place is the outermost in memory where allowed.
/// Inside another axis, the tensor would be larger by that axis's size.
fn huge(
    spec: &TensorSpec,
    places: &Places,
    place: usize,
    permutable: bool,
    unit: usize,
) -> Option<TensorLayout> {
    let stepping = places.axes(place);
    let steps = spec.axes[stepping.clone()]
        .iter()
        .map(|axis| axis.extent)
        .product::<usize>()
        .checked_sub(1)?;
    if !(1..MOST_HUGE_STEPS).contains(&steps) {
        return None;
    }
    let others = (0..spec.axes.len()).filter(|at| !stepping.contains(at));
    let order: Vec<usize> = if permutable {
        stepping.clone().chain(others).collect()
    } else {
        (0..spec.axes.len()).collect()
    };
    // The gap comes after the inner axis, so that the strides of the place around it are huge.
    let within = order[order.iter().rposition(|at| stepping.contains(at))? + 1];
    let name = |at: usize| spec.axes[at].name.to_owned();
    let gap = TensorLayout::gap(spec.axes[within].name, (HUGE / steps + 1).next_multiple_of(unit));
    let order = if order.is_sorted() { Vec::new() } else { order.into_iter().map(name).collect() };
    Some(TensorLayout { order, ..gap })
}

/// Gaps of whole accesses after the rows of every tensor, no two with the same number of elements.
/// A tensor with many short rows stays dense if it would take more than [`MOST_WITH_GAPS`]
/// elements.
pub fn unlike_gaps(specs: &Specs) -> Layouts {
    let mut layouts = all(specs, true, &|tensor| Choice::Padded(1 + tensor));
    let elements =
        |name: &str, layout: &TensorLayout| Some(layout.place(specs.find(name)?).ok()?.elements);
    layouts.retain(|name, layout| {
        elements(name, layout).is_some_and(|elements| elements <= MOST_WITH_GAPS)
    });
    layouts
}

fn all(specs: &Specs, whole_vectors: bool, choice: &dyn Fn(usize) -> Choice) -> Layouts {
    lay_out(specs, whole_vectors, &(0..specs.all().len()).map(choice).collect::<Vec<_>>())
}

/// Layouts at the start of every operator's sweep: gaps that are all different, odd gaps behind
/// addresses off by one, axes in another order, and huge strides along each axis. Huge strides
/// apply to as many tensors at a time as fit a GPU's memory.
pub fn edge_cases(specs: &Specs) -> Vec<Layouts> {
    let mut found = vec![
        unlike_gaps(specs),
        offset_by_one(specs, all(specs, false, &|tensor| Choice::Gap(0, 1 + tensor))),
        all(specs, true, &|tensor| Choice::Turned(1, 1 + tensor)),
    ];
    let places = |spec: &TensorSpec| Places::of(spec).map_or(0, |places| places.count);
    for place in 0..specs.all().iter().map(places).max().unwrap_or(0) {
        let has_place = |tensor: usize| place < places(&specs.all()[tensor]);
        let huge = all(specs, true, &|tensor| {
            if has_place(tensor) { Choice::Huge(place) } else { Choice::Dense }
        });
        found.extend(in_memory(specs, huge));
    }
    found.retain(|layouts| !layouts.is_empty());
    found.dedup();
    found
}

/// Every tensor with its outer axes in another order where its kernel accepts that, and a unique
/// gap after its rows. Each gap keeps accesses of 16 bytes possible, so kernels take the same paths
/// as for dense tensors.
pub fn spread(specs: &Specs) -> Layouts {
    let mut layouts = all(specs, true, &|tensor| Choice::Padded(1 + tensor));
    layouts.extend(all(specs, true, &|tensor| Choice::Turned(1, 1 + tensor)));
    layouts
}

/// The layouts in groups that each take at most [`MOST_HUGE_BYTES`], except for a single tensor
/// that takes more.
fn in_memory(specs: &Specs, layouts: Layouts) -> Vec<Layouts> {
    let mut groups = Vec::new();
    let (mut group, mut taken) = (Layouts::new(), 0usize);
    for (name, layout) in layouts {
        let placed = specs.find(&name).map(|spec| (spec, layout.place(spec)));
        let Some((spec, Ok(placed))) = placed else { continue };
        let bytes = placed.elements.saturating_mul(spec.dtype.size());
        if taken.saturating_add(bytes) > MOST_HUGE_BYTES {
            groups.push(std::mem::take(&mut group));
            taken = 0;
        }
        group.insert(name, layout);
        taken += bytes;
    }
    groups.push(group);
    groups
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::DType;

    use super::super::declaration::{axis, input};
    use super::*;

    fn q(strides: fn(TensorSpec) -> TensorSpec) -> TensorSpec {
        let axes = [axis("num_tokens", 3), axis("num_heads", 5), axis("head_dim", 64)];
        strides(input("q", DType::Bf16, &axes))
    }

    #[test]
    fn heads_may_come_first_in_memory_with_a_gap_behind_each_row() {
        let spec = q(TensorSpec::aligned_rows);
        let layout = resolve_one(&spec, Choice::Turned(1, 2), false).unwrap();
        assert_eq!(layout.order, ["num_heads", "num_tokens", "head_dim"]);
        let placed = layout.place(&spec).unwrap();
        assert_eq!(placed.strides, [80, 240, 1]);
    }

    #[test]
    fn huge_steps_reach_beyond_what_32_bits_hold() {
        let spec = q(TensorSpec::rows);
        for axis in 0..2 {
            let placed =
                resolve_one(&spec, Choice::Huge(axis), false).unwrap().place(&spec).unwrap();
            let last: i64 =
                placed.strides.iter().zip([2, 4, 63]).map(|(stride, at)| stride * at).sum();
            assert!(last > 1 << 32 && placed.elements < 7 << 30, "{placed:?}");
        }
    }

    #[test]
    fn what_a_kernel_does_not_take_is_neither_drawn_nor_placed() {
        assert_eq!(resolve_one(&q(|spec| spec), Choice::Padded(3), false), None);
        assert_eq!(resolve_one(&q(|spec| spec.ordered_rows(1)), Choice::Turned(1, 0), false), None);
        let odd = TensorLayout::gap("head_dim", 3);
        assert!(odd.place(&q(TensorSpec::rows)).is_ok());
        assert!(odd.place(&q(TensorSpec::aligned_rows)).unwrap_err().contains("16 bytes"));
        assert!(odd.place(&q(|spec| spec)).unwrap_err().contains("dense"));
        assert!(
            TensorLayout::gap("width", 8)
                .place(&q(TensorSpec::rows))
                .unwrap_err()
                .contains("no axis `width`")
        );
        let twice = TensorLayout { order: vec!["num_heads".into(); 3], ..TensorLayout::default() };
        assert!(twice.place(&q(TensorSpec::rows)).unwrap_err().contains("once"));
    }

    #[test]
    fn axes_that_are_one_to_the_kernel_stay_evenly_spaced_in_every_layout_that_is_drawn() {
        let axes = [axis("batch", 3), axis("s_q", 2), axis("num_heads", 5), axis("head_dim", 64)];
        let spec = input("q", DType::Bf16, &axes).aligned_rows().joined();
        let mut found = std::collections::BTreeSet::new();
        for number in 0..4 {
            for choice in
                [Choice::Gap(number, 3), Choice::Turned(1 + number, number), Choice::Huge(number)]
            {
                let placed = resolve_one(&spec, choice, false).unwrap().place(&spec).unwrap();
                assert_eq!(placed.strides[0], 2 * placed.strides[1], "{choice:?}");
                found.insert(placed.strides);
            }
        }
        // Heads first, gaps after heads and after rows, and both of them huge.
        assert!(
            found.contains(&vec![128, 64, 384, 1])
                && found.iter().any(|s| s[2] > 1 << 28)
                && found.len() > 6
        );
        assert!(TensorLayout::gap("s_q", 8).place(&spec).unwrap_err().contains("evenly spaced"));
        let apart = ["s_q", "num_heads", "batch", "head_dim"].map(str::to_owned).to_vec();
        let apart = TensorLayout { order: apart, ..TensorLayout::default() };
        assert!(apart.place(&spec).unwrap_err().contains("evenly spaced"));
    }

    #[test]
    fn gaps_that_no_address_can_hold_are_refused() {
        for spec in [
            q(TensorSpec::rows),
            q(TensorSpec::aligned_rows),
            q(TensorSpec::aligned_rows).with_gap("padding", 8),
        ] {
            assert!(TensorLayout::gap("head_dim", usize::MAX).place(&spec).is_err());
            assert!(TensorLayout::gap("num_heads", usize::MAX - 7).place(&spec).is_err());
        }
    }

    #[test]
    fn in_every_second_case_all_steps_are_whole_accesses() {
        let specs = |seed| Specs::new(seed, [q(TensorSpec::rows)]);
        let steps = |seed| {
            resolve(&specs(seed), &[Choice::Padded(3)])["q"]
                .place(&q(TensorSpec::rows))
                .unwrap()
                .strides
        };
        assert_eq!([steps(0), steps(1)], [[560, 112, 1], [335, 67, 1]]);
    }

    #[test]
    fn the_edge_cases_have_huge_steps_along_every_axis_of_every_tensor_in_the_memory_of_a_gpu() {
        let lists = [axis("num_tokens", 3), axis("topk", 4)];
        let list = |name| input(name, DType::I32, &lists).rows();
        let tensors =
            [q(TensorSpec::aligned_rows), list("indices"), list("lengths"), list("positions")];
        let specs = Specs::new(0, tensors);
        let mut huge = std::collections::BTreeSet::new();
        for layouts in edge_cases(&specs) {
            let mut bytes = 0;
            for (name, layout) in &layouts {
                let spec = specs.find(name).unwrap();
                let placed = layout.place(spec).unwrap();
                bytes += placed.elements * spec.dtype.size();
                huge.extend(
                    (0..2)
                        .filter(|&axis| placed.strides[axis] >= 1 << 30)
                        .map(|axis| (name.clone(), axis)),
                );
            }
            assert!(bytes <= MOST_HUGE_BYTES, "{layouts:?} take {bytes} bytes");
        }
        let found: Vec<_> = huge.iter().map(|(name, axis)| (name.as_str(), *axis)).collect();
        assert_eq!(found, [("indices", 0), ("lengths", 0), ("positions", 0), ("q", 0), ("q", 1)]);
    }

    #[test]
    fn a_tensor_of_very_many_rows_has_no_huge_steps() {
        let rows = |count| {
            let spec = input("x", DType::F32, &[axis("num_rows", count), axis("width", 8)]).rows();
            resolve_one(&spec, Choice::Huge(0), false).is_some()
        };
        assert_eq!([1, 2, 256, 257].map(rows), [false, true, true, false]);
    }

    #[test]
    fn a_tensor_of_very_many_short_rows_stays_dense_among_others_with_gaps() {
        let table =
            input("cos", DType::F32, &[axis("table_rows", 1 << 20), axis("half", 1)]).rows();
        let specs = Specs::new(0, [q(TensorSpec::rows), table]);
        assert_eq!(unlike_gaps(&specs).keys().collect::<Vec<_>>(), ["q"]);
    }

    #[test]
    fn spread_tensors_are_turned_where_they_may_be_and_stay_aligned() {
        let rows = [axis("num_rows", 3), axis("width", 8)];
        let in_order = TensorSpec { name: "k", ..q(|spec| spec.ordered_rows(16)) };
        let specs =
            Specs::new(0, [q(TensorSpec::rows), in_order, input("x", DType::F32, &rows).rows()]);
        let layouts = spread(&specs);
        let strides = |name: &str| layouts[name].place(specs.find(name).unwrap()).unwrap().strides;
        assert_eq!(strides("q"), [80, 240, 1]);
        assert!(layouts["k"].order.is_empty() && strides("k")[1] > 64 && strides("x")[0] > 8);
        assert!(
            ["q", "k", "x"].iter().all(|name| strides(name)
                .iter()
                .rev()
                .skip(1)
                .all(|stride| stride % 8 == 0))
        );
    }

    #[test]
    fn every_tensor_gets_a_gap_of_its_own() {
        let axes = [axis("num_rows", 3), axis("width", 8)];
        let specs = Specs::new(
            0,
            [input("x", DType::F32, &axes).rows(), input("y", DType::F32, &axes).rows()],
        );
        let first = &edge_cases(&specs)[0];
        assert_ne!(first["x"].gaps, first["y"].gaps);
    }
}
