//! What a kind under check is built with: its settings, and resources below it.

use resource_api::{Kind, KindHandle};
use resource_testkit::check::{Subject, Watch, spec, unmarked};
use resource_testkit::{Fake, FakeCache};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::registry::PluginFile;

/// Most combinations of kinds for the dependencies that are tried.
const TRIES: usize = 64;

/// The TOML of `--settings`: the resource's own keys, and a table `[dependencies.<key>]` for each
/// resource below it that is not to be chosen by the check, with its `kind`.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    own: Map<String, Value>,
    dependencies: Map<String, Value>,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// `usage` with the place in the text.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |what: String| Error::usage(format!("--settings: {}", what.trim()));
        let table: toml::Table =
            text.parse().map_err(|e: toml::de::Error| wrong(e.message().to_string()))?;
        let Value::Object(mut own) =
            serde_json::to_value(table).map_err(|e| wrong(e.to_string()))?
        else {
            return Err(wrong("not a table".into()));
        };
        let dependencies = match own.remove("dependencies") {
            None => Map::new(),
            Some(Value::Object(dependencies)) => dependencies,
            Some(_) => return Err(wrong("`dependencies` holds tables".into())),
        };
        Ok(Self { own, dependencies })
    }

    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.dependencies.is_empty()
    }
}

/// As a node does: what a model decides, by the name of a kind. Pools are small, so that they run out.
fn of_small_model(kind: &str) -> Value {
    match kind {
        "kv" => json!({
            "num_layers": 2, "num_kv_heads": 2, "num_qo_heads": 4, "head_dim": 8,
            "pages": 15, "page_size": 3,
        }),
        "fake_kv" => json!({ "head_dim": 8 }),
        "attention" | "cross_attention" | "positions" => json!({ "kv_cache": "main_kv" }),
        "sampler" => json!({ "vocab_size": 40 }),
        _ => json!({}),
    }
}

fn with_defaults(kind: &str, own: &Map<String, Value>) -> String {
    let mut settings = match of_small_model(kind) {
        Value::Object(settings) => settings,
        _ => Map::new(),
    };
    settings.extend(own.clone());
    Value::Object(settings).to_string()
}

/// A subject that can be built, if there is one: with what `settings` say about dependencies, and for
/// the rest with kinds of `others`, of the kit and of the plugin itself.
///
/// # Errors
/// `usage` when `settings` name a kind that nobody has, or the kind cannot say what it depends on.
pub fn make(
    kind: &KindHandle,
    settings: &Settings,
    plugin: &PluginFile,
    others: &[PluginFile],
    watch: Watch,
) -> Result<Subject> {
    let name = kind.kind();
    let mut subject = Subject::new(kind.clone(), &with_defaults(&name, &settings.own))?;
    let own = [resource_api::kind::<FakeCache>(), resource_api::kind::<Fake>()];
    let of_others = others.iter().flat_map(|p| &p.kinds);
    let candidates: Vec<&KindHandle> = of_others.chain(&own).chain(&plugin.kinds).collect();
    for (key, value) in &settings.dependencies {
        let wanted = value["kind"].as_str().unwrap_or_default();
        let Some(kind) = candidates.iter().find(|k| k.kind() == wanted) else {
            return Err(Error::usage(format!(
                "--settings: [dependencies.{key}] has kind {wanted:?}, which no plugin of --with \
                 builds"
            )));
        };
        let mut own = value.as_object().cloned().unwrap_or_default();
        own.remove("kind");
        let spec = spec(key, wanted, &with_defaults(wanted, &own));
        subject.dependencies.push(((*kind).clone(), spec));
    }
    let keys = unmarked(kind).and_then(|k| k.depends_on(subject.spec.clone()));
    // The check itself says what is wrong with a kind that cannot even be asked.
    let Ok(keys) = keys else { return Ok(subject) };
    let open: Vec<String> =
        keys.into_iter().filter(|key| !settings.dependencies.contains_key(key)).collect();
    if open.is_empty() {
        return Ok(subject);
    }
    let mut first = None;
    let combinations = candidates.len().checked_pow(open.len() as u32).unwrap_or(TRIES).min(TRIES);
    for combination in 0..combinations {
        let mut tried = subject.clone();
        let mut rest = combination;
        for key in &open {
            let kind = candidates[rest % candidates.len()];
            rest /= candidates.len();
            let name = kind.kind();
            let spec = spec(key, &name, &with_defaults(&name, &Map::new()));
            tried.dependencies.push((kind.clone(), spec));
        }
        if tried.build(watch).is_ok() {
            return Ok(tried);
        }
        first.get_or_insert(tried);
    }
    // None fits: the first attempt's error is the one to show.
    Ok(first.unwrap_or(subject))
}
