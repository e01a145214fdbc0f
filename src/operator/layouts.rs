//! How each tensor of a case lies in memory: drawn by this layer, for every operator alike.
//!
//! Every tensor has a layout of its own, independently of the others: dense, rows with gaps between them, gaps behind
//! outer axes, axes in another order, or steps so huge that offsets exceed 2^31 elements. What a kernel does not take
//! ([`Strides`]) is not drawn; that its launcher refuses it is checked apart ([`super::refusals`]).

use std::collections::BTreeMap;

use dsv4_kernels::runtime::DType;
use dsv4_kernels::runtime::arena::Layout;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::{Deserialize, Serialize};

use super::declaration::{Specs, Strides, TensorSpec};

/// Offsets of a huge layout reach beyond so many elements: what a signed 32-bit number cannot hold.
const HUGE: usize = 1 << 31;

/// How one tensor lies in memory, by the names of its axes. The default is dense.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorLayout {
    /// Axes from the outermost in memory to the innermost; empty is the declared order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<String>,
    /// Elements, belonging to nobody, behind all of an axis: they lengthen the step of the axis around it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gaps: BTreeMap<String, usize>,
}

/// Layouts by the names of tensors; dense where a tensor is missing.
pub type Layouts = BTreeMap<String, TensorLayout>;

impl TensorLayout {
    /// Gaps alone.
    fn gap(axis: &str, elements: usize) -> Self {
        Self { gaps: [(axis.to_owned(), elements)].into(), ..Self::default() }
    }

    /// The layout in memory.
    ///
    /// # Errors
    /// An axis that the tensor has not, an order that is none, an alignment that the kernel does not take, sizes beyond
    /// what an address can hold.
    pub fn place(&self, spec: &TensorSpec) -> Result<Layout, String> {
        let order = self.axes_of(spec)?;
        let mut gaps = vec![0; spec.axes.len()];
        for (name, &gap) in &self.gaps {
            gaps[spec.axis(name).ok_or_else(|| unknown(spec, name))?] = gap;
        }
        if let Some(last) = gaps.last_mut() {
            *last = last.checked_add(spec.minimum_gap).ok_or_else(|| format!("`{}`: too large a gap", spec.name))?;
        }
        self.hold_to(spec, &order, &mut gaps)?;
        Layout::of(&spec.shape(), &order, &gaps).map_err(|error| format!("`{}`: {error}", spec.name))
    }

    /// Places of the axes, from the outermost in memory to the innermost.
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
            return Err(format!("`{}`: {:?} does not name each of its axes once", spec.name, self.order));
        }
        Ok(order)
    }

    /// Holds the layout to what the kernel takes; where it takes only aligned rows, a dense row that is not gets a gap.
    fn hold_to(&self, spec: &TensorSpec, order: &[usize], gaps: &mut [usize]) -> Result<(), String> {
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
            return Err(format!("`{}`: its kernel does not take its axes in the order {:?}", spec.name, self.order));
        }
        if spec.joined && (gaps[1] > 0 || !order.windows(2).any(|pair| pair == [0, 1])) {
            let [first, second] = [spec.axes[0].name, spec.axes[1].name];
            return Err(format!("`{}`: its kernel takes {first} and {second} as one axis, evenly spaced", spec.name));
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

fn unknown(spec: &TensorSpec, axis: &str) -> String {
    let axes: Vec<_> = spec.axes.iter().map(|axis| axis.name).collect();
    format!("`{}` has no axis `{axis}`; it has {}", spec.name, axes.join(", "))
}

/// Every floating-point tensor that takes rows anywhere, with `elements` behind each row: what lines of JSON said with
/// `padding`. Lists and pages of bytes had none of it.
pub fn padded(specs: &Specs, elements: usize) -> Layouts {
    let floating_point = |spec: &TensorSpec| matches!(spec.dtype, DType::Bf16 | DType::F32);
    let takes_rows = |spec: &TensorSpec| spec.strides != Strides::Dense && spec.axes.len() > 1;
    let rows = specs.present().filter(|spec| floating_point(spec) && takes_rows(spec));
    let last = |spec: &TensorSpec| spec.axes.last().map(|axis| axis.name).unwrap_or_default();
    rows.filter(|_| elements > 0).map(|spec| (spec.name.to_owned(), TensorLayout::gap(last(spec), elements))).collect()
}

/// What is drawn for one tensor; it becomes a [`TensorLayout`] when its axes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Dense.
    Dense,
    /// So many units of its alignment behind each row.
    Padded(usize),
    /// So many behind the axis of this number (modulo those that it has).
    Gap(usize, usize),
    /// Its outer axes turned by so many places, with a gap behind each row.
    Turned(usize, usize),
    /// Steps of the axis of this number beyond 2^31 elements.
    Huge(usize),
}

/// No operator declares more tensors.
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

