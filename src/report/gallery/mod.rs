//! `parity gallery`: public kernels under this harness, on one page.
//!
//! A file lists libraries and their kernels, each with the worker that serves it ([`list`]). Every
//! kernel is judged as `parity external` does; the page puts the results together ([`page`]): what
//! agrees, how much of the budget it uses, what errors the verdicts would have seen, which bits
//! depend on the batch, and the times of `parity beside` where both were measured.

pub mod list;
pub mod page;
#[cfg(test)]
mod tests;
