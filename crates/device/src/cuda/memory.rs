//! Device memory, and host memory that copies can overlap with.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUresult};
use resource_api::tensor::MAX_RANK;
use resource_api::{DeviceColumn, Element, RawTensor, TensorView, TensorViewMut};

use super::check::driver as check;
use super::context::Context;
use super::event::Event;
use super::stream::Stream;
use crate::error::{Error, Result, check_len, product};

/// An allocation on a device. Its contents are arbitrary until written.
///
/// The borrow checker orders what is *put into* streams; what runs later is ordered by the streams.
/// Dropping it waits for the whole device, so that nothing in flight loses its memory: not in a step.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    context: Arc<Context>,
    /// 0 where `len` is 0, which cannot be allocated.
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Allocates room for `len` elements. Not under capture.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the device has no such room.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        let bytes = product("a device buffer", len, size_of::<T>())?;
        let mut address = 0;
        if bytes > 0 {
            context.bind()?;
            // SAFETY: a context is current; the pointer is to a local.
            match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    let free = context.free_memory().unwrap_or(0);
                    let reason = format!("{} has {free} bytes free", context.device());
                    return Err(Error::OutOfMemory { bytes, reason });
                }
                code => check("cuMemAlloc", code)?,
            }
        }
        Ok(Self { context: context.clone(), address, len, element: PhantomData })
    }

    /// As [`DeviceBuffer::new`], and sets every byte to 0 before it returns.
    ///
    /// # Errors
    /// As for [`DeviceBuffer::new`].
    pub fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self> {
        let buffer = Self::new(context, len)?;
        if len > 0 {
            // SAFETY: the buffer is that long.
            let code = unsafe { sys::cuMemsetD8_v2(buffer.address, 0, len * size_of::<T>()) };
            check("cuMemsetD8", code)?;
            context.synchronize()?;
        }
        Ok(buffer)
    }

    /// A buffer with a copy of `values`, which is complete when this returns.
    ///
    /// # Errors
    /// As for [`DeviceBuffer::new`].
    pub fn from_slice(context: &Arc<Context>, values: &[T]) -> Result<Self> {
        let mut buffer = Self::new(context, values.len())?;
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }

    /// Overwrites all elements; waits for the device before and after. Not under capture.
    ///
    /// # Errors
    /// [`Error::Length`] where `values` is not as long as the buffer.
    pub fn copy_from_slice(&mut self, values: &[T]) -> Result<()> {
        check_len("values for a device buffer", values.len(), self.len)?;
        self.context.synchronize()?;
        if self.len > 0 {
            let bytes = size_of_val(values);
            // SAFETY: both sides are that long.
            let code = unsafe { sys::cuMemcpyHtoD_v2(self.address, values.as_ptr().cast(), bytes) };
            check("cuMemcpyHtoD", code)?;
        }
        // The copy may return with its last part in flight on the default stream, which other streams
        // do not wait for.
        self.context.synchronize()
    }

    /// The elements, once the device has done everything it was given. Not under capture.
    ///
    /// # Errors
    /// [`Error::Cuda`]: also the error of a kernel that failed before.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.context.synchronize()?;
        let mut values = vec![T::zeroed(); self.len];
        if self.len > 0 {
            let bytes = size_of_val(values.as_slice());
            // SAFETY: both sides are that long, and any bytes are a value of T.
            let code =
                unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.address, bytes) };
            check("cuMemcpyDtoH", code)?;
        }
        Ok(values)
    }
}

