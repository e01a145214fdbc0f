//! Criterion's results, read back for the report.
//!
//! The benchmarks (`benches/kernels`) leave `GROUP/NAME/new/{benchmark,estimates,sample}.json`
//! under criterion's directory. Next to the groups they leave [`FACTS_FILE`]: what each benchmark
//! moves and computes, and what the device can do.
//!
//! A result is found by the full id inside its `benchmark.json`, not by its path. Criterion
//! replaces characters in directory names, cuts them to 64 bytes and numbers those that collide.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dsv4_runtime::process::variable;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::{BenchmarkRecord, Ceilings, Operands, Skip, Work};

/// Written by the benchmarks, next to criterion's folders.
pub const FACTS_FILE: &str = "parity-facts.json";

/// Folders between criterion's directory and a benchmark's `new`: group, function, parameter.
const DEPTH: usize = 3;

/// What criterion does not know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// What the benchmarks ran on.
    pub device: String,
    /// What ran: the revision and the kernels.
    pub revision: String,
    /// Rates of the device, measured in the same run.
    pub ceilings: Option<Ceilings>,
    /// By criterion's full id.
    pub work: BTreeMap<String, Work>,
}

impl Facts {
    /// The facts in criterion's directory if they are of this device and revision, so that a run
    /// goes on where an interrupted one stopped; otherwise new ones.
    pub fn continued(dir: &Path, device: &str, revision: &str) -> Self {
        let new = Self { device: device.into(), revision: revision.into(), ..Self::default() };
        let earlier = json(&dir.join(FACTS_FILE)).ok();
        let earlier = earlier.and_then(|facts| serde_json::from_value::<Self>(facts).ok());
        earlier.filter(|facts| facts.device == device && facts.revision == revision).unwrap_or(new)
    }

    /// Writes the facts into criterion's directory.
    ///
    /// # Errors
    /// A directory or file that cannot be written, by path.
    pub fn write(&self, dir: &Path) -> Result<PathBuf, String> {
        let path = dir.join(FACTS_FILE);
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        let text =
            serde_json::to_string_pretty(self).map_err(|e| format!("{}: {e}", path.display()))?;
        std::fs::create_dir_all(dir).map_err(failed)?;
        std::fs::write(&path, text).map_err(failed)?;
        Ok(path)
    }
}

/// Criterion's directory: `CRITERION_HOME`, `criterion` in `CARGO_TARGET_DIR`, or
/// `target/criterion`.
pub fn directory() -> PathBuf {
    let set = |name: &str| variable(name).map(PathBuf::from);
    set("CRITERION_HOME")
        .or_else(|| set("CARGO_TARGET_DIR").map(|dir| dir.join("criterion")))
        .unwrap_or_else(|| PathBuf::from("target/criterion"))
}

/// What criterion's directory holds for a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// One entry for each benchmark.
    pub benchmarks: Vec<BenchmarkRecord>,
    /// Rates of the device, measured in the same run.
    pub ceilings: Option<Ceilings>,
    /// Measurements that were skipped because they belong to another device.
    pub skip: Option<Skip>,
}

/// Reads every benchmark that the facts name, if they belong to this device. Without a facts file
/// the result is empty.
///
/// # Errors
/// A file that exists and cannot be parsed, by path; a benchmark of the facts without a result.
pub fn read(dir: &Path, device: &str) -> Result<Found, String> {
    let facts_path = dir.join(FACTS_FILE);
    if !facts_path.is_file() {
        return Ok(Found::default());
    }
    let facts: Facts = serde_json::from_value(json(&facts_path)?)
        .map_err(|e| format!("{}: {e}", facts_path.display()))?;
    if facts.device != device {
        let why = format!("{} are of `{}`, not of `{device}`", facts_path.display(), facts.device);
        let skip = Skip { what: "benchmarks".into(), why, count: facts.work.len() as u64 };
        return Ok(Found { skip: Some(skip), ..Found::default() });
    }
    let mut results = BTreeMap::new();
    find_results(dir, DEPTH, &mut results)?;
    let mut records: Vec<(BenchmarkRecord, &Work)> = Vec::new();
    for (id, work) in &facts.work {
        let new = results.get(id).ok_or_else(|| {
            format!(
                "{} names `{id}`, of which there is no result under {}",
                facts_path.display(),
                dir.display()
            )
        })?;
        records.push((record(id, work, new)?, work));
    }
    if let Some(ceilings) = facts.ceilings {
        let limits = Limits::of(&ceilings, &records);
        for (record, work) in &mut records {
            record.percent_of_limit = limits.percent(work, record.median_ns);
        }
    }
    let benchmarks = records.into_iter().map(|(record, _)| record).collect();
    Ok(Found { benchmarks, ceilings: facts.ceilings, skip: None })
}

