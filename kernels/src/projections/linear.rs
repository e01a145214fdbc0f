//! `linear`: launchers of `kernels/cuda/projections/linear.cu`, `linear_quantized.cu` and
//! `linear_hopper.cu` (inference 0, 5.2 to 5.7).

use serde::{Deserialize, Serialize};

use crate::arguments::{
    Argument, Arguments, Defines, FLOATS, Signature, is_aligned, read, scratch, write,
};
pub use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::formats::scale_layout::{extents_of, product_params};
use crate::implementation::Implementation;
use dsv4_runtime::matrix::{Matrix, MatrixProduct};
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::tensor_map::{MapWords, TensorMap};
use dsv4_runtime::{DType, Device, Result, TensorView, Views};

const FILE: &str = "linear.cu";
const QUANTIZED_FILE: &str = "linear_quantized.cu";
const HOPPER_FILE: &str = "linear_hopper.cu";
const HOPPER_LARGE: &str = "linear_hopper_large.cu";
const CHECK: Arguments = Arguments { operator: "linear" };
/// Most features of a row, in or out.
pub const MAX_FEATURES: usize = 1 << 30;
/// Most groups of a layer.
pub const MAX_GROUPS: usize = 1 << 16;
/// Up to this many rows, tiles of 16 rows are used; `Small::ROWS` in the kernel source.
pub(crate) const FEW_ROWS: usize = 16;
/// The kernel for one token, whose warps read whole rows of w. Then the features of a block, and
/// the most warps that share a row, each with this many values of k at a time: `ONE_WARPS *
/// ONE_FEATURES`, `ONE_WARPS` and `ONE_STEP * CHUNK` in the kernel source.
const ONE: &str = "linear_forward_one";
const FEATURES_OF_ONE: usize = 16;
const MOST_WARPS_OF_ROW: usize = 8;
const STEP_OF_ONE: usize = 512;
/// Lower bound on its blocks for each SM, if rows are long enough to be shared: fewer blocks have
/// too few loads in flight.
const BLOCKS_OF_ONE: usize = 3;
/// SMs of the GPU for which the parts of k of an invariant path are chosen.
const NOMINAL_PROCESSORS: usize = 132;
/// Above this many rows, blocks of an invariant path add all parts of k.
const MANY_ROWS: usize = 256;
/// Most parts of k of an invariant path with quantized operands.
const MOST_QUANTIZED_PARTS: usize = 4;
/// Values of k of a stage, and the least stages of a part of k; `DEPTH` in the kernel source.
const DEPTH: usize = 64;
const FEWEST_STAGES: usize = 4;
/// The cost of starting a tile in a block of the Hopper kernel, in stages, and the most rounds into
/// which k is divided.
const STARTS: usize = 4;
const MOST_ROUNDS: usize = 4;
/// Elements of a row that a thread of the sum processes, and its threads; `CHUNK` and `SUM_THREADS`
/// in the kernel source.
const CHUNK: usize = 8;
const SUM_THREADS: usize = 256;

/// Rows and values of k of a block of FP8 weights that share a scale.
pub const BLOCK: usize = 128;

/// The quantized formats of the portable kernels, with the groups of x.
pub(crate) const FORMATS: [(Weights, usize); 4] =
    [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32), (Weights::Nvfp4, 16)];

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let of = |(weights, group): (Weights, usize)| {
        module(QUANTIZED_FILE, &quantized_defines(weights, group))
    };
    let hopper = hopper_modules(HOPPER_FILE).into_iter().chain([module(HOPPER_LARGE, &[])]);
    let quantized = FORMATS.map(of);
    [vec![module(FILE, &[])], quantized.to_vec(), hopper.collect()].concat()
}

/// Formats of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// bf16, and x is bf16.
    Bf16,
    /// e4m3 with a scale for each block of 128 x 128; x is e4m3 with a scale for each 128 values of
    /// a row.
    Fp8,
    /// e2m1 with an e8m0 scale for each 32 values of a row; x is e4m3 with a scale for each 128 or
    /// 32.
    Mxfp4,
    /// e2m1 with an e4m3 scale for each 16 values of a row and an fp32 scale of the tensor, and so
    /// is x.
    Nvfp4,
}

/// Which kernels multiply bf16 operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// The kernels of `linear.cu`.
    #[default]
    Own,
    /// The device's library ([`Device::matrix_library`]), cublasLt on a GPU, wherever it supports
    /// the GEMM, otherwise the kernels of `linear.cu`. Requirements: more than 16 rows of the
    /// result, no size of 0, and rows of all matrices at multiples of 16 bytes and within 2^31
    /// elements. A result with an addend is fp32.
    Library,
}

/// How the operands of a call are quantized, and which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// Formats, except bf16.
    pub weights: Weights,
    /// Values of x that share a scale: 128 for FP8, 32 or 128 for MXFP4, 16 for NVFP4.
    pub group: usize,
    /// Whether scales are bytes: e8m0, or e4m3 for NVFP4. FP8 may have fp32 scales instead.
    pub scale_bytes: bool,
    /// The layout of the scales of rows; those of FP8's blocks of weights are plain.
    pub layout: ScaleLayout,
    /// Which kernels run. Those for Hopper take FP8 and MXFP4, with rows of x and w at multiples of
    /// 16 bytes, whose length is a multiple of 16 bytes.
    pub implementation: Implementation,
}

impl Quantized {
    /// The scales of x.
    pub fn x_scales(&self, num_tokens: usize, in_features: usize) -> Scales {
        let groups = in_features.div_ceil(self.group.max(1));
        Scales {
            bytes: self.scale_bytes,
            layout: self.layout,
            rows: num_tokens,
            of_rows: true,
            groups,
        }
    }

