//! Whole pages of a cache: copied inside of it, and between it and pinned host memory.

use cudarc::driver::sys;

use super::check::driver as check;
use super::kv::KvPool;
use super::memory::PinnedBuffer;
use super::stream::Stream;
use crate::error::{Result, check_len};

impl KvPool {
    /// Copies all layers of page `from` to page `to`, later.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for a page that there is not.
    pub fn copy_page(&self, stream: &Stream, from: u32, to: u32) -> Result<()> {
        let (source, target) = (self.page_address(from)?, self.page_address(to)?);
        if from == to {
            return Ok(());
        }
        self.context().bind()?;
        // SAFETY: two different pages of the allocation (checked).
        let code =
            unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, self.page_bytes(), stream.raw()) };
        check("cuMemcpyDtoDAsync", code)
    }

    /// Copies all layers of page `from` to `to`, later: whoever accesses `to` waits for the copy. Whoever
    /// writes the page again puts that behind the copy.
    ///
    /// # Errors
    /// As for [`KvPool::copy_page`]; [`Error::Length`](crate::Error::Length) where `to` is not as long as a
    /// page; [`Error::Cuda`](crate::Error::Cuda) under capture.
    pub fn download_page(
        &self,
        stream: &Stream,
        from: u32,
        to: &mut PinnedBuffer<u8>,
    ) -> Result<()> {
        let source = self.page_address(from)?;
        check_len("memory for a page", to.len(), self.page_bytes())?;
        let target = to.begin_use(stream)?;
        // SAFETY: both are a page long (checked). The pool's drop waits for the device, and the pinned memory's
        // for `end_use`'s event.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.cast(), source, self.page_bytes(), stream.raw())
        };
        check("cuMemcpyDtoHAsync", code)?;
        to.end_use(stream)
    }

    /// The reverse of [`KvPool::download_page`]. The pinned memory can be accessed again at once: whoever
    /// does waits for the copy.
    ///
    /// # Errors
    /// As for [`KvPool::download_page`].
    pub fn upload_page(&self, stream: &Stream, from: &mut PinnedBuffer<u8>, to: u32) -> Result<()> {
        let target = self.page_address(to)?;
        check_len("a page", from.len(), self.page_bytes())?;
        let source = from.begin_use(stream)?;
        // SAFETY: as in `download_page`.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(target, source.cast(), self.page_bytes(), stream.raw())
        };
        check("cuMemcpyHtoDAsync", code)?;
        from.end_use(stream)
    }
}
