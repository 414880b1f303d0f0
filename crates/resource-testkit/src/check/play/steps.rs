//! Steps with every end that they can have.

use resource_api::Resource;

use super::super::model::{Expected, Model};
use super::super::ops::{Fate, Shape};
use super::super::step::Step;
use super::{Outcome, Play, fails};

impl Play {
    pub(super) fn run(&mut self, shape: &Shape, fate: Fate) -> Outcome {
        let order = self.free_order()?;
        let (mut step, digests) = self.step(shape);
        let expected = self.model.after(shape, &digests);
        step.staged = matches!(
            fate,
            Fate::StageAndCommit
                | Fate::StageAndClear
                | Fate::AdmitAheadAndClear
                | Fate::StageAndReplace
        );
        if step.staged && !self.rig.can_stage() {
            return Ok(());
        }
        let admitted = self.admit(&step, &expected)?;
        let Expected::Runs { next, reads, .. } = expected else {
            return self.unchanged(&order, "a refused step");
        };
        if !admitted {
            return self.unchanged(&order, "a refused step");
        }
        match fate {
            Fate::RollBackAdmitted => self.rig.rollback(&step).map_err(fails("rollback_admit"))?,
            Fate::RollBackWritten => {
                self.forward(&step, &digests, &reads)?;
                self.rig.rollback(&step).map_err(fails("rollback_admit"))?;
                self.rig.rollback(&step).map_err(fails("a second rollback_admit"))?;
            }
            Fate::AdmitAheadAndClear => {
                self.rig.clear(&step).map_err(fails("clear_preplan"))?;
            }
            Fate::StageAndClear => {
                self.rig.plan(&step).map_err(fails("plan ahead"))?;
                self.rig.clear(&step).map_err(fails("clear_preplan"))?;
                self.rig.clear(&step).map_err(fails("a second clear_preplan"))?;
            }
            Fate::StageAndReplace => {
                self.rig.plan(&step).map_err(fails("plan ahead"))?;
                self.empty_step()?;
                self.unchanged(&order, "a stage that another step dropped")?;
                return self.arrive(step, &digests, &reads, *next);
            }
            Fate::Commit => return self.arrive(step, &digests, &reads, *next),
            Fate::StageAndCommit => {
                self.rig.plan(&step).map_err(fails("plan ahead"))?;
                return self.arrive(step, &digests, &reads, *next);
            }
            Fate::CancelBeforePlan(slot) | Fate::CancelBeforeCommit(slot) => {
                let early = matches!(fate, Fate::CancelBeforePlan(_));
                return self.cancel(shape, &step, &digests, slot, early);
            }
        }
        self.unchanged(&order, &format!("\"{fate}\""))
    }

    /// The step is run as the live one: promoted, where it was planned ahead.
    pub(super) fn arrive(
        &mut self,
        mut step: Step,
        digests: &[u64],
        reads: &[Vec<u64>],
        next: Model,
    ) -> Outcome {
        step.staged = false;
        let outcome = self.rig.admit(&step).map_err(fails("admit"))?;
        if !outcome.is_ready() {
            return Err(format!("{step}, admitted before, is refused: {}", outcome.message()));
        }
        let plans = self.forward(&step, digests, reads)?;
        self.rig.commit(&step, &plans).map_err(fails("commit"))?;
        self.model = next;
        // Both may be refused, and change nothing in any case.
        match step.id % 4 {
            0 => drop(self.rig.commit(&step, &plans)),
            1 => drop(self.rig.rollback(&step)),
            _ => {}
        }
        Ok(())
    }

