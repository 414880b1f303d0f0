//! What was called, in an order that is common to all fakes of the library.

use std::sync::atomic::{AtomicU64, Ordering};

use resource_api::{Exclusive, StepContext, StepId};
use serde_json::{Value, json};

use super::spec::FakeSpec;

static SEQUENCE: AtomicU64 = AtomicU64::new(0);

/// The next number of the common order.
pub fn next_sequence() -> u64 {
    SEQUENCE.fetch_add(1, Ordering::Relaxed)
}

/// For what runs before there is a log.
pub fn panic_if_asked(spec: &FakeSpec, method: &str) {
    if spec.panic_in.as_deref() == Some(method) {
        panic!("{method} was asked to panic");
    }
}

/// The calls of one resource.
#[derive(Debug)]
pub struct Log {
    panic_in: Option<String>,
    calls: Exclusive<Vec<Call>>,
}

#[derive(Debug)]
struct Call {
    sequence: u64,
    method: &'static str,
    step: Option<StepId>,
    preplan: bool,
}

impl Log {
    /// An empty log; the method called `panic_in` panics when it enters.
    pub fn new(panic_in: Option<String>) -> Self {
        Self { panic_in, calls: Exclusive::default() }
    }

    /// Notes a call.
    pub fn enter(&self, method: &'static str) {
        self.note(method, None, false);
    }

    /// Notes a call of a step.
    pub fn enter_step(&self, method: &'static str, ctx: &StepContext<'_>) {
        self.note(method, Some(ctx.step()), ctx.is_preplan());
    }

    fn note(&self, method: &'static str, step: Option<StepId>, preplan: bool) {
        let call = Call { sequence: next_sequence(), method, step, preplan };
        self.calls.lock().push(call);
        if self.panic_in.as_deref() == Some(method) {
            panic!("{method} was asked to panic");
        }
    }

    /// All calls as `[sequence, method, step or null, staged]`.
    pub fn inspect(&self) -> Value {
        let calls = self.calls.lock();
        let show = |c: &Call| json!([c.sequence, c.method, c.step.map(|s| s.0), c.preplan]);
        calls.iter().map(show).collect()
    }
}
