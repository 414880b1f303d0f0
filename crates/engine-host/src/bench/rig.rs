//! Built resources, requests with prompts, and one timed step of them.

use std::sync::Arc;
use std::time::Instant;

use resource_api::{
    AttentionHandle, DType, Device, EngineLimits, LabelId, NodeId, NodeResourceSpec, PrefixInputs,
    PrefixWalk, RequestId, RequestOverrides, Resource, Segment, WalkId,
};
use serde_json::{Value, json};

use super::kinds::Kinds;
use super::ledger::Ledger;
use crate::error::{Error, ErrorKind, Result};
use crate::resources::{BuildInfo, ResourceSet, Wanted};
use crate::runner::{FullAdmitOutcome, Live, Runner, Started};
use crate::services::Services;
use crate::slots;
use crate::step::SubmoduleStep;

/// Token slots of a page.
pub const PAGE: u32 = 16;
/// What is sampled, always.
pub const TOKEN: u32 = 7;
/// Tokens of the vocabulary.
pub const VOCABULARY: u32 = 49_152;
/// Plan buffer sets, as many as the engine has on the CPU.
pub const SLOTS: u32 = slots::ON_CPU as u32;
/// Elements of the cache's one head; its contents are never touched.
const HEAD_DIM: u32 = 2;
/// Tokens of one prompt that a step takes while a prompt is computed.
const CHUNK: u32 = 1024;
/// Prompts that are computed side by side, so that their pages lie between each other's.
const SIDE_BY_SIDE: usize = 8;

/// How large the resources are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Pages of the cache, the sink included.
    pub pages: u32,
    /// Requests of a step.
    pub max_batch: u32,
    /// Tokens of a stream.
    pub max_len: u32,
}

/// A prompt that is computed from its position instead of being kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Tells prompts apart.
    pub seed: u64,
    /// Tells beginnings apart.
    pub common: u64,
    /// How many tokens belong to the beginning, and are those of every prompt with the same one.
    pub shared: u32,
    /// Tokens.
    pub len: u32,
}

impl Prompt {
    /// The token at a position; past the prompt, what is always sampled.
    pub fn token(&self, at: u32) -> u32 {
        if at >= self.len {
            return TOKEN;
        }
        let seed = if at < self.shared { self.common } else { self.seed };
        let mixed = ((seed << 32) + u64::from(at) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed >> 32) % u64::from(VOCABULARY)) as u32
    }

    /// All tokens.
    pub fn tokens(&self) -> Vec<u32> {
        (0..self.len).map(|at| self.token(at)).collect()
    }
}

/// A request and how far it is.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// The request.
    pub rid: RequestId,
    /// Its prompt.
    pub prompt: Prompt,
    /// Tokens computed.
    pub len: u32,
    /// Tokens sampled.
    pub sampled: u32,
    /// Seed of its random choices.
    pub seed: u64,
}

/// Nanoseconds of the phases of one step, less what reading the clock costs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Writing the step's description.
    pub declare: u64,
    /// `admit` and `plan` of all resources.
    pub start: u64,
    /// `commit` of all resources.
    pub commit: u64,
    /// `on_outputs` of all resources, and giving the slot back.
    pub outputs: u64,
    /// `publish_for_step` of every request, in steps whose plans are compared: what it leaves in the
    /// caches must not change the other phases.
    pub publish: Option<u64>,
    /// Allocations from `start` to the end, where they can be counted.
    pub allocations: u64,
}

impl Times {
    /// Everything but the description.
    pub fn total(&self) -> u64 {
        self.start + self.commit + self.outputs
    }
}

/// What follows a step, untimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Nothing.
    None,
    /// The ledger takes the new pages down.
    Record,
    /// The plan is compared with the ledger, entry by entry.
    Compare,
}

/// Where the plans of the resources are filed.
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    pub kv: u32,
    pub positions: u32,
    pub sampler: u32,
}

