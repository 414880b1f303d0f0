//! What the host does for plugins: its thread pool, log, metrics, clock, names and memory budget.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use device::{Parallel, Pool};
use resource_api::host::{Job, ParallelBody, level};
use resource_api::{Device, ErrorKind, HostServices, LabelId, NodeId, ResourceError, WalkId};

use crate::compute::Compute;
use crate::names::Names;

/// The services of one engine.
pub struct Services {
    pool: Pool,
    started: Instant,
    /// Labels of streams; `main` is 0.
    pub labels: Names,
    /// Walks.
    pub walks: Names,
    /// Nodes.
    pub nodes: Names,
    budget: Budget,
    /// The device that steps run on, where that is not the CPU.
    compute: Option<(Arc<Compute>, Budget)>,
    cpu_features: String,
    completed_epoch: AtomicU64,
    /// By resource and name.
    metrics: Mutex<BTreeMap<String, BTreeMap<String, Metric>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Memory for resources, and how much of it is taken.
struct Budget {
    bytes: u64,
    reserved: AtomicU64,
}

/// One metric of a resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Metric {
    /// Only ever added to.
    Counter(u64),
    /// Set to the present value.
    Gauge(f64),
}

impl Services {
    /// Services with `threads` threads (the calling one included) and `budget` bytes for resources.
    pub fn new(threads: usize, budget: u64) -> Arc<Self> {
        Self::on_device(Pool::new(threads), budget, None)
    }

    /// As [`Services::new`], with a pool, and a device and the bytes of its memory for resources.
    pub fn on_device(pool: Pool, budget: u64, compute: Option<(Arc<Compute>, u64)>) -> Arc<Self> {
        Arc::new(Self {
            pool,
            started: Instant::now(),
            labels: Names::with(["main"]),
            walks: Names::default(),
            nodes: Names::default(),
            budget: Budget::new(budget),
            compute: compute.map(|(compute, bytes)| (compute, Budget::new(bytes))),
            cpu_features: device::CpuFeatures::current().name().to_string(),
            completed_epoch: AtomicU64::new(0),
            metrics: Mutex::default(),
            threads: Mutex::default(),
        })
    }

    /// The pool, for the model's own kernels.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Says that the work of steps up to `epoch` is done, or, with a device, given to its stream.
    pub fn complete_epoch(&self, epoch: u64) {
        let Some((compute, _)) = &self.compute else {
            self.completed_epoch.fetch_max(epoch, Ordering::Release);
            return;
        };
        // Without the mark the epoch completes with the next one that gets one.
        if let Err(e) = compute.end_epoch(epoch) {
            tracing::error!("epoch {epoch} cannot be marked on {}: {e}", compute.device());
        }
    }

    /// The handle of the stream that device work of steps is put on; 0 on the CPU.
    pub fn stream(&self) -> u64 {
        self.compute.as_ref().map_or(0, |(compute, _)| compute.stream().handle())
    }

    /// All metrics, by `resource.name`.
    pub fn metrics(&self) -> BTreeMap<String, Metric> {
        let metrics = lock(&self.metrics);
        let all = metrics.iter().flat_map(|(resource, of)| {
            of.iter().map(move |(name, &metric)| (format!("{resource}.{name}"), metric))
        });
        all.collect()
    }

    /// Waits for the threads that plugins spawned.
    pub fn join_threads(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic in it was contained and printed there.
            let _ = thread.join();
        }
    }

    /// The budget of a device that this engine uses.
    fn budget_of(&self, device: Device) -> Option<&Budget> {
        match &self.compute {
            _ if device.is_cpu() => Some(&self.budget),
            Some((compute, budget)) if compute.device() == device => Some(budget),
            _ => None,
        }
    }

    /// Allocates only for a metric that is new.
    fn update(&self, resource: &str, name: &str, f: impl FnOnce(Option<Metric>) -> Metric) {
        let mut metrics = lock(&self.metrics);
        match metrics.get_mut(resource).and_then(|of| of.get_mut(name)) {
            Some(metric) => *metric = f(Some(*metric)),
            None => {
                let of = metrics.entry(resource.to_owned()).or_default();
                of.insert(name.to_owned(), f(None));
            }
        }
    }
}

impl Budget {
    fn new(bytes: u64) -> Self {
        Self { bytes, reserved: AtomicU64::new(0) }
    }

    fn free(&self) -> u64 {
        self.bytes.saturating_sub(self.reserved.load(Ordering::Acquire))
    }

