//! A step as the kit describes it, and the buffers that it crosses in.

use std::fmt;

use resource_api::{
    BucketKey, CombinedLabel, Fork, KvStepOptions, LabelId, NodeId, PlanVec, RequestId,
    ResourceStep, Retention, Segments, SlotLease, StepContext, StepHead, StepId, TypedRef, WalkId,
};

/// A stream's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose stream.
    pub rid: RequestId,
    /// Which one.
    pub label: LabelId,
    /// Tokens that are added.
    pub span: u32,
}

/// What a cache is asked to do beside adding tokens.
#[derive(Clone, Debug, Default)]
pub struct CacheOptions {
    /// Do not keep what the step adds.
    pub discard: bool,
    /// Copies made before the step.
    pub pre: Vec<Fork>,
    /// Copies made after it.
    pub post: Vec<Fork>,
    /// Windows to keep after it.
    pub retain: Vec<Retention>,
    /// Labels that are planned together.
    pub combined: Vec<CombinedLabel>,
}

/// A step.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Its identity; also its epoch.
    pub id: u64,
    /// Its buffer set.
    pub slot: u32,
    /// Its walk.
    pub walk: u32,
    /// Its rows.
    pub rows: Vec<Row>,
    /// Ids of the tokens that its rows add.
    pub tokens: Vec<u32>,
    /// For the resource under check, where that is a cache.
    pub options: Option<CacheOptions>,
    /// Only planned ahead.
    pub staged: bool,
    /// Rows and tokens of the captured shape that it replays.
    pub bucket: Option<(u32, u32)>,
}

impl Step {
    /// The live requests, each once.
    pub fn requests(&self) -> Vec<RequestId> {
        let mut rids: Vec<RequestId> = Vec::new();
        for row in &self.rows {
            if !row.rid.is_padding() && !rids.contains(&row.rid) {
                rids.push(row.rid);
            }
        }
        rids
    }

    fn combined(&self) -> &[CombinedLabel] {
        self.options.as_ref().map_or(&[], |o| &o.combined)
    }

    /// The label that rows of `label` are planned under.
    pub fn plan_label(&self, label: LabelId) -> LabelId {
        let of = self.combined().iter().find(|c| c.source == label);
        of.map_or(label, |c| c.combined)
    }

    /// The plan labels, each once, in order of first appearance.
    pub fn plan_labels(&self) -> Vec<LabelId> {
        let mut labels: Vec<LabelId> = Vec::new();
        for label in self.rows.iter().map(|row| self.plan_label(row.label)) {
            if !labels.contains(&label) {
                labels.push(label);
            }
        }
        labels
    }

    /// The rows of a plan label as they are packed: those of a combined one source by source.
    pub fn rows_of(&self, plan_label: LabelId) -> Vec<usize> {
        let sources = self.combined().iter().filter(|c| c.combined == plan_label);
        let mut sources: Vec<LabelId> = sources.map(|c| c.source).collect();
        if sources.is_empty() {
            sources.push(plan_label);
        }
        let of = |label| (0..self.rows.len()).filter(move |&r| self.rows[r].label == label);
        sources.into_iter().flat_map(of).collect()
    }

    fn lease(&self) -> SlotLease {
        let eager = SlotLease::eager(self.slot, self.id as u32);
        let Some((bs, num_tokens)) = self.bucket else { return eager };
        let bucket = BucketKey { graph_walk: WalkId(self.walk), bs, num_tokens, cg_key_info: 0 };
        SlotLease { bucket, has_bucket: true, ..eager }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.id)?;
        for row in &self.rows {
            write!(f, " {}/{}+{}", row.rid, row.label.0, row.span)?;
        }
        Ok(())
    }
}

/// The buffers behind a step that crosses. They stay where they are, and hold nonsense whenever no
/// call is going on: a resource that keeps a view of a step reads that later.
#[derive(Debug)]
pub struct Columns {
    request: Vec<RequestId>,
    label: Vec<LabelId>,
    span: Vec<u32>,
    tokens: Vec<u32>,
    live: Vec<RequestId>,
    padded: Vec<RequestId>,
    results: Vec<TypedRef<'static>>,
}

/// More than any step of the kit has.
const CAPACITY: usize = 4096;
/// What a kept view finds. Not the id of a padding row: it belongs to nobody.
const NOBODY: RequestId = RequestId::new(0xdead_dead, 0xdead_dead);
const NOTHING: u32 = 0xdead_dead;

