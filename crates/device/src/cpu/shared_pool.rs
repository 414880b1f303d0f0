//! Memory of cached keys and values, which several threads and plugins read and write.
//!
//! The pool's owner knows the geometry; here it is one range of elements. What makes sharing sound is
//! [`Turns`]: any number of writers, or any number of readers, but not both. A step stores its rows
//! of a layer before it reads them, so the two seldom wait for each other; taking a turn is one
//! atomic operation, which is meant to be paid once a task and not once a row. Writers copy in with
//! atomic stores of single elements, so even two that meet at one row cause no undefined behaviour;
//! readers have the memory to themselves as ordinary slices, for vector loads.
//!
//! Who may write which row when, so that values are right and not just defined, is the business of
//! the KV cache: rows of a page are written only by the step that owns the page.

mod turns;

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use half::{bf16, f16};

pub use self::turns::Turns;
use crate::cpu::attention::{Element, Rows, SCALE_BYTES, Slice, steps_of, store_elements};
use crate::cpu::memory::AlignedBuffer;
use crate::error::{Error, Result, product};
use crate::float8::E4m3;

/// The storage type of a pool's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum PoolType {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    /// Rows have their scale behind them, see [`Rows::i8`].
    I8 = 3,
    /// Without scales.
    E4M3 = 4,
}

impl PoolType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 | Self::E4M3 => 1,
        }
    }
}

/// A pool and its memory: zeros at first, taken from the operating system as it is written.
#[derive(Debug)]
pub struct SharedPool {
    // Held for its memory, which is reached through `data` alone.
    _buffer: AlignedBuffer,
    data: NonNull<u8>,
    elements: usize,
    element: PoolType,
    turns: Box<Turns>,
}

// SAFETY: the memory belongs to the pool and is reached only through views, which `Turns` orders.
unsafe impl Send for SharedPool {}
// SAFETY: as above.
unsafe impl Sync for SharedPool {}

impl SharedPool {
    /// A pool of `elements` zeros.
    ///
    /// # Errors
    /// When the size overflows or the operating system refuses it.
    pub fn new(elements: usize, element: PoolType) -> Result<Self> {
        let bytes = product("a pool", elements, element.bytes())?;
        let mut buffer = AlignedBuffer::zeroed(bytes, true)?;
        let data = NonNull::new(buffer.as_mut_ptr()).expect("a mapping is not at address 0");
        // An empty buffer has no address that suits its elements.
        let data = if elements == 0 { NonNull::<u32>::dangling().cast() } else { data };
        Ok(Self { _buffer: buffer, data, elements, element, turns: Box::default() })
    }

    /// The pool as its own process or library uses it.
    pub fn view(&self) -> PoolView<'_> {
        PoolView { raw: self.as_raw(), pool: PhantomData }
    }

    /// Addresses to hand to another library, which makes a view of them. They hold until the pool is
    /// dropped.
    pub fn as_raw(&self) -> RawPool {
        RawPool {
            data: self.data.as_ptr(),
            elements: self.elements,
            element: self.element,
            turns: &*self.turns,
        }
    }
}

/// A pool in plain numbers, for crossing a library boundary.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawPool {
    /// The first element, aligned to its size.
    pub data: *mut u8,
    /// Number of elements.
    pub elements: usize,
    /// Their type.
    pub element: PoolType,
    /// What orders access, shared by all views.
    pub turns: *const Turns,
}

/// Shared access to a pool. Copies of a view are views of the same pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolView<'a> {
    raw: RawPool,
    pool: PhantomData<&'a SharedPool>,
}

// SAFETY: access goes through `Turns`, see `reader` and `writer`.
unsafe impl Send for PoolView<'_> {}
// SAFETY: as above.
unsafe impl Sync for PoolView<'_> {}

impl<'a> PoolView<'a> {
    /// A view of what `raw` describes.
    ///
    /// # Safety
    /// For all of `'a`, `raw` is what [`SharedPool::as_raw`] returned for a pool that is alive, or
    /// describes memory with the same guarantees: `data` points to `elements` initialised elements of
    /// type `element`, aligned to their size, accessed by nothing but views that share `turns`.
    pub unsafe fn from_raw(raw: RawPool) -> Self {
        Self { raw, pool: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.raw.elements
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.raw.elements == 0
    }

    /// The type of the elements.
    pub fn element(&self) -> PoolType {
        self.raw.element
    }

    /// Waits until nobody writes, and keeps writers out until the result is dropped.
    ///
    /// A thread that holds a [`PoolWriter`] of this pool would wait for itself for ever.
    pub fn reader(&self) -> PoolReader<'a> {
        self.turns().start_reading();
        PoolReader { view: *self }
    }

