//! Large zeroed allocations straight from the operating system.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

use crate::error::{Error, Result};

/// Bytes that begin on a page, are zero at first, and take up memory only once written.
#[derive(Debug, Default)]
pub struct AlignedBuffer(Memory);

#[derive(Debug, Default)]
enum Memory {
    /// For a length of 0, which cannot be mapped.
    #[default]
    None,
    Own(MmapMut),
    Part(Part),
}

impl AlignedBuffer {
    /// Allocates `len` bytes. With `huge_pages` the operating system is asked for large pages, which
    /// it may refuse without an error: fewer address translations for data that is used all over.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the operating system refuses the mapping.
    pub fn zeroed(len: usize, huge_pages: bool) -> Result<Self> {
        match len {
            0 => Ok(Self::default()),
            _ => Ok(Self(Memory::Own(map(len, huge_pages)?))),
        }
    }

    /// As [`zeroed`](Self::zeroed) with large pages, beside others that are allocated like this: for what
    /// comes in many pieces, each perhaps smaller than a large page, and goes together. A piece's memory
    /// goes back to the operating system with that of its neighbours.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn together(len: usize) -> Result<Self> {
        match len {
            0 => Ok(Self::default()),
            _ => Ok(Self(Memory::Part(Part::next(len)?))),
        }
    }

    /// Where the bytes begin; on a page, so aligned for everything.
    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.0 {
            Memory::None => NOWHERE,
            Memory::Own(map) => map.as_mut_ptr(),
            Memory::Part(part) => part.as_mut_ptr(),
        }
    }
}

fn map(len: usize, huge_pages: bool) -> Result<MmapMut> {
    let map = MmapMut::map_anon(len)
        .map_err(|e| Error::OutOfMemory { bytes: len, reason: e.to_string() })?;
    #[cfg(target_os = "linux")]
    if huge_pages {
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    let _ = huge_pages;
    Ok(map)
}

/// A part of a larger mapping, which nobody else has.
#[derive(Debug)]
struct Part {
    whole: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

/// The mapping that parts are taken from, and how much of it is taken.
static LATEST: Mutex<Option<(Arc<MmapRaw>, usize)>> = Mutex::new(None);

impl Part {
    fn next(len: usize) -> Result<Self> {
        /// Many large pages; what is not written takes no memory.
        const WHOLE: usize = 64 << 20;
        let too_large = || Error::TooLarge { what: "a part of memory" };
        let space = len.checked_next_multiple_of(OS_PAGE).ok_or_else(too_large)?;
        let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |(whole, taken): &(Arc<MmapRaw>, usize)| whole.len() - taken >= space;
        let (whole, start) = match latest.take().filter(fits) {
            Some(latest) => latest,
            None => (Arc::new(MmapRaw::from(map(space.max(WHOLE), true)?)), 0),
        };
        *latest = Some((Arc::clone(&whole), start + space));
        Ok(Self { whole, start, len })
    }

    fn as_mut_ptr(&self) -> *mut u8 {
        self.whole.as_mut_ptr().wrapping_add(self.start)
    }
}

/// Asks the operating system for large pages where memory that is allocated already is not in use yet.
/// It may refuse, and nothing else changes.
pub fn prefer_large_pages<T>(memory: *const T, len: usize) {
    #[cfg(target_os = "linux")]
    {
        let first = memory.addr().next_multiple_of(OS_PAGE);
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
const NOWHERE: *mut u8 = std::ptr::without_provenance_mut(OS_PAGE);

/// Bytes of the least that the operating system maps.
const OS_PAGE: usize = 4096;

impl Deref for AlignedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            // SAFETY: not null, and any address is good for no bytes.
            Memory::None => unsafe { std::slice::from_raw_parts(NOWHERE, 0) },
            Memory::Own(map) => map,
            // SAFETY: inside the mapping, which the part keeps, initialised by the operating system, and no
            // other part has these bytes.
            Memory::Part(part) => unsafe {
                std::slice::from_raw_parts(part.as_mut_ptr(), part.len)
            },
        }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            // SAFETY: as above.
            Memory::None => unsafe { std::slice::from_raw_parts_mut(NOWHERE, 0) },
            Memory::Own(map) => map,
            // SAFETY: as above, and the part is borrowed for as long.
            Memory::Part(part) => unsafe {
                std::slice::from_raw_parts_mut(part.as_mut_ptr(), part.len)
            },
        }
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
    fn parts_are_apart_zero_and_outlive_each_other() {
        let mut parts: Vec<AlignedBuffer> = [1, 4096, 0, 100_000, 70 << 20, 5, 40 << 20, 30 << 20]
            .into_iter()
            .map(|len| AlignedBuffer::together(len).unwrap())
            .collect();
        for (i, part) in parts.iter_mut().enumerate() {
            assert!(part.as_ptr().addr().is_multiple_of(4096));
            assert!(part.iter().all(|&b| b == 0), "{i} is not zero");
            part.fill(i as u8 + 1);
        }
        parts.remove(1);
        for (i, part) in parts.iter().enumerate() {
            let value = if i == 0 { 1 } else { i as u8 + 2 };
            assert!(part.iter().all(|&b| b == value));
        }
        assert!(AlignedBuffer::together(usize::MAX).is_err());
    }

    #[test]
    fn more_than_there_is_address_space_is_an_error() {
        let error = AlignedBuffer::zeroed(1 << 60, false).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
}
