//! `logits.processor/1`: what a sampler accepts from resources built after it (grammars, biases).

use crate::Result;
use crate::id::RequestId;
use crate::step::StepContext;
use crate::tensor::TensorViewMut;
use resource_api_macros::capability;

/// Changes logits before sampling. Called in build order, by the sampler, in the step's forward.
#[capability(id = "logits.processor", major = 1, path = crate)]
pub trait LogitsProcessor: Send + Sync {
    /// Edits the f32 rows `[rids, vocabulary]` in place: in host memory, or where
    /// [`takes_device`](Self::takes_device) says so.
    fn process(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
    ) -> Result<()>;

    /// Whether it takes logits in the memory of the device that the engine runs on. Otherwise the sampler
    /// copies them to the host and back, which takes time in proportion to rows and vocabulary.
    fn takes_device(&self) -> bool {
        false
    }
}
