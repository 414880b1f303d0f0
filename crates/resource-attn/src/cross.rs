//! Kind `cross_attention`.

use crate::cache::Cache;
use crate::cpu;
use crate::cuda::{self, Cuda};
use crate::layout::{Layout, Shape};
use crate::plan::AttentionPlan;
use crate::planned::Planned;
use crate::spec::{CrossAttentionSettings, Scoring};
use resource_api::{
    Capability, CrossAttention, CrossAttentionHandle, EngineResourceInfo, HostServices,
    HostServicesHandle, KvPlan, LabelId, NodeResourceSpec, Plan, PlanSlots, RequestId, Resource,
    ResourceError, ResourceKey, ResourceKind, ResourceStep, Result, StepContext, TensorView,
    TensorViewMut,
};
use std::sync::Arc;

/// Attention of a step's tokens over a context: another stream of the same request, which some
/// earlier step (or this one) wrote, seen whole by every token.
///
/// A step that has queries carries a segment of the context label for each request, of span 0 once
/// the context is written. Queries are packed as the query cache plans them, or, without one, as
/// the segments of this resource's step: grouped by label in order of first appearance.
#[derive(Debug)]
pub struct PagedCrossAttention {
    settings: CrossAttentionSettings,
    cache: Cache,
    /// Cache that packs the queries, and whether it is the one that holds the contexts.
    queries: Option<(Cache, bool)>,
    context: LabelId,
    scoring: Scoring,
    shape: Shape,
    plans: PlanSlots<AttentionPlan>,
    planned: Planned,
    /// Where the engine runs on a CUDA device.
    cuda: Option<Cuda>,
    index: u32,
    host: HostServicesHandle,
}

fn dependencies(settings: &CrossAttentionSettings) -> Vec<ResourceKey> {
    let mut keys = vec![settings.kv_cache.clone()];
    keys.extend(settings.query_kv_cache.clone().filter(|key| *key != settings.kv_cache));
    keys
}

impl ResourceKind for PagedCrossAttention {
    type Spec = CrossAttentionSettings;
    const KIND: &'static str = "cross_attention";
    const PROVIDES: &'static [&'static str] = &["cross_attention/1"];

    fn depends_on(spec: &NodeResourceSpec<CrossAttentionSettings>) -> Vec<ResourceKey> {
        dependencies(&spec.settings)
    }

    fn build(
        spec: NodeResourceSpec<CrossAttentionSettings>,
        info: &EngineResourceInfo,
    ) -> Result<Self> {
        device::use_features_of(&info.host)?;
        let settings = spec.settings;
        let within = |e: ResourceError| e.within(format!("[resources.{}]", spec.resource_key));
        let cache = Cache::new(info, &settings.kv_cache).map_err(within)?;
        let queries = settings
            .query_kv_cache
            .as_ref()
            .map(|key| Ok((Cache::new(info, key)?, *key == settings.kv_cache)))
            .transpose()
            .map_err(within)?;
        let scoring =
            Scoring::new(cache.head_dim(), settings.sm_scale, None, None).map_err(within)?;
        let (block_tokens, threads) = (cache.block_tokens(), info.host.threads());
        let shape = Shape { window: None, block_tokens, threads };
        let cuda = (!info.device.is_cpu()).then(|| Cuda::new(info, &cache)).transpose();
        Ok(Self {
            cuda: cuda.map_err(within)?,
            context: info.host.label_id(&settings.context_label),
            settings,
            cache,
            queries,
            scoring,
            shape,
            plans: PlanSlots::new(),
            planned: Planned::default(),
            index: info.index,
            host: info.host.clone(),
        })
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![CrossAttentionHandle::new(this.clone()).into()]
    }
}

