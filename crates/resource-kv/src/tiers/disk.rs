//! Pages in a file, which outlives the process.
//!
//! The file is a head of one block and then slots, each a block with what it holds and the page. Nothing
//! is synced and no order of writes is relied on: a page is served only if the digest in its block
//! matches its key and contents, so what a crash has torn is a miss. Without memory maps: a failing disk
//! is an error of one read, not a signal.
//!
//! | of a block, at | bytes | what |
//! |---|---|---|
//! | 0 | 8 | sequence number |
//! | 8 | 16 | key; zeros for the page of a request |
//! | 24 | 32 | digest over those and the page |
//! | 56 | 4 + 32 + 4 each | tokens of the page, how many, after which link: a hint, which the key proves. Left out where a page has more than fit |

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind::FileTooLarge, ErrorKind::QuotaExceeded};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use resource_api::{ErrorKind, ResourceError, Result};

use super::{Origin, Origins, PageStore};
use crate::keys::{Key, Link};

const MAGIC: &[u8; 16] = b"engine-host kv 1";

/// Bytes of the head and of each slot's block: a sector, which disks write as one.
const BLOCK: u64 = 512;

/// What a block says before its digest: the sequence number and the key.
const SAID: usize = 8 + 16;

/// Where a block says what its page has.
const ORIGIN: usize = SAID + 32;

/// Most pages of which a start notes what they have, the youngest of them.
const MOST_FOUND: usize = 1 << 16;

/// A file of pages, locked by this process.
#[derive(Debug)]
pub(crate) struct DiskStore {
    file: File,
    path: PathBuf,
    page_bytes: u64,
    /// Counts writes over the file's life: larger is younger.
    sequence: AtomicU64,
    origins: Arc<Mutex<Origins>>,
}

/// A file, and what it held when it was opened.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) store: DiskStore,
    /// Slots and the keys of their pages, the oldest first. Pages are checked when they are read.
    pub(crate) contents: Vec<(u32, Key)>,
    /// What those pages have, where that is known.
    pub(crate) found: Vec<Origin>,
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

fn head(page_bytes: u64) -> [u8; BLOCK as usize] {
    let mut head = [0; BLOCK as usize];
    head[..16].copy_from_slice(MAGIC);
    head[16..24].copy_from_slice(&page_bytes.to_le_bytes());
    head
}

impl DiskStore {
    /// Opens or begins a file of `slots` pages of `page_bytes`; `origins` says what goes there. A file for
    /// pages of another size is begun anew.
    ///
    /// # Errors
    /// `INVALID` for a file that is something else, is in use, or that the system refuses.
    pub(crate) fn open(
        path: &Path,
        slots: u32,
        page_bytes: u64,
        origins: Arc<Mutex<Origins>>,
    ) -> Result<Opened> {
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
        let mut found = [0; BLOCK as usize];
        let is_ours = len >= BLOCK && file.read_exact_at(&mut found, 0).is_ok();
        if len > 0 && (!is_ours || found[..16] != MAGIC[..]) {
            return Err(bad("it is no file of cached pages, and is left as it is"));
        }
        if found != head(page_bytes) {
            file.set_len(0).map_err(failed)?;
            file.write_all_at(&head(page_bytes), 0).map_err(failed)?;
        }
        // Bounded also where it was larger before.
        let end = BLOCK + u64::from(slots) * (BLOCK + page_bytes);
        if file.metadata().map_err(failed)?.len() > end {
            file.set_len(end).map_err(failed)?;
        }
        let store = DiskStore { file, path: path.into(), page_bytes, sequence: 1.into(), origins };
        store.contents(slots).map_err(failed)
    }

