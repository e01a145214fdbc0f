//! The job array of `fixtures/sharding`, and ranks in the tasks of `srun`, on a real Slurm: a
//! controller, a node daemon and munge, from Debian's packages `slurm-wlm` and `munge`. A test
//! starts them on this machine and ends them.
//!
//! A node daemon starts jobs as their owners, so this needs root. Where something is missing the
//! test is skipped, and the skip is reported and counted. With `PARITY_REQUIRE_SLURM=1` it fails
//! instead.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dsv4_parity::record::Report;

use crate::rank_processes::{self, SWEEP};
use crate::shard::{wait_for_lines, without_times};
use crate::{command_line, support};

/// Time limit of operations that usually take a second or two.
const LIMIT: Duration = Duration::from_secs(40);

const PROGRAMS: [&str; 8] =
    ["munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo"];

/// Where Debian installs daemons, which may not be on the path.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    dirs.map(|dir: PathBuf| dir.join(name)).find(|file| file.is_file())
}

/// Why a cluster is not possible here.
fn obstacle() -> Option<String> {
    if let Some(name) = PROGRAMS.iter().find(|name| program(name).is_none()) {
        return Some(format!("`{name}` is not installed (Debian: slurm-wlm, munge)"));
    }
    let owner = std::fs::metadata("/proc/self").map(|process| process.uid());
    (owner.ok() != Some(0)).then(|| "slurmd needs root".to_owned())
}

/// Reports and counts a skip on the real standard error, which the test runner does not capture.
fn skip(why: &str) {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    assert!(
        std::env::var_os("PARITY_REQUIRE_SLURM").is_none(),
        "PARITY_REQUIRE_SLURM is set, but {why}"
    );
    let number = 1 + SKIPPED.fetch_add(1, Ordering::Relaxed);
    writeln!(std::io::stderr(), "skipped (number {number}): no Slurm to run on: {why}")
        .expect("standard error takes a line");
}

