//! The services that a resource under check gets: one thread, fixed names, and a small budget of
//! memory that is accounted for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use resource_api::host::{Job, ParallelBody, PlainHost};
use resource_api::{
    Device, ErrorKind, HostServices, HostServicesHandle, LabelId, NodeId, ResourceError, Result,
    WalkId,
};

/// Bytes that resources under check may take.
const BUDGET: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub struct KitHost {
    names: HostServicesHandle,
    reserved: AtomicU64,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl Default for KitHost {
    fn default() -> Self {
        let threads = Mutex::default();
        Self { names: PlainHost::handle(), reserved: AtomicU64::new(0), threads }
    }
}

impl KitHost {
    /// Bytes that have been taken and not given back.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// Waits for the threads that the resource has started.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(|e| e.into_inner()));
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl HostServices for KitHost {
    fn threads(&self) -> u32 {
        1
    }

    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        (0..tasks).for_each(|task| body.call(task));
    }

    fn log(&self, _level: u32, _target: &str, _message: &str) {}

    fn count(&self, _resource: &str, _name: &str, _by: u64) {}

    fn gauge(&self, _resource: &str, _name: &str, _value: f64) {}

    /// Does not move: an answer that depends on the time is not repeatable.
    fn now_nanos(&self) -> u64 {
        0
    }

    fn label_name(&self, label: LabelId) -> String {
        self.names.label_name(label)
    }

    fn label_id(&self, name: &str) -> LabelId {
        self.names.label_id(name)
    }

    fn walk_name(&self, walk: WalkId) -> String {
        self.names.walk_name(walk)
    }

    fn node_name(&self, node: NodeId) -> String {
        self.names.node_name(node)
    }

    /// The kit calls one method after the other: whatever a step did is done when it returns.
    fn completed_epoch(&self) -> u64 {
        u64::MAX
    }

    fn reserve_memory(&self, device: Device, bytes: u64) -> Result<()> {
        let sum = |taken: u64| taken.checked_add(bytes).filter(|&sum| sum <= BUDGET);
        let took = self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, sum);
        took.map(|_| ()).map_err(|taken| {
            let message = format!("{bytes} bytes on {device} do not fit the kit's {BUDGET}");
            ResourceError::new(ErrorKind::EXHAUSTED, message).with_amounts(bytes, BUDGET - taken)
        })
    }

    fn release_memory(&self, _device: Device, bytes: u64) {
        let left = |taken: u64| Some(taken.saturating_sub(bytes));
        let _ = self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, left);
    }

    fn free_memory(&self, _device: Device) -> u64 {
        BUDGET - self.reserved()
    }

    fn spawn(&self, name: &str, job: Job) -> Result<()> {
        let thread =
            std::thread::Builder::new().name(name.into()).spawn(move || drop(job.run()))?;
        self.threads.lock().unwrap_or_else(|e| e.into_inner()).push(thread);
        Ok(())
    }
}
