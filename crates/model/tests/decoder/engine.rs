//! Drives a decoder and its resources through steps, as a runner does.

use std::sync::Arc;

use device::{Activations, PackOptions, Pool};
use model::{Decoder, ModelPackage, Node, NodeResource, NodeResources, StepInput, StepOutput};
use resource_api::{
    BucketKey, BuiltResource, EngineLimits, LabelId, NodeId, RequestId, RequestOverrides, Resource,
    ResourceStep, Result, Segments, SlotLease, StepContext, StepHead, StepId, TypedRef, WalkId,
};

use crate::kinds::{Place, kinds};
use crate::plain::{Recorder, plain};

/// One request's share of a step.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub request: RequestId,
    pub label: LabelId,
    pub tokens: &'a [u32],
    pub sample: bool,
}

impl<'a> Part<'a> {
    /// Tokens of the request in `slot`, sampled after the last.
    pub fn sampled(slot: u32, tokens: &'a [u32]) -> Self {
        let request = RequestId::new(slot, 1);
        Self { request, label: LabelId::MAIN, tokens, sample: true }
    }
}

/// A sampled row: the token, and the logits that the sampler saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub request: RequestId,
    pub token: u32,
    pub logits: Vec<f32>,
}

/// What stands behind the decoder's capabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Resources {
    /// Growing lists and float64 sums.
    Plain,
    /// The shipped kinds.
    Kinds,
}

pub const BOTH: [Resources; 2] = [Resources::Plain, Resources::Kinds];

/// The largest steps of these tests.
pub const LIMITS: EngineLimits =
    EngineLimits { max_batch: 4, max_batch_tokens: 64, max_model_len: 128 };

