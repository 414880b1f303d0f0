//! Performs operations on a paged cache and compares it with the reference interpreter after each.

use std::collections::BTreeMap;

use resource_api::{
    CombinedLabel, ErrorKind, Fork, KvCache, LabelId, RequestId, Resource, Retention,
};

use super::model::{Model, Stream};
use super::ops::{Op, Row3, SLOTS, Shape};
use super::rig::{Rig, Subject, Watch, told};
use super::step::{CacheOptions, Row, Step};
use super::values::Cells;

/// A request whose steps show which pages are free, and in what order.
const PROBE: RequestId = RequestId::new(SLOTS + 5, 1);

/// What combined rows are planned under; no stream has it.
const COMBINED: LabelId = LabelId(200);

mod look;
mod steps;

type Outcome = Result<(), String>;

/// A cache with the streams that it should hold.
struct Play {
    rig: Rig,
    cells: Cells,
    model: Model,
    generations: BTreeMap<u32, u32>,
    next_step: u64,
    next_token: u32,
}

/// Performs `ops` on a fresh resource. Gives how many were performed; where one shows a fault, which
/// one and what.
///
/// # Errors
/// See above. A resource without a paged cache performs nothing.
pub fn perform(subject: &Subject, ops: &[Op], watch: Watch) -> Result<usize, (usize, String)> {
    let fresh = || -> Result<Option<Play>, String> {
        let rig = subject.build(watch).map_err(|e| told(&e))?;
        let Some(cells) = Cells::of(&rig)? else { return Ok(None) };
        let mut play = Play::new(rig, cells)?;
        play.check()?;
        Ok(Some(play))
    };
    let Some(mut play) = fresh().map_err(|e| (0, e))? else { return Ok(0) };
    for (at, op) in ops.iter().enumerate() {
        play.rig.say(&op.to_string());
        let done = play.apply(op).and_then(|()| play.check());
        done.and_then(|()| play.rig.check_fault()).map_err(|e| (at, e))?;
    }
    play.finish().map_err(|e| (ops.len().saturating_sub(1), e))?;
    Ok(ops.len())
}

fn fails(what: &str) -> impl Fn(resource_api::ResourceError) -> String {
    let what = what.to_string();
    move |e| format!("{what} fails: {}", told(&e))
}

impl Play {
    fn new(rig: Rig, cells: Cells) -> Result<Self, String> {
        rig.ingest(PROBE, &[]).map_err(fails("ingest_request"))?;
        let (facts, free) = (cells.facts, cells.kv.free_pages());
        if free != u64::from(facts.num_pages - 1) {
            let pages = facts.num_pages;
            return Err(format!("of {pages} pages, the sink among them, {free} are free at first"));
        }
        let model = Model {
            page: facts.page_size.into(),
            pages: free,
            max_len: facts.max_seq_len.into(),
            ..Model::default()
        };
        let (generations, next_step, next_token) = (BTreeMap::new(), 1, 1);
        Ok(Play { rig, cells, model, generations, next_step, next_token })
    }

    fn resource(&self) -> &resource_api::ResourceHandle {
        self.rig.part(self.cells.index)
    }

    /// Of the slot's present owner; of one that never was where it has none.
    fn rid(&self, slot: u32) -> RequestId {
        RequestId::new(slot, self.model.live.get(&slot).copied().unwrap_or(u32::MAX))
    }

