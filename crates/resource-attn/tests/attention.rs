//! Kind `attention` against a float64 reference, over every shape of a step.

mod common;

use common::*;
use resource_api::*;
use std::sync::Arc;

fn check_all(config: &Config, streams: &[Stream]) {
    for (stream, outputs) in streams.iter().zip(attend(config, streams)) {
        check(config, stream, &outputs);
    }
}

/// Prefill, decode, zero-span and padding rows, around page ends.
fn mixed(page_size: u32) -> Vec<Stream> {
    vec![
        Stream::new(1, 0, 1),
        Stream::new(2, page_size - 1, 1),
        Stream::padding(0),
        Stream::new(3, 0, page_size + 1),
        Stream::new(4, page_size, 0),
        Stream::new(5, page_size, 1),
        Stream::new(6, 2 * page_size - 3, 5),
        Stream::new(7, 0, 0),
        Stream::new(8, 0, page_size - 1),
        Stream::padding(1),
    ]
}

#[test]
fn head_dims_types_and_head_ratios() {
    for head_dim in [33, 64, 80, 96, 128, 256] {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8] {
            for (heads, kv_heads) in [(2, 2), (6, 2), (8, 1)] {
                let config = Config { head_dim, dtype, heads, kv_heads, ..Config::default() };
                check_all(&config, &mixed(16));
            }
        }
    }
}

#[test]
fn page_sizes_and_strides() {
    for page_size in [1, 7, 16, 128, 512] {
        for slot_major in [false, true] {
            let streams = [Stream::new(1, 510, 4), Stream::new(2, 0, 300), Stream::new(3, 255, 1)];
            let config = Config { page_size, slot_major, head_dim: 16, ..Config::default() };
            check_all(&config, &streams);
            let small = [Stream::new(4, page_size - 1, 2), Stream::new(5, page_size, 1)];
            check_all(&config, &small);
        }
    }
}

#[test]
fn one_request_far_longer_than_the_rest() {
    for threads in [1, 2, 5] {
        let config = Config { threads, head_dim: 32, dtype: DType::BF16, ..Config::default() };
        let streams = [
            Stream::new(1, 3, 1),
            Stream::new(2, 3000, 1),
            Stream::new(3, 0, 2),
            Stream::new(4, 2000, 3),
        ];
        check_all(&config, &streams);
    }
}

#[test]
fn windows_scales_and_caps() {
    for window in [1, 2, 15, 16, 17, 256, 300, 5000] {
        let streams = [Stream::new(1, 0, 40), Stream::new(2, 600, 3), Stream::new(3, 255, 2)];
        let config = Config { window: Some(window), head_dim: 16, ..Config::default() };
        check_all(&config, &streams);
        check_all(&Config { causal: false, ..config }, &streams);
    }
    for (scale, softcap) in [(Some(1.0), None), (None, Some(0.5)), (Some(0.3), Some(20.0))] {
        check_all(&Config { scale, softcap, ..Config::default() }, &mixed(16));
    }
}

#[test]
fn a_window_leaves_out_the_layers_that_are_named() {
    let streams = [Stream::new(1, 3000, 1), Stream::new(2, 600, 3), Stream::new(3, 0, 40)];
    for (full_layer, threads) in [0, LAYERS as u32 - 1].map(|l| [1, 2, 5].map(|t| (l, t))).concat()
    {
        for window in [1, 30, 256, 700] {
            let (window, full_layer) = (Some(window), Some(full_layer));
            check_all(&Config { window, full_layer, threads, ..Config::default() }, &streams);
        }
    }
}

#[test]
fn a_layer_that_the_cache_lacks_is_refused() {
    let config = Config { window: Some(8), full_layer: Some(LAYERS as u32), ..Config::default() };
    let cache = Arc::new(FakeCache::new(&config, &[]));
    let spec = spec("attn", "attention", settings(&config));
    let e = build_resource::<resource_attn::PagedAttention>(&spec, &info(&cache, 1)).unwrap_err();
    let said = format!(
        "[resources.attn]: full_layers names layer {LAYERS}, but the cache has {LAYERS} layers"
    );
    assert_eq!(e.to_string(), said);
}

