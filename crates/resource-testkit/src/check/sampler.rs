//! What `sampler/1` promises.

use resource_api::{RequestId, Sampled, Sampler, SamplerHandle, TensorView, TensorViewMut};

use super::bench::{Bench, failed};
use super::random::Random;
use super::report::Verdict;
use super::rig::{Subject, Watch};
use super::rules::{SeededRule, offers};

pub const RULES: &[SeededRule] = &[
    ("sampler/1: temperature 0 takes the best, ties the smaller id", greedy),
    ("sampler/1: a choice depends on its own request alone", alone),
    ("sampler/1: a row that is no distribution fails alone", bad_rows),
    ("sampler/1: log-probabilities are the model's own", logprobs),
];

const REQUESTS: u32 = 4;

/// A bench with requests of its own, a sampler and its vocabulary.
struct Table {
    bench: Bench,
    sampler: SamplerHandle,
    vocabulary: usize,
}

fn rid(slot: u32) -> RequestId {
    RequestId::new(10 + slot, 1)
}

impl Table {
    /// `None` where there is no sampler. Requests ask for `text`.
    fn new(subject: &Subject, watch: Watch, text: &str) -> Result<Option<Self>, String> {
        if !offers(subject, "sampler") {
            return Ok(None);
        }
        let bench = Bench::new(subject, watch)?;
        let sampler = bench.rig.own::<SamplerHandle>().ok_or("sampler/1 cannot be opened")?;
        for slot in 0..REQUESTS {
            let told = bench.rig.ingest_as(rid(slot), &[1, 2], text);
            told.map_err(failed(format!("ingest_request with {text}")))?;
        }
        // The width of a row is not part of the contract's facts; the setting has one name only.
        let settings = serde_json::from_str::<serde_json::Value>(&subject.spec.settings);
        let size = settings.ok().and_then(|s| s["vocab_size"].as_u64());
        Ok(Some(Self { bench, sampler, vocabulary: size.unwrap_or(32) as usize }))
    }

    /// Runs a step of these requests with a row of logits each.
    fn sample(&mut self, slots: &[u32], rows: &[Vec<f32>]) -> Result<Vec<Sampled>, String> {
        let list: Vec<(RequestId, u32)> = slots.iter().map(|&s| (rid(s), 1)).collect();
        let step = self.bench.step(&list);
        self.bench.admit(&step)?;
        let plans = self.bench.rig.plan(&step).map_err(failed("plan"))?;
        let mut logits = rows.concat();
        let mut out = vec![Sampled { token: u32::MAX, status: u32::MAX, logprob: 0.0 }; rows.len()];
        let rids: Vec<RequestId> = slots.iter().map(|&s| rid(s)).collect();
        self.bench.rig.say("sample");
        let done = self.bench.rig.call(&step, self.bench.rig.index(), &plans, |_, ctx| {
            let shape = [rows.len(), self.vocabulary];
            let mut logits = TensorViewMut::from_slice(&mut logits, &shape);
            self.sampler.sample(ctx, &rids, &mut logits, &mut out)
        });
        done.map_err(failed("sample"))?;
        let vocabulary = self.vocabulary as u32;
        let is_odd = |s: &&Sampled| s.status == Sampled::OK && s.token >= vocabulary;
        if let Some(odd) = out.iter().find(is_odd) {
            return Err(format!("token {} of a vocabulary of {vocabulary}", odd.token));
        }
        self.bench.commit(&step, &plans)?;
        Ok(out)
    }

    fn row(&self, random: &mut Random) -> Vec<f32> {
        (0..self.vocabulary).map(|_| random.below(4000) as f32 / 500.0 - 4.0).collect()
    }
}

fn skipped() -> Result<Verdict, String> {
    Ok(Verdict::Skipped("it offers no sampler/1".into()))
}

