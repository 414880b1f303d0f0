//! A file mapped read-only into memory: how model weights are read without copying them.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a regular file, read on demand by the operating system.
///
/// The file must not be changed while it is mapped: a writer's bytes may show through, and pages cut
/// off by a truncation end the process with `SIGBUS`. Replacing a file by renaming another over it,
/// which is how download tools do it, is harmless.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// The operating system's error, with the path, when the file cannot be opened or mapped;
    /// [`io::ErrorKind::InvalidInput`] when it is not a regular file, and
    /// [`io::ErrorKind::InvalidData`] when it is empty.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        // Looked at before opening, since opening a FIFO would wait for a writer.
        check(path, &std::fs::metadata(path).map_err(|e| named(path, &e))?)?;
        let file = open_without_waiting(path).map_err(|e| named(path, &e))?;
        check(path, &file.metadata().map_err(|e| named(path, &e))?)?;
        // SAFETY: a read-only private view of a regular file. That nobody changes the file meanwhile
        // is the documented condition which no process can enforce on Linux.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| named(path, &e))?;
        Ok(Self { map })
    }

    /// Asks the operating system to read the whole file ahead. A hint: failure is not an error.
    pub fn will_need(&self) {
        let _ = self.map.advise(memmap2::Advice::WillNeed);
    }

    /// Takes the pages of `range` out of this process's memory until they are read again; the
    /// system's file cache keeps them. A hint: failure is not an error.
    ///
    /// # Panics
    /// When `range` is not within the file.
    pub fn release(&self, range: std::ops::Range<usize>) {
        let part = &self.map[range.clone()];
        #[cfg(unix)]
        if !part.is_empty() {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: on a mapping of a file that is never written to, dropped pages come back from
            // the file with the same bytes.
            let _ = unsafe { self.map.unchecked_advise_range(advice, range.start, part.len()) };
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

fn check(path: &Path, metadata: &Metadata) -> io::Result<()> {
    let refuse = |kind, why: &str| Err(io::Error::new(kind, format!("{}: {why}", path.display())));
    if metadata.is_dir() {
        return refuse(io::ErrorKind::InvalidInput, "is a directory, name a file in it");
    }
    if !metadata.is_file() {
        return refuse(io::ErrorKind::InvalidInput, "is not a regular file, it cannot be mapped");
    }
    if metadata.len() == 0 {
        return refuse(io::ErrorKind::InvalidData, "is empty");
    }
    Ok(())
}

/// Opens without waiting, should the path have become a FIFO since it was looked at.
fn open_without_waiting(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    options.open(path)
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_the_bytes_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        file.will_need();
        file.release(1..3);
        file.release(0..0);
        assert_eq!(&file[..], &bytes[..]);
    }

    #[test]
    fn refuses_what_is_not_a_file_with_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        let fifo = dir.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: `name` is a NUL-terminated string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);

        for (path, kind, word) in [
            (dir.path(), io::ErrorKind::InvalidInput, "directory"),
            (&fifo, io::ErrorKind::InvalidInput, "regular file"),
            (&empty, io::ErrorKind::InvalidData, "empty"),
            (&dir.path().join("missing"), io::ErrorKind::NotFound, "missing"),
        ] {
            let error = MappedFile::open(path).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(word), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
    }
}
