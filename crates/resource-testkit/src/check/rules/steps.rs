//! Steps that are refused, given up, planned ahead, or out of order.

use resource_api::{AdmitOutcome, RequestId, Resource, StepId};

use super::super::bench::{A, B, Bench, STRANGER, failed};
use super::super::rig::{Subject, Watch};
use super::{HOLDS, Outcome, skipped};

pub(super) fn abandoned_steps(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3)])?;
    let before = bench.both()?;
    for planned in [false, true] {
        let step = bench.step(&[(A, 2), (B, 3)]);
        bench.admit(&step)?;
        if planned {
            bench.rig.plan(&step).map_err(failed("plan"))?;
        }
        bench.rig.rollback(&step).map_err(failed("rollback_admit"))?;
        bench.same(&before, "a step that was rolled back")?;
        bench.rig.rollback(&step).map_err(failed("a second rollback_admit"))?;
        bench.same(&before, "a second rollback_admit")?;
    }
    // A stranger's row is refused by whoever keeps state; it must leave nothing either way.
    let step = bench.step(&[(A, 2), (STRANGER, 1)]);
    if bench.rig.admit(&step).is_ok_and(|o| o.is_ready()) {
        bench.rig.rollback(&step).map_err(failed("rollback_admit"))?;
    }
    bench.same(&before, "a step with an unknown request")?;
    let step = bench.step(&[(A, 1000)]);
    if bench.rig.admit(&step).is_ok_and(|o: AdmitOutcome| o.is_ready()) {
        bench.rig.rollback(&step).map_err(failed("rollback_admit"))?;
    }
    bench.same(&before, "a step that is too large")?;
    bench.run(&[(A, 2), (B, 3)])?;
    HOLDS
}

pub(super) fn dropped_stages(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    if !bench.rig.can_stage() {
        return skipped("it is not planned ahead");
    }
    bench.run(&[(A, 3)])?;
    let before = bench.both()?;
    for (planned, all) in [(false, false), (true, false), (true, true)] {
        let mut step = bench.step(&[(A, 2), (B, 3)]);
        step.staged = true;
        bench.admit(&step)?;
        if planned {
            bench.rig.plan(&step).map_err(failed("plan ahead"))?;
        }
        let id = (!all).then_some(StepId(step.id));
        bench
            .rig
            .each("clear_preplan", |r| r.clear_preplan(id))
            .map_err(failed("clear_preplan"))?;
        bench.same(&before, "a staged step that was dropped")?;
        bench
            .rig
            .each("clear_preplan", |r| r.clear_preplan(id))
            .map_err(failed("clear_preplan"))?;
        bench.same(&before, "a second clear_preplan")?;
    }
    bench.run(&[(A, 2), (B, 3)])?;
    HOLDS
}

pub(super) fn promotion(subject: &Subject, watch: Watch) -> Outcome {
    let (mut ahead, mut plain) = (Bench::new(subject, watch)?, Bench::new(subject, watch)?);
    if !ahead.rig.can_stage() {
        return skipped("it is not planned ahead");
    }
    for bench in [&mut ahead, &mut plain] {
        bench.run(&[(A, 3), (B, 1)])?;
    }
    let (mut step, other) = (ahead.step(&[(A, 1), (B, 2)]), plain.step(&[(A, 1), (B, 2)]));
    step.staged = true;
    ahead.admit(&step)?;
    let first = ahead.rig.plan(&step).map_err(failed("plan ahead"))?;
    step.staged = false;
    ahead.admit(&step)?;
    let second = ahead.rig.plan(&step).map_err(failed("plan of a staged step"))?;
    let at = ahead.rig.index();
    if first[at].tag() != second[at].tag() {
        return Err("a promoted step has a plan of another type than its stage".into());
    }
    ahead.commit(&step, &second)?;
    plain.admit(&other)?;
    let plans = plain.rig.plan(&other).map_err(failed("plan"))?;
    plain.commit(&other, &plans)?;
    plain.same(&ahead.both()?, "planning ahead")?;
    let _ = ahead.rig.commit(&step, &second);
    ahead.same(&plain.both()?, "a second commit")?;
    HOLDS
}