/// The layouts that choices, one for each declared tensor, mean for a case. A choice that a tensor cannot have is dense.
pub fn resolve(specs: &Specs, choices: &[Choice]) -> Layouts {
    let chosen = specs.all().iter().zip(choices).filter(|(spec, _)| spec.present && spec.placed.is_none());
    chosen
        .filter_map(|(spec, &choice)| {
            let layout = resolve_one(spec, choice)?;
            layout.place(spec).is_ok().then(|| (spec.name.to_owned(), layout))
        })
        .collect()
}

fn resolve_one(spec: &TensorSpec, choice: Choice) -> Option<TensorLayout> {
    let (align, permutable) = match spec.strides {
        Strides::Dense => return None,
        Strides::Rows { align } => (align, true),
        Strides::OrderedRows { align } => (align, false),
    };
    let unit = (align / spec.dtype.size()).max(1);
    let outer = spec.axes.len().checked_sub(1).filter(|&outer| outer > 0)?;
    let name = |at: usize| spec.axes[at].name;
    // Axes that are joined stay together: no gap comes behind the second of them, and they turn as one.
    let joined = usize::from(spec.joined);
    let behind = |axis: usize| 1 + joined + axis % (outer - joined);
    let places = outer - joined;
    match choice {
        Choice::Dense => None,
        Choice::Padded(units) => Some(TensorLayout::gap(name(outer), units * unit)),
        Choice::Gap(axis, units) => Some(TensorLayout::gap(name(behind(axis)), units * unit)),
        Choice::Turned(by, units) if permutable && places > 1 => {
            let turned = (0..places).map(|at| (at + 1 + (by - 1) % (places - 1)) % places);
            let axes =
                turned.flat_map(|place| if place == 0 { 0..1 + joined } else { place + joined..place + joined + 1 });
            let turned = axes.chain([outer]);
            let gaps = (units > 0).then(|| (name(outer).to_owned(), units * unit));
            Some(TensorLayout {
                order: turned.map(|at| name(at).to_owned()).collect(),
                gaps: gaps.into_iter().collect(),
            })
        }
        Choice::Turned(..) => None,
        Choice::Huge(axis) => {
            // The gap lies behind axis `at`, so that the steps of the one around it are huge.
            let at = behind(axis);
            let around = if at == 1 + joined { 0..at } else { at - 1..at };
            let entries: usize = spec.axes[around].iter().map(|axis| axis.extent).product();
            let steps = entries.checked_sub(1).filter(|&steps| steps > 0)?;
            Some(TensorLayout::gap(name(at), (HUGE / steps + 1).next_multiple_of(unit)))
        }
    }
}

/// Layouts that every operator's sweep begins with: gaps that are all different, axes in another order, huge steps.
pub fn edge_cases(specs: &Specs) -> Vec<Layouts> {
    let count = specs.all().len();
    let all = |choice: &dyn Fn(usize) -> Choice| resolve(specs, &(0..count).map(choice).collect::<Vec<_>>());
    let mut found = vec![
        all(&|tensor| Choice::Padded(1 + tensor)),
        all(&|tensor| Choice::Gap(0, 1 + tensor)),
        all(&|tensor| Choice::Turned(1, 1 + tensor)),
        all(&|_| Choice::Huge(0)),
    ];
    found.retain(|layouts| !layouts.is_empty());
    found.dedup();
    found
}

/// Every tensor with its outer axes in another order where its kernel takes that, and a gap behind its rows that no other
/// has, of so many elements that accesses of 16 bytes stay possible: kernels take the paths that they take when it is dense.
pub fn spread(specs: &Specs) -> Layouts {
    const WIDE: usize = 16;
    let gap = |number: usize| WIDE * (1 + number);
    let count = specs.all().len();
    let turned: Vec<_> = (0..count).map(|number| Choice::Turned(1, gap(number))).collect();
    let padded: Vec<_> = (0..count).map(|number| Choice::Padded(gap(number))).collect();
    let mut layouts = resolve(specs, &padded);
    layouts.extend(resolve(specs, &turned));
    layouts
}

#[cfg(test)]
mod tests {
    use dsv4_kernels::runtime::DType;

    use super::super::declaration::{axis, input};
    use super::*;

    fn q(strides: fn(TensorSpec) -> TensorSpec) -> TensorSpec {
        let axes = [axis("num_tokens", 3), axis("num_heads", 5), axis("head_dim", 64)];
        strides(input("q", DType::Bf16, &axes))
    }

    #[test]
    fn heads_may_come_first_in_memory_with_a_gap_behind_each_row() {
        let spec = q(TensorSpec::aligned_rows);
        let layout = resolve_one(&spec, Choice::Turned(1, 2)).unwrap();
        assert_eq!(layout.order, ["num_heads", "num_tokens", "head_dim"]);
        let placed = layout.place(&spec).unwrap();
        assert_eq!(placed.strides, [80, 240, 1]);
    }

