//! The step protocol: `admit -> plan -> forward -> commit -> outputs -> publish`, over all
//! resources of a step, in build order.
//!
//! The runner hands out values that own what they reserved: a [`Live`] step is admitted and
//! planned, a [`Staged`] one is so ahead of time. Each is used up by exactly one of promote,
//! commit and abandon.

use std::sync::Arc;

use resource_api::{
    AdmitOutcome, BucketKey, PublishedInfo, RequestId, Resource, ResourceError, ResourceHandle,
    SlotLease, StepContext, StepHead, StepId, TypedRef,
};

use crate::account::Account;
use crate::error::{Error, ErrorKind, Result};
use crate::resources::{Entry, ResourceSet};
use crate::seam;
use crate::slots::Slots;
use crate::step::SubmoduleStep;
use crate::watch::{Method, ResourceUsage, Usage, Watch};

/// The answer of a resource that stopped a step, with the name it does not know itself.
#[derive(Clone, Debug)]
pub struct FullAdmitOutcome {
    /// The first answer that is not a plain yes, or [`AdmitOutcome::OK`].
    pub outcome: AdmitOutcome,
    /// Key of the resource that refused; `None` when none did.
    pub failed_resource: Option<String>,
}

/// How an attempt to start a step ended.
#[derive(Debug)]
pub enum Started {
    /// It may run.
    Live(Live),
    /// It may not, and nothing has changed. The step comes back, to be tried in another shape.
    Refused(FullAdmitOutcome, SubmoduleStep),
}

/// How an attempt to stage a step ended.
#[derive(Debug)]
pub enum StageOutcome {
    /// It is planned ahead.
    Staged(Staged),
    /// It is not, and nothing has changed. The step comes back.
    Refused(FullAdmitOutcome, SubmoduleStep),
}

/// A step that failed before its forward pass. Whatever it reserved has been given back.
#[derive(Debug)]
pub struct FailedStep {
    /// Why, naming resource and method.
    pub error: Error,
    /// The step, for another try.
    pub step: Box<SubmoduleStep>,
}

impl FailedStep {
    fn new(error: Error, step: SubmoduleStep) -> Self {
        Self { error, step: Box::new(step) }
    }
}

/// A step that is admitted and planned.
#[derive(Debug)]
pub struct Live {
    head: StepHead,
    step: SubmoduleStep,
    plan_results: Vec<TypedRef<'static>>,
}

impl Live {
    /// What the step consists of.
    pub fn step(&self) -> &SubmoduleStep {
        &self.step
    }

    /// The same, to fill in the ids of tokens that were not known when it was planned.
    pub fn step_mut(&mut self) -> &mut SubmoduleStep {
        &mut self.step
    }

    /// Its identity.
    pub fn id(&self) -> StepId {
        self.head.step
    }

    /// The context to run the forward pass under.
    pub fn ctx(&self) -> StepContext<'_> {
        let (rids, padded) = (&self.step.request_ids, self.step.all_request_ids());
        StepContext::new(self.head, rids, padded, &self.plan_results)
    }

    /// The same for a forward pass that is to be captured.
    pub fn capturing_ctx(&self) -> StepContext<'_> {
        let head = StepHead { capture: true, ..self.head };
        let (rids, padded) = (&self.step.request_ids, self.step.all_request_ids());
        StepContext::new(head, rids, padded, &self.plan_results)
    }
}

/// A step that is admitted and planned ahead of time.
#[derive(Debug)]
pub struct Staged(Live);

impl Staged {
    /// Its identity.
    pub fn id(&self) -> StepId {
        self.0.head.step
    }

    /// What the step consists of.
    pub fn step(&self) -> &SubmoduleStep {
        &self.0.step
    }

    /// Fills in the ids of the tokens that the segments add: some were not known when the step was
    /// planned.
    pub fn set_token_ids(&mut self, ids: &[u32]) {
        self.0.step.token_ids.clear();
        self.0.step.token_ids.extend_from_slice(ids);
    }
}

/// A step that every resource has committed; its plans are still readable.
#[derive(Debug)]
pub struct Committed(Live);

impl Committed {
    /// Its identity.
    pub fn id(&self) -> StepId {
        self.0.id()
    }

    /// What the step consisted of.
    pub fn step(&self) -> &SubmoduleStep {
        &self.0.step
    }
}

/// Drives resources through steps. One step is live at a time; one more may be staged.
#[derive(Debug)]
pub struct Runner {
    resources: Arc<ResourceSet>,
    slots: Slots,
    last_step: u64,
    epoch: u64,
    /// Where device work of steps goes; 0 on the CPU.
    stream: u64,
    spare_results: Vec<Vec<TypedRef<'static>>>,
    /// The step that is planned ahead.
    staged: Option<StepId>,
    watch: Arc<Watch>,
    /// By resource.
    usage: Vec<Usage>,
}

