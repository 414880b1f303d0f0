//! Every operation at every level this CPU has, against plain arithmetic.

use half::{bf16, f16};

use super::*;

/// Runs a kernel at every level and hands its output to the check.
fn at_every_level<K: Kernel + Clone>(kernel: K, check: impl Fn(K::Output)) {
    for features in CpuFeatures::supported() {
        check(dispatch(features, kernel.clone()));
    }
}

fn floats(seed: u32) -> [f32; 16] {
    std::array::from_fn(|i| {
        let bits =
            (i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
        (bits >> 8) as f32 / 8_388_608.0 - 1.0
    })
}

fn bytes(seed: u32) -> [u8; 64] {
    std::array::from_fn(|i| {
        ((i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(977)) >> 24)
            as u8
    })
}

#[derive(Clone)]
struct Floats([f32; 16], [f32; 16]);

impl Kernel for Floats {
    type Output = ([[f32; 16]; 7], f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (a, b) = (s.load(&self.0), s.load(&self.1));
        let mut out = [[0.0; 16]; 7];
        s.store(s.add(a, b), &mut out[0]);
        s.store(s.sub(a, b), &mut out[1]);
        s.store(s.mul(a, b), &mut out[2]);
        s.store(s.div(a, b), &mut out[3]);
        s.store(s.min(a, b), &mut out[4]);
        s.store(s.max(a, b), &mut out[5]);
        s.store(s.fma(a, b, s.splat(0.5)), &mut out[6]);
        (out, s.sum(a))
    }
}

#[test]
fn float_arithmetic() {
    let (a, b) = (floats(1), floats(2));
    at_every_level(Floats(a, b), |(out, sum)| {
        for i in 0..16 {
            let want = [
                a[i] + b[i],
                a[i] - b[i],
                a[i] * b[i],
                a[i] / b[i],
                a[i].min(b[i]),
                a[i].max(b[i]),
            ];
            for (got, want) in out.iter().zip(want) {
                assert_eq!(got[i], want);
            }
            assert!(
                (f64::from(out[6][i]) - (f64::from(a[i]) * f64::from(b[i]) + 0.5)).abs() < 1e-7
            );
        }
        let want: f64 = a.iter().map(|&x| f64::from(x)).sum();
        assert!((f64::from(sum) - want).abs() < 1e-6);
    });
}

#[derive(Clone)]
struct Sums([[f32; 16]; 16]);

impl Kernel for Sums {
    type Output = ([f32; 16], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let x = self.0.map(|x| s.load(&x));
        let mut together = [0.0; 16];
        let quarters = std::array::from_fn(|j| s.quarters(&[x[j], x[4 + j], x[8 + j], x[12 + j]]));
        s.store(s.sum_quarters(&quarters), &mut together);
        (together, x.map(|x| s.sum(x)))
    }
}

#[test]
fn sums_of_sixteen_vectors_are_those_of_each() {
    at_every_level(Sums(std::array::from_fn(|i| floats(i as u32))), |(together, apart)| {
        assert_eq!(together.map(f32::to_bits), apart.map(f32::to_bits));
    });
}

#[test]
fn min_and_max_pass_a_nan_that_comes_second() {
    at_every_level(Floats([1.0; 16], [f32::NAN; 16]), |(out, _)| {
        assert!(out[4].iter().chain(&out[5]).all(|x| x.is_nan()));
    });
    at_every_level(Floats([f32::NAN; 16], [1.0; 16]), |(out, _)| {
        assert!(out[4].iter().chain(&out[5]).all(|&x| x == 1.0));
    });
}

#[derive(Clone)]
struct Halves([f32; 16]);

impl Kernel for Halves {
    type Output = ([u16; 16], [u16; 16], [f32; 16], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let x = s.load(&self.0);
        let (mut f, mut b) = ([0; 16], [0; 16]);
        let (mut from_f, mut from_b) = ([0.0; 16], [0.0; 16]);
        s.store_f16(x, &mut f);
        s.store_bf16(x, &mut b);
        s.store(s.load_f16(&f), &mut from_f);
        s.store(s.load_bf16(&b), &mut from_b);
        (f, b, from_f, from_b)
    }
}

#[test]
fn half_precision_is_rounded_to_even() {
    let edges = [
        0.0,
        -0.0,
        1.0,
        65519.0,
        65520.0,
        1e-8,
        3e-5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(0x3f80_8000), // ties to 1.0 in bf16
        f32::from_bits(0x3f81_8000), // ties upwards in bf16
        f32::from_bits(0x3f80_1000), // ties to 1.0 in f16
        f32::from_bits(0x3f80_3000), // ties upwards in f16
        -7.3,
    ];
    for x in [edges, floats(3)] {
        at_every_level(Halves(x), |(f, b, from_f, from_b)| {
            for i in 0..16 {
                assert_eq!(f[i], f16::from_f32(x[i]).to_bits(), "{}", x[i]);
                assert_eq!(b[i], bf16::from_f32(x[i]).to_bits(), "{}", x[i]);
                assert_eq!(from_f[i], f16::from_bits(f[i]).to_f32());
                assert_eq!(from_b[i], bf16::from_bits(b[i]).to_f32());
            }
        });
    }
    at_every_level(Halves([f32::from_bits(0x7f80_0001); 16]), |(f, b, from_f, from_b)| {
        assert!(f16::from_bits(f[3]).is_nan() && bf16::from_bits(b[3]).is_nan());
        assert!(from_f[15].is_nan() && from_b[15].is_nan());
    });
}

#[derive(Clone)]
struct Eighths<'a>(&'a [f32], &'a [u8]);

impl Kernel for Eighths<'_> {
    type Output = (Vec<u8>, Vec<u32>);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (mut codes, mut bits) = (Vec::new(), Vec::new());
        for x in self.0.as_chunks().0 {
            let mut code = [0; 16];
            s.store_e4m3(s.load(x), &mut code);
            codes.extend(code.map(i8::cast_unsigned));
        }
        for x in self.1.as_chunks().0 {
            let mut wide = [0.0; 16];
            s.store(s.load_e4m3(x), &mut wide);
            bits.extend(wide.map(f32::to_bits));
        }
        (codes, bits)
    }
}