    /// What the blocks say.
    fn contents(self, slots: u32) -> io::Result<Opened> {
        let len = self.file.metadata()?.len();
        let mut blocks: Vec<(u64, u32, Key, Option<Origin>)> = Vec::new();
        for slot in 0..slots {
            if self.start(slot) + BLOCK + self.page_bytes > len {
                break;
            }
            let mut block = [0; BLOCK as usize];
            self.file.read_exact_at(&mut block, self.start(slot))?;
            let (sequence, rest) = block.split_first_chunk().unwrap_or((&[0; 8], &[]));
            let (sequence, key) = (u64::from_le_bytes(*sequence), key_of(&rest[..16]));
            // A key of zeros marks the page of a request, which ended with its process.
            if sequence > 0 && key != 0 {
                blocks.push((sequence, slot, key, read_origin(&block)));
            }
        }
        blocks.sort_unstable_by_key(|block| (block.0, block.1));
        let youngest = blocks.last().map_or(0, |block| block.0);
        self.sequence.store(youngest + 1, Ordering::Relaxed);
        let contents = blocks.iter().map(|block| (block.1, block.2)).collect();
        let old = blocks.len().saturating_sub(MOST_FOUND);
        let mut origins = self.origins();
        let found: Vec<Origin> = blocks
            .drain(old..)
            .filter_map(|(_, _, key, origin)| {
                let origin = origin?;
                origins.note(key, &origin.parent, &origin.tokens);
                // Only what the key proves: whatever else is there is somebody's mistake.
                origins.find(key)
            })
            .collect();
        drop(origins);
        Ok(Opened { store: self, contents, found })
    }

    /// What goes beside the pages.
    pub(super) fn origins(&self) -> MutexGuard<'_, Origins> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, slot: u32) -> u64 {
        BLOCK + u64::from(slot) * (BLOCK + self.page_bytes)
    }

    fn failed(&self, what: &str, slot: u32, why: impl fmt::Display) -> ResourceError {
        let message = format!("{what} slot {slot} of \"{}\": {why}", self.path.display());
        ResourceError::new(ErrorKind::INTERNAL, message)
    }

    fn write(&self, slot: u32, block: &[u8], page: &[u8]) -> io::Result<()> {
        let start = self.start(slot);
        self.file.write_all_at(page, start + BLOCK)?;
        self.file.write_all_at(block, start)?;
        // Whoever cuts the file short takes its head, too, and without that it is nobody's at the next start.
        // Looked for last: it may be cut in the midst of this.
        let (mut found, head) = ([0; BLOCK as usize], head(self.page_bytes));
        self.file.read_exact_at(&mut found, 0)?;
        if found == head { Ok(()) } else { self.file.write_all_at(&head, 0) }
    }
}

/// Puts what a page has into its block, where that has room for it.
fn write_origin(block: &mut [u8; BLOCK as usize], origin: &Origin) {
    let words = [origin.tokens.len() as u32].into_iter().chain(origin.parent);
    let words = words.chain(origin.tokens.iter().copied());
    let room = block[ORIGIN..].as_chunks_mut::<4>().0;
    if 9 + origin.tokens.len() <= room.len() {
        room.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
    }
}

/// What a block says that its page has, right or wrong.
fn read_origin(block: &[u8; BLOCK as usize]) -> Option<Origin> {
    let mut words = block[ORIGIN..].as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let count = words.next()? as usize;
    let mut parent = Link::default();
    parent.iter_mut().zip(&mut words).for_each(|(to, word)| *to = word);
    let tokens: Vec<u32> = words.take(count).collect();
    (count > 0 && tokens.len() == count).then_some(Origin { parent, tokens })
}

fn key_of(bytes: &[u8]) -> Key {
    bytes.try_into().map_or(0, Key::from_le_bytes)
}

impl PageStore for DiskStore {
    fn put(&self, slot: u32, key: Option<Key>, page: &[u8]) -> Result<()> {
        let mut block = [0; BLOCK as usize];
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        block[..8].copy_from_slice(&sequence.to_le_bytes());
        block[8..SAID].copy_from_slice(&key.unwrap_or(0).to_le_bytes());
        let sum = digest(&block[..SAID], page);
        block[SAID..ORIGIN].copy_from_slice(sum.as_bytes());
        if let Some(key) = key {
            self.origins().find(key).iter().for_each(|origin| write_origin(&mut block, origin));
        }
        self.write(slot, &block, page).map_err(|e| {
            let full = [io::ErrorKind::StorageFull, QuotaExceeded, FileTooLarge];
            let failed = self.failed("writing", slot, &e);
            match full.contains(&e.kind()) {
                true => ResourceError::new(ErrorKind::EXHAUSTED, failed.message()),
                false => failed,
            }
        })
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
            || digest(&block[..SAID], page).as_bytes()[..] != block[SAID..ORIGIN]
        {
            return Err(self.failed("reading", slot, "its digest does not match its contents"));
        }
        take(page)
    }
}
