//! Matrix products: one row, where reading weights is the limit, and many, where arithmetic is.
//!
//! `cargo bench -p device --bench matmul`. Throughput of one row is in bytes of packed weights, of many
//! in multiplications (two operations each). `THREADS` (2) and `CPU_FEATURES` (the best) choose how.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::{Activations, BlockType, CpuFeatures, Matrix, PackOptions, Pool, Scratch};

fn pool() -> Pool {
    Pool::new(std::env::var("THREADS").map_or(2, |n| n.parse().expect("THREADS is a number")))
}

fn features() -> CpuFeatures {
    std::env::var("CPU_FEATURES")
        .map_or(CpuFeatures::detected(), |name| CpuFeatures::parse(&name).expect("CPU_FEATURES"))
}

/// A matrix of weights whose size is all that matters.
fn matrix(
    block_type: BlockType,
    outputs: usize,
    inputs: usize,
    activations: Activations,
) -> Matrix {
    let len = block_type.row_bytes(inputs).unwrap() * outputs;
    // Bytes of 0x11 are small positive numbers in every type.
    let options = PackOptions { activations, features: features() };
    Matrix::pack(block_type, outputs, inputs, &vec![0x11; len], options, &pool()).unwrap()
}

const KINDS: [(BlockType, Activations); 7] = [
    (BlockType::Q4_1, Activations::Int8),
    (BlockType::Q8_0, Activations::Int8),
    (BlockType::Q4_K, Activations::Int8),
    (BlockType::Q6_K, Activations::Int8),
    (BlockType::Q4_1, Activations::Float),
    (BlockType::F32, Activations::Float),
    (BlockType::BF16, Activations::Float),
];

fn bench(c: &mut Criterion) {
    let pool = pool();
    let mut scratch = Scratch::default();
    for (rows, outputs, inputs) in
        [(1, 49152, 512), (8, 1536, 512), (32, 1536, 512), (512, 1536, 512)]
    {
        let mut group = c.benchmark_group(format!("{rows} x {inputs} x {outputs}"));
        for (block_type, activations) in KINDS {
            let matrix = matrix(block_type, outputs, inputs, activations);
            let x: Vec<f32> = (0..rows * inputs).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut out = vec![0.0; rows * outputs];
            group.throughput(if rows == 1 {
                Throughput::Bytes(matrix.packed_bytes() as u64)
            } else {
                Throughput::Elements((rows * outputs * inputs) as u64)
            });
            let id = BenchmarkId::new(block_type.name(), format!("{activations:?}"));
            group.bench_function(id, |b| {
                b.iter(|| {
                    matrix.matmul(black_box(&x), rows, &mut out, &mut scratch, &pool).unwrap();
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
