//! What is sampled: distributions, independence of the batch, bad rows.

#[allow(dead_code)] // each test file uses its part
mod common;

use common::*;
use resource_api::{
    Capability, LogitsProcessor, LogitsProcessorHandle, Offered, RequestId, Resource as _, Result,
    Sampled, Sampler as _, StepContext, TensorView, TensorViewMut,
};
use std::sync::Arc;

const A: RequestId = RequestId::new(0, 1);
const B: RequestId = RequestId::new(9, 4);
const C: RequestId = RequestId::new(3, 2);

fn softmax(row: &[f32]) -> Vec<f64> {
    let best = row.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = row.iter().map(|&x| (f64::from(x) - f64::from(best)).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// Pearson's statistic may be this large by chance once in about a million draws of a seed
/// (Wilson and Hilferty's approximation at 4.75 standard deviations).
fn chi_squared_limit(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 4.75 * spread.sqrt()).powi(3)
}

/// Draws and compares with `want`, tokens too rare for the statistic taken together.
fn assert_distribution(config: &str, prompt: &[u32], row: &[f32], want: &[f64]) {
    const DRAWS: usize = 20_000;
    let e = Engine::new(row.len());
    let mut counts = vec![0.0; row.len()];
    // One draw of each of many sequences, since a penalty looks at what was drawn before.
    for i in 0..DRAWS / 50 {
        let rids: Vec<_> = (0..50).map(|slot| RequestId::new(slot, i as u32 + 1)).collect();
        for &rid in &rids {
            let seed = i * 50 + rid.index();
            let config = format!("{{{config}, \"seed\": {seed}}}");
            e.ingest_prompt(rid, &config, prompt).unwrap();
        }
        for s in e.step(&rids, &vec![row; rids.len()]) {
            counts[s.token as usize] += 1.0;
        }
    }
    let (mut statistic, mut freedom) = (0.0, -1.0);
    let (mut rare, mut rare_wanted) = (0.0, 0.0);
    let mut add = |count: f64, wanted: f64| {
        statistic += (count - wanted).powi(2) / wanted;
        freedom += 1.0;
    };
    for (&count, &p) in counts.iter().zip(want) {
        let wanted = p * DRAWS as f64;
        assert!(p > 0.0 || count == 0.0, "an impossible token was drawn {count} times");
        match wanted < 10.0 {
            true => (rare, rare_wanted) = (rare + count, rare_wanted + wanted),
            false => add(count, wanted),
        }
    }
    if rare_wanted > 0.0 {
        add(rare, rare_wanted);
    }
    assert!(statistic < chi_squared_limit(freedom), "{config}: {statistic} of {freedom}");
}

#[test]
fn plain_sampling_has_the_exact_distribution_over_several_blocks() {
    let row = noise(1, 700);
    assert_distribution(r#""temperature": 1"#, &[], &row, &softmax(&row));
    let warmer: Vec<f32> = row.iter().map(|x| x / 1.7).collect();
    assert_distribution(r#""temperature": 1.7"#, &[], &row, &softmax(&warmer));
}

#[test]
fn truncated_sampling_has_the_exact_distribution() {
    let row: Vec<f32> = [0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.02].map(|p: f64| p.ln() as f32).into();
    let over = |kept: &[usize]| -> Vec<f64> {
        let p = softmax(&row);
        let total: f64 = kept.iter().map(|&t| p[t]).sum();
        (0..row.len()).map(|t| if kept.contains(&t) { p[t] / total } else { 0.0 }).collect()
    };
    let t = r#""temperature": 1"#;
    assert_distribution(&format!(r#"{t}, "top_k": 3"#), &[], &row, &over(&[0, 1, 2]));
    assert_distribution(&format!(r#"{t}, "top_p": 0.7"#), &[], &row, &over(&[0, 1, 2]));
    assert_distribution(&format!(r#"{t}, "min_p": 0.22"#), &[], &row, &over(&[0, 1, 2, 3]));
    // Of 0.4, 0.2, 0.15, which are 0.533, 0.267, 0.2 of what top-k leaves, two reach 0.75.
    let both = format!(r#"{t}, "top_k": 3, "top_p": 0.75"#);
    assert_distribution(&both, &[], &row, &over(&[0, 1]));
}

#[test]
fn a_penalty_lowers_seen_tokens_whatever_their_sign() {
    let row = [-2.0, -3.0, 1.0, 0.5, 0.0];
    let penalised = [-4.0, -3.0, 0.5, 0.5, 0.0];
    let config = r#""temperature": 1, "repetition_penalty": 2"#;
    assert_distribution(config, &[0, 2, 4, 0], &row, &softmax(&penalised));
}

#[test]
fn a_penalty_of_one_is_none_to_the_bit_and_keeps_no_tokens() {
    let row = noise(8, 200);
    let run = |config: &str, beside: Option<&str>| {
        let e = Engine::new(200);
        e.ingest_prompt(A, config, &[1, 2, 3]).unwrap();
        beside.inspect(|config| e.ingest(B, config));
        let inspect: serde_json::Value = serde_json::from_str(&e.resource.inspect()).unwrap();
        let both: (&[RequestId], &[&[f32]]) = (&[A, B], &[&row, &row]);
        let (rids, rows) = if beside.is_some() { both } else { (&both.0[..1], &both.1[..1]) };
        let sampled: Vec<(u32, u32)> = (0..40)
            .map(|_| e.step(rids, rows)[0])
            .map(|sampled| (sampled.token, sampled.logprob.to_bits()))
            .collect();
        (sampled, inspect["any_penalised"].clone())
    };
    let (want, any) = run(r#"{"seed": 3, "temperature": 1}"#, None);
    assert_eq!(any, false);
    let one = r#"{"seed": 3, "temperature": 1, "repetition_penalty": 1.0}"#;
    assert_eq!(run(one, None), (want.clone(), false.into()), "nobody looks at tokens");
    let other = r#"{"temperature": 1, "repetition_penalty": 3}"#;
    assert_eq!(run(one, Some(other)), (want.clone(), true.into()));
    let penalised = r#"{"seed": 3, "temperature": 1, "repetition_penalty": 3}"#;
    assert_ne!(run(penalised, None).0, want);
}

#[test]
fn tokens_fed_and_drawn_are_seen() {
    let e = Engine::new(4);
    e.ingest(A, r#"{"temperature": 0, "repetition_penalty": 4}"#);
    let row = [4.0, 3.0, 2.0, 1.5];
    let fed = Extra { tokens: vec![vec![0, 0]], ..Extra::default() };
    assert_eq!(e.step_with(&[A], &[&row], fed)[0].token, 1, "fed in this very step");
    assert_eq!(e.run(A, &row, 2), [2, 3], "fed and drawn before");
    let mut off = Extra::default();
    off.options.apply_penalty = false;
    assert_eq!(e.step_with(&[A], &[&row], off)[0].token, 0);
}

#[test]
fn a_bias_is_added_to_logits() {
    let row = [1.0, 0.5, 0.0, -0.5];
    let config = r#""temperature": 1, "logit_bias": {"1": 1.5, "3": -100}"#;
    assert_distribution(config, &[], &row, &softmax(&[1.0, 2.0, 0.0, -100.5]));
}

#[test]
fn generated_tokens_lose_by_how_often_they_came_and_those_of_the_prompt_do_not() {
    let drawn = |config: &str, row: &[f32], n: usize| {
        let e = Engine::new(row.len());
        e.ingest(A, config);
        let fed = Extra { tokens: vec![vec![0, 0]], ..Extra::default() };
        let mut all = vec![e.step_with(&[A], &[row], fed)[0].token];
        all.extend(e.run(A, row, n / 2));
        e.resource.reset_request(A, true).unwrap(); // preempted: what came has come
        all.extend(e.run(A, row, n - n / 2 - 1));
        all
    };
    let row = [2.0, 1.5, 1.2];
    let each = r#"{"temperature": 0, "frequency_penalty": 1}"#;
    assert_eq!(drawn(each, &row, 5), [0, 1, 2, 0, 1]);
    let once = r#"{"temperature": 0, "presence_penalty": 0.6}"#;
    assert_eq!(drawn(once, &row, 5), [0, 1, 0, 0, 0]);
    let reward = r#"{"temperature": 0, "frequency_penalty": -1}"#;
    assert_eq!(drawn(reward, &row, 3), [0, 0, 0]);
}

#[test]
fn the_end_is_held_off_until_enough_has_come() {
    let e = Engine::new(3);
    e.ingest(A, r#"{"temperature": 0, "min_tokens": 2, "end_token_ids": [0, 7]}"#);
    e.ingest(B, r#"{"temperature": 0}"#);
    let row = [2.0, 1.0, 0.0];
    let tokens = |e: &Engine| {
        let drawn = e.step_with(&[A, B], &[&row, &row], Extra::default());
        (drawn[0].token, drawn[1].token, drawn[0].logprob)
    };
    let (first, other, logprob) = tokens(&e);
    assert_eq!((first, other), (1, 0));
    assert!((f64::from(logprob) - softmax(&row)[1].ln()).abs() < 1e-6, "the model's own");
    assert_eq!(tokens(&e).0, 1);
    assert_eq!(tokens(&e).0, 0);
}

#[test]
fn the_batch_changes_nothing() {
    let (row, other) = (noise(3, 500), noise(4, 500));
    for config in [
        r#"{"seed": 42, "temperature": 1}"#,
        r#"{"seed": 42, "temperature": 0.8, "top_k": 40, "top_p": 0.9}"#,
        r#"{"seed": 42, "temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.1}"#,
    ] {
        let alone = Engine::new(500);
        alone.ingest(A, config);
        let want = alone.run(A, &row, 30);
        assert!(want.iter().any(|t| *t != want[0]));

        let crowded = Engine::on(500, Threads::handle());
        let a = RequestId::new(77, 5);
        crowded.ingest(a, config);
        crowded.ingest(B, r#"{"temperature": 1}"#);
        crowded.ingest(C, r#"{"seed": 42, "choice": 1}"#);
        let mut got = Vec::new();
        for i in 0..30 {
            let (rids, rows): (&[_], Vec<&[f32]>) = match i % 3 {
                0 => (&[a, B], vec![&row, &other]),
                1 => (&[C, B, a], vec![&row, &other, &row]),
                _ => (&[B, a, RequestId::padding(0)], vec![&other, &row, &other]),
            };
            if i == 15 {
                crowded.resource.reset_request(a, true).unwrap(); // preempted
            }
            let at = rids.iter().position(|&r| r == a).unwrap();
            let extra = Extra { slot: i % 4, ..Extra::default() };
            got.push(crowded.step_with(rids, &rows, extra)[at].token);
        }
        assert_eq!(got, want, "{config}");
    }
}

#[test]
fn seeds_and_choices_differ_and_come_again() {
    let row = noise(5, 300);
    let run = |config: &str| {
        let e = Engine::new(300);
        e.ingest(A, config);
        e.run(A, &row, 20)
    };
    let base = run(r#"{"temperature": 1, "seed": 7}"#);
    assert_eq!(base, run(r#"{"temperature": 1, "seed": 7}"#));
    assert_ne!(base, run(r#"{"temperature": 1, "seed": 8}"#));
    assert_ne!(base, run(r#"{"temperature": 1, "seed": -7}"#));
    assert_ne!(base, run(r#"{"temperature": 1, "seed": 7, "choice": 1}"#));
}

#[test]
fn a_bad_row_fails_alone() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let good = [0.0, 1.0, 0.5, -INF];
    let bad: [[f32; 4]; 5] =
        [[NAN; 4], [0.0, 1.0, NAN, 0.0], [-INF; 4], [0.0, INF, 0.0, 0.0], [-INF, NAN, 1.0, 0.0]];
    for config in [
        r#"{"temperature": 1, "top_p": 0.9}"#,
        r#"{"temperature": 0}"#,
        r#"{"temperature": 1, "top_k": 2, "repetition_penalty": 1.5}"#,
        r#"{"temperature": 1}"#,
    ] {
        for bad in &bad {
            let e = Engine::new(4);
            e.ingest(A, config);
            e.ingest(B, config);
            e.ingest(C, r#"{"temperature": 0}"#);
            let out = e.step(&[A, B, C], &[&good, bad, &good]);
            assert_eq!(out[1].status, Sampled::BAD_LOGITS, "{config} {bad:?}");
            assert_eq!((out[0].status, out[2].status), (Sampled::OK, Sampled::OK));
            assert!(out[0].token < 3 && out[2].token == 1);
            assert!(out.iter().all(|s| s.token < 4));
        }
    }
}

#[test]
fn every_top_k_is_answered_beside_a_greedy_row() {
    let row = noise(6, 10);
    let plain = {
        let e = Engine::new(10);
        e.ingest(A, r#"{"temperature": 1, "seed": 3}"#);
        e.run(A, &row, 40)
    };
    let best = (0..10).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
    for top_k in [0, -1, 1, 10, 11, 9_999_999] {
        let e = Engine::new(10);
        e.ingest(A, &format!(r#"{{"temperature": 1, "seed": 3, "top_k": {top_k}}}"#));
        e.ingest(B, r#"{"temperature": 0}"#);
        for want in &plain {
            let out = e.step(&[B, A], &[&row, &row]);
            assert_eq!(out[0].token, best);
            assert_eq!(out[1].token, if top_k == 1 { best } else { *want }, "top_k {top_k}");
        }
    }
}

#[test]
fn equal_logits_go_to_the_smaller_id_when_greedy() {
    let e = Engine::new(200);
    e.ingest(A, r#"{"temperature": 0}"#);
    let mut row = vec![0.0; 200];
    (row[130], row[71], row[150]) = (2.0, 2.0, 2.0);
    assert_eq!(e.run(A, &row, 3), [71, 71, 71]);
}

#[test]
fn nothing_past_the_vocabulary_or_impossible_is_drawn() {
    let (vocab, width) = (61, 64);
    let e = Engine::new(vocab);
    let configs = [
        r#"{"temperature": 5}"#,
        r#"{"temperature": 5, "top_k": 60}"#,
        r#"{"temperature": 5, "top_p": 0.99}"#,
        r#"{"temperature": 5, "min_p": 0.001}"#,
        r#"{"temperature": 5, "repetition_penalty": 0.5}"#,
    ];
    let rids: Vec<_> = (0..configs.len() as u32).map(|slot| RequestId::new(slot, 1)).collect();
    for (&rid, config) in rids.iter().zip(configs) {
        e.ingest_prompt(rid, config, &[1, 2, 63, 4_000_000]).unwrap();
    }
    for i in 0..300 {
        let mut row = noise(i, width);
        row[vocab..].fill(50.0);
        (0..vocab)
            .filter(|t| (t * 7 + i as usize).is_multiple_of(3))
            .for_each(|t| row[t] = f32::NEG_INFINITY);
        for s in e.step(&rids, &vec![&row[..]; rids.len()]) {
            assert_eq!(s.status, Sampled::OK);
            assert!((s.token as usize) < vocab && row[s.token as usize].is_finite());
        }
    }
}

#[test]
fn log_probabilities_are_the_models_own() {
    let row = noise(8, 1000);
    let exact = softmax(&row);
    let e = Engine::new(1000);
    e.ingest_prompt(A, r#"{"temperature": 0.3, "top_k": 5, "repetition_penalty": 3}"#, &[1, 2, 3])
        .unwrap();
    for _ in 0..20 {
        let s = e.step(&[A], &[&row])[0];
        assert!((f64::from(s.logprob) - exact[s.token as usize].ln()).abs() < 1e-5);
    }
    let mut order: Vec<u32> = (0..1000).collect();
    order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    for k in [0, 1, 20, 999, 1000] {
        let (mut ids, mut logprobs) = (vec![0; k], vec![0.0; k]);
        let view = TensorView::from_slice(&row, &[1000]);
        e.api.top_logprobs(&view, &mut ids, &mut logprobs).unwrap();
        assert_eq!(ids, order[..k]);
        for (id, logprob) in ids.iter().zip(logprobs) {
            assert!((f64::from(logprob) - exact[*id as usize].ln()).abs() < 1e-5);
        }
    }
}

#[test]
fn impossible_tokens_have_no_log_probability_and_bad_rows_are_errors() {
    let e = Engine::new(4);
    let (mut ids, mut logprobs) = ([9; 4], [9.0; 4]);
    let row = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 1.0];
    e.api.top_logprobs(&TensorView::from_slice(&row, &[4]), &mut ids, &mut logprobs).unwrap();
    assert_eq!(ids, [1, 3, 0, 2]);
    assert_eq!(logprobs[2..], [f32::NEG_INFINITY; 2]);
    assert!((logprobs[0] + 2f32.ln()).abs() < 1e-6);
    let nan = TensorView::from_slice(&[f32::NAN; 4], &[4]);
    assert!(e.api.top_logprobs(&nan, &mut ids, &mut logprobs).is_err());
    let view = TensorView::from_slice(&row, &[4]);
    assert!(e.api.top_logprobs(&view, &mut [0; 5], &mut [0.0; 5]).is_err());
}

/// Adds to one token, or forbids it.
struct Bias(usize, f32);

impl LogitsProcessor for Bias {
    fn process(
        &self,
        _ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let all = logits.as_mut_slice::<f32>().unwrap();
        let width = all.len() / rids.len();
        all.chunks_mut(width).for_each(|row| row[self.0] = row[self.0] * 2.0 + self.1);
        Ok(())
    }
}

#[test]
fn processors_run_in_build_order_and_leave_log_probabilities_alone() {
    let e = Engine::new(3);
    assert_eq!(e.resource.accepts(), ["logits.processor"]);
    let offer = |bias| {
        let capability: Capability = LogitsProcessorHandle::new(Arc::new(bias)).into();
        Offered { key: "bias".into(), capability }
    };
    let row = [1.0, 0.0, 3.0];
    e.ingest(A, r#"{"temperature": 0}"#);
    // In this order token 1 becomes (0 * 2 + 4) * 2 - 1 = 7; the other way it would be 2.
    e.resource.bind(vec![offer(Bias(1, 4.0)), offer(Bias(1, -1.0)), offer(Bias(2, 0.5))]).unwrap();
    let s = e.step(&[A], &[&row])[0];
    assert_eq!(s.token, 1);
    assert!((f64::from(s.logprob) - softmax(&row)[1].ln()).abs() < 1e-6);
    e.resource.bind(vec![]).unwrap();
    assert_eq!(e.step(&[A], &[&row])[0].token, 2);
}
