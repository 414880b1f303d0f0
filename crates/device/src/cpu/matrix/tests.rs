//! Products at every level and type against float64, and that a row never depends on its company.

use half::f16;

use super::*;
use crate::cpu::pool::Pool;
use crate::parallel::Serial;

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    /// Between -1 and 1.
    fn float(&mut self) -> f32 {
        self.bits() as i32 as f32 / 2_147_483_648.0
    }
}

/// Random weights as a model file stores them.
fn weights(block_type: BlockType, outputs: usize, inputs: usize, random: &mut Random) -> Vec<u8> {
    let row = block_type.row_bytes(inputs).unwrap();
    let mut bytes: Vec<u8> = (0..row * outputs).map(|_| random.bits() as u8).collect();
    for block in bytes.chunks_exact_mut(block_type.block_bytes()) {
        let mut scale = |at: usize, size: f32| {
            let value = f16::from_f32(random.float() * size);
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        match block_type {
            BlockType::F32 => block.copy_from_slice(&random.float().to_le_bytes()),
            BlockType::F16 => scale(0, 1.0),
            BlockType::BF16 => block.copy_from_slice(&random.float().to_le_bytes()[2..]),
            BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => scale(0, 0.1),
            BlockType::Q4_1 | BlockType::Q5_1 => {
                scale(0, 0.1);
                scale(2, 1.0);
            }
            BlockType::Q4_K | BlockType::Q5_K => {
                scale(0, 0.002);
                scale(2, 0.02);
            }
            BlockType::Q6_K => scale(208, 0.0005),
        }
    }
    bytes
}

/// The product and the sum of its terms' magnitudes, in float64.
fn reference(w: &[f32], x: &[f32]) -> (f64, f64) {
    let terms = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
    (terms.clone().sum(), terms.map(f64::abs).sum())
}

/// Vectors that rounding to int8 leaves as they are: in each block integers times a power of two,
/// the largest of them 127.
fn exact_vectors(rows: usize, inputs: usize, random: &mut Random) -> Vec<f32> {
    let mut x = Vec::with_capacity(rows * inputs);
    for _ in 0..rows * inputs.div_ceil(32) {
        let unit = 2f32.powi((random.bits() % 5) as i32 - 3);
        let at = random.bits() % 32;
        x.extend((0..32).map(|i| match random.bits() {
            bits if i == at => [127.0, -127.0][(bits % 2) as usize] * unit,
            bits => ((bits % 255) as f32 - 127.0) * unit,
        }));
    }
    x.truncate(rows * inputs);
    x
}

fn options(activations: Activations) -> impl Iterator<Item = PackOptions> {
    CpuFeatures::supported().map(move |features| PackOptions { activations, features })
}

fn sizes(block_type: BlockType) -> &'static [(usize, usize)] {
    match block_type.block_len() {
        1 => &[(1, 1), (16, 32), (33, 31), (70, 161), (130, 300)],
        32 => &[(1, 32), (16, 64), (33, 96), (70, 160), (130, 288)],
        _ => &[(1, 256), (33, 512), (130, 768)],
    }
}

/// Holds products with the rows of `x` to float64, for both kinds of activations on every level of CPU;
/// `least` is what an error may be beside that of a sum of roundings.
fn check_products(
    block_type: BlockType,
    (outputs, inputs): (usize, usize),
    bytes: &[u8],
    x: &[f32],
    least: f64,
) {
    let rows = x.len() / inputs;
    let mut w = vec![0.0; outputs * inputs];
    block_type.dequantize(bytes, &mut w).unwrap();
    for options in [Activations::Float, Activations::Int8].into_iter().flat_map(options) {
        let matrix = Matrix::pack(block_type, outputs, inputs, bytes, options, &Serial).unwrap();
        let mut out = vec![f32::NAN; rows * outputs];
        matrix.matmul(x, rows, &mut out, &mut Scratch::default(), &Serial).unwrap();
        for (i, &got) in out.iter().enumerate() {
            let (r, o) = (i / outputs, i % outputs);
            let (want, size) = reference(&w[o * inputs..][..inputs], &x[r * inputs..][..inputs]);
            // A sum of n roundings, each of a part of the terms so far.
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= size * 4e-6 + least,
                "{block_type} {outputs}x{inputs} {options:?} row {r} of {rows}, output {o}: {got} for \
                 {want}, terms sum up to {size}"
            );
        }
    }
}

