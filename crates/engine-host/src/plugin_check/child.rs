//! The process in which a plugin is loaded and tried.

use std::io::Write as _;
use std::path::PathBuf;

use resource_api::Kind;
use resource_testkit::check::{Options, check_kind};
use serde_json::{Value, json};

use super::subject::{self, Settings};
use crate::discovery;
use crate::error::{Error, Result};
use crate::manifest::ApiVersion;
use crate::probe::Probe;
use crate::registry::{PluginFile, load_file};

/// What to check.
#[derive(Clone, Debug)]
pub struct Request {
    /// The plugin, by its library or its manifest.
    pub file: PathBuf,
    /// Only this kind of it.
    pub kind: Option<String>,
    /// TOML of the resource under check; see `Settings`.
    pub settings: String,
    /// Plugins for what it is built on.
    pub with: Vec<PathBuf>,
    /// How much to try.
    pub options: Options,
    /// Leave out kinds before this one.
    pub first: usize,
}

fn tell(line: &Value) {
    let mut out = crate::output::out();
    // Whoever reads has gone: then nobody wants the rest either.
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

fn begin(what: &str) {
    tell(&json!({ "begin": what }));
}

/// Checks, and says on standard output how it goes. Ends with `{"done": true}`.
pub fn run(request: &Request) {
    if let Err(e) = try_run(request) {
        let key = if e.exit_code() == 2 { "usage" } else { "refused" };
        tell(&json!({ key: e.to_string() }));
    }
    tell(&json!({ "done": true }));
}

fn try_run(request: &Request) -> Result<()> {
    let settings = Settings::parse(&request.settings)?;
    let plugin = load(&request.file)?;
    let others = request.with.iter().map(|path| load(path)).collect::<Result<Vec<_>>>()?;
    if plugin.manifest.is_none() && request.first == 0 {
        let note = "no manifest beside the file names it: nothing to compare it with";
        tell(&json!({ "note": note }));
    }
    let names: Vec<String> = plugin.kinds.iter().map(Kind::kind).collect();
    let wanted = |name: &String| request.kind.as_ref().is_none_or(|k| k == name);
    if let Some(kind) = request.kind.as_ref().filter(|k| !names.contains(k)) {
        return Err(Error::usage(format!(
            "--kind {kind}: {} builds {}",
            plugin.name,
            crate::suggest::listed(names.iter().map(String::as_str))
        )));
    }
    if !settings.is_empty() && names.iter().filter(|n| wanted(n)).count() > 1 {
        return Err(Error::usage(format!(
            "--settings are those of one kind, and {} builds {}: say which with --kind",
            plugin.name,
            crate::suggest::listed(names.iter().map(String::as_str))
        )));
    }
    for (index, kind) in plugin.kinds.iter().enumerate().skip(request.first) {
        if !wanted(&names[index]) {
            continue;
        }
        tell(&json!({ "kind": names[index], "index": index }));
        let subject = subject::make(kind, &settings, &plugin, &others, begin)?;
        let report = check_kind(&subject, &Options { watch: begin, ..request.options });
        tell(&json!({ "text": report.to_string(), "report": report.to_json() }));
    }
    Ok(())
}

fn load(path: &std::path::Path) -> Result<PluginFile> {
    begin(&format!("load {}", path.display()));
    let api =
        ApiVersion::parse(resource_api::API_VERSION).unwrap_or(ApiVersion { major: 1, minor: 0 });
    // This process is the one that may come to harm.
    let probe = Probe::Never;
    load_file(path, &discovery::Options { strict: false, api, probe, use_lock: false })
}
