//! `bench load`: from the start of the process to resources that are built.

use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::child;
use super::kinds::MEASURED;
use super::machine;
use super::record::number;
use super::rig::{Geometry, limits, wanted};
use super::sections::Section;
use super::stats::Summary;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::registry::Registry;
use crate::resources::{BuildInfo, ResourceSet};
use crate::services::Services;
use crate::setup;

/// Tells a child when it was started, in nanoseconds since 1970.
const STARTED: &str = "ENGINE_HOST_BENCH_STARTED";

/// As large as the resources of the default configuration.
const GEOMETRY: Geometry = Geometry { pages: 4096, max_batch: 64, max_len: 8192 };

/// Starts this program anew, again and again, and tells how long the stages of loading took.
///
/// # Errors
/// When a child fails.
pub fn run(config: Option<&Path>, quick: bool) -> Result<Value> {
    let program = std::env::current_exe()
        .map_err(|e| Error::new(ErrorKind::Internal, format!("no path of this program: {e}")))?;
    let config = config.map(|path| path.display().to_string());
    let mut args = vec!["bench", "load", "--once"];
    args.extend(config.iter().flat_map(|path| ["--config", path.as_str()]));
    let mut stages: Vec<(String, Vec<u64>)> = Vec::new();
    for n in 0..if quick { 6 } else { 22 } {
        let started = now().to_string();
        let results = child::results(&program, &args, &[(STARTED, &started)])?;
        let once = results.first().and_then(Value::as_object);
        // The first finds files that are not in memory yet.
        for (name, nanos) in once.into_iter().flatten().filter(|_| n > 1) {
            let nanos = nanos.as_u64().unwrap_or(0);
            match stages.iter_mut().find(|(known, _)| known == name) {
                Some((_, samples)) => samples.push(nanos),
                None => stages.push((name.clone(), vec![nanos])),
            }
        }
    }
    let us = stages
        .iter_mut()
        .map(|(name, samples)| (name.clone(), Summary::of(samples, 1.0).to_json()));
    let us: Map<String, Value> = us.collect();
    Ok(json!({
        "bench": "load",
        "what": "process start to resources",
        "us": us,
        "machine": machine::describe("plugins"),
    }))
}

/// The stages of this process, in nanoseconds.
///
/// # Errors
/// Whatever goes wrong when plugins are loaded.
pub fn once(config: impl FnOnce() -> Result<Config>) -> Result<Value> {
    let entered = now();
    let clock = Instant::now();
    let mut stages = Map::new();
    let mut last = 0;
    let mut stage = |name: &str, clock: &Instant| {
        let at = clock.elapsed().as_nanos() as u64;
        stages.insert(name.into(), json!(at - last));
        last = at;
    };
    let config = config()?;
    stage("configuration", &clock);
    let discovery = setup::discover(&config)?;
    stage("plugins found", &clock);
    let registry = Registry::load(&discovery, Some(&MEASURED));
    stage("checked and loaded", &clock);
    let info = BuildInfo {
        device: resource_api::Device::CPU,
        kv_dtype: resource_api::DType::BF16,
        needs_remote_transfer: false,
        batch_invariant: false,
        transfer: None,
        limits: limits(GEOMETRY),
    };
    let services = Services::new(config.engine.threads, 1 << 40);
    stage("services", &clock);
    let set = ResourceSet::build(&registry, wanted(GEOMETRY), &info, services)?;
    stage("built", &clock);
    let ready = clock.elapsed().as_nanos() as u64;
    // Once more by itself, with the files in the processor's caches.
    for plugin in &discovery.plugins {
        let wanted = |kinds: &[String]| kinds.iter().any(|k| MEASURED.contains(&k.as_str()));
        if plugin.manifest.as_ref().is_some_and(|m| wanted(&m.kinds)) {
            plugin.check_library()?;
        }
    }
    stage("checks alone", &clock);
    drop(set);
    let started = std::env::var(STARTED).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(started) = started {
        let before = entered.saturating_sub(started);
        stages.insert("process".into(), json!(before));
        stages.insert("all".into(), json!(before + ready));
    }
    Ok(Value::Object(stages))
}

const SECTION: Section = Section { name: "load time", command: "load" };

/// Writes the result into `docs/performance.md`.
///
/// # Errors
/// When the file cannot be written.
pub fn report(docs: &Path, result: &Value) -> Result<()> {
    let stages = result["us"].as_object().into_iter().flatten().map(|(name, _)| {
        let ms = |percentile| number(result, name, percentile).unwrap_or(0.0) / 1e3;
        format!("| {name} | {:.2} | {:.2} |\n", ms("median"), ms("p90"))
    });
    let text = format!(
        "## Loading plugins\n\nFrom the start of the process to built resources, in fresh processes; `process` \
         is what passes before `main`, and `checks alone` is part of `checked and loaded`, once more. Measured \
         on {}.\n\n| stage | median, ms | p90, ms |\n|---|---|---|\n{}",
        machine::in_words(&result["machine"]),
        stages.collect::<String>(),
    );
    SECTION.write(docs, &text)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}
