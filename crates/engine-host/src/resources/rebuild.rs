//! Building a resource anew after it broke, with everything that holds on to it.

use std::collections::BTreeSet;

use resource_api::{NodeResourceSpec, Resource};

use super::{Account, Arc, Entry, Registered, ResourceSet, give_back};
use crate::error::Result;

/// What an entry is built from.
struct Recipe {
    kind: Registered,
    spec: NodeResourceSpec,
    depends_on: Vec<String>,
    account: Arc<Account>,
}

impl ResourceSet {
    /// Builds the resource `key` anew, and every one that was built on it; the others are bound to the
    /// new ones and keep their state. Whoever holds a capability of those built anew has to let go of
    /// it before. Answers which were built anew, in build order.
    ///
    /// # Errors
    /// What `build` or `bind` say. The set is incomplete then, and good for nothing but to be dropped.
    pub fn rebuild(&mut self, key: &str) -> Result<Vec<String>> {
        let mut anew: BTreeSet<String> = [key.to_owned()].into();
        for entry in &self.entries {
            if entry.depends_on.iter().any(|d| anew.contains(d)) {
                anew.insert(entry.key.clone());
            }
        }
        let is_anew = |entry: &Entry| anew.contains(&entry.key);
        for entry in
            self.entries.iter().filter(|e| !is_anew(e) && !e.resource().accepts().is_empty())
        {
            // The old ones must not live on in it.
            entry.resource().bind(Vec::new())?;
        }
        self.entries.iter().rev().filter(|e| is_anew(e)).for_each(Entry::let_go);
        // Dependents are dropped before what they depend on, and everything old before anything new:
        // there may not be room for both.
        let mut places = Vec::with_capacity(self.entries.len());
        while let Some(entry) = self.entries.pop() {
            places.push(match is_anew(&entry) {
                true => Err(entry.into_recipe(&*self.host)),
                false => Ok(entry),
            });
        }
        let mut built = Vec::new();
        for place in places.into_iter().rev() {
            let entry = match place {
                Ok(kept) => kept,
                Err(Recipe { kind, spec, depends_on, account }) => {
                    built.push(spec.resource_key.clone());
                    self.build_one(&kind, spec, depends_on, account)?
                }
            };
            self.entries.push(entry);
        }
        self.bind()?;
        self.check_unbroken(|key| anew.contains(key))?;
        Ok(built)
    }
}

impl Entry {
    /// Drops the resource, takes back what it held, and keeps what another is built from.
    fn into_recipe(self, host: &dyn resource_api::HostServices) -> Recipe {
        let panics = u64::from(self.panics());
        let Entry { kind_handle: kind, spec, depends_on, account, built, .. } = self;
        drop(built);
        give_back(host, &account);
        account.start_anew(panics);
        Recipe { kind, spec, depends_on, account }
    }
}
