//! The resource: its build, and the methods of the protocol handed on to the state.

use std::sync::{Arc, OnceLock};

use device::Budget;
use resource_api::host::level;
use resource_api::{
    AdmitOutcome, Capability, EngineResourceInfo, Exclusive, HostServices, KvCacheHandle, KvFacts,
    KvPlan, LabelId, NodeId, NodeResourceSpec, Plan, PlanSlots, PrefixInputs, PrefixWalk,
    PublishedInfo, RequestId, RequestOverrides, Resource, ResourceError, ResourceKind,
    ResourceStep, Result, StepContext, StepId, TypedRef, WalkId,
};

use crate::board::Board;
use crate::declared::declare;
use crate::geometry::{PageSize, lay_out, total_bytes};
use crate::handover::Transfer;
use crate::memory::KvMemory;
use crate::overrides::RequestSettings;
use crate::prefix::Prefix;
use crate::spec::{KvSpec, within};
use crate::state::{Shared, State, no_memory};

/// A paged cache of keys and values.
#[derive(Debug)]
pub struct Kv {
    pub(crate) index: u32,
    pub(crate) shared: Shared,
    state: Exclusive<State>,
    plans: PlanSlots<KvPlan>,
    fingerprint: Vec<u8>,
    /// The salt of the prefix cache, where the settings want one.
    prefix_salt: Option<String>,
    _budget: Budget,
    _tier_budget: Option<Budget>,
}

impl Kv {
    /// Runs `f` under the lock and shows the outside how many pages are free then.
    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut State, &Shared) -> R) -> R {
        let mut state = self.state.lock();
        if state.handovers.has_orphans() {
            state.settle_reads(&self.shared);
        }
        let result = f(&mut state, &self.shared);
        self.shared.board.set_free(state.pool.unowned());
        result
    }

    fn build_checked(spec: &NodeResourceSpec<KvSpec>, info: &EngineResourceInfo) -> Result<Self> {
        device::use_features_of(&info.host)?;
        let settings = &spec.settings;
        let shape = settings.shape(info)?;
        let page_bytes = total_bytes(&lay_out(&shape, 1)?);
        let free = info.host.free_memory(info.device);
        let num_pages = settings.num_pages(&shape, info.limits.max_batch, page_bytes, free)?;
        let facts = lay_out(&shape, num_pages)?;
        let budget = Budget::take(&info.host, info.device, total_bytes(&facts))?;
        let layout = String::from_utf8_lossy(&fingerprint(&facts, "")).into_owned();
        let transfer = Transfer::new(info, settings.transfer(num_pages)?, page_bytes, layout)?;
        let tiers = settings.tiers(page_bytes, facts.page_size, info)?;
        let memory = KvMemory::new(facts, info)?;
        let mut state = State::new(&facts, info.limits.max_batch)?;
        state.tiers = tiers.0;
        let tokens = u64::from(num_pages - 1) * u64::from(facts.page_size);
        let message = format!(
            "{}: {num_pages} pages of {} tokens, {} MiB of {}",
            spec.resource_key,
            facts.page_size,
            total_bytes(&facts) >> 20,
            facts.dtype.name()
        );
        info.host.log(level::INFO, "kv", &message);
        if tokens < u64::from(facts.max_seq_len) {
            let message = format!(
                "{}: the pool holds {tokens} tokens, a stream may have {}; longer ones are refused",
                spec.resource_key, facts.max_seq_len
            );
            info.host.log(level::WARN, "kv", &message);
        }
        let kv = Kv {
            index: info.index,
            shared: Shared {
                key: spec.resource_key.clone(),
                facts,
                page_size: PageSize::new(facts.page_size),
                memory: Arc::new(memory),
                transfer,
                board: Board::new(),
                host: info.host.clone(),
                prefix: OnceLock::new(),
            },
            state: Exclusive::new(state),
            plans: PlanSlots::new(),
            fingerprint: fingerprint(&facts, &settings.prefix_cache_salt),
            prefix_salt: settings.prefix_cache.then(|| settings.prefix_cache_salt.clone()),
            _budget: budget,
            _tier_budget: tiers.1,
        };
        kv.with_state(|state, shared| {
            if shared.memory.takes_changes() {
                state.seats.note_changes();
            }
        });
        Ok(kv)
    }
}

