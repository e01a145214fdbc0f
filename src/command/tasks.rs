//! `srun parity`: which of the tasks that Slurm has started does the work, and what the others do.

use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use dsv4_runtime::tasks::{self, PATIENCE, Step};

use super::Exit;

/// The option by which each task has a part of its own.
const SHARD: &str = "--shard";

/// The option of the parts that task 0 itself starts.
pub(super) const PART_OF_ANOTHER: &str = "--part-of-another";

/// Takes this process's part among the tasks of a Slurm step. Task 0 does what the words of the
/// command line ask for, whatever that is, and has ranks in the other tasks. These end with it, and
/// do nothing else: their exit code is returned. `None` for task 0, and where there are no other
/// tasks.
///
/// With `--shard` each task works for itself: it has another part of the sweep.
///
/// # Errors
/// Tasks on several hosts, in task 0; a task that does not come.
pub(super) fn take_part(words: &[OsString]) -> Result<Option<Exit>> {
    if works_for_itself(words) {
        return Ok(None);
    }
    let Some(step) = Step::of_environment().map_err(anyhow::Error::msg)? else { return Ok(None) };
    let (tasks, hosts) = (step.tasks, step.hosts);
    match step.task {
        0 if hosts > 1 => bail!(
            "srun started {tasks} tasks on {hosts} hosts: ranks meet in the memory of one (srun -N 1)"
        ),
        // Task 0 has the error.
        _ if hosts > 1 => Ok(Some(Exit::BadInput)),
        0 => {
            tasks::join(step, PATIENCE, ended_too_early)
                .context("waiting for the tasks of srun")?;
            Ok(None)
        }
        task => {
            tasks::serve(&step, PATIENCE).with_context(|| format!("task {task} of srun"))?;
            Ok(Some(Exit::Agreed))
        }
    }
}

fn works_for_itself(words: &[OsString]) -> bool {
    let has = |option: &str| {
        words.iter().filter_map(|word| word.to_str()).any(|word| {
            word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    has(SHARD) && !has(PART_OF_ANOTHER)
}

/// Ends this process: a task whose rank is needed has ended. Nothing is recorded of the case that
/// runs, because no kernel is to blame.
fn ended_too_early(task: usize) {
    static FIRST: Mutex<()> = Mutex::new(());
    // Never unlocked: other threads need the task as well.
    let _first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    errln!(
        "parity: task {task} of srun has ended, and rank {task} with it; --resume continues a sweep"
    );
    std::process::exit(Exit::BadInput.code().into());
}

#[cfg(test)]
mod tests {
    use super::works_for_itself;

    #[test]
    fn a_task_with_a_shard_works_for_itself_unless_task_0_has_started_it() {
        let alone = |line: &str| {
            works_for_itself(&line.split_whitespace().map(Into::into).collect::<Vec<_>>())
        };
        assert!(alone("parity run --shard 0/2") && alone("parity run --ops rope --shard=1/2"));
        assert!(!alone("parity run --ops rope") && !alone("parity run --shards 0/2"));
        assert!(!alone("parity run --part-of-another --shard 0/2"));
    }
}
