//! Of what needs no second process. Tasks that are processes are tested with the program.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use super::*;

fn step_of(variables: &[(&str, &str)]) -> std::result::Result<Option<Step>, String> {
    let variables: Vec<(String, OsString)> =
        variables.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
    Step::of(|asked| {
        variables.iter().find(|(name, _)| name == asked).map(|(_, value)| value.clone())
    })
}

/// What `srun` sets in task 1 of 4.
const SRUN: [(&str, &str); 6] = [
    ("SLURM_JOB_ID", "7"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_PROCID", "1"),
    ("SLURM_LOCALID", "1"),
];

fn changed(name: &str, value: Option<&str>) -> std::result::Result<Option<Step>, String> {
    let others = SRUN.iter().copied().filter(|(other, _)| *other != name);
    let all: Vec<_> = others.chain(value.map(|value| (name, value))).collect();
    step_of(&all)
}

#[test]
fn only_a_step_with_several_tasks_is_one_and_a_strange_variable_is_named() {
    let step = Step { job: 7, number: 2, task: 1, tasks: 4, hosts: 1, local: 1 };
    assert_eq!(step_of(&SRUN), Ok(Some(step)));
    assert_eq!(step_of(&[]), Ok(None));
    // A batch script, and an allocation.
    let batch = [("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")];
    assert_eq!(step_of(&batch), Ok(None));
    assert_eq!(changed("SLURM_STEP_NUM_TASKS", Some("1")), Ok(None));
    assert_eq!(changed("SLURM_STEP_ID", None), Ok(None));
    let hosts = |value| changed("SLURM_STEP_NUM_NODES", value).unwrap().unwrap().hosts;
    assert_eq!((hosts(None), hosts(Some("3"))), (1, 3));
    for (name, value, said) in [
        ("SLURM_PROCID", Some("-1"), "SLURM_PROCID is \"-1\""),
        ("SLURM_PROCID", Some("4"), "SLURM_PROCID is 4, and SLURM_STEP_NUM_TASKS 4"),
        ("SLURM_PROCID", None, "SLURM_PROCID is not set"),
        ("SLURM_JOB_ID", None, "SLURM_JOB_ID is not set"),
        ("SLURM_STEP_NUM_TASKS", Some("four"), "SLURM_STEP_NUM_TASKS is \"four\""),
    ] {
        let error = changed(name, value).expect_err(name);
        assert!(error.contains(said), "{name}: {error}");
    }
}

#[test]
fn a_rank_has_the_only_gpu_of_its_task_or_that_of_its_number_on_the_host() {
    let uuids = |count: usize| (0..count).map(|gpu| format!("GPU-{gpu}")).collect::<Vec<_>>();
    let ordinal = |count, local| chosen(&uuids(count), local).map(|gpu| gpu.ordinal);
    assert_eq!([ordinal(1, 0), ordinal(1, 3)], [Some(0); 2]);
    assert_eq!([ordinal(4, 3), ordinal(2, 3), ordinal(0, 3)], [Some(3), Some(1), None]);
    // Distinct by their ids, not by their numbers, which are all 0 with one GPU for each task.
    let tasks = |uuids: [&str; 3]| {
        let step = Step { job: 0, number: 0, task: 0, tasks: 3, hosts: 1, local: 0 };
        let known = |uuid: &str| OnceLock::from(Gpu { ordinal: 0, uuid: uuid.to_owned() });
        let gpus = uuids.map(known).into();
        Tasks { step, attended: Vec::new(), gpus, lost: Box::new(|_| {}) }
    };
    let of = |uuids, size| tasks(uuids).gpus_of(size).expect("they are known");
    assert_eq!([of(["a", "b", "a"], 2), of(["a", "b", "a"], 3), of(["a", "b", "c"], 3)], [2, 2, 3]);
}

#[test]
fn a_message_comes_with_its_descriptors_and_half_of_one_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut near, far) = UnixStream::pair().unwrap();
    message::send(&ours, &Request::Start { tag: u64::MAX }, &[far.as_fd(), ours.as_fd()]).unwrap();
    drop(far);
    let (request, descriptors) = message::receive::<Request>(&theirs).unwrap();
    assert!(matches!(request, Request::Start { tag: u64::MAX }), "{request:?}");
    let [far, _] = <[_; 2]>::try_from(descriptors).expect("two descriptors");
    near.write_all(b"over").unwrap();
    let mut got = [0; 4];
    io::Read::read_exact(&mut UnixStream::from(far), &mut got).unwrap();
    assert_eq!(&got, b"over");
    let many = [ours.as_fd(); 9];
    assert!(message::send(&ours, &Request::Gpu, &many).is_err());
    let kind = |bytes: &[u8]| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(bytes).unwrap();
        drop(ours);
        message::receive::<Request>(&theirs).unwrap_err().kind()
    };
    assert_eq!(kind(b""), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind(b"\x09\0\0\0\"Att"), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind(b"\xff\xff\xff\xff"), io::ErrorKind::InvalidData);
    assert!(!message::is_closed(&theirs));
    drop(ours);
    assert!(message::is_closed(&theirs));
}

#[test]
fn a_task_that_does_not_come_is_named_and_so_is_task_0() {
    let step =
        |task| Step { job: 0, number: std::process::id(), task, tasks: 2, hosts: 1, local: task };
    let limit = Duration::from_millis(30);
    let error = Tasks::of(step(0), limit, Box::new(|_| {})).err().expect("no task listens");
    assert!(
        error.to_string().contains("task 1 of 2 of srun: it did not come within 0.03 s"),
        "{error}"
    );
    let error = agent::work(&step(1), limit).expect_err("no task connects");
    assert!(error.to_string().contains("task 0 did not come within 0.03 s"), "{error}");
}
