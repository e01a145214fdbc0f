//! Which operator of a run is to blame: each call of a run against the oracle on the very tensors
//! that it read.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `calls` | the calls of a run with their tensors, recorded from a model |
//! | `recorded` | the run of a model whose calls are recorded |
//! | `cases` | the case of an operator that declares a call's tensors |
//! | `numbers` | the numbers of a model's calls, which no tensor tells |
//! | `dump` | calls as files, of this model or of another stack |
//! | `shadow` | the same run without any rounding, call by call: what an error was inherited from |
//! | `summary` | findings by layer and operator, and the growth of the error |
//! | `judge` | each call's own error, held to its budget |
//!
//! The error of a tensor is split. What a call *adds* is its distance from the oracle on the call's
//! own inputs. What it *inherits* is the distance of that from the run without roundings. A choice
//! (an index, a count) is followed, so that no choice among near-ties passes for an error; a choice
//! that is none is a failure of the call that made it.

pub mod calls;
pub mod cases;
pub mod dump;
pub mod judge;
mod numbers;
pub mod recorded;
pub mod shadow;
pub mod summary;
