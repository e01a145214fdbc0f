//! The findings of a run as text, 80 columns wide.

use crate::blame::dump::Divergence;
use crate::blame::judge::Finding;
use crate::blame::summary::{Blame, Cell};
use crate::report::numbers::{aligned, count, counted, significant};

use super::NAMED;

/// Width of a line.
const WIDTH: usize = 80;
/// Width of a layer's column.
const COLUMN: usize = 6;

/// The whole text.
pub fn text(blame: &Blame) -> String {
    let mut lines = vec![headline(blame)];
    if let Some(first) = blame.first() {
        for failure in first.failures.iter().take(3) {
            let text = format!("{} of {}: {}", failure.check, failure.tensor, failure.message);
            lines.extend(wrapped(&text, "    "));
        }
    }
    lines.push(String::new());
    lines.push("largest share of a budget by operator and layer, `!` outside:".to_owned());
    lines.extend(grid(blame));
    let growth = blame.growth();
    if !growth.is_empty() {
        lines.push(String::new());
        lines.push("error of the streams, of their root mean square:".to_owned());
        let row = |layer: &str, total: &str, added: &str| {
            vec![format!("  {layer}"), total.to_owned(), added.to_owned()]
        };
        let mut rows = vec![row("layer", "error", "added by its last call")];
        rows.extend(
            growth
                .iter()
                .map(|of| row(&of.layer, &significant(of.total, 3), &significant(of.added, 3))),
        );
        lines.push(aligned(&rows).trim_end().to_owned());
    }
    lines.push(String::new());
    lines.push("calls outside their budgets, then those that move the logits most:".to_owned());
    let heads = ["  budget", "adds", "inherits", "moves", "call", "layer", ""];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(blame.worst(NAMED).into_iter().map(|finding| worst(blame, finding)));
    let table = aligned(&rows);
    lines.extend(table.lines().map(|line| line.chars().take(WIDTH).collect::<String>()));
    for finding in blame.skipped().take(NAMED) {
        let why = finding.skipped.as_deref().unwrap_or_default();
        let text = format!("not judged: {}: {why}", place(blame, finding));
        lines.extend(wrapped(&text, "  "));
    }
    lines.join("\n")
}

/// The verdict.
pub fn headline(blame: &Blame) -> String {
    let calls = counted(blame.findings.len() as u64, "call");
    let compared = count(blame.compared());
    match blame.first() {
        Some(first) => {
            let guilty = blame.findings.iter().filter(|finding| finding.is_guilty()).count();
            format!(
                "first outside its own budget: {}\n  {guilty} of {calls}, {compared} elements",
                place(blame, first)
            )
        }
        None => {
            format!("every call is within its own budget: {calls}, {compared} elements compared")
        }
    }
}

/// Where a call is: `rms_norm q_norm of layer 2, call 31`.
pub fn place(blame: &Blame, finding: &Finding) -> String {
    let place = &finding.place;
    let layer = match place.layer {
        None => "outside the layers".to_owned(),
        Some(_) => format!("of layer {}", blame.layer(place.layer)),
    };
    let name = if place.name == place.operator { "" } else { &place.name };
    let what = format!("{} {name}", place.operator);
    format!("{} {layer}, call {}", what.trim_end(), place.number)
}

/// A row for a call: its share of a budget, what it adds, and how far that moves the logits.
fn worst(blame: &Blame, finding: &Finding) -> Vec<String> {
    let mark = if finding.is_guilty() { "!" } else { "" };
    let number = |value: Option<f64>| value.map_or_else(String::new, |of| significant(of, 2));
    let error = finding.error();
    vec![
        format!("  {mark}{}", significant(finding.budget_used, 2)),
        number(error.map(|error| error.added)),
        number(error.map(|error| error.inherited)),
        number(finding.effect),
        finding.place.number.to_string(),
        blame.layer(finding.place.layer),
        format!("{} {}", finding.place.operator, finding.place.name),
    ]
}

/// The grid, as many layers next to each other as fit.
fn grid(blame: &Blame) -> Vec<String> {
    let grid = blame.grid();
    let widest = grid.operators.iter().map(String::len).max().unwrap_or(0);
    let name = |name: &str| format!("  {name:<widest$}");
    let fit = ((WIDTH - widest - 2) / COLUMN).max(1);
    let mut lines = Vec::new();
    for from in (0..grid.layers.len()).step_by(fit) {
        let columns = from..grid.layers.len().min(from + fit);
        let heads = grid.layers[columns.clone()].iter().map(|layer| format!("{layer:>COLUMN$}"));
        lines.push(name("layer") + &heads.collect::<String>());
        for (operator, cells) in grid.operators.iter().zip(&grid.cells) {
            if cells[columns.clone()].iter().all(Option::is_none) {
                continue;
            }
            let cells =
                cells[columns.clone()].iter().map(|cell| format!("{:>COLUMN$}", shown(*cell)));
            lines.push((name(operator) + &cells.collect::<String>()).trim_end().to_owned());
        }
    }
    lines
}

/// A share with two digits.
fn shown(cell: Option<Cell>) -> String {
    let Some(Cell { used, is_guilty }) = cell else { return String::new() };
    let share = match used {
        None => "?".to_owned(),
        Some(used) if used < 99.0 => format!("{used:.2}"),
        Some(_) => ">99".to_owned(),
    };
    if is_guilty { format!("!{share}") } else { share }
}

/// Lines of at most [`WIDTH`] characters.
fn wrapped(text: &str, indent: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let fits = indent.len() + lines[last].chars().count() + 1 + word.chars().count() <= WIDTH;
        match lines[last].is_empty() {
            true => lines[last].push_str(word),
            false if fits => lines[last].extend([" ", word]),
            false => lines.push(word.to_owned()),
        }
    }
    lines.into_iter().map(|line| format!("{indent}{line}")).collect()
}

/// Where two runs part.
pub fn divergence(apart: &[Divergence], compared: usize, missing: usize) -> String {
    let calls = counted(compared as u64, "call");
    let mut lines = Vec::new();
    match apart.first() {
        None => lines.push(format!("{calls} wrote the same bits")),
        Some(first) => {
            lines.push(format!("the runs part at {}", of_place(first)));
            lines.push(format!("  {} of {calls} wrote other bits", apart.len()));
        }
    }
    if missing > 0 {
        lines.push(format!("  {} not in the other dump", counted(missing as u64, "call")));
    }
    for one in apart.iter().take(NAMED) {
        let inputs = if one.same_inputs { "from the same inputs" } else { "from other inputs" };
        let distance = significant(one.distance, 3);
        let line = format!("  {distance:>9}  {} of {}, {inputs}", one.tensor, of_place(one));
        lines.push(line.chars().take(WIDTH).collect());
    }
    lines.join("\n")
}

fn of_place(one: &Divergence) -> String {
    let place = &one.place;
    let layer = place.layer.map_or_else(|| "-".to_owned(), |layer| layer.to_string());
    format!("{} {} of layer {layer}, call {}", place.operator, place.name, place.number)
}
