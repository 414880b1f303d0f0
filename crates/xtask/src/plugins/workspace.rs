//! The workspace as cargo sees it: which directories a package is built from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::step::{cargo, shown};

struct Package {
    name: String,
    /// Directories of packages in the workspace that it needs to be built.
    needs: Vec<PathBuf>,
}

/// Packages by directory.
pub struct Workspace {
    root: PathBuf,
    packages: BTreeMap<PathBuf, Package>,
}

/// Files at the root that every build reads.
const SHARED: [&str; 4] = [".cargo/config.toml", "Cargo.lock", "Cargo.toml", "rust-toolchain.toml"];

impl Workspace {
    /// Asks cargo. `Cargo.lock` is up to date already: running this task has seen to that.
    pub fn load(root: &Path) -> Result<Self> {
        let mut command = cargo(["metadata", "--no-deps", "--format-version=1"]);
        let output = command.output().context("cannot run cargo")?;
        if !output.status.success() {
            bail!("{} failed: {}", shown(&command), String::from_utf8_lossy(&output.stderr));
        }
        let metadata: Value = serde_json::from_slice(&output.stdout)?;
        let listed = metadata["packages"].as_array().into_iter().flatten();
        let packages = listed.filter_map(|package| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            let needs = package["dependencies"].as_array()?.iter();
            let needs = needs.filter(|need| need["kind"] != "dev");
            Some((
                manifest.parent()?.to_owned(),
                Package {
                    name: package["name"].as_str()?.to_owned(),
                    needs: needs.filter_map(|n| n["path"].as_str().map(PathBuf::from)).collect(),
                },
            ))
        });
        Ok(Self { root: root.to_owned(), packages: packages.collect() })
    }

    /// The name of the package in `folder`, relative to the root.
    pub fn package_in(&self, folder: &str) -> Result<&str> {
        match self.packages.get(&self.root.join(folder)) {
            Some(package) => Ok(&package.name),
            None => bail!("{folder} is no member of the workspace: add it in Cargo.toml"),
        }
    }

    /// Everything of the workspace that a build of the package in `folder` reads, relative to the
    /// root.
    pub fn sources_of(&self, folder: &str) -> Result<Vec<String>> {
        self.package_in(folder)?;
        let mut found = BTreeSet::new();
        let mut pending = vec![self.root.join(folder)];
        while let Some(directory) = pending.pop() {
            let package = self.packages.get(&directory);
            if found.insert(directory) {
                pending.extend(package.into_iter().flat_map(|package| package.needs.clone()));
            }
        }
        let relative = |path: &PathBuf| {
            path.strip_prefix(&self.root).unwrap_or(path).to_string_lossy().into_owned()
        };
        let shared = SHARED.iter().filter(|file| self.root.join(file).is_file());
        Ok(shared.map(|file| (*file).to_owned()).chain(found.iter().map(relative)).collect())
    }
}
