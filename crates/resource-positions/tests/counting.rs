//! Which position each token gets, step by step.

#[allow(dead_code)] // each test file uses its part
mod common;

use common::*;
use resource_api::{
    CombinedLabel, FailureReason, Fork, LabelId, NodeId, Positions as _, PrefixInputs,
    PublishedInfo, RequestId, RequestOverrides, Resource as _, StepId, WalkId,
};
use serde_json::json;

const A: RequestId = RequestId::new(0, 1);
const B: RequestId = RequestId::new(70, 3);

fn engine(settings: serde_json::Value) -> Engine {
    let engine = Engine::new(settings);
    engine.ingest(&[A, B]);
    engine
}

#[test]
fn sequential_ids_go_on_from_step_to_step() {
    let e = engine(json!({}));
    assert_eq!(e.run(&Step::new(1, 0, &[(A, MAIN, 3), (B, MAIN, 2)])), [0, 1, 2, 0, 1]);
    assert_eq!(e.run(&Step::new(2, 0, &[(B, MAIN, 1), (A, MAIN, 1)])), [2, 3]);
    assert_eq!(e.run(&Step::new(3, 1, &[(A, MAIN, 0), (B, MAIN, 2)])), [3, 4]);
    assert_eq!((e.api.position(A, MAIN).unwrap(), e.api.position(B, MAIN).unwrap()), (4, 5));
    assert_eq!(e.api.position(A, OTHER).unwrap(), 0);
}

#[test]
fn a_block_shares_one_id_and_an_empty_one_does_not_count() {
    let e = engine(json!({ "scheme": "block", "block_step": 5 }));
    assert_eq!(e.run(&Step::new(1, 0, &[(A, MAIN, 3), (B, MAIN, 0)])), [0, 0, 0]);
    assert_eq!(e.run(&Step::new(2, 0, &[(A, MAIN, 2), (B, MAIN, 1)])), [5, 5, 0]);
    assert_eq!(e.api.position(A, MAIN).unwrap(), 10);
    assert_eq!(e.api.position(B, MAIN).unwrap(), 5);
}

#[test]
fn explicit_ids_and_advances_win() {
    let e = engine(json!({}));
    let mut step = Step::new(1, 0, &[(A, MAIN, 2), (B, OTHER, 1), (B, MAIN, 2)]);
    [9, 8, 7, 6, 5].into_iter().for_each(|id| step.options.pos_ids.push(id));
    [4, 0, 2].into_iter().for_each(|n| step.options.advance.push(n));
    assert!(e.admit(&step).is_ready());
    assert_eq!(e.plan(&step, MAIN), [9, 8, 6, 5]);
    assert_eq!(e.plan(&step, OTHER), [7]);
    e.commit(&step);
    assert_eq!((e.api.position(A, MAIN).unwrap(), e.api.position(B, MAIN).unwrap()), (4, 2));
    assert_eq!(e.api.position(B, OTHER).unwrap(), 0);
}

#[test]
fn a_combined_label_has_its_members_one_after_the_other() {
    let e = engine(json!({}));
    let mut first = Step::new(1, 0, &[(A, MAIN, 5), (A, OTHER, 2)]);
    e.run(&first);
    let both = LabelId(2);
    first = Step::new(2, 0, &[(A, MAIN, 1), (A, OTHER, 1), (B, MAIN, 2), (B, OTHER, 1)]);
    for source in [OTHER, MAIN] {
        let member = CombinedLabel { combined: both, source };
        first.kv.combined_labels.push(member);
        first.options.combined_labels.push(member);
    }
    assert!(e.admit(&first).is_ready());
    assert_eq!(e.plan(&first, both), [2, 0, 5, 0, 1]);
    first.options.combined_labels.clear();
    // Rows of streams that nobody names must not get some other stream's ids.
    let refused = e.try_plan(&first).unwrap_err();
    assert!(refused.to_string().contains("combined_labels"), "{refused}");
}

