//! Vectors rounded to int8 for the integer kernel.

use crate::cpu::features::CpuFeatures;
use crate::cpu::matrix::format::BLOCK;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};
use crate::parallel::{Parallel, Shared, run_once_each};

/// Thirty-two neighbours of one vector.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ActivationBlock {
    /// What a code stands for: the largest magnitude is code 127. NaN where a value is not finite.
    pub(super) scale: f32,
    /// `scale` times the sum of the codes.
    pub(super) scaled_sum: f32,
    /// Minus the sum of the first and of the second 16 codes.
    pub(super) negative_sums: [i32; 2],
    /// The codes, four to a word as an integer product takes them.
    pub(super) codes: [i32; BLOCK / 4],
}

/// Rounds `x`, `rows` vectors of whole blocks, into `blocks`: the first block of every row, then the
/// second of every row, and so on.
pub(super) fn quantize(
    features: CpuFeatures,
    x: &[f32],
    rows: usize,
    blocks: &mut Vec<ActivationBlock>,
    parallel: &dyn Parallel,
) {
    /// Below this many values, waking threads costs more than it saves.
    const TASK: usize = 16 * 1024;

    let per_row = x.len() / rows / BLOCK;
    let need = per_row * rows;
    if blocks.len() < need {
        blocks.resize(need, ActivationBlock::default());
    }
    let out = Shared::new(&mut blocks[..need]);
    let together = (TASK / (per_row * BLOCK).max(1)).max(1);
    run_once_each(parallel, rows.div_ceil(together), &|task| {
        let first = task * together;
        let x = &x.as_chunks::<BLOCK>().0[first * per_row..rows.min(first + together) * per_row];
        dispatch(features, Quantize { x, per_row, rows, first, out: &out });
    });
}

/// Rows that lie together, whole: reading them in order is what this takes time for.
struct Quantize<'a> {
    x: &'a [[f32; BLOCK]],
    per_row: usize,
    /// All rows there are, and the first of these.
    rows: usize,
    first: usize,
    out: &'a Shared<'a, ActivationBlock>,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, x) in self.x.chunks_exact(self.per_row).enumerate() {
            for (column, x) in x.iter().enumerate() {
                let at = column * self.rows + self.first + row;
                // SAFETY: each block belongs to one row, tasks have different rows, and each comes up once.
                let out = unsafe { self.out.get(at, 1) };
                round_block(s, x, &mut out[0]);
            }
        }
    }
}

#[inline(always)]
fn round_block<S: Simd>(s: S, x: &[f32; BLOCK], out: &mut ActivationBlock) {
    let halves = x.as_chunks::<LANES>().0;
    let (a, b) = (s.load(&halves[0]), s.load(&halves[1]));
    // As integers, the bits of magnitudes are ordered like the magnitudes, and what is not finite is
    // greatest of all.
    let magnitude = s.splat_i32(0x7fff_ffff);
    let max = s.max_i32(s.and(s.bits(a), magnitude), s.and(s.bits(b), magnitude));
    let max = f32::from_bits(s.max_lane_i32(max) as u32);
    // A maximum too small to be inverted counts as zero: its products vanish in float32.
    let (scale, inverse) = if !max.is_finite() {
        (f32::NAN, 0.0)
    } else if max < 1e-36 {
        (0.0, 0.0)
    } else {
        (max / 127.0, 127.0 / max)
    };
    let inverse = s.splat(inverse);
    // Zero times what is not finite would round to any integer.
    let (a, b) = if max.is_finite() { (a, b) } else { (inverse, inverse) };
    let (a, b) = (s.round(s.mul(a, inverse)), s.round(s.mul(b, inverse)));
    let mut codes = [[0i8; LANES]; 2];
    s.store_low_bytes(a, &mut codes[0]);
    s.store_low_bytes(b, &mut codes[1]);
    let sums = [s.sum_i32(a), s.sum_i32(b)];
    *out = ActivationBlock {
        scale,
        scaled_sum: scale * (sums[0] + sums[1]) as f32,
        negative_sums: [-sums[0], -sums[1]],
        codes: bytemuck::cast(codes),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Serial;

    #[test]
    fn codes_are_the_nearest_and_sums_are_theirs() {
        let (rows, width) = (3, 96);
        let x: Vec<f32> = (0..rows * width)
            .map(|i| match i / 32 {
                1 => 0.0,
                block => ((i * 37 % 101) as f32 - 50.0) * 10f32.powi(block as i32 * 5 - 20),
            })
            .collect();
        for features in CpuFeatures::supported() {
            let mut blocks = Vec::new();
            quantize(features, &x, rows, &mut blocks, &Serial);
            for row in 0..rows {
                for column in 0..3 {
                    let block = &blocks[column * rows + row];
                    let x = &x[row * width + column * 32..][..32];
                    let max = x.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
                    let codes: [i8; 32] = bytemuck::cast(block.codes);
                    for (&code, &x) in codes.iter().zip(x) {
                        assert!(code != -128);
                        let error = f64::from(block.scale) * f64::from(code) - f64::from(x);
                        assert!(error.abs() <= max / 127.0 * 0.5001, "{x}: {code}");
                    }
                    let sum =
                        |r: std::ops::Range<usize>| codes[r].iter().map(|&c| i32::from(c)).sum();
                    let sums: [i32; 2] = [sum(0..16), sum(16..32)];
                    assert_eq!(block.negative_sums, sums.map(|s| -s));
                    assert_eq!(block.scaled_sum, block.scale * (sums[0] + sums[1]) as f32);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_makes_the_scale_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for features in CpuFeatures::supported() {
                for at in [0, 17] {
                    let mut x = [1.0; 32];
                    x[at] = bad;
                    let mut blocks = Vec::new();
                    quantize(features, &x, 1, &mut blocks, &Serial);
                    assert!(blocks[0].scale.is_nan() && blocks[0].scaled_sum.is_nan());
                }
            }
        }
    }
}
