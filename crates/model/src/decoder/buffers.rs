//! The activations of a forward pass, kept from step to step.

use device::Scratch;
use resource_api::{ErrorKind, ResourceError, Result};

use super::layout::Layout;
use crate::config::ModelConfig;

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

    /// Moves the rows of these indices to the front.
    fn gather(&mut self, rows: &[usize]) {
        if !rows.is_sorted() {
            let moved: Vec<f32> =
                rows.iter().flat_map(|&row| self.range(row, 1)).copied().collect();
            return self.first_mut(rows.len()).copy_from_slice(&moved);
        }
        for (to, &from) in rows.iter().enumerate() {
            let from = from * self.width;
            self.values.copy_within(from..from + self.width, to * self.width);
        }
    }
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
    pub(super) layout: Layout,
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
            layout: Layout::default(),
        }
    }

    /// Makes room for a step of `tokens` with logits of `samples` rows at a time.
    pub(super) fn fit(&mut self, tokens: usize, samples: usize) -> Result<()> {
        let AttentionBuffers { q, k, v, out } = &mut self.attention;
        let stream = [&mut self.hidden, &mut self.normed, &mut self.update, &mut self.unnormed];
        for rows in stream.into_iter().chain([q, k, v, out, &mut self.gate, &mut self.up]) {
            rows.fit(tokens)?;
        }
        self.layout.reserve(samples);
        self.logits.fit(samples)
    }

    /// Drops the rows that nobody samples or scores from what the end of the last layer reads.
    pub(super) fn keep_rows(&mut self) {
        self.hidden.gather(&self.layout.kept_rows);
        self.attention.out.gather(&self.layout.kept_rows);
    }
}
