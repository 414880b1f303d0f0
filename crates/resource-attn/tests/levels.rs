//! At every level of instructions and number of threads a token's output is the same to the bit: alone,
//! among others and as the end of a prompt, at contexts around every limit by which work is divided.

mod common;

use common::*;
use device::CpuFeatures;
use resource_api::DType;

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Around: pages, what is asked for ahead, chunks, and contexts that are split among threads.
const POSITIONS: [u32; 17] =
    [0, 14, 15, 16, 31, 95, 96, 97, 127, 128, 254, 255, 256, 511, 512, 767, 1024];

#[test]
fn neither_threads_nor_neighbours_change_a_bit_at_any_level() {
    let shapes = [(9, 3, 64, 16), (16, 8, 128, 16), (5, 1, 33, 1), (4, 4, 80, 24)];
    // One test in this binary: the level is the process's.
    for level in CpuFeatures::supported() {
        device::set_cpu_features(level.name()).unwrap();
        for (heads, kv_heads, head_dim, page_size) in shapes {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let of =
                    Config { heads, kv_heads, head_dim, page_size, dtype, ..Config::default() };
                for (i, &position) in POSITIONS.iter().enumerate() {
                    let alone = |threads| {
                        let config = Config { threads, ..of.clone() };
                        bits(&attend(&config, &[Stream::new(3, position, 1)])[0])
                    };
                    let want = alone(1);
                    let threads = [2, 3, 7][i % 3];
                    assert!(alone(threads) == want, "{level:?}, {position}, {threads}, {of:?}");

                    let config = Config { threads, ..of.clone() };
                    let others = [Stream::new(4, 300, 1), Stream::new(5, 700 - position % 700, 1)];
                    let mut streams = others.to_vec();
                    streams.insert(i % 3, Stream::new(3, position, 1));
                    let got = &attend(&config, &streams)[i % 3];
                    assert!(bits(got) == want, "{level:?}, {position} among others, {config:?}");

                    let span = 5.min(position + 1);
                    let got = &attend(&config, &[Stream::new(3, position + 1 - span, span)])[0];
                    let last = &got[got.len() - want.len()..];
                    assert!(bits(last) == want, "{level:?}, {position} of a prompt, {config:?}");
                }
            }
        }
    }
}
