//! Parts of every page: the head with the style, tables in frames, numbers, names, badges, commands
//! and links to cases.

use std::cell::RefCell;
use std::collections::BTreeSet;

use maud::{Markup, PreEscaped, html};

use crate::case::Case;
use crate::record::CaseRecord;
use crate::record::Standing;

const STYLE: &str = include_str!("style.css");

const SCRIPT: &str = include_str!("script.js");

/// The head of every page: this project's title and style, and what the page adds to the style.
pub(crate) fn page_head(title: &str, own_style: &str) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            title { (title) " · DeepSeek-V4 kernel parity" }
            style { (PreEscaped(STYLE)) (PreEscaped(own_style)) }
        }
    }
}

/// The script at the end of every page: it copies commands, sorts and filters tables, and opens
/// folds that a link leads into. The page is complete without it.
pub(crate) fn page_script() -> Markup {
    html! { script { (PreEscaped(SCRIPT)) } }
}

/// A table inside its own scrolling frame, so that the page never scrolls sideways.
pub(crate) fn scroller(label: &str, table: Markup) -> Markup {
    html! { div .scroll tabindex="0" role="region" aria-label=(label) { (table) } }
}

/// A command to copy. Quotes need no escaping in text, and lines of cases have many of them.
pub(super) fn command(text: &str) -> Markup {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    html! { code .command { (PreEscaped(text)) } }
}

/// A number's text, marked where it is not a number.
pub(super) fn number(value: f64, text: String) -> Markup {
    html! { @if value.is_finite() { (text) } @else { strong .fail-text { (text) } } }
}

/// A name that may break after underscores.
pub(crate) fn breakable(name: &str) -> Markup {
    html! { @for part in name.split_inclusive('_') { (part) wbr; } }
}

/// A standing as a symbol and a word.
pub(super) fn badge(standing: Standing) -> Markup {
    html! { span class=(format!("badge {}", standing.word())) { (standing.symbol()) " " (standing.word()) } }
}

/// Characters of a case's hash.
const HASH: usize = 10;

/// A case's name in every report: the start of blake3 of its line.
pub(crate) fn hash(case: &CaseRecord) -> String {
    let line = serde_json::from_value::<Case>(case.case.clone())
        .map_or_else(|_| case.case.to_string(), |case| case.line());
    blake3::hash(line.as_bytes()).to_hex()[..HASH].to_owned()
}

/// The anchors of cases on a page: a name occurs once, at the first place where the case is shown.
#[derive(Default)]
pub(super) struct Anchors(RefCell<BTreeSet<String>>);

impl Anchors {
    /// A link to the case by its hash, which is also the anchor if it is the first one; and whether
    /// it is the first.
    pub(super) fn of(&self, case: &CaseRecord) -> (Markup, bool) {
        let hash = hash(case);
        let name = format!("case-{hash}");
        let first = self.0.borrow_mut().insert(hash.clone());
        (
            html! { a .anchor id=[first.then_some(&name)] href=(format!("#{name}")) { (hash) } },
            first,
        )
    }
}
