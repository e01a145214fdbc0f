//! From a case to its verdict: what ran, what the oracle says, and how far apart the two may be.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `runner` | who runs a kernel: a device of ours, or somebody else's process |
//! | `budget` | the error allowed to each element, derived from the oracle's scatter |
//! | `yardstick` | bounds on a tensor as a whole: bias, energy, share of equal bits |
//! | `power` | the smallest defects that a verdict would have seen, and what other rules see |
//! | `grid` | the numbers that a compared tensor can hold, and what its last rounding is worth |
//! | `agreement` | a kernel's tensor beside the oracle's, in numbers |
//! | `failing` | which elements fail a check, axis by axis |
//! | `selection` | indices of a selection, held to the scores that were selected from |
//! | `triangulation` | the oracle's gradients against finite differences and its own forward pass |
//! | `checks` | every check of a case |
//! | `recheck` | what a timed call wrote |
//! | `turns` | the memory of a GPU that several processes share |
//! | `truth` | what the oracle says of a case, and the bounds that follow |
//! | `truths` | what the oracle says of a case, worked out once for many kernels |
//! | `golden_run` | what an independent implementation computed, compared |
//! | `order` | what a failing case says, in the order in which a person wants it |

pub mod agreement;
pub mod budget;
pub mod checks;
pub mod failing;
pub mod golden_run;
pub mod grid;
pub(crate) mod order;
pub mod power;
pub mod recheck;
pub mod runner;
pub mod selection;
pub mod triangulation;
pub mod truth;
pub mod truths;
pub mod turns;
pub mod yardstick;
