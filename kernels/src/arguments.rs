//! What launchers check before they launch. Every error names the argument and the value.
//!
//! A launcher declares its tensors once, with named axes, and gets the sizes of those axes back:
//!
//! ```text
//! let [num_rows, width] = CHECK.signature(views, [
//!     read("x").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
//!     read("weight").of(&FLOATS).axes(&["width"]).optional(),
//!     write("y").like("x").rows().may_be("x"),
//! ]).extent("width", 1, MAX_WIDTH).bind(["num_rows", "width"])?;
//! ```

use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Result, RuntimeError, TensorView, Views};

/// The floating-point types of tensors.
pub(crate) const FLOATS: [DType; 2] = [DType::Bf16, DType::F32];

/// Defines by name.
pub(crate) type Defines = Vec<(&'static str, String)>;

/// The defines for the element types.
pub(crate) fn element_types(types: &[(&'static str, DType)]) -> Defines {
    types.iter().map(|(name, dtype)| (*name, dtype.c_name().to_owned())).collect()
}

/// The modules of `file` for each combination of floating-point types under these names.
pub(crate) fn modules_of_floats(file: &str, names: &[&'static str]) -> Vec<Module> {
    let with_each = |combinations: Vec<Vec<_>>, name: &&'static str| {
        let with = |dtype| {
            combinations.iter().map(move |types| [vec![(*name, dtype)], types.clone()].concat())
        };
        FLOATS.into_iter().flat_map(with).collect()
    };
    let combinations = names.iter().rev().fold(vec![Vec::new()], with_each);
    combinations.iter().map(|types| module(file, &element_types(types))).collect()
}

/// The arguments of one operator's launcher.
#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    pub operator: &'static str,
}

impl Arguments {
    pub fn refuse<T>(self, argument: &'static str, reason: impl Into<String>) -> Result<T> {
        Err(RuntimeError::argument(self.operator, argument, reason))
    }

    /// The tensors of a call, found by name among `views`; see [`Signature::bind`].
    pub fn signature<'a>(
        self,
        views: &'a Views,
        tensors: impl IntoIterator<Item = Argument<'a>>,
    ) -> Signature<'a> {
        let found = |tensor: Argument<'a>| {
            let taken = |_: &&TensorView| tensor.presence != Presence::Ignored;
            Argument { view: views.get(tensor.name).filter(taken), ..tensor }
        };
        let tensors = tensors.into_iter().map(found).collect();
        Signature { check: self, views, tensors, bound: Vec::new(), rules: Vec::new() }
    }

    /// A parameter struct without fields.
    pub fn params(self) -> Params {
        Params::new(self.operator)
    }

    /// A finite number above zero.
    pub fn positive(self, argument: &'static str, value: f32) -> Result<()> {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        self.refuse(argument, format!("{value} must be finite and above 0"))
    }

    pub fn int32(self, argument: &'static str, value: usize) -> Result<()> {
        i32::try_from(value)
            .map(|_| ())
            .or_else(|_| self.refuse(argument, format!("{value} must fit 32 bits")))
    }

    /// The scratch memory has at least the required bytes.
    pub fn holds(self, argument: &'static str, scratch: &TensorView, needed: usize) -> Result<()> {
        let bytes = scratch.elements() * scratch.dtype.size();
        if bytes >= needed {
            return Ok(());
        }
        self.refuse(argument, format!("{bytes} bytes; it must have {needed}"))
    }

    /// The view of a tensor `[batch, s_q, ...]` as `[batch * s_q, ...]`.
    pub fn tokens(self, argument: &'static str, view: &TensorView) -> Result<TensorView> {
        view.merged().map_or_else(
            || {
                let (strides, shape) = (&view.strides, &view.shape);
                self.refuse(
                    argument,
                    format!("strides {strides:?} of shape {shape:?}: tokens must be evenly spaced"),
                )
            },
            Ok,
        )
    }
}

/// Which memory layouts of a tensor are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Row-major without gaps.
    Dense,
    /// The last axis is contiguous. The others have any order and any gaps, and no two elements
    /// overlap.
    Rows,
    /// [`Self::Rows`], and each row starts at a multiple of 16 bytes.
    AlignedRows,
}

/// Whether a call has a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Required,
    Optional,
    /// Absent where one of the tensors that it goes `with` is absent, otherwise optional.
    Dependent,
    /// It may be among the views; this call does not use it.
    Ignored,
}

/// One tensor of a signature. By default dense, f32 and required.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument<'a> {
    name: &'static str,
    view: Option<&'a TensorView>,
    written: bool,
    /// `None` is any shape.
    axes: Option<&'static [&'static str]>,
    types: &'static [DType],
    /// The tensor whose axes and type it has, and the tensor whose type only.
    like: Option<&'static str>,
    typed: Option<&'static str>,
    layout: Layout,
    /// Whether kernels call the stride of its rows `NAME_stride`.
    one_stride: bool,
    /// Whether its first two axes are one to the kernels, of tokens.
    packed: bool,
    /// Alignment of the address in bytes, in addition to that of an element.
    alignment: u64,
    may_be: Option<&'static str>,
    presence: Presence,
    with: &'static [&'static str],
}

/// A tensor that the kernels read.
pub(crate) fn read<'a>(name: &'static str) -> Argument<'a> {
    Argument {
        name,
        view: None,
        written: false,
        axes: None,
        types: &[DType::F32],
        like: None,
        typed: None,
        layout: Layout::Dense,
        one_stride: false,
        packed: false,
        alignment: 1,
        may_be: None,
        presence: Presence::Required,
        with: &[],
    }
}

