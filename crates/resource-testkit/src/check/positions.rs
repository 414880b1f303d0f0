//! What `positions/1` promises.

use resource_api::{LabelId, Positions, PositionsHandle, PositionsPlan, TensorViewMut};

use super::bench::{A, B, Bench, failed};
use super::random::Random;
use super::report::Verdict;
use super::rig::{Plans, Subject, Watch, told};
use super::rules::{SeededRule, offers};
use super::step::Step;
use super::values::Cells;

pub const RULES: &[SeededRule] = &[
    ("positions/1: ids follow the counters, which follow commits", counting),
    ("positions/1: turning keeps lengths, and position 0 as it is", turning),
];

fn bench(subject: &Subject, watch: Watch) -> Result<Option<Bench>, String> {
    match offers(subject, "positions") {
        true => Bench::new(subject, watch).map(Some),
        false => Ok(None),
    }
}

fn skipped() -> Result<Verdict, String> {
    Ok(Verdict::Skipped("it offers no positions/1".into()))
}

/// The ids of a step's tokens as the capability gives them; the plan must say the same.
fn ids(bench: &Bench, step: &Step, plans: &Plans) -> Result<Vec<u32>, String> {
    let positions = bench.rig.own::<PositionsHandle>().ok_or("positions/1 cannot be opened")?;
    let at = bench.rig.index();
    let plan = plans[at].open::<PositionsPlan>().map_err(|e| told(&e))?;
    let asked = bench
        .rig
        .call(step, at, plans, |_, ctx| positions.pos_ids(ctx, LabelId::MAIN).map(<[u32]>::to_vec));
    let asked = asked.map_err(failed("pos_ids"))?;
    match plan.ids(LabelId::MAIN) {
        Some(planned) if planned == asked => Ok(asked),
        planned => Err(format!("pos_ids gives {asked:?}, its plan has {planned:?}")),
    }
}

fn counting(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut bench) = bench(subject, watch)? else { return skipped() };
    let positions = bench.rig.own::<PositionsHandle>().ok_or("positions/1 cannot be opened")?;
    let mut random = Random::new(seed);
    let at = |rid| positions.position(rid, LabelId::MAIN).map_err(failed("position"));
    for round in 0..12 {
        let spans = [random.below(4), 1 + random.below(3)];
        let mut step = bench.step(&[(A, spans[0]), (B, spans[1])]);
        let ahead = bench.rig.can_stage() && random.chance(40);
        let before = [at(A)?, at(B)?];
        if ahead {
            step.staged = true;
            bench.admit(&step)?;
            bench.rig.plan(&step).map_err(failed("plan ahead"))?;
            step.staged = false;
        }
        bench.admit(&step)?;
        let plans = bench.rig.plan(&step).map_err(failed("plan"))?;
        let ids = ids(&bench, &step, &plans)?;
        if ids.len() != (spans[0] + spans[1]) as usize {
            return Err(format!("{} ids for {spans:?} tokens", ids.len()));
        }
        let (own, other) = ids.split_at(spans[0] as usize);
        for (ids, start) in [(own, before[0]), (other, before[1])] {
            let rising = ids.windows(2).all(|w| w[0] <= w[1]);
            if ids.first().is_some_and(|&first| first != start) || !rising {
                return Err(format!("a stream at position {start} gets {ids:?}"));
            }
        }
        if [at(A)?, at(B)?] != before {
            return Err("a counter moved before the commit".into());
        }
        match round % 3 {
            2 => bench.rig.rollback(&step).map_err(failed("rollback_admit"))?,
            _ => bench.commit(&step, &plans)?,
        }
        let after = [at(A)?, at(B)?];
        for ((ids, start), now) in [(own, before[0]), (other, before[1])].into_iter().zip(after) {
            let moved = round % 3 != 2 && !ids.is_empty();
            let past_last = ids.last().is_none_or(|&last| now > last);
            if moved != (now > start) || (moved && !past_last) {
                return Err(format!("{ids:?} took a counter from {start} to {now}"));
            }
        }
    }
    Ok(Verdict::Holds)
}

fn turning(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut bench) = bench(subject, watch)? else { return skipped() };
    let positions = bench.rig.own::<PositionsHandle>().ok_or("positions/1 cannot be opened")?;
    let Some(cells) = Cells::of(&bench.rig)? else {
        return Ok(Verdict::Skipped("nothing below it says how large a head is".into()));
    };
    let (dim, heads) = (cells.facts.head_dim as usize, cells.facts.num_kv_heads as usize);
    let mut random = Random::new(seed);
    let step = bench.step(&[(A, 5)]);
    bench.admit(&step)?;
    let plans = bench.rig.plan(&step).map_err(failed("plan"))?;
    let mut number = || random.below(2000) as f32 / 1000.0 - 1.0;
    let start: Vec<f32> = (0..5 * heads * dim).map(|_| number()).collect();
    let (mut q, mut k) = (start.clone(), start.clone());
    bench.rig.say("apply_qk");
    let turned = bench.rig.call(&step, bench.rig.index(), &plans, |_, ctx| {
        let shape = [5, heads, dim];
        let mut q = TensorViewMut::from_slice(&mut q, &shape);
        let mut k = TensorViewMut::from_slice(&mut k, &shape);
        positions.apply_qk(ctx, LabelId::MAIN, &mut q, &mut k)
    });
    turned.map_err(failed("apply_qk"))?;
    if q != k {
        return Err("equal queries and keys are turned differently".into());
    }
    if q[..heads * dim] != start[..heads * dim] {
        return Err("the token at position 0 is turned".into());
    }
    let norm = |x: &[f32]| x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    for (head, (was, is)) in start.chunks(dim).zip(q.chunks(dim)).enumerate() {
        let (was, is) = (norm(was), norm(is));
        if (was - is).abs() > 1e-4 * was.max(1.0) {
            return Err(format!("head {head} of length {was} has length {is} when turned"));
        }
    }
    Ok(Verdict::Holds)
}
