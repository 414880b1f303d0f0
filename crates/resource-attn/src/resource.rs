//! Kind `attention`.

use crate::cache::Cache;
use crate::cpu;
use crate::cuda::{self, Cuda, RowColumns};
use crate::layout::{Layout, Shape};
use crate::plan::AttentionPlan;
use crate::planned::Planned;
use crate::spec::{AttentionSettings, Scoring};
use resource_api::{
    Attending, Attention, AttentionHandle, AttentionStepOptions, Capability, EngineResourceInfo,
    HostServices, HostServicesHandle, KvPlan, LabelId, NodeResourceSpec, Plan, PlanSlots, Resource,
    ResourceError, ResourceKey, ResourceKind, ResourceStep, Result, StepContext, TensorView,
    TensorViewMut,
};
use std::sync::Arc;

/// Attention of a step's tokens over their own streams.
///
/// Plans what its cache plans: every group and row of [`KvPlan`], in the same order.
#[derive(Debug)]
pub struct PagedAttention {
    settings: AttentionSettings,
    cache: Cache,
    scoring: Scoring,
    shape: Shape,
    plans: PlanSlots<AttentionPlan>,
    planned: Planned,
    /// Where the engine runs on a CUDA device.
    cuda: Option<Cuda>,
    index: u32,
    host: HostServicesHandle,
}

impl ResourceKind for PagedAttention {
    type Spec = AttentionSettings;
    const KIND: &'static str = "attention";
    const PROVIDES: &'static [&'static str] = &["attention/1"];

    fn depends_on(spec: &NodeResourceSpec<AttentionSettings>) -> Vec<ResourceKey> {
        vec![spec.settings.kv_cache.clone()]
    }

    fn build(spec: NodeResourceSpec<AttentionSettings>, info: &EngineResourceInfo) -> Result<Self> {
        device::use_features_of(&info.host)?;
        let settings = spec.settings;
        let within = |e: ResourceError| e.within(format!("[resources.{}]", spec.resource_key));
        let cache = Cache::new(info, &settings.kv_cache).map_err(within)?;
        let AttentionSettings { sm_scale, logit_softcap, sliding_window, .. } = settings;
        let scoring = Scoring::new(cache.head_dim(), sm_scale, logit_softcap, sliding_window)
            .map_err(within)?;
        if let Some(layer) = settings.full_layers.iter().find(|&&l| l >= cache.num_layers()) {
            return Err(within(ResourceError::invalid(format!(
                "full_layers names layer {layer}, but the cache has {} layers",
                cache.num_layers()
            ))));
        }
        // One plan serves all layers, so it is cut for the most that any of them reads.
        let window = sliding_window.filter(|_| settings.full_layers.is_empty());
        let (block_tokens, threads) = (cache.block_tokens(), info.host.threads());
        let shape = Shape { window, block_tokens, threads };
        let cuda = (!info.device.is_cpu()).then(|| Cuda::new(info, &cache)).transpose();
        let (index, host) = (info.index, info.host.clone());
        let (cuda, plans) = (cuda.map_err(within)?, PlanSlots::new());
        let planned = Planned::default();
        Ok(Self { settings, cache, scoring, shape, plans, planned, cuda, index, host })
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![AttentionHandle::new(this.clone()).into()]
    }
}

impl Resource for PagedAttention {
    fn depends_on(&self) -> Vec<String> {
        vec![self.settings.kv_cache.clone()]
    }

    fn inspect(&self) -> String {
        serde_json::json!({
            "kind": Self::KIND,
            "settings": self.settings,
            "planned": self.planned.to_json(),
            "slots": self.plans.used().collect::<Vec<_>>(),
        })
        .to_string()
    }

    /// It keeps nothing for a request, so it misses nothing.
    fn prefix_skip_safe(&self) -> bool {
        true
    }

    /// A slot's plan depends on nothing but the step, so a staged one needs no undoing.
    fn supports_preplan(&self) -> bool {
        true
    }