    /// The scales of w.
    pub fn w_scales(&self, out_features: usize, in_features: usize) -> Scales {
        let (layout, rows, of_rows, group) = match self.weights {
            Weights::Nvfp4 => (self.layout, out_features, true, 16),
            Weights::Mxfp4 => (self.layout, out_features, true, 32),
            Weights::Fp8 | Weights::Bf16 => {
                (ScaleLayout::Plain, out_features.div_ceil(BLOCK), false, BLOCK)
            }
        };
        Scales {
            bytes: self.scale_bytes,
            layout,
            rows,
            of_rows,
            groups: in_features.div_ceil(group),
        }
    }

    /// Bytes of the codes of a row of x, and of w, with this many values.
    pub fn row_bytes(&self, in_features: usize) -> [usize; 2] {
        match self.weights {
            Weights::Nvfp4 => [in_features / 2, in_features / 2],
            Weights::Mxfp4 => [in_features, in_features / 2],
            Weights::Fp8 | Weights::Bf16 => [in_features, in_features],
        }
    }

    /// Rejects combinations that no kernel computes.
    pub(crate) fn check(&self, check: Arguments) -> Result<()> {
        let groups: &[usize] = match self.weights {
            Weights::Bf16 => return check.refuse("weights", "bf16 weights are not quantized"),
            Weights::Fp8 => &[128],
            Weights::Mxfp4 => &[128, 32],
            Weights::Nvfp4 => &[16],
        };
        if !groups.contains(&self.group) {
            return check.refuse(
                "group",
                format!("{} must be one of {groups:?} for these weights", self.group),
            );
        }
        if self.weights != Weights::Fp8 && !self.scale_bytes {
            return check.refuse("scale_bytes", "scales of four-bit weights are bytes");
        }
        self.x_scales(0, 1).check(check)
    }
}

/// The defines of the portable kernels of a format.
pub(crate) fn quantized_defines(weights: Weights, group: usize) -> Defines {
    vec![("FORMAT", (weights as usize).to_string()), ("GROUP", group.to_string())]
}

/// The defines of the Hopper kernels for few tokens, with tiles of this many tokens.
pub(crate) fn hopper_defines(tokens: usize, weights: Weights, group: usize) -> Defines {
    let numbers = [("TOKENS", tokens), ("WEIGHTS", weights as usize), ("X_GROUP", group)];
    numbers.map(|(name, number)| (name, number.to_string())).to_vec()
}

/// Every module of a file of Hopper kernels for few tokens.
pub(crate) fn hopper_modules(file: &'static str) -> Vec<Module> {
    let formats = [(Weights::Fp8, BLOCK), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32)].into_iter();
    let of = |(weights, group)| {
        token_tiles(weights)
            .iter()
            .map(move |&tokens| module(file, &hopper_defines(tokens, weights, group)))
    };
    formats.flat_map(of).collect()
}

/// Which of the three GEMMs a launch computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Product {
    Forward,
    Dx,
    Dw,
}

/// The paths of GEMMs by a library.
const LIBRARY: [&str; 3] = ["linear_forward<library>", "linear_dx<library>", "linear_dw<library>"];

