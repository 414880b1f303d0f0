//! Products with rows of every type against float64, whole and in parts.

use half::{bf16, f16};

use super::*;
use crate::E4m3;

const WIDTHS: [usize; 10] = [1, 7, 16, 33, 64, 80, 96, 100, 128, 256];

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let bits = (i + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
            (bits.wrapping_mul(bits | 1) as i32) as f32 / 2_147_483_648.0
        })
        .collect()
}

/// The same values in each type, with the exact value each rounds to.
fn with_each_type(x: &[f32], stride: usize, test: impl Fn(Rows<'_>, &[f64])) {
    let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    test(Rows::f32(x, stride), &exact);
    let halves: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    let exact: Vec<f64> = halves.iter().map(|x| x.to_f64()).collect();
    test(Rows::f16(&halves, stride), &exact);
    let halves: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let exact: Vec<f64> = halves.iter().map(|x| x.to_f64()).collect();
    test(Rows::bf16(&halves, stride), &exact);
    let eighths: Vec<E4m3> = x.iter().map(|&x| E4m3::from_f32(x)).collect();
    let exact: Vec<f64> = eighths.iter().map(|x| f64::from(x.to_f32())).collect();
    test(Rows::e4m3(&eighths, stride), &exact);
}

/// Scores of `count` rows with each of `heads` queries.
pub(crate) fn dot_some(
    q: &[f32],
    heads: usize,
    rows: Rows<'_>,
    count: usize,
    out: &mut [f32],
    stride: usize,
) {
    dot_rows(q, q.len() / heads, &[Span::new(rows, count, heads)], out, stride);
}

/// Adds `count` rows to each of `heads` sums.
pub(crate) fn add_some(
    p: &[f32],
    stride: usize,
    heads: usize,
    rows: Rows<'_>,
    count: usize,
    acc: &mut [f32],
) {
    accumulate_rows(p, stride, acc.len() / heads, &[Span::new(rows, count, heads)], acc);
}

/// Rows from `i` on.
fn from<'a>(rows: Rows<'a>, i: usize) -> Rows<'a> {
    let stride = rows.stride;
    match rows.data {
        Slice::F32(x) => Rows::f32(&x[i * stride..], stride),
        Slice::F16(x) => Rows::f16(&x[i * stride..], stride),
        Slice::BF16(x) => Rows::bf16(&x[i * stride..], stride),
        Slice::E4M3(x) => Rows::e4m3(&x[i * stride..], stride),
        Slice::I8(x) => Rows::i8(&x[i * stride..], stride),
    }
}

#[test]
fn scores() {
    crate::cpu::ops::tests::at_every_level(|| {
        for width in WIDTHS {
            for (heads, count, gap) in
                [(1, 16, 0), (3, 5, 3), (9, 2, 1), (4, 1, 0), (2, 0, 0), (6, 37, 2), (8, 32, 0)]
            {
                let stride = width + gap;
                let (x, q) = (values(37 * stride, 1), values(heads * width, 2));
                let out_stride = count + 2;
                with_each_type(&x, stride, |rows, exact| {
                    let mut out = vec![7.0; heads * out_stride];
                    dot_some(&q, heads, rows, count, &mut out, out_stride);
                    for (at, &got) in out.iter().enumerate() {
                        let (h, i) = (at / out_stride, at % out_stride);
                        if i >= count {
                            assert_eq!(got, 7.0, "written beside the scores");
                            continue;
                        }
                        let row = &exact[i * stride..][..width];
                        let q = &q[h * width..][..width];
                        let want: f64 = row.iter().zip(q).map(|(x, &q)| x * f64::from(q)).sum();
                        assert!((f64::from(got) - want).abs() < 2e-6 * (width as f64).sqrt());
                        // The same alone.
                        let mut one = [0.0];
                        let rest = from(rows, i);
                        dot_some(q, 1, rest, 1, &mut one, 1);
                        assert_eq!(one[0], got);
                    }
                });
            }
        }
    });
}

