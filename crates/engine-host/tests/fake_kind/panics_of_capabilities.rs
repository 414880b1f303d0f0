//! Panics in what resources offer: every method of every interface, the third party's included.

use resource_api::{
    Attention, AttentionHandle, Capability, CrossAttention, CrossAttentionHandle, DeviceColumn,
    HeadTurn, Interface, KvCache, KvCacheHandle, LabelId, LogitsProcessor, LogitsProcessorHandle,
    Positions, PositionsHandle, Resource, Sampled, Sampler, SamplerHandle, StepId, TensorView,
    TensorViewMut, Turning,
};
use resource_testkit::{Echo, EchoHandle};
use serde_json::json;

use crate::panics::{Answer, Calls, RID, check, failed, in_step, panicker, plain};

const MAIN: LabelId = LabelId::MAIN;

/// The capability `H` of a fresh panicker.
fn offered<H: Interface>() -> H {
    let built = panicker(json!({}));
    let found = built.capabilities.iter().find(|c| c.id() == H::ID);
    found.map(Capability::open).unwrap().unwrap()
}

/// Calls `f` with two tensors to write.
fn with_tensors(
    f: impl FnOnce(&mut TensorViewMut<'_>, &mut TensorViewMut<'_>) -> Answer,
) -> Answer {
    let (mut x, mut y) = ([0f32; 2], [0f32; 2]);
    let mut x = TensorViewMut::from_slice(&mut x, &[1, 2]);
    let mut y = TensorViewMut::from_slice(&mut y, &[1, 2]);
    f(&mut x, &mut y)
}

#[test]
fn every_method_of_a_cache_may_panic() {
    let calls: Calls<KvCacheHandle> = vec![
        ("write_kv", |c| {
            let data = [0f32; 2];
            let x = TensorView::from_slice(&data, &[1, 1, 2]);
            in_step(|_, ctx| failed(c.write_kv(ctx, 0, MAIN, &x, &x)))
        }),
        ("read_kv", |c| {
            with_tensors(|k, v| in_step(|_, ctx| failed(c.read_kv(ctx, 0, MAIN, k, v))))
        }),
        ("layer_view", |c| failed(c.layer_view(0))),
        ("stream_len", |c| failed(c.stream_len(RID, MAIN))),
        ("has_room", |c| failed(c.has_room(RID, MAIN, 1))),
        ("free_pages", |c| plain(c.free_pages())),
        ("protect_prefix", |c| failed(c.protect_prefix(RID, MAIN, 1))),
        ("release_oldest", |c| failed(c.release_oldest(RID, MAIN, 1))),
        ("correct_len", |c| failed(c.correct_len(RID, MAIN, 1))),
        ("write_turned", |c| {
            let data = [0f32; 2];
            let x = TensorView::from_slice(&data, &[1, 1, 2]);
            let (positions, phases) = (DeviceColumn::EMPTY, DeviceColumn::EMPTY);
            let turning = Turning { positions, phases, is_interleaved: false };
            let (q_norm, k_norm) = (DeviceColumn::EMPTY, DeviceColumn::EMPTY);
            let how = HeadTurn { turning, q_norm, k_norm, eps: 0.0 };
            with_tensors(|q, _| {
                in_step(|_, ctx| failed(c.write_turned(ctx, 0, MAIN, q, &x, &x, &how)))
            })
        }),
        ("assert_pages_conserved", |c| failed(c.assert_pages_conserved())),
        ("write_places", |c| in_step(|_, ctx| failed(c.write_places(ctx, MAIN)))),
    ];
    check("KvCache", offered, calls);
}