#[test]
fn products_are_those_of_float64() {
    let mut random = Random(1);
    for block_type in BlockType::ALL {
        for &size in sizes(block_type) {
            let bytes = weights(block_type, size.0, size.1, &mut random);
            for rows in [1, 13, 37] {
                let x = exact_vectors(rows, size.1, &mut random);
                check_products(block_type, size, &bytes, &x, 0.0);
            }
        }
    }
}

#[test]
fn rounding_vectors_costs_half_a_code_a_value() {
    let mut random = Random(2);
    let (block_type, outputs, inputs) = (BlockType::Q8_0, 48, 256);
    let bytes = weights(block_type, outputs, inputs, &mut random);
    let mut w = vec![0.0; outputs * inputs];
    block_type.dequantize(&bytes, &mut w).unwrap();
    let x: Vec<f32> = (0..inputs).map(|_| random.float()).collect();
    for options in options(Activations::Int8) {
        let matrix = Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial).unwrap();
        let mut out = vec![0.0; outputs];
        matrix.matmul(&x, 1, &mut out, &mut Scratch::default(), &Serial).unwrap();
        for (o, &got) in out.iter().enumerate() {
            let w = &w[o * inputs..][..inputs];
            let bound: f64 = w
                .chunks(32)
                .zip(x.chunks(32))
                .map(|(w, x)| {
                    let max = x.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
                    w.iter().map(|&w| f64::from(w).abs()).sum::<f64>() * max / 254.0
                })
                .sum();
            let error = (f64::from(got) - reference(w, &x).0).abs();
            // Errors of random sign do not come near the sum of their bounds.
            assert!(error <= bound * 0.3 && error > 0.0, "{error} for {bound}");
        }
    }
}

/// Each row alone, all rows, shuffled rows, threads, and products computed together.
#[test]
fn a_row_is_the_same_to_the_bit_in_any_company() {
    let mut random = Random(3);
    let pool = Pool::new(3);
    for block_type in BlockType::ALL {
        let &(outputs, inputs) = sizes(block_type).last().unwrap();
        let bytes = weights(block_type, outputs, inputs, &mut random);
        let most = 35;
        let x: Vec<f32> = (0..most * inputs).map(|_| random.float()).collect();
        for activations in [Activations::Float, Activations::Int8] {
            for options in options(activations) {
                let matrix =
                    Matrix::pack(block_type, outputs, inputs, &bytes, options, &pool).unwrap();
                let mut scratch = Scratch::default();
                let mut product = |x: &[f32], parallel: &dyn Parallel| {
                    let rows = x.len() / inputs;
                    let mut out = vec![f32::NAN; rows * outputs];
                    matrix.matmul(x, rows, &mut out, &mut scratch, parallel).unwrap();
                    out
                };
                let alone: Vec<Vec<f32>> = x.chunks(inputs).map(|x| product(x, &Serial)).collect();
                for rows in 2..=most {
                    let last = &x[(most - rows) * inputs..];
                    assert_eq!(product(last, &pool), alone[most - rows..].concat(), "{rows}");
                }
                for threads in [1, 2, 7] {
                    assert_eq!(product(&x, &Pool::new(threads)), alone.concat(), "{threads}");
                }
                let backwards: Vec<f32> = x.chunks(inputs).rev().flatten().copied().collect();
                let reversed: Vec<f32> = alone.iter().rev().flatten().copied().collect();
                assert_eq!(product(&backwards, &pool), reversed);

                let (mut first, mut second) = (vec![0.0; outputs], vec![0.0; outputs]);
                let row = &x[..inputs];
                let both = [(&matrix, &mut first[..]), (&matrix, &mut second[..])];
                matmul_all(both, row, 1, &mut scratch, &pool).unwrap();
                assert_eq!((&first, &second), (&alone[0], &alone[0]));
            }
        }
    }
}

