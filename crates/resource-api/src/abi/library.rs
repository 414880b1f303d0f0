//! Opening a plugin file that passed the host's checks.

use super::guard::guard;
use super::layout::{Fitting, check, check_methods};
use super::object::{Interface, open_knowing};
use super::root::{API_VERSION, INTERFACES, InterfaceDesc, PluginRootRef, TYPES, TypeDesc};
use crate::kind::{Kind, KindHandle};
use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::library::{AbiHeaderRef, LibHeader};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::Path;

/// glibc's flag that keeps a library mapped for ever.
const RTLD_NODELETE: i32 = 0x1000;

/// Most kinds of a plugin, and most capabilities.
pub const MOST_KINDS: usize = 64;
/// Longest name of a plugin, a kind or a capability.
pub const MOST_NAME_BYTES: usize = 128;

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
    open_root(header)
}

fn refuse(message: String) -> ResourceError {
    ResourceError::new(ErrorKind::INCOMPATIBLE, message)
}

/// Compares what the library was compiled against, and then, not before, calls its constructor.
fn open_root(header: &'static LibHeader) -> Result<PluginLibrary> {
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
    check(PluginRootRef::LAYOUT, layout).map_err(|e| rebuild("contract layout", &e))?;
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
    let count = root.kinds().len();
    if count == 0 || count > MOST_KINDS {
        return Err(refuse(format!("exports {count} kinds; a plugin has 1 to {MOST_KINDS}")));
    }
    let texts = [("name", root.name()), ("version", root.version()), ("api", root.api())];
    for (what, text) in texts {
        if text.as_ptr().is_null() || text.len() > MOST_NAME_BYTES {
            return Err(refuse(format!("its {what} is no text of 1 to {MOST_NAME_BYTES} bytes")));
        }
    }
    let mut fitting = Fitting::default();
    check_contract(root.interfaces().as_slice(), root.types().as_slice(), &mut fitting)
        .map_err(|e| rebuild("the contract is a draft", &e))?;
    let kinds: Vec<_> = guard("opening kinds", || {
        let kinds = root.kinds().into_iter();
        kinds.map(|k| open_knowing::<KindHandle>(k.object(), &mut fitting)).collect::<Result<_>>()
    })?;
    check_names(&kinds)?;
    Ok(PluginLibrary {
        name: root.name().to_string(),
        version: root.version().to_string(),
        api: root.api().to_string(),
        kinds,
    })
}

/// What kinds answer about themselves: a panic is answered with nothing.
fn check_names(kinds: &[KindHandle]) -> Result<()> {
    for kind in kinds {
        let (name, provides) = (kind.kind(), kind.provides());
        kind.object().check_fault().map_err(|e| refuse(e.to_string()))?;
        if name.is_empty() || name.len() > MOST_NAME_BYTES {
            return Err(refuse(format!("has a kind with a name of {} bytes", name.len())));
        }
        let long = provides.iter().any(|p| p.len() > MOST_NAME_BYTES);
        if provides.len() > MOST_KINDS || long {
            return Err(refuse(format!(
                "its kind `{name}` offers {} capabilities, or one with a name of over \
                 {MOST_NAME_BYTES} bytes",
                provides.len()
            )));
        }
    }
    Ok(())
}

/// An answer about a plugin that was built against another contract.
fn rebuild(what: &str, e: &ResourceError) -> ResourceError {
    let message = format!("{what}: {e}: rebuild the plugin against this version of resource-api");
    refuse(message).with_details(e.details())
}