impl Default for Columns {
    fn default() -> Self {
        Self {
            request: Vec::with_capacity(CAPACITY),
            label: Vec::with_capacity(CAPACITY),
            span: Vec::with_capacity(CAPACITY),
            tokens: Vec::with_capacity(CAPACITY),
            live: Vec::with_capacity(CAPACITY),
            padded: Vec::with_capacity(CAPACITY),
            results: Vec::with_capacity(64),
        }
    }
}

impl Columns {
    /// Calls `f` with the step as it crosses, and makes the buffers useless afterwards. `for_cache`
    /// adds the step's options.
    pub fn lend<R>(
        &mut self,
        step: &Step,
        for_cache: bool,
        results: &[TypedRef<'static>],
        f: impl FnOnce(&ResourceStep<'_>, &StepContext<'_>) -> R,
    ) -> R {
        self.fill(step, results);
        let options = step.options.as_ref().filter(|_| for_cache).map(cache_options);
        let segments = Segments { request: &self.request, label: &self.label, span: &self.span };
        let mut share = ResourceStep::new(segments).with_token_ids(&self.tokens);
        if let Some(options) = &options {
            share = share.with_options(TypedRef::new(options));
        }
        let head = StepHead {
            step: StepId(step.id),
            epoch: step.id,
            node: NodeId(0),
            graph_walk: WalkId(step.walk),
            lease: step.lease(),
            capture: false,
            is_preplan: step.staged,
            stream: 0,
        };
        let result = f(&share, &StepContext::new(head, &self.live, &self.padded, &self.results));
        self.poison();
        result
    }

    fn fill(&mut self, step: &Step, results: &[TypedRef<'static>]) {
        self.request.clear();
        self.request.extend(step.rows.iter().map(|r| r.rid));
        self.label.clear();
        self.label.extend(step.rows.iter().map(|r| r.label));
        self.span.clear();
        self.span.extend(step.rows.iter().map(|r| r.span));
        self.tokens.clear();
        self.tokens.extend(&step.tokens);
        self.live.clear();
        self.live.extend(step.requests());
        self.padded.clear();
        self.padded.extend(step.requests());
        self.padded.extend(step.rows.iter().map(|r| r.rid).filter(|rid| rid.is_padding()));
        self.results.clear();
        self.results.extend(results);
    }

    fn poison(&mut self) {
        self.request.fill(NOBODY);
        self.label.fill(LabelId(NOTHING));
        self.span.fill(NOTHING);
        self.tokens.fill(NOTHING);
        self.live.fill(NOBODY);
        self.padded.fill(NOBODY);
        self.results.fill(TypedRef::NONE);
    }
}

fn cache_options(options: &CacheOptions) -> KvStepOptions {
    fn list<T: Copy>(items: &[T]) -> PlanVec<T> {
        let mut list = PlanVec::default();
        items.iter().for_each(|&item| list.push(item));
        list
    }
    KvStepOptions {
        commit: !options.discard,
        pre_forks: list(&options.pre),
        post_forks: list(&options.post),
        retention: list(&options.retain),
        combined_labels: list(&options.combined),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_that_is_kept_finds_nonsense_at_the_same_place() {
        let rid = RequestId::new(1, 1);
        let row = Row { rid, label: LabelId::MAIN, span: 2 };
        let step = Step { id: 1, rows: vec![row], tokens: vec![7, 8], ..Step::default() };
        let mut columns = Columns::default();
        let mut kept = Vec::new();
        for round in 0..3 {
            let seen = columns.lend(&step, false, &[], |share, ctx| {
                assert_eq!(
                    (share.segments().request, share.token_ids()),
                    (&[rid][..], &[7, 8][..])
                );
                let segments = share.segments();
                [
                    segments.request.as_ptr() as usize,
                    segments.label.as_ptr() as usize,
                    segments.span.as_ptr() as usize,
                    share.token_ids().as_ptr() as usize,
                    ctx.request_ids().as_ptr() as usize,
                    ctx.padded_request_ids().as_ptr() as usize,
                ]
            });
            if round > 0 {
                assert_eq!(kept, seen);
            }
            kept = seen.to_vec();
            let places = [
                columns.request.as_ptr() as usize,
                columns.label.as_ptr() as usize,
                columns.span.as_ptr() as usize,
                columns.tokens.as_ptr() as usize,
                columns.live.as_ptr() as usize,
                columns.padded.as_ptr() as usize,
            ];
            assert_eq!(kept, places, "the nonsense lies where the view was");
            assert_eq!((&columns.request[..], &columns.live[..]), (&[NOBODY][..], &[NOBODY][..]));
            assert_eq!(
                (&columns.span[..], &columns.tokens[..]),
                (&[NOTHING][..], &[NOTHING; 2][..])
            );
        }
    }
}
