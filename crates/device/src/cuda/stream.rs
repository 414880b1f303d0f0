//! Streams: queues of device work, each done in order.

use std::sync::Arc;

use cudarc::driver::sys;

use super::check::driver as check;
use super::context::Context;
use super::event::Event;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::tensor;
use crate::error::{Error, Result};
use bytemuck::Pod;
use resource_api::{Element, RawTensor, StepContext, TensorView, TensorViewMut};

/// A queue of device work, or another library's queue that is used for a while.
///
/// Work on different streams overlaps unless an [`Event`] orders it. What is put in here reads and
/// writes device memory later: memory that it uses must not be freed before, which is why dropping a
/// [`DeviceBuffer`] waits.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    is_owned: bool,
}

// SAFETY: the driver's stream calls are thread safe; an owned handle is destroyed once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, not ordered after the device's default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the pointer is to a local.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { context: context.clone(), raw, is_owned: true })
    }

    /// Another library's stream, by its handle; 0 is the device's default stream.
    ///
    /// # Safety
    /// The handle must be of a stream of `context`'s device that stays alive as long as the value.
    pub unsafe fn borrowed(context: &Arc<Context>, handle: u64) -> Self {
        Self { context: context.clone(), raw: handle as usize as sys::CUstream, is_owned: false }
    }

    /// The stream that a step's device work is put on.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a step of a host that made no stream.
    pub fn of_step(context: &Arc<Context>, ctx: &StepContext<'_>) -> Result<Self> {
        if ctx.stream() == 0 {
            let reason =
                format!("step {} has none, and the work is on {}", ctx.step().0, context.device());
            return Err(Error::Tensor { what: "stream", reason });
        }
        // SAFETY: the contract promises that a step's handle is of a stream of the engine's device,
        // which the host keeps until all resources are gone.
        Ok(unsafe { Self::borrowed(context, ctx.stream()) })
    }

    /// The handle, for other libraries; good while this value is alive.
    pub fn handle(&self) -> u64 {
        self.raw as usize as u64
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until everything put in so far is done. Not under capture.
    ///
    /// # Errors
    /// [`Error::Cuda`]: also the error of a kernel that failed before.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the handle is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Has later work of this stream wait for `event`, as it was last recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles are alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw(), 0) })
    }

    /// Whether what is put in becomes part of a graph instead of being done.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_capturing(&self) -> Result<bool> {
        self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the handle is alive; the pointer is to a local.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Copies `len` elements from `from[from_at..]` to `to[to_at..]`, later. The pinned memory can be
    /// accessed again at once: whoever does waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where either range is not inside its buffer.
    pub fn upload<T: Pod>(
        &self,
        from: &mut PinnedBuffer<T>,
        from_at: usize,
        to: &mut DeviceBuffer<T>,
        to_at: usize,
        len: usize,
    ) -> Result<()> {
        check_range("elements to upload from", from_at, len, from.len())?;
        check_range("elements to upload to", to_at, len, to.len())?;
        if len == 0 {
            return Ok(());
        }
        let source = from.begin_use(self)?.wrapping_add(from_at);
        let target = to.address() + (to_at * size_of::<T>()) as u64;
        // SAFETY: both ranges are inside their allocations (checked). The pinned one outlives the copy
        // because its drop waits for `end_use`'s event, the device one because its drop waits too.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(target, source.cast(), len * size_of::<T>(), self.raw)
        };
        check("cuMemcpyHtoDAsync", code)?;
        from.end_use(self)
    }

    /// Copies `len` elements from `from[from_at..]` to `to[to_at..]`, later: whoever accesses `to`
    /// waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where either range is not inside its buffer.
    pub fn download<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        from_at: usize,
        to: &mut PinnedBuffer<T>,
        to_at: usize,
        len: usize,
    ) -> Result<()> {
        check_range("elements to download from", from_at, len, from.len())?;
        check_range("elements to download to", to_at, len, to.len())?;
        if len == 0 {
            return Ok(());
        }
        let target = to.begin_use(self)?.wrapping_add(to_at);
        let source = from.address() + (from_at * size_of::<T>()) as u64;
        // SAFETY: as in `upload`; nobody reads the pinned range before `end_use`'s event is passed.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.cast(), source, len * size_of::<T>(), self.raw)
        };
        check("cuMemcpyDtoHAsync", code)?;
        to.end_use(self)
    }

    /// Copies `from` to `to[to_at..]`, after what was put in before, and waits for it: `from` may be pinned
    /// memory, of which the driver makes no copy. For tests and tools; per step, use [`Stream::upload`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the target is not inside its buffer; [`Error::Cuda`] under capture,
    /// where the graph would read `from` after its end.
    pub fn upload_slice<T: Pod>(
        &self,
        from: &[T],
        to: &mut DeviceBuffer<T>,
        to_at: usize,
    ) -> Result<()> {
        check_range("elements to upload to", to_at, from.len(), to.len())?;
        if self.is_capturing()? {
            let reason = "pageable memory cannot be copied under capture".to_owned();
            return Err(Error::Cuda { call: "cuMemcpyHtoDAsync", reason });
        }
        if from.is_empty() {
            return Ok(());
        }
        let target = to.address() + (to_at * size_of::<T>()) as u64;
        // SAFETY: the target is inside its allocation (checked), and the copy is done before this
        // returns, whatever kind of memory the source is.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(target, from.as_ptr().cast(), size_of_val(from), self.raw)
        };
        check("cuMemcpyHtoDAsync", code)?;
        self.synchronize()
    }

    /// Copies a contiguous device tensor to another of the same type and number of elements, later.
    ///
    /// # Errors
    /// [`Error::Tensor`] where they do not agree.
    pub fn copy(&self, from: &TensorView<'_>, to: &mut TensorViewMut<'_>) -> Result<()> {
        let (from, to) = (from.raw(), to.raw());
        let source = tensor::contiguous("source of a copy", &self.context, from, from.dtype)?;
        let target = tensor::contiguous("target of a copy", &self.context, to, from.dtype)?;
        crate::error::check_len("target of a copy", to.elements(), from.elements())?;
        let bytes = from.elements() * from.dtype.size();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both views promise that many bytes on this device, the target exclusively.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.raw) };
        check("cuMemcpyDtoDAsync", code)
    }

    /// Copies a contiguous device tensor to the beginning of `to`, later: whoever accesses `to` waits for
    /// the copy.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a tensor of another type or place; [`Error::Length`] where `to` is shorter;
    /// [`Error::Cuda`] under capture.
    pub fn download_tensor<T: Element + Pod>(
        &self,
        from: &TensorView<'_>,
        to: &mut PinnedBuffer<T>,
    ) -> Result<()> {
        let source = tensor::contiguous("tensor to download", &self.context, from.raw(), T::DTYPE)?;
        let elements = from.raw().elements();
        check_range("elements to download to", 0, elements, to.len())?;
        if elements == 0 {
            return Ok(());
        }
        let target = to.begin_use(self)?;
        // SAFETY: the view promises that many elements, and the target has them (checked); as in `download`
        // for the rest.
        let code = unsafe {
            let bytes = elements * size_of::<T>();
            sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, self.raw)
        };
        check("cuMemcpyDtoHAsync", code)?;
        to.end_use(self)
    }

    /// The reverse of [`Stream::download_tensor`]. The pinned memory can be accessed again at once: whoever
    /// does waits for the copy.
    ///
    /// # Errors
    /// As for [`Stream::download_tensor`].
    pub fn upload_tensor<T: Element + Pod>(
        &self,
        from: &mut PinnedBuffer<T>,
        to: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let target = tensor::contiguous("tensor to upload to", &self.context, to.raw(), T::DTYPE)?;
        let elements = to.raw().elements();
        check_range("elements to upload from", 0, elements, from.len())?;
        if elements == 0 {
            return Ok(());
        }
        let source = from.begin_use(self)?;
        // SAFETY: as in `download_tensor`, and the view is exclusive.
        let code = unsafe {
            let bytes = elements * size_of::<T>();
            sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, self.raw)
        };
        check("cuMemcpyHtoDAsync", code)?;
        from.end_use(self)
    }

    /// The elements of a device tensor with any strides, in row-major order, once everything that was
    /// put in before is done. One copy per run of neighbouring elements: for tests and tools.
    ///
    /// # Errors
    /// [`Error::Tensor`] for another type or device; [`Error::Cuda`], also under capture.
    pub fn read<T: Element + Pod>(&self, from: &TensorView<'_>) -> Result<Vec<T>> {
        let raw = from.raw();
        let start = tensor::strided("tensor to read", &self.context, raw, T::DTYPE)?;
        let mut values = vec![T::zeroed(); raw.elements()];
        self.synchronize()?;
        let (run, offsets) = runs(raw);
        for (values, offset) in values.chunks_mut(run.max(1)).zip(offsets) {
            let at = start.wrapping_add_signed(offset * size_of::<T>() as i64);
            let bytes = size_of_val(values);
            // SAFETY: the run lies inside the elements that the view describes, and `values` is as long.
            let code = unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), at, bytes) };
            check("cuMemcpyDtoH", code)?;
        }
        Ok(values)
    }

    /// The reverse of [`Stream::read`]: complete when this returns.
    ///
    /// # Errors
    /// As for [`Stream::read`]; [`Error::Length`] for another number of elements.
    pub fn write<T: Element + Pod>(&self, to: &mut TensorViewMut<'_>, values: &[T]) -> Result<()> {
        let raw = to.raw();
        let start = tensor::strided("tensor to write", &self.context, raw, T::DTYPE)?;
        crate::error::check_len("values of a tensor", values.len(), raw.elements())?;
        self.synchronize()?;
        let (run, offsets) = runs(raw);
        for (values, offset) in values.chunks(run.max(1)).zip(offsets) {
            let at = start.wrapping_add_signed(offset * size_of::<T>() as i64);
            // SAFETY: as in `read`, and the view is exclusive.
            let code =
                unsafe { sys::cuMemcpyHtoD_v2(at, values.as_ptr().cast(), size_of_val(values)) };
            check("cuMemcpyHtoD", code)?;
        }
        self.context.synchronize()
    }

    /// Sets every byte of a buffer, later.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn fill_bytes<T: Pod>(&self, buffer: &mut DeviceBuffer<T>, byte: u8) -> Result<()> {
        self.context.bind()?;
        if buffer.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer is alive and that long; any bytes are a value of T.
        let code = unsafe {
            sys::cuMemsetD8Async(buffer.address(), byte, buffer.len() * size_of::<T>(), self.raw)
        };
        check("cuMemsetD8Async", code)
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_owned && self.context.bind().is_ok() {
            // SAFETY: the handle is ours; the driver does the pending work before it lets go of it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Length of the runs of neighbouring elements that a tensor consists of, and the offset of each from
/// the first element, in row-major order.
fn runs(raw: &RawTensor) -> (usize, impl Iterator<Item = i64>) {
    let shape: Vec<i64> = raw.shape().to_vec();
    let strides = raw.strides;
    let (mut run, mut outer) = (1, shape.len());
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == run) {
        run *= shape[outer - 1];
        outer -= 1;
    }
    let count: i64 = shape[..outer].iter().product();
    let offset_of = move |mut index: i64| {
        let mut offset = 0;
        for d in (0..outer).rev() {
            offset += index % shape[d] * strides[d];
            index /= shape[d];
        }
        offset
    };
    (run.max(0) as usize, (0..count.max(0)).map(offset_of))
}

