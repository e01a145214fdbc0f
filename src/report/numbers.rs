//! How numbers are written: significant digits, units, thousands separators; NaN and infinities by
//! name.

use crate::record::{Spread, figures};

/// A count with thousands separators: `12,345,678`.
pub(crate) fn count(value: u64) -> String {
    figures::grouped(&value.to_string())
}

/// A count and its noun, in the singular for one: `1 case`, `3 cases`.
pub(crate) fn counted(value: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(value), if value == 1 { "" } else { "s" })
}

/// Rows of a text table with aligned columns.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A measure to `digits` significant digits, in scientific notation below 0.001 and from 1,000,000.
pub(crate) fn significant(value: f64, digits: usize) -> String {
    figures::padded(value, digits)
}

/// The median of some times in microseconds, and in parentheses the least and the largest.
pub(crate) fn spread(spread: Spread) -> String {
    let digits = |value| significant(value, 4);
    let Spread { median_us, least_us, most_us, .. } = spread;
    format!("{} ({} to {})", digits(median_us), digits(least_us), digits(most_us))
}

/// A measure that may be of any size, with two digits: `3.1e-9`, `0.42`.
pub(crate) fn scientific(value: f64) -> String {
    figures::padded(value, 2)
}

/// `1 - cosine`. Below a few roundings of f64 the difference has no significant digit.
pub(crate) fn one_minus_cosine(cosine: f64) -> String {
    let distance = 1.0 - cosine;
    if distance.abs() <= 8.0 * f64::EPSILON { "0".to_owned() } else { scientific(distance) }
}

/// One element's value.
pub(crate) fn element(value: f64) -> String {
    figures::element(value)
}

/// A time given in nanoseconds, with three significant digits and its unit.
pub(crate) fn time(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds.abs() {
        size if size < 1e3 => (nanoseconds, "ns"),
        size if size < 1e6 => (nanoseconds / 1e3, "µs"),
        size if size < 1e9 => (nanoseconds / 1e6, "ms"),
        _ => (nanoseconds / 1e9, "s"),
    };
    format!("{} {unit}", significant(value, 3))
}

/// A duration given in seconds: `41.3 s`, `3 min 12 s`, `2 h 05 min`.
pub(crate) fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 60.0 {
        return time(seconds * 1e9);
    }
    let whole = seconds.round() as u64;
    match whole {
        0..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", count(whole / 3600), whole % 3600 / 60),
    }
}

/// A size in bytes: `227 KiB`.
pub(crate) fn bytes(value: u64) -> String {
    match value {
        0..1024 => format!("{value} B"),
        1024..1_048_576 => format!("{} KiB", significant(value as f64 / 1024.0, 3)),
        _ => format!("{} MiB", significant(value as f64 / 1_048_576.0, 3)),
    }
}

/// Seconds since 1970 as a date and time: `2025-06-30 14:05:09 UTC`.
pub(crate) fn utc(unix: u64) -> String {
    let (days, seconds) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Year, month and day of a number of days since 1970-01-01. Years are counted from March, so that
/// the leap day is the last of its year and month lengths follow `(153 m + 2) / 5`.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}
