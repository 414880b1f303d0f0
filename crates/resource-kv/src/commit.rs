//! Making what a step wrote part of its streams.

use resource_api::{LabelId, ResourceError, ResourceStep, Result, StepContext};

use crate::chain::Chain;
use crate::pool::PagePool;
use crate::prefix::Fed;
use crate::rows::{Rows, Target};
use crate::state::{Shared, State};
use crate::step::StepRecord;
use crate::stream::{Stream, StreamId, droppable};

impl State {
    /// Lets the streams of a step grow, trims those that keep a window, and makes the copies that
    /// belong after the step.
    pub(crate) fn commit(
        &mut self,
        shared: &Shared,
        step: &ResourceStep<'_>,
        ctx: &StepContext<'_>,
    ) -> Result<()> {
        let Some(at) = self.find(ctx.step()).filter(|&at| !self.steps[at].staged) else {
            return Err(ResourceError::wrong_state(format!(
                "step {} is not in flight: it was not admitted, or is committed already",
                ctx.step().0
            )));
        };
        // Where the step was never planned, they are still missing.
        self.copy_before(shared, at)?;
        // Not at admission: a step that is rolled back leaves no trace.
        self.pool.note_peak();
        let mut record = self.steps.remove(at);
        for at in 0..record.copies.len() {
            if !record.copies[at].after && record.copies[at].alive {
                self.replace(shared, &mut record, at);
            }
        }
        if record.commit {
            self.grow(shared, &record, Fed::by(shared, step, ctx, record.rows.tokens as usize));
            self.trim(shared, &record);
        } else {
            self.unmark(&record);
        }
        let copied = self.copy_after(shared, &mut record);
        self.index_ended();
        self.spare.push(record);
        copied
    }

    /// Takes the step's marks off its streams and lets them grow, in one pass over them.
    fn grow(&mut self, shared: &Shared, record: &StepRecord, mut fed: Fed<'_>) {
        let rows = &record.rows;
        if rows.all_plain() {
            let start = &rows.start[..];
            match fed {
                Fed::Ids(ids) if rows.all_single() => {
                    self.grow_plain(shared, rows, |row, chain| {
                        chain.feed_one(start[row], ids[row]);
                    })
                }
                _ => self.grow_plain(shared, rows, |row, chain| {
                    let (own, span) = (fed.split(rows.span[row]), rows.span[row]);
                    if span > 0 {
                        own.note(chain, start[row], span);
                    }
                }),
            }
            return self.index_ended();
        }
        let mut lens = shared.board.lens();
        for entry in record.rows.iter() {
            let own = fed.split(entry.span);
            let Some((stream, chain)) = self.requests.get_with_chain(entry.id) else { continue };
            match entry.target {
                Target::Stream => {
                    stream.in_flight -= 1;
                    stream.pending -= entry.span;
                }
                Target::Fork(_) => {}
                Target::Sink | Target::Nothing => continue,
            }
            if entry.span == 0 {
                continue;
            }
            stream.len += entry.span;
            lens.set(entry.id, stream.len);
            own.note(chain, entry.start, entry.span);
            if chain.has_ended_page(stream.len) {
                self.ended.push(entry.id);
            }
        }
        self.unmark_others(record);
        self.index_ended();
    }

