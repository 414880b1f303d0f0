//! The decoder on a CUDA device, against float64: with resources that compute on the host, and with
//! the shipped kinds.
//!
//! `cargo xtask device-test` runs these on a machine with a GPU.

use std::sync::Arc;

use device::Pool;
use device::cuda::{Context, Stream};
use half::bf16;
use model::testing::{TinyModel, Vocabulary};
use model::{Architecture, CudaDecoder, ModelPackage, Node};
use resource_api::{
    Attention, AttentionHandle, BuiltResource, DType, Device, KvCache, KvCacheHandle, KvLayer,
    LabelId, Plan, Positions, PositionsHandle, RequestId, Resource, ResourceError, ResourceHandle,
    ResourceStep, Result, StepContext, TensorView, TensorViewMut,
};

use crate::engine::{Engine, LIMITS, Part};
use crate::kinds::{Place, kinds};
use crate::plain::Plain;
use crate::reference;
use crate::tiny::{from_gguf, tokens};

/// A device tensor's values, once the step has come that far.
pub fn to_host(ctx: &StepContext<'_>, view: &TensorView<'_>) -> Vec<f32> {
    let context = Context::of_device(view.raw().device).expect("a device");
    let stream = Stream::of_step(&context, ctx).expect("a stream");
    match view.raw().dtype {
        DType::F32 => stream.read(view).expect("can be read"),
        _ => {
            let values: Vec<bf16> = stream.read(view).expect("can be read");
            values.into_iter().map(bf16::to_f32).collect()
        }
    }
}

fn to_device(ctx: &StepContext<'_>, view: &mut TensorViewMut<'_>, values: &[f32]) {
    let context = Context::of_device(view.raw().device).expect("a device");
    let stream = Stream::of_step(&context, ctx).expect("a stream");
    let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
    stream.write(view, &values).expect("can be written");
}

fn shape_of(view: &TensorView<'_>) -> Vec<usize> {
    view.shape().iter().map(|&n| n as usize).collect()
}

/// Cache, attention and positions on the host for a decoder on a device.
struct Bridge(Plain);

impl Bridge {
    fn built(node: &dyn Node) -> BuiltResource {
        let bridge = Arc::new(Self(Plain::of(node)));
        BuiltResource {
            resource: ResourceHandle::new(bridge.clone()),
            capabilities: vec![
                KvCacheHandle::new(bridge.clone()).into(),
                AttentionHandle::new(bridge.clone()).into(),
                PositionsHandle::new(bridge).into(),
            ],
        }
    }
}

impl Resource for Bridge {
    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.0.plan(step, ctx)
    }

    fn commit(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<()> {
        self.0.commit(step, ctx)
    }
}

impl KvCache for Bridge {
    fn write_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        let (shape, k, v) = (shape_of(k), to_host(ctx, k), to_host(ctx, v));
        let (k, v) = (TensorView::from_slice(&k, &shape), TensorView::from_slice(&v, &shape));
        self.0.write_kv(ctx, layer, label, &k, &v)
    }

    fn read_kv(
        &self,
        _ctx: &StepContext<'_>,
        _layer: u32,
        _label: LabelId,
        _k: &mut TensorViewMut<'_>,
        _v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        Err(ResourceError::unsupported("no decoder calls this"))
    }

    fn layer_view(&self, layer: u32) -> Result<KvLayer<'_>> {
        self.0.layer_view(layer)
    }

    fn stream_len(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        self.0.stream_len(rid, label)
    }

    fn has_room(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<bool> {
        self.0.has_room(rid, label, tokens)
    }

    fn free_pages(&self) -> u64 {
        0
    }
}

impl Attention for Bridge {
    fn run(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let (shape, q) = (shape_of(q), to_host(ctx, q));
        let mut mixed = vec![f32::NAN; q.len()];
        let q = TensorView::from_slice(&q, &shape);
        self.0.run(ctx, layer, label, &q, &mut TensorViewMut::from_slice(&mut mixed, &shape))?;
        to_device(ctx, out, &mixed);
        Ok(())
    }

    fn qo_indptr(&self, ctx: &StepContext<'_>, label: LabelId, indptr: &mut [u32]) -> Result<u32> {
        self.0.qo_indptr(ctx, label, indptr)
    }

    fn select_last_hidden(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        hidden: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.0.select_last_hidden(ctx, label, hidden, out)
    }
}

impl Positions for Bridge {
    fn apply_qk(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.0.apply_qk(ctx, label, q, k)
    }

