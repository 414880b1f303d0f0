//! Requests that begin in one engine and go on in another.

use std::collections::BTreeMap;
use std::fmt::Write;

use resource_api::{FailureReason, NodeId, PublishedInfo, RequestId, Resource, WalkId};
use serde_json::{Map, Value, json};

use super::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Tracked, Usage};
use crate::resources::Entry;
use crate::scheduler::Join;

/// Version of a handover's text form.
const VERSION: u64 = 1;

/// A request between two engines: what was generated, and what each resource has published about it.
/// Holds names only, so that it means the same in every process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handover {
    /// What all state depends on beside the request: the model's files and the resources' settings.
    root: [u8; 32],
    /// Tokens generated so far.
    pub tokens: Vec<u32>,
    /// Tokens, prompt and generated, whose state there is.
    pub computed: usize,
    /// Tokens of the prompt that the first engine read from a cache.
    pub cached: usize,
    /// By resource key.
    state: BTreeMap<String, PublishedInfo>,
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some((digit(*high)? << 4 | digit(*low)?) as u8));
    rest.is_empty().then(|| bytes.collect())?
}

impl Handover {
    /// As JSON, for a line of a file or a message. The state of each resource is bytes with a checksum, in
    /// hexadecimal digits.
    pub fn to_json(&self) -> Value {
        let state =
            self.state.iter().map(|(key, info)| (key.clone(), to_hex(&info.to_bytes()).into()));
        json!({
            "version": VERSION,
            "root": to_hex(&self.root),
            "tokens": self.tokens,
            "computed": self.computed,
            "cached": self.cached,
            "state": state.collect::<Map<String, Value>>(),
        })
    }

    /// The inverse of [`Handover::to_json`].
    ///
    /// # Errors
    /// What is missing, damaged or of another version.
    pub fn from_json(value: &Value) -> Result<Self> {
        let bad = |what: &str| Error::usage(format!("handover: {what}"));
        let field = |name: &str| {
            value.get(name).ok_or_else(|| bad(&format!("the field {name:?} is missing")))
        };
        let number = |name: &str| {
            let number = field(name)?.as_u64().and_then(|n| usize::try_from(n).ok());
            number.ok_or_else(|| bad(&format!("{name} must be a whole number")))
        };
        match field("version")?.as_u64() {
            Some(VERSION) => {}
            _ => {
                return Err(bad(&format!(
                    "version {} is not the one that this engine reads, {VERSION}",
                    value["version"]
                )));
            }
        }
        let root = field("root")?.as_str().and_then(from_hex).and_then(|b| b.try_into().ok());
        let mut handover = Handover {
            root: root.ok_or_else(|| bad("root must be 64 hexadecimal digits"))?,
            tokens: serde_json::from_value(field("tokens")?.clone())
                .map_err(|_| bad("tokens must be an array of token ids"))?,
            computed: number("computed")?,
            cached: number("cached")?,
            state: BTreeMap::new(),
        };
        let state = field("state")?.as_object().ok_or_else(|| bad("state must be an object"))?;
        for (key, text) in state {
            let bytes = text.as_str().and_then(from_hex);
            let bytes =
                bytes.ok_or_else(|| bad(&format!("state.{key} must be hexadecimal digits")))?;
            let info = PublishedInfo::from_bytes(&bytes);
            let info = info.map_err(|e| bad(&format!("state.{key}: {}", e.message())))?;
            handover.state.insert(key.clone(), info);
        }
        Ok(handover)
    }
}

/// Where a request comes from and where it goes, when that is another engine.
#[derive(Clone, Debug, Default)]
pub struct Relay {
    /// What another engine has handed over; the request is the same.
    pub from: Option<Handover>,
    /// Hand the request over once so many tokens are generated, unless it ends with them.
    pub after: Option<u32>,
}

/// What a request that comes from another engine waits for.
#[derive(Debug)]
pub(crate) struct Arriving {
    computed: usize,
    cached: usize,
    state: BTreeMap<String, PublishedInfo>,
}

/// Asks the node's resources whether what was published about the request is there.
pub(super) fn arrive<'a>(
    own: impl Iterator<Item = &'a Entry>,
    request: &mut Tracked,
    node: NodeId,
    walk: WalkId,
) -> std::result::Result<Join, String> {
    let Some(arriving) = &request.arriving else { return Ok(Join::Runs) };
    let mut ready = true;
    for entry in own {
        let published = arriving.state.get(&entry.key);
        let outcome = entry.resource().admit_retrieve(request.rid, node, walk, published);
        let outcome = outcome.map_err(|e| format!("resource `{}`: {e}", entry.key))?;
        match outcome.reason() {
            FailureReason::NONE => ready &= outcome.is_ready(),
            FailureReason::RUNTIME_ERROR => {
                return Err(format!("resource `{}`: {}", entry.key, outcome.message()));
            }
            _ => return Ok(Join::Waits),
        }
    }
    if !ready {
        return Ok(Join::Aside);
    }
    (request.computed, request.cached) = (arriving.computed, arriving.cached);
    (request.prefix_resolved, request.arriving) = (true, None);
    Ok(Join::Runs)
}

