//! Rotary embedding: frequencies from the settings, and cosines and sines by position.

use std::f64::consts::TAU;
use std::sync::OnceLock;

use device::ops::{RopeLayout, rope};
use resource_api::{ResourceError, Result};

use crate::spec::{Llama3, PositionsSpec};

/// Positions whose angles are computed together, when the first of them is needed.
const CHUNK: usize = 256;

/// The frequencies of `spec` for heads of `head_dim`: pair `i` at position `p` is turned by
/// `p * frequencies[i]` radians.
///
/// # Errors
/// `INVALID` naming the setting that cannot be.
pub fn frequencies(spec: &PositionsSpec, head_dim: u32) -> Result<Vec<f64>> {
    spec.check()?;
    let dim = spec.rotary_dim.unwrap_or(head_dim);
    if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
        return Err(ResourceError::invalid(format!(
            "rotary_dim = {dim} must be even, and at most the head dimension {head_dim}"
        )));
    }
    let pairs = dim as usize / 2;
    if let Some(divisors) = spec.rope_freqs.as_ref().filter(|d| d.len() != pairs) {
        return Err(ResourceError::invalid(format!(
            "rope_freqs has {} values, but rotary_dim = {dim} needs {pairs}",
            divisors.len()
        )));
    }
    let llama3 = spec.llama3()?;
    let one = |pair: usize| {
        let base = spec.rope_theta.powf(-2.0 * pair as f64 / f64::from(dim)) / spec.rope_scale;
        match (&llama3, &spec.rope_freqs) {
            (Some(llama3), _) => llama3.scale(base),
            (None, Some(divisors)) => base / divisors[pair],
            (None, None) => base,
        }
    };
    Ok((0..pairs).map(one).collect())
}

impl Llama3 {
    /// Low frequencies are divided by the factor, high ones kept, with a ramp in between.
    fn scale(&self, frequency: f64) -> f64 {
        let turns = self.original * frequency / TAU;
        let keep = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        frequency * (keep + (1.0 - keep) / self.factor)
    }
}

/// Cosines and sines of every position up to a limit, filled in as they are needed.
///
/// An angle is computed in float64 and rounded once, so that a token is turned by the same bits in
/// whatever batch and at whatever position of a long text.
pub struct RopeTable {
    frequencies: Vec<f64>,
    head_dim: usize,
    layout: RopeLayout,
    chunks: Vec<OnceLock<Box<[f32]>>>,
}

impl RopeTable {
    /// A table for positions below `positions`.
    pub fn new(frequencies: Vec<f64>, head_dim: u32, interleave: bool, positions: u32) -> Self {
        let chunks = (positions as usize).div_ceil(CHUNK);
        Self {
            frequencies,
            head_dim: head_dim as usize,
            layout: if interleave { RopeLayout::Interleaved } else { RopeLayout::HalfSplit },
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Elements per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Cosines and sines of one position, a value for each pair.
    ///
    /// # Panics
    /// At a position past the table's limit; plans are checked against it.
    pub fn angles(&self, position: u32) -> (&[f32], &[f32]) {
        let pairs = self.frequencies.len();
        let position = position as usize;
        let chunk = self.chunks[position / CHUNK].get_or_init(|| self.fill(position / CHUNK));
        let first = position % CHUNK * 2 * pairs;
        chunk[first..first + 2 * pairs].split_at(pairs)
    }

    fn fill(&self, chunk: usize) -> Box<[f32]> {
        let mut values = Vec::with_capacity(CHUNK * 2 * self.frequencies.len());
        for position in chunk * CHUNK..(chunk + 1) * CHUNK {
            let angles = || self.frequencies.iter().map(|f| position as f64 * f);
            values.extend(angles().map(|angle| angle.cos() as f32));
            values.extend(angles().map(|angle| angle.sin() as f32));
        }
        values.into()
    }

    /// Turns all heads of one token.
    pub fn turn(&self, heads: &mut [f32], position: u32) {
        let (cos, sin) = self.angles(position);
        rope(heads, self.head_dim, cos, sin, self.layout);
    }

    /// What keys written under this table depend on, as bytes.
    pub fn fingerprint(&self) -> Vec<u8> {
        let interleaved = u8::from(matches!(self.layout, RopeLayout::Interleaved));
        let mut bytes = vec![interleaved];
        bytes.extend((self.head_dim as u32).to_le_bytes());
        bytes.extend(self.frequencies.iter().flat_map(|f| f.to_le_bytes()));
        bytes
    }
}

impl std::fmt::Debug for RopeTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let filled = self.chunks.iter().filter(|c| c.get().is_some()).count();
        write!(f, "RopeTable({} pairs, {filled} chunks)", self.frequencies.len())
    }
}
