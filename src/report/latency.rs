//! Times of steps of a model: a table for the terminal, and a page.

use super::numbers::{aligned, significant, spread, utc};
use crate::model::latency::{Measured, Row, Work};
use crate::record::Spread;

/// What the times were measured on.
#[derive(Clone, Debug)]
pub struct Place {
    /// The command that made the page.
    pub command: String,
    /// The device.
    pub device: String,
    /// Its driver and compiler.
    pub software: String,
    /// The commit of this build.
    pub revision: String,
    /// Seconds since 1970.
    pub unix: u64,
    /// The model.
    pub model: String,
    /// Samples of each time.
    pub samples: usize,
}

const TITLES: [&str; 6] =
    ["step", "step us", "launches, cold us", "step / cold", "launches, warm us", "call us"];
const OPERATORS: [&str; 5] = ["operator", "launches", "cold us", "share", "warm us"];

/// What the columns are.
pub const LEGEND: &str = "\
Columns: medians over samples.
  step       the step's launches as one graph
  cold       the sum of its launches' own times, each after other bytes have
             been written through the L2
  ratio      of both
  warm       the same sum, each after a launch of the same
  call       from the host's call to the sampled tokens";

fn name(Work { batch, context, tokens }: Work) -> String {
    match tokens {
        1 => format!("decode, batch {batch}, context {context}"),
        _ => format!("prefill, {batch} prompts, {tokens} tokens up to {context}"),
    }
}

fn cells(one: &Measured, shown: impl Fn(Spread) -> String) -> [String; TITLES.len()] {
    let [cold, warm] = [one.cold_us(), one.warm_us()];
    [
        name(one.work),
        shown(one.step),
        significant(cold, 4),
        format!("{:.3}", one.step.median_us / cold),
        significant(warm, 4),
        shown(one.call),
    ]
}

fn operator_cells(one: &Measured, row: &Row) -> [String; OPERATORS.len()] {
    [
        row.operator.to_owned(),
        row.launches.to_string(),
        significant(row.cold_us, 3),
        format!("{:.1} %", 100.0 * row.cold_us / one.cold_us()),
        significant(row.warm_us, 3),
    ]
}

/// The tables as text: medians alone, which fit a terminal.
pub fn tables(all: &[Measured]) -> String {
    let median = |spread: Spread| significant(spread.median_us, 4);
    let titles = ["step", "step us", "cold us", "ratio", "warm us", "call us"];
    let short = |one: &Measured| {
        let Work { batch, context, tokens } = one.work;
        let mut cells = cells(one, median).to_vec();
        cells[0] = format!("{batch} x {tokens} at {context}");
        cells
    };
    let rows = [titles.map(str::to_owned).to_vec()].into_iter().chain(all.iter().map(short));
    let mut text = aligned(&rows.collect::<Vec<_>>());
    for one in all {
        text += &format!("\n{}\n", name(one.work));
        let rows = one.rows.iter().map(|row| operator_cells(one, row).to_vec());
        let titles = OPERATORS.map(str::to_owned).to_vec();
        text += &aligned(&[titles].into_iter().chain(rows).collect::<Vec<_>>());
    }
    text
}

/// The page as Markdown.
pub fn page(place: &Place, all: &[Measured]) -> String {
    let Place { command, device, software, revision, unix, model, samples } = place;
    let mut page = format!("Made by `{command}`.\n\n# Steps of a model\n\n| | |\n|---|---|\n");
    let repeats = format!(
        "{samples} of each time; of a step each is the mean of 5 replays; of a launch the least of 3 graphs of 10"
    );
    for (name, value) in [
        ("device", device),
        ("software", software),
        ("revision", revision),
        ("date", &utc(*unix)),
        ("model", model),
        ("samples", &repeats),
    ] {
        page += &format!("| {name} | {value} |\n");
    }
    page += &format!("\n| {} |\n|---|{}\n", TITLES.join(" | "), "--:|".repeat(TITLES.len() - 1));
    for one in all {
        page += &format!("| {} |\n", cells(one, spread).join(" | "));
    }
    page += "\nA step is all its launches as one graph, the head and the sampler included. Cold and warm: the sum of its \
             launches' own times, each after other bytes have been written through the L2, or after a launch of the same. \
             Call: from the host's call to the sampled tokens, lists and upload included. Weights and caches are random.\n";
    for one in all {
        page += &format!("\n## {}\n\n", name(one.work));
        page += &format!("| {} |\n|---|{}\n", OPERATORS.join(" | "), "--:|".repeat(4));
        for row in &one.rows {
            let mut cells = operator_cells(one, row);
            cells[0] = format!("`{}`", cells[0]);
            page += &format!("| {} |\n", cells.join(" | "));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_stands_next_to_the_sum_of_its_launches() {
        let spread = |us: f64| Spread { median_us: us, least_us: us, most_us: us, samples: 1 };
        let row =
            |operator, cold_us| Row { operator, launches: 4, warm_us: cold_us / 2.0, cold_us };
        let rows = vec![row("grouped_linear", 75.0), row("mhc_post_mix_pre", 25.0)];
        let work = Work { batch: 128, context: 65_536, tokens: 1 };
        let one = Measured { work, step: spread(110.0), call: spread(150.0), rows };
        let text = tables(std::slice::from_ref(&one));
        assert!(text.contains("1.100") && text.contains("75.0 %"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }
}
