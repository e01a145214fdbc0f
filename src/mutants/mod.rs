//! Bugs on purpose, so that a pass means something: [`planted`] by hand, [`generated`] by the
//! hundred, and the [`matrix`] of which check saw which of them.

pub mod generated;
pub mod matrix;
pub mod planted;
