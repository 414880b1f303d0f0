//! What a resource is built from: its spec, what the engine offers, and its dependencies.

use crate::abi::cross::Cross;
use crate::abi::object::Object;
use crate::{
    Capability, DType, Device, ErrorKind, HostServicesHandle, LabelId, ResourceError, ResourceKey,
    Result, Typed, TypedRef,
};
use abi_stable::StableAbi;
use abi_stable::std_types::{RString, RVec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What the config declares for a key. `S` is the kind's own settings; on the host's side, which
/// does not know kinds, it is their JSON text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeResourceSpec<S = String> {
    /// Key of the resource, unique in the engine.
    pub resource_key: ResourceKey,
    /// Kind that builds it.
    pub kind: String,
    /// Nodes that use it.
    pub nodes: BTreeSet<String>,
    /// Settings of the kind, with the node's defaults from the model filled in.
    pub settings: S,
}

impl NodeResourceSpec<String> {
    /// Reads the kind's settings.
    ///
    /// # Errors
    /// `INVALID` naming the resource and the key; for an unknown key the nearest valid one.
    pub fn parse<S: DeserializeOwned>(&self) -> Result<NodeResourceSpec<S>> {
        let settings = parse_settings(&self.settings)
            .map_err(|e| e.within(format!("[resources.{}]", self.resource_key)))?;
        Ok(NodeResourceSpec {
            resource_key: self.resource_key.clone(),
            kind: self.kind.clone(),
            nodes: self.nodes.clone(),
            settings,
        })
    }
}

/// Reads JSON text into a kind's own type, naming the nearest valid key for an unknown one.
pub fn parse_settings<S: DeserializeOwned>(text: &str) -> Result<S> {
    let text = if text.trim().is_empty() { "{}" } else { text };
    let mut reader = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let what = with_suggestion(&e.inner().to_string());
        let path = e.path().to_string();
        let known = path == "." || what.contains(&format!("`{path}`"));
        ResourceError::invalid(if known { what } else { format!("{path}: {what}") })
    })
}

/// serde says "unknown field `x`, expected one of `a`, `b`"; adds which of them `x` looks like.
fn with_suggestion(message: &str) -> String {
    // Positions in the JSON text mean nothing to someone who wrote TOML.
    let message = message.split(" at line ").next().unwrap_or(message);
    let mut quoted = message.split('`').skip(1).step_by(2);
    let Some(rest) = message.strip_prefix("unknown field ") else { return message.to_string() };
    let Some(unknown) = quoted.next() else { return format!("unknown field {rest}") };
    let nearest = quoted
        .map(|name| (strsim::damerau_levenshtein(unknown, name), name))
        .min()
        .filter(|(distance, name)| *distance <= 1 + name.len() / 3);
    let expected = message.split_once(", expected").map_or("", |(_, e)| e);
    match nearest {
        Some((_, name)) => format!("unknown key `{unknown}`; did you mean `{name}`?"),
        None => format!("unknown key `{unknown}`; expected{expected}"),
    }
}

/// A group of workers that hold shards of the same state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommGroup {
    /// This worker's place.
    pub rank: u32,
    /// How many there are.
    pub world_size: u32,
}

/// How to reach other workers' state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferEngineInfo {
    /// Which engine (`in-process`, `shared-memory`, ...).
    pub engine: String,
    /// Its address.
    pub endpoint: String,
}

/// Limits of the engine that pools and buffers are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLimits {
    /// Most requests in a step.
    pub max_batch: u32,
    /// Most tokens in a step.
    pub max_batch_tokens: u32,
    /// Longest stream, prompt and output together.
    pub max_model_len: u32,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self { max_batch: 64, max_batch_tokens: 512, max_model_len: 8192 }
    }
}

/// A built resource that another one depends on.
#[derive(Clone, Debug)]
pub struct Dependency {
    /// Its spec. Read its facts, not another kind's settings.
    pub spec: NodeResourceSpec,
    /// Its index: where its plan is filed in a step's context.
    pub index: u32,
    capabilities: Vec<Capability>,
    facts: Vec<TypedRef<'static>>,
    // Keeps what `facts` points into alive.
    resource: Object,
}

