//! The built resources of an engine, in build order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use resource_api::host::HostServices;
use resource_api::{
    BuiltResource, Capability, DType, Device, EngineLimits, EngineResourceInfo, HostServicesHandle,
    NodeResourceSpec, Offered, Resource, ResourceHandle, TransferEngineInfo,
};

use crate::error::{Error, ErrorKind, Result};
use crate::order::build_order;
use crate::registry::Registry;

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
    /// Whether it can be planned a step ahead.
    pub supports_preplan: bool,
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

    /// How often it has panicked.
    pub fn panics(&self) -> u32 {
        use resource_api::Interface;
        self.built.resource.object().fault().panics()
    }

    /// Whether it panicked and is out of use.
    pub fn is_faulted(&self) -> bool {
        use resource_api::Interface;
        self.built.resource.object().check_fault().is_err()
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
#[derive(Debug)]
pub struct ResourceSet {
    entries: Vec<Entry>,
}

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
        let host = HostServicesHandle::new(services);
        let mut set = ResourceSet { entries: Vec::with_capacity(order.len()) };
        for key in order {
            let spec = &specs[&key];
            let depends_on = depends_on.remove(&key).unwrap_or_default();
            let entry = set.build_one(registry, spec, depends_on, &specs, info, &host)?;
            set.entries.push(entry);
        }
        set.bind()?;
        // What cannot fail answers a panic with a default: it must not pass for an answer.
        if let Some(entry) = set.entries.iter().find(|e| e.is_faulted()) {
            let message = format!(
                "[resources.{}] (kind {}) panicked while it was loaded",
                entry.key, entry.kind
            );
            return Err(Error::new(ErrorKind::Panicked, message));
        }
        Ok(set)
    }

    fn build_one(
        &self,
        registry: &Registry,
        spec: &NodeResourceSpec,
        depends_on: Vec<String>,
        specs: &BTreeMap<String, NodeResourceSpec>,
        info: &BuildInfo,
        host: &HostServicesHandle,
    ) -> Result<Entry> {
        let key = &spec.resource_key;
        let mut offer = EngineResourceInfo::new(info.device, host.clone());
        offer.kv_dtype = info.kv_dtype;
        offer.needs_remote_transfer = info.needs_remote_transfer;
        offer.transfer_engine_info.clone_from(&info.transfer);
        offer.limits = info.limits;
        offer.batch_invariant = info.batch_invariant;
        offer.index = self.entries.len() as u32;
        for dependency in &depends_on {
            // The order puts dependencies first, so each is there.
            if let Some((index, entry)) = self.find(dependency) {
                let dep_spec = specs[dependency].clone();
                let built = entry.built.as_dependency(dep_spec, index as u32);
                offer.dependencies.insert(dependency.clone(), built);
            }
        }
        let built = registry.build_resource(spec, offer)?.named(key);
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
        Ok(Entry {
            key: key.clone(),
            kind: spec.kind.clone(),
            nodes: spec.nodes.clone(),
            depends_on,
            supports_preplan,
            built,
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
}

impl Drop for ResourceSet {
    /// Breaks what `bind` tied, then drops in reverse: dependents before what they depend on.
    fn drop(&mut self) {
        for entry in self.entries.iter().rev() {
            for result in [entry.resource().cleanup(), entry.resource().bind(Vec::new())] {
                if let Err(e) = result {
                    tracing::warn!(resource = entry.key, "at shutdown: {e}");
                }
            }
        }
        while self.entries.pop().is_some() {}
    }
}
