//! Finds plugins: scans the plugin directories for manifests, without opening any library.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::document::{self, Problem, Problems};
use crate::elf::{self, CheckedFile, LibraryError, Sha256Digest};
use crate::error::{Error, Result};
use crate::manifest::{ApiVersion, MAX_MANIFEST_BYTES, Manifest};
use crate::probe::Probe;
use crate::suggest;

pub mod lock;
mod needs;
pub mod policy;

use lock::Lock;
use policy::Policy;

/// Most manifests of a directory.
const MOST_MANIFESTS: usize = 1024;

/// What the scan depends on beside the directories.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The strict directory rules, see [`policy`].
    pub strict: bool,
    /// The contract's version in this host; plugins built against another major are refused.
    pub api: ApiVersion,
    /// Which plugins are loaded in a child process first.
    pub probe: Probe,
    /// Whether `plugins.lock` of a directory is obeyed; `false` only to write it anew.
    pub use_lock: bool,
}

/// What became of one manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The library may be checked and loaded.
    Usable,
    /// `enabled = false`.
    Disabled,
    /// Not to be used; the reason in one line, with the manifest's path.
    Refused(String),
}

/// One manifest found.
#[derive(Debug, Clone)]
pub struct Discovered {
    /// Path of the manifest.
    pub path: PathBuf,
    /// Its content; `None` where it could not be understood.
    pub manifest: Option<Manifest>,
    /// Whether the plugin can be used.
    pub state: State,
    /// Every problem of the manifest, each with its place; the state's reason is their short form.
    pub problems: Problems,
    /// Digest of the manifest as it was read; `None` where it could not be.
    pub manifest_sha256: Option<Sha256Digest>,
    policy: Policy,
    probe: Probe,
    locked: Option<Sha256Digest>,
}

impl Discovered {
    /// The plugin's name; the manifest's file name where it could not be understood.
    pub fn name(&self) -> String {
        match &self.manifest {
            Some(manifest) => manifest.name.clone(),
            None => document::shown(Path::new(self.path.file_stem().unwrap_or_default())),
        }
    }

    /// Where the library for this CPU lies: absolute, beside the manifest. `None` without a manifest.
    pub fn library_path(&self) -> Option<PathBuf> {
        let manifest = self.manifest.as_ref()?;
        Some(self.policy.directory().join(manifest.build().0))
    }

    /// The directory that it lies in, without symbolic links.
    pub fn directory(&self) -> &Path {
        self.policy.directory()
    }

    /// Whether the manifest or the lock says what the library's content must be.
    pub fn is_pinned(&self) -> bool {
        self.locked.is_some() || self.manifest.as_ref().is_some_and(|m| m.build().1.is_some())
    }

    /// Whether the library is to be loaded in a child process first.
    pub fn needs_probe(&self) -> bool {
        match self.probe {
            Probe::Always => true,
            Probe::Unpinned => !self.is_pinned(),
            Probe::Never => false,
        }
    }

    /// Opens the library and runs all checks of the file stage, the manifest's pin among them.
    /// Plugins that are not [`State::Usable`] are not opened.
    pub fn check_library(&self) -> Result<CheckedFile, LibraryError> {
        let refuse = |reason: &str| LibraryError { path: self.path.clone(), reason: reason.into() };
        match (&self.state, &self.manifest, self.library_path()) {
            (State::Usable, Some(manifest), Some(library)) => {
                let checked = elf::check_file(&library, &self.policy, manifest.build().1)?;
                match self.locked.filter(|locked| *locked != checked.sha256) {
                    None => Ok(checked),
                    Some(_) => Err(LibraryError {
                        path: library,
                        reason: format!(
                            "is not the build that {} names: {}",
                            lock::LOCK_FILE,
                            lock::TRUST
                        ),
                    }),
                }
            }
            (State::Refused(_), ..) => {
                Err(refuse(self.problems.0.first().map_or("refused", |p| &p.message)))
            }
            _ => Err(refuse("the plugin is disabled (enabled = false)")),
        }
    }

    fn refuse(&mut self, reason: String) {
        self.problems.0.push(Problem::of_file(document::shown(&self.path), reason));
        self.state = State::Refused(self.problems.one_line());
    }
}

/// The result of a scan: every manifest, by directory as configured and then by file name.
#[derive(Debug, Clone, Default)]
pub struct Discovery {
    /// Every manifest found.
    pub plugins: Vec<Discovered>,
}

