//! Diagnoses on the page and in the summary.

use maud::{Markup, html};

use super::{Diagnosis, of_operator, of_report};
use crate::record::Report;
use crate::report::markdown::text;

/// Operators in the verdict's block.
const MOST_OPERATORS: usize = 8;

/// The block below the verdict: each operator that fails, with what its failing cases have in
/// common. Empty where all agree.
pub(crate) fn verdict(report: &Report) -> Markup {
    let diagnoses = of_report(report);
    html! {
        @if !diagnoses.is_empty() {
            div .diagnosis {
                @for diagnosis in diagnoses.iter().take(MOST_OPERATORS) { (block(diagnosis)) }
                @if diagnoses.len() > MOST_OPERATORS {
                    p { "And " (diagnoses.len() - MOST_OPERATORS) " more operators, each in its section." }
                }
            }
        }
    }
}

/// The same at the top of an operator's section.
pub(crate) fn section(report: &Report, operator: &str) -> Markup {
    html! { @if let Some(diagnosis) = of_operator(report, operator) { div .diagnosis { (block(&diagnosis)) } } }
}

fn block(diagnosis: &Diagnosis) -> Markup {
    html! {
        p { strong { (diagnosis.heading()) } }
        @if !diagnosis.sentences.is_empty() { ul { @for sentence in &diagnosis.sentences { li { (sentence) } } } }
    }
}

/// The same for a summary; empty where all agree.
pub(crate) fn markdown(report: &Report) -> String {
    let diagnoses = of_report(report);
    let mut page = String::new();
    for diagnosis in diagnoses.iter().take(MOST_OPERATORS) {
        page += &format!("**{}**\n\n", text(&diagnosis.heading()));
        for sentence in &diagnosis.sentences {
            page += &format!("- {}\n", text(sentence));
        }
        page += if diagnosis.sentences.is_empty() { "" } else { "\n" };
    }
    if diagnoses.len() > MOST_OPERATORS {
        page += &format!("And {} more operators.\n\n", diagnoses.len() - MOST_OPERATORS);
    }
    page
}
