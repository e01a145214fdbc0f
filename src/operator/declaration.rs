//! What an operator declares about its tensors: names, types, named axes, and roles.
//!
//! [`Specs`] is a value that a function of the case returns. Everything that the harness does with
//! tensors follows from it: random data, upload, poison and read-back, and the oracle's inputs. It
//! also gives the gradients to triangulate, layouts, rejections, and the protocol of external
//! kernels.

use dsv4_runtime::DType;
use serde::Serialize;

use super::declared::{Refused, finite, not_empty, positive, refuse, shift_of_logits};
use super::{Comparison, Grid, Pooling};
use crate::case::Distribution;
use crate::operator::fields::{Aliasing, Data};

/// An axis of a tensor. Axes of one name have the same extent in all tensors of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Its name, such as `num_tokens`.
    pub name: &'static str,
    /// Its extent in this case.
    pub extent: usize,
    /// What the extent must be a multiple of; it is then not 0. The value 0 allows any extent.
    pub multiple: usize,
    /// The largest extent allowed.
    pub most: usize,
}

impl Axis {
    /// Rejects a case whose field of this name is 0.
    pub fn not_empty(self) -> Self {
        self.multiples(1, usize::MAX)
    }

    /// Rejects a case whose field of this name is 0, is not a multiple of `multiple`, or is above
    /// `most`.
    pub fn multiples(self, multiple: usize, most: usize) -> Self {
        Self { multiple, most, ..self }
    }

    fn check(self) -> Result<(), Refused> {
        let Self { name, extent, multiple, most } = self;
        match multiple {
            0 => Ok(()),
            _ if extent > 0 && extent.is_multiple_of(multiple) && extent <= most => Ok(()),
            1 if extent == 0 => not_empty(name, extent),
            1 => refuse(name, format!("{extent} must be 1 to {most}")),
            _ if most == usize::MAX => {
                refuse(name, format!("{extent} must be a multiple of {multiple}, not 0"))
            }
            _ => refuse(name, format!("{extent} must be a multiple of {multiple} up to {most}")),
        }
    }
}

/// An axis.
pub fn axis(name: &'static str, extent: usize) -> Axis {
    Axis { name, extent, multiple: 0, most: usize::MAX }
}

/// The role of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Read by the forward, and by the backward.
    Input,
    /// The gradient of the loss with respect to an output: read by the backward.
    Upstream {
        /// The output.
        of: &'static str,
    },
    /// Written by the forward. The backward may read it but must not change it.
    Output,
    /// Written by the backward: the gradient with respect to an input. In a chain of operators,
    /// also with respect to an output that one operator passes to the next.
    Gradient {
        /// The input or output.
        of: &'static str,
    },
    /// Read and written by the forward, such as a cache. Bytes that it does not write keep their
    /// values. Compared element by element, unless the case observes what is stored
    /// ([`Part::Observed`]).
    State,
    /// Written but never compared: scratch memory with a shape.
    Scratch,
    /// A tensor without memory: what the stored bytes of others mean
    /// ([`super::Operator::observe`]).
    Observed,
}

/// The layouts that a kernel accepts for a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strides {
    /// Dense and row-major.
    Dense,
    /// The last axis is contiguous. The others may have any strides, as long as no two elements
    /// overlap. Address and strides are multiples of `align` bytes.
    Rows {
        /// Bytes; 1 is any element.
        align: usize,
    },
    /// As `Rows`, but the axes stay in their order.
    OrderedRows {
        /// Bytes; 1 is any element.
        align: usize,
    },
}

/// Where the values of an input come from before [`super::Operator::amend`] sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A distribution, multiplied by a magnitude.
    Drawn {
        /// The distribution.
        distribution: Distribution,
        /// The magnitude.
        magnitude: f64,
    },
    /// Zeros, which `amend` replaces.
    Amended,
}

