//! Sampling on a CUDA device: the same choice as on the CPU, from logits that stay there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::Budget;
use device::cuda::{Context, DeviceBuffer, RowSampler, SampleRow, Stream, read_tensor};
use resource_api::{
    EngineResourceInfo, HostServicesHandle, ResourceError, Result, Sampled, StepContext,
    TensorView, TensorViewMut,
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
    /// The model's logits, where processors change them.
    model: Option<(DeviceBuffer<f32>, Budget)>,
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
        let state = Mutex::new(State { sampler, rows: Vec::new(), model: None });
        let host = info.host.clone();
        Ok(Self { context, vocabulary, max_rows, state, host, _budget: budget })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a copy of the logits, which processors are going to change.
    ///
    /// # Errors
    /// `EXHAUSTED` without memory.
    pub(crate) fn keep_model(&self) -> Result<()> {
        let elements = self.max_rows * self.vocabulary;
        let budget = Budget::take(&self.host, self.context.device(), 4 * elements as u64)?;
        self.state().model = Some((DeviceBuffer::new(&self.context, elements)?, budget));
        Ok(())
    }

    /// Samples a token for each row of `logits`, as `draw` says of it. `process` changes the logits
    /// before; `None` leaves them as they are.
    ///
    /// # Errors
    /// `INVALID` for more rows than the engine's batch, and for tensors of another shape or place.
    pub(crate) fn sample<'d>(
        &self,
        ctx: &StepContext<'_>,
        draw: impl Fn(usize) -> Draw<'d>,
        logits: &mut TensorViewMut<'_>,
        process: Option<impl FnOnce(&mut TensorViewMut<'_>) -> Result<()>>,
        out: &mut [Sampled],
    ) -> Result<()> {
        if out.len() > self.max_rows {
            let what =
                format!("{} rows to sample; the engine's batch has {}", out.len(), self.max_rows);
            let (asked, most) = (out.len() as u64, self.max_rows as u64);
            return Err(ResourceError::invalid(what).with_amounts(asked, most));
        }
        let stream = Stream::of_step(&self.context, ctx)?;
        let State { sampler, rows, model } = &mut *self.state();
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
        let sampled = match (process, model) {
            (Some(process), Some((model, _))) => {
                let &[count, width] = logits.shape() else { return Err(not_rows(logits)) };
                let shape = [count, width].map(|n| n.max(0) as usize);
                stream.copy(&logits.view(), &mut model.view_mut(&shape)?)?;
                process(logits)?;
                sampler.sample(&stream, &model.view(&shape)?, &logits.view(), rows, sets, fill)?
            }
            _ => sampler.sample(&stream, &logits.view(), &logits.view(), rows, sets, fill)?,
        };
        for (out, row) in out.iter_mut().zip(sampled) {
            *out = Sampled { token: row.token, status: row.status, logprob: row.logprob };
        }
        Ok(())
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
        let model = match &self.state().model {
            Some((model, _)) => Some(self.read(&model.view(&[out.len(), self.vocabulary])?)?),
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
