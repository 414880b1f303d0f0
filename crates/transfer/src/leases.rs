//! Which pages of a region are leased to whom, and until when.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Address, Region, RemotePages, Result, TransferError, digest};

/// A lease: its number, as the source counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease(pub u64);

/// The leases on a region. Pages come free when a reader has notified or the time is up.
#[derive(Debug)]
pub struct Leases {
    region: Arc<dyn Region>,
    page_bytes: u64,
    life: Duration,
    free: Vec<u32>,
    active: BTreeMap<Lease, (Instant, Vec<u32>)>,
    last: u64,
}

/// Most leases at a time: each has a word for its notification.
pub(crate) const MOST: usize = 4096;

impl Leases {
    /// No leases yet; each will last for `life`.
    pub fn new(region: Arc<dyn Region>, page_bytes: u64, life: Duration) -> Self {
        let free = (0..region.pages()).rev().collect();
        Leases { region, page_bytes, life, free, active: BTreeMap::new(), last: 0 }
    }

    /// Where the region is, for others.
    pub fn address(&self) -> &Address {
        self.region.address()
    }

    /// Pages that can be leased now.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Leases that have not ended.
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Whether a lease has not ended.
    pub fn is_active(&self, lease: Lease) -> bool {
        self.active.contains_key(&lease)
    }

    /// Ends what readers are done with, and what is over at `now`. Says how many leases ended either way.
    pub fn settle(&mut self, now: Instant) -> (usize, usize) {
        let notified = self.region.notifications().into_iter().map(Lease);
        let notified = notified.filter(|&lease| self.end(lease)).count();
        let over = self.active.iter().filter(|(_, (until, _))| *until <= now);
        let over: Vec<Lease> = over.map(|(&lease, _)| lease).collect();
        for &lease in &over {
            self.end(lease);
        }
        (notified, over.len())
    }

    /// Ends a lease: reads under it fail from now on.
    pub fn end(&mut self, lease: Lease) -> bool {
        let Some((_, pages)) = self.active.remove(&lease) else { return false };
        pages.iter().for_each(|&page| self.region.end_lease(page));
        self.free.extend(pages.into_iter().rev());
        true
    }

    /// Copies `pages` pages into the region and leases them; `fill` hands out the contents of each.
    ///
    /// # Errors
    /// `Full` where there is no room; and what `fill` and the region fail with. Nothing is leased then.
    pub fn offer(
        &mut self,
        pages: usize,
        now: Instant,
        mut fill: impl FnMut(usize, &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<RemotePages> {
        let mut taken = Vec::with_capacity(pages);
        if pages > self.free.len() || self.active.len() >= MOST {
            return Err(TransferError::Full { need: pages, free: self.free.len() });
        }
        taken.extend(self.free.drain(self.free.len() - pages..).rev());
        self.last += 1;
        let lease = Lease(self.last);
        let mut digests = Vec::with_capacity(pages);
        let filled = taken.iter().enumerate().try_for_each(|(i, &page)| {
            fill(i, &mut |bytes| {
                digests.push(digest(bytes));
                self.region.put(page, lease.0, bytes)
            })
        });
        self.active.insert(lease, (now + self.life, taken.clone()));
        if let Err(e) = filled {
            self.end(lease);
            return Err(e);
        }
        let (address, page_bytes) = (self.region.address().clone(), self.page_bytes);
        Ok(RemotePages { address, lease: lease.0, page_bytes, pages: taken, digests })
    }
}