/// The kernels of one tile: those of all GEMMs, blocks that an SM holds, rows and columns of the
/// tile.
struct Tiles {
    names: [&'static str; 3],
    per_processor: usize,
    extents: [usize; 2],
    /// Those whose blocks add all parts of k in order, if there are such.
    folded: Option<[&'static str; 3]>,
}

const LARGE: Tiles = Tiles {
    names: ["linear_forward_large", "linear_dx_large", "linear_dw_large"],
    per_processor: 1,
    extents: [128, 128],
    folded: Some(["linear_forward_large_folded", "linear_dx_large_folded", "linear_dw_large"]),
};
/// For up to [`FEW_ROWS`] rows. dw has no such tile: its rows are features.
const SMALL: Tiles = Tiles {
    names: ["linear_forward_small", "linear_dx_small", "linear_dw_large"],
    per_processor: 3,
    extents: [FEW_ROWS, 64],
    folded: None,
};
const SCALAR: Tiles = Tiles {
    names: ["linear_forward_scalar", "linear_dx_scalar", "linear_dw_scalar"],
    per_processor: 4,
    extents: [64, 64],
    folded: None,
};

const QUANTIZED: [Tiles; 3] = [
    Tiles {
        names: ["linear_quantized_large"; 3],
        per_processor: 1,
        extents: [128, 128],
        folded: None,
    },
    Tiles {
        names: ["linear_quantized_small"; 3],
        per_processor: 4,
        extents: [FEW_ROWS, 64],
        folded: None,
    },
    Tiles {
        names: ["linear_quantized_scalar"; 3],
        per_processor: 4,
        extents: [64, 64],
        folded: None,
    },
];
/// Features of a tile of the Hopper kernel for few tokens, and the values of k of a stage of either
/// Hopper kernel.
pub(crate) const FEATURE_TILE: usize = 128;
/// Tokens and features of a tile of the Hopper kernel for many tokens, and rows of its TMA boxes.
pub(crate) const LARGE_TILE: [usize; 2] = [128, 256];
const LARGE_BOX_ROWS: u32 = 128;
/// From this many tiles of tokens on, a pair of tiles counts as complete, though the last may lack
/// its second tile.
const MANY_TOKEN_TILES: usize = 15;

/// Sizes of a GEMM: groups, for each rows and columns of the result, and values that are added for
/// each element.
#[derive(Clone, Copy)]
struct Extents {
    groups: usize,
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
        Extents { groups: 1, rows, columns, depth }
    }

    /// Whether warps read whole rows of w, if 16-byte accesses fit.
    fn reads_whole_rows(self, extents: Extents) -> bool {
        self == Self::Forward && extents.rows == 1
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
    /// The same for this many groups.
    fn of_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Tiles of the result, and parts of k: as many parts as fill the device's blocks, where there
    /// are fewer tiles.
    fn grid(self, device: &Device, tiles: &Tiles) -> [usize; 2] {
        let [rows, columns] = tiles.extents;
        let count = self
            .rows
            .div_ceil(rows)
            .saturating_mul(self.columns.div_ceil(columns))
            .saturating_mul(self.groups);
        let held = tiles.per_processor * device.environment().processors as usize;
        [count, (held / count.max(1)).clamp(1, self.depth.div_ceil(DEPTH * FEWEST_STAGES).max(1))]
    }

    /// Parts of k that depend on nothing but the result's columns and its depth: those of one tile
    /// of few rows on a nominal GPU.
    fn invariant_parts(self, tiles: &Tiles) -> usize {
        let count = self.columns.div_ceil(tiles.extents[1]).saturating_mul(self.groups);
        let held = tiles.per_processor * NOMINAL_PROCESSORS;
        (held / count.max(1)).clamp(1, self.depth.div_ceil(DEPTH * FEWEST_STAGES).max(1))
    }

    /// As [`Self::invariant_parts`], of quantized operands, whose blocks take one part of k each:
    /// few, because every part of a long prefill leaves its sums in memory.
    fn quantized_parts(self) -> usize {
        let [_, small, _] = &QUANTIZED;
        let stages = self.depth.div_ceil(FEATURE_TILE * FEWEST_STAGES).max(1);
        self.invariant_parts(small).min(MOST_QUANTIZED_PARTS).min(stages)
    }

    /// Whether blocks of an invariant path add all parts of k: their tiles fill the device, or the
    /// sums of the parts would take much memory. Either way gives the same bits.
    fn folds(self, device: &Device, tiles: &Tiles) -> bool {
        let parts = self.invariant_parts(&SMALL);
        let [count, _] = self.grid(device, tiles);
        let many = count >= device.environment().processors as usize || self.rows > MANY_ROWS;
        parts > 1 && tiles.folded.is_some() && many
    }

    /// The same for the Hopper kernels, whose blocks process several tiles. The parts of k nearly
    /// fill the last round of the SMs, where storing their sums costs less than the idle SMs.
    /// `tokens`, `features`: of a tile.
    fn hopper_grid(self, device: &Device, [tokens, features]: [usize; 2]) -> [usize; 2] {
        let processors = device.environment().processors as usize;
        let count = self.rows.div_ceil(tokens).saturating_mul(self.columns.div_ceil(features));
        let stages = self.depth.div_ceil(FEATURE_TILE);
        // In stages: those of the longest block, its starts, and the partial sums, 8 bytes an
        // element for store and load.
        let cost = |splits: &usize| {
            let left = if *splits > 1 { tokens.min(self.rows).div_ceil(16) } else { 0 };
            count
                .saturating_mul(*splits)
                .div_ceil(processors)
                .saturating_mul(stages.div_ceil(*splits) + STARTS + left)
        };
        let most = stages
            .div_ceil(FEWEST_STAGES)
            .min(processors.div_ceil(count.max(1)) * MOST_ROUNDS)
            .max(1);
        [count, (1..=most).min_by_key(cost).unwrap_or(1)]
    }

    /// For one token, whose warps read whole rows of w: how many warps of a block share a row, and
    /// the blocks.
    fn warps_of_row(self, device: &Device) -> [usize; 2] {
        let blocks = |warps: usize| {
            self.columns.div_ceil(FEATURES_OF_ONE / warps).saturating_mul(self.groups)
        };
        let wanted = BLOCKS_OF_ONE * device.environment().processors as usize;
        let mut warps = 1;
        while 2 * warps <= MOST_WARPS_OF_ROW
            && blocks(warps) < wanted
            && self.depth > warps * STEP_OF_ONE
        {
            warps *= 2;
        }
        [warps, blocks(warps)]
    }

    /// Bytes of the sums that parts of k leave.
    fn partial_bytes(self, splits: usize) -> usize {
        let counts = [splits, self.groups, self.rows, self.columns.next_multiple_of(CHUNK)];
        let bytes = counts.into_iter().try_fold(4usize, usize::checked_mul);
        if splits > 1 { bytes.unwrap_or(usize::MAX) } else { 0 }
    }

    /// The most for any tiles, so that the result does not depend on alignment.
    fn workspace_bytes(self, device: &Device, product: Product) -> usize {
        let of = |tiles: &Tiles| match device.is_invariant() && product != Product::Dw {
            true if self.folds(device, tiles) => 0,
            true => self.partial_bytes(self.invariant_parts(&SMALL)),
            false => self.partial_bytes(self.grid(device, tiles)[1]),
        };
        // One token leaves none.
        let one = product.reads_whole_rows(self) && !device.is_invariant();
        let vectorised = if one { 0 } else { of(product.tiles(self, true)) };
        vectorised.max(of(product.tiles(self, false)))
    }
}

/// Bytes of scratch memory that [`forward`] needs, or [`grouped_forward`] with this many groups;
/// [`forward`] has one.
pub fn forward_workspace_bytes(
    device: &Device,
    num_groups: usize,
    num_tokens: usize,
    out_features: usize,
    in_features: usize,
) -> usize {
    let extents =
        Product::Forward.extents(num_tokens, out_features, in_features).of_groups(num_groups);
    extents.workspace_bytes(device, Product::Forward)
}

/// The same for [`backward`] and [`grouped_backward`].
pub fn backward_workspace_bytes(
    device: &Device,
    num_groups: usize,
    num_tokens: usize,
    out_features: usize,
    in_features: usize,
) -> usize {
    let of = |product: Product| {
        let extents = product.extents(num_tokens, out_features, in_features).of_groups(num_groups);
        extents.workspace_bytes(device, product)
    };
    of(Product::Dx).max(of(Product::Dw))
}

impl Extents {
    /// The parameters of the partial sums and of the sizes.
    fn params(self, params: Params, views: &Views) -> Result<Params> {
        let params = params.ptr("partials", DeviceAddress(views["workspace"].address));
        params.i64("rows", self.rows)?.i64("columns", self.columns)?.i64("depth", self.depth)
    }
}

/// The number of parts of k, and how the result is stored.
fn how_stored(
    params: Params,
    splits: usize,
    out: &TensorView,
    before: Option<&TensorView>,
) -> Result<Params> {
    let wide = |view: &TensorView| {
        view.shape.last().is_some_and(|&width| (width * view.dtype.size()).is_multiple_of(16))
            && is_aligned(view)
    };
    let params = params.i32("splits", splits)?.flag("out_is_f32", out.dtype == DType::F32);
    Ok(params.flag("wide", wide(out) && before.is_none_or(wide)))
}

/// A call whose arguments were checked.
struct Call<'a> {
    device: &'a Device,
    signature: Signature<'a>,
    views: &'a Views,
    extents: [usize; 3],
    products: Products,
    /// The number of groups, where tensors have such an axis.
    num_groups: Option<usize>,
}

/// Tensors whose first axis is that of the groups, if there are any; in the others it is the second
/// axis.
const OF_WEIGHTS: [&str; 3] = ["w", "dw", "dw_before"];

impl Call<'_> {
    /// Computes a GEMM with the device's library; returns whether it did.
    fn launch_library(&self, product: Product, operands: [&str; 3], before: &str) -> Result<bool> {
        let library = self.device.matrix_library().filter(|_| self.products == Products::Library);
        let Some(library) = library else { return Ok(false) };
        let matrix = |name: &str| match self.num_groups {
            None => Matrix::of(&self.views[name]),
            Some(_) => Matrix::of_each(&self.views[name], usize::from(!OF_WEIGHTS.contains(&name))),
        };
        let ([a, b, out], dtype) = (operands.map(matrix), self.views[operands[2]].dtype);
        let (Some(a), Some(b), Some(out)) = (a, b, out) else { return Ok(false) };
        // With few rows, the bytes of w determine the floor, and our kernels are near it. A library
        // chooses its kernels by the number of rows.
        if out.extents[0] <= FEW_ROWS || self.device.is_invariant() {
            return Ok(false);
        }
        let before = match self.views.get(before) {
            None => None,
            // Measured on an H200: the library rounds a product to bf16 before it adds the addend,
            // so it rounds twice.
            Some(_) if dtype == DType::Bf16 => return Ok(false),
            Some(_) => match matrix(before) {
                None => return Ok(false),
                before => before,
            },
        };
        let transposed = match product {
            Product::Forward => [false, true],
            Product::Dx => [false, false],
            Product::Dw => [true, false],
        };
        library.multiply(&MatrixProduct {
            a,
            b,
            transposed,
            before,
            out,
            dtype,
            count: self.num_groups.unwrap_or(1),
        })
    }

