//! The plots of a bisection: as text for the terminal, and on a page with the diff of the kernels.

use std::fmt::Write;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::Bisection;
use super::search::Answer;
use crate::record::figures;

/// Width of the longest bar of the text plot, in characters.
const BAR: f64 = 32.0;

/// An answer as one word.
pub fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Good => "good",
        Answer::Bad => "bad",
        Answer::Skip => "skip",
    }
}

/// How values are placed between 0 and 1: by logarithm where they are positive and span a wide
/// range.
struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Scale {
    fn of(found: &Bisection) -> Self {
        let values: Vec<f64> = found
            .trials
            .values()
            .filter_map(|trial| trial.value)
            .filter(|v| v.is_finite())
            .collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        let logarithmic = low > 0.0 && high > 10.0 * low;
        // The ends are powers of ten. A linear axis starts at zero, so that lengths compare.
        let decade = |value: f64, up: f64| 10f64.powf((value.log10() + up).floor());
        match (values.is_empty(), logarithmic) {
            (true, _) => Self { low: 0.0, high: 1.0, logarithmic: false },
            (_, true) => Self { low: decade(low, 0.0), high: decade(high, 1.0), logarithmic },
            (_, false) => Self { low: 0.0, high: if high > 0.0 { high } else { 1.0 }, logarithmic },
        }
    }

    /// NaN and infinity go to the top: they are worse than any number.
    fn place(&self, value: f64) -> f64 {
        let share = if !value.is_finite() {
            1.0
        } else if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    fn name(&self) -> &'static str {
        if self.logarithmic { "logarithmic" } else { "linear" }
    }
}

/// One line for each tried commit, oldest first, with a bar for its value.
pub fn text_plot(found: &Bisection) -> String {
    let scale = Scale::of(found);
    let mut text = format!(
        "{} ({}, {} to {}), {} of {} commits tried\n",
        found.metric.value_name(),
        scale.name(),
        figures::measure(scale.low, 4),
        figures::measure(scale.high, 4),
        found.trials.len(),
        found.line.len()
    );
    for (&at, trial) in &found.trials {
        let commit = &found.line[at];
        let (value, bar) = match trial.value {
            Some(value) => (
                figures::measure(value, 4),
                "#".repeat((scale.place(value) * BAR).round() as usize),
            ),
            None => ("-".to_owned(), String::new()),
        };
        let mark = if at == found.turn.first_bad { '>' } else { ' ' };
        let width = BAR as usize;
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{mark}{at:5} {} {:4} {value:>10} |{bar:width$}| {}",
            commit.short(),
            word(trial.answer),
            commit.subject
        );
    }
    text
}

/// The page: result, plot, trials and diff. It has no external references.
pub fn html(found: &Bisection) -> String {
    let first_bad = &found.line[found.turn.first_bad];
    let title = match found.turn.is_exact() {
        true => format!("First bad commit: {} {}", first_bad.short(), first_bad.subject),
        false => format!(
            "First bad commit: one of {}, up to {}",
            found.turn.first_bad - found.turn.last_good,
            first_bad.short()
        ),
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p { (first_bad.signature) }
                p { "Case " code { (found.case.line()) } }
                (plot(found))
                (table(found))
                h2 { "What changed in the kernels" }
                pre { (diff(&found.diff)) }
            }
        }
    };
    page.into_string()
}