/// Microseconds of a call, one for each sample that criterion has just saved for this benchmark.
///
/// # Errors
/// A result that is missing or cannot be parsed, by path.
pub fn samples_us(dir: &Path, group: &str, id: &str) -> Result<Vec<f64>, String> {
    let mut results = BTreeMap::new();
    // A group is an identifier, so its folder has its name.
    let of_group = dir.join(group);
    find_results(&of_group, DEPTH - 1, &mut results)?;
    let new = results
        .get(id)
        .ok_or_else(|| format!("no result of `{id}` under {}", of_group.display()))?;
    let sample = json(&new.join("sample.json"))?;
    let numbers = |name: &str| -> Option<Vec<f64>> {
        sample[name].as_array()?.iter().map(Value::as_f64).collect()
    };
    let (times, calls) = numbers("times")
        .zip(numbers("iters"))
        .ok_or_else(|| format!("{}: no `times` and `iters` in sample.json", new.display()))?;
    Ok(times.iter().zip(calls).map(|(nanoseconds, calls)| nanoseconds / calls * 1e-3).collect())
}

/// Collects the `new` folders below `dir` by the full id of their benchmark.
fn find_results(
    dir: &Path,
    depth: usize,
    results: &mut BTreeMap<String, PathBuf>,
) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let benchmark = path.join("benchmark.json");
        if path.ends_with("new") && benchmark.is_file() {
            let id = json(&benchmark)?["full_id"].as_str().map(str::to_owned);
            results
                .insert(id.ok_or_else(|| format!("{}: no `full_id`", benchmark.display()))?, path);
        } else if path.is_dir() && depth > 0 {
            find_results(&path, depth - 1, results)?;
        }
    }
    Ok(())
}

fn json(path: &Path) -> Result<Value, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

fn record(id: &str, work: &Work, new: &Path) -> Result<BenchmarkRecord, String> {
    let estimates = json(&new.join("estimates.json"))?;
    let sample = json(&new.join("sample.json"))?;
    let number = |path: &str| {
        let value = estimates.pointer(path).and_then(Value::as_f64);
        value.ok_or_else(|| format!("{}: no `{path}` in estimates.json", new.display()))
    };
    let median_ns = number("/median/point_estimate")?;
    let times = sample["times"]
        .as_array()
        .ok_or_else(|| format!("{}: no `times` in sample.json", new.display()))?;
    Ok(BenchmarkRecord {
        id: id.to_owned(),
        operator: work.operator.clone(),
        median_ns,
        low_ns: number("/median/confidence_interval/lower_bound")?,
        high_ns: number("/median/confidence_interval/upper_bound")?,
        samples: times.len() as u64,
        bytes: work.bytes,
        flops: work.flops,
        percent_of_limit: None,
    })
}

/// The highest rates that anything reached: the ceilings, or a benchmark that is faster. (A call
/// that reads more than it writes moves more than a copy.)
struct Limits {
    bytes_per_second: f64,
    flops_per_second: [Option<f64>; 2],
}

impl Limits {
    fn of(ceilings: &Ceilings, records: &[(BenchmarkRecord, &Work)]) -> Self {
        let fastest = |least: f64, done: &dyn Fn(&Work) -> f64| {
            let rates = records.iter().map(|(record, work)| done(work) * 1e9 / record.median_ns);
            rates.fold(least, f64::max)
        };
        let products = |operands, measured: Option<f64>| {
            let of = |work: &Work| if work.operands == operands { work.flops } else { 0.0 };
            measured.map(|rate| fastest(rate, &of))
        };
        Self {
            bytes_per_second: fastest(ceilings.copy_bytes_per_second, &|work| work.bytes),
            flops_per_second: [
                products(Operands::Bf16, ceilings.matrix_flops_per_second),
                products(Operands::E4m3, ceilings.e4m3_flops_per_second),
            ],
        }
    }