impl Runner {
    /// A runner with `slots` plan buffer sets; two are enough for one live and one staged step.
    pub fn new(resources: Arc<ResourceSet>, slots: usize) -> Self {
        let slots = Slots::new(slots.max(2));
        let usage = resources.entries().iter().map(|_| Usage::default()).collect();
        Self {
            resources,
            slots,
            last_step: 0,
            epoch: 0,
            stream: 0,
            spare_results: Vec::new(),
            staged: None,
            watch: Arc::default(),
            usage,
        }
    }

    /// What is being called right now.
    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// What the step methods of each resource have taken, in build order.
    pub fn usage(&self) -> Vec<ResourceUsage> {
        let entries = self.resources.entries().iter().zip(&self.usage);
        let one = |(entry, usage): (&Entry, &Usage)| ResourceUsage {
            key: entry.key.clone(),
            kind: entry.kind.clone(),
            calls: usage.calls(),
            time: usage.time(),
            plugin: entry.plugin.clone(),
            panics: entry.all_panics(),
            is_faulted: entry.is_faulted(),
            bad_values: entry.account.bad_values(),
            restarts: entry.account.restarts(),
            bytes: entry.account.bytes(),
            most_bytes: entry.account.most_bytes(),
        };
        entries.map(one).collect()
    }

    /// Calls resource `i` for a step, where the watchdog sees it. Staged steps have a lane of their own.
    fn call<R>(
        &self,
        live: &Live,
        i: usize,
        method: Method,
        call: impl FnOnce(&ResourceHandle) -> R,
    ) -> R {
        let resource = self.resources.entries()[i].resource();
        let lane = usize::from(live.head.is_preplan);
        self.watch.call(lane, i, method, &self.usage[i], || call(resource))
    }

    /// The same, whose steps put their device work on this stream (the driver's handle), which must
    /// outlive the resources.
    #[must_use]
    pub fn with_stream(mut self, stream: u64) -> Self {
        self.stream = stream;
        self
    }

    /// The resources.
    pub fn resources(&self) -> &Arc<ResourceSet> {
        &self.resources
    }

    /// The resources, to be built anew; `None` while somebody else holds them too. No step may be in
    /// flight.
    pub fn resources_mut(&mut self) -> Option<&mut ResourceSet> {
        Arc::get_mut(&mut self.resources)
    }

    /// Epoch of the last step that was started.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Adds slots of captured shapes; answers how many shapes there was room for.
    pub fn add_buckets(&mut self, keys: &[BucketKey]) -> usize {
        self.slots.add_buckets(keys)
    }

    /// Forgets the captured shapes; no step may be in flight.
    pub fn remove_buckets(&mut self) {
        self.slots.remove_buckets();
    }

    /// The slots of captured shapes that no step holds.
    pub fn bucket_slots(&self) -> impl Iterator<Item = (BucketKey, u32)> {
        self.slots.of_buckets()
    }

    /// Slots that no step holds.
    pub fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// Admits and plans a step. On a refusal or an error every resource reached has been rolled
    /// back, in reverse order, the refuser included.
    ///
    /// # Errors
    /// What a resource's `admit` or `plan` failed with, and the step.
    pub fn start(&mut self, step: SubmoduleStep) -> Result<Started, FailedStep> {
        let head = match self.new_head(&step, false) {
            Ok(head) => head,
            Err(e) => return Err(FailedStep::new(e, step)),
        };
        let mut live = Live { head, step, plan_results: self.take_results() };
        match self.admit_and_plan(&mut live) {
            Ok(None) => Ok(Started::Live(live)),
            Ok(Some(refusal)) => Ok(Started::Refused(refusal, self.give_back(live))),
            Err(e) => Err(FailedStep::new(e, self.give_back(live))),
        }
    }

    /// Like [`Runner::start`], one step ahead. Resources that cannot be planned ahead are left for
    /// the promotion.
    ///
    /// # Errors
    /// As for [`Runner::start`]; and when a step is planned ahead already.
    pub fn stage(&mut self, step: SubmoduleStep) -> Result<StageOutcome, FailedStep> {
        if let Some(StepId(pending)) = self.staged {
            let message =
                format!("step {pending} is planned ahead already: promote or unstage it first");
            return Err(FailedStep::new(Error::new(ErrorKind::Internal, message), step));
        }
        let head = match self.new_head(&step, true) {
            Ok(head) => head,
            Err(e) => return Err(FailedStep::new(e, step)),
        };
        let mut live = Live { head, step, plan_results: self.take_results() };
        match self.admit_and_plan(&mut live) {
            Ok(None) => {
                self.staged = Some(live.head.step);
                Ok(StageOutcome::Staged(Staged(live)))
            }
            Ok(Some(refusal)) => {
                self.clear_stage(&live);
                Ok(StageOutcome::Refused(refusal, self.give_back(live)))
            }
            Err(e) => {
                self.clear_stage(&live);
                Err(FailedStep::new(e, self.give_back(live)))
            }
        }
    }

