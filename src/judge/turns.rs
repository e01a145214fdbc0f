//! Turns of processes, or of threads with one device each, that share the memory of a GPU and of
//! the machine. A kernel that needs much of the first, and a case that needs much of the second,
//! wait until that much is free.
//!
//! A memory is divided into places of some GiB. Each place is a file, and the lock of the file is
//! the right to the place. A process that waits for places also holds the lock of one more file,
//! the queue, so it comes before all later ones. So no process waits for a place of another process
//! that waits as well. A case has its places of the machine before its kernels ask for those of the
//! GPU, so no two processes wait for each other's.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The variable that names the folder of a GPU's places, the same for all processes on it.
pub const TURNS: &str = "PARITY_TURNS";

/// The variable that names the folder of the places of the machine's memory.
pub const MACHINE_TURNS: &str = "PARITY_MACHINE_TURNS";

/// Bytes of a GPU's memory in one place.
const GPU_PLACE: u64 = 4 << 30;

/// Bytes of the machine's memory in one place.
const MACHINE_PLACE: u64 = 1 << 30;

/// A kernel or a case that needs no more memory than this takes it without a place. All processes
/// may do so at the same time.
const UNASKED: u64 = 1 << 30;

/// The file that is locked by the process that waits for places.
const QUEUE: &str = "queue";

/// How often a waiting process looks for a free place.
const PACE: Duration = Duration::from_millis(2);

/// A process that waited longer logs it (`PARITY_LOG=info`).
const WORTH_SAYING: Duration = Duration::from_millis(500);

/// Makes the folder for a GPU of that many bytes that that many processes share, with at least one
/// place. An eighth of the memory is left to contexts and modules.
///
/// # Errors
/// A folder or file that cannot be made.
pub fn prepare(folder: &Path, bytes: u64, processes: u64) -> io::Result<()> {
    make_places(folder, bytes - bytes / 8, processes, GPU_PLACE)
}

/// Makes the folder for that many bytes of the machine's memory, as [`prepare`].
///
/// # Errors
/// A folder or file that cannot be made.
pub fn prepare_machine(folder: &Path, bytes: u64, processes: u64) -> io::Result<()> {
    make_places(folder, bytes, processes, MACHINE_PLACE)
}

fn make_places(folder: &Path, bytes: u64, processes: u64, place: u64) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let places = bytes.saturating_sub(processes.saturating_mul(UNASKED)) / place;
    File::create(folder.join(QUEUE))?;
    for place in 0..places.max(1) {
        File::create(place_of(folder, place))?;
    }
    Ok(())
}

/// The folder through which threads of this process share a GPU.
static OF_THREADS: OnceLock<PathBuf> = OnceLock::new();

/// Makes all threads of this process take turns by a folder that is [prepared](prepare), whatever
/// the variable holds; the first folder stays.
pub fn share(folder: PathBuf) {
    let _ = OF_THREADS.set(folder);
}

fn place_of(folder: &Path, place: u64) -> PathBuf {
    folder.join(place.to_string())
}

/// Places that are held until this is dropped.
pub(crate) struct Turn {
    _places: Vec<File>,
}

/// The places of this GPU, once they are free. `None` unless other processes share the GPU and
/// `room` bytes, which nothing else needs, are a large part of it.
pub(super) fn wait(room: impl FnOnce() -> u64) -> Option<Turn> {
    let folder = OF_THREADS
        .get()
        .cloned()
        .or_else(|| dsv4_runtime::process::variable(TURNS).map(PathBuf::from))?;
    wait_in(&folder, room(), GPU_PLACE, "the GPU")
}

/// The places of the machine's memory for a case that takes `room` bytes, once they are free.
/// `None` unless other processes share it and the case takes much.
pub(crate) fn wait_on_machine(room: impl FnOnce() -> u64) -> Option<Turn> {
    let folder = dsv4_runtime::process::variable(MACHINE_TURNS).map(PathBuf::from)?;
    wait_in(&folder, room(), MACHINE_PLACE, "the machine")
}