/// A tensor that the kernels write.
pub(crate) fn write<'a>(name: &'static str) -> Argument<'a> {
    Argument { written: true, ..read(name) }
}

/// A tensor that one launch writes and a `later` launch, such as the backward, reads.
pub(crate) fn saved<'a>(name: &'static str, later: bool) -> Argument<'a> {
    Argument { written: !later, ..read(name) }
}

/// Memory of any shape and type that the kernels write, at a multiple of `alignment` bytes; see
/// [`Arguments::holds`].
pub(crate) fn scratch<'a>(name: &'static str, alignment: u64) -> Argument<'a> {
    Argument { types: &[], alignment, ..write(name) }
}

impl Argument<'_> {
    /// It has one of these types.
    pub fn of(self, types: &'static [DType]) -> Self {
        Self { types, ..self }
    }

    /// It has these axes. Their sizes are those of the same axes of other tensors.
    pub fn axes(self, axes: &'static [&'static str]) -> Self {
        Self { axes: Some(axes), ..self }
    }

    /// It has the axes and the type of another tensor.
    pub fn like(self, other: &'static str) -> Self {
        Self { like: Some(other), ..self }.typed(other)
    }

    /// It has the type of another tensor.
    pub fn typed(self, other: &'static str) -> Self {
        Self { typed: Some(other), ..self }
    }

    /// The last axis is contiguous. The others have any order and any gaps, as long as no two
    /// elements overlap.
    pub fn rows(self) -> Self {
        Self { layout: Layout::Rows, ..self }
    }

    /// As [`Self::rows`], each row at a multiple of 16 bytes.
    pub fn aligned_rows(self) -> Self {
        Self { layout: Layout::AlignedRows, ..self }
    }

    /// Kernels call the stride of its rows `NAME_stride`, whatever its first axis is.
    pub fn one_stride(self) -> Self {
        Self { one_stride: true, ..self }
    }

    /// Its first two axes are requests and tokens of each, evenly spaced: one axis of tokens to the
    /// kernels.
    pub fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    /// It may be the same memory as another tensor, element by element.
    pub fn may_be(self, other: &'static str) -> Self {
        Self { may_be: Some(other), ..self }
    }

    /// It may be absent.
    pub fn optional(self) -> Self {
        Self { presence: Presence::Optional, ..self }
    }

    /// It is present exactly when all of the other tensors are.
    pub fn with(self, others: &'static [&'static str]) -> Self {
        Self { with: others, ..self.optional() }
    }

    /// It may be absent, and it must be absent unless all of the other tensors are present.
    pub fn only_with(self, others: &'static [&'static str]) -> Self {
        Self { with: others, presence: Presence::Dependent, ..self }
    }

    /// Unless `taken`, the call does not use it, whether it is present or absent.
    pub fn when(self, taken: bool) -> Self {
        if taken { self } else { Self { presence: Presence::Ignored, with: &[], ..self } }
    }
}

/// The allowed sizes of an axis.
#[derive(Clone, Copy)]
struct Rule {
    axis: &'static str,
    multiple: usize,
    most: usize,
}

/// The tensors of one call, and the allowed sizes of their axes. Sizes fit 32 bits except after
/// [`Self::wide`].
pub(crate) struct Signature<'a> {
    check: Arguments,
    views: &'a Views,
    tensors: Vec<Argument<'a>>,
    bound: Vec<(&'static str, usize)>,
    rules: Vec<Rule>,
}

impl<'a> Signature<'a> {
    /// The size of this axis is known before the call.
    pub fn given(mut self, axis: &'static str, extent: usize) -> Self {
        self.bound.push((axis, extent));
        self
    }

    /// The size of an axis is a multiple of `multiple`, not 0 and at most `most`.
    pub fn extent(mut self, axis: &'static str, multiple: usize, most: usize) -> Self {
        self.rules.push(Rule { axis, multiple, most });
        self
    }

    /// The kernels count along this axis in 64 bits.
    pub fn wide(self, axis: &'static str) -> Self {
        self.extent(axis, 0, usize::MAX)
    }

