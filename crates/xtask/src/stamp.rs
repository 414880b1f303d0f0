//! The stamp that `cargo xtask build` leaves in `plugins/`: which sources the installed plugins
//! were built from.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::hash;

/// Name of the stamp in `plugins/`. Hidden, so that the host does not take it for a manifest.
pub const STAMP_FILE: &str = ".stamp.toml";

/// What was installed last.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Cargo's profile, `release` or `debug`.
    pub profile: String,
    /// By the plugin's folder under `plugins/`.
    pub plugins: BTreeMap<String, Installed>,
}

/// One installed plugin.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// File name of the manifest in `plugins/`.
    pub manifest: String,
    /// File name of the library in `plugins/`.
    pub library: String,
    /// Digest of the library.
    pub library_sha256: String,
    /// Files and package directories that the build read, relative to the workspace.
    pub sources: Vec<String>,
    /// Digest of them, see [`hash::of_sources`].
    pub sources_sha256: String,
}

impl Stamp {
    /// Reads the stamp in `plugins`; `None` where there is none, or one of another format.
    pub fn read(plugins: &Path) -> Option<Self> {
        toml::from_str(&fs::read_to_string(plugins.join(STAMP_FILE)).ok()?).ok()
    }
}

/// Names of the folders under `plugins` that hold a plugin's sources, in alphabetical order.
pub fn plugin_folders(plugins: &Path) -> std::io::Result<Vec<String>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(plugins)? {
        let entry = entry?;
        if entry.path().join("Cargo.toml").is_file() {
            folders.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    folders.sort();
    Ok(folders)
}

/// The directory of installed plugins of the workspace at `root`, if every plugin of the workspace
/// is installed and built from the present sources. The error says which is not, in one line each,
/// and what to do.
pub fn installed_plugins(root: &Path) -> Result<PathBuf, String> {
    let plugins = root.join("plugins");
    let folders = plugin_folders(&plugins)
        .map_err(|error| format!("{}: cannot be read: {error}", plugins.display()))?;
    let stamp = Stamp::read(&plugins).unwrap_or_default();
    let problems: Vec<String> = folders
        .iter()
        .filter_map(|folder| {
            let problem = match stamp.plugins.get(folder) {
                None => Some("is not installed"),
                Some(installed) => installed.problem(root, &plugins),
            };
            problem.map(|problem| format!("plugin {folder:?} {problem}: run `cargo xtask build`"))
        })
        .collect();
    if problems.is_empty() { Ok(plugins) } else { Err(problems.join("\n")) }
}

impl Installed {
    fn problem(&self, root: &Path, plugins: &Path) -> Option<&'static str> {
        if !plugins.join(&self.manifest).is_file() {
            return Some("has no manifest installed");
        }
        match hash::of_file(&plugins.join(&self.library)) {
            Err(_) => return Some("has no library installed"),
            Ok(digest) if digest != self.library_sha256 => {
                return Some("has a library installed that is not the one built");
            }
            Ok(_) => {}
        }
        match hash::of_sources(root, &self.sources) {
            Ok(digest) if digest == self.sources_sha256 => None,
            _ => Some("is stale, its sources have changed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_missing_or_stale_is_said() {
        let root = tempfile::tempdir().unwrap();
        let plugins = root.path().join("plugins");
        let check = || installed_plugins(root.path());
        assert!(check().unwrap_err().contains("plugins: cannot be read"));

        let folder = plugins.join("kv");
        fs::create_dir_all(folder.join("src")).unwrap();
        fs::write(folder.join("Cargo.toml"), "").unwrap();
        fs::write(folder.join("src/lib.rs"), "").unwrap();
        let says = |problem: &str| {
            assert_eq!(
                check().unwrap_err(),
                format!("plugin \"kv\" {problem}: run `cargo xtask build`")
            );
        };
        says("is not installed");

        let library = plugins.join("libkv.so");
        fs::write(&library, "built").unwrap();
        let sources = vec!["plugins/kv".to_owned()];
        let installed = Installed {
            manifest: "kv.toml".into(),
            library: "libkv.so".into(),
            library_sha256: hash::of_file(&library).unwrap(),
            sources_sha256: hash::of_sources(root.path(), &sources).unwrap(),
            sources,
        };
        let stamp = Stamp {
            profile: "release".into(),
            plugins: BTreeMap::from([("kv".to_owned(), installed)]),
        };
        fs::write(plugins.join(STAMP_FILE), toml::to_string(&stamp).unwrap()).unwrap();
        assert_eq!(Stamp::read(&plugins).unwrap(), stamp);
        says("has no manifest installed");

        fs::write(plugins.join("kv.toml"), "").unwrap();
        assert_eq!(check().unwrap(), plugins);
        fs::write(folder.join("src/lib.rs"), "// changed").unwrap();
        says("is stale, its sources have changed");
        fs::write(&library, "other").unwrap();
        says("has a library installed that is not the one built");
        fs::remove_file(&library).unwrap();
        says("has no library installed");
    }
}
