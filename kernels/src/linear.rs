//! `linear`: launchers of `kernels/cuda/linear.cu` (inference 0, 5.2, 5.5).

use crate::arguments::{Arguments, FLOATS, Signature, is_aligned, read, scratch, write};
use crate::runtime::device::{Module, module};
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, Result, TensorView, Views};

const FILE: &str = "linear.cu";
const CHECK: Arguments = Arguments { operator: "linear" };
/// Most features of a row, in or out.
pub const MAX_FEATURES: usize = 1 << 30;
/// Rows up to which tiles of 16 rows are taken; `Small::ROWS` in the kernel source.
const FEW_ROWS: usize = 16;
/// Numbers of k of a stage, and stages of a part of k at least; `DEPTH` in the kernel source.
const DEPTH: usize = 64;
const FEWEST_STAGES: usize = 4;
/// Elements of a row that a thread of the sum takes, and its threads; `CHUNK` and `SUM_THREADS` in the kernel source.
const CHUNK: usize = 8;
const SUM_THREADS: usize = 256;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &[])]
}

/// Which of the three products a launch computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Product {
    Forward,
    Dx,
    Dw,
}

/// The kernels of one tile: those of all products, blocks that a multiprocessor holds, rows and columns of the tile.
struct Tiles {
    names: [&'static str; 3],
    per_processor: usize,
    extents: [usize; 2],
}

const LARGE: Tiles = Tiles {
    names: ["linear_forward_large", "linear_dx_large", "linear_dw_large"],
    per_processor: 2,
    extents: [128, 128],
};
/// Of up to [`FEW_ROWS`] rows, which dw does not have: its rows are features.
const SMALL: Tiles = Tiles {
    names: ["linear_forward_small", "linear_dx_small", "linear_dw_large"],
    per_processor: 3,
    extents: [FEW_ROWS, 64],
};
const SCALAR: Tiles = Tiles {
    names: ["linear_forward_scalar", "linear_dx_scalar", "linear_dw_scalar"],
    per_processor: 4,
    extents: [64, 64],
};

/// Extents of a product: rows and columns of the result, numbers that are added for each element.
#[derive(Clone, Copy)]
struct Extents {
    rows: usize,
    columns: usize,
    depth: usize,
}

impl Product {
    fn extents(self, num_tokens: usize, out_features: usize, in_features: usize) -> Extents {
        let [rows, columns, depth] = match self {
            Self::Forward => [num_tokens, out_features, in_features],
            Self::Dx => [num_tokens, in_features, out_features],
            Self::Dw => [out_features, in_features, num_tokens],
        };
        Extents { rows, columns, depth }
    }

    fn tiles(self, extents: Extents, vectorised: bool) -> &'static Tiles {
        match vectorised {
            false => &SCALAR,
            true if self != Self::Dw && extents.rows <= FEW_ROWS => &SMALL,
            true => &LARGE,
        }
    }
}

impl Extents {
    /// Tiles of the result, and parts of k: as many as the device holds blocks, where tiles alone are fewer.
    fn grid(self, device: &Device, tiles: &Tiles) -> [usize; 2] {
        let [rows, columns] = tiles.extents;
        let count = self.rows.div_ceil(rows).saturating_mul(self.columns.div_ceil(columns));
        let held = tiles.per_processor * device.environment().processors as usize;
        [count, (held / count.max(1)).clamp(1, self.depth.div_ceil(DEPTH * FEWEST_STAGES).max(1))]
    }

    /// Bytes of the sums that parts of k leave.
    fn partial_bytes(self, splits: usize) -> usize {
        let counts = [splits, self.rows, self.columns.next_multiple_of(CHUNK)];
        let bytes = counts.into_iter().try_fold(4usize, usize::checked_mul);
        if splits > 1 { bytes.unwrap_or(usize::MAX) } else { 0 }
    }

    /// The most of any tiles, so that the answer does not depend on alignment.
    fn workspace_bytes(self, device: &Device, product: Product) -> usize {
        let of = |vectorised| self.partial_bytes(self.grid(device, product.tiles(self, vectorised))[1]);
        of(true).max(of(false))
    }
}

/// Bytes of scratch memory that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, out_features: usize, in_features: usize) -> usize {
    Product::Forward.extents(num_tokens, out_features, in_features).workspace_bytes(device, Product::Forward)
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, out_features: usize, in_features: usize) -> usize {
    let of = |product: Product| product.extents(num_tokens, out_features, in_features).workspace_bytes(device, product);
    of(Product::Dx).max(of(Product::Dw))
}

/// A call whose arguments were checked.
struct Call<'a> {
    device: &'a Device,
    signature: Signature<'a>,
    views: &'a Views,
    extents: [usize; 3],
}

