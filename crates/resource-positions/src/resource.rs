//! The kind's `Resource`, and the `positions/1` it offers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use resource_api::{
    AdmitOutcome, Capability, EngineResourceInfo, HostServices, HostServicesHandle, KvFacts,
    KvPlan, LabelId, MAX_SLOTS, NodeId, NodeResourceSpec, Plan, PlanSlots, PositionStepOptions,
    PositionsHandle, PositionsPlan, PrefixInputs, PublishedInfo, RequestId, RequestOverrides,
    Resource, ResourceError, ResourceKey, ResourceKind, ResourceStep, Result, StepContext,
    TensorViewMut, Turning, WalkId,
};

use serde_json::json;

use crate::counters::{Counters, admit};
use crate::cuda::Cuda;
use crate::layout::{Part, Rules, last_position, lay_out, parts, plain_parts, start};
use crate::rotary::{RopeTable, frequencies};
use crate::spec::{PositionsSpec, Scheme};

/// Format of what is published.
const PUBLISHED: (&str, u32) = ("positions", 1);
/// Elements below which handing work to other threads costs more than it saves.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// A built `positions` resource.
pub struct Positions {
    key: ResourceKey,
    kv_cache: ResourceKey,
    kv_index: u32,
    index: u32,
    rules: Rules,
    table: RopeTable,
    local: Option<Local>,
    counters: Counters,
    plans: PlanSlots<PositionsPlan>,
    /// The plan of every used slot, for calls that hand out a part of it. A slot's plan stays at one
    /// address.
    planned: [OnceLock<Plan>; MAX_SLOTS],
    /// Next positions of the streams of sessions.
    sessions: Mutex<HashMap<String, Vec<(LabelId, u32)>>>,
    /// Where the engine runs on a CUDA device.
    cuda: Option<Cuda>,
    host: HostServicesHandle,
}

/// Layers that are turned by a table of their own.
struct Local {
    layers: Vec<u32>,
    table: RopeTable,
}

impl ResourceKind for Positions {
    type Spec = PositionsSpec;
    const KIND: &'static str = "positions";
    const PROVIDES: &'static [&'static str] = &["positions/1"];

    fn depends_on(spec: &NodeResourceSpec<PositionsSpec>) -> Vec<ResourceKey> {
        vec![spec.settings.kv_cache.clone()]
    }

    fn build(spec: NodeResourceSpec<PositionsSpec>, info: &EngineResourceInfo) -> Result<Self> {
        device::use_features_of(&info.host)?;
        let key = spec.resource_key;
        let settings = spec.settings;
        let kv = info.dependency(&settings.kv_cache)?;
        let facts = kv.facts::<KvFacts>()?;
        let limit = info.limits.max_model_len.max(facts.max_seq_len);
        let within = |e: ResourceError| e.within(format!("[resources.{key}]"));
        let of = |settings: &PositionsSpec| frequencies(settings, facts.head_dim).map_err(within);
        let (own, local) = (of(&settings)?, settings.local().as_ref().map(of).transpose()?);
        let (dim, interleave) = (facts.head_dim, settings.interleave);
        let cuda = match info.device.is_cpu() {
            true => None,
            false => {
                let cuda = Cuda::new(info, dim, &own, local.as_deref(), interleave);
                Some(cuda.map_err(within)?)
            }
        };
        let table = |frequencies| RopeTable::new(frequencies, dim, interleave, limit);
        Ok(Self {
            kv_index: kv.index,
            index: info.index,
            rules: Rules { scheme: settings.scheme, block_step: settings.block_step, limit },
            table: table(own),
            local: local.map(|own| Local {
                layers: settings.local_layers.unwrap_or_default(),
                table: table(own),
            }),
            cuda,
            counters: Counters::default(),
            plans: PlanSlots::new(),
            planned: [const { OnceLock::new() }; MAX_SLOTS],
            sessions: Mutex::default(),
            host: info.host.clone(),
            kv_cache: settings.kv_cache,
            key,
        })
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![PositionsHandle::new(this.clone()).into()]
    }
}

