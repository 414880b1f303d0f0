//! Scores of queries with rows.

use super::rows::{Element, Slice, load_some};
use super::scaled::scale_behind;
use super::spans::{Span, Walk};
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};
use std::marker::PhantomData;
use std::ops::Range;

/// Scores of the rows of each span with each of its queries:
/// `out[(query + h) * out_stride + column + i] = q[query + h] . row[i]`.
///
/// `q` is `[n, width]`, and `out` has as many rows, `out_stride` apart, with a column for each position.
///
/// # Panics
/// When a slice is too short, the spans differ in type or number of queries, or what belongs to two
/// queries of a span would overlap.
pub fn dot_rows(q: &[f32], width: usize, spans: &[Span<'_>], out: &mut [f32], out_stride: usize) {
    let Some(&Span { queries, rows, .. }) = spans.first() else { return };
    for span in spans {
        assert_eq!(span.queries, queries, "spans of one call have as many queries each");
        span.check_scores(out_stride, out.len());
        let end = span.query.checked_add(queries).and_then(|n| n.checked_mul(width));
        assert!(end.is_some_and(|n| n <= q.len()), "queries beyond the {} elements", q.len());
    }
    if width == 0 {
        let places = spans.iter().flat_map(|s| (0..queries).map(move |h| (s, h)));
        return places.for_each(|(s, h)| {
            out[(s.query + h) * out_stride + s.column..][..s.count].fill(0.0);
        });
    }
    let table = Table { q, width, spans, queries, out, out_stride };
    match rows.data {
        Slice::F32(_) => table.fill::<f32>(),
        Slice::F16(_) => table.fill::<half::f16>(),
        Slice::BF16(_) => table.fill::<half::bf16>(),
        Slice::E4M3(_) => table.fill::<crate::E4m3>(),
        Slice::I8(_) => {
            table.fill::<i8>();
            for span in spans {
                let Slice::I8(x) = span.rows.data else { continue };
                for i in 0..span.count {
                    let scale = scale_behind(&x[i * span.rows.stride..], width);
                    let places = &mut out[span.query * out_stride + span.column + i..];
                    places
                        .iter_mut()
                        .step_by(out_stride.max(1))
                        .take(queries)
                        .for_each(|x| *x *= scale);
                }
            }
        }
    }
}

/// What meets what, and where the scores go.
struct Table<'a> {
    q: &'a [f32],
    width: usize,
    spans: &'a [Span<'a>],
    queries: usize,
    out: &'a mut [f32],
    out_stride: usize,
}

impl Table<'_> {
    /// All scores. How many queries are taken at a time is known when a kernel begins: one for every
    /// number would keep too little in registers.
    fn fill<E: Element>(self) {
        let Self { q, width, spans, queries, out, out_stride } = self;
        let features = CpuFeatures::current();
        let fours = queries / 4 * 4;
        macro_rules! dot {
            ($n:literal, $queries:expr) => {
                dispatch(
                    features,
                    Dot::<E, $n> {
                        q,
                        width,
                        spans,
                        queries: $queries,
                        out,
                        out_stride,
                        element: PhantomData,
                    },
                )
            };
        }
        if fours > 0 {
            dot!(4, 0..fours);
        }
        match queries - fours {
            3 => dot!(3, fours..queries),
            2 => dot!(2, fours..queries),
            1 => dot!(1, fours..queries),
            _ => {}
        }
    }
}

/// Scores of the queries in a range of each span's, `H` at a time.
struct Dot<'a, E, const H: usize> {
    q: &'a [f32],
    width: usize,
    spans: &'a [Span<'a>],
    queries: Range<usize>,
    out: &'a mut [f32],
    out_stride: usize,
    element: PhantomData<E>,
}

impl<E: Element, const H: usize> Kernel for Dot<'_, E, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for span in self.spans {
            let mut rows = Walk::<E>::new(span, self.width);
            if self.queries.start > 0 {
                rows = rows.fetched();
            }
            for h in self.queries.clone().step_by(H) {
                self.tile(s, &mut rows, span.query + h, span.column);
                rows = rows.fetched();
            }
        }
    }
}

impl<E: Element, const H: usize> Dot<'_, E, H> {
    /// Queries `query..query + H`, whose scores begin in `column`.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, s: S, rows: &mut Walk<'_, E>, query: usize, column: usize) {
        let width = self.width;
        let mut q = [Query { whole: &[], rest: &[] }; H];
        for (h, q) in q.iter_mut().enumerate() {
            let (whole, rest) = self.q[(query + h) * width..][..width].as_chunks();
            // A length known for all leaves nothing to be checked in the loops.
            *q = Query { whole: &whole[..width / LANES], rest };
        }
        let whole = rows.count / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            let mut quarters = [[s.splat(0.0); 4]; H];
            for j in 0..4 {
                rows.fetch();
                // Rows 4 apart, whose sums `quarters` and `sum_quarters` put in their places.
                let mut sums = [[s.splat(0.0); 4]; H];
                if S::REGISTERS >= 32 {
                    sums = Self::products::<S, 4>(s, &q, rows, first + j);
                } else {
                    for k in 0..4 {
                        let of_row = Self::products::<S, 1>(s, &q, rows, first + j + 4 * k);
                        for (sums, [sum]) in sums.iter_mut().zip(of_row) {
                            sums[k] = sum;
                        }
                    }
                }
                for (quarters, sums) in quarters.iter_mut().zip(&sums) {
                    quarters[j] = s.quarters(sums);
                }
            }
            for (h, quarters) in quarters.iter().enumerate() {
                let out = &mut self.out[(query + h) * self.out_stride + column + first..];
                let out = out.first_chunk_mut().expect("a place for each row");
                s.store(s.sum_quarters(quarters), out);
            }
        }
        for i in whole..rows.count {
            for (h, [sum]) in Self::products::<S, 1>(s, &q, rows, i).into_iter().enumerate() {
                self.out[(query + h) * self.out_stride + column + i] = s.sum(sum);
            }
        }
    }

    /// The products of rows `first`, `first + 4` and so on, `R` of them, with each query, summed over
    /// vectors and not yet over lanes.
    #[inline(always)]
    fn products<S: Simd, const R: usize>(
        s: S,
        q: &[Query<'_>; H],
        rows: &Walk<'_, E>,
        first: usize,
    ) -> [[S::F; R]; H] {
        assert!(first + 4 * R <= rows.count + 3, "rows beyond the last");
        let vectors = rows.width / LANES;
        let mut sums = [[s.splat(0.0); R]; H];
        for c in 0..vectors {
            let mut x = [s.splat(0.0); R];
            for (r, x) in x.iter_mut().enumerate() {
                // SAFETY: the last row's number is `first + 4 R - 4`, and these are whole vectors.
                *x = E::load(s, unsafe { rows.vector(first + 4 * r, c * LANES) });
            }
            for (q, sums) in q.iter().zip(&mut sums) {
                let q = s.load(&q.whole[c]);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.fma(q, x, *sum);
                }
            }
        }
        if !rows.width.is_multiple_of(LANES) {
            let mut x = [s.splat(0.0); R];
            for (r, x) in x.iter_mut().enumerate() {
                *x = load_some(s, rows.rest(first + 4 * r, vectors * LANES));
            }
            for (q, sums) in q.iter().zip(&mut sums) {
                let q = s.load_part(q.rest);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.fma(q, x, *sum);
                }
            }
        }
        sums
    }
}

/// A query in vectors, and what is left over.
#[derive(Clone, Copy)]
struct Query<'a> {
    whole: &'a [[f32; LANES]],
    rest: &'a [f32],
}