/// While the contract is a draft, both sides must have the same interfaces and types.
fn check_contract(
    interfaces: &[InterfaceDesc],
    types: &[TypeDesc],
    fitting: &mut Fitting,
) -> Result<()> {
    let differs = |m: String| Err(ResourceError::new(ErrorKind::INCOMPATIBLE, m));
    for ours in INTERFACES {
        let Some(theirs) = interfaces.iter().find(|i| i.id == ours.id) else {
            return differs(format!("the plugin does not know the interface {}", ours.id));
        };
        let (have, expect) = (theirs.methods.len(), ours.methods.len());
        let (known, found) = (ours.methods.as_slice(), theirs.methods.as_slice());
        check_methods(ours.id.as_str(), known, found, fitting)?;
        if have != expect {
            return differs(format!("{}: {expect} methods here, {have} in the plugin", ours.id));
        }
    }
    for ours in TYPES {
        match types.iter().find(|t| t.tag == ours.tag) {
            Some(theirs) => fitting
                .check(ours.layout, theirs.layout)
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

#[cfg(test)]
mod tests {
    use super::super::root::{header, open_plugin};
    use super::*;
    use crate::spec::{EngineResourceInfo, NodeResourceSpec};
    use crate::{Resource, ResourceKind};
    use abi_stable::library::{CheckTypeLayout, RootModuleResult};

    struct Plain;
    impl Resource for Plain {}
    impl ResourceKind for Plain {
        type Spec = ();
        const KIND: &'static str = "plain";
        fn build(_: NodeResourceSpec<()>, _: &EngineResourceInfo) -> Result<Self> {
            Ok(Plain)
        }
    }

    /// A header whose constructor is `$open`.
    macro_rules! plugin {
        ($name:ident, $unwinds:expr, $kinds:expr) => {{
            extern "C" fn $name() -> RootModuleResult {
                open_plugin("test", "0.1.0", $unwinds, $kinds)
            }
            Box::leak(Box::new(header($name)))
        }};
    }

    fn refusal(header: &'static LibHeader) -> String {
        let e = open_root(header).unwrap_err();
        assert!(!e.message().contains('\n'), "{e}");
        e.message().to_string()
    }

    #[test]
    fn a_plugin_that_fits_is_opened() {
        let library = open_root(plugin!(good, true, || vec![crate::kind::<Plain>()])).unwrap();
        assert_eq!((library.name.as_str(), library.kinds.len()), ("test", 1));
        assert_eq!(library.kinds[0].kind(), "plain");
    }

    #[test]
    fn constructors_that_fail_are_refused_with_their_own_words() {
        let panics = plugin!(panics, true, || panic!("no GPU here"));
        let what = refusal(panics);
        assert!(what.starts_with("its constructor failed: "), "{what}");
        assert!(what.contains("panicked: no GPU here"), "{what}");
        let none = plugin!(none, true, Vec::new);
        assert_eq!(refusal(none), "exports 0 kinds; a plugin has 1 to 64");
        let many = plugin!(many, true, || (0..100_000).map(|_| crate::kind::<Plain>()).collect());
        assert_eq!(refusal(many), "exports 100000 kinds; a plugin has 1 to 64");
        let aborts = plugin!(aborts, false, || vec![crate::kind::<Plain>()]);
        assert!(refusal(aborts).starts_with("was built with panic=abort"));
    }

    #[test]
    fn kinds_with_absurd_names_are_refused() {
        struct Long;
        impl Resource for Long {}
        impl ResourceKind for Long {
            type Spec = ();
            const KIND: &'static str = match std::str::from_utf8(&[b'x'; 1000]) {
                Ok(name) => name,
                Err(_) => "",
            };
            fn build(_: NodeResourceSpec<()>, _: &EngineResourceInfo) -> Result<Self> {
                Ok(Long)
            }
        }
        let long = plugin!(long, true, || vec![crate::kind::<Long>()]);
        assert_eq!(refusal(long), "has a kind with a name of 1000 bytes");
    }

    #[test]
    fn a_header_without_a_layout_is_refused_before_its_constructor_runs() {
        extern "C" fn open() -> RootModuleResult {
            panic!("must not be called")
        }
        // SAFETY: the constructor is never called.
        let header =
            unsafe { LibHeader::from_constructor::<PluginRootRef>(open, CheckTypeLayout::No) };
        let what = refusal(Box::leak(Box::new(header)));
        assert!(what.starts_with("carries no layout description"), "{what}");
    }
}
