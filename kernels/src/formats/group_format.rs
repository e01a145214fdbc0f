//! Rows stored as codes with a scale for each group: what the launchers of the quantizers share.

use crate::arguments::{Arguments, FLOATS, Signature, element_types, read, saved, write};
use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, Scales, extents_of};
use dsv4_runtime::params::Params;
use dsv4_runtime::{DType, Device, Result, Views};

/// A format of rows.
#[derive(Clone, Copy)]
pub(crate) struct GroupFormat {
    pub check: Arguments,
    pub file: &'static str,
    /// Elements of a row that share a scale.
    pub group: usize,
    /// Elements in a byte of codes; the width is a multiple of it.
    pub elements_per_byte: usize,
    /// Whether the tensor has a scale, too: `global_scale` `[1]` f32.
    pub has_global_scale: bool,
}

/// A call whose arguments were checked.
pub(crate) struct GroupCall<'a> {
    format: GroupFormat,
    signature: Signature<'a>,
    /// The tensor of numbers.
    numbers: &'static str,
    element: DType,
    /// Blocks that process all rows.
    pub blocks: usize,
    params: Params,
}

impl GroupFormat {
    /// The sizes of `x` or `y`, for the [`Scales`] of a call that quantizes or decodes.
    pub fn extents(views: &Views, quantizes: bool) -> [usize; 2] {
        extents_of(views, numbers(quantizes))
    }

    /// Launches a call with byte scales of rows, with these kernels: for elements one by one, and
    /// for 16 bytes at a time. Returns the one that ran.
    ///
    /// # Errors
    /// A rejected argument, a compile error, a rejected launch.
    pub fn launch(
        self,
        device: &Device,
        views: &Views,
        layout: ScaleLayout,
        quantizes: bool,
        names: [&'static str; 2],
    ) -> Result<&'static str> {
        let [rows, columns] = Self::extents(views, quantizes);
        let scales = Scales::of_bytes(layout, rows, columns, self.group);
        self.call(views, scales, quantizes)?.launch(device, names)
    }

    /// Checks the tensors of a call: `x` is quantized to `codes` and `scales`, or these are decoded
    /// to `y`.
    ///
    /// # Errors
    /// A rejected argument.
    pub fn call<'a>(
        self,
        views: &'a Views,
        scales: Scales,
        quantizes: bool,
    ) -> Result<GroupCall<'a>> {
        let numbers = numbers(quantizes);
        let [_, columns] = extents_of(views, numbers);
        let rows = if quantizes { read(numbers) } else { write(numbers) };
        let mut tensors = vec![rows.of(&FLOATS).axes(&["num_rows", "width"]).rows()];
        if self.has_global_scale {
            tensors.push(read("global_scale").axes(&["one"]));
        }
        tensors.push(
            saved("codes", !quantizes).of(&[DType::U8]).axes(&["num_rows", "code_bytes"]).rows(),
        );
        tensors.push(if quantizes { scales.written() } else { scales.read() });
        let signature = self.check.signature(views, tensors).wide("num_rows").given("one", 1);
        let signature = signature
            .extent("width", self.elements_per_byte, MAX_WIDTH)
            .given("code_bytes", columns / self.elements_per_byte);
        let mut signature = scales.bound(signature);
        let [num_rows, width] = signature.bind(["num_rows", "width"])?;
        // What is decoded are rows of elements, without padding.
        let of_rows = Scales { layout: ScaleLayout::Plain, rows: num_rows, ..scales };
        let (row_warps, blocks) =
            if quantizes { scales } else { of_rows }.grid(self.check, numbers, self.group)?;
        let rows = if quantizes { [numbers, "codes"] } else { ["codes", numbers] };
        let factors: &[_] =
            if self.has_global_scale { &["global_scale", "scales"] } else { &["scales"] };
        let params = signature.params(&[&rows[..], factors].concat());
        let params = scales.params(params, num_rows, width, row_warps)?;
        let element = views[numbers].dtype;
        Ok(GroupCall { format: self, signature, numbers, element, blocks, params })
    }
}

fn numbers(quantizes: bool) -> &'static str {
    if quantizes { "x" } else { "y" }
}

impl GroupCall<'_> {
    /// Adds parameters after those of every format.
    ///
    /// # Errors
    /// Those of `more`.
    pub fn with(self, more: impl FnOnce(Params) -> Result<Params>) -> Result<Self> {
        Ok(Self { params: more(self.params)?, ..self })
    }

    /// Launches the kernel for elements one by one, or the one for 16 bytes at a time where those
    /// fit every row. Returns the kernel that ran.
    ///
    /// # Errors
    /// A compile error, a rejected launch.
    pub fn launch(
        self,
        device: &Device,
        [scalar, vector]: [&'static str; 2],
    ) -> Result<&'static str> {
        let name = if self.signature.vectorised() { vector } else { scalar };
        let types = element_types(&[("ELEMENT", self.element)]);
        device.kernel(self.format.file, &types, name)?.launch_blocks(
            self.numbers,
            self.blocks,
            &self.params,
        )?;
        Ok(name)
    }
}