    /// A pointer to a tensor, the stride of its rows, and that of its groups.
    fn rows(&self, params: Params, name: &str, tensor: &str) -> Params {
        let axes = match (self.num_groups, OF_WEIGHTS.contains(&tensor)) {
            (None, _) => [Some(0), None],
            (Some(_), false) => [Some(0), Some(1)],
            (Some(_), true) => [Some(1), Some(0)],
        };
        let view = self.views.get(tensor);
        let stride =
            |axis: Option<usize>| view.zip(axis).map_or(0, |(view, axis)| view.strides[axis]);
        let params = params.ptr(name, view).stride(format!("{name}_stride"), stride(axes[0]));
        params.stride(format!("{name}_group_stride"), stride(axes[1]))
    }

    /// Launches a GEMM of two of the call's tensors into a third. Returns the kernels that ran.
    fn launch(
        &self,
        product: Product,
        [a, b, out]: [&'static str; 3],
        before: &'static str,
    ) -> Result<Vec<&'static str>> {
        if self.launch_library(product, [a, b, out], before)? {
            return Ok(vec![LIBRARY[product as usize]]);
        }
        let [num_tokens, out_features, in_features] = self.extents;
        let groups = self.num_groups.unwrap_or(1);
        let extents = product.extents(num_tokens, out_features, in_features).of_groups(groups);
        let vectorised = self.signature.vectorised_rows(&[a, b]);
        let invariant = self.device.is_invariant() && product != Product::Dw;
        let one = vectorised && product.reads_whole_rows(extents) && !invariant;
        let tiles = product.tiles(extents, vectorised);
        let (name, blocks, splits) = if invariant {
            return self.launch_invariant(product, [a, b, out], before, extents, tiles);
        } else if one {
            let [warps, blocks] = extents.warps_of_row(self.device);
            (ONE, blocks, warps)
        } else {
            let [count, splits] = extents.grid(self.device, tiles);
            (tiles.names[product as usize], count.saturating_mul(splits), splits)
        };
        let params = self.params([a, b, out], before, extents, splits)?;
        self.device.kernel(FILE, &[], name)?.launch_blocks(a, blocks, &params)?;
        if one || splits == 1 {
            return Ok(vec![name]);
        }
        self.launch_sum(a, extents, &params)?;
        Ok(vec![name, "linear_sum"])
    }

    /// As [`Self::launch`], with parts of k that do not depend on the rows. Blocks that add all
    /// parts run where there are enough tiles for the device; otherwise each part has blocks.
    fn launch_invariant(
        &self,
        product: Product,
        [a, b, out]: [&'static str; 3],
        before: &'static str,
        extents: Extents,
        tiles: &Tiles,
    ) -> Result<Vec<&'static str>> {
        let parts = extents.invariant_parts(&SMALL);
        let [count, _] = extents.grid(self.device, tiles);
        let params = self.params([a, b, out], before, extents, parts)?;
        if let Some(folded) = tiles.folded.filter(|_| extents.folds(self.device, tiles)) {
            let name = folded[product as usize];
            self.device.kernel(FILE, &[], name)?.launch_blocks(a, count, &params)?;
            return Ok(vec![name]);
        }
        let name = tiles.names[product as usize];
        let blocks = count.saturating_mul(parts);
        self.device.kernel(FILE, &[], name)?.launch_blocks(a, blocks, &params)?;
        if parts == 1 {
            return Ok(vec![name]);
        }
        self.launch_sum(a, extents, &params)?;
        Ok(vec![name, "linear_sum"])
    }

