//! DeepSeek-V4's operators in CUDA C++, and their launchers. `dsv4-runtime` runs them.
//!
//! `kernels/cuda/FAMILY/NAME.cu` is the kernel, `kernels/src/FAMILY/NAME.rs` its launcher. This
//! crate does not depend on the oracles (`reference/`): a kernel cannot use its own reference.

mod arguments;
pub mod attention;
pub mod cache;
pub mod experts;
pub mod formats;
pub mod head;
pub mod implementation;
pub mod indexer;
pub mod model;
pub mod parallel;
pub mod projections;
pub mod streams;

use std::sync::LazyLock;

use dsv4_runtime::{DeviceOptions, SourceTree};
use include_dir::{Dir, include_dir};

static EMBEDDED: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/cuda");

/// The kernel sources that this binary was built with.
///
/// # Panics
/// If two of them have the same name. No test of this repository would pass then.
pub fn embedded() -> &'static SourceTree {
    static TREE: LazyLock<SourceTree> = LazyLock::new(|| {
        SourceTree::from_embedded("the embedded kernels", &EMBEDDED)
            .expect("each kernel file has a name of its own")
    });
    &TREE
}

/// A copy of [`embedded`], for a device.
pub fn sources() -> SourceTree {
    embedded().clone()
}

/// The options of a device with these kernels; everything else has its default.
pub fn device_options() -> DeviceOptions {
    DeviceOptions::of(sources())
}
