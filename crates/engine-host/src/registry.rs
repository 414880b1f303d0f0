//! The kinds that can be built, each from the plugin that was loaded for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use resource_api::abi::fault::FaultCell;
use resource_api::abi::library::{PluginLibrary, load_trusted};
use resource_api::abi::object::open as open_object;
use resource_api::{
    BuiltResource, EngineResourceInfo, Interface, Kind, KindHandle, NodeResourceSpec, ResourceError,
};

use crate::discovery::{Discovered, Discovery, State};
use crate::document;
use crate::elf::{CheckedFile, PluginNote};
use crate::error::{Error, ErrorKind, Result};
use crate::probe;
use crate::suggest;
use crate::watch::told_if_slow;

mod file;

pub use file::{PluginFile, load_file};

/// A kind with where it comes from.
#[derive(Clone, Debug)]
pub struct Registered {
    /// Builds resources of the kind.
    pub kind: KindHandle,
    /// Name of the plugin; `(linked in)` for a static kind.
    pub plugin: String,
}

impl Registered {
    /// The kind with a fault mark of its own: it keeps no state between calls, so a panic over one
    /// spec must not put it out of use for the others, or for another engine of the process.
    fn unmarked(&self) -> resource_api::Result<KindHandle> {
        let mut object = self.kind.clone().into_object();
        object.share_fault(FaultCell::shared(&self.plugin));
        open_object(object)
    }

    /// Builds a resource.
    ///
    /// # Errors
    /// Wrong settings, or what the kind's own `build` says; names the resource.
    pub fn build(
        &self,
        spec: &NodeResourceSpec,
        info: EngineResourceInfo,
    ) -> Result<BuiltResource> {
        let built = self.unmarked().and_then(|kind| kind.build(spec.clone(), info));
        built.map_err(|e| of_resource(spec, self, e))
    }
}

/// Kinds by name.
#[derive(Debug, Default)]
pub struct Registry {
    kinds: BTreeMap<String, Registered>,
    /// Why kinds that some manifest offers are not here.
    missing: BTreeMap<String, String>,
}

/// One manifest after loading was tried: what `plugin list` shows.
#[derive(Debug)]
pub struct Listed {
    /// Name of the plugin.
    pub name: String,
    /// Its version, from the manifest.
    pub version: String,
    /// Path of the manifest.
    pub manifest: PathBuf,
    /// Kinds that it offers.
    pub kinds: Vec<String>,
    /// Capabilities of what it builds.
    pub provides: Vec<String>,
    /// `loaded`, `disabled` or `refused`.
    pub state: &'static str,
    /// Why it was refused; one line.
    pub reason: Option<String>,
    /// What there is to read beside the reason, in any number of lines.
    pub details: String,
    /// How long checking and loading took.
    pub took: Duration,
    library: Option<PluginLibrary>,
}

/// What has been loaded in this process.
struct Images {
    /// Kinds by the file's digest. The same content is loaded once: the dynamic linker would give
    /// back the same image, whose statics are shared anyway.
    kinds: BTreeMap<[u8; 32], Vec<KindHandle>>,
    /// Kept open for good. The linker tells images apart by the name they were opened by, here
    /// `/proc/self/fd/N`: a number used again would answer with the earlier image.
    files: Vec<File>,
}

static IMAGES: Mutex<Images> = Mutex::new(Images { kinds: BTreeMap::new(), files: Vec::new() });

impl Registry {
    /// Loads what the config needs, or everything usable when `wanted` is `None`. A plugin that is
    /// refused does not stop the others; asking for a kind of it says why.
    pub fn load(discovery: &Discovery, wanted: Option<&[&str]>) -> Self {
        tell_of_environment();
        let mut registry = Self::default();
        for found in &discovery.plugins {
            let Some(manifest) = &found.manifest else { continue };
            let is_wanted = |kinds: &[&str]| manifest.kinds.iter().any(|k| kinds.contains(&&**k));
            if found.state == State::Usable && wanted.is_none_or(is_wanted) {
                registry.register(inspect(found));
            }
        }
        registry
    }

    fn register(&mut self, listed: Listed) {
        match listed.library {
            Some(library) => {
                for kind in library.kinds {
                    let entry = Registered { plugin: listed.name.clone(), kind };
                    self.kinds.insert(entry.kind.kind(), entry);
                }
            }
            None => {
                let reason = listed.reason.unwrap_or_default();
                for kind in listed.kinds {
                    self.missing.insert(kind, reason.clone());
                }
            }
        }
    }