#[test]
fn every_method_of_attention_may_panic() {
    let calls: Calls<AttentionHandle> = vec![
        ("run", |a| {
            with_tensors(|q, out| in_step(|_, ctx| failed(a.run(ctx, 0, MAIN, &q.view(), out))))
        }),
        ("qo_indptr", |a| in_step(|_, ctx| failed(a.qo_indptr(ctx, MAIN, &mut [0; 2])))),
        ("select_last_hidden", |a| {
            with_tensors(|hidden, out| {
                in_step(|_, ctx| failed(a.select_last_hidden(ctx, MAIN, &hidden.view(), out)))
            })
        }),
        ("attending", |a| in_step(|_, ctx| failed(a.attending(ctx, 0, MAIN)))),
    ];
    check("Attention", offered, calls);
    let calls: Calls<CrossAttentionHandle> = vec![("run", |a| {
        with_tensors(|q, out| in_step(|_, ctx| failed(a.run(ctx, 0, MAIN, &q.view(), out))))
    })];
    check("CrossAttention", offered, calls);
}

#[test]
fn every_method_of_positions_may_panic() {
    let calls: Calls<PositionsHandle> = vec![
        ("apply_qk", |p| {
            with_tensors(|q, k| in_step(|_, ctx| failed(p.apply_qk(ctx, MAIN, q, k))))
        }),
        ("pos_ids", |p| in_step(|_, ctx| failed(p.pos_ids(ctx, MAIN)))),
        ("position", |p| failed(p.position(RID, MAIN))),
        ("apply_qk_layer", |p| {
            with_tensors(|q, k| in_step(|_, ctx| failed(p.apply_qk_layer(ctx, 0, MAIN, q, k))))
        }),
        ("turning", |p| in_step(|_, ctx| failed(p.turning(ctx, 0, MAIN)))),
    ];
    check("Positions", offered, calls);
}

#[test]
fn every_method_of_a_sampler_and_of_a_processor_may_panic() {
    let calls: Calls<SamplerHandle> = vec![
        ("sample", |s| {
            let mut out = [Sampled::default()];
            with_tensors(|logits, _| {
                in_step(|_, ctx| failed(s.sample(ctx, &[RID], logits, &mut out)))
            })
        }),
        ("top_logprobs", |s| {
            with_tensors(|logits, _| {
                failed(s.top_logprobs(&logits.view(), &mut [0; 1], &mut [0.0; 1]))
            })
        }),
        ("can_begin", |s| plain(s.can_begin(&[RID]))),
        ("begin_sample", |s| {
            with_tensors(|logits, tokens| {
                in_step(|_, ctx| failed(s.begin_sample(ctx, &[RID], logits, tokens)))
            })
        }),
        ("end_sample", |s| failed(s.end_sample(StepId(1), &mut [Sampled::default()]))),
    ];
    check("Sampler", offered, calls);
    let calls: Calls<LogitsProcessorHandle> = vec![
        ("process", |p| {
            with_tensors(|logits, _| in_step(|_, ctx| failed(p.process(ctx, &[RID], logits))))
        }),
        ("takes_device", |p| plain(p.takes_device())),
    ];
    check("LogitsProcessor", offered, calls);
}

#[test]
fn every_method_of_a_third_partys_interface_may_panic() {
    let calls: Calls<EchoHandle> = vec![
        ("echo", |e| failed(e.echo(&[1], None))),
        ("key", |e| plain(e.key())),
        ("peers", |e| plain(e.peers())),
        ("spread", |e| failed(e.spread(1, None))),
        ("start_job", |e| failed(e.start_job(false))),
        ("jobs_done", |e| plain(e.jobs_done())),
        ("graph_buffer", |e| failed(e.graph_buffer(0, 0))),
        ("twice", |e| failed(e.twice(&[1]))),
    ];
    check("Echo", offered, calls);
}

#[test]
fn a_panic_in_a_capability_puts_its_resource_out_of_use() {
    let built = panicker(json!({}));
    let cache: KvCacheHandle = built.capabilities[0].open().unwrap();
    assert_eq!(cache.free_pages(), 0);
    let e = built.resource.publish(RID).unwrap_err();
    assert_eq!(e.kind(), resource_api::ErrorKind::POISONED);
    assert_eq!(e.message(), "`p` panicked earlier and is out of use");
}
