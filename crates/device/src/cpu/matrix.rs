//! Weight matrices, repacked at load for the kernels that multiply by them.
//!
//! Sixteen rows of weights form a *panel*: for each step along a row, the panel holds the weights of
//! its 16 rows side by side, so that a vector lane is one output. Each output is then summed in the
//! order of its row, in one lane, whatever else is computed beside it.

mod activations;
mod float;
mod format;
mod int8;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::marker::PhantomData;

use self::activations::ActivationBlock;
use self::format::{Format, with_format, with_quantized};
use crate::block_type::BlockType;
use crate::cpu::features::CpuFeatures;
use crate::cpu::memory::AlignedBuffer;
use crate::cpu::simd::{LANES, Simd, dispatch};
use crate::error::{Error, Result, check_len, product};
use crate::parallel::{Parallel, Shared, for_each_chunk_mut, run_once_each};

/// What a product does with the vectors it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// Keeps them float32; weights are dequantized exactly and sums are float32.
    #[default]
    Float,
    /// Rounds each run of 32 to int8 with one float32 scale, as other engines do with quantized
    /// weights; sums within a run are exact integers, sums of runs float32. Weights stored as floats
    /// are multiplied as in [`Float`](Self::Float). A run with a NaN or an infinity makes the whole
    /// result NaN.
    Int8,
}

/// How to pack a matrix.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    pub activations: Activations,
    /// The instructions that products of this matrix will use.
    pub features: CpuFeatures,
}

impl PackOptions {
    /// For the instructions in use now.
    pub fn new(activations: Activations) -> Self {
        Self { activations, features: CpuFeatures::current() }
    }
}

impl Default for PackOptions {
    fn default() -> Self {
        Self::new(Activations::default())
    }
}

/// Weights of shape `[outputs, inputs]`.
#[derive(Debug)]
pub struct Matrix {
    block_type: BlockType,
    outputs: usize,
    inputs: usize,
    options: PackOptions,
    panel_bytes: usize,
    panels: AlignedBuffer,
}

/// Memory that products need besides their operands. It grows to the largest product it has served
/// and is reused after that; one per thread that calls [`Matrix::matmul`] is enough.
#[derive(Debug, Default)]
pub struct Scratch {
    blocks: Vec<ActivationBlock>,
    #[cfg(target_arch = "x86_64")]
    tiles: tiles::Memory,
}

impl Matrix {
    /// Repacks `bytes`, the `outputs` rows of `inputs` weights of a model file.
    ///
    /// # Errors
    /// When `inputs` is not whole blocks of the type, `bytes` does not have the size these numbers
    /// ask for, or memory is short.
    pub fn pack(
        block_type: BlockType,
        outputs: usize,
        inputs: usize,
        bytes: &[u8],
        options: PackOptions,
        parallel: &dyn Parallel,
    ) -> Result<Self> {
        let row_bytes = block_type.row_bytes(inputs)?;
        let need = product("a weight matrix", row_bytes, outputs)?;
        check_len("bytes of a weight matrix", bytes.len(), need)?;
        // Nor may padding to whole panels and blocks overflow; scales take less than the weights.
        let padded = product("a weight matrix", inputs.max(32), outputs.max(LANES))?;
        product("a weight matrix", padded, 16)?;

        let panel_bytes = with_format!(block_type, F => F::panel_bytes(inputs));
        let mut panels = AlignedBuffer::together(panel_bytes * outputs.div_ceil(LANES))?;
        if panel_bytes > 0 {
            for_each_chunk_mut(parallel, &mut panels, panel_bytes, |panel, to| {
                let first = panel * LANES;
                for lane in 0..LANES.min(outputs - first) {
                    let row = &bytes[(first + lane) * row_bytes..][..row_bytes];
                    with_format!(block_type, F => F::pack(row, lane, to));
                }
            });
        }
        Ok(Self { block_type, outputs, inputs, options, panel_bytes, panels })
    }

    /// Rows of the matrix: the width of a result.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix: the width of an operand.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// How the weights were stored in the model file.
    pub fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Bytes that the repacked weights take.
    pub fn packed_bytes(&self) -> usize {
        self.panels.len()
    }

    /// Writes row `i` to `out`, dequantized exactly: the lookup in an embedding table.
    ///
    /// # Errors
    /// When there is no such row or `out` is not one row long.
    pub fn row(&self, i: usize, out: &mut [f32]) -> Result<()> {
        check_len("an embedding row", out.len(), self.inputs)?;
        if i >= self.outputs {
            return Err(Error::OutOfRange { what: "row", index: i, limit: self.outputs });
        }
        let panel = &self.panels[i / LANES * self.panel_bytes..][..self.panel_bytes];
        with_format!(self.block_type, F => float::row::<F>(
            self.options.features, panel, i % LANES, out
        ));
        Ok(())
    }

    /// Multiplies `rows` vectors: `out[r] = self * x[r]`, with `x` of shape `[rows, inputs]` and `out`
    /// of shape `[rows, outputs]`.
    ///
    /// A row of the result depends on that row of `x` alone, to the bit.
    ///
    /// # Errors
    /// When a slice does not have the length its shape asks for.
    pub fn matmul(
        &self,
        x: &[f32],
        rows: usize,
        out: &mut [f32],
        scratch: &mut Scratch,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        matmul_all([(self, out)], x, rows, scratch, parallel)
    }

    fn uses_int8(&self) -> bool {
        let quantized = with_quantized!(self.block_type, _F => true, else false);
        quantized && self.options.activations == Activations::Int8
    }

