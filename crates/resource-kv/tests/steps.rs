//! Steps one by one, through the handles a host uses.

mod common;

use std::sync::atomic::Ordering;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{
    CombinedLabel, FailureReason, KvCache, KvFacts, KvPlan, KvStepOptions, LabelId, PlanVec,
    RequestId, RequestOverrides, Resource, ResourceError, Retention, StepId, TensorView, TypedRef,
};

fn list<T: Clone>(items: &[T]) -> PlanVec<T> {
    let mut vec = PlanVec::default();
    items.iter().for_each(|i| vec.push(i.clone()));
    vec
}

/// Admits, plans, writes `values` to `main`, and commits.
fn run(cache: &Cache, step: &Step, values: &[f32]) {
    assert!(cache.admit(step).is_ready());
    let plan = cache.plan(step).unwrap();
    if !values.is_empty() {
        cache.write(step, plan, MAIN, values);
    }
    cache.commit(step).unwrap();
    cache.conserved();
}

/// What a stream holds, read by a step that adds nothing.
fn contents(cache: &Cache, id: u64, slot: u32, label: u32) -> Vec<f32> {
    let step = Step { slot: 7, ..Step::new(id, &[(slot, label, 0)]) };
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    let found = cache.history(plan.open::<KvPlan>().unwrap(), 0);
    cache.commit(&step).unwrap();
    found
}

fn count(from: u32, to: u32) -> Vec<f32> {
    (from..to).map(|v| v as f32).collect()
}

#[test]
fn a_stream_takes_only_the_pages_that_its_tokens_need() {
    let cache = cache(4, 10, 40);
    cache.ingest(0);
    assert_eq!(cache.kv.free_pages(), 10);
    for (id, span, len, free) in [(1, 4, 4, 9), (2, 1, 5, 8), (3, 3, 8, 8), (4, 9, 17, 5)] {
        let step = Step::new(id, &[(0, 0, span)]);
        run(&cache, &step, &count(len - span, len));
        assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (len, free));
    }
    assert_eq!(contents(&cache, 9, 0, 0), count(0, 17));
    cache.resource.remove_request(rid(0)).unwrap();
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (0, 10));
    cache.conserved();
}

#[test]
fn a_full_last_page_has_a_page_of_tokens_in_it() {
    let cache = cache(4, 10, 40);
    cache.ingest(0);
    for (id, span, last) in [(1, 4, 4), (2, 1, 1), (3, 7, 4)] {
        let step = Step::new(id, &[(0, 0, span)]);
        assert!(cache.admit(&step).is_ready());
        let plan = cache.plan(&step).unwrap();
        let plan = plan.open::<KvPlan>().unwrap();
        assert_eq!(plan.last_page_len[0], last);
        let end = plan.len[0] - 1;
        assert_eq!(*plan.write_slot.last().unwrap(), end % 4);
        assert_eq!(*plan.write_page.last().unwrap(), plan.pages(0, 4)[end as usize / 4]);
        cache.commit(&step).unwrap();
    }
}

#[test]
fn written_rows_are_read_back_and_more_rows_are_ignored() {
    let cache = cache(4, 10, 40);
    cache.ingest(0);
    cache.ingest(1);
    let step = Step::new(1, &[(0, 0, 3), (1, 0, 2)]);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    cache.write(&step, plan, MAIN, &[1.0, 2.0, 3.0, 4.0, 5.0, 77.0, 78.0]);
    for layer in 0..LAYERS {
        let [k, v] = cache.read(&step, plan, layer, 5);
        let want: Vec<f32> = (1..=5).flat_map(|x| row(x as f32, layer)).collect();
        assert_eq!(v, want.iter().map(|x| -x).collect::<Vec<_>>());
        assert_eq!(k, want);
    }
}

#[test]
fn strided_heads_and_the_caches_own_type_are_taken() {
    let settings = r#""pages": 4, "page_size": 4, "max_seq_len": 8, "dtype": "bf16""#;
    let cache = cache_on(PlainHost::handle(), settings, 4);
    cache.ingest(0);
    let step = Step::new(1, &[(0, 0, 3)]);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    // One fused row holds q (ignored), k and v of a token.
    let fused: Vec<f32> = (0..3 * 3 * ROW).map(|i| i as f32).collect();
    let memory = device::SharedPool::new(fused.len(), device::PoolType::F32).unwrap();
    memory.view().writer().store(0, &fused).unwrap();
    let part =
        |which: usize| memory.tensor(which * ROW, &[3, HEADS, DIM], &[3 * ROW, DIM, 1]).unwrap();
    step.call(&[plan], |_, c| cache.kv.write_kv(c, 1, MAIN, &part(1), &part(2))).unwrap();
    let [k, v] = cache.read(&step, plan, 1, 3);
    for (token, (k, v)) in k.chunks(ROW).zip(v.chunks(ROW)).enumerate() {
        // Integers below 256 are exact in bf16.
        let at = |which: usize| &fused[(token * 3 + which) * ROW..][..ROW];
        assert_eq!((k, v), (at(1), at(2)));
    }
    let own: Vec<half::bf16> = (0..3 * ROW).map(|i| half::bf16::from_f32(i as f32)).collect();
    let own = TensorView::from_slice(&own, &[3, HEADS, DIM]);
    step.call(&[plan], |_, c| cache.kv.write_kv(c, 0, MAIN, &own, &own)).unwrap();
    let [k, v] = cache.read(&step, plan, 0, 3);
    assert_eq!(k, count(0, 3 * ROW as u32));
    assert_eq!(v, k);
}