#[test]
fn a_step_staged_behind_an_admitted_one_starts_after_it() {
    let e = engine(json!({}));
    e.run(&Step::new(1, 0, &[(A, MAIN, 4)]));
    let running = Step::new(2, 0, &[(A, MAIN, 3), (B, MAIN, 1)]);
    assert!(e.admit(&running).is_ready());
    e.plan(&running, MAIN);
    let segments = [(A, MAIN, 1), (B, MAIN, 1)];
    let staged = Step::new(3, 1, &segments).staged();
    assert!(e.admit(&staged).is_ready());
    assert_eq!(e.plan(&staged, MAIN), [7, 1]);
    assert_eq!(e.plan(&running, MAIN), [4, 5, 6, 0], "the running step is where it was");
    e.commit(&running);
    // Promoted, planned afresh and never staged are one and the same.
    assert_eq!(e.run(&Step::new(3, 1, &segments)), [7, 1]);
    assert_eq!(e.api.position(A, MAIN).unwrap(), 8);
}

#[test]
fn a_dropped_or_rolled_back_step_leaves_no_trace() {
    let e = engine(json!({}));
    e.run(&Step::new(1, 0, &[(A, MAIN, 4)]));
    let before = e.pos.publish(A).unwrap();
    let staged = Step::new(2, 1, &[(A, MAIN, 9), (A, OTHER, 2)]).staged();
    assert!(e.admit(&staged).is_ready());
    e.plan(&staged, MAIN);
    e.pos.clear_preplan(Some(StepId(2))).unwrap();
    e.pos.clear_preplan(None).unwrap();
    let refused = Step::new(3, 0, &[(A, MAIN, 2), (A, OTHER, 2)]);
    assert!(e.admit(&refused).is_ready());
    e.roll_back(&refused);
    assert_eq!(e.pos.publish(A).unwrap(), before);
    let next = Step::new(4, 1, &[(A, MAIN, 1), (A, OTHER, 1)]).staged();
    assert_eq!((e.plan(&next, MAIN), e.plan(&next, OTHER)), (vec![4], vec![0]));
}

#[test]
fn an_abandoned_step_is_overtaken_by_the_next() {
    let e = engine(json!({}));
    let lost = Step::new(1, 0, &[(A, MAIN, 5)]);
    assert!(e.admit(&lost).is_ready());
    e.plan(&lost, MAIN);
    let next = Step::new(2, 0, &[(A, MAIN, 2)]);
    assert!(e.admit(&next).is_ready());
    assert_eq!(e.plan(&next, MAIN), [0, 1]);
    assert_eq!(e.plan(&Step::new(3, 1, &[(A, MAIN, 1)]).staged(), MAIN), [2]);
}

#[test]
fn forks_copy_counters_and_an_absent_source_changes_nothing() {
    let e = engine(json!({}));
    let mut step = Step::new(1, 0, &[(A, MAIN, 6)]);
    step.options.post_forks.push(Fork { request_id: A, from: MAIN, to: OTHER });
    step.options.post_forks.push(Fork { request_id: A, from: LabelId(7), to: OTHER });
    e.run(&step);
    assert_eq!(e.api.position(A, OTHER).unwrap(), 6);
}

#[test]
fn many_labels_of_one_request_are_kept_apart() {
    let e = engine(json!({}));
    for step in 0..2 {
        let segments: Vec<_> = (0..11).map(|l| (A, LabelId(l), l + 1)).collect();
        e.run(&Step::new(step, 0, &segments));
    }
    for l in 0..11 {
        assert_eq!(e.api.position(A, LabelId(l)).unwrap(), 2 * (l + 1));
    }
}

#[test]
fn requests_come_twice_go_and_come_again() {
    let e = engine(json!({}));
    e.run(&Step::new(1, 0, &[(A, MAIN, 4), (A, OTHER, 1)]));
    e.ingest(&[A]);
    assert_eq!(e.api.position(A, MAIN).unwrap(), 4, "a second ingest changes nothing");
    e.pos.reset_request(A, true).unwrap();
    assert_eq!(e.run(&Step::new(2, 0, &[(A, MAIN, 2)])), [0, 1]);
    assert_eq!(e.api.position(A, OTHER).unwrap(), 0);
    e.pos.remove_request(A).unwrap();
    e.pos.remove_request(A).unwrap();
    e.pos.reset_request(A, false).unwrap();
    let next = RequestId::new(A.slot, 2);
    e.ingest(&[next]);
    e.run(&Step::new(3, 0, &[(next, MAIN, 3)]));
    e.pos.remove_request(A).unwrap();
    e.commit(&Step::new(4, 0, &[(A, MAIN, 50)]));
    assert_eq!(e.api.position(next, MAIN).unwrap(), 3, "a late copy hits nobody");
    let late = e.pos.ingest_request(A, &RequestOverrides::new("", &[], 1)).unwrap_err();
    assert!(late.to_string().contains("request r0.1 is out of date"), "{late}");
    let refused = e.admit(&Step::new(5, 0, &[(A, MAIN, 1)]));
    assert_eq!(refused.reason(), FailureReason::RUNTIME_ERROR);
    assert_eq!(refused.message(), "`pos`: request r0.1 is not known here");
}

