//! From a configuration to a running engine: plugins, model, resources, in this order of memory:
//! weights first, then the node's buffers, then pools from what is left.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use device::{Activations, PackOptions, Pool};
use model::{CudaDecoder, Decoder, ModelConfig, ModelPackage, Node};
use resource_api::{DType, Device, EngineLimits, NodeResourceSpec, TransferEngineInfo};
use serde_json::{Map, Value};

use crate::checkpoint::{self, Arithmetic};
use crate::compute::Compute;
use crate::config::{self, Config, Origin, ResourceConfig};
use crate::discovery::{self, Discovery};
use crate::document::{Problem, Problems};
use crate::engine::{Engine, ModelFacts};
use crate::error::{Error, ErrorKind, Result};
use crate::manifest::ApiVersion;
use crate::order;
use crate::registry::Registry;
use crate::resources::{BuildInfo, ResourceSet, Wanted};
use crate::services::Services;
use crate::suggest;

/// Share of the memory left after the model is loaded that resources may take.
const POOL_SHARE: f64 = 0.9;

/// Told how far the model's weights are loaded, in bytes done and in all.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

/// An engine with the model's text side.
pub struct Loaded {
    /// Runs requests.
    pub engine: Engine,
    /// Tokenizer and chat template.
    pub model: ModelPackage,
}

/// Finds the plugins of a configuration.
///
/// # Errors
/// All plugin directories that cannot be used.
pub fn discover(config: &Config) -> Result<Discovery> {
    discovery::discover(&config.engine.plugin_dirs, &discovery_options(config))
}

/// What a configuration says about finding plugins.
pub(crate) fn discovery_options(config: &Config) -> discovery::Options {
    let api =
        ApiVersion::parse(resource_api::API_VERSION).unwrap_or(ApiVersion { major: 1, minor: 0 });
    let (strict, probe) = (config.engine.strict, config.engine.probe);
    discovery::Options { strict, api, probe, use_lock: true }
}

/// Loads plugins and model and builds the engine.
///
/// # Errors
/// One line per problem, naming file and place where they are in the configuration.
pub fn load(config: &Config, progress: Progress<'_>) -> Result<Loaded> {
    let discovery = discover(config)?;
    let wanted: Vec<&str> = config.resources.values().map(|r| r.kind.as_str()).collect();
    let mut registry = Registry::load(&discovery, Some(&wanted));
    load_with(config, &mut registry, &discovery, progress)
}

/// Whether the plugins of a configuration can be loaded, offer its kinds, and are in an order that can
/// be built, and whether the model's file can be read. Nothing is computed, and no weights are loaded.
/// What a kind's own settings are worth is known only once the model is.
///
/// # Errors
/// As for [`load`].
pub fn check(config: &Config) -> Result<()> {
    let discovery = discover(config)?;
    let wanted: Vec<&str> = config.resources.values().map(|r| r.kind.as_str()).collect();
    let registry = Registry::load(&discovery, Some(&wanted));
    check_kinds(config, &registry, &discovery)?;
    order::build_order(&config.declared_dependencies())?;
    max_model_len(config, &open_model(&config.model.path)?)?;
    Ok(())
}

/// As [`load`], with random weights in the shape of a well-known model
/// ([`ModelConfig::PRESETS`]) on a CUDA device. Tokenizer and template are those of the configured
/// model, and what is generated means nothing: for measurements.
///
/// # Errors
/// As for [`load`]; an unknown name; a configuration for the CPU.
pub fn load_random(config: &Config, name: &str) -> Result<Loaded> {
    let Some(numbers) = ModelConfig::preset(name) else {
        let hint = suggest::did_you_mean(name, ModelConfig::PRESETS);
        let known = ModelConfig::PRESETS.join(", ");
        return Err(Error::usage(format!(
            "there are no random weights {name:?}{hint} (there are: {known})"
        )));
    };
    let discovery = discover(config)?;
    let wanted: Vec<&str> = config.resources.values().map(|r| r.kind.as_str()).collect();
    let mut registry = Registry::load(&discovery, Some(&wanted));
    build(config, &mut registry, &discovery, &mut |_, _| (), Some(numbers))
}

