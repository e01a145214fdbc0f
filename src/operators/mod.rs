//! The operators: how each one's kernel and oracle are compared.

pub mod attention;
pub mod cache;
pub mod contents;
pub mod experts;
pub mod formats;
pub mod head;
pub mod indexer;
pub mod lists;
pub mod projections;
pub mod registry;
pub mod streams;
