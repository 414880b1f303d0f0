//! Functions of 16 lanes that no instruction computes.

use super::Simd;

/// e to the power of each lane, within 2 units in the last place. NaN stays NaN; results too small
/// for float32 go through the subnormals to 0 and those too large to infinity.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond these the result is 0 or infinity anyway. `x` comes second so that NaN passes.
    let x = s.max(s.splat(-104.0), s.min(s.splat(89.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let nf = s.to_f32(n);
    // ln 2 in two parts, the first short enough that its product with n is exact.
    let r = s.fma(nf, s.splat(-0.693_359_4), x);
    let r = s.fma(nf, s.splat(2.121_944_4e-4), r);
    // Cephes' polynomial for e^r - 1 - r on |r| <= ln 2 / 2.
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    // Two factors of 2^(n/2): one alone could not hold the exponents of subnormals.
    let half = s.sar::<1>(n);
    let first = power_of_two(s, half);
    let second = power_of_two(s, s.sub_i32(n, half));
    s.mul(s.mul(p, first), second)
}

#[inline(always)]
fn power_of_two<S: Simd>(s: S, n: S::I) -> S::F {
    s.floats(s.shl::<23>(s.add_i32(n, s.splat_i32(127))))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(s.splat(1.0), s.add(s.splat(1.0), e))
}
