//! One plugin by the path of its file or of its manifest, for tools that look at a single one.

use std::fs;
use std::path::{Path, PathBuf};

use resource_api::KindHandle;

use super::{load_once, open};
use crate::discovery::policy::Policy;
use crate::discovery::{self, Discovered, Options, State};
use crate::document;
use crate::elf;
use crate::error::{Error, ErrorKind, Result};

/// A plugin that was loaded.
#[derive(Debug)]
pub struct PluginFile {
    /// Its name: the manifest's, or that of its crate.
    pub name: String,
    /// Its kinds, in the order in which it exports them.
    pub kinds: Vec<KindHandle>,
    /// The manifest that it was compared with; `None` where the file has none beside it.
    pub manifest: Option<PathBuf>,
}

/// Loads a plugin by the path of its manifest (`.toml`) or of its library. A library is compared with
/// the manifest beside it that names it, if there is one. All checks of loading apply.
///
/// # Errors
/// Why it is refused, in one line.
pub fn load_file(path: &Path, options: &Options) -> Result<PluginFile> {
    let refused = |reason: String| Error::new(ErrorKind::Invalid, reason);
    let metadata = fs::metadata(path)
        .map_err(|e| Error::new(ErrorKind::NotFound, format!("{}: {e}", document::shown(path))))?;
    if !metadata.is_file() {
        return Err(Error::usage(format!("{} is not a file", document::shown(path))));
    }
    let found = match path.extension().is_some_and(|e| e == "toml") {
        true => Some(discovery::discover_one(path, options)?),
        false => manifest_of(path, options)?,
    };
    if let Some(found) = found {
        if let State::Refused(reason) = &found.state {
            return Err(refused(reason.clone()));
        }
        let library = open(&found).map_err(|why| refused(why.reason))?;
        let (name, manifest) = (found.name(), Some(found.path));
        return Ok(PluginFile { name, kinds: library.kinds, manifest });
    }
    let unusable = |reason: String| refused(format!("{}: {reason}", document::shown(path)));
    let policy = Policy::of_directory(directory_of(path), options.strict);
    let policy = policy.map_err(|e| unusable(format!("its directory {e}")))?;
    let checked = elf::check_file(path, &policy, None).map_err(|e| refused(e.to_string()))?;
    let note = checked.note.as_ref().ok_or_else(|| unusable("is not a resource plugin".into()))?;
    note.check().map_err(unusable)?;
    let library = load_once(checked).map_err(|e| unusable(e.to_string()))?;
    Ok(PluginFile { name: library.name, kinds: library.kinds, manifest: None })
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The manifest beside a library that names it.
fn manifest_of(library: &Path, options: &Options) -> Result<Option<Discovered>> {
    let own = fs::canonicalize(library).ok();
    let entries = fs::read_dir(directory_of(library)).into_iter().flatten().flatten();
    let mut manifests: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    manifests.sort();
    for manifest in manifests {
        let found = discovery::discover_one(&manifest, options)?;
        let theirs = found.library_path().and_then(|p| fs::canonicalize(p).ok());
        if theirs.is_some() && theirs == own {
            return Ok(Some(found));
        }
    }
    Ok(None)
}