#[test]
fn without_causality_a_token_sees_its_whole_stream() {
    let config = Config { causal: false, ..Config::default() };
    check_all(&config, &mixed(16));
    check_all(&config, &[Stream::new(1, 0, 270), Stream::new(2, 250, 20)]);
}

#[test]
fn labels_are_packed_apart() {
    let other = |seed, start, span| Stream { label: LabelId(2), ..Stream::new(seed, start, span) };
    let streams = [other(1, 0, 5), Stream::new(2, 20, 2), other(3, 40, 1), Stream::new(4, 0, 3)];
    check_all(&Config::default(), &streams);
}

#[test]
fn a_key_that_a_token_must_not_see_does_not_reach_it() {
    let config = Config { window: Some(20), ..Config::default() };
    let streams = [Stream::new(1, 30, 30)];
    let cache = Arc::new(FakeCache::new(&config, &streams));
    cache.spoil(0, 45);
    let outputs = &attend_on(&config, &cache, &streams)[0];
    let width = config.heads * config.head_dim;
    for (out, position) in outputs.chunks(width).zip(30..) {
        let sees_it = (45..65).contains(&position);
        assert!(out.iter().all(|x| x.is_nan() == sees_it), "position {position}");
    }
}

fn built(cache: &Arc<FakeCache>) -> BuiltResource {
    let spec = spec("attn", "attention", settings(&Config::default()));
    build_resource::<resource_attn::PagedAttention>(&spec, &info(cache, 2)).unwrap()
}

#[test]
fn rows_and_last_tokens_are_found() {
    let streams = mixed(16);
    let cache = Arc::new(FakeCache::new(&Config::default(), &streams));
    let built = built(&cache);
    let attention: AttentionHandle = built.capabilities[0].open().unwrap();
    with_step(None, &cache, &built.resource, &streams, |ctx| {
        let mut indptr = [u32::MAX; 12];
        let n = attention.qo_indptr(ctx, LabelId::MAIN, &mut indptr).unwrap();
        assert_eq!(indptr, [0, 1, 2, 3, 20, 20, 21, 26, 26, 41, 42, u32::MAX]);
        assert_eq!(n, 11);
        let e = attention.qo_indptr(ctx, LabelId::MAIN, &mut indptr[..4]).unwrap_err();
        assert_eq!((e.kind(), e.amounts()), (ErrorKind::INVALID, (11, 4)));

        let hidden: Vec<f32> = (0..42 * 3).map(|i| i as f32).collect();
        let mut out = [-1.0f32; 30];
        let hidden = TensorView::from_slice(&hidden, &[42, 3]);
        let mut view = TensorViewMut::from_slice(&mut out, &[10, 3]);
        attention.select_last_hidden(ctx, LabelId::MAIN, &hidden, &mut view).unwrap();
        let firsts: Vec<f32> = out.chunks(3).map(|row| row[0] / 3.0).collect();
        let third = -1.0 / 3.0;
        assert_eq!(firsts, [0.0, 1.0, 2.0, 19.0, third, 20.0, 25.0, third, 40.0, 41.0]);
        let mut short = [0.0f32; 27];
        let mut short = TensorViewMut::from_slice(&mut short, &[9, 3]);
        let e = attention.select_last_hidden(ctx, LabelId::MAIN, &hidden, &mut short).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::INVALID);
    })
    .unwrap();
}

#[test]
fn output_beyond_the_planned_tokens_is_zero() {
    let config = Config::default();
    let streams = [Stream::new(1, 0, 2)];
    let cache = Arc::new(FakeCache::new(&config, &streams));
    let built = built(&cache);
    let attention: AttentionHandle = built.capabilities[0].open().unwrap();
    let width = config.heads * config.head_dim;
    with_step(None, &cache, &built.resource, &streams, |ctx| {
        let mut q = queries(&config, &streams, LabelId::MAIN);
        q.resize(5 * width, f32::NAN);
        let mut out = vec![f32::NAN; 5 * width];
        let shape = [5, config.heads, config.head_dim];
        let q = TensorView::from_slice(&q, &shape);
        let mut view = TensorViewMut::from_slice(&mut out, &shape);
        attention.run(ctx, 1, LabelId::MAIN, &q, &mut view).unwrap();
        check(&config, &streams[0], &out[..2 * width]);
        assert!(out[2 * width..].iter().all(|&x| x == 0.0));
    })
    .unwrap();
}

