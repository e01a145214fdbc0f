//! `parity beside`: times of this project's kernels next to those of public kernels for the same
//! work, and of memory-bound kernels next to a copy of as many bytes.
//!
//! Both sides leave logs ([`log`]). A list of pairs declares which work of one side corresponds to
//! which of the other ([`pairs`]). The page puts them next to each other ([`page`]). Nothing is
//! judged and nothing is typed in.

use std::fmt;
use std::path::Path;

pub mod log;
mod page;
pub mod pairs;
#[cfg(test)]
mod tests;

pub use page::{page, speed};

/// What is wrong, and with which file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    path: String,
    why: String,
}

impl Failure {
    pub(super) fn new(path: &Path, why: &str) -> Self {
        Self { path: path.display().to_string(), why: why.trim().replace('\n', " ") }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}

impl std::error::Error for Failure {}
