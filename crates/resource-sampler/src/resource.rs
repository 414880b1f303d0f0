//! The kind's `Resource`, and the `sampler/1` it offers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use resource_api::{
    AdmitOutcome, Capability, EngineResourceInfo, HostServices, HostServicesHandle, Interface,
    LabelId, LogitsProcessor, LogitsProcessorHandle, NodeId, NodeResourceSpec, Offered, Plan,
    PlanSlots, PublishedInfo, RequestId, RequestOverrides, Resource, ResourceError, ResourceKey,
    ResourceKind, ResourceStep, Result, Sampled, SamplerHandle, SamplerPlan, SamplerStepOptions,
    StepContext, StepId, TensorView, TensorViewMut, WalkId,
};

use crate::adjust::Adjustments;
use crate::cuda::{Cuda, not_begun};
use crate::draw::{Draw, Scratch, draw, top_logprobs};
use crate::params::SamplingParams;
use crate::plan;
use crate::requests::Requests;
use crate::seen::Seen;
use crate::spec::SamplerSpec;

mod published;

/// The token of a bad row, for work that follows.
const NO_TOKEN: u32 = i32::MAX as u32;

/// A built `sampler` resource.
pub struct Sampler {
    key: ResourceKey,
    spec: SamplerSpec,
    index: u32,
    /// Steps and calls only read it; requests that come and go write it.
    requests: RwLock<Requests>,
    plans: PlanSlots<SamplerPlan>,
    processors: RwLock<Vec<LogitsProcessorHandle>>,
    batch: Mutex<Batch>,
    /// On the CPU: what steps that began to sample got.
    begun: Mutex<Vec<(StepId, Vec<Sampled>)>>,
    scratch: Mutex<Vec<Scratch>>,
    /// Where the engine runs on a CUDA device.
    cuda: Option<Cuda>,
    host: HostServicesHandle,
}

/// Memory of one `sample` call, kept for the next.
#[derive(Default)]
struct Batch {
    /// The model's logits, where processors change them.
    model: Vec<f32>,
    seen: Vec<Option<Arc<Seen>>>,
    /// Empty where no live request has any.
    adjust: Vec<Option<Arc<Adjustments>>>,
}

impl ResourceKind for Sampler {
    type Spec = SamplerSpec;
    const KIND: &'static str = "sampler";
    const PROVIDES: &'static [&'static str] = &["sampler/1"];

    fn build(spec: NodeResourceSpec<SamplerSpec>, info: &EngineResourceInfo) -> Result<Self> {
        device::use_features_of(&info.host)?;
        let key = spec.resource_key;
        if spec.settings.vocab_size == 0 {
            return Err(ResourceError::invalid(format!(
                "[resources.{key}]: vocab_size = 0 must be above 0"
            )));
        }
        let vocabulary = spec.settings.vocab_size as usize;
        let with_penalties = spec.settings.enable_repetition_penalty;
        let cuda = || Cuda::new(info, vocabulary, with_penalties);
        let cuda = (!info.device.is_cpu()).then(cuda).transpose();
        // One for each thread, whichever step it first takes part in.
        let threads = if info.device.is_cpu() { info.host.threads() } else { 0 };
        let scratch = (0..threads).map(|_| Scratch::of(vocabulary)).collect();
        Ok(Self {
            cuda: cuda.map_err(|e| e.within(format!("[resources.{key}]")))?,
            key,
            spec: spec.settings,
            index: info.index,
            requests: RwLock::default(),
            plans: PlanSlots::new(),
            processors: RwLock::default(),
            batch: Mutex::default(),
            begun: Mutex::default(),
            scratch: Mutex::new(scratch),
            host: info.host.clone(),
        })
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![SamplerHandle::new(this.clone()).into()]
    }
}

