//! Steps of a worker.

use resource_api::{AdmitOutcome, Fork, KvCache, LabelId, RequestId, Resource};

use super::super::rig::{LIMITS, Plans};
use super::super::step::{CacheOptions, Row, Step};
use super::super::values::planned_row;
use super::ops::{End, Feed};
use super::{Outcome, Worker, digests, fails};

/// A step, and what each of its rows should read.
struct Laid {
    step: Step,
    /// The ids of its tokens, by row, without padding.
    ids: Vec<Vec<u32>>,
    /// What a row's stream holds before.
    before: Vec<Vec<u32>>,
    /// Pages that it takes at most.
    most: u64,
    /// Whether one of its requests is off the device.
    away: bool,
    copy: Option<(u32, u32, u32, bool)>,
}

impl Laid {
    /// Digests of the tokens that it adds, padding included, in packed order.
    fn written(&self) -> Vec<u64> {
        let of = |(ids, before): (&Vec<u32>, &Vec<u32>)| {
            digests(&[&before[..], ids].concat()).split_off(before.len())
        };
        let mut all: Vec<u64> = self.ids.iter().zip(&self.before).flat_map(of).collect();
        // Padding rows write too, to where nobody reads.
        all.resize(self.step.tokens.len(), u64::MAX);
        all
    }
}

impl Worker {
    /// Lays a step out; generated tokens that nobody has sampled yet count from `fresh`.
    fn lay_out(&mut self, feed: &Feed, mut fresh: u32) -> Laid {
        let id = self.next_step;
        self.next_step += 1;
        let page = u64::from(self.cells.facts.page_size);
        let longest = LIMITS.max_model_len.min(self.cells.facts.max_seq_len) as usize;
        let step = Step { id, slot: (id % 3) as u32, ..Step::default() };
        let (ids, before) = Default::default();
        let mut laid = Laid { step, ids, before, most: 0, away: false, copy: None };
        let copied = feed.copy.and_then(|(slot, from, to, after)| {
            let request = self.live.get(&slot).filter(|r| r.may_run() && !r.away)?;
            Some((slot, from, to, after, request.tokens(from).to_vec()))
        });
        for &(slot, label, most) in &feed.rows {
            let Some(r) = self.live.get(&slot).filter(|r| r.may_run()) else { continue };
            let before = match &copied {
                Some((s, _, to, false, tokens)) if (*s, *to) == (slot, label) => tokens.clone(),
                _ => r.tokens(label).to_vec(),
            };
            let room = longest - before.len().min(longest);
            let ids: Vec<u32> = match label {
                0 => {
                    let known = &r.ids[before.len().min(r.ids.len())..];
                    let known = &known[..known.len().min(most as usize)];
                    // Without any, one that was sampled and not told of.
                    if known.is_empty() && most > 0 && before.len() == r.ids.len() {
                        fresh += 1;
                        vec![fresh]
                    } else {
                        known.to_vec()
                    }
                }
                _ => {
                    let first = fresh + 1;
                    fresh += most;
                    (first..first + most).collect()
                }
            };
            if ids.len() > room {
                continue;
            }
            laid.away |= r.away;
            laid.most += (ids.len() as u64).div_ceil(page) + 1;
            laid.step.tokens.extend(&ids);
            let span = ids.len() as u32;
            laid.step.rows.push(Row { rid: self.rid(slot), label: LabelId(label), span });
            laid.ids.push(ids);
            laid.before.push(before);
        }
        for (i, &span) in feed.padding.iter().enumerate() {
            let rid = RequestId::padding(i as u32);
            laid.step.rows.push(Row { rid, label: LabelId::MAIN, span });
            laid.step.tokens.extend((0..span).map(|_| 0));
        }
        let mut options = CacheOptions { discard: feed.end == End::Discard, ..Default::default() };
        if let Some((slot, from, to, after, tokens)) = copied {
            let grown = laid.rows_of(self.rid(slot), from).map_or(0, |row| laid.ids[row].len());
            let len = tokens.len() + if after { grown } else { 0 };
            laid.most += (len as u64).div_ceil(page) + 1;
            let fork = Fork { request_id: self.rid(slot), from: LabelId(from), to: LabelId(to) };
            if after { &mut options.post } else { &mut options.pre }.push(fork);
            laid.copy = Some((slot, from, to, after));
        }
        let plain = !options.discard && laid.copy.is_none();
        laid.step.options = (!plain).then_some(options);
        laid
    }

    pub(super) fn feed(&mut self, feed: &Feed, fresh: u32) -> Outcome {
        let mut laid = self.lay_out(feed, fresh);
        let ahead = matches!(feed.end, End::Promote | End::Drop);
        if ahead && !self.rig.can_stage() {
            return Ok(());
        }
        laid.step.staged = ahead;
        if !self.admit(&laid)? {
            return Ok(());
        }
        if ahead {
            self.rig.plan(&laid.step).map_err(fails("plan ahead"))?;
            if feed.end == End::Drop {
                return self.rig.clear(&laid.step).map_err(fails("clear_preplan"));
            }
            laid.step.staged = false;
            if !self.admit(&laid)? {
                return Err(format!("{}, admitted before, is refused", laid.step));
            }
        }
        let gone = match feed.end {
            End::LeaveEarly(slot) | End::LeaveLate(slot) => Some(self.rid(slot)),
            _ => None,
        };
        if let (End::LeaveEarly(slot), true) = (feed.end, gone.is_some()) {
            self.remove(slot)?;
        }
        let early = gone.filter(|_| matches!(feed.end, End::LeaveEarly(_)));
        let plans = self.forward(&laid, early)?;
        match feed.end {
            End::RollBack => {
                self.rig.rollback(&laid.step).map_err(fails("rollback_admit"))?;
                return Ok(());
            }
            End::LeaveLate(slot) => self.remove(slot)?,
            _ => {}
        }
        self.rig.commit(&laid.step, &plans).map_err(fails("commit"))?;
        self.take_in(&laid, feed, gone);
        if feed.told && feed.end != End::Discard {
            self.tell_outputs(&laid, &plans, fresh + 500)?;
        }
        Ok(())
    }