    /// Checks every tensor: presence, number of axes, type, alignment and layout. Checks each size
    /// against that of the same axis in other tensors. Then checks that no written tensor shares
    /// memory with any other tensor. Returns the sizes of these axes, 0 for an axis that no present
    /// tensor has.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] for the first tensor, in the order of the declarations, that
    /// breaks a rule.
    pub fn bind<const N: usize>(&mut self, axes: [&'static str; N]) -> Result<[usize; N]> {
        if let Some((unknown, _)) = self.views.iter().find(|(name, _)| self.find(name).is_none()) {
            return self.check.refuse(unknown, "there is no argument of this name");
        }
        for number in 0..self.tensors.len() {
            let tensor = self.tensors[number];
            self.names(&tensor)?;
            self.presence(&tensor)?;
            let Some(view) = tensor.view else { continue };
            self.range(tensor.name, view)?;
            self.shape(&tensor, view)?;
            self.element_type(&tensor, view)?;
            self.alignment(&tensor, view)?;
            self.layout(&tensor, view)?;
            if tensor.packed {
                self.check.tokens(tensor.name, view)?;
            }
        }
        self.overlaps()?;
        Ok(axes.map(|axis| self.bound(axis).unwrap_or(0)))
    }

    /// The parameters of these tensors: a pointer for each. A tensor with rows also has the strides
    /// of all its axes but the last, such as `x_row_stride` for axis `num_rows` of `x`, or
    /// `x_stride` after [`Argument::one_stride`]. A tensor that is absent, or that the call does not
    /// use, is `nullptr` with strides of 0.
    ///
    /// # Panics
    /// For a name that the signature does not have. That is a mistake in the launcher, which every
    /// call shows.
    pub fn params(&self, names: &[&'static str]) -> Params {
        self.append(self.check.params(), names)
    }

    /// The same after other parameters.
    ///
    /// # Panics
    /// As [`Self::params`].
    pub fn append(&self, params: Params, names: &[&'static str]) -> Params {
        names.iter().fold(params, |params, name| self.append_as(params, name, name))
    }

    /// The same for one tensor, which the kernels call `field`.
    ///
    /// # Panics
    /// As [`Self::params`].
    pub fn append_as(&self, params: Params, field: &str, name: &'static str) -> Params {
        let tensor = self.known(name);
        let view = tensor.view.filter(|_| tensor.presence != Presence::Ignored);
        let merged = view.filter(|_| tensor.packed).and_then(TensorView::merged);
        self.fields(params, field, tensor, merged.as_ref().or(view))
    }

    /// The same for these tensors from entry `first` of their first axis on.
    ///
    /// # Panics
    /// As [`Self::params`].
    pub fn append_from(&self, params: Params, first: usize, names: &[&'static str]) -> Params {
        names.iter().fold(params, |params, name| {
            let view = self.known(name).view.map(|view| view.skip(first));
            self.fields(params, name, self.known(name), view.as_ref())
        })
    }

    fn known(&self, name: &str) -> &Argument<'a> {
        self.find(name).unwrap_or_else(|| panic!("the signature has no tensor `{name}`"))
    }

    /// A pointer to `view`, and the strides of the axes that `tensor` has.
    fn fields(
        &self,
        params: Params,
        field: &str,
        tensor: &Argument<'a>,
        view: Option<&TensorView>,
    ) -> Params {
        let dense = tensor.layout == Layout::Dense;
        let axes = self.axes_of(tensor).filter(|_| !dense).unwrap_or(&[]);
        let outer = &axes[..axes.len().saturating_sub(1)];
        let tokens = tensor.packed && !outer.is_empty();
        let outer = outer.iter().skip(usize::from(tokens)).enumerate();
        outer.fold(params.ptr(field, view), |params, (number, axis)| {
            let axis = if tokens && number == 0 { "num_tokens" } else { axis };
            let one = axis.strip_prefix("num_").map_or(axis, |many| many.trim_end_matches('s'));
            let name = match tensor.one_stride {
                true => format!("{field}_stride"),
                false => format!("{field}_{one}_stride"),
            };
            params.stride(name, view.map_or(0, |view| view.strides[number]))
        })
    }

    /// Whether 16-byte accesses fit every row of every tensor that has rows.
    pub fn vectorised(&self) -> bool {
        let rows = self
            .tensors
            .iter()
            .filter(|tensor| tensor.layout != Layout::Dense)
            .filter_map(|rows| rows.view);
        rows.into_iter().all(holds_wide_rows)
    }

    /// The same for the tensors of these names that are present. Other tensors are not rows of
    /// elements.
    pub fn vectorised_rows(&self, names: &[&str]) -> bool {
        names.iter().filter_map(|name| self.find(name)?.view).all(holds_wide_rows)
    }

    fn axes_of(&self, tensor: &Argument<'_>) -> Option<&'static [&'static str]> {
        tensor.axes.or_else(|| self.find(tensor.like?)?.axes)
    }

    fn bound(&self, axis: &str) -> Option<usize> {
        self.bound.iter().find(|(name, _)| *name == axis).map(|&(_, extent)| extent)
    }

    /// Every tensor that a declaration refers to is declared.
    fn names(&self, tensor: &Argument<'_>) -> Result<()> {
        let others = [tensor.like, tensor.typed, tensor.may_be].into_iter().flatten();
        match others.chain(tensor.with.iter().copied()).find(|other| self.find(other).is_none()) {
            Some(absent) => self.check.refuse(
                tensor.name,
                format!("its declaration refers to `{absent}`: there is none"),
            ),
            None => Ok(()),
        }
    }

    fn find(&self, name: &str) -> Option<&Argument<'a>> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    fn presence(&self, tensor: &Argument<'_>) -> Result<()> {
        if tensor.presence == Presence::Required && tensor.view.is_none() {
            return self.check.refuse(tensor.name, "it must be present");
        }
        let present = |other: &&str| self.find(other).is_some_and(|other| other.view.is_some());
        let (there, others) = (tensor.view.is_some(), tensor.with.iter().all(present));
        let dependent = tensor.presence == Presence::Dependent;
        if tensor.with.is_empty() || there == others || dependent && !there {
            return Ok(());
        }
        let (others, are) =
            (tensor.with.join("` and `"), if tensor.with.len() > 1 { "are" } else { "is" });
        let rule = if dependent { "may be present only" } else { "must be present exactly" };
        self.check.refuse(tensor.name, format!("it {rule} when `{others}` {are}"))
    }

    /// Every offset within the tensor fits 64 bits, and so does every address.
    fn range(&self, name: &'static str, view: &TensorView) -> Result<()> {
        let TensorView { shape, strides, address, .. } = view;
        if shape.len() != strides.len() {
            return self
                .check
                .refuse(name, format!("strides {strides:?} must be as many as axes of {shape:?}"));
        }
        let size = view.dtype.size() as i128;
        let elements =
            shape.iter().try_fold(size, |all, &extent| all.checked_mul(extent.max(1) as i128));
        let last = shape.iter().zip(strides).try_fold(size, |end, (&extent, &stride)| {
            let steps = (extent as i128 - 1).max(0).checked_mul(i128::from(stride).abs())?;
            end.checked_add(steps.checked_mul(size)?)
        });
        let fits = |bytes: Option<i128>| {
            bytes.is_some_and(|bytes| i128::from(*address) + bytes <= i64::MAX.into())
        };
        if fits(elements) && fits(last) {
            return Ok(());
        }
        let reason = format!(
            "strides {strides:?} of shape {shape:?} from {address:#x} on must stay within 63 bits"
        );
        self.check.refuse(name, reason)
    }

    fn shape(&mut self, tensor: &Argument<'_>, view: &TensorView) -> Result<()> {
        let Some(axes) = self.axes_of(tensor) else { return Ok(()) };
        let shape = &view.shape;
        if shape.len() != axes.len() {
            let reason = format!(
                "shape {shape:?} has {} axes, not {} ({})",
                shape.len(),
                axes.len(),
                axes.join(", ")
            );
            return self.check.refuse(tensor.name, reason);
        }
        for (&axis, &own) in axes.iter().zip(shape) {
            if self.bound(axis).is_none() {
                self.rule(tensor.name, axis, own)?;
                self.bound.push((axis, own));
            }
        }
        let expected: Vec<usize> = axes.iter().filter_map(|axis| self.bound(axis)).collect();
        if *shape == expected {
            return Ok(());
        }
        self.check.refuse(
            tensor.name,
            format!("shape {shape:?} must be {expected:?} ({})", axes.join(", ")),
        )
    }

    fn rule(&self, name: &'static str, axis: &str, own: usize) -> Result<()> {
        let rule = self.rules.iter().find(|rule| rule.axis == axis);
        let reason = match rule {
            Some(&Rule { multiple: 0, .. }) => return Ok(()),
            Some(&Rule { multiple: 1, most, .. }) if !(1..=most).contains(&own) => {
                format!("{axis} {own} must be 1 to {most}")
            }
            Some(&Rule { multiple, most, .. })
                if own == 0 || !own.is_multiple_of(multiple) || own > most =>
            {
                format!("{axis} {own} must be a multiple of {multiple} up to {most}")
            }
            _ if i32::try_from(own).is_err() => format!("{axis} {own} must fit 32 bits"),
            _ => return Ok(()),
        };
        self.check.refuse(name, reason)
    }

    fn element_type(&self, tensor: &Argument<'_>, view: &TensorView) -> Result<()> {
        let same = tensor.typed.and_then(|other| self.find(other)).and_then(|other| other.view);
        let allowed = same.map_or(tensor.types.to_vec(), |other| vec![other.dtype]);
        if allowed.is_empty() || allowed.contains(&view.dtype) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(ToString::to_string).collect();
        self.check.refuse(
            tensor.name,
            format!("element type {} must be {}", view.dtype, allowed.join(" or ")),
        )
    }

    fn alignment(&self, tensor: &Argument<'_>, view: &TensorView) -> Result<()> {
        let TensorView { address, strides, .. } = view;
        let size = view.dtype.size() as u64;
        let reason = match tensor.layout {
            Layout::AlignedRows if !is_aligned(view) => {
                format!(
                    "address {address:#x} and strides {strides:?} must be multiples of 16 bytes"
                )
            }
            _ if !address.is_multiple_of(tensor.alignment) => {
                format!("address {address:#x} must be {}-byte aligned", tensor.alignment)
            }
            _ if !address.is_multiple_of(size) => {
                format!("address {address:#x} must be a multiple of {size} bytes")
            }
            _ => return Ok(()),
        };
        self.check.refuse(tensor.name, reason)
    }

    fn layout(&self, tensor: &Argument<'_>, view: &TensorView) -> Result<()> {
        let TensorView { shape, strides, .. } = view;
        let reason = match tensor.layout {
            Layout::Dense if view.is_dense() => return Ok(()),
            Layout::Dense => format!("strides {strides:?} of shape {shape:?} must be dense"),
            Layout::Rows | Layout::AlignedRows
                if shape.last() > Some(&1) && strides.last() != Some(&1) =>
            {
                format!("strides {strides:?}: the last axis must be contiguous")
            }
            Layout::Rows | Layout::AlignedRows => match coinciding_axis(view) {
                None => return Ok(()),
                Some(axis) => {
                    format!("strides {strides:?} of shape {shape:?}: axis {axis} overlaps itself")
                }
            },
        };
        self.check.refuse(tensor.name, reason)
    }

    fn overlaps(&self) -> Result<()> {
        let written = |number: usize| self.tensors[number].written;
        for number in (0..self.tensors.len()).filter(|&number| written(number)) {
            // Two written tensors are compared once: the later one is rejected.
            for other in (0..self.tensors.len()).filter(|&other| !written(other) || other < number)
            {
                self.overlap(&self.tensors[number], &self.tensors[other])?;
            }
        }
        Ok(())
    }

    fn overlap(&self, tensor: &Argument<'_>, other: &Argument<'_>) -> Result<()> {
        let (Some(own), Some(view)) = (tensor.view, other.view) else { return Ok(()) };
        let may_be = tensor.may_be == Some(other.name);
        let apart = own.elements() == 0 || view.elements() == 0 || !own.overlaps(view);
        if apart || may_be && own.same_elements(view) {
            return Ok(());
        }
        let without = if may_be { " without being the same tensor" } else { "" };
        self.check.refuse(tensor.name, format!("it overlaps `{}`{without}", other.name))
    }
}

/// An axis along which elements would overlap those of another axis. The remaining elements do not
/// overlap.
fn coinciding_axis(view: &TensorView) -> Option<usize> {
    let last = view.shape.len().saturating_sub(1);
    let mut axes: Vec<usize> = (0..last).filter(|&axis| view.shape[axis] > 1).collect();
    axes.sort_by_key(|&axis| view.strides[axis]);
    let mut reach = view.shape.last().map_or(0, |&extent| extent as i64);
    axes.into_iter().find(|&axis| {
        let stride = view.strides[axis];
        let coincides = stride < reach;
        reach += (view.shape[axis] as i64 - 1) * stride;
        coincides
    })
}

/// Whether 16-byte accesses fit: address and every stride but the last.
pub(crate) fn is_aligned(view: &TensorView) -> bool {
    let elements = 16 / view.dtype.size() as i64;
    let axes = view.shape.len();
    view.address.is_multiple_of(16)
        && (0..axes.saturating_sub(1))
            .all(|axis| view.shape[axis] <= 1 || view.strides[axis] % elements == 0)
}

/// Whether 16-byte accesses fit every row, up to its end. Strides of an axis of one entry count,
/// too: a row alone takes the path that it takes among others in the same memory.
fn holds_wide_rows(view: &TensorView) -> bool {
    let elements = (16 / view.dtype.size()) as i64;
    let outer = view.strides.len().saturating_sub(1);
    view.shape.last().is_some_and(|&w| (w * view.dtype.size()).is_multiple_of(16))
        && is_aligned(view)
        && view.strides[..outer].iter().all(|stride| stride % elements == 0)
}

/// Blocks of this many threads that process a row, with 16-byte accesses or one element a thread.
pub(crate) fn pieces(width: usize, dtype: DType, vectorised: bool, threads: usize) -> usize {
    let count = if vectorised { 16 / dtype.size() } else { 1 };
    width.div_ceil(threads * count)
}

/// Parts of a scratch memory, one after the other, each at a multiple of 16 bytes.
#[derive(Default)]
pub(crate) struct Parts {
    /// Bytes of all parts.
    pub bytes: usize,
}

impl Parts {
    /// Adds a part: this many 4-byte words for each element of a product of counts. Returns the
    /// byte offset at which it starts.
    pub fn words(&mut self, counts: &[usize]) -> usize {
        let words = counts.iter().try_fold(4usize, |words, &count| words.checked_mul(count));
        let start = self.bytes;
        // A size that does not fit is more than any memory has.
        let end = words
            .and_then(|bytes| bytes.checked_next_multiple_of(16))
            .and_then(|bytes| start.checked_add(bytes));
        self.bytes = end.unwrap_or(usize::MAX);
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECK: Arguments = Arguments { operator: "test" };

    fn view(address: u64, dtype: DType, shape: &[usize], strides: &[i64]) -> TensorView {
        TensorView {
            strides: strides.to_vec(),
            ..TensorView::dense("a view", address, dtype, shape)
        }
    }

    fn dense(address: u64, shape: &[usize]) -> TensorView {
        TensorView::dense("a view", address, DType::F32, shape)
    }

    /// A tensor that is read, either present or absent.
    fn read_at<'a>(name: &'static str, view: impl Into<Option<&'a TensorView>>) -> Argument<'a> {
        Argument { view: view.into(), ..read(name).optional() }
    }

    fn write_at<'a>(name: &'static str, view: impl Into<Option<&'a TensorView>>) -> Argument<'a> {
        Argument { view: view.into(), ..write(name).optional() }
    }

    fn scratch_at<'a>(
        name: &'static str,
        view: impl Into<Option<&'a TensorView>>,
        alignment: u64,
    ) -> Argument<'a> {
        Argument { view: view.into(), ..scratch(name, alignment).optional() }
    }

    /// A signature of tensors that are already looked up.
    fn signature_at<'a>(tensors: impl IntoIterator<Item = Argument<'a>>) -> Signature<'a> {
        static NONE: Views = Views::new();
        let tensors = tensors.into_iter().collect();
        Signature { check: CHECK, views: &NONE, tensors, bound: Vec::new(), rules: Vec::new() }
    }

