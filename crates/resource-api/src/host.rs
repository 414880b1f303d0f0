//! What the host does for plugins.
//!
//! Each cdylib has its own std, thread pools, logger and allocator; what must be shared goes
//! through here. The list grows at the end.

use crate::abi::guard::guard;
use crate::id::{LabelId, NodeId, WalkId};
use crate::{Device, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::RResult;
use resource_api_macros::capability;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

/// Severity of a log line.
pub mod level {
    /// Something failed.
    pub const ERROR: u32 = 1;
    /// Something is off.
    pub const WARN: u32 = 2;
    /// Worth knowing.
    pub const INFO: u32 = 3;
    /// For debugging.
    pub const DEBUG: u32 = 4;
    /// For debugging, in bulk.
    pub const TRACE: u32 = 5;
}

/// Services of the host. All methods may be called from any thread unless they say otherwise.
#[capability(id = "engine.host", major = 1, path = crate)]
pub trait HostServices: Send + Sync {
    /// Number of threads that [`HostServices::parallel_for`] uses, the caller included.
    fn threads(&self) -> u32;

    /// Runs `body(0..tasks)` on the host's pool and waits. The caller takes part; nested calls run
    /// in the calling thread. Allocates nothing. Prefer [`HostServicesHandle::run`].
    fn parallel_for(&self, tasks: u32, body: ParallelBody);

    /// Writes a log line ([`level`]) under the plugin's target.
    fn log(&self, level: u32, target: &str, message: &str);

    /// Adds to a counter. The name is prefixed with the resource's key.
    fn count(&self, resource: &str, name: &str, by: u64);

    /// Sets a gauge.
    fn gauge(&self, resource: &str, name: &str, value: f64);

    /// Nanoseconds on the host's monotonic clock.
    fn now_nanos(&self) -> u64;

    /// Name of a label.
    fn label_name(&self, label: LabelId) -> String;

    /// The id of a label, interning it if it is new.
    fn label_id(&self, name: &str) -> LabelId;

    /// Name of a walk.
    fn walk_name(&self, walk: WalkId) -> String;

    /// Name of a node.
    fn node_name(&self, node: NodeId) -> String;

    /// The last step epoch whose device work has completed: memory freed at or before it may be
    /// reused.
    fn completed_epoch(&self) -> u64;

    /// Takes `bytes` from the engine's budget for `device` and says whether they were there. What a
    /// resource does not take here does not count, so pools are sized through it.
    fn reserve_memory(&self, device: Device, bytes: u64) -> Result<()>;

    /// Gives back what `reserve_memory` took.
    fn release_memory(&self, device: Device, bytes: u64);

    /// Bytes of the budget that nobody has taken yet.
    fn free_memory(&self, device: Device) -> u64;

    /// Runs `job` once on a thread of the host named after the plugin, joined at shutdown.
    fn spawn(&self, name: &str, job: Job) -> Result<()>;

    /// Name of the CPU instruction level that kernels are to keep to (`avx2`, `avx512vnni`, ...), the
    /// same in the host and in every plugin; empty for the best that the CPU has.
    fn cpu_features(&self) -> String {
        String::new()
    }
}

impl Default for LabelId {
    fn default() -> Self {
        LabelId::MAIN
    }
}

impl crate::abi::cross::CrossReturn for LabelId {
    type Raw = LabelId;
    fn lower_return(self) -> Result<LabelId> {
        Ok(self)
    }
    unsafe fn lift_return(raw: Result<LabelId>) -> Self {
        raw.unwrap_or_default()
    }
}

/// A borrowed `Fn(u32)` on its way to the host's pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct ParallelBody {
    state: *const (),
    call: unsafe extern "C" fn(*const (), u32),
}

// SAFETY: made from a `Sync` closure only, which outlives the call (see `run`).
unsafe impl Send for ParallelBody {}
// SAFETY: as above.
unsafe impl Sync for ParallelBody {}
crate::cross_value!(ParallelBody, Job);

impl ParallelBody {
    /// Runs one task. Panics in it stay inside the library that made the body.
    pub fn call(&self, task: u32) {
        // SAFETY: `state` is alive while the `run` that made it waits.
        unsafe { (self.call)(self.state, task) }
    }
}

struct Guarded<F> {
    body: F,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

unsafe extern "C" fn call_guarded<F: Fn(u32) + Sync>(state: *const (), task: u32) {
    // SAFETY: `run` made `state` from a Guarded<F> and waits for all calls.
    let guarded = unsafe { &*(state as *const Guarded<F>) };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (guarded.body)(task))) {
        let mut first = guarded.panic.lock().unwrap_or_else(|e| e.into_inner());
        match *first {
            None => *first = Some(payload),
            Some(_) => std::mem::forget(payload),
        }
    }
}

