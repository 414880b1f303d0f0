//! What can be seen of a cache from outside, compared with the reference.

use std::collections::BTreeMap;

use resource_api::{AdmitOutcome, ErrorKind, FailureReason, KvCache, LabelId, TypedRef};

use super::super::model::Expected;
use super::super::ops::{LABELS, Row3, SLOTS, Shape};
use super::super::rig::{Plans, told};
use super::super::step::{CacheOptions, Row, Step};
use super::super::values::planned_row;
use super::{Outcome, PROBE, Play, fails};

impl Play {
    /// Whether the step was admitted; a finding where that is wrong.
    pub(super) fn admit(&self, step: &Step, expected: &Expected) -> Result<bool, String> {
        let answer = self.rig.admit(step);
        if let Err(e) = &answer
            && (e.kind() == ErrorKind::PANICKED || e.kind() == ErrorKind::POISONED)
        {
            return Err(told(e));
        }
        // Windows and combined labels are more than a cache must have.
        let asks = |o: &CacheOptions| !o.retain.is_empty() || !o.combined.is_empty();
        if step.options.as_ref().is_some_and(asks)
            && answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::UNSUPPORTED)
        {
            return Ok(false);
        }
        let admitted = answer.as_ref().is_ok_and(AdmitOutcome::is_ready);
        match expected {
            Expected::Refused(why) if admitted => Err(format!("{step} is admitted, though {why}")),
            Expected::Runs { may_refuse: false, .. } if !admitted => {
                let later = |o: &AdmitOutcome| {
                    let reason = o.reason();
                    o.is_ok()
                        || reason == FailureReason::ADMISSION_DEFERRED
                        || reason == FailureReason::GRANT_DEFERRED
                };
                // What is planned ahead may have to wait for the step that runs.
                if step.staged && answer.as_ref().is_ok_and(later) {
                    return Ok(false);
                }
                let why = answer.map_or_else(|e| told(&e), |o| o.message());
                Err(format!("{step} fits and is refused: {why}"))
            }
            _ => Ok(admitted),
        }
    }

    /// Plans the step, writes what it adds, and compares what its rows read.
    pub(super) fn forward(
        &self,
        step: &Step,
        digests: &[u64],
        reads: &[Vec<u64>],
    ) -> Result<Plans, String> {
        let plans = self.rig.plan(step).map_err(fails("plan of an admitted step"))?;
        for row in step.rows.iter().filter(|r| !r.rid.is_padding()) {
            let len = self.cells.kv.stream_len(row.rid, row.label).map_err(fails("stream_len"))?;
            if len as usize != self.model.tokens(row.rid.slot, row.label.0).len() {
                return Err(format!("{step}: before its commit {} has {len} tokens", row.rid));
            }
        }
        self.cells.write(&self.rig, step, &plans, digests)?;
        for (row, want) in reads.iter().enumerate() {
            self.compare(step, &plans, row, want)?;
        }
        let plan = self.cells.plan(&plans)?;
        for (row, r) in step.rows.iter().enumerate().filter(|(_, r)| r.rid.is_padding()) {
            let Some(at) = planned_row(step, plan, row) else {
                return Err(format!("{step}: padding row {row} is not planned"));
            };
            let group = plan.group(step.plan_label(r.label)).map_or(0, |g| g.first_token);
            let first = (group + plan.token_start[at]) as usize;
            let written = &plan.write_page[first..first + r.span as usize];
            let read = plan.pages(at, self.cells.facts.page_size);
            if plan.len[at] == 0 || written.iter().chain(read).any(|&page| page != 0) {
                return Err(format!("{step}: padding row {row} does not use the sink, page 0"));
            }
        }
        Ok(plans)
    }

    pub(super) fn compare(
        &self,
        step: &Step,
        plans: &[TypedRef<'static>],
        row: usize,
        want: &[u64],
    ) -> Outcome {
        let plan = self.cells.plan(plans)?;
        let at = planned_row(step, plan, row)
            .ok_or_else(|| format!("{step}: row {row} is not where its label's group has it"))?;
        let (start, span) = (plan.start[at], plan.span[at]);
        if start + span != plan.len[at] || span != step.rows[row].span {
            return Err(format!(
                "{step}: row {row} is planned from {start} by {span} to {}",
                plan.len[at]
            ));
        }
        self.cells.compare(plan, at, want).map_err(|e| format!("{step}: {e}"))
    }

    /// The free pages in the order in which they will be taken, found by a step that takes all.
    pub(super) fn free_order(&mut self) -> Result<Vec<u32>, String> {
        let mut left = self.cells.kv.free_pages() * self.model.page;
        let (mut step, _) = self.step(&Shape::default());
        let (longest, page) = (self.model.max_len / self.model.page, self.model.page);
        while left > 0 {
            let span = left.min(longest.max(1) * page);
            let label = LabelId(LABELS + 1 + step.rows.len() as u32);
            step.rows.push(Row { rid: PROBE, label, span: span as u32 });
            left -= span;
        }
        step.tokens = vec![0; step.rows.iter().map(|r| r.span as usize).sum()];
        step.slot = 5;
        let outcome = self.rig.admit(&step).map_err(fails("admit"))?;
        if !outcome.is_ready() {
            return Err(format!("a step over all free pages is refused: {}", outcome.message()));
        }
        let plans = self.rig.plan(&step).map_err(fails("plan"))?;
        let plan = self.cells.plan(&plans)?;
        let pages = (0..step.rows.len()).flat_map(|r| plan.pages(r, self.cells.facts.page_size));
        let order = pages.copied().collect();
        self.rig.rollback(&step).map_err(fails("rollback_admit"))?;
        Ok(order)
    }

    pub(super) fn unchanged(&mut self, order: &[u32], after: &str) -> Outcome {
        let now = self.free_order()?;
        match now == order {
            true => Ok(()),
            false => Err(format!("{after} changes the free pages from {order:?} to {now:?}")),
        }
    }

    /// Everything that can be asked, against the reference.
    pub(super) fn check(&mut self) -> Outcome {
        self.cells.kv.assert_pages_conserved().map_err(fails("assert_pages_conserved"))?;
        let (free, want) = (self.cells.kv.free_pages(), self.model.free());
        if free != want {
            return Err(format!("{free} pages are free, not {want}"));
        }
        let mut shape = Shape::default();
        for slot in (0..SLOTS).filter(|s| !self.model.away.contains(s)) {
            for label in 0..LABELS {
                let (rid, label_id) = (self.rid(slot), LabelId(label));
                let len = self.cells.kv.stream_len(rid, label_id).map_err(fails("stream_len"))?;
                let want = self.model.tokens(slot, label).len();
                if len as usize != want {
                    return Err(format!("{rid} label {label} has {len} tokens, not {want}"));
                }
                if self.model.live.contains_key(&slot) {
                    shape.rows.push(Row3 { slot, label, span: 0 });
                }
            }
        }
        let (mut step, _) = self.step(&shape);
        step.slot = 4;
        self.admit(&step, &self.model.after(&shape, &[]))?;
        let wanted: Vec<Vec<u64>> =
            shape.rows.iter().map(|r| self.model.tokens(r.slot, r.label).to_vec()).collect();
        let plans = self.forward(&step, &[], &wanted)?;
        let mut owners: BTreeMap<u32, usize> = BTreeMap::new();
        let plan = self.cells.plan(&plans)?;
        for row in 0..plan.request.len() {
            for &page in plan.pages(row, self.cells.facts.page_size) {
                if page == 0 || owners.insert(page, row).is_some() {
                    return Err(format!("page {page} is the sink, or belongs to two streams"));
                }
            }
        }
        self.rig.commit(&step, &plans).map_err(fails("commit"))?;
        let order = self.free_order()?;
        match order.iter().find(|page| **page == 0 || owners.insert(**page, usize::MAX).is_some()) {
            None => Ok(()),
            Some(page) => Err(format!("page {page} is handed out while it is in use")),
        }
    }
}
