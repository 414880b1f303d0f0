//! Rotary position embedding.

use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

/// Which elements of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Elements `2 i` and `2 i + 1`.
    Interleaved,
    /// Elements `i` and `i + n`, for `n` angles.
    HalfSplit,
}

/// Turns every head in `x` by the angles of one position: `(a, b)` becomes
/// `(a cos - b sin, a sin + b cos)`.
///
/// `x` is whole heads of `head_dim`; `cos` and `sin` hold one value an angle, at most `head_dim / 2`
/// of them. Where there are fewer, the elements after the first `2 * cos.len()` stay as they are.
pub fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], layout: RopeLayout) {
    assert_eq!(cos.len(), sin.len(), "cos and sin of different lengths");
    assert!(cos.len() <= head_dim / 2, "more angles than pairs in a head");
    if x.is_empty() {
        return;
    }
    assert!(x.len().is_multiple_of(head_dim.max(1)), "x is not whole heads");
    let features = CpuFeatures::current();
    match layout {
        RopeLayout::Interleaved => dispatch(features, Interleaved(Rope { x, head_dim, cos, sin })),
        RopeLayout::HalfSplit => dispatch(features, HalfSplit(Rope { x, head_dim, cos, sin })),
    }
}

struct Rope<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

/// The rotated pair. Rounded alike in the vector loops and after them: products, then a sum.
#[inline(always)]
fn turn<S: Simd>(s: S, a: S::F, b: S::F, cos: S::F, sin: S::F) -> (S::F, S::F) {
    let first = s.sub(s.mul(a, cos), s.mul(b, sin));
    let second = s.add(s.mul(a, sin), s.mul(b, cos));
    (first, second)
}

struct HalfSplit<'a>(Rope<'a>);

impl Kernel for HalfSplit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rope { x, head_dim, cos, sin } = self.0;
        for head in x.chunks_exact_mut(head_dim) {
            let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
            let vectors = first.chunks_mut(LANES).zip(second.chunks_mut(LANES));
            let angles = cos.chunks(LANES).zip(sin.chunks(LANES));
            for ((a, b), (cos, sin)) in vectors.zip(angles) {
                let (x, y) = (super::load_filled(s, a, 0.0), super::load_filled(s, b, 0.0));
                let cos = super::load_filled(s, cos, 0.0);
                let sin = super::load_filled(s, sin, 0.0);
                let (x, y) = turn(s, x, y, cos, sin);
                super::store_some(s, x, a);
                super::store_some(s, y, b);
            }
        }
    }
}

struct Interleaved<'a>(Rope<'a>);

impl Kernel for Interleaved<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rope { x, head_dim, cos, sin } = self.0;
        for head in x.chunks_exact_mut(head_dim) {
            let pairs = head[..2 * cos.len()].chunks_mut(2 * LANES);
            let angles = cos.chunks(LANES).zip(sin.chunks(LANES));
            for (pairs, (cos, sin)) in pairs.zip(angles) {
                let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
                for (i, pair) in pairs.as_chunks::<2>().0.iter().enumerate() {
                    (a[i], b[i]) = (pair[0], pair[1]);
                }
                let cos = super::load_filled(s, cos, 0.0);
                let sin = super::load_filled(s, sin, 0.0);
                let (x, y) = turn(s, s.load(&a), s.load(&b), cos, sin);
                s.store(x, &mut a);
                s.store(y, &mut b);
                for (i, pair) in pairs.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *pair = [a[i], b[i]];
                }
            }
        }
    }
}
