//! Marks in a stream.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::check::driver as check;
use super::context::Context;
use super::stream::Stream;
use crate::error::Result;

/// A mark that a stream passes once it has done what was given to it before.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's event calls are thread safe; the handle is destroyed once, by the owner.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that counts as passed until it is recorded. It keeps no time, which makes it cheaper.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a context is current; the pointer is to a local.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Puts the mark at the present end of the stream; an earlier mark is forgotten.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles are alive while they are borrowed.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    /// Whether the mark has been passed. Does not wait.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): also the error of a kernel that failed before.
    pub fn is_passed(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the handle is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until the mark has been passed. Not under capture.
    ///
    /// # Errors
    /// As for [`Event::is_passed`].
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the handle is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: the handle is alive and ours. Pending waits on it still hold.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
