//! Sixteen lanes in two 256-bit registers.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Intrinsics that need no more than `self`.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: `self` proves that the CPU has the instruction; pointers come from array references
        // that cover what is read or written, and the intrinsics ask for no alignment.
        unsafe { $e }
    }};
}

/// The same intrinsic on both halves.
macro_rules! both {
    ($f:path, $($x:ident),+) => { op!([$f($($x[0]),+), $f($($x[1]),+)]) };
}

/// Two vectors' halves, as the two shuffles pick them, added to each other.
macro_rules! fold {
    ($a:expr, $b:expr, $shuffle:ident, $first:literal, $second:literal) => {{
        let (a, b) = ($a, $b);
        op!(_mm256_add_ps($shuffle::<$first>(a, b), $shuffle::<$second>(a, b)))
    }};
}

#[inline(always)]
fn halves<T>(x: &[T; LANES]) -> (*const T, *const T) {
    let (low, high) = x.split_at(8);
    (low.as_ptr(), high.as_ptr())
}

#[inline(always)]
fn halves_mut<T>(x: &mut [T; LANES]) -> (*mut T, *mut T) {
    let (low, high) = x.split_at_mut(8);
    (low.as_mut_ptr(), high.as_mut_ptr())
}

impl Avx2 {
    /// Eight bf16 in the low halves of eight int32.
    #[inline(always)]
    fn round_bf16(self, x: __m256) -> __m256i {
        op!({
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_add_epi32(bits, up);
            // A NaN must not be rounded into infinity: make it quiet and cut it off.
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
        })
    }

