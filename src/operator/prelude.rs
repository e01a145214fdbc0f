//! The imports of an operator's file: declarations, shared case fields, and strategies.

pub use dsv4_reference::Result as OracleResult;
pub use dsv4_reference::precision::Rounding;
pub use dsv4_reference::{Convention, Conventions, Named};
pub use dsv4_runtime::{DType, Device, Environment, HostTensor, RuntimeError, Views};
pub use proptest::prelude::*;
pub use proptest::sample::select;
pub use serde::{Deserialize, Serialize};
pub use serde_json::json;

pub use super::batches::{Batches, Cut};
pub use super::benchmarks::{Benchmark, DRAWN, Direction, Reduced, on_gpu};
pub use super::declaration::{Specs, axis, gradient, input, output, scratch, upstream};
pub use super::declared::{
    About, Launches, Operator, Refused, finite, not_empty, positive, refuse,
};
pub use super::golden::{self, Golden, Reading};
pub use super::laws::{Laws, Variant};
pub use super::tensors::{Bound, Tensors};
pub use super::{ModuleSpecification, Profile, Relation, Same};
pub use crate::case::{Distribution, Draw};
pub use crate::operator::fields::{Aliasing, Data, Float, Postfix, matrix};
pub use crate::record::{BatchAxis, Family};