/// Like [`load`], with kinds of a registry: static engines and tests.
///
/// # Errors
/// As for [`load`].
pub fn load_with(
    config: &Config,
    registry: &mut Registry,
    discovery: &Discovery,
    progress: Progress<'_>,
) -> Result<Loaded> {
    build(config, registry, discovery, progress, None)
}

/// With `random`, weights of this shape take the place of the model's.
fn build(
    config: &Config,
    registry: &mut Registry,
    discovery: &Discovery,
    progress: Progress<'_>,
    random: Option<ModelConfig>,
) -> Result<Loaded> {
    check_kinds(config, registry, discovery)?;
    if let Some(level) = &config.engine.cpu_features {
        device::set_cpu_features(level).map_err(|e| Error::usage(e.to_string()))?;
    }
    let compute = match config.engine.device {
        config::Device::Cpu => None,
        config::Device::Cuda { ordinal } => Some(
            Compute::open(ordinal)
                .map_err(|e| Error::new(e.kind(), format!("{}: {e}", config.file)))?,
        ),
    };
    let mut model = open_model(&config.model.path)?;
    let is_random = random.is_some();
    model.config = random.unwrap_or(model.config);
    let max_model_len = max_model_len(config, &model)?;
    let limits = EngineLimits {
        max_batch: config.engine.max_batch as u32,
        max_batch_tokens: config.engine.max_batch_tokens as u32,
        max_model_len,
    };
    let (node, arithmetic) = match (is_random, &compute) {
        (false, _) => load_node(config, &model, compute.as_ref(), &limits, progress)?,
        (true, None) => return Err(Error::usage("random weights need device = \"cuda:N\"")),
        (true, Some(compute)) => {
            let decoder = CudaDecoder::random(&model.config, compute.context(), &limits);
            let decoder = decoder.map_err(of_model(&config.model.path))?;
            let decoder = with_settings(decoder, &config.engine);
            (Box::new(decoder) as Box<dyn Node>, Arithmetic::Cuda)
        }
    };
    let budget = (free_bytes() as f64 * POOL_SHARE) as u64;
    let compute = match compute {
        None => None,
        Some(compute) => {
            let free = compute.context().free_memory().map_err(|e| compute.failed(&e))?;
            Some((compute, (free as f64 * POOL_SHARE) as u64))
        }
    };
    let device = compute.as_ref().map_or(Device::CPU, |(compute, _)| compute.device());
    let services = Services::on_device(pool(&config.engine), budget, compute);
    let info = BuildInfo {
        device,
        kv_dtype: DType::parse(config.engine.kv_dtype.name()).unwrap_or(DType::BF16),
        needs_remote_transfer: config.engine.transfer != config::TransferEngine::Off,
        transfer: config.engine.transfer.name().map(|engine| TransferEngineInfo {
            engine: engine.into(),
            endpoint: config.engine.transfer_directory.to_string_lossy().into_owned(),
        }),
        limits,
        batch_invariant: config.engine.batch_invariant,
    };
    let wanted = specs(config, &*node)?;
    check_settings(config, registry, &wanted)?;
    let resources = Arc::new(ResourceSet::build(registry, wanted, &info, services.clone())?);
    let facts = ModelFacts {
        eos: model.tokenizer.eos_ids().to_vec(),
        vocab: model.config.vocab,
        identity: match is_random {
            true => *blake3::hash(b"random weights").as_bytes(),
            false => checkpoint::identity(&config.model.path, arithmetic)?,
        },
    };
    let mut engine = Engine::new(node, resources, services, facts, limits)?;
    engine.plan_ahead(config.engine.preplan)?;
    engine.run_ahead(config.engine.run_ahead);
    engine.set_relief(&config.engine.pressure);
    engine.set_victims(config.engine.victims.clone())?;
    engine.set_queue(config.engine.queue);
    let limit = Duration::from_secs(config.engine.watchdog);
    engine.watch_calls((!limit.is_zero()).then_some(limit))?;
    for (key, resource) in &config.resources {
        engine.set_on_fault(key, resource.on_fault);
    }
    Ok(Loaded { engine, model })
}

