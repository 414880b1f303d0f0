//! Steps as the runner drives them: order, refusals, failures, and what they leave behind.

use engine_host::error::ErrorKind;
use engine_host::step::{SegmentList, Share};
use resource_api::{AttentionStepOptions, FailureReason, LabelId, RequestId, Resource, Segment};
use resource_testkit::FakeStepOptions;
use serde_json::json;

use crate::fixture::{Bench, STEP_METHODS, step_over};

#[test]
fn a_step_visits_all_resources_in_build_order_method_by_method() {
    let mut bench = Bench::chain();
    let (r0, r1) = (bench.ingest(0, &[1, 2, 3]), bench.ingest(1, &[4]));
    let live = bench.start(bench.step(&[(r0, 3), (r1, 1)]));
    let ctx = live.ctx();
    let (a, b, c) = (bench.plan(&ctx, "a"), bench.plan(&ctx, "b"), bench.plan(&ctx, "c"));
    assert_eq!((a.span.to_vec(), a.start.to_vec()), (vec![3, 1], vec![0, 0]));
    assert_eq!(a.slots.to_vec(), [1, 2, 3, 4]);
    // `a` has no dependency; the others read the plan below them and call its capability, which
    // adds the length of its key to the sum of the spans.
    assert_eq!((a.dependency_tokens, a.dependency_echo), (0, 0));
    assert_eq!((b.dependency_tokens, b.dependency_echo), (4, 5));
    assert_eq!((c.dependency_tokens, c.dependency_echo), (4, 5));
    let done = bench.commit(live);
    bench.runner.outputs(&done, &[r0, r1], &[7, 8]).unwrap();
    bench.runner.finish(done);
    let each = |method: &str| ["a", "b", "c"].map(|key| format!("{key}.{method}"));
    let order = ["admit", "plan", "commit", "on_outputs"].map(each).concat();
    assert_eq!(bench.calls(STEP_METHODS), order);
    for key in ["a", "b", "c"] {
        let streams = &bench.state(key)["streams"];
        assert_eq!(streams["r0.1"]["tokens"], json!([100, 101, 102]), "{key}");
        assert_eq!(streams["r1.1"]["outputs"], json!([8]), "{key}");
        assert_eq!(bench.state(key)["steps"], json!([]), "{key}");
    }
}

#[test]
fn a_refusal_stops_the_sweep_and_is_rolled_back_in_reverse() {
    let reasons = [
        FailureReason::ALLOCATION_FAILED,
        FailureReason::REQUEST_OFFLOADING,
        FailureReason::RUNTIME_ERROR,
        FailureReason::ADMISSION_DEFERRED,
        FailureReason::GRANT_DEFERRED,
    ];
    for reason in reasons {
        let mut bench = Bench::chain();
        let rid = bench.ingest(0, &[1, 2]);
        bench.run(&[(rid, 2)]);
        let (before, calls) = (bench.states(), bench.calls(STEP_METHODS).len());
        let options = FakeStepOptions { refuse: reason.0, ..Default::default() };
        let step = bench.step_with(&[(rid, 3)], "b", options);
        let (outcome, mut step) = bench.refused(step);
        assert_eq!(outcome.failed_resource.as_deref(), Some("b"));
        assert_eq!(outcome.outcome.reason(), reason);
        assert_eq!(outcome.outcome.request_id(), rid);
        assert_eq!(outcome.outcome.message(), "the step's options say so");
        let sweep = ["a.admit", "b.admit", "b.rollback_admit", "a.rollback_admit"];
        assert_eq!(bench.calls(STEP_METHODS)[calls..], sweep);
        assert_eq!(bench.states(), before);
        assert_eq!(bench.runner.free_slots(), 2);
        // The step came back whole: without the cause of the refusal it runs.
        step.shares.clear();
        let live = bench.start(step);
        assert_eq!(bench.plan(&live.ctx(), "c").start.to_vec(), [2]);
        bench.commit(live);
    }
}

