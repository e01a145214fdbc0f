//! Source lines of a module's code, for the report of a fault.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::supervisor::run_within;

/// Headers whose functions stand for their callers: a load in one of them is the caller's.
const ACCESSORS: [&str; 6] =
    ["emulator.h", "mma_model.h", "memory.h", "async_copy.h", "mbarrier.h", "pipeline.h"];

/// Bytes of code after an accessor's within which the function that it is inlined in goes on.
const NEAR: u32 = 256;

/// `FILE:LINE` for offsets in the library at `path`. Nothing for an offset of 0, without the tool
/// `addr2line`, which comes with the assembler, and where the library does not say.
///
/// Modules do not name the functions that are inlined. So for an accessor it is the first line
/// after it, in the same function, that is no accessor's.
pub fn source_lines<const N: usize>(path: &Path, offsets: [u32; N]) -> [Option<String>; N] {
    // A return address is that of the next instruction.
    offsets.map(|offset| source_line(path, offset.checked_sub(1)?))
}

fn source_line(path: &Path, offset: u32) -> Option<String> {
    let mut command = Command::new("addr2line");
    command.arg("-f").arg("-e").arg(path);
    command.args((offset..offset + NEAR).step_by(2).map(|offset| format!("{offset:#x}")));
    let ended = run_within(&command, Duration::from_secs(10)).ok()??;
    line_of(&ended.words)
}

/// The line that answers of `addr2line -f` mean: a function and a line by turns.
fn line_of(answers: &str) -> Option<String> {
    let answers: Vec<&str> = answers.lines().collect();
    let function = *answers.first()?;
    let mut lines = answers
        .chunks_exact(2)
        .take_while(|answer| answer[0] == function)
        .map_while(|answer| file_and_line(answer[1]));
    let first = lines.next()?;
    let is_accessor = |line: &String| ACCESSORS.iter().any(|name| line.starts_with(name));
    if !is_accessor(&first) {
        return Some(first);
    }
    Some(lines.find(|line| !is_accessor(line)).unwrap_or(first))
}

/// `file.h:12` of `/tmp/compile-1/./file.h:12 (discriminator 3)`; nothing of `??:0`.
fn file_and_line(line: &str) -> Option<String> {
    let (path, rest) = line.rsplit_once(':')?;
    let number = rest.split(' ').next().filter(|number| *number != "0" && *number != "?")?;
    let file = Path::new(path).file_name()?.to_str()?;
    Some(format!("{file}:{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_named_by_its_file_alone() {
        let name = |line| file_and_line(line);
        assert_eq!(name("/tmp/compile-x/./rope.cu:41"), Some("rope.cu:41".to_owned()));
        assert_eq!(name("rope.cu:41 (discriminator 2)"), Some("rope.cu:41".to_owned()));
        let answers =
            ["k", "a/memory.h:7", "k", "a/memory.h:8", "k", "a/k.cu:5", "other", "b.cu:1"];
        let found = |count: usize| line_of(&answers[answers.len() - count..].join("\n"));
        assert_eq!(found(8), Some("k.cu:5".to_owned()));
        assert_eq!(line_of("k\na/memory.h:7\nother\nb.cu:1"), Some("memory.h:7".to_owned()));
        assert_eq!([found(2), line_of("")], [Some("b.cu:1".to_owned()), None]);
        assert_eq!([name("??:0"), name("??:?"), name("")], [None, None, None]);
    }
}