/// Scans `dirs` (not their subdirectories) for files named `*.toml`; hidden files are skipped.
///
/// A directory that is missing, unreadable, no directory or open to strangers is an error, all of
/// them reported together. A bad manifest is none: it is listed as refused, the others work.
pub fn discover(dirs: &[PathBuf], options: &Options) -> Result<Discovery> {
    let mut problems = Vec::new();
    let mut plugins: Vec<Discovered> = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        match scan(dir, options.strict) {
            Err(reason) => problems
                .push(Problem::of_file(document::shown(dir), format!("plugin directory {reason}"))),
            // One directory under two names is not two plugins.
            Ok((policy, _)) if seen.iter().any(|known| known == policy.directory()) => {}
            Ok((policy, manifests)) => {
                seen.push(policy.directory().to_owned());
                let lock = match options.use_lock {
                    true => Lock::read(&policy),
                    false => Ok(None),
                };
                match lock {
                    Ok(lock) => plugins.extend(
                        manifests.into_iter().map(|p| inspect(p, &policy, options, lock.as_ref())),
                    ),
                    Err(reason) => {
                        problems.push(Problem::of_file(document::shown(dir), reason));
                    }
                }
            }
        }
    }
    if !problems.is_empty() {
        return Err(Error::Discovery(Problems(problems)));
    }
    refuse_duplicates(&mut plugins);
    needs::refuse_unmet(&mut plugins);
    needs::refuse_cycles(&mut plugins);
    Ok(Discovery { plugins })
}

/// One manifest by its path, whatever else lies in its directory, `plugins.lock` included.
///
/// # Errors
/// As for [`discover`], about the manifest's directory.
pub fn discover_one(manifest: &Path, options: &Options) -> Result<Discovered> {
    let directory = match manifest.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let policy = Policy::of_directory(directory, options.strict).map_err(|reason| {
        let what = format!("plugin directory {reason}");
        Error::Discovery(Problems(vec![Problem::of_file(document::shown(directory), what)]))
    })?;
    Ok(inspect(manifest.to_owned(), &policy, options, None))
}

/// The rules of a directory and its manifests in the order of their names' bytes.
fn scan(dir: &Path, strict: bool) -> Result<(Policy, Vec<PathBuf>), String> {
    let policy = Policy::of_directory(dir, strict)?;
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let is_toml = Path::new(&name).extension().is_some_and(|ext| ext == "toml");
        if is_toml && !name.as_encoded_bytes().starts_with(b".") {
            names.push(name);
        }
        if names.len() > MOST_MANIFESTS {
            return Err(format!("has more than {MOST_MANIFESTS} manifests"));
        }
    }
    names.sort();
    Ok((policy, names.into_iter().map(|name| dir.join(name)).collect()))
}

fn inspect(path: PathBuf, policy: &Policy, options: &Options, lock: Option<&Lock>) -> Discovered {
    let mut found = Discovered {
        path,
        manifest: None,
        state: State::Usable,
        problems: Problems::default(),
        manifest_sha256: None,
        policy: policy.clone(),
        probe: options.probe,
        locked: None,
    };
    let opened = policy.check_link(&found.path).and_then(|()| {
        let file = document::open_regular(&found.path)
            .map_err(|error| format!("cannot be read: {error}"))?;
        policy.check_open_file(&file).map(|()| file)
    });
    let file = match opened {
        Ok(file) => file,
        Err(reason) => {
            found.refuse(reason);
            return found;
        }
    };
    let text = match document::read_text_from(&file, &found.path, MAX_MANIFEST_BYTES) {
        Ok(text) => text,
        Err(problem) => {
            found.problems = problem.into();
            found.state = State::Refused(found.problems.one_line());
            return found;
        }
    };
    let digest = lock::digest_of(text.as_bytes());
    found.manifest_sha256 = Some(digest);
    match lock.map(|lock| lock.library_of(&found.path, digest)).transpose() {
        Ok(locked) => found.locked = locked,
        Err(reason) => {
            found.refuse(reason);
            return found;
        }
    }
    match Manifest::parse(&document::shown(&found.path), &text) {
        Err(error) => {
            found.state = match error.disabled {
                true => State::Disabled,
                false => State::Refused(error.problems.one_line()),
            };
            found.problems = error.problems;
        }
        Ok(manifest) => {
            let enabled = manifest.enabled;
            let refused = manifest_refusal(&manifest, policy, options);
            found.manifest = Some(manifest);
            match refused {
                _ if !enabled => found.state = State::Disabled,
                Some(reason) => found.refuse(reason),
                None => {}
            }
        }
    }
    found
}

