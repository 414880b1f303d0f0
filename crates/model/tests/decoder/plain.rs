//! The resources of a decoder in the plainest form: growing lists and float64 sums.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use model::Node;
use resource_api::{
    Attention, AttentionHandle, BuiltResource, KvCache, KvCacheHandle, KvLayer, LabelId, Plan,
    Positions, PositionsHandle, RequestId, Resource, ResourceError, ResourceHandle, ResourceStep,
    Result, Sampled, Sampler, SamplerHandle, Segment, StepContext, TensorView, TensorViewMut,
};
use serde_json::{Map, Value};

type Stream = (RequestId, LabelId);

/// Key and value of one token in one layer, all heads.
type KeyValue = (Vec<f32>, Vec<f32>);

/// Cache, attention and positions in one.
#[derive(Default)]
pub struct Plain {
    rope: Map<String, Value>,
    scoring: Map<String, Value>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lengths: HashMap<Stream, usize>,
    cache: HashMap<(u32, Stream), Vec<KeyValue>>,
    step: Vec<Segment>,
}

/// Cache, attention and positions, with what the model says of the latter two.
pub fn plain(node: &dyn Node) -> BuiltResource {
    let plain = Arc::new(Plain::of(node));
    BuiltResource {
        resource: ResourceHandle::new(plain.clone()),
        capabilities: vec![
            KvCacheHandle::new(plain.clone()).into(),
            AttentionHandle::new(plain.clone()).into(),
            PositionsHandle::new(plain).into(),
        ],
    }
}

impl Plain {
    /// With what the model says of positions and attention.
    pub fn of(node: &dyn Node) -> Self {
        let (rope, scoring) =
            (node.resource_defaults("positions"), node.resource_defaults("attention"));
        Self { rope, scoring, ..Self::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics inside")
    }

    fn rope_number(&self, key: &str) -> Option<f64> {
        self.rope.get(key).and_then(Value::as_f64)
    }

    /// The first token that one at `position` sees.
    fn first_seen(&self, layer: u32, position: usize) -> usize {
        let window = self.scoring.get("sliding_window").and_then(Value::as_u64);
        let window = window.filter(|_| !names(&self.scoring, "full_layers", layer));
        window.map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }
}

impl State {
    /// The stream and position of each token of a label.
    fn tokens(&self, label: LabelId) -> Vec<(Stream, usize)> {
        let segments = self.step.iter().filter(|s| s.label == label);
        let tokens = segments.flat_map(|s| {
            let stream = (s.request_id, s.label);
            let start = self.lengths.get(&stream).copied().unwrap_or(0);
            (0..s.span as usize).map(move |i| (stream, start + i))
        });
        tokens.collect()
    }
}

impl Resource for Plain {
    fn plan(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<Plan> {
        self.state().step = step.segments().iter().collect();
        Ok(Plan::NONE)
    }

    fn commit(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        let mut state = self.state();
        for s in step.segments().iter() {
            *state.lengths.entry((s.request_id, s.label)).or_default() += s.span as usize;
        }
        Ok(())
    }
}

impl KvCache for Plain {
    fn write_kv(
        &self,
        _ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        let mut state = self.state();
        let tokens = state.tokens(label);
        let (k, v) = (rows(k, tokens.len()), rows(v, tokens.len()));
        for ((&(stream, position), k), v) in tokens.iter().zip(k).zip(v) {
            let entries = state.cache.entry((layer, stream)).or_default();
            assert_eq!(entries.len(), position, "layer {layer} is written once and in order");
            entries.push((k.to_vec(), v.to_vec()));
        }
        Ok(())
    }

    fn read_kv(
        &self,
        _ctx: &StepContext<'_>,
        _layer: u32,
        _label: LabelId,
        _k: &mut TensorViewMut<'_>,
        _v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        unused()
    }

    fn layer_view(&self, _layer: u32) -> Result<KvLayer<'_>> {
        unused()
    }

    fn stream_len(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        Ok(self.state().lengths.get(&(rid, label)).copied().unwrap_or(0) as u32)
    }

