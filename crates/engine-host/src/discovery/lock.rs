//! `plugins.lock`: which plugins of a directory are trusted, to the byte. With the file there, all
//! others are refused.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::policy::Policy;
use crate::document;
use crate::elf::Sha256Digest;

/// Name of the file in a plugin directory.
pub const LOCK_FILE: &str = "plugins.lock";

/// Of the format.
const VERSION: i64 = 1;

/// Larger locks are refused unread.
const MAX_BYTES: u64 = 1 << 20;

const HEADER: &str = "# Written by `engine-host plugin trust`. With this file here, plugins that are not in it, and\n\
                      # files that have changed since, are refused.\n";

/// The content of a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Of the format.
    version: u32,
    /// By manifest.
    #[serde(default, rename = "plugin")]
    plugins: Vec<Locked>,
}

/// One trusted plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Locked {
    /// Its name.
    pub name: String,
    /// File name of its manifest.
    pub manifest: String,
    /// Digest of the manifest.
    pub manifest_sha256: String,
    /// Digest of the library.
    pub library_sha256: String,
}

impl Lock {
    /// A lock over these plugins.
    pub fn new(mut plugins: Vec<Locked>) -> Self {
        plugins.sort_by(|a, b| a.manifest.cmp(&b.manifest));
        Self { version: VERSION as u32, plugins }
    }

    /// Reads the lock of a directory; `None` when it has none. A lock that cannot be read or understood
    /// is an error: to go on without it would be to trust everything.
    pub fn read(policy: &Policy) -> Result<Option<Self>, String> {
        let path = policy.directory().join(LOCK_FILE);
        if fs::symlink_metadata(&path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            return Ok(None);
        }
        let within = |reason: String| format!("{LOCK_FILE}: {reason}");
        policy.check_link(&path).map_err(within)?;
        let file = document::open_regular(&path)
            .map_err(|error| within(format!("cannot be read: {error}")))?;
        policy.check_open_file(&file).map_err(within)?;
        let mut text = String::new();
        file.take(MAX_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(|error| within(format!("cannot be read: {error}")))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(within(format!("is larger than {MAX_BYTES} bytes")));
        }
        Self::parse(&text).map_err(|reason| within(format!("{reason}: {ANEW}")))
    }

    fn parse(text: &str) -> Result<Option<Self>, String> {
        let told = |error: toml::de::Error| {
            let message = error.message().lines().collect::<Vec<_>>().join(" ");
            match error.span() {
                Some(span) => {
                    let line = 1 + text[..span.start].matches('\n').count();
                    format!("line {line}: {message}")
                }
                None => message,
            }
        };
        // The version first: what else another one has, this host cannot know.
        let table: toml::Table = toml::from_str(text).map_err(told)?;
        match table.get("version").map(toml::Value::as_integer) {
            Some(Some(VERSION)) => {}
            Some(Some(other)) => {
                return Err(format!("has version {other}, this host knows {VERSION}"));
            }
            _ => return Err("does not say its version".to_owned()),
        }
        let lock: Self = toml::from_str(text).map_err(told)?;
        for (i, locked) in lock.plugins.iter().enumerate() {
            if lock.plugins[..i].iter().any(|earlier| earlier.manifest == locked.manifest) {
                return Err(format!("names {:?} twice", locked.manifest));
            }
        }
        Ok(Some(lock))
    }

    /// Writes the lock into a directory, whole or not at all.
    ///
    /// # Errors
    /// The system's reason.
    pub fn write(&self, directory: &Path) -> std::io::Result<()> {
        let text = toml::to_string(self).map_err(std::io::Error::other)?;
        let temporary = directory.join(format!(".{LOCK_FILE}.new"));
        // Whatever has that name, a link perhaps, is not to be written through.
        match fs::remove_file(&temporary) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = File::create_new(&temporary)?;
        file.write_all(format!("{HEADER}{text}").as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, directory.join(LOCK_FILE))
    }

    /// The digest that the library of the plugin with this manifest must have.
    ///
    /// # Errors
    /// One line when the plugin is not in the lock, or its manifest is another.
    pub fn library_of(
        &self,
        manifest: &Path,
        content: Sha256Digest,
    ) -> Result<Sha256Digest, String> {
        let name = manifest.file_name().unwrap_or_default().to_string_lossy();
        let Some(locked) = self.plugins.iter().find(|p| p.manifest == name) else {
            return Err(format!("is not in {LOCK_FILE}: {TRUST}"));
        };
        if Sha256Digest::parse(&locked.manifest_sha256) != Some(content) {
            return Err(format!("is not the manifest that {LOCK_FILE} names: {TRUST}"));
        }
        Sha256Digest::parse(&locked.library_sha256)
            .ok_or_else(|| format!("{LOCK_FILE} has no digest for its library: {TRUST}"))
    }
}

/// What to do about a plugin that the lock does not cover.
pub const TRUST: &str = "`engine-host plugin trust` takes it in, if you trust it";

/// What to do about a lock that cannot be understood.
const ANEW: &str = "`engine-host plugin trust` writes it anew";

/// SHA-256 of some bytes.
pub fn digest_of(content: &[u8]) -> Sha256Digest {
    Sha256Digest(Sha256::digest(content).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_cannot_be_understood_says_where_and_what_to_do() {
        let entry = "[[plugin]]\nname = \"a\"\nmanifest = \"a.toml\"\nmanifest_sha256 = \"\"\n\
                     library_sha256 = \"\"\n";
        for (text, says) in [
            ("", "does not say its version"),
            ("version = \"1\"", "does not say its version"),
            ("version = 2\nsigned_by = \"x\"", "has version 2, this host knows 1"),
            ("version = 1\nplugins = 3", "line 2: unknown field"),
            ("version = 1\n[[plugin]]\nname = \"a\"", "line 2: missing field `manifest`"),
            ("version = 1\nversion = 1", "line 2: duplicate key"),
            (&format!("version = 1\n{entry}{entry}"), "names \"a.toml\" twice"),
        ] {
            let reason = Lock::parse(text).unwrap_err();
            assert!(reason.starts_with(says), "{reason}, and should say {says}");
        }
        assert!(Lock::parse(&format!("version = 1\n{entry}")).unwrap().is_some());
    }
}