#[test]
fn e4m3_of_every_code_and_of_a_dense_grid() {
    use crate::float8::{E4m3, tests::*};
    let mut grid = grid();
    grid.resize(grid.len().next_multiple_of(16), f32::from_bits(0xffc0_0001));
    let want: Vec<u8> = grid.iter().map(|&x| nearest(x)).collect();
    let all: Vec<u8> = (0..=255).collect();
    at_every_level(Eighths(&grid, &all), |(codes, bits)| {
        for ((got, want), x) in codes.iter().zip(&want).zip(&grid) {
            assert_eq!(got, want, "{x:e}");
        }
        for (code, &bits) in all.iter().zip(&bits) {
            match value(*code) {
                Some(x) => assert_eq!(f64::from(f32::from_bits(bits)).to_bits(), x.to_bits()),
                None => assert_eq!(bits, E4m3::NAN.to_f32().to_bits()),
            }
        }
    });
}

#[derive(Clone)]
struct Integers([u8; 64], [u8; 64], [f32; 16]);

impl Kernel for Integers {
    type Output = ([[f32; 16]; 8], [i8; 16], i32, i32, bool);

    const HAS_DOTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (w, x) = (s.load_bytes(&self.0), s.load_bytes(&self.1));
        let start = s.splat_i32(-1000);
        let small = s.and(w, s.splat_i32(0x7f7f_7f7f));
        let first: &[u8; 16] = self.0.first_chunk().unwrap();
        let wide = s.widen_i8(first);
        let mut out = [[0.0; 16]; 8];
        s.store(s.to_f32(s.dot(start, small, x)), &mut out[0]);
        s.store(s.to_f32(s.dot_biased(start, w, x)), &mut out[1]);
        s.store(s.to_f32(s.widen_u8(first)), &mut out[2]);
        s.store(s.to_f32(wide), &mut out[3]);
        s.store(s.to_f32(s.round(s.load(&self.2))), &mut out[4]);
        s.store(s.to_f32(s.sar::<2>(s.shl::<24>(w))), &mut out[5]);
        s.store(s.to_f32(s.shr::<8>(w)), &mut out[6]);
        s.store(s.floats(s.bits(s.load(&self.2))), &mut out[7]);
        let mut low = [0; 16];
        s.store_low_bytes(w, &mut low);
        let sum = s.sum_i32(s.sub_i32(s.add_i32(wide, wide), s.splat_i32(3)));
        (out, low, s.max_lane_i32(s.max_i32(wide, s.splat_i32(-100))), sum, S::DOT_KEEPS_BIAS)
    }
}

