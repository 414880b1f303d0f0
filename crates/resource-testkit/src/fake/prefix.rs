//! A toy prefix store: token vectors that have been computed once.

use std::collections::{BTreeMap, BTreeSet};

use resource_api::RequestId;
use serde_json::{Value, json};

/// Computed vectors, and which request holds how many tokens of them.
#[derive(Debug, Default)]
pub struct Prefixes {
    root: Option<Vec<u8>>,
    known: BTreeSet<Vec<u32>>,
    held: BTreeMap<RequestId, u32>,
}

impl Prefixes {
    /// Opens the store for state that depends on `root`.
    pub fn open(&mut self, root: &[u8]) {
        self.root = Some(root.to_vec());
    }

    /// Adds what a request has computed.
    pub fn add(&mut self, chain: Vec<u32>) {
        if self.root.is_some() && !chain.is_empty() {
            self.known.insert(chain);
        }
    }

    /// How many leading tokens of the prompt are known: one short of all, so that there is
    /// something left to compute. Asking again gives the same answer and takes nothing more.
    pub fn resolve(&mut self, rid: RequestId, prompt: &[u32]) -> Option<u32> {
        self.root.as_ref()?;
        let known = &self.known;
        let held = self.held.entry(rid).or_insert_with(|| {
            let common = |v: &Vec<u32>| v.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            let longest = known.iter().map(common).max().unwrap_or(0);
            longest.min(prompt.len().saturating_sub(1)) as u32
        });
        Some(*held)
    }

    /// Lets go of what a request holds.
    pub fn release(&mut self, rid: RequestId) {
        self.held.remove(&rid);
    }

    /// For `inspect`.
    pub fn inspect(&self) -> Value {
        let held: Vec<_> = self.held.iter().map(|(r, n)| json!([r.to_string(), n])).collect();
        json!({ "root": self.root, "known": self.known, "held": held })
    }
}
