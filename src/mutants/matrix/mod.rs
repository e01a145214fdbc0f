//! The kill matrix: operator × mutant × check.
//!
//! Planted mutants ([`crate::mutants::planted`]) run on the cases that they name, with every check.
//! Generated ones ([`crate::mutants::generated`]) run until a case kills them, on cases that reach
//! the changed function. These are their operator's saved and edge cases and those of its planted
//! mutants. A mutant that no case kills is equivalent if the compiler makes the same code of it.
//! Each mutant runs in a separate process ([`trial`]). So a mutant with a wild write corrupts only
//! its own heap or CUDA context.
//!
//! | file | content |
//! | --- | --- |
//! | `cases` | the cases, their run on the unmutated kernels, their order for a mutant |
//! | `equivalent` | the list of mutants without effect |
//! | `plan` | which mutants run, from seed, sample and list |
//! | `trial` | one mutant on its cases |
//! | `journal` | the result of each mutant so far, for `--resume` |
//! | `schedule` | many trials in child processes, a time budget |
//! | `session` | the whole run, from what is asked for to what it leaves |
//! | `tally` | killed, survived, kill rates |

pub mod cases;
pub mod equivalent;
pub mod journal;
pub mod plan;
pub mod schedule;
pub mod session;
pub mod tally;
pub mod trial;
