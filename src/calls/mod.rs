//! Operators as functions of a caller's tensors: which arguments they have, and which
//! case declares the tensors of a call. All of it follows from the operators' declarations.
//!
//! - [`fields`]: the fields of a case as a flat list;
//! - [`observed`]: what the launches of a case do with its tensors;
//! - [`signature`]: the arguments of an operator;
//! - [`solve`]: the case of given tensors;
//! - `fit`: the fields of that case.

pub mod fields;
mod fit;
pub mod observed;
pub mod signature;
pub mod solve;
