//! Bugs on purpose, so that a pass means something: [`planted`] by hand, [`generated`] by the hundred, the
//! [`matrix`] of which check saw which of them, and the [`selection`] of those that a commit must run.

pub mod generated;
pub mod matrix;
pub mod planted;
pub mod selection;
