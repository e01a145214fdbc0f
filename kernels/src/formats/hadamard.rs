//! `hadamard`: launcher of `kernels/cuda/formats/hadamard.cu` and `hadamard_codes.cu` (inference
//! 5.4, 7, 7.1).

use serde::{Deserialize, Serialize};

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "hadamard.cu";
const CODES_FILE: &str = "hadamard_codes.cu";
const CHECK: Arguments = Arguments { operator: "hadamard" };
/// Length of a row.
pub const DIM: usize = 128;
/// Rows of a block of either kernel, or of one iteration: one for four of its lanes, or for each.
const ROWS_PER_BLOCK: usize = 32;

/// How the transform is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stored {
    /// As values of the input's type.
    Values,
    /// As e2m1 codes with an e8m0 scale for each 32 of them.
    E2m1,
    /// As e4m3 codes with an fp32 scale for each row.
    E4m3,
}

impl Stored {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Values, Self::E2m1, Self::E4m3];

    fn define(self) -> (&'static str, String) {
        ("STORED", (self as usize).to_string())
    }

    /// Bytes of a row's codes.
    pub fn code_bytes(self) -> usize {
        match self {
            Self::Values => 0,
            Self::E2m1 => DIM / 2,
            Self::E4m3 => DIM,
        }
    }
}

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    let with = |stored: Stored| {
        let define = |(name, value): (&str, String)| (name.to_owned(), value);
        modules_of_floats(FILE, &["ELEMENT"]).into_iter().map(move |(file, mut defines)| {
            defines.push(define(stored.define()));
            (file, defines)
        })
    };
    let codes = |stored: Stored| module(CODES_FILE, &[stored.define()]);
    Stored::ALL.into_iter().flat_map(with).chain([Stored::E2m1, Stored::E4m3].map(codes)).collect()
}

/// Launches the transform, or its `backward`. Returns the kernel that ran. Its tensors:
///
/// - `x` `[num_rows, 128]`, bf16 or f32, rows contiguous; in the backward it is `dy`;
/// - `y` of the same type and shape, rows contiguous, which may be `x` itself; in the backward it
///   is `dx`, which may be `dy`;
/// - instead of `y` `codes` `[num_rows, 64]` (e2m1, the even one of two in the low nibble) or
///   `[num_rows, 128]` (e4m3) u8, rows contiguous;
/// - with e2m1 `scale_bytes` `[num_rows, 4]` u8, e8m0; with e4m3 `scales` `[num_rows]` f32.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn launch(
    device: &Device,
    views: &Views,
    stored: Stored,
    backward: bool,
) -> Result<&'static str> {
    let (x, y) = if backward { ("dy", "dx") } else { ("x", "y") };
    let (values, e2m1, e4m3) =
        (stored == Stored::Values, stored == Stored::E2m1, stored == Stored::E4m3);
    // The backward does not read it, and leaves it unchanged.
    let given = read("x").of(&FLOATS).axes(&["num_rows", "head_dim"]).rows();
    let tensors = [
        if backward { given.optional() } else { given },
        write("y").like("x").rows().may_be("x").when(values && !backward),
        read("dy").of(&FLOATS).axes(&["num_rows", "head_dim"]).rows().when(backward),
        write("dx").like("dy").rows().may_be("dy").when(backward),
        write("codes").of(&[DType::U8]).axes(&["num_rows", "code_bytes"]).rows().when(!values),
        write("scale_bytes").of(&[DType::U8]).axes(&["num_rows", "num_groups"]).when(e2m1),
        write("scales").axes(&["num_rows"]).when(e4m3),
    ];
    let signature = CHECK.signature(views, tensors).wide("num_rows").given("head_dim", DIM);
    let mut call = signature.given("code_bytes", stored.code_bytes()).given("num_groups", DIM / 32);
    let [num_rows] = call.bind(["num_rows"])?;
    let vectorised = call.vectorised();
    let (file, name) = match vectorised {
        true if !values && views[x].dtype == DType::Bf16 => (CODES_FILE, "hadamard_codes"),
        true => (FILE, "hadamard_vector"),
        false => (FILE, "hadamard_scalar"),
    };
    let mut params = call.append_as(CHECK.params(), "x", x);
    let mut defines = vec![stored.define()];
    if file == FILE {
        params = call.append_as(params, "y", y);
        defines.extend(element_types(&[("ELEMENT", views[x].dtype)]));
    }
    let params = call.append(params, &["codes", "scale_bytes", "scales"]);
    let params = params.i64("num_rows", num_rows)?;
    let kernel = device.kernel(file, &defines, name)?;
    // Blocks of `hadamard_codes` run several iterations.
    let resident =
        if file == CODES_FILE { kernel.resident_blocks(device.environment()) } else { usize::MAX };
    kernel.launch_blocks("x", num_rows.div_ceil(ROWS_PER_BLOCK).min(resident), &params)?;
    Ok(name)
}