    /// The parameters of a GEMM and of the sum of its parts.
    fn params(
        &self,
        [a, b, out]: [&'static str; 3],
        before: &'static str,
        extents: Extents,
        splits: usize,
    ) -> Result<Params> {
        let params = self.rows(self.rows(CHECK.params(), "a", a), "b", b);
        let params = extents
            .params(self.rows(self.rows(params, "before", before), "out", out), self.views)?;
        how_stored(params, splits, &self.views[out], self.views.get(before))?
            .i32("num_groups", extents.groups)
    }

    /// Adds the parts of k in order.
    fn launch_sum(&self, a: &'static str, extents: Extents, params: &Params) -> Result<()> {
        let chunks = extents
            .rows
            .saturating_mul(extents.columns.div_ceil(CHUNK))
            .saturating_mul(extents.groups);
        let kernel = self.device.kernel(FILE, &[], "linear_sum")?;
        kernel.launch_blocks(a, chunks.div_ceil(SUM_THREADS), params)
    }
}

/// The axes of inputs, weights and outputs of a layer, without and with groups.
const AXES: [&[&str]; 3] = [
    &["num_tokens", "in_features"],
    &["out_features", "in_features"],
    &["num_tokens", "out_features"],
];
const GROUPED_AXES: [&[&str]; 3] = [
    &["num_tokens", "num_groups", "in_features"],
    &["num_groups", "out_features", "in_features"],
    &["num_tokens", "num_groups", "out_features"],
];

/// Checks the tensors of a call.
fn bind<'a>(
    device: &'a Device,
    views: &'a Views,
    products: Products,
    backward: bool,
    grouped: bool,
) -> Result<Call<'a>> {
    let [inputs, weights, outputs] = if grouped { GROUPED_AXES } else { AXES };
    // The addend of the other direction is not read and not changed.
    let tensors = [
        read("x").of(&[DType::Bf16]).axes(inputs).rows(),
        read("w").of(&[DType::Bf16]).axes(weights).rows(),
        write("y").of(&FLOATS).axes(outputs).rows().may_be("y_before").when(!backward),
        if backward {
            read("y_before").of(&FLOATS).axes(outputs)
        } else {
            read("y_before").like("y")
        }
        .rows()
        .optional(),
        read("dy").of(&[DType::Bf16]).axes(outputs).rows().when(backward),
        write("dx").like("x").rows().when(backward),
        write("dw").of(&FLOATS).axes(weights).rows().may_be("dw_before").when(backward),
        if backward {
            read("dw_before").like("dw")
        } else {
            read("dw_before").of(&FLOATS).axes(weights)
        }
        .rows()
        .optional(),
        scratch("workspace", 16),
    ];
    let signature =
        CHECK.signature(views, tensors).wide("num_tokens").extent("num_groups", 1, MAX_GROUPS);
    let signature =
        signature.extent("out_features", 1, MAX_FEATURES).extent("in_features", 1, MAX_FEATURES);
    let mut call = Call { device, signature, views, extents: [0; 3], products, num_groups: None };
    let [num_tokens, out_features, in_features, num_groups] =
        call.signature.bind(["num_tokens", "out_features", "in_features", "num_groups"])?;
    call.extents = [num_tokens, out_features, in_features];
    call.num_groups = grouped.then_some(num_groups);
    let needed = if backward { backward_workspace_bytes } else { forward_workspace_bytes };
    let groups = call.num_groups.unwrap_or(1);
    CHECK.holds(
        "workspace",
        &views["workspace"],
        needed(device, groups, num_tokens, out_features, in_features),
    )?;
    Ok(call)
}

/// Launches `y = y_before + x w^T`; returns the kernels that ran. Its tensors, all with contiguous
/// rows:
///
/// - `x` `[num_tokens, in_features]` and `w` `[out_features, in_features]` bf16;
/// - `y` `[num_tokens, out_features]`, bf16 or f32;
/// - `y_before` like `y`, which may be `y` itself; absent for zeros;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch, a library that fails.
pub fn forward(device: &Device, views: &Views, products: Products) -> Result<Vec<&'static str>> {
    bind(device, views, products, false, false)?.forward()
}

/// [`forward`] of a layer with groups (inference 9), `y[:, g] = y_before[:, g] + x[:, g] w[g]^T`
/// for each group. Returns the kernels that ran. Its tensors are those of [`forward`] with an axis
/// of groups, the second of `x`, `y` and `y_before`, the first of `w`: `x` `[num_tokens,
/// num_groups, in_features]`, `w` `[num_groups, out_features, in_features]`, `y` `[num_tokens,
/// num_groups, out_features]`.
///
/// # Errors
/// As [`forward`]; more than [`MAX_GROUPS`] groups, or none.
pub fn grouped_forward(
    device: &Device,
    views: &Views,
    products: Products,
) -> Result<Vec<&'static str>> {
    bind(device, views, products, false, true)?.forward()
}

/// Launches the gradients `dx = dy w` and `dw = dw_before + dy^T x`; returns the kernels that ran.
/// Its tensors, all with contiguous rows:
///
/// - `x` and `w` as in [`forward`], and `dx` like `x`;
/// - `dy` `[num_tokens, out_features]` bf16;
/// - `dw` like `w`, bf16 or f32, and `dw_before` like `dw`, which may be `dw` itself: the sum over
///   the chunks of tokens before this one; absent for zeros;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, products: Products) -> Result<Vec<&'static str>> {
    bind(device, views, products, true, false)?.backward()
}

