//! Paths in the configuration: `~`, relative ones, and where the default model lies.

use std::env;
use std::path::{Path, PathBuf};

/// Overrides the default model; `model.path` in a configuration still wins.
pub const MODEL_ENV: &str = "ENGINE_HOST_MODEL";

/// File name of the model that `cargo xtask fetch-model` keeps in [`model_cache_dir`].
pub const DEFAULT_MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// `$ENGINE_HOST_MODEL`, else [`DEFAULT_MODEL_FILE`] in the user's cache directory.
pub fn default_model_path() -> PathBuf {
    match non_empty(MODEL_ENV) {
        Some(path) => path,
        None => model_cache_dir().join(DEFAULT_MODEL_FILE),
    }
}

/// `${XDG_CACHE_HOME:-~/.cache}/engine-host/models`.
pub fn model_cache_dir() -> PathBuf {
    let absolute = |path: &PathBuf| path.is_absolute();
    // The XDG specification says to ignore relative values.
    let cache = non_empty("XDG_CACHE_HOME").filter(absolute).unwrap_or_else(|| {
        non_empty("HOME").map_or_else(|| PathBuf::from(".cache"), |home| home.join(".cache"))
    });
    cache.join("engine-host").join("models")
}

/// `text` from the configuration as a path: `~` is the home directory, relative ones count from
/// `base`. The error is one line.
pub(super) fn resolve(text: &str, base: &Path) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("an empty path".to_owned());
    }
    if text.contains('\0') {
        return Err("a path with a zero byte".to_owned());
    }
    match text.strip_prefix('~') {
        None => Ok(base.join(text)),
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            let home = non_empty("HOME").ok_or("a path with ~, and HOME is not set")?;
            Ok(home.join(rest.trim_start_matches('/')))
        }
        Some(_) => Err("a path with ~ before a user's name, of which only ~/ is known".to_owned()),
    }
}

fn non_empty(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}
