//! The operators: how the kernel of each is compared with its oracle.

pub mod attention;
pub mod cache;
pub mod contents;
pub mod experts;
pub mod formats;
pub mod head;
pub mod indexer;
pub mod lists;
pub mod projections;
pub mod ranks;
pub mod registry;
pub mod streams;
