//! Large tables that are read and written all over: few address translations, and no first touch
//! while something waits.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use crate::cpu::memory::AlignedBuffer;
use crate::error::Result;

/// Bytes that the operating system hands out at a time at least.
const OS_PAGE: usize = 4096;

/// A slice of plain data, zero at first, in large pages where the operating system has them. All of
/// it is in memory from the beginning.
#[derive(Debug)]
pub struct Table<T> {
    bytes: AlignedBuffer,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Table<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) when the operating system refuses.
    pub fn zeroed(len: usize) -> Result<Self> {
        const { assert!(align_of::<T>() <= OS_PAGE) }
        let mut bytes = AlignedBuffer::zeroed(len.saturating_mul(size_of::<T>()), true)?;
        bytes.chunks_mut(OS_PAGE).for_each(|page| page[0] = 0);
        Ok(Self { bytes, len, of: PhantomData })
    }
}

impl<T: Pod> Default for Table<T> {
    /// An empty table.
    fn default() -> Self {
        Self { bytes: AlignedBuffer::default(), len: 0, of: PhantomData }
    }
}

impl<T: Pod> Deref for Table<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the buffer has `len` values, begins on a page of the operating system, which suits
        // any `T` (checked in `zeroed`), and every pattern of bits is a value of a `Pod`.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.len) }
    }
}

impl<T: Pod> DerefMut for Table<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` excludes others.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), self.len) }
    }
}

/// Asks for the memory of a value to be brought into the processor's caches, without waiting for it.
#[inline]
pub fn prefetch<T>(value: &T) {
    prefetch_at(std::ptr::from_ref(value).addr());
}

/// [`prefetch`] of an address, of which nothing else is known: it may have been freed since.
#[inline]
pub fn prefetch_at(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint about an address; it reads nothing that the program could see, and where
        // nothing is mapped it does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) }
    }
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_zero_and_keeps_what_is_written() {
        let mut table = Table::<u64>::zeroed(100_000).unwrap();
        assert!(table.len() == 100_000 && table.iter().all(|&x| x == 0));
        table[99_999] = 7;
        prefetch(&table[5]);
        prefetch_at(0);
        assert_eq!(table.iter().sum::<u64>(), 7);
        assert!(Table::<u128>::zeroed(0).unwrap().is_empty() && Table::<u8>::default().is_empty());
        assert!(Table::<u64>::zeroed(usize::MAX / 8).is_err());
    }
}
