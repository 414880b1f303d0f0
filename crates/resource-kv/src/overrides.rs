//! What a request may say to the cache.

use serde::Deserialize;

/// A request's own settings.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RequestSettings {
    /// Whether its pages are shared with other requests.
    pub(crate) prefix_cache: bool,
    /// Only requests with the same salt share pages.
    pub(crate) prefix_salt: String,
    /// Its streams, where it has others than `main` alone.
    pub(crate) labels: Option<Labels>,
}

impl Default for RequestSettings {
    fn default() -> Self {
        Self { prefix_cache: true, prefix_salt: String::new(), labels: None }
    }
}

/// Names of streams. All are written by the walks of `main`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Labels {
    /// Those that the prompt goes to, each with all of its tokens.
    pub(crate) prompt: Vec<String>,
    /// Those that what is generated goes to.
    pub(crate) generated: Vec<String>,
}
