//! The decoder on a CUDA device: the same computation as on the CPU, in the same order of calls.
//!
//! Weights and what goes into a product are bf16; products are summed in f32. The residual stream is
//! f32: products add to it directly, which costs a few bytes per token and saves the rounding that
//! every layer of a bf16 stream adds. Norms compute in f32, logits are f32.
//!
//! All work goes on the step's stream and nothing waits, until the sampler has its answer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::Parallel;
use device::cuda::{Context, DecodeStep, DeviceBuffer, Graph, Stream};
use resource_api::{
    AttentionHandle, AttentionResource, Bound, BucketKey, EngineLimits, ErrorKind, Interface,
    KvCache, KvCacheHandle, Positions, RequestId, ResourceError, Result, Sampler, StepContext,
    StepId, TensorView,
};
use serde_json::{Map, Value};

use super::layout::Group;
use super::{Handles, NODE, Slot, defaults};
use crate::config::ModelConfig;
use crate::node::{Node, NodeResources, StepInput, StepOutput};

mod buffers;
mod layer;
mod load;
mod tools;
mod whole;

use buffers::Buffers;
use layer::{Layer, Weight};
use tools::{Normed, Tools};

/// A decoder whose weights lie on a CUDA device.
pub struct CudaDecoder {
    config: ModelConfig,
    context: Arc<Context>,
    embed: Weight,
    layers: Vec<Layer>,
    norm: DeviceBuffer<f32>,
    /// `None` where the embedding is the output matrix too.
    head: Option<Weight>,
    tools: Tools,
    /// Steps of a few rows in one kernel, where there is one.
    whole: Option<DecodeStep>,
    whole_steps: AtomicU64,
    limits: EngineLimits,
    has_graphs: bool,
    handles: Slot,
    buffers: Mutex<Buffers>,
}

impl CudaDecoder {
    /// The numbers of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The same, which captures decode steps or, as at first, does not.
    #[must_use]
    pub fn with_graphs(mut self, on: bool) -> Self {
        self.has_graphs = on;
        self
    }

    /// The same, whose rows depend on nothing but themselves, to the bit, or, as at first, on how many there
    /// are.
    #[must_use]
    pub fn with_batch_invariance(mut self, on: bool) -> Self {
        self.tools.set_batch_invariant(on);
        self
    }

    /// Steps that were given to the device as one kernel so far, without replays.
    pub fn whole_steps(&self) -> u64 {
        self.whole_steps.load(Relaxed)
    }

    /// Bytes that the weights take on the device.
    pub fn weight_bytes(&self) -> usize {
        let ends = self.embed.bytes() + self.head.as_ref().map_or(0, Weight::bytes);
        ends + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }

