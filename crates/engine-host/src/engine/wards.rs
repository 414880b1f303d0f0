//! What keeps an engine answerable: cancelling from other threads, the watchdog, and what happens
//! when a resource has panicked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use resource_api::RequestId;

use super::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::request::Failure;
use crate::services::Metric;
use crate::watch::{ResourceUsage, Watchdog};

/// What happens when a resource has panicked and so is out of use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFault {
    /// The requests that need it fail, now and later; those that do not go on.
    #[default]
    FailRequests,
    /// The resource is built anew, with those that were built on it. The requests of the step in which
    /// it broke fail, all others are computed again from their tokens. After three times in ten
    /// minutes it stays out of use.
    Restart,
    /// The engine ends all requests and takes no more.
    Stop,
}

impl OnFault {
    /// The names used in configurations.
    pub const NAMES: [(&'static str, Self); 3] =
        [("fail_requests", Self::FailRequests), ("restart", Self::Restart), ("stop", Self::Stop)];

    /// Name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::FailRequests => "fail_requests",
            Self::Restart => "restart",
            Self::Stop => "stop",
        }
    }
}

/// Cancels requests from any thread, also while a step runs or a resource stalls.
#[derive(Clone, Debug, Default)]
pub struct Canceller(Arc<Mutex<Vec<RequestId>>>);

impl Canceller {
    /// Cancels a request. Returns at once; the engine lets go of it before its next step, or after
    /// the present one. Unknown requests are accepted.
    pub fn cancel(&self, rid: RequestId) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).push(rid);
    }

    fn take(&self) -> Vec<RequestId> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

impl Engine {
    /// A way to cancel requests from other threads.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    pub(super) fn take_cancelled(&mut self) {
        for rid in self.canceller.take() {
            self.forget(rid);
        }
    }

    /// Has a thread of its own log the resource that has not come back from a call for `limit`; `None`
    /// ends that.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn watch_calls(&mut self, limit: Option<Duration>) -> Result<()> {
        self.watchdog = None;
        let Some(limit) = limit else { return Ok(()) };
        let names = self.resources().entries().iter();
        let names = names.map(|e| format!("resource `{}` (kind {})", e.key, e.kind)).collect();
        let tell = |line: &str| tracing::warn!("{line}");
        let dog = Watchdog::new(self.runner.watch().clone(), names, limit, tell);
        self.watchdog = Some(dog.map_err(|e| {
            Error::new(ErrorKind::Internal, format!("no thread for the watchdog: {e}"))
        })?);
        Ok(())
    }

    /// What each resource's step methods have taken.
    pub fn usage(&self) -> Vec<ResourceUsage> {
        self.runner.usage()
    }

    /// All metrics: what resources count themselves, by `resource.name`, and what the engine counts of
    /// each.
    pub fn metrics(&self) -> BTreeMap<String, Metric> {
        let mut all = self.services.metrics();
        for u in self.usage() {
            let mut add = |name: &str, metric| all.insert(format!("{}.{name}", u.key), metric);
            add("calls", Metric::Counter(u.calls));
            add("seconds", Metric::Gauge(u.time.as_secs_f64()));
            add("panics", Metric::Counter(u.panics));
            add("out_of_use", Metric::Gauge(f64::from(u8::from(u.is_faulted))));
            add("bad_values", Metric::Counter(u.bad_values));
            add("restarts", Metric::Counter(u.restarts));
            add("bytes", Metric::Gauge(u.bytes as f64));
            add("most_bytes", Metric::Gauge(u.most_bytes as f64));
        }
        all
    }

    /// Says what happens when the resource `key` has panicked.
    pub fn set_on_fault(&mut self, key: &str, policy: OnFault) {
        self.policies.remove(key);
        if policy != OnFault::FailRequests {
            self.policies.insert(key.to_owned(), policy);
        }
    }

    /// Does what is to be done about resources that have broken since the last step.
    pub(super) fn mind_faults(&mut self) {
        if self.policies.is_empty() || self.stopped.is_some() {
            return;
        }
        let broken = |policy| {
            let mut entries = self.resources().entries().iter();
            entries.find(|e| {
                self.policies.get(&e.key) == Some(&policy)
                    && e.is_broken()
                    && !self.restarts.has_given_up(&e.key)
            })
        };
        if let Some(entry) = broken(OnFault::Stop) {
            let what = if entry.is_faulted() { "panicked" } else { "is broken" };
            let message = format!(
                "resource `{}` (kind {}) {what}, and its on_fault = \"stop\": start the engine again",
                entry.key, entry.kind
            );
            return self.stop(message);
        }
        if let Some(entry) = broken(OnFault::Restart) {
            let key = entry.key.clone();
            self.settle();
            self.restart(&key);
        }
    }

    /// Ends all requests and takes no more.
    pub(super) fn stop(&mut self, message: String) {
        tracing::error!("{message}");
        let all: Vec<RequestId> = self.requests.iter().map(|r| r.rid).collect();
        self.fail_all(&all, &Failure::new(ErrorKind::Unavailable, message.clone()));
        self.stopped = Some(message);
    }

    /// Why the engine takes no more requests, if so.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// A resource that has panicked and will not be built anew: what needs it fails.
    pub fn out_of_use(&self) -> Option<&str> {
        let stays = |key: &str| {
            self.policies.get(key) != Some(&OnFault::Restart) || self.restarts.has_given_up(key)
        };
        let mut entries = self.resources().entries().iter();
        Some(entries.find(|e| e.is_faulted() && stays(&e.key))?.key.as_str())
    }

    /// Fails once the engine has stopped.
    pub(super) fn check_running(&self) -> Result<()> {
        match &self.stopped {
            Some(why) => Err(Error::new(ErrorKind::Unavailable, why.clone())),
            None => Ok(()),
        }
    }
}