#[test]
fn wrong_tensors_labels_and_layers_are_refused_in_one_line() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    let step = Step::new(1, &[(0, 0, 3)]);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    let data = [0.0; 4 * ROW];
    let (good, few) = ([3, HEADS, DIM], [2, HEADS, DIM]);
    let view = |shape: &[usize]| TensorView::from_slice(&data[..shape.iter().product()], shape);
    let ints = vec![0u32; 3 * ROW];
    let ints = TensorView::from_slice(&ints, &good);
    let write = |layer, label, k: &TensorView<'_>| -> ResourceError {
        let v = view(&good);
        let result = step.call(&[plan], |_, c| cache.kv.write_kv(c, layer, label, k, &v));
        result.unwrap_err()
    };
    for (error, said) in [
        (write(0, MAIN, &view(&few)), "the step needs [3 or more, 2, 4]"),
        (write(0, MAIN, &view(&[3, ROW])), "`k` has shape [3, 8]"),
        (write(0, MAIN, &ints), "`k` is u32 on cpu"),
        (write(LAYERS, MAIN, &view(&good)), "layer 2 does not exist"),
        (write(0, LabelId(4), &view(&good)), "label 4 is not planned in this step; planned: 0"),
        (cache.kv.layer_view(9).err().unwrap(), "layer 9 does not exist"),
    ] {
        assert!(error.message().contains(said) && !error.message().contains('\n'), "{error}");
    }
}

#[test]
fn a_refused_admit_changes_nothing() {
    let cache = cache(4, 4, 16);
    (0..3).for_each(|slot| cache.ingest(slot));
    run(&cache, &Step::new(1, &[(0, 0, 5)]), &count(0, 5));
    let before = cache.resource.inspect();
    let too_much = Step::new(2, &[(0, 0, 3), (1, 0, 5), (2, 1, 2)]);
    let outcome = cache.admit(&too_much);
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!((outcome.request_id(), outcome.label()), (rid(2), LabelId(1)));
    assert_eq!(outcome.amounts(), (3, 2));
    assert_eq!(cache.resource.inspect(), before);
    // The pages go to the next step in the order in which they would have gone without it.
    let step = Step::new(3, &[(1, 0, 8)]);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    assert_eq!(plan.open::<KvPlan>().unwrap().pages(0, 4), [3, 4]);
}

#[test]
fn rolling_back_gives_back_in_the_same_order_and_only_once() {
    let cache = cache(4, 6, 24);
    cache.ingest(0);
    cache.ingest(1);
    run(&cache, &Step::new(1, &[(0, 0, 6)]), &count(0, 6));
    for id in 2..4 {
        let step = Step::new(id, &[(0, 0, 4), (1, 0, 8), (1, 5, 1)]);
        assert!(cache.admit(&step).is_ready());
        assert!(cache.admit(&step).is_ready(), "a second time takes nothing more");
        assert_eq!(cache.kv.free_pages(), 0);
        let plan = cache.plan(&step).unwrap();
        let plan = plan.open::<KvPlan>().unwrap();
        assert_eq!(
            (plan.pages(0, 4), plan.pages(1, 4), plan.pages(2, 4)),
            (&[1, 2, 3][..], &[4, 5][..], &[6][..])
        );
        cache.rollback(&step);
        cache.rollback(&step);
        assert_eq!((cache.kv.free_pages(), cache.len(0, 0)), (4, 6));
        cache.conserved();
    }
    assert_eq!(contents(&cache, 9, 0, 0), count(0, 6));
    let step = Step::new(10, &[(0, 0, 1)]);
    run(&cache, &step, &[6.0]);
    cache.rollback(&step);
    assert_eq!((cache.kv.free_pages(), cache.len(0, 0)), (4, 7), "committed: nothing to roll back");
}

