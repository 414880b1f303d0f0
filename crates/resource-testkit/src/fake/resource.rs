//! The methods of the protocol: each notes that it was called and hands on to the state.

use std::sync::atomic::Ordering;

use resource_api::{
    AdmitOutcome, CGSlotSpec, FailureReason, LabelId, NodeId, Offered, Plan, PrefixInputs,
    PrefixWalk, PublishedInfo, RequestId, RequestOverrides, Resource, ResourceError, ResourceStep,
    Result, StepContext, StepId, TypedRef, WalkId,
};
use serde_json::json;

use super::Fake;
use crate::interface::{Echo, EchoHandle, FakePlan, FakeStepOptions};

impl Fake {
    fn options(&self, share: &ResourceStep<'_>) -> Result<FakeStepOptions> {
        Ok(share.options::<FakeStepOptions>()?.copied().unwrap_or_default())
    }

    /// Fills the part of a plan that comes from others: dependencies by their plans and their
    /// capability, resources built later by what they were bound with.
    fn ask_others(&self, plan: &mut FakePlan, ctx: &StepContext<'_>) -> Result<()> {
        (plan.dependency_tokens, plan.dependency_echo, plan.peer_echo) = (0, 0, 0);
        for upstream in &self.dependencies {
            if upstream.is_fake {
                let theirs = ctx.plan_result::<FakePlan>(upstream.index)?;
                plan.dependency_tokens += theirs.slots.len() as u64;
            }
            plan.dependency_echo += upstream.echo.echo(&plan.span, None)?;
        }
        for (_, peer) in self.peers.lock().iter() {
            plan.peer_echo += peer.echo(&plan.span, None)?;
        }
        Ok(())
    }
}

impl Resource for Fake {
    fn depends_on(&self) -> Vec<String> {
        self.log.enter("depends_on");
        self.spec.depends_on.clone()
    }

