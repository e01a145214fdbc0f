//! Ranks with emulated devices, so that all of this is tested without a GPU.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::crew::{Member, Ranks, Terms};
use super::meeting::PIECE;
use super::*;
use crate::remote::RemoteOptions;
use crate::{BackendKind, Contract, Device, DeviceArena, DeviceOptions, HostTensor};

const LIMIT: Duration = Duration::from_secs(60);

fn device() -> Device {
    let options = DeviceOptions::of(crate::testing::kernels());
    Device::open(BackendKind::Emulator, options).expect("the emulator opens")
}

fn ranks(limit: Duration) -> Ranks {
    let cache = crate::cache::ModuleCache::default_dir();
    Ranks::new(BackendKind::Emulator, cache, RemoteOptions { time_limit: limit })
}

fn terms(size: usize) -> Terms {
    Terms { size, delays: None, schedule: None }
}

/// fp32 numbers of one rank, of all magnitudes: their sum depends on the order.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    let mut chance = StdRng::seed_from_u64(rank as u64);
    (0..count)
        .map(|_| (chance.random::<f32>() - 0.5) * 2f32.powi(chance.random_range(-9..9)))
        .collect()
}

fn tensor(numbers: &[f32]) -> HostTensor {
    let bytes = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
    HostTensor { dtype: DType::F32, shape: vec![numbers.len()], bytes }
}

/// What a rank has after one of each collective.
type Held = Vec<HostTensor>;

/// One of each collective of `count` numbers.
fn one_of_each(device: &Device, count: usize) -> Result<Held> {
    let world = device.world().expect("a rank");
    let (rank, size) = (world.rank(), world.size());
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let own = arena.input("own", &tensor(&numbers(rank, count)))?;
    let gathered = arena.output("gathered", DType::F32, &[size * count])?;
    let reduced = arena.output("reduced", DType::F32, &[count])?;
    let summed = arena.output("summed", DType::F32, &[count])?;
    let [left, right] = ["left", "right"].map(|name| arena.output(name, DType::F32, &[count]));
    let (left, right) = (left?, right?);
    let violations = arena.run(|device| {
        let backend = device.backend();
        world.all_gather(&own, &gathered)?;
        world.barrier()?;
        world.reduce_scatter(&gathered, &reduced)?;
        backend.copy(summed.address, own.address, 4 * count)?;
        world.all_reduce(&summed)?;
        // A ring: the last tokens go to the right, the first to the left.
        let (before, after) = ((rank + size - 1) % size, (rank + 1) % size);
        if size > 1 {
            let sends = [(after, own.clone()), (before, summed.clone())];
            world.exchange(&sends, &[(before, left.clone()), (after, right.clone())])?;
        } else {
            backend.copy(left.address, own.address, 4 * count)?;
            backend.copy(right.address, summed.address, 4 * count)?;
        }
        Ok(())
    })?;
    assert!(violations.is_empty(), "{violations:?}");
    [gathered, reduced, summed, left, right].iter().map(|view| arena.download(view)).collect()
}

#[test]
fn collectives_move_every_element_and_add_in_the_order_of_ranks_whatever_delays_them() {
    let device = device();
    // The last count takes several pieces, and no rank's share of one divides it.
    for (size, count) in [(1, 5), (2, 0), (3, 7), (4, PIECE / 4 + 13)] {
        let all: Vec<Vec<f32>> = (0..size).map(|rank| numbers(rank, count)).collect();
        let in_order = |at: usize| all[1..].iter().fold(all[0][at], |sum, of| sum + of[at]);
        let sum = tensor(&(0..count).map(in_order).collect::<Vec<_>>());
        let scaled = |rank: usize| {
            let times = |x: f32| (1..size).fold(x, |sum, _| sum + x);
            tensor(&all[rank].iter().map(|&x| times(x)).collect::<Vec<_>>())
        };
        for delays in [None, Some(1), Some(2)] {
            let held = device.on_ranks(size, delays, |rank| one_of_each(rank, count)).unwrap();
            for (rank, held) in held.iter().enumerate() {
                let left = tensor(&all[(rank + size - 1) % size]);
                let expected =
                    [tensor(&all.concat()), scaled(rank), sum.clone(), left, sum.clone()];
                assert_eq!(held[..], expected, "rank {rank} of {size}, delays {delays:?}");
            }
        }
    }
}

/// The error of a world in which each rank does its own.
fn failed<T: Send + std::fmt::Debug>(
    ranks: &Ranks,
    size: usize,
    work: impl Fn(&Member) -> Result<T> + Sync,
) -> String {
    let start = Instant::now();
    let done = ranks.run(terms(size), &|_| {}, &|member| work(&member));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    done.expect_err("it must fail").to_string()
}

fn view(elements: usize, dtype: DType) -> TensorView {
    TensorView::dense("x", 4096, dtype, &[elements])
}

