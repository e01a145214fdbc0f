//! Compression of keys, and writes to the caches.

pub mod compressor;
pub mod compressor_stream;
pub mod cp_compressor;
pub mod indexer_cache_write;
pub mod kv_cache_write;
pub mod kv_norm_rope_write;
pub(crate) mod paged;
