//! Source lines of a module's code, for the report of a fault.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::supervisor::run_within;

/// Headers whose functions stand for their callers: a load in one of them is the caller's.
const ACCESSORS: [&str; 4] = ["emulator.h", "mma_model.h", "memory.h", "async_copy.h"];

/// Bytes of code after an accessor's within which its caller goes on.
const NEAR: u32 = 256;

/// `FILE:LINE` for offsets in the library at `path`. Nothing for an offset of 0, without the tool
/// `addr2line`, which comes with the assembler, and where the library does not say.
///
/// Modules do not say which function an inlined one is part of. So for an accessor it is the first
/// line after it that is no accessor's.
pub fn source_lines<const N: usize>(path: &Path, offsets: [u32; N]) -> [Option<String>; N] {
    // A return address is that of the next instruction.
    offsets.map(|offset| source_line(path, offset.checked_sub(1)?))
}

fn source_line(path: &Path, offset: u32) -> Option<String> {
    let mut command = Command::new("addr2line");
    command.arg("-e").arg(path);
    command.args((offset..offset + NEAR).step_by(2).map(|offset| format!("{offset:#x}")));
    let ended = run_within(&command, Duration::from_secs(10)).ok()??;
    let mut lines = ended.words.lines().map_while(file_and_line);
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
        assert_eq!([name("??:0"), name("??:?"), name("")], [None, None, None]);
    }
}
