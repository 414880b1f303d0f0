//! Sixteen lanes at a time, on whatever instructions the CPU has.
//!
//! A kernel is written once, as a [`Kernel`] generic over [`Simd`], and [`dispatch`] compiles it for
//! each level and calls the right one. A lane is the same element at every level, and sums over lanes
//! use one tree, so levels differ only in whether a product and a sum are rounded once or twice.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod math;
mod portable;

use crate::cpu::features::CpuFeatures;

pub(crate) const LANES: usize = 16;

/// Vectors of 16 float32 ([`F`](Self::F)) and of 16 int32 or 64 bytes ([`I`](Self::I)).
///
/// A value of an implementing type is the proof that the CPU has its instructions. Every method must
/// be inlined into the function that [`dispatch`] compiles for the level; kernels therefore mark
/// what they call `#[inline(always)]` and keep closures out of inner loops.
pub(crate) trait Simd: Copy {
    type F: Copy;
    type I: Copy;

    /// Vector registers there are, which decides how large a tile of a product is.
    const REGISTERS: usize;
    /// Whether [`dot_biased`](Self::dot_biased) leaves the bias in the sum.
    const DOT_KEEPS_BIAS: bool;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; LANES]);
    /// Widens f16 bits.
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    /// Rounds to the nearest f16, ties to even.
    fn store_f16(self, x: Self::F, to: &mut [u16; LANES]);
    /// Widens bf16 bits.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F;
    /// Rounds to the nearest bf16, ties to even; NaN stays NaN.
    fn store_bf16(self, x: Self::F, to: &mut [u16; LANES]);

    /// Widens [`E4m3`](crate::E4m3) bits.
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F;
    /// Rounds as [`E4m3::from_f32`](crate::E4m3::from_f32).
    #[inline(always)]
    fn store_e4m3(self, x: Self::F, to: &mut [i8; LANES]) {
        let of = |x: f32| self.splat_i32(x.to_bits() as i32);
        let bits = self.bits(x);
        let size = self.and(bits, self.splat_i32(i32::MAX));
        // Negative lanes, as all ones, where it is one; the greatest number where it is beyond.
        let is_nan = self.sar::<31>(self.sub_i32(of(f32::INFINITY), size));
        let size = self.min(self.splat(448.0), self.floats(size));
        let odd = self.and(self.shr::<20>(self.bits(size)), self.splat_i32(1));
        let up = self.add_i32(odd, self.splat_i32(0x7_ffff));
        let normal = self.shr::<20>(self.add_i32(self.bits(size), up));
        let normal = self.sub_i32(normal, self.splat_i32(120 << 3));
        // Below 2^-6 steps are 2^-9: a sum with 2^14 has no fraction of them left.
        let small = self.bits(self.add(size, self.splat(16384.0)));
        let small = self.sub_i32(small, of(16384.0));
        let is_small = self.sar::<31>(self.sub_i32(self.bits(size), of(0.015625)));
        let pick = |a, b, which| self.xor(a, self.and(self.xor(a, b), which));
        let sign = self.and(self.shr::<24>(bits), self.splat_i32(0x80));
        let code = self.xor(sign, pick(normal, small, is_small));
        self.store_low_bytes(pick(code, self.splat_i32(0x7f), is_nan), to);
    }

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the CPU can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The lesser; `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The greater; `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Sum of the lanes: halves added to halves, down to one.
    fn sum(self, x: Self::F) -> f32;
    /// Half of [`sum`](Self::sum) for four vectors at once: the `k`-th four lanes of the result are those
    /// of `x[k]`, halves added to halves twice.
    #[inline(always)]
    fn quarters(self, x: &[Self::F; 4]) -> Self::F {
        let (mut lanes, mut out) = ([0.0; LANES], [0.0; LANES]);
        for (x, out) in x.iter().zip(out.as_chunks_mut::<4>().0) {
            self.store(*x, &mut lanes);
            for (i, out) in out.iter_mut().enumerate() {
                *out = (lanes[i] + lanes[8 + i]) + (lanes[4 + i] + lanes[12 + i]);
            }
        }
        self.load(&out)
    }
    /// The other half: lane `4 k + j` becomes the sum of the vector that was the `k`-th of
    /// [`quarters`](Self::quarters) `x[j]`.
    #[inline(always)]
    fn sum_quarters(self, x: &[Self::F; 4]) -> Self::F {
        let (mut lanes, mut out) = ([0.0; LANES], [0.0; LANES]);
        for (j, x) in x.iter().enumerate() {
            self.store(*x, &mut lanes);
            for (k, z) in lanes.as_chunks::<4>().0.iter().enumerate() {
                out[4 * k + j] = (z[0] + z[2]) + (z[1] + z[3]);
            }
        }
        self.load(&out)
    }

    fn splat_i32(self, x: i32) -> Self::I;
    fn load_bytes(self, x: &[u8; 64]) -> Self::I;
    fn widen_u8(self, x: &[u8; LANES]) -> Self::I;
    fn widen_i8(self, x: &[u8; LANES]) -> Self::I;
    /// The low byte of each lane.
    fn store_low_bytes(self, x: Self::I, to: &mut [i8; LANES]);
    /// The bits of the lanes.
    fn bits(self, x: Self::F) -> Self::I;
    /// The float of which these are the bits.
    fn floats(self, x: Self::I) -> Self::F;
    fn to_f32(self, x: Self::I) -> Self::F;
    /// To the nearest integer, ties to even. Out of range: any value.
    fn round(self, x: Self::F) -> Self::I;
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl<const N: u32>(self, x: Self::I) -> Self::I;
    /// Shifts in zeros.
    fn shr<const N: u32>(self, x: Self::I) -> Self::I;
    /// Shifts in the sign.
    fn sar<const N: u32>(self, x: Self::I) -> Self::I;
    /// The greatest lane.
    fn max_lane_i32(self, x: Self::I) -> i32;
    /// Sum of the lanes.
    fn sum_i32(self, x: Self::I) -> i32;
    /// Adds to each lane of `acc` the sum of its four products of bytes of `w`, unsigned and at most
    /// 127, with bytes of `x`, signed and at least -127.
    fn dot(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// As [`dot`](Self::dot) for weights stored plus 128. Where
    /// [`DOT_KEEPS_BIAS`](Self::DOT_KEEPS_BIAS), 128 times the sum of `x` is in the result and has to
    /// be taken off.
    fn dot_biased(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// The first `x.len()` lanes, at most 16; zeros in the others.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::F {
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// Stores the first `to.len()` lanes, at most 16.
    #[inline(always)]
    fn store_part(self, x: Self::F, to: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

/// Asks for the cache line at `at`, which need not be one that there is. It comes no further than the
/// second-level cache: a core has room for few lines on their way to the first, and waits for it.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which does nothing for an address that cannot be read.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    let _ = at;
}

/// A computation written for any [`Simd`].
pub(crate) trait Kernel {
    type Output;

    /// Whether it uses [`Simd::dot`] or [`Simd::dot_biased`]. Others need no version for VNNI.
    const HAS_DOTS: bool = false;

    /// Must be `#[inline(always)]`, see [`Simd`].
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs `kernel` on the instructions of `features`.
#[inline(always)]
pub(crate) fn dispatch<K: Kernel>(features: CpuFeatures, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::cpu::features::Level;

        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<K: Kernel>(s: avx2::Avx2, kernel: K) -> K::Output {
            kernel.run(s)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512<K: Kernel>(s: avx512::Avx512, kernel: K) -> K::Output {
            kernel.run(s)
        }
        #[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512_vnni<K: Kernel>(s: avx512::Avx512Vnni, kernel: K) -> K::Output {
            kernel.run(s)
        }

        match features.level() {
            Level::Portable => {}
            Level::Avx2 => {
                // SAFETY: a `CpuFeatures` of this level exists only where it was detected.
                return unsafe { avx2(avx2::Avx2::new(), kernel) };
            }
            level if K::HAS_DOTS && level >= Level::Avx512Vnni => {
                // SAFETY: as above.
                return unsafe { avx512_vnni(avx512::Avx512Vnni::new(), kernel) };
            }
            _ => {
                // SAFETY: as above.
                return unsafe { avx512(avx512::Avx512::new(), kernel) };
            }
        }
    }
    let _ = features;
    kernel.run(portable::Portable)
}

#[cfg(test)]
mod tests;