/// Resources that are built and driven as in an engine.
pub struct Rig {
    pub runner: Runner,
    pub services: Arc<Services>,
    pub node: NodeId,
    pub prefill: WalkId,
    pub decode: WalkId,
    pub geometry: Geometry,
    pub ledger: Ledger,
    pub clock: u64,
    pub allocations: Option<fn() -> u64>,
    /// Tokens of one prompt that a step takes while prompts are computed.
    pub chunk: u32,
    /// Counts requests that are asked about and never run.
    pub generation: u32,
    spare: Option<SubmoduleStep>,
    generations: Vec<u32>,
    free_slots: Vec<u32>,
    seeds: u64,
    rids: Vec<RequestId>,
    ids: Vec<u32>,
}

impl Rig {
    /// Builds one resource of each measured kind, with the prefix cache on.
    ///
    /// # Errors
    /// What a kind's `build` says.
    pub fn build(kinds: &Kinds, geometry: Geometry) -> Result<Self> {
        let clock = super::stats::clock_cost();
        Ok(Self { clock, ..Self::untimed(kinds, geometry)? })
    }

    /// The same for steps that are not timed: it does the same work in every run, to the instruction.
    ///
    /// # Errors
    /// As for [`Rig::build`].
    pub fn untimed(kinds: &Kinds, geometry: Geometry) -> Result<Self> {
        let services = Services::new(1, 1 << 60);
        let info = BuildInfo {
            device: Device::CPU,
            kv_dtype: DType::BF16,
            needs_remote_transfer: false,
            batch_invariant: false,
            transfer: None,
            limits: limits(geometry),
        };
        let set = ResourceSet::build(&kinds.registry, wanted(geometry), &info, services.clone())?;
        let node = NodeId(services.nodes.intern(NODE));
        let prefill = WalkId(services.walks.intern("prefill"));
        let decode = WalkId(services.walks.intern("decode"));
        for entry in set.entries() {
            let walks = vec![PrefixWalk { label: LabelId::MAIN, write: prefill, decode }];
            entry.resource().enable_prefix_cache(b"engine-host bench", walks)?;
        }
        let find = |key: &str| {
            let found = set.find(key);
            found.ok_or_else(|| Error::new(ErrorKind::Internal, format!("no resource {key:?}")))
        };
        let at = Indices {
            kv: find("kv")?.0 as u32,
            positions: find("pos")?.0 as u32,
            sampler: find("sampler")?.0 as u32,
        };
        let attention = find("attn")?.1.capabilities().iter();
        let attention: Option<AttentionHandle> = attention.filter_map(|c| c.open().ok()).next();
        let attention = attention
            .ok_or_else(|| Error::new(ErrorKind::Internal, "kind attention offers no attention"))?;
        let all = set.of_node(NODE);
        Ok(Self {
            runner: Runner::new(Arc::new(set), SLOTS as usize),
            services,
            node,
            prefill,
            decode,
            geometry,
            ledger: Ledger::new(at, attention),
            clock: 0,
            allocations: kinds.allocations,
            chunk: CHUNK,
            generation: 0,
            spare: Some(SubmoduleStep::new(node, prefill, all)),
            generations: Vec::new(),
            free_slots: Vec::new(),
            seeds: 0,
            rids: Vec::new(),
            ids: Vec::new(),
        })
    }

    /// A prompt that nobody had yet.
    pub fn fresh_prompt(&mut self, len: u32) -> Prompt {
        self.seeds += 1;
        Prompt { seed: self.seeds, common: 0, shared: 0, len }
    }

