//! Bugs on purpose, so that a pass means something. [`planted`] ones are written by hand,
//! [`generated`] ones come from syntax trees by the hundred. The [`matrix`] shows which check saw
//! which mutant.

pub mod generated;
pub mod matrix;
pub mod planted;