    /// Makes room in `scratch` for threads that multiply so many vectors on tiles.
    fn fit_tiles(&self, rows: usize, threads: usize, scratch: &mut Scratch) {
        #[cfg(target_arch = "x86_64")]
        if self.uses_int8() {
            let features = self.options.features;
            let tiled = with_quantized!(
                self.block_type,
                F => tiles::takes::<F>(features, rows),
                else false
            );
            if tiled {
                let panels = self.panels_per_task(threads).min(self.panels());
                scratch.tiles.fit(threads, panels, self.inputs);
            }
        }
        let _ = (rows, threads, scratch);
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Panels that one task computes: four tasks a thread, which evens out what other processes take
    /// of the cores.
    fn panels_per_task(&self, threads: usize) -> usize {
        let panels = (self.panels() / (4 * threads)).clamp(1, 16);
        if self.uses_int8() { panels } else { panels.next_multiple_of(float::GROUP) }
    }

    /// The part of a product that panels `first..end` make up.
    fn multiply_panels(&self, first: usize, end: usize, x: &Operand<'_>, out: &Outputs<'_>) {
        let (inputs, panel_bytes, rows) = (self.inputs, self.panel_bytes, x.rows);
        let panels = &self.panels[first * panel_bytes..end * panel_bytes];
        let features = self.options.features;
        if self.uses_int8() {
            #[cfg(target_arch = "x86_64")]
            let tiles = x.tiles;
            let x = x.blocks;
            with_quantized!(self.block_type, F => {
                let format = PhantomData;
                let mut task =
                    int8::Task::<F> { panels, panel_bytes, first, inputs, rows, from: 0, x, out, format };
                #[cfg(target_arch = "x86_64")]
                {
                    task.from = tiles::multiply(features, &task, tiles);
                }
                if task.from < rows {
                    dispatch(features, task);
                }
            }, else unreachable!("float weights do not use int8"));
        } else {
            let x = x.floats;
            let task = float::Task { panels, panel_bytes, first, inputs, rows, x, out };
            with_format!(self.block_type, F => task.run::<F>(features))
        }
    }
}

/// Several products of the same vectors, as [`Matrix::matmul`] computes each, in one go: the vectors
/// are prepared once and the threads start once.
///
/// # Errors
/// As [`Matrix::matmul`], before anything is computed.
pub fn matmul_all<const N: usize>(
    products: [(&Matrix, &mut [f32]); N],
    x: &[f32],
    rows: usize,
    scratch: &mut Scratch,
    parallel: &dyn Parallel,
) -> Result<()> {
    for (matrix, out) in &products {
        check_len("x of a product", x.len(), product("x", rows, matrix.inputs)?)?;
        check_len("out of a product", out.len(), product("out", rows, matrix.outputs)?)?;
    }
    if rows == 0 {
        return Ok(());
    }
    if x.is_empty() {
        products.into_iter().for_each(|(_, out)| out.fill(0.0));
        return Ok(());
    }
    if let Some((matrix, _)) = products.iter().find(|(matrix, _)| matrix.uses_int8()) {
        activations::quantize(matrix.options.features, x, rows, &mut scratch.blocks, parallel);
    }
    let threads = parallel.threads();
    products.iter().for_each(|(matrix, _)| matrix.fit_tiles(rows, threads, scratch));
    let operand = Operand {
        rows,
        floats: x,
        blocks: &scratch.blocks,
        #[cfg(target_arch = "x86_64")]
        tiles: &scratch.tiles,
    };

    let tasks_of = |m: &Matrix| m.panels().div_ceil(m.panels_per_task(threads));
    let tasks = products.iter().map(|(matrix, _)| tasks_of(matrix)).sum();
    let products = products.map(|(matrix, out)| (matrix, Outputs::new(out, matrix.outputs)));
    run_once_each(parallel, tasks, &|task| {
        let mut task = task;
        for (matrix, out) in &products {
            let tasks = tasks_of(matrix);
            if task < tasks {
                let first = task * matrix.panels_per_task(threads);
                let end = matrix.panels().min(first + matrix.panels_per_task(threads));
                return matrix.multiply_panels(first, end, &operand, out);
            }
            task -= tasks;
        }
    });
    Ok(())
}

/// The vectors of a product, in both forms; `blocks` is filled only where a matrix uses int8.
struct Operand<'a> {
    rows: usize,
    floats: &'a [f32],
    blocks: &'a [ActivationBlock],
    #[cfg(target_arch = "x86_64")]
    tiles: &'a tiles::Memory,
}

/// The result of a product, written by panels of 16 outputs from several threads.
struct Outputs<'a> {
    values: Shared<'a, f32>,
    width: usize,
}

impl<'a> Outputs<'a> {
    fn new(values: &'a mut [f32], width: usize) -> Self {
        Self { values: Shared::new(values), width }
    }

    /// The outputs of a panel for a row: 16, or fewer in the last panel.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    fn part(&self, row: usize, panel: usize) -> &mut [f32] {
        let first = panel * LANES;
        // SAFETY: parts of different panels or rows do not overlap. Each panel belongs to one task,
        // which runs once, and neither `load` nor `store` keeps a part.
        unsafe { self.values.get(row * self.width + first, LANES.min(self.width - first)) }
    }

    #[inline(always)]
    fn load<S: Simd>(&self, s: S, row: usize, panel: usize) -> S::F {
        let part = self.part(row, panel);
        match part.first_chunk() {
            Some(all) => s.load(all),
            None => s.load_part(part),
        }
    }

    #[inline(always)]
    fn store<S: Simd>(&self, s: S, row: usize, panel: usize, x: S::F) {
        let part = self.part(row, panel);
        match part.first_chunk_mut() {
            Some(all) => s.store(x, all),
            None => s.store_part(x, part),
        }
    }
}

#[cfg(test)]
mod tests;
