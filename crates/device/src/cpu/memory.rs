//! Large zeroed allocations straight from the operating system.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// Bytes that begin on a page, are zero at first, and take up memory only once written.
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    /// `None` for a length of 0, which cannot be mapped.
    map: Option<MmapMut>,
}

impl AlignedBuffer {
    /// Allocates `len` bytes. With `huge_pages` the operating system is asked for large pages, which
    /// it may refuse without an error: fewer address translations for data that is used all over.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the operating system refuses the mapping.
    pub fn zeroed(len: usize, huge_pages: bool) -> Result<Self> {
        if len == 0 {
            return Ok(Self { map: None });
        }
        let map = MmapMut::map_anon(len)
            .map_err(|e| Error::OutOfMemory { bytes: len, reason: e.to_string() })?;
        #[cfg(target_os = "linux")]
        if huge_pages {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let _ = huge_pages;
        Ok(Self { map: Some(map) })
    }

    /// Where the bytes begin; on a page, so aligned for everything.
    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.as_mut().map_or(NOWHERE, |m| m.as_mut_ptr())
    }
}

/// Asks the operating system for large pages where memory that is allocated already is not in use yet.
/// It may refuse, and nothing else changes.
pub fn prefer_large_pages<T>(memory: *const T, len: usize) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let first = memory.addr().next_multiple_of(PAGE);
        let end = memory.addr() + len * size_of::<T>();
        if end > first {
            let start = memory.with_addr(first).cast_mut().cast();
            // SAFETY: advice that changes neither what the memory holds nor who may use it; of a range
            // that is not mapped it is an error and nothing happens.
            unsafe { libc::madvise(start, end - first, libc::MADV_HUGEPAGE) };
        }
    }
    let _ = (memory, len);
}

/// Where no bytes begin: on a page too, since slices of larger elements are made of it.
const NOWHERE: *mut u8 = std::ptr::without_provenance_mut(4096);

impl Deref for AlignedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: not null, and any address is good for no bytes.
        self.map.as_deref().unwrap_or_else(|| unsafe { std::slice::from_raw_parts(NOWHERE, 0) })
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        let empty = || unsafe { std::slice::from_raw_parts_mut(NOWHERE, 0) };
        self.map.as_deref_mut().unwrap_or_else(empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_zero_and_writable() {
        for len in [0, 1, 4096, 5_000_000] {
            let mut buffer = AlignedBuffer::zeroed(len, true).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&b| b == 0));
            assert!(buffer.as_ptr().addr().is_multiple_of(4096));
            buffer.fill(7);
            assert!(buffer.iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn more_than_there_is_address_space_is_an_error() {
        let error = AlignedBuffer::zeroed(1 << 60, false).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
}
