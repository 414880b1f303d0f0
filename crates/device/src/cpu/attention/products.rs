//! Scores of queries with rows, and sums of rows by weight.

use super::rows::{Element, Rows, Slice, load_some};
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

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
    rows.check(count, width);
    check_table(heads, count, out_stride, out.len());
    if heads == 0 || count == 0 {
        return;
    }
    let stride = rows.stride;
    let features = CpuFeatures::current();
    match rows.data {
        Slice::F32(x) => dispatch(features, Dot { q, width, x, stride, count, out, out_stride }),
        Slice::F16(x) => dispatch(features, Dot { q, width, x, stride, count, out, out_stride }),
        Slice::BF16(x) => dispatch(features, Dot { q, width, x, stride, count, out, out_stride }),
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
    rows.check(count, width);
    check_table(heads, count, p_stride, p.len());
    if heads == 0 || count == 0 {
        return;
    }
    let stride = rows.stride;
    let features = CpuFeatures::current();
    match rows.data {
        Slice::F32(x) => dispatch(features, Sum { p, p_stride, x, stride, count, acc, width }),
        Slice::F16(x) => dispatch(features, Sum { p, p_stride, x, stride, count, acc, width }),
        Slice::BF16(x) => dispatch(features, Sum { p, p_stride, x, stride, count, acc, width }),
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

struct Dot<'a, E> {
    q: &'a [f32],
    width: usize,
    x: &'a [E],
    stride: usize,
    count: usize,
    out: &'a mut [f32],
    out_stride: usize,
}

impl<E: Element> Kernel for Dot<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let heads = self.q.len().checked_div(self.width);
        let Some(heads) = heads else {
            return self.out.fill(0.0);
        };
        let mut head = 0;
        while head < heads {
            head += match heads - head {
                4.. => self.tile::<S, 4>(s, head),
                3 => self.tile::<S, 3>(s, head),
                2 => self.tile::<S, 2>(s, head),
                _ => self.tile::<S, 1>(s, head),
            };
        }
    }
}

impl<E: Element> Dot<'_, E> {
    /// Heads `head..head + H`; returns `H`.
    #[inline(always)]
    fn tile<S: Simd, const H: usize>(&mut self, s: S, head: usize) -> usize {
        let whole = self.count / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            let mut sums = [[s.splat(0.0); LANES]; H];
            if S::REGISTERS >= 32 {
                self.rows::<S, H, 4>(s, head, first, &mut sums);
            } else {
                self.rows::<S, H, 1>(s, head, first, &mut sums);
            }
            for (h, sums) in sums.iter().enumerate() {
                let out = &mut self.out[(head + h) * self.out_stride + first..];
                s.store(s.sums(sums), out.first_chunk_mut().expect("a place for each row"));
            }
        }
        for i in whole..self.count {
            for (h, [sum]) in self.products::<S, H, 1>(s, head, i).into_iter().enumerate() {
                self.out[(head + h) * self.out_stride + i] = s.sum(sum);
            }
        }
        H
    }

    /// The products of 16 rows from `first` on, `R` of them at a time.
    #[inline(always)]
    fn rows<S: Simd, const H: usize, const R: usize>(
        &self,
        s: S,
        head: usize,
        first: usize,
        sums: &mut [[S::F; LANES]; H],
    ) {
        for i in (0..LANES).step_by(R) {
            let products = self.products::<S, H, R>(s, head, first + i);
            for (sums, products) in sums.iter_mut().zip(products) {
                sums[i..i + R].copy_from_slice(&products);
            }
        }
    }

    /// The products of rows `first..first + R` with each head, summed over vectors and not yet over lanes.
    #[inline(always)]
    fn products<S: Simd, const H: usize, const R: usize>(
        &self,
        s: S,
        head: usize,
        first: usize,
    ) -> [[S::F; R]; H] {
        // Equal lengths, known before the loop, leave nothing in it to be checked.
        let vectors = self.width / LANES;
        let (mut q, mut x) = ([&[][..]; H], [&[][..]; R]);
        let (mut q_rest, mut x_rest) = ([&[][..]; H], [&[][..]; R]);
        for h in 0..H {
            let of_head = self.q[(head + h) * self.width..][..self.width].as_chunks::<LANES>();
            (q[h], q_rest[h]) = (&of_head.0[..vectors], of_head.1);
        }
        for r in 0..R {
            let row = self.x[(first + r) * self.stride..][..self.width].as_chunks::<LANES>();
            (x[r], x_rest[r]) = (&row.0[..vectors], row.1);
        }
        let mut sums = [[s.splat(0.0); R]; H];
        for c in 0..vectors {
            let mut of_rows = [s.splat(0.0); R];
            for r in 0..R {
                of_rows[r] = E::load(s, &x[r][c]);
            }
            for h in 0..H {
                let q = s.load(&q[h][c]);
                for r in 0..R {
                    sums[h][r] = s.fma(q, of_rows[r], sums[h][r]);
                }
            }
        }
        if !self.width.is_multiple_of(LANES) {
            for r in 0..R {
                let x = load_some(s, x_rest[r]);
                for h in 0..H {
                    sums[h][r] = s.fma(s.load_part(q_rest[h]), x, sums[h][r]);
                }
            }
        }
        sums
    }
}