/// One tensor of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name: used by the oracle, the kernel, the launcher's argument, and the exchange with
    /// external kernels.
    pub name: &'static str,
    /// Storage type.
    pub dtype: DType,
    /// Axes, outermost first.
    pub axes: Vec<Axis>,
    /// Its role.
    pub part: Part,
    /// Whether this case has it.
    pub present: bool,
    /// What layouts the kernel accepts.
    pub strides: Strides,
    /// How it is compared.
    pub comparison: Comparison,
    /// The grid of its last rounding. Default: that of its storage type.
    pub grid: Option<Grid>,
    /// Which of its elements share one scale.
    pub pooling: Pooling,
    /// Whether two runs must agree bit for bit. Sums by floating-point atomics need not.
    pub deterministic: bool,
    /// Where an input's values come from.
    pub source: Source,
    /// Whether it shares another tensor's memory.
    pub placed: Option<(Aliasing, &'static str)>,
    /// The tensor whose memory the launcher lets it share, in cases that place it there.
    pub may_be: Option<&'static str>,
    /// The launcher's name for it. Default: its own name.
    pub argument: &'static str,
    /// The one of several launches that receives it. `None` is all of the forward's (or the
    /// backward's).
    pub only_in: Option<&'static str>,
    /// Elements after each row that belong to no tensor, in every layout.
    pub minimum_gap: usize,
    /// The case's field that sets this number, if any.
    pub gap_of: Option<&'static str>,
    /// Whether the kernel takes its first two axes as one: the entries of both together are evenly
    /// spaced.
    pub joined: bool,
    /// The limits between which its values are clamped. Infinity means no limit.
    pub clamped: Option<[f64; 2]>,
    /// The distance over which the oracle bends, away from limits.
    pub bends_over: Option<f64>,
    /// Whether every second number is 0 where others are at their limits.
    pub zeros: bool,
    /// Results are linear or homogeneous in it. Cases make it as large and as small as fp32 allows.
    pub any_size: bool,
    /// No case has an infinity in it.
    pub never_infinite: bool,
    /// Whether its negative entries mark padding along its axis.
    pub marks_padding: bool,
    /// Whether part of what is written is undefined. Then only the observed tensors are compared.
    pub partly_undefined: bool,
    /// Whether an upstream gradient has its own type instead of its output's.
    pub own_type: bool,
}

fn spec(name: &'static str, dtype: DType, axes: &[Axis], part: Part, source: Source) -> TensorSpec {
    TensorSpec {
        name,
        dtype,
        axes: axes.to_vec(),
        part,
        present: true,
        strides: Strides::Dense,
        comparison: Comparison::Rounded,
        grid: None,
        pooling: Pooling::default(),
        deterministic: true,
        source,
        placed: None,
        may_be: None,
        argument: name,
        only_in: None,
        minimum_gap: 0,
        gap_of: None,
        joined: false,
        clamped: None,
        bends_over: None,
        zeros: false,
        any_size: false,
        never_infinite: false,
        marks_padding: false,
        partly_undefined: false,
        own_type: false,
    }
}

/// A tensor that kernels read. [`super::Operator::amend`] sets its values, unless
/// [`TensorSpec::drawn`] does.
pub fn input(name: &'static str, dtype: DType, axes: &[Axis]) -> TensorSpec {
    spec(name, dtype, axes, Part::Input, Source::Amended)
}

/// A tensor that the forward writes.
pub fn output(name: &'static str, dtype: DType, axes: &[Axis]) -> TensorSpec {
    spec(name, dtype, axes, Part::Output, Source::Amended)
}

/// The gradient of the loss with respect to output `of`, standard normal. [`Specs::new`] fills in
/// its type and axes from the output.
pub fn upstream(name: &'static str, of: &'static str) -> TensorSpec {
    let source = Source::Drawn { distribution: Distribution::Normal, magnitude: 1.0 };
    spec(name, DType::F32, &[], Part::Upstream { of }, source)
}

/// The gradient with respect to `of`, with its axes; stored as `dtype`.
pub fn gradient(name: &'static str, of: &'static str, dtype: DType) -> TensorSpec {
    spec(name, dtype, &[], Part::Gradient { of }, Source::Amended)
}

