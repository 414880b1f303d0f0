//! One row of logits: its greatest entry, its weights, and the token at a given share of them.

use device::ops;

/// Elements whose weights are computed together and summed in float32. A row's weights are not kept: to
/// find a token, its block is computed once more.
const BLOCK: usize = 256;

/// What weights and their sums are counted in, to the weight of the best token. Sums of whole numbers do
/// not depend on their order, so that a device which adds in another one draws the same token. A row
/// of 2^24 entries fits.
pub const UNITS: f64 = (1u64 << 40) as f64;

/// A weight in units.
pub fn units(weight: f32) -> u64 {
    (f64::from(weight) * UNITS) as u64
}

/// The share of `total` that 53 random bits ask for, rounded down: always less than `total`.
pub fn share(bits: u64, total: u64) -> u64 {
    ((u128::from(bits) * u128::from(total)) >> 53) as u64
}

/// The greatest entry of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// Its token, the smallest of equals.
    pub token: u32,
    /// Its logit, a finite number.
    pub logit: f32,
}

impl Best {
    /// `None` when no entry is a finite number, or one is plus infinity.
    pub fn of(row: &[f32]) -> Option<Self> {
        let token = ops::argmax(row)?;
        let logit = row[token];
        logit.is_finite().then_some(Self { token: token as u32, logit })
    }
}

/// Weights `e^((logit - best) / temperature)` of a row, as sums over its blocks.
#[derive(Debug, Default)]
pub struct Weights {
    /// In units.
    sums: Vec<u64>,
    total: u64,
    is_number: bool,
    temperature: f32,
    best: f32,
}

impl Weights {
    /// With room for a row of a vocabulary.
    pub fn of(vocabulary: usize) -> Self {
        Self { sums: Vec::with_capacity(vocabulary.div_ceil(BLOCK)), ..Self::default() }
    }

    /// Computes the sums.
    pub fn compute(&mut self, row: &[f32], best: f32, temperature: f32) {
        (self.best, self.temperature) = (best, temperature);
        (self.total, self.is_number) = (0, true);
        self.sums.clear();
        let mut block = [0.0; BLOCK];
        for part in row.chunks(BLOCK) {
            let sum = self.block(part, &mut block);
            self.is_number &= !sum.is_nan();
            self.sums.push(units(sum));
            self.total += units(sum);
        }
    }

    /// Sum of all weights in units; the best token alone has [`UNITS`].
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Weights of a block, and their sum.
    fn block(&self, part: &[f32], weights: &mut [f32; BLOCK]) -> f32 {
        let weights = &mut weights[..part.len()];
        weigh(part.iter().copied(), self.best, self.temperature, weights)
    }

    /// The token at which the running sum over tokens by id passes the share of the total that `bits`
    /// ask for.
    pub fn token_at(&self, row: &[f32], bits: u64) -> Option<u32> {
        let target = share(bits, self.total);
        let mut below = 0;
        let block = self.sums.iter().position(|&sum| {
            let passes = below + sum > target;
            below += if passes { 0 } else { sum };
            passes
        })?;
        let first = block * BLOCK;
        let part = &row[first..row.len().min(first + BLOCK)];
        let mut weights = [0.0; BLOCK];
        self.block(part, &mut weights);
        let mut last = None;
        for (token, &weight) in (first as u32..).zip(&weights[..part.len()]) {
            if weight > 0.0 {
                below += units(weight);
                last = Some(token);
                if below > target {
                    break;
                }
            }
        }
        // Where rounding leaves the target at the end of the block: its last possible token.
        last
    }
}

/// Computes the weights of logits, as many as `weights` has room for; their sum in float32.
pub fn weigh(
    logits: impl Iterator<Item = f32>,
    best: f32,
    temperature: f32,
    weights: &mut [f32],
) -> f32 {
    // The reciprocal of the smallest temperatures is infinite.
    let scale = (1.0 / temperature).min(f32::MAX);
    for (weight, logit) in weights.iter_mut().zip(logits) {
        *weight = (logit - best) * scale;
    }
    ops::exp(weights)
}

/// Log of the sum of `e^(logit - best)` over a row, in float64; `None` when the row holds NaN.
pub fn log_sum(weights: &mut Weights, row: &[f32], best: Best) -> Option<f64> {
    weights.compute(row, best.logit, 1.0);
    weights.is_number.then(|| (weights.total() as f64 / UNITS).ln())
}
