//! The kind `fake`: uses everything that the contract offers, on plain memory.
//!
//! What it keeps is a toy (a request is one stream, a page is one token), how it keeps it is not:
//! a refused, abandoned or dropped step leaves its state exactly as it was.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use resource_api::{
    Capability, Device, EngineResourceInfo, Exclusive, HostServices, HostServicesHandle,
    NodeResourceSpec, PlanSlots, ResourceError, ResourceKey, ResourceKind, Result,
};

use crate::interface::{EchoHandle, FakeFacts, FakePlan};

mod buffers;
mod echo;
mod log;
mod pool;
mod prefix;
mod resource;
mod spec;
mod state;

pub use spec::{FakeRequest, FakeSpec};

use buffers::GraphBuffers;
use log::Log;
use state::State;

/// A resource of kind `fake`.
#[derive(Debug)]
pub struct Fake {
    key: ResourceKey,
    spec: FakeSpec,
    index: u32,
    facts: FakeFacts,
    device: Device,
    host: HostServicesHandle,
    dependencies: Vec<Upstream>,
    state: Exclusive<State>,
    plans: PlanSlots<FakePlan>,
    /// Tokens that every plan is to have room for.
    plan_room: AtomicU32,
    buffers: GraphBuffers,
    /// What `bind` brought. Its own lock: capability calls do not wait for step methods.
    peers: Exclusive<Vec<(ResourceKey, EchoHandle)>>,
    jobs_done: Arc<AtomicU32>,
    log: Log,
}

/// A resource that a fake was built on.
#[derive(Debug)]
struct Upstream {
    index: u32,
    /// Whether its plans are a fake's.
    is_fake: bool,
    echo: EchoHandle,
}

impl Fake {
    fn bytes(capacity: u32) -> u64 {
        u64::from(capacity) * size_of::<u32>() as u64
    }
}

impl ResourceKind for Fake {
    type Spec = FakeSpec;
    const KIND: &'static str = "fake";
    const PROVIDES: &'static [&'static str] = &["org.testkit.echo/1"];

    fn depends_on(spec: &NodeResourceSpec<FakeSpec>) -> Vec<ResourceKey> {
        log::panic_if_asked(&spec.settings, "depends_on");
        spec.settings.depends_on.clone()
    }

    fn build(spec: NodeResourceSpec<FakeSpec>, info: &EngineResourceInfo) -> Result<Self> {
        let NodeResourceSpec { resource_key: key, settings: spec, .. } = spec;
        log::panic_if_asked(&spec, "build");
        let mut dependencies = Vec::new();
        for key in &spec.depends_on {
            let upstream = info.dependency(key)?;
            let is_fake = upstream.spec.kind == Self::KIND;
            if is_fake && upstream.facts::<FakeFacts>()?.capacity == 0 {
                return Err(ResourceError::invalid(format!("`{key}` has no capacity")));
            }
            let echo = upstream.capability::<EchoHandle>()?;
            dependencies.push(Upstream { index: upstream.index, is_fake, echo });
        }
        info.host.reserve_memory(info.device, Self::bytes(spec.capacity))?;
        Ok(Self {
            facts: FakeFacts { capacity: spec.capacity },
            state: Exclusive::new(State::new(spec.capacity, spec.host_capacity)),
            log: Log::new(spec.panic_in.clone()),
            key,
            index: info.index,
            device: info.device,
            host: info.host.clone(),
            dependencies,
            plans: PlanSlots::new(),
            plan_room: AtomicU32::new(0),
            buffers: GraphBuffers::default(),
            peers: Exclusive::default(),
            jobs_done: Arc::default(),
            spec,
        })
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![EchoHandle::new(this.clone()).into()]
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.host.release_memory(self.device, Self::bytes(self.spec.capacity));
        self.host.gauge(&self.key, "dropped", log::next_sequence() as f64);
        self.log.enter("drop");
    }
}