/// A tensor that the forward reads and partly overwrites.
pub fn state(name: &'static str, dtype: DType, axes: &[Axis]) -> TensorSpec {
    spec(name, dtype, axes, Part::State, Source::Amended)
}

/// Memory that a launch needs and that is never compared.
pub fn scratch(name: &'static str, dtype: DType, axes: &[Axis]) -> TensorSpec {
    spec(name, dtype, axes, Part::Scratch, Source::Amended)
}

/// What the stored bytes of other tensors mean.
pub fn observed(name: &'static str, dtype: DType, axes: &[Axis]) -> TensorSpec {
    spec(name, dtype, axes, Part::Observed, Source::Amended)
}

impl TensorSpec {
    /// Its values are of this distribution, times a magnitude.
    pub fn drawn(mut self, distribution: Distribution, magnitude: f64) -> Self {
        self.source = Source::Drawn { distribution, magnitude };
        self
    }

    /// Its values are drawn as the case declares.
    pub fn drawn_as(self, data: Data) -> Self {
        self.drawn(data.distribution, data.magnitude)
    }

    /// The operator clamps its values between these limits. They have the same magnitude unless one
    /// is infinite. Cases of [`super::special::Special`] values hold the limits, values around and
    /// beyond them, and non-finite values.
    pub fn clamped(mut self, low: f64, high: f64) -> Self {
        self.clamped = Some([low, high]);
        self
    }

    /// The oracle bends over this distance wherever no limit of [`Self::clamped`] is nearer. Finite
    /// differences step by a small part of it.
    pub fn bends_over(mut self, distance: f64) -> Self {
        self.bends_over = Some(distance);
        self
    }

    /// Every second value is 0 where others are at their limits.
    pub fn with_zeros(mut self) -> Self {
        self.zeros = true;
        self
    }

    /// Results scale with it, or do not depend on its scale. [`super::special::Special`] cases make
    /// it as large and as small as fp32 allows. Upstream gradients are homogeneous by default.
    /// Logits are not: their differences vanish when they become small.
    pub fn of_any_size(mut self) -> Self {
        self.any_size = true;
        self
    }

    /// No case has an infinity in it: which results are infinite, and which NaN, would follow from
    /// the signs of numbers that are computed before, some of which are next to zero. Where those
    /// numbers are given, the operator alone is tried with it.
    pub fn never_infinite(mut self) -> Self {
        self.never_infinite = true;
        self
    }

    /// It is i32, with one axis. A negative entry marks padding along its axis. A third of the
    /// entries are negative, and the given tensors hold NaN there: nothing may read it.
    pub fn marks_padding(mut self) -> Self {
        self.marks_padding = true;
        self
    }

    /// Some elements of this output are undefined if `undefined`: any value, written or not. Only
    /// the case's observed tensors ([`Part::Observed`]) are compared.
    pub fn partly_undefined(mut self, undefined: bool) -> Self {
        self.partly_undefined = undefined;
        self
    }

    /// An upstream gradient that is stored in this type, independent of its output's type.
    pub fn stored_in(mut self, dtype: DType) -> Self {
        (self.dtype, self.own_type) = (dtype, true);
        self
    }

    /// This case has it only if `present`. A gradient or upstream of an absent tensor is absent as
    /// well.
    pub fn when(mut self, present: bool) -> Self {
        self.present &= present;
        self
    }

    /// The kernel accepts any row strides ([`Strides::Rows`]).
    pub fn rows(mut self) -> Self {
        self.strides = Strides::Rows { align: 1 };
        self
    }

    /// The kernel accepts any row strides that are multiples of 16 bytes.
    pub fn aligned_rows(mut self) -> Self {
        self.strides = Strides::Rows { align: 16 };
        self
    }

    /// The kernel accepts gaps after any axis but the last, at multiples of 16 bytes.
    pub fn ordered_rows(mut self, align: usize) -> Self {
        self.strides = Strides::OrderedRows { align };
        self
    }

