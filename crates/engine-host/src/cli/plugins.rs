//! `engine-host plugin list`.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{ConfigArg, ListArgs};
use crate::document;
use crate::engine::Engine;
use crate::error::Result;
use crate::registry::{self, Listed};
use crate::request::GenerateRequest;
use crate::setup;
use crate::watch::ResourceUsage;

/// Tries every manifest and prints what became of it. A refused plugin is no failure of the
/// command: the list is what was asked for.
pub fn list(args: &ListArgs) -> Result<ExitCode> {
    let discovery = setup::discover(&args.config.load()?)?;
    let listed: Vec<Listed> = discovery.plugins.iter().map(registry::inspect).collect();
    let usage = args.stats.then(|| usage(&args.config)).transpose()?;
    if args.json {
        let all = listed.iter().map(|l| to_json(l, usage.as_deref())).collect();
        say!("{}", Value::Array(all));
        return Ok(ExitCode::SUCCESS);
    }
    for listed in &listed {
        print(listed, args.verbose);
        if let Some(usage) = &usage {
            print_usage(listed, usage);
        }
    }
    if listed.is_empty() {
        say!("no manifests found; `cargo xtask build` installs the plugins of this repository");
    }
    Ok(ExitCode::SUCCESS)
}

/// Tokens of the request that `--stats` runs, and how many more it asks for.
const PROMPT: usize = 16;
const TOKENS: u32 = 16;

/// Runs a short request through the configured engine, and tells what every resource has taken.
fn usage(config: &ConfigArg) -> Result<Vec<ResourceUsage>> {
    let mut engine: Engine = setup::load(&config.load()?, &mut |_, _| {})?.engine;
    let prompt = vec![0; PROMPT];
    let request = GenerateRequest {
        prompt,
        max_tokens: TOKENS,
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    engine.submit(request)?;
    while !engine.is_idle() {
        engine.step();
    }
    Ok(engine.usage())
}

fn of<'a>(
    listed: &'a Listed,
    usage: &'a [ResourceUsage],
) -> impl Iterator<Item = &'a ResourceUsage> {
    usage.iter().filter(|u| u.plugin == listed.name)
}

fn to_json(listed: &Listed, usage: Option<&[ResourceUsage]>) -> Value {
    let mut entry = json!({
        "name": listed.name,
        "version": listed.version,
        "manifest": document::shown(&listed.manifest),
        "state": listed.state,
        "kinds": listed.kinds,
        "provides": listed.provides,
        "reason": listed.reason,
    });
    if !listed.details.is_empty() {
        entry["details"] = listed.details.clone().into();
    }
    if let Some(usage) = usage {
        entry["load_ms"] = (listed.took.as_secs_f64() * 1e3).into();
        entry["resources"] = of(listed, usage).map(usage_json).collect();
    }
    entry
}

fn usage_json(u: &ResourceUsage) -> Value {
    json!({
        "key": u.key,
        "kind": u.kind,
        "calls": u.calls,
        "seconds": u.time.as_secs_f64(),
        "bytes": u.bytes,
        "most_bytes": u.most_bytes,
        "panics": u.panics,
        "bad_values": u.bad_values,
        "restarts": u.restarts,
        "state": state(u),
    })
}

fn state(u: &ResourceUsage) -> &'static str {
    if u.is_faulted { "out of use" } else { "in use" }
}

fn print(listed: &Listed, verbose: bool) {
    let kinds = listed.kinds.join(", ");
    say!("{:<24} {:<9} {:<9} {kinds}", listed.name, listed.version, listed.state);
    if let Some(reason) = &listed.reason {
        say!("    {reason}");
    }
    if verbose {
        listed.details.lines().for_each(|line| say!("      {line}"));
    }
}

fn print_usage(listed: &Listed, usage: &[ResourceUsage]) {
    if listed.state == "loaded" {
        say!("    checked and loaded in {:.1?}", listed.took);
    }
    for u in of(listed, usage) {
        let time = format!("{:.1?}", u.time);
        let mib = u.bytes as f64 / f64::from(1 << 20);
        say!(
            "    {:<16} {:>7} calls {time:>9}  {mib:>9.1} MiB  {} panics, {} bad values, {} restarts, {}",
            u.key,
            u.calls,
            u.panics,
            u.bad_values,
            u.restarts,
            state(u)
        );
    }
}