#[test]
fn a_rollback_after_its_request_went_frees_nothing_twice() {
    for planned in [false, true] {
        let cache = cache(4, 6, 24);
        (0..2).for_each(|slot| cache.ingest(slot));
        run(&cache, &Step::new(1, &[(0, 0, 3), (1, 0, 3)]), &count(0, 6));
        let step = Step::new(2, &[(0, 0, 5), (1, 0, 5)]);
        assert!(cache.admit(&step).is_ready());
        if planned {
            cache.plan(&step).unwrap();
        }
        cache.resource.remove_request(rid(0)).unwrap();
        cache.conserved();
        // The slot's next owner has pages by then, perhaps the very same.
        let next = RequestId::new(0, 2);
        cache.resource.ingest_request(next, &RequestOverrides::new("", &[], 0)).unwrap();
        let mut own = Step::new(3, &[(0, 0, 7)]);
        own.request[0] = next;
        run(&cache, &own, &count(20, 27));
        let free = cache.kv.free_pages();
        cache.rollback(&step);
        cache.rollback(&step);
        cache.conserved();
        assert_eq!(cache.kv.free_pages(), free + 1, "the page of the one that is still there");
        assert_eq!(cache.kv.stream_len(next, MAIN).unwrap(), 7);
        assert_eq!(contents(&cache, 4, 1, 0), count(3, 6));
    }
}

#[test]
fn plans_of_two_slots_lie_apart_and_stay_where_they_are() {
    let cache = cache(4, 40, 40);
    (0..4).for_each(|slot| cache.ingest(slot));
    let mut places = std::collections::BTreeMap::new();
    for id in 1..=24u64 {
        // Wide and narrow steps take turns; the widest comes first in each slot.
        let rows: Vec<_> =
            (0..if id <= 2 { 4 } else { 1 + id as u32 % 4 }).map(|s| (s, 0, 1)).collect();
        let step = Step { slot: (id % 2) as u32, ..Step::new(id, &rows) };
        assert!(cache.admit(&step).is_ready());
        let filed = cache.plan(&step).unwrap();
        let plan = filed.open::<KvPlan>().unwrap();
        assert_eq!((plan.len.len(), plan.write_page.len()), (rows.len(), rows.len()));
        let columns =
            [&plan.seat, &plan.start, &plan.span, &plan.len, &plan.write_page, &plan.write_slot];
        let at = columns.map(|column| column.as_ptr() as usize);
        assert_eq!(*places.entry(step.slot).or_insert(at), at, "step {id}");
        cache.write(&step, filed, MAIN, &vec![id as f32; rows.len()]);
        cache.commit(&step).unwrap();
    }
    assert!(places[&0].iter().all(|at| !places[&1].contains(at)));
}

#[test]
fn a_step_that_was_given_up_without_a_word_does_not_count_twice() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    for id in 1..20 {
        assert!(cache.admit(&Step::new(id, &[(0, 0, 4)])).is_ready());
        assert_eq!(cache.kv.free_pages(), 3);
    }
}

#[test]
fn what_can_never_fit_is_refused_for_good() {
    let cache = cache(4, 3, 40);
    cache.ingest(0);
    for (span, said) in
        [(41, "over `max_seq_len` = 40"), (13, "the whole pool has 3"), (u32::MAX, "over")]
    {
        let outcome = cache.admit(&Step::new(1, &[(0, 0, span)]));
        assert_eq!(outcome.reason(), FailureReason::RUNTIME_ERROR);
        assert!(outcome.message().contains(said), "{}", outcome.message());
    }
    assert_eq!(cache.admit(&Step::new(2, &[(9, 0, 1)])).reason(), FailureReason::RUNTIME_ERROR);
    assert!(cache.admit(&Step::new(3, &[(0, 0, 12)])).is_ready());
}

#[test]
fn padding_rows_use_the_sink_and_take_nothing() {
    let cache = cache(4, 2, 16);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 7)]), &count(0, 7));
    // The pool is full, as in the case of a replay whose batch is smaller than its bucket.
    let mut step = Step::new(2, &[(0, 0, 1)]);
    for (pad, span) in [(0, 1), (1, 1), (2, 0)] {
        step.request.push(RequestId::padding(pad));
        step.label.push(MAIN);
        step.span.push(span);
    }
    assert!(cache.admit(&step).is_ready());
    let filed = cache.plan(&step).unwrap();
    let plan = filed.open::<KvPlan>().unwrap();
    assert_eq!(plan.len[..], [8, 1, 1, 1]);
    assert_eq!(plan.write_page[1..], [0, 0]);
    for padding in 1..4 {
        assert_eq!((plan.pages(padding, 4), plan.last_page_len[padding]), (&[0][..], 1));
    }
    cache.write(&step, filed, MAIN, &[7.0, 500.0, 501.0]);
    cache.commit(&step).unwrap();
    assert_eq!(contents(&cache, 3, 0, 0), count(0, 8));
}

#[test]
fn a_label_that_nobody_opened_reads_as_empty_and_stays_closed() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    let before = cache.resource.inspect();
    let step = Step::new(1, &[(0, 3, 0), (9, 0, 0)]);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    let plan = plan.open::<KvPlan>().unwrap();
    assert_eq!((&plan.len[..], &plan.last_page_len[..]), (&[0, 0][..], &[0, 0][..]));
    assert!(plan.pages(0, 4).is_empty());
    cache.commit(&step).unwrap();
    assert_eq!(cache.resource.inspect(), before);
}