    fn has_room(&self, _rid: RequestId, _label: LabelId, _tokens: u32) -> Result<bool> {
        Ok(true)
    }

    fn free_pages(&self) -> u64 {
        0
    }
}

impl Attention for Plain {
    fn run(
        &self,
        _ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let state = self.state();
        let tokens = state.tokens(label);
        let (heads, head_dim) = (q.shape()[1] as usize, q.shape()[2] as usize);
        let cap = self.scoring.get("logit_softcap").and_then(Value::as_f64);
        let q = rows(q, tokens.len());
        let out = out.as_mut_slice::<f32>().expect("contiguous f32");
        for ((&(stream, position), q), out) in
            tokens.iter().zip(q).zip(out.chunks_exact_mut(heads * head_dim))
        {
            let first = self.first_seen(layer, position);
            let cache = &state.cache[&(layer, stream)][first..=position];
            let group = heads / (cache[0].0.len() / head_dim);
            for (h, q) in q.chunks_exact(head_dim).enumerate() {
                let part = h / group * head_dim..(h / group + 1) * head_dim;
                let score = |k: &[f32]| {
                    let terms = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k));
                    let score = terms.sum::<f64>() / (head_dim as f64).sqrt();
                    cap.map_or(score, |cap| cap * (score / cap).tanh())
                };
                let scores: Vec<f64> = cache.iter().map(|(k, _)| score(&k[part.clone()])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut mixed = vec![0.0; head_dim];
                let mut sum = 0.0;
                for (score, (_, v)) in scores.iter().zip(cache) {
                    let weight = (score - max).exp();
                    sum += weight;
                    for (mixed, v) in mixed.iter_mut().zip(&v[part.clone()]) {
                        *mixed += weight * f64::from(*v);
                    }
                }
                for (out, mixed) in out[h * head_dim..][..head_dim].iter_mut().zip(mixed) {
                    *out = (mixed / sum) as f32;
                }
            }
        }
        Ok(())
    }

    fn qo_indptr(&self, _: &StepContext<'_>, _: LabelId, _: &mut [u32]) -> Result<u32> {
        unused()
    }

    fn select_last_hidden(
        &self,
        _ctx: &StepContext<'_>,
        _label: LabelId,
        _hidden: &TensorView<'_>,
        _out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        unused()
    }
}

impl Positions for Plain {
    fn apply_qk(
        &self,
        _ctx: &StepContext<'_>,
        _label: LabelId,
        _q: &mut TensorViewMut<'_>,
        _k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        unused()
    }

    fn apply_qk_layer(
        &self,
        _ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let tokens = self.state().tokens(label);
        let turn_all = |x: &mut TensorViewMut<'_>| {
            let (heads, head_dim) = (x.shape()[1] as usize, x.shape()[2] as usize);
            let x = x.as_mut_slice::<f32>().expect("contiguous f32");
            for (&(_, position), x) in tokens.iter().zip(x.chunks_exact_mut(heads * head_dim)) {
                x.chunks_exact_mut(head_dim).for_each(|head| self.turn(layer, head, position));
            }
        };
        turn_all(q);
        turn_all(k);
        Ok(())
    }

    fn pos_ids(&self, _ctx: &StepContext<'_>, _label: LabelId) -> Result<&[u32]> {
        unused()
    }

    fn position(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        self.stream_len(rid, label)
    }
}

impl Plain {
    fn turn(&self, layer: u32, head: &mut [f32], position: usize) {
        let theta = match names(&self.rope, "local_layers", layer) {
            true => "local_rope_theta",
            false => "rope_theta",
        };
        let dim = self.rope_number("rotary_dim").expect("the model states it") as usize;
        let theta = self.rope_number(theta).expect("the model states it");
        let scale = self.rope_number("rope_scale").unwrap_or(1.0);
        let interleave = self.rope["interleave"].as_bool().expect("the model states it");
        for i in 0..dim / 2 {
            let divisor = self.rope.get("rope_freqs").map_or(1.0, |f| f[i].as_f64().unwrap());
            let frequency = theta.powf(-(2.0 * i as f64) / dim as f64) / (scale * divisor);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = if interleave { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
            let (x, y) = (f64::from(head[a]), f64::from(head[b]));
            (head[a], head[b]) = ((x * cos - y * sin) as f32, (x * sin + y * cos) as f32);
        }
    }
}

/// A sampler that keeps the logits it saw, and takes the best token or what another one takes.
#[derive(Default)]
pub struct Recorder {
    inner: Option<SamplerHandle>,
    seen: Mutex<Vec<Vec<f32>>>,
}

impl Recorder {
    /// A recorder before `inner`.
    pub fn before(inner: SamplerHandle) -> Self {
        Self { inner: Some(inner), ..Self::default() }
    }

