//! Sampling on a device: the CPU's choice, to the token.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use resource_api::{DType, TensorView, TensorViewMut};

use super::context::Context;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::{refuse, shaped, strided};
use crate::error::{Error, Result};

/// Entries of a row that one block of threads looks at.
const CHUNK: usize = 8192;
/// Entries whose weights are summed together.
const BLOCK: usize = 256;

/// How one row is sampled. The definition of each field, and what is done with it, is the sampler's.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Key of the random numbers.
    pub seed: u64,
    /// Which of several answers this is.
    pub choice: u32,
    /// Place in the sequence of random numbers.
    pub position: u32,
    /// 0 takes the best token.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub penalty: f32,
    /// Which of the call's sets of seen tokens is this row's; [`SampleRow::NO_SET`] for none.
    pub set: u32,
    /// Fills the struct up; 0.
    pub unused: u64,
}

impl SampleRow {
    /// No set of seen tokens.
    pub const NO_SET: u32 = u32::MAX;
}

/// What became of a row.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Pod, Zeroable)]
pub struct SampledRow {
    /// The token.
    pub token: u32,
    /// 0, or 1 for a row that is no distribution.
    pub status: u32,
    /// Log-probability of the token under the model's own logits.
    pub logprob: f32,
}

/// The sampling kernels, with scratch memory for rows of one vocabulary.
#[derive(Debug)]
pub struct RowSampler {
    vocabulary: usize,
    rows: usize,
    best: Kernel,
    sums: Kernel,
    pick: Kernel,
    bests: DeviceBuffer<u64>,
    keys: DeviceBuffer<u32>,
    block_sums: DeviceBuffer<u64>,
    how: DeviceBuffer<SampleRow>,
    out: DeviceBuffer<SampledRow>,
    /// Sets of seen tokens.
    seen: (PinnedBuffer<u64>, DeviceBuffer<u64>),
    /// Host memory of the call that goes on and of the one before it, whose answer may not have been read.
    turns: [Turn; 2],
    /// Which of them is next.
    next: usize,
}

/// The host's side of a call.
#[derive(Debug)]
struct Turn {
    how: PinnedBuffer<SampleRow>,
    out: PinnedBuffer<SampledRow>,
}

impl RowSampler {
    /// Scratch memory for up to `rows` rows at a time, of which `sets` may have a set of seen tokens.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; as for [`Module::load`].
    pub fn new(
        context: &Arc<Context>,
        vocabulary: usize,
        rows: usize,
        sets: usize,
    ) -> Result<Self> {
        let module = Module::load(context, &Instance::of("sample.cu"))?;
        let (chunks, blocks) = (vocabulary.div_ceil(CHUNK), vocabulary.div_ceil(BLOCK));
        let words = sets * vocabulary.div_ceil(64);
        let turn = || -> Result<Turn> {
            Ok(Turn {
                how: PinnedBuffer::zeroed(context, rows)?,
                out: PinnedBuffer::zeroed(context, rows)?,
            })
        };
        Ok(Self {
            vocabulary,
            rows,
            best: module.kernel("sample_best")?,
            sums: module.kernel("sample_sums")?,
            pick: module.kernel("sample_pick")?,
            bests: DeviceBuffer::new(context, rows * 2 * chunks)?,
            keys: DeviceBuffer::new(context, rows * blocks)?,
            block_sums: DeviceBuffer::new(context, rows * 2 * blocks)?,
            how: DeviceBuffer::new(context, rows)?,
            out: DeviceBuffer::new(context, rows)?,
            seen: (PinnedBuffer::zeroed(context, words)?, DeviceBuffer::new(context, words)?),
            turns: [turn()?, turn()?],
            next: 0,
        })
    }

    /// Bytes of device memory that [`RowSampler::new`] takes.
    pub fn bytes(vocabulary: usize, rows: usize, sets: usize) -> u64 {
        let (chunks, blocks) = (vocabulary.div_ceil(CHUNK), vocabulary.div_ceil(BLOCK));
        let row = 16 * chunks + 20 * blocks + size_of::<SampleRow>() + size_of::<SampledRow>();
        (rows * row + sets * vocabulary.div_ceil(64) * 8) as u64
    }

    /// Words of a set of seen tokens: a bit for each token, lowest first.
    pub fn set_words(&self) -> usize {
        self.vocabulary.div_ceil(64)
    }

