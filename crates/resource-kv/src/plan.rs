//! Laying an admitted step out: which pages its rows read, and where its tokens are written.

use resource_api::{
    CombinedLabel, KvGroup, KvPlan, KvStepOptions, LabelId, Plan, PlanSlots, ResourceError,
    ResourceStep, Result, StepContext,
};

use crate::geometry::PageSize;
use crate::pool::SINK;
use crate::seats::Seats;
use crate::state::{Shared, State};
use crate::step::{Entry, StepRecord, Target, plan_label};
use crate::stream::{NO_SEAT, Requests};

impl State {
    /// Writes the step's plan into its slot. A step that was planned ahead for the same lease keeps
    /// that plan.
    pub(crate) fn plan(
        &mut self,
        shared: &Shared,
        plans: &PlanSlots<KvPlan>,
        step: &ResourceStep<'_>,
        ctx: &StepContext<'_>,
    ) -> Result<Plan> {
        self.drop_stage(shared, Some(ctx.step()));
        let options = step.options::<KvStepOptions>()?;
        let Some(at) = self.find(ctx.step()) else {
            let what = format!("step {} is planned without having been admitted", ctx.step().0);
            return Err(ResourceError::wrong_state(what));
        };
        let record = &mut self.steps[at];
        if !record.is_for(step.segments(), options) {
            let what = format!("step {} is not planned as it was admitted", ctx.step().0);
            return Err(ResourceError::wrong_state(what));
        }
        if !ctx.is_preplan() {
            record.staged = false;
            self.last_epoch = self.last_epoch.max(ctx.epoch());
        }
        let plan = match record.plan {
            Some((lease, plan)) if lease == *ctx.slot_lease() && !record.stale => plan,
            _ => {
                let combined: &[CombinedLabel] = options.map_or(&[], |o| &o.combined_labels);
                let (requests, seats) = (&mut self.requests, &mut self.seats);
                let plan = plans.plan(ctx, |plan| {
                    lay_out(plan, shared, record, requests, seats, ctx, combined)?;
                    match seats.changes(ctx.slot() as usize) {
                        Some(changes) => shared.memory.upload(ctx, plan, changes),
                        None => Ok(()),
                    }
                })?;
                record.plan = Some((*ctx.slot_lease(), plan));
                plan
            }
        };
        // A source may still grow while the step is only planned ahead.
        if !ctx.is_preplan() {
            self.copy_before(shared, at)?;
        }
        Ok(plan)
    }

    /// Makes the copies that belong before the step.
    pub(crate) fn copy_before(&mut self, shared: &Shared, at: usize) -> Result<()> {
        let record = &mut self.steps[at];
        for at in 0..record.copies.len() {
            let (earlier, rest) = record.copies.split_at_mut(at);
            let copy = &mut rest[0];
            if copy.after || copy.done || !copy.alive {
                continue;
            }
            let source = copy.source();
            let pages = match earlier.iter().rfind(|c| !c.after && c.target() == source) {
                Some(copied) => &copied.pages[..],
                None => self.requests.get(source).map_or(&[][..], |s| &s.pages),
            };
            for (&from, &to) in pages.iter().zip(&copy.pages[..shared.pages_for(copy.len) as usize])
            {
                shared.memory.copy_page(from, to)?;
            }
            copy.done = true;
        }
        Ok(())
    }
}

/// Writes the columns.
fn lay_out(
    plan: &mut KvPlan,
    shared: &Shared,
    record: &StepRecord,
    requests: &mut Requests,
    seats: &mut Seats,
    ctx: &StepContext<'_>,
    combined: &[CombinedLabel],
) -> Result<()> {
    let uniform = record.one_label && combined.is_empty();
    match record.entries.first() {
        Some(first) if uniform => write_group(plan, record, first.id.label),
        _ => write_groups(plan, record, combined)?,
    }
    if record.unseated {
        for entry in &record.entries {
            if let (Target::Stream | Target::Fork(_), Some(s)) =
                (entry.target, requests.get_mut(entry.id))
            {
                seats.take(s);
            }
        }
    }
    let slot = ctx.slot() as usize;
    seats.make_room(slot, &mut plan.table, ctx.slot_lease().bucket().is_some());
    plan.table_stride = seats.stride();

    let rows = record.entries.len();
    let tokens = plan.groups.last().map_or(0, |g| (g.first_token + g.num_tokens) as usize);
    let KvPlan {
        groups,
        request,
        seat,
        start,
        span,
        len,
        token_start,
        last_page_len,
        write_page,
        write_slot,
        table,
        ..
    } = plan;
    let mut columns = Columns {
        request: request.resize(rows, resource_api::RequestId::padding(0)),
        seat: seat.resize(rows, 0),
        start: start.resize(rows, 0),
        span: span.resize(rows, 0),
        len: len.resize(rows, 0),
        token_start: token_start.resize(rows, 0),
        last_page_len: last_page_len.resize(rows, 0),
        write_page: write_page.resize(tokens, SINK),
        write_slot: write_slot.resize(tokens, 0),
        size: shared.page_size,
    };
    let mut tables = seats.tables(slot, table.as_mut_slice());
    let mut at = At::default();
    let mut add = |entry: &Entry, at: At| {
        let stream = match entry.target {
            Target::Stream | Target::Fork(_) => requests.get(entry.id),
            Target::Sink | Target::Nothing => None,
        };
        let Some(stream) = stream else { return columns.sink_row(at, entry) };
        let (pages, list) = match entry.target {
            Target::Fork(copy) => {
                let copy = &record.copies[copy as usize];
                (&copy.pages, copy.table)
            }
            _ => (&stream.pages, stream.table),
        };
        let needed = columns.stream_row(at, entry, stream.seat, pages);
        tables.write(stream.seat, list, &pages[..needed]);
    };
    if uniform {
        for entry in &record.entries {
            add(entry, at);
            at.pass(entry.span);
        }
        return Ok(());
    }
    for group in groups.iter() {
        at.first_token = at.token;
        for_each_of(record, group.label, combined, |entry| {
            add(entry, at);
            at.pass(entry.span);
        });
    }
    Ok(())
}

