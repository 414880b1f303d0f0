//! Which directories and files the host takes plugins from: whoever can write them owns the process.
//!
//! By default nothing that every user of the machine can write. `strict` adds: no symbolic links,
//! no writing by the group, only the user's own files and root's, and the same for every directory
//! above.

use std::fs::{self, File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::document;

const STICKY: u32 = 0o1000;
const GROUP_WRITE: u32 = 0o020;
const WORLD_WRITE: u32 = 0o002;
const ROOT: u32 = 0;

/// The rules for the files of one directory that has itself passed them.
#[derive(Debug, Clone)]
pub struct Policy {
    directory: PathBuf,
    strict: bool,
}

impl Policy {
    /// Checks the directory at `path`. The error is one line without `path`.
    pub fn of_directory(path: &Path, strict: bool) -> Result<Self, String> {
        let directory = fs::canonicalize(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => "does not exist".to_owned(),
            _ => format!("cannot be read: {error}"),
        })?;
        let metadata =
            fs::metadata(&directory).map_err(|error| format!("cannot be read: {error}"))?;
        if !metadata.is_dir() {
            return Err("is not a directory".to_owned());
        }
        let policy = Self { directory, strict };
        if strict {
            policy.check_strict_directories(path)?;
        } else {
            policy.check_mode(&metadata)?;
        }
        Ok(policy)
    }

    /// The directory, without symbolic links.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether the strict rules hold.
    pub fn strict(&self) -> bool {
        self.strict
    }

    /// Checks `path` before it is opened: under strict rules it must be no symbolic link.
    pub fn check_link(&self, path: &Path) -> Result<(), String> {
        if !self.strict {
            return Ok(());
        }
        let metadata =
            fs::symlink_metadata(path).map_err(|error| format!("cannot be read: {error}"))?;
        if metadata.is_symlink() { Err(NO_LINKS.to_owned()) } else { Ok(()) }
    }

    /// Checks an open file: it must really lie in the directory, and not be open to strangers.
    pub fn check_open_file(&self, file: &File) -> Result<(), String> {
        // Asking the kernel about the descriptor leaves no time for anyone to exchange the file.
        let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|error| format!("its real path is unknown: {error}"))?;
        if !real.starts_with(&self.directory) {
            return Err(format!(
                "a symbolic link that leads out of the directory, to {}",
                document::shown(&real)
            ));
        }
        let metadata = file.metadata().map_err(|error| format!("cannot be read: {error}"))?;
        self.check_mode(&metadata)?;
        // A link may lead into a directory further down, where others can replace what it leads to.
        let between = real.ancestors().skip(1).take_while(|above| *above != self.directory);
        for above in between {
            let told =
                |reason: String| format!("lies in {}, which {reason}", document::shown(above));
            let metadata =
                fs::metadata(above).map_err(|error| told(format!("cannot be read: {error}")))?;
            self.check_mode(&metadata).map_err(told)?;
        }
        Ok(())
    }

    fn check_strict_directories(&self, given: &Path) -> Result<(), String> {
        let named = std::path::absolute(given).map_err(|e| format!("cannot be read: {e}"))?;
        for above in named.ancestors() {
            let metadata = fs::symlink_metadata(above)
                .map_err(|error| format!("{} cannot be read: {error}", document::shown(above)))?;
            let refused = if metadata.is_symlink() {
                Err(NO_LINKS.to_owned())
            } else {
                self.check_mode(&metadata)
            };
            refused.map_err(|reason| {
                if above == named {
                    reason
                } else {
                    format!("{}: {reason}", document::shown(above))
                }
            })?;
        }
        Ok(())
    }

    /// The sticky bit of a directory keeps others from replacing files; on a file it means nothing.
    fn check_mode(&self, metadata: &Metadata) -> Result<(), String> {
        let mode = metadata.permissions().mode() & 0o7777;
        let open_to = if self.strict { WORLD_WRITE | GROUP_WRITE } else { WORLD_WRITE };
        let sticky = metadata.is_dir() && mode & STICKY != 0;
        if mode & open_to != 0 && !sticky {
            let (who, fix) = if mode & WORLD_WRITE != 0 {
                ("every user", "chmod o-w")
            } else {
                ("its group", "chmod g-w; strict = true demands it")
            };
            return Err(format!("can be written by {who} (mode {mode:04o}): {fix}"));
        }
        if self.strict {
            let (owner, us) = (metadata.uid(), effective_user()?);
            if owner != ROOT && owner != us {
                return Err(format!(
                    "belongs to user {owner}; strict = true demands user {us} or root"
                ));
            }
        }
        Ok(())
    }
}

const NO_LINKS: &str = "is a symbolic link, which strict = true forbids";

/// The effective user, whom the kernel names as the owner of the process's own entry.
fn effective_user() -> Result<u32, String> {
    let own = fs::metadata("/proc/self");
    own.map(|own| own.uid()).map_err(|error| format!("the own user is unknown: {error}"))
}
