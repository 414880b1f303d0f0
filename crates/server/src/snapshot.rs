//! The engine's state as its thread last published it: what `/metrics` and `/v1/loads` tell.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Counts and states. Counters only grow while the engine lives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Requests that wait to run, and that run.
    pub waiting: usize,
    pub running: usize,
    /// Requests that were taken in, ended well, were cancelled, failed.
    pub submitted: u64,
    pub finished: u64,
    pub cancelled: u64,
    pub failed: u64,
    /// Steps, and tokens of prompts computed, of prompts read from a cache, and generated.
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    /// Requests that gave way and were computed again.
    pub preemptions: u64,
    /// Pages of the caches: in use by requests, in all, and the tokens of one.
    pub pages_used: u64,
    pub pages_total: u64,
    pub page_size: u64,
    /// Why the engine takes no more requests, if so.
    pub stopped: Option<String>,
    /// A resource that panicked and is not built anew, if there is one.
    pub out_of_use: Option<String>,
    pub resources: Arc<[ResourceSnapshot]>,
    /// What resources count and measure, by `resource.name`.
    pub metrics: Arc<BTreeMap<String, Metric>>,
}

impl Snapshot {
    /// Why no request can be answered any more, if so.
    pub fn trouble(&self) -> Option<String> {
        let broken = |key: &String| {
            format!("resource `{key}` has panicked and is out of use: start the server again")
        };
        self.stopped.clone().or_else(|| self.out_of_use.as_ref().map(broken))
    }
}

/// One resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResourceSnapshot {
    pub key: String,
    pub kind: String,
    /// The plugin that it is from.
    pub plugin: String,
    /// Calls of its step methods, and their time.
    pub calls: u64,
    pub time: Duration,
    pub panics: u64,
    pub is_faulted: bool,
    /// Answers that could not be right.
    pub bad_values: u64,
    /// How often it was built anew.
    pub restarts: u64,
    /// Of the engine's memory.
    pub bytes: u64,
    /// What it says of itself.
    pub state: serde_json::Value,
}

/// A metric of a resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Metric {
    /// Only ever added to.
    Counter(u64),
    /// Set to the present value.
    Gauge(f64),
}
