//! Text from outside: from kernels, compilers, workers and files. It may have any length and hold
//! anything.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Characters of a message that are kept.
const MOST: usize = 2000;

/// Characters of a line that is quoted within a message.
const BRIEF: usize = 160;

/// A message as it is recorded: its first characters, and how many more it had.
pub fn message(text: impl Into<String>) -> String {
    shortened(text.into(), MOST)
}

/// The start of a line that is quoted within a message.
pub fn brief(text: &str) -> String {
    shortened(text.to_owned(), BRIEF)
}

fn shortened(mut text: String, most: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(most) {
        let more = text[end..].chars().count();
        text.truncate(end);
        let _ = write!(text, "… and {more} more characters");
    }
    text
}

/// Text that a terminal may show. Control characters could move the cursor, change colours or hide
/// earlier text, so they are written out. Lines stay lines.
pub fn printable(text: &str) -> Cow<'_, str> {
    let hides = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(hides) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if hides(c) { shown.extend(c.escape_unicode()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// Text from outside that is part of a line: without control characters, and on one line.
pub fn line(text: &str) -> String {
    printable(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// An error with its causes, each once: many errors already include the text of their cause.
pub fn of_error(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain() {
        let words = cause.to_string();
        if said.is_empty() {
            said = words;
        } else if !said.contains(&words) {
            let _ = write!(said, ": {words}");
        }
    }
    message(said)
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn messages_end_and_say_how_much_they_leave_out() {
        assert_eq!(message("ä".repeat(MOST)), "ä".repeat(MOST));
        let long = message("ä".repeat(MOST + 7));
        assert!(long.ends_with("ä… and 7 more characters") && long.chars().count() < MOST + 40);
        assert!(brief(&"x".repeat(5000)).chars().count() < 200);
    }

    #[test]
    fn what_would_move_the_cursor_or_turn_the_line_is_written_out() {
        assert_eq!(printable("two\nlines\tand more"), "two\nlines\tand more");
        assert_eq!(
            printable("\u{1b}[2J\r\u{9b}1A\u{202e}x"),
            "\\u{1b}[2J\\u{d}\\u{9b}1A\\u{202e}x"
        );
    }

    #[test]
    fn the_words_of_the_system_are_said_once() {
        let source = std::io::Error::from_raw_os_error(2);
        let error: anyhow::Result<()> =
            Err(dsv4_runtime::RuntimeError::system("reading x", source).into());
        let said = of_error(&error.context("--kernels DIR").unwrap_err());
        assert_eq!(said, "--kernels DIR: reading x: No such file or directory (os error 2)");
    }
}