#[test]
fn weighted_sums() {
    crate::cpu::ops::tests::at_every_level(|| {
        for width in WIDTHS {
            for (heads, count, gap) in
                [(1, 16, 0), (3, 5, 3), (9, 2, 1), (4, 1, 0), (2, 0, 0), (7, 14, 0)]
            {
                let stride = width + gap;
                let p_stride = count + 1;
                let (x, p) = (values(16 * stride, 3), values(heads * p_stride, 4));
                let start = values(heads * width, 5);
                with_each_type(&x, stride, |rows, exact| {
                    let mut acc = start.clone();
                    add_some(&p, p_stride, heads, rows, count, &mut acc);
                    for (at, &got) in acc.iter().enumerate() {
                        let (h, c) = (at / width, at % width);
                        let terms = (0..count)
                            .map(|i| f64::from(p[h * p_stride + i]) * exact[i * stride + c]);
                        let want = f64::from(start[at]) + terms.sum::<f64>();
                        assert!((f64::from(got) - want).abs() < 4e-6);
                    }
                    // The same row by row and head by head.
                    let mut parts = start.clone();
                    for i in 0..count {
                        for (h, acc) in parts.chunks_mut(width).enumerate() {
                            let rest = from(rows, i);
                            add_some(&p[h * p_stride + i..][..1], 1, 1, rest, 1, acc);
                        }
                    }
                    assert_eq!(parts, acc);
                });
            }
        }
    });
}

