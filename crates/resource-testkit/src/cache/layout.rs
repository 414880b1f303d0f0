//! Laying a step out.

use resource_api::{
    KvGroup, KvPlan, LabelId, Plan, ResourceError, ResourceStep, Result, StepContext,
};

use super::FakeCache;
use super::fault::Fault;
use super::state::{Entry, InFlight, State, Target};

/// Rows and tokens that a slot's columns have room for from the start.
const ROWS: usize = 64;
const TOKENS: usize = 512;

impl FakeCache {
    pub(super) fn lay_out(&self, _share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.with(|state| {
            let id = ctx.step().0;
            state.drop_stages(|staged| staged != id);
            let Some(step) = state.steps.get(&id) else {
                return Err(ResourceError::wrong_state(format!("step {id} is not admitted")));
            };
            let plan = self.plans.plan(ctx, |plan| {
                let same = plan.request.len() == step.entries.len() && !step.entries.is_empty();
                let kept = step.planned || (same && self.has(Fault::LeftoverPlan));
                if !kept {
                    self.write_columns(plan, state, step);
                }
                Ok(())
            })?;
            if !ctx.is_preplan() || self.has(Fault::AbandonedFork) {
                self.copy_before(state, id)?;
            }
            if let Some(step) = state.steps.get_mut(&id) {
                step.planned = true;
            }
            Ok(plan)
        })
    }

    fn copy_before(&self, state: &mut State, id: u64) -> Result<()> {
        let Some(step) = state.steps.get_mut(&id) else { return Ok(()) };
        for copy in step.copies.iter_mut().filter(|c| !c.after && !c.done) {
            let source = state.streams.get(&copy.from);
            for (&from, &to) in source.iter().flat_map(|s| &s.pages).zip(&copy.pages) {
                self.copy_page(from, to)?;
            }
            if self.fault == Some(Fault::AbandonedFork) {
                let target = state.streams.get(&copy.to);
                for (&from, &to) in copy.pages.iter().zip(target.iter().flat_map(|s| &s.pages)) {
                    self.copy_page(from, to)?;
                }
            }
            copy.done = true;
        }
        Ok(())
    }

    fn write_columns(&self, plan: &mut KvPlan, state: &State, step: &InFlight) {
        let stride = self.facts.max_seq_len.div_ceil(self.facts.page_size);
        let mut labels: Vec<LabelId> = Vec::new();
        let planned = |label| {
            let of = step.combined.iter().find(|c| c.source == label);
            of.map_or(label, |c| c.combined)
        };
        for label in step.entries.iter().map(|entry| planned(entry.id.1)) {
            if !labels.contains(&label) {
                labels.push(label);
            }
        }
        plan.groups.clear();
        plan.request.clear();
        let columns = [
            &mut plan.seat,
            &mut plan.start,
            &mut plan.span,
            &mut plan.len,
            &mut plan.token_start,
            &mut plan.last_page_len,
        ];
        for column in columns {
            column.reserve(ROWS, true);
            column.clear();
        }
        for column in [&mut plan.write_page, &mut plan.write_slot] {
            column.reserve(TOKENS, true);
            column.clear();
        }
        plan.table.reserve(ROWS * stride as usize, true);
        plan.table.clear();
        plan.table_stride = stride;
        for label in labels {
            let first_token = plan.write_page.len() as u32;
            let mut group = KvGroup {
                label,
                first_row: plan.request.len() as u32,
                num_rows: 0,
                first_token,
                num_tokens: 0,
            };
            let mut sources: Vec<LabelId> =
                step.combined.iter().filter(|c| c.combined == label).map(|c| c.source).collect();
            if sources.is_empty() {
                sources.push(label);
            }
            if self.has(Fault::CombinedOrder) {
                sources.reverse();
            }
            let of = |source| step.entries.iter().filter(move |e| e.id.1 == source);
            for entry in sources.into_iter().flat_map(of) {
                plan.token_start.push(group.num_tokens);
                self.write_row(plan, state, step, entry);
                group.num_rows += 1;
                group.num_tokens += entry.span;
            }
            plan.groups.push(group);
        }
    }

    fn write_row(&self, plan: &mut KvPlan, state: &State, step: &InFlight, entry: &Entry) {
        let size = self.facts.page_size;
        let stream = state.streams.get(&entry.id).map_or(&[][..], |s| &s.pages);
        let pages = match entry.target {
            Target::Stream => stream,
            Target::Fork(at) => &step.copies[at].pages,
            Target::Sink | Target::Nothing => &[],
        };
        let is_row = !pages.is_empty() && entry.target != Target::Sink;
        let mut len = entry.start + entry.span;
        if entry.target == Target::Sink {
            len = u32::from(!self.has(Fault::PaddingUnread));
        }
        plan.request.push(entry.id.0);
        plan.seat.push(plan.request.len() as u32 - 1);
        plan.start.push(if entry.target == Target::Sink { 0 } else { entry.start });
        plan.span.push(entry.span);
        plan.len.push(len);
        plan.last_page_len.push(if len == 0 { 0 } else { (len - 1) % size + 1 });
        for position in entry.start..entry.start + entry.span {
            let off = u32::from(self.has(Fault::OffByOneSlot));
            let at = (position / size) as usize + usize::from(self.has(Fault::OffByOnePage));
            let own = (position / size) as usize;
            let page = pages.get(at).or(pages.get(own)).copied().unwrap_or(0);
            let last = self.facts.num_pages - 1;
            let astray = entry.id.0.is_padding() && self.has(Fault::PaddingWrites);
            let beyond = plan.write_page.is_empty() && self.has(Fault::PageOutside);
            plan.write_page.push(if beyond {
                last + 1
            } else if astray {
                last
            } else {
                page
            });
            plan.write_slot.push((position + off) % size);
        }
        let used = len.div_ceil(size) as usize;
        for at in 0..plan.table_stride as usize {
            let page = if is_row && at < used { pages.get(at).copied().unwrap_or(0) } else { 0 };
            plan.table.push(page);
        }
    }
}
