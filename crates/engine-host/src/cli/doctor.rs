//! `engine-host plugin doctor`: every stage that a plugin goes through, and how it fared; and
//! `plugin trust`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use super::ConfigArg;
use crate::discovery::lock::{Lock, Locked};
use crate::discovery::{self, Discovered, Options, State};
use crate::document;
use crate::error::{Error, ErrorKind, Result};
use crate::probe::{self, Probe};
use crate::{registry, setup};

/// What one stage said.
struct Stage {
    name: &'static str,
    /// What was found, or why the plugin is refused.
    outcome: std::result::Result<String, String>,
    /// What there is to read beside it.
    details: String,
}

/// Examines plugins and prints what was found; a failure if one is refused.
pub fn doctor(
    config: &ConfigArg,
    paths: &[PathBuf],
    as_json: bool,
    verbose: bool,
) -> Result<ExitCode> {
    let found = select(config, paths)?;
    for line in registry::environment() {
        note!("warning: {line}");
    }
    let mut refused = 0;
    let mut all = Vec::new();
    for plugin in &found {
        let stages = examine(plugin);
        refused += usize::from(stages.iter().any(|s| s.outcome.is_err()));
        match as_json {
            true => all.push(to_json(plugin, &stages)),
            false => print(plugin, &stages, verbose),
        }
    }
    match as_json {
        true => say!("{}", Value::Array(all)),
        false => say!("{}", summary(&found, refused)),
    }
    Ok(ExitCode::from(u8::from(refused > 0)))
}

fn summary(found: &[Discovered], refused: usize) -> String {
    let disabled = found.iter().filter(|p| p.state == State::Disabled).count();
    let usable = found.len() - refused - disabled;
    format!("{usable} of {} can be used; {refused} refused, {disabled} disabled", found.len())
}