#[test]
fn a_step_that_does_not_fit_gives_back_what_it_got_so_far() {
    let mut bench = Bench::new(&[
        ("a", json!({ "capacity": 64 })),
        ("b", json!({ "capacity": 8, "depends_on": ["a"] })),
    ]);
    let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
    bench.run(&[(r0, 1)]);
    let before = bench.states();
    // 7 are free in `b`: the first row fits, the second gets 2 of 5.
    let (outcome, _) = bench.refused(bench.step(&[(r0, 5), (r1, 5)]));
    assert_eq!(outcome.failed_resource.as_deref(), Some("b"));
    assert_eq!(outcome.outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!(outcome.outcome.amounts(), (5, 2));
    assert_eq!(outcome.outcome.request_id(), r1);
    assert_eq!(outcome.outcome.message(), "allocation failed: needs 5, 2 free");
    assert_eq!(bench.states(), before);
    bench.run(&[(r0, 5), (r1, 2)]);
    assert_eq!(bench.state("b")["free"], json!([]));
}

#[test]
fn not_ready_names_no_culprit_and_changes_nothing() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let before = bench.states();
    let options = FakeStepOptions { not_ready: true, ..Default::default() };
    let (outcome, _) = bench.refused(bench.step_with(&[(rid, 1)], "c", options));
    assert!(outcome.outcome.is_ok() && !outcome.outcome.is_ready());
    assert_eq!(outcome.failed_resource, None);
    assert_eq!(bench.states(), before);
}

#[test]
fn a_failing_plan_is_an_error_that_names_it_and_leaves_no_trace() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let before = bench.states();
    let options = FakeStepOptions { fail_plan: true, ..Default::default() };
    let failed = bench.runner.start(bench.step_with(&[(rid, 2)], "b", options)).unwrap_err();
    let expected = "resource `b`, plan: the step's options say that it cannot be planned";
    assert_eq!(failed.error.to_string(), expected);
    let rollback = ["c.rollback_admit", "b.rollback_admit", "a.rollback_admit"];
    assert_eq!(bench.calls(&["rollback_admit", "commit"]), rollback);
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 2));
    assert_eq!(failed.step.request_ids, [rid]);
}

#[test]
fn a_failing_commit_does_not_keep_the_others_from_theirs() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let options = FakeStepOptions { fail_commit: true, ..Default::default() };
    let live = bench.start(bench.step_with(&[(rid, 2)], "a", options));
    let (done, result) = bench.runner.commit(live);
    assert_eq!(result.unwrap_err().to_string(), "resource `a`, commit: the step's options say so");
    bench.runner.finish(done);
    assert_eq!(bench.calls(&["commit"]), ["a.commit", "b.commit", "c.commit"]);
    assert_eq!(bench.state("c")["streams"]["r0.1"]["len"], 2);
}

#[test]
fn an_abandoned_step_leaves_no_trace() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    bench.run(&[(rid, 2)]);
    let before = bench.states();
    let live = bench.start(bench.step(&[(rid, 3)]));
    assert_ne!(bench.states(), before);
    bench.runner.abandon(live);
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 2));
}

#[test]
fn whatever_is_admitted_can_be_planned() {
    let mut bench = Bench::chain();
    let known = bench.ingest(0, &[]);
    let unknown = RequestId::new(9, 4);
    let mut step = bench.step(&[(known, 2), (known, 0), (unknown, 0), (RequestId::padding(0), 1)]);
    // A label that nobody has opened.
    step.segments.push(Segment { request_id: known, label: LabelId(7), span: 0 });
    let live = bench.start(step);
    let ctx = live.ctx();
    let plan = bench.plan(&ctx, "c");
    assert_eq!(plan.span.to_vec(), [2, 0, 0, 1, 0]);
    // The padding row writes to the sink.
    assert_eq!(plan.slots.to_vec(), [1, 2, 0]);
    bench.commit(live);
    // A stream that is to grow must be known.
    let (outcome, _) = bench.refused(bench.step(&[(unknown, 1)]));
    assert_eq!(outcome.outcome.reason(), FailureReason::RUNTIME_ERROR);
    assert_eq!(outcome.outcome.message(), "r9.4 is unknown");
}

#[test]
fn resources_that_a_step_does_not_name_hear_nothing_of_it() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let (a, b) = (bench.index("a"), bench.index("b"));
    // A step over all came before, and its memory is used again.
    bench.run(&[(rid, 1)]);
    let before = bench.calls(&["admit", "plan", "commit", "publish_for_step"]).len();
    let c = bench.state("c");
    let live = bench.start(step_over(vec![a, b], &[(rid, 1)]));
    let planned =
        [0, 1, 2].map(|i| live.ctx().plan_result::<resource_testkit::FakePlan>(i).is_ok());
    assert_eq!(planned, [true, true, false], "and nothing of the step before");
    let done = bench.commit(live);
    let published = bench.runner.publish_for_step(&done, rid).unwrap();
    assert_eq!(published.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    bench.runner.finish(done);
    let calls = bench.calls(&["admit", "plan", "commit", "publish_for_step"]);
    assert!(calls[before..].iter().all(|call| !call.starts_with('c')), "{calls:?}");
    assert_eq!(bench.state("c"), c);
    // Without its dependency, `b` has no plan to read.
    let before = bench.states();
    let failed = bench.runner.start(step_over(vec![b], &[(rid, 1)])).unwrap_err();
    let text = failed.error.to_string();
    assert!(text.starts_with("resource `b`, plan: resource 0 has no org.testkit.plan"), "{text}");
    assert_eq!(bench.states(), before);
    let failed = bench.runner.start(step_over(vec![3], &[(rid, 1)])).unwrap_err();
    assert_eq!(failed.error.to_string(), "the step names resource 3, which does not exist");
    assert_eq!(bench.runner.free_slots(), 2);
}

