//! Reads the configuration's text into [`Config`], with every default and limit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::Spanned;

use super::layer::{Origin, Override, nearest_path, toml_of};
use super::settings::{Access, SETTINGS, Setting, TABLES};
use super::{
    Activations, Config, Device, EngineConfig, KvDtype, LogConfig, MODEL_ENV, ModelConfig, Places,
    ResourceConfig, ServerConfig, TransferEngine, default_model_path, paths,
};
use crate::document::{Document, Problem, Problems, TableReader};
use crate::engine::{OnFault, Queue, Relief, Victims};
use crate::probe::Probe;
use crate::suggest;

const MAX_KEY_BYTES: usize = 64;

/// Reads the file's text and then what overrides it.
pub(super) fn read(
    file: &str,
    text: &str,
    base: &Path,
    overrides: &[Override],
) -> Result<Config, Problems> {
    // Columns of the first line are counted without the mark, as editors do.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let doc = Document::new(file, text);
    let root = doc.parse();
    if doc.has_problems() {
        // After a syntax error half a table may be missing: further complaints would mislead.
        return Err(doc.into_problems());
    }
    let mut config = defaults(file, base);
    let mut top = doc.top(&root);
    for (name, _) in TABLES {
        let Some(mut table) = top.table(name) else { continue };
        let keys: Vec<_> = table.keys().collect();
        for setting in SETTINGS.iter().filter(|setting| setting.table == *name) {
            take(setting, &mut table, &mut config, base);
            if let Some((_, span)) = keys.iter().find(|(key, _)| *key == setting.key) {
                let (line, column) = doc.place(span.start);
                config.origins.insert(setting.path(), Origin::File(line, column));
            }
        }
        table.finish(|_, _| false);
    }
    if let Some(table) = top.table("resources") {
        config.resources = resources(table);
    }
    top.finish(|_, _| false);
    let mut problems = doc.into_problems();
    for each in overrides {
        problems.0.extend(put_over(&mut config, each).0);
    }
    problems.0.extend(unknown_victims_key(&config));
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}

/// `victims = "priority:KEY"` with a key that no resource has.
fn unknown_victims_key(config: &Config) -> Option<Problem> {
    let key = config.engine.victims.resource()?;
    if config.resources.contains_key(key) {
        return None;
    }
    let keys = config.resources.keys().map(String::as_str);
    let message = format!(
        "victims = \"{}\" in [engine] names resource {key:?}, which does not exist{}",
        config.engine.victims,
        suggest::did_you_mean(key, keys)
    );
    match config.origin("engine.victims") {
        Origin::File(line, column) => {
            Some(Problem { file: config.file.clone(), place: Some((line, column)), message })
        }
        origin => Some(Problem::of_file(origin.to_string(), message)),
    }
}

fn defaults(file: &str, base: &Path) -> Config {
    let mut origins = BTreeMap::new();
    if std::env::var_os(MODEL_ENV).is_some_and(|value| !value.is_empty()) {
        origins.insert("model.path".to_owned(), Origin::Environment(MODEL_ENV.to_owned()));
    }
    Config {
        file: file.to_owned(),
        engine: EngineConfig {
            device: Device::Cpu,
            kv_dtype: KvDtype::Bf16,
            activations: Activations::Float,
            plugin_dirs: vec![base.join("plugins")],
            strict: false,
            probe: Probe::Unpinned,
            threads: device::default_threads(),
            pin_threads: true,
            cpu_features: None,
            preplan: true,
            run_ahead: true,
            pressure: Relief::ORDER.to_vec(),
            victims: Victims::default(),
            queue: Queue::default(),
            transfer: TransferEngine::Off,
            transfer_directory: PathBuf::from("/dev/shm"),
            watchdog: 10,
            cuda_graphs: true,
            batch_invariant: false,
            max_batch: 64,
            max_batch_tokens: 512,
            max_model_len: None,
        },
        model: ModelConfig { path: default_model_path() },
        server: ServerConfig::default(),
        log: LogConfig::default(),
        resources: BTreeMap::new(),
        origins,
    }
}

