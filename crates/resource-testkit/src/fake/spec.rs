//! Settings of a fake resource, and what a request may ask of it.

use resource_api::ResourceKey;
use serde::Deserialize;

/// `[resources.<key>]` of kind `fake`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FakeSpec {
    /// Resources it is built on; each must offer `org.testkit.echo/1`.
    pub depends_on: Vec<ResourceKey>,
    /// Interfaces that it takes from resources built later.
    pub accepts: Vec<String>,
    /// Token slots of its pool.
    pub capacity: u32,
    /// Token slots of the pool that offloaded requests go to.
    pub host_capacity: u32,
    /// Whether it can be planned a step ahead.
    pub preplan: bool,
    /// Whether it opens a prefix store when asked to.
    pub prefix: bool,
    /// Whether its plan buffers must not be reused while the previous step runs.
    pub double_buffer: bool,
    /// How often `admit_retrieve` says that it is not ready before it is.
    pub retrieve_polls: u32,
    /// Name of the method that panics.
    pub panic_in: Option<String>,
}

impl Default for FakeSpec {
    fn default() -> Self {
        Self {
            depends_on: Vec::new(),
            accepts: Vec::new(),
            capacity: 64,
            host_capacity: 64,
            preplan: true,
            prefix: false,
            double_buffer: false,
            retrieve_polls: 0,
            panic_in: None,
        }
    }
}

/// What a request may ask of a fake resource.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FakeRequest {
    /// How much it is to be offloaded; the stream's length when it does not say.
    pub priority: Option<f64>,
}
