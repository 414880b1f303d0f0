//! Laying an admitted step out: which pages its rows read, and where its tokens are written.
//!
//! Where all rows are plain, which is nearly always, the columns are copies of what admission noted,
//! and a stream is looked at again only where its page table lacks something.

use resource_api::{
    CombinedLabel, KvGroup, KvPlan, KvStepOptions, LabelId, Plan, PlanSlots, PlanVec,
    ResourceError, ResourceStep, Result, StepContext,
};

use crate::geometry::PageSize;
use crate::pool::SINK;
use crate::rows::{Entry, Rows, Target};
use crate::seats::Seats;
use crate::state::{Shared, State};
use crate::step::{StepRecord, plan_label};
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
    record: &mut StepRecord,
    requests: &mut Requests,
    seats: &mut Seats,
    ctx: &StepContext<'_>,
    combined: &[CombinedLabel],
) -> Result<()> {
    let rows = &mut record.rows;
    let uniform = rows.one_label && combined.is_empty() && rows.len() > 0;
    match uniform {
        true => write_group(plan, rows),
        false => write_groups(plan, rows, combined),
    }
    if rows.unseated {
        seat_all(rows, requests, seats);
    }
    let slot = ctx.slot() as usize;
    seats.make_room(slot, &mut plan.table, ctx.slot_lease().bucket().is_some());
    plan.table_stride = seats.stride();
    if uniform && rows.all_plain() {
        write_plain(plan, shared.page_size, rows, requests, seats, slot);
        return Ok(());
    }
    write_any(plan, shared.page_size, record, requests, seats, slot, combined, uniform);
    Ok(())
}

/// Gives every stream of the step a seat.
fn seat_all(rows: &mut Rows, requests: &mut Requests, seats: &mut Seats) {
    for row in 0..rows.len() {
        let Entry { id, target: Target::Stream | Target::Fork(_), .. } = rows.get(row) else {
            continue;
        };
        if let Some(stream) = requests.get_mut(id) {
            rows.seat[row] = seats.take(stream);
        }
    }
    rows.unseated = false;
}

/// Rows that are all plain, as columns.
fn write_plain(
    plan: &mut KvPlan,
    size: PageSize,
    rows: &Rows,
    requests: &Requests,
    seats: &mut Seats,
    slot: usize,
) {
    let count = rows.len();
    plan.request.resize(count, resource_api::RequestId::padding(0)).copy_from_slice(&rows.request);
    set(&mut plan.seat, &rows.seat);
    set(&mut plan.start, &rows.start);
    set(&mut plan.span, &rows.span);
    let len = plan.len.resize(count, 0);
    let spans = rows.start.iter().zip(&rows.span);
    len.iter_mut().zip(spans).for_each(|(len, (start, span))| *len = start + span);
    size.last_slots(len, plan.last_page_len.resize(count, 0));
    let token_start = plan.token_start.resize(count, 0);
    if rows.all_single() {
        token_start.iter_mut().zip(0..).for_each(|(to, row)| *to = row);
        set(&mut plan.write_page, &rows.page);
        size.slots(&rows.start, plan.write_slot.resize(count, 0));
    } else {
        let tokens = rows.tokens as usize;
        let write_page = plan.write_page.resize(tokens, SINK);
        let write_slot = plan.write_slot.resize(tokens, 0);
        let mut token = 0;
        for (row, first) in token_start.iter_mut().enumerate() {
            *first = token as u32;
            let (start, span) = (rows.start[row], rows.span[row]);
            let tokens = token..token + span as usize;
            let to = (&mut write_page[tokens.clone()], &mut write_slot[tokens]);
            match (span, requests.main(rows.request[row])) {
                (1, _) => (to.0[0], to.1[0]) = (rows.page[row], size.slot(start)),
                (_, Some(stream)) => write_places(to, size, start, &stream.pages),
                _ => {}
            }
            token += span as usize;
        }
    }
    let mut tables = seats.tables(slot, plan.table.as_mut_slice());
    for (((&seat, &list), &len), request) in
        rows.seat.iter().zip(&rows.list).zip(plan.len.iter()).zip(&rows.request)
    {
        let needed = size.pages(len);
        if !tables.has(seat, list, needed)
            && let Some(stream) = requests.main(*request)
        {
            tables.write(seat, list, &stream.pages[..needed as usize]);
        }
    }
}

