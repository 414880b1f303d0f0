//! The kind `fake_kv`: a small paged cache that offers `kv.cache/1`, on plain memory.
//!
//! It does what the contract says and is slow: every question walks every stream. The conformance
//! check builds on it what needs a cache, and its settings can name one fault to be planted
//! ([`Fault`]), which shows that the check finds it.

use std::collections::BTreeMap;
use std::sync::Arc;

use device::{PoolType, SharedPool};
use resource_api::{
    Capability, DType, Device, EngineResourceInfo, Exclusive, HostServices, HostServicesHandle,
    KvCacheHandle, KvFacts, KvPlan, LabelId, NodeResourceSpec, PlanSlots, RequestId, ResourceError,
    ResourceKind, Result,
};
use serde::Deserialize;

mod capability;
mod fault;
mod layout;
mod moves;
mod prefix;
mod resource;
mod state;
mod steps;

pub use fault::Fault;

use state::State;

/// `[resources.<key>]` with `kind = "fake_kv"`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FakeCacheSpec {
    /// Pages of the pool, without the sink.
    pub pages: u32,
    /// Token slots of a page.
    pub page_size: u32,
    /// Layers.
    pub num_layers: u32,
    /// Key/value heads.
    pub num_kv_heads: u32,
    /// Query heads.
    pub num_qo_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Longest stream; the engine's limit when not set.
    pub max_seq_len: Option<u32>,
    /// Pages that may be off the device.
    pub host_pages: u32,
    /// What it does wrong.
    pub fault: Option<Fault>,
}

impl Default for FakeCacheSpec {
    fn default() -> Self {
        Self {
            pages: 14,
            page_size: 3,
            num_layers: 2,
            num_kv_heads: 2,
            num_qo_heads: 4,
            head_dim: 4,
            max_seq_len: None,
            host_pages: 8,
            fault: None,
        }
    }
}

/// A resource of kind `fake_kv`.
#[derive(Debug)]
pub struct FakeCache {
    index: u32,
    facts: KvFacts,
    /// What it says about itself.
    described: KvFacts,
    memory: SharedPool,
    state: Exclusive<State>,
    /// What capability calls are answered from: they take no lock of the step methods.
    board: Exclusive<Board>,
    plans: PlanSlots<KvPlan>,
    fault: Option<Fault>,
    host: HostServicesHandle,
    device: Device,
    bytes: u64,
}

/// See [`FakeCache::board`].
#[derive(Debug, Default)]
struct Board {
    lengths: BTreeMap<(RequestId, LabelId), u32>,
    held: BTreeMap<(RequestId, LabelId), u32>,
    free: u64,
}

impl FakeCache {
    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Runs `f` on the state and shows the outside what has become of it.
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state.lock();
        let result = f(&mut state);
        let mut board = self.board.lock();
        board.free = state.free_pages();
        board.lengths = state.streams.iter().map(|(id, s)| (*id, s.len)).collect();
        board.held = state.streams.iter().map(|(id, s)| (*id, s.pages.len() as u32)).collect();
        result
    }

    /// First element of a token's row.
    fn place(&self, layer: u32, which: u64, page: u32, slot: u32) -> usize {
        let f = &self.facts;
        (u64::from(page) * f.page_stride
            + u64::from(layer) * f.layer_stride
            + which * f.kv_stride
            + u64::from(slot) * f.slot_stride) as usize
    }

    fn copy_page(&self, from: u32, to: u32) -> Result<()> {
        let start = self.place(0, 0, from, 0);
        let range = start..start + self.facts.page_stride as usize;
        let done = self.memory.view().writer().copy(range, self.place(0, 0, to, 0));
        done.map_err(|e| ResourceError::internal(e.to_string()))
    }
}

impl ResourceKind for FakeCache {
    type Spec = FakeCacheSpec;
    const KIND: &'static str = "fake_kv";
    const PROVIDES: &'static [&'static str] = &["kv.cache/1"];

    fn build(spec: NodeResourceSpec<FakeCacheSpec>, info: &EngineResourceInfo) -> Result<Self> {
        let spec = spec.settings;
        let row = u64::from(spec.num_kv_heads) * u64::from(spec.head_dim);
        let kv_stride = row * u64::from(spec.page_size);
        let layer_stride = 2 * kv_stride;
        let facts = KvFacts {
            num_layers: spec.num_layers,
            num_kv_heads: spec.num_kv_heads,
            num_qo_heads: spec.num_qo_heads,
            head_dim: spec.head_dim,
            page_size: spec.page_size,
            num_pages: spec.pages + 1,
            max_seq_len: spec.max_seq_len.unwrap_or(info.limits.max_model_len),
            dtype: DType::F32,
            page_stride: layer_stride * u64::from(spec.num_layers),
            layer_stride,
            kv_stride,
            head_stride: spec.head_dim.into(),
            slot_stride: row,
        };
        let elements = facts.page_stride * u64::from(facts.num_pages);
        info.host.reserve_memory(info.device, 4 * elements)?;
        let memory = SharedPool::new(elements as usize, PoolType::F32)
            .map_err(|e| ResourceError::internal(e.to_string()))?;
        let cache = Self {
            index: info.index,
            state: Exclusive::new(State::new(&facts, spec.host_pages, spec.fault)),
            described: match spec.fault {
                Some(Fault::FactsLie) => KvFacts { num_pages: facts.num_pages + 1, ..facts },
                _ => facts,
            },
            facts,
            memory,
            board: Exclusive::default(),
            plans: PlanSlots::new(),
            fault: spec.fault,
            host: info.host.clone(),
            device: info.device,
            bytes: 4 * elements,
        };
        cache.with(|_| ());
        Ok(cache)
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![KvCacheHandle::new(this.clone()).into()]
    }
}

impl Drop for FakeCache {
    fn drop(&mut self) {
        if !self.has(Fault::MemoryKept) {
            self.host.release_memory(self.device, self.bytes);
        }
    }
}
