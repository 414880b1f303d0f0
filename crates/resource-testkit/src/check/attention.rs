//! What `attention/1` promises, as far as it can be judged without knowing the scale of the scores:
//! rows are averages of the values that they see, and depend on nothing else.

use resource_api::{Attention, AttentionHandle, LabelId, TensorView, TensorViewMut};

use super::bench::{A, B, Bench, failed};
use super::random::Random;
use super::report::Verdict;
use super::rig::{Plans, Rig, Subject, Watch, told};
use super::rules::{SeededRule, offers};
use super::step::Step;
use super::values::Cells;

pub const RULES: &[SeededRule] = &[
    ("attention/1: rows are averages of the values that they see", averages),
    ("attention/1: a token sees what comes before it and nothing else", causal),
    ("attention/1: rows are where the plan has them", packing),
];

fn skipped() -> Result<Verdict, String> {
    Ok(Verdict::Skipped("it offers no attention/1".into()))
}

/// A bench with the cache below it.
struct Table {
    bench: Bench,
    cells: Cells,
    attention: AttentionHandle,
}

/// Keys and values of a step's tokens.
struct Rows {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Table {
    fn new(subject: &Subject, watch: Watch) -> Result<Option<Self>, String> {
        if !offers(subject, "attention") {
            return Ok(None);
        }
        let bench = Bench::new(subject, watch)?;
        let Some(cells) = Cells::of(&bench.rig)? else { return Ok(None) };
        let attention = bench.rig.own::<AttentionHandle>().ok_or("attention/1 cannot be opened")?;
        Ok(Some(Self { bench, cells, attention }))
    }

    /// Elements of a token's keys, and of its queries.
    fn widths(&self) -> (usize, usize) {
        let f = &self.cells.facts;
        ((f.num_kv_heads * f.head_dim) as usize, (f.num_qo_heads * f.head_dim) as usize)
    }

    fn random(&self, random: &mut Random, tokens: usize) -> Rows {
        let mut column = || {
            let all = 0..tokens * self.widths().0;
            all.map(|_| random.below(2000) as f32 / 1000.0 - 1.0).collect()
        };
        Rows { k: column(), v: column() }
    }

    /// Runs a step of main streams whose tokens have these keys and values, all with the same query,
    /// and gives what attention makes of it in layer 0.
    fn attend(&self, step: &Step, rows: &Rows) -> Result<(Plans, Vec<f32>), String> {
        self.bench.admit(step)?;
        let rig: &Rig = &self.bench.rig;
        let plans = rig.plan(step).map_err(failed("plan"))?;
        let f = &self.cells.facts;
        let (dim, tokens) = (f.head_dim as usize, step.tokens.len());
        let shape = [tokens, f.num_kv_heads as usize, dim];
        let wrote = rig.call(step, self.cells.index, &plans, |_, ctx| {
            let k = TensorView::from_slice(&rows.k, &shape);
            let v = TensorView::from_slice(&rows.v, &shape);
            resource_api::KvCache::write_kv(&self.cells.kv, ctx, 0, LabelId::MAIN, &k, &v)
        });
        wrote.map_err(failed("write_kv"))?;
        let shape = [tokens, f.num_qo_heads as usize, dim];
        let q: Vec<f32> =
            (0..tokens * self.widths().1).map(|i| (i % 5) as f32 / 4.0 - 0.5).collect();
        let mut out = vec![f32::NAN; q.len()];
        rig.say("run");
        let ran = rig.call(step, rig.index(), &plans, |_, ctx| {
            let q = TensorView::from_slice(&q, &shape);
            let mut out = TensorViewMut::from_slice(&mut out, &shape);
            Attention::run(&self.attention, ctx, 0, LabelId::MAIN, &q, &mut out)
        });
        ran.map_err(failed("run"))?;
        match out.iter().all(|x| x.is_finite()) {
            true => Ok((plans, out)),
            false => Err("a row is not finite, or was not written".into()),
        }
    }
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-4
}

fn averages(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut table) = Table::new(subject, watch)? else { return skipped() };
    let mut random = Random::new(seed);
    let (width, q_width) = table.widths();
    // A stream of one token sees that token's values, whatever the scores are.
    let step = table.bench.step(&[(A, 1), (B, 1)]);
    let rows = table.random(&mut random, 2);
    let (plans, out) = table.attend(&step, &rows)?;
    let dim = table.cells.facts.head_dim as usize;
    let group = q_width / width;
    for (at, &got) in out.iter().enumerate() {
        let (token, head, i) = (at / q_width, at % q_width / dim / group, at % dim);
        let want = rows.v[token * width + head * dim + i];
        if !close(got, want) {
            return Err(format!("a lone token's value {want} became {got}"));
        }
    }
    table.bench.commit(&step, &plans)?;
    // Whatever the scores, an average of values lies between the least and the largest.
    let mut seen = vec![rows];
    for span in [3, 1, 5] {
        let step = table.bench.step(&[(A, span), (B, 1)]);
        let rows = table.random(&mut random, span as usize + 1);
        let (plans, out) = table.attend(&step, &rows)?;
        table.bench.commit(&step, &plans)?;
        seen.push(rows);
        let all = seen.iter().flat_map(|r| &r.v);
        let (low, high) = all.fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
        if let Some(odd) = out.iter().find(|&&x| x < low - 1e-4 || x > high + 1e-4) {
            return Err(format!("{odd} is no average of values between {low} and {high}"));
        }
    }
    Ok(Verdict::Holds)
}

