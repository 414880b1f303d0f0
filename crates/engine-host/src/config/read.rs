//! Reads the configuration's text into [`Config`], with every default and limit.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use toml::Spanned;

use super::{
    Activations, Config, Device, EngineConfig, KvDtype, ModelConfig, Places, ResourceConfig,
    default_model_path, paths,
};
use crate::document::{Document, Problems, TableReader};
use crate::engine::OnFault;
use crate::probe::Probe;

const MAX_KEY_BYTES: usize = 64;

// Beyond these a value is a slip: each still fits every arithmetic done with it.
const THREADS: RangeInclusive<u64> = 1..=1024;
const MAX_BATCH: RangeInclusive<u64> = 1..=65_536;
const TOKENS: RangeInclusive<u64> = 1..=(1 << 24);

pub(super) fn read(file: &str, text: &str, base: &Path) -> Result<Config, Problems> {
    // Columns of the first line are counted without the mark, as editors do.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let doc = Document::new(file, text);
    let root = doc.parse();
    if doc.has_problems() {
        // After a syntax error half a table may be missing: further complaints would mislead.
        return Err(doc.into_problems());
    }
    let mut top = doc.top(&root);
    let engine = engine(top.table("engine"), base);
    let model = model(top.table("model"), base);
    let resources = match top.table("resources") {
        Some(table) => resources(table),
        None => BTreeMap::new(),
    };
    top.finish(|_, _| false);
    if doc.has_problems() {
        return Err(doc.into_problems());
    }
    Ok(Config { file: file.to_owned(), engine, model, resources })
}

fn engine(table: Option<TableReader<'_, '_>>, base: &Path) -> EngineConfig {
    let mut config = EngineConfig {
        device: Device::Cpu,
        kv_dtype: KvDtype::Bf16,
        activations: Activations::Float,
        plugin_dirs: vec![base.join("plugins")],
        strict: false,
        probe: Probe::Unpinned,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        cpu_features: None,
        preplan: true,
        watchdog: 10,
        cuda_graphs: true,
        batch_invariant: false,
        max_batch: 64,
        max_batch_tokens: 512,
        max_model_len: None,
    };
    let Some(mut table) = table else { return config };

    if let Some(text) = table.string("device") {
        match text.get_ref().parse() {
            Ok(device) => config.device = device,
            Err(message) => report(&table, &text, &message),
        }
    }
    if let Some(dtype) = table.choice("kv_dtype", &KvDtype::NAMES) {
        config.kv_dtype = dtype;
    }
    if let Some(activations) = table.choice("activations", &Activations::NAMES) {
        config.activations = activations;
    }
    if let Some(dirs) = table.strings("plugin_dirs") {
        if dirs.is_empty() {
            let (_, span) =
                table.keys().find(|(key, _)| *key == "plugin_dirs").unwrap_or(("", table.span()));
            table.doc().report(&span, "plugin_dirs in [engine] names no directory");
        }
        config.plugin_dirs =
            dirs.iter().filter_map(|dir| path(&table, "plugin_dirs", dir, base)).collect();
    }
    if let Some(strict) = table.boolean("strict") {
        config.strict = strict;
    }
    if let Some(seconds) = table.integer("watchdog", 0..=86_400) {
        config.watchdog = seconds;
    }
    if let Some(preplan) = table.boolean("preplan") {
        config.preplan = preplan;
    }
    if let Some(cuda_graphs) = table.boolean("cuda_graphs") {
        config.cuda_graphs = cuda_graphs;
    }
    if let Some(batch_invariant) = table.boolean("batch_invariant") {
        config.batch_invariant = batch_invariant;
    }
    if let Some(level) = table.string("cpu_features") {
        match device::CpuFeatures::parse(level.get_ref()) {
            Ok(_) => config.cpu_features = Some(level.get_ref().to_string()),
            Err(e) => report(&table, &level, &format!("cpu_features in [engine]: {e}")),
        }
    }
    if let Some(probe) = table.choice("probe", &Probe::NAMES) {
        config.probe = probe;
    }
    let mut count = |key, range| table.integer(key, range).and_then(|n| usize::try_from(n).ok());
    config.threads = count("threads", THREADS).unwrap_or(config.threads);
    config.max_batch = count("max_batch", MAX_BATCH).unwrap_or(config.max_batch);
    config.max_batch_tokens = count("max_batch_tokens", TOKENS).unwrap_or(config.max_batch_tokens);
    config.max_model_len = count("max_model_len", TOKENS);
    table.finish(|_, _| false);
    config
}

fn model(table: Option<TableReader<'_, '_>>, base: &Path) -> ModelConfig {
    let mut given = None;
    if let Some(mut table) = table {
        given = table.string("path").and_then(|text| path(&table, "path", &text, base));
        table.finish(|_, _| false);
    }
    ModelConfig { path: given.unwrap_or_else(default_model_path) }
}

fn resources(mut table: TableReader<'_, '_>) -> BTreeMap<String, ResourceConfig> {
    let mut resources = BTreeMap::new();
    let keys: Vec<_> = table.keys().collect();
    for (key, span) in keys {
        if !is_name(key) {
            table.doc().report(&span, format!("resource key {key:?} {NAME_RULE}"));
        }
        let Some(reader) = table.table(key) else { continue };
        resources.insert(key.to_owned(), resource(reader));
    }
    resources
}

fn resource(mut table: TableReader<'_, '_>) -> ResourceConfig {
    table.require("kind");
    table.require("nodes");
    let kind = table.string("kind");
    if let Some(kind) = kind.as_ref().filter(|kind| !is_name(kind.get_ref())) {
        report(&table, kind, &format!("kind = {:?} {NAME_RULE}", kind.get_ref()));
    }
    let nodes = table.strings("nodes");
    if nodes.as_ref().is_some_and(Vec::is_empty) {
        let message = format!("\"nodes\" in {} names no node of the model", table.name());
        table.doc().report(&table.span(), message);
    }
    let depends_on = table.strings("depends_on").unwrap_or_default();
    let on_fault = table.choice("on_fault", &OnFault::NAMES).unwrap_or_default();
    let owned = |names: Vec<Spanned<&str>>| -> Vec<String> {
        names.into_iter().map(|name| name.into_inner().to_owned()).collect()
    };
    let doc = table.doc();
    let places = Places {
        table: doc.place(table.span().start),
        keys: table.keys().map(|(key, span)| (key.to_owned(), doc.place(span.start))).collect(),
    };
    ResourceConfig {
        kind: kind.map(|kind| kind.into_inner().to_owned()).unwrap_or_default(),
        nodes: owned(nodes.unwrap_or_default()),
        depends_on: owned(depends_on),
        on_fault,
        settings: table.rest(),
        places,
    }
}

const NAME_RULE: &str = "must be 1 to 64 letters, digits, '_', '-' and '.'";

fn is_name(text: &str) -> bool {
    (1..=MAX_KEY_BYTES).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
}

fn path(
    table: &TableReader<'_, '_>,
    key: &str,
    text: &Spanned<&str>,
    base: &Path,
) -> Option<PathBuf> {
    match paths::resolve(text.get_ref(), base) {
        Ok(path) => Some(path),
        Err(reason) => {
            report(table, text, &format!("{key} in {} is {reason}", table.name()));
            None
        }
    }
}

fn report(table: &TableReader<'_, '_>, at: &Spanned<&str>, message: &str) {
    table.doc().report(&at.span(), message);
}