/// Takes every plugin that passes all checks before loading into its directory's lock.
pub fn trust(config: &ConfigArg) -> Result<ExitCode> {
    let config = config.load()?;
    let set = setup::discovery_options(&config);
    // What is trusted is not probed later: that happens now, whatever the manifest pins.
    let probe = if set.probe == Probe::Never { Probe::Never } else { Probe::Always };
    let options = Options { use_lock: false, probe, ..set };
    let discovery = discovery::discover(&config.engine.plugin_dirs, &options)?;
    for dir in &config.engine.plugin_dirs {
        let real = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
        let mut locked = Vec::new();
        for plugin in discovery.plugins.iter().filter(|p| p.directory() == real) {
            match lock_entry(plugin) {
                Ok(entry) => {
                    say!("trusted  {}  {}", entry.library_sha256, document::shown(&plugin.path));
                    locked.push(entry);
                }
                Err(why) => note!("left out {}: {why}", document::shown(&plugin.path)),
            }
        }
        Lock::new(locked).write(&real).map_err(|e| {
            let message = format!("cannot write the lock of {}: {e}", document::shown(dir));
            Error::new(ErrorKind::Internal, message)
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

fn lock_entry(plugin: &Discovered) -> std::result::Result<Locked, String> {
    if let State::Refused(why) = &plugin.state {
        return Err(why.clone());
    }
    let checked = registry::check(plugin)?;
    // Of what was read and checked, not of what may lie there by now.
    let manifest = plugin.manifest_sha256.ok_or("its manifest could not be read")?;
    Ok(Locked {
        name: plugin.name(),
        manifest: plugin.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        manifest_sha256: manifest.to_string(),
        library_sha256: checked.sha256.to_string(),
    })
}

/// The plugins that `paths` name: directories, manifests, or libraries beside a manifest. Without
/// any, those of the configuration.
fn select(config: &ConfigArg, paths: &[PathBuf]) -> Result<Vec<Discovered>> {
    let mut config = config.load()?;
    if paths.is_empty() {
        return Ok(setup::discover(&config)?.plugins);
    }
    let mut all = Vec::new();
    for path in paths {
        let is_dir = path.is_dir();
        let parent =
            || path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = if is_dir { path } else { parent() };
        config.engine.plugin_dirs = vec![dir.to_path_buf()];
        let name = path.file_name();
        let is_meant = |p: &Discovered| {
            is_dir
                || p.path.file_name() == name
                || p.library_path().is_some_and(|library| library.file_name() == name)
        };
        let before = all.len();
        all.extend(setup::discover(&config)?.plugins.into_iter().filter(is_meant));
        if all.len() == before {
            let what = match (is_dir, path.exists()) {
                (true, _) => "no manifest (*.toml) is in it",
                (_, false) => "does not exist",
                _ => {
                    "no manifest beside it names it; a plugin is a library with a manifest beside it"
                }
            };
            return Err(Error::usage(format!("{}: {what}", document::shown(path))));
        }
    }
    Ok(all)
}

/// Puts a plugin through every stage, up to the first that refuses it.
fn examine(plugin: &Discovered) -> Vec<Stage> {
    let mut stages = Vec::new();
    let mut stage = |name, outcome: std::result::Result<String, String>| {
        let went_well = outcome.is_ok();
        stages.push(Stage { name, outcome, details: String::new() });
        went_well
    };
    let manifest = match (&plugin.state, &plugin.manifest) {
        (State::Refused(_), _) | (_, None) => Err(plugin.problems.to_string()),
        (State::Disabled, Some(_)) => Ok("disabled (enabled = false)".into()),
        (State::Usable, Some(m)) => Ok(format!(
            "{} {}, contract {}, kinds {}",
            m.name,
            m.version,
            m.api,
            m.kinds.join(", ")
        )),
    };
    if !stage("manifest", manifest) || plugin.state == State::Disabled {
        return stages;
    }
    let checked = match plugin.check_library() {
        Ok(checked) => checked,
        Err(e) => {
            stage("file", Err(e.reason));
            return stages;
        }
    };
    let size = checked.file.metadata().map_or(0, |m| m.len());
    let pin = if plugin.is_pinned() { "pinned" } else { "not pinned" };
    let mut found = vec![format!("{size} bytes, sha256 {} ({pin})", checked.sha256)];
    found.extend(checked.warnings.iter().map(|warning| format!("warning: {warning}")));
    stage("file", Ok(found.join("\n")));
    let note = match &checked.note {
        None => Err("carries no RESAPI note: is it built with export_plugin!?".to_owned()),
        Some(note) => registry::check_note(plugin, note).map(|()| {
            let cpu = match note.features.is_empty() {
                true => "any CPU of its kind".to_owned(),
                false => format!("a CPU with {}", note.features.join(", ")),
            };
            let profile = if note.profile.is_empty() { "unknown" } else { &note.profile };
            format!(
                "{}, by {} ({profile}), panic={}, for {cpu}",
                note.plugin, note.rustc, note.panic
            )
        }),
    };
    if !stage("note", note) {
        return stages;
    }
    let probed = probe::probe(&checked);
    let text = |took: std::time::Duration| format!("a child process loads it in {took:.1?}");
    if !stage("probe", probed.map(text)) {
        return stages;
    }
    let listed = registry::inspect(plugin);
    stage(
        "load",
        match listed.reason {
            Some(reason) => Err(reason),
            None => Ok(format!(
                "provides {}",
                crate::suggest::listed(listed.provides.iter().map(String::as_str))
            )),
        },
    );
    if let Some(last) = stages.last_mut() {
        last.details = listed.details;
    }
    stages
}

fn print(plugin: &Discovered, stages: &[Stage], verbose: bool) {
    say!("{}", document::shown(&plugin.path));
    for Stage { name, outcome, details } in stages {
        let (mark, text) = match outcome {
            Ok(text) => ("ok", text),
            Err(text) => ("refused", text),
        };
        for (i, line) in text.lines().enumerate() {
            let mark = if i == 0 { mark } else { "" };
            say!("  {name:<9} {mark:<8} {line}");
        }
        if verbose {
            details.lines().for_each(|line| say!("      {line}"));
        }
    }
}

fn to_json(plugin: &Discovered, stages: &[Stage]) -> Value {
    let stages = stages.iter().map(|s| {
        let (key, text) = match &s.outcome {
            Ok(text) => ("found", text),
            Err(text) => ("refused", text),
        };
        json!({ "stage": s.name, key: text })
    });
    json!({ "manifest": document::shown(&plugin.path), "stages": stages.collect::<Vec<_>>() })
}