impl<T> DeviceBuffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins on the device; aligned to 256 bytes.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// All elements as a column. Whoever hands it on keeps this value for as long as it is read.
    pub fn column(&self) -> DeviceColumn<T> {
        // SAFETY: the whole allocation, which this value keeps.
        unsafe { DeviceColumn::from_raw(self.address, self.len) }
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// The first elements as a contiguous tensor.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the buffer is shorter.
    pub fn view(&self, shape: &[usize]) -> Result<TensorView<'_>> {
        self.view_at(0, shape)
    }

    /// The elements from `first` on as a contiguous tensor.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the buffer ends before.
    pub fn view_at(&self, first: usize, shape: &[usize]) -> Result<TensorView<'_>> {
        // SAFETY: the range is inside the allocation (checked), which the view borrows.
        Ok(unsafe { TensorView::from_raw(self.describe(first, shape)?) })
    }

    /// The first elements as a contiguous tensor that may be written.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the buffer is shorter.
    pub fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>> {
        self.view_mut_at(0, shape)
    }

    /// The elements from `first` on as a contiguous tensor that may be written.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the buffer ends before.
    pub fn view_mut_at(&mut self, first: usize, shape: &[usize]) -> Result<TensorViewMut<'_>> {
        // SAFETY: the range is inside the allocation (checked), which the view borrows exclusively.
        Ok(unsafe { TensorViewMut::from_raw(self.describe(first, shape)?) })
    }

    /// `rows` rows from row `first` on, each split into tensors that lie side by side in it: part n has
    /// `[heads, dim] = parts[n]` elements of a row, and is the tensor `[rows, heads, dim]`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the buffer ends before.
    pub fn parts_mut<const N: usize>(
        &mut self,
        first: usize,
        rows: usize,
        parts: [[usize; 2]; N],
    ) -> Result<[TensorViewMut<'_>; N]> {
        let what = "a view of a device buffer";
        let width = parts.iter().try_fold(0usize, |width, [heads, dim]| {
            heads.checked_mul(*dim).and_then(|part| width.checked_add(part))
        });
        let width = width.ok_or(Error::TooLarge { what })?;
        let begin = product(what, first, width)?;
        let whole = self.describe(begin, &[rows, width])?;
        let mut column = 0;
        Ok(parts.map(|[heads, dim]| {
            let mut part =
                RawTensor::contiguous(whole.data, whole.device, T::DTYPE, &[rows, heads, dim]);
            part.strides[0] = width as i64;
            part.byte_offset = (column * size_of::<T>()) as u64;
            column += heads * dim;
            // SAFETY: the parts' elements are inside the allocation (checked as a whole), which is
            // borrowed exclusively, and no two parts have one in common.
            unsafe { TensorViewMut::from_raw(part) }
        }))
    }

    fn describe(&self, first: usize, shape: &[usize]) -> Result<RawTensor> {
        let what = "end of a view of a device buffer";
        let len = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let end = len.and_then(|n| n.checked_add(first)).unwrap_or(usize::MAX);
        if end > self.len || shape.len() > MAX_RANK {
            return Err(Error::OutOfRange { what, index: end, limit: self.len });
        }
        let start = self.address + (first * size_of::<T>()) as u64;
        let start = std::ptr::without_provenance_mut(start as usize);
        Ok(RawTensor::contiguous(start, self.context.device(), T::DTYPE, shape))
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.len > 0 && self.address != 0 && self.context.synchronize().is_ok() {
            // SAFETY: allocated by `new`, freed once, and the device is idle.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Host memory that the device copies from and to without the driver's help.
///
/// A copy given to a stream marks it as in use; every access from the host waits until the copy is
/// done, so that it reads and writes only what is complete.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    context: Arc<Context>,
    start: *mut T,
    len: usize,
    last_use: Event,
    is_in_use: AtomicBool,
}

// SAFETY: owns its memory; access goes through `&self` and `&mut self` as for a Vec.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// Allocates `len` elements, all zero. Slow (it locks pages): at load, not in a step.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self> {
        let bytes = product("a pinned buffer", len, size_of::<T>())?.max(1);
        let last_use = Event::new(context)?;
        let mut start = std::ptr::null_mut();
        // SAFETY: a context is current; the pointer is to a local.
        match unsafe { sys::cuMemHostAlloc(&mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let reason = "the system locks no more memory".to_owned();
                return Err(Error::OutOfMemory { bytes, reason });
            }
            code => check("cuMemHostAlloc", code)?,
        }
        // SAFETY: that many bytes were just allocated, and nobody else knows of them.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        let is_in_use = AtomicBool::new(false);
        Ok(Self { context: context.clone(), start: start.cast(), len, last_use, is_in_use })
    }

    /// The elements, once no copy uses them.
    ///
    /// # Errors
    /// [`Error::Cuda`] where the device failed before it got there.
    pub fn as_slice(&self) -> Result<&[T]> {
        self.wait()?;
        // SAFETY: allocated with that length and always initialized; no copy is in flight, and a new
        // one would take `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.start, self.len) })
    }

    /// The elements to be written, once no copy uses them.
    ///
    /// # Errors
    /// As for [`PinnedBuffer::as_slice`].
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: as above, and exclusively ours.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, self.len) })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> PinnedBuffer<T> {
    fn wait(&self) -> Result<()> {
        if self.is_in_use.load(Ordering::Acquire) {
            self.last_use.synchronize()?;
            self.is_in_use.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Announces a copy on `stream`, which comes after those given to other streams. Answers where the
    /// elements are. Refused under capture: a replay would copy when nobody knows of it.
    pub(super) fn begin_use(&mut self, stream: &Stream) -> Result<*mut T> {
        if stream.is_capturing()? {
            let reason = "host memory cannot be copied under capture: copy before the replay";
            return Err(Error::Cuda { call: "cuMemcpyAsync", reason: reason.to_owned() });
        }
        if *self.is_in_use.get_mut() {
            stream.wait(&self.last_use)?;
        }
        Ok(self.start)
    }

    /// Marks the end of the copy.
    pub(super) fn end_use(&mut self, stream: &Stream) -> Result<()> {
        *self.is_in_use.get_mut() = true;
        self.last_use.record(stream).inspect_err(|_| {
            // The event still tells of an earlier copy, so that nothing but the end of the stream's work
            // tells of this one. A device that cannot say that either does nothing any more.
            let _ = stream.synchronize();
        })
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // A device that failed does nothing any more; the memory is then left to the process's end.
        if self.context.synchronize().is_ok() {
            // SAFETY: allocated by `zeroed`, freed once, and the device is idle.
            let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}