/// Takes a setting's value from its table, if it is there.
fn take<'d>(
    setting: &'d Setting,
    table: &mut TableReader<'d, '_>,
    config: &mut Config,
    base: &Path,
) {
    let key = setting.key;
    match &setting.access {
        Access::Boolean(at) => {
            if let Some(value) = table.boolean(key) {
                *at(config) = value;
            }
        }
        Access::Integer(range, at) => {
            if let Some(value) = table.integer(key, range.clone()) {
                at(config).set(value);
            }
        }
        Access::Choice(at) => {
            let names: Vec<_> = at(config).names().into_iter().map(|name| (name, name)).collect();
            if let Some(name) = table.choice(key, &names) {
                at(config).set(name);
            }
        }
        Access::Text(_, set) => {
            let Some(text) = table.string(key) else { return };
            if let Err(message) = set(config, text.get_ref()) {
                // A flag or a variable has said what is wrong.
                let message = match table.doc().has_places() && !message.starts_with(key) {
                    true => format!("{key} in {}: {message}", table.name()),
                    false => message,
                };
                report(table, &text, &message);
            }
        }
        Access::Path(at) => {
            let text = table.string(key);
            if let Some(path) = text.and_then(|text| path(table, key, &text, base)) {
                at(config).set(path);
            }
        }
        Access::Paths(at) => {
            let Some(dirs) = table.strings(key) else { return };
            if dirs.is_empty() {
                let found = table.keys().find(|(name, _)| *name == key);
                let (_, span) = found.unwrap_or(("", table.span()));
                let message = format!("{key} in {} names no directory", table.name());
                table.doc().report(&span, message);
            }
            *at(config) = dirs.iter().filter_map(|dir| path(table, key, dir, base)).collect();
        }
        Access::Order(_, set) => {
            let Some(names) = table.strings(key) else { return };
            let texts: Vec<&str> = names.iter().map(|name| *name.get_ref()).collect();
            if let Err(message) = set(config, &texts) {
                let found = table.keys().find(|(name, _)| *name == key);
                let (_, span) = found.unwrap_or(("", table.span()));
                table.doc().report(&span, format!("{key} in {}: {message}", table.name()));
            }
        }
        Access::Texts(at) => {
            let Some(texts) = table.strings(key) else { return };
            refuse_empty(table, key, &texts);
            *at(config) = texts.iter().map(|text| (*text.get_ref()).to_owned()).collect();
        }
        Access::Secrets(at) => {
            let Some(keys) = table.secrets(key) else { return };
            refuse_empty(table, key, &keys);
            at(config).clear();
            keys.iter().for_each(|secret| at(config).push(secret.get_ref()));
        }
    }
}

fn refuse_empty(table: &TableReader<'_, '_>, key: &str, texts: &[Spanned<&str>]) {
    for text in texts.iter().filter(|text| text.get_ref().trim().is_empty()) {
        report(table, text, &format!("{key} in {} has an empty string in it", table.name()));
    }
}

/// Puts one value from outside over what the file says.
fn put_over(config: &mut Config, with: &Override) -> Problems {
    let name = with.origin.to_string();
    if let Some(setting) = Setting::find(&with.path) {
        let value = toml_of(Some(setting), &with.value);
        let text = format!("[{}]\n{} = {value}\n", setting.table, setting.key);
        let doc = Document::outside(name, &text);
        let root = doc.parse();
        if let Some(mut table) = doc.top(&root).table(setting.table) {
            take(setting, &mut table, config, Path::new(""));
        }
        config.origins.insert(with.path.clone(), with.origin.clone());
        return doc.into_problems();
    }
    let Some((key, setting)) = resource_setting(config, &with.path) else {
        let keys = config.resources.iter().flat_map(|(key, resource)| {
            resource.settings.keys().map(move |name| format!("resources.{key}.{name}"))
        });
        let hint = nearest_path(&with.path, keys);
        let hint = match (hint.is_empty(), with.path.starts_with("resources.")) {
            (true, true) => format!(
                "; there are the resources {}",
                suggest::listed(config.resources.keys().map(String::as_str))
            ),
            _ => hint,
        };
        let message = format!("there is no setting {:?}{hint}", with.path);
        return Problem::of_file(name, message).into();
    };
    let text = format!("[resources.{key:?}]\n{setting:?} = {}\n", toml_of(None, &with.value));
    let doc = Document::outside(name, &text);
    let root = doc.parse();
    let mut top = doc.top(&root);
    let table = top.table("resources").and_then(|mut all| all.table(&key));
    if let (Some(table), Some(old)) = (table, config.resources.remove(&key)) {
        config.resources.insert(key.clone(), resource(table, Some(old)));
    }
    config.origins.insert(format!("resources.{key}.{setting}"), with.origin.clone());
    doc.into_problems()
}

