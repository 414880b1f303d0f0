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
    /// Most tokens of each of its streams, where it has others than `main` alone: what can never fit is
    /// refused by them.
    pub(crate) stream_tokens: Option<Vec<u32>>,
}

impl Default for RequestSettings {
    fn default() -> Self {
        Self { prefix_cache: true, prefix_salt: String::new(), stream_tokens: None }
    }
}
