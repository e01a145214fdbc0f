//! The jobs of worker processes, and the initialiser by which a program becomes a worker.

use std::convert::Infallible;
use std::io;

use serde_json::Value;

use crate::worker::link::Link;
use crate::worker::program::{Serve, become_worker};
use crate::{emulator, remote, supervisor};

/// By name.
static JOBS: [(&str, Serve); 2] = [(emulator::serve::JOB, launches), (remote::JOB, device)];

fn launches(start: Value, link: &mut Link) -> io::Result<Infallible> {
    emulator::serve::serve(serde_json::from_value(start)?, link)
}

fn device(start: Value, link: &mut Link) -> io::Result<Infallible> {
    remote::host::serve(serde_json::from_value(start)?, link)
}

// SAFETY of the section: its entries are functions without results that the loader calls before
// `main`, with arguments that this one ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: extern "C" fn() = initialise;

/// Keeps the initialiser in the program: the linker drops unreferenced code.
pub fn is_linked() -> bool {
    std::hint::black_box(&INITIALISER) as *const extern "C" fn() as usize != 0
}

extern "C" fn initialise() {
    become_worker(&JOBS, false);
}

/// What a host calls first where it loads this library ([`crate::process::Host`]). If it was
/// started for a device of this library, or for a command, it works for that and never returns. An
/// initialiser cannot: while a library is loaded, no thread of it can load another one, such as a
/// compiled kernel.
pub fn become_worker_of_host() {
    supervisor::become_supervisor(true);
    become_worker(&JOBS, true);
}
