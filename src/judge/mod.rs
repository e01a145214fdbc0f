//! From a case to its verdict: what ran, the oracle's results, and how far apart the two may be.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `runner` | what runs a kernel: a device of ours, or an external process |
//! | `budget` | the error allowed to each element, derived from the oracle's scatter |
//! | `yardstick` | bounds on a whole tensor: bias, energy, share of equal bits |
//! | `power` | the smallest defects that a verdict would have seen, and what other rules see |
//! | `grid` | the values that a compared tensor can hold, and the error of its last rounding |
//! | `agreement` | metrics of a kernel's tensor against the oracle's |
//! | `failing` | which elements fail a check, axis by axis |
//! | `selection` | indices of a selection, checked against the scores that were selected from |
//! | `triangulation` | the oracle's gradients against finite differences and its own forward pass |
//! | `checks` | every check of a case |
//! | `recheck` | what a timed call wrote |
//! | `turns` | the memory of a GPU that several processes share |
//! | `truth` | the oracle's results for a case, and the bounds that follow |
//! | `truths` | the oracle's results for a case, computed once for many kernels |
//! | `golden_run` | what an independent implementation computed, compared |
//! | `order` | the findings of a failing case, the most useful to a reader first |

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
