//! Requests: learning, forgetting, moving between workers, off the device and back, and prefixes.

use std::collections::BTreeSet;

use resource_api::{
    CGSlotSpec, FailureReason, Interface, LabelId, PrefixInputs, PrefixWalk, PublishedInfo,
    RequestId, RequestOverrides, Resource, ResourceHandle,
};
use serde_json::json;

use crate::fixture::{Bench, NODE, WALK};

#[test]
fn published_state_goes_on_in_another_worker_once_it_has_arrived() {
    let mut first = Bench::new(&[("a", json!({})), ("b", json!({ "depends_on": ["a"] }))]);
    let rid = first.ingest(0, &[]);
    first.run(&[(rid, 3)]);
    let live = first.start(first.step(&[(rid, 2)]));
    let done = first.commit(live);
    first.runner.outputs(&done, &[rid], &[42]).unwrap();
    let published = first.runner.publish_for_step(&done, rid).unwrap();
    let nobody = first.runner.publish_for_step(&done, RequestId::new(8, 8)).unwrap();
    assert!(nobody.is_empty());
    first.runner.finish(done);
    let keys: Vec<&str> = published.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["a", "b"]);

    let mut second =
        Bench::new(&[("a", json!({ "retrieve_polls": 2 })), ("b", json!({ "depends_on": ["a"] }))]);
    let there = second.ingest(5, &[]);
    for (key, info) in &published {
        let info = PublishedInfo::from_bytes(&info.to_bytes()).unwrap();
        let resource = second.resource(key);
        let ask = || resource.admit_retrieve(there, NODE, WALK, Some(&info)).unwrap();
        let polls = if key == "a" { 2 } else { 0 };
        let empty = second.state(key)["free"].clone();
        for _ in 0..polls {
            let outcome = ask();
            assert!(outcome.is_ok() && !outcome.is_ready());
            assert_eq!(second.state(key)["free"], empty);
        }
        assert!(ask().is_ready());
        let arrived = second.state(key);
        assert!(ask().is_ready(), "asking again takes nothing more");
        assert_eq!(second.state(key), arrived);
        let stream = &arrived["streams"]["r5.1"];
        assert_eq!(stream["tokens"], json!([100, 101, 102, 100, 101]));
        assert_eq!(stream["outputs"], json!([42]));
    }
    let live = second.start(second.step(&[(there, 1)]));
    assert_eq!(second.plan(&live.ctx(), "b").start.to_vec(), [5]);
    second.commit(live);
}

#[test]
fn a_retrieval_that_cannot_be_taken_in_says_why() {
    let mut first = Bench::new(&[("a", json!({}))]);
    let rid = first.ingest(0, &[]);
    first.run(&[(rid, 5)]);
    let info = first.resource("a").publish(rid).unwrap().unwrap();
    let after_stop = first.resource("a").publish_after_stop(rid, Some(NODE), None).unwrap();
    assert_eq!(after_stop.as_ref(), Some(&info));

    let small = Bench::new(&[("a", json!({ "capacity": 4 }))]);
    let there = small.ingest(0, &[]);
    let before = small.state("a");
    let a = small.resource("a");
    let outcome = a.admit_retrieve(there, NODE, WALK, Some(&info)).unwrap();
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!(outcome.amounts(), (5, 4));
    assert_eq!(small.state("a")["free"], before["free"]);
    assert!(a.admit_retrieve(there, NODE, WALK, None).unwrap().is_ready(), "nothing to fetch");
    let foreign = PublishedInfo::new("kv", 1);
    let e = a.admit_retrieve(there, NODE, WALK, Some(&foreign)).unwrap_err();
    assert_eq!(e.message(), "published by kv/1, expected fake/1");
}