impl Resource for PagedCrossAttention {
    fn depends_on(&self) -> Vec<String> {
        dependencies(&self.settings)
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
        Some(self.scoring.fingerprint(Self::KIND))
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        let kv = self.cache.plan(ctx)?;
        let mut contexts = Contexts::new(kv, self.context);
        let queries = match &self.queries {
            Some((cache, shared)) => Some((cache.plan(ctx)?, *shared)),
            None => None,
        };
        self.plans.plan(ctx, |plan| {
            let mut layout = Layout::new(plan, false);
            match queries {
                Some((plan, shared)) => {
                    self.rows_of_plan(plan, shared, &mut contexts, &mut layout)?;
                }
                None => self.rows_of_step(step, &mut contexts, &mut layout)?,
            }
            layout.finish(&self.shape);
            self.planned.note(plan);
            self.cuda.as_ref().map_or(Ok(()), |cuda| cuda.upload(ctx, plan, kv))
        })
    }
}

impl PagedCrossAttention {
    /// Packs queries as the query cache does.
    fn rows_of_plan(
        &self,
        queries: &KvPlan,
        shared: bool,
        contexts: &mut Contexts<'_>,
        layout: &mut Layout<'_>,
    ) -> Result<()> {
        for group in queries.groups.iter().filter(|g| !(shared && g.label == self.context)) {
            layout.group(group.label);
            for r in group.first_row as usize..(group.first_row + group.num_rows) as usize {
                self.row(queries.request[r], queries.span[r], contexts, layout)?;
            }
        }
        Ok(())
    }

    /// Packs queries as the step's segments say.
    fn rows_of_step(
        &self,
        step: &ResourceStep<'_>,
        contexts: &mut Contexts<'_>,
        layout: &mut Layout<'_>,
    ) -> Result<()> {
        let segments = step.segments();
        for (i, &label) in segments.label.iter().enumerate() {
            if label == self.context || segments.label[..i].contains(&label) {
                continue;
            }
            layout.group(label);
            for segment in segments.iter().skip(i).filter(|s| s.label == label) {
                self.row(segment.request_id, segment.span, contexts, layout)?;
            }
        }
        Ok(())
    }

    fn row(
        &self,
        request: RequestId,
        tokens: u32,
        contexts: &mut Contexts<'_>,
        layout: &mut Layout<'_>,
    ) -> Result<()> {
        let context = if request.is_padding() { None } else { contexts.find(request) };
        if context.is_none() && tokens > 0 && !request.is_padding() {
            return Err(self.no_context(request, contexts.kv));
        }
        let keys = context.map_or(0, |row| contexts.kv.len[row as usize]);
        layout.row(context, tokens, 0, keys);
        Ok(())
    }

    fn no_context(&self, request: RequestId, kv: &KvPlan) -> ResourceError {
        let planned: Vec<_> = kv.groups.iter().map(|g| self.host.label_name(g.label)).collect();
        ResourceError::wrong_state(format!(
            "{request} has queries but no segment of label `{}` in `{}` (planned labels: {}); \
             give it one of span 0",
            self.settings.context_label,
            self.settings.kv_cache,
            if planned.is_empty() { "none".into() } else { planned.join(", ") }
        ))
    }
}

/// The context rows of a step, found by request. Queries come in the same order as a rule, so the
/// search goes on from the last hit.
struct Contexts<'a> {
    kv: &'a KvPlan,
    rows: std::ops::Range<u32>,
    next: u32,
}

impl<'a> Contexts<'a> {
    fn new(kv: &'a KvPlan, label: LabelId) -> Self {
        let rows = kv.group(label).map_or(0..0, |g| g.first_row..g.first_row + g.num_rows);
        Self { kv, next: rows.start, rows }
    }

    fn find(&mut self, request: RequestId) -> Option<u32> {
        let is_of = |r: &u32| self.kv.request[*r as usize] == request;
        let found = (self.next..self.rows.end).chain(self.rows.start..self.next).find(is_of)?;
        self.next = found + 1;
        Some(found)
    }
}

impl CrossAttention for PagedCrossAttention {
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
        let (kv, cache, scoring) = (self.cache.plan(ctx)?, &self.cache, &self.scoring);
        if let Some(cuda) = &self.cuda {
            let work = cuda::Work { ctx, plan, group, kv, cache, scoring };
            return cuda.run(&work, layer, q, out);
        }
        let work =
            cpu::Work { plan, group, kv, cache, scoring, planned_window: None, host: &self.host };
        cpu::attend(&work, layer, q, out)
    }
}