fn set(column: &mut PlanVec<u32>, values: &[u32]) {
    column.resize(values.len(), 0).copy_from_slice(values);
}

/// The places of tokens from `start` on of a stream with these pages.
fn write_places(
    (write_page, write_slot): (&mut [u32], &mut [u32]),
    size: PageSize,
    start: u32,
    pages: &[u32],
) {
    for ((page, slot), position) in write_page.iter_mut().zip(write_slot).zip(start..) {
        (*page, *slot) = (pages[size.page(position) as usize], size.slot(position));
    }
}

/// Rows of any kind, one by one.
#[allow(clippy::too_many_arguments)]
fn write_any(
    plan: &mut KvPlan,
    size: PageSize,
    record: &StepRecord,
    requests: &Requests,
    seats: &mut Seats,
    slot: usize,
    combined: &[CombinedLabel],
    uniform: bool,
) {
    let rows = record.rows.len();
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
        size,
    };
    let mut tables = seats.tables(slot, table.as_mut_slice());
    let mut at = At::default();
    let mut add = |entry: Entry, at: At| {
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
        for entry in record.rows.iter() {
            add(entry, at);
            at.pass(entry.span);
        }
        return;
    }
    for group in groups.iter() {
        at.first_token = at.token;
        for_each_of(&record.rows, group.label, combined, |entry| {
            add(entry, at);
            at.pass(entry.span);
        });
    }
}

/// The group of a step whose rows all have one label.
fn write_group(plan: &mut KvPlan, rows: &Rows) {
    let (label, num_rows, num_tokens) = (rows.label[0], rows.len() as u32, rows.tokens);
    plan.groups.clear();
    plan.groups.push(KvGroup { label, first_row: 0, num_rows, first_token: 0, num_tokens });
}

/// One group per plan label, in order of first appearance.
fn write_groups(plan: &mut KvPlan, rows: &Rows, combined: &[CombinedLabel]) {
    plan.groups.clear();
    for entry in rows.iter() {
        let label = plan_label(entry.id.label, combined);
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
}

/// Refuses labels that cannot be planned together: what is admitted can be planned.
pub(crate) fn check_combined(rows: &Rows, combined: &[CombinedLabel]) -> Result<()> {
    for (i, c) in combined.iter().enumerate() {
        if combined[..i].iter().any(|other| other.source == c.source) {
            let what = format!("label {} is part of two combined labels, or twice", c.source.0);
            return Err(ResourceError::invalid(what));
        }
    }
    for entry in rows.iter().filter(|_| !combined.is_empty()) {
        let label = entry.id.label;
        if combined.iter().any(|c| c.combined == label)
            && combined.iter().all(|c| c.source != label)
        {
            let what = format!("label {} has rows of its own and is a combined label", label.0);
            return Err(ResourceError::invalid(what));
        }
    }
    Ok(())
}

/// The entries of a plan label: of a combined one, source by source.
fn for_each_of(rows: &Rows, label: LabelId, combined: &[CombinedLabel], mut f: impl FnMut(Entry)) {
    let mut of = |label| rows.iter().filter(|e| e.id.label == label).for_each(&mut f);
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
    fn row(&mut self, at: At, entry: Entry, seat: u32, start: u32, len: u32) {
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
    fn stream_row(&mut self, at: At, entry: Entry, seat: u32, pages: &[u32]) -> usize {
        let len = entry.start + entry.span;
        self.row(at, entry, seat, entry.start, len);
        let size = self.size;
        let tokens = at.token..at.token + entry.span as usize;
        let to = (&mut self.write_page[tokens.clone()], &mut self.write_slot[tokens]);
        write_places(to, size, entry.start, pages);
        size.pages(len) as usize
    }

    /// A row of the sink. Attention over no tokens is undefined, so padding reads at least one.
    fn sink_row(&mut self, at: At, entry: Entry) {
        let len = if entry.target == Target::Nothing { 0 } else { entry.span.max(1) };
        self.row(at, entry, NO_SEAT, 0, len);
        let tokens = at.token..at.token + entry.span as usize;
        let places = self.write_page[tokens.clone()].iter_mut().zip(&mut self.write_slot[tokens]);
        for ((page, slot), position) in places.zip(0..entry.span) {
            (*page, *slot) = (SINK, self.size.slot(position));
        }
    }
}