#[test]
fn wrong_calls_are_errors_that_say_what_is_wrong() {
    let config = Config::default();
    let streams = [Stream::new(1, 0, 3), Stream::new(2, 300, 1)];
    let mut cache = FakeCache::new(&config, &streams);
    cache.break_page(1);
    let cache = Arc::new(cache);
    let built = built(&cache);
    let attention: AttentionHandle = built.capabilities[0].open().unwrap();
    with_step(None, &cache, &built.resource, &streams, |ctx| {
        let data = vec![0f32; 4 * 6 * 64];
        let run = |layer, label, q: &[usize], o: &[usize]| {
            let mut out = vec![0f32; o.iter().product()];
            let q = TensorView::from_slice(&data[..q.iter().product()], q);
            let mut out = TensorViewMut::from_slice(&mut out, o);
            attention.run(ctx, layer, label, &q, &mut out).unwrap_err().to_string()
        };
        let right = [4, 6, 64];
        let e = run(1, LabelId::MAIN, &[3, 6, 64], &right);
        assert_eq!(e, "q is [3, 6, 64]; this step needs [4, 6, 64]");
        let e = run(1, LabelId::MAIN, &right, &[4, 384]);
        assert_eq!(e, "out is [4, 384]; this step needs [4, 6, 64]");
        let e = run(1, CONTEXT, &right, &right);
        assert!(e.contains("no tokens of label `context` (planned: main)"), "{e}");
        assert_eq!(run(7, LabelId::MAIN, &right, &right), "no layer 7");
        let e = run(1, LabelId::MAIN, &right, &right);
        assert!(e.contains("of r2.1 (keys 0..16) is not in the cache's pool"), "{e}");
    })
    .unwrap();
}

#[test]
fn what_cannot_be_built_is_refused_in_one_line() {
    let refusal = |config: &Config, edit: fn(&mut EngineResourceInfo)| {
        let cache = Arc::new(FakeCache::new(config, &[Stream::new(1, 0, 1)]));
        let mut info = info(&cache, 1);
        edit(&mut info);
        let spec = spec("attn", "attention", settings(config));
        build_resource::<resource_attn::PagedAttention>(&spec, &info).unwrap_err().to_string()
    };
    let e = refusal(&Config::default(), |info| info.dependencies.clear());
    assert!(e.starts_with("[resources.attn]: `kv` is not a declared dependency"), "{e}");
    let e = refusal(&Config::default(), |info| info.device = Device { kind: 10, ordinal: 0 });
    assert!(e.contains("device10:0 is not a CUDA device"), "{e}");
    let e = refusal(&Config { heads: 5, ..Config::default() }, |_| {});
    assert!(e.contains("5 query heads are no multiple of 2 key/value heads"), "{e}");
    let e = refusal(&Config { scale: Some(-1.0), ..Config::default() }, |_| {});
    assert_eq!(e, "[resources.attn]: sm_scale = -1 must be above 0");
}

#[test]
fn a_resource_says_what_it_depends_on_and_what_it_can() {
    let cache = Arc::new(FakeCache::new(&Config::default(), &[Stream::new(1, 0, 1)]));
    let attention = built(&cache).resource;
    assert_eq!(attention.depends_on(), ["kv"]);
    assert!(attention.supports_preplan() && !attention.force_double_buffer());
    assert!(attention.prefix_skip_safe() && attention.fingerprint().is_some());
    let kind = kind::<resource_attn::PagedAttention>();
    let spec = spec("attn", "attention", settings(&Config::default()));
    assert_eq!(kind.depends_on(spec).unwrap(), ["kv"]);
    assert_eq!(kind.provides(), ["attention/1"]);
    // Unknown requests and steps that were never staged are accepted.
    attention.remove_request(RequestId::new(77, 3)).unwrap();
    attention.reset_request(RequestId::new(77, 3), true).unwrap();
    attention.clear_preplan(Some(StepId(5))).unwrap();
}