    #[test]
    fn huge_steps_reach_beyond_what_32_bits_hold() {
        let spec = q(TensorSpec::rows);
        for axis in 0..2 {
            let placed = resolve_one(&spec, Choice::Huge(axis)).unwrap().place(&spec).unwrap();
            let last: i64 = placed.strides.iter().zip([2, 4, 63]).map(|(stride, at)| stride * at).sum();
            assert!(last > 1 << 31, "{placed:?}");
        }
    }

    #[test]
    fn what_a_kernel_does_not_take_is_neither_drawn_nor_placed() {
        assert_eq!(resolve_one(&q(|spec| spec), Choice::Padded(3)), None);
        assert_eq!(resolve_one(&q(|spec| spec.ordered_rows(1)), Choice::Turned(1, 0)), None);
        let odd = TensorLayout::gap("head_dim", 3);
        assert!(odd.place(&q(TensorSpec::rows)).is_ok());
        assert!(odd.place(&q(TensorSpec::aligned_rows)).unwrap_err().contains("16 bytes"));
        assert!(odd.place(&q(|spec| spec)).unwrap_err().contains("dense"));
        assert!(TensorLayout::gap("width", 8).place(&q(TensorSpec::rows)).unwrap_err().contains("no axis `width`"));
        let twice = TensorLayout { order: vec!["num_heads".into(); 3], ..TensorLayout::default() };
        assert!(twice.place(&q(TensorSpec::rows)).unwrap_err().contains("once"));
    }

    #[test]
    fn axes_that_are_one_to_the_kernel_stay_evenly_spaced_in_every_layout_that_is_drawn() {
        let axes = [axis("batch", 3), axis("s_q", 2), axis("num_heads", 5), axis("head_dim", 64)];
        let spec = input("q", DType::Bf16, &axes).aligned_rows().joined();
        let mut found = std::collections::BTreeSet::new();
        for number in 0..4 {
            for choice in [Choice::Gap(number, 3), Choice::Turned(1 + number, number), Choice::Huge(number)] {
                let placed = resolve_one(&spec, choice).unwrap().place(&spec).unwrap();
                assert_eq!(placed.strides[0], 2 * placed.strides[1], "{choice:?}");
                found.insert(placed.strides);
            }
        }
        // Heads first, gaps behind heads and behind rows, and both of them huge.
        assert!(found.contains(&vec![128, 64, 384, 1]) && found.iter().any(|s| s[2] > 1 << 28) && found.len() > 6);
        assert!(TensorLayout::gap("s_q", 8).place(&spec).unwrap_err().contains("evenly spaced"));
        let apart = ["s_q", "num_heads", "batch", "head_dim"].map(str::to_owned).to_vec();
        let apart = TensorLayout { order: apart, ..TensorLayout::default() };
        assert!(apart.place(&spec).unwrap_err().contains("evenly spaced"));
    }

    #[test]
    fn gaps_that_no_address_can_hold_are_refused() {
        for spec in [q(TensorSpec::rows), q(TensorSpec::aligned_rows), q(TensorSpec::aligned_rows).with_gap(8)] {
            assert!(TensorLayout::gap("head_dim", usize::MAX).place(&spec).is_err());
            assert!(TensorLayout::gap("num_heads", usize::MAX - 7).place(&spec).is_err());
        }
    }

    #[test]
    fn what_lines_called_padding_lengthens_rows_of_numbers_alone() {
        let pages = [axis("num_pages", 3), axis("page_bytes", 32)];
        let lists = [axis("num_tokens", 3), axis("topk", 4)];
        let cache = input("cache", DType::U8, &pages).aligned_rows();
        let specs = Specs::new(0, [q(TensorSpec::aligned_rows), cache, input("indices", DType::I32, &lists).rows()]);
        assert_eq!(padded(&specs, 24).keys().collect::<Vec<_>>(), ["q"]);
    }

    #[test]
    fn spread_tensors_are_turned_where_they_may_be_and_stay_aligned() {
        let rows = [axis("num_rows", 3), axis("width", 8)];
        let in_order = TensorSpec { name: "k", ..q(|spec| spec.ordered_rows(16)) };
        let specs = Specs::new(0, [q(TensorSpec::rows), in_order, input("x", DType::F32, &rows).rows()]);
        let layouts = spread(&specs);
        let strides = |name: &str| layouts[name].place(specs.find(name).unwrap()).unwrap().strides;
        assert_eq!(strides("q"), [80, 240, 1]);
        assert!(layouts["k"].order.is_empty() && strides("k")[1] > 64 && strides("x")[0] > 8);
        assert!(["q", "k", "x"].iter().all(|name| strides(name).iter().rev().skip(1).all(|stride| stride % 8 == 0)));
    }

    #[test]
    fn every_tensor_gets_a_gap_of_its_own() {
        let axes = [axis("num_rows", 3), axis("width", 8)];
        let specs = Specs::new(0, [input("x", DType::F32, &axes).rows(), input("y", DType::F32, &axes).rows()]);
        let first = &edge_cases(&specs)[0];
        assert_ne!(first["x"].gaps, first["y"].gaps);
    }
}
