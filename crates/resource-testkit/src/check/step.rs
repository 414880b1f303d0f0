//! A step as the kit describes it, and the buffers that it crosses in.

use std::fmt;

use resource_api::{
    BucketKey, Fork, KvStepOptions, LabelId, NodeId, PlanVec, RequestId, ResourceStep, Segments,
    SlotLease, StepContext, StepHead, StepId, TypedRef, WalkId,
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

    /// The labels, each once, in order of first appearance.
    pub fn labels(&self) -> Vec<LabelId> {
        let mut labels: Vec<LabelId> = Vec::new();
        for row in &self.rows {
            if !labels.contains(&row.label) {
                labels.push(row.label);
            }
        }
        labels
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
    let list = |forks: &[Fork]| {
        let mut list = PlanVec::default();
        forks.iter().for_each(|&fork| list.push(fork));
        list
    };
    KvStepOptions {
        commit: !options.discard,
        pre_forks: list(&options.pre),
        post_forks: list(&options.post),
        ..KvStepOptions::default()
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