    /// Whether it was admitted; a finding where that is wrong.
    fn admit(&self, laid: &Laid) -> Result<bool, String> {
        let step = &laid.step;
        let outcome = self.rig.admit(step).map_err(fails("admit"))?;
        let free = self.cells.kv.free_pages();
        match outcome.is_ready() {
            true if laid.away => Err(format!("{step} is admitted, though a request of it is away")),
            // What is planned ahead may have to wait.
            false if !laid.away && !step.staged && free >= laid.most => {
                Err(format!("{step} fits and is refused: {}", outcome.message()))
            }
            admitted => Ok(admitted),
        }
    }

    /// Plans the step, writes what it adds, and compares what its rows read, but for those of a request
    /// that has gone.
    fn forward(&self, laid: &Laid, gone: Option<RequestId>) -> Result<Plans, String> {
        let step = &laid.step;
        let plans = self.rig.plan(step).map_err(fails("plan of an admitted step"))?;
        self.cells.write(&self.rig, step, &plans, &laid.written())?;
        let plan = self.cells.plan(&plans)?;
        for (row, (before, ids)) in laid.before.iter().zip(&laid.ids).enumerate() {
            if Some(step.rows[row].rid) == gone {
                continue;
            }
            let at = planned_row(step, plan, row).ok_or("a row is not planned")?;
            let want = digests(&[&before[..], ids].concat());
            self.cells.compare(plan, at, &want).map_err(|e| format!("{step}: {e}"))?;
        }
        Ok(plans)
    }

    /// Makes what a step has added part of the reference.
    fn take_in(&mut self, laid: &Laid, feed: &Feed, gone: Option<RequestId>) {
        let discard = feed.end == End::Discard;
        self.copy(laid, false);
        for (row, (before, ids)) in laid.before.iter().zip(&laid.ids).enumerate() {
            let Row { rid, label, .. } = laid.step.rows[row];
            if Some(rid) == gone {
                continue;
            }
            let tokens = [&before[..], ids].concat();
            let held = self.pages_of(tokens.len());
            let Some(r) = self.live.get_mut(&rid.slot) else { continue };
            let stream = r.streams.entry(label.0).or_default();
            stream.held = stream.held.max(held);
            if discard {
                continue;
            }
            if label == LabelId::MAIN {
                self.computed.extend(digests(&tokens));
                r.ids.extend(tokens.get(r.ids.len()..).unwrap_or_default());
            }
            stream.tokens = tokens;
        }
        self.copy(laid, true);
    }

    /// A source that nobody opened is empty.
    fn copy(&mut self, laid: &Laid, after: bool) {
        let Some((slot, from, to, _)) = laid.copy.filter(|copy| copy.3 == after) else { return };
        let page = u64::from(self.cells.facts.page_size);
        let Some(r) = self.live.get_mut(&slot) else { return };
        let tokens = r.tokens(from).to_vec();
        let target = r.streams.entry(to).or_default();
        target.held = target.held.max((tokens.len() as u64).div_ceil(page));
        target.tokens = tokens;
    }

    /// The host learns what was sampled of requests whose known tokens are used up.
    fn tell_outputs(&mut self, laid: &Laid, plans: &Plans, first: u32) -> Outcome {
        let (mut rids, mut ids) = (Vec::new(), Vec::new());
        for Row { rid, label, span } in &laid.step.rows {
            let Some(r) = self.live.get_mut(&rid.slot).filter(|_| !rid.is_padding()) else {
                continue;
            };
            let used_up = r.tokens(0).len() == r.ids.len() && r.generation == rid.generation;
            if *label == LabelId::MAIN && *span > 0 && used_up {
                // A small choice, so that requests go on alike.
                let id = 50 + (first + rids.len() as u32) % 2;
                r.ids.push(id);
                rids.push(*rid);
                ids.push(id);
            }
        }
        let part = self.resource();
        self.rig.say(&format!("on_outputs {}", laid.step));
        let tell = self
            .rig
            .call(&laid.step, self.cells.index, plans, |_, c| part.on_outputs(c, &rids, &ids));
        tell.map_err(fails("on_outputs"))
    }
}

impl Laid {
    /// The row of a stream.
    fn rows_of(&self, rid: RequestId, label: u32) -> Option<usize> {
        let is_it = |row: &Row| row.rid == rid && row.label == LabelId(label);
        self.step.rows[..self.ids.len()].iter().position(is_it)
    }
}

/// Whether a refusal may be for lack of room.
pub(super) fn lacks_room(outcome: &AdmitOutcome) -> bool {
    outcome.reason() == resource_api::FailureReason::ALLOCATION_FAILED
}
