//! Processes that work for a device: this program, started again. The effects of a kernel on its
//! process then fail only the current request.
//!
//! - [`program`]: such a process, from before `main` on; it never starts the program's own work.
//! - [`process`]: the device's side: starts one, sends requests, and reports the fate of one that
//!   does not answer.
//! - [`link`]: the transport of both sides: messages, and their bytes.
//! - [`failure`]: errors as they are sent back.
//!
//! The emulator's device uses one for launches, over shared memory ([`super::emulator`]); a GPU's
//! device uses one for everything ([`super::remote`]).

pub mod failure;
pub mod link;
pub mod process;
pub mod program;
