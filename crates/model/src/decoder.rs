//! The decoder stack of Llama, Qwen 2, Qwen 3 and Gemma 3 as a [`Node`].
//!
//! ```text
//! x = embed[token] (* scale)
//! per layer:  q, k, v = W x̂ (+ bias), x̂ = norm(x); norm per head of q and k (Qwen 3, Gemma 3); rope
//!             x += (norm) W_o attention(q, cache of k and v)
//!             x += (norm) W_down (silu(W_gate x̂) * W_up x̂), x̂ = norm(x); GELU in Gemma 3
//! logits = head norm(x), only for rows that are sampled
//! ```
//!
//! Positions, cache, attention and sampling are capabilities of resources; the rest is computed
//! here, row by row, each in an order that neither the batch nor the threads can change.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use device::{Matrix, Parallel, ops};
use resource_api::{
    AttentionHandle, AttentionResource, Bound, EngineLimits, ErrorKind, Interface, KvCacheHandle,
    Positions, PositionsHandle, ResourceError, Result, Sampler, SamplerHandle, StepContext,
    TensorView, TensorViewMut,
};
use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::node::{Node, NodeResources, Score, StepInput, StepOutput};

mod buffers;
mod cuda;
mod defaults;
mod layer;
mod layout;
mod load;
mod rows;

use buffers::Buffers;
use layer::Layer;
use layout::Group;

pub use cuda::CudaDecoder;

/// Name of the node in configs.
pub const NODE: &str = "decoder";

/// Rows of a prompt whose logits are computed together when they are scored.
const SCORED_AT_ONCE: usize = 16;

/// A decoder with its weights packed for the device.
pub struct Decoder {
    config: ModelConfig,
    embed: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// `None` where the embedding is the output matrix too.
    head: Option<Matrix>,
    handles: Slot,
    buffers: Mutex<Buffers>,
}

/// The capabilities that a forward pass calls.
struct Handles {
    positions: PositionsHandle,
    kv: KvCacheHandle,
    attention: AttentionHandle,
    sampler: SamplerHandle,
}

/// Where a decoder keeps its handles while it has some.
#[derive(Default)]
struct Slot(RwLock<Option<Arc<Handles>>>);

impl Slot {
    fn set(&self, handles: Handles) -> Result<()> {
        let mut slot = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if slot.is_some() {
            return Err(ResourceError::wrong_state("the decoder already has its resources"));
        }
        *slot = Some(Arc::new(handles));
        Ok(())
    }

