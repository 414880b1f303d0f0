//! Opening a plugin file that passed the host's checks.

use super::guard::guard;
use super::layout::{check, check_methods};
use super::object::open;
use super::root::{API_VERSION, INTERFACES, InterfaceDesc, PluginRootRef, TYPES, TypeDesc};
use crate::kind::KindHandle;
use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::library::{AbiHeaderRef, LibHeader};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::Path;

/// glibc's flag that keeps a library mapped for ever.
const RTLD_NODELETE: i32 = 0x1000;

/// The symbol that `export_plugin!` writes.
const ENTRY: &[u8] = b"_1as_0lib_1header_0root_bmodule_bloader\0";

/// A plugin that is loaded and fits this host. It stays mapped until the process ends: a Rust
/// library with thread-local destructors cannot be unloaded soundly.
#[derive(Clone, Debug, Default)]
pub struct PluginLibrary {
    /// Name of its crate.
    pub name: String,
    /// Version of its crate.
    pub version: String,
    /// Contract version it was built against.
    pub api: String,
    /// The kinds it builds.
    pub kinds: Vec<KindHandle>,
}

/// Loads `path` (absolute, or `/proc/self/fd/N` of the descriptor that was checked).
///
/// # Errors
/// One line that says which stage refused and why. Nothing is unloaded afterwards.
///
/// Runs the file's initialisers and trusts what it says about itself. Calling this is the decision
/// to run the file's code in this process, as starting it would be; there is nothing more that a
/// caller could check.
pub fn load_trusted(path: &Path) -> Result<PluginLibrary> {
    let refuse = |m: String| ResourceError::new(ErrorKind::INCOMPATIBLE, m);
    // SAFETY: initialisers of the file run here; the caller has decided to run its code.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) }
        .map_err(|e| refuse(format!("cannot be loaded: {}", loader_text(&e))))?;
    // SAFETY: the symbol, if there, is the header that `export_plugin!` writes; `upgrade` checks
    // abi_stable's magic before anything behind it is read.
    let header: &'static LibHeader = unsafe {
        let symbol = library.get::<AbiHeaderRef>(ENTRY).map_err(|_| {
            refuse("is not a resource plugin: it has no entry written by export_plugin!".into())
        })?;
        let header = *symbol;
        header.upgrade().map_err(|_| {
            refuse("was built with another major version of abi_stable; rebuild it".into())
        })?
    };
    std::mem::forget(library);
    let versions = header.version_strings();
    let major = versions.version.as_str().split('.').next().unwrap_or("");
    if major != API_VERSION.split('.').next().unwrap_or("") {
        return Err(refuse(format!(
            "was built against contract {}, this host speaks {API_VERSION}; rebuild it against \
             this version of resource-api",
            versions.version
        )));
    }
    let layout = header.layout().ok_or_else(|| {
        refuse(
            "carries no layout description, so it cannot be checked; build it with \
                export_plugin!"
                .into(),
        )
    })?;
    check(PluginRootRef::LAYOUT, layout)
        .map_err(|e| refuse(format!("contract layout: {e}: {REBUILD}")))?;
    // SAFETY: the layout fits, so the constructor gives a root of this type.
    let root = unsafe { header.init_root_module_with_unchecked_layout::<PluginRootRef>() }
        .map_err(|e| refuse(format!("its constructor failed: {}", one_line(&e.to_string()))))?;
    if !root.unwinds() {
        return Err(refuse(
            "was built with panic=abort: a panic in it would end the process; build it with \
             panic=unwind"
                .into(),
        ));
    }
    check_contract(root.interfaces().as_slice(), root.types().as_slice())
        .map_err(|e| refuse(format!("{e}: the contract is a draft, so {REBUILD}")))?;
    let kinds = guard("opening kinds", || {
        root.kinds().iter().map(|k| open::<KindHandle>(k.object())).collect::<Result<Vec<_>>>()
    })?;
    Ok(PluginLibrary {
        name: root.name().to_string(),
        version: root.version().to_string(),
        api: root.api().to_string(),
        kinds,
    })
}

/// What to do about a plugin that was built against another contract.
const REBUILD: &str = "rebuild the plugin against this version of resource-api";

/// While the contract is a draft, both sides must have the same interfaces and types.
fn check_contract(interfaces: &[InterfaceDesc], types: &[TypeDesc]) -> Result<()> {
    let differs = |m: String| Err(ResourceError::new(ErrorKind::INCOMPATIBLE, m));
    for ours in INTERFACES {
        let Some(theirs) = interfaces.iter().find(|i| i.id == ours.id) else {
            return differs(format!("the plugin does not know the interface {}", ours.id));
        };
        let (have, expect) = (theirs.methods.len(), ours.methods.len());
        check_methods(ours.id.as_str(), ours.methods.as_slice(), theirs.methods.as_slice())?;
        if have != expect {
            return differs(format!("{}: {expect} methods here, {have} in the plugin", ours.id));
        }
    }
    for ours in TYPES {
        match types.iter().find(|t| t.tag == ours.tag) {
            Some(theirs) => check(ours.layout, theirs.layout)
                .map_err(|e| e.within(format!("type {}", ours.tag)))?,
            None => return differs(format!("the plugin does not know the type {}", ours.tag)),
        }
    }
    Ok(())
}

/// dlopen's text without libloading's frame.
fn loader_text(e: &libloading::Error) -> String {
    let source = std::error::Error::source(e).map(|s| s.to_string());
    one_line(&source.unwrap_or_else(|| e.to_string()))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
