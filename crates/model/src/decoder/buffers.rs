//! The activations of a forward pass, kept from step to step.

use device::Scratch;
use resource_api::{ErrorKind, LabelId, ResourceError, Result};

use crate::config::ModelConfig;
use crate::node::StepInput;

/// Rows of equal width, as many as the largest step needed so far.
#[derive(Debug)]
pub(super) struct Rows {
    values: Vec<f32>,
    width: usize,
}

impl Rows {
    fn new(width: usize) -> Self {
        Self { values: Vec::new(), width }
    }

    fn fit(&mut self, rows: usize) -> Result<()> {
        let need = rows.saturating_mul(self.width);
        let more = need.saturating_sub(self.values.len());
        self.values.try_reserve_exact(more).map_err(|_| {
            let message = format!(
                "no memory for {rows} rows of {} activations; lower max_batch_tokens or max_batch",
                self.width
            );
            ResourceError::new(ErrorKind::EXHAUSTED, message)
        })?;
        if more > 0 {
            self.values.resize(need, 0.0);
        }
        Ok(())
    }

    pub(super) fn first(&self, rows: usize) -> &[f32] {
        self.range(0, rows)
    }

    pub(super) fn first_mut(&mut self, rows: usize) -> &mut [f32] {
        self.range_mut(0, rows)
    }

    pub(super) fn range(&self, first: usize, rows: usize) -> &[f32] {
        &self.values[first * self.width..][..rows * self.width]
    }

    pub(super) fn range_mut(&mut self, first: usize, rows: usize) -> &mut [f32] {
        &mut self.values[first * self.width..][..rows * self.width]
    }

    /// Moves the rows of these ascending indices to the front.
    fn gather(&mut self, rows: &[usize]) {
        for (to, &from) in rows.iter().enumerate() {
            let from = from * self.width;
            self.values.copy_within(from..from + self.width, to * self.width);
        }
    }
}

/// The tokens of one label: a range of the packed rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) label: LabelId,
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// What the resources see of a layer.
#[derive(Debug)]
pub(super) struct AttentionBuffers {
    pub(super) q: Rows,
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) out: Rows,
}

/// Everything that a pass writes besides its result.
#[derive(Debug)]
pub(super) struct Buffers {
    /// The residual stream.
    pub(super) hidden: Rows,
    pub(super) normed: Rows,
    pub(super) attention: AttentionBuffers,
    /// Heads before their norm, in models that have one; q, then k.
    pub(super) unnormed: Rows,
    /// What a block adds to the residual stream.
    pub(super) update: Rows,
    pub(super) gate: Rows,
    pub(super) up: Rows,
    pub(super) logits: Rows,
    pub(super) scratch: Scratch,
    /// The labels of the step that have tokens.
    pub(super) groups: Vec<Group>,
    /// The token rows that are sampled, ascending.
    pub(super) sampled_rows: Vec<usize>,
}

impl Buffers {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self {
            hidden: Rows::new(config.hidden),
            normed: Rows::new(config.hidden),
            attention: AttentionBuffers {
                q: Rows::new(config.q_width()),
                k: Rows::new(config.kv_width()),
                v: Rows::new(config.kv_width()),
                out: Rows::new(config.q_width()),
            },
            // k is at most as wide as q.
            unnormed: Rows::new(if config.qk_norm { config.q_width() } else { 0 }),
            update: Rows::new(config.hidden),
            gate: Rows::new(config.ffn),
            up: Rows::new(config.ffn),
            logits: Rows::new(config.vocab),
            scratch: Scratch::default(),
            groups: Vec::new(),
            sampled_rows: Vec::new(),
        }
    }

    /// Makes room for a step of `tokens` with `samples` samples.
    pub(super) fn fit(&mut self, tokens: usize, samples: usize) -> Result<()> {
        let AttentionBuffers { q, k, v, out } = &mut self.attention;
        let stream = [&mut self.hidden, &mut self.normed, &mut self.update, &mut self.unnormed];
        for rows in stream.into_iter().chain([q, k, v, out, &mut self.gate, &mut self.up]) {
            rows.fit(tokens)?;
        }
        self.sampled_rows.reserve(samples.saturating_sub(self.sampled_rows.len()));
        self.logits.fit(samples)
    }

    /// Finds the groups and the sampled rows of a step that has been checked.
    pub(super) fn lay_out(&mut self, input: &StepInput<'_>) -> Result<()> {
        self.groups.clear();
        self.sampled_rows.clear();
        let mut sample = input.sample.iter().copied().peekable();
        let mut first = 0;
        for (index, segment) in input.segments.iter().enumerate() {
            let tokens = segment.span as usize;
            if tokens == 0 {
                continue;
            }
            let label = segment.label;
            match self.groups.iter().position(|g| g.label == label) {
                None => self.groups.push(Group { label, first, tokens }),
                Some(at) if at + 1 == self.groups.len() => self.groups[at].tokens += tokens,
                Some(_) => {
                    return Err(ResourceError::invalid(format!(
                        "the segments of label {} do not lie side by side in the step",
                        label.0
                    )));
                }
            }
            first += tokens;
            if sample.next_if_eq(&(index as u32)).is_some() {
                self.sampled_rows.push(first - 1);
            }
        }
        Ok(())
    }

    /// Drops the rows that nobody samples from what the end of the last layer reads.
    pub(super) fn keep_sampled_rows(&mut self) {
        self.hidden.gather(&self.sampled_rows);
        self.attention.out.gather(&self.sampled_rows);
    }
}
