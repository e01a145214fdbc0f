//! DeepSeek-V4's operators in CUDA C++, and their launchers. `dsv4-runtime` runs them.
//!
//! `kernels/cuda/FAMILY/NAME.cu` is what runs, `kernels/src/FAMILY/NAME.rs` is how it is launched.
//! Nothing here knows the oracles (`reference/`): a kernel cannot borrow its own judge.

mod arguments;
pub mod attention;
pub mod cache;
pub mod experts;
pub mod formats;
pub mod head;
pub mod implementation;
pub mod indexer;
pub mod projections;
pub mod streams;

use dsv4_runtime::{DeviceOptions, SourceTree};
use include_dir::{Dir, include_dir};

static EMBEDDED: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/cuda");

/// The kernel sources that this binary was built with.
///
/// # Panics
/// Where two of them have one name: no test of this repository would pass.
pub fn sources() -> SourceTree {
    SourceTree::from_embedded("the embedded kernels", &EMBEDDED)
        .expect("each kernel file has a name of its own")
}

/// A device of these kernels, in all else as usual.
pub fn device_options() -> DeviceOptions {
    DeviceOptions::of(sources())
}
