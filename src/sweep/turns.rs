//! Turns of processes that share a GPU: those of their cases that take much of its memory run one after another, since it has
//! not enough for all of them at a time.

use std::fs::File;
use std::io;
use std::path::Path;

use dsv4_kernels::runtime::Environment;

use crate::case::Case;
use crate::operator::registry;

/// The variable that names the file whose lock is the turn, the same for all processes on one GPU.
pub const TURNS: &str = "PARITY_TURNS";

/// Where the case takes much of this GPU and others share it: the turn, which ends when it is dropped.
pub(super) fn wait(case: &Case, environment: &Environment) -> Option<File> {
    let path = std::env::var_os(TURNS)?;
    if !registry::find(&case.operator).is_ok_and(|operator| operator.takes_much(case, environment)) {
        return None;
    }
    // Without a turn the case may lack memory, and says so itself.
    turn(path.as_ref()).inspect_err(|error| tracing::warn!("{}: {error}", path.display())).ok()
}

fn turn(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).append(true).open(path)?;
    file.lock()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs::TryLockError;

    use super::*;

    #[test]
    fn one_has_a_turn_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("turns");
        let first = turn(&path).unwrap();
        let second = File::options().append(true).open(&path).unwrap();
        assert!(matches!(second.try_lock(), Err(TryLockError::WouldBlock)));
        drop(first);
        second.lock().unwrap();
    }
}
