//! The state for people: as JSON, and checked.

use std::collections::HashMap;

use resource_api::{ResourceError, Result};
use serde_json::{Value, json};

use crate::pool::SINK;
use crate::state::{Shared, State};
use crate::stream::StreamId;

impl State {
    /// The state for tools. Labels are ids; `label_name` gives their names. `published` is what
    /// [`crate::handover::Transfer::usage`] says.
    pub(crate) fn inspect(
        &self,
        shared: &Shared,
        label_name: impl Fn(resource_api::LabelId) -> String,
        published: Option<(usize, usize)>,
    ) -> Value {
        let facts = &shared.facts;
        let streams: Vec<Value> = self
            .requests
            .iter()
            .map(|(id, s)| {
                json!({
                    "request": id.request.to_string(),
                    "label": label_name(id.label),
                    "tokens": s.len,
                    "pending": s.pending,
                    "pages": s.held(),
                    "page_map": runs(&s.pages),
                    "released": s.released,
                    "protected": s.protected,
                    "generation": s.generation,
                })
            })
            .collect();
        let idle = self.pool.ready() + self.pool.cached() + self.pool.waiting();
        json!({
            "pages": {
                "total": facts.num_pages,
                "used": self.pool.usable().saturating_sub(idle),
                "free": self.pool.ready(),
                "cached": self.pool.cached(),
                "peak": self.pool.peak(),
                "waiting": self.pool.waiting(),
                "sealed": self.pool.sealed(),
            },
            "prefix": {
                "open": shared.prefix.get().is_some(),
                "lookups": self.prefix_use.lookups,
                "hits": self.prefix_use.hits,
                "hit_tokens": self.prefix_use.hit_tokens,
                "labels": self.label_use.iter().map(|&(label, of)| (label_name(label), json!({
                    "lookups": of.lookups,
                    "hits": of.hits,
                    "hit_tokens": of.hit_tokens,
                }))).collect::<serde_json::Map<_, _>>(),
                "evictions": self.pool.evictions(),
                "pages": self.pool.indexed(),
                "smallest": facts.page_size,
            },
            "tiers": self.tiers.usage().map(|(name, of)| json!({
                "name": name,
                "pages": of.slots,
                "free": of.free,
                "cached": of.idle,
                "held": of.held,
            })).collect::<Vec<_>>(),
            "away": self.journeys.len(),
            "sessions": self.sessions.len(),
            "quarantined": self.handovers.quarantined(),
            "published": published.map(|(free, leases)| {
                json!({ "pages_free": free, "leases": leases })
            }),
            "spilled": self.tiers.spilled,
            "restored": self.tiers.restored,
            "tier_failures": self.tiers.failures,
            "page_size": facts.page_size,
            "max_seq_len": facts.max_seq_len,
            "dtype": facts.dtype.name(),
            "bytes": crate::geometry::total_bytes(facts),
            "steps_in_flight": self.steps.len(),
            "streams": streams,
        })
    }

    /// Checks that every page is free or owned, never both, by as many as it counts.
    pub(crate) fn check_conservation(&self) -> Result<()> {
        let mut owners: HashMap<u32, u32> = HashMap::from([(SINK, 1)]);
        let held = self.requests.iter().flat_map(|(_, s)| &s.pages);
        let copies = self.steps.iter().flat_map(|r| &r.copies).flat_map(|c| &c.pages);
        let leases = self.requests.chains().flat_map(|c| &c.lease);
        let away = self.journeys.pages().chain(self.sessions.pages()).chain(self.in_flight.pages());
        for &page in held.chain(copies).chain(leases).chain(away).chain(self.handovers.pages()) {
            *owners.entry(page).or_default() += 1;
        }
        let fault = |what: String| Err(ResourceError::internal(what));
        let mut free = vec![false; self.pool.usable() as usize + 1];
        for page in self.pool.ready_list().chain(self.pool.waiting_list()) {
            if std::mem::replace(&mut free[page as usize], true) {
                return fault(format!("page {page} is free twice"));
            }
        }
        let mut cached = vec![false; free.len()];
        for page in self.pool.cached_list() {
            if free[page as usize] || std::mem::replace(&mut cached[page as usize], true) {
                return fault(format!("page {page} is cached twice, or cached and free"));
            }
        }
        for (page, &is_free) in free.iter().enumerate() {
            let page = page as u32;
            let (counted, found) =
                (self.pool.owners(page), owners.get(&page).copied().unwrap_or(0));
            if counted != found {
                return fault(format!("page {page} counts {counted} owners and has {found}"));
            }
            match (is_free, cached[page as usize], found > 0) {
                (true, false, false) | (false, true, false) | (false, false, true) => {}
                (false, false, false) => return fault(format!("page {page} is lost")),
                _ => return fault(format!("page {page} is owned, and free or cached")),
            }
            let (indexed, sealed) = (self.pool.is_indexed(page), self.pool.is_sealed(page));
            if (cached[page as usize] && !indexed) || (indexed && (is_free || !sealed)) {
                return fault(format!("page {page} is cached or indexed, and not both as it must"));
            }
            if indexed && self.pool.find(self.pool.key(page)) != Some(page) {
                return fault(format!("page {page} is not found under its key"));
            }
            let is_pinned = || self.in_flight.pages().any(|&pinned| pinned == page);
            if found > 1 && page != SINK && !self.pool.is_sealed(page) && !is_pinned() {
                return fault(format!("page {page} is shared by {found} and not sealed"));
            }
        }
        let (found, counted) = (cached.iter().filter(|&&c| c).count() as u32, self.pool.cached());
        if found != counted {
            return fault(format!("{found} pages are cached, {counted} are counted"));
        }
        let indexed = (0..free.len() as u32).filter(|&p| self.pool.is_indexed(p)).count() as u32;
        if indexed != self.pool.indexed() {
            return fault(format!(
                "{indexed} pages are indexed, the index has {}",
                self.pool.indexed()
            ));
        }
        let listed = free.iter().filter(|&&f| f).count() as u32;
        let counted = self.pool.ready() + self.pool.waiting();
        if listed != counted {
            return fault(format!("{listed} pages are free, {counted} are counted"));
        }
        self.tiers.check(self.journeys.slots())?;
        self.requests.iter().try_for_each(|(id, s)| self.check_stream(id, s))
    }

    fn check_stream(&self, id: StreamId, s: &crate::stream::Stream) -> Result<()> {
        let size = self.page_size();
        let what = match () {
            _ if self.journeys.is_away(id.request) => return Ok(()),
            _ if u64::from(s.held()) * u64::from(size) < u64::from(s.len) => "pages for its tokens",
            _ if s.in_flight == 0 && (s.pending > 0 || s.rewriters > 0) => {
                "step for what is pending"
            }
            _ => return Ok(()),
        };
        let (request, label) = (id.request, id.label.0);
        Err(ResourceError::internal(format!("label {label} of request {request} lacks a {what}")))
    }
}

/// Pages in their order, as runs of neighbours: (first, how many).
fn runs(pages: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &page in pages {
        match runs.last_mut().filter(|(first, count)| first + count == page) {
            Some((_, count)) => *count += 1,
            None => runs.push((page, 1)),
        }
    }
    runs
}
