//! `parity run --benchmarks`: runs the benchmarks' executable and reads its results for the report
//! of the same run.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dsv4_runtime::Device;
use dsv4_runtime::supervisor::{Supervised, temporary_folder};

use super::DeviceArguments;
use crate::record::Skip;
use crate::report::benchmarks::{self, Found};

/// The file for what the executable prints, next to the report.
const LOG: &str = "benchmarks.txt";

/// Criterion's default directory for results, next to the sources.
const USUAL: &str = "target/criterion";

/// The results, and whether everything that ran agreed with the oracle.
pub(super) struct Measured {
    pub found: Found,
    pub agreed: bool,
}

/// Reads the results of an earlier run of the benchmarks from criterion's directory: the named one,
/// or the default one, which may not exist.
pub(super) fn earlier(directory: Option<&Path>, device: &Device) -> Result<Measured> {
    if let Some(named) = directory.filter(|named| !named.join(benchmarks::FACTS_FILE).is_file()) {
        bail!(
            "--criterion {}: no {} in it: no benchmark left its results there",
            named.display(),
            benchmarks::FACTS_FILE
        );
    }
    let directory = directory.unwrap_or(Path::new(USUAL));
    let found =
        benchmarks::read(directory, &device.environment().device).map_err(anyhow::Error::msg)?;
    Ok(Measured { found, agreed: true })
}

/// Runs the executable, on the same backend with the same kernels, and reads its results.
pub(super) fn run(
    executable: &Path,
    operators: Option<&str>,
    arguments: &DeviceArguments,
    device: &Device,
    out: &Path,
) -> Result<Measured> {
    let path = out.join(LOG);
    std::fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    let log = File::create(&path).with_context(|| format!("writing {}", path.display()))?;
    let results =
        temporary_folder("benchmarks-").context("a folder for the benchmarks' results")?;
    // A name without a folder is a file here; it is not searched on the path.
    let program = executable
        .canonicalize()
        .with_context(|| format!("--benchmarks {}", executable.display()))?;
    let mut command = Command::new(&program);
    command.arg("--bench");
    if let Some(list) = operators {
        let names: Vec<&str> = list.split(',').map(str::trim).collect();
        command.arg(format!("^({})_(forward|backward)", names.join("|")));
    }
    command.env("CRITERION_HOME", results.path());
    command.env("PARITY_BACKEND", device.environment().backend.to_string());
    if let Some(kernels) = &arguments.kernels {
        command.env("PARITY_KERNELS", kernels);
    }
    let streams = [Stdio::null(), log.try_clone()?.into(), log.into()];
    errln!("benchmarks: {}", path.display());
    // The children end with this process, however it ends.
    let ended = Supervised::spawn(&command, streams)
        .and_then(|mut running| running.wait_within(Duration::MAX));
    let status = ended.with_context(|| format!("--benchmarks {}", program.display()))?;
    let Some(status) = status else { bail!("--benchmarks {}: it did not end", program.display()) };
    // 1 is a disagreement, and the report still includes the results. After any other exit code
    // there are no reliable results.
    if !matches!(status.code(), Some(0 | 1)) {
        bail!(
            "--benchmarks {}: {status}; what it printed is in {}",
            program.display(),
            path.display()
        );
    }
    let mut found = benchmarks::read(results.path(), &device.environment().device)
        .map_err(anyhow::Error::msg)?;
    let agreed = status.success();
    if !agreed && found.skip.is_none() {
        let why =
            format!("what they wrote disagrees with the oracle, or a rate is impossible: {LOG}");
        found.skip = Some(Skip { what: "some benchmarks".into(), why, count: 1 });
    }
    Ok(Measured { found, agreed })
}
