//! One row of logits: its greatest entry, its weights, and the token at a given share of them.

use device::ops;

/// Elements whose weights are computed together. A row's weights are not kept: to find a token, its
/// block is computed once more.
const BLOCK: usize = 256;

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
    sums: Vec<f64>,
    temperature: f32,
    best: f32,
}

impl Weights {
    /// Computes the sums. NaN in the row becomes NaN in the total.
    pub fn compute(&mut self, row: &[f32], best: f32, temperature: f32) {
        (self.best, self.temperature) = (best, temperature);
        self.sums.clear();
        let mut block = [0.0; BLOCK];
        for part in row.chunks(BLOCK) {
            let (scale, sum) = self.block(part, &mut block);
            self.sums.push(scale * f64::from(sum));
        }
    }

    /// Sum of all weights; the best token alone has 1.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Weights of a block as a common factor and float32 values; and the sum of those.
    fn block(&self, part: &[f32], values: &mut [f32; BLOCK]) -> (f64, f32) {
        let values = &mut values[..part.len()];
        for (value, logit) in values.iter_mut().zip(part) {
            // Dividing, since 1 / t of the smallest temperatures is infinite.
            *value = (logit - self.best) / self.temperature;
        }
        let (greatest, sum) = ops::exponentials(values);
        match greatest == f32::NEG_INFINITY {
            true => (0.0, sum),
            false => (f64::from(greatest).exp(), sum),
        }
    }

    /// The token at which the running sum over tokens by id passes `share` of the total.
    pub fn token_at(&self, row: &[f32], share: f64) -> Option<u32> {
        let target = share * self.total();
        let (mut running, mut below, mut found) = (0.0, 0.0, None);
        for (i, &sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            (below, found) = (running, Some(i));
            running += sum;
            if running > target {
                break;
            }
        }
        let first = found? * BLOCK;
        let part = &row[first..row.len().min(first + BLOCK)];
        let mut values = [0.0; BLOCK];
        let (scale, _) = self.block(part, &mut values);
        let mut last = None;
        for (token, &value) in (first as u32..).zip(&values[..part.len()]) {
            let weight = scale * f64::from(value);
            if weight > 0.0 {
                below += weight;
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

/// Log of the sum of `e^(logit - best)` over a row, in float64; `None` when the row holds NaN.
pub fn log_sum(weights: &mut Weights, row: &[f32], best: Best) -> Option<f64> {
    weights.compute(row, best.logit, 1.0);
    let total = weights.total();
    (!total.is_nan()).then(|| total.ln())
}