fn check_range(what: &'static str, at: usize, len: usize, limit: usize) -> Result<()> {
    match at.checked_add(len) {
        Some(end) if end <= limit => Ok(()),
        end => Err(Error::OutOfRange { what, index: end.unwrap_or(usize::MAX), limit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use resource_api::{DType, Device};

    #[test]
    fn a_strided_tensor_is_as_few_runs_as_it_can_be() {
        let of = |shape: &[usize], strides: &[i64]| {
            let null = std::ptr::null_mut();
            let mut raw = RawTensor::contiguous(null, Device::cuda(0), DType::F32, shape);
            raw.strides[..strides.len()].copy_from_slice(strides);
            let (run, offsets) = runs(&raw);
            (run, offsets.collect::<Vec<_>>())
        };
        assert_eq!(of(&[3, 4], &[4, 1]), (12, vec![0]));
        assert_eq!(of(&[2, 3, 4], &[40, 4, 1]), (12, vec![0, 40]));
        assert_eq!(of(&[2, 2, 4], &[40, 8, 1]), (4, vec![0, 8, 40, 48]));
        assert_eq!(of(&[2, 2], &[1, 2]), (1, vec![0, 2, 1, 3]));
        assert_eq!(of(&[0, 4], &[4, 1]).0, 0);
    }
}