impl Positions {
    /// Turns the queries and keys of a label's group by the frequencies of all layers, or of the local
    /// ones.
    /// What turns the layers that turn otherwise, if this is one.
    fn local_of(&self, layer: u32) -> Option<&Local> {
        self.local.as_ref().filter(|local| local.layers.contains(&layer))
    }

    fn turn(
        &self,
        local: Option<&Local>,
        ctx: &StepContext<'_>,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let plan = ctx.plan_result::<PositionsPlan>(self.index)?;
        if let Some(cuda) = &self.cuda {
            let group = plan.groups.iter().find(|g| g.label == label);
            let group = group.ok_or_else(|| unplanned(label))?;
            return cuda.turn(ctx, plan, group, local.is_some(), q, k);
        }
        let ids = plan.ids(label).ok_or_else(|| unplanned(label))?;
        let table = local.map_or(&self.table, |local| &local.table);
        let dim = table.head_dim();
        let (q, q_width) = heads("q", q, ids.len(), dim)?;
        let (k, k_width) = heads("k", k, ids.len(), dim)?;
        let turn = |ids: &[u32], q: &mut [f32], k: &mut [f32]| {
            let tokens = q.chunks_exact_mut(q_width).zip(k.chunks_exact_mut(k_width));
            for (&id, (q, k)) in ids.iter().zip(tokens) {
                table.turn(q, id);
                table.turn(k, id);
            }
        };
        let elements = ids.len() * (q_width + k_width);
        if elements < PARALLEL_ELEMENTS || self.host.threads() < 2 {
            turn(ids, q, k);
            return Ok(());
        }
        let tokens = (PARALLEL_ELEMENTS / 4 / (q_width + k_width)).max(1);
        let chunks = q.chunks_mut(tokens * q_width).zip(k.chunks_mut(tokens * k_width));
        let work = Mutex::new(ids.chunks(tokens).zip(chunks));
        let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
        self.host.run(self.host.threads(), |_| {
            while let Some((ids, (q, k))) = next() {
                turn(ids, q, k);
            }
        });
        Ok(())
    }

    #[inline]
    fn admit_parts<'p>(
        &self,
        requests: &[RequestId],
        parts: impl Iterator<Item = Part<'p>>,
        ctx: &StepContext<'_>,
    ) -> AdmitOutcome {
        let (rules, step, staged) = (self.rules, ctx.step(), ctx.is_preplan());
        let mut edit = self.counters.edit();
        let mut starts = edit.admitted.begin(requests.len()).iter_mut();
        for part in parts {
            let (rid, label) = (part.segment.request_id, part.segment.label);
            let live = self.counters.live(rid);
            if live.is_none() && !rid.is_padding() {
                return self.refuse(rid, label, "is not known here".into());
            }
            let stream = live.and_then(|live| live.find(label));
            let start = start(stream, step, staged);
            if let Some(last) = last_position(rules, start, &part).filter(|&p| p >= rules.limit) {
                let why = format!("reaches position {last}; the limit is {}", rules.limit);
                return self.refuse(rid, label, why);
            }
            if let Some(to) = starts.next() {
                *to = start;
            }
            if let (false, Some(live)) = (staged, live) {
                admit(live, stream, label, step, part.advance);
            }
        }
        edit.admitted.end(step, staged, requests);
        AdmitOutcome::OK
    }

    fn refuse(&self, rid: RequestId, label: LabelId, why: String) -> AdmitOutcome {
        AdmitOutcome::runtime_error(rid, label, format!("`{}`: request {rid} {why}", self.key))
    }
}

impl Resource for Positions {
    fn depends_on(&self) -> Vec<String> {
        vec![self.kv_cache.clone()]
    }

    fn inspect(&self) -> String {
        let streams = self.counters.all().flat_map(|rid| {
            self.counters.streams(rid).map(move |(label, next)| {
                let label = self.host.label_name(label);
                json!({ "request": rid.to_string(), "label": label, "next": next })
            })
        });
        json!({
            "requests": self.counters.len(),
            "max_position": self.rules.limit,
            "sessions": self.sessions.lock().unwrap_or_else(PoisonError::into_inner).len(),
            "streams": streams.collect::<Vec<_>>(),
        })
        .to_string()
    }

