//! The one way to standard output and standard error.
//!
//! `println!` panics where its reader has ended or the disk is full, so clippy denies it in this
//! crate (`print_stdout`, `print_stderr`). Commands print with `outln!` and `errln!` instead:
//!
//! - Standard output was closed (`parity ops | head`): the process ends at once, without a message,
//!   with code 141. A shell reports the same code of a program that SIGPIPE ends. SIGPIPE itself
//!   stays ignored: it would also end the harness when a worker process closes its end of a pipe.
//! - Standard output cannot be written (a full disk): one error, code 2.
//! - Standard error cannot be written: nothing is done.
//!
//! Text holds ANSI colours from [`good`], [`bad`] and the like; they are removed where colours are
//! off.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::OnceLock;

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::Exit;
use crate::record::words::printable;

/// How this process prints.
#[derive(Clone, Copy, Debug, Default)]
struct Settings {
    quiet: bool,
    stdout_color: bool,
    stderr_color: bool,
}

/// What follows the escape character in the sequences of [`Styled`] and of clap.
const STYLES: [&str; 7] = ["[0m", "[1m", "[2m", "[4m", "[31m", "[32m", "[33m"];

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Sets how this process prints; only the first call has an effect. Without one no output is
/// coloured.
pub fn set(quiet: bool, color: clap::ColorChoice) {
    match color {
        clap::ColorChoice::Auto => {}
        clap::ColorChoice::Always => ColorChoice::Always.write_global(),
        clap::ColorChoice::Never => ColorChoice::Never.write_global(),
    }
    // These respect NO_COLOR, CLICOLOR, CLICOLOR_FORCE, TERM and terminals.
    let colored = |choice: ColorChoice| choice != ColorChoice::Never;
    let stdout_color = colored(AutoStream::choice(&io::stdout()));
    let stderr_color = colored(AutoStream::choice(&io::stderr()));
    let _ = SETTINGS.set(Settings { quiet, stdout_color, stderr_color });
}

fn settings() -> Settings {
    SETTINGS.get().copied().unwrap_or_default()
}

/// Whether only the verdict and the failures are printed (`--quiet`).
pub fn is_quiet() -> bool {
    settings().quiet
}

/// Whether standard error is coloured. A worker whose standard error this process passes on must
/// use the same.
pub fn stderr_has_color() -> bool {
    settings().stderr_color
}

/// Prints to standard output, or ends the process.
pub fn print(text: fmt::Arguments<'_>) {
    let text = dressed(text, settings().stdout_color);
    let written = io::stdout().lock().write_all(text.as_bytes());
    end_unless(written);
}

/// Prints what is still buffered, or ends the process.
pub fn flush() {
    end_unless(io::stdout().flush());
}

/// Prints to standard error and ignores errors, because they cannot be reported.
pub fn print_error(text: fmt::Arguments<'_>) {
    let text = dressed(text, settings().stderr_color);
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Prints a value as JSON.
///
/// # Errors
/// A value that JSON cannot hold.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    print(format_args!("{text}\n"));
    Ok(())
}

/// The text, with or without its colours. Of the control characters only those of [`Styled`] reach
/// a terminal, whoever wrote the others.
fn dressed(text: fmt::Arguments<'_>, color: bool) -> String {
    let text = text.to_string();
    let mut shown = String::with_capacity(text.len());
    for (number, part) in text.split('\u{1b}').enumerate() {
        let own = STYLES.iter().find(|style| number > 0 && part.starts_with(**style));
        let rest = match own {
            Some(style) => {
                if color {
                    shown.push('\u{1b}');
                    shown.push_str(style);
                }
                &part[style.len()..]
            }
            None => {
                if number > 0 {
                    shown.push_str(&printable("\u{1b}"));
                }
                part
            }
        };
        shown.push_str(&printable(rest));
    }
    shown
}

fn end_unless(written: io::Result<()>) {
    let Err(error) = written else { return };
    let exit = if error.kind() == io::ErrorKind::BrokenPipe {
        Exit::Closed
    } else {
        print_error(format_args!("parity: writing to standard output: {error}\n"));
        Exit::BadInput
    };
    // Here, so that no caller can forget it. Children and folders are cleaned up as when this
    // process is killed.
    std::process::exit(exit.code().into())
}

/// Prints a line to standard output.
macro_rules! outln {
    ($($text:tt)*) => { $crate::command::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard output.
macro_rules! out {
    ($($text:tt)*) => { $crate::command::output::print(format_args!($($text)*)) };
}

/// Prints a line to standard output that is neither verdict nor failure; `--quiet` hides it.
macro_rules! detailln {
    ($($text:tt)*) => {
        if !$crate::command::output::is_quiet() {
            outln!($($text)*);
        }
    };
}

/// Prints a line to standard error.
macro_rules! errln {
    ($($text:tt)*) => { $crate::command::output::print_error(format_args!("{}\n", format_args!($($text)*))) };
}

/// Text in a style.
#[derive(Clone, Copy, Debug)]
pub struct Styled<T> {
    text: T,
    style: Style,
}

impl<T: fmt::Display> fmt::Display for Styled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Widths apply to the text: escapes take no column.
        write!(f, "{}", self.style)?;
        self.text.fmt(f)?;
        write!(f, "{:#}", self.style)
    }
}

/// What agrees.
pub fn good<T: fmt::Display>(text: T) -> Styled<T> {
    Styled { text, style: AnsiColor::Green.on_default().bold() }
}

/// What disagrees, and errors.
pub fn bad<T: fmt::Display>(text: T) -> Styled<T> {
    Styled { text, style: AnsiColor::Red.on_default().bold() }
}

/// A failure: its first line names what fails.
pub fn failure(text: &str) -> String {
    let (head, rest) = text.split_at(text.find('\n').unwrap_or(text.len()));
    format!("{}{rest}", bad(head))
}

/// Undecided results, and warnings.
pub fn unsure<T: fmt::Display>(text: T) -> Styled<T> {
    Styled { text, style: AnsiColor::Yellow.on_default().bold() }
}

/// A heading or a name.
pub fn strong<T: fmt::Display>(text: T) -> Styled<T> {
    Styled { text, style: Style::new().bold() }
}

/// Legends.
pub fn faint<T: fmt::Display>(text: T) -> Styled<T> {
    Styled { text, style: Style::new().dimmed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_style_takes_no_column() {
        assert_eq!(format!("{:6}|", good("ok")), "\u{1b}[1m\u{1b}[32mok    \u{1b}[0m|");
    }

    #[test]
    fn of_control_characters_only_own_styles_reach_a_terminal() {
        let forged = "\u{1b}[2J\u{1b}[8mhidden\r\u{9b}1Aall agreed";
        let shown = "\\u{1b}[2J\\u{1b}[8mhidden\\u{d}\\u{9b}1Aall agreed";
        for color in [false, true] {
            let text = dressed(format_args!("{} {forged}\n", bad("x")), color);
            let styled = if color { "\u{1b}[1m\u{1b}[31mx\u{1b}[0m" } else { "x" };
            assert_eq!(text, format!("{styled} {shown}\n"));
        }
        for style in [good("").style, bad("").style, unsure("").style, strong("").style] {
            let text = format!("{style}t{style:#}");
            assert_eq!(dressed(format_args!("{text}"), true), text);
            assert_eq!(dressed(format_args!("{text}"), false), "t");
        }
    }
}
