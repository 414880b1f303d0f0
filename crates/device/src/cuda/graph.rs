//! Work that is recorded once and put into a stream as a whole.

use std::sync::Arc;

use cudarc::driver::sys;

use super::check::driver as check;
use super::context::Context;
use super::stream::Stream;
use crate::error::Result;

/// A recorded sequence of kernels and copies. A replay costs the host one call, whatever its length,
/// and uses the addresses that the recording named. Nothing here knows whose they are: whoever captures
/// keeps every buffer that the recorded work uses, in whatever library, for as long as the graph.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: a replay takes `&mut self`, so that no two threads use the handle at once.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts into `stream`, which is not done. Meanwhile this thread must not
    /// allocate or free device memory, nor wait for the device; other threads may.
    ///
    /// # Errors
    /// Those of `work`, and [`Error::Cuda`](crate::Error::Cuda) where something in it cannot be
    /// recorded. The stream is usable again either way.
    pub fn capture<E: From<crate::Error>>(
        stream: &Stream,
        work: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        let context = stream.context().clone();
        context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
        check("cuStreamBeginCapture", code)?;
        let recording = Recording { stream, is_open: true };
        let worked = work();
        // Dropped with `recording`, so that what was recorded before a failure goes with it.
        worked?;
        let graph = recording.end()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph was just made; the pointer is to a local. The executable one does not
        // need it any more.
        let code = unsafe {
            let code = sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0);
            sys::cuGraphDestroy(graph);
            code
        };
        check("cuGraphInstantiate", code)?;
        Ok(Self { context, raw })
    }

    /// Puts the recorded work into a stream of the same device.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn replay(&mut self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles are alive. The recording has no copies from or to host memory (they are
        // refused under capture), so that a replay reaches device memory only.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: ours, destroyed once, and not running.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}

/// An open capture; a failure or a panic in the recorded work closes it too.
struct Recording<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl Recording<'_> {
    fn end(mut self) -> Result<sys::CUgraph> {
        self.is_open = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive and capturing; the pointer is to a local.
        let code = unsafe { sys::cuStreamEndCapture(self.stream.raw(), &mut graph) };
        check("cuStreamEndCapture", code)?;
        Ok(graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.is_open {
            let mut graph = std::ptr::null_mut();
            // SAFETY: as in `end`; what was recorded is thrown away.
            unsafe {
                sys::cuStreamEndCapture(self.stream.raw(), &mut graph);
                if !graph.is_null() {
                    sys::cuGraphDestroy(graph);
                }
            }
        }
    }
}