    /// A sequential counter only has to be told how long the skipped prefix is. Under the block
    /// scheme it would have to know in what spans it was written.
    fn prefix_skip_safe(&self) -> bool {
        self.rules.scheme == Scheme::Sequential
    }

    fn supports_preplan(&self) -> bool {
        true
    }

    fn takes_outputs_late(&self) -> bool {
        true
    }

    /// Keys are cached as they were turned.
    fn fingerprint(&self) -> Option<Vec<u8>> {
        let mut bytes = b"positions/1".to_vec();
        bytes.push(u8::from(self.rules.scheme == Scheme::Block));
        bytes.extend(self.rules.block_step.to_le_bytes());
        bytes.extend(self.table.fingerprint());
        if let Some(local) = &self.local {
            bytes.extend(b"local");
            bytes.extend(local.layers.iter().flat_map(|layer| layer.to_le_bytes()));
            bytes.extend(local.table.fingerprint());
        }
        Some(bytes)
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        overrides.refuse_any()?;
        match rid.is_padding() {
            true => Ok(()),
            false => self.counters.edit().ingest(rid),
        }
    }

    fn admit_retrieve(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        let Some(published) = published else { return Ok(AdmitOutcome::OK) };
        if (published.kind(), published.version()) != PUBLISHED {
            let (kind, version) = (published.kind(), published.version());
            let why = format!("brings state of {kind}/{version}, not of positions/1");
            return Ok(self.refuse(rid, LabelId::MAIN, why));
        }
        let mut edit = self.counters.edit();
        for (name, next, _) in published.entries() {
            let label = self.host.label_id(name);
            let next = u32::try_from(next).unwrap_or(u32::MAX);
            // What is published may be older than what has happened here since.
            edit.set(rid, label, next.max(self.counters.position(rid, label)));
        }
        Ok(AdmitOutcome::OK)
    }

    fn resolve_cached_prefix(
        &self,
        _rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
    ) -> Result<Option<u32>> {
        Ok((!self.prefix_skip_safe()).then_some(0))
    }

    fn apply_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        inputs: &PrefixInputs<'_>,
        matched_len: u32,
    ) -> Result<()> {
        let mut edit = self.counters.edit();
        inputs.labels().iter().for_each(|&label| edit.set(rid, label, matched_len));
        Ok(())
    }

    fn reset_request(&self, rid: RequestId, _free: bool) -> Result<()> {
        self.counters.edit().reset(rid);
        Ok(())
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.counters.edit().remove(rid);
        Ok(())
    }

    fn retain_session(&self, rid: RequestId, session: &str) -> Result<()> {
        let streams: Vec<_> = self.counters.streams(rid).filter(|(_, next)| *next > 0).collect();
        self.counters.edit().reset(rid);
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        match streams.is_empty() {
            true => sessions.remove(session),
            false => sessions.insert(session.to_string(), streams),
        };
        Ok(())
    }

    /// A part of what a session has can be taken up only where positions count tokens.
    fn adopt_session(&self, rid: RequestId, session: &str, len: u32) -> Result<Option<u32>> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(streams) = sessions.remove(session) else { return Ok(Some(0)) };
        let counts_tokens = self.rules.scheme == Scheme::Sequential;
        let main = streams.iter().find(|(label, _)| *label == LabelId::MAIN).map_or(0, |s| s.1);
        if !counts_tokens || main < len {
            return Ok(Some(0));
        }
        let mut edit = self.counters.edit();
        for (label, next) in streams {
            edit.set(rid, label, if label == LabelId::MAIN { len } else { next });
        }
        Ok(Some(len))
    }

    fn remove_session(&self, session: &str) -> Result<()> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).remove(session);
        Ok(())
    }

    fn admit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        match step.options::<PositionStepOptions>()? {
            None => {
                let parts = plain_parts(self.rules, step);
                Ok(self.admit_parts(step.segments().request, parts, ctx))
            }
            // Its plan is more than where its rows start.
            options => Ok(self.admit_parts(&[], parts(self.rules, step, options)?, ctx)),
        }
    }

    fn rollback_admit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        let edit = self.counters.edit();
        for segment in step.segments().iter() {
            edit.roll_back(segment.request_id, segment.label, ctx.step());
        }
        Ok(())
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        let kv = ctx.plan_result::<KvPlan>(self.kv_index)?;
        let plan = self.plans.plan(ctx, |plan| {
            lay_out(plan, self.rules, &self.counters, step, ctx, kv)?;
            self.cuda.as_ref().map_or(Ok(()), |cuda| cuda.upload(ctx, plan))
        })?;
        self.planned[ctx.slot() as usize].get_or_init(|| plan);
        Ok(plan)
    }

    fn commit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        let options = step.options::<PositionStepOptions>()?;
        let (id, mut edit) = (ctx.step(), self.counters.edit());
        let commit = |part: Part<'_>| {
            if let Some(live) = self.counters.live(part.segment.request_id) {
                edit.commit(live, part.segment.label, id, part.advance);
            }
        };
        match options {
            None => plain_parts(self.rules, step).for_each(commit),
            Some(_) => parts(self.rules, step, options)?.for_each(commit),
        }
        for fork in options.iter().flat_map(|o| o.post_forks.iter()) {
            edit.fork(fork.request_id, fork.from, fork.to);
        }
        Ok(())
    }

    fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
        let mut info = PublishedInfo::new(PUBLISHED.0, PUBLISHED.1);
        let mut any = false;
        for (label, next) in self.counters.streams(rid) {
            info.set(&self.host.label_name(label), u64::from(next), Vec::new());
            any = true;
        }
        Ok(any.then_some(info))
    }
}

