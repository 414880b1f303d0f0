//! Pages on their way between the pool and the tiers.

use std::sync::{Arc, Mutex, PoisonError};

use resource_api::{ResourceError, Result};

use crate::keys::Key;
use crate::memory::KvMemory;
use crate::state::Shared;
use crate::tiers::{PageStore, Slot};

/// A page of the pool, and the slot that it is copied to or from.
#[derive(Debug)]
pub(crate) struct PageCopy {
    pub(crate) page: u32,
    pub(crate) slot: Slot,
    pub(crate) key: Option<Key>,
    pub(crate) store: Arc<dyn PageStore>,
}

/// A copy that failed, and the slot that is to blame.
pub(crate) type Failed = (ResourceError, Slot);

impl Shared {
    /// Copies pages to their slots, several at a time, and returns when all are there.
    pub(crate) fn copy_out(&self, copies: &[PageCopy]) -> Result<(), Failed> {
        self.copy_all(copies, |copy| match (&*self.memory, copy.store.pinned(copy.slot.at)) {
            (KvMemory::Cuda(memory), Some(mut pinned)) => {
                memory.download_page(copy.page, &mut pinned)
            }
            (memory, pinned) => {
                drop(pinned);
                let put = &mut |page: &[u8]| copy.store.put(copy.slot.at, copy.key, page);
                memory.read_page(copy.page, put)
            }
        })
    }

    /// Copies pages from their slots, several at a time, and returns when all are there.
    pub(crate) fn copy_in(&self, copies: &[PageCopy]) -> Result<(), Failed> {
        self.copy_all(copies, |copy| match (&*self.memory, copy.store.pinned(copy.slot.at)) {
            (KvMemory::Cuda(memory), Some(mut pinned)) => {
                memory.upload_page(&mut pinned, copy.page)
            }
            (memory, pinned) => {
                drop(pinned);
                let take = &mut |page: &[u8]| memory.write_page(copy.page, page);
                copy.store.get(copy.slot.at, copy.key, take)
            }
        })
    }

    fn copy_all(
        &self,
        copies: &[PageCopy],
        one: impl Fn(&PageCopy) -> Result<()> + Sync,
    ) -> Result<(), Failed> {
        let Some(first) = copies.first() else { return Ok(()) };
        let of_all = |e: ResourceError| (e, first.slot);
        self.memory.begin_copies().map_err(of_all)?;
        let failed = Mutex::new(None);
        self.host.run(copies.len() as u32, |at| {
            let copy = &copies[at as usize];
            if let Err(e) = one(copy) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some((e, copy.slot));
            }
        });
        // Also after a failure: the others are on their way.
        let ended = self.memory.end_copies().map_err(of_all);
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(ended, Err)
    }
}
