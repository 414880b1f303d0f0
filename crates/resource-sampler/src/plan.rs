//! Laying a step out: every request in its seat, parameters written only where they changed.

use resource_api::{
    LabelId, PlanVec, RequestId, ResourceStep, Result, SamplerPlan, SamplerStepOptions, StepContext,
};

use crate::params::SamplingParams;
use crate::requests::{Request, Requests};

/// The seat of padding rows.
const PADDING_SEAT: u32 = 0;

/// A request's seat: one for each slot, so that a request keeps its own.
fn seat_of(rid: RequestId) -> u32 {
    if rid.is_padding() { PADDING_SEAT } else { rid.slot + 1 }
}

/// Writes the plan.
pub fn lay_out(
    plan: &mut SamplerPlan,
    requests: &Requests,
    step: &ResourceStep<'_>,
    ctx: &StepContext<'_>,
) -> Result<()> {
    let options = step.options::<SamplerStepOptions>()?;
    plan.apply_penalty = options.is_none_or(|o| o.apply_penalty);
    let rids = ctx.padded_request_ids();
    let seats = rids.iter().map(|&rid| seat_of(rid)).max().unwrap_or(0) as usize + 1;
    if plan.version.len() < seats {
        grow(plan, seats);
    }
    plan.fresh.clear();
    plan.request.resize(rids.len(), RequestId::padding(0)).copy_from_slice(rids);
    plan.seat.resize(rids.len(), PADDING_SEAT);
    let staged = ctx.is_preplan();
    let mut first = 0;
    // Goes on after every request that sits down.
    while let Some((row, request)) = write_rows(plan, requests, &rids[first..], first, staged) {
        sit(plan, plan.seat[row] as usize, request);
        first = row;
    }
    if !ctx.is_preplan() && plan.apply_penalty && requests.any_penalised() {
        note_fresh(plan, requests, step);
    }
    Ok(())
}

/// Writes what moves in every step, from row `first` on. Stops at a row whose request has just come to
/// its seat, or whose parameters have changed.
fn write_rows<'r>(
    plan: &mut SamplerPlan,
    requests: &'r Requests,
    rids: &[RequestId],
    first: usize,
    staged: bool,
) -> Option<(usize, &'r Request)> {
    let SamplerPlan { seat, row, version, position, fresh_len, .. } = plan;
    let version: &[u64] = version;
    // Columns of one length, so that a seat is checked once.
    let seats = version.len();
    let rows = &mut row.as_mut_slice()[..seats];
    let position = &mut position.as_mut_slice()[..seats];
    let fresh_len = &mut fresh_len.as_mut_slice()[..seats];
    for ((row, &rid), seat) in (first..).zip(rids).zip(&mut seat.as_mut_slice()[first..]) {
        // A request that nobody knows is treated as padding: admission has refused it.
        let Some(request) = requests.get(rid) else {
            *seat = PADDING_SEAT;
            continue;
        };
        *seat = seat_of(rid);
        let at = *seat as usize;
        if version[at] != request.version {
            return Some((row, request));
        }
        rows[at] = row as u32;
        if !staged {
            position[at] = request.next_position();
            fresh_len[at] = 0;
        }
    }
    None
}

/// The seat of `rid`, if it has a row in this step.
pub fn planned_seat(plan: &SamplerPlan, rid: RequestId) -> Option<usize> {
    if rid.is_padding() {
        return Some(PADDING_SEAT as usize);
    }
    let seat = seat_of(rid);
    let row = *plan.row.get(seat as usize)? as usize;
    let here = plan.request.get(row) == Some(&rid) && plan.seat.get(row) == Some(&seat);
    here.then_some(seat as usize)
}

/// The parameters in a seat.
pub fn params(plan: &SamplerPlan, seat: usize) -> SamplingParams {
    SamplingParams {
        temperature: plan.temperature[seat],
        top_k: plan.top_k[seat],
        top_p: plan.top_p[seat],
        min_p: plan.min_p[seat],
        repetition_penalty: plan.repetition_penalty[seat],
        seed: plan.seed[seat],
        choice: plan.choice[seat],
    }
}