    /// The kernel takes its first two axes, such as requests and the tokens of each, as one. Their
    /// entries are evenly spaced in every layout.
    ///
    /// # Panics
    /// If there is no third axis for the rows. That is a mistake in the operator, and every case of
    /// it shows it.
    pub fn joined(mut self) -> Self {
        assert!(self.axes.len() > 2, "`{}` has no row behind its first two axes", self.name);
        self.joined = true;
        self
    }

    /// At least that many elements, owned by no tensor, separate the rows. A field of the case sets
    /// the number.
    pub fn with_gap(mut self, field: &'static str, elements: usize) -> Self {
        (self.minimum_gap, self.gap_of) = (elements, Some(field));
        self
    }

    /// It must equal the oracle's exactly.
    pub fn exact(mut self) -> Self {
        self.comparison = Comparison::Exact;
        self
    }

    /// It holds indices of a selection from the oracle's tensor `scores`.
    pub fn selected_from(mut self, scores: &'static str) -> Self {
        self.comparison = Comparison::Selection { scores };
        self
    }

    /// Its values are on this grid, such as codes with scales.
    pub fn on_grid(mut self, grid: Grid) -> Self {
        self.grid = Some(grid);
        self
    }

    /// These elements share one scale.
    pub fn pooled(mut self, pooling: Pooling) -> Self {
        self.pooling = pooling;
        self
    }

    /// Its sums have no fixed order: floating-point atomics.
    pub fn atomic_if(mut self, atomic: bool) -> Self {
        self.deterministic = !atomic;
        self
    }

    /// It shares the memory of `of`, declared before it, as `aliasing` declares, with its layout.
    pub fn placed(mut self, aliasing: Aliasing, of: &'static str) -> Self {
        self.placed = (aliasing != Aliasing::OutOfPlace).then_some((aliasing, of));
        self.may_be = Some(of);
        self
    }

    /// Its launcher uses another name for it. An example is a launcher that rotates gradients as it
    /// does activations.
    pub fn argument(mut self, name: &'static str) -> Self {
        self.argument = name;
        self
    }

    /// Its launcher allows it in the memory of `of`.
    pub fn may_be(mut self, of: &'static str) -> Self {
        self.may_be = Some(of);
        self
    }

    /// Only the launch of this name receives it. Other launches may use its memory.
    pub fn only_in(mut self, launch: &'static str) -> Self {
        self.only_in = Some(launch);
        self
    }

    /// Shape, outermost first.
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.extent).collect()
    }

    /// Number of elements; saturates.
    pub fn elements(&self) -> usize {
        self.axes.iter().fold(1, |product, axis| product.saturating_mul(axis.extent))
    }

    /// The index of the axis called `name`.
    pub fn axis(&self, name: &str) -> Option<usize> {
        self.axes.iter().position(|axis| axis.name == name)
    }

    /// Whether kernels read the values that the harness puts there.
    pub fn is_given(&self) -> bool {
        matches!(self.part, Part::Input | Part::Upstream { .. } | Part::State)
    }

    /// Whether a forward reads the values that it finds there.
    pub fn is_read(&self) -> bool {
        matches!(self.part, Part::Input | Part::State)
    }

    /// Whether it has memory.
    pub fn is_stored(&self) -> bool {
        self.part != Part::Observed
    }

    /// Whether its memory may start anywhere between two addresses of 16 bytes.
    pub(super) fn takes_offsets(&self) -> bool {
        self.is_stored()
    }

    /// Whether kernels write it.
    pub fn is_written(&self) -> bool {
        matches!(self.part, Part::Output | Part::Gradient { .. } | Part::State | Part::Scratch)
    }
}

/// The tensors of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Specs {
    /// Seed of all random data.
    pub seed: u64,
    all: Vec<TensorSpec>,
    /// Values of the case that break a rule.
    refused: Vec<Refused>,
}

