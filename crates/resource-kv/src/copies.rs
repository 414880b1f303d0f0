//! Pages on their way between the pool and the tiers.

use std::sync::{Arc, Mutex, PoisonError};

use resource_api::{ResourceError, Result};

use crate::keys::Key;
use crate::memory::KvMemory;
use crate::state::Shared;
use crate::tiers::{Fall, PageStore, Slot};

/// A page of the pool, and the slot that it is copied to or from.
#[derive(Debug)]
pub(crate) struct PageCopy {
    pub(crate) page: u32,
    pub(crate) slot: Slot,
    pub(crate) key: Option<Key>,
    pub(crate) store: Arc<dyn PageStore>,
    /// What has to leave the slot first.
    pub(crate) fall: Option<Box<Fall>>,
}

/// Where to pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

/// The copies that failed, by their place, and why.
pub(crate) type Failed = Vec<(usize, ResourceError)>;

impl Shared {
    /// Copies pages to their slots, several at a time, and returns when all are there. Needs no lock.
    pub(crate) fn copy_out(&self, copies: &[PageCopy]) -> Failed {
        self.copy_all(copies, Way::Out)
    }

    /// Copies pages from their slots, several at a time, and returns when all are there. Needs no lock.
    pub(crate) fn copy_in(&self, copies: &[PageCopy]) -> Failed {
        self.copy_all(copies, Way::In)
    }

    fn copy_all(&self, copies: &[PageCopy], way: Way) -> Failed {
        let all = |e: ResourceError| (0..copies.len()).map(|at| (at, e.clone())).collect();
        if copies.is_empty() {
            return Failed::new();
        }
        if let Err(e) = self.memory.begin_copies() {
            return all(e);
        }
        let failed = Mutex::new(Failed::new());
        self.host.run(copies.len() as u32, |at| {
            if let Err(e) = self.copy(&copies[at as usize], way) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).push((at as usize, e));
            }
        });
        // Also after a failure: the others are on their way.
        match self.memory.end_copies() {
            Ok(()) => failed.into_inner().unwrap_or_else(PoisonError::into_inner),
            Err(e) => all(e),
        }
    }

    fn copy(&self, copy: &PageCopy, way: Way) -> Result<()> {
        let PageCopy { page, slot, key, ref store, ref fall } = *copy;
        fall.iter().for_each(|fall| fall.copy());
        if let KvMemory::Cuda(memory) = &*self.memory
            && let Some(mut pinned) = store.pinned(slot.at)
        {
            return match way {
                Way::Out => memory.download_page(page, &mut pinned),
                Way::In => memory.upload_page(&mut pinned, page),
            };
        }
        match way {
            Way::Out if store.is_quick() => {
                self.memory.read_page(page, &mut |bytes| store.put(slot.at, key, bytes))
            }
            Way::Out => store.put(slot.at, key, &self.memory.copy_of_page(page)?),
            Way::In => store.get(slot.at, key, &mut |bytes| self.memory.write_page(page, bytes)),
        }
    }
}
