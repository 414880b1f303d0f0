//! Pages in host memory.

use std::sync::{Mutex, PoisonError};

use resource_api::{ResourceError, Result};

use super::{PageStore, no_slot};
use crate::keys::Key;

/// Host memory for pages, allocated where it is first used.
#[derive(Debug)]
pub(crate) struct MemoryStore {
    slots: Box<[Mutex<Vec<u8>>]>,
}

impl MemoryStore {
    pub(crate) fn new(slots: u32) -> Self {
        MemoryStore { slots: (0..slots).map(|_| Mutex::default()).collect() }
    }

    fn slot(&self, slot: u32) -> Result<&Mutex<Vec<u8>>> {
        self.slots.get(slot as usize).ok_or_else(|| no_slot(slot))
    }
}

impl PageStore for MemoryStore {
    fn is_quick(&self) -> bool {
        true
    }

    fn put(&self, slot: u32, _key: Option<Key>, page: &[u8]) -> Result<()> {
        let mut kept = self.slot(slot)?.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clear();
        kept.try_reserve_exact(page.len())
            .map_err(|e| ResourceError::internal(format!("no memory for a page: {e}")))?;
        kept.extend_from_slice(page);
        Ok(())
    }

    fn get(
        &self,
        slot: u32,
        _key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        take(&self.slot(slot)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
