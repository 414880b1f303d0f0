//! `positions/1`: position ids of a step's tokens, and rotary embedding by them.

use crate::id::{LabelId, RequestId};
use crate::step::StepContext;
use crate::tensor::TensorViewMut;
use crate::{PlanVec, Result, Typed};
use abi_stable::StableAbi;
use resource_api_macros::capability;

/// Options of a position resource's share of a step.
#[repr(C)]
#[derive(Debug, Default, StableAbi)]
pub struct PositionStepOptions {
    /// Explicit position ids, packed like the step's tokens; empty for the scheme's own.
    pub pos_ids: PlanVec<u32>,
    /// By how much each segment's counter advances at commit; empty for the scheme's own rule.
    pub advance: PlanVec<u32>,
    /// Counters copied after the step, as a cache's post-forks.
    pub post_forks: PlanVec<crate::Fork>,
}

impl Typed for PositionStepOptions {
    const TAG: &'static str = "positions.step";
    const MAJOR: u32 = 1;
}

/// Positions of the tokens of a step.
#[capability(id = "positions", major = 1, path = crate)]
pub trait Positions: Send + Sync {
    /// Rotates queries `[tokens, query heads, head dim]` and keys `[tokens, kv heads, head dim]`
    /// of the label's group in place, by the position of each token. f32.
    fn apply_qk(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()>;

    /// Position of each token of the label's group, in packed order.
    fn pos_ids(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<&[u32]>;

    /// The next position of a stream; 0 for one that nobody opened.
    fn position(&self, rid: RequestId, label: LabelId) -> Result<u32>;
}