    /// Samples a token from each row of `logits` `[rows, vocabulary or more]` f32; log-probabilities are
    /// taken from `model`, the same rows before anything changed them. `seen` fills set `i` for a row
    /// that has `set == i`, of `sets`. `tokens`, u32 `[rows]`, gets the tokens by themselves. Later:
    /// [`RowSampler::answer`] has what came of the call whose number this returns, until the one after
    /// the next.
    ///
    /// # Errors
    /// [`Error::Tensor`] for tensors of another shape or type, [`Error::Length`] for more rows than
    /// there is memory for, [`Error::Cuda`] under capture.
    #[allow(clippy::too_many_arguments)]
    pub fn begin(
        &mut self,
        stream: &Stream,
        model: &TensorView<'_>,
        logits: &TensorView<'_>,
        how: &[SampleRow],
        sets: usize,
        fill_sets: impl FnOnce(&mut [u64]),
        tokens: Option<&mut TensorViewMut<'_>>,
    ) -> Result<usize> {
        let rows = how.len();
        if rows > self.rows {
            let (what, unit) = ("rows to sample", "rows");
            return Err(Error::Length { what, unit, got: rows, need: self.rows });
        }
        if how.iter().any(|row| row.set != SampleRow::NO_SET && row.set as usize >= sets) {
            return refuse("rows to sample", format!("a row names a set past the {sets} given"));
        }
        let context = stream.context().clone();
        let model = self.rows_of("logits of the model", &context, model, rows)?;
        let logits = self.rows_of("logits", &context, logits, rows)?;
        let tokens = match tokens {
            Some(tokens) => shaped("sampled tokens", &context, tokens.raw(), DType::U32, &[rows])?,
            None => 0,
        };
        let turn = self.next;
        self.next = (turn + 1) % self.turns.len();
        if rows == 0 {
            return Ok(turn);
        }
        let staging = &mut self.turns[turn].how;
        staging.as_mut_slice()?[..rows].copy_from_slice(how);
        stream.upload(staging, 0, &mut self.how, 0, rows)?;
        let seen = if sets > 0 { self.upload_sets(stream, sets, fill_sets)? } else { 0 };

        let (chunks, blocks) = (self.vocabulary.div_ceil(CHUNK), self.vocabulary.div_ceil(BLOCK));
        let mut common = Args::default();
        common.push(model.0).push(model.1).push(logits.0).push(logits.1);
        common.push(self.vocabulary as u32).push(seen).push(2 * self.set_words() as u32);
        common.push(self.how.address()).push(self.bests.address());
        let sizes = |args: &mut Args| {
            args.push(chunks as u32).push(blocks as u32);
        };
        let grid = |blocks: usize, threads: u32| Grid {
            blocks: (blocks as u32, rows as u32, 1),
            threads: (threads, 1, 1),
            shared: 0,
        };
        let mut best = common.clone();
        best.push(self.keys.address());
        sizes(&mut best);
        let mut sums = common.clone();
        sums.push(self.block_sums.address());
        sizes(&mut sums);
        let mut pick = common;
        pick.push(self.keys.address()).push(self.block_sums.address());
        sizes(&mut pick);
        pick.push(self.out.address()).push(tokens);
        // SAFETY: the signatures begin with (const float*, i64, const float*, i64, u32, const u32*, u32,
        // const SampleRow*, u64*), then (u32*), (u64*) or (u32*, u64*), two u32, and the last (Sampled*, u32*).
        // The views promise `rows` rows of the vocabulary, scratch memory is made for as many, and every
        // row's set is one of those uploaded (checked). Each kernel reads what the one before wrote.
        unsafe {
            self.best.launch(stream, grid(chunks, 128), &best)?;
            self.sums.launch_early(stream, grid(chunks, 128), &sums)?;
            self.pick.launch_early(stream, grid(1, 1024), &pick)?;
        }
        stream.download(&self.out, 0, &mut self.turns[turn].out, 0, rows)?;
        Ok(turn)
    }

    /// What came of a call of [`RowSampler::begin`] with so many rows. Waits for it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a call or a row that there is not; that of a kernel that failed before.
    pub fn answer(&self, call: usize, rows: usize) -> Result<&[SampledRow]> {
        let out = |what: &'static str, index: usize, limit: usize| Error::OutOfRange {
            what,
            index,
            limit,
        };
        let turn = self.turns.get(call).ok_or_else(|| out("call", call, self.turns.len()))?;
        let all = turn.out.as_slice()?;
        all.get(..rows).ok_or_else(|| out("sampled row", rows, all.len()))
    }

    /// Address of the sets on the device.
    fn upload_sets(
        &mut self,
        stream: &Stream,
        sets: usize,
        fill: impl FnOnce(&mut [u64]),
    ) -> Result<u64> {
        let words = self.set_words();
        let (staging, device) = &mut self.seen;
        if sets * words > staging.len() {
            let (what, unit) = ("sets of seen tokens", "sets");
            return Err(Error::Length { what, unit, got: sets, need: staging.len() / words });
        }
        fill(&mut staging.as_mut_slice()?[..sets * words]);
        stream.upload(staging, 0, device, 0, sets * words)?;
        Ok(device.address())
    }

    /// Address and stride of rows of logits.
    fn rows_of(
        &self,
        what: &'static str,
        context: &Context,
        logits: &TensorView<'_>,
        rows: usize,
    ) -> Result<(u64, i64)> {
        let address = strided(what, context, logits.raw(), DType::F32)?;
        match (logits.shape(), logits.raw().strides) {
            (&[n, width], [stride, 1, ..])
                if n == rows as i64 && width >= self.vocabulary as i64 && stride >= 0 =>
            {
                Ok((address, stride))
            }
            (shape, _) => {
                refuse(what, format!("shape {shape:?}, need [{rows}, {}]", self.vocabulary))
            }
        }
    }
}