impl Specs {
    /// Fills in the axes (and types) of gradients and upstreams. Marks them absent where their
    /// tensor is absent.
    ///
    /// # Panics
    /// If one refers to a tensor that is not declared, or two have the same name. That is a mistake
    /// in the operator, and every case of it shows it.
    pub fn new(seed: u64, tensors: impl IntoIterator<Item = TensorSpec>) -> Self {
        let mut all: Vec<TensorSpec> = tensors.into_iter().collect();
        for index in 0..all.len() {
            let name = all[index].name;
            assert!(
                all[..index].iter().all(|other| other.name != name),
                "two tensors are called `{name}`"
            );
            let of = match all[index].part {
                Part::Upstream { of } | Part::Gradient { of } => of,
                _ => continue,
            };
            let base = all.iter().find(|spec| spec.name == of);
            let base = base
                .unwrap_or_else(|| panic!("`{name}` is of `{of}`, which is not declared"))
                .clone();
            let spec = &mut all[index];
            spec.axes = base.axes;
            spec.present &= base.present;
            if spec.strides == Strides::Dense {
                (spec.strides, spec.joined) = (base.strides, base.joined);
            }
            if matches!(spec.part, Part::Upstream { .. }) && !spec.own_type {
                spec.dtype = base.dtype;
            }
        }
        Self { seed, all, refused: Vec::new() }
    }

    /// Requires a number of the case, by the name of its field, to be finite and above 0.
    pub fn positive(mut self, field: &'static str, value: impl Into<f64>) -> Self {
        self.refused.extend(positive(field, value.into()).err());
        self
    }

    /// Requires a number of the case, by the name of its field, to be finite.
    pub fn finite(mut self, field: &'static str, value: impl Into<f64>) -> Self {
        self.refused.extend(finite(field, value.into()).err());
        self
    }

    /// Requires a shift of logits, by the name of its field, to leave a softmax in fp32 something of
    /// their differences.
    pub fn shift_of_logits(mut self, field: &'static str, value: impl Into<f64>) -> Self {
        self.refused.extend(shift_of_logits(field, value.into()).err());
        self
    }

    /// Adds the tensors of the operators that follow in a chain. One replaces another of the same
    /// name: an input of one operator is then an output of another.
    pub fn with(self, tensors: impl IntoIterator<Item = TensorSpec>) -> Self {
        let (mut all, further) = (self.all, tensors.into_iter().collect::<Vec<_>>());
        all.retain(|spec| further.iter().all(|other| other.name != spec.name));
        Self { refused: self.refused, ..Self::new(self.seed, all.into_iter().chain(further)) }
    }

    /// Checks axes, magnitudes and values against their declarations.
    ///
    /// # Errors
    /// The field, its value and the rule.
    pub(super) fn check(&self) -> Result<(), Refused> {
        // Before magnitudes, which may follow from them.
        if let Some(refused) = self.refused.first() {
            return Err(refused.clone());
        }
        for spec in &self.all {
            spec.axes.iter().try_for_each(|axis| axis.check())?;
            if let Source::Drawn { magnitude, .. } = spec.source {
                positive("magnitude", magnitude)?;
            }
        }
        Ok(())
    }

    /// The same without declared space between rows; only layouts add gaps.
    pub(super) fn without_gaps(mut self) -> Self {
        self.all.iter_mut().for_each(|spec| spec.minimum_gap = 0);
        self
    }

    /// The same without some of them.
    pub(super) fn without(mut self, left_out: impl Fn(&TensorSpec) -> bool) -> Self {
        for spec in &mut self.all {
            spec.present &= !left_out(spec);
        }
        self
    }

    /// The tensors that this case has.
    pub fn present(&self) -> impl Iterator<Item = &TensorSpec> + Clone {
        self.all.iter().filter(|spec| spec.present)
    }

    /// All tensors, including those that this case does not have.
    pub fn all(&self) -> &[TensorSpec] {
        &self.all
    }

    /// The one called `name`, if this case has it.
    pub fn find(&self, name: &str) -> Option<&TensorSpec> {
        self.present().find(|spec| spec.name == name)
    }

    /// The extent of an axis; `None` where no tensor of the case has it.
    pub fn extent(&self, axis: &str) -> Option<usize> {
        self.present().flat_map(|spec| &spec.axes).find(|a| a.name == axis).map(|a| a.extent)
    }

