//! The two products of attention over pages of 16 rows, on one thread.
//!
//! `cargo bench -p device --bench attention`. Throughput is in bytes of cached values read.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::attention::{Rows, Span, accumulate_rows, dot_rows};
use half::{bf16, f16};

const PAGE: usize = 16;
const PAGES: usize = 64;

fn bench(c: &mut Criterion) {
    for (heads, width) in [(1, 64), (3, 64), (4, 128)] {
        let elements = PAGES * PAGE * width;
        let (singles, halves, brains) =
            (vec![0.5f32; elements], vec![f16::ONE; elements], vec![bf16::ONE; elements]);
        let kinds = [
            ("f32", Rows::f32(&singles, width), 4),
            ("f16", Rows::f16(&halves, width), 2),
            ("bf16", Rows::bf16(&brains, width), 2),
        ];
        let q = vec![0.25; heads * width];
        let mut group = c.benchmark_group(format!("{heads} heads of {width}"));
        for (name, rows, bytes) in kinds {
            group.throughput(Throughput::Bytes((elements * bytes) as u64));
            let count = PAGES * PAGE;
            let mut scores = vec![0.0; heads * count];
            let spans = [Span::new(rows, count, heads)];
            group.bench_function(BenchmarkId::new("scores", name), |b| {
                b.iter(|| dot_rows(black_box(&q), width, &spans, &mut scores, count));
            });
            let mut acc = vec![0.0; heads * width];
            group.bench_function(BenchmarkId::new("weighted sums", name), |b| {
                b.iter(|| accumulate_rows(black_box(&scores), count, width, &spans, &mut acc));
            });
        }
        group.finish();
    }
}

/// A layer's keys of one token with a long context, in pages that lie apart, in as many bytes as the keys
/// of a whole model: one span a call, and many.
fn long_context(c: &mut Criterion) {
    let (heads, queries, width, pages, layers) = (3, 3, 64, 256, 30);
    let run = PAGE * width;
    let cache = vec![bf16::ONE; layers * pages * heads * run];
    let q = vec![0.25; heads * queries * width];
    let mut scores = vec![0.0; heads * queries * PAGE * pages];
    let mut sums = q.clone();
    // Odd, so that all pages have their turn.
    let rows = |i: usize| {
        let page = i / heads * 1_237 % (layers * pages);
        Rows::bf16(&cache[(page * heads + i % heads) * run..][..run], width)
    };
    let spans: Vec<Span<'_>> = (0..layers * pages * heads)
        .map(|i| {
            let (head, page) = (i % heads, i / heads % pages);
            let (query, column, sum) = (head * queries, page * PAGE, head * queries * width);
            Span { query, column, sum, ..Span::new(rows(i).before(rows(i + 6)), PAGE, queries) }
        })
        .collect();
    let mut group = c.benchmark_group("pages apart");
    group.throughput(Throughput::Bytes((cache.len() * 2) as u64)).sample_size(20);
    for together in [1, 8, 32] {
        group.bench_function(BenchmarkId::new("scores", together), |b| {
            b.iter(|| {
                for spans in spans.chunks(together) {
                    dot_rows(black_box(&q), width, spans, &mut scores, PAGE * pages);
                }
            });
        });
        group.bench_function(BenchmarkId::new("weighted sums", together), |b| {
            b.iter(|| {
                for spans in spans.chunks(together) {
                    accumulate_rows(black_box(&scores), PAGE * pages, width, spans, &mut sums);
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench, long_context);
criterion_main!(benches);