    fn apply_qk_layer(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let (q_shape, k_shape) = (shape_of(&q.view()), shape_of(&k.view()));
        let (mut q_there, mut k_there) = (to_host(ctx, &q.view()), to_host(ctx, &k.view()));
        let mut q_view = TensorViewMut::from_slice(&mut q_there, &q_shape);
        let mut k_view = TensorViewMut::from_slice(&mut k_there, &k_shape);
        self.0.apply_qk_layer(ctx, layer, label, &mut q_view, &mut k_view)?;
        to_device(ctx, q, &q_there);
        to_device(ctx, k, &k_there);
        Ok(())
    }

    fn pos_ids(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<&[u32]> {
        self.0.pos_ids(ctx, label)
    }

    fn position(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        self.0.position(rid, label)
    }
}

/// What stands behind the decoder's capabilities.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Bridge,
    Kinds(DType),
    /// With a bf16 cache, and results that do not depend on the batch.
    Invariant,
}

/// An engine with the stream that it works on.
pub struct Rig {
    pub engine: Engine<CudaDecoder>,
    _stream: Stream,
}

impl Rig {
    fn new(model: &TinyModel, on: On) -> Self {
        Self::of_package(&from_gguf(model), on)
    }

    pub fn of_package(package: &ModelPackage, on: On) -> Self {
        let context = Context::of(0).expect("a GPU");
        let stream = Stream::new(&context).expect("a stream");
        let pool = Pool::new(2);
        let (config, weights) = (&package.config, &package.weights);
        let mut last = 0;
        let mut progress = |done, _| last = done;
        let node = CudaDecoder::load(config, weights, &context, &LIMITS, &pool, &mut progress)
            .expect("loads")
            .with_batch_invariance(matches!(on, On::Invariant));
        assert_eq!(last, weights.total_bytes());
        let device = Device::cuda(0);
        let place = Place { device, kv_dtype: DType::BF16, batch_invariant: false };
        let resources = match on {
            On::Bridge => vec![("plain", Bridge::built(&node))],
            On::Kinds(kv_dtype) => kinds(&node, Place { kv_dtype, ..place }),
            On::Invariant => kinds(&node, Place { batch_invariant: true, ..place }),
        };
        let engine = Engine::with(node, resources, pool, &LIMITS, stream.handle());
        Self { engine, _stream: stream }
    }
}

/// A tiny model whose weights are bf16 numbers already, so that what is left to differ is arithmetic.
fn rounded(architecture: Architecture, head_dim: usize, seed: u64) -> TinyModel {
    let mut config = TinyModel::new(architecture, 0).config;
    config.head_dim = head_dim;
    config.rope.dim = head_dim;
    config.hidden = 64;
    config.ffn = 128;
    // As files of Gemma imply it.
    config.embedding_scale = config.embedding_scale.map(|_| (config.hidden as f32).sqrt());
    let name = if architecture == Architecture::Llama { "smollm" } else { "qwen2" };
    let mut model = TinyModel::with_config(config, Vocabulary::small(name), seed);
    for tensor in &mut model.tensors {
        tensor.values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    }
    model
}

pub fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(&g, w)| square(f64::from(g) - w)).sum();
    (error / want.iter().map(|&w| square(w)).sum::<f64>()).sqrt()
}

/// Activations are bf16, each rounded by up to 2^-9: over two layers, a hundredth. One position of one model may
/// be off by more, where what is left after roundings that do not cancel is small.
const MARGIN: f64 = 0.01;
const WORST: f64 = 3.0 * MARGIN;

/// Over a few models: feeds a text whole, then another in parts with single tokens between, and compares the
/// logits wherever they are sampled.
fn check(architecture: Architecture, head_dim: usize, on: On) {
    let what = format!("{architecture:?}, head dim {head_dim}, {on:?}");
    let errors: Vec<f64> =
        (5..9).flat_map(|seed| errors_of(&rounded(architecture, head_dim, seed), on)).collect();
    let mean = (errors.iter().map(|e| e * e).sum::<f64>() / errors.len() as f64).sqrt();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    eprintln!("{what}: {mean:.2e}, {worst:.2e} at most");
    assert!(mean < MARGIN && worst < WORST, "{what}: {mean}, {worst} at most");
}

fn errors_of(model: &TinyModel, on: On) -> Vec<f64> {
    let mut rig = Rig::new(model, on);
    let (a, b) = (tokens(23, 3), tokens(40, 8));
    let (want_a, want_b) = (reference::logits(model, &a), reference::logits(model, &b));
    let mut errors = Vec::new();
    let mut compare = |got: &[f32], want: &[f64]| errors.push(relative_error(got, want));
    rig.engine.ingest(0, &a);
    rig.engine.ingest(1, &b);
    let unsampled = Part { sample: false, ..Part::sampled(1, &b[..17]) };
    let rows = rig.engine.step(&[Part::sampled(0, &a[..20]), unsampled]).expect("the step runs");
    compare(&rows[0].logits, &want_a[19]);
    for i in 0..3 {
        let (in_a, in_b) = (20 + i..21 + i, 17 + i..18 + i);
        let parts = [Part::sampled(0, &a[in_a.clone()]), Part::sampled(1, &b[in_b.clone()])];
        let rows = rig.engine.step(&parts).expect("the step runs");
        compare(&rows[0].logits, &want_a[in_a.start]);
        compare(&rows[1].logits, &want_b[in_b.start]);
    }
    let rows = rig.engine.step(&[Part::sampled(1, &b[20..])]).expect("the step runs");
    compare(&rows[0].logits, &want_b[39]);
    errors
}

