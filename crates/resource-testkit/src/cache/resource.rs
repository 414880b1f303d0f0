//! The methods of the protocol, handed on to the state.

use resource_api::{
    AdmitOutcome, LabelId, NodeId, Plan, PrefixInputs, PrefixWalk, PublishedInfo, RequestId,
    RequestOverrides, Resource, ResourceStep, Result, StepContext, StepId, TypedRef, WalkId,
};
use serde_json::json;

use super::FakeCache;
use super::fault::Fault;

impl Resource for FakeCache {
    fn describe(&self) -> Vec<TypedRef<'_>> {
        vec![TypedRef::new(&self.described)]
    }

    fn inspect(&self) -> String {
        self.with(|state| {
            let total = self.facts.num_pages - 1;
            json!({ "pages": { "free": state.free.len(), "total": total } }).to_string()
        })
    }

    fn prefix_skip_safe(&self) -> bool {
        true
    }

    fn supports_preplan(&self) -> bool {
        true
    }

    fn supports_eviction(&self) -> bool {
        true
    }

    fn fingerprint(&self) -> Option<Vec<u8>> {
        Some(format!("fake_kv/1;{:?}", self.facts).into_bytes())
    }

    fn enable_prefix_cache(&self, _root: &[u8], walks: Vec<PrefixWalk>) -> Result<bool> {
        let opens = walks.iter().any(|w| w.label == LabelId::MAIN);
        if opens {
            self.with(|state| {
                state.index.get_or_insert_default();
            });
        }
        Ok(opens)
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        overrides.refuse_any()?;
        self.with(|state| state.ingest(rid, overrides.prompt()));
        Ok(())
    }

    fn resolve_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _walk: WalkId,
    ) -> Result<Option<u32>> {
        Ok(self.with(|state| state.probe(rid)))
    }

    fn apply_cached_prefix(
        &self,
        rid: RequestId,
        _node: NodeId,
        _walk: WalkId,
        inputs: &PrefixInputs<'_>,
        matched: u32,
    ) -> Result<()> {
        self.adopt(rid, inputs.token_ids(), matched)
    }

    fn reset_request(&self, rid: RequestId, free: bool) -> Result<()> {
        self.with(|state| state.reset(rid, free));
        Ok(())
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.with(|state| state.remove(rid));
        Ok(())
    }

    fn admit(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        self.with(|state| state.admit(share, ctx))
    }

    fn rollback_admit(&self, _share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        if !self.has(Fault::SkippedRollback) {
            self.with(|state| state.undo(ctx.step().0));
        }
        Ok(())
    }

    fn plan(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.lay_out(share, ctx)
    }

    fn commit(&self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        let crowd = ctx.request_ids().len() > 1;
        assert!(!(crowd && self.has(Fault::PanicsInCommit)), "planted");
        Fault::strike(self.fault);
        self.with(|state| {
            let keyed = ctx.graph_walk() == WalkId(0);
            let moves = state.commit(ctx.step().0, share.token_ids(), keyed)?;
            moves.into_iter().try_for_each(|(from, to)| self.copy_page(from, to))
        })
    }

    fn clear_preplan(&self, step: Option<StepId>) -> Result<()> {
        self.with(|state| state.drop_stages(|id| step.is_none_or(|s| s.0 == id)));
        Ok(())
    }

    fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
        Ok(self.published(rid))
    }

    fn admit_retrieve(
        &self,
        rid: RequestId,
        _node: NodeId,
        _walk: WalkId,
        published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        published.map_or(Ok(AdmitOutcome::OK), |info| self.take_in(rid, info))
    }

    fn retain_session(&self, rid: RequestId, session: &str) -> Result<()> {
        self.with(|state| state.retain(rid, session))
    }

    fn adopt_session(&self, rid: RequestId, session: &str, len: u32) -> Result<Option<u32>> {
        self.adopt_streams(rid, session, len).map(Some)
    }

    fn remove_session(&self, session: &str) -> Result<()> {
        self.with(|state| state.forget(session));
        Ok(())
    }

    fn reclaimable(&self, rid: RequestId) -> Result<u64> {
        Ok(self.with(|state| state.reclaimable(rid)))
    }

    fn offload(&self, rid: RequestId) -> Result<u64> {
        Ok(self.put_away(rid))
    }

    fn is_offloaded(&self, rid: RequestId) -> Result<bool> {
        Ok(self.with(|state| state.known(rid) && state.requests[&rid.slot].away.is_some()))
    }

    fn can_reload(&self, rid: RequestId) -> Result<bool> {
        self.is_offloaded(rid)
    }

    fn reload(&self, rid: RequestId) -> Result<bool> {
        self.bring_back(rid)
    }
}
