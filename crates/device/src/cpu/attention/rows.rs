//! Rows of cached values in their storage type.

use half::{bf16, f16};

use super::scaled::scale_behind;
use super::spans::LINE;
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch, prefetch};
use crate::float8::E4m3;

/// A storage type of cached values.
pub(crate) trait Element: Copy + Default + 'static {
    /// The elements, where they are of this type.
    fn of(data: Slice<'_>) -> Option<&[Self]>;
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F;
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]);
}

impl Element for f32 {
    #[inline(always)]
    fn of(data: Slice<'_>) -> Option<&[Self]> {
        match data {
            Slice::F32(x) => Some(x),
            _ => None,
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load(x)
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]) {
        s.store(x, to);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn of(data: Slice<'_>) -> Option<&[Self]> {
        match data {
            Slice::F16(x) => Some(x),
            _ => None,
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load_f16(bytemuck::cast_ref(x))
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]) {
        s.store_f16(x, bytemuck::cast_mut(to));
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn of(data: Slice<'_>) -> Option<&[Self]> {
        match data {
            Slice::BF16(x) => Some(x),
            _ => None,
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load_bf16(bytemuck::cast_ref(x))
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]) {
        s.store_bf16(x, bytemuck::cast_mut(to));
    }
}

impl Element for E4m3 {
    #[inline(always)]
    fn of(data: Slice<'_>) -> Option<&[Self]> {
        match data {
            Slice::E4M3(x) => Some(x),
            _ => None,
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load_e4m3(bytemuck::cast_ref(x))
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]) {
        s.store_e4m3(x, bytemuck::cast_mut(to));
    }
}

/// Without the scale of its row.
impl Element for i8 {
    #[inline(always)]
    fn of(data: Slice<'_>) -> Option<&[Self]> {
        match data {
            Slice::I8(x) => Some(x),
            _ => None,
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.to_f32(s.widen_i8(bytemuck::cast_ref(x)))
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; LANES]) {
        s.store_low_bytes(s.round(x), to);
    }
}

/// Up to 16 elements, widened; zeros in the lanes after them.
#[inline(always)]
pub(super) fn load_some<E: Element, S: Simd>(s: S, x: &[E]) -> S::F {
    match x.first_chunk() {
        Some(all) => E::load(s, all),
        None => {
            let mut lanes = [E::default(); LANES];
            lanes[..x.len()].copy_from_slice(x);
            E::load(s, &lanes)
        }
    }
}

/// Elements of one of the storage types.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Slice<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    E4M3(&'a [E4m3]),
    I8(&'a [i8]),
}

/// Rows at equal distances: row `i` begins at element `i * stride`. Its width is that of the vectors
/// it is multiplied with.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    pub(super) data: Slice<'a>,
    pub(super) stride: usize,
    /// Bytes of the rows that are read later, at the same stride.
    pub(super) next: &'a [u8],
}

impl<'a> Rows<'a> {
    /// Rows of float32, `stride` elements from one to the next.
    pub fn f32(data: &'a [f32], stride: usize) -> Self {
        Self::new(Slice::F32(data), stride)
    }

    /// Rows of f16.
    pub fn f16(data: &'a [f16], stride: usize) -> Self {
        Self::new(Slice::F16(data), stride)
    }

    /// Rows of bf16.
    pub fn bf16(data: &'a [bf16], stride: usize) -> Self {
        Self::new(Slice::BF16(data), stride)
    }

    /// Rows of 8-bit floats.
    pub fn e4m3(data: &'a [E4m3], stride: usize) -> Self {
        Self::new(Slice::E4M3(data), stride)
    }

    /// Rows of int8, each with its scale in the [`SCALE_BYTES`](super::SCALE_BYTES) behind it.
    pub fn i8(data: &'a [i8], stride: usize) -> Self {
        Self::new(Slice::I8(data), stride)
    }

    pub(crate) fn new(data: Slice<'a>, stride: usize) -> Self {
        Self { data, stride, next: &[] }
    }

