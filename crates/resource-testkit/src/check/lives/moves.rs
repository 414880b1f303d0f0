//! Requests that come from a cache, leave the device, go elsewhere, or become sessions.

use std::time::Duration;

use resource_api::{ErrorKind, KvCache, LabelId, PrefixInputs, Resource, ResourceHandle};

use super::super::rig::{shown, told};
use super::steps::lacks_room;
use super::{
    LABELS, Mail, NODE, Outcome, Request, Stream, Streams, WALK, Worker, World, digest, digests,
    fails,
};

/// How often a read is asked for before it counts as lost, a millisecond apart.
const POLLS: u32 = 5000;

impl Worker {
    pub(super) fn ingest_again(&mut self, slot: u32) -> Outcome {
        let Some(r) = self.live.get(&slot) else { return Ok(()) };
        self.rig.ingest(self.rid(slot), &r.ids).map_err(fails("a second ingest_request"))
    }

    pub(super) fn probe(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        let Some(request) = self.live.get(&slot).filter(|r| r.is_empty()).cloned() else {
            return Ok(());
        };
        let mut first = request.found;
        for _ in 0..3 {
            self.rig.say(&format!("resolve_cached_prefix {rid}"));
            let found = self.resource().resolve_cached_prefix(rid, NODE, WALK);
            let found = found.map_err(fails("resolve_cached_prefix"))?.unwrap_or(0);
            if request.away && found > 0 {
                return Err(format!("it is off the device, and has {found} tokens to take over"));
            }
            if first.is_some_and(|f| f != found && f > 0) {
                return Err(format!("asked again, it has {found} tokens and not {first:?}"));
            }
            // After a reset, what was generated is known like the prompt.
            if found as usize >= request.ids.len() {
                let known = request.ids.len();
                return Err(format!("it has {found} of {known} tokens: none is left to compute"));
            }
            if found > 0 && !self.computed.contains(&digest(&request.ids[..found as usize])) {
                return Err(format!("it has {found} tokens that nobody has computed"));
            }
            first = Some(found);
        }
        if let Some(r) = self.live.get_mut(&slot) {
            r.found = first;
        }
        Ok(())
    }

    pub(super) fn take_over(&mut self, slot: u32, quarters: u32) -> Outcome {
        let (rid, page) = (self.rid(slot), self.cells.facts.page_size);
        let Some(r) = self.live.get_mut(&slot).filter(|r| !r.may_run()) else { return Ok(()) };
        let matched = r.found.take().unwrap_or(0) * quarters / 4;
        let inputs = PrefixInputs::new(&r.ids);
        self.rig.say(&format!("apply_cached_prefix {rid} {matched}"));
        let part = self.rig.part(self.cells.index);
        match part.apply_cached_prefix(rid, NODE, WALK, &inputs, matched) {
            Ok(()) => {
                let main = r.streams.entry(0).or_default();
                main.tokens = r.ids[..matched as usize].to_vec();
                main.held = main.held.max(u64::from(matched.div_ceil(page)));
                Ok(())
            }
            // Only a cut within a page needs one of its own, and may find none.
            Err(e) if matched.is_multiple_of(page) => Err(fails("apply_cached_prefix")(e)),
            Err(_) => Ok(()),
        }
    }

    pub(super) fn rewind(&mut self, slot: u32, label: u32, len: u32) -> Outcome {
        let rid = self.rid(slot);
        let Some(r) = self.live.get_mut(&slot).filter(|r| r.may_run() && !r.away) else {
            return Ok(());
        };
        let Some(stream) = r.streams.get_mut(&label).filter(|s| s.tokens.len() >= len as usize)
        else {
            return Ok(());
        };
        self.rig.say(&format!("correct_len {rid} label {label} {len}"));
        match self.cells.kv.correct_len(rid, LabelId(label), len) {
            Ok(()) => stream.tokens.truncate(len as usize),
            Err(e) if e.kind() == ErrorKind::UNSUPPORTED => {}
            Err(e) => return Err(format!("correct_len to {len} fails: {}", told(&e))),
        }
        Ok(())
    }

