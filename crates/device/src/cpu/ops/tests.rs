//! Each operation at every level against float64, on lengths with and without a rest.

use std::sync::Mutex;

use super::*;
use crate::cpu::features::{CpuFeatures, set_cpu_features};

const LENGTHS: [usize; 9] = [1, 2, 15, 16, 17, 32, 63, 64, 577];

/// Runs `test` at every level. The level is the process's, so one at a time.
pub(crate) fn at_every_level(test: impl Fn()) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    for features in CpuFeatures::supported() {
        set_cpu_features(features.name()).unwrap();
        assert_eq!(CpuFeatures::current(), features);
        test();
    }
}

/// Values between `-size` and `size`.
fn values(n: usize, seed: u32, size: f32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let bits = (i + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
            (bits.wrapping_mul(bits | 1) as i32) as f32 / 2_147_483_648.0 * size
        })
        .collect()
}

fn assert_near(got: &[f32], want: impl IntoIterator<Item = f64>, relative: f64, absolute: f64) {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= want.abs() * relative + absolute, "element {i}: {got} for {want}");
    }
}

fn pairs<'a>(x: &'a [f32], y: &'a [f32]) -> impl Iterator<Item = (f64, f64)> + 'a {
    x.iter().zip(y).map(|(&x, &y)| (f64::from(x), f64::from(y)))
}

#[test]
fn elementwise() {
    at_every_level(|| {
        for n in LENGTHS {
            let (x, y) = (values(n, 1, 12.0), values(n, 2, 3.0));
            let result = |f: fn(&mut [f32], &[f32])| {
                let mut out = x.clone();
                f(&mut out, &y);
                out
            };
            assert_near(&result(add_in_place), pairs(&x, &y).map(|(x, y)| x + y), 1e-7, 0.0);
            let silu = pairs(&x, &y).map(|(x, y)| x / (1.0 + (-x).exp()) * y);
            assert_near(&result(silu_mul), silu, 1e-6, 0.0);
            let gelu = pairs(&x, &y).map(|(x, y)| {
                // 1 + tanh(u) as 2 / (1 + e^-2u), exact where tanh is near -1.
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                x / (1.0 + (-2.0 * u).exp()) * y
            });
            // Where u is large, its rounding is what e^u multiplies.
            assert_near(&result(gelu_tanh_mul), gelu, 2e-5, 1e-38);

            let mut out = x.clone();
            scale(&mut out, 0.3);
            assert_near(&out, x.iter().map(|&x| f64::from(x) * f64::from(0.3f32)), 1e-7, 0.0);
            let mut out = x.clone();
            soft_cap(&mut out, 5.0);
            assert_near(&out, x.iter().map(|&x| 5.0 * (f64::from(x) / 5.0).tanh()), 0.0, 2e-6);
        }
    });
}

#[test]
fn normalization_treats_each_row_by_itself() {
    at_every_level(|| {
        for n in LENGTHS {
            let (x, weight) = (values(3 * n, 3, 2.0), values(n, 4, 1.5));
            let mut out = vec![f32::NAN; 3 * n];
            rms_norm(&x, &weight, 1e-5, &mut out);
            for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
                assert_near(out, pairs(x, &weight).map(|(x, w)| x * factor * w), 1e-6, 0.0);
                let mut alone = vec![0.0; n];
                rms_norm(x, &weight, 1e-5, &mut alone);
                assert_eq!(alone, out);
            }
        }
    });
}

#[test]
fn distributions() {
    at_every_level(|| {
        for n in LENGTHS {
            let mut x = values(n, 5, 30.0);
            if n > 2 {
                x[1] = f32::NEG_INFINITY;
            }
            let max = x.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
            let e: Vec<f64> = x.iter().map(|&x| (f64::from(x) - max).exp()).collect();
            let sum: f64 = e.iter().sum();
            let mut out = x.clone();
            softmax(&mut out);
            // A difference of up to 60 is rounded before it is an exponent.
            assert_near(&out, e.iter().map(|e| e / sum), 5e-6, 1e-44);
            let (got_max, got_sum) = exponentials(&mut x);
            assert_eq!(f64::from(got_max), max);
            assert_near(&[got_sum], [sum], 5e-6, 0.0);
            assert_near(&x, e, 5e-6, 1e-44);
        }
    });
}

#[test]
fn powers_of_e() {
    at_every_level(|| {
        for n in LENGTHS {
            let mut x = values(n, 9, 80.0);
            x[n / 2] = f32::NEG_INFINITY;
            let e: Vec<f64> = x.iter().map(|&x| f64::from(x).exp()).collect();
            let sum = exp(&mut x);
            assert_near(&x, e.iter().copied(), 3e-7, 1e-44);
            assert_near(&[sum], [e.iter().sum()], 3e-6, 0.0);
        }
        assert!(exp(&mut [0.0, f32::NAN]).is_nan());
        assert_eq!(exp(&mut []), 0.0);
    });
}

#[test]
fn distributions_of_odd_values() {
    at_every_level(|| {
        for n in LENGTHS {
            let mut x = vec![f32::NEG_INFINITY; n];
            assert_eq!(exponentials(&mut x), (f32::NEG_INFINITY, 0.0));
            let mut x = vec![f32::NEG_INFINITY; n];
            softmax(&mut x);
            assert_eq!(x, vec![0.0; n]);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = vec![1.0; n];
                x[n / 2] = bad;
                softmax(&mut x);
                assert!(x.iter().all(|x| x.is_nan()), "{bad} in {n}: {x:?}");
            }
            let mut x = vec![3e38; n];
            softmax(&mut x);
            assert_near(&x, vec![1.0 / n as f64; n], 1e-6, 0.0);
        }
        softmax(&mut []);
        assert_eq!(exponentials(&mut []), (f32::NEG_INFINITY, 0.0));
    });
}

#[test]
fn greatest_element() {
    at_every_level(|| {
        for n in LENGTHS {
            for at in [0, n / 3, n - 1] {
                let mut x = values(n, 6, 1.0);
                x[at] = 2.0;
                assert_eq!(argmax(&x), Some(at));
                x[n - 1] = 2.0;
                assert_eq!(argmax(&x), Some(at), "the first of equals");
            }
            assert_eq!(argmax(&vec![f32::NAN; n]), None);
            let mut x = vec![f32::NAN; n];
            x[n - 1] = f32::NEG_INFINITY;
            assert_eq!(argmax(&x), Some(n - 1));
        }
        assert_eq!(argmax(&[]), None);
    });
}

#[test]
fn rotation() {
    at_every_level(|| {
        for (head_dim, angles) in [(64, 32), (64, 16), (80, 40), (6, 2), (2, 1), (34, 17)] {
            let x = values(3 * head_dim, 7, 2.0);
            let angle = values(angles, 8, 3.0);
            let cos: Vec<f32> = angle.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angle.iter().map(|a| a.sin()).collect();
            for layout in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
                let mut out = x.clone();
                rope(&mut out, head_dim, &cos, &sin, layout);
                let mut want: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                for head in want.chunks_mut(head_dim) {
                    for i in 0..angles {
                        let (a, b) = match layout {
                            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                            RopeLayout::HalfSplit => (i, i + angles),
                        };
                        let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                        (head[a], head[b]) = (head[a] * c - head[b] * s, head[a] * s + head[b] * c);
                    }
                }
                assert_near(&out, want, 1e-7, 1e-6);
            }
        }
    });
}