/// A cluster of one node.
struct Cluster {
    daemons: Vec<Child>,
    dir: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let mut cluster = Self { daemons: Vec::new(), dir };
        for folder in ["state", "spool"] {
            std::fs::create_dir(cluster.path(folder)).expect("a folder");
        }
        let mut key = [0u8; 128];
        let mut random = std::fs::File::open("/dev/urandom").expect("random bytes");
        random.read_exact(&mut key).expect("random bytes");
        std::fs::write(cluster.path("munge.key"), key).expect("the key is written");
        // munged rejects a key that others can read.
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(cluster.path("munge.key"), private).expect("the key is private");
        let option = |name: &str, file: &str| format!("--{name}={}", cluster.path(file).display());
        let munge = [
            option("key-file", "munge.key"),
            option("socket", "munge.socket"),
            option("pid-file", "munge.pid"),
            option("seed-file", "munge.seed"),
            "--foreground".into(),
            "--force".into(),
        ];
        cluster.daemon("munged", &munge);
        cluster.wait_until("munged listens", |cluster| cluster.path("munge.socket").exists());
        std::fs::write(cluster.path("slurm.conf"), cluster.configuration())
            .expect("slurm.conf is written");
        std::fs::write(cluster.path("cgroup.conf"), "CgroupPlugin=cgroup/v1\n")
            .expect("cgroup.conf is written");
        cluster.daemon("slurmctld", &["-D".into(), "-i".into()]);
        cluster.daemon("slurmd", &["-D".into()]);
        cluster.wait_until("the node is idle", |cluster| {
            cluster.output("sinfo", &["-h", "-o", "%t"]) == "idle"
        });
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configuration(&self) -> String {
        // Both ports stay bound until both are known, so that they differ.
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [controller, node] = listeners.map(|l| l.local_addr().expect("an address").port());
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
        let host = host.trim().split('.').next().unwrap_or_default().to_owned();
        let dir = self.dir.path().display();
        format!(
            "ClusterName=parity\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmdPort={node}\n\
             SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=socket={dir}/munge.socket\n\
             CredType=cred/munge\nStateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool\n\
             SlurmctldPidFile={dir}/slurmctld.pid\nSlurmdPidFile={dir}/slurmd.pid\n\
             SlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/slurmd.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n\
             MpiDefault=none\nSwitchType=switch/none\nSchedulerType=sched/builtin\n\
             SchedulerParameters=sched_interval=1,batch_sched_delay=0\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nReturnToService=2\nSlurmdParameters=config_overrides\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=3 State=UNKNOWN\n\
             PartitionName=parity Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(program(name).expect("it was found before"));
        command.env("SLURM_CONF", self.path("slurm.conf")).current_dir(self.dir.path());
        command
    }

    fn daemon(&mut self, name: &str, arguments: &[String]) {
        let log = std::fs::File::create(self.path(&format!("{name}.out"))).expect("a log");
        let also = log.try_clone().expect("a log");
        let mut command = self.command(name);
        command.args(arguments).stdin(Stdio::null()).stdout(log).stderr(also);
        self.daemons.push(command.spawn().expect("the daemon starts"));
    }

    fn output(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.command(name).args(arguments).output().expect("the program runs");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn wait_until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            assert!(start.elapsed() < LIMIT, "waited in vain until {what}:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn logs(&self) -> String {
        let files = std::fs::read_dir(self.dir.path()).expect("the scratch directory");
        let mut text = String::new();
        for path in files.flatten().map(|file| file.path()) {
            if path.extension().is_some_and(|extension| extension == "out" || extension == "log") {
                text += &format!(
                    "--- {}\n{}\n",
                    path.display(),
                    std::fs::read_to_string(&path).unwrap_or_default()
                );
            }
        }
        text
    }

    /// Submits the example script; returns the job's number.
    fn submit(&self, environment: &[(&str, &str)], options: &[&str], arguments: &[&str]) -> String {
        let script = support::fixtures().join("sharding/parity.sbatch");
        let mut command = self.command("sbatch");
        command.env("PARITY", command_line::binary()).env("PARITY_OUT", self.path("shards"));
        command.env_remove("PARITY_SHARDS").envs(environment.iter().copied());
        command.arg("--parsable").args(options).arg(script).args(arguments);
        let output = command.output().expect("sbatch runs");
        assert!(
            output.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.logs()
        );
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn wait_for_job(&self, job: &str) {
        self.wait_until(&format!("job {job} ends"), |cluster| {
            cluster.output("squeue", &["-h", "-j", job]).is_empty()
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The node ends first, so that it starts nothing more; its processes are identified by
        // their environment.
        while let Some(mut daemon) = self.daemons.pop() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let here = self.dir.path().display().to_string();
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            if id != std::process::id() && String::from_utf8_lossy(&environment).contains(&here) {
                let _ = Command::new("kill").args(["-KILL", &id.to_string()]).status();
            }
        }
    }
}

fn report(dir: &Path) -> Report {
    let path = dir.join("report.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("the report parses")
}

#[test]
fn a_slurm_job_array_with_a_killed_task_merges_to_the_run_that_was_not_divided() {
    if let Some(why) = obstacle() {
        return skip(&why);
    }
    let cluster = Cluster::start();
    let (backend, regressions) =
        (support::backend().to_string(), cluster.path("regressions").display().to_string());
    let arguments = [
        "--backend",
        &backend,
        "--regressions",
        &regressions,
        "--ops",
        "rms_norm",
        "--cases",
        "30",
    ];
    let array = cluster.submit(&[], &["--array=0-2"], &arguments);
    wait_for_lines(&cluster.path("shards/shard-1/records.jsonl"), 1, LIMIT);
    cluster.output("scancel", &["--full", "--signal=KILL", &format!("{array}_1")]);
    cluster.wait_for_job(&array);
    let shards = [0, 1, 2].map(|index| cluster.path(&format!("shards/shard-{index}")));
    assert!(!shards[1].join("report.json").exists(), "the task had finished before it was killed");
    let recorded = std::fs::read_to_string(shards[1].join("records.jsonl")).expect("records");
    let recorded = &recorded[..recorded.rfind('\n').expect("a complete line") + 1];
    let merged = cluster.path("merged").display().to_string();
    let folders = shards.each_ref().map(|dir| dir.display().to_string());
    let fixed = ["--out", merged.as_str(), "--regressions", &regressions];
    let merge = [&["merge"][..], &folders.each_ref().map(String::as_str), &fixed].concat();
    command_line::Parity::new(&merge).run().assert_bad_input(&["shard 1/3 is unfinished"]);

    let again = cluster.submit(&[("PARITY_SHARDS", "3")], &["--array=1"], &arguments);
    let whole = cluster.path("whole").display().to_string();
    let not_divided = [&["run", "--out", &whole][..], &arguments].concat();
    command_line::Parity::new(&not_divided).run().assert_code(0);
    cluster.wait_for_job(&again);
    let after = std::fs::read_to_string(shards[1].join("records.jsonl")).expect("records");
    assert!(after.starts_with(recorded), "a recorded case was lost or ran again");
    command_line::Parity::new(&merge).run().assert_code(0);
    let (merged, whole) = (report(merged.as_ref()), report(whole.as_ref()));
    assert_eq!(without_times(&merged.cases), without_times(&whole.cases), "{}", cluster.logs());
    assert_eq!(merged.shards.len(), 3);
}

#[test]
fn srun_has_a_rank_in_each_task_and_a_cancelled_step_leaves_nothing_and_resumes() {
    if let Some(why) = obstacle() {
        return skip(&why);
    }
    let cluster = Cluster::start();
    let path = |name: &str| cluster.path(name).display().to_string();
    let (out, regressions) = (path("out"), path("regressions"));
    let mark = format!("srun {out}");
    let srun = || {
        let mut srun = cluster.command("srun");
        srun.args(["-n", "4", "--overcommit"])
            .arg(command_line::binary())
            .args(["run", "--resume"]);
        srun.args(["--out", &out, "--regressions", &regressions]).args(SWEEP);
        srun.env(rank_processes::MARK, &mark).env_remove("PARITY_BACKEND").stdin(Stdio::null());
        srun
    };
    let mut cancelled = srun().stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("srun");
    wait_for_lines(&cluster.path("out/records.jsonl"), 1, LIMIT);
    let tasks = rank_processes::tasks_of_ranks(&mark);
    let some = [0, 1, 2].iter().all(|&task| tasks.contains(&Some(task)));
    assert!(some, "{tasks:?}\n{}", cluster.logs());
    let step = cluster.output("squeue", &["-h", "-s", "-o", "%i"]);
    cluster.output("scancel", &[&step]);
    assert!(!cancelled.wait().expect("it ends").success(), "{}", cluster.logs());
    cluster.wait_until("no process of the step is left", |_| {
        rank_processes::tasks_of_ranks(&mark).is_empty()
    });
    assert!(!cluster.path("out/report.json").exists(), "it had finished before it was cancelled");

    let again = srun().output().expect("srun runs");
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success(), "{said}\n{}", cluster.logs());
    rank_processes::is_whole(&cluster.path("out"));
}
