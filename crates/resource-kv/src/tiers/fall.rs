//! Pages that make room in a tier by going to the one below.

use std::sync::{Arc, OnceLock};

use resource_api::{ResourceError, Result};

use super::{PageStore, Slot, Tiers};
use crate::keys::Key;

/// A page that has to go to the tier below before its slot gets another one. No tier has it meanwhile.
#[derive(Debug)]
pub(crate) struct Fall {
    pub(super) key: Key,
    pub(super) from: (Arc<dyn PageStore>, u32),
    pub(super) to: (Arc<dyn PageStore>, Slot),
    /// The one in whose slot this one comes.
    pub(super) below: Option<Box<Fall>>,
    /// What came of it.
    pub(super) fell: OnceLock<Result<()>>,
}

impl Fall {
    /// Copies the page, after those below it. Needs no lock.
    pub(crate) fn copy(&self) {
        self.below.iter().for_each(|below| below.copy());
        let ((from, at), (to, slot)) = (&self.from, &self.to);
        let mut put = |page: &[u8]| to.put(slot.at, Some(self.key), page);
        self.fell.get_or_init(|| from.get(*at, Some(self.key), &mut put));
    }
}

impl Tiers {
    /// Takes a slot of the tier below for an idle page, where that leaves so many slots to spare.
    pub(super) fn drop_down(&mut self, tier: usize, at: u32, spare: usize) -> Option<Box<Fall>> {
        let spare = spare.checked_sub(1)?;
        let from = (self.store(Slot { tier, at }), at);
        let key = self.tiers[tier].records[at as usize].key?;
        if self.tiers.get(tier + 1)?.is_known(key) {
            return None;
        }
        let (slot, below) = self.take_in(tier + 1, spare)?;
        self.in_flight.push(slot);
        let to = (self.store(slot), slot);
        Some(Box::new(Fall { key, from, to, below, fell: OnceLock::new() }))
    }

    /// Notes what came of a page that had to leave its slot, and of those below it.
    pub(crate) fn fallen(&mut self, fall: &Fall) {
        let not_copied = || Err(ResourceError::internal("it was not copied"));
        let fell = fall.fell.get().cloned().unwrap_or_else(not_copied);
        self.kept(fall.to.1, fall.key, fell.as_ref().err());
        fall.below.iter().for_each(|below| self.fallen(below));
    }
}
