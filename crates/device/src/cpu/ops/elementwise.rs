//! Operations of each element by itself.

use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, Simd, dispatch, math};

/// `x += y`; equal lengths.
pub fn add_in_place(x: &mut [f32], y: &[f32]) {
    binary::<Add>(x, y);
}

/// `gate = gate / (1 + e^-gate) * up`; equal lengths.
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    binary::<SiluMul>(gate, up);
}

/// `gate = gelu(gate) * up` with the tanh approximation of GELU,
/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`; equal lengths.
pub fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) {
    binary::<GeluMul>(gate, up);
}

/// `x *= factor`.
pub fn scale(x: &mut [f32], factor: f32) {
    dispatch(CpuFeatures::current(), Unary { x, f: Scale(factor) });
}

/// `x = cap * tanh(x / cap)`, within `4e-7 * cap`; `cap` is positive.
pub fn soft_cap(x: &mut [f32], cap: f32) {
    dispatch(CpuFeatures::current(), Unary { x, f: SoftCap(cap) });
}

/// A function of one lane.
trait UnaryOp {
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F;
}

struct Unary<'a, O> {
    x: &'a mut [f32],
    f: O,
}

impl<O: UnaryOp> Kernel for Unary<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (whole, rest) = self.x.as_chunks_mut();
        for x in whole {
            let y = self.f.apply(s, s.load(x));
            s.store(y, x);
        }
        if !rest.is_empty() {
            let y = self.f.apply(s, s.load_part(rest));
            s.store_part(y, rest);
        }
    }
}

struct Scale(f32);

impl UnaryOp for Scale {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        s.mul(x, s.splat(self.0))
    }
}

struct SoftCap(f32);

impl UnaryOp for SoftCap {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        // tanh(y) is 2 sigmoid(2 y) - 1.
        let sigmoid = math::sigmoid(s, s.mul(x, s.splat(2.0 / self.0)));
        s.mul(s.splat(self.0), s.fma(s.splat(2.0), sigmoid, s.splat(-1.0)))
    }
}

/// A function of one lane of each of two slices.
trait BinaryOp {
    fn apply<S: Simd>(s: S, x: S::F, y: S::F) -> S::F;
}

fn binary<O: BinaryOp>(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "operands of different lengths");
    dispatch(CpuFeatures::current(), Binary { x, y, op: std::marker::PhantomData::<O> });
}

struct Binary<'a, O> {
    x: &'a mut [f32],
    y: &'a [f32],
    op: std::marker::PhantomData<O>,
}

impl<O: BinaryOp> Kernel for Binary<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ((whole, rest), (whole_y, rest_y)) = (self.x.as_chunks_mut(), self.y.as_chunks());
        for (x, y) in whole.iter_mut().zip(whole_y) {
            let result = O::apply(s, s.load(x), s.load(y));
            s.store(result, x);
        }
        if !rest.is_empty() {
            let result = O::apply(s, s.load_part(rest), s.load_part(rest_y));
            s.store_part(result, rest);
        }
    }
}

struct Add;

impl BinaryOp for Add {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
        s.add(x, y)
    }
}

struct SiluMul;

impl BinaryOp for SiluMul {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
        s.mul(s.mul(x, math::sigmoid(s, x)), y)
    }
}

struct GeluMul;

impl BinaryOp for GeluMul {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
        // (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation near 0.
        const LINEAR: f32 = 1.595_769; // 2 sqrt(2 / pi)
        let cubic = s.fma(s.mul(x, x), s.splat(LINEAR * 0.044_715), s.splat(LINEAR));
        s.mul(s.mul(x, math::sigmoid(s, s.mul(x, cubic))), y)
    }
}