struct Sum<'a, E> {
    p: &'a [f32],
    p_stride: usize,
    x: &'a [E],
    stride: usize,
    count: usize,
    acc: &'a mut [f32],
    width: usize,
}

impl<E: Element> Kernel for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let heads = self.acc.len().checked_div(self.width).unwrap_or(0);
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

impl<E: Element> Sum<'_, E> {
    /// Heads `head..head + H`, as many columns at a time as have room in registers; returns `H`.
    #[inline(always)]
    fn heads<S: Simd, const H: usize>(&mut self, s: S, head: usize) -> usize {
        let mut column = 0;
        while column < self.width {
            column += match self.width - column {
                64.. if S::REGISTERS >= 32 => self.tile::<S, H, 4>(s, head, column),
                32.. => self.tile::<S, H, 2>(s, head, column),
                16.. => self.tile::<S, H, 1>(s, head, column),
                _ => self.rest::<S, H>(s, head, column),
            };
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
            let acc = &self.acc[(head + h) * self.width + column..][..C * LANES];
            for (sum, acc) in sums.iter_mut().zip(acc.as_chunks().0) {
                *sum = s.load(acc);
            }
        }
        for i in 0..self.count {
            let row = self.x[i * self.stride + column..][..C * LANES].as_chunks().0;
            let mut x = [s.splat(0.0); C];
            for (x, row) in x.iter_mut().zip(row) {
                *x = E::load(s, row);
            }
            for (h, sums) in sums.iter_mut().enumerate() {
                let p = s.splat(self.p[(head + h) * self.p_stride + i]);
                for c in 0..C {
                    sums[c] = s.fma(x[c], p, sums[c]);
                }
            }
        }
        for (h, sums) in sums.into_iter().enumerate() {
            let acc = &mut self.acc[(head + h) * self.width + column..][..C * LANES];
            for (sum, acc) in sums.into_iter().zip(acc.as_chunks_mut().0) {
                s.store(sum, acc);
            }
        }
        C * LANES
    }

    /// The columns after the last whole vector of `H` sums; returns their number.
    #[inline(always)]
    fn rest<S: Simd, const H: usize>(&mut self, s: S, head: usize, column: usize) -> usize {
        let left = self.width - column;
        let mut sums = [s.splat(0.0); H];
        for (h, sum) in sums.iter_mut().enumerate() {
            *sum = s.load_part(&self.acc[(head + h) * self.width + column..][..left]);
        }
        for i in 0..self.count {
            let x = load_some(s, &self.x[i * self.stride + column..][..left]);
            for (h, sum) in sums.iter_mut().enumerate() {
                *sum = s.fma(x, s.splat(self.p[(head + h) * self.p_stride + i]), *sum);
            }
        }
        for (h, sum) in sums.into_iter().enumerate() {
            s.store_part(sum, &mut self.acc[(head + h) * self.width + column..][..left]);
        }
        left
    }
}