    /// The error of a signature, `argument: reason`.
    fn refusal<'a>(tensors: impl IntoIterator<Item = Argument<'a>>) -> String {
        refusal_of(signature_at(tensors))
    }

    fn refusal_of(mut signature: Signature<'_>) -> String {
        match signature.bind([]) {
            Err(RuntimeError::Argument { operator: "test", argument, reason }) => {
                format!("{argument}: {reason}")
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    fn rows(view: &TensorView) -> Result<[usize; 0]> {
        signature_at([read_at("x", view).axes(&["a", "b", "c"]).rows()]).bind([])
    }

    #[test]
    fn extents_come_back_by_name_and_those_of_absent_tensors_are_zero() {
        let (x, w) = (dense(0, &[3, 5]), dense(1024, &[5]));
        let tensors = [
            read_at("x", &x).axes(&["n", "m"]),
            read_at("w", &w).axes(&["m"]),
            read_at("v", None).axes(&["k"]),
        ];
        assert_eq!(signature_at(tensors).bind(["m", "k", "n"]).unwrap(), [5, 0, 3]);
    }

    #[test]
    fn the_number_of_axes_and_extents_that_differ_are_refused() {
        let (x, w) = (dense(0, &[3, 5]), dense(1024, &[4]));
        assert_eq!(
            refusal([read_at("x", &x).axes(&["n"])]),
            "x: shape [3, 5] has 2 axes, not 1 (n)"
        );
        let tensors = [read_at("x", &x).axes(&["n", "m"]), read_at("w", &w).axes(&["m"])];
        assert_eq!(refusal(tensors), "w: shape [4] must be [5] (m)");
        let given = signature_at([read_at("x", &x).axes(&["n", "m"])]).given("m", 7);
        assert_eq!(refusal_of(given), "x: shape [3, 5] must be [3, 7] (n, m)");
        assert_eq!(
            refusal([read_at("x", &x).axes(&["n", "n"])]),
            "x: shape [3, 5] must be [3, 3] (n, n)"
        );
    }

    #[test]
    fn an_extent_beyond_its_rule_is_refused_with_the_rule() {
        let refused = |shape: &[usize], multiple, most| {
            let x = view(0, DType::U8, shape, &[1]);
            refusal_of(
                signature_at([read_at("x", &x).of(&[DType::U8]).axes(&["n"])])
                    .extent("n", multiple, most),
            )
        };
        assert_eq!(refused(&[0], 1, 8), "x: n 0 must be 1 to 8");
        assert_eq!(refused(&[9], 1, 8), "x: n 9 must be 1 to 8");
        assert_eq!(refused(&[24], 16, 64), "x: n 24 must be a multiple of 16 up to 64");
        assert_eq!(refused(&[0], 16, 64), "x: n 0 must be a multiple of 16 up to 64");
        assert_eq!(refused(&[80], 16, 64), "x: n 80 must be a multiple of 16 up to 64");
        assert_eq!(refused(&[1 << 31], 2, usize::MAX), "x: n 2147483648 must fit 32 bits");
    }

    #[test]
    fn extents_fit_32_bits_unless_the_kernel_counts_in_64() {
        let x = view(0, DType::U8, &[1 << 31], &[1]);
        let tensors = || [read_at("x", &x).of(&[DType::U8]).axes(&["n"])];
        assert_eq!(refusal(tensors()), "x: n 2147483648 must fit 32 bits");
        assert_eq!(signature_at(tensors()).wide("n").bind(["n"]).unwrap(), [1 << 31]);
    }

    #[test]
    fn another_element_type_is_refused() {
        let (x, y) = (view(0, DType::Bf16, &[4], &[1]), view(64, DType::F32, &[4], &[1]));
        assert_eq!(refusal([read_at("x", &x).axes(&["n"])]), "x: element type bf16 must be f32");
        let integers = read_at("x", &x).of(&[DType::I32, DType::U8]).axes(&["n"]);
        assert_eq!(refusal([integers]), "x: element type bf16 must be i32 or u8");
        let like = [read_at("x", &x).of(&FLOATS).axes(&["n"]), read_at("y", &y).like("x")];
        assert_eq!(refusal(like), "y: element type f32 must be bf16");
    }

    #[test]
    fn axes_may_lie_in_any_order_and_with_any_gaps() {
        for strides in [[12, 4, 1], [4, 8, 1], [100, 7, 1], [7, 100, 1]] {
            rows(&view(0, DType::F32, &[2, 3, 4], &strides))
                .unwrap_or_else(|error| panic!("{strides:?}: {error}"));
        }
        // Along an axis of one entry the stride is never applied.
        rows(&view(0, DType::F32, &[2, 1, 4], &[4, -9, 1])).expect("one entry");
        rows(&view(0, DType::F32, &[2, 3, 1], &[1, 2, 77])).expect("columns of one element");
    }

    #[test]
    fn elements_that_coincide_are_refused_whatever_the_order_of_the_axes() {
        for (strides, axis) in
            [([11, 4, 1], 0), ([4, 7, 1], 1), ([3, 12, 1], 0), ([12, 3, 1], 1), ([0, 4, 1], 0)]
        {
            let x = view(0, DType::F32, &[2, 3, 4], &strides);
            let reason = rows(&x).unwrap_err().to_string();
            let overlap =
                format!("strides {strides:?} of shape [2, 3, 4]: axis {axis} overlaps itself");
            assert!(reason.ends_with(&overlap), "{reason}");
        }
        let backwards =
            rows(&view(1024, DType::F32, &[2, 3, 4], &[-12, 4, 1])).unwrap_err().to_string();
        assert!(backwards.contains("axis 0 overlaps itself"), "{backwards}");
    }

    #[test]
    fn a_last_axis_with_gaps_and_a_dense_tensor_with_gaps_are_refused() {
        let x = view(0, DType::F32, &[2, 3, 4], &[24, 8, 2]);
        assert!(
            rows(&x)
                .unwrap_err()
                .to_string()
                .contains("strides [24, 8, 2]: the last axis must be contiguous")
        );
        let x = view(0, DType::F32, &[2, 4], &[5, 1]);
        assert_eq!(
            refusal([read_at("x", &x).axes(&["n", "m"])]),
            "x: strides [5, 1] of shape [2, 4] must be dense"
        );
    }

    #[test]
    fn rows_and_memory_off_their_alignment_are_refused() {
        let refused = |address, strides: [i64; 2]| {
            let x = view(address, DType::F32, &[2, 4], &strides);
            refusal([read_at("x", &x).axes(&["n", "m"]).aligned_rows()])
        };
        assert_eq!(
            refused(8, [8, 1]),
            "x: address 0x8 and strides [8, 1] must be multiples of 16 bytes"
        );
        assert_eq!(
            refused(16, [6, 1]),
            "x: address 0x10 and strides [6, 1] must be multiples of 16 bytes"
        );
        let x = view(2, DType::F32, &[4], &[1]);
        assert_eq!(
            refusal([read_at("x", &x).axes(&["n"])]),
            "x: address 0x2 must be a multiple of 4 bytes"
        );
        let scratch_at_8 = view(8, DType::U8, &[64], &[1]);
        assert_eq!(
            refusal([scratch_at("s", &scratch_at_8, 16)]),
            "s: address 0x8 must be 16-byte aligned"
        );
        signature_at([scratch_at("s", &scratch_at_8, 8)]).bind([]).expect("any shape and type");
    }

    #[test]
    fn offsets_beyond_64_bits_are_refused_and_do_not_wrap() {
        for x in [
            view(0, DType::F32, &[2, 4], &[i64::MAX, 1]),
            view(0, DType::F32, &[1 << 40, 1 << 40], &[1, 1]),
            view(0, DType::F32, &[0, usize::MAX, usize::MAX], &[1, 1, 1]),
            view(u64::MAX - 3, DType::F32, &[1], &[1]),
            view(0, DType::F32, &[3, 3], &[i64::MIN, 1]),
        ] {
            let reason = refusal([read_at("x", &x).axes(&["n", "m"]).rows()]);
            assert!(reason.contains("must stay within 63 bits"), "{reason}");
        }
        let ragged = view(0, DType::F32, &[2, 4], &[1]);
        assert!(refusal([read_at("x", &ragged)]).contains("as many as axes"));
    }

    #[test]
    fn a_written_tensor_shares_no_memory_with_any_other() {
        let (x, y, z) = (dense(0, &[8]), dense(16, &[8]), dense(64, &[8]));
        let axes: &[&str] = &["n"];
        assert_eq!(
            refusal([read_at("x", &x).axes(axes), write_at("y", &y).axes(axes)]),
            "y: it overlaps `x`"
        );
        // Declared before or after the tensor that it overlaps. Of two written tensors the later is
        // rejected.
        assert_eq!(
            refusal([write_at("y", &y).axes(axes), read_at("x", &x).axes(axes)]),
            "y: it overlaps `x`"
        );
        assert_eq!(
            refusal([write_at("x", &x).axes(axes), write_at("y", &y).axes(axes)]),
            "y: it overlaps `x`"
        );
        signature_at([read_at("x", &x).axes(axes), read_at("y", &y).axes(axes)])
            .bind([])
            .expect("both are only read");
        signature_at([read_at("x", &x).axes(axes), write_at("z", &z).axes(axes)])
            .bind([])
            .expect("they are apart");
    }

    #[test]
    fn a_tensor_may_be_another_one_itself_only_where_that_is_declared() {
        let (x, shifted) = (dense(0, &[8]), dense(4, &[8]));
        let pair = |y| [read_at("x", &x).axes(&["n"]), write_at("y", y).like("x").may_be("x")];
        signature_at(pair(&x)).bind([]).expect("in place");
        assert_eq!(refusal(pair(&shifted)), "y: it overlaps `x` without being the same tensor");
        assert_eq!(
            refusal([read_at("x", &x).axes(&["n"]), write_at("y", &x).like("x")]),
            "y: it overlaps `x`"
        );
    }

    #[test]
    fn a_tensor_that_comes_with_another_is_refused_without_it_and_alone() {
        let x = dense(0, &[8]);
        let pair = |x, y| [read_at("x", x).axes(&["n"]), read_at("y", y).axes(&["n"]).with(&["x"])];
        let message = "y: it must be present exactly when `x` is";
        assert_eq!(refusal(pair(None, Some(&x))), message);
        assert_eq!(refusal(pair(Some(&x), None)), message);
        signature_at(pair(None, None)).bind([]).expect("both absent");
    }

    #[test]
    fn a_tensor_that_is_only_there_with_another_may_be_absent_and_is_refused_without_it() {
        let (x, y) = (dense(0, &[8]), dense(64, &[8]));
        let pair = [read("x").axes(&["n"]).optional(), read("y").axes(&["n"]).only_with(&["x"])];
        let bound = |views: &Views| {
            CHECK.signature(views, pair).bind([]).map_err(|error| error.to_string())
        };
        for views in [Views::from([("x", &x), ("y", &y)]), Views::from([("x", &x)]), Views::new()] {
            assert_eq!(bound(&views), Ok([]));
        }
        let message = "test: argument `y`: it may be present only when `x` is";
        assert_eq!(bound(&Views::from([("y", &y)])), Err(message.into()));
    }

    #[test]
    fn a_declaration_that_refers_to_nothing_is_refused() {
        let x = dense(0, &[8]);
        assert!(refusal([read_at("x", &x).like("absent")]).contains("refers to `absent`"));
    }

    #[test]
    fn scratch_memory_has_all_bytes_that_are_needed() {
        let scratch = view(0, DType::F32, &[4], &[1]);
        CHECK.holds("s", &scratch, 16).expect("as many as needed");
        let reason = CHECK.holds("s", &scratch, 17).unwrap_err().to_string();
        assert_eq!(reason, "test: argument `s`: 16 bytes; it must have 17");
    }

    #[test]
    fn a_tensor_that_others_together_bring_with_them_is_refused_without_one_of_them() {
        let (x, y, z) = (dense(0, &[4]), dense(64, &[4]), dense(128, &[4]));
        let three = |x, y, z| [read_at("x", x), read_at("y", y), read_at("z", z).with(&["x", "y"])];
        for (first, second, third) in
            [(Some(&x), Some(&y), Some(&z)), (Some(&x), None, None), (None, None, None)]
        {
            signature_at(three(first, second, third)).bind([]).expect("all or not all");
        }
        let reason = "z: it must be present exactly when `x` and `y` are";
        assert_eq!(refusal(three(Some(&x), Some(&y), None)), reason);
        assert_eq!(refusal(three(Some(&x), None, Some(&z))), reason);
    }

    #[test]
    fn parameters_follow_from_the_axes_and_absent_tensors_keep_their_places() {
        let (x, w) = (view(64, DType::F32, &[2, 3, 4], &[40, 8, 1]), dense(1024, &[4]));
        let k = view(2048, DType::F32, &[7, 4], &[24, 1]);
        let signature = signature_at([
            read_at("x", &x).axes(&["num_tokens", "num_heads", "batch_dim"]).rows(),
            read_at("w", &w).axes(&["batch_dim"]),
            write_at("y", None).like("x").rows(),
            read_at("k", &k).axes(&["num_keys", "batch_dim"]).rows().one_stride(),
        ]);
        let by_hand = CHECK.params().ptr("w", &w).heads("x", &x).heads("y", None).rows("k", &k);
        let params = signature.append(signature.params(&["w", "x"]), &["y", "k"]);
        assert_eq!((params.bytes(), params.layout()), (by_hand.bytes(), by_hand.layout()));
    }

    #[test]
    fn parameters_take_other_names_tokens_of_requests_and_tokens_from_one_on() {
        let tokens = view(64, DType::F32, &[2, 3, 4], &[24, 8, 1]);
        let (uneven, flat) =
            (view(64, DType::F32, &[2, 3, 4], &[40, 8, 1]), view(64, DType::F32, &[6, 4], &[8, 1]));
        let packed = |x| read_at("x", x).axes(&["batch", "s_q", "head_dim"]).rows().packed();
        let signature = signature_at([packed(&tokens)]);
        let params = signature.append_as(CHECK.params(), "q", "x");
        let by_hand = CHECK.params().strided("q", &flat, ["token_stride"]);
        assert_eq!((params.bytes(), params.layout()), (by_hand.bytes(), by_hand.layout()));
        assert!(refusal([packed(&uneven)]).contains("tokens must be evenly spaced"));

        let rows = signature_at([read_at("x", &flat).axes(&["num_tokens", "head_dim"]).rows()]);
        let params = rows.append_from(CHECK.params(), 2, &["x"]);
        let by_hand = CHECK.params().strided("x", &flat.skip(2), ["token_stride"]);
        assert_eq!((params.bytes(), params.layout()), (by_hand.bytes(), by_hand.layout()));
    }

    #[test]
    fn a_tensor_that_a_call_does_not_use_is_no_parameter_of_its_kernels() {
        let x = dense(64, &[4]);
        let signature = signature_at([read_at("x", &x).when(false)]);
        let by_hand = CHECK.params().ptr("x", None::<&TensorView>);
        assert_eq!(signature.params(&["x"]).bytes(), by_hand.bytes());
    }

    #[test]
    fn accesses_are_wide_only_where_every_row_of_every_tensor_with_rows_takes_them() {
        let vectorised = |address, shape: &[usize], strides: &[i64]| {
            let (x, w) = (view(address, DType::Bf16, shape, strides), dense(4, &[3]));
            signature_at([read_at("x", &x).of(&FLOATS).axes(&["n", "m"]).rows(), read_at("w", &w)])
                .vectorised()
        };
        assert!(vectorised(16, &[2, 8], &[24, 1]));
        assert!(!vectorised(8, &[2, 8], &[24, 1]) && !vectorised(16, &[2, 8], &[20, 1]));
        assert!(!vectorised(16, &[2, 4], &[24, 1]));
    }

    #[test]
    fn there_is_a_module_for_each_combination_of_types() {
        let modules = modules_of_floats("a.cu", &["X", "W"]);
        let types: Vec<Vec<&str>> = modules
            .iter()
            .map(|(_, defines)| defines.iter().map(|(_, value)| value.as_str()).collect())
            .collect();
        assert_eq!(
            types,
            [["bf16", "bf16"], ["bf16", "float"], ["float", "bf16"], ["float", "float"]]
        );
    }

    #[test]
    fn parts_of_scratch_memory_start_at_multiples_of_16_bytes_and_never_wrap() {
        let mut parts = Parts::default();
        assert_eq!(
            [parts.words(&[3]), parts.words(&[2, 4]), parts.words(&[0, 9]), parts.words(&[1])],
            [0, 16, 48, 48]
        );
        assert_eq!(parts.bytes, 64);
        parts.words(&[usize::MAX / 2, 3]);
        parts.words(&[1]);
        assert_eq!(parts.bytes, usize::MAX);
    }
}