    /// A step in its own slot, with the digests of what its rows add.
    fn step(&mut self, shape: &Shape) -> (Step, Vec<u64>) {
        let id = self.next_step;
        self.next_step += 1;
        let rid = |slot| self.rid(slot);
        let row = |r: &Row3| Row { rid: rid(r.slot), label: LabelId(r.label), span: r.span };
        let mut rows: Vec<Row> = shape.rows.iter().map(row).collect();
        let padding = shape.padding.iter().enumerate();
        rows.extend(padding.map(|(i, &span)| Row {
            rid: RequestId::padding(i as u32),
            label: LabelId(shape.rows.first().map_or(0, |r| r.label)),
            span,
        }));
        let fork = |f: &(u32, u32, u32)| Fork {
            request_id: rid(f.0),
            from: LabelId(f.1),
            to: LabelId(f.2),
        };
        let options = CacheOptions {
            discard: shape.discard,
            pre: shape.pre.iter().map(fork).collect(),
            post: shape.post.iter().map(fork).collect(),
            retain: shape
                .retain
                .iter()
                .map(|keep| Retention {
                    request_id: rid(keep.slot),
                    label: LabelId(keep.label),
                    context_budget: keep.budget,
                    protected_prefix: keep.prefix,
                })
                .collect(),
            combined: match shape.combined {
                true => {
                    [1, 0].map(|l| CombinedLabel { combined: COMBINED, source: LabelId(l) }).into()
                }
                false => Vec::new(),
            },
        };
        let plain = !options.discard
            && options.pre.is_empty()
            && options.post.is_empty()
            && options.retain.is_empty()
            && options.combined.is_empty();
        let tokens: u32 = rows.iter().map(|r| r.span).sum();
        let ids: Vec<u32> = (0..tokens).map(|i| self.next_token + i).collect();
        self.next_token += tokens;
        let mut digests = self.model.digests(shape, &ids);
        // Padding rows write too, to where nobody reads.
        digests.resize(tokens as usize, u64::MAX);
        let options = (!plain).then_some(options);
        let slot = (id % 3) as u32;
        (Step { id, slot, rows, tokens: ids, options, ..Step::default() }, digests)
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Ingest(slot) => self.ingest(*slot),
            Op::Remove(slot) => {
                let rid = self.rid(*slot);
                self.rig.remove(rid).map_err(fails("remove_request"))?;
                self.model.remove(*slot);
                Ok(())
            }
            Op::Late(slot) => self.late(*slot),
            Op::Reset(slot, free) => self.reset(*slot, *free),
            Op::Rewind(slot, label, len) => self.rewind(*slot, *label, *len),
            Op::Offload(slot) => self.offload(*slot),
            Op::Reload(slot) => self.reload(*slot),
            Op::Step(shape, fate) => self.run(shape, *fate),
            Op::Overlap(first, second, fate) => self.overlap(first, second, *fate),
        }
    }

    fn ingest(&mut self, slot: u32) -> Outcome {
        let last = self.generations.entry(slot).or_insert(0);
        self.model.live.entry(slot).or_insert_with(|| {
            *last += 1;
            *last
        });
        let prompt = [self.next_token, 2, 3];
        self.rig.ingest(self.rid(slot), &prompt).map_err(fails("ingest_request"))
    }

    /// What comes late for the slot's last owner must not hit the present one.
    fn late(&mut self, slot: u32) -> Outcome {
        let last = self.generations.get(&slot).copied().unwrap_or(0);
        let live = self.model.live.contains_key(&slot);
        let Some(generation) = last.checked_sub(u32::from(live)).filter(|&g| g > 0) else {
            return Ok(());
        };
        let late = RequestId::new(slot, generation);
        let reset = |r: &resource_api::ResourceHandle| r.reset_request(late, true);
        self.rig.each(&format!("reset_request {late}"), reset).map_err(fails("reset_request"))?;
        self.rig.remove(late).map_err(fails("remove_request"))?;
        let len = self.cells.kv.stream_len(late, LabelId::MAIN).map_err(fails("stream_len"))?;
        if len != 0 {
            return Err(format!("{late} was removed and still has {len} tokens"));
        }
        let (mut step, _) = self.step(&Shape::default());
        step.rows = vec![Row { rid: late, label: LabelId::MAIN, span: 1 }];
        step.tokens = vec![1];
        match self.rig.admit(&step) {
            Ok(outcome) if outcome.is_ready() => {
                Err(format!("a step of {late} is admitted, which was removed"))
            }
            _ => Ok(()),
        }
    }

    fn reset(&mut self, slot: u32, free: bool) -> Outcome {
        let rid = self.rid(slot);
        let reset = |r: &resource_api::ResourceHandle| r.reset_request(rid, free);
        self.rig.each(&format!("reset_request {rid}"), reset).map_err(fails("reset_request"))?;
        let freed = self.cells.kv.free_pages().saturating_sub(self.model.free());
        self.model.away.retain(|&s| s != slot);
        let own = self.model.streams.iter_mut().filter(|(k, _)| k.0 == slot);
        for (_, stream) in own {
            stream.tokens.clear();
            stream.protected = 0;
            // Without `free` it may keep its memory, or not.
            if free || freed > 0 {
                stream.held = 0;
            }
        }
        Ok(())
    }

    fn rewind(&mut self, slot: u32, label: u32, len: u32) -> Outcome {
        if self.model.away.contains(&slot) {
            return Ok(());
        }
        let (rid, before) = (self.rid(slot), self.cells.kv.free_pages());
        self.rig.say(&format!("correct_len {rid} {len}"));
        let done = self.cells.kv.correct_len(rid, LabelId(label), len);
        let freed = self.cells.kv.free_pages().saturating_sub(before);
        let stream = self.model.streams.get_mut(&(slot, label));
        match (stream.filter(|s| len as usize <= s.tokens.len()), done) {
            (_, Err(e)) if e.kind() == ErrorKind::UNSUPPORTED => Ok(()),
            (Some(_), Err(e)) => Err(format!("correct_len to {len} fails: {}", told(&e))),
            (Some(stream), Ok(())) => {
                stream.tokens.truncate(len as usize);
                stream.held = stream.held.saturating_sub(freed);
                Ok(())
            }
            (None, Ok(())) if len > 0 => {
                Err(format!("correct_len sets a shorter stream to {len} tokens"))
            }
            (None, _) => Ok(()),
        }
    }

    fn offload(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        self.rig.say(&format!("offload {rid}"));
        let resource = self.resource();
        let could = resource.reclaimable(rid).map_err(fails("reclaimable"))?;
        let freed = resource.offload(rid).map_err(fails("offload"))?;
        let away = resource.is_offloaded(rid).map_err(fails("is_offloaded"))?;
        let was_away = self.model.away.contains(&slot);
        if freed > 0 && (could == 0 || was_away || !self.model.live.contains_key(&slot)) {
            return Err(format!("{rid} has nothing to offload, and {freed} are said to be freed"));
        }
        if away != (was_away || freed > 0) {
            return Err(format!("{freed} were freed, and is_offloaded says {away}"));
        }
        if freed > 0 {
            self.model.away.push(slot);
            let own = self.model.streams.iter_mut().filter(|(k, _)| k.0 == slot);
            own.for_each(|(_, stream)| stream.held = 0);
        }
        Ok(())
    }

    fn reload(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        self.rig.say(&format!("reload {rid}"));
        let resource = self.resource();
        resource.can_reload(rid).map_err(fails("can_reload"))?;
        let back = resource.reload(rid).map_err(fails("reload"))?;
        if !self.model.away.contains(&slot) {
            return match back {
                true => Ok(()),
                false => Err(format!("reload of {rid}, which is here, says that it is not")),
            };
        }
        let page = self.model.page;
        let need = |s: &Stream| (s.tokens.len() as u64).div_ceil(page);
        let own = self.model.streams.iter().filter(|(k, _)| k.0 == slot);
        let (all, free) = (own.map(|(_, s)| need(s)).sum::<u64>(), self.model.free());
        if back != (all <= free) {
            return Err(format!("reload of {all} pages into {free} says {back}"));
        }
        if back {
            self.model.away.retain(|&s| s != slot);
            let own = self.model.streams.iter_mut().filter(|(k, _)| k.0 == slot);
            own.for_each(|(_, stream)| stream.held = need(stream));
        }
        Ok(())
    }

    /// Everything that was taken can be given back.
    fn finish(mut self) -> Outcome {
        for slot in 0..SLOTS {
            self.apply(&Op::Remove(slot))?;
        }
        self.check()?;
        self.rig.remove(PROBE).map_err(fails("remove_request"))?;
        let (free, all) = (self.cells.kv.free_pages(), self.model.pages);
        if free != all {
            return Err(format!("after everything was removed {free} of {all} pages are free"));
        }
        self.cells.kv.assert_pages_conserved().map_err(fails("assert_pages_conserved"))?;
        self.rig.check_fault()
    }
}
