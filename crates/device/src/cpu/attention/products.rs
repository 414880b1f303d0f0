//! Scores of queries with rows, and sums of rows by weight.

use super::rows::{Element, Rows, Slice, load_some};
use super::scaled::scale_behind;
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch, prefetch};

/// Scores of `count` rows with each of `heads` queries: `out[h * out_stride + i] = q[h] . row[i]`.
///
/// `q` is `[heads, width]`. `out_stride`, at least `count` where there are several heads, lets `out`
/// be a part of a larger table whose rows are heads and whose columns are positions.
///
/// # Panics
/// When a slice is too short, or `q` is not whole heads.
pub fn dot_rows(
    q: &[f32],
    heads: usize,
    rows: Rows<'_>,
    count: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let width = head_width(q.len(), heads);
    check_table(heads, count, out_stride, out.len());
    if heads == 0 || count == 0 {
        return;
    }
    if width == 0 {
        return (0..heads).for_each(|h| out[h * out_stride..][..count].fill(0.0));
    }
    let table = Table { q, out, out_stride };
    match rows.data {
        Slice::F32(x) => table.fill(heads, Walk::new(x, &rows, count, width)),
        Slice::F16(x) => table.fill(heads, Walk::new(x, &rows, count, width)),
        Slice::BF16(x) => table.fill(heads, Walk::new(x, &rows, count, width)),
        Slice::I8(x) => {
            table.fill(heads, Walk::new(x, &rows, count, width));
            for i in 0..count {
                let scale = scale_behind(&x[i * rows.stride..], width);
                (0..heads).for_each(|h| out[h * out_stride + i] *= scale);
            }
        }
    }
}

/// Adds `count` rows, weighted, to each of `heads` sums:
/// `acc[h] += sum over i of p[h * p_stride + i] * row[i]`.
///
/// `acc` is `[heads, width]`; `p_stride` is as `out_stride` of [`dot_rows`].
///
/// # Panics
/// When a slice is too short, or `acc` is not whole heads.
pub fn accumulate_rows(
    p: &[f32],
    p_stride: usize,
    heads: usize,
    rows: Rows<'_>,
    count: usize,
    acc: &mut [f32],
) {
    let width = head_width(acc.len(), heads);
    check_table(heads, count, p_stride, p.len());
    if heads == 0 || count == 0 {
        return;
    }
    let features = CpuFeatures::current();
    macro_rules! sum {
        ($x:expr) => {
            dispatch(features, Sum { p, p_stride, x: Walk::new($x, &rows, count, width), acc })
        };
    }
    match rows.data {
        Slice::F32(x) => sum!(x),
        Slice::F16(x) => sum!(x),
        Slice::BF16(x) => sum!(x),
        Slice::I8(_) if width == 0 => {}
        Slice::I8(x) => {
            // Weights take the scales on, some at a time.
            const KEYS: usize = 64;
            const HEADS: usize = 8;
            let mut weights = [0.0; KEYS * HEADS];
            for first in (0..count).step_by(KEYS) {
                let (n, x) = (KEYS.min(count - first), &x[first * rows.stride..]);
                let part = Rows::i8(x, rows.stride);
                for (group, acc) in acc.chunks_mut(HEADS * width).enumerate() {
                    let p = &p[group * HEADS * p_stride + first..];
                    for i in 0..n {
                        let scale = scale_behind(&x[i * rows.stride..], width);
                        for h in 0..acc.len() / width {
                            weights[h * KEYS + i] = p[h * p_stride + i] * scale;
                        }
                    }
                    let (p, x) = (&weights[..], Walk::new(x, &part, n, width));
                    dispatch(features, Sum { p, p_stride: KEYS, x, acc });
                }
            }
        }
    }
}

fn head_width(len: usize, heads: usize) -> usize {
    assert!(len.is_multiple_of(heads.max(1)), "{len} elements are not {heads} heads");
    len / heads.max(1)
}

fn check_table(heads: usize, count: usize, stride: usize, len: usize) {
    assert!(heads <= 1 || stride >= count, "{count} columns at a stride of {stride} overlap");
    let fits = heads == 0
        || (heads - 1)
            .checked_mul(stride)
            .and_then(|s| s.checked_add(count))
            .is_some_and(|n| n <= len);
    assert!(fits, "{heads} rows of {count} at a stride of {stride} do not fit into {len}");
}

/// Rows that a kernel goes through, and those to be fetched on the way.
#[derive(Clone, Copy)]
struct Walk<'a, E> {
    x: &'a [E],
    stride: usize,
    width: usize,
    count: usize,
    next: &'a [u8],
}

impl<'a, E: Element> Walk<'a, E> {
    /// The elements `x` of `rows`, of which there must be `count`.
    fn new(x: &'a [E], rows: &Rows<'a>, count: usize, width: usize) -> Self {
        rows.check(count, width);
        assert_eq!(x.len(), rows.len(), "other elements than the rows'");
        Self { x, stride: rows.stride, width, count, next: rows.next }
    }

