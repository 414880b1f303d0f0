//! Taking requests in: what is checked, what the resources learn, and what is skipped because a cache
//! holds it already.

use std::time::Instant;

use resource_api::{
    LabelId, NodeId, PrefixInputs, RequestId, RequestOverrides, Resource, ResourceError, WalkId,
};
use serde_json::{Map, Value, json};

use super::{Engine, Relay};
use crate::error::{Error, ErrorKind, Result};
use crate::labels::{self, StreamLabels};
use crate::request::{GenerateRequest, ScoredPrompt, Tracked};
use crate::resources::{Entry, ResourceSet};

/// The kind that a request's sampling settings go to.
const SAMPLER_KIND: &str = "sampler";
/// The kind that keeps prompts for others.
const CACHE_KIND: &str = "kv";

/// Most alternatives reported per token.
const MAX_LOGPROBS: u32 = 1000;

impl Engine {
    /// Takes a request in. Its events come from later calls of [`Engine::step`].
    ///
    /// # Errors
    /// A request that is wrong, or that could never fit, with the limit; nothing is left over.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<RequestId> {
        self.submit_relayed(request, Relay::default())
    }

    /// As [`Engine::submit`], for a request that comes from another engine or is to go on in one.
    ///
    /// # Errors
    /// As there; and for what was handed over by an engine that is not like this one.
    pub fn submit_relayed(
        &mut self,
        mut request: GenerateRequest,
        relay: Relay,
    ) -> Result<RequestId> {
        if self.is_idle() {
            // Nobody is stepping who would notice.
            self.mind_faults();
        }
        self.check_running()?;
        let room = self.check(&request)?;
        let most = self.limits.max_batch_tokens as usize;
        let labels =
            labels::resolve(&request.labels, self.node.name(), most, &self.services.labels)?;
        self.hold_off_the_end(&mut request);
        if let Some(handover) = &relay.from {
            self.check_handover(handover, request.prompt.len())?;
            // It was told where the prompt was computed.
            request.prompt_logprobs = None;
        }
        let rid = self.requests.next_id();
        let max_tokens = request.max_tokens.min(room);
        // What is generated elsewhere takes no room here.
        let here = relay.after.map_or(max_tokens, |after| max_tokens.min(after.max(1)));
        if let Some(labels) = &labels {
            self.tell_of_streams(&mut request, labels);
        }
        if let Err(e) = self.ingest(rid, &request, here) {
            self.remove_from_resources(rid);
            self.requests.burn(rid);
            return Err(e);
        }
        let arriving = match relay.from.as_ref().map(|from| self.take_over(rid, from)).transpose() {
            Ok(arriving) => arriving,
            Err(e) => {
                self.remove_from_resources(rid);
                self.requests.burn(rid);
                return Err(e);
            }
        };
        let generated = relay.from.map_or(Vec::new(), |from| from.tokens);
        self.remember(rid, &request, here);
        let deadline = request.timeout.and_then(|t| Instant::now().checked_add(t));
        if let Some(deadline) = deadline {
            let next = self.next_deadline.map_or(deadline, |next| next.min(deadline));
            self.next_deadline = Some(next);
        }
        self.requests.insert(Tracked {
            rid,
            deadline,
            prompt_len: request.prompt.len(),
            tokens: [request.prompt, generated].concat(),
            session: request.session,
            arriving,
            hand_over_after: relay.after,
            computed: 0,
            in_step: 0,
            cached: 0,
            again: false,
            prefix_resolved: false,
            offloaded: false,
            max_tokens,
            ignore_eos: request.ignore_eos,
            stop_token_ids: request.stop_token_ids,
            logprobs: request.logprobs,
            labels: labels.map(Box::new),
            prompt: request.prompt_logprobs.map(|top| ScoredPrompt { top, tokens: vec![None] }),
        });
        self.scheduler.enqueue(rid);
        Ok(rid)
    }

    /// Tells caches which streams its tokens go to, where that is not `main` alone.
    fn tell_of_streams(&self, request: &mut GenerateRequest, labels: &StreamLabels) {
        let name = |label: &LabelId| Value::from(self.services.labels.name(label.0));
        let names = |labels: &[LabelId]| labels.iter().map(name).collect::<Value>();
        let streams = json!({
            "prompt": names(&labels.prefill),
            "generated": names(&labels.decode),
        });
        for entry in self.runner.resources().entries().iter().filter(|e| e.kind == CACHE_KIND) {
            let config = request.overrides.entry(entry.key.clone()).or_default();
            config.insert("labels".into(), streams.clone());
        }
    }

    /// Tells the sampler which tokens may not come before `min_tokens`.
    fn hold_off_the_end(&self, request: &mut GenerateRequest) {
        if request.min_tokens == 0 {
            return;
        }
        let eos = self.model.eos.iter().filter(|_| !request.ignore_eos);
        let ends: Vec<u32> = eos.chain(&request.stop_token_ids).copied().collect();
        request.sampling.insert("min_tokens".into(), request.min_tokens.into());
        request.sampling.insert("end_token_ids".into(), ends.into());
    }

    /// Checks what needs no resource, and answers how many tokens may be generated at most.
    fn check(&self, request: &GenerateRequest) -> Result<u32> {
        let max_len = self.limits.max_model_len as usize;
        let len = request.prompt.len();
        if len == 0 {
            return Err(Error::usage("the prompt has no tokens"));
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= self.model.vocab) {
            return Err(Error::usage(format!(
                "the prompt has token id {id}; ids of this model are below {}",
                self.model.vocab
            )));
        }
        if request.max_tokens == 0 {
            return Err(Error::usage("max_tokens must be at least 1"));
        }
        if len >= max_len {
            return Err(Error::usage(format!(
                "the prompt has {len} tokens; with one generated token it would exceed \
                 max_model_len = {max_len}"
            )));
        }
        if request.min_tokens > request.max_tokens {
            return Err(Error::usage(format!(
                "min_tokens = {} is more than max_tokens = {}",
                request.min_tokens, request.max_tokens
            )));
        }
        if let Some(id) = request.stop_token_ids.iter().find(|&&id| id as usize >= self.model.vocab)
        {
            return Err(Error::usage(format!(
                "stop_token_ids has token id {id}; ids of this model are below {}",
                self.model.vocab
            )));
        }
        let most = self.model.vocab.min(MAX_LOGPROBS as usize);
        let asked = [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)];
        for (name, k) in asked {
            if let Some(k) = k.filter(|&k| k as usize > most) {
                return Err(Error::usage(format!("{name} must be at most {most}, got {k}")));
            }
        }
        Ok((max_len - len) as u32)
    }

    fn ingest(&self, rid: RequestId, request: &GenerateRequest, max_tokens: u32) -> Result<()> {
        let entries = self.runner.resources().entries();
        if let Some(key) =
            request.overrides.keys().find(|key| !entries.iter().any(|e| e.key == **key))
        {
            let keys = entries.iter().map(|e| e.key.as_str());
            return Err(Error::usage(format!(
                "overrides name resource {key:?}, which does not exist{}",
                crate::suggest::did_you_mean(key, keys)
            )));
        }
        for entry in entries {
            let text = to_text(config_of(request, &entry.key, &entry.kind));
            ingest_into(entry, rid, &text, &request.prompt, max_tokens)?;
        }
        Ok(())
    }
}