#[test]
fn a_step_without_commit_overwrites_its_span() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 3)]), &count(0, 3));
    for (id, value) in [(2, 50.0), (3, 60.0)] {
        let options = KvStepOptions { commit: false, ..Default::default() };
        run(&cache, &Step::new(id, &[(0, 0, 4)]).with(options), &[value; 4]);
        assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (3, 2));
    }
    assert!(cache.kv.correct_len(rid(0), MAIN, 2).is_ok(), "the mark is cleared");
    run(&cache, &Step::new(4, &[(0, 0, 2)]), &[7.0, 8.0]);
    assert_eq!(contents(&cache, 5, 0, 0), [0.0, 1.0, 7.0, 8.0]);
}

#[test]
fn ingest_remove_and_reset_may_be_repeated() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 6)]), &count(0, 6));
    cache.ingest(0);
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (6, 2));
    cache.resource.reset_request(rid(0), false).unwrap();
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (0, 2), "keeps its pages");
    run(&cache, &Step::new(2, &[(0, 0, 5)]), &count(10, 15));
    assert_eq!(contents(&cache, 3, 0, 0), count(10, 15));
    cache.resource.reset_request(rid(0), true).unwrap();
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (0, 4));
    for unknown in [rid(9), RequestId::new(0, 7), RequestId::padding(3)] {
        cache.resource.reset_request(unknown, true).unwrap();
        cache.resource.remove_request(unknown).unwrap();
    }
    run(&cache, &Step::new(4, &[(0, 0, 4)]), &count(0, 4));
    // The slot's next owner: late copies of the old id find nothing, and it replaces what is left.
    let next = RequestId::new(0, 2);
    cache.resource.ingest_request(next, &RequestOverrides::new("", &[], 0)).unwrap();
    cache.resource.ingest_request(rid(0), &RequestOverrides::new("", &[], 0)).unwrap();
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (0, 4));
    cache.conserved();
}

#[test]
fn a_request_removed_in_mid_step_leaves_nothing_behind() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    cache.ingest(1);
    let step = Step::new(1, &[(0, 0, 5), (1, 0, 2)]);
    assert!(cache.admit(&step).is_ready());
    cache.resource.remove_request(rid(0)).unwrap();
    let filed = cache.plan(&step).unwrap();
    let plan = filed.open::<KvPlan>().unwrap();
    assert_eq!(plan.write_page[..5], [0; 5]);
    cache.write(&step, filed, MAIN, &[9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0]);
    cache.commit(&step).unwrap();
    cache.conserved();
    assert_eq!((cache.kv.free_pages(), cache.len(1, 0)), (3, 2));
    assert_eq!(contents(&cache, 2, 1, 0), [1.0, 2.0]);
}

#[test]
fn a_fork_before_and_one_after_the_step() {
    let cache = cache(4, 12, 40);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 5)]), &count(0, 5));
    let options = KvStepOptions {
        pre_forks: list(&[fork(0, 0, 1)]),
        post_forks: list(&[fork(0, 0, 2)]),
        ..Default::default()
    };
    let step = Step::new(2, &[(0, 0, 4), (0, 1, 1)]).with(options);
    assert!(cache.admit(&step).is_ready());
    let filed = cache.plan(&step).unwrap();
    let plan = filed.open::<KvPlan>().unwrap();
    assert_eq!((&plan.start[..], &plan.len[..]), (&[5, 5][..], &[9, 6][..]));
    assert_eq!(plan.groups.len(), 2);
    assert!(plan.pages(0, 4).iter().all(|page| !plan.pages(1, 4).contains(page)));
    cache.write(&step, filed, MAIN, &count(5, 9));
    cache.write(&step, filed, LabelId(1), &[70.0]);
    assert_eq!(cache.history(plan, 1), [0.0, 1.0, 2.0, 3.0, 4.0, 70.0]);
    cache.commit(&step).unwrap();
    cache.conserved();
    assert_eq!(contents(&cache, 3, 0, 0), count(0, 9));
    assert_eq!(contents(&cache, 4, 0, 1), [0.0, 1.0, 2.0, 3.0, 4.0, 70.0]);
    assert_eq!(contents(&cache, 5, 0, 2), count(0, 9));
    assert_eq!(cache.kv.free_pages(), 12 - 3 - 2 - 3);
}

