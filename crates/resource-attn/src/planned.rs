//! What was planned so far, for `inspect`. A plan itself belongs to the step that leases its slot.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use serde_json::{Value, json};

use crate::plan::AttentionPlan;

/// Counts of the plans that a resource has laid out.
#[derive(Debug, Default)]
pub(crate) struct Planned {
    plans: AtomicU64,
    groups: AtomicU32,
    rows: AtomicU32,
    tokens: AtomicU32,
    blocks: AtomicU32,
}

impl Planned {
    /// Notes a plan that is complete.
    pub(crate) fn note(&self, plan: &AttentionPlan) {
        self.plans.fetch_add(1, Relaxed);
        let tokens = plan.groups.iter().map(|group| group.num_tokens).sum();
        self.groups.store(plan.groups.len() as u32, Relaxed);
        self.rows.store(plan.rows.len() as u32, Relaxed);
        self.tokens.store(tokens, Relaxed);
        self.blocks.store(plan.blocks.len() as u32, Relaxed);
    }

    /// How many there were, and what the last one was over.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "plans": self.plans.load(Relaxed),
            "last": {
                "groups": self.groups.load(Relaxed),
                "rows": self.rows.load(Relaxed),
                "tokens": self.tokens.load(Relaxed),
                "blocks": self.blocks.load(Relaxed),
            },
        })
    }
}