/// Tells one resource of a request.
pub(super) fn ingest_into(
    entry: &Entry,
    rid: RequestId,
    config: &str,
    prompt: &[u32],
    max_tokens: u32,
) -> Result<()> {
    let overrides = RequestOverrides::new(config, prompt, max_tokens);
    entry.resource().ingest_request(rid, &overrides).map_err(|e| {
        Error::new(ErrorKind::from(e.kind()), format!("resource `{}`: {e}", entry.key))
    })
}

/// What a request says to one resource: what it says to its key and, to a sampler, how to sample.
pub(super) fn config_of(request: &GenerateRequest, key: &str, kind: &str) -> Map<String, Value> {
    let mut config = request.overrides.get(key).cloned().unwrap_or_default();
    if kind == SAMPLER_KIND {
        config.extend(request.sampling.clone());
    }
    if kind == CACHE_KIND && !request.cache_salt.is_empty() {
        config.insert("prefix_salt".into(), request.cache_salt.clone().into());
    }
    config
}

pub(super) fn to_text(config: Map<String, Value>) -> String {
    if config.is_empty() { String::new() } else { Value::Object(config).to_string() }
}

/// Root of the prefix cache: what every stored page depends on beyond its own tokens. Parts are
/// tagged and carry their length, so that no two lists of parts give the same bytes.
pub(super) fn prefix_root(identity: &[u8; 32], resources: &ResourceSet, own: &[usize]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new_derive_key("engine-host prefix root 1");
    hash.update(identity);
    for &i in own {
        let entry = &resources.entries()[i];
        let Some(print) = entry.resource().fingerprint() else { continue };
        for part in [entry.kind.as_bytes(), &print] {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
    }
    *hash.finalize().as_bytes()
}

/// Asks the node's resources how much of the request they hold already, and has all of them skip what
/// all can. At least one token is left to compute.
///
/// # Errors
/// What a resource fails with, which is the failure of this request alone.
pub(super) fn skip_cached_prefix<'a>(
    own: impl Iterator<Item = &'a Entry> + Clone,
    request: &mut Tracked,
    node: NodeId,
    walk: WalkId,
) -> Result<()> {
    if request.prefix_resolved || request.computed > 0 {
        return Ok(());
    }
    request.prefix_resolved = true;
    // What is skipped gives no logits.
    if request.prompt.is_some() {
        return Ok(());
    }
    let rid = request.rid;
    let within = |entry: &Entry, method: &str, e: ResourceError| {
        Error::from(e.within(format!("resource `{}`, {method}", entry.key)))
    };
    let (mut agreed, mut longest) = (None::<u32>, 0);
    for entry in own.clone() {
        let found = entry.resource().resolve_cached_prefix(rid, node, walk);
        let found = found.map_err(|e| within(entry, "resolve_cached_prefix", e))?;
        if let Some(len) = found {
            if len as usize > request.tokens.len() {
                return Err(too_long_a_prefix(entry, len, request.tokens.len()));
            }
            agreed = Some(agreed.map_or(len, |a| a.min(len)));
            longest = longest.max(len);
        }
    }
    // Who found more than all agree on, nothing perhaps, holds it until it is told.
    let Some(matched) = agreed.filter(|_| longest > 0) else { return Ok(()) };
    let matched = matched.min(request.most_to_skip() as u32);
    let inputs = PrefixInputs::new(&request.tokens).with_labels(request.labels_at(0));
    for entry in own {
        let applied = entry.resource().apply_cached_prefix(rid, node, walk, &inputs, matched);
        applied.map_err(|e| within(entry, "apply_cached_prefix", e))?;
    }
    request.take_cached(matched as usize);
    Ok(())
}

