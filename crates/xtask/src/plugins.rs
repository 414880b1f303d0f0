//! `cargo xtask build`: builds the host and every plugin under `plugins/*/`, and installs manifest
//! and library of each at the top of `plugins/`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use toml_edit::DocumentMut;
use xtask::hash;
use xtask::stamp::{Installed, STAMP_FILE, Stamp, plugin_folders};

use crate::step::{Step, cargo, shown};

mod workspace;

use workspace::Workspace;

#[derive(clap::Args, Default)]
pub struct BuildOptions {
    /// Without optimisation, faster to build
    #[arg(long)]
    debug: bool,
    /// Do not write each library's sha256 into its installed manifest: the host then takes whatever
    /// file lies there, and loads it in a child process first
    #[arg(long)]
    no_pin: bool,
}

/// What a build made.
pub struct Built {
    /// The host's binary.
    pub host: Option<PathBuf>,
}

/// A plugin's sources.
struct Plugin {
    /// Name of its folder under `plugins/`.
    folder: String,
    /// Its `plugin.toml`.
    manifest: DocumentMut,
    /// `name` in the manifest: the installed manifest is named after it.
    name: String,
    /// `library` in the manifest.
    library: String,
}

/// Builds everything and installs the plugins. Each file is replaced by a rename, so that a running
/// host keeps the one it has mapped.
pub fn build(options: &BuildOptions) -> Result<Built> {
    let root = xtask::workspace_root();
    let directory = root.join("plugins");
    let folders = plugin_folders(&directory)
        .with_context(|| format!("cannot read {}", directory.display()))?;
    let plugins =
        folders.into_iter().map(|f| Plugin::read(&directory, f)).collect::<Result<Vec<_>>>()?;

    let profile = if options.debug { "debug" } else { "release" };
    let step = Step::begin(format!("build of the host and {} plugins ({profile})", plugins.len()));
    let workspace = Workspace::load(&root)?;
    // Before the build: what changes while it runs must count as stale.
    let mut sources = BTreeMap::new();
    for plugin in &plugins {
        let read = workspace.sources_of(&format!("plugins/{}", plugin.folder))?;
        let digest = hash::of_sources(&root, &read)?;
        sources.insert(plugin.folder.as_str(), (read, digest));
    }
    let packages = plugins.iter().map(|p| workspace.package_in(&format!("plugins/{}", p.folder)));
    let artifacts = compile(&packages.collect::<Result<Vec<_>>>()?, options)?;
    step.end();

    let step = Step::begin("installation into plugins/");
    let mut stamp = Stamp { profile: profile.to_owned(), plugins: BTreeMap::new() };
    for plugin in &plugins {
        let manifest_path = directory.join(&plugin.folder).join("Cargo.toml");
        let built = artifacts.libraries.get(&manifest_path).with_context(|| {
            format!(
                "{}: no shared library was built (set crate-type = [\"cdylib\"])",
                manifest_path.display()
            )
        })?;
        let (read, digest) = sources.remove(plugin.folder.as_str()).unwrap_or_default();
        let installed = plugin.install(&directory, built, !options.no_pin, read, digest)?;
        eprintln!("    plugins/{}, plugins/{}", installed.manifest, installed.library);
        stamp.plugins.insert(plugin.folder.clone(), installed);
    }
    remove_leftovers(&directory, &stamp)?;
    write_atomically(&directory.join(STAMP_FILE), toml::to_string(&stamp)?.as_bytes(), 0o644)?;
    step.end();
    Ok(Built { host: artifacts.host })
}

impl Plugin {
    fn read(directory: &Path, folder: String) -> Result<Self> {
        let path = directory.join(&folder).join("plugin.toml");
        let text = fs::read_to_string(&path)
            .with_context(|| format!("cannot read the manifest {}", path.display()))?;
        let manifest: DocumentMut =
            text.parse().with_context(|| format!("{} is no TOML", path.display()))?;
        let field = |key: &str| {
            let value = manifest.get("plugin").and_then(|plugin| plugin.get(key)?.as_str());
            match value {
                Some(value) if !value.is_empty() && !value.contains('/') => Ok(value.to_owned()),
                Some(value) => bail!("{}: {key} = {value:?} is no file name", path.display()),
                None => bail!("{}: [plugin] lacks the string {key:?}", path.display()),
            }
        };
        let (name, library) = (field("name")?, field("library")?);
        Ok(Self { folder, name, library, manifest })
    }