    /// These rows, and on the way, row by row, `next` is brought into the CPU's cache. Rows far apart
    /// come slowly if each is asked for when it is needed.
    pub fn before(self, next: Rows<'a>) -> Self {
        Self { next: next.bytes(), ..self }
    }

    /// Has all of these rows brought into the CPU's cache.
    pub fn fetch(&self) {
        self.bytes().chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
    }

    fn bytes(&self) -> &'a [u8] {
        match self.data {
            Slice::F32(x) => bytemuck::cast_slice(x),
            Slice::F16(x) => bytemuck::cast_slice(x),
            Slice::BF16(x) => bytemuck::cast_slice(x),
            Slice::E4M3(x) => bytemuck::cast_slice(x),
            Slice::I8(x) => bytemuck::cast_slice(x),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self.data {
            Slice::F32(x) => x.len(),
            Slice::F16(x) => x.len(),
            Slice::BF16(x) => x.len(),
            Slice::E4M3(x) => x.len(),
            Slice::I8(x) => x.len(),
        }
    }

    /// Panics unless there are `count` rows of `width`.
    pub(super) fn check(&self, count: usize, width: usize) {
        let end = count
            .checked_sub(1)
            .map(|last| last.checked_mul(self.stride).and_then(|start| start.checked_add(width)));
        match end {
            None => {}
            Some(Some(end)) if end <= self.len() => {}
            _ => panic!(
                "{count} rows of {width} at a stride of {} do not fit into {} elements",
                self.stride,
                self.len()
            ),
        }
    }
}

/// Widens row `i` of `rows` into `out`: exactly, but for the one rounding of int8 times a scale.
///
/// # Panics
/// When there is no such row of `out.len()` elements.
pub fn load_row(rows: Rows<'_>, i: usize, out: &mut [f32]) {
    rows.check(i.saturating_add(1), out.len());
    let start = i * rows.stride;
    let features = CpuFeatures::current();
    match rows.data {
        Slice::F32(x) => out.copy_from_slice(&x[start..][..out.len()]),
        Slice::F16(x) => dispatch(features, Widen { x: &x[start..], out }),
        Slice::BF16(x) => dispatch(features, Widen { x: &x[start..], out }),
        Slice::E4M3(x) => dispatch(features, Widen { x: &x[start..], out }),
        Slice::I8(x) => {
            let scale = scale_behind(&x[start..], out.len());
            dispatch(features, Widen { x: &x[start..], out });
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// A storage type that [`store_row`] rounds to.
#[allow(private_bounds)] // closed: the types of `Rows` that need no scale
pub trait Storage: Element {}

impl Storage for f32 {}
impl Storage for f16 {}
impl Storage for bf16 {}
impl Storage for E4m3 {}

/// Rounds `x` to the storage type, to the nearest, ties to even; equal lengths. [`E4m3`] has no infinity: what is
/// beyond its greatest number becomes that.
///
/// # Panics
/// When the lengths differ.
pub fn store_row<E: Storage>(x: &[f32], out: &mut [E]) {
    assert_eq!(x.len(), out.len(), "a row and its storage differ in length");
    store_elements(x, out);
}

pub(crate) fn store_elements<E: Element>(x: &[f32], out: &mut [E]) {
    dispatch(CpuFeatures::current(), Narrow { x, out });
}

struct Widen<'a, E> {
    x: &'a [E],
    out: &'a mut [f32],
}

impl<E: Element> Kernel for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.x.chunks(LANES).zip(self.out.chunks_mut(LANES)) {
            let wide = load_some(s, x);
            match out.first_chunk_mut() {
                Some(all) => s.store(wide, all),
                None => s.store_part(wide, out),
            }
        }
    }
}

struct Narrow<'a, E> {
    x: &'a [f32],
    out: &'a mut [E],
}

impl<E: Element> Kernel for Narrow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.x.chunks(LANES).zip(self.out.chunks_mut(LANES)) {
            let x = load_some(s, x);
            match out.first_chunk_mut() {
                Some(all) => E::store(s, x, all),
                None => {
                    let mut lanes = [E::default(); LANES];
                    E::store(s, x, &mut lanes);
                    out.copy_from_slice(&lanes[..out.len()]);
                }
            }
        }
    }
}
