//! Sampling on a CUDA device: the same choice as on the CPU, from logits that stay there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::Budget;
use device::cuda::{
    Context, DeviceBuffer, PinnedBuffer, RowSampler, SampleRow, SampledRow, Stream, read_tensor,
};
use resource_api::{
    EngineResourceInfo, HostServicesHandle, LogitsProcessor, LogitsProcessorHandle, RequestId,
    ResourceError, Result, Sampled, StepContext, StepId, TensorView, TensorViewMut,
};

use crate::draw::{Draw, Scratch};

/// Kernels and scratch memory.
#[derive(Debug)]
pub(crate) struct Cuda {
    context: Arc<Context>,
    vocabulary: usize,
    max_rows: usize,
    state: Mutex<State>,
    host: HostServicesHandle,
    _budget: Budget,
}

#[derive(Debug)]
struct State {
    sampler: RowSampler,
    rows: Vec<SampleRow>,
    processing: Option<Processing>,
    /// Calls whose answers have not been read: step, number of the call, rows.
    begun: VecDeque<(StepId, usize, usize)>,
}

/// What is needed where processors change the logits.
#[derive(Debug)]
struct Processing {
    /// The model's logits.
    model: DeviceBuffer<f32>,
    /// Logits for processors that work on the host; empty if there are none.
    on_host: PinnedBuffer<f32>,
    _budget: Budget,
}

impl Cuda {
    /// Loads the kernels and allocates for the engine's largest batch.
    ///
    /// # Errors
    /// `UNSUPPORTED` on a machine without the driver; `EXHAUSTED` without memory.
    pub(crate) fn new(
        info: &EngineResourceInfo,
        vocabulary: usize,
        with_penalties: bool,
    ) -> Result<Self> {
        let context = Context::of_device(info.device)?;
        let max_rows = info.limits.max_batch.max(1) as usize;
        let sets = if with_penalties { max_rows } else { 0 };
        let bytes = RowSampler::bytes(vocabulary, max_rows, sets);
        let budget = Budget::take(&info.host, info.device, bytes)?;
        let sampler = RowSampler::new(&context, vocabulary, max_rows, sets)?;
        let state = Mutex::new(State {
            sampler,
            rows: Vec::new(),
            processing: None,
            begun: VecDeque::new(),
        });
        let host = info.host.clone();
        Ok(Self { context, vocabulary, max_rows, state, host, _budget: budget })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a copy of the logits, which processors are going to change, some of them on the host.
    ///
    /// # Errors
    /// `EXHAUSTED` without memory.
    pub(crate) fn prepare_processing(&self, on_host: bool) -> Result<()> {
        let elements = self.max_rows * self.vocabulary;
        let budget = Budget::take(&self.host, self.context.device(), 4 * elements as u64)?;
        self.state().processing = Some(Processing {
            model: DeviceBuffer::new(&self.context, elements)?,
            on_host: PinnedBuffer::zeroed(&self.context, if on_host { elements } else { 0 })?,
            _budget: budget,
        });
        Ok(())
    }

    /// Samples a token for each row of `logits`, as `draw` says of it, after `processors` have changed them.
    ///
    /// # Errors
    /// `INVALID` for more rows than the engine's batch, and for tensors of another shape or place.
    pub(crate) fn sample<'d>(
        &self,
        ctx: &StepContext<'_>,
        draw: impl Fn(usize) -> Draw<'d>,
        logits: &mut TensorViewMut<'_>,
        processors: &[LogitsProcessorHandle],
        rids: &[RequestId],
        out: &mut [Sampled],
    ) -> Result<()> {
        self.check_rows(out.len())?;
        let stream = Stream::of_step(&self.context, ctx)?;
        let State { sampler, rows, processing, .. } = &mut *self.state();
        let mut sets = 0;
        rows.clear();
        rows.extend((0..out.len()).map(|i| {
            let draw = draw(i);
            let set = if draw.seen.is_some() { sets } else { SampleRow::NO_SET };
            sets += u32::from(draw.seen.is_some());
            row(&draw, set)
        }));
        let draws = (0..out.len()).map(&draw);
        let fill = |words: &mut [u64]| {
            let seen = draws.filter_map(|draw| Some((draw.seen?, draw.fresh)));
            for ((seen, fresh), set) in seen.zip(words.chunks_mut(self.vocabulary.div_ceil(64))) {
                seen.copy_with(fresh, set);
            }
        };
        let sets = sets as usize;
        let call = match processing {
            Some(processing) if !processors.is_empty() => {
                let &[count, width] = logits.shape() else { return Err(not_rows(logits)) };
                let shape = [count, width].map(|n| n.max(0) as usize);
                stream.copy(&logits.view(), &mut processing.model.view_mut(&shape)?)?;
                let mut on_host = OnHost { stream: &stream, room: &mut processing.on_host, shape };
                on_host.process(processors, logits, |processor, logits| {
                    processor.process(ctx, rids, logits)
                })?;
                let model = processing.model.view(&shape)?;
                sampler.begin(&stream, &model, &logits.view(), rows, sets, fill, None)?
            }
            _ => sampler.begin(&stream, &logits.view(), &logits.view(), rows, sets, fill, None)?,
        };
        give(sampler.answer(call, out.len())?, out);
        Ok(())
    }

