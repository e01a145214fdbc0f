//! Times of the attention of ranks: a table for the terminal, and a page.

use super::numbers::{aligned, significant, spread, utc};
use crate::parallel_time::Row;
use crate::record::Spread;

/// What the times were measured on.
#[derive(Clone, Debug)]
pub struct Place {
    /// The command that made the page.
    pub command: String,
    /// The device of each rank.
    pub device: String,
    /// Its driver and compiler.
    pub software: String,
    /// How collectives move tensors.
    pub world: String,
    /// The commit of this build.
    pub revision: String,
    /// Seconds since 1970.
    pub unix: u64,
    /// Samples of each time.
    pub samples: usize,
}

const TITLES: [&str; 9] = [
    "tokens",
    "ranks",
    "direction",
    "step us",
    "attention alone us",
    "step / attention",
    "collectives alone us",
    "GB/s",
    "hidden",
];

/// What the columns are.
pub const LEGEND: &str = "\
Columns: medians over samples (least to most), of the slowest rank.
  step                 the attention of ranks, its collectives included
  attention alone      its kernels on a rank's queries, all keys in place
  collectives alone    the all-gather of keys; backward also the reduce-scatter
                       of their fp32 gradient
  GB/s                 what a rank receives in them
  hidden               share of them that the step does not take on top of the
                       attention";

fn cells(row: &Row, shown: impl Fn(Spread) -> String) -> [String; TITLES.len()] {
    [
        row.shape.tokens.to_string(),
        row.shape.ranks.to_string(),
        row.direction.to_owned(),
        shown(row.step),
        shown(row.kernels),
        format!("{:.3}", row.ratio()),
        shown(row.collectives),
        format!("{:.0}", row.rate() * 1e-9),
        format!("{:.0} %", 100.0 * row.hidden()),
    ]
}

/// The table as text: medians alone, which fit a terminal.
pub fn table(rows: &[Row]) -> String {
    const SHORT: [&str; TITLES.len()] = [
        "tokens",
        "ranks",
        "direction",
        "step us",
        "attention",
        "ratio",
        "collectives",
        "GB/s",
        "hidden",
    ];
    let median = |spread: Spread| significant(spread.median_us, 4);
    let titles = SHORT.map(str::to_owned).to_vec();
    let rows = rows.iter().map(|row| cells(row, median).to_vec());
    aligned(&[titles].into_iter().chain(rows).collect::<Vec<_>>())
}

/// The page as Markdown.
pub fn page(place: &Place, rows: &[Row]) -> String {
    let Place { command, device, software, world, revision, unix, samples } = place;
    let mut page = format!("Made by `{command}`.\n\n# Attention of ranks\n\n| | |\n|---|---|\n");
    let shape = rows.first().map(|row| row.shape);
    let shape = shape.map_or(String::new(), |shape| {
        format!(
            "{} heads of 512, lists of {} keys up to the token, zigzag, lists remapped",
            shape.heads, shape.topk
        )
    });
    for (name, value) in [
        ("ranks", &format!("each {device}, {world}")),
        ("software", software),
        ("revision", revision),
        ("date", &utc(*unix)),
        ("shape", &shape),
        (
            "samples",
            &format!(
                "{samples}, each the mean of 10 replays of a graph where the device records, else of one call; the slowest rank's time"
            ),
        ),
    ] {
        page += &format!("| {name} | {value} |\n");
    }
    page += &format!("\n| {} |\n|{}\n", TITLES.join(" | "), "--:|".repeat(TITLES.len()));
    for row in rows {
        page += &format!("| {} |\n", cells(row, spread).join(" | "));
    }
    page + "\nA step is the attention of ranks with its collectives. Attention alone: its kernels on a rank's queries, with all \
            keys in place. Collectives alone: the all-gather of keys, in the backward also the reduce-scatter of their \
            fp32 gradient, each by one call of the library; GB/s is what a rank receives. Hidden: the share of them that \
            a step does not take on top of its attention. The results of a step have the bits of the attention alone.\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel_time::Shape;

    fn row(step: f64, kernels: f64, collectives: f64) -> Row {
        let spread = |us: f64| Spread { median_us: us, least_us: us, most_us: us, samples: 1 };
        Row {
            direction: "forward",
            shape: Shape { ranks: 2, tokens: 64, heads: 4, topk: 8 },
            step: spread(step),
            kernels: spread(kernels),
            collectives: spread(collectives),
            received: 2_000_000,
        }
    }

    #[test]
    fn what_a_step_takes_on_top_of_its_attention_is_not_hidden() {
        let half = row(1050.0, 1000.0, 100.0);
        assert_eq!((half.ratio(), half.hidden(), half.rate()), (1.05, 0.5, 2e10));
        assert_eq!(row(1200.0, 1000.0, 100.0).hidden(), 0.0);
        assert_eq!(row(999.0, 1000.0, 100.0).hidden(), 1.0);
        let table = table(&[half]);
        assert!(table.contains("1.050  100"), "{table}");
        assert!(table.lines().all(|line| line.len() <= 80), "{table}");
    }
}