    fn get(&self) -> Result<Arc<Handles>> {
        let slot = self.0.read().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| {
            ResourceError::wrong_state("the decoder has no resources yet: attach them first")
        })
    }

    fn clear(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Handles {
    fn find(resources: &NodeResources<'_>) -> Result<Self> {
        Ok(Self {
            positions: resources.only("positions")?,
            kv: resources.only("kv")?,
            attention: resources.only("attention")?,
            sampler: resources.only("sampler")?,
        })
    }
}

impl Decoder {
    /// The numbers of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes that the packed weights take.
    pub fn weight_bytes(&self) -> usize {
        let ends = self.embed.packed_bytes() + self.head.as_ref().map_or(0, Matrix::packed_bytes);
        ends + self.layers.iter().map(Layer::packed_bytes).sum::<usize>()
    }
}

impl Node for Decoder {
    fn name(&self) -> &str {
        NODE
    }

    fn walks(&self) -> &[&str] {
        &["prefill", "decode"]
    }

    fn resource_defaults(&self, kind: &str) -> Map<String, Value> {
        defaults::of_kind(&self.config, kind)
    }

    fn attach(&self, resources: &NodeResources<'_>, limits: &EngineLimits) -> Result<()> {
        let handles = Handles::find(resources)?;
        let (tokens, samples) = (limits.max_batch_tokens as usize, limits.max_batch as usize);
        self.lock_buffers().fit(tokens, samples.min(tokens))?;
        self.handles.set(handles)
    }

    fn detach(&self) {
        self.handles.clear();
    }

    fn forward(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        out: &mut StepOutput,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        out.clear();
        input.check(self.config.vocab)?;
        let handles = &*self.handles.get()?;
        let buffers = &mut *self.lock_buffers();
        let scored_at_once = input.score.len().min(SCORED_AT_ONCE);
        buffers.fit(input.token_ids.len(), input.sample.len().max(scored_at_once))?;
        buffers.layout.lay_out(input)?;
        if input.token_ids.is_empty() {
            return Ok(());
        }
        let mut pass = Pass { decoder: self, handles, ctx, parallel, wrong: None };
        pass.run_layers(input.token_ids, buffers)?;
        if let Some((resource, what)) = pass.wrong.take() {
            out.blame(&resource, what);
        }
        if buffers.layout.kept_rows.is_empty() {
            return Ok(());
        }
        pass.norm(buffers);
        pass.score(input, buffers, out)?;
        match input.sample.is_empty() {
            true => Ok(()),
            false => pass.sample(input, buffers, out),
        }
    }
}

impl Decoder {
    /// A panic of another pass leaves nothing behind that matters: every pass writes what it reads.
    fn lock_buffers(&self) -> std::sync::MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One forward pass.
struct Pass<'a> {
    decoder: &'a Decoder,
    handles: &'a Handles,
    ctx: &'a StepContext<'a>,
    parallel: &'a dyn Parallel,
    /// Where numbers first went wrong, and in which resource.
    wrong: Option<(String, String)>,
}

impl Pass<'_> {
    /// Leaves the hidden states of the rows to keep, and only those, in `buffers.hidden`.
    fn run_layers(&mut self, token_ids: &[u32], buffers: &mut Buffers) -> Result<()> {
        let Decoder { config, embed, layers, .. } = self.decoder;
        let mut rows = token_ids.len();
        let hidden = buffers.hidden.first_mut(rows);
        for (&id, row) in token_ids.iter().zip(hidden.chunks_exact_mut(config.hidden)) {
            embed.row(id as usize, row).map_err(device_error)?;
            if let Some(scale) = config.embedding_scale {
                ops::scale(row, scale);
            }
        }
        let mut kv = Bound::new(&self.handles.kv, self.ctx);
        let mut attention = Bound::new(&self.handles.attention, self.ctx);
        for (index, layer) in layers.iter().enumerate() {
            kv.set_default_layer_idx(index as u32);
            attention.set_default_layer_idx(index as u32);
            let is_last = index + 1 == layers.len();
            layer.project_qkv(config, buffers, rows, self.parallel)?;
            for &group in &buffers.layout.groups {
                kv.set_default_label(group.label);
                attention.set_default_label(group.label);
                let tensors = &mut buffers.attention;
                self.write_cache(&kv, index as u32, group, tensors)?;
                // Past the last layer only what is kept is read.
                if !(is_last && buffers.layout.kept_rows.is_empty()) {
                    self.attend(&attention, group, tensors)?;
                    self.look_for_nan(index, group, tensors);
                }
            }
            if is_last {
                buffers.keep_rows();
                rows = buffers.layout.kept_rows.len();
            }
            layer.finish(config, buffers, rows, self.parallel)?;
        }
        Ok(())
    }

    /// Turns queries and keys by their positions and writes keys and values to the cache.
    fn write_cache(
        &self,
        kv: &Bound<'_, KvCacheHandle>,
        layer: u32,
        group: Group,
        tensors: &mut buffers::AttentionBuffers,
    ) -> Result<()> {
        let config = &self.decoder.config;
        let q_shape = [group.tokens, config.heads, config.head_dim];
        let kv_shape = [group.tokens, config.kv_heads, config.head_dim];
        let q = tensors.q.range_mut(group.first, group.tokens);
        let k = tensors.k.range_mut(group.first, group.tokens);
        let v = tensors.v.range(group.first, group.tokens);
        let mut turned_k = TensorViewMut::from_slice(k, &kv_shape);
        self.handles.positions.apply_qk_layer(
            self.ctx,
            layer,
            group.label,
            &mut TensorViewMut::from_slice(q, &q_shape),
            &mut turned_k,
        )?;
        kv.write(&turned_k.view(), &TensorView::from_slice(v, &kv_shape), None, None)
    }

    fn attend(
        &self,
        attention: &Bound<'_, AttentionHandle>,
        group: Group,
        tensors: &mut buffers::AttentionBuffers,
    ) -> Result<()> {
        let config = &self.decoder.config;
        let shape = [group.tokens, config.heads, config.head_dim];
        let q = tensors.q.range(group.first, group.tokens);
        let out = tensors.out.range_mut(group.first, group.tokens);
        attention.attend(
            &TensorView::from_slice(q, &shape),
            &mut TensorViewMut::from_slice(out, &shape),
            None,
            None,
        )
    }

    /// Remembers which resource was the first to answer with what is no number.
    fn look_for_nan(&mut self, layer: usize, group: Group, tensors: &buffers::AttentionBuffers) {
        let is_sound = |values: &[f32]| rows::are_finite(values);
        if self.wrong.is_some() || is_sound(tensors.out.range(group.first, group.tokens)) {
            return;
        }
        let sound = |rows: &buffers::Rows| is_sound(rows.range(group.first, group.tokens));
        let (culprit, did) = match (sound(&tensors.q) && sound(&tensors.k), sound(&tensors.v)) {
            (true, true) => (self.handles.attention.object(), "attention"),
            (false, true) => (self.handles.positions.object(), "the turning of queries and keys"),
            // Values come from the model alone: so does what is wrong with them.
            (_, false) => return,
        };
        let what = format!("gave what is no number in {did} of layer {layer}");
        self.wrong = Some((culprit.fault().owner().to_owned(), what));
    }

    /// Norms the kept rows.
    fn norm(&self, buffers: &mut Buffers) {
        let rows = buffers.layout.kept_rows.len();
        let (hidden, normed) = (buffers.hidden.first(rows), buffers.normed.first_mut(rows));
        let Decoder { config, norm, .. } = self.decoder;
        rows::rms_norm(hidden, norm, config.rms_eps, normed, self.parallel);
    }

    /// The logits of `rows` kept rows from `first` on, at the front of `buffers.logits`.
    fn compute_logits(&self, first: usize, rows: usize, buffers: &mut Buffers) -> Result<()> {
        let Decoder { config, embed, head, .. } = self.decoder;
        let (normed, logits) = (buffers.normed.range(first, rows), buffers.logits.first_mut(rows));
        head.as_ref()
            .unwrap_or(embed)
            .matmul(normed, rows, logits, &mut buffers.scratch, self.parallel)
            .map_err(device_error)?;
        if let Some(cap) = config.logit_softcap {
            rows::soft_cap(logits, cap, self.parallel);
        }
        Ok(())
    }

    /// Tells how likely the tokens of a prompt are, a few rows at a time.
    fn score(
        &self,
        input: &StepInput<'_>,
        buffers: &mut Buffers,
        out: &mut StepOutput,
    ) -> Result<()> {
        let vocab = self.decoder.config.vocab;
        let mut first = input.sample.len();
        for scores in input.score.chunks(SCORED_AT_ONCE) {
            self.compute_logits(first, scores.len(), buffers)?;
            first += scores.len();
            let rows = buffers.logits.first(scores.len()).chunks_exact(vocab);
            for (score, row) in scores.iter().zip(rows) {
                score_row(&self.handles.sampler, score, row, out)?;
            }
        }
        Ok(())
    }

    fn sample(
        &self,
        input: &StepInput<'_>,
        buffers: &mut Buffers,
        out: &mut StepOutput,
    ) -> Result<()> {
        let config = &self.decoder.config;
        let rows = input.sample.len();
        self.compute_logits(0, rows, buffers)?;
        let logits = buffers.logits.first_mut(rows);

        // First, since sampling may overwrite the logits.
        for (row, &k) in logits.chunks_exact(config.vocab).zip(input.top_logprobs) {
            let (ids, logprobs) = out.push_top(config.vocab.min(k as usize));
            if !ids.is_empty() {
                let row = TensorView::from_slice(row, &[config.vocab]);
                match self.handles.sampler.top_logprobs(&row, ids, logprobs) {
                    // A row that is no distribution fails its own request: `sample` says so.
                    Err(e) if e.kind() == ErrorKind::INVALID => logprobs.fill(f32::NAN),
                    done => done?,
                }
            }
        }
        let sampled = input.sample.iter().map(|&s| input.segments.request[s as usize]);
        out.requests.extend(sampled);
        let mut logits = TensorViewMut::from_slice(logits, &[rows, config.vocab]);
        let sampler = &self.handles.sampler;
        let (requests, sampled) = out.begin_samples(rows);
        sampler.sample(self.ctx, requests, &mut logits, sampled)?;
        out.check_samples(sampler.object().fault().owner(), config.vocab);
        Ok(())
    }
}