impl Dependency {
    /// `facts` point into memory that lives as long as `resource`.
    pub(crate) fn new(
        spec: NodeResourceSpec,
        index: u32,
        capabilities: Vec<Capability>,
        facts: Vec<TypedRef<'static>>,
        resource: Object,
    ) -> Self {
        Self { spec, index, capabilities, facts, resource }
    }

    /// The capability with handle type `H`, such as `KvCacheHandle`.
    ///
    /// # Errors
    /// `NOT_FOUND` when the resource does not offer it, naming what it offers.
    pub fn capability<H: crate::Interface>(&self) -> Result<H> {
        let found = self.capabilities.iter().find(|c| c.id() == H::ID && c.major() == H::MAJOR);
        found.map(Capability::open).unwrap_or_else(|| {
            let offered: Vec<String> =
                self.capabilities.iter().map(|c| format!("{}/{}", c.id(), c.major())).collect();
            Err(ResourceError::new(
                ErrorKind::NOT_FOUND,
                format!(
                    "`{}` (kind {}) offers no {}/{}; it offers {}",
                    self.spec.resource_key,
                    self.spec.kind,
                    H::ID,
                    H::MAJOR,
                    if offered.is_empty() { "nothing".into() } else { offered.join(", ") }
                ),
            ))
        })
    }

    /// Facts of type `T` that the resource gives about itself.
    ///
    /// # Errors
    /// `NOT_FOUND` when it gives none of that type.
    pub fn facts<T: Typed>(&self) -> Result<&T> {
        match self.facts.iter().find(|f| f.tag() == T::TAG) {
            Some(fact) => fact.open(),
            None => Err(ResourceError::new(
                ErrorKind::NOT_FOUND,
                format!("`{}` describes no {}", self.spec.resource_key, T::TAG),
            )),
        }
    }
}

/// What the engine has to offer a resource at build time.
#[derive(Clone, Debug)]
pub struct EngineResourceInfo {
    /// Where the resource's state lives.
    pub device: Device,
    /// The group of workers that hold shards of it, if any.
    pub joint_comm_group: Option<CommGroup>,
    /// How to reach other workers, if state moves between them.
    pub transfer_engine_info: Option<TransferEngineInfo>,
    /// Element type of caches.
    pub kv_dtype: DType,
    /// Whether state may have to move to another worker.
    pub needs_remote_transfer: bool,
    /// What the resource declared in `depends_on`, by key.
    pub dependencies: BTreeMap<ResourceKey, Dependency>,
    /// Services of the host.
    pub host: HostServicesHandle,
    /// This resource's index: where its own plan is filed in a step's context.
    pub index: u32,
    /// Limits of the engine.
    pub limits: EngineLimits,
    /// Whether what a request gets may not depend, to the bit, on what runs beside it, nor on how its tokens
    /// were divided into steps. On the CPU it never does.
    pub batch_invariant: bool,
}

impl EngineResourceInfo {
    /// What a resource on `device` gets when nothing else is said: the seed's defaults.
    pub fn new(device: Device, host: HostServicesHandle) -> Self {
        Self {
            device,
            joint_comm_group: None,
            transfer_engine_info: None,
            kv_dtype: DType::BF16,
            needs_remote_transfer: true,
            dependencies: BTreeMap::new(),
            host,
            index: 0,
            limits: EngineLimits::default(),
            batch_invariant: false,
        }
    }

    /// A declared dependency.
    ///
    /// # Errors
    /// `NOT_FOUND` telling the author to declare the key in `depends_on`.
    pub fn dependency(&self, key: &str) -> Result<&Dependency> {
        self.dependencies.get(key).ok_or_else(|| {
            let declared: Vec<&str> = self.dependencies.keys().map(String::as_str).collect();
            ResourceError::new(
                ErrorKind::NOT_FOUND,
                format!(
                    "`{key}` is not a declared dependency (declared: {}); name it in depends_on",
                    if declared.is_empty() { "none".into() } else { declared.join(", ") }
                ),
            )
        })
    }
}

/// What a request asks of one resource at `ingest_request`. Grows at the end.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct RequestOverrides<'a> {
    size: u32,
    max_new_tokens: u32,
    text: *const u8,
    text_len: usize,
    prompt: *const u32,
    prompt_len: usize,
    borrow: std::marker::PhantomData<&'a ()>,
}

// SAFETY: shared borrows of plain data.
unsafe impl Send for RequestOverrides<'_> {}
// SAFETY: as above.
unsafe impl Sync for RequestOverrides<'_> {}

