//! Which resource is being called right now, how much of the host's time each takes, and a watchdog
//! that names the one that does not come back.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The methods that the runner calls in a step.
pub(crate) const METHODS: [&str; 7] =
    ["admit", "rollback_admit", "plan", "commit", "on_outputs", "clear_preplan", "forward"];

/// Place of a method in [`METHODS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Admit,
    Rollback,
    Plan,
    Commit,
    Outputs,
    ClearPreplan,
    Forward,
}

impl Method {
    pub(crate) fn name(self) -> &'static str {
        METHODS[self as usize]
    }
}

/// In place of a resource's index: the forward pass, in which the node calls resources itself.
const NODE: u64 = 0xffff;

/// Threads that call resources: the one that runs steps, and the one that plans ahead.
const LANES: usize = 2;

/// After this long without an answer while plugins are loaded, the log says who is waited for.
const SLOW: Duration = Duration::from_secs(10);

/// Runs `work`, and has the log name `what` if it does not come back for a while.
pub(crate) fn told_if_slow<R>(what: &str, work: impl FnOnce() -> R) -> R {
    told_after(SLOW, what, |line| tracing::warn!("{line}"), work)
}

fn told_after<R>(
    limit: Duration,
    what: &str,
    tell: impl Fn(&str) + Send + 'static,
    work: impl FnOnce() -> R,
) -> R {
    let (done, waiting) = std::sync::mpsc::channel::<()>();
    let name = what.to_owned();
    let spawned = std::thread::Builder::new().name("watch load".into()).spawn(move || {
        let started = Instant::now();
        let mut told = false;
        while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(limit) {
            if !told {
                tell(&format!("{name} has not come back for {:.0?}", started.elapsed()));
            }
            told = true;
        }
        if told {
            tell(&format!("{name} has come back, after {:.0?}", started.elapsed()));
        }
    });
    let result = work();
    drop(done);
    // Without a thread nobody watches, and the work is done all the same.
    if let Ok(watcher) = spawned {
        let _ = watcher.join();
    }
    result
}

/// What each lane is in. One writer per lane; the watchdog reads.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    lanes: [AtomicU64; LANES],
}

/// Every so many calls of a method, one is timed.
const SAMPLED: u64 = 16;

/// What one resource has taken of the host's time.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    calls: Cell<u64>,
    timed: Cell<u64>,
    nanos: Cell<u64>,
}

/// What a resource's step methods have taken since the engine was made.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceUsage {
    /// Key of the resource.
    pub key: String,
    /// Its kind.
    pub kind: String,
    /// Calls of its step methods.
    pub calls: u64,
    /// Their time, estimated from one call in 16.
    pub time: Duration,
    /// The plugin that it is from.
    pub plugin: String,
    /// Panics in it, those of threads that it started included.
    pub panics: u64,
    /// Whether it is out of use.
    pub is_faulted: bool,
    /// Answers that could not be right.
    pub bad_values: u64,
    /// How often it was built anew.
    pub restarts: u64,
    /// Bytes that it holds of the engine's memory, on all devices.
    pub bytes: u64,
    /// The most that it has held.
    pub most_bytes: u64,
}

impl Usage {
    pub(crate) fn calls(&self) -> u64 {
        self.calls.get()
    }

    pub(crate) fn time(&self) -> Duration {
        match self.timed.get() {
            0 => Duration::ZERO,
            timed => Duration::from_nanos(
                (u128::from(self.nanos.get()) * u128::from(self.calls.get()) / u128::from(timed))
                    as u64,
            ),
        }
    }
}

impl Watch {
    /// Makes a call of a resource, where the watchdog sees it.
    pub(crate) fn call<R>(
        &self,
        lane: usize,
        resource: usize,
        method: Method,
        usage: &Usage,
        call: impl FnOnce() -> R,
    ) -> R {
        let calls = usage.calls.get();
        usage.calls.set(calls + 1);
        self.enter(lane, resource as u64, method);
        let result = if calls.is_multiple_of(SAMPLED) {
            let start = Instant::now();
            let result = call();
            usage.nanos.set(usage.nanos.get() + start.elapsed().as_nanos() as u64);
            usage.timed.set(usage.timed.get() + 1);
            result
        } else {
            call()
        };
        self.leave(lane);
        result
    }

    /// Runs the node's forward pass, where the watchdog sees it.
    pub(crate) fn forward<R>(&self, work: impl FnOnce() -> R) -> R {
        self.enter(0, NODE, Method::Forward);
        let result = work();
        self.leave(0);
        result
    }

    /// The count in the high bits makes two calls of one method differ.
    fn enter(&self, lane: usize, resource: u64, method: Method) {
        let lane = &self.lanes[lane];
        let count = (lane.load(Ordering::Relaxed) >> 24) + 1;
        lane.store((count << 24) | (resource << 8) | (method as u64 + 1), Ordering::Relaxed);
    }