fn wait_in(folder: &Path, room: u64, place: u64, of: &str) -> Option<Turn> {
    if room <= UNASKED {
        return None;
    }
    let begun = Instant::now();
    // Without a turn memory may run out, and that reports itself.
    let turn = turn(folder, room.div_ceil(place))
        .inspect_err(|error| tracing::warn!("{}: {error}", folder.display()));
    let seconds = begun.elapsed();
    if seconds > WORTH_SAYING {
        let (seconds, room) = (seconds.as_secs_f64(), room >> 30);
        tracing::info!("waited {seconds:.1} s for {room} GiB of the memory of {of}");
    }
    turn.ok()
}

/// That many places, or all that exist.
fn turn(folder: &Path, wanted: u64) -> io::Result<Turn> {
    let open = |path: &Path| File::options().append(true).open(path);
    let _queue = open(&folder.join(QUEUE)).and_then(|queue| queue.lock().map(|()| queue))?;
    let paths = (0..).map(|place| place_of(folder, place)).take_while(|path| path.exists());
    let mut free = paths.map(|path| open(&path)).collect::<io::Result<Vec<_>>>()?;
    let wanted = free.len().min(usize::try_from(wanted).unwrap_or(usize::MAX));
    let mut places = Vec::new();
    loop {
        for place in std::mem::take(&mut free) {
            match place.try_lock() {
                Ok(()) if places.len() < wanted => places.push(place),
                // Dropped, the place is free again.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => free.push(place),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        if places.len() == wanted {
            return Ok(Turn { _places: places });
        }
        std::thread::sleep(PACE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn free_places(folder: &Path) -> usize {
        let free = |place: &u64| {
            File::open(place_of(folder, *place)).is_ok_and(|place| place.try_lock().is_ok())
        };
        (0..).take_while(|&place| place_of(folder, place).exists()).filter(free).count()
    }

    #[test]
    fn cases_have_the_places_that_they_take_and_others_what_is_left() {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path(), 64 << 30, 16).unwrap();
        assert_eq!(
            free_places(dir.path()),
            10,
            "seven eighths of 64 GiB without 16, in places of 4"
        );
        let large = turn(dir.path(), 7).unwrap();
        assert_eq!(free_places(dir.path()), 3);
        let small = turn(dir.path(), 2).unwrap();
        assert_eq!(free_places(dir.path()), 1);
        drop((large, small));
        assert_eq!(free_places(dir.path()), 10);
        let all = turn(dir.path(), 99).unwrap();
        assert_eq!(free_places(dir.path()), 0, "who wants more than there are has all");
        drop(all);
    }

    #[test]
    fn who_wants_more_than_is_free_waits_until_it_is_and_nobody_overtakes_it() {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path(), 32 << 30, 4).unwrap();
        let first = turn(dir.path(), 4).unwrap();
        let (sender, order) = mpsc::channel();
        let waiter = |wanted: u64, sender: mpsc::Sender<u64>| {
            let folder = dir.path().to_owned();
            std::thread::spawn(move || {
                let turn = turn(&folder, wanted).unwrap();
                sender.send(wanted).unwrap();
                drop(turn);
            })
        };
        let large = waiter(6, sender.clone());
        // The large one holds the queue once it has taken the two free places.
        while free_places(dir.path()) > 0 {
            std::thread::sleep(PACE);
        }
        let small = waiter(1, sender);
        std::thread::sleep(20 * PACE);
        assert!(order.try_recv().is_err(), "neither has what it wants");
        drop(first);
        [large, small].into_iter().for_each(|waiter| waiter.join().unwrap());
        assert_eq!(order.iter().collect::<Vec<_>>(), [6, 1]);
    }

    #[test]
    fn the_memory_of_a_machine_has_smaller_places_and_nothing_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        prepare_machine(dir.path(), 12 << 30, 2).unwrap();
        assert_eq!(free_places(dir.path()), 10);
        assert!(wait_in(dir.path(), 1 << 30, MACHINE_PLACE, "it").is_none());
        let held = wait_in(dir.path(), (5 << 30) + 1, MACHINE_PLACE, "it");
        assert_eq!(free_places(dir.path()), 4);
        drop(held);
    }

    #[test]
    fn a_gpu_with_little_memory_has_one_place() {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path(), 8 << 30, 64).unwrap();
        assert_eq!(free_places(dir.path()), 1);
    }
}