    /// Lays a step out, sends it to the device, and does `work` if it has tokens.
    fn run(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        work: impl FnOnce(&Pass<'_>, &mut Buffers) -> Result<()>,
    ) -> Result<()> {
        input.check(self.config.vocab)?;
        let handles = &*self.handles.get()?;
        let buffers = &mut *self.lock_buffers();
        buffers.check_room(input.token_ids.len(), input.sample.len())?;
        buffers.layout.lay_out(input)?;
        if input.token_ids.is_empty() {
            return Ok(());
        }
        let stream = &Stream::of_step(&self.context, ctx)?;
        buffers.upload(stream, input, input.sample.len())?;
        work(&Pass { decoder: self, handles, ctx, stream }, buffers)
    }

    /// A panic of another pass leaves nothing behind that matters: every pass writes what it reads.
    fn lock_buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node for CudaDecoder {
    fn name(&self) -> &str {
        NODE
    }

    fn walks(&self) -> &[&str] {
        &["prefill", "decode"]
    }

    fn resource_defaults(&self, kind: &str) -> Map<String, Value> {
        defaults::of_kind(&self.config, kind)
    }

    /// Buffers are made when the weights are loaded, so that what the device has left is known before
    /// pools are sized: `limits` must be those of then.
    fn attach(&self, resources: &NodeResources<'_>, limits: &EngineLimits) -> Result<()> {
        let own = &self.limits;
        let fits =
            limits.max_batch_tokens <= own.max_batch_tokens && limits.max_batch <= own.max_batch;
        if !fits {
            return Err(ResourceError::invalid(format!(
                "the decoder was loaded for steps of {} tokens and {} requests, not {} and {}",
                own.max_batch_tokens, own.max_batch, limits.max_batch_tokens, limits.max_batch
            )));
        }
        self.handles.set(Handles::find(resources)?)
    }

    fn detach(&self) {
        self.handles.clear();
        self.lock_buffers().graphs.clear();
    }

    fn forward(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        out: &mut StepOutput,
        _parallel: &dyn Parallel,
    ) -> Result<()> {
        out.clear();
        self.run(ctx, input, |pass, buffers| match input.score.is_empty() {
            false => pass.score_and_sample(input, buffers, out),
            true => {
                pass.compute_or_replay(input.token_ids.len(), buffers)?;
                match input.sample.is_empty() || ctx.capture() {
                    true => Ok(()),
                    false => pass.sample(input, buffers, out),
                }
            }
        })
    }

    fn can_launch(&self, input: &StepInput<'_>) -> bool {
        let Ok(handles) = self.handles.get() else { return false };
        let is_plain = input.score.is_empty() && input.top_logprobs.is_empty();
        is_plain && handles.sampler.can_begin(&Vec::from_iter(sampled_requests(input)))
    }

    fn launch(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        _parallel: &dyn Parallel,
    ) -> Result<()> {
        self.run(ctx, input, |pass, buffers| {
            pass.compute_or_replay(input.token_ids.len(), buffers)?;
            pass.begin_sampling(&Vec::from_iter(sampled_requests(input)), buffers)
        })
    }

    fn land(&self, step: StepId, requests: &[RequestId], out: &mut StepOutput) -> Result<()> {
        out.clear();
        if requests.is_empty() {
            return Ok(());
        }
        let sampler = &self.handles.get()?.sampler;
        sampler.end_sample(step, out.begin_samples_of(requests))?;
        out.check_samples(sampler.object().fault().owner(), self.config.vocab);
        Ok(())
    }

    fn captures(&self) -> bool {
        self.has_graphs
    }
}

/// Which rows go through the end of the last layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// None: nothing is sampled.
    None,
    /// Those that are sampled, moved together.
    Sampled,
    /// All, where they are.
    All,
}

/// One forward pass.
struct Pass<'a> {
    decoder: &'a CudaDecoder,
    handles: &'a Handles,
    ctx: &'a StepContext<'a>,
    stream: &'a Stream,
}

/// Who is sampled, in the order of the step.
fn sampled_requests(input: &StepInput<'_>) -> impl Iterator<Item = RequestId> {
    input.sample.iter().map(|&s| input.segments.request[s as usize])
}

