//! Memory that engines of one process can all reach.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::reads::{Reads, Source};
use crate::{
    Address, PageRead, ReadId, ReadState, Region, Result, TransferEngine, TransferError, new_epoch,
};

/// The regions of this process, by endpoint.
static REGIONS: Mutex<Option<HashMap<String, Weak<Memory>>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves pages between engines of one process.
#[derive(Debug)]
pub struct InProcess {
    reads: Reads,
}

impl InProcess {
    /// Its name.
    pub const NAME: &'static str = "in-process";

    /// An engine.
    ///
    /// # Errors
    /// `Local` without a thread.
    pub fn new() -> Result<Self> {
        Ok(InProcess { reads: Reads::new()? })
    }
}

/// The lease that a page is under, and its contents.
type Page = (u64, Vec<u8>);

#[derive(Debug)]
struct Memory {
    address: Address,
    pages: Box<[Mutex<Page>]>,
    notified: Mutex<Vec<u64>>,
}

impl Region for Memory {
    fn address(&self) -> &Address {
        &self.address
    }

    fn pages(&self) -> u32 {
        self.pages.len() as u32
    }

    fn put(&self, page: u32, lease: u64, bytes: &[u8]) -> Result<()> {
        let mut page = lock(&self.pages[page as usize]);
        page.0 = lease;
        page.1.clear();
        page.1.extend_from_slice(bytes);
        Ok(())
    }

    fn end_lease(&self, page: u32) {
        let mut page = lock(&self.pages[page as usize]);
        page.0 = 0;
        page.1 = Vec::new();
    }

    fn notifications(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.notified))
    }
}

struct FromMemory(Arc<Memory>);

impl Source for FromMemory {
    fn fetch(&self, page: u32, into: &mut Vec<u8>) -> Result<u64> {
        let found = self.0.pages.get(page as usize).ok_or(TransferError::Damaged { page })?;
        let found = lock(found);
        into.clear();
        into.extend_from_slice(&found.1);
        Ok(found.0)
    }

    fn notify(&self, lease: u64) -> Result<()> {
        lock(&self.0.notified).push(lease);
        Ok(())
    }
}

impl TransferEngine for InProcess {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn register(&self, _page_bytes: u64, pages: u32) -> Result<Arc<dyn Region>> {
        let epoch = new_epoch();
        let endpoint = format!("{epoch:016x}");
        let address = Address { engine: Self::NAME.into(), endpoint: endpoint.clone(), epoch };
        let pages = (0..pages).map(|_| Mutex::default()).collect();
        let memory = Arc::new(Memory { address, pages, notified: Mutex::default() });
        let mut regions = lock(&REGIONS);
        let regions = regions.get_or_insert_default();
        regions.retain(|_, region| region.strong_count() > 0);
        regions.insert(endpoint, Arc::downgrade(&memory));
        Ok(memory)
    }

    fn read(&self, read: PageRead) -> Result<ReadId> {
        let endpoint = &read.from.address.endpoint;
        if read.from.address.engine != Self::NAME {
            let what =
                format!("an address of {:?} cannot be read in process", read.from.address.engine);
            return Err(TransferError::Local(what));
        }
        let found = lock(&REGIONS).as_ref().and_then(|r| r.get(endpoint)?.upgrade());
        let Some(memory) = found else {
            let why = "no engine of this process has it".into();
            return Err(TransferError::Unreachable { endpoint: endpoint.clone(), why });
        };
        self.reads.begin(read, Box::new(FromMemory(memory)))
    }

    fn poll(&self, read: ReadId) -> ReadState {
        self.reads.poll(read)
    }

    fn cancel(&self, read: ReadId) {
        self.reads.cancel(read);
    }
}