    /// Waits until nobody reads, and keeps readers out until the result is dropped. Other writers may
    /// write at the same time.
    ///
    /// A thread that holds a [`PoolReader`] of this pool would wait for itself for ever.
    pub fn writer(&self) -> PoolWriter<'a> {
        self.turns().start_writing();
        PoolWriter { view: *self }
    }

    fn turns(&self) -> &'a Turns {
        // SAFETY: a view's pointers hold for `'a`.
        unsafe { &*self.raw.turns }
    }

    /// The index in bytes of a range of elements.
    fn check(&self, start: usize, len: usize) -> Result<()> {
        let limit = self.raw.elements;
        match start.checked_add(len) {
            Some(end) if end <= limit => Ok(()),
            _ => Err(Error::OutOfRange {
                what: "end of pool range",
                index: start.saturating_add(len),
                limit,
            }),
        }
    }

    /// The address of element `start`, which [`check`](Self::check) has passed.
    fn at(&self, start: usize) -> *mut u8 {
        // SAFETY: `start` is at most the number of elements.
        unsafe { self.raw.data.add(start * self.raw.element.bytes()) }
    }
}

/// The right to read a pool.
#[derive(Debug)]
pub struct PoolReader<'a> {
    view: PoolView<'a>,
}

impl PoolReader<'_> {
    /// Rows that begin at element `start`, `stride` elements apart: `count` rows of `width`.
    ///
    /// # Errors
    /// When they reach beyond the pool.
    pub fn rows(
        &self,
        start: usize,
        count: usize,
        width: usize,
        stride: usize,
    ) -> Result<Rows<'_>> {
        let len = match count.checked_sub(1) {
            None => 0,
            Some(last) => product("rows of a pool", last, stride)?
                .checked_add(width)
                .ok_or(Error::TooLarge { what: "rows of a pool" })?,
        };
        Ok(Rows::new(self.slice(start, len)?, stride))
    }

    /// Widens the row from element `start` on into `out`.
    ///
    /// # Errors
    /// When they reach beyond the pool.
    pub fn load(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let behind = if self.view.raw.element == PoolType::I8 { SCALE_BYTES } else { 0 };
        let rows = Rows::new(self.slice(start, out.len() + behind)?, out.len());
        crate::cpu::attention::load_row(rows, 0, out);
        Ok(())
    }

    /// The bytes of elements `range`: what is copied out of the pool to be kept elsewhere.
    ///
    /// # Errors
    /// When they reach beyond the pool.
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        Ok(match self.slice(range.start, range.end.saturating_sub(range.start))? {
            Slice::F32(x) => bytemuck::cast_slice(x),
            Slice::F16(x) => bytemuck::cast_slice(x),
            Slice::BF16(x) => bytemuck::cast_slice(x),
            Slice::I8(x) => bytemuck::cast_slice(x),
            Slice::E4M3(x) => bytemuck::cast_slice(x),
        })
    }

    fn slice(&self, start: usize, len: usize) -> Result<Slice<'_>> {
        /// # Safety
        /// `data` points to `len` initialised elements that nobody writes during `'a`.
        unsafe fn typed<'a, T>(data: *mut u8, len: usize) -> &'a [T] {
            // SAFETY: promised by the caller.
            unsafe { std::slice::from_raw_parts(data.cast(), len) }
        }

        self.view.check(start, len)?;
        let data = self.view.at(start);
        // SAFETY: within the pool and aligned as its elements are; the borrow of `self` keeps writers
        // out as long as the slice lives.
        Ok(unsafe {
            match self.view.raw.element {
                PoolType::F32 => Slice::F32(typed(data, len)),
                PoolType::F16 => Slice::F16(typed(data, len)),
                PoolType::BF16 => Slice::BF16(typed(data, len)),
                PoolType::I8 => Slice::I8(typed(data, len)),
                PoolType::E4M3 => Slice::E4M3(typed(data, len)),
            }
        })
    }
}

impl Drop for PoolReader<'_> {
    fn drop(&mut self) {
        self.view.turns().stop_reading();
    }
}

/// The right to write a pool.
#[derive(Debug)]
pub struct PoolWriter<'a> {
    view: PoolView<'a>,
}