    /// Takes a request in, and adopts what is cached of its prompt.
    ///
    /// # Errors
    /// What a resource says.
    pub fn begin(&mut self, prompt: Prompt, new_tokens: u32) -> Result<Stream> {
        let tokens = prompt.tokens();
        let mut stream = self.ingest(prompt, &tokens, new_tokens)?;
        let matched = self.resolve(&stream)?;
        self.apply(&mut stream, &tokens, matched)?;
        Ok(stream)
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// What a resource says.
    pub fn ingest(&mut self, prompt: Prompt, tokens: &[u32], new_tokens: u32) -> Result<Stream> {
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.generations.push(0);
            self.generations.len() as u32 - 1
        });
        self.generations[slot as usize] += 1;
        let rid = RequestId::new(slot, self.generations[slot as usize]);
        let seed = prompt.seed ^ 0x5eed;
        let sampling = format!(
            r#"{{"temperature": {TEMPERATURE}, "top_k": {TOP_K}, "top_p": {TOP_P}, "seed": {seed}}}"#
        );
        for entry in self.runner.resources().entries() {
            let text = if entry.kind == "sampler" { sampling.as_str() } else { "" };
            entry
                .resource()
                .ingest_request(rid, &RequestOverrides::new(text, tokens, new_tokens))?;
        }
        self.ledger.forget(rid);
        Ok(Stream { rid, prompt, len: 0, sampled: 0, seed })
    }

    /// How many leading tokens all resources can skip; leaves one to compute.
    ///
    /// # Errors
    /// What a resource says.
    pub fn resolve(&self, stream: &Stream) -> Result<u32> {
        let mut agreed: Option<u32> = None;
        for entry in self.runner.resources().entries() {
            let found =
                entry.resource().resolve_cached_prefix(stream.rid, self.node, self.prefill)?;
            agreed = found.map_or(agreed, |len| Some(agreed.map_or(len, |a| a.min(len))));
        }
        Ok(agreed.unwrap_or(0).min(stream.prompt.len - 1))
    }

    /// Makes all resources skip `matched` tokens.
    ///
    /// # Errors
    /// What a resource says.
    pub fn apply(&mut self, stream: &mut Stream, tokens: &[u32], matched: u32) -> Result<()> {
        if matched == 0 {
            return Ok(());
        }
        let inputs = PrefixInputs::new(tokens);
        for entry in self.runner.resources().entries() {
            let resource = entry.resource();
            resource.apply_cached_prefix(stream.rid, self.node, self.prefill, &inputs, matched)?;
        }
        stream.len = matched;
        self.ledger.adopt(stream.rid, matched);
        Ok(())
    }

    /// Ends a request.
    ///
    /// # Errors
    /// What a resource says.
    pub fn end(&mut self, stream: &Stream) -> Result<()> {
        for entry in self.runner.resources().entries().iter().rev() {
            entry.resource().remove_request(stream.rid)?;
        }
        self.free_slots.push(stream.rid.slot);
        Ok(())
    }

    /// Ends them all.
    ///
    /// # Errors
    /// What a resource says.
    pub fn end_all(&mut self, streams: &[Stream]) -> Result<()> {
        // In reverse, so that the next requests get the slots in the same order.
        streams.iter().rev().try_for_each(|stream| self.end(stream))
    }

    /// Begins requests with fresh prompts of these lengths and computes them.
    ///
    /// # Errors
    /// What a resource says; a pool that is too small.
    pub fn population(&mut self, lens: &[u32], new_tokens: u32) -> Result<Vec<Stream>> {
        let mut streams = Vec::with_capacity(lens.len());
        for &len in lens {
            let prompt = self.fresh_prompt(len);
            streams.push(self.begin(prompt, new_tokens)?);
        }
        self.compute(&mut streams, Check::Record)?;
        Ok(streams)
    }

    /// Computes what is left of prompts, in chunks.
    ///
    /// # Errors
    /// What a resource says; a pool that is too small.
    pub fn compute(&mut self, streams: &mut [Stream], check: Check) -> Result<()> {
        for group in streams.chunks_mut(SIDE_BY_SIDE) {
            loop {
                let left = |s: &Stream| s.prompt.len.saturating_sub(s.len).min(self.chunk);
                let spans: Vec<u32> = group.iter().map(left).collect();
                if spans.iter().all(|&span| span == 0) {
                    break;
                }
                self.step(group, Some(&spans), check)?;
            }
        }
        Ok(())
    }

    /// Fills the pool with pages of prompts that have ended, which leave it in no order.
    ///
    /// # Errors
    /// What a resource says.
    pub fn fill(&mut self) -> Result<()> {
        const LEN: u32 = 8192;
        const LIVE: usize = 512;
        let len = LEN.min(self.geometry.max_len - PAGE);
        let count = self.geometry.pages / len.div_ceil(PAGE);
        let most = LIVE.min(count as usize / 2 + 1).min(self.geometry.max_batch as usize / 2 + 1);
        let mut live: Vec<Stream> = Vec::new();
        let mut random = 0x2545_f491_4f6c_dd1du64;
        for _ in 0..count.div_ceil(SIDE_BY_SIDE as u32) {
            while live.len() + SIDE_BY_SIDE > most && !live.is_empty() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let out = live.swap_remove((random % live.len() as u64) as usize);
                self.end(&out)?;
            }
            let mut group = Vec::with_capacity(SIDE_BY_SIDE);
            for _ in 0..SIDE_BY_SIDE {
                let prompt = self.fresh_prompt(len);
                group.push(self.begin(prompt, 1)?);
            }
            self.compute(&mut group, Check::None)?;
            live.append(&mut group);
        }
        self.end_all(&live)
    }

    /// Runs one step of these streams, one token each or as many as `spans` says; those with none
    /// sit out.
    ///
    /// # Errors
    /// A refusal, what a resource says, or a plan that is not what the ledger says.
    pub fn step(
        &mut self,
        streams: &mut [Stream],
        spans: Option<&[u32]>,
        check: Check,
    ) -> Result<Times> {
        let before = Instant::now();
        let step = self.declare(streams, spans)?;
        let declared = Instant::now();
        let allocations = self.count();
        let start = Instant::now();
        let started = self.runner.start(step);
        let mut times = Times {
            declare: self.nanos(before, declared),
            start: self.nanos(start, Instant::now()),
            ..Times::default()
        };
        times.allocations = self.count() - allocations;
        let live = self.live(started)?;
        self.finish(live, streams, spans, check, times)
    }

    /// The second half of a step: what follows the forward pass.
    ///
    /// # Errors
    /// As for [`Rig::step`].
    pub fn finish(
        &mut self,
        live: Live,
        streams: &mut [Stream],
        spans: Option<&[u32]>,
        check: Check,
        mut times: Times,
    ) -> Result<Times> {
        self.services.complete_epoch(self.runner.epoch());
        match check {
            Check::None => {}
            Check::Record => self.ledger.record(&live.ctx())?,
            Check::Compare => {
                self.ledger.record(&live.ctx())?;
                self.ledger.compare(&live.ctx(), streams, spans)?;
            }
        }
        self.rids.clear();
        self.ids.clear();
        for (i, stream) in streams.iter_mut().enumerate() {
            let span = spans.map_or(1, |spans| spans[i]);
            if span == 0 {
                continue;
            }
            stream.len += span;
            if stream.len >= stream.prompt.len {
                stream.sampled += 1;
                self.rids.push(stream.rid);
                self.ids.push(TOKEN);
            }
        }
        let allocations = self.count();
        let start = Instant::now();
        let (done, committed) = self.runner.commit(live);
        let commit = Instant::now();
        let told = self.runner.outputs(&done, &self.rids, &self.ids);
        let outputs = Instant::now();
        times.allocations += self.count() - allocations;
        if check == Check::Compare {
            let start = Instant::now();
            for &rid in &self.rids {
                self.runner.publish_for_step(&done, rid)?;
            }
            times.publish = Some(self.nanos(start, Instant::now()));
        }
        let allocations = self.count();
        let finish = Instant::now();
        self.spare = Some(self.runner.finish(done));
        let end = Instant::now();
        times.allocations += self.count() - allocations;
        committed.and(told)?;
        times.commit = self.nanos(start, commit);
        times.outputs = self.nanos(commit, outputs) + self.nanos(finish, end);
        Ok(times)
    }

    /// The description of a step, in memory that the last one left.
    ///
    /// # Errors
    /// When the last one was not given back.
    pub fn declare(&mut self, streams: &[Stream], spans: Option<&[u32]>) -> Result<SubmoduleStep> {
        let lost = || Error::new(ErrorKind::Internal, "a step was not given back");
        let mut step = self.spare.take().ok_or_else(lost)?;
        step.clear();
        step.graph_walk = self.decode;
        for (i, stream) in streams.iter().enumerate() {
            let span = spans.map_or(1, |spans| spans[i]);
            if span == 0 {
                continue;
            }
            let label = LabelId::MAIN;
            step.request_ids.push(stream.rid);
            step.segments.push(Segment { request_id: stream.rid, label, span });
            if stream.len < stream.prompt.len {
                step.graph_walk = self.prefill;
                step.token_ids
                    .extend((stream.len..stream.len + span).map(|at| stream.prompt.token(at)));
            } else {
                step.token_ids.resize(step.token_ids.len() + span as usize, TOKEN);
            }
        }
        Ok(step)
    }

    /// Takes a description back.
    pub fn give_back(&mut self, step: SubmoduleStep) {
        self.spare = Some(step);
    }

    /// A step that runs.
    ///
    /// # Errors
    /// A refusal, or what a resource says.
    pub fn live(
        &mut self,
        started: std::result::Result<Started, crate::runner::FailedStep>,
    ) -> Result<Live> {
        match started {
            Ok(Started::Live(live)) => Ok(live),
            Ok(Started::Refused(why, step)) => {
                self.spare = Some(step);
                Err(refused(&why))
            }
            Err(failed) => {
                self.spare = Some(*failed.step);
                Err(failed.error)
            }
        }
    }

    /// Allocations so far; 0 where they cannot be counted.
    pub fn count(&self) -> u64 {
        self.allocations.map_or(0, |count| count())
    }

    /// Nanoseconds from one reading of the clock to a later one, less what a reading costs.
    pub fn nanos(&self, from: Instant, to: Instant) -> u64 {
        (to.duration_since(from).as_nanos() as u64).saturating_sub(self.clock)
    }

    /// The state of all resources as they tell it.
    pub fn inspect(&self) -> Vec<String> {
        self.runner.resources().entries().iter().map(|e| e.resource().inspect()).collect()
    }
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rig({:?})", self.geometry)
    }
}

