//! Between processes of one machine: a region is a file in a memory file system.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4096 | magic, epoch, bytes of a page, number of pages |
//! | 4096 | 8 x 4096 | notifications: a reader writes the number of its lease at that number modulo 4096 |
//! | 36864 | (64 + page) each | lease, and the page |
//!
//! Files are read and written, not mapped: one that was cut short is an error and not a signal. The owner
//! holds a lock on its file; one whose owner has gone is removed by whoever registers next.

use std::cell::OnceCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::leases::MOST;
use crate::reads::{Reads, Source};
use crate::{
    Address, PageRead, ReadId, ReadState, Region, Result, TransferEngine, TransferError, new_epoch,
};

const MAGIC: &[u8; 16] = b"engine-host xfr1";
const HEAD: u64 = 4096;
const NOTIFICATIONS: u64 = 8 * MOST as u64;
/// Before each page.
const BLOCK: u64 = 64;
const PREFIX: &str = "engine-host-";
const SUFFIX: &str = ".pages";

/// Moves pages between processes of one machine.
#[derive(Debug)]
pub struct SharedMemory {
    directory: PathBuf,
    reads: Reads,
}

impl SharedMemory {
    /// Its name.
    pub const NAME: &'static str = "shared-memory";

    /// An engine whose files are in `directory`.
    ///
    /// # Errors
    /// `Local` for a directory that is none, or without a thread.
    pub fn new(directory: &Path) -> Result<Self> {
        if !directory.is_dir() {
            let what = format!("{} is not a directory for shared memory", directory.display());
            return Err(TransferError::Local(what));
        }
        Ok(SharedMemory { directory: directory.into(), reads: Reads::new()? })
    }

