//! Root-mean-square normalization.

use super::{load_filled, store_some};
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row; a row is as long as `weight`, `x` and
/// `out` are the same number of rows.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x and out of different lengths");
    if x.is_empty() {
        return;
    }
    assert!(x.len().is_multiple_of(weight.len().max(1)), "x is not whole rows");
    dispatch(CpuFeatures::current(), RmsNorm { x, weight, eps, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            // Two sums, so that one addition need not wait for the last.
            let mut sums = [s.splat(0.0); 2];
            for pair in x.chunks(2 * LANES) {
                let (first, second) = pair.split_at(pair.len().min(LANES));
                let (a, b) = (load_filled(s, first, 0.0), load_filled(s, second, 0.0));
                sums = [s.fma(a, a, sums[0]), s.fma(b, b, sums[1])];
            }
            let mean = s.sum(s.add(sums[0], sums[1])) / width as f32;
            let factor = s.splat(1.0 / (mean + self.eps).sqrt());
            let chunks = x.chunks(LANES).zip(self.weight.chunks(LANES)).zip(out.chunks_mut(LANES));
            for ((x, weight), out) in chunks {
                let x = s.mul(load_filled(s, x, 0.0), factor);
                store_some(s, s.mul(x, load_filled(s, weight, 0.0)), out);
            }
        }
    }
}