    fn leave(&self, lane: usize) {
        let lane = &self.lanes[lane];
        lane.store(lane.load(Ordering::Relaxed) & !0xff, Ordering::Relaxed);
    }
}

/// Tells when a call does not come back.
#[derive(Debug)]
pub(crate) struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Looks at `watch` until it is dropped. A call that lasts `limit` is told once, and again when it
    /// has come back; `names` are the resources by index.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(
        watch: Arc<Watch>,
        names: Vec<String>,
        limit: Duration,
        mut tell: impl FnMut(&str) + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = stop.clone();
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            let mut seen = [Seen::default(); LANES];
            let (stopped, changed) = &*theirs;
            let mut stopped = lock(stopped);
            while !*stopped {
                for (seen, lane) in seen.iter_mut().zip(&watch.lanes) {
                    if let Some(line) = seen.look(lane.load(Ordering::Relaxed), limit, &names) {
                        tell(&line);
                    }
                }
                let waited = changed.wait_timeout(stopped, limit / 4);
                stopped = waited.unwrap_or_else(|e| e.into_inner()).0;
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *lock(&self.stop.0) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(mutex: &Mutex<bool>) -> MutexGuard<'_, bool> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// What the watchdog last saw of a lane.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    value: u64,
    since: Option<Instant>,
    told: bool,
}

impl Seen {
    fn look(&mut self, value: u64, limit: Duration, names: &[String]) -> Option<String> {
        let since = match self.since.filter(|_| value == self.value) {
            Some(since) => since,
            None => {
                let was = std::mem::replace(
                    self,
                    Self { value, since: Some(Instant::now()), told: false },
                );
                let took = was.since.map_or(Duration::ZERO, |since| since.elapsed());
                return was.told.then(|| {
                    format!("{} has come back, after about {took:.1?}", name(was.value, names))
                });
            }
        };
        let is_in_call = value & 0xff != 0;
        if !is_in_call || self.told || since.elapsed() < limit {
            return None;
        }
        self.told = true;
        Some(format!(
            "{} has not come back for {:.1?}; steps wait for it",
            name(value, names),
            since.elapsed()
        ))
    }
}

fn name(value: u64, names: &[String]) -> String {
    let method = METHODS.get((value & 0xff) as usize - 1).copied().unwrap_or("?");
    match value >> 8 & 0xffff {
        NODE => format!("the forward pass, in which the node calls {}", names.join(", ")),
        resource => {
            let name = names.get(resource as usize).map_or("?", String::as_str);
            format!("{name}, {method},")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_plugin_that_is_slow_to_load_is_named() {
        let (sender, told) = mpsc::channel();
        let tell = move |line: &str| sender.send(line.to_owned()).unwrap();
        let limit = Duration::from_millis(10);
        let line = told_after(limit, "plugin x, constructor,", tell, || told.recv().unwrap());
        assert!(line.starts_with("plugin x, constructor, has not come back for "), "{line}");
        let line = told.recv().unwrap();
        assert!(line.starts_with("plugin x, constructor, has come back, after "), "{line}");
        let silent = |_: &str| panic!("it was quick");
        assert_eq!(told_after(Duration::from_secs(60), "y", silent, || 7), 7);
    }

    #[test]
    fn a_call_that_stays_away_is_told_once_and_told_when_it_is_back() {
        let watch = Arc::new(Watch::default());
        let names = vec!["resource `a`".to_owned(), "resource `b`".to_owned()];
        let (sender, told) = mpsc::channel();
        let tell = move |line: &str| sender.send(line.to_owned()).unwrap();
        let limit = Duration::from_millis(40);
        let dog = Watchdog::new(watch.clone(), names, limit, tell).unwrap();
        let usage = Usage::default();
        for _ in 0..1000 {
            // Many quick calls of one method are not one long call.
            watch.call(0, 0, Method::Admit, &usage, std::thread::yield_now);
        }
        let first = watch.call(1, 1, Method::Plan, &usage, || {
            let first = told.recv_timeout(Duration::from_secs(20)).unwrap();
            assert!(told.recv_timeout(4 * limit).is_err(), "told twice");
            first
        });
        assert!(first.starts_with("resource `b`, plan, has not come back for "), "{first}");
        let back = told.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(back.starts_with("resource `b`, plan, has come back"), "{back}");
        let stuck = watch.forward(|| told.recv_timeout(Duration::from_secs(20)).unwrap());
        assert!(
            stuck.starts_with("the forward pass, in which the node calls resource `a`"),
            "{stuck}"
        );
        drop(dog);
        assert_eq!(usage.calls(), 1001);
        assert!(usage.time() > Duration::ZERO);
    }
}