impl<'a> RequestOverrides<'a> {
    /// A request with this prompt that may generate up to `max_new_tokens`; `text` is the JSON of
    /// the resource's per-request config, empty for none.
    pub fn new(text: &'a str, prompt: &'a [u32], max_new_tokens: u32) -> Self {
        Self {
            size: std::mem::size_of::<Self>() as u32,
            max_new_tokens,
            text: text.as_ptr(),
            text_len: text.len(),
            prompt: prompt.as_ptr(),
            prompt_len: prompt.len(),
            borrow: std::marker::PhantomData,
        }
    }

    /// JSON of the resource's per-request config; `None` when the request says nothing.
    pub fn text(&self) -> Option<&'a str> {
        // SAFETY: from a str in `new`.
        let text = unsafe {
            std::str::from_utf8_unchecked(std::slice::from_raw_parts(self.text, self.text_len))
        };
        (!text.is_empty()).then_some(text)
    }

    /// Reads the per-request config; `None` when the request says nothing.
    ///
    /// # Errors
    /// `INVALID` naming the key.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        self.text().map(parse_settings).transpose()
    }

    /// For a kind without per-request config: fails when the request has some.
    ///
    /// # Errors
    /// `INVALID` naming the first key.
    pub fn refuse_any(&self) -> Result<()> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Nothing {}
        self.parse::<Nothing>().map(|_| ())
    }

    /// Token ids of the prompt; empty when the inputs are not tokens.
    pub fn prompt(&self) -> &'a [u32] {
        // SAFETY: from a slice in `new`.
        unsafe { std::slice::from_raw_parts(self.prompt, self.prompt_len) }
    }

    /// Most tokens the request may generate.
    pub fn max_new_tokens(&self) -> u32 {
        self.max_new_tokens
    }
}

/// The untrimmed inputs of a request that is about to skip a cached prefix. Grows at the end.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct PrefixInputs<'a> {
    size: u32,
    token_ids: *const u32,
    len: usize,
    labels: *const LabelId,
    num_labels: usize,
    borrow: std::marker::PhantomData<&'a ()>,
}

const MAIN_ALONE: &[LabelId] = &[LabelId::MAIN];

impl<'a> PrefixInputs<'a> {
    /// Inputs that are token ids, of the stream `main` alone.
    pub fn new(token_ids: &'a [u32]) -> Self {
        Self {
            size: std::mem::size_of::<Self>() as u32,
            token_ids: token_ids.as_ptr(),
            len: token_ids.len(),
            labels: MAIN_ALONE.as_ptr(),
            num_labels: MAIN_ALONE.len(),
            borrow: std::marker::PhantomData,
        }
    }

    /// The same inputs, of each of these streams.
    pub fn with_labels(self, labels: &'a [LabelId]) -> Self {
        Self { labels: labels.as_ptr(), num_labels: labels.len(), ..self }
    }

    /// The streams that begin with the skipped tokens, each with all of them.
    pub fn labels(&self) -> &'a [LabelId] {
        // SAFETY: from a slice in `with_labels`, or from a constant in `new`.
        unsafe { std::slice::from_raw_parts(self.labels, self.num_labels) }
    }

    /// All ids, the skipped ones included.
    pub fn token_ids(&self) -> &'a [u32] {
        // SAFETY: from a slice in `new`.
        unsafe { std::slice::from_raw_parts(self.token_ids, self.len) }
    }
}

/// Raw forms of this module's cold types.
mod raw {
    use super::*;

    #[repr(C)]
    #[derive(StableAbi)]
    pub struct RawSpec {
        pub json: RString,
    }

    #[repr(C)]
    #[derive(StableAbi)]
    pub struct RawDependency {
        pub spec: RawSpec,
        pub index: u32,
        pub capabilities: RVec<Capability>,
        pub facts: RVec<TypedRef<'static>>,
        pub resource: Object,
    }

    #[repr(C)]
    #[derive(StableAbi)]
    pub struct RawInfo {
        pub json: RString,
        pub device: Device,
        pub kv_dtype: DType,
        pub dependencies: RVec<RawDependency>,
        pub host: Object,
        pub index: u32,
    }
}

