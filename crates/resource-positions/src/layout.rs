//! Giving every token of a step its position.

use resource_api::{
    KvGroup, KvPlan, LabelId, PositionGroup, PositionStepOptions, PositionsPlan, RequestId,
    ResourceError, ResourceStep, Result, Segment, StepContext, StepId,
};

use crate::counters::{Counters, Stream};
use crate::spec::Scheme;

/// How a resource counts.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub scheme: Scheme,
    pub block_step: u32,
    /// Ids are below this.
    pub limit: u32,
}

impl Rules {
    /// By how much a span advances the counter when the step does not say.
    fn advance(&self, span: u32) -> u32 {
        match self.scheme {
            Scheme::Sequential => span,
            Scheme::Block if span > 0 => self.block_step,
            Scheme::Block => 0,
        }
    }

    #[inline]
    fn write(&self, ids: &mut [u32], start: u32) {
        if let [id] = ids {
            *id = start;
            return;
        }
        match self.scheme {
            Scheme::Sequential => (start..).zip(ids).for_each(|(p, id)| *id = p),
            Scheme::Block => ids.fill(start),
        }
    }

    /// The largest id that a span starting here gets.
    fn last(&self, start: u32, span: u32) -> u32 {
        match self.scheme {
            Scheme::Sequential => start.saturating_add(span.saturating_sub(1)),
            Scheme::Block => start,
        }
    }
}

/// A segment, with what the step's options say about it.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub segment: Segment,
    /// By how much it advances its stream.
    pub advance: u32,
    /// Its explicit ids, if there are any.
    pub ids: Option<&'a [u32]>,
}

/// The parts of a step.
///
/// # Errors
/// `INVALID` when the options do not fit the segments.
pub fn parts<'s>(
    rules: Rules,
    step: &'s ResourceStep<'_>,
    options: Option<&'s PositionStepOptions>,
) -> Result<impl Iterator<Item = Part<'s>>> {
    let segments = step.segments();
    let ids = options.map_or(&[][..], |o| &o.pos_ids);
    let advance = options.map_or(&[][..], |o| &o.advance);
    if !ids.is_empty() && ids.len() != segments.num_tokens() {
        return Err(ResourceError::invalid(format!(
            "the step has {} tokens but {} explicit position ids",
            segments.num_tokens(),
            ids.len()
        )));
    }
    if !advance.is_empty() && advance.len() != segments.len() {
        return Err(ResourceError::invalid(format!(
            "the step has {} segments but {} advances",
            segments.len(),
            advance.len()
        )));
    }
    let mut rest = ids;
    Ok((0..segments.len()).map(move |i| {
        let (request_id, label) = (segments.request[i], segments.label[i]);
        let segment = Segment { request_id, label, span: segments.span[i] };
        let advance = advance.get(i).copied().unwrap_or_else(|| rules.advance(segment.span));
        let own;
        (own, rest) = rest.split_at(rest.len().min(segment.span as usize));
        Part { segment, advance, ids: (!ids.is_empty()).then_some(own) }
    }))
}

/// The parts of a step without options.
pub fn plain_parts<'s>(
    rules: Rules,
    step: &'s ResourceStep<'_>,
) -> impl Iterator<Item = Part<'s>> + Clone {
    let segments = step.segments();
    let rows = segments.request.iter().zip(segments.label).zip(segments.span);
    rows.map(move |((&request_id, &label), &span)| Part {
        segment: Segment { request_id, label, span },
        advance: rules.advance(span),
        ids: None,
    })
}

/// The position of the first token of a segment. A staged step starts after what the step before it
/// is still going to add.
#[inline]
pub fn start(stream: Option<&Stream>, step: StepId, staged: bool) -> u32 {
    let Some(stream) = stream else { return 0 };
    match staged {
        true => stream.next().saturating_add(stream.pending_besides(step)),
        false => stream.next(),
    }
}

/// The largest position of a segment that starts at `start`; `None` when it adds no token.
#[inline]
pub fn last_position(rules: Rules, start: u32, part: &Part<'_>) -> Option<u32> {
    match part.ids {
        Some(ids) => ids.iter().copied().max(),
        None if part.segment.span == 0 => None,
        None => Some(rules.last(start, part.segment.span)),
    }
}