const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { overflow-x: auto; white-space: pre; }
table { border-collapse: collapse; } td, th { padding: .15rem .6rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.axis { stroke: currentColor; fill: none; opacity: .5; } .turn { stroke: currentColor; stroke-dasharray: 4 3; }
.good { stroke: #2a7fb8; fill: #2a7fb8; color: #2a7fb8; } .bad { stroke: #d1542c; fill: none; stroke-width: 2; color: #d1542c; }
.skip { stroke: currentColor; fill: none; }
.added { color: #2a7fb8; } .removed { color: #d1542c; }
";

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 220.0;
const TOP: f64 = 20.0;

/// Value over position on the line. Good commits are discs, bad ones crosses, skipped ones circles.
fn plot(found: &Bisection) -> Markup {
    let scale = Scale::of(found);
    let last = (found.line.len() - 1).max(1) as f64;
    let x = |at: f64| LEFT + (WIDTH - LEFT - 20.0) * at / last;
    let y = |value: Option<f64>| {
        value.map_or(BOTTOM, |value| BOTTOM - (BOTTOM - TOP) * scale.place(value))
    };
    let turn = x((found.turn.last_good + found.turn.first_bad) as f64 / 2.0);
    html! {
        figure {
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" {
                title { (found.metric.value_name()) " over the commits that were tried" }
                path .axis d=(format!("M{LEFT} {TOP}V{BOTTOM}H{WIDTH}")) {}
                path .turn d=(format!("M{turn:.1} {TOP}V{BOTTOM}")) {}
                text x="4" y=(TOP + 4.0) { (figures::measure(scale.high, 2)) }
                text x="4" y=(BOTTOM) { (figures::measure(scale.low, 2)) }
                text x=(LEFT) y=(HEIGHT - 20.0) { (found.line[0].short()) }
                text x=(WIDTH - 20.0) y=(HEIGHT - 20.0) text-anchor="end" { (found.line[found.line.len() - 1].short()) }
                @for (&at, trial) in &found.trials {
                    (mark(trial.answer, x(at as f64), y(trial.value), &found.line[at].subject))
                }
            }
            figcaption {
                (found.metric.value_name()) " (" (scale.name()) " scale), by commit, oldest first; disc: good, cross: bad, "
                "circle: skipped; the dashed line is the turn."
            }
        }
    }
}

fn mark(answer: Answer, x: f64, y: f64, subject: &str) -> Markup {
    let class = word(answer);
    html! {
        @match answer {
            Answer::Good => { circle class=(class) cx=(format!("{x:.1}")) cy=(format!("{y:.1}")) r="4" { title { (subject) } } }
            Answer::Skip => { circle class=(class) cx=(format!("{x:.1}")) cy=(format!("{y:.1}")) r="5" { title { (subject) } } }
            Answer::Bad => { path class=(class) d=(format!("M{:.1} {:.1}l8 8m0-8l-8 8", x - 4.0, y - 4.0)) { title { (subject) } } }
        }
    }
}

fn table(found: &Bisection) -> Markup {
    html! {
        h2 { (found.trials.len()) " of " (found.line.len()) " commits were tried" }
        table {
            thead { tr { th { "commit" } th { "subject" } th { "answer" } th { (found.metric.value_name()) } th { "seen" } } }
            tbody {
                @for (&at, trial) in &found.trials {
                    tr {
                        td { code { (found.line[at].short()) } }
                        td { (found.line[at].subject) }
                        td { (word(trial.answer)) }
                        td .number { (trial.value.map_or("–".to_owned(), |value| figures::measure(value, 4))) }
                        td { (trial.note) }
                    }
                }
            }
        }
    }
}

fn diff(text: &str) -> Markup {
    let class = |line: &str| match line.as_bytes().first() {
        Some(b'+') => "added",
        Some(b'-') => "removed",
        _ => "",
    };
    html! {
        @for line in text.lines() {
            span class=(class(line)) { (line) "\n" }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::bisect::history::Commit;
    use crate::bisect::judge::{Metric, Trial};
    use crate::bisect::search::Turn;
    use crate::case::Case;

    fn found(values: &[(Answer, Option<f64>)]) -> Bisection {
        let commit = |at: usize| Commit {
            id: format!("{at:040}"),
            subject: format!("Change <{at}>"),
            signature: "A, 2026-01-01".into(),
            parents: vec![],
        };
        let trial =
            |&(answer, value): &(Answer, Option<f64>)| Trial { answer, value, note: "seen".into() };
        Bisection {
            metric: Metric::Error,
            case: Case::parse(r#"{"operator":"rms_norm"}"#).unwrap(),
            line: (0..values.len()).map(commit).collect(),
            trials: values.iter().map(trial).enumerate().collect::<BTreeMap<_, _>>(),
            turn: Turn { last_good: 0, first_bad: values.len() - 1 },
            diff: "-old < new\n+new".into(),
        }
    }

    #[test]
    fn the_text_plot_has_a_line_for_each_trial_and_marks_the_turn() {
        let text = text_plot(&found(&[
            (Answer::Good, Some(1e-8)),
            (Answer::Skip, None),
            (Answer::Bad, Some(1e-5)),
        ]));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].contains("logarithmic") && lines[0].contains("3 of 3"));
        assert!(lines[2].contains("skip") && !lines[2].contains('#') && lines[3].starts_with('>'));
        let bar = |line: &str| line.matches('#').count();
        assert!(bar(lines[3]) > 2 * bar(lines[1]), "{text}");
    }

    #[test]
    fn the_page_holds_plot_trials_and_difference_escaped() {
        let page = html(&found(&[(Answer::Good, Some(0.0)), (Answer::Bad, Some(f64::INFINITY))]));
        for needle in [
            "<svg",
            "class=\"good\"",
            "class=\"bad\"",
            "Change &lt;1&gt;",
            "-old &lt; new",
            "linear",
        ] {
            assert!(page.contains(needle), "`{needle}` is not in the page");
        }
        assert!(!page.contains("NaN") && !page.contains("http"));
    }

    #[test]
    fn nothing_measured_and_nothing_but_zeros_can_be_drawn() {
        for values in [
            [(Answer::Good, None), (Answer::Bad, None)],
            [(Answer::Good, Some(0.0)), (Answer::Bad, Some(0.0))],
        ] {
            assert!(
                html(&found(&values)).contains("<svg")
                    && text_plot(&found(&values)).lines().count() == 3
            );
        }
    }
}
