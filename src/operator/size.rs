//! The memory that a case takes, computed from its declaration before anything is allocated.
//!
//! Given tensors are on the host in several copies: a case's own, those of its laws' variants, and
//! values widened to f64. All tensors are on the device, in two sets where calls follow one
//! another. Each output has as many tensors as the oracle has runs. [`bytes_of`] adds all that up.
//! Its result is never less than the real use: `tests/suite/bad_input.rs` measures it for every
//! operator.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use super::declaration::{Specs, TensorSpec};
use super::layouts::Layouts;
use super::lines::layout_of;
use crate::operator::{NEAREST_RUNS, WORKING_RUNS};

/// Copies of a given tensor on the host: the case's, one for each of a dozen variants of laws, and
/// those being made.
const HOST_COPIES: u128 = 16;

/// Copies of a tensor's memory on the device: current, previous, read back, and the mask of bytes
/// that may change. All in two sets.
const DEVICE_COPIES: u128 = 8;

/// Tensors in f64 for each output: the exact run and the others, those rounded to what kernels
/// store, and what is derived from both.
const RUNS: u128 = 2 * (1 + WORKING_RUNS + NEAREST_RUNS) as u128 + 16;

/// Tensors of one size that an oracle run holds at a time while it computes.
const STEPS: u128 = 8;

/// Bytes of a GiB.
const GIB: u64 = 1 << 30;

/// The most memory that one case may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limit(u64);

impl Limit {
    /// That many bytes.
    pub const fn bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Whether a case may take that many bytes.
    pub fn allows(self, bytes: u128) -> bool {
        bytes <= u128::from(self.0)
    }

    /// Half of the memory available to this process: the machine's, or its control group's where
    /// that is less.
    pub fn of_this_machine() -> Self {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        Self(available(&read).unwrap_or(2 * SMALLEST_DEFAULT) / 2)
    }
}

/// The assumed memory where the system does not report it.
const SMALLEST_DEFAULT: u64 = 2 * GIB;

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&in_words(u128::from(self.0)))
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = match unit.trim() {
            "" => 1,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => GIB,
            "TiB" => 1 << 40,
            other => return Err(format!("`{text}`: `{other}` is none of KiB, MiB, GiB and TiB")),
        };
        let bytes = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .filter(|&bytes| bytes > 0);
        bytes.map(Self).ok_or_else(|| format!("`{text}` is no number of bytes, such as 8GiB"))
    }
}

static LIMIT: OnceLock<Limit> = OnceLock::new();

/// Sets the memory limit of a case for all of this process. The first call decides.
pub fn set_limit(limit: Limit) {
    // A second call in one process could only come from a test, whose cases are small.
    let _ = LIMIT.set(limit);
}

/// The memory limit of a case in this process: what was set, or a share of the machine's.
pub fn limit() -> Limit {
    *LIMIT.get_or_init(Limit::of_this_machine)
}

/// Memory available to this process, in bytes, from the system's files.
fn available(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
    });
    machine.into_iter().chain(group_limits(read)).min()
}

/// The limits of this process's control groups, from its own up to the root. For version 1, that of
/// its mount.
fn group_limits(read: &dyn Fn(&Path) -> Option<String>) -> Vec<u64> {
    let root = Path::new("/sys/fs/cgroup");
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let own = root.join(own);
    let files = own
        .ancestors()
        .take_while(|group| group.starts_with(root))
        .map(|group| group.join("memory.max"));
    let files = files.chain([root.join("memory/memory.limit_in_bytes")]);
    // `max` is not a number: it means no limit.
    files.filter_map(|file| read(&file)?.trim().parse().ok()).collect()
}

/// Bytes of the machine's memory that a case takes, where one oracle run holds `oracle` elements in
/// addition to its tensors. Nothing wraps: an overflow gives the maximum.
pub(super) fn bytes_of(specs: &Specs, layouts: &Layouts, oracle: u128) -> u128 {
    let of =
        |of: &dyn Fn(&TensorSpec) -> u128| specs.present().map(of).fold(0, u128::saturating_add);
    let bytes = |spec: &TensorSpec| elements(spec).saturating_mul(spec.dtype.size() as u128);
    let given = of(&|spec| if spec.is_given() { bytes(spec) } else { 0 });
    let on_device = of(&|spec| if spec.is_stored() { placed(spec, layouts) } else { 0 });
    let judged = specs.compared().map(elements).fold(0, u128::saturating_add);
    let computed = elements_of(specs, oracle);
    // A tensor without elements may still have long axes, and lists are made along them.
    let lists = of(&|spec| spec.axes.iter().map(|axis| axis.extent as u128).sum());
    let at_once = 1 + rayon::current_num_threads() as u128;
    [
        given.saturating_mul(HOST_COPIES),
        on_device.saturating_mul(DEVICE_COPIES),
        judged.saturating_mul(RUNS * size_of::<f64>() as u128),
        lists.saturating_mul(HOST_COPIES * size_of::<usize>() as u128),
        computed.saturating_mul(STEPS * at_once * size_of::<f64>() as u128),
    ]
    .into_iter()
    .fold(0, u128::saturating_add)
}