/// Copies where the rows start from what admission noted, where that is all there is to a plan: one
/// group, one token a row. Says whether it was.
fn copy_starts(
    plan: &mut PositionsPlan,
    counters: &Counters,
    step: &ResourceStep<'_>,
    ctx: &StepContext<'_>,
    kv: &KvPlan,
) -> bool {
    let ([group], segments) = (&kv.groups[..], step.segments()) else { return false };
    let singles = segments.span.iter().fold(0, |any, span| any | (span ^ 1)) == 0;
    if !singles
        || !group.label.is_all(segments.label)
        || !RequestId::all_equal(&kv.request, segments.request)
        || kv.span[..] != *segments.span
    {
        return false;
    }
    let edit = counters.edit();
    let starts = edit.admitted.starts(ctx.step(), ctx.is_preplan(), segments.request);
    let Some(starts) = starts else { return false };
    plan.groups.clear();
    plan.groups.push(PositionGroup {
        label: group.label,
        first_token: 0,
        num_tokens: group.num_tokens,
    });
    plan.pos_ids.resize(starts.len(), 0).copy_from_slice(starts);
    plan.step = ctx.step();
    true
}

/// Lays the step out in the row order of the cache's plan.
///
/// # Errors
/// `INVALID` when the cache's rows are not the step's segments.
pub fn lay_out(
    plan: &mut PositionsPlan,
    rules: Rules,
    counters: &Counters,
    step: &ResourceStep<'_>,
    ctx: &StepContext<'_>,
    kv: &KvPlan,
) -> Result<()> {
    let options = step.options::<PositionStepOptions>()?;
    if options.is_none() && copy_starts(plan, counters, step, ctx, kv) {
        return Ok(());
    }
    let tokens: usize = kv.groups.iter().map(|g| g.num_tokens as usize).sum();
    plan.groups.clear();
    let ids = plan.pos_ids.resize(tokens, 0);
    let mut done = 0;
    for group in kv.groups.iter() {
        let group_ids = &mut ids[done..done + group.num_tokens as usize];
        let mut rows = Rows { kv, group, row: 0, ids: group_ids };
        let combined = options.map_or(&[][..], |o| &o.combined_labels);
        if combined.iter().any(|c| c.combined == group.label) {
            for member in combined.iter().filter(|c| c.combined == group.label) {
                rows.add(member.source, rules, counters, step, ctx, options)?;
            }
        } else if options.is_none() {
            let own = plain_parts(rules, step).filter(|p| p.segment.label == group.label);
            rows.add_parts(own, rules, counters, ctx)?;
        } else {
            rows.add(group.label, rules, counters, step, ctx, options)?;
        }
        rows.finish()?;
        plan.groups.push(PositionGroup {
            label: group.label,
            first_token: done as u32,
            num_tokens: group.num_tokens,
        });
        done += group.num_tokens as usize;
    }
    plan.step = ctx.step();
    Ok(())
}

/// The rows of one group that have no ids yet.
struct Rows<'a> {
    kv: &'a KvPlan,
    group: &'a KvGroup,
    row: u32,
    ids: &'a mut [u32],
}

impl Rows<'_> {
    /// Fills the rows of one stream label.
    fn add(
        &mut self,
        label: LabelId,
        rules: Rules,
        counters: &Counters,
        step: &ResourceStep<'_>,
        ctx: &StepContext<'_>,
        options: Option<&PositionStepOptions>,
    ) -> Result<()> {
        let own = parts(rules, step, options)?.filter(|p| p.segment.label == label);
        self.add_parts(own, rules, counters, ctx)
    }

    #[inline]
    fn add_parts<'p>(
        &mut self,
        parts: impl Iterator<Item = Part<'p>>,
        rules: Rules,
        counters: &Counters,
        ctx: &StepContext<'_>,
    ) -> Result<()> {
        for part in parts {
            let Segment { request_id, label, span } = part.segment;
            let row = (self.group.first_row + self.row) as usize;
            let planned = (self.kv.request.get(row), self.kv.span.get(row));
            if self.row == self.group.num_rows || planned != (Some(&request_id), Some(&span)) {
                return Err(self.mismatch());
            }
            let Some((ids, rest)) =
                std::mem::take(&mut self.ids).split_at_mut_checked(span as usize)
            else {
                return Err(self.mismatch());
            };
            match part.ids {
                Some(explicit) => ids.copy_from_slice(explicit),
                None => {
                    let stream = counters.live(request_id).and_then(|live| live.find(label));
                    rules.write(ids, start(stream, ctx.step(), ctx.is_preplan()));
                }
            }
            self.ids = rest;
            self.row += 1;
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        match self.row == self.group.num_rows && self.ids.is_empty() {
            true => Ok(()),
            false => Err(self.mismatch()),
        }
    }

    fn mismatch(&self) -> ResourceError {
        ResourceError::invalid(format!(
            "row {} of plan label {} in the cache's plan is not the step's segment: give both the \
             same segments, and the labels that the cache combines in combined_labels too",
            self.row, self.group.label.0
        ))
    }
}