impl resource_api::Positions for Positions {
    fn apply_qk(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.turn(None, ctx, label, q, k)
    }

    fn pos_ids(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<&[u32]> {
        let plan = self.planned.get(ctx.slot() as usize).and_then(OnceLock::get);
        let plan = plan.map(|plan| plan.into_result().open::<PositionsPlan>()).transpose()?;
        let plan = plan.filter(|plan| plan.step == ctx.step()).ok_or_else(|| {
            ResourceError::wrong_state(format!("`{}` has not planned this step", self.key))
        })?;
        plan.ids(label).ok_or_else(|| unplanned(label))
    }

    fn position(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        Ok(self.counters.position(rid, label))
    }

    fn apply_qk_layer(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.turn(self.local_of(layer), ctx, label, q, k)
    }

    fn turning(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
    ) -> Result<Option<Turning>> {
        let Some(cuda) = &self.cuda else { return Ok(None) };
        let plan = ctx.plan_result::<PositionsPlan>(self.index)?;
        let group = plan.groups.iter().find(|g| g.label == label);
        let group = group.ok_or_else(|| unplanned(label))?;
        cuda.turning(plan, group, self.local_of(layer).is_some()).map(Some)
    }
}

fn unplanned(label: LabelId) -> ResourceError {
    ResourceError::invalid(format!("plan label {} has no rows in this step", label.0))
}

/// The heads of the first `tokens` tokens, and how many elements a token has.
fn heads<'t>(
    name: &str,
    tensor: &'t mut TensorViewMut<'_>,
    tokens: usize,
    dim: usize,
) -> Result<(&'t mut [f32], usize)> {
    let raw = *tensor.raw();
    let wrong = || {
        ResourceError::invalid(format!(
            "{name} is {} {:?}: expected contiguous f32 [{tokens} tokens, heads, {dim}] in host \
             memory",
            raw.dtype.name(),
            raw.shape()
        ))
    };
    let &[rows, heads, head_dim] = raw.shape() else { return Err(wrong()) };
    let fits = rows >= tokens as i64 && heads > 0 && head_dim == dim as i64;
    let width = heads as usize * dim;
    match tensor.as_mut_slice::<f32>() {
        Some(all) if fits => Ok((&mut all[..tokens * width], width)),
        _ => Err(wrong()),
    }
}
