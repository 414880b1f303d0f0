//! `sampler/1`: from logits to tokens.

use crate::id::RequestId;
use crate::step::StepContext;
use crate::tensor::{TensorView, TensorViewMut};
use crate::{PlanVec, Result, Typed};
use abi_stable::StableAbi;
use resource_api_macros::capability;

/// Options of a sampler's share of a step.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct SamplerStepOptions {
    /// Whether the repetition penalty applies in this step.
    pub apply_penalty: bool,
    /// Requests whose sample of this step is thrown away: it is not counted.
    pub discarded: PlanVec<RequestId>,
}

impl Default for SamplerStepOptions {
    fn default() -> Self {
        Self { apply_penalty: true, discarded: PlanVec::default() }
    }
}

impl Typed for SamplerStepOptions {
    const TAG: &'static str = "sampler.step";
    const MAJOR: u32 = 1;
}

/// One row's result.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, StableAbi)]
pub struct Sampled {
    /// The token; meaningless unless `status` is [`Sampled::OK`].
    pub token: u32,
    /// [`Sampled::OK`] or what is wrong with the row.
    pub status: u32,
    /// Log-probability of the token under the model's own distribution: before temperature,
    /// penalties and truncation.
    pub logprob: f32,
}

impl Sampled {
    /// The row gave a token.
    pub const OK: u32 = 0;
    /// The row's logits are not numbers, or none is above minus infinity: the request fails.
    pub const BAD_LOGITS: u32 = 1;
}

/// Picks tokens. The choice depends on (seed, choice index, position in the request's own stream,
/// contents of the row) and on nothing else.
#[capability(id = "sampler", major = 1, path = crate)]
pub trait Sampler: Send + Sync {
    /// Samples one token per entry of `rids` from the f32 rows of `logits` `[rids, vocabulary]`,
    /// which it may overwrite. A bad row fails alone, by its status.
    fn sample(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        out: &mut [Sampled],
    ) -> Result<()>;

    /// The `k` best tokens of one row and their log-probabilities, before temperature, penalties
    /// and truncation; best first, ties to the smaller id. `ids` and `logprobs` have length `k`.
    fn top_logprobs(
        &self,
        logits: &TensorView<'_>,
        ids: &mut [u32],
        logprobs: &mut [f32],
    ) -> Result<()>;
}