fn causal(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let run = |other: bool| -> Result<Option<Vec<f32>>, String> {
        let Some(mut table) = Table::new(subject, watch)? else { return Ok(None) };
        let mut random = Random::new(seed);
        let (width, q_width) = table.widths();
        let first = table.bench.step(&[(A, 4), (B, 3)]);
        let mut rows = table.random(&mut random, 7);
        if other {
            // A neighbour's tokens, which A must not see.
            rows.k[4 * width..].fill(0.25);
            rows.v[4 * width..].fill(77.0);
        }
        let (plans, mut out) = table.attend(&first, &rows)?;
        out.truncate(4 * q_width);
        table.bench.commit(&first, &plans)?;
        let second = table.bench.step(&[(A, 4)]);
        let mut rows = table.random(&mut random, 4);
        if other {
            // The last token, which those before it must not see.
            rows.k[3 * width..].fill(0.5);
            rows.v[3 * width..].fill(99.0);
        }
        let (plans, more) = table.attend(&second, &rows)?;
        out.extend(&more[..3 * q_width]);
        table.bench.commit(&second, &plans)?;
        Ok(Some(out))
    };
    let (Some(one), Some(two)) = (run(false)?, run(true)?) else { return skipped() };
    match one.iter().zip(&two).position(|(a, b)| a != b) {
        None => Ok(Verdict::Holds),
        Some(at) => Err(format!(
            "element {at} is {} or {}, by what a neighbour or a later token holds",
            one[at], two[at]
        )),
    }
}

fn packing(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut table) = Table::new(subject, watch)? else { return skipped() };
    let mut random = Random::new(seed);
    let step = table.bench.step(&[(A, 3), (B, 2)]);
    let rows = table.random(&mut random, 5);
    let (plans, _) = table.attend(&step, &rows)?;
    let (rig, at) = (&table.bench.rig, table.bench.rig.index());
    let mut indptr = [u32::MAX; 3];
    let count = rig.call(&step, at, &plans, |_, ctx| {
        table.attention.qo_indptr(ctx, LabelId::MAIN, &mut indptr)
    });
    let count = count.map_err(failed("qo_indptr"))?;
    if (count, indptr) != (3, [0, 3, 5]) {
        return Err(format!("rows of 3 and 2 tokens begin at {:?} of {count}", &indptr));
    }
    let mut small = [0; 2];
    let fits = rig.call(&step, at, &plans, |_, ctx| {
        table.attention.qo_indptr(ctx, LabelId::MAIN, &mut small)
    });
    if fits.is_ok() {
        return Err("qo_indptr of three entries fits into two".into());
    }
    let hidden: Vec<f32> = (0..10).map(|i| i as f32).collect();
    let mut last = [0.0; 4];
    let done = rig.call(&step, at, &plans, |_, ctx| {
        let hidden = TensorView::from_slice(&hidden, &[5, 2]);
        let mut last = TensorViewMut::from_slice(&mut last, &[2, 2]);
        table.attention.select_last_hidden(ctx, LabelId::MAIN, &hidden, &mut last)
    });
    done.map_err(|e| format!("select_last_hidden fails: {}", told(&e)))?;
    match last == [4.0, 5.0, 8.0, 9.0] {
        true => Ok(Verdict::Holds),
        false => Err(format!("the last of 3 and of 2 tokens are said to be {last:?}")),
    }
}