/// [`backward`] of a layer with groups, with the axes of [`grouped_forward`]. Returns the kernels
/// that ran.
///
/// # Errors
/// As [`grouped_forward`].
pub fn grouped_backward(
    device: &Device,
    views: &Views,
    products: Products,
) -> Result<Vec<&'static str>> {
    bind(device, views, products, true, true)?.backward()
}

impl Call<'_> {
    fn forward(&self) -> Result<Vec<&'static str>> {
        self.launch(Product::Forward, ["x", "w", "y"], "y_before")
    }

    fn backward(&self) -> Result<Vec<&'static str>> {
        let dx = self.launch(Product::Dx, ["dy", "w", "dx"], "")?;
        Ok([dx, self.launch(Product::Dw, ["dy", "x", "dw"], "dw_before")?].concat())
    }
}

/// The names of the axes of an operand's scales: row by row, block of rows by block, words or
/// values group by group, tiles.
pub(crate) struct ScaleAxes {
    pub plain: &'static [&'static str],
    pub blocks: &'static [&'static str],
    pub words: &'static [&'static str],
    pub groups: &'static [&'static str],
    pub tiles: &'static [&'static str],
}

const X_SCALES: ScaleAxes = ScaleAxes {
    plain: &["num_tokens", "x_groups"],
    blocks: &[],
    words: &["x_words", "x_aligned_rows"],
    groups: &["x_groups", "x_aligned_rows"],
    tiles: &["x_row_tiles", "x_group_tiles", "tile_bytes"],
};
const W_SCALES: ScaleAxes = ScaleAxes {
    plain: &["out_features", "w_groups"],
    blocks: &["w_row_blocks", "w_groups"],
    words: &["w_words", "w_aligned_rows"],
    groups: &["w_groups", "w_aligned_rows"],
    tiles: &["w_row_tiles", "w_group_tiles", "tile_bytes"],
};

impl ScaleAxes {
    /// The axes of these scales.
    pub fn of(&self, scales: Scales) -> &'static [&'static str] {
        match (scales.layout, scales.bytes) {
            (ScaleLayout::Plain, _) if !scales.of_rows => self.blocks,
            (ScaleLayout::Plain, _) => self.plain,
            (ScaleLayout::MnMajor, true) => self.words,
            (ScaleLayout::MnMajor, false) => self.groups,
            (ScaleLayout::Blocked, _) => self.tiles,
        }
    }
}

/// The type and the axes of a tensor of scales.
pub type ScaleTensor = (DType, Vec<(&'static str, usize)>);

impl Quantized {
    /// The types and axes of `x_scales` and `w_scales`.
    pub fn scale_tensors(
        &self,
        num_tokens: usize,
        out_features: usize,
        in_features: usize,
    ) -> [ScaleTensor; 2] {
        let of = |scales: Scales, names: &ScaleAxes| {
            let (dtype, axes) = scales.tensor();
            let extents = axes.into_iter().map(|(_, extent)| extent);
            (dtype, names.of(scales).iter().copied().zip(extents).collect())
        };
        let w_scales = self.w_scales(out_features, in_features);
        [of(self.x_scales(num_tokens, in_features), &X_SCALES), of(w_scales, &W_SCALES)]
    }

    /// Scales that are read, with these axes.
    pub(crate) fn read_scales<'a>(
        name: &'static str,
        dtype: DType,
        axes: &'static [&'static str],
    ) -> Argument<'a> {
        let types: &[DType] = match dtype {
            DType::U8 => &[DType::U8],
            DType::I32 => &[DType::I32],
            _ => &[DType::F32],
        };
        read(name).of(types).axes(axes)
    }

    /// Tokens, features out and features in of a call, from x and w; their other properties are
    /// checked later.
    fn extents_of(&self, views: &Views) -> [usize; 3] {
        let [num_tokens, x_bytes] = extents_of(views, "x");
        let in_features = if self.weights == Weights::Nvfp4 { 2 * x_bytes } else { x_bytes };
        [num_tokens, extents_of(views, "w")[0], in_features]
    }

    fn bind<'a>(&self, views: &'a Views) -> Result<(Signature<'a>, [usize; 3])> {
        let extents @ [num_tokens, out_features, in_features] = self.extents_of(views);
        let (x_axes, w_axes) = match self.weights {
            Weights::Nvfp4 => (&["num_tokens", "code_bytes"], &["out_features", "code_bytes"]),
            Weights::Mxfp4 => (&["num_tokens", "in_features"], &["out_features", "code_bytes"]),
            Weights::Fp8 | Weights::Bf16 => {
                (&["num_tokens", "in_features"], &["out_features", "in_features"])
            }
        };
        let (of_x, of_w) =
            (self.x_scales(num_tokens, in_features), self.w_scales(out_features, in_features));
        let global = self.weights == Weights::Nvfp4;
        let hopper = self.implementation == Implementation::Hopper;
        let rows =
            |argument: Argument<'a>| if hopper { argument.aligned_rows() } else { argument.rows() };
        let tensors = [
            rows(read("x").of(&[DType::U8]).axes(x_axes)).one_stride(),
            rows(read("w").of(&[DType::U8]).axes(w_axes)).one_stride(),
            write("y")
                .of(&FLOATS)
                .axes(&["num_tokens", "out_features"])
                .rows()
                .one_stride()
                .may_be("y_before"),
            read("y_before").like("y").rows().one_stride().optional(),
            // After the tensors that determine their sizes.
            Self::read_scales("x_scales", of_x.tensor().0, X_SCALES.of(of_x)),
            Self::read_scales("w_scales", of_w.tensor().0, W_SCALES.of(of_w)),
            read("x_global_scale").axes(&["one"]).when(global),
            read("w_global_scale").axes(&["one"]).when(global),
            scratch("workspace", 16),
        ];
        let signature = CHECK.signature(views, tensors).wide("num_tokens").extent(
            "out_features",
            1,
            MAX_FEATURES,
        );
        // A byte holds two codes, an access 16 bytes.
        let codes = 1 + usize::from(self.weights == Weights::Mxfp4);
        let bytes = if hopper { 16 } else { 1 };
        let signature = signature.extent("in_features", codes * bytes, MAX_FEATURES);
        let signature = signature.extent("code_bytes", bytes, MAX_FEATURES / 2).given("one", 1);
        let signature = if self.weights == Weights::Mxfp4 {
            signature.given("code_bytes", in_features / 2)
        } else {
            signature
        };
        let scales = self
            .scale_tensors(num_tokens, out_features, in_features)
            .map(|(_, axes)| axes)
            .concat();
        let known =
            scales.into_iter().filter(|(axis, _)| !["num_tokens", "out_features"].contains(axis));
        let mut signature =
            known.fold(signature, |signature, (axis, extent)| signature.given(axis, extent));
        signature.bind([])?;
        Ok((signature, extents))
    }

    /// Why the Hopper kernel does not take a call.
    pub(crate) fn hopper_misfit(&self, vectorised: bool) -> Option<String> {
        if !matches!(self.weights, Weights::Fp8 | Weights::Mxfp4) {
            return Some("the Hopper kernel takes FP8 and MXFP4 weights".into());
        }
        let reason =
            "the Hopper kernel needs rows of x and w at multiples of 16 bytes, whole accesses long";
        (!vectorised).then(|| reason.into())
    }

    /// The path of a Hopper kernel for few tokens, with tiles of this many tokens.
    pub(crate) fn hopper_path(&self, kernel: &str, tokens: usize) -> String {
        match self.weights {
            Weights::Mxfp4 => format!("{kernel}<{tokens}, mxfp4, {}>", self.group),
            _ => format!("{kernel}<{tokens}>"),
        }
    }

    /// Blocks of such a kernel that an SM holds; `HELD` in the kernel source.
    pub(crate) fn hopper_held(&self, tokens: usize) -> usize {
        if self.weights == Weights::Mxfp4 && tokens <= 16 { 2 } else { 1 }
    }

    /// The part of a path after the kernel's name.
    pub(crate) fn suffix(&self) -> String {
        match self.weights {
            Weights::Fp8 => "<fp8>".into(),
            Weights::Nvfp4 => "<nvfp4>".into(),
            _ => format!("<mxfp4, {}>", self.group),
        }
    }
}