/// Puts the model where it is computed.
fn load_node(
    config: &Config,
    model: &ModelPackage,
    compute: Option<&Arc<Compute>>,
    limits: &EngineLimits,
    progress: Progress<'_>,
) -> Result<(Box<dyn Node>, Arithmetic)> {
    // The pool is made twice over: loading needs it before the budget is known.
    let pool = pool(&config.engine);
    let (numbers, weights) = (&model.config, &model.weights);
    let failed = of_model(&config.model.path);
    if let Some(compute) = compute {
        let context = compute.context();
        let decoder = CudaDecoder::load(numbers, weights, context, limits, &pool, progress);
        let decoder = with_settings(decoder.map_err(failed)?, &config.engine);
        return Ok((Box::new(decoder), Arithmetic::Cuda));
    }
    let (activations, arithmetic) = match config.engine.activations {
        config::Activations::Float => (Activations::Float, Arithmetic::Float),
        config::Activations::Int8 => (Activations::Int8, Arithmetic::Int8),
    };
    let options = PackOptions { activations, ..PackOptions::default() };
    let decoder = Decoder::load(numbers, weights, options, &pool, progress);
    Ok((Box::new(decoder.map_err(failed)?), arithmetic))
}

fn pool(engine: &config::EngineConfig) -> Pool {
    // With fewer threads, other programs that count from the first processor would meet them there.
    let takes_all = |cpus: device::Cpus| [cpus.cores(), cpus.count()].contains(&engine.threads);
    match engine.pin_threads && device::Cpus::allowed().is_some_and(takes_all) {
        true => device::pinned_pool(engine.threads),
        false => Pool::new(engine.threads),
    }
}

fn with_settings(decoder: CudaDecoder, engine: &config::EngineConfig) -> CudaDecoder {
    decoder.with_graphs(engine.cuda_graphs).with_batch_invariance(engine.batch_invariant)
}

/// Opens a model without running it.
///
/// # Errors
/// One line with the path; for the default model also how to get it.
pub fn open_model(path: &Path) -> Result<ModelPackage> {
    if !path.exists() {
        let hint = match path == config::default_model_path() {
            true => ": `cargo xtask fetch-model` gets it, or set model.path",
            false => "",
        };
        let message = format!("model {} does not exist{hint}", path.display());
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    ModelPackage::open(path).map_err(|e| Error::new(ErrorKind::Invalid, e.to_string()))
}

fn of_model(path: &Path) -> impl Fn(model::Error) -> Error + '_ {
    move |e| Error::new(ErrorKind::Invalid, format!("{}: {e}", path.display()))
}

/// Every section whose kind cannot be built, with its place.
fn check_kinds(config: &Config, registry: &Registry, discovery: &Discovery) -> Result<()> {
    let mut problems = Vec::new();
    for (key, resource) in &config.resources {
        let Err(unknown) = registry.kind(&resource.kind) else { continue };
        // What the scan knows is more: a plugin that was refused before it was opened.
        let message = match discovery.provider(&resource.kind) {
            Err(reason) if registry.kinds().next().is_none() || !discovery.plugins.is_empty() => {
                reason
            }
            _ => unknown.to_string(),
        };
        problems.push(problem(config, resource, "kind", format!("[resources.{key}]: {message}")));
    }
    finish(problems)
}

fn problem(config: &Config, resource: &ResourceConfig, key: &str, message: String) -> Problem {
    let path = config.resources.iter().find(|(_, other)| std::ptr::eq(*other, resource));
    match path.map(|(of, _)| config.origin(&format!("resources.{of}.{key}"))) {
        Some(origin @ (Origin::Flag(_) | Origin::Environment(_))) => {
            Problem::of_file(origin.to_string(), message)
        }
        _ => Problem { file: config.file.clone(), place: Some(resource.places.of(key)), message },
    }
}

fn finish(problems: Vec<Problem>) -> Result<()> {
    if problems.is_empty() { Ok(()) } else { Err(Error::Config(Problems(problems))) }
}