#[test]
fn a_share_may_have_segments_of_its_own() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let mut step = bench.step(&[(rid, 3)]);
    let mut own = SegmentList::default();
    own.push(Segment { request_id: rid, label: LabelId::MAIN, span: 1 });
    step.shares.insert(bench.index("a"), Share { segments: Some(own), options: None });
    let live = bench.start(step);
    let ctx = live.ctx();
    assert_eq!(bench.plan(&ctx, "a").span.to_vec(), [1]);
    assert_eq!(bench.plan(&ctx, "b").span.to_vec(), [3]);
    assert_eq!(bench.plan(&ctx, "b").dependency_tokens, 1);
    bench.commit(live);
}

#[test]
fn options_of_another_kind_are_an_error() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let before = bench.states();
    let mut step = bench.step(&[(rid, 1)]);
    let wrong = Share { options: Some(Box::new(AttentionStepOptions::default())), segments: None };
    step.shares.insert(bench.index("b"), wrong);
    let failed = bench.runner.start(step).unwrap_err();
    assert_eq!(
        failed.error.to_string(),
        "resource `b`, admit: expected a org.testkit.step/1, found a attention.step/1"
    );
    assert_eq!((bench.states(), bench.runner.free_slots()), (before, 2));
}

#[test]
fn a_faulted_resource_is_out_of_use_and_the_others_go_on() {
    let mut bench =
        Bench::new(&[("a", json!({})), ("b", json!({ "panic_in": "admit" })), ("c", json!({}))]);
    let rid = bench.ingest(0, &[]);
    let before = bench.state("a");
    let failed = bench.runner.start(bench.step(&[(rid, 1)])).unwrap_err();
    assert_eq!(failed.error.kind(), ErrorKind::Panicked);
    let text = failed.error.to_string();
    let expected = "resource `b`, admit: Resource::admit panicked: admit was asked to panic";
    assert!(text.starts_with(expected), "{text}");
    assert!(bench.entry("b").is_faulted());
    assert_eq!((bench.state("a"), bench.runner.free_slots()), (before.clone(), 2));

    let failed = bench.runner.start(bench.step(&[(rid, 1)])).unwrap_err();
    assert_eq!(failed.error.kind(), ErrorKind::Unavailable);
    let expected = "resource `b`, admit: `b` panicked earlier and is out of use";
    assert_eq!(failed.error.to_string(), expected);
    assert_eq!(bench.state("a"), before);

    let healthy = vec![bench.index("a"), bench.index("c")];
    let live = bench.start(step_over(healthy, &[(rid, 1)]));
    bench.commit(live);
    assert!(!bench.entry("a").is_faulted() && !bench.entry("c").is_faulted());
    assert_eq!(bench.state("c")["streams"]["r0.1"]["len"], 1);
}

#[test]
fn a_panic_in_commit_does_not_keep_the_others_from_theirs() {
    let mut bench = Bench::new(&[("a", json!({ "panic_in": "commit" })), ("b", json!({}))]);
    let rid = bench.ingest(0, &[]);
    let live = bench.start(bench.step(&[(rid, 1)]));
    let (done, result) = bench.runner.commit(live);
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Panicked);
    bench.runner.finish(done);
    assert_eq!(bench.state("b")["streams"]["r0.1"]["len"], 1);
}

#[test]
fn a_resource_with_nothing_to_publish_is_left_out() {
    let mut bench = Bench::chain();
    let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
    let live = bench.start(bench.step(&[(r0, 2), (r1, 1)]));
    let done = bench.commit(live);
    bench.resource("b").remove_request(r0).unwrap();
    let keys = |rid| -> Vec<String> {
        let published = bench.runner.publish_for_step(&done, rid).unwrap();
        published.into_iter().map(|(key, _)| key).collect()
    };
    assert_eq!(keys(r0), ["a", "c"]);
    assert_eq!(keys(r1), ["a", "b", "c"]);
    assert_eq!(keys(RequestId::new(9, 1)), Vec::<String>::new());
}