    /// [`State::grow`] where all rows are plain. `note` tells the chain of a row's request what was fed.
    #[inline]
    fn grow_plain(
        &mut self,
        shared: &Shared,
        rows: &Rows,
        mut note: impl FnMut(usize, &mut Chain),
    ) {
        let mut lens = shared.board.lens();
        let State { requests, pool, seats, ended, .. } = self;
        let mut next_takes = 0;
        for (row, (&request, &span)) in rows.request.iter().zip(&rows.span).enumerate() {
            let Some((stream, chain)) = requests.main_and_chain(request) else { continue };
            stream.in_flight -= 1;
            stream.pending -= span;
            stream.len += span;
            let len = stream.len;
            lens.set(StreamId { request, label: LabelId::MAIN }, len);
            note(row, chain);
            let end = chain.next_end();
            if len >= end && chain.has_ended_page(len) {
                next_takes += 1;
                if len > end || !index_page(pool, stream, chain) {
                    ended.push(StreamId { request, label: LabelId::MAIN });
                }
            } else if len + 1 == end {
                // The next token ends the page: what that will touch is asked for now.
                chain.warm();
                if let Some(&page) = stream.pages.get(chain.indexed as usize) {
                    pool.warm_page(page);
                }
                seats.warm(stream.seat, chain.indexed + 1);
            }
        }
        pool.warm_next(next_takes);
    }

    fn trim(&mut self, shared: &Shared, record: &StepRecord) {
        for retention in &record.retention {
            let id = StreamId { request: retention.request_id, label: retention.label };
            let Some(stream) = self.requests.get_mut(id) else { continue };
            stream.protected = stream.protected.max(retention.protected_prefix);
            let (len, protected) = (stream.len, stream.protected);
            let size = shared.facts.page_size;
            self.drop_front(shared, id, droppable(len, protected, retention.context_budget, size));
        }
    }

    /// Releases `count` whole pages after the protected ones. Says how many tokens went.
    pub(crate) fn drop_front(&mut self, shared: &Shared, id: StreamId, count: u32) -> u32 {
        let Some(stream) = self.requests.get_mut(id).filter(|_| count > 0) else { return 0 };
        let size = shared.facts.page_size;
        let first = stream.protected.div_ceil(size) as usize;
        let tokens = count * size;
        stream.len -= tokens;
        stream.released += u64::from(tokens);
        stream.generation += 1;
        self.break_chain(id);
        self.release_range(shared, id, first..first + count as usize);
        self.publish(shared, id);
        tokens
    }

    fn copy_after(&mut self, shared: &Shared, record: &mut StepRecord) -> Result<()> {
        let mut result = Ok(());
        for at in 0..record.copies.len() {
            let copy = &mut record.copies[at];
            if !copy.after || !copy.alive {
                continue;
            }
            let source = self.requests.get(copy.source());
            copy.len = source.map_or(0, |s| s.len);
            let needed = shared.pages_for(copy.len) as usize;
            let pages = source.map_or(&[][..], |s| &s.pages[..needed]);
            for (&from, &to) in pages.iter().zip(&copy.pages) {
                result = result.and(shared.memory.copy_page(from, to));
            }
            // The source may have been trimmed since the pages were counted.
            let mut rest = copy.pages.split_off(needed.min(copy.pages.len()));
            self.release(shared, &mut rest);
            self.replace(shared, record, at);
        }
        result
    }

    /// Gives the copy's pages to its target.
    fn replace(&mut self, shared: &Shared, record: &mut StepRecord, at: usize) {
        let copy = &mut record.copies[at];
        let id = copy.target();
        let Some(stream) = self.requests.get_mut(id) else { return };
        let mut old = std::mem::replace(&mut stream.pages, std::mem::take(&mut copy.pages));
        (stream.len, stream.table) = (copy.len, copy.table);
        (stream.released, stream.protected) = (0, 0);
        stream.generation += 1;
        let len = copy.len;
        self.copy_chain(copy.source(), id, len);
        self.release(shared, &mut old);
        self.publish(shared, id);
    }
}

/// Indexes the page after those indexed, which has just become whole. Says whether its key was there.
#[inline(never)]
fn index_page(pool: &mut PagePool, stream: &Stream, chain: &mut Chain) -> bool {
    let page = stream.pages.get(chain.indexed as usize);
    let (Some(key), Some(&page)) = (chain.next_key(), page) else { return false };
    chain.tip_is_own = pool.insert(key, page);
    chain.indexed += 1;
    true
}