    /// Adds a kind that is linked in: `registry.link(resource_api::kind::<MyKind>())`.
    pub fn link(&mut self, kind: KindHandle) {
        let entry = Registered { plugin: "(linked in)".into(), kind };
        self.kinds.insert(entry.kind.kind(), entry);
    }

    /// Names of the kinds.
    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    /// The kind with this name.
    ///
    /// # Errors
    /// Which kinds there are, the nearest name, and why a plugin that has it was refused.
    pub fn kind(&self, name: &str) -> Result<&Registered> {
        if let Some(kind) = self.kinds.get(name) {
            return Ok(kind);
        }
        let message = match self.missing.get(name) {
            Some(reason) => format!("kind {name:?} cannot be used: {reason}"),
            None => format!(
                "kind {name:?} is offered by no plugin{} (kinds there are: {})",
                suggest::did_you_mean(name, self.kinds()),
                suggest::listed(self.kinds()),
            ),
        };
        Err(Error::new(ErrorKind::NotFound, message))
    }

    /// Builds a resource: the seed's `build_resource(spec, info)`.
    ///
    /// # Errors
    /// An unknown kind, wrong settings, or what the kind's own `build` says; names the resource.
    pub fn build_resource(
        &self,
        spec: &NodeResourceSpec,
        info: EngineResourceInfo,
    ) -> Result<BuiltResource> {
        self.kind(&spec.kind)?.build(spec, info)
    }

    /// Keys that a resource with this spec depends on, as its kind says.
    ///
    /// # Errors
    /// An unknown kind or wrong settings; names the resource.
    pub fn depends_on(&self, spec: &NodeResourceSpec) -> Result<Vec<String>> {
        let registered = self.kind(&spec.kind)?;
        let keys = registered.unmarked().and_then(|kind| kind.depends_on(spec.clone()));
        keys.map_err(|e| of_resource(spec, registered, e))
    }
}

/// An error of a plugin with the names that a person needs to act on it.
fn of_resource(spec: &NodeResourceSpec, from: &Registered, e: ResourceError) -> Error {
    let place = format!("[resources.{}]", spec.resource_key);
    let text = e.to_string();
    let message = match text.starts_with(&place) {
        true => text,
        false => format!("{place} (kind {}, plugin {}): {text}", spec.kind, from.plugin),
    };
    Error::new(ErrorKind::from(e.kind()), message)
}

/// What the environment makes the dynamic linker do to this process and all plugins in it.
pub fn environment() -> Vec<String> {
    let what = |name| match name {
        "LD_PRELOAD" | "LD_AUDIT" => "puts code into this process and every plugin",
        _ => "decides where libraries that plugins need (of the GPU driver, for example) come from",
    };
    let names = ["LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH"].into_iter();
    let set = names.filter_map(|n| Some((n, std::env::var_os(n).filter(|v| !v.is_empty())?)));
    set.map(|(name, value)| format!("{name}={} {}", value.to_string_lossy(), what(name))).collect()
}

fn tell_of_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for line in environment() {
            match line.starts_with("LD_LIBRARY_PATH") {
                true => tracing::info!("{line}"),
                false => tracing::warn!("{line}"),
            }
        }
    });
}

/// Loads one plugin, if its manifest allows, and says what became of it.
pub fn inspect(found: &Discovered) -> Listed {
    let manifest = found.manifest.as_ref();
    let mut listed = Listed {
        name: found.name(),
        version: manifest.map(|m| m.version.clone()).unwrap_or_default(),
        manifest: found.path.clone(),
        kinds: manifest.map(|m| m.kinds.clone()).unwrap_or_default(),
        provides: manifest
            .map(|m| m.provides.iter().map(ToString::to_string).collect())
            .unwrap_or_default(),
        state: "refused",
        reason: None,
        details: String::new(),
        took: Duration::ZERO,
        library: None,
    };
    let started = Instant::now();
    match &found.state {
        State::Disabled => listed.state = "disabled",
        State::Refused(reason) => listed.reason = Some(reason.clone()),
        State::Usable => match open(found) {
            Ok(library) => {
                listed.state = "loaded";
                listed.library = Some(library);
            }
            Err(Refused { reason, details }) => {
                listed.reason = Some(reason);
                listed.details = details;
            }
        },
    }
    listed.took = started.elapsed();
    listed
}

