//! Laying an admitted step out: which pages its rows read, and where its tokens are written.

use resource_api::{
    CombinedLabel, KvGroup, KvPlan, KvStepOptions, LabelId, Plan, PlanSlots, ResourceError,
    ResourceStep, Result, StepContext,
};

use crate::pool::SINK;
use crate::seats::Seats;
use crate::state::{Shared, State};
use crate::step::{Entry, StepRecord, Target, plan_label};
use crate::stream::{NO_SEAT, Requests, Stream};

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
                    lay_out(plan, shared, record, requests, seats, ctx, combined)
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
    write_groups(plan, record, combined)?;
    for entry in &record.entries {
        if let (Target::Stream | Target::Fork(_), Some(s)) =
            (entry.target, requests.get_mut(entry.id))
        {
            seats.take(s);
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
        seat: seat.resize(rows, 0),
        start: start.resize(rows, 0),
        span: span.resize(rows, 0),
        len: len.resize(rows, 0),
        token_start: token_start.resize(rows, 0),
        last_page_len: last_page_len.resize(rows, 0),
        write_page: write_page.resize(tokens, SINK),
        write_slot: write_slot.resize(tokens, 0),
        page_size: shared.facts.page_size,
    };
    let request = request.resize(rows, resource_api::RequestId::padding(0));
    let (mut row, mut token) = (0, 0);
    for group in groups.iter() {
        let first_token = token;
        for_each_of(record, group.label, combined, |entry| {
            request[row] = entry.id.request;
            columns.token_start[row] = (token - first_token) as u32;
            let stream = requests.get(entry.id);
            let found = match (entry.target, stream) {
                (Target::Stream, Some(s)) => Some((s, &s.pages, s.table)),
                (Target::Fork(at), Some(s)) => {
                    Some((s, &record.copies[at].pages, record.copies[at].table))
                }
                _ => None,
            };
            match found {
                Some((stream, pages, list)) => {
                    let needed = columns.stream_row(row, token, entry, stream, pages);
                    seats.write(slot, table.as_mut_slice(), stream.seat, list, &pages[..needed]);
                }
                None => columns.sink_row(row, token, entry),
            }
            row += 1;
            token += entry.span as usize;
        });
    }
    Ok(())
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

/// The columns of a plan, as slices.
struct Columns<'a> {
    seat: &'a mut [u32],
    start: &'a mut [u32],
    span: &'a mut [u32],
    len: &'a mut [u32],
    token_start: &'a mut [u32],
    last_page_len: &'a mut [u32],
    write_page: &'a mut [u32],
    write_slot: &'a mut [u32],
    page_size: u32,
}

impl Columns<'_> {
    fn row(&mut self, row: usize, seat: u32, start: u32, span: u32, len: u32) {
        self.seat[row] = seat;
        self.start[row] = start;
        self.span[row] = span;
        self.len[row] = len;
        self.last_page_len[row] = if len == 0 { 0 } else { (len - 1) % self.page_size + 1 };
    }

    /// A row that reads and writes `pages`; says how many of them.
    fn stream_row(
        &mut self,
        row: usize,
        token: usize,
        entry: &Entry,
        stream: &Stream,
        pages: &[u32],
    ) -> usize {
        let len = entry.start + entry.span;
        self.row(row, stream.seat, entry.start, entry.span, len);
        let size = self.page_size;
        let places = self.write_page[token..].iter_mut().zip(&mut self.write_slot[token..]);
        for ((page, slot), position) in places.zip(entry.start..len) {
            (*page, *slot) = (pages[(position / size) as usize], position % size);
        }
        len.div_ceil(size) as usize
    }

    /// A row of the sink. Attention over no tokens is undefined, so padding reads at least one.
    fn sink_row(&mut self, row: usize, token: usize, entry: &Entry) {
        let len = if entry.target == Target::Nothing { 0 } else { entry.span.max(1) };
        self.row(row, NO_SEAT, 0, entry.span, len);
        let places = self.write_page[token..].iter_mut().zip(&mut self.write_slot[token..]);
        for ((page, slot), position) in places.zip(0..entry.span) {
            (*page, *slot) = (SINK, position % self.page_size);
        }
    }
}