/// Tokens of this step that the request in a seat had not seen before.
pub fn fresh(plan: &SamplerPlan, seat: usize) -> &[u32] {
    let first = plan.fresh_start[seat] as usize;
    &plan.fresh[first..][..plan.fresh_len[seat] as usize]
}

fn grow(plan: &mut SamplerPlan, seats: usize) {
    // Ahead of what is asked for: requests come one by one.
    let seats = seats.next_power_of_two();
    fn fill<T: Clone>(column: &mut PlanVec<T>, seats: usize, value: T) {
        // A captured graph may still read the old place.
        column.reserve(seats, true);
        column.resize(seats, value);
    }
    let greedy = SamplingParams::GREEDY;
    fill(&mut plan.row, seats, u32::MAX);
    fill(&mut plan.version, seats, 0);
    fill(&mut plan.position, seats, 0);
    fill(&mut plan.seed, seats, greedy.seed);
    fill(&mut plan.choice, seats, greedy.choice);
    fill(&mut plan.temperature, seats, greedy.temperature);
    fill(&mut plan.top_k, seats, greedy.top_k);
    fill(&mut plan.top_p, seats, greedy.top_p);
    fill(&mut plan.min_p, seats, greedy.min_p);
    fill(&mut plan.repetition_penalty, seats, greedy.repetition_penalty);
    fill(&mut plan.fresh_start, seats, 0);
    fill(&mut plan.fresh_len, seats, 0);
}

fn sit(plan: &mut SamplerPlan, seat: usize, request: &Request) {
    let params = &request.params;
    plan.version.as_mut_slice()[seat] = request.version;
    plan.seed.as_mut_slice()[seat] = params.seed;
    plan.choice.as_mut_slice()[seat] = params.choice;
    plan.temperature.as_mut_slice()[seat] = params.temperature;
    plan.top_k.as_mut_slice()[seat] = params.top_k;
    plan.top_p.as_mut_slice()[seat] = params.top_p;
    plan.min_p.as_mut_slice()[seat] = params.min_p;
    plan.repetition_penalty.as_mut_slice()[seat] = params.repetition_penalty;
}

/// The tokens that each segment of a `main` stream feeds. Other streams (a guidance branch, a
/// context) are not what the request repeats.
pub fn main_tokens<'s>(
    step: &'s ResourceStep<'_>,
) -> impl Iterator<Item = (RequestId, &'s [u32])> + 's {
    let (segments, mut rest) = (step.segments(), step.token_ids());
    (0..segments.len()).filter_map(move |i| {
        let own;
        (own, rest) = rest.split_at(rest.len().min(segments.span[i] as usize));
        let counts = segments.label[i] == LabelId::MAIN && !own.is_empty();
        counts.then_some((segments.request[i], own))
    })
}

fn note_fresh(plan: &mut SamplerPlan, requests: &Requests, step: &ResourceStep<'_>) {
    for (rid, tokens) in main_tokens(step) {
        let Some(seen) = requests.get(rid).and_then(|r| r.seen.as_ref()) else { continue };
        let Some(seat) = planned_seat(plan, rid) else { continue };
        let first = plan.fresh.len();
        for &token in tokens.iter().filter(|&&t| !seen.contains(t)) {
            plan.fresh.push(token);
        }
        let len = sort_and_dedup(&mut plan.fresh.as_mut_slice()[first..]);
        plan.fresh.resize(first + len, 0);
        plan.fresh_start.as_mut_slice()[seat] = first as u32;
        plan.fresh_len.as_mut_slice()[seat] = len as u32;
    }
}

/// Sorts, moves the distinct values to the front and counts them.
fn sort_and_dedup(values: &mut [u32]) -> usize {
    values.sort_unstable();
    let mut kept = 0;
    for i in 0..values.len() {
        if kept == 0 || values[i] != values[kept - 1] {
            values[kept] = values[i];
            kept += 1;
        }
    }
    kept
}