/// Elements of all tensors of a case, and of what one oracle run holds in addition.
pub(super) fn elements_of(specs: &Specs, oracle: u128) -> u128 {
    specs.present().map(elements).fold(oracle, u128::saturating_add)
}

fn elements(spec: &TensorSpec) -> u128 {
    spec.axes.iter().fold(1, |product, axis| product.saturating_mul(axis.extent as u128))
}

/// Bytes of a tensor's buffer that are filled and read back.
fn placed(spec: &TensorSpec, layouts: &Layouts) -> u128 {
    let shape = spec.shape();
    let layout = layout_of(spec, layouts).place(spec);
    layout.map_or(u128::MAX, |layout| layout.touched_bytes(&shape, spec.dtype))
}

/// Bytes in the largest unit with a value of at least one.
pub(super) fn in_words(bytes: u128) -> String {
    let units = [("EiB", 60), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / 2f64.powi(shift)),
        None => format!("{bytes} bytes"),
    }
}

/// The largest tensor of a case, for error messages.
pub(super) fn largest(specs: &Specs) -> Option<&TensorSpec> {
    specs.present().max_by_key(|spec| spec.elements())
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::DType;

    use super::super::declaration::{axis, input, output};
    use super::*;

    #[test]
    fn a_limit_is_a_number_of_bytes_with_or_without_a_unit() {
        let parse = |text: &str| text.parse::<Limit>().map(|limit| limit.0);
        assert_eq!(
            (parse("4096"), parse("3GiB"), parse("512 MiB")),
            (Ok(4096), Ok(3 << 30), Ok(512 << 20))
        );
        for wrong in
            ["", "0", "GiB", "-1", "1.5GiB", "3 GB", "99999999999999999999", "17179869184GiB"]
        {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(&format!("`{wrong}`")), "{wrong}: {error}");
        }
        assert_eq!(Limit(5 << 29).to_string(), "2.5 GiB");
    }

    #[test]
    fn the_default_is_what_the_machine_or_a_control_group_above_this_process_allows() {
        let files = |group: &str, outer: &str| {
            let (group, outer) = (group.to_owned(), outer.to_owned());
            move |path: &Path| match path.to_str()? {
                "/proc/meminfo" => Some("MemTotal:       8388608 kB\nMemFree: 1 kB\n".to_owned()),
                "/proc/self/cgroup" => Some("0::/outer/own\n".to_owned()),
                "/sys/fs/cgroup/outer/own/memory.max" => Some(group.clone()),
                "/sys/fs/cgroup/outer/memory.max" => Some(outer.clone()),
                _ => None,
            }
        };
        assert_eq!(available(&files("max\n", "max\n")), Some(8 << 30));
        assert_eq!(available(&files("max\n", "1073741824\n")), Some(1 << 30));
        assert_eq!(available(&files("4096\n", "1073741824\n")), Some(4096));
        assert_eq!(available(&|_| None), None);
        assert!(Limit::of_this_machine().0 > 0);
    }

    #[test]
    fn bytes_are_counted_where_a_product_of_extents_wraps() {
        let axes = [axis("a", 1 << 31), axis("b", 1 << 31), axis("c", 4)];
        let specs =
            Specs::new(0, [input("x", DType::F32, &axes), output("y", DType::F32, &axes[..1])]);
        assert!(bytes_of(&specs, &Layouts::new(), 0) > 1 << 66);
        assert_eq!(largest(&specs).map(|spec| spec.name), Some("x"));
    }

    #[test]
    fn of_huge_steps_only_what_is_touched_counts_and_of_small_gaps_all() {
        let rows = [axis("num_rows", 64), axis("width", 1024)];
        let specs = Specs::new(0, [input("x", DType::F32, &rows).rows()]);
        let with = |gap: usize| {
            let gaps = [("width".to_owned(), gap)].into();
            let layout = super::super::layouts::TensorLayout { gaps, ..Default::default() };
            bytes_of(&specs, &[("x".to_owned(), layout)].into(), 0)
        };
        let dense = bytes_of(&specs, &Layouts::new(), 0);
        assert!(
            with(1024) > dense && with(1 << 32) < 20 * dense,
            "{dense} {} {}",
            with(1024),
            with(1 << 32)
        );
    }
}