    /// A request of the step goes while that is in flight.
    pub(super) fn cancel(
        &mut self,
        shape: &Shape,
        step: &Step,
        digests: &[u64],
        slot: u32,
        early: bool,
    ) -> Outcome {
        let gone = self.rid(slot);
        let mut left = shape.clone();
        left.rows.retain(|r| r.slot != slot);
        left.pre = left.pre.filter(|f| f.0 != slot);
        left.post = left.post.filter(|f| f.0 != slot);
        left.retain = left.retain.filter(|keep| keep.slot != slot);
        let (mut kept, mut first) = (Vec::new(), 0);
        for row in &shape.rows {
            let own = first..first + row.span as usize;
            first = own.end;
            if row.slot != slot {
                kept.extend_from_slice(&digests[own]);
            }
        }
        let plans = match early {
            true => None,
            false => {
                let plans = self.rig.plan(step).map_err(fails("plan"))?;
                self.cells.write(&self.rig, step, &plans, digests)?;
                Some(plans)
            }
        };
        self.rig.remove(gone).map_err(fails("remove_request"))?;
        self.model.remove(slot);
        let Expected::Runs { next, reads, .. } = self.model.after(&left, &kept) else {
            return Err("without one of its requests, a step does not fit".into());
        };
        let plans = match plans {
            Some(plans) => plans,
            None => {
                let plans = self.rig.plan(step).map_err(fails("plan"))?;
                self.cells.write(&self.rig, step, &plans, digests)?;
                let mut others = reads.iter();
                for (i, row) in step.rows.iter().enumerate().take(shape.rows.len()) {
                    if row.rid != gone {
                        let want = others.next().map_or(&[][..], Vec::as_slice);
                        self.compare(step, &plans, i, want)?;
                    }
                }
                plans
            }
        };
        if step.id.is_multiple_of(3) {
            return self.rig.rollback(step).map_err(fails("rollback_admit"));
        }
        self.rig.commit(step, &plans).map_err(fails("commit"))?;
        self.model = *next;
        Ok(())
    }

    pub(super) fn overlap(&mut self, first: &Shape, second: &Shape, fate: Fate) -> Outcome {
        if !self.rig.can_stage() {
            return Ok(());
        }
        let order = self.free_order()?;
        let (running, digests) = self.step(first);
        let expected = self.model.after(first, &digests);
        let admitted = self.admit(&running, &expected)?;
        let Expected::Runs { next, reads, .. } = expected else { return Ok(()) };
        if !admitted {
            return Ok(());
        }
        let plans = self.forward(&running, &digests, &reads)?;
        // The next step is laid out on what this one will have left.
        let before = std::mem::replace(&mut self.model, *next);
        let (mut staged, digests) = self.step(second);
        let mut after = self.model.after(second, &digests);
        // Pages that the running step will let go are not free before it has.
        if let (Expected::Runs { may_refuse, .. }, Some(_)) = (&mut after, first.retain) {
            *may_refuse = true;
        }
        staged.staged = true;
        let is_staged = self.admit(&staged, &after)?;
        if is_staged {
            self.rig.plan(&staged).map_err(fails("plan ahead"))?;
        }
        if matches!(fate, Fate::RollBackAdmitted | Fate::RollBackWritten) {
            self.rig.clear(&staged).map_err(fails("clear_preplan"))?;
            self.rig.rollback(&running).map_err(fails("rollback_admit"))?;
            self.model = before;
            return self.unchanged(&order, "a step given up with another planned behind it");
        }
        self.rig.commit(&running, &plans).map_err(fails("commit"))?;
        let (Expected::Runs { next, reads, .. }, true) = (after, is_staged) else { return Ok(()) };
        match fate {
            Fate::Commit | Fate::StageAndCommit => self.arrive(staged, &digests, &reads, *next),
            Fate::StageAndReplace => self.empty_step(),
            Fate::CancelBeforePlan(slot) | Fate::CancelBeforeCommit(slot) => {
                self.rig.remove(self.rid(slot)).map_err(fails("remove_request"))?;
                self.model.remove(slot);
                self.rig
                    .each("clear_preplan", |r| r.clear_preplan(None))
                    .map_err(fails("clear_preplan"))
            }
            _ => self.rig.clear(&staged).map_err(fails("clear_preplan")),
        }
    }

    pub(super) fn empty_step(&mut self) -> Outcome {
        let (step, _) = self.step(&Shape::default());
        self.admit(&step, &self.model.after(&Shape::default(), &[]))?;
        let plans = self.rig.plan(&step).map_err(fails("plan of an empty step"))?;
        self.rig.commit(&step, &plans).map_err(fails("commit of an empty step"))
    }
}
