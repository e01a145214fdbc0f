//! Which step of Slurm this process is a task of.

use std::ffi::OsString;

use crate::process::variable;

/// A task of a step that has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The job's number.
    pub job: u32,
    /// The step's number in the job.
    pub number: u32,
    /// This task, from 0.
    pub task: usize,
    /// How many tasks the step has, more than 1.
    pub tasks: usize,
    /// On how many hosts they are.
    pub hosts: usize,
    /// The number of this task among those of its host.
    pub local: usize,
}

impl Step {
    /// The step that `srun` started this process in, by Slurm's variables; `None` where it has one
    /// task. A job without a step, such as a batch script, has none either, whatever number of tasks
    /// it asked for.
    ///
    /// # Errors
    /// Names a variable that Slurm does not set in this way.
    pub fn of_environment() -> Result<Option<Self>, String> {
        Self::of(variable)
    }

    pub(super) fn of(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>, String> {
        let number = |name: &str| -> Result<Option<u32>, String> {
            let Some(value) = get(name) else { return Ok(None) };
            let parsed = value.to_str().and_then(|text| text.parse().ok());
            parsed.map(Some).ok_or_else(|| format!("{name} is {value:?}, which is not a number"))
        };
        let required = |name: &str| {
            number(name)?.ok_or_else(|| {
                format!("{name} is not set, and SLURM_STEP_ID and SLURM_STEP_NUM_TASKS are")
            })
        };
        // An allocation has the number of its tasks in SLURM_NTASKS; only a step starts them.
        let (Some(step), Some(tasks)) = (number("SLURM_STEP_ID")?, number("SLURM_STEP_NUM_TASKS")?)
        else {
            return Ok(None);
        };
        if tasks < 2 {
            return Ok(None);
        }
        let (job, task) = (required("SLURM_JOB_ID")?, required("SLURM_PROCID")?);
        if task >= tasks {
            return Err(format!("SLURM_PROCID is {task}, and SLURM_STEP_NUM_TASKS {tasks}"));
        }
        let hosts = match number("SLURM_STEP_NUM_NODES")? {
            Some(hosts) => hosts,
            None => number("SLURM_NNODES")?.unwrap_or(1),
        };
        let local = number("SLURM_LOCALID")?.unwrap_or(task);
        let [task, tasks, hosts, local] = [task, tasks, hosts, local].map(|n| n as usize);
        Ok(Some(Self { job, number: step, task, tasks, hosts, local }))
    }
}