#[test]
fn an_abandoned_fork_leaves_its_target_as_it_was() {
    let cache = cache(4, 12, 40);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 5)]), &count(0, 5));
    let step = Step::new(2, &[(0, 1, 3)]);
    assert!(cache.admit(&step).is_ready());
    let filed = cache.plan(&step).unwrap();
    cache.write(&step, filed, LabelId(1), &[20.0, 21.0, 22.0]);
    cache.commit(&step).unwrap();
    let free = cache.kv.free_pages();
    for (id, preplan, planned) in [(3, false, true), (4, true, true), (5, true, false)] {
        let options = KvStepOptions {
            pre_forks: list(&[fork(0, 0, 1), fork(0, 0, 9)]),
            ..Default::default()
        };
        let step = Step { preplan, ..Step::new(id, &[(0, 1, 1), (0, 9, 1)]).with(options) };
        assert!(cache.admit(&step).is_ready());
        if planned {
            cache.plan(&step).unwrap();
        }
        match preplan {
            true => cache.resource.clear_preplan(Some(StepId(id))).unwrap(),
            false => cache.rollback(&step),
        }
        assert_eq!((cache.len(0, 1), cache.kv.free_pages()), (3, free));
        assert!(!cache.resource.inspect().contains("label9"), "no invented label remains");
        assert_eq!(contents(&cache, 10 + id, 0, 1), [20.0, 21.0, 22.0]);
        cache.conserved();
    }
}

#[test]
fn a_fork_can_be_refused_and_an_absent_source_is_empty() {
    let cache = cache(4, 4, 16);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 9)]), &count(0, 9));
    let pre =
        |from, to| KvStepOptions { pre_forks: list(&[fork(0, from, to)]), ..Default::default() };
    let outcome = cache.admit(&Step::new(2, &[]).with(pre(0, 1)));
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!(outcome.amounts(), (3, 1));
    run(&cache, &Step::new(3, &[]).with(pre(8, 0)), &[]);
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (0, 4));
    let itself = Step::new(4, &[]).with(pre(1, 1));
    assert!(itself.call(&[], |s, c| cache.resource.admit(s, c)).is_err());
}

#[test]
fn a_combined_label_has_its_sources_rows_one_after_the_other() {
    let cache = cache(4, 8, 16);
    cache.ingest(0);
    cache.ingest(1);
    let source = |label| CombinedLabel { combined: LabelId(9), source: LabelId(label) };
    let options =
        KvStepOptions { combined_labels: list(&[source(1), source(0)]), ..Default::default() };
    let rows = [(0, 0, 1), (0, 1, 2), (0, 2, 1), (1, 0, 3), (1, 1, 1)];
    let step = Step::new(1, &rows).with(options);
    assert!(cache.admit(&step).is_ready());
    let filed = cache.plan(&step).unwrap();
    let plan = filed.open::<KvPlan>().unwrap();
    let labels: Vec<u32> = plan.groups.iter().map(|g| g.label.0).collect();
    assert_eq!(labels, [9, 2]);
    assert_eq!(plan.span[..], [2, 1, 1, 3, 1]);
    assert_eq!(plan.token_start[..], [0, 2, 3, 4, 0]);
    assert_eq!(plan.request[..], [rid(0), rid(1), rid(0), rid(1), rid(0)]);
    assert_eq!((plan.groups[1].first_row, plan.groups[1].first_token), (4, 7));
    cache.write(&step, filed, LabelId(9), &count(0, 7));
    let found: Vec<Vec<f32>> = (0..4).map(|r| cache.history(plan, r)).collect();
    assert_eq!(found, [count(0, 2), count(2, 3), count(3, 4), count(4, 7)]);
}

#[test]
fn labels_that_cannot_be_planned_together_are_not_admitted() {
    let cache = cache(4, 8, 16);
    cache.ingest(0);
    let combine = |pairs: &[(u32, u32)]| {
        let one = |&(combined, source): &(u32, u32)| CombinedLabel {
            combined: LabelId(combined),
            source: LabelId(source),
        };
        let all: Vec<_> = pairs.iter().map(one).collect();
        KvStepOptions { combined_labels: list(&all), ..Default::default() }
    };
    for (pairs, said) in [
        (&[(9, 0), (9, 0)][..], "is part of two combined labels, or twice"),
        (&[(9, 0), (8, 0)][..], "is part of two combined labels, or twice"),
        (&[(1, 0)][..], "label 1 has rows of its own and is a combined label"),
    ] {
        let step = Step::new(1, &[(0, 0, 3), (0, 1, 5)]).with(combine(pairs));
        let e = step.call(&[], |s, c| cache.resource.admit(s, c)).unwrap_err();
        assert!(e.message().contains(said), "{e}");
        assert_eq!(cache.kv.free_pages(), 8);
        cache.conserved();
    }
    // A staged step that combined other labels is another step.
    let mut staged = Step::new(2, &[(0, 0, 3), (0, 1, 5)]).with(combine(&[(9, 0), (9, 1)]));
    staged.preplan = true;
    assert!(cache.admit(&staged).is_ready());
    cache.plan(&staged).unwrap();
    let plain = Step::new(2, &[(0, 0, 3), (0, 1, 5)]);
    assert!(cache.admit(&plain).is_ready());
    let filed = cache.plan(&plain).unwrap();
    let plan = filed.open::<KvPlan>().unwrap();
    assert_eq!(plan.groups.iter().map(|g| g.label.0).collect::<Vec<_>>(), [0, 1]);
    cache.commit(&plain).unwrap();
    assert_eq!((cache.len(0, 0), cache.len(0, 1)), (3, 5));
}

