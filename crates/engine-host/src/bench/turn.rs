//! A whole turn of the engine around a model that does nothing: what scheduling and book-keeping add
//! to the resources.

use std::sync::Arc;
use std::time::Instant;

use device::Parallel;
use model::{Node, NodeResources, StepInput, StepOutput};
use resource_api::{DType, Device, EngineLimits, Sampled, StepContext};
use serde_json::{Map, Value, json};

use super::decode::WARM;
use super::kinds::Kinds;
use super::other::Figures;
use super::rig::{
    Geometry, NODE, PAGE, Prompt, SLOTS, TEMPERATURE, TOKEN, TOP_K, TOP_P, VOCABULARY, limits,
    wanted,
};
use super::stats::{Summary, clock_cost};
use crate::engine::{Engine, ModelFacts};
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Event, GenerateRequest};
use crate::resources::{BuildInfo, ResourceSet, Wanted};
use crate::services::Services;

/// Samples the same token everywhere.
struct Idle;

impl Node for Idle {
    fn name(&self) -> &str {
        NODE
    }

    fn walks(&self) -> &[&str] {
        &["prefill", "decode"]
    }

    fn resource_defaults(&self, _kind: &str) -> Map<String, Value> {
        Map::new()
    }

    fn attach(&self, _: &NodeResources<'_>, _: &EngineLimits) -> resource_api::Result<()> {
        Ok(())
    }

    fn forward(
        &self,
        _ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        out: &mut StepOutput,
        _parallel: &dyn Parallel,
    ) -> resource_api::Result<()> {
        out.requests.clear();
        out.requests.extend(input.sample.iter().map(|&i| input.segments.request[i as usize]));
        let sampled = Sampled { token: TOKEN, status: Sampled::OK, logprob: 0.0 };
        out.sampled.clear();
        out.sampled.resize(input.sample.len(), sampled);
        Ok(())
    }
}

const BATCH: u32 = 256;
const LEN: u32 = 512;

/// Turns of an engine with 256 requests that decode from 512 tokens on.
///
/// # Errors
/// What a resource says.
pub fn measure(kinds: &Kinds, count: usize) -> Result<Figures> {
    let (summary, note) = turns(kinds, count, wanted)?;
    Ok(("engine turn B=256 L=512", vec![("turn", summary)], note))
}

/// The same without any resource: what is left is the engine's own scheduling and book-keeping.
///
/// # Errors
/// None that are expected.
pub fn without_resources(kinds: &Kinds, count: usize) -> Result<Figures> {
    let (summary, note) = turns(kinds, count, |_| Vec::new())?;
    Ok(("engine turn without resources B=256", vec![("turn", summary)], note))
}

fn turns(
    kinds: &Kinds,
    count: usize,
    wanted: impl Fn(Geometry) -> Vec<Wanted>,
) -> Result<(Summary, Value)> {
    let max_len = LEN + count as u32 + WARM + 2 * PAGE;
    let pages = BATCH * (max_len.div_ceil(PAGE) + 1) + 2;
    let geometry = Geometry { pages, max_batch: BATCH, max_len };
    let services = Services::new(1, 1 << 60);
    let info = BuildInfo {
        device: Device::CPU,
        kv_dtype: DType::BF16,
        needs_remote_transfer: false,
        batch_invariant: false,
        transfer: None,
        limits: limits(geometry),
    };
    let wanted = wanted(geometry);
    let is_bare = wanted.is_empty();
    let set = ResourceSet::build(&kinds.registry, wanted, &info, services.clone())?;
    let facts = ModelFacts { eos: Vec::new(), vocab: VOCABULARY as usize, identity: [0; 32] };
    let mut engine = Engine::new(Box::new(Idle), Arc::new(set), services, facts, limits(geometry))?;
    // Nothing runs that a step could be planned beside.
    engine.plan_ahead(false)?;
    for i in 0..BATCH {
        let prompt = Prompt { seed: u64::from(i) + 1, common: 0, shared: 0, len: LEN - i % PAGE };
        let sampling = json!({
            "temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "seed": i,
        });
        let sampling = if is_bare { json!({}) } else { sampling };
        let Value::Object(sampling) = sampling else { continue };
        engine.submit(GenerateRequest {
            prompt: prompt.tokens(),
            max_tokens: max_len - LEN,
            sampling,
            ..GenerateRequest::default()
        })?;
    }
    let clock = clock_cost();
    let mut samples = Vec::with_capacity(count);
    let mut allocations = 0;
    for n in 0..count + WARM as usize {
        let before = kinds.allocations.map_or(0, |count| count());
        let start = Instant::now();
        let events = engine.step();
        let took = (start.elapsed().as_nanos() as u64).saturating_sub(clock);
        let tokens = events.iter().filter(|e| matches!(e, Event::Token(..))).count();
        if tokens != BATCH as usize {
            let message =
                format!("turn {n} gave {tokens} tokens, not {BATCH}: {:?}", events.first());
            return Err(Error::new(ErrorKind::Internal, message));
        }
        if n >= WARM as usize {
            samples.push(took);
            allocations += kinds.allocations.map_or(0, |count| count()) - before;
        }
    }
    let per_turn = allocations as f64 / count as f64;
    let note = json!({ "slots": SLOTS, "allocations": kinds.allocations.map(|_| per_turn) });
    Ok((Summary::of(&mut samples, 1.0), note))
}
