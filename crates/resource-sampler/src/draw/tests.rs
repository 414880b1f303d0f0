//! The tokens that may be drawn, against float64 computed straight: everything sorted, no shortcut.

use super::*;

/// A generator that is not the one under test.
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }
}

/// The tokens left, best first; `None` when float32 could rightly decide otherwise.
fn reference(row: &[f32], p: &SamplingParams) -> Option<Vec<u32>> {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    let logit = |t: u32| f64::from(row[t as usize]);
    order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)).then(a.cmp(&b)));
    order.retain(|&t| logit(t) > f64::NEG_INFINITY);
    if p.top_k > 0 {
        order.truncate(p.top_k as usize);
    }
    let best = logit(order[0]);
    let weight = |t: u32| ((logit(t) - best) / f64::from(p.temperature)).exp();
    let total: f64 = order.iter().map(|&t| weight(t)).sum();
    if p.top_p < 1.0 {
        let mut running = 0.0;
        let mut keep = order.len();
        for (i, &t) in order.iter().enumerate() {
            running += weight(t) / total;
            if (running - f64::from(p.top_p)).abs() < 1e-5 {
                return None;
            }
            if running >= f64::from(p.top_p) {
                keep = i + 1;
                break;
            }
        }
        order.truncate(keep);
    }
    if order.iter().any(|&t| (weight(t) - f64::from(p.min_p)).abs() < 1e-5 * weight(t)) {
        return None;
    }
    order.retain(|&t| weight(t) >= f64::from(p.min_p));
    Some(order)
}

fn random_row(noise: &mut Noise) -> Vec<f32> {
    let n = [1, 2, 10, 63, 64, 65, 300, 5000][noise.below(8)];
    let spread = [0.01, 1.0, 5.0, 40.0][noise.below(4)];
    // Some of few values, so that there are ties.
    let steps = [3.0, 1e6][noise.below(2)];
    let masked = [0.0, 0.5, 0.99][noise.below(3)];
    let mut row: Vec<f32> = (0..n)
        .map(|_| match noise.next() < masked {
            true => f32::NEG_INFINITY,
            false => ((noise.next() * steps).round() / steps * spread) as f32,
        })
        .collect();
    row[noise.below(n)] = 0.5;
    row
}

fn random_params(noise: &mut Noise, n: usize) -> SamplingParams {
    let top_k = [0, 1 + noise.below(n), 2.min(n)][noise.below(3)] as u32;
    SamplingParams {
        temperature: [0.05, 0.7, 1.0, 3.0][noise.below(4)],
        top_k: if top_k as usize >= n { 0 } else { top_k },
        top_p: [1.0, 0.9, 0.5, 0.01, 0.9999][noise.below(5)],
        min_p: [0.0, 0.05, 0.9][noise.below(3)],
        ..SamplingParams::GREEDY
    }
}

#[test]
fn truncation_keeps_the_tokens_that_the_definition_keeps() {
    let (mut noise, mut scratch) = (Noise(1), Scratch::default());
    let mut compared = 0;
    for case in 0..3000 {
        let row = random_row(&mut noise);
        let params = random_params(&mut noise, row.len());
        let draw = Draw { params, position: case, seen: None, fresh: &[], adjust: None };
        let truncated = params.top_k > 1 || params.top_p < 1.0 || params.min_p > 0.0;
        let token = choose(&row, &draw, &mut scratch).unwrap();
        let Some(mut want) = reference(&row, &params) else { continue };
        assert!(want.contains(&token), "case {case}: {params:?}");
        if truncated && params.top_k != 1 {
            want.sort_unstable();
            let mut got: Vec<u32> = scratch.candidates.iter().map(|c| c.token).collect();
            // Whether weights about the smallest of float32 are candidates is a matter of rounding.
            let best = row[first_best(&row)];
            let counts = |&t: &u32| (row[t as usize] - best) / params.temperature > -80.0;
            want.retain(counts);
            got.retain(counts);
            assert_eq!(got, want, "case {case}: {params:?} over {} tokens", row.len());
            compared += 1;
        }
    }
    assert!(compared > 1500, "only {compared} cases were decided");
}

fn first_best(row: &[f32]) -> usize {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

#[test]
fn a_tiny_temperature_is_greedy_and_an_enormous_one_is_uniform() {
    let mut scratch = Scratch::default();
    let row = [0.1, 5.0, 2.0];
    let mut counts = [0; 3];
    for position in 0..3000 {
        let mut at = |temperature| {
            let params = SamplingParams { temperature, ..SamplingParams::GREEDY };
            let draw = Draw { params, position, seen: None, fresh: &[], adjust: None };
            choose(&row, &draw, &mut scratch).unwrap()
        };
        for temperature in [1e-45, 1e-30, 1e-6, 0.0] {
            assert_eq!(at(temperature), 1);
        }
        counts[at(1e30) as usize] += 1;
    }
    assert!(counts.iter().all(|&n| (900..1100).contains(&n)), "{counts:?}");
}

#[test]
fn extreme_logits_are_drawn_from() {
    let mut scratch = Scratch::default();
    let lowest = f32::MIN;
    for row in [vec![lowest; 70], vec![f32::MAX; 70], vec![f32::MAX, lowest, 0.0, f32::MAX]] {
        for (top_p, min_p, top_k) in [(1.0, 0.0, 0), (0.5, 0.0, 0), (1.0, 0.5, 0), (1.0, 0.0, 3)] {
            let params =
                SamplingParams { temperature: 1.0, top_p, min_p, top_k, ..SamplingParams::GREEDY };
            let draw = Draw { params, position: 3, seen: None, fresh: &[], adjust: None };
            let token = choose(&row, &draw, &mut scratch).unwrap();
            assert_eq!(row[token as usize], row[first_best(&row)]);
        }
    }
}

#[test]
fn zero_and_minus_zero_are_a_tie() {
    let mut scratch = Scratch::default();
    let (mut ids, mut logprobs) = ([0; 2], [0.0; 2]);
    top_logprobs(&[-0.0, 0.0, -1.0], &mut ids, &mut logprobs, &mut scratch).unwrap();
    assert_eq!(ids, [0, 1]);
}