const ARCHITECTURES: [Architecture; 4] =
    [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3];

#[test]
#[ignore = "needs a GPU"]
fn logits_on_a_device_are_those_of_float64_for_every_architecture() {
    for architecture in ARCHITECTURES {
        check(architecture, 16, On::Bridge);
    }
    check(Architecture::Qwen3, 64, On::Bridge);
    check(Architecture::Gemma3, 64, On::Bridge);
}

#[test]
#[ignore = "needs a GPU"]
fn the_kinds_on_a_device_give_the_same() {
    for architecture in ARCHITECTURES {
        check(architecture, 64, On::Kinds(DType::BF16));
    }
    check(Architecture::Llama, 16, On::Kinds(DType::F32));
    check(Architecture::Llama, 128, On::Kinds(DType::F32));
}

#[test]
#[ignore = "needs a GPU"]
fn a_replayed_step_gives_what_it_gives_launch_by_launch() {
    let model = rounded(Architecture::Qwen3, 64, 5);
    let mut rig = Rig::new(&model, On::Kinds(DType::BF16));
    let (a, b) = (tokens(60, 3), tokens(60, 8));
    let (want_a, want_b) = (reference::logits(&model, &a), reference::logits(&model, &b));
    let engine = &mut rig.engine;
    // The larger one later: it must leave the other as it is.
    engine.capture(2).expect("captures");
    engine.capture(4).expect("captures");
    engine.ingest(0, &a);
    engine.ingest(1, &b);
    engine.step(&[Part::sampled(0, &a[..20]), Part::sampled(1, &b[..7])]).expect("the step runs");
    for i in 0..36 {
        let (in_a, in_b) = (20 + i..21 + i, 7 + i..8 + i);
        let parts = [Part::sampled(0, &a[in_a.clone()]), Part::sampled(1, &b[in_b.clone()])];
        // Alone, side by side, and padded, in turn; the streams grow over pages meanwhile.
        let rows = match i % 3 {
            0 => engine.step(&parts),
            1 => engine.step_captured(&parts, 2),
            _ => engine.step_captured(&parts, 4),
        };
        let rows = rows.expect("the step runs");
        for (row, want) in rows.iter().zip([&want_a[in_a.start], &want_b[in_b.start]]) {
            let error = relative_error(&row.logits, want);
            assert!(error < 1.5 * MARGIN, "step {i}: {error}");
        }
    }
}

/// The logits of a text's last position: fed whole; in parts; token by token; and beside others, padded and
/// replayed.
#[test]
#[ignore = "needs a GPU"]
fn batch_invariant_logits_are_the_same_to_the_bit_however_they_come_about() {
    for architecture in ARCHITECTURES {
        let model = rounded(architecture, 64, 5);
        let mut rig = Rig::new(&model, On::Invariant);
        let engine = &mut rig.engine;
        engine.capture(4).expect("captures");
        let (text, other) = (tokens(40, 3), tokens(60, 8));
        let last = text.len() - 1;
        (0..4).for_each(|slot| engine.ingest(slot, &text));
        let whole = engine.step(&[Part::sampled(0, &text)]).expect("the step runs");
        let want = &whole[0].logits;
        let error = relative_error(want, &reference::logits(&model, &text)[last]);
        assert!(error < 1.5 * MARGIN, "{architecture:?}: {error}");

        let parts = [0..17, 17..18, 18..31, 31..40];
        let mut at_other = 0;
        let mut beside = |count: usize| {
            at_other += count;
            at_other - count..at_other
        };
        for (i, range) in parts.into_iter().enumerate() {
            let others = beside([9, 1, 0, 3][i]);
            let mut step = vec![Part::sampled(1, &text[range])];
            if !others.is_empty() {
                step.insert(0, Part::sampled(2, &other[others]));
            }
            let rows = engine.step(&step).expect("the step runs");
            let row = rows.iter().find(|row| row.request.index() == 1).expect("its row");
            assert!(i < 3 || row.logits == *want, "{architecture:?}, in parts beside another");
        }
        for (i, token) in text.chunks(1).enumerate() {
            let others = beside(1);
            let step = [Part::sampled(3, token), Part::sampled(2, &other[others])];
            let rows = match i % 3 {
                0 => engine.step(&step[..1]),
                1 => engine.step(&step),
                _ => engine.step_captured(&step, 4),
            };
            let rows = rows.expect("the step runs");
            assert!(i < last || rows[0].logits == *want, "{architecture:?}, token by token");
        }
    }
}