    /// As a resource.
    pub fn built(self: &Arc<Self>) -> BuiltResource {
        BuiltResource {
            resource: ResourceHandle::new(self.clone()),
            capabilities: vec![SamplerHandle::new(self.clone()).into()],
        }
    }

    /// The rows since the last call.
    pub fn take(&self) -> Vec<Vec<f32>> {
        std::mem::take(&mut *self.seen.lock().expect("no test panics inside"))
    }
}

impl Resource for Recorder {}

impl Sampler for Recorder {
    fn sample(
        &self,
        ctx: &StepContext<'_>,
        rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        out: &mut [Sampled],
    ) -> Result<()> {
        let vocab = logits.shape()[1] as usize;
        // From a device they come as a copy.
        let mut there = match logits.raw().device.is_cpu() {
            true => Vec::new(),
            false => crate::cuda::to_host(ctx, &logits.view()),
        };
        let rows = match there.is_empty() {
            true => logits.as_mut_slice::<f32>().expect("contiguous f32"),
            false => &mut there,
        };
        assert_eq!((rids.len(), rows.len()), (out.len(), out.len() * vocab));
        let mut seen = self.seen.lock().expect("no test panics inside");
        seen.extend(rows.chunks_exact(vocab).map(<[f32]>::to_vec));
        drop(seen);
        if let Some(inner) = &self.inner {
            return inner.sample(ctx, rids, logits, out);
        }
        for (row, out) in rows.chunks_exact_mut(vocab).zip(out) {
            let (token, logprob) = best(row, 1)[0];
            *out = Sampled { token, status: Sampled::OK, logprob };
            // As it may: nobody may read the logits afterwards.
            row.fill(f32::NAN);
        }
        Ok(())
    }

    fn top_logprobs(
        &self,
        logits: &TensorView<'_>,
        ids: &mut [u32],
        logprobs: &mut [f32],
    ) -> Result<()> {
        if let Some(inner) = &self.inner {
            return inner.top_logprobs(logits, ids, logprobs);
        }
        let row = logits.as_slice::<f32>().expect("contiguous f32");
        for (i, (id, logprob)) in best(row, ids.len()).into_iter().enumerate() {
            (ids[i], logprobs[i]) = (id, logprob);
        }
        Ok(())
    }
}

/// The `k` best tokens of a row with their log-probabilities.
pub fn best(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
    let mut all: Vec<(u32, f32)> = row
        .iter()
        .enumerate()
        .map(|(id, &x)| (id as u32, (f64::from(x - max) - sum.ln()) as f32))
        .collect();
    all.sort_by(|a, b| row[b.0 as usize].total_cmp(&row[a.0 as usize]));
    all.truncate(k);
    all
}

fn rows<'a>(view: &TensorView<'a>, tokens: usize) -> std::slice::ChunksExact<'a, f32> {
    let shape = view.shape();
    assert_eq!((shape.len(), shape[0] as usize), (3, tokens), "tokens of the label's group");
    let width = (shape[1] * shape[2]) as usize;
    view.as_slice::<f32>().expect("contiguous f32").chunks_exact(width)
}

/// Whether the list of layers under `key` has `layer`.
fn names(settings: &Map<String, Value>, key: &str, layer: u32) -> bool {
    let listed = settings.get(key).and_then(Value::as_array);
    listed.is_some_and(|layers| layers.iter().any(|l| l.as_u64() == Some(layer.into())))
}

fn unused<T>() -> Result<T> {
    Err(ResourceError::unsupported("no decoder calls this"))
}
