//! What a resource takes of the host: memory, threads, and what has gone wrong in it.
//!
//! Every resource gets the host's services through an object of its own, which charges to it what it
//! asks for. The memory that a resource still holds when it is dropped is given back for it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use resource_api::host::{Job, ParallelBody};
use resource_api::{Device, HostServices, LabelId, NodeId, ResourceError, WalkId};

/// What one resource has taken. Any thread.
#[derive(Debug)]
pub struct Account {
    key: String,
    held: Mutex<Held>,
    most: AtomicU64,
    job_panics: AtomicU64,
    bad_values: AtomicU64,
    /// Whether one of those shows that its state is not to be relied on.
    suspect: AtomicBool,
    /// Panics of those that were built under this key before.
    past_panics: AtomicU64,
    restarts: AtomicU64,
    /// Names of the threads it has started that run.
    threads: Mutex<Vec<String>>,
    thread_ended: Condvar,
}

/// What the resource that is alive now holds.
#[derive(Debug, Default)]
struct Held {
    /// How many were built under this key before, or have been dropped.
    life: u32,
    /// Bytes.
    by_device: Vec<(Device, u64)>,
}

impl Account {
    /// An empty account of the resource `key`.
    pub fn new(key: &str) -> Arc<Self> {
        Arc::new(Self {
            key: key.to_owned(),
            held: Mutex::default(),
            most: AtomicU64::new(0),
            job_panics: AtomicU64::new(0),
            bad_values: AtomicU64::new(0),
            suspect: AtomicBool::new(false),
            past_panics: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            threads: Mutex::default(),
            thread_ended: Condvar::new(),
        })
    }