/// Tokens of a tile of the Hopper kernels for few tokens, ascending: a call uses the smallest tile
/// that holds all tokens, or the largest.
pub(crate) fn token_tiles(weights: Weights) -> &'static [usize] {
    if weights == Weights::Fp8 { &[16, 64] } else { &[8, 16, 64, 128] }
}

/// The tile of a call.
pub(crate) fn token_tile(weights: Weights, num_tokens: usize) -> usize {
    let tiles = token_tiles(weights);
    tiles.iter().copied().find(|&tokens| num_tokens <= tokens).unwrap_or(tiles[tiles.len() - 1])
}

/// The tile of an expert for which this many rows are expected. Half of a tile of 8 tokens stays
/// unused, because few experts have exactly the expected number. An expert with more rows reads its
/// weights twice, for an eighth fewer instructions.
pub(crate) fn expert_tile(weights: Weights, expected_rows: usize) -> usize {
    token_tile(weights, if expected_rows > 4 { expected_rows.max(9) } else { expected_rows })
}

/// The TMA boxes of the Hopper kernel for many tokens: x and w. `None` where another kernel has to
/// run: few tokens, weights other than FP8, strides for which hardware copies no boxes.
pub(crate) fn large_maps(
    device: &Device,
    views: &Views,
    weights: Weights,
    num_tokens: usize,
) -> Result<Option<[MapWords; 2]>> {
    let few = token_tiles(Weights::Fp8);
    if weights != Weights::Fp8 || num_tokens <= few[few.len() - 1] {
        return Ok(None);
    }
    large_boxes(views).map(|boxes| maps_of(device, boxes)).transpose()
}

/// The same for any kernel: `None` where hardware copies no boxes of x or w.
pub(crate) fn large_boxes(views: &Views) -> Option<[TensorMap; 2]> {
    let [x, w] = ["x", "w"].map(|name| TensorMap::of(&views[name], LARGE_BOX_ROWS));
    Some([x?, w?])
}

/// The device's form of these maps.
pub(crate) fn maps_of(device: &Device, [x, w]: [TensorMap; 2]) -> Result<[MapWords; 2]> {
    Ok([device.tensor_map(&x)?, device.tensor_map(&w)?])
}

/// The last fields of the parameters of quantized linear layers.
pub(crate) fn with_maps(params: Params, maps: Option<[MapWords; 2]>) -> Params {
    let [x, w] = maps.map_or([None; 2], |maps| maps.map(Some));
    params.tensor_map("x_map", x).tensor_map("w_map", w)
}

/// The tiles of the portable kernels.
fn quantized_tiles(num_tokens: usize, vectorised: bool) -> &'static Tiles {
    let [large, small, scalar] = &QUANTIZED;
    match vectorised {
        false => scalar,
        true if num_tokens <= FEW_ROWS => small,
        true => large,
    }
}

/// Bytes of scratch memory that [`forward_quantized`] needs: the most of all kernels.
pub fn quantized_workspace_bytes(
    device: &Device,
    num_tokens: usize,
    out_features: usize,
    in_features: usize,
) -> usize {
    let extents = Product::Forward.extents(num_tokens, out_features, in_features);
    if device.is_invariant() {
        return extents.partial_bytes(extents.quantized_parts());
    }
    let portable = [true, false]
        .map(|vectorised| extents.grid(device, quantized_tiles(num_tokens, vectorised))[1]);
    let few = [Weights::Fp8, Weights::Mxfp4]
        .map(|weights| [token_tile(weights, num_tokens), FEATURE_TILE]);
    let hopper =
        few.into_iter().chain([LARGE_TILE]).map(|tile| extents.hopper_grid(device, tile)[1]);
    portable
        .into_iter()
        .chain(hopper)
        .map(|splits| extents.partial_bytes(splits))
        .max()
        .unwrap_or(0)
}

