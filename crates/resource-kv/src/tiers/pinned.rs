//! Pages in host memory that a device copies from and to by itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::cuda::{Context, PinnedBuffer};
use resource_api::{ResourceError, Result};

use super::{PageStore, no_slot};
use crate::keys::Key;

/// Host memory for pages, all of it locked when it is made: that is slow, and no step waits for it.
#[derive(Debug)]
pub(crate) struct PinnedStore {
    slots: Box<[Mutex<PinnedBuffer<u8>>]>,
}

impl PinnedStore {
    /// # Errors
    /// `EXHAUSTED` where the system locks no more memory.
    pub(crate) fn new(context: &Arc<Context>, slots: u32, page_bytes: usize) -> Result<Self> {
        let slot = |_| Ok(Mutex::new(PinnedBuffer::zeroed(context, page_bytes)?));
        Ok(PinnedStore { slots: (0..slots).map(slot).collect::<Result<_>>()? })
    }

    fn slot(&self, slot: u32) -> Result<MutexGuard<'_, PinnedBuffer<u8>>> {
        self.pinned(slot).ok_or_else(|| no_slot(slot))
    }
}

impl PageStore for PinnedStore {
    fn put(&self, slot: u32, _key: Option<Key>, page: &[u8]) -> Result<()> {
        let mut kept = self.slot(slot)?;
        if kept.len() != page.len() {
            let what = format!("a page of {} bytes for a slot of {}", page.len(), kept.len());
            return Err(ResourceError::internal(what));
        }
        kept.as_mut_slice()?.copy_from_slice(page);
        Ok(())
    }

    fn get(
        &self,
        slot: u32,
        _key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        take(self.slot(slot)?.as_slice()?)
    }

    fn pinned(&self, slot: u32) -> Option<MutexGuard<'_, PinnedBuffer<u8>>> {
        let slot = self.slots.get(slot as usize)?;
        Some(slot.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