    /// Bytes that it holds on all devices together.
    pub fn bytes(&self) -> u64 {
        lock(&self.held).by_device.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The most that it has held.
    pub fn most_bytes(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Panics of jobs that it gave to [`HostServices::spawn`].
    pub fn job_panics(&self) -> u64 {
        self.job_panics.load(Ordering::Relaxed)
    }

    /// Answers of it that cannot be right.
    pub fn bad_values(&self) -> u64 {
        self.bad_values.load(Ordering::Relaxed)
    }

    /// Counts an answer that cannot be right, and logs it.
    pub fn charge(&self, what: &str) {
        self.bad_values.fetch_add(1, Ordering::Relaxed);
        tracing::error!(resource = self.key, "{what}");
    }

    /// As [`charge`](Self::charge), for an answer after which its state is not to be relied on.
    pub fn suspect(&self, what: &str) {
        self.charge(what);
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// Whether there was such an answer.
    pub fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// How often the resource has been built anew.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Panics before it was built anew the last time.
    pub fn past_panics(&self) -> u64 {
        self.past_panics.load(Ordering::Relaxed)
    }

    /// Goes on with a resource that is built in place of one that has panicked so often.
    pub fn start_anew(&self, panics: u64) {
        self.past_panics.fetch_add(panics, Ordering::Relaxed);
        self.restarts.fetch_add(1, Ordering::Relaxed);
        self.suspect.store(false, Ordering::Relaxed);
    }

    /// Waits for the threads that it has started; answers the names of those that have not ended by
    /// then.
    pub fn join_threads(&self, patience: Duration) -> Vec<String> {
        let end = Instant::now() + patience;
        let mut threads = lock(&self.threads);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if threads.is_empty() || left.is_zero() {
                return threads.clone();
            }
            let waited = self.thread_ended.wait_timeout(threads, left);
            threads = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Adds bytes that the resource took in the life `life`; `false` when that is over.
    fn add(&self, life: u32, device: Device, bytes: u64) -> bool {
        let mut held = lock(&self.held);
        if held.life != life {
            return false;
        }
        let held = &mut held.by_device;
        match held.iter_mut().find(|(on, _)| *on == device) {
            Some((_, has)) => *has += bytes,
            None => held.push((device, bytes)),
        }
        let sum = held.iter().map(|(_, bytes)| bytes).sum();
        self.most.fetch_max(sum, Ordering::Relaxed);
        true
    }

    /// Takes `bytes` off; answers how many of them it had, `None` when the life `life` is over.
    fn take(&self, life: u32, device: Device, bytes: u64) -> Option<u64> {
        let mut held = lock(&self.held);
        if held.life != life {
            return None;
        }
        let found = held.by_device.iter_mut().find(|(on, _)| *on == device);
        let Some((_, has)) = found else { return Some(0) };
        let taken = bytes.min(*has);
        *has -= taken;
        Some(taken)
    }

    fn job_ended(&self, name: &str, result: resource_api::Result<()>) {
        if let Err(e) = result {
            self.job_panics.fetch_add(1, Ordering::Relaxed);
            tracing::error!(resource = self.key, "its thread {name:?} has ended: {e}");
        }
        let mut threads = lock(&self.threads);
        if let Some(at) = threads.iter().position(|t| t == name) {
            threads.swap_remove(at);
        }
        self.thread_ended.notify_all();
    }
}

/// The host's services as one resource gets them.
pub struct Charged {
    host: Arc<dyn HostServices>,
    account: Arc<Account>,
    /// The account's, when these were made: what outlives its resource touches nothing of the next one's.
    life: u32,
}

impl Charged {
    /// Services of `host` that charge `account`.
    pub fn new(host: Arc<dyn HostServices>, account: Arc<Account>) -> Self {
        let life = lock(&account.held).life;
        Self { host, account, life }
    }
}

impl HostServices for Charged {
    fn threads(&self) -> u32 {
        self.host.threads()
    }

    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        self.host.parallel_for(tasks, body);
    }

    fn log(&self, level: u32, target: &str, message: &str) {
        self.host.log(level, target, message);
    }

    fn count(&self, resource: &str, name: &str, by: u64) {
        self.host.count(resource, name, by);
    }

    fn gauge(&self, resource: &str, name: &str, value: f64) {
        self.host.gauge(resource, name, value);
    }

    fn now_nanos(&self) -> u64 {
        self.host.now_nanos()
    }

    fn label_name(&self, label: LabelId) -> String {
        self.host.label_name(label)
    }

    fn label_id(&self, name: &str) -> LabelId {
        self.host.label_id(name)
    }

    fn walk_name(&self, walk: WalkId) -> String {
        self.host.walk_name(walk)
    }

    fn node_name(&self, node: NodeId) -> String {
        self.host.node_name(node)
    }

    fn completed_epoch(&self) -> u64 {
        self.host.completed_epoch()
    }

    fn reserve_memory(&self, device: Device, bytes: u64) -> resource_api::Result<()> {
        self.host.reserve_memory(device, bytes)?;
        if !self.account.add(self.life, device, bytes) {
            self.host.release_memory(device, bytes);
            return Err(ResourceError::wrong_state("the resource has ended"));
        }
        Ok(())
    }

    fn release_memory(&self, device: Device, bytes: u64) {
        // More than it has would be taken from the others.
        let Some(taken) = self.account.take(self.life, device, bytes) else { return };
        if taken < bytes {
            self.account.charge(&format!(
                "release_memory: gives back {bytes} bytes on {device}, of which it holds {taken}"
            ));
        }
        self.host.release_memory(device, taken);
    }

    fn free_memory(&self, device: Device) -> u64 {
        self.host.free_memory(device)
    }

    fn spawn(&self, name: &str, job: Job) -> resource_api::Result<()> {
        let (account, name) = (self.account.clone(), name.to_owned());
        lock(&account.threads).push(name.clone());
        let charged = {
            let (account, name) = (account.clone(), name.clone());
            // A thread that is never started drops the job: then it has ended, too.
            let ended = Ended { account, name, result: Ok(()) };
            Job::new(move || {
                let mut ended = ended;
                ended.result = job.run();
            })
        };
        self.host.spawn(&name, charged)
    }

    fn cpu_features(&self) -> String {
        self.host.cpu_features()
    }
}

/// Notes the end of a job when it is dropped.
struct Ended {
    account: Arc<Account>,
    name: String,
    result: resource_api::Result<()>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, Ok(()));
        self.account.job_ended(&self.name, result);
    }
}

/// Ends a life of a resource: gives back what it still holds, because it panicked in its own end, or
/// because somebody has not let go of it.
pub fn give_back(host: &dyn HostServices, account: &Account) {
    let mut held = lock(&account.held);
    held.life += 1;
    for (device, bytes) in std::mem::take(&mut held.by_device) {
        host.release_memory(device, bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::Services;

    #[test]
    fn what_a_resource_takes_is_charged_to_it_alone() {
        let host = Services::new(1, 100);
        let accounts = ["a", "b"].map(Account::new);
        let [a, b] = accounts.each_ref().map(|to| Charged::new(host.clone(), to.clone()));
        a.reserve_memory(Device::CPU, 60).unwrap();
        b.reserve_memory(Device::CPU, 30).unwrap();
        assert!(a.reserve_memory(Device::CPU, 20).is_err());
        assert_eq!([60, 30], accounts.each_ref().map(|a| a.bytes()));
        // Nobody gives back what another one holds.
        b.release_memory(Device::CPU, 90);
        assert_eq!((accounts[1].bytes(), accounts[1].bad_values()), (0, 1));
        assert_eq!(host.free_memory(Device::CPU), 40);
        a.release_memory(Device::CPU, 10);
        assert_eq!((accounts[0].bytes(), accounts[0].most_bytes()), (50, 60));
        give_back(&*host, &accounts[0]);
        assert_eq!((host.free_memory(Device::CPU), accounts[0].bytes()), (100, 0));
        // Who outlived that can touch nothing of the next one's.
        let next = Charged::new(host.clone(), accounts[0].clone());
        next.reserve_memory(Device::CPU, 70).unwrap();
        a.release_memory(Device::CPU, 50);
        assert!(a.reserve_memory(Device::CPU, 5).is_err());
        assert_eq!((host.free_memory(Device::CPU), accounts[0].bytes()), (30, 70));
    }

    #[test]
    fn threads_are_waited_for_and_their_panics_counted() {
        resource_api::abi::guard::install_panic_hook();
        let host = Services::new(1, 0);
        let account = Account::new("a");
        let charged = Charged::new(host.clone(), account.clone());
        charged.spawn("fails", Job::new(|| panic!("the job was asked to panic"))).unwrap();
        assert!(account.join_threads(Duration::from_secs(20)).is_empty());
        assert_eq!(account.job_panics(), 1);
        let (open, gate) = std::sync::mpsc::channel::<()>();
        charged
            .spawn(
                "stays",
                Job::new(move || {
                    let _ = gate.recv();
                }),
            )
            .unwrap();
        assert_eq!(account.join_threads(Duration::from_millis(5)), ["stays"]);
        drop(open);
        assert!(account.join_threads(Duration::from_secs(20)).is_empty());
        host.join_threads();
    }
}
