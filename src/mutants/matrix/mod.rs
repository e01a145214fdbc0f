//! The kill matrix: operator × mutant × check.
//!
//! Planted mutants ([`crate::mutants::planted`]) run on the cases that they name, with every
//! check. Generated ones ([`crate::mutants::generated`]) run on their operator's remembered and
//! edge cases and on those of its planted mutants, where these reach the changed function, until
//! one kills them; one that none kills is equivalent if the compiler makes the same code of it.
//! Each mutant runs in a process of its own ([`trial`]): one that writes where it must not spoils
//! nothing but itself, be it a heap or a CUDA context.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `cases` | the cases, their run on the unmutated kernels, their order for a mutant |
//! | `equivalent` | the list of mutants without effect |
//! | `plan` | which mutants, from seed, sample and list |
//! | `trial` | one mutant on its cases |
//! | `journal` | what became of each so far, for `--resume` |
//! | `schedule` | many trials in child processes, a time budget |
//! | `tally` | killed, survived, kill rates |

pub mod cases;
pub mod equivalent;
pub mod journal;
pub mod plan;
pub mod schedule;
pub mod tally;
pub mod trial;
