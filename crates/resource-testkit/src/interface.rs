//! What the fake kind shares with others across the boundary: an interface of a third party, its
//! plan, its step options and its facts.

// Derives and `#[capability]` write the unsafe code of the boundary; there is none by hand.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;

use abi_stable::StableAbi;
use resource_api::{PlanVec, RequestId, Result, StepId, Typed, capability};

/// An interface that the contract knows nothing of. Takes no lock of the step methods.
#[capability(id = "org.testkit.echo", major = 1)]
pub trait Echo: Send + Sync {
    /// The sum of `values`, plus the length of the resource's key; `INVALID` for label `bad`.
    fn echo(&self, values: &[u32], label: Option<&str>) -> Result<u64>;

    /// Key of the resource behind it.
    fn key(&self) -> String;

    /// Keys of the resources that were bound to it, in the order in which they came.
    fn peers(&self) -> Vec<String>;

    /// The sum of `0..tasks`, one task each on the host's pool. Task `panic_at` panics.
    fn spread(&self, tasks: u32, panic_at: Option<u32>) -> Result<u64>;

    /// Starts a job on a thread of the host that counts itself in [`Echo::jobs_done`], or panics.
    fn start_job(&self, panic: bool) -> Result<()>;

    /// How many jobs have run to their end.
    fn jobs_done(&self) -> u32;

    /// The `at`-th buffer that was made for captured graphs of `slot`, oldest first. Stays where it
    /// is while the resource lives.
    fn graph_buffer(&self, slot: u32, at: u32) -> Result<&[AtomicU32]>;

    /// Twice the echo. Has a default: an implementation may be too old to have it.
    fn twice(&self, values: &[u32]) -> Result<u64> {
        Ok(2 * self.echo(values, None)?)
    }
}

/// What a fake resource lays out for a step. Rows are the step's segments.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct FakePlan {
    /// The step it was laid out for.
    pub step: StepId,
    /// How often this slot's plan has been written: equal before and after a promotion.
    pub writes: u64,
    /// Whose stream each row is.
    pub request: PlanVec<RequestId>,
    /// Stream length before the step.
    pub start: PlanVec<u32>,
    /// Tokens the step adds.
    pub span: PlanVec<u32>,
    /// Per added token, the pool slot it goes to; 0 (the sink) for padding rows.
    pub slots: PlanVec<u32>,
    /// Tokens in the plans of all dependencies together, read from those plans.
    pub dependency_tokens: u64,
    /// Sum of what the dependencies' `Echo` answered for the spans.
    pub dependency_echo: u64,
    /// Sum of what the bound peers' `Echo` answered for the spans.
    pub peer_echo: u64,
}

impl Default for FakePlan {
    fn default() -> Self {
        Self {
            step: StepId(0),
            writes: 0,
            request: PlanVec::default(),
            start: PlanVec::default(),
            span: PlanVec::default(),
            slots: PlanVec::default(),
            dependency_tokens: 0,
            dependency_echo: 0,
            peer_echo: 0,
        }
    }
}

impl Typed for FakePlan {
    const TAG: &'static str = "org.testkit.plan";
    const MAJOR: u32 = 1;
}

/// How a fake resource is to behave in one step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, StableAbi)]
pub struct FakeStepOptions {
    /// Refuse with this [`resource_api::FailureReason`], after everything has been reserved; 0 not.
    pub refuse: u32,
    /// Answer that it is not ready yet.
    pub not_ready: bool,
    /// Fail in `plan`.
    pub fail_plan: bool,
    /// Fail in `commit`, after the step has been recorded.
    pub fail_commit: bool,
}

impl Typed for FakeStepOptions {
    const TAG: &'static str = "org.testkit.step";
    const MAJOR: u32 = 1;
}

/// What a fake resource tells its dependents about itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct FakeFacts {
    /// Token slots of the pool, without the sink.
    pub capacity: u32,
}

impl Typed for FakeFacts {
    const TAG: &'static str = "org.testkit.facts";
    const MAJOR: u32 = 1;
}
