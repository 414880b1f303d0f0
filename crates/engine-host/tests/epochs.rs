//! Every step that was started completes, so that nothing waits for ever for what it held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device::Parallel;
use engine_host::engine::{Engine, ModelFacts};
use engine_host::registry::Registry;
use engine_host::request::{Event, GenerateRequest};
use engine_host::resources::{BuildInfo, ResourceSet};
use engine_host::services::Services;
use model::{Node, NodeResources, StepInput, StepOutput};
use resource_api::host::HostServices;
use resource_api::{DType, Device, EngineLimits, ResourceError, Sampled, StepContext};
use serde_json::{Map, Value};

/// Fails where it is told to, and samples token 1 otherwise.
struct Fragile(Arc<AtomicBool>);

impl Node for Fragile {
    fn name(&self) -> &str {
        "decoder"
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
        if self.0.load(Ordering::Relaxed) {
            return Err(ResourceError::invalid("told to fail"));
        }
        out.clear();
        out.requests.extend(input.sample.iter().map(|&i| input.segments.request[i as usize]));
        let sampled = Sampled { token: 1, status: Sampled::OK, logprob: 0.0 };
        out.sampled.resize(input.sample.len(), sampled);
        Ok(())
    }
}

#[test]
fn a_step_that_fails_completes_its_epoch_like_one_that_runs() {
    let fails = Arc::new(AtomicBool::new(false));
    let limits = EngineLimits { max_batch: 4, max_batch_tokens: 16, max_model_len: 64 };
    let services = Services::new(1, 0);
    let info = BuildInfo {
        device: Device::CPU,
        kv_dtype: DType::F32,
        needs_remote_transfer: false,
        batch_invariant: false,
        transfer: None,
        limits,
    };
    let set = ResourceSet::build(&Registry::default(), vec![], &info, services.clone()).unwrap();
    let facts = ModelFacts { eos: vec![], vocab: 8, identity: [0; 32] };
    let node = Box::new(Fragile(fails.clone()));
    let mut engine = Engine::new(node, Arc::new(set), services.clone(), facts, limits).unwrap();
    let before = services.completed_epoch();
    for (step, is_failing) in [false, true, true, false].into_iter().enumerate() {
        fails.store(is_failing, Ordering::Relaxed);
        let request =
            GenerateRequest { prompt: vec![1], max_tokens: 1, ..GenerateRequest::default() };
        engine.submit(request).unwrap();
        let events = engine.step();
        assert_eq!(events.iter().any(|e| matches!(e, Event::Failed(..))), is_failing);
        assert_eq!(services.completed_epoch(), before + step as u64 + 1, "step {step}");
    }
}
