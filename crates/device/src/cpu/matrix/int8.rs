//! Products of quantized weights and vectors rounded to int8.
//!
//! With weights `s * (q - o) + m` and a vector of `d * c`, a block of 32 contributes
//! `s * d * (sum of q c - o * sum of c) + m * d * (sum of c)`: an integer product for each output, then
//! one or two float steps. Integer sums are exact, so only the order of blocks matters, and that is
//! the row's own.

use std::marker::PhantomData;

use super::Outputs;
use super::activations::ActivationBlock;
use super::format::{BLOCK, QuantizedFormat, ScaleKind, Scales};
use crate::cpu::simd::{Kernel, Simd, prefetch};

/// Neighbouring panels times all vectors.
pub(super) struct Task<'a, F> {
    pub(super) panels: &'a [u8],
    pub(super) panel_bytes: usize,
    /// Number of the first panel, that is, its first output over 16.
    pub(super) first: usize,
    pub(super) inputs: usize,
    pub(super) rows: usize,
    /// The first vector that is not computed yet.
    pub(super) from: usize,
    pub(super) x: &'a [ActivationBlock],
    pub(super) out: &'a Outputs<'a>,
    pub(super) format: PhantomData<F>,
}

impl<F: QuantizedFormat> Kernel for Task<'_, F> {
    type Output = ();

    const HAS_DOTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Vectors that a few panels use one after another should still be in the cache.
        const CACHED: usize = 512 * 1024;
        let row_bytes = (self.inputs / BLOCK).max(1) * size_of::<ActivationBlock>();
        let at_once = (CACHED / row_bytes).max(8).next_multiple_of(8);

        let mut start = self.from;
        while start < self.rows {
            let end = self.rows.min(start + at_once);
            for (i, panel) in self.panels.chunks_exact(self.panel_bytes).enumerate() {
                let mut row = start;
                while row < end {
                    let panel = Panel { bytes: panel, number: self.first + i };
                    row += match end - row {
                        8.. if S::REGISTERS >= 32 => self.tile::<S, 8>(s, panel, row),
                        4.. => self.tile::<S, 4>(s, panel, row),
                        2.. if S::REGISTERS >= 32 => self.tile::<S, 2>(s, panel, row),
                        _ => self.tile::<S, 1>(s, panel, row),
                    };
                }
            }
            start = end;
        }
    }
}

#[derive(Clone, Copy)]
struct Panel<'a> {
    bytes: &'a [u8],
    number: usize,
}

impl<F: QuantizedFormat> Task<'_, F> {
    /// One panel times `R` vectors from `row`; returns `R`.
    #[inline(always)]
    fn tile<S: Simd, const R: usize>(&self, s: S, panel: Panel<'_>, row: usize) -> usize {
        let mut sums = [s.splat(0.0); R];
        for block in 0..self.inputs / BLOCK {
            if R <= 2 {
                ask_ahead(panel.bytes, block, self.panel_bytes / (self.inputs / BLOCK));
            }
            let (scales, weights) = F::load(s, panel.bytes, block);
            let x: &[ActivationBlock; R] =
                self.x[block * self.rows + row..].first_chunk().expect("rows of this block");
            for r in 0..R {
                sums[r] = add_block::<S, F>(s, sums[r], &scales, &weights, &x[r]);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            self.out.store(s, row + r, panel.number, sum);
        }
        R
    }
}

/// Asks for what comes [`AHEAD`] bytes after a block, where so few vectors share it that reading takes longer
/// than the products. Matrices are short: before the CPU has seen that one is read in order, much of it has
/// been.
#[inline(always)]
fn ask_ahead(panel: &[u8], block: usize, bytes: usize) {
    let ahead = panel.as_ptr().wrapping_add(block * bytes + AHEAD);
    (0..bytes).step_by(64).for_each(|at| prefetch(ahead.wrapping_add(at)));
}

/// What memory delivers in the time it takes to answer.
const AHEAD: usize = 8 << 10;

#[inline(always)]
fn add_block<S: Simd, F: QuantizedFormat>(
    s: S,
    sum: S::F,
    scales: &Scales<S::F>,
    weights: &[S::I; 8],
    x: &ActivationBlock,
) -> S::F {
    let mut dots = [start::<S, F>(s, x.negative_sums[0]), start::<S, F>(s, x.negative_sums[1])];
    for g in 0..8 {
        let x = s.splat_i32(x.codes[g]);
        dots[g / 4] = if F::OFFSET == 128 {
            s.dot_biased(dots[g / 4], weights[g], x)
        } else {
            s.dot(dots[g / 4], weights[g], x)
        };
    }
    if !F::Scale::PER_HALF {
        dots[0] = s.add_i32(dots[0], dots[1]);
    }
    add_sums::<S, F>(s, sum, scales, dots, x)
}

/// Adds the integer sums of a block: its halves', or that of both where they share a scale.
#[inline(always)]
pub(super) fn add_sums<S: Simd, F: QuantizedFormat>(
    s: S,
    sum: S::F,
    scales: &Scales<S::F>,
    dots: [S::I; 2],
    x: &ActivationBlock,
) -> S::F {
    let d = s.splat(x.scale);
    let mut sum = s.fma(s.to_f32(dots[0]), s.mul(scales.scale[0], d), sum);
    if F::Scale::PER_HALF {
        sum = s.fma(s.to_f32(dots[1]), s.mul(scales.scale[1], d), sum);
    }
    if F::Scale::HAS_MIN { s.fma(scales.min, s.splat(x.scaled_sum), sum) } else { sum }
}

/// What takes the codes' offset off the integer sum.
#[inline(always)]
fn start<S: Simd, F: QuantizedFormat>(s: S, negative_sum: i32) -> S::I {
    let sum = s.splat_i32(negative_sum);
    match F::OFFSET {
        8 => s.shl::<3>(sum),
        16 => s.shl::<4>(sum),
        32 => s.shl::<5>(sum),
        128 if S::DOT_KEEPS_BIAS => s.shl::<7>(sum),
        _ => s.splat_i32(0),
    }
}
