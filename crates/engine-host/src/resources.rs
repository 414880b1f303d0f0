//! The built resources of an engine, in build order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use resource_api::host::HostServices;
use resource_api::{
    BuiltResource, Capability, DType, Device, EngineLimits, EngineResourceInfo, HostServicesHandle,
    Interface, KvFacts, NodeResourceSpec, Offered, Resource, ResourceHandle, TransferEngineInfo,
    Typed,
};

use crate::account::{Account, Charged, give_back};
use crate::error::{Error, ErrorKind, Result};
use crate::order::build_order;
use crate::registry::{Registered, Registry};
use crate::seam;
use crate::watch::told_if_slow;

mod rebuild;

/// One built resource.
#[derive(Debug)]
pub struct Entry {
    /// Its key in the config.
    pub key: String,
    /// The kind that built it.
    pub kind: String,
    /// Nodes that use it.
    pub nodes: BTreeSet<String>,
    /// Keys it was built on.
    pub depends_on: Vec<String>,
    /// The plugin that the kind is from.
    pub plugin: String,
    /// Whether it can be planned a step ahead.
    pub supports_preplan: bool,
    /// Whether a step may be planned before it is told what the one before sampled.
    pub takes_outputs_late: bool,
    /// What it has taken of the host.
    pub account: Arc<Account>,
    /// What a cache says about itself.
    pub facts: Option<KvFacts>,
    spec: NodeResourceSpec,
    kind_handle: Registered,
    built: BuiltResource,
}

impl Entry {
    /// The resource.
    pub fn resource(&self) -> &ResourceHandle {
        &self.built.resource
    }

    /// What it offers.
    pub fn capabilities(&self) -> &[Capability] {
        &self.built.capabilities
    }

    /// How often this one has panicked.
    pub fn panics(&self) -> u32 {
        self.built.resource.object().fault().panics()
    }

    /// Panics of all that were built under this key, and of the threads that they started.
    pub fn all_panics(&self) -> u64 {
        u64::from(self.panics()) + self.account.past_panics() + self.account.job_panics()
    }

    /// Whether it panicked and is out of use.
    pub fn is_faulted(&self) -> bool {
        self.built.resource.object().check_fault().is_err()
    }

    /// Whether its state cannot be relied on: it panicked, or said what cannot be.
    pub fn is_broken(&self) -> bool {
        self.is_faulted() || self.account.is_suspect()
    }
}

/// A resource that is to be built: its spec, and dependencies that the config adds to its own.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Spec with the settings as JSON.
    pub spec: NodeResourceSpec,
    /// Extra keys from `depends_on` in the config.
    pub depends_on: Vec<String>,
}

/// What every resource is told at build time.
#[derive(Clone, Debug)]
pub struct BuildInfo {
    /// Where state lives.
    pub device: Device,
    /// Element type of caches.
    pub kv_dtype: DType,
    /// Whether state may have to move to other workers.
    pub needs_remote_transfer: bool,
    /// How it does.
    pub transfer: Option<TransferEngineInfo>,
    /// Limits that pools are sized by.
    pub limits: EngineLimits,
    /// Whether what a request gets may not depend on what runs beside it.
    pub batch_invariant: bool,
}

/// All resources of an engine. An entry's index is its place in build order: dependencies first,
/// ties alphabetical.
pub struct ResourceSet {
    entries: Vec<Entry>,
    info: BuildInfo,
    host: Arc<dyn HostServices>,
}

/// How long threads of a resource may take to end once it has been told to clean up.
const PATIENCE: Duration = Duration::from_secs(2);

