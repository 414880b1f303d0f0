//! Lanes as arrays: what runs where no better instructions are known.

use half::{bf16, f16};

use super::{LANES, Simd};
use crate::float8::E4m3;

/// Values of all E4m3.
static E4M3: [f32; 256] = {
    let (mut all, mut code) = ([0.0; 256], 0);
    while code < 256 {
        all[code] = E4m3(code as u8).to_f32();
        code += 1;
    }
    all
};

/// Needs nothing of the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

macro_rules! lanes {
    (|$($x:ident),+| $body:expr) => {
        std::array::from_fn(
            #[inline(always)]
            |i| {
                $(let $x = $x[i];)+
                $body
            },
        )
    };
}

impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];

    const REGISTERS: usize = 16;
    const DOT_KEEPS_BIAS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        *x
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        *to = x;
    }

    #[inline]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        lanes!(|x| f16::from_bits(x).to_f32())
    }

    #[inline]
    fn store_f16(self, x: Self::F, to: &mut [u16; LANES]) {
        *to = lanes!(|x| f16::from_f32(x).to_bits());
    }

    #[inline]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        lanes!(|x| bf16::from_bits(x).to_f32())
    }

    #[inline]
    fn store_bf16(self, x: Self::F, to: &mut [u16; LANES]) {
        *to = lanes!(|x| bf16::from_f32(x).to_bits());
    }

    #[inline]
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F {
        lanes!(|x| E4M3[usize::from(x)])
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not `mul_add`: without the instruction that is a slow library call.
        lanes!(|a, b, c| a * b + c)
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn sum(self, mut x: Self::F) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [x; LANES]
    }

    #[inline]
    fn load_bytes(self, x: &[u8; 64]) -> Self::I {
        let words = x.as_chunks().0;
        lanes!(|words| i32::from_le_bytes(words))
    }

    #[inline(always)]
    fn widen_u8(self, x: &[u8; LANES]) -> Self::I {
        lanes!(|x| i32::from(x))
    }

    #[inline(always)]
    fn widen_i8(self, x: &[u8; LANES]) -> Self::I {
        lanes!(|x| i32::from(x as i8))
    }

    #[inline]
    fn store_low_bytes(self, x: Self::I, to: &mut [i8; LANES]) {
        *to = lanes!(|x| x as i8);
    }

    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::I {
        lanes!(|x| x.to_bits() as i32)
    }

    #[inline(always)]
    fn floats(self, x: Self::I) -> Self::F {
        lanes!(|x| f32::from_bits(x as u32))
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        lanes!(|x| x as f32)
    }

    #[inline]
    fn round(self, x: Self::F) -> Self::I {
        // Adding 1.5 * 2^23 leaves no bits for a fraction, so the sum itself is rounded to even.
        const SHIFT: f32 = 12_582_912.0;
        lanes!(|x| if x.abs() < 4_194_304.0 { ((x + SHIFT) - SHIFT) as i32 } else { x as i32 })
    }

    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.wrapping_add(b))
    }

    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.wrapping_sub(b))
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a & b)
    }

    #[inline(always)]
    fn xor(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a ^ b)
    }

    #[inline(always)]
    fn max_i32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.max(b))
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: Self::I) -> Self::I {
        lanes!(|x| x << N)
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: Self::I) -> Self::I {
        lanes!(|x| (x as u32 >> N) as i32)
    }

    #[inline(always)]
    fn sar<const N: u32>(self, x: Self::I) -> Self::I {
        lanes!(|x| x >> N)
    }

    #[inline(always)]
    fn max_lane_i32(self, x: Self::I) -> i32 {
        let mut max = x[0];
        for lane in x {
            max = max.max(lane);
        }
        max
    }

    #[inline(always)]
    fn sum_i32(self, x: Self::I) -> i32 {
        let mut sum = 0i32;
        for lane in x {
            sum = sum.wrapping_add(lane);
        }
        sum
    }

    #[inline]
    fn dot(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        lanes!(|acc, w, x| {
            let (w, x) = (w.to_le_bytes(), x.to_le_bytes());
            let mut sum = acc;
            for j in 0..4 {
                sum += i32::from(w[j]) * i32::from(x[j] as i8);
            }
            sum
        })
    }

    #[inline]
    fn dot_biased(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        lanes!(|acc, w, x| {
            let (w, x) = (w.to_le_bytes(), x.to_le_bytes());
            let mut sum = acc;
            for j in 0..4 {
                sum += (i32::from(w[j]) - 128) * i32::from(x[j] as i8);
            }
            sum
        })
    }
}