    fn takes_outputs_late(&self) -> bool {
        true
    }

    fn fingerprint(&self) -> Option<Vec<u8>> {
        let mut bytes = self.scoring.fingerprint(Self::KIND);
        if !self.settings.full_layers.is_empty() {
            bytes.extend(format!(" full={:?}", self.settings.full_layers).bytes());
        }
        Some(bytes)
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        let options = step.options::<AttentionStepOptions>()?.copied().unwrap_or_default();
        let kv = self.cache.plan(ctx)?;
        self.plans.plan(ctx, |plan| {
            lay_out(plan, kv, options.causal, &self.shape);
            plan.device = RowColumns::of(kv);
            self.planned.note(plan);
            Ok(())
        })
    }
}

fn lay_out(plan: &mut AttentionPlan, kv: &KvPlan, causal: bool, shape: &Shape) {
    let mut layout = Layout::new(plan, causal);
    for group in kv.groups.iter() {
        layout.group(group.label);
        let first = group.first_row as usize;
        let rows = first..first + group.num_rows as usize;
        let (request, span) = (&kv.request[rows.clone()], &kv.span[rows.clone()]);
        let (start, len) = (&kv.start[rows.clone()], &kv.len[rows]);
        layout.rows((0..group.num_rows as usize).map(|i| {
            let reads = (!request[i].is_padding()).then_some((first + i) as u32);
            (reads, span[i], start[i], len[i])
        }));
    }
    layout.finish(shape);
}

impl PagedAttention {
    fn scoring_of(&self, layer: u32) -> Scoring {
        let mut scoring = self.scoring;
        if self.settings.full_layers.contains(&layer) {
            scoring.window = None;
        }
        scoring
    }
}

impl Attention for PagedAttention {
    fn run(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let plan: &AttentionPlan = ctx.plan_result(self.index)?;
        let group = plan.group(label, |l| self.host.label_name(l))?;
        let scoring = self.scoring_of(layer);
        let (kv, cache, scoring) = (self.cache.plan(ctx)?, &self.cache, &scoring);
        if let Some(cuda) = &self.cuda {
            let work = cuda::Work { ctx, plan, group, kv, cache, scoring };
            return cuda.run(&work, layer, q, out);
        }
        let work = cpu::Work {
            plan,
            group,
            kv,
            cache,
            scoring,
            planned_window: self.shape.window,
            host: &self.host,
        };
        cpu::attend(&work, layer, q, out)
    }

    fn qo_indptr(&self, ctx: &StepContext<'_>, label: LabelId, indptr: &mut [u32]) -> Result<u32> {
        let plan: &AttentionPlan = ctx.plan_result(self.index)?;
        let from = plan.indptr(plan.group(label, |l| self.host.label_name(l))?);
        let have = indptr.len();
        let Some(to) = indptr.get_mut(..from.len()) else {
            return Err(ResourceError::invalid(format!(
                "qo_indptr has {} entries, the buffer {have}",
                from.len()
            ))
            .with_amounts(from.len() as u64, have as u64));
        };
        to.copy_from_slice(from);
        Ok(from.len() as u32)
    }

    fn select_last_hidden(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        hidden: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let plan: &AttentionPlan = ctx.plan_result(self.index)?;
        let group = plan.group(label, |l| self.host.label_name(l))?;
        match &self.cuda {
            Some(cuda) => cuda.select_last(ctx, plan, group, hidden, out),
            None => cpu::select_last(plan.indptr(group), hidden, out),
        }
    }

    fn attending(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
    ) -> Result<Option<Attending>> {
        let Some(cuda) = &self.cuda else { return Ok(None) };
        let plan: &AttentionPlan = ctx.plan_result(self.index)?;
        let group = plan.group(label, |l| self.host.label_name(l))?;
        let (kv, cache, scoring) = (self.cache.plan(ctx)?, &self.cache, &self.scoring_of(layer));
        cuda.describe(&cuda::Work { ctx, plan, group, kv, cache, scoring }, layer)
    }
}
