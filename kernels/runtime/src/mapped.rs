//! Large files as memory: what is not read is never loaded.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a regular file, mapped read-only. No other process may change or truncate the file
/// while it is mapped, as with any mapping: reads would see the change, or end the process.
#[derive(Debug)]
pub struct MappedFile(Option<Mmap>);

impl MappedFile {
    /// Maps a file.
    ///
    /// # Errors
    /// A file that cannot be opened or mapped, or is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // A file without bytes has nothing to map.
        if found.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the mapping is read-only and never given out as mutable memory. That the
        // file does not change meanwhile is the documented contract of this type.
        Ok(Self(Some(unsafe { Mmap::map(&file)? })))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_has_the_bytes_of_the_file_and_an_empty_one_has_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, b"12345").expect("a file");
        assert_eq!(&MappedFile::open(&path).expect("a mapping")[..], b"12345");
        std::fs::write(&path, b"").expect("a file");
        assert!(MappedFile::open(&path).expect("a mapping").is_empty());
        let error = MappedFile::open(folder.path()).expect_err("a folder");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(MappedFile::open(&folder.path().join("none")).is_err());
    }
}