#[test]
fn a_staged_step_builds_on_the_one_in_flight() {
    let cache = cache(4, 8, 32);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 3)]), &count(0, 3));
    let running = Step::new(2, &[(0, 0, 1)]);
    assert!(cache.admit(&running).is_ready());
    let running_plan = cache.plan(&running).unwrap();
    let mut staged = Step { preplan: true, slot: 1, ..Step::new(3, &[(0, 0, 1)]) };
    assert!(cache.admit(&staged).is_ready());
    let ahead = cache.plan(&staged).unwrap();
    assert_eq!(ahead.open::<KvPlan>().unwrap().start[0], 4);
    cache.write(&running, running_plan, MAIN, &[3.0]);
    cache.commit(&running).unwrap();
    assert_eq!(cache.len(0, 0), 4);
    staged.preplan = false;
    assert!(cache.admit(&staged).is_ready());
    let plan = cache.plan(&staged).unwrap();
    let (plan_ref, ahead) = (plan.open::<KvPlan>().unwrap(), ahead.open::<KvPlan>().unwrap());
    assert!(std::ptr::eq(plan_ref, ahead), "promoted, not planned again");
    cache.write(&staged, plan, MAIN, &[4.0]);
    cache.commit(&staged).unwrap();
    assert!(cache.commit(&staged).is_err(), "commits exactly once");
    assert_eq!(contents(&cache, 4, 0, 0), count(0, 5));
    cache.conserved();
}

#[test]
fn another_step_drops_the_stage_without_trace() {
    let cache = cache(4, 8, 32);
    cache.ingest(0);
    cache.ingest(1);
    run(&cache, &Step::new(1, &[(0, 0, 4)]), &count(0, 4));
    let before = cache.resource.inspect();
    for (id, planned) in [(2, true), (4, false)] {
        let staged = Step { preplan: true, slot: 1, ..Step::new(id, &[(0, 0, 1), (0, 3, 2)]) };
        assert!(cache.admit(&staged).is_ready());
        if planned {
            cache.plan(&staged).unwrap();
        }
        assert!(cache.commit(&staged).is_err(), "it was never promoted");
        let other = Step::new(id + 1, &[(1, 0, 0)]);
        assert!(cache.admit(&other).is_ready());
        cache.rollback(&other);
        assert_eq!(cache.resource.inspect(), before);
        cache.resource.clear_preplan(Some(StepId(id))).unwrap();
        cache.conserved();
    }
    // The page that the stage gave back may be another stream's now, and its own table must notice.
    run(&cache, &Step::new(6, &[(1, 0, 1)]), &[99.0]);
    let step = Step { slot: 1, ..Step::new(7, &[(0, 0, 1)]) };
    run(&cache, &step, &[4.0]);
    assert_eq!(contents(&cache, 8, 0, 0), count(0, 5));
    assert_eq!(contents(&cache, 9, 1, 0), [99.0]);
}

#[test]
fn a_stage_waits_where_the_step_in_flight_rewrites_its_stream() {
    let cache = cache(4, 8, 32);
    cache.ingest(0);
    let options = KvStepOptions { post_forks: list(&[fork(0, 0, 1)]), ..Default::default() };
    let running = Step::new(1, &[(0, 0, 4)]).with(options);
    assert!(cache.admit(&running).is_ready());
    cache.plan(&running).unwrap();
    let staged = Step { preplan: true, slot: 1, ..Step::new(2, &[(0, 1, 1)]) };
    assert_eq!(cache.admit(&staged).reason(), FailureReason::ADMISSION_DEFERRED);
    let other = Step { preplan: true, slot: 1, ..Step::new(3, &[(0, 0, 1)]) };
    assert!(cache.admit(&other).is_ready(), "its source only grows");
    cache.commit(&running).unwrap();
    assert!(cache.admit(&staged).is_ready());
}

#[test]
fn retention_keeps_the_window_and_the_protected_prefix() {
    let cache = cache(4, 12, 48);
    cache.ingest(0);
    let keep = |protected_prefix| KvStepOptions {
        retention: list(&[Retention {
            request_id: rid(0),
            label: MAIN,
            context_budget: 6,
            protected_prefix,
        }]),
        ..Default::default()
    };
    let mut reference = Vec::new();
    for id in 0..40 {
        let step = Step::new(id, &[(0, 0, 1)]).with(keep(if id < 5 { 0 } else { 5 }));
        run(&cache, &step, &[id as f32]);
        reference.push(id as f32);
        // Written anew from the rule: pages wholly between the prefix and the window go.
        let prefix = if id < 5 { 0 } else { 5 };
        let first = usize::div_ceil(prefix, 4) * 4;
        while reference.len() - prefix >= 6 + 4 && reference.len() - first > 4 {
            reference.drain(first..first + 4);
        }
        assert_eq!(cache.len(0, 0) as usize, reference.len());
    }
    assert_eq!(contents(&cache, 100, 0, 0), reference);
    assert!(reference.len() < 5 + 6 + 4 + 4 && reference[..5] == count(0, 5));
    let changed = Step::new(101, &[(0, 0, 1)]).with(keep(4));
    assert!(changed.call(&[], |s, c| cache.resource.admit(s, c)).is_err());
    cache.conserved();
}