#[test]
fn an_offloaded_request_waits_and_comes_back_whole() {
    let mut bench = Bench::new(&[("a", json!({ "capacity": 8 }))]);
    let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
    bench.run(&[(r0, 5)]);
    let live = bench.start(bench.step(&[(r0, 1)]));
    assert_eq!(bench.resource("a").reclaimable(r0).unwrap(), 0, "a step uses it");
    assert_eq!(bench.resource("a").offload(r0).unwrap(), 0);
    let done = bench.commit(live);
    bench.runner.finish(done);
    let tokens = bench.state("a")["streams"]["r0.1"]["tokens"].clone();

    assert_eq!(bench.resource("a").reclaimable(r0).unwrap(), 6);
    assert!(!bench.resource("a").is_offloaded(r0).unwrap());
    assert_eq!(bench.resource("a").offload(r0).unwrap(), 6);
    assert!(bench.resource("a").is_offloaded(r0).unwrap());
    assert_eq!(bench.resource("a").reclaimable(r0).unwrap(), 0);
    assert_eq!(bench.state("a")["free"], json!([1, 2, 3, 4, 5, 6, 7, 8]));

    let before = bench.states();
    let (outcome, _) = bench.refused(bench.step(&[(r0, 1)]));
    assert_eq!(outcome.outcome.reason(), FailureReason::REQUEST_OFFLOADING);
    assert_eq!(bench.states(), before);

    // Somebody else has taken the room meanwhile.
    bench.run(&[(r1, 4)]);
    let a = bench.resource("a");
    assert!(!a.can_reload(r0).unwrap() && !a.reload(r0).unwrap());
    assert!(a.is_offloaded(r0).unwrap());
    a.remove_request(r1).unwrap();
    assert!(a.can_reload(r0).unwrap() && a.reload(r0).unwrap());
    assert!(!a.is_offloaded(r0).unwrap());
    let state = bench.state("a");
    assert_eq!(state["streams"]["r0.1"]["tokens"], tokens);
    assert_eq!(state["host_free"].as_array().unwrap().len(), 64);
    bench.run(&[(r0, 2)]);
    assert_eq!(bench.state("a")["streams"]["r0.1"]["len"], 8);
}

#[test]
fn a_known_prefix_is_found_once_and_skipped() {
    let mut bench = Bench::new(&[("a", json!({ "prefix": true })), ("b", json!({}))]);
    assert_eq!(bench.resource("a").fingerprint(), Some(b"fake/1;key=a".to_vec()));
    assert_eq!(bench.resource("b").fingerprint(), None);
    let prompt = [100, 101, 102, 9];
    let early = bench.ingest(7, &prompt);
    let a = bench.resource("a");
    assert_eq!(a.resolve_cached_prefix(early, NODE, WALK).unwrap(), None, "not opened yet");
    let walks = || vec![PrefixWalk { label: LabelId::MAIN, write: WALK, decode: WALK }];
    assert!(a.enable_prefix_cache(b"root", walks()).unwrap());
    assert!(!bench.resource("b").enable_prefix_cache(b"root", walks()).unwrap());
    assert!(a.prefix_skip_safe() && !bench.resource("b").prefix_skip_safe());

    // The first request computes the tokens 100, 101, 102 and samples 5.
    let r0 = bench.ingest(0, &prompt[..3]);
    let live = bench.start(bench.step(&[(r0, 3)]));
    let done = bench.commit(live);
    bench.runner.outputs(&done, &[r0], &[5]).unwrap();
    bench.runner.finish(done);
    assert_eq!(bench.state("a")["prefixes"]["known"], json!([[100, 101, 102]]));

    let r1 = bench.ingest(1, &prompt);
    for _ in 0..2 {
        let a = bench.resource("a");
        assert_eq!(a.resolve_cached_prefix(r1, NODE, WALK).unwrap(), Some(3));
        assert_eq!(bench.state("a")["prefixes"]["held"], json!([["r1.1", 3]]));
    }
    assert_eq!(bench.resource("b").resolve_cached_prefix(r1, NODE, WALK).unwrap(), None);
    let whole = bench.ingest(2, &prompt[..2]);
    let found = bench.resource("a").resolve_cached_prefix(whole, NODE, WALK).unwrap();
    assert_eq!(found, Some(1), "one token is left to compute");
    for key in ["a", "b"] {
        let inputs = PrefixInputs::new(&prompt);
        bench.resource(key).apply_cached_prefix(r1, NODE, WALK, &inputs, 3).unwrap();
        assert_eq!(bench.state(key)["streams"]["r1.1"]["tokens"], json!([100, 101, 102]));
    }
    let live = bench.start(bench.step(&[(r1, 1)]));
    assert_eq!(bench.plan(&live.ctx(), "a").start.to_vec(), [3]);
    bench.commit(live);
}

#[test]
fn requests_may_be_told_of_twice_and_forgotten_without_having_been_known() {
    let mut bench = Bench::new(&[("a", json!({}))]);
    let rid = bench.ingest(0, &[1, 2]);
    bench.run(&[(rid, 4)]);
    let before = bench.states();
    bench.ingest(0, &[9, 9, 9]);
    assert_eq!(bench.states(), before, "the second time changes nothing");
    let a = bench.resource("a");
    let late = RequestId::new(0, 9);
    a.remove_request(late).unwrap();
    a.remove_requests(&[late, RequestId::new(3, 1)]).unwrap();
    a.reset_request(late, true).unwrap();
    a.clear_preplan(None).unwrap();
    assert_eq!(bench.states(), before, "a late copy of an id hits nobody");

    a.reset_request(rid, false).unwrap();
    let state = bench.state("a");
    assert_eq!(state["streams"]["r0.1"]["len"], 0);
    assert_eq!(state["free"], before[0]["free"], "the memory was kept");
    bench.run(&[(rid, 4)]);
    assert_eq!(bench.states(), before, "and was used again");
    bench.resource("a").remove_requests(&[rid]).unwrap();
    assert_eq!(bench.state("a")["streams"], json!({}));
    assert_eq!(bench.state("a")["free"].as_array().unwrap().len(), 64);
}

