//! `engine-host plugin list`.

use std::process::ExitCode;

use serde_json::json;

use super::ConfigArg;
use crate::error::Result;
use crate::registry::{self, Listed};
use crate::setup;

/// Tries every manifest and prints what became of it. A refused plugin is no failure of the
/// command: the list is what was asked for.
pub fn list(config: &ConfigArg, as_json: bool) -> Result<ExitCode> {
    let discovery = setup::discover(&config.load()?)?;
    let listed: Vec<Listed> = discovery.plugins.iter().map(registry::inspect).collect();
    match as_json {
        true => say!("{}", serde_json::Value::Array(listed.iter().map(to_json).collect())),
        false => listed.iter().for_each(print),
    }
    if listed.is_empty() && !as_json {
        say!("no manifests found; `cargo xtask build` installs the plugins of this repository");
    }
    Ok(ExitCode::SUCCESS)
}

fn to_json(listed: &Listed) -> serde_json::Value {
    json!({
        "name": listed.name,
        "version": listed.version,
        "manifest": listed.manifest,
        "state": listed.state,
        "kinds": listed.kinds,
        "provides": listed.provides,
        "reason": listed.reason,
    })
}

fn print(listed: &Listed) {
    let kinds = listed.kinds.join(", ");
    say!("{:<24} {:<9} {:<9} {kinds}", listed.name, listed.version, listed.state);
    if let Some(reason) = &listed.reason {
        say!("    {reason}");
    }
}
