//! The cache that an attention resource was built on.

use resource_api::{
    DType, Dependency, EngineResourceInfo, KvCache, KvCacheHandle, KvFacts, KvLayer, KvPlan,
    ResourceError, Result, StepContext,
};

/// Most (token, query head) pairs of a block: their scores of one chunk stay in the second-level
/// cache while keys and values pass by once for all of them.
pub(crate) const BLOCK_ROWS: u32 = 48;

/// A dependency of kind `kv`: where its plan is filed, what it looks like, and how to read it.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    index: u32,
    facts: KvFacts,
    handle: KvCacheHandle,
}

impl Cache {
    /// The declared dependency `key`.
    ///
    /// # Errors
    /// `NOT_FOUND` when it is not declared or is no cache; `UNSUPPORTED` for a geometry, a type or
    /// a device that no kernel here has.
    pub fn new(info: &EngineResourceInfo, key: &str) -> Result<Self> {
        let dependency: &Dependency = info.dependency(key)?;
        let facts = *dependency.facts::<KvFacts>()?;
        check(&facts).map_err(|e| e.within(format!("cache `{key}`")))?;
        Ok(Self { index: dependency.index, facts, handle: dependency.capability()? })
    }

    /// Layers.
    pub fn num_layers(&self) -> u32 {
        self.facts.num_layers
    }

    /// Elements per head.
    pub fn head_dim(&self) -> u32 {
        self.facts.head_dim
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.facts.dtype
    }

    /// Longest stream in tokens.
    pub fn max_seq_len(&self) -> u32 {
        self.facts.max_seq_len
    }

    /// Query heads.
    pub fn query_heads(&self) -> usize {
        self.facts.num_qo_heads as usize
    }

    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.facts.num_kv_heads as usize
    }

    /// Token slots per page.
    pub fn page_size(&self) -> u32 {
        self.facts.page_size
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        let group = self.facts.num_qo_heads / self.facts.num_kv_heads;
        (BLOCK_ROWS / group).clamp(1, 32)
    }

    /// The cache's plan of this step.
    pub fn plan<'a>(&self, ctx: &'a StepContext<'_>) -> Result<&'a KvPlan> {
        ctx.plan_result(self.index)
    }

    /// Pages of a layer.
    pub fn layer(&self, layer: u32) -> Result<KvLayer<'_>> {
        self.handle.layer_view(layer)
    }
}

fn check(facts: &KvFacts) -> Result<()> {
    let KvFacts { num_qo_heads: heads, num_kv_heads: kv_heads, .. } = *facts;
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(ResourceError::unsupported(format!(
            "{heads} query heads are no multiple of {kv_heads} key/value heads"
        )));
    }
    if facts.head_dim == 0 || facts.page_size == 0 {
        return Err(ResourceError::unsupported(format!(
            "head_dim {} and page_size {} must be above 0",
            facts.head_dim, facts.page_size
        )));
    }
    let known = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8];
    if !known.contains(&facts.dtype) {
        return Err(ResourceError::unsupported(format!(
            "attention reads f32, f16, bf16, fp8 and i8, not {}: set kv_dtype to one of them",
            facts.dtype.name()
        )));
    }
    Ok(())
}