    fn install(
        &self,
        directory: &Path,
        built: &Path,
        pin: bool,
        sources: Vec<String>,
        sources_sha256: String,
    ) -> Result<Installed> {
        let content = stripped(built)?;
        // The library first: a manifest must not name one that is not there.
        write_atomically(&directory.join(&self.library), &content, 0o755)?;
        let library_sha256 = hash::of_file(&directory.join(&self.library))?;
        let mut manifest = self.manifest.clone();
        if pin {
            manifest["plugin"]["sha256"] = toml_edit::value(&library_sha256);
        }
        let file = format!("{}.toml", self.name);
        write_atomically(&directory.join(&file), manifest.to_string().as_bytes(), 0o644)?;
        Ok(Installed {
            manifest: file,
            library: self.library.clone(),
            library_sha256,
            sources,
            sources_sha256,
        })
    }
}

/// The library without its debugging information and local symbols, which are nine tenths of it: the
/// host reads and hashes the whole file each time it starts. What cargo built keeps them.
fn stripped(built: &Path) -> Result<Vec<u8>> {
    let target = tempfile::NamedTempFile::new().context("no temporary file")?;
    let status = Command::new("strip")
        .args(["--strip-unneeded", "-o"])
        .args([target.path(), built])
        .status();
    let read = match status {
        Ok(status) if status.success() => target.path(),
        // It comes with the linker, so nearly always it is there; the plugin is as good without.
        _ => {
            eprintln!(
                "    {}: installed with debugging information, `strip` failed",
                built.display()
            );
            built
        }
    };
    fs::read(read).with_context(|| format!("cannot read {}", built.display()))
}

#[derive(Default)]
struct Artifacts {
    /// By the package's `Cargo.toml`.
    libraries: BTreeMap<PathBuf, PathBuf>,
    host: Option<PathBuf>,
}

/// Runs cargo, which shows its own progress, and collects where it put things.
fn compile(packages: &[&str], options: &BuildOptions) -> Result<Artifacts> {
    let mut command = cargo(["build", "--message-format=json-render-diagnostics"]);
    if !options.debug {
        command.arg("--release");
    }
    for package in ["engine-host"].iter().chain(packages) {
        command.args(["--package", package]);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run cargo")?;
    let stdout = child.stdout.take().context("cargo's output cannot be read")?;
    let mut artifacts = Artifacts::default();
    for line in BufReader::new(stdout).lines() {
        let message: Value = serde_json::from_str(&line?).unwrap_or_default();
        let manifest = message["manifest_path"].as_str().map(PathBuf::from);
        let Some(manifest) = manifest.filter(|_| message["reason"] == "compiler-artifact") else {
            continue;
        };
        let strings = |value: &Value| -> Vec<String> {
            let items = value.as_array().into_iter().flatten();
            items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
        };
        if strings(&message["target"]["kind"]).iter().any(|kind| kind == "cdylib") {
            let files = strings(&message["filenames"]);
            if let Some(library) = files.into_iter().find(|file| file.ends_with(".so")) {
                artifacts.libraries.insert(manifest, library.into());
            }
        } else if message["target"]["name"] == "engine-host"
            && let Some(binary) = message["executable"].as_str()
        {
            artifacts.host = Some(binary.into());
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{} failed ({status})", shown(&command));
    }
    Ok(artifacts)
}

/// Removes what an earlier build installed and this one did not: a plugin renamed or deleted would
/// otherwise still be loaded.
fn remove_leftovers(directory: &Path, now: &Stamp) -> Result<()> {
    let files = |stamp: &Stamp| -> BTreeSet<String> {
        let installed = stamp.plugins.values();
        installed.flat_map(|i| [i.manifest.clone(), i.library.clone()]).collect()
    };
    let before = Stamp::read(directory).unwrap_or_default();
    for leftover in files(&before).difference(&files(now)) {
        let path = directory.join(leftover);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => eprintln!("    plugins/{leftover} removed, no longer built"),
        }
    }
    Ok(())
}

/// Writes beside `path` and renames. The temporary name is hidden and keeps the extension, so that
/// git ignores it and the host does not read it.
fn write_atomically(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let directory = path.parent().unwrap_or(Path::new("."));
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        let mut file = tempfile::Builder::new()
            .prefix(".install-")
            .suffix(&format!(".{extension}"))
            .tempfile_in(directory)?;
        file.write_all(content)?;
        file.as_file().set_permissions(Permissions::from_mode(mode))?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
