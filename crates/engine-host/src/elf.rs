//! The file stage of loading a plugin: everything that is checked before the dynamic linker maps
//! the file, because from then on a bad file can kill the process.
//!
//! The file is opened once and copied into sealed memory; hash and checks are of the copy, and the
//! library is loaded from it ([`CheckedFile::load_path`]). So neither replacing the file between check
//! and load has an effect, nor writing into it in place, even while the library is in use: a mapped
//! file that is cut short would end the process.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::discovery::policy::Policy;
use crate::document::{self, open_regular};

mod dynamic;
mod header;
mod note;

pub use header::check_image;
pub use note::{PluginNote, cpu_has};

/// A SHA-256 digest; displays as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sha256Digest(pub [u8; 32]);

impl Sha256Digest {
    /// Parses 64 hexadecimal digits of either case.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hex = String::with_capacity(64);
        for byte in self.0 {
            write!(hex, "{byte:02x}")?;
        }
        f.pad(&hex)
    }
}

impl fmt::Debug for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a library was refused before loading: one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}", path = document::shown(path))]
pub struct LibraryError {
    /// The library's file.
    pub path: PathBuf,
    /// One line.
    pub reason: String,
}

/// A library that passed the file stage, still open.
#[derive(Debug)]
pub struct CheckedFile {
    /// What was checked: a sealed copy of the file, or the file itself where the system gives none.
    pub file: File,
    /// Where the file was found; for messages only, the name may lead elsewhere by now.
    pub path: PathBuf,
    /// Digest of the whole content.
    pub sha256: Sha256Digest,
    /// What the library says about itself; `None` when it is no plugin.
    pub note: Option<PluginNote>,
    /// What is allowed and may surprise, one line each.
    pub warnings: Vec<String>,
}

impl CheckedFile {
    /// A path by which the dynamic linker opens exactly the checked file. Valid while `self` lives.
    pub fn load_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }
}

/// Larger files are refused unread: a plugin with embedded GPU kernels stays well below.
pub const MAX_LIBRARY_BYTES: u64 = 1 << 30;

/// Opens and checks the library at `path`, which must lie inside the directory of `policy`.
///
/// `pin` is the digest that the manifest demands. Never blocks on pipes or devices, and no content
/// of the file can make it panic.
pub fn check_file(
    path: &Path,
    policy: &Policy,
    pin: Option<Sha256Digest>,
) -> Result<CheckedFile, LibraryError> {
    let refuse = |reason: String| LibraryError { path: path.to_owned(), reason };
    let unread = |error: io::Error| refuse(format!("cannot be read: {error}"));

    policy.check_link(path).map_err(refuse)?;
    let file = open_regular(path).map_err(unread)?;
    policy.check_open_file(&file).map_err(refuse)?;

    let size = file.metadata().map_err(unread)?.len();
    if size > MAX_LIBRARY_BYTES {
        return Err(refuse(format!(
            "{size} bytes, more than the {MAX_LIBRARY_BYTES} allowed for a plugin"
        )));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (file, sha256) = match sealed_memory(&name) {
        Some(copy) => {
            let sha256 = digest(&file, |bytes| (&copy).write_all(bytes)).map_err(unread)?;
            seal(&copy).map_err(unread)?;
            (copy, sha256)
        }
        None => {
            let sha256 = digest(&file, |_| Ok(())).map_err(unread)?;
            (file, sha256)
        }
    };
    // What was read: the file may have another length by now.
    let size = file.metadata().map_err(unread)?.len();
    if let Some(pin) = pin.filter(|pin| *pin != sha256) {
        return Err(refuse(format!(
            "sha256 is {sha256}, the manifest pins {pin}: install the pinned build or update the pin"
        )));
    }
    let (note, warnings) = header::examine(&file, size).map_err(refuse)?;
    Ok(CheckedFile { file, path: path.to_owned(), sha256, note, warnings })
}

/// Memory that can be loaded from and sealed; `None` where the system has none or forbids it.
fn sealed_memory(name: &str) -> Option<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // For people who look at the process's maps; longer names are refused.
    let name: String = name.chars().take(MEMORY_NAME_CHARACTERS).collect();
    let made = match rustix::fs::memfd_create(&name, flags | MemfdFlags::EXEC) {
        // A system that does not know the flag. One that knows it and says no would give memory without
        // it, too, but none that code can be run from.
        Err(Errno::INVAL) => rustix::fs::memfd_create(&name, flags),
        made => made,
    };
    made.ok().map(File::from)
}

const MEMORY_NAME_CHARACTERS: usize = 50;

/// Keeps everyone from changing `memory` from now on.
fn seal(memory: &File) -> io::Result<()> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    /// The system itself holds pages for moments, to move them or to see whether they are used, and then says
    /// that they are busy; nobody else has the memory.
    const TRIES: u32 = 50;
    let mut tries = 0..TRIES;
    loop {
        match rustix::fs::fcntl_add_seals(memory, seals) {
            Err(Errno::BUSY) if tries.next().is_some() => thread::sleep(Duration::from_millis(20)),
            done => return Ok(done?),
        }
    }
}

/// Digest of the whole file, whose pieces also go to `copy`.
fn digest(file: &File, mut copy: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Sha256Digest> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut offset = 0;
    loop {
        match file.read_at(&mut buffer, offset) {
            Ok(0) => return Ok(Sha256Digest(hasher.finalize().into())),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                copy(&buffer[..n])?;
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_parse_and_show() {
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Sha256Digest::parse(&hex.to_uppercase()).unwrap();
        assert_eq!(digest.to_string(), hex);
        for bad in ["", &hex[1..], &format!("{hex} "), &hex.replace('b', "g"), &"ä".repeat(32)] {
            assert_eq!(Sha256Digest::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn digest_of_a_file_is_that_of_the_standard() {
        // FIPS 180-2, appendix B.1.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(
            digest(&File::open(path).unwrap(), |_| Ok(())).unwrap().to_string(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