    /// Turns a staged step into the live one. Resources that planned it ahead recognise it by its
    /// id and hand out the same plan.
    ///
    /// # Errors
    /// As for [`Runner::start`]; the stage is undone.
    pub fn promote(&mut self, staged: Staged) -> Result<Started, FailedStep> {
        self.staged = None;
        let mut live = staged.0;
        live.head.is_preplan = false;
        self.epoch += 1;
        live.head.epoch = self.epoch;
        match self.admit_and_plan(&mut live) {
            Ok(None) => Ok(Started::Live(live)),
            Ok(Some(refusal)) => {
                self.clear_stage(&live);
                Ok(Started::Refused(refusal, self.give_back(live)))
            }
            Err(e) => {
                self.clear_stage(&live);
                Err(FailedStep::new(e, self.give_back(live)))
            }
        }
    }

    /// Undoes a staged step without trace and gives its description back.
    pub fn unstage(&mut self, staged: Staged) -> SubmoduleStep {
        self.staged = None;
        self.clear_stage(&staged.0);
        self.give_back(staged.0)
    }

    /// Records that the step has run. Every resource commits, also after one has failed, so that
    /// healthy ones stay consistent with what the forward pass wrote; the first failure is told.
    pub fn commit(&self, live: Live) -> (Committed, Result<()>) {
        let done = self.each(&live, Method::Commit, |r, i, ctx| r.commit(&live.step.share(i), ctx));
        (Committed(live), done)
    }

    /// Tells every resource of the step what was sampled.
    ///
    /// # Errors
    /// The first resource that fails; the others are told all the same.
    pub fn outputs(&self, done: &Committed, rids: &[RequestId], ids: &[u32]) -> Result<()> {
        self.each(&done.0, Method::Outputs, |r, _, ctx| r.on_outputs(ctx, rids, ids))
    }

    /// Releases the slot of a step and gives its description back for reuse.
    pub fn finish(&mut self, done: Committed) -> SubmoduleStep {
        self.give_back(done.0)
    }

