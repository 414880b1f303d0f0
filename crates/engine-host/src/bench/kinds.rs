//! Where the measured kinds come from.

use resource_api::KindHandle;

use crate::config::Config;
use crate::error::Result;
use crate::registry::Registry;
use crate::setup;

/// The kinds that are measured.
pub const MEASURED: [&str; 4] = ["attention", "kv", "positions", "sampler"];

/// What a program has that links kinds in.
#[derive(Clone, Copy, Debug)]
pub struct Linked {
    /// Makes the kinds.
    pub kinds: fn() -> Vec<KindHandle>,
    /// Allocations of the process so far. A plugin has an allocator of its own, which the host
    /// cannot count; a program without plugins has one for everything.
    pub allocations: fn() -> u64,
}

/// Kinds that can be built.
#[derive(Debug)]
pub struct Kinds {
    /// By name.
    pub registry: Registry,
    /// Counts allocations, where there is a way.
    pub allocations: Option<fn() -> u64>,
}

impl Kinds {
    /// The kinds of a program's own, or those of the plugins that `config` finds.
    ///
    /// # Errors
    /// Plugin directories that cannot be used, or a kind that none of them offers.
    pub fn load(config: &Config, linked: Option<Linked>) -> Result<Self> {
        let mut kinds = match linked {
            Some(linked) => {
                let mut registry = Registry::default();
                (linked.kinds)().into_iter().for_each(|kind| registry.link(kind));
                Self { registry, allocations: Some(linked.allocations) }
            }
            None => {
                let registry = Registry::load(&setup::discover(config)?, Some(&MEASURED));
                Self { registry, allocations: None }
            }
        };
        kinds.check()?;
        Ok(kinds)
    }

    fn check(&mut self) -> Result<()> {
        MEASURED.iter().try_for_each(|kind| self.registry.kind(kind).map(|_| ()))
    }

    /// `plugins` or `linked`.
    pub fn source(&self) -> &'static str {
        if self.allocations.is_some() { "linked" } else { "plugins" }
    }
}