#[test]
fn a_request_may_go_while_its_step_runs() {
    let mut bench = Bench::new(&[("a", json!({}))]);
    let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
    let live = bench.start(bench.step(&[(r0, 3), (r1, 2)]));
    bench.resource("a").remove_request(r0).unwrap();
    let done = bench.commit(live);
    bench.runner.outputs(&done, &[r0, r1], &[1, 2]).unwrap();
    let state = bench.state("a");
    assert_eq!(state["streams"]["r1.1"]["tokens"], json!([200, 201]));
    assert_eq!(state["free"].as_array().unwrap().len(), 62);
}

#[test]
fn what_a_request_asks_for_is_read_strictly() {
    let bench = Bench::new(&[("a", json!({}))]);
    let (a, rid) = (bench.resource("a"), RequestId::new(0, 1));
    let typo = RequestOverrides::new(r#"{"prioriti": 2}"#, &[], 1);
    let e = a.ingest_request(rid, &typo).unwrap_err();
    assert_eq!(e.to_string(), "unknown key `prioriti`; did you mean `priority`?");
    a.ingest_request(rid, &RequestOverrides::new(r#"{"priority": 2.5}"#, &[], 1)).unwrap();
    assert_eq!(a.get_offload_priority(rid).unwrap(), 2.5);
}

/// The proof that the fake exercises the contract: no method of the vtable is left out.
#[test]
fn one_life_of_an_engine_calls_every_method() {
    let mut bench =
        Bench::new(&[("a", json!({ "prefix": true, "accepts": ["org.testkit.echo"] }))]);
    let rid = bench.ingest(0, &[1, 2, 3]);
    let a = bench.resource("a").clone();
    assert!(a.enable_prefix_cache(b"root", Vec::new()).unwrap());
    a.build_cuda_graph_buffers(&[] as &[CGSlotSpec], 4, 16).unwrap();
    a.post_warmup_validate().unwrap();
    assert!(!a.force_double_buffer() && a.prefix_skip_safe() && a.supports_eviction());
    assert_eq!(a.depends_on(), Vec::<String>::new());
    assert!(a.fingerprint().is_some());
    assert_eq!(a.describe().len(), 1);
    assert!(a.admit_retrieve(rid, NODE, WALK, None).unwrap().is_ready());
    assert_eq!(a.resolve_cached_prefix(rid, NODE, WALK).unwrap(), Some(0));
    a.apply_cached_prefix(rid, NODE, WALK, &PrefixInputs::new(&[1, 2, 3]), 0).unwrap();
    let step = bench.step(&[(rid, 3)]);
    let staged = bench.stage(step);
    let step = bench.runner.unstage(staged);
    let live = bench.start(step);
    let step = bench.runner.abandon(live);
    let live = bench.start(step);
    let done = bench.commit(live);
    bench.runner.outputs(&done, &[rid], &[4]).unwrap();
    assert_eq!(bench.runner.publish_for_step(&done, rid).unwrap().len(), 1);
    bench.runner.finish(done);
    assert!(a.publish_after_stop(rid, None, None).unwrap().is_some());
    assert_eq!(a.reclaimable(rid).unwrap(), 3);
    assert_eq!(a.get_offload_priority(rid).unwrap(), 3.0);
    assert_eq!(a.offload(rid).unwrap(), 3);
    assert!(a.is_offloaded(rid).unwrap() && a.can_reload(rid).unwrap() && a.reload(rid).unwrap());
    a.retain_session(rid, "chat").unwrap();
    assert_eq!(a.adopt_session(rid, "chat", 2).unwrap(), Some(2));
    assert_eq!(a.adopt_session(rid, "chat", 2).unwrap(), Some(0), "it is gone");
    a.remove_session("chat").unwrap();
    a.reset_request(rid, true).unwrap();
    a.remove_requests(&[rid]).unwrap();
    a.cleanup().unwrap();

    let log = bench.inspect("a")["log"].clone();
    let called: BTreeSet<&str> =
        log.as_array().unwrap().iter().map(|call| call[1].as_str().unwrap()).collect();
    let methods = ResourceHandle::METHODS.iter().map(|m| m.name.as_str());
    let left_out: Vec<&str> = methods.filter(|m| *m != "inspect" && !called.contains(m)).collect();
    assert_eq!(left_out, Vec::<&str>::new());
}