/// Tells how likely `score.target` is after a row with these logits.
fn score_row(
    sampler: &SamplerHandle,
    score: &Score,
    row: &[f32],
    out: &mut StepOutput,
) -> Result<()> {
    let k = row.len().min(score.top.max(1) as usize);
    let (ids, logprobs) = out.push_score_top(k);
    let told = sampler.top_logprobs(&TensorView::from_slice(row, &[row.len()]), ids, logprobs);
    let logprob = match told {
        // The best token gives away the sum of all.
        Ok(()) => {
            if let Some(id) = ids.iter().find(|&&id| id as usize >= row.len()) {
                let owner = sampler.object().fault().owner();
                return Err(ResourceError::internal(format!(
                    "resource `{owner}` named token {id} of a vocabulary of {} among the best; this is a \
                     fault of the plugin",
                    row.len()
                )));
            }
            let best = f64::from(row[ids[0] as usize]) - f64::from(logprobs[0]);
            (f64::from(row[score.target as usize]) - best) as f32
        }
        Err(e) if e.kind() == ErrorKind::INVALID => {
            logprobs.fill(f32::NAN);
            f32::NAN
        }
        Err(e) => return Err(e),
    };
    out.shorten_score_top(score.top as usize);
    out.scores.push(logprob);
    Ok(())
}

/// Shapes are checked when weights are packed, so an error of a product is a fault of this crate.
fn device_error(e: device::Error) -> ResourceError {
    ResourceError::internal(format!("decoder: {e}"))
}