/// The part of an info that crosses as text.
#[derive(Serialize, Deserialize)]
struct InfoText {
    joint_comm_group: Option<CommGroup>,
    transfer_engine_info: Option<TransferEngineInfo>,
    needs_remote_transfer: bool,
    limits: EngineLimits,
    #[serde(default)]
    batch_invariant: bool,
}

// SAFETY: crosses as JSON of a type that both sides' serde reads back.
unsafe impl Cross for NodeResourceSpec {
    type Raw = raw::RawSpec;
    fn lower(self) -> raw::RawSpec {
        raw::RawSpec { json: to_json(&self).into() }
    }
    unsafe fn lift(raw: raw::RawSpec) -> Self {
        from_json(&raw.json)
    }
}

// SAFETY: text, checked objects and plain data.
unsafe impl Cross for EngineResourceInfo {
    type Raw = raw::RawInfo;
    fn lower(self) -> raw::RawInfo {
        let text = InfoText {
            joint_comm_group: self.joint_comm_group,
            transfer_engine_info: self.transfer_engine_info,
            needs_remote_transfer: self.needs_remote_transfer,
            limits: self.limits,
            batch_invariant: self.batch_invariant,
        };
        let dependencies = self.dependencies.into_values().map(|d| raw::RawDependency {
            spec: d.spec.lower(),
            index: d.index,
            capabilities: d.capabilities.into(),
            facts: d.facts.into(),
            resource: d.resource,
        });
        raw::RawInfo {
            json: to_json(&text).into(),
            device: self.device,
            kv_dtype: self.kv_dtype,
            dependencies: dependencies.collect(),
            host: self.host.lower(),
            index: self.index,
        }
    }
    unsafe fn lift(raw: raw::RawInfo) -> Self {
        let text: InfoText = from_json(&raw.json);
        let dependencies = raw.dependencies.into_iter().map(|d| {
            // SAFETY: lowered from a spec.
            let spec = unsafe { NodeResourceSpec::lift(d.spec) };
            let dependency = Dependency {
                index: d.index,
                capabilities: d.capabilities.into(),
                facts: d.facts.into(),
                resource: d.resource,
                spec,
            };
            (dependency.spec.resource_key.clone(), dependency)
        });
        EngineResourceInfo {
            device: raw.device,
            joint_comm_group: text.joint_comm_group,
            transfer_engine_info: text.transfer_engine_info,
            kv_dtype: raw.kv_dtype,
            needs_remote_transfer: text.needs_remote_transfer,
            dependencies: dependencies.collect(),
            // SAFETY: lowered from a host handle.
            host: unsafe { HostServicesHandle::lift(raw.host) },
            index: raw.index,
            limits: text.limits,
            batch_invariant: text.batch_invariant,
        }
    }
}

// Serializing these types cannot fail (string keys, no custom impls), and what comes in was
// written by the same serde types; a failure is a fault of the carrier and is contained by the shim.
fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("a spec serializes")
}

fn from_json<T: DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).expect("a spec written by this crate reads back")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Settings {
        page_size: Option<u32>,
        memory: Option<String>,
    }

    fn message(settings: &str) -> String {
        let spec = NodeResourceSpec {
            resource_key: "main_kv".into(),
            kind: "kv".into(),
            nodes: BTreeSet::new(),
            settings: settings.into(),
        };
        spec.parse::<Settings>().unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_names_resource_key_and_nearest() {
        assert_eq!(
            message(r#"{"page_sise": 16}"#),
            "[resources.main_kv]: unknown key `page_sise`; did you mean `page_size`?"
        );
        assert_eq!(
            message(r#"{"zebra": 16}"#),
            "[resources.main_kv]: unknown key `zebra`; expected `page_size` or `memory`"
        );
    }

    #[test]
    fn a_wrong_type_names_its_key() {
        assert_eq!(
            message(r#"{"page_size": "a"}"#),
            "[resources.main_kv]: page_size: invalid type: string \"a\", expected u32"
        );
    }

    #[test]
    fn an_undeclared_dependency_says_to_declare_it() {
        let info = EngineResourceInfo::new(Device::CPU, crate::host::PlainHost::handle());
        let e = info.dependency("main_kv").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NOT_FOUND);
        assert!(e.to_string().contains("depends_on"), "{e}");
        assert_eq!((info.kv_dtype, info.needs_remote_transfer), (DType::BF16, true));
    }
}
