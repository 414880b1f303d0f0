//! Sixteen lanes in one 512-bit register.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Proof of AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Proof of these and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Avx512Vnni {
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ, VL and VNNI.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Intrinsics that need no more than `self`.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: `self` proves that the CPU has the instruction; pointers come from array references
        // of the register's size, and the intrinsics ask for no alignment.
        unsafe { $e }
    }};
}

/// Two vectors' halves, as the two shuffles pick them, added to each other.
macro_rules! fold {
    ($a:expr, $b:expr, $shuffle:ident, $first:literal, $second:literal) => {{
        let (a, b) = ($a, $b);
        op!(_mm512_add_ps($shuffle::<$first>(a, b), $shuffle::<$second>(a, b)))
    }};
}

/// The methods that do not depend on VNNI.
macro_rules! common {
    () => {
        type F = __m512;
        type I = __m512i;

        const REGISTERS: usize = 32;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            op!(_mm512_set1_ps(x))
        }

        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            op!(_mm512_loadu_ps(x.as_ptr()))
        }

        #[inline(always)]
        fn store(self, x: __m512, to: &mut [f32; LANES]) {
            op!(_mm512_storeu_ps(to.as_mut_ptr(), x))
        }

        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> __m512 {
            op!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
        }

        #[inline(always)]
        fn store_f16(self, x: __m512, to: &mut [u16; LANES]) {
            op!(_mm256_storeu_si256(
                to.as_mut_ptr().cast(),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)
            ))
        }

        #[inline(always)]
        fn load_bf16(self, x: &[u16; LANES]) -> __m512 {
            op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
                _mm256_loadu_si256(x.as_ptr().cast())
            ))))
        }

        #[inline(always)]
        fn store_bf16(self, x: __m512, to: &mut [u16; LANES]) {
            op!({
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_add_epi32(bits, up);
                // A NaN must not be rounded into infinity: make it quiet and cut it off.
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
                let bits = _mm512_mask_mov_epi32(rounded, nan, quiet);
                let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), high)
            })
        }

        #[inline(always)]
        fn load_e4m3(self, x: &[u8; LANES]) -> __m512 {
            op!({
                // As an f16 with these bits it is 2^8 times less, subnormals included.
                let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
                let f16 = _mm256_and_si256(
                    _mm256_slli_epi16::<7>(wide),
                    _mm256_set1_epi16(0xbf80_u16.cast_signed()),
                );
                let most = _mm256_set1_epi16(0x3f80);
                let nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(f16, most), most);
                let f16 = _mm256_mask_mov_epi16(f16, nan, _mm256_set1_epi16(0x7e00));
                _mm512_mul_ps(_mm512_cvtph_ps(f16), _mm512_set1_ps(256.0))
            })
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_mul_ps(a, b))
        }

        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_div_ps(a, b))
        }

        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            op!(_mm512_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_min_ps(a, b))
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_max_ps(a, b))
        }

        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            op!({
                let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
                let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
            })
        }

        #[inline(always)]
        fn quarters(self, x: &[__m512; 4]) -> __m512 {
            let [a, b, c, d] = *x;
            let ab = fold!(a, b, _mm512_shuffle_f32x4, 0x44, 0xee);
            let cd = fold!(c, d, _mm512_shuffle_f32x4, 0x44, 0xee);
            fold!(ab, cd, _mm512_shuffle_f32x4, 0x88, 0xdd)
        }

        #[inline(always)]
        fn sum_quarters(self, x: &[__m512; 4]) -> __m512 {
            let first = fold!(x[0], x[1], _mm512_shuffle_ps, 0x44, 0xee);
            let second = fold!(x[2], x[3], _mm512_shuffle_ps, 0x44, 0xee);
            fold!(first, second, _mm512_shuffle_ps, 0x88, 0xdd)
        }

        #[inline(always)]
        fn splat_i32(self, x: i32) -> __m512i {
            op!(_mm512_set1_epi32(x))
        }

        #[inline(always)]
        fn load_bytes(self, x: &[u8; 64]) -> __m512i {
            op!(_mm512_loadu_si512(x.as_ptr().cast()))
        }

        #[inline(always)]
        fn widen_u8(self, x: &[u8; LANES]) -> __m512i {
            op!(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
        }

        #[inline(always)]
        fn widen_i8(self, x: &[u8; LANES]) -> __m512i {
            op!(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
        }

        #[inline(always)]
        fn store_low_bytes(self, x: __m512i, to: &mut [i8; LANES]) {
            op!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x)))
        }

        #[inline(always)]
        fn bits(self, x: __m512) -> __m512i {
            op!(_mm512_castps_si512(x))
        }

        #[inline(always)]
        fn floats(self, x: __m512i) -> __m512 {
            op!(_mm512_castsi512_ps(x))
        }

        #[inline(always)]
        fn to_f32(self, x: __m512i) -> __m512 {
            op!(_mm512_cvtepi32_ps(x))
        }

        #[inline(always)]
        fn round(self, x: __m512) -> __m512i {
            op!(_mm512_cvtps_epi32(x))
        }

        #[inline(always)]
        fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
            op!(_mm512_add_epi32(a, b))
        }

        #[inline(always)]
        fn sub_i32(self, a: __m512i, b: __m512i) -> __m512i {
            op!(_mm512_sub_epi32(a, b))
        }

        #[inline(always)]
        fn and(self, a: __m512i, b: __m512i) -> __m512i {
            op!(_mm512_and_si512(a, b))
        }

        #[inline(always)]
        fn xor(self, a: __m512i, b: __m512i) -> __m512i {
            op!(_mm512_xor_si512(a, b))
        }

        #[inline(always)]
        fn max_i32(self, a: __m512i, b: __m512i) -> __m512i {
            op!(_mm512_max_epi32(a, b))
        }

        #[inline(always)]
        fn shl<const N: u32>(self, x: __m512i) -> __m512i {
            op!(_mm512_slli_epi32::<N>(x))
        }

        #[inline(always)]
        fn shr<const N: u32>(self, x: __m512i) -> __m512i {
            op!(_mm512_srli_epi32::<N>(x))
        }

        #[inline(always)]
        fn sar<const N: u32>(self, x: __m512i) -> __m512i {
            op!(_mm512_srai_epi32::<N>(x))
        }

        #[inline(always)]
        fn max_lane_i32(self, x: __m512i) -> i32 {
            op!(_mm512_reduce_max_epi32(x))
        }

        #[inline(always)]
        fn sum_i32(self, x: __m512i) -> i32 {
            op!(_mm512_reduce_add_epi32(x))
        }
    };
}

impl Simd for Avx512 {
    common!();

    const DOT_KEEPS_BIAS: bool = false;

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        op!({
            let pairs = _mm512_maddubs_epi16(w, x);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_biased(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        op!({
            // The unsigned factor may not pass 128, or pairs would saturate: |w| * (x with w's sign).
            let w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
            let negative = _mm512_movepi8_mask(w);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        })
    }
}

impl Simd for Avx512Vnni {
    common!();

    const DOT_KEEPS_BIAS: bool = true;

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, x))
    }

    #[inline(always)]
    fn dot_biased(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, x))
    }
}