    /// The time that the device would need at these rates, over the time that it took.
    fn percent(&self, work: &Work, median_ns: f64) -> Option<f64> {
        let moving = work.bytes / self.bytes_per_second;
        let rate = self.flops_per_second[work.operands as usize];
        let limit = f64::max(moving, rate.map_or(0.0, |rate| work.flops / rate));
        (limit > 0.0).then(|| 100.0 * limit / (median_ns * 1e-9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = "a device";

    /// The files that criterion 0.8 writes for one benchmark, with the fields that are read here.
    fn criterion_result(dir: &Path, folder: &str, full_id: &str, median: f64) {
        let new = dir.join(folder).join("new");
        std::fs::create_dir_all(&new).expect("a folder");
        let estimate = |value: f64| {
            let interval = serde_json::json!({
                "confidence_level": 0.95, "lower_bound": 0.9 * value, "upper_bound": 1.1 * value
            });
            serde_json::json!({ "confidence_interval": interval, "point_estimate": value, "standard_error": 1.0 })
        };
        let estimates = serde_json::json!({
            "mean": estimate(2.0 * median), "median": estimate(median), "median_abs_dev": estimate(1.0),
            "slope": null, "std_dev": estimate(1.0),
        });
        let sample = serde_json::json!({ "sampling_mode": "Flat", "iters": [1.0, 1.0], "times": [median, median] });
        let benchmark = serde_json::json!({ "full_id": full_id, "directory_name": folder });
        for (name, value) in
            [("estimates", estimates), ("sample", sample), ("benchmark", benchmark)]
        {
            std::fs::write(new.join(format!("{name}.json")), value.to_string()).expect("a file");
        }
    }

    fn facts(ids: &[&str], ceilings: Option<Ceilings>) -> Facts {
        let operands = Operands::Bf16;
        let work = Work { operator: "rms_norm".into(), bytes: 4e6, flops: 1e9, operands };
        let work = ids.iter().map(|id| ((*id).to_owned(), work.clone())).collect();
        Facts { device: DEVICE.into(), revision: "a revision".into(), ceilings, work }
    }

    fn ceilings(copy: f64, bf16: Option<f64>, e4m3: Option<f64>) -> Ceilings {
        Ceilings {
            copy_bytes_per_second: copy,
            matrix_flops_per_second: bf16,
            e4m3_flops_per_second: e4m3,
        }
    }

    #[test]
    fn results_are_found_by_their_full_id_whatever_their_folder_is_called() {
        let dir = tempfile::tempdir().expect("a folder");
        let long = format!("group/a: {}", "wide ".repeat(20));
        criterion_result(dir.path(), "group/a_ wide wide_2", &long, 1000.0);
        criterion_result(dir.path(), "group/parameter/7", "group/parameter/7", 3000.0);
        let base = dir.path().join("group/parameter/7/base");
        std::fs::create_dir_all(base).expect("a folder");
        let written = facts(&[&long, "group/parameter/7"], None);
        written.write(dir.path()).expect("writes");
        let Found { benchmarks: records, ceilings, .. } = read(dir.path(), DEVICE).expect("reads");
        assert_eq!(ceilings, None);
        assert_eq!(
            records.iter().map(|r| r.id.as_str()).collect::<Vec<_>>(),
            [long.as_str(), "group/parameter/7"]
        );
        assert_eq!(
            (records[0].median_ns, records[0].low_ns, records[0].samples),
            (1000.0, 900.0, 2)
        );
        assert_eq!(records[0].percent_of_limit, None);
    }

    #[test]
    fn samples_of_a_benchmark_are_microseconds_of_a_call() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/x_ y", "g/x: y", 3000.0);
        let sample = serde_json::json!({ "iters": [2.0, 2.0], "times": [3000.0, 5000.0] });
        std::fs::write(dir.path().join("g/x_ y/new/sample.json"), sample.to_string())
            .expect("a file");
        assert_eq!(samples_us(dir.path(), "g", "g/x: y"), Ok(vec![1.5, 2.5]));
        assert!(
            samples_us(dir.path(), "g", "g/z").expect_err("no such benchmark").contains("`g/z`")
        );
        std::fs::write(dir.path().join("g/x_ y/new/sample.json"), "{}").expect("a file");
        assert!(samples_us(dir.path(), "g", "g/x: y").expect_err("no samples").contains("`times`"));
    }

    #[test]
    fn the_limit_is_the_slower_of_moving_and_computing() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/x", "g/x", 2000.0);
        let share = |ceilings: Ceilings| {
            facts(&["g/x"], Some(ceilings)).write(dir.path()).expect("writes");
            read(dir.path(), DEVICE).expect("reads").benchmarks[0]
                .percent_of_limit
                .expect("a share")
        };
        let copy = 4e12;
        let moving = share(ceilings(copy, None, None));
        assert!((moving - 50.0).abs() < 1e-9, "{moving}");
        let computing = share(ceilings(copy, Some(6.25e14), None));
        assert!((computing - 80.0).abs() < 1e-9, "{computing}");
    }

    #[test]
    fn what_multiplies_e4m3_is_limited_by_the_rate_of_e4m3() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/x", "g/x", 1000.0);
        let mut facts = facts(&["g/x"], Some(ceilings(1e13, Some(8e14), Some(1.6e15))));
        facts.work.get_mut("g/x").expect("the work").operands = Operands::E4m3;
        facts.write(dir.path()).expect("writes");
        let found = read(dir.path(), DEVICE).expect("reads");
        let percent = found.benchmarks[0].percent_of_limit.expect("a share");
        assert!((percent - 62.5).abs() < 1e-9, "{percent}");
    }

