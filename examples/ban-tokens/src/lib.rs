//! A kind in one file: `ban_tokens` makes a sampler never choose some tokens.
//!
//! It offers `logits.processor/1`. The sampler accepts those from resources that are built after it,
//! which is why this kind depends on the sampler.

#![forbid(unsafe_code)]

use std::sync::Arc;

use resource_api::{
    Capability, EngineResourceInfo, LogitsProcessor, LogitsProcessorHandle, NodeResourceSpec,
    RequestId, Resource, ResourceError, ResourceKey, ResourceKind, Result, StepContext,
    TensorViewMut,
};

/// The settings of a `[resources.<key>]` section.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Key of the sampler.
    sampler: ResourceKey,
    /// Ids that must not be chosen.
    tokens: Vec<u32>,
}

/// The resource. It keeps nothing for a request, so most of `Resource`'s defaults are right.
pub struct BanTokens(Settings);

impl Resource for BanTokens {
    fn depends_on(&self) -> Vec<String> {
        vec![self.0.sampler.clone()]
    }
}

impl ResourceKind for BanTokens {
    type Spec = Settings;
    const KIND: &'static str = "ban_tokens";
    const PROVIDES: &'static [&'static str] = &["logits.processor/1"];

    fn depends_on(spec: &NodeResourceSpec<Settings>) -> Vec<ResourceKey> {
        vec![spec.settings.sampler.clone()]
    }

    fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(BanTokens(spec.settings))
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![LogitsProcessorHandle::new(this.clone()).into()]
    }
}

impl LogitsProcessor for BanTokens {
    fn process(
        &self,
        _ctx: &StepContext<'_>,
        _rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let vocabulary = *logits.shape().last().unwrap_or(&0) as usize;
        let rows = logits
            .as_mut_slice::<f32>()
            .ok_or_else(|| ResourceError::invalid("ban_tokens edits f32 logits in host memory"))?;
        for row in rows.chunks_exact_mut(vocabulary.max(1)) {
            for &token in &self.0.tokens {
                if let Some(logit) = row.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }
}

resource_api::export_plugin!(BanTokens);