    #[inline(always)]
    fn add_pairs(self, acc: __m256i, pairs: __m256i) -> __m256i {
        op!(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
    }

    #[inline(always)]
    fn dot_half(self, acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        self.add_pairs(acc, op!(_mm256_maddubs_epi16(w, x)))
    }

    #[inline(always)]
    fn dot_biased_half(self, acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // The unsigned factor may not pass 128, or pairs would saturate: |w| * (x with w's sign).
        op!({
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            let x = _mm256_sign_epi8(x, w);
            self.add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), x))
        })
    }
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    const REGISTERS: usize = 16;
    const DOT_KEEPS_BIAS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [op!(_mm256_set1_ps(x)); 2]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        let (low, high) = halves(x);
        op!([_mm256_loadu_ps(low), _mm256_loadu_ps(high)])
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        let (low, high) = halves_mut(to);
        op!({
            _mm256_storeu_ps(low, x[0]);
            _mm256_storeu_ps(high, x[1]);
        })
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        let (low, high) = halves(x);
        op!([
            _mm256_cvtph_ps(_mm_loadu_si128(low.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(high.cast())),
        ])
    }

    #[inline(always)]
    fn store_f16(self, x: Self::F, to: &mut [u16; LANES]) {
        let (low, high) = halves_mut(to);
        op!({
            _mm_storeu_si128(low.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]));
            _mm_storeu_si128(high.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]));
        })
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        let (low, high) = halves(x);
        op!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(low.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(high.cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }

    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [u16; LANES]) {
        op!({
            // Packing works within 128-bit halves: put the quarters back into order.
            let packed = _mm256_packus_epi32(self.round_bf16(x[0]), self.round_bf16(x[1]));
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), ordered)
        })
    }

    #[inline(always)]
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F {
        op!({
            // As an f16 with these bits it is 2^8 times less, subnormals included.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let f16 = _mm256_and_si256(
                _mm256_slli_epi16::<7>(wide),
                _mm256_set1_epi16(0xbf80_u16.cast_signed()),
            );
            let most = _mm256_set1_epi16(0x3f80);
            let nan = _mm256_cmpeq_epi16(_mm256_and_si256(f16, most), most);
            let f16 = _mm256_blendv_epi8(f16, _mm256_set1_epi16(0x7e00), nan);
            let scale = _mm256_set1_ps(256.0);
            [
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(f16)), scale),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(f16)), scale),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        op!({
            let x = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn quarters(self, x: &[Self::F; 4]) -> Self::F {
        let (mut low, high) =
            ([x[0][0], x[1][0], x[2][0], x[3][0]], [x[0][1], x[1][1], x[2][1], x[3][1]]);
        for (low, high) in low.iter_mut().zip(high) {
            *low = op!(_mm256_add_ps(*low, high));
        }
        let [a, b, c, d] = low;
        [
            fold!(a, b, _mm256_permute2f128_ps, 0x20, 0x31),
            fold!(c, d, _mm256_permute2f128_ps, 0x20, 0x31),
        ]
    }

    #[inline(always)]
    fn sum_quarters(self, x: &[Self::F; 4]) -> Self::F {
        let mut out = x[0];
        for (half, out) in out.iter_mut().enumerate() {
            let first = fold!(x[0][half], x[1][half], _mm256_shuffle_ps, 0x44, 0xee);
            let second = fold!(x[2][half], x[3][half], _mm256_shuffle_ps, 0x44, 0xee);
            *out = fold!(first, second, _mm256_shuffle_ps, 0x88, 0xdd);
        }
        out
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [op!(_mm256_set1_epi32(x)); 2]
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> Self::I {
        let (low, high) = x.split_at(32);
        op!([_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast()),])
    }

    #[inline(always)]
    fn widen_u8(self, x: &[u8; LANES]) -> Self::I {
        let (low, high) = halves(x);
        op!([
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast())),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(high.cast())),
        ])
    }

    #[inline(always)]
    fn widen_i8(self, x: &[u8; LANES]) -> Self::I {
        let (low, high) = halves(x);
        op!([
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(low.cast())),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(high.cast())),
        ])
    }

    #[inline(always)]
    fn store_low_bytes(self, x: Self::I, to: &mut [i8; LANES]) {
        op!({
            // Keep the low byte so that packing does not saturate; it works within 128-bit halves.
            let low = _mm256_set1_epi32(0xff);
            let words =
                _mm256_packus_epi32(_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (a, b) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_packus_epi16(a, b))
        })
    }

    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::I {
        both!(_mm256_castps_si256, x)
    }

    #[inline(always)]
    fn floats(self, x: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps, x)
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, x)
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::I {
        both!(_mm256_cvtps_epi32, x)
    }

    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }

    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32, a, b)
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_and_si256, a, b)
    }

    #[inline(always)]
    fn xor(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_xor_si256, a, b)
    }

    #[inline(always)]
    fn max_i32(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_max_epi32, a, b)
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: Self::I) -> Self::I {
        // The 256-bit shifts take their count as i32, the 512-bit ones as u32.
        let count = op!(_mm_cvtsi32_si128(N as i32));
        op!([_mm256_sll_epi32(x[0], count), _mm256_sll_epi32(x[1], count)])
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: Self::I) -> Self::I {
        let count = op!(_mm_cvtsi32_si128(N as i32));
        op!([_mm256_srl_epi32(x[0], count), _mm256_srl_epi32(x[1], count)])
    }

    #[inline(always)]
    fn sar<const N: u32>(self, x: Self::I) -> Self::I {
        let count = op!(_mm_cvtsi32_si128(N as i32));
        op!([_mm256_sra_epi32(x[0], count), _mm256_sra_epi32(x[1], count)])
    }

    #[inline(always)]
    fn max_lane_i32(self, x: Self::I) -> i32 {
        op!({
            let x = _mm256_max_epi32(x[0], x[1]);
            let x = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }

    #[inline(always)]
    fn sum_i32(self, x: Self::I) -> i32 {
        op!({
            let x = _mm256_add_epi32(x[0], x[1]);
            let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }

    #[inline(always)]
    fn dot(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        [self.dot_half(acc[0], w[0], x[0]), self.dot_half(acc[1], w[1], x[1])]
    }

    #[inline(always)]
    fn dot_biased(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        [self.dot_biased_half(acc[0], w[0], x[0]), self.dot_biased_half(acc[1], w[1], x[1])]
    }
}