    fn each(
        &self,
        live: &Live,
        method: Method,
        call: impl Fn(&ResourceHandle, usize, &StepContext<'_>) -> resource_api::Result<()>,
    ) -> Result<()> {
        let ctx = live.ctx();
        let mut first = Ok(());
        for &i in &live.step.resources {
            let entry = &self.resources.entries()[i];
            let result = self.call(live, i, method, |resource| call(resource, i, &ctx));
            if let (Err(e), true) = (result, first.is_ok()) {
                first = Err(within(&entry.key, method.name(), e));
            }
        }
        first
    }

    /// Gives up a live step whose forward pass failed: rolls back what it reserved. A step that was
    /// staged behind it builds on what it would have added: unstage that one first.
    pub fn abandon(&mut self, live: Live) -> SubmoduleStep {
        self.roll_back(&live, live.step.resources.len());
        self.give_back(live)
    }

    /// What each resource of the step publishes for `rid`, by key; silent ones are left out.
    ///
    /// # Errors
    /// The first resource that fails.
    pub fn publish_for_step(
        &self,
        done: &Committed,
        rid: RequestId,
    ) -> Result<Vec<(String, PublishedInfo)>> {
        let live = &done.0;
        let mut all = Vec::new();
        for &i in &live.step.resources {
            let entry = &self.resources.entries()[i];
            let (node, walk) = (live.head.node, live.head.graph_walk);
            let info = entry.resource().publish_for_step(rid, Some(node), Some(walk));
            if let Some(info) = info.map_err(|e| within(&entry.key, "publish_for_step", e))? {
                all.push((entry.key.clone(), info));
            }
        }
        Ok(all)
    }

    fn new_head(&mut self, step: &SubmoduleStep, is_preplan: bool) -> Result<StepHead> {
        if let Some(i) = step.resources.iter().find(|&&i| i >= self.resources.entries().len()) {
            return Err(Error::usage(format!("the step names resource {i}, which does not exist")));
        }
        let lease = self.slots.lease(step.bucket.as_ref())?;
        self.last_step += 1;
        if !is_preplan {
            self.epoch += 1;
        }
        Ok(StepHead {
            step: StepId(self.last_step),
            epoch: self.epoch,
            node: step.node,
            graph_walk: step.graph_walk,
            lease,
            capture: false,
            is_preplan,
            stream: self.stream,
        })
    }

    /// `Ok(None)` when everybody is in; `Ok(Some(..))` on a refusal, after rolling back.
    fn admit_and_plan(&self, live: &mut Live) -> Result<Option<FullAdmitOutcome>> {
        live.plan_results.fill(TypedRef::NONE);
        if let Some(refusal) = self.admit(live)? {
            return Ok(Some(refusal));
        }
        self.plan(live)?;
        Ok(None)
    }

    fn admit(&self, live: &Live) -> Result<Option<FullAdmitOutcome>> {
        let ctx = live.ctx();
        for (reached, &i) in live.step.resources.iter().enumerate() {
            let entry = &self.resources.entries()[i];
            if ctx.is_preplan() && !entry.supports_preplan {
                continue;
            }
            let answer = self.call(live, i, Method::Admit, |r| r.admit(&live.step.share(i), &ctx));
            match answer {
                Ok(outcome) if outcome.is_ready() => {}
                Ok(outcome) => {
                    self.roll_back(live, reached + 1);
                    if let Err(what) = seam::admission(&outcome) {
                        return Err(self.bad(entry, "admit", &what, Account::charge));
                    }
                    let refused = (!outcome.is_ok()).then(|| entry.key.clone());
                    return Ok(Some(FullAdmitOutcome { outcome, failed_resource: refused }));
                }
                Err(e) => {
                    self.roll_back(live, reached + 1);
                    return Err(within(&entry.key, "admit", e));
                }
            }
        }
        Ok(None)
    }

    fn plan(&self, live: &mut Live) -> Result<()> {
        for n in 0..live.step.resources.len() {
            let i = live.step.resources[n];
            let entry = &self.resources.entries()[i];
            if live.head.is_preplan && !entry.supports_preplan {
                continue;
            }
            let planned =
                self.call(live, i, Method::Plan, |r| r.plan(&live.step.share(i), &live.ctx()));
            let result = match planned {
                Ok(plan) => {
                    let result = plan.into_result();
                    let (share, starts) = (live.step.share(i), live.step.starts_of(i));
                    match seam::plan(&result, entry.facts.as_ref(), &share, starts) {
                        Ok(()) => Ok(result),
                        Err(what) => Err(self.bad(entry, "plan", &what, Account::suspect)),
                    }
                }
                Err(e) => Err(within(&entry.key, "plan", e)),
            };
            match result {
                Ok(result) => live.plan_results[i] = result,
                Err(e) => {
                    self.roll_back(live, live.step.resources.len());
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Charges a resource with an answer that cannot be right.
    #[cold]
    fn bad(&self, entry: &Entry, method: &str, what: &str, charge: fn(&Account, &str)) -> Error {
        let Entry { key, kind, plugin, .. } = entry;
        let message = format!(
            "resource `{key}` (kind {kind}, plugin {plugin}), {method}: {what}; this is a fault of \
             the plugin"
        );
        charge(&entry.account, &message);
        Error::new(ErrorKind::Invalid, message)
    }

    /// Rolls back the first `reached` resources of the step, last first.
    fn roll_back(&self, live: &Live, reached: usize) {
        let ctx = live.ctx();
        for &i in live.step.resources[..reached].iter().rev() {
            let entry = &self.resources.entries()[i];
            if ctx.is_preplan() && !entry.supports_preplan {
                continue;
            }
            let done = self
                .call(live, i, Method::Rollback, |r| r.rollback_admit(&live.step.share(i), &ctx));
            if let Err(e) = done {
                tracing::error!(resource = entry.key, "rollback_admit failed: {e}");
            }
        }
    }

    fn clear_stage(&self, live: &Live) {
        for &i in live.step.resources.iter().rev() {
            let entry = &self.resources.entries()[i];
            if !entry.supports_preplan {
                continue;
            }
            let step = Some(live.head.step);
            let done = self.call(live, i, Method::ClearPreplan, |r| r.clear_preplan(step));
            if let Err(e) = done {
                tracing::error!(resource = entry.key, "clear_preplan failed: {e}");
            }
        }
    }

    fn take_results(&mut self) -> Vec<TypedRef<'static>> {
        let mut results = self.spare_results.pop().unwrap_or_default();
        results.resize(self.resources.entries().len(), TypedRef::NONE);
        results
    }

    fn give_back(&mut self, live: Live) -> SubmoduleStep {
        self.slots.release(SlotLease { ..live.head.lease });
        self.spare_results.push(live.plan_results);
        live.step
    }
}

fn within(key: &str, method: &str, e: ResourceError) -> Error {
    Error::from(e.within(format!("resource `{key}`, {method}")))
}
