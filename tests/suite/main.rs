//! One binary for every integration test: `cargo test --test suite NAME`.
mod emulator;
