//! The capability `kv.cache/1`. Calls with a context read the step's plan; lengths and free pages
//! come from the board. Only what changes a stream outside of a step takes the lock, and refuses while
//! a step with that stream is in flight.

use resource_api::{
    ErrorKind, HeadTurn, KvCache, KvGroup, KvLayer, KvPlan, LabelId, RequestId, ResourceError,
    Result, StepContext, TensorView, TensorViewMut, WritePlaces,
};

use crate::resource::Kv;
use crate::stream::StreamId;

/// The group of a label in this step.
fn group(plan: &KvPlan, label: LabelId) -> Result<&KvGroup> {
    plan.group(label).ok_or_else(|| {
        let planned: Vec<String> = plan.groups.iter().map(|g| g.label.0.to_string()).collect();
        ResourceError::new(
            ErrorKind::NOT_FOUND,
            format!(
                "label {} is not planned in this step; planned: {}",
                label.0,
                planned.join(", ")
            ),
        )
    })
}

impl KvCache for Kv {
    fn write_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        let plan = ctx.plan_result::<KvPlan>(self.index)?;
        let group = group(plan, label)?;
        self.shared.memory.write(ctx, &self.shared.host, layer, (plan, group), k, v)
    }

    fn read_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let plan = ctx.plan_result::<KvPlan>(self.index)?;
        self.shared.memory.read(ctx, layer, (plan, group(plan, label)?), k, v)
    }

    fn layer_view(&self, layer: u32) -> Result<KvLayer<'_>> {
        self.shared.memory.layer(layer)
    }

    fn stream_len(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        Ok(self.shared.board.get(StreamId { request: rid, label }).0)
    }

    fn has_room(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<bool> {
        let (len, held) = self.shared.board.get(StreamId { request: rid, label });
        let total = len.saturating_add(tokens);
        let fresh = self.shared.pages_for(total).saturating_sub(held);
        Ok(total <= self.shared.facts.max_seq_len && fresh <= self.shared.board.free())
    }

    fn free_pages(&self) -> u64 {
        self.shared.board.free().into()
    }

    fn protect_prefix(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<()> {
        let id = StreamId { request: rid, label };
        self.with_state(|state, _| {
            let stream = state.idle_stream(id, "protect")?;
            if tokens > stream.len {
                return Err(ResourceError::invalid(format!(
                    "cannot protect {tokens} tokens of {} of request {rid}",
                    stream.len
                )));
            }
            if stream.protected > 0 && stream.protected != tokens {
                return Err(ResourceError::invalid(format!(
                    "request {rid}: {} tokens are protected already, not {tokens}",
                    stream.protected
                )));
            }
            state.requests.get_mut(id).expect("found above").protected = tokens;
            Ok(())
        })
    }

    fn release_oldest(&self, rid: RequestId, label: LabelId, keep: u32) -> Result<u32> {
        let id = StreamId { request: rid, label };
        self.with_state(|state, shared| {
            let stream = state.idle_stream(id, "release")?;
            let size = shared.facts.page_size;
            let excess = stream.len.saturating_sub(keep).div_ceil(size);
            let count = excess.min(crate::stream::droppable(stream.len, stream.protected, 0, size));
            Ok(state.drop_front(shared, id, count))
        })
    }

    fn correct_len(&self, rid: RequestId, label: LabelId, len: u32) -> Result<()> {
        let id = StreamId { request: rid, label };
        self.with_room(|state, shared| {
            let stream = state.idle_stream(id, "correct")?;
            if len > stream.len || len < stream.protected {
                return Err(ResourceError::invalid(format!(
                    "the length of label {} of request {rid} can go back to {}..={}, not to {len}",
                    label.0, stream.protected, stream.len
                )));
            }
            state.rewind(shared, id, len)
        })
    }

    fn write_turned(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        how: &HeadTurn,
    ) -> Result<bool> {
        let plan = ctx.plan_result::<KvPlan>(self.index)?;
        self.shared.memory.write_turned(ctx, layer, (plan, group(plan, label)?), (q, k, v), how)
    }

    fn write_places(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<Option<WritePlaces>> {
        let plan = ctx.plan_result::<KvPlan>(self.index)?;
        self.shared.memory.write_places(plan, group(plan, label)?)
    }

    fn assert_pages_conserved(&self) -> Result<()> {
        self.with_state(|state, _| state.check_conservation())
    }
}
