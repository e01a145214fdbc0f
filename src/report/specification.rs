//! The page's citations as links. The text of what is cited is at the page's end, so the links work
//! wherever the page is stored.

use std::collections::BTreeSet;

use maud::{Markup, html};

use crate::record::Report;
use crate::specification::{Citation, Section, citations, sections};

use super::numbers::counted;

/// A text whose citations are links. Citations of sections that this build does not know stay text.
pub(super) fn linked(text: &str) -> Markup {
    let mut end = 0;
    let mut parts = Vec::new();
    for place in
        citations(text, None).into_iter().filter(|place| place.citation.section().is_some())
    {
        parts.push((&text[end..place.range.start], &text[place.range.clone()], place.citation));
        end = place.range.end;
    }
    html! {
        @for (before, name, citation) in &parts { (before) a href=(format!("#{}", id(citation))) { (name) } }
        (text[end..])
    }
}

/// What the report's operators and mutants cite, each folded at first; empty where they cite
/// nothing.
pub(super) fn section(report: &Report) -> Markup {
    let cited = cited(report);
    html! {
        @if !cited.is_empty() {
            section #specification {
                h2 { "Specification" }
                p .note { "The " (counted(cited.len() as u64, "section")) " of reference/spec that this page cites, as this report's program knows them." }
                @for section in cited {
                    details .more.cited id=(id(&section.citation)) {
                        summary { (section.citation) " · " (section.title) }
                        pre { (section.text) }
                        p .note { code { (section.citation.document.file()) "#" (section.anchor) } }
                    }
                }
            }
        }
    }
}

/// Whether the page has the section.
pub(super) fn cites(report: &Report) -> bool {
    !cited(report).is_empty()
}

/// Cited sections, in the documents' order.
fn cited(report: &Report) -> Vec<&'static Section> {
    let operators = report.operators.iter().flat_map(|operator| &operator.specification);
    let texts = operators.chain(report.mutants.iter().map(|mutant| &mutant.catalogue));
    let names: BTreeSet<Citation> =
        texts.flat_map(|text| citations(text, None)).map(|place| place.citation).collect();
    sections().iter().filter(|section| names.contains(&section.citation)).collect()
}

/// The anchor of a section on a page: `inference-8.1`, `FM-03`.
fn id(citation: &Citation) -> String {
    citation.to_string().replace(' ', "-")
}