#[test]
fn ranks_that_call_different_things_get_one_error_that_names_both_places() {
    let ranks = ranks(LIMIT);
    let [first, second] = [line!() + 4, line!() + 5];
    let error = failed(&ranks, 3, |member| {
        let world = &*member.world;
        match world.rank() {
            0 => world.all_gather(&view(4, DType::Bf16), &view(12, DType::Bf16)),
            _ => world.barrier(),
        }
    });
    for part in [
        "rank 1 of 3, barrier at ",
        "it calls this, where rank 0 calls all_gather of 4 bf16 at ",
        &format!("tests.rs:{first}"),
        &format!("tests.rs:{second}"),
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let counts = failed(&ranks, 2, |member| {
        let elements = 4 + member.world.rank();
        member.world.all_gather(&view(elements, DType::F32), &view(2 * elements, DType::F32))
    });
    assert!(counts.contains("all_gather of 4 f32") && counts.contains("of 5 f32"), "{counts}");
    let types = failed(&ranks, 2, |member| {
        let dtype = [DType::F32, DType::I32][member.world.rank()];
        member.world.all_gather(&view(4, dtype), &view(8, dtype))
    });
    assert!(types.contains("of 4 f32 at") && types.contains("of 4 i32 at"), "{types}");
    let halo = failed(&ranks, 3, |member| match member.world.rank() {
        0 => member.world.exchange(&[(1, view(4, DType::F32))], &[]),
        1 => member.world.exchange(&[], &[(0, view(3, DType::F32))]),
        _ => member.world.exchange(&[], &[]),
    });
    assert!(halo.contains("sends [0, 4, 0]") && halo.contains("receives [3, 0, 0]"), "{halo}");
}

#[test]
fn arguments_that_do_not_fit_are_refused_by_name_before_anybody_is_met() {
    let ranks = ranks(LIMIT);
    let refused =
        |call: fn(&dyn World) -> Result<()>| failed(&ranks, 2, |member| call(&*member.world));
    let strided = |world: &dyn World| {
        let strided = TensorView { strides: vec![9, 1], shape: vec![2, 4], ..view(8, DType::F32) };
        world.all_gather(&strided, &view(16, DType::F32))
    };
    assert!(refused(strided).contains("`source`: strides [9, 1]"));
    let short = |world: &dyn World| world.all_gather(&view(4, DType::F32), &view(7, DType::F32));
    assert!(refused(short).contains("`target`: 7 f32 must be 2 of 4 f32"));
    let bf16 =
        |world: &dyn World| world.reduce_scatter(&view(4, DType::Bf16), &view(2, DType::Bf16));
    assert!(refused(bf16).contains("sums over ranks are fp32"));
    let peer = |world: &dyn World| world.exchange(&[(2, view(1, DType::F32))], &[]);
    assert!(refused(peer).contains("rank 2 is no other of the 2 ranks"));
    let none = ranks.run(terms(0), &|_| {}, &|_| Ok(())).expect_err("no rank");
    assert!(none.to_string().contains("0 must be 1 to 64"), "{none}");
}

#[test]
fn a_rank_that_fails_panics_or_ends_early_ends_the_others_and_is_named() {
    let ranks = ranks(LIMIT);
    let barrier_unless = |member: &Member, rank: usize| {
        member.world.barrier()?;
        if member.world.rank() == rank { Ok(true) } else { member.world.barrier().map(|()| false) }
    };
    let early = failed(&ranks, 3, |member| barrier_unless(member, 1));
    assert!(
        early.contains("rank 1 of 3, barrier at") && early.contains("it ended without it"),
        "{early}"
    );
    let panicked = failed(&ranks, 3, |member| match barrier_unless(member, 2)? {
        true => panic!("no more"),
        false => Ok(()),
    });
    assert!(
        panicked.contains("rank 2 of 3") && panicked.contains("panicked: no more"),
        "{panicked}"
    );
    assert!(panicked.contains("in or after barrier at"), "{panicked}");
    let argument = failed(&ranks, 2, |member| match barrier_unless(member, 0)? {
        true => Err(RuntimeError::argument("x", "y", "no")),
        false => Ok(()),
    });
    assert!(argument.contains("argument `y`: no"), "the cause, not what followed: {argument}");
    // Nothing of it is left for the next world.
    let done = ranks.run(terms(3), &|_| {}, &|member| member.world.barrier());
    assert!(done.is_ok(), "{done:?}");
}

/// The processes with these numbers, and all that they started.
fn family(of: &[u32]) -> BTreeMap<u32, String> {
    let stat = |id: u32| std::fs::read_to_string(format!("/proc/{id}/stat")).ok();
    let parents: Vec<(u32, u32, String)> = std::fs::read_dir("/proc")
        .expect("processes")
        .filter_map(|entry| {
            let id = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let text = stat(id)?;
            let (_, rest) = text.rsplit_once(')')?;
            let mut fields = rest.split_whitespace();
            let state = fields.next()?.to_owned();
            Some((id, fields.next()?.parse().ok()?, state))
        })
        .collect();
    let mut found: BTreeMap<u32, String> = BTreeMap::new();
    loop {
        let before = found.len();
        for (id, parent, state) in &parents {
            if state != "Z" && (of.contains(id) || found.contains_key(parent)) {
                found.insert(*id, state.clone());
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

fn kill(process: u32, signal: i32) {
    // SAFETY: a process of this test's ranks.
    unsafe { libc::kill(process as libc::pid_t, signal) };
}

/// Waits until none of these processes is left.
fn gone(processes: &BTreeMap<u32, String>) -> bool {
    let start = Instant::now();
    let ids: Vec<u32> = processes.keys().copied().collect();
    while start.elapsed() < Duration::from_secs(10) {
        if family(&ids).is_empty() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Collectives until something ends them.
fn endless(member: &Member, came: &AtomicUsize) -> Result<()> {
    let device = &member.device;
    let place = |name, bytes| device.allocate(name, bytes, crate::Placement::FlushBack);
    let (own, all) = (place("own", 4096)?, place("all", 3 * 4096)?);
    let view = |address, elements| TensorView::dense("x", address, DType::F32, &[elements]);
    device.upload(own.address, &[0; 4096])?;
    let (own, all) = (view(own.address, 1024), view(all.address, 3 * 1024));
    loop {
        member.world.all_gather(&own, &all)?;
        came.fetch_add(1, Ordering::Relaxed);
        member.world.reduce_scatter(&all, &own)?;
    }
}

use crate::backend::Backend as _;

#[test]
fn thirty_kills_at_random_moments_hang_no_rank_and_leave_no_process() {
    let mut chance = StdRng::seed_from_u64(60);
    for turn in 0..30 {
        let ranks = ranks(LIMIT);
        let (victim, came) = (chance.random_range(0..3usize), AtomicUsize::new(0));
        let wait = Duration::from_micros(chance.random_range(0..120_000));
        let (family_of, killed) = (Mutex::new(BTreeMap::new()), Mutex::new(None));
        let error = std::thread::scope(|scope| {
            let started = |processes: &[u32]| {
                let processes = processes.to_vec();
                let (family_of, killed) = (&family_of, &killed);
                scope.spawn(move || {
                    std::thread::sleep(wait);
                    *family_of.lock().unwrap() = family(&processes);
                    *killed.lock().unwrap() = Some(Instant::now());
                    kill(processes[victim], libc::SIGKILL);
                });
            };
            ranks.run(terms(3), &started, &|member| endless(&member, &came)).expect_err("killed")
        });
        let took = killed.lock().unwrap().expect("it was killed").elapsed();
        assert!(took < Duration::from_secs(10), "turn {turn}: {took:?}");
        let text = error.to_string();
        let names = text.contains(&format!("rank {victim} of 3")) && text.contains("signal 9");
        let collective = ["all_gather of", "reduce_scatter of", "before its first collective"];
        assert!(names && collective.iter().any(|part| text.contains(part)), "turn {turn}: {text}");
        let family = family_of.into_inner().unwrap();
        assert!(family.len() >= 3, "turn {turn}: {family:?}");
        assert!(gone(&family), "turn {turn}: some of {family:?} are left");
    }
}

#[test]
fn a_rank_that_stalls_is_named_within_the_limit_and_its_process_is_ended() {
    let ranks = ranks(Duration::from_secs(2));
    let (came, all) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let start = Instant::now();
    let error = std::thread::scope(|scope| {
        let started = |processes: &[u32]| {
            let (processes, all, came) = (processes.to_vec(), &all, &came);
            scope.spawn(move || {
                while came.load(Ordering::Relaxed) < 3 && start.elapsed() < LIMIT {
                    std::thread::sleep(Duration::from_millis(5));
                }
                *all.lock().unwrap() = family(&processes);
                kill(processes[1], libc::SIGSTOP);
            });
        };
        ranks.run(terms(3), &started, &|member| endless(&member, &came)).expect_err("stalled")
    });
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let text = error.to_string();
    assert!(text.contains("rank 1 of 3") && text.contains("did not come within 2 s"), "{text}");
    assert!(text.contains("its last collective was"), "{text}");
    assert!(gone(&all.into_inner().unwrap()), "a process is left");
}

#[test]
fn processes_of_ranks_start_once_and_serve_worlds_of_any_size() {
    let device = device();
    assert!(device.processes_of_ranks().is_empty() && device.world().is_none());
    let sizes = |size| {
        let size_of = |rank: &Device| Ok(rank.world().expect("a rank").size());
        device.on_ranks(size, None, size_of).expect("a world")
    };
    assert_eq!(sizes(3), [3; 3]);
    let three = device.processes_of_ranks();
    assert_eq!((three.len(), sizes(2), sizes(3)), (3, vec![2; 2], vec![3; 3]));
    assert_eq!(device.processes_of_ranks(), three);
    assert_eq!(sizes(4), [4; 4]);
    assert_eq!(device.processes_of_ranks()[..3], three);
    let nested = device.on_ranks(1, None, |rank| rank.on_ranks(1, None, |_| Ok(())).map(drop));
    assert!(nested.is_err(), "a rank has no ranks of its own");
}