#[test]
fn a_step_that_is_not_kept_releases_nothing_and_only_what_is_there_is_protected() {
    let cache = cache(4, 12, 48);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 20)]), &count(0, 20));
    let keep = |commit, protected_prefix| {
        let window =
            Retention { request_id: rid(0), label: MAIN, context_budget: 4, protected_prefix };
        KvStepOptions { commit, retention: list(&[window]), ..Default::default() }
    };
    run(&cache, &Step::new(2, &[(0, 0, 1)]).with(keep(false, 0)), &[20.0]);
    assert_eq!(cache.len(0, 0), 20);
    let early = Step::new(3, &[(0, 0, 1)]).with(keep(true, 22));
    assert!(early.call(&[], |s, c| cache.resource.admit(s, c)).is_err(), "22 tokens of 21");
    run(&cache, &Step::new(4, &[(0, 0, 1)]), &[20.0]);
    assert_eq!(contents(&cache, 5, 0, 0), count(0, 21), "no policy, nothing released");
    run(&cache, &Step::new(6, &[(0, 0, 1)]).with(keep(true, 0)), &[21.0]);
    assert_eq!(contents(&cache, 7, 0, 0), count(16, 22));
    // The window is kept before another stream, an empty one, is copied over it.
    let both = KvStepOptions { post_forks: list(&[fork(0, 1, 0)]), ..keep(true, 2) };
    run(&cache, &Step::new(8, &[(0, 0, 1)]).with(both), &[22.0]);
    assert_eq!(cache.len(0, 0), 0);
    cache.conserved();
}

#[test]
fn streams_can_be_trimmed_and_rewound_between_steps_only() {
    let cache = cache(4, 12, 48);
    cache.ingest(0);
    run(&cache, &Step::new(1, &[(0, 0, 18)]), &count(0, 18));
    cache.kv.protect_prefix(rid(0), MAIN, 3).unwrap();
    assert!(cache.kv.protect_prefix(rid(0), MAIN, 4).is_err());
    assert_eq!(cache.kv.release_oldest(rid(0), MAIN, 11).unwrap(), 8);
    let kept = [count(0, 4), count(12, 18)].concat();
    assert_eq!(contents(&cache, 2, 0, 0), kept);
    let step = Step::new(3, &[(0, 0, 1)]);
    assert!(cache.admit(&step).is_ready());
    assert!(cache.kv.release_oldest(rid(0), MAIN, 1).is_err());
    assert!(cache.kv.correct_len(rid(0), MAIN, 5).is_err());
    cache.rollback(&step);
    cache.kv.correct_len(rid(0), MAIN, 5).unwrap();
    assert_eq!((cache.len(0, 0), cache.kv.free_pages()), (5, 10));
    assert!(cache.kv.correct_len(rid(0), MAIN, 6).is_err());
    assert!(cache.kv.correct_len(rid(0), MAIN, 2).is_err(), "protected");
    run(&cache, &Step::new(4, &[(0, 0, 4)]), &count(30, 34));
    assert_eq!(contents(&cache, 5, 0, 0), [&kept[..5], &count(30, 34)[..]].concat());
    assert!(cache.kv.has_room(rid(0), MAIN, 39).unwrap());
    assert!(!cache.kv.has_room(rid(0), MAIN, 40).unwrap());
    cache.conserved();
}

#[test]
fn a_plan_must_be_of_what_was_admitted() {
    let cache = cache(4, 8, 32);
    cache.ingest(0);
    let step = Step::new(1, &[(0, 0, 2)]);
    assert!(cache.plan(&step).err().unwrap().message().contains("without having been admitted"));
    assert!(cache.commit(&step).is_err());
    assert!(cache.admit(&step).is_ready());
    let other = Step::new(1, &[(0, 0, 3)]);
    assert!(cache.plan(&other).err().unwrap().message().contains("not planned as it was admitted"));
    let twice = Step::new(2, &[(0, 0, 1), (0, 0, 1)]);
    assert!(twice.call(&[], |s, c| cache.resource.admit(s, c)).is_err());
    assert!(cache.admit(&other).is_ready(), "what was admitted may be admitted otherwise");
    assert_eq!(cache.kv.free_pages(), 7);
}