/// Everything that a stored page depends on beyond its tokens and the model, each part tagged.
fn fingerprint(facts: &KvFacts, salt: &str) -> Vec<u8> {
    let KvFacts { num_layers, num_kv_heads, head_dim, page_size, dtype, .. } = facts;
    let scaled = crate::geometry::scale_elements(*dtype) > 0;
    let layout = "page layer kv head slot dim";
    let layout = if scaled { "page layer kv head slot dim+scale" } else { layout };
    format!(
        "kv/1;layers={num_layers};heads={num_kv_heads};dim={head_dim};page={page_size};\
         dtype={};layout={layout};salt={}:{salt}",
        dtype.name(),
        salt.len()
    )
    .into_bytes()
}

impl Resource for Kv {
    fn describe(&self) -> Vec<TypedRef<'_>> {
        vec![TypedRef::new(&self.shared.facts)]
    }

    fn inspect(&self) -> String {
        let name = |label| self.shared.host.label_name(label);
        // Before the lock is taken: whoever publishes may be at it.
        let published = self.shared.transfer.as_ref().and_then(|t| t.usage());
        self.with_state(|state, shared| state.inspect(shared, name, published)).to_string()
    }

    fn prefix_skip_safe(&self) -> bool {
        true
    }

    fn supports_preplan(&self) -> bool {
        true
    }

    fn takes_outputs_late(&self) -> bool {
        true
    }

    fn fingerprint(&self) -> Option<Vec<u8>> {
        Some(self.fingerprint.clone())
    }

    /// Opens the index for `main`, which `walks` must name, and for the labels that requests name.
    fn enable_prefix_cache(&self, root: &[u8], walks: Vec<PrefixWalk>) -> Result<bool> {
        let walk = walks.iter().find(|w| w.label == LabelId::MAIN);
        let (Some(salt), Some(&walk)) = (&self.prefix_salt, walk) else { return Ok(false) };
        let size = self.shared.facts.page_size;
        let prefix = Prefix::new(root, salt, size, walk);
        self.with_state(|state, shared| {
            if shared.prefix.set(prefix).is_err() {
                return Err(ResourceError::wrong_state("the prefix cache is open already"));
            }
            state.branches.open(shared, state.pool.usable()).map_err(no_memory)?;
            state.note_found();
            state.pool.open_index().map_err(no_memory)
        })?;
        let (key, host) = (&self.shared.key, &self.shared.host);
        let message = format!("{key}: prefixes are cached from {size} tokens on, a page at a time");
        host.log(level::INFO, "kv", &message);
        host.gauge(key, "prefix_smallest_tokens", f64::from(size));
        Ok(true)
    }

    fn post_warmup_validate(&self) -> Result<()> {
        self.with_state(|state, _| state.check_conservation())
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        let settings = overrides.parse::<RequestSettings>();
        let settings = settings.map_err(|e| e.within(format!("`{}`", self.shared.key)))?;
        let settings = settings.unwrap_or_default();
        // Keys are computed before the lock is taken.
        let streams = declare(&self.shared, rid, overrides, &settings)?;
        self.with_state(|state, shared| state.ingest(shared, rid, overrides, streams))
    }

    /// Pages are copied where other workers read them.
    fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
        self.publish_request(rid)
    }

    fn admit_retrieve(
        &self,
        rid: RequestId,
        _node: NodeId,
        _walk: WalkId,
        published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        Ok(self.retrieve_request(rid, published))
    }

    fn resolve_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        walk: WalkId,
    ) -> Result<Option<u32>> {
        if self.shared.prefix.get().is_none() {
            return Ok(None);
        }
        let resolve = |state: &mut State, shared: &Shared| {
            (state.resolve(shared, rid, walk), std::mem::take(&mut state.untold_evictions))
        };
        let wanted = |state: &mut State, shared: &Shared| state.wanted_by_lookup(shared, rid, walk);
        let (found, evictions) = self.with_pages(wanted, resolve);
        self.shared.count("prefix_lookups", 1);
        self.shared.count("prefix_hit_tokens", found.unwrap_or(0).into());
        self.shared.count("prefix_evictions", evictions);
        Ok(found)
    }

    /// Answers errors of the state, and refuses to skip what another cache found.
    fn apply_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _walk: WalkId,
        inputs: &PrefixInputs<'_>,
        matched: u32,
    ) -> Result<()> {
        if rid.is_padding() {
            return Ok(());
        }
        self.with_room(|state, shared| state.apply(shared, rid, inputs, matched))
    }

    fn extend_prefix_chain(
        &self,
        rid: RequestId,
        _node: NodeId,
        walk: WalkId,
        outputs: &[u32],
    ) -> Result<()> {
        if self.shared.prefix.get().is_some() {
            let outputs = outputs.iter().map(|&id| (rid, id));
            self.with_state(|state, shared| state.outputs(shared, walk, outputs));
        }
        Ok(())
    }

    fn reset_request(&self, rid: RequestId, free: bool) -> Result<()> {
        self.with_state(|state, shared| state.reset(shared, rid, free));
        Ok(())
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.remove_requests(&[rid])
    }

    fn remove_requests(&self, rids: &[RequestId]) -> Result<()> {
        let evictions = self.with_state(|state, shared| {
            rids.iter().for_each(|&rid| state.remove(shared, rid));
            std::mem::take(&mut state.untold_evictions)
        });
        self.shared.count("prefix_evictions", evictions);
        Ok(())
    }

    fn supports_eviction(&self) -> bool {
        self.with_state(|state, _| !state.tiers.is_empty())
    }

    /// In pages.
    fn reclaimable(&self, rid: RequestId) -> Result<u64> {
        Ok(self.with_state(|state, _| state.reclaimable(rid)))
    }

    /// The more pages come free, the better, whether its state is moved or given up.
    fn get_offload_priority(&self, rid: RequestId) -> Result<f64> {
        Ok(self.with_state(|state, _| state.own_pages(rid)) as f64)
    }

    /// In pages.
    fn offload(&self, rid: RequestId) -> Result<u64> {
        self.offload_request(rid)
    }

    fn is_offloaded(&self, rid: RequestId) -> Result<bool> {
        Ok(self.with_state(|state, _| state.journeys.is_away(rid)))
    }

    fn can_reload(&self, rid: RequestId) -> Result<bool> {
        Ok(self.with_state(|state, shared| state.can_reload(shared, rid)))
    }

    fn reload(&self, rid: RequestId) -> Result<bool> {
        self.reload_request(rid)
    }

    fn retain_session(&self, rid: RequestId, session: &str) -> Result<()> {
        self.with_state(|state, shared| state.retain_session(shared, rid, session)).map(drop)
    }

    fn adopt_session(&self, rid: RequestId, session: &str, len: u32) -> Result<Option<u32>> {
        let adopted =
            self.with_room(|state, shared| state.adopt_session(shared, rid, session, len))?;
        Ok(Some(adopted.unwrap_or(0)))
    }

    fn remove_session(&self, session: &str) -> Result<()> {
        self.with_state(|state, shared| state.remove_session(shared, session));
        Ok(())
    }

    fn admit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        self.shared.memory.follow(ctx)?;
        self.with_room(|state, shared| state.admit(shared, step, ctx))
    }

    fn rollback_admit(&self, _step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        self.with_state(|state, shared| state.rollback(shared, ctx.step()));
        Ok(())
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.with_state(|state, shared| state.plan(shared, &self.plans, step, ctx))
    }

    fn commit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        self.with_state(|state, shared| state.commit(shared, step, ctx))
    }

    fn clear_preplan(&self, step: Option<StepId>) -> Result<()> {
        self.with_state(|state, shared| state.clear_preplan(shared, step));
        Ok(())
    }

    fn on_outputs(&self, ctx: &StepContext<'_>, rids: &[RequestId], ids: &[u32]) -> Result<()> {
        if self.shared.prefix.get().is_some() {
            let outputs = rids.iter().copied().zip(ids.iter().copied());
            self.with_state(|state, shared| state.outputs(shared, ctx.graph_walk(), outputs));
        }
        Ok(())
    }
}

impl ResourceKind for Kv {
    type Spec = KvSpec;
    const KIND: &'static str = "kv";
    const PROVIDES: &'static [&'static str] = &["kv.cache/1"];

    fn build(spec: NodeResourceSpec<KvSpec>, info: &EngineResourceInfo) -> Result<Self> {
        within(&spec, Self::build_checked(&spec, info))
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![KvCacheHandle::new(this.clone()).into()]
    }
}