impl PoolWriter<'_> {
    /// Rounds `row` to the pool's type and stores it from element `start` on.
    ///
    /// # Errors
    /// When it reaches beyond the pool; then nothing is written.
    pub fn store(&self, start: usize, row: &[f32]) -> Result<()> {
        self.view.check(start, row.len())?;
        match self.view.raw.element {
            PoolType::F32 => {
                self.store_as::<f32>(start, row, |at, x| self.put_u32(at, x.to_bits()))
            }
            PoolType::F16 => {
                self.store_as::<f16>(start, row, |at, x| self.put_u16(at, x.to_bits()))
            }
            PoolType::BF16 => {
                self.store_as::<bf16>(start, row, |at, x| self.put_u16(at, x.to_bits()));
            }
            PoolType::E4M3 => self.store_as::<E4m3>(start, row, |at, x| self.put_u8(at, x.0)),
            PoolType::I8 => self.store_scaled(start, row)?,
        }
        Ok(())
    }

    /// Stores bytes that [`PoolReader::bytes`] gave, from element `start` on.
    ///
    /// # Errors
    /// When they are not whole elements or reach beyond the pool; then nothing is written.
    pub fn store_bytes(&self, start: usize, bytes: &[u8]) -> Result<()> {
        let size = self.view.raw.element.bytes();
        if !bytes.len().is_multiple_of(size) {
            let need = bytes.len().next_multiple_of(size);
            let what = "bytes of whole pool elements";
            return Err(Error::Length { what, unit: "bytes", got: bytes.len(), need });
        }
        self.view.check(start, bytes.len() / size)?;
        match size {
            4 => {
                let words = bytes.as_chunks().0.iter().enumerate();
                words.for_each(|(i, word)| self.put_u32(start + i, u32::from_ne_bytes(*word)));
            }
            2 => {
                let words = bytes.as_chunks().0.iter().enumerate();
                words.for_each(|(i, word)| self.put_u16(start + i, u16::from_ne_bytes(*word)));
            }
            _ => bytes.iter().enumerate().for_each(|(i, byte)| self.put_u8(start + i, *byte)),
        }
        Ok(())
    }

    /// Copies the elements `from` to `to` on: a page that is about to part from its sharers.
    ///
    /// # Errors
    /// When either reaches beyond the pool; then nothing is written.
    pub fn copy(&self, from: Range<usize>, to: usize) -> Result<()> {
        let len = from.end.saturating_sub(from.start);
        self.view.check(from.start, len)?;
        self.view.check(to, len)?;
        let from = from.start;
        match self.view.raw.element.bytes() {
            4 => (0..len)
                .for_each(|i| self.put_u32(to + i, self.u32_at(from + i).load(Ordering::Relaxed))),
            2 => (0..len)
                .for_each(|i| self.put_u16(to + i, self.u16_at(from + i).load(Ordering::Relaxed))),
            _ => (0..len)
                .for_each(|i| self.put_u8(to + i, self.u8_at(from + i).load(Ordering::Relaxed))),
        }
        Ok(())
    }

    /// Stores a row as steps, and behind it how large they are.
    fn store_scaled(&self, start: usize, row: &[f32]) -> Result<()> {
        const AT_ONCE: usize = 256;
        self.view.check(start, row.len().saturating_add(SCALE_BYTES))?;
        let (step, steps) = steps_of(row);
        let (mut scaled, mut rounded) = ([0.0; AT_ONCE], [0_i8; AT_ONCE]);
        for (part, x) in row.chunks(AT_ONCE).enumerate() {
            // Of a row that is not finite the scale tells.
            let to_steps = |x: f32| if steps == 0.0 { 0.0 } else { x * steps };
            scaled.iter_mut().zip(x).for_each(|(to, &x)| *to = to_steps(x));
            store_elements(&scaled[..x.len()], &mut rounded[..x.len()]);
            let first = start + part * AT_ONCE;
            let rounded = rounded[..x.len()].iter().enumerate();
            rounded.for_each(|(i, x)| self.put_u8(first + i, x.cast_unsigned()));
        }
        let scale = step.to_ne_bytes();
        scale.iter().enumerate().for_each(|(i, &byte)| self.put_u8(start + row.len() + i, byte));
        Ok(())
    }

    #[inline(always)]
    fn store_as<E: Element>(&self, start: usize, row: &[f32], put: impl Fn(usize, E)) {
        const AT_ONCE: usize = 256;
        let mut rounded = [E::default(); AT_ONCE];
        for (part, x) in row.chunks(AT_ONCE).enumerate() {
            store_elements(x, &mut rounded[..x.len()]);
            for (i, &x) in rounded[..x.len()].iter().enumerate() {
                put(start + part * AT_ONCE + i, x);
            }
        }
    }

    fn u32_at(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at < self.view.raw.elements && self.view.raw.element.bytes() == 4);
        // SAFETY: callers have checked the range of a pool of 4-byte elements; while there are
        // writers, all access is by atomics of the element's size.
        unsafe { &*self.view.at(at).cast() }
    }

    fn u16_at(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at < self.view.raw.elements && self.view.raw.element.bytes() == 2);
        // SAFETY: as above, for 2-byte elements.
        unsafe { &*self.view.at(at).cast() }
    }

    fn u8_at(&self, at: usize) -> &AtomicU8 {
        debug_assert!(at < self.view.raw.elements && self.view.raw.element.bytes() == 1);
        // SAFETY: as above, for single bytes.
        unsafe { &*self.view.at(at).cast() }
    }

    #[inline(always)]
    fn put_u8(&self, at: usize, bits: u8) {
        self.u8_at(at).store(bits, Ordering::Relaxed);
    }

    #[inline(always)]
    fn put_u32(&self, at: usize, bits: u32) {
        self.u32_at(at).store(bits, Ordering::Relaxed);
    }

    #[inline(always)]
    fn put_u16(&self, at: usize, bits: u16) {
        self.u16_at(at).store(bits, Ordering::Relaxed);
    }
}

impl Drop for PoolWriter<'_> {
    fn drop(&mut self) {
        self.view.turns().stop_writing();
    }
}

#[cfg(test)]
mod tests;
