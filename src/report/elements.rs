//! What pages are made of, whichever page it is: the head with the style, tables in frames, numbers, names, badges.

use maud::{Markup, PreEscaped, html};

use super::summary::Standing;

const STYLE: &str = include_str!("style.css");

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

/// A table inside its own scrolling frame, so that the page never scrolls sideways.
pub(crate) fn scroller(label: &str, table: Markup) -> Markup {
    html! { div .scroll tabindex="0" role="region" aria-label=(label) { (table) } }
}

/// A number's text, marked where the number is none.
pub(super) fn number(value: f64, text: String) -> Markup {
    html! { @if value.is_finite() { (text) } @else { strong .fail-text { (text) } } }
}

/// A name that may break after underscores.
pub(crate) fn breakable(name: &str) -> Markup {
    html! { @for part in name.split_inclusive('_') { (part) wbr; } }
}

/// A standing as symbol and word.
pub(super) fn badge(standing: Standing) -> Markup {
    html! { span class=(format!("badge {}", standing.word())) { (standing.symbol()) " " (standing.word()) } }
}
