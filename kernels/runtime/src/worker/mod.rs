//! Processes that work for a device: this program, started again, so that whatever a kernel does
//! to its process ends no more than what was asked for.
//!
//! - [`program`]: such a process, from before `main` on; it never begins the program's own work.
//! - [`process`]: the device's side: starts one, asks it, and says what became of one that does
//!   not answer.
//! - [`link`]: what both send: messages, and the bytes that these carry.
//! - [`failure`]: errors on their way back.
//!
//! The emulator's device asks one for launches, over memory that both have ([`super::emulator`]);
//! a GPU's asks one for all that a device does ([`super::remote`]).

pub mod failure;
pub mod link;
pub mod process;
pub mod program;