/// Launches `y = y_before + x w^T` of quantized x and w. Returns the kernels that ran. Its tensors:
///
/// - `x` `[num_tokens, in_features]` u8, e4m3 codes, or for NVFP4 `[num_tokens, in_features / 2]`,
///   two e2m1 codes in a byte, the even one in the low nibble; rows contiguous;
/// - `w` `[out_features, in_features]` u8, or `[out_features, in_features / 2]` for four-bit
///   weights, likewise;
/// - `x_scales` and `w_scales`, of the types and axes of [`Quantized::scale_tensors`], dense: as
///   the `quantize_*` operators write them; their padding is not read;
/// - `x_global_scale` and `w_global_scale` `[1]` f32, for NVFP4: the factors of decoding;
/// - `y` `[num_tokens, out_features]`, bf16 or f32, rows contiguous, and `y_before` like `y`,
///   which may be `y` itself; absent for zeros;
/// - `workspace`, scratch memory of [`quantized_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward_quantized(
    device: &Device,
    views: &Views,
    quantized: Quantized,
) -> Result<Vec<String>> {
    quantized.check(CHECK)?;
    let (signature, [num_tokens, out_features, in_features]) = quantized.bind(views)?;
    let needed = quantized_workspace_bytes(device, num_tokens, out_features, in_features);
    CHECK.holds("workspace", &views["workspace"], needed)?;
    let vectorised = signature.vectorised_rows(&["x", "w"]);
    let misfit = quantized.hopper_misfit(vectorised);
    // Any number of tokens is large enough for it.
    let hopper =
        quantized.implementation.runs_hopper(CHECK, device.environment(), usize::MAX, misfit)?;
    let extents = Product::Forward.extents(num_tokens, out_features, in_features);
    let (tiles, tokens) =
        (quantized_tiles(num_tokens, vectorised), token_tile(quantized.weights, num_tokens));
    let maps =
        if hopper { large_maps(device, views, quantized.weights, num_tokens)? } else { None };
    let [count, splits] = match (hopper, maps) {
        (true, Some(_)) => extents.hopper_grid(device, LARGE_TILE),
        (true, None) => extents.hopper_grid(device, [tokens, FEATURE_TILE]),
        (false, _) => extents.grid(device, tiles),
    };
    let splits = if device.is_invariant() { extents.quantized_parts() } else { splits };
    let params =
        with_maps(quantized_params((views, &signature), &quantized, extents, splits)?, maps);
    let defines = quantized_defines(quantized.weights, quantized.group);
    let units = count.saturating_mul(splits);
    let processors = device.environment().processors as usize;
    let path = if maps.is_some() {
        // A pair of blocks processes two tiles of tokens with the same features.
        let tiles = num_tokens.div_ceil(LARGE_TILE[0]);
        let pairs = tiles.is_multiple_of(2) || tiles >= MANY_TOKEN_TILES;
        let (name, blocks) = match pairs {
            true => (
                "linear_hopper_large_pairs",
                (units / tiles).saturating_mul(tiles.next_multiple_of(2)),
            ),
            false => ("linear_hopper_large", units),
        };
        device
            .kernel(HOPPER_LARGE, &[], name)?
            .launch_clusters("x", blocks, processors, &params)?;
        name.to_owned()
    } else if hopper {
        let defines = hopper_defines(tokens, quantized.weights, quantized.group);
        let held = processors * quantized.hopper_held(tokens);
        device.kernel(HOPPER_FILE, &defines, "linear_hopper")?.launch_blocks(
            "x",
            units.min(held),
            &params,
        )?;
        quantized.hopper_path("linear_hopper", tokens)
    } else {
        let name = tiles.names[0];
        device.kernel(QUANTIZED_FILE, &defines, name)?.launch_blocks("x", units, &params)?;
        name.to_owned() + &quantized.suffix()
    };
    if splits == 1 {
        return Ok(vec![path]);
    }
    let chunks = num_tokens.saturating_mul(out_features.div_ceil(CHUNK));
    let kernel = device.kernel(QUANTIZED_FILE, &defines, "linear_quantized_sum")?;
    kernel.launch_blocks("x", chunks.div_ceil(SUM_THREADS), &params)?;
    Ok(vec![path, "linear_quantized_sum".to_owned() + &quantized.suffix()])
}

fn quantized_params(
    (views, call): (&Views, &Signature),
    quantized: &Quantized,
    extents: Extents,
    splits: usize,
) -> Result<Params> {
    let x_scales = quantized.x_scales(extents.rows, extents.depth);
    let w_scales = quantized.w_scales(extents.columns, extents.depth);
    let tensors = ["x", "w", "x_scales", "w_scales", "x_global_scale", "w_global_scale"];
    let params = call.append_as(call.params(&tensors), "before", "y_before");
    let params = extents.params(call.append_as(params, "out", "y"), views)?;
    let params =
        product_params(params, [x_scales, w_scales])?.flag("scale_bytes", quantized.scale_bytes);
    how_stored(params, splits, &views["y"], views.get("y_before"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_invariant_path_depend_on_columns_and_depth_alone() {
        let parts = |rows: usize, columns: usize, depth: usize| {
            let extents = Extents { groups: 1, rows, columns, depth };
            [extents.invariant_parts(&SMALL), extents.quantized_parts()]
        };
        for (columns, depth, expected) in
            [(1536, 7168, [16, 4]), (65_536, 1536, [1, 1]), (24, 40, [1, 1]), (512, 7168, [28, 4])]
        {
            for rows in [0, 1, 16, 17, 4096] {
                assert_eq!(parts(rows, columns, depth), expected, "{rows} {columns} {depth}");
            }
        }
    }
}
