//! The tokens that top-k, top-p and min-p leave, without sorting a vocabulary.

use std::cmp::Ordering;

use crate::row::{self, units};

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub token: u32,
    pub logit: f32,
    /// `e^((logit - best) / temperature)`, once computed.
    pub weight: f32,
}

/// Best first; of equals the smaller id first. Not `total_cmp`, for which 0 is above -0.
pub fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    let best_first = b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal);
    best_first.then(a.token.cmp(&b.token))
}

/// Entries that are looked at together, to skip those that hold nothing of interest.
const GLANCE: usize = 64;

/// Calls `take` with every entry for which it last answered a smaller bound, in the order of ids.
fn scan(row: &[f32], mut bound: f32, mut take: impl FnMut(Candidate) -> f32) {
    for (i, part) in row.chunks(GLANCE).enumerate() {
        // Without a branch for each entry, so that it is done many lanes at a time.
        if !part.iter().fold(false, |any, &logit| any | (logit > bound)) {
            continue;
        }
        for (token, &logit) in ((i * GLANCE) as u32..).zip(part) {
            if logit > bound {
                bound = take(Candidate { token, logit, weight: 0.0 });
            }
        }
    }
}

/// The `k` best entries of a row without NaN, in no order; fewer where others are minus infinity.
pub fn best_k(row: &[f32], k: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    let k = k.min(row.len());
    if k == 0 {
        return;
    }
    let room = (2 * k).max(4 * GLANCE);
    kept.reserve(room);
    let mut bound = f32::NEG_INFINITY;
    scan(row, bound, |candidate| {
        kept.push(candidate);
        if kept.len() == room {
            // Whoever comes later with the same logit has a larger id, and loses to what is kept.
            let (_, worst, _) = kept.select_nth_unstable_by(k - 1, by_rank);
            bound = worst.logit;
            kept.truncate(k);
        }
        bound
    });
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, by_rank);
        kept.truncate(k);
    }
}

/// All entries above `bound`.
pub fn above(row: &[f32], bound: f32, kept: &mut Vec<Candidate>) {
    kept.clear();
    scan(row, bound, |candidate| {
        kept.push(candidate);
        bound
    });
}

/// Computes the weights of candidates.
pub fn weigh(kept: &mut [Candidate], best: f32, temperature: f32, weights: &mut Vec<f32>) {
    weights.clear();
    weights.resize(kept.len(), 0.0);
    row::weigh(kept.iter().map(|c| c.logit), best, temperature, weights);
    kept.iter_mut().zip(weights).for_each(|(c, &mut weight)| c.weight = weight);
}

/// Sum of the weights, in units.
pub fn mass(kept: &[Candidate]) -> u64 {
    kept.iter().map(|c| units(c.weight)).sum()
}

/// Keeps the fewest of the best candidates whose weights together reach `wanted` units, at least one. The
/// candidates come and stay in the order of their ids.
pub fn keep_mass(kept: &mut Vec<Candidate>, wanted: u64, keys: &mut Vec<u64>) {
    keys.clear();
    keys.extend(kept.iter().map(key));
    let best_first = |a: &u64, b: &u64| b.cmp(a);
    // Everything before `low` stays and weighs `held`; everything from `high` on goes.
    let (mut low, mut high, mut held) = (0, keys.len(), 0);
    while high - low > 32 {
        let half = (high - low) / 2;
        keys[low..high].select_nth_unstable_by(half, best_first);
        let upper = held + keys[low..low + half].iter().map(weight).sum::<u64>();
        if upper >= wanted {
            high = low + half;
        } else {
            (low, held) = (low + half, upper);
        }
    }
    keys[low..high].sort_unstable_by(best_first);
    while low < high {
        held += weight(&keys[low]);
        low += 1;
        if held >= wanted {
            break;
        }
    }
    let Some(&last) = low.checked_sub(1).and_then(|last| keys.get(last)) else { return };
    let mut ties = keys[..low].iter().filter(|&&key| key == last).count();
    kept.retain(|candidate| match key(candidate).cmp(&last) {
        Ordering::Greater => true,
        Ordering::Equal if ties > 0 => {
            ties -= 1;
            true
        }
        _ => false,
    });
}

/// A number in the order of the logits, with the weight in its low half: cheaper to move and to
/// compare than a candidate.
fn key(candidate: &Candidate) -> u64 {
    // Adding 0 makes -0 equal to it.
    let bits = (candidate.logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(candidate.weight.to_bits())
}

fn weight(key: &u64) -> u64 {
    units(f32::from_bits(*key as u32))
}
