//! Slots: leased to one step at a time, and what lives in them stays where it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use resource_api::{
    BucketKey, CGSlotSpec, GraphConfig, RequestId, Resource, ResourceHandle, SlotLease,
    StepContext, StepHead, StepId,
};
use resource_testkit::Echo;
use serde_json::json;

use crate::fixture::{Bench, NODE, WALK, step_over};

#[test]
fn a_step_without_a_slot_is_an_error_and_a_finished_one_gives_its_slot_back() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let first = bench.start(bench.step(&[(rid, 1)]));
    let staged = bench.stage(bench.step(&[(rid, 1)]));
    let before = bench.states();
    let failed = bench.runner.start(bench.step(&[(rid, 1)])).unwrap_err();
    assert_eq!(failed.error.to_string(), "all 2 slots are leased");
    assert_eq!(bench.states(), before);
    let done = bench.commit(first);
    assert_eq!(bench.runner.free_slots(), 0, "plans of a committed step are still readable");
    bench.runner.finish(done);
    assert_eq!(bench.runner.free_slots(), 1);
    bench.runner.unstage(staged);
    assert_eq!(bench.runner.free_slots(), 2);
}

#[test]
fn a_slots_plan_is_one_value_from_step_to_step() {
    let mut bench = Bench::chain();
    let rid = bench.ingest(0, &[]);
    let mut seen = BTreeMap::new();
    for step in 0..6u64 {
        let live = bench.start(bench.step(&[(rid, 1)]));
        let ctx = live.ctx();
        let plan = bench.plan(&ctx, "b");
        let lease = ctx.slot_lease();
        assert_eq!((plan.writes, lease.generation), (step / 2 + 1, step as u32 / 2 + 1));
        let first = *seen.entry(lease.slot).or_insert(std::ptr::from_ref(plan));
        assert!(std::ptr::eq(first, plan));
        let done = bench.commit(live);
        bench.runner.finish(done);
    }
    assert_eq!(seen.len(), 2, "slots take turns");
}

#[test]
fn columns_that_a_capture_was_sized_for_do_not_move() {
    let mut bench = Bench::new(&[("a", json!({}))]);
    let rid = bench.ingest(0, &[]);
    bench.resource("a").build_cuda_graph_buffers(&[], 4, 64).unwrap();
    let mut addresses = BTreeMap::new();
    for span in [1, 2, 4, 8, 16, 1, 30] {
        let live = bench.start(bench.step(&[(rid, span)]));
        let ctx = live.ctx();
        let column = &bench.plan(&ctx, "a").slots;
        assert_eq!(column.len(), span as usize);
        let first = *addresses.entry(ctx.slot()).or_insert(column.as_ptr());
        assert_eq!(first, column.as_ptr());
        let done = bench.commit(live);
        bench.runner.finish(done);
    }
}

fn bucket(bs: u32) -> BucketKey {
    BucketKey { graph_walk: WALK, bs, num_tokens: bs, cg_key_info: 0 }
}

fn sized(bs: u32) -> CGSlotSpec {
    CGSlotSpec {
        bucket: bucket(bs),
        slot: 0,
        config: GraphConfig::FULL,
        config_idx: CGSlotSpec::NO_CONFIG_IDX,
    }
}

/// Runs a step that replays the graph of a bucket, as a runner that captures will.
fn replay(
    resource: &ResourceHandle,
    step: u64,
    bs: u32,
    rids: &[RequestId],
) -> resource_api::Result<()> {
    let padding = rids.len() as u32..bs;
    let padded: Vec<RequestId> =
        rids.iter().copied().chain(padding.map(RequestId::padding)).collect();
    let rows: Vec<_> = padded.iter().map(|&rid| (rid, 1)).collect();
    let own = step_over(vec![0], &rows);
    let lease =
        SlotLease { bucket: bucket(bs), has_bucket: true, ..SlotLease::eager(0, step as u32) };
    let head = StepHead {
        step: StepId(step),
        epoch: step,
        node: NODE,
        graph_walk: WALK,
        lease,
        capture: false,
        is_preplan: false,
        stream: 0,
    };
    let ctx = StepContext::new(head, rids, &padded, &[]);
    assert!(resource.admit(&own.share(0), &ctx)?.is_ready());
    if let Err(e) = resource.plan(&own.share(0), &ctx) {
        resource.rollback_admit(&own.share(0), &ctx)?;
        return Err(e);
    }
    resource.commit(&own.share(0), &ctx)
}

fn values(buffer: &[AtomicU32]) -> Vec<u32> {
    buffer.iter().map(|cell| cell.load(Ordering::Relaxed)).collect()
}

#[test]
fn a_buffer_that_grows_leaves_the_captured_one_in_place_and_in_use() {
    let bench = Bench::new(&[("a", json!({}))]);
    let (r0, r1) = (bench.ingest(0, &[]), bench.ingest(1, &[]));
    let (a, echo) = (bench.resource("a"), bench.echo("a"));

    a.build_cuda_graph_buffers(&[sized(2)], 2, 16).unwrap();
    let captured = echo.graph_buffer(0, 0).unwrap();
    replay(a, 1, 2, &[r0, r1]).unwrap();
    assert_eq!(values(captured), [1, 2]);

    // A second runner captures a larger shape: a new buffer, and the old one stays.
    a.build_cuda_graph_buffers(&[sized(2), sized(4)], 4, 16).unwrap();
    let grown = echo.graph_buffer(0, 1).unwrap();
    assert_eq!((grown.len(), values(grown)), (4, vec![0; 4]));
    assert!(std::ptr::eq(captured, echo.graph_buffer(0, 0).unwrap()));
    replay(a, 2, 2, &[r0, r1]).unwrap();
    assert_eq!((values(captured), values(grown)), (vec![3, 4], vec![0; 4]));
    // Three requests in a graph of four rows: the padding row is sent to the sink.
    let r2 = bench.ingest(2, &[]);
    replay(a, 3, 4, &[r0, r1, r2]).unwrap();
    assert_eq!((values(captured), values(grown)), (vec![3, 4], vec![5, 6, 7, 0]));

    // The same again, or less, makes nothing new.
    a.build_cuda_graph_buffers(&[sized(4), sized(1)], 1, 16).unwrap();
    assert!(echo.graph_buffer(0, 2).is_err());

    let before = bench.state("a");
    let e = replay(a, 4, 8, &[r0]).unwrap_err();
    assert!(e.message().contains("build_cuda_graph_buffers first"), "{e}");
    assert_eq!(bench.state("a"), before);
}