#[test]
fn integer_arithmetic() {
    let mut signed = bytes(9).map(|b| if b == 0x80 { 0x81 } else { b });
    let mut weights = bytes(4);
    // The largest sums of products there can be.
    weights[..4].fill(255);
    signed[..4].fill(127);
    weights[4..8].fill(0);
    signed[4..8].fill(0x81);
    let values = std::array::from_fn(|i| (i as f32 - 8.0) * 15.75 + 0.5);
    at_every_level(Integers(weights, signed, values), |(out, low, max, sum, keeps_bias)| {
        for i in 0..16 {
            let (w, x) = (&weights[4 * i..4 * i + 4], &signed[4 * i..4 * i + 4]);
            let dot = |weight: &dyn Fn(u8) -> i32| -> i32 {
                w.iter().zip(x).map(|(&w, &x)| weight(w) * i32::from(x as i8)).sum()
            };
            let bias = if keeps_bias { 0 } else { 128 };
            let word = u32::from_le_bytes(w.try_into().unwrap());
            let want = [
                (dot(&|w| i32::from(w & 0x7f)) - 1000) as f32,
                (dot(&|w| i32::from(w) - bias) - 1000) as f32,
                f32::from(weights[i]),
                f32::from(weights[i] as i8),
                values[i].round_ties_even(),
                (((word << 24) as i32) >> 2) as f32,
                (word >> 8) as f32,
                values[i],
            ];
            for (k, (got, want)) in out.iter().zip(want).enumerate() {
                assert_eq!(got[i], want, "operation {k}, lane {i}");
            }
            assert_eq!(low[i], w[0] as i8);
        }
        let wide = weights[..16].iter().map(|&w| i32::from(w as i8));
        assert_eq!(max, wide.clone().max().unwrap().max(-100));
        assert_eq!(sum, wide.map(|w| 2 * w - 3).sum::<i32>());
    });
}

#[derive(Clone)]
struct Exp([f32; 16]);

impl Kernel for Exp {
    type Output = ([f32; 16], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (mut exp, mut sigmoid) = ([0.0; 16], [0.0; 16]);
        s.store(math::exp(s, s.load(&self.0)), &mut exp);
        s.store(math::sigmoid(s, s.load(&self.0)), &mut sigmoid);
        (exp, sigmoid)
    }
}

#[test]
fn exponentials() {
    for step in 0..2000 {
        let x: [f32; 16] = std::array::from_fn(|i| (step * 16 + i) as f32 * 0.012 - 104.5);
        at_every_level(Exp(x), |(exp, sigmoid)| {
            for i in 0..16 {
                let want = f64::from(x[i]).exp();
                // A subnormal's last place is 2^-149 whatever its size.
                let tolerance = want * 2.4e-7 + 1.5e-45;
                if want < f64::from(f32::MAX) {
                    assert!((f64::from(exp[i]) - want).abs() <= tolerance, "exp {}", x[i]);
                } else {
                    assert_eq!(exp[i], f32::INFINITY);
                }
                let want = 1.0 / (1.0 + (-f64::from(x[i])).exp());
                // What is less than 1 / f32::MAX comes out as 0.
                assert!((f64::from(sigmoid[i]) - want).abs() <= want * 5e-7 + 3e-39);
            }
        });
    }
    at_every_level(Exp([f32::NAN; 16]), |(exp, _)| assert!(exp[0].is_nan()));
    at_every_level(Exp([f32::NEG_INFINITY; 16]), |(exp, _)| assert_eq!(exp, [0.0; 16]));
    at_every_level(Exp([f32::INFINITY; 16]), |(exp, _)| assert_eq!(exp, [f32::INFINITY; 16]));
    at_every_level(Exp([0.0; 16]), |(exp, _)| assert_eq!(exp, [1.0; 16]));
}