/// Tiles of AMX compute what vectors do, to the bit.
#[test]
fn tiles_are_the_vectors_of_the_level_below() {
    let mut random = Random(5);
    let levels: Vec<CpuFeatures> = CpuFeatures::supported().collect();
    let [.., below, best] = levels[..] else { return };
    if best.name() != "amx" {
        println!("skipped: this CPU has no tiles");
        return;
    }
    for block_type in BlockType::ALL {
        for &(outputs, inputs) in sizes(block_type) {
            let bytes = weights(block_type, outputs, inputs, &mut random);
            let x: Vec<f32> = (0..50 * inputs).map(|_| random.float()).collect();
            let product = |features, rows: usize| {
                let options = PackOptions { activations: Activations::Int8, features };
                let matrix =
                    Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial).unwrap();
                let mut out = vec![f32::NAN; rows * outputs];
                let x = &x[..rows * inputs];
                matrix.matmul(x, rows, &mut out, &mut Scratch::default(), &Pool::new(2)).unwrap();
                out
            };
            for rows in [15, 16, 31, 32, 50] {
                assert_eq!(product(best, rows), product(below, rows), "{block_type} {rows}");
            }
        }
    }
}

/// Whoever takes part in a product on tiles finds its memory there: no thread makes its own.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_product_on_tiles_leaves_one_memory_for_each_thread() {
    let (block_type, outputs, inputs, rows) = (BlockType::Q4_1, 640, 64, 16);
    let bytes = weights(block_type, outputs, inputs, &mut Random(6));
    let options = PackOptions::new(Activations::Int8);
    let matrix = Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial).unwrap();
    let (x, mut out) = (vec![1.0; rows * inputs], vec![0.0; rows * outputs]);
    let mut scratch = Scratch::default();
    let pool = Pool::new(3);
    matrix.matmul(&x, rows, &mut out, &mut scratch, &pool).unwrap();
    let places = scratch.tiles.places();
    assert_eq!(places.len(), if options.features.name() == "amx" { 3 } else { 0 });
    for _ in 0..20 {
        matrix.matmul(&x, rows, &mut out, &mut scratch, &pool).unwrap();
        assert_eq!(scratch.tiles.places(), places);
    }
}

#[test]
fn many_vectors_go_through_in_parts() {
    let mut random = Random(4);
    let (block_type, outputs, inputs, rows) = (BlockType::Q4_1, 17, 9600, 70);
    let bytes = weights(block_type, outputs, inputs, &mut random);
    let options = PackOptions::new(Activations::Int8);
    let matrix = Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial).unwrap();
    let x = exact_vectors(rows, inputs, &mut random);
    let (mut out, mut one) = (vec![f32::NAN; rows * outputs], vec![f32::NAN; outputs]);
    let mut scratch = Scratch::default();
    matrix.matmul(&x, rows, &mut out, &mut scratch, &Pool::new(2)).unwrap();
    for (x, out) in x.chunks(inputs).zip(out.chunks(outputs)) {
        matrix.matmul(x, 1, &mut one, &mut scratch, &Serial).unwrap();
        assert_eq!(out, one);
    }
}

#[test]
fn rows_are_those_of_the_file() {
    let mut random = Random(5);
    for block_type in BlockType::ALL {
        let &(outputs, inputs) = sizes(block_type).last().unwrap();
        let bytes = weights(block_type, outputs, inputs, &mut random);
        for options in options(Activations::Int8) {
            let matrix =
                Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial).unwrap();
            let (mut got, mut want) = (vec![f32::NAN; inputs], vec![f32::NAN; inputs]);
            for (i, bytes) in bytes.chunks(bytes.len() / outputs).enumerate() {
                matrix.row(i, &mut got).unwrap();
                block_type.dequantize(bytes, &mut want).unwrap();
                assert_eq!(got, want, "{block_type} row {i}");
            }
            assert!(matrix.row(outputs, &mut got).is_err());
            assert!(matrix.row(0, &mut got[1..]).is_err());
        }
    }
}

/// Where a block's f16 scales lie.
fn scales_at(block_type: BlockType) -> &'static [usize] {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => &[],
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q6_K => &[208],
    }
}

