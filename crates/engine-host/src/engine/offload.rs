//! Requests that leave the device under pressure and come back without being computed again.

use std::fmt;

use resource_api::{RequestId, Resource};

use super::Engine;
use crate::request::Tracked;
use crate::resources::{Entry, ResourceSet};
use crate::scheduler::Join;

/// What makes room when a step does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Caches give up what they keep for later requests. They do so before they refuse a step.
    Evict,
    /// The state of a running request moves off the device, and comes back.
    Offload,
    /// A running request gives its state up and is computed again.
    Recompute,
}

impl Relief {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 3] =
        [("evict", Self::Evict), ("offload", Self::Offload), ("recompute", Self::Recompute)];

    /// An order by names.
    ///
    /// # Errors
    /// One line for an order that cannot be kept: caches evict before they refuse anything, and computing
    /// again is what always works, so only what lies between can be left out.
    pub fn order(names: &[&str]) -> Result<Vec<Self>, String> {
        let mut order = Vec::new();
        for name in names {
            match Self::NAMES.iter().find(|(known, _)| known == name) {
                Some((_, relief)) => order.push(*relief),
                None => {
                    let hint =
                        crate::suggest::did_you_mean(name, Self::NAMES.map(|(name, _)| name));
                    return Err(format!(
                        "there is no {name:?}{hint} (there are evict, offload and recompute)"
                    ));
                }
            }
        }
        match order[..] {
            [Self::Evict, Self::Recompute] | [Self::Evict, Self::Offload, Self::Recompute] => {
                Ok(order)
            }
            _ => Err("the order is evict, offload, recompute; offload may be left out".into()),
        }
    }

    /// Everything, in the order of its cost.
    pub const ORDER: [Self; 3] = [Self::Evict, Self::Offload, Self::Recompute];
}

impl fmt::Display for Relief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            Self::NAMES.iter().find(|(_, relief)| relief == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// What came of moving a request off the device.
enum Moved {
    Away,
    /// It is here as before.
    Stayed,
    /// One resource has it and another one has not: it must be computed again.
    Torn,
}

fn movers(resources: &ResourceSet) -> impl DoubleEndedIterator<Item = &Entry> {
    resources.entries().iter().filter(|entry| entry.resource().supports_eviction())
}

pub(super) fn told<T>(entry: &Entry, what: &str, answer: resource_api::Result<T>) -> Option<T> {
    answer.inspect_err(|e| tracing::warn!(resource = entry.key, "{what} failed: {e}")).ok()
}

/// Moves a request off the device, in all resources that have something to move or in none.
fn leave(resources: &ResourceSet, rid: RequestId) -> Moved {
    let mut gone = Vec::new();
    for entry in movers(resources).rev() {
        let resource = entry.resource();
        match told(entry, "reclaimable", resource.reclaimable(rid)) {
            Some(0) => continue,
            Some(_) if told(entry, "offload", resource.offload(rid)).is_some_and(|n| n > 0) => {
                gone.push(entry);
            }
            _ => return if come_back(gone.into_iter(), rid) { Moved::Stayed } else { Moved::Torn },
        }
    }
    if gone.is_empty() { Moved::Stayed } else { Moved::Away }
}

fn come_back<'a>(entries: impl Iterator<Item = &'a Entry>, rid: RequestId) -> bool {
    let mut all = true;
    for entry in entries {
        all &= told(entry, "reload", entry.resource().reload(rid)) == Some(true);
    }
    all
}

/// Brings a request back to the device, in all resources or in none. `None` when it must be computed
/// again.
fn return_to(resources: &ResourceSet, rid: RequestId) -> Option<bool> {
    let mut away = Vec::new();
    for entry in movers(resources) {
        if told(entry, "is_offloaded", entry.resource().is_offloaded(rid))? {
            if !told(entry, "can_reload", entry.resource().can_reload(rid))? {
                return Some(false);
            }
            away.push(entry);
        }
    }
    for (i, entry) in away.iter().enumerate() {
        if !told(entry, "reload", entry.resource().reload(rid))? {
            // It was asked, and another one's reload took the room: the others leave again.
            for earlier in &away[..i] {
                told(earlier, "offload", earlier.resource().offload(rid))?;
            }
            return Some(false);
        }
    }
    Some(true)
}

/// Empties a request's state in all resources; it is computed again from its tokens.
pub(super) fn start_anew(resources: &ResourceSet, request: &mut Tracked) {
    request.give_up_computed();
    request.arriving = None;
    for entry in resources.entries().iter().rev() {
        if let Err(e) = entry.resource().reset_request(request.rid, true) {
            tracing::error!(resource = entry.key, "reset_request failed: {e}");
        }
    }
}

/// Sees to it that a request that is to run is on the device. Says whether it came back, or starts anew.
pub(super) fn bring_back(resources: &ResourceSet, request: &mut Tracked) -> (Join, bool) {
    if !request.offloaded {
        return (Join::Runs, false);
    }
    match return_to(resources, request.rid) {
        Some(true) => {
            request.offloaded = false;
            (Join::Runs, true)
        }
        Some(false) => (Join::Waits, false),
        None => {
            start_anew(resources, request);
            (Join::Runs, false)
        }
    }
}

impl Engine {
    /// Sets what makes room when a step does not fit. Everything, in the order of [`Relief::ORDER`], from
    /// the start.
    pub fn set_relief(&mut self, order: &[Relief]) {
        self.relief = order.to_vec();
    }

    /// Moves all running requests off the device, where resources can. They come back in the next steps.
    /// Says how many left.
    pub fn offload_running(&mut self) -> usize {
        self.settle_early();
        self.drop_stage();
        let rids = self.scheduler.stand_aside();
        rids.into_iter().filter(|&rid| self.offload(rid)).count()
    }

    /// Moves a request off the device; `false` when it stays or has to be computed again.
    pub(super) fn offload(&mut self, rid: RequestId) -> bool {
        let Some(request) = self.requests.get_mut(rid) else { return false };
        if request.offloaded || request.computed == 0 {
            return false;
        }
        match leave(self.runner.resources(), rid) {
            Moved::Away => {
                request.offloaded = true;
                self.stats.offloads += 1;
                true
            }
            Moved::Stayed => false,
            Moved::Torn => {
                start_anew(self.runner.resources(), request);
                self.stats.preemptions += 1;
                false
            }
        }
    }

    /// Has the youngest request that waits with state of its own start anew, so that its pages can be
    /// freed: one that is off the device, which may share some there, before one that is on it, and that
    /// before one whose state arrives. `None` when there is none.
    pub(super) fn recall(&mut self) -> Option<RequestId> {
        let kinds: [fn(&Tracked) -> bool; 3] =
            [|r| r.offloaded, |r| r.computed > 0, |r| r.arriving.is_some()];
        let youngest = |is: &fn(&Tracked) -> bool| {
            let mut waiting = self.scheduler.youngest_first();
            waiting.find(|&rid| self.requests.get(rid).is_some_and(is))
        };
        let rid = kinds.iter().find_map(youngest)?;
        let request = self.requests.get_mut(rid)?;
        start_anew(self.runner.resources(), request);
        self.stats.preemptions += 1;
        Some(rid)
    }
}