pub(super) fn out_of_order(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3)])?;
    let before = bench.both()?;
    let step = bench.step(&[(A, 2), (B, 1)]);
    let r = bench.rig.resource().clone();
    let at = bench.rig.index();
    let none = vec![resource_api::TypedRef::NONE; at + 1];
    // Answers may be errors or nothing; what counts is what comes after.
    bench.rig.say("rollback_admit, commit, plan and outputs of a step that was not admitted");
    let _ = bench.rig.call(&step, at, &none, |s, c| r.rollback_admit(s, c));
    bench.same(&before, "rollback_admit of a step that was not admitted")?;
    let _ = r.clear_preplan(Some(StepId(step.id)));
    let _ = r.clear_preplan(None);
    bench.same(&before, "clear_preplan of nothing")?;
    let _ = bench.rig.call(&step, at, &none, |s, c| r.plan(s, c).map(|_| ()));
    let _ = bench.rig.call(&step, at, &none, |s, c| r.rollback_admit(s, c));
    bench.same(&before, "a plan without the plans that it needs, rolled back")?;
    bench.admit(&step)?;
    let _ = bench.rig.call(&step, at, &none, |s, c| r.plan(s, c).map(|_| ()));
    bench.rig.rollback(&step).map_err(failed("rollback_admit"))?;
    bench.same(&before, "a step that was rolled back")?;
    let step = bench.step(&[(A, 2), (B, 1)]);
    bench.admit(&step)?;
    bench.admit(&step)?;
    let plans = bench.rig.plan(&step).map_err(failed("plan after two admits"))?;
    let plans = bench.rig.plan(&step).map_err(failed("a second plan")).map(|_| plans)?;
    bench.commit(&step, &plans)?;
    let after = bench.both()?;
    let _ = bench.rig.commit(&step, &plans);
    bench.same(&after, "a second commit")?;
    bench.rig.rollback(&step).map_err(failed("rollback_admit of a committed step"))?;
    bench.same(&after, "rollback_admit of a committed step")?;
    bench.run(&[(A, 1), (B, 1)])?;
    HOLDS
}

pub(super) fn padding(subject: &Subject, watch: Watch) -> Outcome {
    let (mut with, mut without) = (Bench::new(subject, watch)?, Bench::new(subject, watch)?);
    let pads = [(RequestId::padding(0), 1), (RequestId::padding(1), 1)];
    for round in 0..3 {
        let rows = [(A, 1 + round), pads[0], pads[1]];
        with.run(&rows)?;
        without.run(&rows[..1])?;
        with.run(&pads)?;
        without.run(&[])?;
    }
    without.same(&with.both()?, "padding")?;
    HOLDS
}

pub(super) fn cancelled(subject: &Subject, watch: Watch) -> Outcome {
    for early in [true, false] {
        let (mut bench, mut alone) = (Bench::new(subject, watch)?, Bench::new(subject, watch)?);
        let step = bench.step(&[(A, 3), (B, 2)]);
        bench.admit(&step)?;
        let mut plans = None;
        if !early {
            plans = Some(bench.rig.plan(&step).map_err(failed("plan"))?);
        }
        bench.rig.remove(A).map_err(failed("remove_request in the middle of a step"))?;
        let plans = match plans {
            Some(plans) => plans,
            None => bench.rig.plan(&step).map_err(failed("plan after a request has gone"))?,
        };
        bench.commit(&step, &plans)?;
        alone.run(&[(B, 2)])?;
        alone.rig.remove(A).map_err(failed("remove_request"))?;
        let (now, want) = (bench.seen(&[B])?, alone.seen(&[B])?);
        if let Some((is, was)) = now.iter().zip(&want).find(|(a, b)| a != b) {
            return Err(format!("after its neighbour went: {is}; without one: {was}"));
        }
        bench.run(&[(B, 1)])?;
    }
    HOLDS
}
