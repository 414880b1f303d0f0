//! Steps that are planned ahead: promoted by identity, undone when dropped.

use engine_host::runner::{StageOutcome, Started};
use resource_api::FailureReason;
use resource_testkit::{FakePlan, FakeStepOptions};
use serde_json::json;

use crate::fixture::{Bench, STEP_METHODS, build, services, wanted};

#[test]
fn a_promoted_step_has_the_plan_that_was_made_ahead_and_commits_once() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let live = bench.start(bench.step(&[(rid, 2)]));
    // The second step is planned while the first runs, behind what that one will have added.
    let staged = bench.stage(bench.step(&[(rid, 3)]));
    let id = staged.id();
    let calls = bench.calls(STEP_METHODS).len();
    assert_eq!(bench.state("b")["steps"], json!([[id.0 - 1, false, true], [id.0, true, true]]));
    let done = bench.commit(live);
    bench.runner.finish(done);

    let live = bench.promote(staged);
    let ctx = live.ctx();
    assert!(!ctx.is_preplan());
    for key in ["a", "b", "c"] {
        let plan: &FakePlan = bench.plan(&ctx, key);
        assert_eq!((plan.step, plan.writes), (id, 1), "{key}: written once, when it was staged");
        assert_eq!((plan.start.to_vec(), plan.span.to_vec()), (vec![2], vec![3]), "{key}");
        assert_eq!(plan.slots.to_vec(), [3, 4, 5], "{key}");
    }
    let done = bench.commit(live);
    bench.runner.finish(done);
    let each = |method: &str| ["a", "b", "c"].map(|key| format!("{key}.{method}"));
    let order = ["commit", "admit", "plan", "commit"].map(each).concat();
    assert_eq!(bench.calls(STEP_METHODS)[calls..], order);
    assert_eq!(bench.state("c")["streams"]["r0.1"]["len"], 5);
    assert_eq!(bench.state("c")["steps"], json!([]));
    assert_eq!(bench.runner.free_slots(), 2);
}

#[test]
fn a_dropped_stage_leaves_no_trace() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let live = bench.start(bench.step(&[(rid, 2)]));
    let before = bench.states();
    let staged = bench.stage(bench.step(&[(rid, 3)]));
    assert_ne!(bench.states(), before);
    let step = bench.runner.unstage(staged);
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 1));
    assert_eq!(
        bench.calls(&["clear_preplan"]),
        ["c", "b", "a"].map(|k| format!("{k}.clear_preplan"))
    );
    // The live step is not disturbed, and the description can be staged again.
    let again = bench.stage(step);
    let done = bench.commit(live);
    bench.runner.finish(done);
    let live = bench.promote(again);
    assert_eq!(bench.plan(&live.ctx(), "b").start.to_vec(), [2]);
    bench.commit(live);
    assert_eq!(bench.state("b")["streams"]["r0.1"]["len"], 5);
}

#[test]
fn a_stage_that_is_dropped_after_the_live_step_went_on_leaves_no_trace() {
    let run = |with_stage: bool| {
        let mut bench = Bench::chain();
        let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
        let live = bench.start(bench.step(&[(r0, 2)]));
        let staged = with_stage.then(|| bench.stage(bench.step(&[(r1, 3)])));
        let done = bench.commit(live);
        bench.runner.finish(done);
        if let Some(staged) = staged {
            bench.runner.unstage(staged);
        }
        bench.run(&[(r1, 1), (r0, 1)]);
        bench.states()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn what_cannot_be_planned_ahead_is_left_for_the_promotion() {
    let mut bench = Bench::new(&[("a", json!({})), ("z", json!({ "preplan": false }))]);
    let rid = bench.ingest(0, &[]);
    let staged = bench.stage(bench.step(&[(rid, 1)]));
    assert_eq!(bench.calls(STEP_METHODS), ["a.admit*", "a.plan*"]);
    let live = bench.promote(staged);
    let rest = ["a.admit", "z.admit", "a.plan", "z.plan"];
    assert_eq!(bench.calls(STEP_METHODS)[2..], rest);
    assert_eq!(bench.plan(&live.ctx(), "z").span.to_vec(), [1]);
    bench.commit(live);
}

#[test]
fn a_refused_promotion_undoes_the_stage() {
    // The one that refuses comes after the staged one, and before it: then the sweep of the
    // promotion never reaches what was staged.
    for (staged, refuser) in [("m", "z"), ("m", "a")] {
        let mut bench = Bench::new(&[(staged, json!({})), (refuser, json!({ "preplan": false }))]);
        let rid = bench.ingest(0, &[]);
        let before = bench.states();
        let refuse = FailureReason::GRANT_DEFERRED.0;
        let options = FakeStepOptions { refuse, ..Default::default() };
        let staged = bench.stage(bench.step_with(&[(rid, 1)], refuser, options));
        let Started::Refused(outcome, _) = bench.runner.promote(staged).unwrap() else {
            panic!("not refused")
        };
        assert_eq!(outcome.failed_resource.as_deref(), Some(refuser));
        assert_eq!((bench.states(), bench.runner.free_slots()), (before, 2), "{refuser}");
    }
}

#[test]
fn a_refused_or_failed_stage_changes_nothing() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let before = bench.states();
    let refuse = FailureReason::ALLOCATION_FAILED.0;
    let refusal = FakeStepOptions { refuse, ..Default::default() };
    let step = bench.step_with(&[(rid, 1)], "c", refusal);
    let StageOutcome::Refused(outcome, _) = bench.runner.stage(step).unwrap() else {
        panic!("not refused")
    };
    assert_eq!(outcome.failed_resource.as_deref(), Some("c"));
    assert_eq!((bench.states(), bench.runner.free_slots()), (before.clone(), 2));
    let failure = FakeStepOptions { fail_plan: true, ..Default::default() };
    let failed = bench.runner.stage(bench.step_with(&[(rid, 1)], "c", failure)).unwrap_err();
    assert!(failed.error.to_string().starts_with("resource `c`, plan: "), "{}", failed.error);
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 2));
}

#[test]
fn planning_ahead_on_what_is_not_planned_ahead_is_refused_at_load() {
    let list = vec![
        wanted("slow", "fake", json!({ "preplan": false })),
        wanted("fast", "fake", json!({ "depends_on": ["slow"] })),
    ];
    let e = build(list, &services()).unwrap_err();
    assert_eq!(
        e.to_string(),
        "[resources.fast] is planned a step ahead, but depends on `slow` (kind fake), which cannot \
         be: its plan would read a plan that is not there yet"
    );
    assert_eq!(e.exit_code(), 2);
}

#[test]
fn a_second_stage_beside_a_pending_one_is_an_error() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let staged = bench.stage(bench.step(&[(rid, 2)]));
    let before = bench.states();
    let failed = bench.runner.stage(bench.step(&[(rid, 1)])).unwrap_err();
    let text = failed.error.to_string();
    assert!(text.contains("is planned ahead already: promote or unstage it first"), "{text}");
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 1));
    bench.runner.unstage(staged);
    let staged = bench.stage(*failed.step);
    let live = bench.promote(staged);
    let again = bench.stage(bench.step(&[(rid, 1)]));
    bench.commit(live);
    bench.runner.unstage(again);
}