impl Pass<'_> {
    /// From token ids to the logits of the sampled rows: by replay where the step was recorded. Under capture,
    /// records it.
    fn compute_or_replay(&self, tokens: usize, buffers: &mut Buffers) -> Result<()> {
        let key = self.ctx.slot_lease().bucket().map(|bucket| (*bucket, self.ctx.slot()));
        if self.ctx.capture() {
            return match key {
                Some(key) => self.capture(key, tokens, buffers),
                None => Err(ResourceError::invalid("a step to capture has no bucket")),
            };
        }
        let samples_first_rows = buffers.samples_first_rows();
        let recorded = key.filter(|_| samples_first_rows).and_then(|k| buffers.graphs.get_mut(&k));
        match recorded {
            Some(graph) => {
                self.begin_whole()?;
                Ok(graph.replay(self.stream)?)
            }
            None => self.compute(tokens, buffers),
        }
    }

    /// Has the sampler begin, and leave what it picks where the next step finds it.
    fn begin_sampling(&self, requests: &[RequestId], buffers: &mut Buffers) -> Result<()> {
        let rows = requests.len();
        if rows == 0 {
            return Ok(());
        }
        let mut logits = buffers.logits.view_mut(&[rows, self.decoder.config.vocab])?;
        let mut tokens = buffers.sampled_ids.view_mut(&[rows])?;
        self.handles.sampler.begin_sample(self.ctx, requests, &mut logits, &mut tokens)
    }

    /// Records a step of one token per row, all of them sampled.
    fn capture(&self, key: (BucketKey, u32), tokens: usize, buffers: &mut Buffers) -> Result<()> {
        // Once for real: libraries load and choose kernels at the first call, which a capture refuses.
        self.begin_whole()?;
        self.compute_all(tokens, buffers)?;
        self.stream.synchronize()?;
        let graph = Graph::capture(self.stream, || self.compute_all(tokens, buffers))?;
        buffers.graphs.insert(key, graph);
        Ok(())
    }

    /// From token ids to logits, of a step of one token per row, all of them sampled.
    fn compute_all(&self, tokens: usize, buffers: &mut Buffers) -> Result<()> {
        if self.compute_whole(tokens, buffers)? {
            return Ok(());
        }
        self.run_layers(tokens, Keep::All, buffers)?;
        self.compute_logits(Keep::All, tokens, buffers)
    }

    /// From token ids to the logits of the sampled rows.
    fn compute(&self, tokens: usize, buffers: &mut Buffers) -> Result<()> {
        let samples = buffers.layout.kept_rows.len();
        let keep = match samples {
            0 => Keep::None,
            _ if samples == tokens => {
                self.begin_whole()?;
                return self.compute_all(tokens, buffers);
            }
            _ => Keep::Sampled,
        };
        self.run_layers(tokens, keep, buffers)?;
        match keep {
            Keep::None => Ok(()),
            _ => self.compute_logits(keep, samples, buffers),
        }
    }

    /// From `tokens` token ids to the hidden states of the rows to keep, in `buffers.rows` or
    /// `buffers.sampled`.
    fn run_layers(&self, tokens: usize, keep: Keep, buffers: &mut Buffers) -> Result<()> {
        let CudaDecoder { config, embed, layers, tools, .. } = self.decoder;
        let (stream, shape) = (self.stream, [tokens, config.hidden]);
        tools.ops.embed(
            stream,
            &buffers.token_ids.view(&[tokens])?,
            &buffers.sampled_ids.view(&[buffers.sampled_ids.len()])?,
            &embed.view()?,
            config.embedding_scale.unwrap_or(1.0),
            &mut buffers.rows.hidden.view_mut(&shape)?,
        )?;
        let mut kv = Bound::new(&self.handles.kv, self.ctx);
        let mut attention = Bound::new(&self.handles.attention, self.ctx);
        for (index, layer) in layers.iter().enumerate() {
            kv.set_default_layer_idx(index as u32);
            attention.set_default_layer_idx(index as u32);
            let is_last = index + 1 == layers.len();
            layer.project_qkv(tools, config, stream, &mut buffers.rows, tokens)?;
            for &group in &buffers.layout.groups {
                kv.set_default_label(group.label);
                attention.set_default_label(group.label);
                // Past the last layer only what is sampled is read.
                let attention = (!is_last || keep != Keep::None).then_some(&attention);
                self.attend(&kv, attention, (index as u32, layer), group, &mut buffers.rows)?;
            }
            match keep {
                Keep::None if is_last => {}
                Keep::Sampled if is_last => {
                    let sampled = buffers.layout.kept_rows.len();
                    self.keep_sampled_rows(tokens, buffers)?;
                    layer.finish(tools, config, stream, &mut buffers.sampled, sampled)?;
                }
                _ => layer.finish(tools, config, stream, &mut buffers.rows, tokens)?,
            }
        }
        Ok(())
    }

    /// Norms and turns queries and keys, writes keys and values to the cache, and attends.
    fn attend(
        &self,
        kv: &Bound<'_, KvCacheHandle>,
        attention: Option<&Bound<'_, AttentionHandle>>,
        (index, layer): (u32, &Layer),
        group: Group,
        rows: &mut buffers::Rows,
    ) -> Result<()> {
        let CudaDecoder { config, tools, .. } = self.decoder;
        let (heads, kv_heads, dim) = (config.heads, config.kv_heads, config.head_dim);
        let parts = [[heads, dim], [kv_heads, dim], [kv_heads, dim]];
        let [mut q, mut k, v] = rows.qkv.parts_mut(group.first, group.tokens, parts)?;
        let positions = &self.handles.positions;
        let turning = positions.turning(self.ctx, index, group.label)?;
        let is_done = match turning {
            Some(turning) => {
                let how = layer.head_turn(turning, config.rms_eps);
                let (k, v) = (k.view(), v.view());
                self.handles.kv.write_turned(self.ctx, index, group.label, &mut q, &k, &v, &how)?
            }
            None => false,
        };
        if !is_done {
            layer.norm_heads(tools, config, self.stream, [&mut q, &mut k])?;
            positions.apply_qk_layer(self.ctx, index, group.label, &mut q, &mut k)?;
            kv.write(&k.view(), &v.view(), None, None)?;
        }
        let Some(attention) = attention else { return Ok(()) };
        let shape = [group.tokens, heads, dim];
        let mut out = rows.attended.view_mut_at(group.first * config.q_width(), &shape)?;
        attention.attend(&q.view(), &mut out, None, None)
    }

    /// Moves the rows that are sampled to where the end of the last layer reads them.
    fn keep_sampled_rows(&self, tokens: usize, buffers: &mut Buffers) -> Result<()> {
        let CudaDecoder { config, tools, .. } = self.decoder;
        let sampled = buffers.layout.kept_rows.len();
        let rows = buffers.sampled_rows.view(&[sampled])?;
        tools.ops.gather_rows(
            self.stream,
            &buffers.rows.hidden.view(&[tokens, config.hidden])?,
            &rows,
            &mut buffers.sampled.hidden.view_mut(&[sampled, config.hidden])?,
        )?;
        Ok(tools.ops.gather_rows(
            self.stream,
            &buffers.rows.attended.view(&[tokens, config.q_width()])?,
            &rows,
            &mut buffers.sampled.attended.view_mut(&[sampled, config.q_width()])?,
        )?)
    }

    /// From the first `rows` hidden states of those kept to their logits.
    fn compute_logits(&self, keep: Keep, rows: usize, buffers: &mut Buffers) -> Result<()> {
        let CudaDecoder { config, embed, norm, head, tools, .. } = self.decoder;
        let kept = if keep == Keep::All { &mut buffers.rows } else { &mut buffers.sampled };
        let hidden = kept.hidden.view(&[rows, config.hidden])?;
        let x = Normed { rows: &hidden, weight: norm, eps: config.rms_eps };
        let head = head.as_ref().unwrap_or(embed);
        let mut logits = buffers.logits.view_mut(&[rows, config.vocab])?;
        tools.product_of_normed(self.stream, x, &mut kept.normed, head, None, &mut logits)?;
        if let Some(cap) = config.logit_softcap {
            tools.ops.soft_cap(self.stream, &mut logits, cap)?;
        }
        Ok(())
    }

    /// A step in which tokens of a prompt are scored: all rows go through the last layer, and then as many
    /// at a time as there is room for to their logits.
    fn score_and_sample(
        &self,
        input: &StepInput<'_>,
        buffers: &mut Buffers,
        out: &mut StepOutput,
    ) -> Result<()> {
        let vocab = self.decoder.config.vocab;
        self.run_layers(input.token_ids.len(), Keep::All, buffers)?;
        let mut first = input.sample.len();
        for scores in input.score.chunks(buffers.sampled_rows.len()) {
            self.logits_of(first, scores.len(), input.token_ids.len(), buffers)?;
            first += scores.len();
            for (row, score) in scores.iter().enumerate() {
                let there = &mut buffers.logits_on_host;
                self.stream.download(&buffers.logits, row * vocab, there, 0, vocab)?;
                super::score_row(&self.handles.sampler, score, there.as_slice()?, out)?;
            }
        }
        if input.sample.is_empty() {
            return Ok(());
        }
        self.logits_of(0, input.sample.len(), input.token_ids.len(), buffers)?;
        self.sample(input, buffers, out)
    }

    /// The logits of `count` kept rows from `first` on.
    fn logits_of(
        &self,
        first: usize,
        count: usize,
        tokens: usize,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let CudaDecoder { config, tools, .. } = self.decoder;
        // The rows before were read by the stream, or are not needed: what is staged may change.
        self.stream.synchronize()?;
        buffers.upload_rows(self.stream, first, count)?;
        tools.ops.gather_rows(
            self.stream,
            &buffers.rows.hidden.view(&[tokens, config.hidden])?,
            &buffers.sampled_rows.view(&[count])?,
            &mut buffers.sampled.hidden.view_mut(&[count, config.hidden])?,
        )?;
        self.compute_logits(Keep::Sampled, count, buffers)
    }

    fn sample(
        &self,
        input: &StepInput<'_>,
        buffers: &mut Buffers,
        out: &mut StepOutput,
    ) -> Result<()> {
        let vocab = self.decoder.config.vocab;
        let sampler = &self.handles.sampler;
        // First, since sampling may overwrite the logits. Rare, so that the row comes to the host.
        for (row, &k) in input.top_logprobs.iter().enumerate() {
            let (ids, logprobs) = out.push_top(vocab.min(k as usize));
            if !ids.is_empty() {
                let there = &mut buffers.logits_on_host;
                self.stream.download(&buffers.logits, row * vocab, there, 0, vocab)?;
                let row = TensorView::from_slice(there.as_slice()?, &[vocab]);
                match sampler.top_logprobs(&row, ids, logprobs) {
                    // A row that is no distribution fails its own request: `sample` says so.
                    Err(e) if e.kind() == ErrorKind::INVALID => logprobs.fill(f32::NAN),
                    done => done?,
                }
            }
        }
        out.requests.extend(sampled_requests(input));
        let mut logits = buffers.logits.view_mut(&[input.sample.len(), vocab])?;
        let (requests, sampled) = out.begin_samples(input.sample.len());
        sampler.sample(self.ctx, requests, &mut logits, sampled)?;
        out.check_samples(sampler.object().fault().owner(), vocab);
        Ok(())
    }
}