    /// 16 elements of row `i` from `column` on.
    ///
    /// # Safety
    /// There are that many rows, and columns.
    #[inline(always)]
    unsafe fn vector(&self, i: usize, column: usize) -> &'a [E; LANES] {
        debug_assert!(i < self.count && column + LANES <= self.width);
        // SAFETY: by the caller's promise inside a row, and `new` has seen that all rows lie in `x`.
        unsafe { &*self.x.as_ptr().add(i * self.stride + column).cast() }
    }

    /// Row `i` from `column` on.
    #[inline(always)]
    fn rest(&self, i: usize, column: usize) -> &'a [E] {
        &self.x[i * self.stride..][..self.width][column..]
    }

    /// Asks for as much of what comes next as four rows take, or for 16 lines of it.
    #[inline(always)]
    fn fetch(&mut self) {
        match self.width * size_of::<E>() > 2 * LINE {
            true => self.fetch_lines::<16>(),
            false => self.fetch_lines::<8>(),
        }
    }

    #[inline(always)]
    fn fetch_lines<const N: usize>(&mut self) {
        if let Some((lines, rest)) = self.next.split_at_checked(N * LINE) {
            for i in 0..N {
                prefetch(lines.as_ptr().wrapping_add(i * LINE));
            }
            self.next = rest;
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Queries, and where their scores go.
struct Table<'a> {
    q: &'a [f32],
    out: &'a mut [f32],
    out_stride: usize,
}

impl Table<'_> {
    /// The scores of all `heads` queries. How many are taken at a time is known when a kernel begins:
    /// one for every number would take longer to begin than a page of keys takes.
    fn fill<E: Element>(self, heads: usize, mut x: Walk<'_, E>) {
        let Self { q, out, out_stride } = self;
        let features = CpuFeatures::current();
        let fours = heads / 4 * 4;
        let (first, rest) = q.split_at(fours * x.width);
        if fours > 0 {
            dispatch(features, Dot::<E, 4> { q: first, x, out, out_stride });
            x.next = &[];
        }
        let q = rest;
        let out = out.get_mut(fours * out_stride..).unwrap_or_default();
        match heads - fours {
            3 => dispatch(features, Dot::<E, 3> { q, x, out, out_stride }),
            2 => dispatch(features, Dot::<E, 2> { q, x, out, out_stride }),
            1 => dispatch(features, Dot::<E, 1> { q, x, out, out_stride }),
            _ => {}
        }
    }
}

/// Scores of queries, `H` at a time.
struct Dot<'a, E, const H: usize> {
    q: &'a [f32],
    x: Walk<'a, E>,
    out: &'a mut [f32],
    out_stride: usize,
}

impl<E: Element, const H: usize> Kernel for Dot<'_, E, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let heads = self.q.len() / self.x.width;
        for head in (0..heads).step_by(H) {
            self.tile(s, head);
            self.x.next = &[];
        }
    }
}

impl<E: Element, const H: usize> Dot<'_, E, H> {
    /// Heads `head..head + H`.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, s: S, head: usize) {
        let width = self.x.width;
        let mut q = [Query { whole: &[], rest: &[] }; H];
        for (h, q) in q.iter_mut().enumerate() {
            let (whole, rest) = self.q[(head + h) * width..][..width].as_chunks();
            // A length known for all leaves nothing to be checked in the loops.
            *q = Query { whole: &whole[..width / LANES], rest };
        }
        let whole = self.x.count / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            let mut quarters = [[s.splat(0.0); 4]; H];
            for j in 0..4 {
                self.x.fetch();
                // Rows 4 apart, whose sums `quarters` and `sum_quarters` put in their places.
                let mut sums = [[s.splat(0.0); 4]; H];
                if S::REGISTERS >= 32 {
                    sums = self.products::<S, 4>(s, &q, first + j);
                } else {
                    for k in 0..4 {
                        let of_row = self.products::<S, 1>(s, &q, first + j + 4 * k);
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
                let out = &mut self.out[(head + h) * self.out_stride + first..];
                let out = out.first_chunk_mut().expect("a place for each row");
                s.store(s.sum_quarters(quarters), out);
            }
        }
        for i in whole..self.x.count {
            for (h, [sum]) in self.products::<S, 1>(s, &q, i).into_iter().enumerate() {
                self.out[(head + h) * self.out_stride + i] = s.sum(sum);
            }
        }
    }

    /// The products of rows `first`, `first + 4` and so on, `R` of them, with each query, summed over
    /// vectors and not yet over lanes.
    #[inline(always)]
    fn products<S: Simd, const R: usize>(
        &self,
        s: S,
        q: &[Query<'_>; H],
        first: usize,
    ) -> [[S::F; R]; H] {
        assert!(first + 4 * R <= self.x.count + 3, "rows beyond the last");
        let vectors = self.x.width / LANES;
        let mut sums = [[s.splat(0.0); R]; H];
        for c in 0..vectors {
            let mut x = [s.splat(0.0); R];
            for (r, x) in x.iter_mut().enumerate() {
                // SAFETY: the last row's number is `first + 4 R - 4`, and these are whole vectors.
                *x = E::load(s, unsafe { self.x.vector(first + 4 * r, c * LANES) });
            }
            for (q, sums) in q.iter().zip(&mut sums) {
                let q = s.load(&q.whole[c]);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.fma(q, x, *sum);
                }
            }
        }
        if !self.x.width.is_multiple_of(LANES) {
            let mut x = [s.splat(0.0); R];
            for (r, x) in x.iter_mut().enumerate() {
                *x = load_some(s, self.x.rest(first + 4 * r, vectors * LANES));
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

struct Sum<'a, E> {
    p: &'a [f32],
    p_stride: usize,
    x: Walk<'a, E>,
    acc: &'a mut [f32],
}

impl<E: Element> Kernel for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let heads = self.acc.len().checked_div(self.x.width).unwrap_or(0);
        let mut head = 0;
        while head < heads {
            head += match heads - head {
                4.. if S::REGISTERS >= 32 => self.heads::<S, 4>(s, head),
                3 if S::REGISTERS >= 32 => self.heads::<S, 3>(s, head),
                2.. => self.heads::<S, 2>(s, head),
                _ => self.heads::<S, 1>(s, head),
            };
        }
    }
}