    pub(super) fn reset(&mut self, slot: u32, free: bool) -> Outcome {
        let rid = self.rid(slot);
        let reset = |r: &ResourceHandle| r.reset_request(rid, free);
        self.rig.each(&format!("reset_request {rid}"), reset).map_err(fails("reset_request"))?;
        if let Some(r) = self.live.get_mut(&slot) {
            (r.found, r.away) = (None, false);
            for stream in r.streams.values_mut() {
                stream.tokens.clear();
                stream.held = if free { 0 } else { stream.held };
            }
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, slot: u32) -> Outcome {
        self.rig.remove(self.rid(slot)).map_err(fails("remove_request"))?;
        self.live.remove(&slot);
        Ok(())
    }

    pub(super) fn offload(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        self.rig.say(&format!("offload {rid}"));
        let resource = self.resource();
        let could = resource.reclaimable(rid).map_err(fails("reclaimable"))?;
        let freed = resource.offload(rid).map_err(fails("offload"))?;
        let away = resource.is_offloaded(rid).map_err(fails("is_offloaded"))?;
        let was_away = self.live.get(&slot).is_some_and(|r| r.away);
        if freed > 0 && (could == 0 || was_away || !self.live.contains_key(&slot)) {
            return Err(format!("{rid} has nothing to offload, and {freed} are said to be freed"));
        }
        if away != (was_away || freed > 0) {
            return Err(format!("{freed} were freed, and is_offloaded says {away}"));
        }
        if let Some(r) = self.live.get_mut(&slot) {
            r.away = away;
        }
        Ok(())
    }

    pub(super) fn reload(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        let Some(r) = self.live.get(&slot) else { return Ok(()) };
        let (away, need) =
            (r.away, r.streams.values().map(|s| self.pages_of(s.tokens.len())).sum());
        self.rig.say(&format!("reload {rid}"));
        let free = self.cells.kv.free_pages();
        let back = self.resource().reload(rid).map_err(fails("reload"))?;
        if !back && (!away || free >= need) {
            return Err(format!("reload of at most {need} pages into {free} says false"));
        }
        if let Some(r) = self.live.get_mut(&slot).filter(|_| back) {
            r.away = false;
        }
        Ok(())
    }

    /// The request's streams go to a session. A resource without sessions does nothing.
    pub(super) fn retain(&mut self, slot: u32, name: u32) -> Outcome {
        let rid = self.rid(slot);
        let Some(r) = self.live.get(&slot).filter(|r| r.may_run() && !r.away && !r.is_empty())
        else {
            return Ok(());
        };
        let lens = r.streams.iter().filter(|(_, s)| !s.tokens.is_empty());
        let lens: Vec<_> = lens.map(|(&label, s)| (label, s.tokens.len())).collect();
        self.rig.say(&format!("retain_session {rid} {name}"));
        self.resource().retain_session(rid, &name.to_string()).map_err(fails("retain_session"))?;
        let mut left = 0;
        for &(label, len) in &lens {
            let now = self.cells.kv.stream_len(rid, LabelId(label)).map_err(fails("stream_len"))?;
            left += usize::from(now as usize == len);
        }
        if left == lens.len() {
            return Ok(());
        }
        if let Some(r) = self.live.get_mut(&slot) {
            // A request that has become a session is known to nobody by its tokens.
            self.sessions.insert(name, std::mem::take(&mut r.streams));
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, name: u32) -> Outcome {
        self.rig.say(&format!("remove_session {name}"));
        self.sessions.remove(&name);
        self.resource().remove_session(&name.to_string()).map_err(fails("remove_session"))
    }
}

impl World {
    /// A new request that begins as a session ended.
    pub(super) fn adopt(&mut self, at: u32, slot: u32, name: u32, quarters: u32) -> Outcome {
        let kept = self.workers[at as usize].sessions.get(&name).cloned().unwrap_or_default();
        let main = kept.get(&0).map_or(&[][..], |s| &s.tokens);
        let len = (main.len() * quarters as usize / 4).max(usize::from(!main.is_empty()));
        self.next_token += 1;
        let ids = [&main[..len], &[self.next_token]].concat();
        if !self.ingest(at, slot, ids)? {
            return Ok(());
        }
        let worker = &mut self.workers[at as usize];
        let rid = worker.rid(slot);
        worker.rig.say(&format!("adopt_session {rid} {name}: {len} tokens"));
        let adopted = worker.resource().adopt_session(rid, &name.to_string(), len as u32);
        let adopted = adopted.map_err(fails("adopt_session"))?;
        let held = worker.cells.kv.stream_len(rid, LabelId::MAIN).map_err(fails("stream_len"))?;
        if adopted.unwrap_or(0) != held {
            return Err(format!("adopt_session says {adopted:?}, and {rid} has {held} tokens"));
        }
        if adopted.is_some() {
            // It is gone, adopted or forgotten for its room.
            worker.sessions.remove(&name);
        }
        let others =
            |streams: &Streams| streams.iter().any(|(&l, s)| l > 0 && !s.tokens.is_empty());
        let got = match adopted {
            Some(n) if n as usize == len && n > 0 => true,
            Some(0) | None => false,
            Some(n) => {
                return Err(format!(
                    "of a session of {} tokens {n} are adopted, not {len}",
                    main.len()
                ));
            }
        };
        // One without tokens of `main` tells of nothing by its answer.
        let second = worker.cells.kv.stream_len(rid, LabelId(1)).map_err(fails("stream_len"))?;
        let third = worker.cells.kv.stream_len(rid, LabelId(2)).map_err(fails("stream_len"))?;
        if let Some(r) = worker.live.get_mut(&slot)
            && (got || main.is_empty() && others(&kept) && second + third > 0)
        {
            r.streams = kept;
            if let Some(main) = r.streams.get_mut(&0) {
                main.tokens.truncate(len);
            }
        }
        Ok(())
    }

    pub(super) fn publish(&mut self, at: u32, slot: u32) -> Outcome {
        let worker = &self.workers[at as usize];
        let Some(r) = worker.live.get(&slot).filter(|r| r.may_run()) else { return Ok(()) };
        let rid = worker.rid(slot);
        worker.rig.say(&format!("publish {rid}"));
        let info = match worker.resource().publish(rid) {
            Ok(Some(info)) => info,
            Ok(None) => return Ok(()),
            // There is room for so much that nobody has fetched yet.
            Err(e) if e.kind() == ErrorKind::EXHAUSTED => return Ok(()),
            Err(e) => return Err(fails("publish")(e)),
        };
        if r.away || r.is_empty() {
            return Err(format!("{rid} has nothing here, and publishes {}", shown(Some(&info))));
        }
        let request = r.clone();
        if !self.mail.iter().any(|mail| mail.info == info) {
            self.mail.push(Mail { from: at, info, request });
        }
        Ok(())
    }

    pub(super) fn retrieve(&mut self, at: u32, slot: u32, nth: u32) -> Outcome {
        if self.mail.is_empty() || self.workers[at as usize].live.contains_key(&slot) {
            return Ok(());
        }
        let mail = self.mail.swap_remove(nth as usize % self.mail.len());
        self.ingest(at, slot, mail.request.ids.clone())?;
        let worker = &mut self.workers[at as usize];
        let rid = worker.rid(slot);
        let need: u64 =
            mail.request.streams.values().map(|s| worker.pages_of(s.tokens.len())).sum();
        for _ in 0..POLLS {
            worker.rig.say(&format!("admit_retrieve {rid}"));
            let free = worker.cells.kv.free_pages();
            let outcome = worker.resource().admit_retrieve(rid, NODE, WALK, Some(&mail.info));
            let outcome = outcome.map_err(fails("admit_retrieve"))?;
            if outcome.is_ready() {
                // What it has published itself a worker may leave where it is.
                let len = |label: &u32| worker.cells.kv.stream_len(rid, LabelId(*label));
                let is_here = mail.request.streams.keys().any(|l| len(l).is_ok_and(|n| n > 0));
                if mail.from != at || is_here {
                    worker.arrived(slot, mail.request.streams);
                }
                return Ok(());
            }
            if !outcome.is_ok() {
                if !lacks_room(&outcome) || free >= need {
                    return Err(format!("{rid} does not arrive: {}", outcome.message()));
                }
                self.mail.push(mail);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(format!("what was published never arrives as {rid}"))
    }
}

impl Worker {
    fn arrived(&mut self, slot: u32, streams: Streams) {
        let pages = |s: &Stream| self.pages_of(s.tokens.len());
        let here: Streams = streams
            .into_iter()
            .filter(|(label, s)| *label < LABELS && !s.tokens.is_empty())
            .map(|(label, s)| (label, Stream { held: pages(&s), ..s }))
            .collect();
        if let Some(main) = here.get(&0) {
            self.computed.extend(digests(&main.tokens));
        }
        if let Some(r) = self.live.get_mut(&slot) {
            *r = Request { streams: here, ..std::mem::take(r) };
        }
    }
}
