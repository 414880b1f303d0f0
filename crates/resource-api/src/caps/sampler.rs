//! `sampler/1`: from logits to tokens.

use crate::id::{RequestId, StepId};
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

/// What a sampler's `plan` lays out: parameters of the requests of a step.
///
/// Parameters live in seats that are kept from step to step in each slot, and a seat is written
/// again only when its request changes; what moves in every step is `row` and `position`. Columns
/// named "per seat" are parallel to each other, and so are those named "per row".
#[repr(C)]
#[derive(Debug, Default, StableAbi)]
pub struct SamplerPlan {
    /// Per row: the request. Padding rows are there too.
    pub request: PlanVec<RequestId>,
    /// Per row: its seat. Padding rows share seat 0, which is greedy.
    pub seat: PlanVec<u32>,
    /// Per seat: its row in this step. Meaningless unless `request[row]` sits here.
    pub row: PlanVec<u32>,
    /// Per seat: which request with which parameters the seat holds; 0 for none. No two are equal in
    /// the life of a resource.
    pub version: PlanVec<u64>,
    /// Per seat: how many tokens of the request have been sampled, which is the place in its
    /// sequence of random numbers. Not written for a staged step.
    pub position: PlanVec<u32>,
    /// Per seat: key of the random numbers.
    pub seed: PlanVec<u64>,
    /// Per seat: which of several answers to one prompt this is.
    pub choice: PlanVec<u32>,
    /// Per seat: 0 takes the best token.
    pub temperature: PlanVec<f32>,
    /// Per seat: 0 is off.
    pub top_k: PlanVec<u32>,
    /// Per seat: 1 is off.
    pub top_p: PlanVec<f32>,
    /// Per seat: 0 is off.
    pub min_p: PlanVec<f32>,
    /// Per seat: 1 is off.
    pub repetition_penalty: PlanVec<f32>,
    /// Per seat: first of the request's entries in `fresh`. Not written for a staged step.
    pub fresh_start: PlanVec<u32>,
    /// Per seat: number of entries in `fresh`.
    pub fresh_len: PlanVec<u32>,
    /// Tokens that this step feeds to requests with a repetition penalty and that they had not seen
    /// before; ascending for each request.
    pub fresh: PlanVec<u32>,
    /// Whether the repetition penalty applies in this step.
    pub apply_penalty: bool,
}

impl Typed for SamplerPlan {
    const TAG: &'static str = "sampler.plan";
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

    /// Whether [`begin_sample`](Self::begin_sample) takes these requests in the next step too, though nobody
    /// has told of what the present one sampled: what they draw must depend on no token that only the host
    /// hears of. Holds for as long as a request lives.
    fn can_begin(&self, rids: &[RequestId]) -> bool {
        let _ = rids;
        false
    }

    /// As [`sample`](Self::sample), but does not wait for the device: [`end_sample`](Self::end_sample) gives the
    /// answer, and `tokens`, u32 `[rids]` where the logits are, has the tokens for work that follows on the
    /// stream; of a bad row, an id that no vocabulary has. The next step may be planned, and may begin to
    /// sample, before this one is asked for; the one after that may not.
    fn begin_sample(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        tokens: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let _ = (ctx, rids, logits, tokens);
        Err(crate::ResourceError::unsupported("this sampler waits for every step"))
    }

    /// Waits for what [`begin_sample`](Self::begin_sample) of a step began. Once for each step.
    fn end_sample(&self, step: StepId, out: &mut [Sampled]) -> Result<()> {
        let _ = (step, out);
        Err(crate::ResourceError::unsupported("this sampler waits for every step"))
    }
}