fn greedy(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut table) = Table::new(subject, watch, r#"{"temperature": 0}"#)? else {
        return skipped();
    };
    let mut random = Random::new(seed);
    for _ in 0..8 {
        let mut rows: Vec<Vec<f32>> = (0..3).map(|_| table.row(&mut random)).collect();
        let (low, high) = (3, table.vocabulary - 2);
        (rows[1][low], rows[1][high]) = (9.0, 9.0);
        let got = table.sample(&[0, 1, 2], &rows)?;
        for (row, got) in rows.iter().zip(&got) {
            let best = |(i, a): (usize, f32), (j, &b): (usize, &f32)| {
                if b > a { (j, b) } else { (i, a) }
            };
            let want = row.iter().enumerate().fold((0, f32::NEG_INFINITY), best).0;
            if got.status != Sampled::OK || got.token as usize != want {
                return Err(format!("the best token is {want}, sampled {got:?}"));
            }
        }
    }
    Ok(Verdict::Holds)
}

fn alone(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let text = r#"{"temperature": 1.0, "seed": 42}"#;
    let tables = || Table::new(subject, watch, text);
    let (Some(mut batch), Some(mut single)) = (tables()?, tables()?) else { return skipped() };
    let mut random = Random::new(seed);
    let (mut together, mut apart) = (Vec::new(), Vec::new());
    for round in 0..12u32 {
        let rows: Vec<Vec<f32>> = (0..REQUESTS).map(|_| batch.row(&mut random)).collect();
        // The order and the company change from step to step.
        let order: Vec<u32> = (0..REQUESTS).map(|i| (i + round) % REQUESTS).collect();
        let mixed: Vec<Vec<f32>> = order.iter().map(|&s| rows[s as usize].clone()).collect();
        let got = batch.sample(&order, &mixed)?;
        let at = order.iter().position(|&s| s == 1).unwrap_or(0);
        together.push(got[at].token);
        apart.push(single.sample(&[1], &rows[1..2])?[0].token);
    }
    if together != apart {
        return Err(format!("in a batch {together:?}, alone {apart:?}"));
    }
    let distinct: std::collections::BTreeSet<u32> = apart.into_iter().collect();
    match distinct.len() {
        1 => Err("temperature 1 gave one token twelve times".into()),
        _ => Ok(Verdict::Holds),
    }
}

fn bad_rows(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut table) = Table::new(subject, watch, r#"{"temperature": 1.0}"#)? else {
        return skipped();
    };
    let mut random = Random::new(seed);
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let good = [table.row(&mut random), table.row(&mut random)];
        let rows = [good[0].clone(), vec![bad; table.vocabulary], good[1].clone()];
        let got = table.sample(&[0, 1, 2], &rows)?;
        if got[1].status == Sampled::OK {
            return Err(format!("a row of nothing but {bad} gave token {}", got[1].token));
        }
        if got[0].status != Sampled::OK || got[2].status != Sampled::OK {
            return Err("a bad row takes its neighbours along".into());
        }
    }
    Ok(Verdict::Holds)
}

fn logprobs(subject: &Subject, watch: Watch, seed: u64) -> Result<Verdict, String> {
    let Some(mut table) = Table::new(subject, watch, r#"{"temperature": 0.5}"#)? else {
        return skipped();
    };
    let mut random = Random::new(seed);
    for _ in 0..6 {
        let row = table.row(&mut random);
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        let own = |token: usize| f64::from(row[token]) - sum.ln();
        let got = table.sample(&[0], std::slice::from_ref(&row))?[0];
        if (f64::from(got.logprob) - own(got.token as usize)).abs() > 1e-4 {
            return Err(format!("{got:?}, by float64 {}", own(got.token as usize)));
        }
        let (mut ids, mut probs) = ([0; 5], [0.0; 5]);
        table.bench.rig.say("top_logprobs");
        let view = TensorView::from_slice(&row, &[table.vocabulary]);
        table.sampler.top_logprobs(&view, &mut ids, &mut probs).map_err(failed("top_logprobs"))?;
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        for ((&id, &prob), &want) in ids.iter().zip(&probs).zip(&order) {
            if id as usize != want || (f64::from(prob) - own(want)).abs() > 1e-4 {
                return Err(format!("top_logprobs has {id} at {prob} where {want} belongs"));
            }
        }
    }
    Ok(Verdict::Holds)
}
