//! One layer's attention in the shape of a small model: 9 query heads on 3 key/value heads of 64.

#[path = "../tests/common/mod.rs"]
mod common;

use common::*;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use resource_api::*;
use std::hint::black_box;
use std::sync::Arc;

/// Times `run` alone: the step is planned once.
fn bench_step(c: &mut Criterion, name: &str, config: &Config, streams: &[Stream]) {
    let cache = Arc::new(FakeCache::new(config, streams));
    let spec = spec("attn", "attention", settings(config));
    let mut info = info(&cache, config.threads);
    info.host = pool_host(config.threads);
    let built = build_resource::<resource_attn::PagedAttention>(&spec, &info).unwrap();
    let attention: AttentionHandle = built.capabilities[0].open().unwrap();
    let q = queries(config, streams, LabelId::MAIN);
    let mut out = vec![0f32; q.len()];
    let shape = [q.len() / (config.heads * config.head_dim), config.heads, config.head_dim];
    let mut group = c.benchmark_group("attention");
    let keys: u64 = streams.iter().map(|s| u64::from(s.len()) * u64::from(s.span)).sum();
    group.throughput(Throughput::Elements(keys));
    with_step(None, &cache, &built.resource, streams, |ctx| {
        let q = TensorView::from_slice(&q, &shape);
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut out = TensorViewMut::from_slice(black_box(&mut out), &shape);
                attention.run(ctx, LAYERS as u32 - 1, LabelId::MAIN, &q, &mut out).unwrap();
            });
        });
    })
    .unwrap();
}

fn attention(c: &mut Criterion) {
    for threads in [1, 2] {
        for dtype in [DType::F32, DType::BF16] {
            let config = Config { heads: 9, kv_heads: 3, dtype, threads, ..Config::default() };
            let name = |what: &str| format!("{what}/{}/{threads} threads", dtype.name());
            let decode = [Stream::new(1, 4095, 1)];
            bench_step(c, &name("decode 1 at 4096"), &config, &decode);
            let decode: Vec<_> = (0..16).map(|i| Stream::new(i, 255 + 16 * i, 1)).collect();
            bench_step(c, &name("decode 16 at 256..512"), &config, &decode);
            bench_step(c, &name("prefill 512"), &config, &[Stream::new(1, 0, 512)]);
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = attention
}
criterion_main!(benches);
