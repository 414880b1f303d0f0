//! Pages in a file, which outlives the process.
//!
//! The file is a head of one block and then slots, each a block with what it holds and the page. Nothing
//! is synced and no order of writes is relied on: a page is served only if the digest in its block
//! matches its key and contents, so what a crash has torn is a miss. Without memory maps: a failing disk
//! is an error of one read, not a signal.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use resource_api::{ErrorKind, ResourceError, Result};

use super::PageStore;
use crate::keys::Key;

const MAGIC: &[u8; 16] = b"engine-host kv 1";

/// Bytes of the head and of each slot's block: a sector, which disks write as one.
const BLOCK: u64 = 512;

/// What a block says before its digest: the sequence number and the key.
const SAID: usize = 8 + 16;

/// A file of pages, locked by this process.
#[derive(Debug)]
pub(crate) struct DiskStore {
    file: File,
    path: PathBuf,
    page_bytes: u64,
    /// Counts writes over the file's life: larger is younger.
    sequence: std::sync::atomic::AtomicU64,
}

/// Slots of a file of so many bytes.
pub(super) fn slots_in(bytes: u64, page_bytes: u64) -> u32 {
    let slots = bytes.saturating_sub(BLOCK) / (BLOCK + page_bytes);
    u32::try_from(slots).unwrap_or(u32::MAX)
}

fn digest(said: &[u8], page: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_derive_key("engine-host 2026-11 kv page file");
    hasher.update(said).update(page).finalize()
}

impl DiskStore {
    /// Opens or begins a file of `slots` pages and says what it holds, oldest first. Contents are
    /// checked when they are read. A file for pages of another size is begun anew.
    ///
    /// # Errors
    /// `INVALID` for a file that is something else, is in use, or that the system refuses.
    pub(crate) fn open(
        path: &Path,
        slots: u32,
        page_bytes: u64,
    ) -> Result<(Self, Vec<(u32, Key)>)> {
        let bad = |what: &str| {
            ResourceError::invalid(format!("`disk_file` \"{}\": {what}", path.display()))
        };
        let failed = |e: io::Error| bad(&e.to_string());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(bad("another process uses it; give each its own file"));
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        let len = file.metadata().map_err(failed)?.len();
        let mut head = [0; BLOCK as usize];
        head[..16].copy_from_slice(MAGIC);
        head[16..24].copy_from_slice(&page_bytes.to_le_bytes());
        let mut found = [0; BLOCK as usize];
        let is_ours = len >= BLOCK && file.read_exact_at(&mut found, 0).is_ok();
        if len > 0 && (!is_ours || found[..16] != MAGIC[..]) {
            return Err(bad("it is no file of cached pages, and is left as it is"));
        }
        if found != head {
            file.set_len(0).map_err(failed)?;
            file.write_all_at(&head, 0).map_err(failed)?;
        }
        // Bounded also where it was larger before.
        let end = BLOCK + u64::from(slots) * (BLOCK + page_bytes);
        if file.metadata().map_err(failed)?.len() > end {
            file.set_len(end).map_err(failed)?;
        }
        let store = DiskStore { file, path: path.into(), page_bytes, sequence: 1.into() };
        let contents = store.contents(slots).map_err(failed)?;
        Ok((store, contents))
    }

    /// What the blocks say, oldest first.
    fn contents(&self, slots: u32) -> io::Result<Vec<(u32, Key)>> {
        let len = self.file.metadata()?.len();
        let mut found: Vec<(u64, u32, Key)> = Vec::new();
        for slot in 0..slots {
            if self.start(slot) + BLOCK + self.page_bytes > len {
                break;
            }
            let mut said = [0; SAID];
            self.file.read_exact_at(&mut said, self.start(slot))?;
            let (sequence, key) = said.split_first_chunk().unwrap_or((&[0; 8], &[]));
            let (sequence, key) = (u64::from_le_bytes(*sequence), key_of(key));
            // A key of zeros marks the page of a request, which ended with its process.
            if sequence > 0 && key != 0 {
                found.push((sequence, slot, key));
            }
        }
        found.sort_unstable();
        let youngest = found.last().map_or(0, |f| f.0);
        self.sequence.store(youngest + 1, std::sync::atomic::Ordering::Relaxed);
        Ok(found.into_iter().map(|(_, slot, key)| (slot, key)).collect())
    }

    fn start(&self, slot: u32) -> u64 {
        BLOCK + u64::from(slot) * (BLOCK + self.page_bytes)
    }

    fn failed(&self, what: &str, slot: u32, why: impl std::fmt::Display) -> ResourceError {
        let message = format!("{what} slot {slot} of \"{}\": {why}", self.path.display());
        ResourceError::new(ErrorKind::INTERNAL, message)
    }
}

fn key_of(bytes: &[u8]) -> Key {
    bytes.try_into().map_or(0, Key::from_le_bytes)
}

impl PageStore for DiskStore {
    fn put(&self, slot: u32, key: Option<Key>, page: &[u8]) -> Result<()> {
        let mut block = [0; BLOCK as usize];
        let sequence = self.sequence.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        block[..8].copy_from_slice(&sequence.to_le_bytes());
        block[8..SAID].copy_from_slice(&key.unwrap_or(0).to_le_bytes());
        let sum = digest(&block[..SAID], page);
        block[SAID..SAID + 32].copy_from_slice(sum.as_bytes());
        let start = self.start(slot);
        let written = self
            .file
            .write_all_at(page, start + BLOCK)
            .and_then(|()| self.file.write_all_at(&block, start));
        written.map_err(|e| self.failed("writing", slot, e))
    }

    fn get(
        &self,
        slot: u32,
        key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut all = vec![0; (BLOCK + self.page_bytes) as usize];
        let read = self.file.read_exact_at(&mut all, self.start(slot));
        read.map_err(|e| self.failed("reading", slot, e))?;
        let (block, page) = all.split_at(BLOCK as usize);
        if key_of(&block[8..SAID]) != key.unwrap_or(0)
            || digest(&block[..SAID], page).as_bytes()[..] != block[SAID..SAID + 32]
        {
            return Err(self.failed("reading", slot, "its digest does not match its contents"));
        }
        take(page)
    }
}
