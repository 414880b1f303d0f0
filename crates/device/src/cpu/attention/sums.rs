//! Sums of rows by weight.

use super::rows::{Element, Rows, Slice, load_some};
use super::scaled::scale_behind;
use super::spans::{Span, Walk};
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};
use std::marker::PhantomData;

/// Adds the rows of each span, weighted, to the sum of each of its queries, one span after the other:
/// `acc[sum + h * width + d] += p[(query + h) * p_stride + column + i] * row[i][d]`, over `i` in order.
///
/// `p` is a table as the one that [`dot_rows`](super::dot_rows) fills. The sums of a span's queries lie one
/// after the other.
///
/// # Panics
/// When a slice is too short, the spans differ in type, or what belongs to two queries of a span
/// would overlap.
pub fn accumulate_rows(
    p: &[f32],
    p_stride: usize,
    width: usize,
    spans: &[Span<'_>],
    acc: &mut [f32],
) {
    for span in spans {
        span.check_scores(p_stride, p.len());
        let end = span.queries.checked_mul(width).and_then(|n| n.checked_add(span.sum));
        assert!(end.is_some_and(|n| n <= acc.len()), "sums beyond the {} elements", acc.len());
    }
    let Some(first) = spans.first().filter(|_| width > 0) else { return };
    let features = CpuFeatures::current();
    macro_rules! sum {
        ($type:ty) => {{
            let element = PhantomData::<$type>;
            dispatch(features, Sum { p, p_stride, width, spans, acc, element })
        }};
    }
    match first.rows.data {
        Slice::F32(_) => sum!(f32),
        Slice::F16(_) => sum!(half::f16),
        Slice::BF16(_) => sum!(half::bf16),
        Slice::E4M3(_) => sum!(crate::E4m3),
        Slice::I8(_) => spans.iter().for_each(|span| scaled(p, p_stride, width, span, acc)),
    }
}

/// The sums of int8 rows: weights take the scales on, some at a time.
fn scaled(p: &[f32], p_stride: usize, width: usize, span: &Span<'_>, acc: &mut [f32]) {
    const KEYS: usize = 64;
    const QUERIES: usize = 8;
    let Slice::I8(x) = span.rows.data else { panic!("rows of one type in a call") };
    let stride = span.rows.stride;
    let mut weights = [0.0; KEYS * QUERIES];
    for first in (0..span.count).step_by(KEYS) {
        let (count, x) = (KEYS.min(span.count - first), &x[first * stride..]);
        for query in (0..span.queries).step_by(QUERIES) {
            let queries = QUERIES.min(span.queries - query);
            for i in 0..count {
                let scale = scale_behind(&x[i * stride..], width);
                for h in 0..queries {
                    let p = p[(span.query + query + h) * p_stride + span.column + first + i];
                    weights[h * KEYS + i] = p * scale;
                }
            }
            let sum = span.sum + query * width;
            let spans = &[Span { sum, ..Span::new(Rows::i8(x, stride), count, queries) }];
            let element = PhantomData::<i8>;
            let sum = Sum { p: &weights, p_stride: KEYS, width, spans, acc: &mut *acc, element };
            dispatch(CpuFeatures::current(), sum);
        }
    }
}

struct Sum<'a, E> {
    p: &'a [f32],
    p_stride: usize,
    width: usize,
    spans: &'a [Span<'a>],
    acc: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for span in self.spans {
            let mut rows = Walk::new(span, self.width);
            let mut h = 0;
            while h < span.queries {
                let n = match span.queries - h {
                    4.. if S::REGISTERS >= 32 => self.queries::<S, 4>(s, span, h, &mut rows),
                    3 if S::REGISTERS >= 32 => self.queries::<S, 3>(s, span, h, &mut rows),
                    2.. => self.queries::<S, 2>(s, span, h, &mut rows),
                    _ => self.queries::<S, 1>(s, span, h, &mut rows),
                };
                h += n;
            }
        }
    }
}

impl<'a, E: Element> Sum<'a, E> {
    /// Queries `h..h + H` of a span, as many columns at a time as have room in registers; returns `H`.
    #[inline(always)]
    fn queries<S: Simd, const H: usize>(
        &mut self,
        s: S,
        span: &Span<'a>,
        h: usize,
        rows: &mut Walk<'a, E>,
    ) -> usize {
        let mut p = [&[][..]; H];
        for (i, p) in p.iter_mut().enumerate() {
            *p = &self.p[(span.query + h + i) * self.p_stride + span.column..][..span.count];
        }
        let width = self.width;
        let acc = &mut self.acc[span.sum + h * width..][..H * width];
        let mut column = 0;
        while column < width {
            column += match width - column {
                64.. if S::REGISTERS >= 32 => tile::<E, S, H, 4>(s, rows, p, acc, column),
                32.. => tile::<E, S, H, 2>(s, rows, p, acc, column),
                16.. => tile::<E, S, H, 1>(s, rows, p, acc, column),
                _ => rest::<E, S, H>(s, rows, p, acc, column),
            };
            *rows = rows.fetched();
        }
        H
    }
}

/// `C` vectors of columns of `H` sums; returns the number of columns.
#[inline(always)]
fn tile<E: Element, S: Simd, const H: usize, const C: usize>(
    s: S,
    rows: &mut Walk<'_, E>,
    p: [&[f32]; H],
    acc: &mut [f32],
    column: usize,
) -> usize {
    let (count, width) = (rows.count, rows.width);
    assert!(column + C * LANES <= width, "columns beyond the last");
    let mut sums = [[s.splat(0.0); C]; H];
    for (h, sums) in sums.iter_mut().enumerate() {
        let acc = &acc[h * width + column..][..C * LANES];
        for (sum, acc) in sums.iter_mut().zip(acc.as_chunks().0) {
            *sum = s.load(acc);
        }
    }
    for four in (0..count).step_by(4) {
        rows.fetch();
        for i in four..count.min(four + 4) {
            let mut x = [s.splat(0.0); C];
            for (c, x) in x.iter_mut().enumerate() {
                // SAFETY: one of the rows, and the tile's columns are inside.
                *x = E::load(s, unsafe { rows.vector(i, column + c * LANES) });
            }
            for (sums, p) in sums.iter_mut().zip(p) {
                let p = s.splat(p[i]);
                for c in 0..C {
                    sums[c] = s.fma(x[c], p, sums[c]);
                }
            }
        }
    }
    for (h, sums) in sums.into_iter().enumerate() {
        let acc = &mut acc[h * width + column..][..C * LANES];
        for (sum, acc) in sums.into_iter().zip(acc.as_chunks_mut().0) {
            s.store(sum, acc);
        }
    }
    C * LANES
}

/// The columns after the last whole vector of `H` sums; returns their number.
#[inline(always)]
fn rest<E: Element, S: Simd, const H: usize>(
    s: S,
    rows: &Walk<'_, E>,
    p: [&[f32]; H],
    acc: &mut [f32],
    column: usize,
) -> usize {
    let width = rows.width;
    let left = width - column;
    let mut sums = [s.splat(0.0); H];
    for (h, sum) in sums.iter_mut().enumerate() {
        *sum = s.load_part(&acc[h * width + column..][..left]);
    }
    for i in 0..rows.count {
        let x = load_some(s, rows.rest(i, column));
        for (sum, p) in sums.iter_mut().zip(p) {
            *sum = s.fma(x, s.splat(p[i]), *sum);
        }
    }
    for (h, sum) in sums.into_iter().enumerate() {
        s.store_part(sum, &mut acc[h * width + column..][..left]);
    }
    left
}