impl Call<'_> {
    /// Launches a product of two of the call's tensors into a third; returns the kernels that ran.
    fn launch(
        &self,
        product: Product,
        [a, b, out]: [&'static str; 3],
        before: &'static str,
    ) -> Result<Vec<&'static str>> {
        let [num_tokens, out_features, in_features] = self.extents;
        let extents = product.extents(num_tokens, out_features, in_features);
        let tiles = product.tiles(extents, self.signature.vectorised_rows(&[a, b]));
        let [count, splits] = extents.grid(self.device, tiles);
        let (out, before) = (&self.views[out], self.views.get(before));
        let wide = |view: &TensorView| {
            view.shape.last().is_some_and(|&width| (width * view.dtype.size()).is_multiple_of(16)) && is_aligned(view)
        };
        let partials =
            self.views.get("workspace").map_or(DeviceAddress(0), |workspace| DeviceAddress(workspace.address));
        let params = CHECK.params().rows("a", &self.views[a]).rows("b", &self.views[b]);
        let params = params.rows("before", before).rows("out", out).ptr("partials", partials);
        let params = params.i64("rows", extents.rows)?.i64("columns", extents.columns)?.i64("depth", extents.depth)?;
        let params = params.i32("splits", splits)?.flag("out_is_f32", out.dtype == DType::F32);
        let params = params.flag("wide", wide(out) && before.is_none_or(wide));
        let name = tiles.names[product as usize];
        let kernel = self.device.kernel(FILE, &[], name)?;
        kernel.launch_blocks(a, count.saturating_mul(splits), &params)?;
        if splits == 1 {
            return Ok(vec![name]);
        }
        let chunks = extents.rows.saturating_mul(extents.columns.div_ceil(CHUNK));
        self.device.kernel(FILE, &[], "linear_sum")?.launch_blocks(a, chunks.div_ceil(SUM_THREADS), &params)?;
        Ok(vec![name, "linear_sum"])
    }
}

/// Checks the tensors of a call.
fn bind<'a>(device: &'a Device, views: &'a Views, backward: bool) -> Result<Call<'a>> {
    let (inputs, weights, outputs) =
        (&["num_tokens", "in_features"], &["out_features", "in_features"], &["num_tokens", "out_features"]);
    // What the other direction adds to is not read, and left as it is.
    let tensors = [
        read("x").of(&[DType::Bf16]).axes(inputs).rows(),
        read("w").of(&[DType::Bf16]).axes(weights).rows(),
        write("y").of(&FLOATS).axes(outputs).rows().may_be("y_before").when(!backward),
        if backward { read("y_before").of(&FLOATS).axes(outputs) } else { read("y_before").like("y") }
            .rows()
            .optional(),
        read("dy").of(&[DType::Bf16]).axes(outputs).rows().when(backward),
        write("dx").like("x").rows().when(backward),
        write("dw").of(&FLOATS).axes(weights).rows().may_be("dw_before").when(backward),
        if backward { read("dw_before").like("dw") } else { read("dw_before").of(&FLOATS).axes(weights) }
            .rows()
            .optional(),
        scratch("workspace", 16),
    ];
    let signature = CHECK.signature(views, tensors).wide("num_tokens");
    let signature = signature.extent("out_features", 1, MAX_FEATURES).extent("in_features", 1, MAX_FEATURES);
    let mut call = Call { device, signature, views, extents: [0; 3] };
    call.extents = call.signature.bind(["num_tokens", "out_features", "in_features"])?;
    let [num_tokens, out_features, in_features] = call.extents;
    let needed = if backward { backward_workspace_bytes } else { forward_workspace_bytes };
    CHECK.holds("workspace", &views["workspace"], needed(device, num_tokens, out_features, in_features))?;
    Ok(call)
}

/// Launches `y = y_before + x w^T`; returns the kernels that ran. Its tensors, all with contiguous rows:
///
/// - `x` `[num_tokens, in_features]` and `w` `[out_features, in_features]` bf16;
/// - `y` `[num_tokens, out_features]`, bf16 or f32;
/// - `y_before` like `y`, which may be `y` itself; absent for zeros;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, views: &Views) -> Result<Vec<&'static str>> {
    bind(device, views, false)?.launch(Product::Forward, ["x", "w", "y"], "y_before")
}

/// Launches the gradients `dx = dy w` and `dw = dw_before + dy^T x`; returns the kernels that ran. Its tensors, all
/// with contiguous rows:
///
/// - `x` and `w` as in [`forward`], and `dx` like `x`;
/// - `dy` `[num_tokens, out_features]` bf16;
/// - `dw` like `w`, bf16 or f32, and `dw_before` like `dw`, which may be `dw` itself: the sum over the chunks of tokens
///   before this one; absent for zeros;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views) -> Result<Vec<&'static str>> {
    let call = bind(device, views, true)?;
    let dx = call.launch(Product::Dx, ["dy", "w", "dx"], "")?;
    Ok([dx, call.launch(Product::Dw, ["dy", "x", "dw"], "dw_before")?].concat())
}