/// A refusal that should not have been.
pub fn refused(why: &FullAdmitOutcome) -> Error {
    let key = why.failed_resource.as_deref().unwrap_or("?");
    Error::new(ErrorKind::Internal, format!("`{key}` refused a step: {}", why.outcome.message()))
}

/// The node that uses all resources.
pub const NODE: &str = "bench";
/// Sampling parameters of every request.
pub const TEMPERATURE: f32 = 0.7;
/// Likewise.
pub const TOP_K: u32 = 20;
/// Likewise.
pub const TOP_P: f32 = 0.9;

/// Limits of an engine of this size.
pub fn limits(geometry: Geometry) -> EngineLimits {
    EngineLimits {
        max_batch: geometry.max_batch,
        max_batch_tokens: 1 << 20,
        max_model_len: geometry.max_len,
    }
}

/// The resources to build.
pub fn wanted(geometry: Geometry) -> Vec<Wanted> {
    let of = |key: &str, kind: &str, settings: Value| Wanted {
        spec: NodeResourceSpec {
            resource_key: key.into(),
            kind: kind.into(),
            nodes: [NODE.to_string()].into(),
            settings: settings.to_string(),
        },
        depends_on: Vec::new(),
    };
    let kv = json!({
        "num_layers": 1, "num_kv_heads": 1, "head_dim": HEAD_DIM, "page_size": PAGE,
        "pages": geometry.pages, "max_seq_len": geometry.max_len,
    });
    vec![
        of("attn", "attention", json!({ "kv_cache": "kv" })),
        of("kv", "kv", kv),
        of("pos", "positions", json!({ "kv_cache": "kv" })),
        of("sampler", "sampler", json!({ "vocab_size": VOCABULARY })),
    ]
}
