//! `positions/1`: position ids of a step's tokens, and rotary embedding by them.

use crate::id::{LabelId, RequestId, StepId};
use crate::step::StepContext;
use crate::tensor::TensorViewMut;
use crate::{DeviceColumn, PlanVec, Result, Typed};
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
    /// Plan labels that concatenate several streams' rows, as in the cache's options.
    pub combined_labels: PlanVec<crate::CombinedLabel>,
}

impl Typed for PositionStepOptions {
    const TAG: &'static str = "positions.step";
    const MAJOR: u32 = 1;
}

/// What a position resource's `plan` lays out: the id of every token, grouped by plan label as in
/// the cache's plan.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct PositionsPlan {
    /// The step that was planned.
    pub step: StepId,
    /// One per plan label, in the order of the cache's plan.
    pub groups: PlanVec<PositionGroup>,
    /// Per token of the step, in packed order of groups.
    pub pos_ids: PlanVec<u32>,
    /// `pos_ids` on the device; empty on the CPU.
    pub device: DeviceColumn<u32>,
}

impl Default for PositionsPlan {
    fn default() -> Self {
        Self {
            step: StepId(u64::MAX),
            groups: PlanVec::default(),
            pos_ids: PlanVec::default(),
            device: DeviceColumn::EMPTY,
        }
    }
}

impl Typed for PositionsPlan {
    const TAG: &'static str = "positions.plan";
    const MAJOR: u32 = 1;
}

impl PositionsPlan {
    /// Position of each token of `label`'s group, in packed order.
    pub fn ids(&self, label: LabelId) -> Option<&[u32]> {
        let group = self.groups.iter().find(|g| g.label == label)?;
        let first = group.first_token as usize;
        self.pos_ids.get(first..first + group.num_tokens as usize)
    }
}

/// The tokens of one plan label.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct PositionGroup {
    /// The plan label.
    pub label: LabelId,
    /// First token in `pos_ids`.
    pub first_token: u32,
    /// Number of tokens.
    pub num_tokens: u32,
}

/// How a device turns the heads of a group's tokens, for whoever does more with them in the same pass: pair
/// `i` of the token at position `p` is turned by `p * phases[i]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Turning {
    /// Position of each token.
    pub positions: DeviceColumn<u32>,
    /// Per pair, in units of 2^-64 turn: the product with a position wraps at whole turns. As many as half of
    /// the elements that turn, which are the first of a head.
    pub phases: DeviceColumn<u64>,
    /// Whether pairs are elements `2 i` and `2 i + 1`, rather than `i` and `i + pairs`.
    pub is_interleaved: bool,
}
crate::cross_value!(Turning);

/// Positions of the tokens of a step.
#[capability(id = "positions", major = 1, path = crate)]
pub trait Positions: Send + Sync {
    /// Rotates queries `[tokens, query heads, head dim]` and keys `[tokens, kv heads, head dim]`
    /// of the label's group in place, by the position of each token. f32; on a device bf16 too.
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

    /// As [`apply_qk`](Self::apply_qk), for the queries and keys of one layer: some models turn some
    /// layers by other frequencies. A resource whose settings cannot say so turns all alike.
    fn apply_qk_layer(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.apply_qk(ctx, label, q, k)
    }

    /// What [`apply_qk_layer`](Self::apply_qk_layer) does to the label's group in this layer, for a cache that
    /// does it on the way in ([`crate::KvCache::write_turned`]). `None` where it is no plain rotation on the
    /// device.
    fn turning(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
    ) -> Result<Option<Turning>> {
        let _ = (ctx, layer, label);
        Ok(None)
    }
}