impl HostServicesHandle {
    /// Runs `body(0..tasks)` on the host's pool and waits. A panic in `body` goes on in the caller,
    /// where the shim of the plugin catches it.
    pub fn run<F: Fn(u32) + Sync>(&self, tasks: u32, body: F) {
        if tasks <= 1 {
            return (0..tasks).for_each(body);
        }
        let guarded = Guarded { body, panic: Mutex::new(None) };
        let state = &guarded as *const Guarded<F> as *const ();
        self.parallel_for(tasks, ParallelBody { state, call: call_guarded::<F> });
        // A faulted host runs nothing and has no way to say so; results would be silently wrong.
        if let Err(e) = crate::Interface::object(self).check_fault() {
            panic!("the host cannot run parallel work: {e}");
        }
        let panic = guarded.panic.into_inner().unwrap_or_else(|e| e.into_inner());
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

/// An owned `FnOnce()` on its way to a host thread.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct Job {
    state: *mut (),
    call: unsafe extern "C" fn(*mut (), bool) -> RResult<(), ResourceError>,
}

// SAFETY: made from a `Send` closure only.
unsafe impl Send for Job {}

unsafe extern "C" fn call_job<F: FnOnce() + Send + 'static>(
    state: *mut (),
    run: bool,
) -> RResult<(), ResourceError> {
    guard("a job", || {
        // SAFETY: `new` leaked a Box<F>; it comes back exactly once, from `run` or from `drop`.
        let job = unsafe { Box::from_raw(state as *mut F) };
        if run {
            job()
        } else {
            drop(job)
        }
        Ok(())
    })
    .into()
}

impl Job {
    /// Wraps a closure.
    pub fn new<F: FnOnce() + Send + 'static>(job: F) -> Self {
        Self { state: Box::into_raw(Box::new(job)) as *mut (), call: call_job::<F> }
    }

    /// Runs it.
    ///
    /// # Errors
    /// `PANICKED` when it did, caught in the library that made the job.
    pub fn run(self) -> Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: consumed here, so called once.
        unsafe { (this.call)(this.state, true) }.into()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // SAFETY: not run (`run` forgets self), so the closure is still there.
        let _ = unsafe { (self.call)(self.state, false) };
    }
}

/// A host for tests and for use as a library without an engine: one thread, no budget, logs to
/// standard error, fixed names.
#[derive(Debug, Default)]
pub struct PlainHost {
    labels: Mutex<Vec<String>>,
}

impl PlainHost {
    /// As a handle.
    pub fn handle() -> HostServicesHandle {
        let labels = Mutex::new(vec!["main".to_string()]);
        HostServicesHandle::new(Arc::new(PlainHost { labels }))
    }
}

impl HostServices for PlainHost {
    fn threads(&self) -> u32 {
        1
    }
    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        (0..tasks).for_each(|t| body.call(t));
    }
    fn log(&self, level: u32, target: &str, message: &str) {
        if level <= self::level::WARN {
            eprintln!("{target}: {message}");
        }
    }
    fn count(&self, _resource: &str, _name: &str, _by: u64) {}
    fn gauge(&self, _resource: &str, _name: &str, _value: f64) {}
    fn now_nanos(&self) -> u64 {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
    }
    fn label_name(&self, label: LabelId) -> String {
        let labels = self.labels.lock().unwrap_or_else(|e| e.into_inner());
        labels.get(label.index()).cloned().unwrap_or_else(|| format!("label{}", label.0))
    }
    fn label_id(&self, name: &str) -> LabelId {
        let mut labels = self.labels.lock().unwrap_or_else(|e| e.into_inner());
        let at = labels.iter().position(|l| l == name).unwrap_or_else(|| {
            labels.push(name.to_string());
            labels.len() - 1
        });
        LabelId(at as u32)
    }
    fn walk_name(&self, walk: WalkId) -> String {
        format!("walk{}", walk.0)
    }
    fn node_name(&self, node: NodeId) -> String {
        format!("node{}", node.0)
    }
    fn completed_epoch(&self) -> u64 {
        u64::MAX
    }
    fn reserve_memory(&self, _device: Device, _bytes: u64) -> Result<()> {
        Ok(())
    }
    fn release_memory(&self, _device: Device, _bytes: u64) {}
    fn free_memory(&self, _device: Device) -> u64 {
        1 << 40
    }
    fn spawn(&self, name: &str, job: Job) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into());
        thread.spawn(move || {
            if let Err(e) = job.run() {
                eprintln!("{e}");
            }
        })?;
        Ok(())
    }
}