    #[test]
    fn no_benchmark_is_faster_than_its_limit() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/x", "g/x", 500.0);
        criterion_result(dir.path(), "g/y", "g/y", 1000.0);
        // 4 MB in 500 ns are twice the rate of the copy.
        facts(&["g/x", "g/y"], Some(ceilings(4e12, Some(1e15), None)))
            .write(dir.path())
            .expect("writes");
        let percents = read(dir.path(), DEVICE).expect("reads").benchmarks;
        let percents: Vec<f64> = percents.iter().filter_map(|one| one.percent_of_limit).collect();
        let near = |percent: f64, expected: f64| (percent - expected).abs() < 1e-9;
        assert!(near(percents[0], 100.0) && near(percents[1], 50.0), "{percents:?}");
    }

    #[test]
    fn a_run_continues_the_facts_of_its_device_and_revision_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let new = || Facts { device: DEVICE.into(), revision: "b".into(), ..Facts::default() };
        assert_eq!(Facts::continued(dir.path(), DEVICE, "b"), new());
        let earlier = Facts { revision: "b".into(), ..facts(&["g/x"], None) };
        earlier.write(dir.path()).expect("writes");
        assert_eq!(Facts::continued(dir.path(), DEVICE, "b"), earlier);
        let of_other = Facts::continued(dir.path(), DEVICE, "c");
        assert_eq!(of_other, Facts { revision: "c".into(), ..new() });
        assert!(Facts::continued(dir.path(), "another device", "b").work.is_empty());
    }

    #[test]
    fn results_that_the_facts_do_not_name_are_left_out() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/old", "g/old", 1.0);
        assert!(read(dir.path(), DEVICE).expect("no facts, no records").benchmarks.is_empty());
        facts(&[], None).write(dir.path()).expect("writes");
        assert!(read(dir.path(), DEVICE).expect("reads").benchmarks.is_empty());
        assert!(
            read(&dir.path().join("absent"), DEVICE)
                .expect("an absent directory has none")
                .benchmarks
                .is_empty()
        );
    }

    #[test]
    fn a_named_benchmark_without_a_result_is_an_error() {
        let dir = tempfile::tempdir().expect("a folder");
        facts(&["g/x"], None).write(dir.path()).expect("writes");
        assert!(read(dir.path(), DEVICE).expect_err("nothing there").contains("`g/x`"));
        criterion_result(dir.path(), "g/x", "g/x", 1.0);
        std::fs::write(dir.path().join("g/x/new/estimates.json"), "{}").expect("a file");
        assert!(read(dir.path(), DEVICE).expect_err("no median").contains("/median/"));
    }

    #[test]
    fn measurements_of_another_device_are_left_out_and_counted() {
        let dir = tempfile::tempdir().expect("a folder");
        criterion_result(dir.path(), "g/x", "g/x", 1.0);
        facts(&["g/x"], None).write(dir.path()).expect("writes");
        let found = read(dir.path(), "another device").expect("reads");
        assert!(found.benchmarks.is_empty());
        assert_eq!(found.skip.map(|skip| skip.count), Some(1));
    }
}
