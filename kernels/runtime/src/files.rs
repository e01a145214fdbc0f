//! Files that other programs wrote.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Reads a file that another process may have replaced by anything. Only a regular file of at most
/// `most` bytes is read; nothing else is waited for, followed or held in memory.
///
/// # Errors
/// The file's name, and its actual kind.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let name = path
        .file_name()
        .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
    let failed = |e: io::Error| format!("reading {name}: {e}");
    // A plain open of a FIFO waits for its writer. For a link the error code only means "too many".
    let is_link = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    if is_link {
        return Err(format!("{name} is a symbolic link, no regular file"));
    }
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(format!("{name} is {}, no regular file", kind_of(found.file_type())));
    }
    let too_large =
        |bytes: &str| format!("{name} has {bytes} bytes; what is expected has at most {most}");
    if found.len() > most {
        return Err(too_large(&found.len().to_string()));
    }
    let mut bytes = Vec::with_capacity(found.len() as usize);
    // It may grow while it is read.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most { Err(too_large("more")) } else { Ok(bytes) }
}

fn kind_of(found: std::fs::FileType) -> &'static str {
    match found {
        found if found.is_dir() => "a directory",
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        found if found.is_char_device() || found.is_block_device() => "a device",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_of_the_expected_size_is_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "12345").expect("a file");
        assert_eq!(read_regular(&path("file"), 5).as_deref(), Ok(&b"12345"[..]));
        std::fs::create_dir(path("folder")).expect("a folder");
        File::create(path("sparse")).and_then(|file| file.set_len(6 << 30)).expect("a sparse file");
        std::os::unix::fs::symlink("/dev/zero", path("device")).expect("a link");
        std::os::unix::fs::symlink(path("file"), path("link")).expect("a link");
        let socket = std::os::unix::net::UnixListener::bind(path("socket"));
        let fifo =
            std::process::Command::new("mkfifo").arg(path("fifo")).status().expect("mkfifo runs");
        assert!(fifo.success() && socket.is_ok());
        for (name, most, needle) in [
            ("file", 4, "file has 5 bytes; what is expected has at most 4"),
            ("folder", 9, "folder is a directory, no regular file"),
            (
                "sparse",
                1 << 20,
                "sparse has 6442450944 bytes; what is expected has at most 1048576",
            ),
            ("device", 9, "device is a symbolic link, no regular file"),
            ("link", 9, "link is a symbolic link, no regular file"),
            ("fifo", 9, "fifo is a FIFO, no regular file"),
            ("socket", 9, "reading socket: "),
            ("none", 9, "reading none: No such file"),
        ] {
            let error = read_regular(&path(name), most).expect_err(name);
            assert!(error.starts_with(needle), "{error}");
        }
        let device = read_regular(Path::new("/dev/zero"), 9).expect_err("a device");
        assert_eq!(device, "zero is a device, no regular file");
    }
}
