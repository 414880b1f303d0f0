//! The two products of attention over pages of 16 rows, on one thread.
//!
//! `cargo bench -p device --bench attention`. Throughput is in bytes of cached values read.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::attention::{Rows, accumulate_rows, dot_rows};
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
            group.bench_function(BenchmarkId::new("scores", name), |b| {
                b.iter(|| dot_rows(black_box(&q), heads, rows, count, &mut scores, count));
            });
            let mut acc = vec![0.0; heads * width];
            group.bench_function(BenchmarkId::new("weighted sums", name), |b| {
                b.iter(|| accumulate_rows(black_box(&scores), count, heads, rows, count, &mut acc));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
