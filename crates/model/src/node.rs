//! What a runner needs from a piece of a model: its defaults for resources, and its forward pass.
//!
//! A node knows the capabilities of `resource-api` that it calls, never a kind that offers them. A
//! runner plans a step on the node's resources, then calls [`Node::forward`] with the same context.

use device::Parallel;
use resource_api::{EngineLimits, RequestId, ResourceError, Result, StepContext, StepId};
use serde_json::{Map, Value};

mod resources;
mod step;

pub use resources::{NodeResource, NodeResources};
pub use step::{Fault, NOT_SAMPLED, Score, StepInput, StepOutput};

/// A piece of a model that runs as one forward pass.
///
/// One thread at a time is in [`forward`](Self::forward); further callers wait. Everything else may
/// be called from any thread.
pub trait Node: Send + Sync {
    /// Its name in the config's `nodes` lists.
    fn name(&self) -> &str;

    /// The walks it takes part in.
    fn walks(&self) -> &[&str];

    /// What the model says about the settings of resources of `kind`: only keys that this kind has,
    /// nothing for a kind that the model has nothing to say about.
    fn resource_defaults(&self, kind: &str) -> Map<String, Value>;

    /// Resolves the capabilities that the forward pass calls and makes room for the largest step
    /// that `limits` allow. Called when the resources are built; the node holds on to them until it
    /// is detached or dropped, which must come before they are.
    ///
    /// # Errors
    /// `NOT_FOUND` or `INVALID` naming the config section when a capability is offered by none or
    /// by several of the resources, `WRONG_STATE` while it has some, `EXHAUSTED` without the memory.
    fn attach(&self, resources: &NodeResources<'_>, limits: &EngineLimits) -> Result<()>;

    /// Lets go of what [`attach`](Self::attach) resolved, and of all device work recorded with it, so
    /// that it may be called once more. Not while a forward pass runs.
    fn detach(&self) {}

    /// Whether [`forward`](Self::forward) captures: called under a context that says so, with a lease
    /// of a bucket, it records the step's device work in place of sampling, and replays it for later
    /// steps under the same lease.
    fn captures(&self) -> bool {
        false
    }

    /// Runs a step that all resources have planned, and samples where `input` asks for it.
    ///
    /// A row of the result depends on its own request's tokens alone, whatever else is in the step
    /// and however the prompt was cut into steps. Allocates only for a step larger than any before.
    ///
    /// # Errors
    /// `INVALID` for an input that contradicts itself or a token that is not in the vocabulary,
    /// before anything is written; otherwise the error of the resource that failed.
    fn forward(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        out: &mut StepOutput,
        parallel: &dyn Parallel,
    ) -> Result<()>;

    /// Whether a step may be [launched](Self::launch), and the next one behind it before it has
    /// [landed](Self::land): it scores nothing, reports no best tokens, and its requests draw by nothing that
    /// only the host hears of.
    fn can_launch(&self, input: &StepInput<'_>) -> bool {
        let _ = input;
        false
    }

    /// Begins what [`forward`](Self::forward) does, without waiting for its samples: [`land`](Self::land)
    /// gives them. Tokens may be samples of the step launched before this one
    /// ([`StepInput::from_sample`]), which need not have landed.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    fn launch(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let _ = (ctx, input, parallel);
        Err(ResourceError::unsupported("this node waits for every step"))
    }

    /// Waits for the samples of a launched step, which were asked for `requests`. Steps land in the order in
    /// which they were launched; one whose samples nobody wants need not.
    ///
    /// # Errors
    /// What became of the device meanwhile.
    fn land(&self, step: StepId, requests: &[RequestId], out: &mut StepOutput) -> Result<()> {
        let _ = (step, requests, out);
        Err(ResourceError::unsupported("this node waits for every step"))
    }
}
