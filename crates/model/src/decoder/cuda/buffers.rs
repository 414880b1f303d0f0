//! The activations of a forward pass on a device, made once for the largest step.

use std::collections::HashMap;
use std::sync::Arc;

use device::cuda::{Context, DeviceBuffer, Graph, Ops, PinnedBuffer, Stream};
use half::bf16;
use resource_api::{BucketKey, EngineLimits, ResourceError, Result};

use crate::config::ModelConfig;
use crate::decoder::layout::Layout;
use crate::node::StepInput;

/// What a layer reads and writes, one row per token.
#[derive(Debug)]
pub(super) struct Rows {
    /// The residual stream.
    pub(super) hidden: DeviceBuffer<f32>,
    pub(super) normed: DeviceBuffer<bf16>,
    /// Queries, keys and values side by side.
    pub(super) qkv: DeviceBuffer<bf16>,
    /// What attention gave.
    pub(super) attended: DeviceBuffer<bf16>,
    /// Gates, then values.
    pub(super) gate_up: DeviceBuffer<bf16>,
    pub(super) gated: DeviceBuffer<bf16>,
    /// What a block adds to the residual stream, in models with norms after it.
    pub(super) update: DeviceBuffer<bf16>,
}

/// Everything that a pass writes besides its result.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) rows: Rows,
    /// Rows that are sampled, through the end of the last layer.
    pub(super) sampled: Rows,
    pub(super) logits: DeviceBuffer<f32>,
    /// One row of logits.
    pub(super) logits_on_host: PinnedBuffer<f32>,
    pub(super) token_ids: DeviceBuffer<u32>,
    pub(super) sampled_rows: DeviceBuffer<u32>,
    /// What the last step sampled.
    pub(super) sampled_ids: DeviceBuffer<u32>,
    pub(super) layout: Layout,
    /// Recorded steps, by bucket and slot.
    pub(super) graphs: HashMap<(BucketKey, u32), Graph>,
    /// Token ids, then row numbers, on their way to the device.
    staged: PinnedBuffer<u32>,
}

impl Rows {
    /// `with_qkv` is false for rows that are past attention.
    fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        rows: usize,
        with_qkv: bool,
    ) -> device::Result<Self> {
        let update = if config.post_norms { config.hidden } else { 0 };
        let qkv = if with_qkv { config.q_width() + 2 * config.kv_width() } else { 0 };
        Ok(Self {
            hidden: DeviceBuffer::new(context, rows * config.hidden)?,
            normed: DeviceBuffer::new(context, rows * config.hidden)?,
            qkv: DeviceBuffer::new(context, rows * qkv)?,
            attended: DeviceBuffer::new(context, rows * config.q_width())?,
            gate_up: DeviceBuffer::new(context, rows * 2 * config.ffn)?,
            gated: DeviceBuffer::new(context, rows * config.ffn)?,
            update: DeviceBuffer::new(context, rows * update)?,
        })
    }
}

impl Buffers {
    pub(super) fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        limits: &EngineLimits,
    ) -> device::Result<Self> {
        let tokens = limits.max_batch_tokens as usize;
        let samples = (limits.max_batch as usize).min(tokens);
        let mut layout = Layout::default();
        layout.reserve(samples);
        Ok(Self {
            rows: Rows::new(context, config, tokens, true)?,
            sampled: Rows::new(context, config, samples, false)?,
            logits: DeviceBuffer::new(context, samples * config.vocab)?,
            logits_on_host: PinnedBuffer::zeroed(context, config.vocab)?,
            token_ids: DeviceBuffer::zeroed(context, tokens)?,
            sampled_rows: DeviceBuffer::zeroed(context, samples)?,
            sampled_ids: DeviceBuffer::zeroed(context, samples)?,
            layout,
            graphs: HashMap::new(),
            staged: PinnedBuffer::zeroed(context, tokens + samples)?,
        })
    }

    /// # Errors
    /// `INVALID` for a step larger than the limits that the buffers were made for.
    pub(super) fn check_room(&self, tokens: usize, samples: usize) -> Result<()> {
        let room = (self.token_ids.len(), self.sampled_rows.len());
        if tokens > room.0 || samples > room.1 {
            return Err(ResourceError::invalid(format!(
                "a step of {tokens} tokens and {samples} samples is larger than the {} and {} that \
                 the decoder was loaded for",
                room.0, room.1
            )));
        }
        Ok(())
    }

    /// Whether the sampled rows are the step's first ones, in order: they need no moving.
    pub(super) fn samples_first_rows(&self) -> bool {
        self.layout.kept_rows.iter().enumerate().all(|(i, &row)| i == row)
    }

    /// Sends the step's token ids, or which samples they are, and the numbers of its first `kept` kept rows.
    pub(super) fn upload(
        &mut self,
        stream: &Stream,
        input: &StepInput<'_>,
        kept: usize,
    ) -> Result<()> {
        let tokens = input.token_ids.len();
        let samples = self.sampled_ids.len() as u32;
        let staged = &mut self.staged.as_mut_slice()?[..tokens];
        staged.copy_from_slice(input.token_ids);
        for (id, &sample) in staged.iter_mut().zip(input.from_sample) {
            match sample {
                StepInput::KNOWN => {}
                sample if sample < samples => *id = Ops::FROM_SAMPLE + sample,
                other => {
                    let what = format!("a token is sample {other} of {samples} at most");
                    return Err(ResourceError::invalid(what));
                }
            }
        }
        stream.upload(&mut self.staged, 0, &mut self.token_ids, 0, tokens)?;
        // Where all rows are kept, nobody asks for their numbers: a copy less before every decode step.
        match kept < tokens {
            true => self.upload_rows(stream, 0, kept),
            false => Ok(()),
        }
    }

    /// Sends the numbers of `count` kept rows from `first` on.
    pub(super) fn upload_rows(
        &mut self,
        stream: &Stream,
        first: usize,
        count: usize,
    ) -> Result<()> {
        let rows_at = self.token_ids.len();
        let kept = &self.layout.kept_rows[first..first + count];
        for (to, &row) in self.staged.as_mut_slice()?[rows_at..].iter_mut().zip(kept) {
            *to = row as u32;
        }
        Ok(stream.upload(&mut self.staged, rows_at, &mut self.sampled_rows, 0, count)?)
    }
}