#[test]
fn extreme_blocks_and_vectors_are_those_of_float64() {
    let mut random = Random(7);
    let (outputs, inputs, rows) = (33, 512, 17);
    // Zero, the least and greatest that f16 has without and with its full precision, and the largest.
    let scales = [0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff];
    for block_type in BlockType::ALL.into_iter().filter(|t| !scales_at(*t).is_empty()) {
        let mut bytes = weights(block_type, outputs, inputs, &mut random);
        for block in bytes.chunks_exact_mut(block_type.block_bytes()) {
            // Codes at both ends of their range, and scales of scales too.
            match random.bits() % 3 {
                0 => block.fill(0xff),
                1 => block.fill(0x00),
                _ => {}
            }
            for &at in scales_at(block_type) {
                let scale: u16 = scales[random.bits() as usize % scales.len()];
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        let mut x = exact_vectors(rows, inputs, &mut random);
        for block in x.chunks_mut(32) {
            let by = [0.0, 1e-30, 1e-15, 1.0, 1e15, 1e25].map(|by: f32| by.log2().round().exp2());
            let by = by[random.bits() as usize % by.len()];
            block.iter_mut().for_each(|x| *x *= by);
        }
        check_products(block_type, (outputs, inputs), &bytes, &x, f64::from(f32::MIN_POSITIVE));
    }
}

#[test]
fn a_weight_that_is_not_finite_spoils_its_own_output_alone() {
    let mut random = Random(8);
    let (outputs, inputs, rows, bad) = (33, 256, 17, 18);
    for block_type in BlockType::ALL {
        for value in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            let mut bytes = weights(block_type, outputs, inputs, &mut random);
            let row = &mut bytes[bad * block_type.row_bytes(inputs).unwrap()..];
            match block_type {
                BlockType::F32 => row[..4].copy_from_slice(&value.to_f32().to_le_bytes()),
                BlockType::BF16 => row[..2].copy_from_slice(&value.to_f32().to_le_bytes()[2..]),
                BlockType::Q6_K => row[208..210].copy_from_slice(&value.to_le_bytes()),
                _ => row[..2].copy_from_slice(&value.to_le_bytes()),
            }
            let x = exact_vectors(rows, inputs, &mut random);
            for activations in [Activations::Float, Activations::Int8] {
                for options in options(activations) {
                    let matrix =
                        Matrix::pack(block_type, outputs, inputs, &bytes, options, &Serial)
                            .unwrap();
                    let mut out = vec![0.0; rows * outputs];
                    matrix.matmul(&x, rows, &mut out, &mut Scratch::default(), &Serial).unwrap();
                    for (i, x) in out.iter().enumerate() {
                        let is_spoiled = i % outputs == bad;
                        assert_eq!(x.is_finite(), !is_spoiled, "{block_type} {options:?}: {x}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_shows() {
    let mut random = Random(6);
    for block_type in BlockType::ALL {
        let bytes = weights(block_type, 16, 256, &mut random);
        for activations in [Activations::Float, Activations::Int8] {
            for options in options(activations) {
                let matrix = Matrix::pack(block_type, 16, 256, &bytes, options, &Serial).unwrap();
                let mut x = vec![1.0; 512];
                x[256 + 77] = f32::NAN;
                let mut out = vec![0.0; 32];
                matrix.matmul(&x, 2, &mut out, &mut Scratch::default(), &Serial).unwrap();
                assert!(out[..16].iter().all(|x| x.is_finite()));
                assert!(out[16..].iter().all(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let pack = |outputs, inputs, bytes: &[u8]| {
        let options = PackOptions::default();
        Matrix::pack(BlockType::Q8_0, outputs, inputs, bytes, options, &Serial)
    };
    assert!(pack(2, 33, &[0; 68]).is_err());
    assert!(pack(2, 32, &[0; 67]).is_err());
    assert!(pack(usize::MAX, 32, &[0; 68]).is_err());
    assert!(pack(2, usize::MAX - 31, &[0; 68]).is_err());
    let matrix = pack(2, 32, &[0; 68]).unwrap();
    let mut scratch = Scratch::default();
    let mut product =
        |x: &[f32], rows, out: &mut [f32]| matrix.matmul(x, rows, out, &mut scratch, &Serial);
    assert!(product(&[0.0; 31], 1, &mut [0.0; 2]).is_err());
    assert!(product(&[0.0; 32], 1, &mut [0.0; 3]).is_err());
    assert!(product(&[0.0; 32], usize::MAX, &mut [0.0; 2]).is_err());
    assert_eq!(product(&[], 0, &mut []), Ok(()));
    let empty = pack(2, 0, &[]).unwrap();
    let mut out = [1.0; 4];
    empty.matmul(&[], 2, &mut out, &mut scratch, &Serial).unwrap();
    assert_eq!(out, [0.0; 4]);
    let none = pack(0, 32, &[]).unwrap();
    assert_eq!(none.matmul(&[0.0; 32], 1, &mut [], &mut scratch, &Serial), Ok(()));
}