impl Sampler {
    fn requests(&self) -> RwLockReadGuard<'_, Requests> {
        self.requests.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn requests_mut(&self) -> RwLockWriteGuard<'_, Requests> {
        self.requests.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn batch(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` with memory that no other thread uses meanwhile.
    fn with_scratch<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let pool = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = pool().pop().unwrap_or_default();
        let result = work(&mut scratch);
        pool().push(scratch);
        result
    }

    fn refuse(&self, rid: RequestId, why: impl std::fmt::Display) -> AdmitOutcome {
        let message = format!("`{}`: request {rid} {why}", self.key);
        AdmitOutcome::runtime_error(rid, LabelId::MAIN, message)
    }
}

impl Resource for Sampler {
    fn inspect(&self) -> String {
        let requests = self.requests();
        let live = requests.iter().map(|(rid, of)| {
            serde_json::json!({
                "request": rid.to_string(),
                "sampled": of.position(),
                "seed": of.params.seed,
                "choice": of.params.choice,
                "temperature": of.params.temperature,
                "top_k": of.params.top_k,
                "top_p": of.params.top_p,
                "min_p": of.params.min_p,
                "repetition_penalty": of.params.repetition_penalty,
                "adjusted": of.adjust.is_some(),
            })
        });
        serde_json::json!({
            "live": live.collect::<Vec<_>>(),
            "requests": requests.len(),
            "any_penalised": requests.any_penalised(),
            "any_adjusted": requests.any_adjusted(),
            "logits_processors": self.processors.read().map_or(0, |p| p.len()),
        })
        .to_string()
    }

    /// What a request has seen comes with it at ingest, whatever is skipped.
    fn prefix_skip_safe(&self) -> bool {
        true
    }

    fn supports_preplan(&self) -> bool {
        true
    }

    fn takes_outputs_late(&self) -> bool {
        true
    }

    fn accepts(&self) -> Vec<String> {
        vec![LogitsProcessorHandle::ID.to_string()]
    }

    fn bind(&self, offered: Vec<Offered>) -> Result<()> {
        let open = |o: Offered| {
            let handle = o.capability.open::<LogitsProcessorHandle>();
            handle.map_err(|e| e.within(format!("`{}`, offered to `{}`", o.key, self.key)))
        };
        let handles = offered.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        if let Some(cuda) = self.cuda.as_ref().filter(|_| !handles.is_empty()) {
            let on_host = handles.iter().any(|p| !p.takes_device());
            cuda.prepare_processing(on_host)?;
        }
        *self.processors.write().unwrap_or_else(PoisonError::into_inner) = handles;
        Ok(())
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        if rid.is_padding() || self.requests().get(rid).is_some() {
            return Ok(());
        }
        let (params, adjust) = SamplingParams::read(overrides, &self.spec)?;
        let seen = params.is_penalised().then(|| {
            let seen = Seen::new(self.spec.vocab_size);
            seen.extend(overrides.prompt());
            Arc::new(seen)
        });
        self.requests_mut().insert(rid, params, seen, adjust.map(Arc::new))
    }

    fn admit_retrieve(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        let Some(info) = published else { return Ok(AdmitOutcome::OK) };
        let state = match published::read(info) {
            Ok(state) => state,
            Err(e) => return Ok(self.refuse(rid, e)),
        };
        self.requests_mut().reseed(rid, state.seed, state.choice);
        if let Some(request) = self.requests().get(rid) {
            request.catch_up(state.position, &state.seen, &state.counts);
        }
        Ok(AdmitOutcome::OK)
    }

    /// What was sampled elsewhere, or by another sampler before this one was built.
    fn extend_prefix_chain(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        outputs: &[u32],
    ) -> Result<()> {
        if let Some(request) = self.requests_mut().get_mut(rid) {
            outputs.iter().for_each(|&id| request.take_outside(id));
        }
        Ok(())
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.requests_mut().remove(rid);
        Ok(())
    }

    fn remove_requests(&self, rids: &[RequestId]) -> Result<()> {
        let mut requests = self.requests_mut();
        rids.iter().for_each(|&rid| requests.remove(rid));
        Ok(())
    }

    fn admit(&self, _step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        let requests = self.requests();
        let mut rids = ctx.padded_request_ids().iter();
        let unknown = rids.find(|rid| !rid.is_padding() && requests.get(**rid).is_none());
        Ok(unknown.map_or(AdmitOutcome::OK, |&rid| self.refuse(rid, "is not known here")))
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        let requests = self.requests();
        self.plans.plan(ctx, |plan| plan::lay_out(plan, &requests, step, ctx))
    }

    fn commit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        let options = step.options::<SamplerStepOptions>()?;
        let requests = self.requests();
        for &rid in options.iter().flat_map(|o| o.discarded.iter()) {
            if let Some(request) = requests.get(rid) {
                request.discard(ctx.step());
            }
        }
        if requests.any_penalised() {
            for (rid, tokens) in plan::main_tokens(step) {
                if let Some(seen) = requests.get(rid).and_then(|r| r.seen.as_ref()) {
                    seen.extend(tokens);
                }
            }
        }
        Ok(())
    }

    fn on_outputs(&self, ctx: &StepContext<'_>, rids: &[RequestId], ids: &[u32]) -> Result<()> {
        // Alone with them for a moment: an atomic addition a request costs more than all the rest.
        let mut requests = self.requests_mut();
        for (&rid, &id) in rids.iter().zip(ids) {
            if let Some(request) = requests.get_mut(rid) {
                request.take_output(ctx.step(), id);
            }
        }
        Ok(())
    }

    fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
        Ok(self.requests().get(rid).map(published::write))
    }
}

impl resource_api::Sampler for Sampler {
    fn sample(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        out: &mut [Sampled],
    ) -> Result<()> {
        let plan = ctx.plan_result::<SamplerPlan>(self.index)?;
        let vocabulary = self.spec.vocab_size as usize;
        if out.len() != rids.len() {
            return Err(ResourceError::invalid(format!(
                "{} requests to sample but room for {} results",
                rids.len(),
                out.len()
            )));
        }
        let mut batch = self.batch();
        let Batch { model, seen, adjust } = &mut *batch;
        self.find_seen(plan, rids, seen)?;
        self.find_adjustments(rids, adjust);
        let how = |i: usize| {
            // Checked by `find_seen`.
            let seat = plan::planned_seat(plan, rids[i]).unwrap_or_default();
            Draw {
                seen: seen[i].as_deref(),
                fresh: if seen[i].is_some() { plan::fresh(plan, seat) } else { &[] },
                adjust: adjust.get(i).and_then(Option::as_deref),
                ..plain_draw(plan, seat)
            }
        };
        let processors = self.processors.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(cuda) = &self.cuda {
            cuda.sample(ctx, how, logits, &processors, rids, out)?;
            let mut scratch = Scratch::default();
            return cuda.sample_adjusted(how, &logits.view(), out, &mut scratch);
        }
        let width = row_width(logits, rids.len(), vocabulary)?;
        if !processors.is_empty() {
            model.clear();
            model.extend_from_slice(logits.as_mut_slice::<f32>().unwrap_or_default());
            processors.iter().try_for_each(|p| p.process(ctx, rids, logits))?;
        }
        let logits = logits.view();
        let rows = logits.as_slice::<f32>().unwrap_or_default();
        let model = if processors.is_empty() { rows } else { model.as_slice() };

        let one = |i: usize, out: &mut Sampled, scratch: &mut Scratch| {
            let row = |all: &[f32]| i * width..(i * width + vocabulary).min(all.len());
            *out = draw(&model[row(model)], &rows[row(rows)], &how(i), scratch);
        };
        let work = Mutex::new(out.iter_mut().enumerate());
        let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let threads = self.host.threads().min(rids.len() as u32);
        self.host.run(threads, |_| {
            self.with_scratch(|scratch| {
                while let Some((i, out)) = next() {
                    one(i, out, scratch);
                }
            });
        });
        seen.clear();
        Ok(())
    }

    fn top_logprobs(
        &self,
        logits: &TensorView<'_>,
        ids: &mut [u32],
        logprobs: &mut [f32],
    ) -> Result<()> {
        let vocabulary = self.spec.vocab_size as usize;
        let cuda = self.cuda.as_ref().filter(|_| !logits.raw().device.is_cpu());
        let copied = cuda.map(|cuda| cuda.read(logits)).transpose()?;
        let row = copied.as_deref().or_else(|| logits.as_slice::<f32>());
        let row = row.and_then(|row| row.get(..vocabulary)).ok_or_else(|| {
            ResourceError::invalid(format!(
                "logits are {} {:?}: expected one contiguous f32 row of {vocabulary} in host memory",
                logits.raw().dtype.name(),
                logits.shape()
            ))
        })?;
        self.with_scratch(|scratch| top_logprobs(row, ids, logprobs, scratch))
    }

    fn can_begin(&self, rids: &[RequestId]) -> bool {
        let requests = self.requests();
        let is_plain = |rid: &RequestId| {
            requests.get(*rid).is_none_or(|r| r.seen.is_none() && r.adjust.is_none())
        };
        self.processors.read().is_ok_and(|p| p.is_empty()) && rids.iter().all(is_plain)
    }

    fn begin_sample(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        tokens: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        if !self.can_begin(rids) {
            return Err(ResourceError::unsupported(format!(
                "`{}`: a request of step {} draws by tokens that are not known yet",
                self.key,
                ctx.step().0
            )));
        }
        match &self.cuda {
            Some(cuda) => {
                let plan = ctx.plan_result::<SamplerPlan>(self.index)?;
                self.find_seen(plan, rids, &mut Vec::new())?;
                let how = |i: usize| {
                    // Checked by `find_seen`.
                    plain_draw(plan, plan::planned_seat(plan, rids[i]).unwrap_or_default())
                };
                cuda.begin(ctx, rids.len(), how, &logits.view(), tokens)?;
            }
            None => self.begin_on_host(ctx, rids, logits, tokens)?,
        }
        let requests = self.requests();
        rids.iter().filter_map(|&rid| requests.get(rid)).for_each(|r| r.begin(ctx.step()));
        Ok(())
    }

    fn end_sample(&self, step: StepId, out: &mut [Sampled]) -> Result<()> {
        if let Some(cuda) = &self.cuda {
            return cuda.end(step, out);
        }
        let mut begun = self.begun();
        let at = begun.iter().position(|(other, rows)| *other == step && rows.len() == out.len());
        let at = at.ok_or_else(|| not_begun(step, out.len()))?;
        out.copy_from_slice(&begun.remove(at).1);
        Ok(())
    }
}

/// How the request in a seat draws, by its parameters alone.
fn plain_draw(plan: &SamplerPlan, seat: usize) -> Draw<'static> {
    let (params, position) = (plan::params(plan, seat), plan.position[seat]);
    Draw { params, position, seen: None, fresh: &[], adjust: None }
}

impl Sampler {
    fn begun(&self) -> MutexGuard<'_, Vec<(StepId, Vec<Sampled>)>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The CPU has the answer at once, and keeps it as a device would.
    fn begin_on_host(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        tokens: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let mut out = vec![Sampled::default(); rids.len()];
        resource_api::Sampler::sample(self, ctx, rids, logits, &mut out)?;
        let told = tokens.as_mut_slice::<u32>().filter(|told| told.len() == out.len());
        let Some(told) = told else {
            let what = format!("tokens are not contiguous u32 [{}] in host memory", out.len());
            return Err(ResourceError::invalid(what));
        };
        for (told, sampled) in told.iter_mut().zip(&out) {
            *told = if sampled.status == Sampled::OK { sampled.token } else { NO_TOKEN };
        }
        let mut begun = self.begun();
        // As on a device, where the step that goes on and the one before it have room.
        while begun.len() >= 2 {
            begun.remove(0);
        }
        begun.push((ctx.step(), out));
        Ok(())
    }
}

impl Sampler {
    /// What each request has seen, where that matters in this step. Held by itself, so that no lock
    /// is held while rows are worked on.
    fn find_seen(
        &self,
        plan: &SamplerPlan,
        rids: &[RequestId],
        seen: &mut Vec<Option<Arc<Seen>>>,
    ) -> Result<()> {
        seen.clear();
        seen.resize(rids.len(), None);
        let mut requests = None;
        for (seen, &rid) in seen.iter_mut().zip(rids) {
            let Some(seat) = plan::planned_seat(plan, rid) else {
                return Err(ResourceError::invalid(format!(
                    "`{}`: request {rid} is not part of this step",
                    self.key
                )));
            };
            if plan.apply_penalty && plan.repetition_penalty[seat] != 1.0 {
                let requests = requests.get_or_insert_with(|| self.requests());
                *seen = requests.get(rid).and_then(|r| r.seen.clone());
            }
        }
        Ok(())
    }
}

impl Sampler {
    /// What each request adds to its logits. Held by itself, as what it has seen is.
    fn find_adjustments(&self, rids: &[RequestId], adjust: &mut Vec<Option<Arc<Adjustments>>>) {
        adjust.clear();
        let requests = self.requests();
        if requests.any_adjusted() {
            let of = |rid: &RequestId| requests.get(*rid).and_then(|r| r.adjust.clone());
            adjust.extend(rids.iter().map(of));
        }
    }
}

/// Elements from one row to the next.
fn row_width(logits: &mut TensorViewMut<'_>, rows: usize, vocabulary: usize) -> Result<usize> {
    let raw = *logits.raw();
    match (raw.shape(), logits.as_mut_slice::<f32>()) {
        (&[n, width], Some(_)) if n == rows as i64 && width >= vocabulary as i64 => {
            Ok(width as usize)
        }
        _ => Err(ResourceError::invalid(format!(
            "logits are {} {:?}: expected contiguous f32 [{rows}, {vocabulary}] in host memory",
            raw.dtype.name(),
            raw.shape()
        ))),
    }
}