impl Engine {
    /// What another engine needs to go on with a request that no step is running.
    ///
    /// # Errors
    /// A request that is not here or off the device; a resource that cannot publish now.
    pub fn hand_over(&mut self, rid: RequestId) -> Result<Handover> {
        self.settle_early();
        let request = self.requests.get(rid).filter(|r| !r.offloaded && r.arriving.is_none());
        let Some(request) = request else {
            let message = format!("request {rid} has no state here that could be handed over");
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        let mut state = BTreeMap::new();
        for entry in self.resources().only(&self.own) {
            let info = entry.resource().publish(rid).map_err(|e| {
                Error::new(ErrorKind::from(e.kind()), format!("resource `{}`: {e}", entry.key))
            })?;
            state.extend(info.map(|info| (entry.key.clone(), info)));
        }
        Ok(Handover {
            root: self.root,
            tokens: request.tokens[request.prompt_len..].to_vec(),
            computed: request.computed,
            cached: request.cached,
            state,
        })
    }

    /// A handover of a request that has ended with these tokens: there is no state to go on with.
    pub fn hand_over_ended(&self, tokens: Vec<u32>, usage: Usage) -> Handover {
        let computed = (usage.prompt_tokens + usage.completion_tokens).saturating_sub(1) as usize;
        let cached = usage.cached_tokens as usize;
        Handover { root: self.root, tokens, computed, cached, state: BTreeMap::new() }
    }

    /// Checks what another engine has handed over, before anything of it is used.
    pub(super) fn check_handover(&self, handover: &Handover, prompt: usize) -> Result<()> {
        if handover.root != self.root {
            return Err(Error::usage(
                "the request was handed over by an engine with another model or other resources: both need \
                 the same model file and settings",
            ));
        }
        let known = |key: &&String| self.resources().entries().iter().all(|e| e.key != **key);
        if let Some(key) = handover.state.keys().find(known) {
            let what =
                format!("the request was handed over with state of `{key}`, which is not here");
            return Err(Error::usage(what));
        }
        if let Some(id) = handover.tokens.iter().find(|&&id| id as usize >= self.model.vocab) {
            let what = format!("the request was handed over with token id {id}");
            return Err(Error::usage(what));
        }
        if handover.tokens.is_empty() || handover.computed + 1 != prompt + handover.tokens.len() {
            return Err(Error::usage(format!(
                "the request was handed over with {} tokens of which {} are computed; all but the last \
                 generated one must be",
                prompt + handover.tokens.len(),
                handover.computed
            )));
        }
        Ok(())
    }

    /// Tells the resources what was generated elsewhere, and gives what the request then waits for.
    pub(super) fn take_over(&self, rid: RequestId, handover: &Handover) -> Result<Arriving> {
        for entry in self.resources().only(&self.own) {
            let told = entry.resource().extend_prefix_chain(
                rid,
                self.node_id,
                self.decode,
                &handover.tokens,
            );
            told.map_err(|e| {
                Error::new(ErrorKind::from(e.kind()), format!("resource `{}`: {e}", entry.key))
            })?;
        }
        let Handover { computed, cached, state, .. } = handover;
        Ok(Arriving { computed: *computed, cached: *cached, state: state.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Handover {
        let mut info = PublishedInfo::new("kv", 1);
        info.set("main", 7, vec![0, 1, 255]);
        Handover {
            root: [9; 32],
            tokens: vec![3, 4],
            computed: 7,
            cached: 5,
            state: BTreeMap::from([("main_kv".to_string(), info)]),
        }
    }

    #[test]
    fn a_handover_comes_back_from_its_text() {
        let text = sample().to_json().to_string();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(Handover::from_json(&value).unwrap(), sample());
    }

    #[test]
    fn what_is_wrong_with_a_handover_is_named() {
        let good = sample().to_json();
        for (name, value, said) in [
            ("version", json!(2), "version 2 is not"),
            ("root", json!("12"), "64 hexadecimal digits"),
            ("tokens", json!([-1]), "tokens must be"),
            ("computed", json!("x"), "computed must be"),
            ("state", json!([]), "state must be an object"),
            ("state", json!({ "main_kv": "xyz" }), "state.main_kv must be hexadecimal"),
            ("state", json!({ "main_kv": "abcd" }), "state.main_kv: published state is unusable"),
        ] {
            let mut bad = good.clone();
            bad[name] = value;
            let error = Handover::from_json(&bad).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            bad.as_object_mut().unwrap().remove(name);
            let error = Handover::from_json(&bad).unwrap_err();
            assert!(error.to_string().contains("is missing"), "{error}");
        }
    }
}