    fn describe(&self) -> Vec<TypedRef<'_>> {
        self.log.enter("describe");
        vec![TypedRef::new(&self.facts)]
    }

    fn inspect(&self) -> String {
        let state = self.state.lock().inspect();
        json!({
            "key": self.key,
            "index": self.index,
            "peers": self.peers(),
            "state": state,
            "log": self.log.inspect(),
        })
        .to_string()
    }

    fn prefix_skip_safe(&self) -> bool {
        self.log.enter("prefix_skip_safe");
        self.spec.prefix
    }

    fn supports_preplan(&self) -> bool {
        self.log.enter("supports_preplan");
        self.spec.preplan
    }

    fn takes_outputs_late(&self) -> bool {
        self.log.enter("takes_outputs_late");
        false
    }

    fn supports_eviction(&self) -> bool {
        self.log.enter("supports_eviction");
        true
    }

    fn force_double_buffer(&self) -> bool {
        self.log.enter("force_double_buffer");
        self.spec.double_buffer
    }

    fn fingerprint(&self) -> Option<Vec<u8>> {
        self.log.enter("fingerprint");
        self.spec.prefix.then(|| format!("fake/1;key={}", self.key).into_bytes())
    }

    fn accepts(&self) -> Vec<String> {
        self.log.enter("accepts");
        self.spec.accepts.clone()
    }

    fn bind(&self, offered: Vec<Offered>) -> Result<()> {
        self.log.enter("bind");
        let open = |o: Offered| Ok((o.key, o.capability.open::<EchoHandle>()?));
        let peers = offered.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        *self.peers.lock() = peers;
        Ok(())
    }

    fn enable_prefix_cache(&self, root: &[u8], _walks: Vec<PrefixWalk>) -> Result<bool> {
        self.log.enter("enable_prefix_cache");
        if self.spec.prefix {
            self.state.lock().prefixes.open(root);
        }
        Ok(self.spec.prefix)
    }

    fn build_cuda_graph_buffers(
        &self,
        slots: &[CGSlotSpec],
        max_bs: u32,
        max_seq_len: u32,
    ) -> Result<()> {
        self.log.enter("build_cuda_graph_buffers");
        self.plan_room.fetch_max(max_bs.max(max_seq_len), Ordering::Relaxed);
        self.buffers.grow(slots, max_bs)
    }

    fn post_warmup_validate(&self) -> Result<()> {
        self.log.enter("post_warmup_validate");
        Ok(())
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        self.log.enter("ingest_request");
        let asked = overrides.parse()?.unwrap_or_default();
        self.state.lock().ingest(rid, overrides.prompt(), asked);
        Ok(())
    }

    fn admit_retrieve(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        self.log.enter("admit_retrieve");
        match published {
            Some(info) => self.state.lock().retrieve(rid, info, self.spec.retrieve_polls),
            None => Ok(AdmitOutcome::OK),
        }
    }

    fn resolve_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
    ) -> Result<Option<u32>> {
        self.log.enter("resolve_cached_prefix");
        let mut state = self.state.lock();
        let prompt = state.prompt(rid).unwrap_or_default().to_vec();
        Ok(state.prefixes.resolve(rid, &prompt))
    }

    fn apply_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        inputs: &PrefixInputs<'_>,
        matched_len: u32,
    ) -> Result<()> {
        self.log.enter("apply_cached_prefix");
        let Some(tokens) = inputs.token_ids().get(..matched_len as usize) else {
            let message = format!("{matched_len} tokens skipped of {}", inputs.token_ids().len());
            return Err(ResourceError::invalid(message));
        };
        self.state.lock().adopt(rid, tokens)
    }

    fn extend_prefix_chain(
        &self,
        rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        outputs: &[u32],
    ) -> Result<()> {
        self.log.enter("extend_prefix_chain");
        let mut state = self.state.lock();
        state.add_outputs(rid, outputs);
        let chain = state.tokens(rid);
        state.prefixes.add(chain);
        Ok(())
    }

    fn reset_request(&self, rid: RequestId, free: bool) -> Result<()> {
        self.log.enter("reset_request");
        self.state.lock().reset(rid, free);
        Ok(())
    }

    fn retain_session(&self, rid: RequestId, session: &str) -> Result<()> {
        self.log.enter("retain_session");
        self.state.lock().retain(rid, session);
        Ok(())
    }

    fn adopt_session(&self, rid: RequestId, session: &str, len: u32) -> Result<Option<u32>> {
        self.log.enter("adopt_session");
        self.state.lock().resume(rid, session, len).map(Some)
    }

    fn remove_session(&self, session: &str) -> Result<()> {
        self.log.enter("remove_session");
        self.state.lock().forget(session);
        Ok(())
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.log.enter("remove_request");
        self.state.lock().remove(rid);
        Ok(())
    }

    fn remove_requests(&self, rids: &[RequestId]) -> Result<()> {
        self.log.enter("remove_requests");
        rids.iter().try_for_each(|&rid| self.remove_request(rid))
    }

    fn cleanup(&self) -> Result<()> {
        self.log.enter("cleanup");
        Ok(())
    }

    fn admit(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        self.log.enter_step("admit", ctx);
        let options = self.options(share)?;
        let mut state = self.state.lock();
        if state.has_step(ctx.step()) {
            if !ctx.is_preplan() {
                state.promote(ctx.step());
            }
        } else {
            let outcome = state.reserve(ctx.step(), share, ctx.is_preplan());
            if !outcome.is_ready() {
                return Ok(outcome);
            }
        }
        if options.refuse != 0 {
            let rid = share.segments().request.first().copied().unwrap_or(RequestId::padding(0));
            return Ok(AdmitOutcome::refused(FailureReason(options.refuse), rid, LabelId::MAIN)
                .with_message("the step's options say so"));
        }
        Ok(if options.not_ready { AdmitOutcome::NOT_READY } else { AdmitOutcome::OK })
    }

    fn rollback_admit(&self, _share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        self.log.enter_step("rollback_admit", ctx);
        self.state.lock().release(ctx.step());
        Ok(())
    }

    fn plan(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.log.enter_step("plan", ctx);
        if self.options(share)?.fail_plan {
            return Err(ResourceError::internal(
                "the step's options say that it cannot be planned",
            ));
        }
        self.plans.plan(ctx, |plan| {
            // Columns that a capture was sized for never move.
            plan.slots.reserve(self.plan_room.load(Ordering::Relaxed) as usize, true);
            if !self.state.lock().lay_out(ctx.step(), plan)? {
                return Ok(());
            }
            plan.step = ctx.step();
            plan.writes += 1;
            self.ask_others(plan, ctx)?;
            self.buffers.write(ctx.slot_lease(), &plan.slots)
        })
    }

    fn commit(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        self.log.enter_step("commit", ctx);
        self.state.lock().commit(ctx.step(), share.token_ids())?;
        match self.options(share)?.fail_commit {
            true => Err(ResourceError::internal("the step's options say so")),
            false => Ok(()),
        }
    }

    fn clear_preplan(&self, step: Option<StepId>) -> Result<()> {
        self.log.enter("clear_preplan");
        self.state.lock().release_staged(step);
        Ok(())
    }

    fn on_outputs(&self, ctx: &StepContext<'_>, rids: &[RequestId], ids: &[u32]) -> Result<()> {
        self.log.enter_step("on_outputs", ctx);
        rids.iter().zip(ids).try_for_each(|(&rid, id)| {
            self.extend_prefix_chain(rid, ctx.node(), ctx.graph_walk(), std::slice::from_ref(id))
        })
    }

    fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
        self.log.enter("publish");
        Ok(self.state.lock().publish(rid))
    }

    fn publish_for_step(
        &self,
        rid: RequestId,
        _node: Option<NodeId>,
        _graph_walk: Option<WalkId>,
    ) -> Result<Option<PublishedInfo>> {
        self.log.enter("publish_for_step");
        self.publish(rid)
    }

    fn publish_after_stop(
        &self,
        rid: RequestId,
        _node: Option<NodeId>,
        _graph_walk: Option<WalkId>,
    ) -> Result<Option<PublishedInfo>> {
        self.log.enter("publish_after_stop");
        self.publish(rid)
    }

    fn reclaimable(&self, rid: RequestId) -> Result<u64> {
        self.log.enter("reclaimable");
        Ok(self.state.lock().reclaimable(rid))
    }

    fn get_offload_priority(&self, rid: RequestId) -> Result<f64> {
        self.log.enter("get_offload_priority");
        Ok(self.state.lock().priority(rid))
    }

    fn offload(&self, rid: RequestId) -> Result<u64> {
        self.log.enter("offload");
        Ok(self.state.lock().offload(rid))
    }

    fn is_offloaded(&self, rid: RequestId) -> Result<bool> {
        self.log.enter("is_offloaded");
        Ok(self.state.lock().is_offloaded(rid))
    }

    fn can_reload(&self, rid: RequestId) -> Result<bool> {
        self.log.enter("can_reload");
        Ok(self.state.lock().can_reload(rid))
    }

    fn reload(&self, rid: RequestId) -> Result<bool> {
        self.log.enter("reload");
        Ok(self.state.lock().reload(rid))
    }
}
