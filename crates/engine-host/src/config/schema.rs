//! The JSON Schema of a configuration file, for editors and for other programs that write one.

use serde_json::{Map, Value, json};

use super::settings::{Access, SETTINGS, Setting, TABLES};
use super::{Config, DEFAULT_CONFIG};
use crate::engine::OnFault;

/// The schema (draft 2020-12). A TOML file is valid under it when it is read as JSON.
pub fn schema() -> Value {
    let mut tables = Map::new();
    for (table, about) in TABLES {
        let of_table = SETTINGS.iter().filter(|setting| setting.table == *table);
        let properties: Map<String, Value> =
            of_table.map(|setting| (setting.key.to_owned(), property(setting))).collect();
        tables.insert(
            (*table).to_owned(),
            json!({
                "type": "object",
                "description": about,
                "properties": properties,
                "additionalProperties": false,
            }),
        );
    }
    tables.insert("resources".to_owned(), resources());
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of engine-host",
        "type": "object",
        "properties": tables,
        "additionalProperties": false,
    })
}

fn property(setting: &Setting) -> Value {
    let texts = json!({ "type": "array", "items": { "type": "string", "minLength": 1 }, "uniqueItems": true });
    let mut property = match &setting.access {
        Access::Boolean(_) => json!({ "type": "boolean" }),
        Access::Integer(range, _) => {
            json!({ "type": "integer", "minimum": range.start(), "maximum": range.end() })
        }
        Access::Choice(_) => json!({ "enum": setting.choices() }),
        Access::Text(..) | Access::Path(_) => json!({ "type": "string", "minLength": 1 }),
        Access::Paths(_) | Access::Texts(_) | Access::Secrets(_) | Access::Order(..) => texts,
    };
    if let Some(fields) = property.as_object_mut() {
        fields.insert("description".to_owned(), json!(setting.help));
        let default = toml::from_str::<toml::Table>(&format!("v = {}", setting.default));
        match default.ok().and_then(|mut table| table.remove("v")) {
            Some(value) => fields.insert("default".to_owned(), json!(value)),
            None => {
                fields.insert("$comment".to_owned(), json!(format!("default: {}", setting.default)))
            }
        };
    }
    property
}

/// Sections of resources: what the host reads itself; further keys belong to the kind.
fn resources() -> Value {
    let name = "^[A-Za-z0-9_.-]{1,64}$";
    let names = json!({ "type": "array", "items": { "type": "string" }, "uniqueItems": true });
    let on_fault: Vec<&str> = OnFault::NAMES.iter().map(|(name, _)| *name).collect();
    json!({
        "type": "object",
        "description": "What holds state for requests, by key",
        "patternProperties": { name: {
            "type": "object",
            "properties": {
                "kind": { "type": "string", "pattern": name, "description": "Offered by some plugin" },
                "nodes": { "type": "array", "items": { "type": "string" }, "minItems": 1,
                    "uniqueItems": true, "description": "Nodes of the model that use it" },
                "depends_on": names,
                "on_fault": { "enum": on_fault, "default": "fail_requests",
                    "description": "What happens when it has panicked" },
            },
            "required": ["kind", "nodes"],
        }},
        "additionalProperties": false,
    })
}

impl Setting {
    /// The names that it takes, if it is a choice.
    pub fn choices(&self) -> Vec<&'static str> {
        let Access::Choice(at) = &self.access else { return Vec::new() };
        // Names do not depend on what is chosen; any configuration will do to ask for them.
        let config = Config::parse("", DEFAULT_CONFIG, std::path::Path::new(""));
        config.map(|mut config| at(&mut config).names()).unwrap_or_default()
    }
}
