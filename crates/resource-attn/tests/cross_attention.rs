//! Kind `cross_attention` against a float64 reference.

mod common;

use common::*;
use resource_api::*;
use resource_attn::{AttentionPlan, PagedCrossAttention};
use std::sync::Arc;

fn cross(config: &Config, cache: &Arc<FakeCache>, query_kv_cache: bool) -> BuiltResource {
    let mut settings: serde_json::Value = serde_json::from_str(&settings(config)).unwrap();
    if query_kv_cache {
        settings["query_kv_cache"] = "kv".into();
    }
    let spec = spec("cross", "cross_attention", settings.to_string());
    build_resource::<PagedCrossAttention>(&spec, &info(cache, config.threads)).unwrap()
}

/// Runs a step and checks every query of label main against its request's context.
fn check_step(config: &Config, streams: &[Stream], query_kv_cache: bool) {
    let cache = Arc::new(FakeCache::new(config, streams));
    let built = cross(config, &cache, query_kv_cache);
    let cross: CrossAttentionHandle = built.capabilities[0].open().unwrap();
    let q = queries(config, streams, LabelId::MAIN);
    let width = config.heads * config.head_dim;
    let shape = [q.len() / width, config.heads, config.head_dim];
    let mut out = vec![f32::NAN; q.len()];
    with_step(None, &cache, &built.resource, streams, |ctx| {
        let q = TensorView::from_slice(&q, &shape);
        let mut out = TensorViewMut::from_slice(&mut out, &shape);
        cross.run(ctx, LAYERS as u32 - 1, LabelId::MAIN, &q, &mut out).unwrap();
    })
    .unwrap();
    let mut rows = q.chunks(width).zip(out.chunks(width));
    for stream in streams.iter().filter(|s| s.label == LabelId::MAIN) {
        let context = streams.iter().find(|s| s.label == CONTEXT && s.request == stream.request);
        for _ in 0..stream.span {
            let (q, out) = rows.next().unwrap();
            let want = match context {
                Some(context) if !stream.request.is_padding() => {
                    reference(config, q, context, 0, context.len())
                }
                _ => vec![0.0; width],
            };
            for (&got, want) in out.iter().zip(want) {
                assert!((f64::from(got) - want).abs() < 2e-5, "{got} is not {want}; {config:?}");
            }
        }
    }
}

/// Queries of three requests, one without a token, and their contexts in another order; one
/// context is empty, as is that of a padding row.
fn streams() -> Vec<Stream> {
    let pad = Stream { label: CONTEXT, span: 0, ..Stream::padding(0) };
    let alone =
        |request: u32, stream: Stream| Stream { request: RequestId::new(request, 1), ..stream };
    vec![
        alone(1, Stream::new(21, 5, 1)),
        alone(2, Stream::new(22, 0, 7)),
        alone(3, Stream::new(23, 9, 2)),
        alone(4, Stream::new(24, 3, 0)),
        Stream::padding(0),
        alone(3, Stream::context(33, 0)),
        alone(1, Stream::context(31, 17)),
        alone(2, Stream::context(32, 600)),
        pad,
    ]
}

#[test]
fn queries_see_their_requests_whole_context() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8] {
        for query_kv_cache in [false, true] {
            for threads in [1, 3] {
                let config = Config { causal: false, dtype, threads, ..Config::default() };
                check_step(&config, &streams(), query_kv_cache);
                let scaled = Config { scale: Some(0.7), head_dim: 80, ..config };
                check_step(&scaled, &streams(), query_kv_cache);
            }
        }
    }
}

#[test]
fn a_step_that_writes_the_context_may_read_it() {
    let config = Config { causal: false, ..Config::default() };
    let context = Stream { start: 0, span: 20, ..Stream::context(5, 0) };
    check_step(&config, &[context, Stream::new(5, 0, 3)], true);
    check_step(&config, &[context, Stream::new(5, 0, 3)], false);
}

#[test]
fn queries_without_a_context_segment_are_refused_by_name() {
    let config = Config::default();
    let plan = |streams: &[Stream]| {
        let cache = Arc::new(FakeCache::new(&config, streams));
        let built = cross(&config, &cache, false);
        with_step(None, &cache, &built.resource, streams, |_| ())
    };
    let e = plan(&[Stream::new(1, 0, 2)]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::WRONG_STATE);
    assert_eq!(
        e.to_string(),
        "r1.1 has queries but no segment of label `context` in `kv` (planned labels: main); give it \
         one of span 0"
    );
    let e = plan(&[Stream::new(1, 0, 2), Stream::context(2, 4)]).unwrap_err();
    assert!(e.to_string().contains("planned labels: main, context"), "{e}");
    // No query, no need.
    plan(&[Stream::new(1, 4, 0)]).unwrap();
    plan(&[Stream { start: 0, span: 9, ..Stream::context(2, 0) }]).unwrap();
    plan(&[Stream::padding(3)]).unwrap();
}

#[test]
fn steps_with_the_same_queries_and_contexts_are_laid_out_once() {
    let config = Config::default();
    let decode = |position| [Stream::new(1, position, 1), Stream::context(1, 40)];
    let cache = Arc::new(FakeCache::new(&config, &decode(7)));
    let built = cross(&config, &cache, false);
    let layouts = |streams: &[Stream]| {
        with_step(None, &cache, &built.resource, streams, |ctx| {
            ctx.plan_result::<AttentionPlan>(1).unwrap().layouts
        })
        .unwrap()
    };
    assert_eq!(layouts(&decode(7)), 1);
    assert_eq!(layouts(&decode(7)), 1);
    assert_eq!(layouts(&[Stream::new(1, 7, 2), Stream::context(1, 40)]), 2);
}

#[test]
fn dependencies_name_each_cache_once() {
    let kind = kind::<PagedCrossAttention>();
    let of = |settings: &str| kind.depends_on(spec("x", "cross_attention", settings.into()));
    assert_eq!(of(r#"{"kv_cache": "a"}"#).unwrap(), ["a"]);
    assert_eq!(of(r#"{"kv_cache": "a", "query_kv_cache": "a"}"#).unwrap(), ["a"]);
    assert_eq!(of(r#"{"kv_cache": "a", "query_kv_cache": "b"}"#).unwrap(), ["a", "b"]);
    assert_eq!(kind.provides(), ["cross_attention/1"]);
}