#[cold]
fn too_long_a_prefix(entry: &Entry, len: u32, tokens: usize) -> Error {
    let message = format!(
        "resource `{}` (kind {}, plugin {}), resolve_cached_prefix: it has {len} tokens of a request \
         of {tokens}; this is a fault of the plugin",
        entry.key, entry.kind, entry.plugin
    );
    entry.account.suspect(&message);
    Error::new(ErrorKind::Internal, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use resource_api::{Device, EngineResourceInfo, NodeResourceSpec, ResourceKind, kind};

    use crate::registry::Registry;
    use crate::resources::{BuildInfo, Wanted};
    use crate::services::Services;

    /// Says what it was built to say; tells in `inspect` what was agreed on.
    struct Says {
        answer: Option<u32>,
        refuses: bool,
        applied: Mutex<Vec<u32>>,
    }

    #[derive(serde::Deserialize)]
    struct Settings {
        answer: Option<u32>,
        #[serde(default)]
        refuses: bool,
    }

    impl Resource for Says {
        fn inspect(&self) -> String {
            json!(*self.applied.lock().unwrap()).to_string()
        }
        fn resolve_cached_prefix(
            &self,
            _: RequestId,
            _: NodeId,
            _: WalkId,
        ) -> resource_api::Result<Option<u32>> {
            Ok(self.answer)
        }
        fn apply_cached_prefix(
            &self,
            _: RequestId,
            _: NodeId,
            _: WalkId,
            inputs: &PrefixInputs<'_>,
            matched: u32,
        ) -> resource_api::Result<()> {
            assert_eq!(inputs.token_ids().len(), 100, "the inputs are untrimmed");
            if self.refuses {
                return Err(ResourceError::invalid("not this one"));
            }
            self.applied.lock().unwrap().push(matched);
            Ok(())
        }
    }

    impl ResourceKind for Says {
        type Spec = Settings;
        const KIND: &'static str = "says";
        fn build(
            spec: NodeResourceSpec<Settings>,
            _: &EngineResourceInfo,
        ) -> resource_api::Result<Self> {
            let Settings { answer, refuses } = spec.settings;
            Ok(Says { answer, refuses, applied: Mutex::default() })
        }
    }

    /// Resources with these answers, in this order.
    fn resources(settings: &[Value]) -> ResourceSet {
        let mut registry = Registry::default();
        registry.link(kind::<Says>());
        let wanted = |(i, settings): (usize, &Value)| Wanted {
            spec: NodeResourceSpec {
                resource_key: format!("r{i}"),
                kind: "says".into(),
                nodes: Default::default(),
                settings: settings.to_string(),
            },
            depends_on: Vec::new(),
        };
        let info = BuildInfo {
            device: Device::CPU,
            kv_dtype: resource_api::DType::F32,
            needs_remote_transfer: false,
            batch_invariant: false,
            transfer: None,
            limits: Default::default(),
        };
        let list = settings.iter().enumerate().map(wanted).collect();
        ResourceSet::build(&registry, list, &info, Services::new(1, 0)).unwrap()
    }

    fn tracked() -> Tracked {
        Tracked::plain(RequestId::new(0, 1), vec![7; 100])
    }

    fn skip(set: &ResourceSet, request: &mut Tracked) -> Result<()> {
        skip_cached_prefix(set.entries().iter(), request, NodeId(0), WalkId(0))
    }

    fn applied(set: &ResourceSet) -> Vec<String> {
        set.entries().iter().map(|e| e.resource().inspect()).collect()
    }

    #[test]
    fn the_smallest_answer_is_agreed_on_and_told_to_all() {
        let answers = [json!({"answer": 96}), json!({"answer": 32}), json!({"answer": null})];
        let (set, mut request) = (resources(&answers), tracked());
        skip(&set, &mut request).unwrap();
        assert_eq!((request.computed, request.cached), (32, 32));
        assert_eq!(applied(&set), ["[32]"; 3]);
        skip(&set, &mut request).unwrap();
        assert_eq!(applied(&set), ["[32]"; 3], "asked once");
    }

    #[test]
    fn what_a_request_computed_before_it_gave_way_is_not_told_as_cached() {
        let (set, mut request) = (resources(&[json!({"answer": 96})]), tracked());
        // It found 32 tokens, and computed 18 itself.
        (request.computed, request.cached) = (50, 32);
        request.give_up_computed();
        skip(&set, &mut request).unwrap();
        assert_eq!((request.computed, request.cached), (96, 32));
        // One that gave back what it had found, and computed nothing, may find more.
        let mut request = tracked();
        (request.computed, request.cached) = (32, 32);
        request.give_up_computed();
        skip(&set, &mut request).unwrap();
        assert_eq!((request.computed, request.cached), (96, 96));
    }

    #[test]
    fn an_answer_of_0_skips_nothing_and_who_found_something_is_told() {
        let (set, mut request) =
            (resources(&[json!({"answer": 96}), json!({"answer": 0})]), tracked());
        skip(&set, &mut request).unwrap();
        assert_eq!((request.computed, request.cached), (0, 0));
        assert_eq!(applied(&set), ["[0]"; 2]);
        for nothing in [json!({"answer": null}), json!({"answer": 0})] {
            let (set, mut request) = (resources(&[nothing]), tracked());
            skip(&set, &mut request).unwrap();
            assert_eq!((request.computed, applied(&set)), (0, vec!["[]".to_string()]));
        }
    }

    #[test]
    fn a_token_is_left_to_compute_and_a_refusal_is_an_error_of_the_request() {
        let (set, mut request) = (resources(&[json!({"answer": 100})]), tracked());
        skip(&set, &mut request).unwrap();
        assert_eq!(request.computed, 99);
        let (set, mut request) = (resources(&[json!({"answer": 48, "refuses": true})]), tracked());
        let said = skip(&set, &mut request).unwrap_err().to_string();
        assert_eq!(said, "resource `r0`, apply_cached_prefix: not this one");
        assert_eq!(request.computed, 0);
    }

    #[test]
    fn each_resource_gets_what_the_request_says_to_it() {
        let mut request = GenerateRequest::default();
        let own: Map<String, Value> = [("priority".to_string(), json!(2))].into_iter().collect();
        request.overrides = BTreeMap::from([("a".to_string(), own.clone())]);
        request.sampling.insert("temperature".into(), json!(0));
        assert_eq!(config_of(&request, "a", "fake"), own);
        assert_eq!(to_text(config_of(&request, "b", "fake")), "");
        let sampler = config_of(&request, "s", SAMPLER_KIND);
        assert_eq!(sampler.keys().collect::<Vec<_>>(), ["temperature"]);
    }
}