#[test]
fn rows_are_rounded_and_widened() {
    crate::cpu::ops::tests::at_every_level(|| {
        for width in WIDTHS {
            let x = values(width, 6);
            let (mut half, mut brain) = (vec![f16::ZERO; width], vec![bf16::ZERO; width]);
            store_row(&x, &mut half);
            store_row(&x, &mut brain);
            let mut out = vec![0.0; width];
            for i in 0..width {
                assert_eq!(half[i], f16::from_f32(x[i]));
                assert_eq!(brain[i], bf16::from_f32(x[i]));
            }
            load_row(Rows::f16(&half, width), 0, &mut out);
            assert!(out.iter().zip(&half).all(|(&o, h)| o == h.to_f32()));
            load_row(Rows::bf16(&brain, width), 0, &mut out);
            assert!(out.iter().zip(&brain).all(|(&o, h)| o == h.to_f32()));
            let twice = [x.clone(), x.clone()].concat();
            load_row(Rows::f32(&twice, width), 1, &mut out);
            assert_eq!(out, x);
        }
    });
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let x = [0.0; 64];
    let refused = |test: &(dyn Fn() + std::panic::RefUnwindSafe)| {
        assert!(std::panic::catch_unwind(test).is_err());
    };
    refused(&|| dot_some(&[0.0; 16], 1, Rows::f32(&x, 17), 4, &mut [0.0; 4], 4));
    refused(&|| dot_some(&[0.0; 16], 1, Rows::f32(&x, usize::MAX), 3, &mut [0.0; 4], 4));
    refused(&|| dot_some(&[0.0; 32], 2, Rows::f32(&x, 16), 4, &mut [0.0; 7], 4));
    refused(&|| dot_some(&[0.0; 32], 2, Rows::f32(&x, 16), 4, &mut [0.0; 8], 3));
    let rows = Rows::f32(&x, 16);
    let span = Span::new(rows, 4, 1);
    let dot = |spans: &[Span<'_>]| dot_rows(&[0.0; 32], 16, spans, &mut [0.0; 8], 4);
    dot(&[Span { query: 1, ..span }]);
    refused(&|| dot(&[Span { query: 2, ..span }]));
    refused(&|| dot(&[Span { column: 5, ..span }]));
    refused(&|| dot(&[Span { column: usize::MAX, ..span }]));
    refused(&|| dot(&[Span { query: usize::MAX, ..span }]));
    refused(&|| dot(&[Span { column: 1, queries: 2, ..span }]));
    refused(&|| dot(&[span, Span { queries: 2, ..span }]));
    refused(&|| dot(&[span, Span { rows: Rows::bf16(&[half::bf16::ONE; 64], 16), ..span }]));
    let add = |spans: &[Span<'_>]| accumulate_rows(&[0.0; 8], 4, 16, spans, &mut [0.0; 32]);
    add(&[Span { sum: 16, ..span }]);
    refused(&|| add(&[Span { sum: 17, ..span }]));
    refused(&|| add(&[Span { sum: usize::MAX, ..span }]));
    refused(&|| add(&[Span { query: 2, ..span }]));
    refused(&|| add_some(&[0.0; 3], 4, 1, Rows::f32(&x, 16), 4, &mut [0.0; 16]));
    refused(&|| load_row(Rows::f32(&x, 16), usize::MAX, &mut [0.0; 16]));
}

#[test]
fn what_is_asked_for_ahead_changes_nothing() {
    crate::cpu::ops::tests::at_every_level(|| {
        for (width, heads, count) in [(64, 3, 16), (33, 5, 21), (256, 1, 40), (1, 2, 3)] {
            let (x, q) = (values(2 * 40 * width, 1), values(heads * width, 2));
            with_each_type(&x, width, |rows, _| {
                let later = [from(rows, 40), from(rows, 79), Rows::f32(&x[..1], 1), rows];
                let (mut want, mut want_sums) = (vec![0.0; heads * count], q.clone());
                dot_some(&q, heads, rows, count, &mut want, count);
                add_some(&want, count, heads, rows, count, &mut want_sums);
                for later in later {
                    let rows = rows.before(later);
                    let (mut got, mut sums) = (vec![0.0; heads * count], q.clone());
                    dot_some(&q, heads, rows, count, &mut got, count);
                    add_some(&got, count, heads, rows, count, &mut sums);
                    assert_eq!((&got, &sums), (&want, &want_sums));
                }
            });
        }
    });
}

/// A key that is no number makes its own score none, and leaves the 15 that are added up with it alone;
/// so do the greatest and the smallest that there are.
#[test]
fn a_row_of_any_value_changes_no_other_score() {
    crate::cpu::ops::tests::at_every_level(|| {
        for width in [16, 64, 100] {
            let (mut x, q) = (values(33 * width, 1), values(3 * width, 2));
            let mut want = vec![0.0; 3 * 33];
            dot_some(&q, 3, Rows::f32(&x, width), 33, &mut want, 33);
            for odd in [f32::NAN, f32::INFINITY, f32::MAX, 1e-42, -0.0] {
                for i in [0, 5, 15, 16, 31, 32] {
                    let kept = x[i * width..][..width].to_vec();
                    x[i * width..][..width].fill(odd);
                    let mut got = vec![0.0; 3 * 33];
                    dot_some(&q, 3, Rows::f32(&x, width), 33, &mut got, 33);
                    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                        let (h, row) = (at / 33, at % 33);
                        if row != i {
                            assert_eq!(got, want, "row {row} beside {odd} in {i}");
                            continue;
                        }
                        let sum: f64 = q[h * width..][..width].iter().map(|&q| f64::from(q)).sum();
                        let exact = sum * f64::from(odd);
                        match odd.is_finite() {
                            // Sums may pass what float32 holds on the way: infinite or no number.
                            true if odd == f32::MAX => {}
                            true => assert!((f64::from(*got) - exact).abs() <= 1e-6),
                            false => assert!(!got.is_finite(), "{got} of {odd}"),
                        }
                    }
                    x[i * width..][..width].copy_from_slice(&kept);
                }
            }
        }
    });
}

/// Many spans in one call, of several heads and lengths, are one after the other each alone.
#[test]
fn spans_of_a_call_are_those_of_many() {
    crate::cpu::ops::tests::at_every_level(|| {
        for (width, queries) in [(64, 3), (33, 1), (256, 6), (7, 9)] {
            let x = values(64 * width, 1);
            let (q, start) = (values(2 * queries * width, 2), values(2 * queries * width, 3));
            with_each_type(&x, width, |rows, _| {
                let lens = [16, 5, 16, 1];
                let mut spans = Vec::new();
                for (i, count) in lens.into_iter().enumerate() {
                    let column = lens[..i].iter().sum();
                    for head in 0..2 {
                        let rows = from(rows, 16 * i + head).before(from(rows, 20));
                        let (query, sum) = (head * queries, head * queries * width);
                        spans.push(Span { rows, count, query, queries, column, sum });
                    }
                }
                let run = |calls: &[&[Span<'_>]]| {
                    let (mut scores, mut acc) = (vec![7.0; 2 * queries * 40], start.clone());
                    calls.iter().for_each(|spans| dot_rows(&q, width, spans, &mut scores, 40));
                    calls
                        .iter()
                        .for_each(|spans| accumulate_rows(&scores, 40, width, spans, &mut acc));
                    (scores, acc)
                };
                let alone: Vec<&[Span<'_>]> = spans.chunks(1).collect();
                assert_eq!(run(&[&spans]), run(&alone));
            });
        }
    });
}