    /// Begins to sample a token for each of `count` rows of `logits`, none of which has seen anything that
    /// counts; `tokens` gets them.
    ///
    /// # Errors
    /// As for [`Cuda::sample`].
    pub(crate) fn begin<'d>(
        &self,
        ctx: &StepContext<'_>,
        count: usize,
        draw: impl Fn(usize) -> Draw<'d>,
        logits: &TensorView<'_>,
        tokens: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.check_rows(count)?;
        let stream = Stream::of_step(&self.context, ctx)?;
        let State { sampler, rows, begun, .. } = &mut *self.state();
        rows.clear();
        rows.extend((0..count).map(|i| row(&draw(i), SampleRow::NO_SET)));
        let call = sampler.begin(&stream, logits, logits, rows, 0, |_| {}, Some(tokens))?;
        // One that nobody asked for has no answer any more.
        begun.retain(|&(_, other, _)| other != call);
        begun.push_back((ctx.step(), call, count));
        Ok(())
    }

    /// Waits for what [`Cuda::begin`] began in a step.
    ///
    /// # Errors
    /// `WRONG_STATE` for a step that began nothing, or was asked for already.
    pub(crate) fn end(&self, step: StepId, out: &mut [Sampled]) -> Result<()> {
        let State { sampler, begun, .. } = &mut *self.state();
        let at = begun.iter().position(|&(other, _, rows)| other == step && rows == out.len());
        let Some((_, call, rows)) = at.and_then(|at| begun.remove(at)) else {
            return Err(not_begun(step, out.len()));
        };
        give(sampler.answer(call, rows)?, out);
        Ok(())
    }

    fn check_rows(&self, rows: usize) -> Result<()> {
        if rows <= self.max_rows {
            return Ok(());
        }
        let what = format!("{rows} rows to sample; the engine's batch has {}", self.max_rows);
        Err(ResourceError::invalid(what).with_amounts(rows as u64, self.max_rows as u64))
    }

    /// Samples the rows with adjustments anew, on the host: few requests have any, and the choice is the
    /// same from the same logits.
    ///
    /// # Errors
    /// `INTERNAL` when the logits cannot be read.
    pub(crate) fn sample_adjusted<'d>(
        &self,
        draw: impl Fn(usize) -> Draw<'d>,
        logits: &TensorView<'_>,
        out: &mut [Sampled],
        scratch: &mut Scratch,
    ) -> Result<()> {
        if (0..out.len()).all(|i| draw(i).adjust.is_none()) {
            return Ok(());
        }
        let rows = self.read(logits)?;
        let model = match &self.state().processing {
            Some(Processing { model, .. }) => {
                Some(self.read(&model.view(&[out.len(), self.vocabulary])?)?)
            }
            None => None,
        };
        let model = model.as_ref().unwrap_or(&rows);
        let row = |all: &'_ [f32], i: usize| {
            i * self.vocabulary..((i + 1) * self.vocabulary).min(all.len())
        };
        for (i, out) in out.iter_mut().enumerate() {
            let draw = draw(i);
            if draw.adjust.is_some() {
                let (model, rows) = (&model[row(model, i)], &rows[row(&rows, i)]);
                *out = crate::draw::draw(model, rows, &draw, scratch);
            }
        }
        Ok(())
    }

    /// One row of logits, on the host. Waits for the device.
    ///
    /// # Errors
    /// `INTERNAL` for a tensor of another type or place.
    pub(crate) fn read(&self, logits: &TensorView<'_>) -> Result<Vec<f32>> {
        Ok(read_tensor(&self.context, logits)?)
    }
}

/// Logits of a device, for processors that work on the host.
struct OnHost<'a> {
    stream: &'a Stream,
    room: &'a mut PinnedBuffer<f32>,
    shape: [usize; 2],
}

impl OnHost<'_> {
    /// Has every processor change the logits, in order. Those for the host that follow each other share one
    /// copy there and back.
    fn process(
        &mut self,
        processors: &[LogitsProcessorHandle],
        logits: &mut TensorViewMut<'_>,
        mut apply: impl FnMut(&LogitsProcessorHandle, &mut TensorViewMut<'_>) -> Result<()>,
    ) -> Result<()> {
        for run in processors.chunk_by(|a, b| a.takes_device() == b.takes_device()) {
            if run[0].takes_device() {
                run.iter().try_for_each(|processor| apply(processor, logits))?;
                continue;
            }
            self.stream.download_tensor(&logits.view(), self.room)?;
            let elements = self.shape[0] * self.shape[1];
            let rows = &mut self.room.as_mut_slice()?[..elements];
            let mut rows = TensorViewMut::from_slice(rows, &self.shape);
            run.iter().try_for_each(|processor| apply(processor, &mut rows))?;
            self.stream.upload_tensor(self.room, logits)?;
        }
        Ok(())
    }
}

fn give(rows: &[SampledRow], out: &mut [Sampled]) {
    for (out, row) in out.iter_mut().zip(rows) {
        *out = Sampled { token: row.token, status: row.status, logprob: row.logprob };
    }
}

/// The error of who asks for samples that nobody began.
pub(crate) fn not_begun(step: StepId, rows: usize) -> ResourceError {
    let step = step.0;
    ResourceError::wrong_state(format!("step {step} has not begun to sample {rows} rows"))
}

fn row(draw: &Draw<'_>, set: u32) -> SampleRow {
    let p = &draw.params;
    SampleRow {
        seed: p.seed,
        choice: p.choice,
        position: draw.position,
        temperature: p.temperature,
        top_k: p.top_k,
        top_p: p.top_p,
        min_p: p.min_p,
        penalty: p.repetition_penalty,
        set,
        unused: 0,
    }
}

fn not_rows(logits: &TensorViewMut<'_>) -> ResourceError {
    ResourceError::invalid(format!(
        "logits have shape {:?}, need [rows, vocabulary]",
        logits.shape()
    ))
}
