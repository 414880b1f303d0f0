//! Moving pages of state from one worker to another.
//!
//! A source copies pages into a [`Region`] of its [`TransferEngine`] under a lease and tells whoever is to
//! go on where they are: an address, a list of pages, and a digest of each. The other side reads them on
//! its own, page by page, without the source taking part, and polls until the read has ended. At the end,
//! a bad one too, it notifies the source, which then frees the pages; without that they are free when the
//! lease ends, and a later read fails.
//!
//! | engine | between |
//! |---|---|
//! | [`InProcess`] | engines of one process |
//! | [`SharedMemory`] | processes of one machine, by files in `/dev/shm` |
//!
//! An engine for a network has the same shape: regions are registered memory, reads are one-sided, and
//! a notification is a word that travels behind the last page.
#![forbid(unsafe_code)]

mod in_process;
mod leases;
mod reads;
mod shared_memory;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use in_process::InProcess;
pub use leases::{Lease, Leases};
pub use shared_memory::SharedMemory;

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, TransferError>;

/// Why pages did not get through. All are final for their read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The other side's memory is not there.
    #[error("{endpoint} cannot be read: {why}")]
    Unreachable {
        /// Where it should be.
        endpoint: String,
        /// What the system says.
        why: String,
    },
    /// The other side has started again since it published.
    #[error("{endpoint} belongs to a later worker than the one that published")]
    Restarted {
        /// Where it was.
        endpoint: String,
    },
    /// The source has given the page to somebody else.
    #[error("the lease on page {page} has ended: the read came too late")]
    LeaseEnded {
        /// Of the region.
        page: u32,
    },
    /// The contents are not those that were published.
    #[error("page {page} is damaged: its digest does not match what was published")]
    Damaged {
        /// Of the region.
        page: u32,
    },
    /// The read's time is up.
    #[error("the read was not done by its deadline: {done} of {all} pages had come")]
    Late {
        /// Pages that had come.
        done: usize,
        /// Pages in all.
        all: usize,
    },
    /// It was called off here.
    #[error("the read was called off")]
    Cancelled,
    /// The region has no room.
    #[error(
        "the region has {free} free pages and {need} are needed: they come free as peers read them, or when leases end"
    )]
    Full {
        /// Pages wanted.
        need: usize,
        /// Pages there are.
        free: usize,
    },
    /// This side could not take a page, or cannot offer any.
    #[error("{0}")]
    Local(String),
}

/// Digest of a page.
pub type Digest = [u8; 16];

/// The digest that is published beside a page.
pub fn digest(page: &[u8]) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(&blake3::hash(page).as_bytes()[..16]);
    digest
}

/// Where a region is, for other workers. Holds names and numbers only that mean the same everywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// Name of the engine that serves it.
    pub engine: String,
    /// Where that finds it.
    pub endpoint: String,
    /// Differs for every region that was ever made.
    pub epoch: u64,
}

/// Pages of another worker's region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemotePages {
    /// The region.
    pub address: Address,
    /// Under which lease, as the source counts them.
    pub lease: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages of the region, in order.
    pub pages: Vec<u32>,
    /// Digest of each.
    pub digests: Vec<Digest>,
}

/// Memory of this worker that others read.
pub trait Region: Send + Sync + fmt::Debug {
    /// Where others find it.
    fn address(&self) -> &Address;

    /// Number of pages.
    fn pages(&self) -> u32;

    /// Puts contents into a page that nobody has a lease on any more.
    ///
    /// # Errors
    /// `Local` where the memory cannot be had.
    fn put(&self, page: u32, lease: u64, bytes: &[u8]) -> Result<()>;

    /// Ends the lease on a page for readers: from now on their reads fail.
    fn end_lease(&self, page: u32);

    /// The leases whose readers have said that they are done.
    fn notifications(&self) -> Vec<u64>;
}

/// Where pages that are read go.
pub trait Destination: Send + Sync {
    /// Takes a page. Called from a thread of the engine.
    ///
    /// # Errors
    /// Why not; the read fails with it.
    fn put(&self, page: u32, bytes: &[u8]) -> std::result::Result<(), String>;
}

/// A read that is to begin.
pub struct PageRead {
    /// What to read.
    pub from: RemotePages,
    /// Which of its pages, by their place in the list, and where each goes.
    pub pages: Vec<(usize, u32)>,
    /// Takes them.
    pub destination: Arc<dyn Destination>,
    /// When it fails if it is not done.
    pub deadline: Instant,
}

/// A read of this engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadId(pub u64);

/// How far a read is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadState {
    /// It goes on: pages may still be written to the destination.
    Pending,
    /// All pages are there, and the source has been notified.
    Done,
    /// It has ended; nothing more is written to the destination.
    Failed(TransferError),
}

/// Moves pages between workers.
pub trait TransferEngine: Send + Sync + fmt::Debug {
    /// Its name in addresses and configurations.
    fn name(&self) -> &'static str;

    /// Memory for `pages` pages of `page_bytes` that others may read.
    ///
    /// # Errors
    /// `Local` where it cannot be had.
    fn register(&self, page_bytes: u64, pages: u32) -> Result<Arc<dyn Region>>;

    /// Begins to read, and waits for nothing: what lies elsewhere may first turn out not to be there when
    /// the read is polled. A read of no pages only notifies.
    ///
    /// # Errors
    /// `Local` for an address of another engine, `Unreachable` for one of nothing.
    fn read(&self, read: PageRead) -> Result<ReadId>;

    /// How far a read is. One that has ended is forgotten once it was told.
    fn poll(&self, read: ReadId) -> ReadState;

    /// Calls a read off. It has ended once [`TransferEngine::poll`] says so, not before.
    fn cancel(&self, read: ReadId);
}

/// An engine by name; `directory` is where one keeps its files.
///
/// # Errors
/// `Local` for a name that there is none of.
pub fn engine(name: &str, directory: &str) -> Result<Arc<dyn TransferEngine>> {
    match name {
        InProcess::NAME => Ok(Arc::new(InProcess::new()?)),
        SharedMemory::NAME => Ok(Arc::new(SharedMemory::new(directory.as_ref())?)),
        _ => Err(TransferError::Local(format!(
            "there is no transfer engine {name:?}; there are {} and {}",
            InProcess::NAME,
            SharedMemory::NAME
        ))),
    }
}

/// Differs for every call, in this process and in others.
fn new_epoch() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Randomly seeded per process; the time and a counter keep calls of one process apart.
    static CALLS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let call = CALLS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let now = std::time::SystemTime::now();
    RandomState::new().hash_one((now, std::process::id(), call)).max(1)
}
