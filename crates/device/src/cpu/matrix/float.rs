//! Products with float32 vectors and exactly dequantized weights.
//!
//! A few panels at a time are expanded to floats, as much of them as the first-level cache holds,
//! and multiplied with all vectors. Between such stretches the sums wait in the output, which
//! changes nothing: a float32 is stored and loaded as it is.

use std::marker::PhantomData;

use super::Outputs;
use super::format::{BLOCK, Expanded, Format};
use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

/// Panels that are expanded together.
pub(super) const GROUP: usize = 4;

/// Blocks that are expanded together: with [`GROUP`] panels these are 32 KiB of floats.
const STRETCH: usize = 4;

/// Neighbouring panels times all vectors.
pub(super) struct Task<'a> {
    pub(super) panels: &'a [u8],
    pub(super) panel_bytes: usize,
    /// Number of the first panel, that is, its first output over 16.
    pub(super) first: usize,
    pub(super) inputs: usize,
    pub(super) rows: usize,
    pub(super) x: &'a [f32],
    pub(super) out: &'a Outputs<'a>,
}

static ZEROS: Expanded = [[0.0; LANES]; BLOCK];

type Space = [[Expanded; STRETCH]; GROUP];

impl Task<'_> {
    pub(super) fn run<F: Format>(self, features: CpuFeatures) {
        let mut space: Space = [[ZEROS; STRETCH]; GROUP];
        let mut first = self.first;
        for group in self.panels.chunks(GROUP * self.panel_bytes) {
            for start in (0..self.inputs).step_by(STRETCH * BLOCK) {
                let len = (self.inputs - start).min(STRETCH * BLOCK);
                let mut blocks = [[&ZEROS; STRETCH]; GROUP];
                let panels = group.chunks_exact(self.panel_bytes);
                let count = panels.len();
                for ((panel, to), space) in panels.zip(&mut blocks).zip(&mut space) {
                    let number = start / BLOCK;
                    let format = PhantomData::<F>;
                    dispatch(features, Expand { panel, number, len, space, to, format });
                }
                let task = &self;
                dispatch(features, Stretch { task, blocks, count, panel: first, start, len });
            }
            first += GROUP;
        }
    }
}

/// Turns a stretch of a panel into floats.
struct Expand<'a, 'b, F> {
    panel: &'a [u8],
    /// The number of its first block.
    number: usize,
    len: usize,
    space: &'a mut [Expanded; STRETCH],
    to: &'b mut [&'a Expanded; STRETCH],
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Expand<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.len.div_ceil(BLOCK);
        for (b, (to, space)) in self.to.iter_mut().zip(self.space).take(blocks).enumerate() {
            *to = F::expand(s, self.panel, self.number + b, space);
        }
    }
}

/// A stretch of up to [`GROUP`] panels times all vectors.
struct Stretch<'a> {
    task: &'a Task<'a>,
    blocks: [[&'a Expanded; STRETCH]; GROUP],
    /// How many panels there are; the other blocks are zeros.
    count: usize,
    /// The number of the first panel.
    panel: usize,
    /// Where along the rows the stretch begins, and its length.
    start: usize,
    len: usize,
}

impl Kernel for Stretch<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = 0;
        while row < self.task.rows {
            row += if S::REGISTERS >= 32 {
                match self.task.rows - row {
                    6.. => self.tile::<S, GROUP, 6>(s, 0, row),
                    4.. => self.tile::<S, GROUP, 4>(s, 0, row),
                    2.. => self.tile::<S, GROUP, 2>(s, 0, row),
                    _ => self.tile::<S, GROUP, 1>(s, 0, row),
                }
            } else {
                // The sums of one panel fill the registers.
                match self.task.rows - row {
                    6.. => self.panel_by_panel::<S, 6>(s, row),
                    3.. => self.panel_by_panel::<S, 3>(s, row),
                    _ => self.tile::<S, GROUP, 1>(s, 0, row),
                }
            };
        }
    }
}

impl Stretch<'_> {
    #[inline(always)]
    fn panel_by_panel<S: Simd, const R: usize>(&self, s: S, row: usize) -> usize {
        for p in 0..self.count {
            self.tile::<S, 1, R>(s, p, row);
        }
        R
    }

    /// Panels `first..first + P` of the stretch times `R` vectors from `row`; returns `R`.
    #[inline(always)]
    fn tile<S: Simd, const P: usize, const R: usize>(
        &self,
        s: S,
        first: usize,
        row: usize,
    ) -> usize {
        let Task { x, inputs, out, .. } = self.task;
        let panels = P.min(self.count - first);
        let mut sums = [[s.splat(0.0); P]; R];
        if self.start > 0 {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (p, sum) in sums.iter_mut().enumerate().take(panels) {
                    *sum = out.load(s, row + r, self.panel + first + p);
                }
            }
        }
        for b in 0..self.len.div_ceil(BLOCK) {
            let mut weights = [&ZEROS; P];
            for (to, blocks) in weights.iter_mut().zip(&self.blocks[first..]) {
                *to = blocks[b];
            }
            let mut vectors = [&ZEROS_X; R];
            let mut padded = [ZEROS_X; R];
            for (r, (to, padded)) in vectors.iter_mut().zip(&mut padded).enumerate() {
                let from = &x[(row + r) * inputs + self.start + b * BLOCK..];
                let left = self.len - b * BLOCK;
                *to = match from.first_chunk() {
                    Some(x) if left >= BLOCK => x,
                    _ => {
                        padded[..left].copy_from_slice(&from[..left]);
                        padded
                    }
                };
            }
            for k in 0..BLOCK {
                for r in 0..R {
                    let x = s.splat(vectors[r][k]);
                    for p in 0..P {
                        sums[r][p] = s.fma(s.load(&weights[p][k]), x, sums[r][p]);
                    }
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate().take(panels) {
                out.store(s, row + r, self.panel + first + p, sum);
            }
        }
        R
    }
}

static ZEROS_X: [f32; BLOCK] = [0.0; BLOCK];

/// Lane `lane` of a panel, dequantized.
pub(super) fn row<F: Format>(features: CpuFeatures, panel: &[u8], lane: usize, out: &mut [f32]) {
    dispatch(features, Row::<F> { panel, lane, out, format: PhantomData });
}

struct Row<'a, F> {
    panel: &'a [u8],
    lane: usize,
    out: &'a mut [f32],
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Row<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut space = ZEROS;
        for (block, out) in self.out.chunks_mut(BLOCK).enumerate() {
            let weights = F::expand(s, self.panel, block, &mut space);
            for (to, lanes) in out.iter_mut().zip(weights) {
                *to = lanes[self.lane];
            }
        }
    }
}