/// Key and name of a resource's setting. In the environment everything is in capitals, and whatever is
/// neither letter nor digit is `_`.
fn resource_setting(config: &Config, path: &str) -> Option<(String, String)> {
    let rest = path.strip_prefix("resources.")?;
    let exact = |key: &&String| rest.strip_prefix(key.as_str()).is_some_and(|r| r.starts_with('.'));
    if let Some(key) = config.resources.keys().filter(exact).max_by_key(|key| key.len()) {
        let name = &rest[key.len() + 1..];
        return (!name.is_empty()).then(|| (key.clone(), name.to_owned()));
    }
    let (key, name) = rest.split_once('.')?;
    let folded = |text: &str| -> String {
        text.chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
            .collect()
    };
    if folded(key) != key || folded(name) != name || name.is_empty() {
        return None;
    }
    let (key, resource) = config.resources.iter().find(|(known, _)| folded(known) == key)?;
    let known = resource.settings.keys().find(|known| folded(known) == name);
    Some((key.clone(), known.cloned().unwrap_or_else(|| name.to_lowercase())))
}

fn resources(mut table: TableReader<'_, '_>) -> BTreeMap<String, ResourceConfig> {
    let mut resources = BTreeMap::new();
    let keys: Vec<_> = table.keys().collect();
    for (key, span) in keys {
        if !is_name(key) {
            table.doc().report(&span, format!("resource key {key:?} {NAME_RULE}"));
        }
        let Some(reader) = table.table(key) else { continue };
        resources.insert(key.to_owned(), resource(reader, None));
    }
    resources
}

/// One section, over what `old` says if there is one.
fn resource(mut table: TableReader<'_, '_>, old: Option<ResourceConfig>) -> ResourceConfig {
    if old.is_none() {
        table.require("kind");
        table.require("nodes");
    }
    let kind = table.string("kind");
    if let Some(kind) = kind.as_ref().filter(|kind| !is_name(kind.get_ref())) {
        report(&table, kind, &format!("kind = {:?} {NAME_RULE}", kind.get_ref()));
    }
    let nodes = table.strings("nodes");
    if nodes.as_ref().is_some_and(Vec::is_empty) {
        let message = format!("\"nodes\" in {} names no node of the model", table.name());
        table.doc().report(&table.span(), message);
    }
    let depends_on = table.strings("depends_on");
    let on_fault = table.choice("on_fault", &OnFault::NAMES);
    let owned = |names: Vec<Spanned<&str>>| -> Vec<String> {
        names.into_iter().map(|name| name.into_inner().to_owned()).collect()
    };
    let doc = table.doc();
    let places = Places {
        table: doc.place(table.span().start),
        keys: table.keys().map(|(key, span)| (key.to_owned(), doc.place(span.start))).collect(),
    };
    let mut resource =
        old.unwrap_or_else(|| ResourceConfig { places, ..ResourceConfig::default() });
    resource.kind = kind.map_or(resource.kind, |kind| kind.into_inner().to_owned());
    resource.nodes = nodes.map_or(resource.nodes, owned);
    resource.depends_on = depends_on.map_or(resource.depends_on, owned);
    resource.on_fault = on_fault.unwrap_or(resource.on_fault);
    resource.settings.extend(table.rest());
    resource
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
