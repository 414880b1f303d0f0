//! Cached pages that leave the pool for a tier, and come back for the prefix that they hold.

use resource_api::host::level;
use resource_api::{HostServices, Result};

use crate::keys::Key;
use crate::state::{Shared, State};

impl State {
    /// Makes so many cached pages ready, or none if there are not so many. What they hold goes to the
    /// tiers, where there are any.
    pub(crate) fn make_ready(&mut self, shared: &Shared, pages: u32) -> bool {
        if pages > 0 && pages <= self.pool.cached() && !self.tiers.is_empty() {
            let victims = self.pool.cached_list().take(pages as usize);
            let victims: Vec<(u32, Key)> = victims.map(|p| (p, self.pool.key(p))).collect();
            for (page, key) in victims {
                self.tiers.keep(key, |take| shared.memory.read_page(page, take));
            }
            if let Some(why) = self.tiers.take_trouble() {
                let message = format!("{}: a cached page is dropped: {why}", shared.key);
                shared.host.log(level::WARN, "kv", &message);
            }
        }
        self.pool.evict(pages, shared.completed_epoch())
    }

    /// Brings the page with this key back from a tier. It has one owner then, and is indexed.
    pub(crate) fn restore(&mut self, shared: &Shared, key: Key) -> Option<u32> {
        let page = self.read_back(shared, key)?;
        self.pool.insert(key, page);
        self.tiers.restored += 1;
        Some(page)
    }

    /// A page of one owner with what a tier has under this key.
    pub(crate) fn read_back(&mut self, shared: &Shared, key: Key) -> Option<u32> {
        let slot = self.tiers.find(key)?;
        // Making room below must not drop it.
        self.tiers.hold(slot);
        let page = self.take_one(shared);
        let read = |page: u32| -> Result<()> {
            let mut take = |bytes: &[u8]| shared.memory.write_page(page, bytes);
            self.tiers.store(slot).get(slot.at, Some(key), &mut take)
        };
        let filled = match page.map(|page| (page, read(page))) {
            Some((page, Ok(()))) => Some(page),
            Some((page, Err(_))) => {
                self.pool.put_back(page);
                self.tiers.forget(slot);
                None
            }
            None => None,
        };
        self.tiers.let_go(slot);
        filled
    }
}