    /// The error is what there is left.
    fn take(&self, bytes: u64) -> Result<(), u64> {
        let more = |reserved: u64| reserved.checked_add(bytes).filter(|&sum| sum <= self.bytes);
        let taken = self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map(|_| ()).map_err(|reserved| self.bytes.saturating_sub(reserved))
    }

    fn give_back(&self, bytes: u64) {
        let less = |reserved: u64| Some(reserved.saturating_sub(bytes));
        let _ = self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }
}

impl HostServices for Services {
    fn threads(&self) -> u32 {
        self.pool.threads() as u32
    }

    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        self.pool.run(tasks as usize, &|task| body.call(task as u32));
    }

    fn log(&self, at: u32, target: &str, message: &str) {
        // tracing wants static targets, so the plugin's goes into a field.
        match at {
            level::ERROR => tracing::error!(plugin = target, "{message}"),
            level::WARN => tracing::warn!(plugin = target, "{message}"),
            level::INFO => tracing::info!(plugin = target, "{message}"),
            level::DEBUG => tracing::debug!(plugin = target, "{message}"),
            _ => tracing::trace!(plugin = target, "{message}"),
        }
    }

    fn count(&self, resource: &str, name: &str, by: u64) {
        self.update(resource, name, |old| match old {
            Some(Metric::Counter(n)) => Metric::Counter(n.saturating_add(by)),
            _ => Metric::Counter(by),
        });
    }

    fn gauge(&self, resource: &str, name: &str, value: f64) {
        self.update(resource, name, |_| Metric::Gauge(value));
    }

    fn now_nanos(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn label_name(&self, label: LabelId) -> String {
        self.labels.name(label.0)
    }

    fn label_id(&self, name: &str) -> LabelId {
        LabelId(self.labels.intern(name))
    }

    fn walk_name(&self, walk: WalkId) -> String {
        self.walks.name(walk.0)
    }

    fn node_name(&self, node: NodeId) -> String {
        self.nodes.name(node.0)
    }

    fn completed_epoch(&self) -> u64 {
        match &self.compute {
            Some((compute, _)) => compute.completed(),
            None => self.completed_epoch.load(Ordering::Acquire),
        }
    }

    fn reserve_memory(&self, device: Device, bytes: u64) -> resource_api::Result<()> {
        self.budget_of(device).map_or(Err(0), |budget| budget.take(bytes)).map_err(|free| {
            let message = format!(
                "{bytes} bytes on {device} are asked for, {free} of the engine's {} are left: ask for \
                 fewer pages or a smaller share of memory",
                self.budget_of(device).map_or(0, |budget| budget.bytes)
            );
            ResourceError::new(ErrorKind::EXHAUSTED, message).with_amounts(bytes, free)
        })
    }

    fn release_memory(&self, device: Device, bytes: u64) {
        if let Some(budget) = self.budget_of(device) {
            budget.give_back(bytes);
        }
    }

    fn free_memory(&self, device: Device) -> u64 {
        self.budget_of(device).map_or(0, Budget::free)
    }

    fn cpu_features(&self) -> String {
        self.cpu_features.clone()
    }

    fn spawn(&self, name: &str, job: Job) -> resource_api::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            // Whoever is to be charged for a panic has been told.
            let _ = job.run();
        })?;
        lock(&self.threads).push(thread);
        Ok(())
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Services({} threads, {} bytes)", self.pool.threads(), self.budget.bytes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_never_overdrawn() {
        let services = Services::new(1, 100);
        assert!(services.reserve_memory(Device::CPU, 60).is_ok());
        let e = services.reserve_memory(Device::CPU, 60).unwrap_err();
        assert_eq!((e.kind(), e.amounts()), (ErrorKind::EXHAUSTED, (60, 40)));
        assert!(services.reserve_memory(Device::CPU, u64::MAX).is_err());
        services.release_memory(Device::CPU, 60);
        assert_eq!(services.free_memory(Device::CPU), 100);
        let elsewhere = Device::cuda(0);
        assert_eq!(services.free_memory(elsewhere), 0);
        assert!(services.reserve_memory(elsewhere, 1).is_err());
    }

    #[test]
    fn counters_add_and_gauges_replace() {
        let services = Services::new(1, 0);
        services.count("kv", "evicted", 2);
        services.count("kv", "evicted", 3);
        services.gauge("kv", "free", 7.0);
        services.gauge("kv", "free", 6.0);
        let metrics = services.metrics();
        assert_eq!(metrics["kv.evicted"], Metric::Counter(5));
        assert_eq!(metrics["kv.free"], Metric::Gauge(6.0));
    }
}
