//! The part of `cargo xtask` that tests use too: whether the installed plugins are those of the
//! present sources.
//!
//! Cargo knows no dependency of a test on a plugin's `.so`, so a test asks
//! [`stamp::installed_plugins`] first and fails with a clear line instead of testing an old build.

#![forbid(unsafe_code)]

pub mod hash;
pub mod stamp;

use std::path::{Path, PathBuf};

/// The root of the workspace that this crate was built in.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}