/// Specs of all resources, with the node's defaults from the model under the config's settings.
fn specs(config: &Config, node: &dyn Node) -> Result<Vec<Wanted>> {
    let mut problems = Vec::new();
    let mut wanted = Vec::new();
    for (key, resource) in &config.resources {
        for name in resource.nodes.iter().filter(|n| *n != node.name()) {
            let hint = suggest::did_you_mean(name, [node.name()]);
            problems.push(problem(
                config,
                resource,
                "nodes",
                format!(
                    "[resources.{key}]: the model has no node {name:?}{hint} (nodes there are: {})",
                    node.name()
                ),
            ));
        }
        let mut settings = node.resource_defaults(&resource.kind);
        merge(config, key, resource, &mut settings, &mut problems);
        wanted.push(Wanted {
            spec: NodeResourceSpec {
                resource_key: key.clone(),
                kind: resource.kind.clone(),
                nodes: resource.nodes.iter().cloned().collect(),
                settings: Value::Object(settings).to_string(),
            },
            depends_on: resource.depends_on.clone(),
        });
    }
    finish(problems)?;
    Ok(wanted)
}

/// Has every kind read its settings, so that all mistakes are told together and with their places.
fn check_settings(config: &Config, registry: &Registry, wanted: &[Wanted]) -> Result<()> {
    let mut problems = Vec::new();
    for Wanted { spec, .. } in wanted {
        let Err(e) = registry.depends_on(spec) else { continue };
        let Some(resource) = config.resources.get(&spec.resource_key) else { return Err(e) };
        let message = e.to_string();
        // A kind names the key it means in backticks, or at the start.
        let quoted = message.split('`').nth(1);
        let first = message.split("]: ").nth(1).and_then(|rest| rest.split(':').next());
        let named = |key: &&str| resource.settings.contains_key(*key);
        let key = quoted.filter(named).or(first.filter(named)).unwrap_or_default();
        problems.push(problem(config, resource, key, message.clone()));
    }
    finish(problems)
}

/// Puts what the config says over the defaults. What the model decides may be repeated, not
/// changed; limits (`max_...`) may be lowered.
fn merge(
    config: &Config,
    key: &str,
    resource: &ResourceConfig,
    settings: &mut Map<String, Value>,
    problems: &mut Vec<Problem>,
) {
    for (name, value) in &resource.settings {
        let value = match serde_json::to_value(value) {
            Ok(value) => value,
            Err(e) => {
                let message = format!("[resources.{key}]: {name}: {e}");
                problems.push(problem(config, resource, name, message));
                continue;
            }
        };
        match settings.get(name) {
            Some(said) if !agrees(name, &value, said) => problems.push(problem(
                config,
                resource,
                name,
                format!("[resources.{key}]: {name} = {value} contradicts the model, which has {said}; leave it out"),
            )),
            _ => {
                settings.insert(name.clone(), value);
            }
        }
    }
}

fn agrees(name: &str, value: &Value, said: &Value) -> bool {
    match (value.as_f64(), said.as_f64()) {
        (Some(value), Some(said)) if name.starts_with("max_") => value <= said,
        (Some(value), Some(said)) => value == said,
        _ => value == said,
    }
}

fn max_model_len(config: &Config, model: &ModelPackage) -> Result<u32> {
    let most = model.config.max_position;
    match config.engine.max_model_len {
        Some(len) if len > most => Err(Error::usage(format!(
            "{}: [engine] max_model_len = {len} exceeds the model's {most} positions",
            config.file
        ))),
        Some(len) => Ok(len as u32),
        None => Ok(most as u32),
    }
}

/// Bytes that the system could still give without swapping; a cautious guess where it does not say.
fn free_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let fields: BTreeMap<&str, &str> = text.lines().filter_map(|l| l.split_once(':')).collect();
    let kib = fields
        .get("MemAvailable")
        .and_then(|v| v.trim().trim_end_matches("kB").trim().parse().ok());
    kib.map_or(1 << 30, |kib: u64| kib << 10)
}
