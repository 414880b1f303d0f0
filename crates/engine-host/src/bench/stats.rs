//! Percentiles of samples, and what reading the clock costs.

use std::time::Instant;

use serde_json::{Value, json};

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Half of the samples are below it.
    pub median: f64,
    /// A tenth is.
    pub p10: f64,
    /// Nine tenths are.
    pub p90: f64,
    /// 99 of 100 are.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Summary {
    /// Of nanoseconds, each of which stands for `steps` steps; sorts them.
    pub fn of(samples: &mut [u64], steps: f64) -> Self {
        samples.sort_unstable();
        let at = |share: f64| match samples.len() {
            0 => 0.0,
            n => samples[((n - 1) as f64 * share).round() as usize] as f64 / steps / 1e3,
        };
        Self { median: at(0.5), p10: at(0.1), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }

    /// As an object with one field for each.
    pub fn to_json(self) -> Value {
        let round = |x: f64| (x * 1e4).round() / 1e4;
        json!({
            "median": round(self.median),
            "p10": round(self.p10),
            "p90": round(self.p90),
            "p99": round(self.p99),
            "max": round(self.max),
        })
    }
}

/// Nanoseconds between two readings of the clock with nothing between them.
pub fn clock_cost() -> u64 {
    let mut samples: Vec<u64> = (0..10_001)
        .map(|_| {
            let start = Instant::now();
            start.elapsed().as_nanos() as u64
        })
        .collect();
    samples.sort_unstable();
    samples[samples.len() / 2]
}

/// The middle of some figures.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_sorted_samples_per_step() {
        let mut samples: Vec<u64> = (0..=100).rev().map(|n| n * 4000).collect();
        let summary = Summary::of(&mut samples, 4.0);
        let expected = Summary { median: 50.0, p10: 10.0, p90: 90.0, p99: 99.0, max: 100.0 };
        assert_eq!(summary, expected);
        assert_eq!(Summary::of(&mut [], 1.0), Summary::default());
        assert_eq!(median(&[3.0, 1.0, 2.0, 10.0]), 2.5);
    }
}
