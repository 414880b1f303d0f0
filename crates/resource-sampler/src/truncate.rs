//! The tokens that top-k, top-p and min-p leave, without sorting a vocabulary.

use std::cmp::Ordering;

use device::ops;

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

/// Computes the weights of candidates, the best token being one of them.
pub fn weigh(kept: &mut [Candidate], best: f32, temperature: f32, values: &mut Vec<f32>) {
    values.clear();
    // Dividing, since 1 / t of the smallest temperatures is infinite.
    values.extend(kept.iter().map(|c| (c.logit - best) / temperature));
    ops::exponentials(values);
    kept.iter_mut().zip(values).for_each(|(c, &mut weight)| c.weight = weight);
}

/// Sum of the weights.
pub fn mass(kept: &[Candidate]) -> f64 {
    kept.iter().map(|c| f64::from(c.weight)).sum()
}

/// Keeps the fewest of the best candidates whose weights together reach `wanted`, at least one.
pub fn keep_mass(kept: &mut Vec<Candidate>, wanted: f64) {
    // Everything before `low` stays and weighs `held`; everything from `high` on goes.
    let (mut low, mut high, mut held) = (0, kept.len(), 0.0);
    while high - low > 32 {
        let half = (high - low) / 2;
        kept[low..high].select_nth_unstable_by(half, by_rank);
        let upper = held + mass(&kept[low..low + half]);
        if upper >= wanted {
            high = low + half;
        } else {
            (low, held) = (low + half, upper);
        }
    }
    kept[low..high].sort_unstable_by(by_rank);
    while low < high {
        held += f64::from(kept[low].weight);
        low += 1;
        if held >= wanted {
            break;
        }
    }
    kept.truncate(low);
}