impl ResourceSet {
    /// Asks every kind for dependencies, orders, builds, and binds.
    ///
    /// # Errors
    /// An unknown kind, wrong settings, an unknown, own or circular dependency, a pre-planning
    /// resource on one that does not pre-plan, or what a kind's `build` says. Nothing is left over.
    pub fn build<S: HostServices + 'static>(
        registry: &Registry,
        wanted: Vec<Wanted>,
        info: &BuildInfo,
        services: Arc<S>,
    ) -> Result<Self> {
        let mut depends_on = BTreeMap::new();
        let mut specs = BTreeMap::new();
        for Wanted { spec, depends_on: extra } in wanted {
            let mut keys = registry.depends_on(&spec)?;
            keys.extend(extra);
            keys.sort();
            keys.dedup();
            depends_on.insert(spec.resource_key.clone(), keys);
            specs.insert(spec.resource_key.clone(), spec);
        }
        let order = build_order(&depends_on)?;
        let entries = Vec::with_capacity(order.len());
        let mut set = ResourceSet { entries, info: info.clone(), host: services };
        for key in order {
            let Some(spec) = specs.remove(&key) else { continue };
            let depends_on = depends_on.remove(&key).unwrap_or_default();
            let kind = registry.kind(&spec.kind)?.clone();
            let entry = set.build_one(&kind, spec, depends_on, Account::new(&key))?;
            set.entries.push(entry);
        }
        set.bind()?;
        set.check_unbroken(|_| true)?;
        Ok(set)
    }

    /// What cannot fail answers a panic with a default: it must not pass for an answer.
    fn check_unbroken(&self, is_new: impl Fn(&str) -> bool) -> Result<()> {
        let faulted = self.entries.iter().find(|e| is_new(&e.key) && e.is_faulted());
        let Some(entry) = faulted else { return Ok(()) };
        let message =
            format!("[resources.{}] (kind {}) panicked while it was loaded", entry.key, entry.kind);
        Err(Error::new(ErrorKind::Panicked, message))
    }

    fn build_one(
        &self,
        kind: &Registered,
        spec: NodeResourceSpec,
        depends_on: Vec<String>,
        account: Arc<Account>,
    ) -> Result<Entry> {
        let (key, info) = (&spec.resource_key, &self.info);
        let host = Charged::new(self.host.clone(), account.clone());
        let mut offer =
            EngineResourceInfo::new(info.device, HostServicesHandle::new(Arc::new(host)));
        offer.kv_dtype = info.kv_dtype;
        offer.needs_remote_transfer = info.needs_remote_transfer;
        offer.transfer_engine_info.clone_from(&info.transfer);
        offer.limits = info.limits;
        offer.batch_invariant = info.batch_invariant;
        offer.index = self.entries.len() as u32;
        for dependency in &depends_on {
            // The order puts dependencies first, so each is there.
            if let Some((index, entry)) = self.find(dependency) {
                let built = entry.built.as_dependency(entry.spec.clone(), index as u32);
                offer.dependencies.insert(dependency.clone(), built);
            }
        }
        let what = format!("[resources.{key}] (kind {}, plugin {})", spec.kind, kind.plugin);
        let built = told_if_slow(&format!("{what}, build,"), || kind.build(&spec, offer))?;
        let built = built.named(key);
        let own = built.resource.depends_on();
        if let Some(undeclared) = own.iter().find(|d| !depends_on.contains(d)) {
            return Err(Error::usage(format!(
                "[resources.{key}] (kind {}): the built resource depends on `{undeclared}`, which \
                 its kind did not declare; this is a fault of the plugin",
                spec.kind
            )));
        }
        let supports_preplan = built.resource.supports_preplan();
        let behind = depends_on
            .iter()
            .filter_map(|d| self.find(d))
            .find(|(_, d)| supports_preplan && !d.supports_preplan);
        if let Some((_, dependency)) = behind {
            return Err(Error::usage(format!(
                "[resources.{key}] is planned a step ahead, but depends on `{}` (kind {}), which \
                 cannot be: its plan would read a plan that is not there yet",
                dependency.key, dependency.kind
            )));
        }
        let described = built.resource.describe();
        let facts = described.iter().find(|f| f.tag() == KvFacts::TAG);
        let facts = facts.map(|f| f.open::<KvFacts>().copied()).transpose();
        let facts = facts.map_err(|e| Error::new(e.kind().into(), format!("{what}: {e}")))?;
        if let Some(Err(wrong)) = facts.as_ref().map(seam::facts) {
            let message = format!("{what}: {wrong}; this is a fault of the plugin");
            account.charge(&message);
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(Entry {
            key: key.clone(),
            kind: spec.kind.clone(),
            nodes: spec.nodes.clone(),
            depends_on,
            plugin: kind.plugin.clone(),
            supports_preplan,
            takes_outputs_late: built.resource.takes_outputs_late(),
            account,
            facts,
            kind_handle: kind.clone(),
            built,
            spec,
        })
    }

    /// Hands each resource what later ones offer under the interfaces it accepts, in build order.
    fn bind(&self) -> Result<()> {
        for (i, entry) in self.entries.iter().enumerate() {
            let accepts = entry.resource().accepts();
            if accepts.is_empty() {
                continue;
            }
            let later = self.entries[i + 1..].iter();
            let offered: Vec<Offered> = later
                .flat_map(|e| e.capabilities().iter().map(move |c| (e, c)))
                .filter(|(_, c)| accepts.iter().any(|id| id == c.id()))
                .map(|(e, c)| Offered { key: e.key.clone(), capability: c.clone() })
                .collect();
            entry.resource().bind(offered).map_err(|e| {
                Error::new(ErrorKind::from(e.kind()), format!("binding `{}`: {e}", entry.key))
            })?;
        }
        Ok(())
    }

    /// In build order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Index and entry of a key.
    pub fn find(&self, key: &str) -> Option<(usize, &Entry)> {
        self.entries.iter().enumerate().find(|(_, e)| e.key == key)
    }

    /// Indices of the resources that `node` uses, in build order.
    pub fn of_node(&self, node: &str) -> Vec<usize> {
        (0..self.entries.len()).filter(|&i| self.entries[i].nodes.contains(node)).collect()
    }

    /// The resources with these indices.
    pub(crate) fn only<'a>(
        &'a self,
        indices: &'a [usize],
    ) -> impl Iterator<Item = &'a Entry> + Clone {
        indices.iter().map(|&i| &self.entries[i])
    }
}

impl Entry {
    /// Breaks what `bind` tied, and has its threads end.
    fn let_go(&self) {
        for result in [self.resource().cleanup(), self.resource().bind(Vec::new())] {
            match result {
                Err(e) if e.kind() != resource_api::ErrorKind::POISONED => {
                    tracing::warn!(resource = self.key, "at shutdown: {e}");
                }
                _ => {}
            }
        }
        let left = self.account.join_threads(PATIENCE);
        if !left.is_empty() {
            let left = left.join(", ");
            tracing::warn!(resource = self.key, "its threads have not ended, and are left: {left}");
        }
    }
}

impl Drop for ResourceSet {
    /// Breaks what `bind` tied, then drops in reverse: dependents before what they depend on.
    fn drop(&mut self) {
        self.entries.iter().rev().for_each(Entry::let_go);
        while self.entries.pop().is_some() {}
    }
}

impl std::fmt::Debug for ResourceSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.entries).finish()
    }
}
