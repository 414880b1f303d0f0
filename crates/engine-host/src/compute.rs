//! The device that an engine computes on: its stream, and how far the device has come.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::cuda::{Context, Event, Stream};
use resource_api::Device;

use crate::error::{Error, ErrorKind, Result};

/// A CUDA device with the one stream that all work of steps is put on.
#[derive(Debug)]
pub struct Compute {
    context: Arc<Context>,
    stream: Stream,
    marks: Mutex<Marks>,
    completed: AtomicU64,
}

#[derive(Debug, Default)]
struct Marks {
    /// Ends of steps that the device has not been seen to pass, by epoch, oldest first.
    pending: VecDeque<(u64, Event)>,
    /// Events for later marks.
    spare: Vec<Event>,
}

impl Compute {
    /// Opens a device.
    ///
    /// # Errors
    /// `Unsupported` with what is missing where there is no driver, no such device or an old one.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        let failed = |e: device::Error| {
            Error::new(ErrorKind::Unsupported, format!("device = \"cuda:{ordinal}\": {e}"))
        };
        let context = Context::of(ordinal as i32).map_err(failed)?;
        let facts = context.facts();
        if facts.compute < (8, 0) {
            let (major, minor) = facts.compute;
            let message = format!(
                "device = \"cuda:{ordinal}\": {} has compute capability {major}.{minor}; 8.0 or newer \
                 is needed",
                facts.name
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        tracing::info!(
            device = facts.name,
            memory_mb = facts.memory >> 20,
            driver = facts.driver,
            "computes on {}",
            context.device()
        );
        let stream = Stream::new(&context).map_err(failed)?;
        let (marks, completed) = (Mutex::default(), AtomicU64::new(0));
        Ok(Arc::new(Self { context, stream, marks, completed }))
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream of steps.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device as tensors name it.
    pub fn device(&self) -> Device {
        self.context.device()
    }

    /// An error of the device, naming it.
    pub fn failed(&self, e: &device::Error) -> Error {
        Error::new(ErrorKind::Internal, format!("{}: {e}", self.device()))
    }

    /// Says that all work of steps up to `epoch` is on the stream.
    ///
    /// # Errors
    /// [`device::Error::Cuda`]; also that of a kernel that failed before.
    pub fn end_epoch(&self, epoch: u64) -> device::Result<()> {
        let mut marks = self.lock();
        let event = match marks.spare.pop() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        event.record(&self.stream)?;
        marks.pending.push_back((epoch, event));
        Ok(())
    }

    /// The last epoch whose work the device has done. Does not wait. A device that failed completes
    /// nothing more.
    pub fn completed(&self) -> u64 {
        let mut marks = self.lock();
        while let Some((epoch, event)) = marks.pending.front() {
            if !event.is_passed().unwrap_or(false) {
                break;
            }
            self.completed.fetch_max(*epoch, Ordering::Release);
            let passed = marks.pending.pop_front();
            marks.spare.extend(passed.map(|(_, event)| event));
        }
        self.completed.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