/// A step of as many rows as the captured one gives what the captured one gives.
#[test]
#[ignore = "needs a GPU"]
fn a_captured_step_gives_the_bits_of_an_eager_one_of_its_size() {
    let model = rounded(Architecture::Llama, 64, 5);
    let on = On::Kinds(DType::BF16);
    let (mut eager, mut captured) = (Rig::new(&model, on), Rig::new(&model, on));
    let (eager, captured) = (&mut eager.engine, &mut captured.engine);
    captured.capture(4).expect("captures");
    let texts: Vec<_> = (0..4).map(|slot| tokens(50, slot + 1)).collect();
    let part = |slot: u32, range: std::ops::Range<usize>| {
        Part::sampled(slot, &texts[slot as usize][range])
    };
    for engine in [&mut *eager, &mut *captured] {
        (0..4).for_each(|slot| engine.ingest(slot, &texts[slot as usize]));
        let prompts: Vec<_> = (0..4).map(|slot| part(slot, 0..7 + slot as usize)).collect();
        engine.step(&prompts).expect("the step runs");
    }
    for i in 0..30 {
        let step: Vec<_> = (0..4)
            .map(|slot| {
                let at = 7 + slot as usize + i;
                part(slot, at..at + 1)
            })
            .collect();
        let want = eager.step(&step).expect("the step runs");
        assert!(captured.step_captured(&step, 4).expect("the step runs") == want, "step {i}");
    }
}

/// One kernel computes a step where resources say what they would do, and nothing is lost where they do not.
#[test]
#[ignore = "needs a GPU"]
fn a_step_of_few_rows_is_one_kernel_where_resources_describe_themselves() {
    let model = rounded(Architecture::Qwen3, 64, 5);
    let texts: Vec<_> = (0..4).map(|slot| tokens(7, slot)).collect();
    let part = |slot: u32, range: std::ops::Range<usize>| {
        Part::sampled(slot, &texts[slot as usize][range])
    };
    let kinds = [(On::Kinds(DType::BF16), true), (On::Kinds(DType::F32), false)];
    for (on, is_whole) in kinds.into_iter().chain([(On::Bridge, false), (On::Invariant, false)]) {
        let mut rig = Rig::new(&model, on);
        let engine = &mut rig.engine;
        (0..4).for_each(|slot| engine.ingest(slot, &texts[slot as usize]));
        let prompts: Vec<_> = (0..4).map(|slot| part(slot, 0..3)).collect();
        engine.step(&prompts).expect("the step runs");
        assert_eq!(engine.node.whole_steps(), 0, "{on:?}: a prompt");
        for (at, rows) in [(3, 4), (4, 1), (5, 1)] {
            let step: Vec<_> = (0..rows).map(|slot| part(slot, at..at + 1)).collect();
            let got = engine.step(&step).expect("the step runs");
            for (row, text) in got.iter().zip(&texts) {
                let want = &reference::logits(&model, &text[..=at])[at];
                let error = relative_error(&row.logits, want);
                assert!(error < WORST, "{on:?}, {rows} rows: {error}");
            }
        }
        assert_eq!(engine.node.whole_steps(), if is_whole { 3 } else { 0 }, "{on:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn log_probabilities_come_from_a_device_too() {
    let model = rounded(Architecture::Llama, 16, 5);
    let mut rig = Rig::new(&model, On::Bridge);
    let (a, b) = (tokens(5, 1), tokens(4, 2));
    let parts = [Part::sampled(0, &a), Part::sampled(1, &b)];
    let rows = rig.engine.step_with_top(&parts, &[0, 3]).expect("the step runs");
    assert!(rig.engine.out.top(0).0.is_empty());
    let (ids, logprobs) = rig.engine.out.top(1);
    let got: Vec<_> = ids.iter().copied().zip(logprobs.iter().copied()).collect();
    assert_eq!(got, crate::plain::best(&rows[1].logits, 3));
}

#[test]
#[ignore = "needs a GPU"]
fn a_step_beyond_the_buffers_is_refused() {
    let model = rounded(Architecture::Llama, 16, 5);
    let mut rig = Rig::new(&model, On::Bridge);
    let long = tokens(LIMITS.max_batch_tokens as usize + 1, 1);
    let e = rig.engine.step(&[Part::sampled(0, &long)]).expect_err("too long");
    assert!(e.message().contains("a step of 65 tokens and 1 samples is larger than the 64"), "{e}");
}