/// Why an enabled plugin with a sound manifest cannot be used nevertheless.
fn manifest_refusal(manifest: &Manifest, policy: &Policy, options: &Options) -> Option<String> {
    if manifest.api.major != options.api.major {
        let newer = manifest.api.major > options.api.major;
        return Some(format!(
            "built against contract {}, this host speaks {}: {}",
            manifest.api,
            options.api,
            if newer { "update the host" } else { "rebuild the plugin" }
        ));
    }
    if !manifest.enabled {
        return None;
    }
    // Only a look at the directory: the library is opened when it is loaded.
    let library = manifest.build().0;
    match fs::metadata(policy.directory().join(library)) {
        Ok(metadata) if metadata.is_file() => None,
        Ok(_) => Some(format!("library {library:?} is not a regular file")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Some(format!("library {library:?} does not exist beside the manifest"))
        }
        Err(error) => Some(format!("library {library:?} cannot be read: {error}")),
    }
}

/// Two usable plugins of one name or kind are both refused: which one was meant is for the operator
/// to say, by disabling the other.
fn refuse_duplicates(plugins: &mut [Discovered]) {
    let mut claims: BTreeMap<(&str, String), Vec<usize>> = BTreeMap::new();
    for (i, plugin) in plugins.iter().enumerate() {
        let Some(manifest) = plugin.manifest.as_ref().filter(|_| plugin.state == State::Usable)
        else {
            continue;
        };
        claims.entry(("name", manifest.name.clone())).or_default().push(i);
        for kind in &manifest.kinds {
            claims.entry(("kind", kind.clone())).or_default().push(i);
        }
    }
    for ((what, value), claimants) in claims {
        for &i in &claimants {
            let mut others: Vec<String> = claimants
                .iter()
                .filter(|&&other| other != i)
                .take(NAMED_CLAIMANTS)
                .map(|&other| document::shown(&plugins[other].path))
                .collect();
            match claimants.len() - 1 - others.len() {
                0 => {}
                more => others.push(format!("{more} more")),
            }
            if !others.is_empty() {
                let reason = format!(
                    "{what} {value:?} is claimed by {} too: set enabled = false in all but one",
                    others.join(", ")
                );
                plugins[i].refuse(reason);
            }
        }
    }
}

/// Others with the same claim that a message names.
const NAMED_CLAIMANTS: usize = 3;

impl Discovery {
    /// Plugins that may be loaded.
    pub fn usable(&self) -> impl Iterator<Item = (&Discovered, &Manifest)> {
        self.plugins
            .iter()
            .filter(|plugin| plugin.state == State::Usable)
            .filter_map(|plugin| Some((plugin, plugin.manifest.as_ref()?)))
    }

    /// The kinds that can be built, in alphabetical order, each with its plugin.
    pub fn kinds(&self) -> BTreeMap<&str, &Discovered> {
        self.usable()
            .flat_map(|(plugin, manifest)| manifest.kinds.iter().map(move |k| (&**k, plugin)))
            .collect()
    }

    /// The plugin that builds `kind`; the error is one line that says which kinds there are, and
    /// why a plugin that would have it cannot be used.
    pub fn provider(&self, kind: &str) -> Result<&Discovered, String> {
        let kinds = self.kinds();
        if let Some(plugin) = kinds.get(kind) {
            return Ok(plugin);
        }
        let claims = |plugin: &&Discovered| {
            plugin
                .manifest
                .as_ref()
                .is_some_and(|manifest| manifest.kinds.iter().any(|k| k == kind))
        };
        if let Some(plugin) = self.plugins.iter().find(claims) {
            let why = match &plugin.state {
                State::Refused(reason) => format!("refused: {reason}"),
                _ => format!("disabled (enabled = false in {})", document::shown(&plugin.path)),
            };
            return Err(format!(
                "kind {kind:?} is offered by plugin {:?}, which is {why}",
                plugin.name()
            ));
        }
        let refused = self.plugins.iter().filter(|p| matches!(p.state, State::Refused(_))).count();
        let refused = match refused {
            0 => String::new(),
            n => format!("; {n} refused, see `engine-host plugin list`"),
        };
        Err(format!(
            "kind {kind:?} is offered by no plugin{} (kinds there are: {}{refused})",
            suggest::did_you_mean(kind, kinds.keys().copied()),
            suggest::listed(kinds.keys().copied()),
        ))
    }
}
