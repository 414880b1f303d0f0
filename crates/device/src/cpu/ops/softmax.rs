//! Softmax, in whole or in parts, and the greatest element.

use super::load_filled;
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch, math};

/// `x = e^x / sum(e^x)`, computed without overflow.
///
/// Minus infinity, a masked element, becomes 0, and if all are masked all become 0. A NaN or plus
/// infinity anywhere makes every element NaN, so that it is not taken for a distribution.
pub fn softmax(x: &mut [f32]) {
    let (_, sum) = exponentials(x);
    // Masked throughout: dividing would turn the zeros into NaN.
    if sum != 0.0 {
        super::scale(x, 1.0 / sum);
    }
}

/// `x = e^(x - max)`; returns `max` and the sum of the results.
///
/// This is softmax short of the division, for parts of a row that are computed apart: with
/// `(m, s, x)` of each part and `M` the greatest `m`, the parts' shares are `e^(m - M) x` over the
/// sum of `e^(m - M) s`. Minus infinity, a masked element, becomes 0; with nothing else in `x` the
/// result is `(-inf, 0)`. With a NaN or plus infinity in `x`, all results and the sum are NaN.
pub fn exponentials(x: &mut [f32]) -> (f32, f32) {
    dispatch(CpuFeatures::current(), Exponentials { x })
}

/// `x = e^x`; returns the sum of the results: lane by lane of 16, then halves of lanes added to halves,
/// whatever the CPU. A result too small for float32 is 0, one too large infinite, and NaN stays NaN.
pub fn exp(x: &mut [f32]) -> f32 {
    dispatch(CpuFeatures::current(), Exp { x })
}

/// The index of the greatest element, the first of equals. NaN is never the greatest; `None` when
/// there is no other element.
pub fn argmax(x: &[f32]) -> Option<usize> {
    // One pass finds the value at memory speed, the second stops at its place.
    let max = dispatch(CpuFeatures::current(), Max { x, nan: f32::NEG_INFINITY });
    x.iter().position(|&v| v == max)
}

/// The greatest element, where NaN counts as `nan`.
struct Max<'a> {
    x: &'a [f32],
    nan: f32,
}

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut maxima = [s.splat(f32::NEG_INFINITY); 4];
        let (fours, rest) = self.x.as_chunks::<{ 4 * LANES }>();
        // A NaN that comes first gives way to the other operand.
        for four in fours {
            for (max, x) in maxima.iter_mut().zip(four.as_chunks().0) {
                *max = s.max(s.load(x), *max);
            }
        }
        for (max, x) in maxima.iter_mut().zip(rest.chunks(LANES)) {
            *max = s.max(load_filled(s, x, f32::NEG_INFINITY), *max);
        }
        let max = s.max(s.max(maxima[0], maxima[1]), s.max(maxima[2], maxima[3]));
        let mut lanes = [0.0; LANES];
        s.store(max, &mut lanes);
        let mut greatest = self.nan;
        for lane in lanes {
            greatest = greatest.max(lane);
        }
        greatest
    }
}

struct Exp<'a> {
    x: &'a mut [f32],
}

impl Kernel for Exp<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = s.splat(0.0);
        let (whole, rest) = self.x.as_chunks_mut();
        for x in whole {
            let e = math::exp(s, s.load(x));
            sums = s.add(sums, e);
            s.store(e, x);
        }
        if !rest.is_empty() {
            let e = math::exp(s, load_filled(s, rest, f32::NEG_INFINITY));
            sums = s.add(sums, e);
            s.store_part(e, rest);
        }
        s.sum(sums)
    }
}

struct Exponentials<'a> {
    x: &'a mut [f32],
}

impl Kernel for Exponentials<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let max = Max { x: self.x, nan: f32::NEG_INFINITY }.run(s);
        // Where all are masked the differences would be NaN; e^(-inf - 0) is the 0 wanted. Where all
        // are NaN, taking 0 off keeps them.
        let base = s.splat(if max == f32::NEG_INFINITY { 0.0 } else { max });
        let mut sums = s.splat(0.0);
        let (whole, rest) = self.x.as_chunks_mut();
        for x in whole {
            let e = math::exp(s, s.sub(s.load(x), base));
            sums = s.add(sums, e);
            s.store(e, x);
        }
        if !rest.is_empty() {
            let e = math::exp(s, s.sub(load_filled(s, rest, f32::NEG_INFINITY), base));
            sums = s.add(sums, e);
            s.store_part(e, rest);
        }
        let sum = s.sum(sums);
        if sum.is_nan() {
            self.x.fill(f32::NAN);
        }
        (max, sum)
    }
}