/// Why a plugin is not loaded: one line, and what else there is to read.
#[derive(Debug, Default)]
struct Refused {
    reason: String,
    details: String,
}

impl From<String> for Refused {
    fn from(reason: String) -> Self {
        Self { reason, details: String::new() }
    }
}

/// What is wrong with a library, as one line.
fn within(library: &Path, what: &str) -> String {
    format!("{}: {}", document::shown(library), document::plain(what))
}

/// Every check there is before the library is loaded into this process: of the file, of its note, and
/// of what loading it does to a child process.
///
/// # Errors
/// One line.
pub fn check(found: &Discovered) -> Result<CheckedFile, String> {
    let checked = found.check_library().map_err(|e| e.to_string())?;
    let within = |e: String| within(&checked.path, &e);
    let Some(note) = &checked.note else {
        let reason =
            "is not a resource plugin: it carries no RESAPI note, which export_plugin! writes";
        return Err(within(reason.into()));
    };
    check_note(found, note).map_err(within)?;
    if found.needs_probe() {
        probe::probe(&checked).map_err(within)?;
    }
    Ok(checked)
}

/// What can be told of a library before anything of it runs, by what it says about itself.
///
/// # Errors
/// One line.
pub fn check_note(found: &Discovered, note: &PluginNote) -> Result<(), String> {
    note.check()?;
    agrees(found, note.kinds.clone(), note.provides.clone())
}

/// Checks, loads and compares with the manifest.
fn open(found: &Discovered) -> Result<PluginLibrary, Refused> {
    let checked = check(found)?;
    let path = checked.path.clone();
    if let Some(note) = &checked.note {
        tracing::info!(
            plugin = found.name(),
            rustc = note.rustc,
            profile = note.profile,
            "loading {}",
            document::shown(&path)
        );
    }
    // The linker knows it by this name, which nobody else does.
    let opened_as = checked.load_path();
    let library = load_once(checked).map_err(|e| Refused {
        reason: within(&path, &e.to_string().replace(&format!("{}: ", opened_as.display()), "")),
        details: e.details().to_owned(),
    })?;
    let kinds = library.kinds.iter().map(Kind::kind).collect();
    let provides = library.kinds.iter().flat_map(Kind::provides).collect();
    agrees(found, kinds, provides).map_err(|e| within(&path, &e))?;
    Ok(library)
}

/// A list of a broken library may be of any length.
const MOST_SHOWN: usize = 20;

/// Compares what a library offers with its manifest.
fn agrees(
    found: &Discovered,
    mut kinds: Vec<String>,
    mut provides: Vec<String>,
) -> Result<(), String> {
    let Some(manifest) = &found.manifest else { return Ok(()) };
    let mut said_kinds = manifest.kinds.clone();
    let mut said_provides: Vec<String> =
        manifest.provides.iter().map(|p| format!("{}/{}", p.name, p.major)).collect();
    for list in [&mut kinds, &mut provides, &mut said_kinds, &mut said_provides] {
        list.sort();
        list.dedup();
    }
    let differs = |what: &str, said: &[String], has: &[String]| {
        let show =
            |names: &[String]| suggest::listed(names.iter().map(String::as_str).take(MOST_SHOWN));
        let (said, has) = (show(said), show(has));
        Err(format!(
            "manifest says {what} {said}, library has {has}: make {} agree",
            document::shown(&found.path)
        ))
    };
    if kinds != said_kinds {
        return differs("kinds", &said_kinds, &kinds);
    }
    if provides != said_provides {
        return differs("provides", &said_provides, &provides);
    }
    Ok(())
}

fn load_once(checked: CheckedFile) -> resource_api::Result<PluginLibrary> {
    let mut images = IMAGES.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(kinds) = images.kinds.get(&checked.sha256.0) {
        return Ok(PluginLibrary { kinds: kinds.clone(), ..PluginLibrary::default() });
    }
    let (path, digest) = (checked.load_path(), checked.sha256.0);
    // Before the outcome is known: a library that is refused once it is mapped stays mapped.
    let what = format!("plugin {}, initialisers and constructor,", document::shown(&checked.path));
    images.files.push(checked.file);
    let library = told_if_slow(&what, || load_trusted(&path))?;
    images.kinds.insert(digest, library.kinds.clone());
    Ok(library)
}