pub struct Engine<N = Decoder> {
    pub node: N,
    pub out: StepOutput,
    resources: Vec<(&'static str, BuiltResource)>,
    recorder: Arc<Recorder>,
    pool: Pool,
    /// Handle of the stream that device work goes on; 0 on the CPU.
    stream: u64,
    steps: u64,
}

impl Engine {
    /// A decoder with its resources.
    pub fn new(package: &ModelPackage, activations: Activations, on: Resources) -> Self {
        let pool = Pool::new(2);
        let options = PackOptions::new(activations);
        let mut last = (0, 0);
        let mut progress = |done, total| {
            assert!(done > last.0 && done <= total);
            last = (done, total);
        };
        let (config, weights) = (&package.config, &package.weights);
        let node = Decoder::load(config, weights, options, &pool, &mut progress).expect("loads");
        assert_eq!(last, (weights.total_bytes(), weights.total_bytes()));

        let resources = match on {
            Resources::Plain => vec![("plain", plain(&node))],
            Resources::Kinds => kinds(&node, Place::CPU),
        };
        // Smaller than some steps: buffers grow.
        let limits = EngineLimits { max_batch: 2, max_batch_tokens: 8, max_model_len: 128 };
        Self::with(node, resources, pool, &limits, 0)
    }
}

impl<N: Node> Engine<N> {
    /// `node` over `resources`, with a recorder in front of their sampler.
    pub fn with(
        node: N,
        mut resources: Vec<(&'static str, BuiltResource)>,
        pool: Pool,
        limits: &EngineLimits,
        stream: u64,
    ) -> Self {
        let sampler = resources.iter_mut().find(|(key, _)| *key == "sampler");
        let recorder = match sampler {
            Some((_, sampler)) => {
                let inner = sampler.capabilities.remove(0).open().expect("a sampler");
                Arc::new(Recorder::before(inner))
            }
            None => Arc::default(),
        };
        resources.push(("recorder", recorder.built()));
        let listed = resources.iter().map(|(key, built)| NodeResource {
            key,
            kind: key,
            capabilities: &built.capabilities,
        });
        node.attach(&NodeResources::new(node.name(), listed.collect()), limits).expect("attaches");
        Self { node, out: StepOutput::default(), resources, recorder, pool, stream, steps: 0 }
    }

    /// Announces the request in `slot`.
    pub fn ingest(&self, slot: u32, prompt: &[u32]) {
        for (key, built) in &self.resources {
            let text = if *key == "sampler" { r#"{"temperature": 0}"# } else { "" };
            // Tests generate a few tokens, of prompts of up to `max_model_len`.
            let overrides = RequestOverrides::new(text, prompt, 1);
            built.resource.ingest_request(RequestId::new(slot, 1), &overrides).expect("ingests");
        }
    }

    /// Runs one step and gives its sampled rows.
    pub fn step(&mut self, parts: &[Part<'_>]) -> Result<Vec<Row>> {
        self.step_with_top(parts, &[])
    }

    /// As [`step`](Self::step), with the numbers of log-probabilities to report.
    pub fn step_with_top(&mut self, parts: &[Part<'_>], top: &[u32]) -> Result<Vec<Row>> {
        let request: Vec<_> = parts.iter().map(|p| p.request).collect();
        let label: Vec<_> = parts.iter().map(|p| p.label).collect();
        let span: Vec<_> = parts.iter().map(|p| p.tokens.len() as u32).collect();
        let token_ids: Vec<_> = parts.iter().flat_map(|p| p.tokens).copied().collect();
        let sampled = (0..parts.len()).filter(|&i| parts[i].sample);
        let sample: Vec<u32> = sampled.map(|i| i as u32).collect();
        self.run(&StepInput {
            segments: Segments { request: &request, label: &label, span: &span },
            token_ids: &token_ids,
            sample: &sample,
            top_logprobs: top,
            score: &[],
            from_sample: &[],
        })
    }

    /// Admits, plans, runs and commits a step.
    pub fn run(&mut self, input: &StepInput<'_>) -> Result<Vec<Row>> {
        let request = input.segments.request;
        self.drive(input, request, request, SlotLease::eager(0, 0), false)
    }

    /// Has the node capture steps of `rows` rows of one token.
    pub fn capture(&mut self, rows: usize) -> Result<()> {
        self.step_of_bucket(&[], rows, true).map(|_| ())
    }

    /// One token for each of `parts`, in a step that is padded to a captured one of `rows` rows.
    pub fn step_captured(&mut self, parts: &[Part<'_>], rows: usize) -> Result<Vec<Row>> {
        self.step_of_bucket(parts, rows, false)
    }

    fn step_of_bucket(
        &mut self,
        parts: &[Part<'_>],
        rows: usize,
        capture: bool,
    ) -> Result<Vec<Row>> {
        let bs = rows as u32;
        let bucket = BucketKey { graph_walk: WalkId(0), bs, num_tokens: bs, cg_key_info: 0 };
        let lease = SlotLease { bucket, has_bucket: true, ..SlotLease::eager(1, 0) };
        let own: Vec<_> = parts.iter().map(|p| p.request).collect();
        let padding = (parts.len() as u32..bs).map(RequestId::padding);
        let request: Vec<_> = own.iter().copied().chain(padding).collect();
        let mut token_ids: Vec<_> = parts.iter().flat_map(|p| p.tokens).copied().collect();
        assert_eq!(token_ids.len(), parts.len(), "one token each");
        token_ids.resize(rows, 0);
        let (label, span) = (vec![LabelId::MAIN; rows], vec![1; rows]);
        let sample: Vec<u32> = (0..parts.len() as u32).collect();
        let input = StepInput {
            segments: Segments { request: &request, label: &label, span: &span },
            token_ids: &token_ids,
            sample: &sample,
            top_logprobs: &[],
            score: &[],
            from_sample: &[],
        };
        self.drive(&input, &own, &request, lease, capture)
    }

    fn drive(
        &mut self,
        input: &StepInput<'_>,
        own: &[RequestId],
        padded: &[RequestId],
        lease: SlotLease,
        capture: bool,
    ) -> Result<Vec<Row>> {
        self.steps += 1;
        let head = StepHead {
            step: StepId(self.steps),
            epoch: self.steps,
            node: NodeId(0),
            graph_walk: WalkId(0),
            lease: SlotLease { generation: self.steps as u32, ..lease },
            capture: false,
            is_preplan: false,
            stream: self.stream,
        };
        let step = ResourceStep::new(input.segments).with_token_ids(input.token_ids);
        let mut plans = vec![TypedRef::NONE; self.resources.len()];
        for (_, built) in &self.resources {
            let ctx = StepContext::new(head, own, padded, &plans);
            let outcome = built.resource.admit(&step, &ctx)?;
            assert!(outcome.is_ready(), "{}", outcome.message());
        }
        for (index, (_, built)) in self.resources.iter().enumerate() {
            let ctx = StepContext::new(head, own, padded, &plans);
            plans[index] = built.resource.plan(&step, &ctx)?.into_result();
        }
        if capture {
            let ctx = StepContext::new(StepHead { capture, ..head }, own, padded, &plans);
            let input = StepInput { sample: &[], ..*input };
            let captured = self.node.forward(&ctx, &input, &mut self.out, &self.pool);
            let ctx = StepContext::new(head, own, padded, &plans);
            for (_, built) in self.resources.iter().rev() {
                built.resource.rollback_admit(&step, &ctx)?;
            }
            return captured.map(|()| Vec::new());
        }
        let ctx = StepContext::new(head, own, padded, &plans);
        self.node.forward(&ctx, input, &mut self.out, &self.pool)?;
        for (_, built) in &self.resources {
            built.resource.commit(&step, &ctx)?;
        }
        let out = &self.out;
        let tokens: Vec<u32> = out.sampled.iter().map(|s| s.token).collect();
        for (_, built) in &self.resources {
            built.resource.on_outputs(&ctx, &out.requests, &tokens)?;
        }
        let logits = self.recorder.take();
        assert_eq!((logits.len(), tokens.len()), (out.requests.len(), input.sample.len()));
        let rows = out.requests.iter().zip(tokens).zip(logits);
        Ok(rows.map(|((&request, token), logits)| Row { request, token, logits }).collect())
    }
}