    /// The tensors of the oracle that are compared with the kernel's: what is written, and the
    /// observed tensors instead of a state.
    pub fn compared(&self) -> impl Iterator<Item = &TensorSpec> + Clone {
        let observes = self.present().any(|spec| spec.part == Part::Observed);
        self.present().filter(move |spec| match spec.part {
            Part::Output => !spec.partly_undefined,
            Part::Gradient { .. } | Part::Observed => true,
            Part::State => !observes,
            Part::Input | Part::Upstream { .. } | Part::Scratch => false,
        })
    }

    /// Whether the oracle's tensor called `name` is compared with the kernel's.
    pub fn compares(&self, name: &str) -> bool {
        self.compared().any(|spec| spec.name == name)
    }

    /// Pairs of a differentiable input and its gradient. Excludes gradients with respect to an
    /// output, which one operator of a chain passes to another.
    pub fn gradients(&self) -> impl Iterator<Item = (&TensorSpec, &TensorSpec)> {
        self.present().filter_map(|spec| match spec.part {
            Part::Gradient { of } => Some((self.find(of).filter(|of| of.is_given())?, spec)),
            _ => None,
        })
    }

    /// Pairs of an output and its upstream gradient.
    pub fn upstreams(&self) -> impl Iterator<Item = (&TensorSpec, &TensorSpec)> {
        self.present().filter_map(|spec| match spec.part {
            Part::Upstream { of } => Some((self.find(of)?, spec)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(weighted: bool) -> Specs {
        let rows = [axis("num_rows", 3), axis("width", 8)];
        Specs::new(
            1,
            [
                input("x", DType::Bf16, &rows).rows(),
                input("weight", DType::F32, &rows[1..]).when(weighted),
                output("y", DType::Bf16, &rows).rows(),
                upstream("dy", "y"),
                gradient("dx", "x", DType::Bf16),
                gradient("dweight", "weight", DType::F32),
            ],
        )
    }

    #[test]
    fn gradients_and_upstreams_take_over_axes_layouts_and_absence() {
        let specs = specs(false);
        assert!(specs.find("dweight").is_none() && specs.find("weight").is_none());
        let dy = specs.find("dy").unwrap();
        assert_eq!(
            (dy.dtype, dy.shape(), dy.strides),
            (DType::Bf16, vec![3, 8], Strides::Rows { align: 1 })
        );
        assert_eq!(
            specs.gradients().map(|(of, gradient)| (of.name, gradient.name)).collect::<Vec<_>>(),
            [("x", "dx")]
        );
        assert_eq!(
            specs.upstreams().map(|(of, dy)| (of.name, dy.name)).collect::<Vec<_>>(),
            [("y", "dy")]
        );
        assert_eq!(specs.extent("width"), Some(8));
    }

    #[test]
    fn an_upstream_gradient_has_its_outputs_type_unless_it_has_one_of_its_own() {
        let rows = [axis("num_rows", 3)];
        let decoded = || observed("decoded", DType::F32, &rows);
        let of = |dy| Specs::new(1, [decoded(), dy]).find("dy").map(|spec| spec.dtype);
        assert_eq!(of(upstream("dy", "decoded")), Some(DType::F32));
        assert_eq!(of(upstream("dy", "decoded").stored_in(DType::Bf16)), Some(DType::Bf16));
    }

    #[test]
    fn what_a_chain_hands_back_is_the_gradient_of_no_input() {
        let rows = [axis("num_rows", 3)];
        let (x, mid) = (input("x", DType::F32, &rows), output("mid", DType::F32, &rows));
        let gradients = [gradient("dmid", "mid", DType::F32), gradient("dx", "x", DType::F32)];
        let specs = Specs::new(1, [x, mid].into_iter().chain(gradients));
        assert_eq!(
            specs.gradients().map(|(of, gradient)| (of.name, gradient.name)).collect::<Vec<_>>(),
            [("x", "dx")]
        );
        assert_eq!(specs.find("dmid").map(TensorSpec::shape), Some(vec![3]));
    }

    #[test]
    fn a_chain_has_the_tensors_of_both_and_what_one_hands_to_the_other_once() {
        let rows = [axis("num_rows", 3)];
        let first = Specs::new(
            1,
            [
                input("x", DType::F32, &rows),
                output("mid", DType::F32, &rows),
                upstream("dmid", "mid"),
            ],
        );
        let own = [output("y", DType::F32, &rows), gradient("dmid", "mid", DType::Bf16)];
        let chain = first.finite("shift", f64::NAN).with(own);
        assert_eq!(
            chain.present().map(|spec| spec.name).collect::<Vec<_>>(),
            ["x", "mid", "y", "dmid"]
        );
        let dmid = chain.find("dmid").unwrap();
        assert_eq!(
            (dmid.part, dmid.dtype, dmid.shape()),
            (Part::Gradient { of: "mid" }, DType::Bf16, vec![3])
        );
        assert_eq!(chain.check().unwrap_err().field, "shift");
    }

    #[test]
    fn an_extent_or_a_number_beyond_its_rule_is_refused_by_its_field() {
        let refused = |extent: usize, magnitude: f64, shift: f64| {
            let x = input("x", DType::F32, &[axis("width", extent).multiples(16, 64)]);
            let refused = Specs::new(1, [x.drawn(Distribution::Normal, 1.0 / magnitude)])
                .positive("scale", magnitude);
            refused
                .finite("shift", shift)
                .check()
                .err()
                .map(|refused| format!("{}: {}", refused.field, refused.reason))
        };
        assert_eq!(refused(48, 1.0, -2.0), None);
        for extent in [0, 24, 80] {
            let reason = format!("width: {extent} must be a multiple of 16 up to 64");
            assert_eq!(refused(extent, 1.0, 0.0), Some(reason));
        }
        // Not the magnitude that follows from it.
        assert_eq!(refused(48, 0.0, 0.0).as_deref(), Some("scale: 0 must be finite and above 0"));
        assert_eq!(refused(48, 1.0, f64::INFINITY).as_deref(), Some("shift: inf must be finite"));
        let heads = |extent: usize| {
            axis("num_heads", extent).multiples(1, 128).check().err().map(|refused| refused.reason)
        };
        assert_eq!(heads(129).as_deref(), Some("129 must be 1 to 128"));
        assert_eq!(heads(0).as_deref(), Some("0: there must be at least one"));
        assert_eq!(heads(128), None);
        let bytes = axis("page_bytes", 24).multiples(16, usize::MAX).check().unwrap_err();
        assert_eq!(bytes.reason, "24 must be a multiple of 16, not 0");
    }

    #[test]
    fn a_state_is_compared_itself_unless_something_is_observed_of_it() {
        let pages = [axis("num_pages", 3), axis("page_bytes", 16)];
        let compared = |observes: bool| {
            let (cache, rows) =
                (state("cache", DType::U8, &pages), observed("rows", DType::U8, &pages));
            let specs =
                Specs::new(1, [cache, output("y", DType::F32, &pages), rows.when(observes)]);
            specs.compared().map(|spec| spec.name).collect::<Vec<_>>()
        };
        assert_eq!((compared(false), compared(true)), (vec!["cache", "y"], vec!["y", "rows"]));
    }

    #[test]
    fn an_output_that_is_undefined_in_part_is_compared_by_what_is_observed_of_it() {
        let rows = [axis("num_rows", 3)];
        let compared = |undefined: bool| {
            let logits = output("logits", DType::F32, &rows).partly_undefined(undefined);
            let specs =
                Specs::new(1, [logits, observed("seen", DType::F32, &rows).when(undefined)]);
            specs.compared().map(|spec| spec.name).collect::<Vec<_>>()
        };
        assert_eq!((compared(false), compared(true)), (vec!["logits"], vec!["seen"]));
    }

    #[test]
    #[should_panic(expected = "which is not declared")]
    fn a_gradient_of_an_undeclared_input_is_a_mistake_in_the_operator() {
        Specs::new(1, [gradient("dx", "x", DType::F32)]);
    }
}