impl<'a, E: Element> Sum<'a, E> {
    /// Of each of `H` heads one weight a row.
    #[inline(always)]
    fn weights<const H: usize>(&self, head: usize) -> [&'a [f32]; H] {
        let mut p = [&[][..]; H];
        for (h, p) in p.iter_mut().enumerate() {
            *p = &self.p[(head + h) * self.p_stride..][..self.x.count];
        }
        p
    }

    /// Heads `head..head + H`, as many columns at a time as have room in registers; returns `H`.
    #[inline(always)]
    fn heads<S: Simd, const H: usize>(&mut self, s: S, head: usize) -> usize {
        let mut column = 0;
        let width = self.x.width;
        while column < width {
            column += match width - column {
                64.. if S::REGISTERS >= 32 => self.tile::<S, H, 4>(s, head, column),
                32.. => self.tile::<S, H, 2>(s, head, column),
                16.. => self.tile::<S, H, 1>(s, head, column),
                _ => self.rest::<S, H>(s, head, column),
            };
            self.x.next = &[];
        }
        H
    }

    /// `C` vectors of columns of `H` sums; returns the number of columns.
    #[inline(always)]
    fn tile<S: Simd, const H: usize, const C: usize>(
        &mut self,
        s: S,
        head: usize,
        column: usize,
    ) -> usize {
        let mut sums = [[s.splat(0.0); C]; H];
        for (h, sums) in sums.iter_mut().enumerate() {
            let acc = &self.acc[(head + h) * self.x.width + column..][..C * LANES];
            for (sum, acc) in sums.iter_mut().zip(acc.as_chunks().0) {
                *sum = s.load(acc);
            }
        }
        let p = self.weights::<H>(head);
        let count = self.x.count;
        assert!(column + C * LANES <= self.x.width, "columns beyond the last");
        for four in (0..count).step_by(4) {
            self.x.fetch();
            for i in four..count.min(four + 4) {
                let mut x = [s.splat(0.0); C];
                for (c, x) in x.iter_mut().enumerate() {
                    // SAFETY: one of the rows, and the tile's columns are inside.
                    *x = E::load(s, unsafe { self.x.vector(i, column + c * LANES) });
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
            let acc = &mut self.acc[(head + h) * self.x.width + column..][..C * LANES];
            for (sum, acc) in sums.into_iter().zip(acc.as_chunks_mut().0) {
                s.store(sum, acc);
            }
        }
        C * LANES
    }

    /// The columns after the last whole vector of `H` sums; returns their number.
    #[inline(always)]
    fn rest<S: Simd, const H: usize>(&mut self, s: S, head: usize, column: usize) -> usize {
        let left = self.x.width - column;
        let mut sums = [s.splat(0.0); H];
        for (h, sum) in sums.iter_mut().enumerate() {
            *sum = s.load_part(&self.acc[(head + h) * self.x.width + column..][..left]);
        }
        let p = self.weights::<H>(head);
        for i in 0..self.x.count {
            let x = load_some(s, self.x.rest(i, column));
            for (sum, p) in sums.iter_mut().zip(p) {
                *sum = s.fma(x, s.splat(p[i]), *sum);
            }
        }
        for (h, sum) in sums.into_iter().enumerate() {
            s.store_part(sum, &mut self.acc[(head + h) * self.x.width + column..][..left]);
        }
        left
    }
}