#[test]
fn seats_stay_and_each_slot_catches_up_with_its_own_last_use() {
    let cache = cache(2, 64, 32);
    (0..4).for_each(|slot| cache.ingest(slot));
    let mut lengths = [0u32; 4];
    let mut seats = [None; 4];
    for id in 0..45u64 {
        let rows: Vec<(u32, u32, u32)> =
            (0..4).filter(|s| (id + u64::from(*s)) % 3 != 0).map(|s| (s, 0, 1)).collect();
        let step = Step { slot: (id % 2) as u32 + 3, ..Step::new(id, &rows) };
        assert!(cache.admit(&step).is_ready());
        let filed = cache.plan(&step).unwrap();
        let plan = filed.open::<KvPlan>().unwrap();
        let values: Vec<f32> =
            rows.iter().map(|r| (r.0 * 100 + lengths[r.0 as usize]) as f32).collect();
        cache.write(&step, filed, MAIN, &values);
        for (i, &(slot, ..)) in rows.iter().enumerate() {
            let seat = *seats[slot as usize].get_or_insert(plan.seat[i]);
            assert_eq!(plan.seat[i], seat);
            lengths[slot as usize] += 1;
            let want = count(slot * 100, slot * 100 + lengths[slot as usize]);
            assert_eq!(cache.history(plan, i), want);
        }
        cache.commit(&step).unwrap();
    }
}

#[test]
fn facts_describe_the_geometry() {
    let cache = cache(4, 10, 40);
    let facts = cache.resource.describe();
    let facts = facts[0].open::<KvFacts>().unwrap();
    assert_eq!((facts.num_layers, facts.num_kv_heads, facts.head_dim), (2, 2, 4));
    assert_eq!((facts.num_pages, facts.page_size, facts.max_seq_len), (11, 4, 40));
    assert_eq!((facts.slot_stride, facts.head_stride, facts.kv_stride), (4, 16, 32));
    assert_eq!((facts.layer_stride, facts.page_stride), (64, 128));
    let view = cache.kv.layer_view(1).unwrap();
    assert_eq!(view.v.shape(), [11, 4, 2, 4]);
    assert_eq!(view.v.raw().byte_offset, (64 + 32) * 4);
    let _: TypedRef<'_> = cache.resource.describe()[0];
}

#[test]
fn a_page_waits_until_the_last_step_that_may_access_it_has_completed() {
    let host = TestHost::new(1, 1 << 20);
    let settings = r#""pages": 4, "page_size": 4, "max_seq_len": 16, "dtype": "f32""#;
    let cache = cache_on(host.handle(), settings, 4);
    (0..2).for_each(|slot| cache.ingest(slot));
    host.0.completed.store(0, Ordering::Relaxed);
    run(&cache, &Step::new(5, &[(0, 0, 9)]), &count(0, 9));
    cache.resource.remove_request(rid(0)).unwrap();
    cache.conserved();
    assert_eq!(cache.kv.free_pages(), 3);
    let step = Step::new(6, &[(1, 0, 1)]);
    assert_eq!(cache.admit(&step).reason(), FailureReason::ADMISSION_DEFERRED);
    host.0.completed.store(5, Ordering::Relaxed);
    assert!(cache.admit(&step).is_ready());
    cache.conserved();
}

#[test]
fn memory_comes_from_the_engines_budget_and_goes_back() {
    let host = TestHost::new(1, 1 << 20);
    // A page of 4 tokens is 512 bytes; 80% of 1 MiB is 1,638 of them.
    let settings = r#""memory": "80%", "page_size": 4, "dtype": "f32""#;
    let cache = cache_on(host.handle(), settings, 4);
    assert_eq!(cache.kv.free_pages(), 1637);
    assert_eq!(host.0.free.load(Ordering::Relaxed), (1 << 20) - 1638 * 512);
    drop(cache);
    assert_eq!(host.0.free.load(Ordering::Relaxed), 1 << 20);
    let error = try_cache_on(host.handle(), r#""pages": 5000, "page_size": 4, "dtype": "f32""#);
    assert!(error.err().unwrap().message().contains("[resources.main_kv]: no memory"));
    assert_eq!(host.0.free.load(Ordering::Relaxed), 1 << 20);
}

#[test]
fn threads_write_what_one_thread_writes() {
    let host = TestHost::new(3, 1 << 30);
    let settings = r#""pages": 600, "page_size": 16, "max_seq_len": 9000, "dtype": "f32""#;
    let cache = cache_on(host.handle(), settings, 16);
    cache.ingest(0);
    let mut step = Step::new(1, &[(0, 0, 8197)]);
    step.request.push(RequestId::padding(0));
    step.label.push(MAIN);
    step.span.push(40);
    assert!(cache.admit(&step).is_ready());
    let plan = cache.plan(&step).unwrap();
    cache.write(&step, plan, MAIN, &count(0, 8237));
    cache.commit(&step).unwrap();
    assert!(host.0.parallel.load(Ordering::Relaxed) > 0);
    assert_eq!(contents(&cache, 2, 0, 0), count(0, 8197));
}