/// The group of a step whose rows all have one label.
fn write_group(plan: &mut KvPlan, record: &StepRecord, label: LabelId) {
    let (num_rows, num_tokens) = (record.entries.len() as u32, record.tokens);
    plan.groups.clear();
    plan.groups.push(KvGroup { label, first_row: 0, num_rows, first_token: 0, num_tokens });
}

/// One group per plan label, in order of first appearance.
fn write_groups(plan: &mut KvPlan, record: &StepRecord, combined: &[CombinedLabel]) -> Result<()> {
    for (i, c) in combined.iter().enumerate() {
        if combined[..i].iter().any(|other| other.source == c.source) {
            let what = format!("label {} is part of two combined labels, or twice", c.source.0);
            return Err(ResourceError::invalid(what));
        }
    }
    plan.groups.clear();
    for entry in &record.entries {
        let label = plan_label(entry.id.label, combined);
        if label == entry.id.label
            && combined.iter().any(|c| c.combined == label)
            && combined.iter().all(|c| c.source != label)
        {
            let what = format!("label {} has rows of its own and is a combined label", label.0);
            return Err(ResourceError::invalid(what));
        }
        let at = plan.groups.iter().position(|g| g.label == label).unwrap_or_else(|| {
            let (first_row, num_rows, first_token, num_tokens) = (0, 0, 0, 0);
            plan.groups.push(KvGroup { label, first_row, num_rows, first_token, num_tokens });
            plan.groups.len() - 1
        });
        let group = &mut plan.groups.as_mut_slice()[at];
        group.num_rows += 1;
        group.num_tokens += entry.span;
    }
    let (mut row, mut token) = (0, 0);
    for group in plan.groups.as_mut_slice() {
        (group.first_row, group.first_token) = (row, token);
        row += group.num_rows;
        token += group.num_tokens;
    }
    Ok(())
}

/// The entries of a plan label: of a combined one, source by source.
fn for_each_of(
    record: &StepRecord,
    label: LabelId,
    combined: &[CombinedLabel],
    mut f: impl FnMut(&Entry),
) {
    let mut of = |label| record.entries.iter().filter(|e| e.id.label == label).for_each(&mut f);
    let mut sources = combined.iter().filter(|c| c.combined == label).peekable();
    match sources.peek() {
        None => of(label),
        Some(_) => sources.for_each(|c| of(c.source)),
    }
}

/// Where the next row goes.
#[derive(Clone, Copy, Debug, Default)]
struct At {
    row: usize,
    token: usize,
    /// First token of the group.
    first_token: usize,
}

impl At {
    fn pass(&mut self, span: u32) {
        self.row += 1;
        self.token += span as usize;
    }
}

/// The columns of a plan, as slices.
struct Columns<'a> {
    request: &'a mut [resource_api::RequestId],
    seat: &'a mut [u32],
    start: &'a mut [u32],
    span: &'a mut [u32],
    len: &'a mut [u32],
    token_start: &'a mut [u32],
    last_page_len: &'a mut [u32],
    write_page: &'a mut [u32],
    write_slot: &'a mut [u32],
    size: PageSize,
}

impl Columns<'_> {
    #[inline]
    fn row(&mut self, at: At, entry: &Entry, seat: u32, start: u32, len: u32) {
        let row = at.row;
        self.request[row] = entry.id.request;
        self.seat[row] = seat;
        self.start[row] = start;
        self.span[row] = entry.span;
        self.len[row] = len;
        self.token_start[row] = (at.token - at.first_token) as u32;
        self.last_page_len[row] = if len == 0 { 0 } else { self.size.slot(len - 1) + 1 };
    }

    /// A row that reads and writes `pages`; says how many of them.
    #[inline]
    fn stream_row(&mut self, at: At, entry: &Entry, seat: u32, pages: &[u32]) -> usize {
        let len = entry.start + entry.span;
        self.row(at, entry, seat, entry.start, len);
        let size = self.size;
        if entry.span == 1 {
            let page = size.page(entry.start) as usize;
            self.write_page[at.token] = pages[page];
            self.write_slot[at.token] = size.slot(entry.start);
            return page + 1;
        }
        let tokens = at.token..at.token + entry.span as usize;
        let places = self.write_page[tokens.clone()].iter_mut().zip(&mut self.write_slot[tokens]);
        for ((page, slot), position) in places.zip(entry.start..len) {
            (*page, *slot) = (pages[size.page(position) as usize], size.slot(position));
        }
        size.pages(len) as usize
    }

    /// A row of the sink. Attention over no tokens is undefined, so padding reads at least one.
    fn sink_row(&mut self, at: At, entry: &Entry) {
        let len = if entry.target == Target::Nothing { 0 } else { entry.span.max(1) };
        self.row(at, entry, NO_SEAT, 0, len);
        let tokens = at.token..at.token + entry.span as usize;
        let places = self.write_page[tokens.clone()].iter_mut().zip(&mut self.write_slot[tokens]);
        for ((page, slot), position) in places.zip(0..entry.span) {
            (*page, *slot) = (SINK, self.size.slot(position));
        }
    }
}