#[test]
fn padding_rows_and_unopened_labels_run() {
    let e = engine(json!({}));
    let segments = [(A, MAIN, 1), (RequestId::padding(0), MAIN, 1), (A, LabelId(5), 0)];
    let step = Step::new(1, 0, &segments);
    assert!(e.admit(&step).is_ready());
    assert_eq!(e.plan(&step, MAIN), [0, 0]);
    assert_eq!(e.plan(&step, LabelId(5)), [0u32; 0]);
    e.commit(&step);
    assert_eq!(e.pos.publish(RequestId::padding(0)).unwrap(), None);
    let info = e.pos.publish(A).unwrap().unwrap();
    assert_eq!(
        info.entries().map(|(name, next, _)| (name.to_string(), next)).collect::<Vec<_>>(),
        [("main".to_string(), 1)]
    );
}

#[test]
fn a_request_past_the_limit_is_refused_by_name() {
    let e = engine(json!({}));
    let step = Step::new(1, 0, &[(A, MAIN, 1), (B, MAIN, (1 << 14) + 1)]);
    let refused = e.admit(&step);
    assert_eq!((refused.reason(), refused.request_id()), (FailureReason::RUNTIME_ERROR, B));
    assert_eq!(
        refused.message(),
        "`pos`: request r70.3 reaches position 16384; the limit is 16384"
    );
}

#[test]
fn published_counters_are_taken_over_and_never_move_back() {
    let (from, to) = (engine(json!({})), engine(json!({})));
    from.run(&Step::new(1, 0, &[(A, MAIN, 4)]));
    let early = from.pos.publish(A).unwrap().unwrap();
    from.run(&Step::new(2, 0, &[(A, MAIN, 4)]));
    let late = from.pos.publish(A).unwrap().unwrap();
    let retrieve =
        |info: &PublishedInfo| to.pos.admit_retrieve(B, NodeId(0), WalkId(0), Some(info)).unwrap();
    for info in [&late, &early] {
        assert!(retrieve(&PublishedInfo::from_bytes(&info.to_bytes()).unwrap()).is_ready());
        assert_eq!(to.api.position(B, MAIN).unwrap(), 8);
    }
    let refused = retrieve(&PublishedInfo::new("sampler", 1));
    assert!(refused.message().contains("sampler/1, not of positions/1"), "{}", refused.message());
}

#[test]
fn a_cached_prefix_is_where_a_sequence_starts() {
    let e = engine(json!({}));
    assert!(e.pos.prefix_skip_safe());
    assert_eq!(e.pos.resolve_cached_prefix(A, NodeId(0), WalkId(0)).unwrap(), None);
    let tokens = [1; 40];
    e.pos.apply_cached_prefix(A, NodeId(0), WalkId(0), &PrefixInputs::new(&tokens), 32).unwrap();
    assert_eq!(e.run(&Step::new(1, 0, &[(A, MAIN, 2)])), [32, 33]);
    let (one, two) = (LabelId(1), LabelId(2));
    let both = [one, two];
    let inputs = PrefixInputs::new(&tokens).with_labels(&both);
    e.pos.apply_cached_prefix(B, NodeId(0), WalkId(0), &inputs, 16).unwrap();
    let of = |label| e.api.position(B, label).unwrap();
    assert_eq!([of(one), of(two), of(MAIN)], [16, 16, 0], "the streams that begin with it");
    let block = engine(json!({ "scheme": "block" }));
    assert!(!block.pos.prefix_skip_safe());
    assert_eq!(block.pos.resolve_cached_prefix(A, NodeId(0), WalkId(0)).unwrap(), Some(0));
}