    /// Removes files whose owners have gone.
    fn sweep(&self) {
        for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) || !name.ends_with(SUFFIX) {
                continue;
            }
            // Another user's is theirs to remove.
            let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else {
                continue;
            };
            if file.try_lock().is_ok() {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[derive(Debug)]
struct Segment {
    address: Address,
    path: PathBuf,
    file: File,
    page_bytes: u64,
    pages: u32,
    /// The notifications that were seen last.
    seen: Mutex<Vec<u8>>,
}

fn start(page: u32, page_bytes: u64) -> u64 {
    HEAD + NOTIFICATIONS + u64::from(page) * (BLOCK + page_bytes)
}

impl Region for Segment {
    fn address(&self) -> &Address {
        &self.address
    }

    fn pages(&self) -> u32 {
        self.pages
    }

    fn put(&self, page: u32, lease: u64, bytes: &[u8]) -> Result<()> {
        if bytes.len() as u64 != self.page_bytes {
            let what =
                format!("a page of {} bytes for a region of {}", bytes.len(), self.page_bytes);
            return Err(TransferError::Local(what));
        }
        let at = start(page, self.page_bytes);
        let written = self
            .file
            .write_all_at(bytes, at + BLOCK)
            .and_then(|()| self.file.write_all_at(&lease.to_le_bytes(), at));
        let failed = |e| TransferError::Local(format!("writing {}: {e}", self.path.display()));
        written.map_err(failed)
    }

    fn end_lease(&self, page: u32) {
        // Where it cannot be written, the digest still tells what is put there next.
        let _ = self.file.write_all_at(&[0; 8], start(page, self.page_bytes));
    }

    fn notifications(&self) -> Vec<u64> {
        let mut now = vec![0; NOTIFICATIONS as usize];
        if self.file.read_exact_at(&mut now, HEAD).is_err() {
            return Vec::new();
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let words = now.as_chunks::<8>().0.iter().zip(seen.as_chunks::<8>().0);
        let new = words.filter(|(now, seen)| now != seen).map(|(now, _)| u64::from_le_bytes(*now));
        let new = new.collect();
        *seen = now;
        new
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opened by the thread that reads, so that whoever begins a read waits for no file system.
struct FromFile {
    address: Address,
    page_bytes: u64,
    file: OnceCell<File>,
}

impl FromFile {
    /// # Errors
    /// `Unreachable` for an address that names no region. It comes from outside: nothing else is opened.
    fn at(address: &Address, page_bytes: u64) -> Result<Self> {
        let name = Path::new(&address.endpoint).file_name().map(|name| name.to_string_lossy());
        if !name.is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX)) {
            let (endpoint, why) = (address.endpoint.clone(), "that is no name of a region".into());
            return Err(TransferError::Unreachable { endpoint, why });
        }
        Ok(FromFile { address: address.clone(), page_bytes, file: OnceCell::new() })
    }

    fn failed(&self, e: std::io::Error) -> TransferError {
        let why = match e.kind() {
            std::io::ErrorKind::UnexpectedEof => "it was cut short".into(),
            std::io::ErrorKind::NotFound => "the worker that published it has ended".into(),
            _ => e.to_string(),
        };
        TransferError::Unreachable { endpoint: self.address.endpoint.clone(), why }
    }

    fn file(&self) -> Result<&File> {
        match self.file.get() {
            Some(file) => Ok(file),
            None => self.open().map(|file| self.file.get_or_init(|| file)),
        }
    }

    fn open(&self) -> Result<File> {
        let endpoint = self.address.endpoint.clone();
        let file = OpenOptions::new().read(true).write(true).open(&endpoint);
        let file = file.map_err(|e| self.failed(e))?;
        let mut head = [0; 36];
        file.read_exact_at(&mut head, 0).map_err(|e| self.failed(e))?;
        if head[..16] != MAGIC[..] {
            let why = "it is no region of pages".into();
            return Err(TransferError::Unreachable { endpoint, why });
        }
        if head[16..24] != self.address.epoch.to_le_bytes() {
            return Err(TransferError::Restarted { endpoint });
        }
        if head[24..32] != self.page_bytes.to_le_bytes() {
            let bytes = self.page_bytes;
            let what = format!("{endpoint} has pages of another size than {bytes} bytes");
            return Err(TransferError::Local(what));
        }
        Ok(file)
    }
}

impl Source for FromFile {
    fn fetch(&self, page: u32, into: &mut Vec<u8>) -> Result<u64> {
        let (file, mut block) = (self.file()?, [0; BLOCK as usize]);
        let at = start(page, self.page_bytes);
        file.read_exact_at(&mut block, at).map_err(|e| self.failed(e))?;
        into.resize(self.page_bytes as usize, 0);
        file.read_exact_at(into, at + BLOCK).map_err(|e| self.failed(e))?;
        let (lease, _) = block.split_first_chunk().unwrap_or((&[0; 8], &[]));
        Ok(u64::from_le_bytes(*lease))
    }

    fn notify(&self, lease: u64) -> Result<()> {
        let at = HEAD + 8 * (lease % MOST as u64);
        self.file()?.write_all_at(&lease.to_le_bytes(), at).map_err(|e| self.failed(e))
    }
}

impl TransferEngine for SharedMemory {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn register(&self, page_bytes: u64, pages: u32) -> Result<Arc<dyn Region>> {
        self.sweep();
        let epoch = new_epoch();
        let path = self.directory.join(format!("{PREFIX}{epoch:016x}{SUFFIX}"));
        let failed = |e: std::io::Error| TransferError::Local(format!("{}: {e}", path.display()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(failed)?;
        file.try_lock().map_err(|e| failed(std::io::Error::other(e.to_string())))?;
        let mut head = [0; HEAD as usize];
        head[..16].copy_from_slice(MAGIC);
        head[16..24].copy_from_slice(&epoch.to_le_bytes());
        head[24..32].copy_from_slice(&page_bytes.to_le_bytes());
        head[32..36].copy_from_slice(&pages.to_le_bytes());
        // Takes memory only where it is written.
        let end = start(pages, page_bytes);
        file.write_all_at(&head, 0).and_then(|()| file.set_len(end)).map_err(failed)?;
        let endpoint = path.to_string_lossy().into_owned();
        let address = Address { engine: Self::NAME.into(), endpoint, epoch };
        let seen = Mutex::new(vec![0; NOTIFICATIONS as usize]);
        Ok(Arc::new(Segment { address, path, file, page_bytes, pages, seen }))
    }

    fn read(&self, read: PageRead) -> Result<ReadId> {
        if read.from.address.engine != Self::NAME {
            let engine = &read.from.address.engine;
            let what = format!("an address of {engine:?} cannot be read by {:?}", Self::NAME);
            return Err(TransferError::Local(what));
        }
        let source = FromFile::at(&read.from.address, read.from.page_bytes)?;
        self.reads.begin(read, Box::new(source))
    }

    fn poll(&self, read: ReadId) -> ReadState {
        self.reads.poll(read)
    }

    fn cancel(&self, read: ReadId) {
        self.reads.cancel(read);
    }
}
