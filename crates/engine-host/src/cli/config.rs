//! `engine-host config`: what a configuration says, and whether it will do.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use super::ConfigArg;
use super::settings::ServerFlags;
use crate::config::{self, Config, SETTINGS, TABLES};
use crate::error::Result;
use crate::setup;

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Reads the configuration, and looks whether plugins and model are there
    Check(Box<Settings>),
    /// Every value in force, and where it comes from
    Show {
        #[command(flatten)]
        settings: Box<Settings>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// The JSON Schema of the configuration file
    Schema,
    /// The reference page of all settings, in Markdown
    Reference,
}

#[derive(Args)]
pub struct Settings {
    #[command(flatten)]
    config: ConfigArg,
    #[command(flatten)]
    server: ServerFlags,
}

pub fn run(command: &ConfigCommand) -> Result<ExitCode> {
    match command {
        ConfigCommand::Check(settings) => check(&settings.load()?)?,
        ConfigCommand::Show { settings, json: true } => {
            say!("{}", as_json(&settings.load()?));
        }
        ConfigCommand::Show { settings, json: false } => {
            as_toml(&settings.load()?).iter().for_each(|line| say!("{line}"));
        }
        ConfigCommand::Schema => say!("{:#}", config::schema()),
        ConfigCommand::Reference => say!("{}", config::reference::page().trim_end()),
    }
    Ok(ExitCode::SUCCESS)
}

impl Settings {
    fn load(&self) -> Result<Config> {
        self.config.load_with(&self.server.0)
    }
}

fn check(config: &Config) -> Result<()> {
    let keys = config.server.all_keys()?;
    setup::check(config)?;
    say!("{}: good", config.file);
    if !config.server.host.is_loopback() && keys.is_empty() {
        note!(
            "warning: [server] host = \"{}\" lets other machines in, and no API key is asked for",
            config.server.host
        );
    }
    Ok(())
}

/// Rows of (path, value, where it comes from); no value where there is none.
fn rows(config: &Config) -> Vec<(String, Option<toml::Value>, String)> {
    let mut rows = Vec::new();
    let from = |path: &str| match config.origin(path) {
        config::Origin::File(line, column) => format!("{}:{line}:{column}", config.file),
        origin => origin.to_string(),
    };
    for (table, _) in TABLES {
        for setting in SETTINGS.iter().filter(|setting| setting.table == *table) {
            let path = setting.path();
            rows.push((path.clone(), setting.value(config), from(&path)));
        }
    }
    for (key, resource) in &config.resources {
        let own = [
            ("kind", toml::Value::String(resource.kind.clone())),
            ("nodes", config::texts(resource.nodes.iter().cloned())),
            ("depends_on", config::texts(resource.depends_on.iter().cloned())),
            ("on_fault", toml::Value::String(resource.on_fault.name().to_owned())),
        ];
        let of_kind = resource.settings.iter().map(|(name, value)| (name.as_str(), value.clone()));
        for (name, value) in own.into_iter().chain(of_kind) {
            let path = format!("resources.{key}.{name}");
            let from = from(&path);
            rows.push((path, Some(value), from));
        }
    }
    rows
}

fn as_json(config: &Config) -> Value {
    let row = |(path, value, from): (String, Option<toml::Value>, String)| {
        (path, json!({ "value": value, "from": from }))
    };
    Value::Object(rows(config).into_iter().map(row).collect::<Map<_, _>>())
}

/// A file that says the same, but for secrets.
fn as_toml(config: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    let mut table = String::new();
    for (path, value, from) in rows(config) {
        let (of, key) = path.rsplit_once('.').unwrap_or(("", &path));
        // Names may hold dots, which a header must quote.
        let header = match of.strip_prefix("resources.") {
            Some(key) if key.contains('.') => format!("[resources.{key:?}]"),
            _ => format!("[{of}]"),
        };
        if table != header {
            if !lines.is_empty() {
                lines.push(String::new());
            }
            lines.push(header.clone());
            table = header;
        }
        let secret = SETTINGS.iter().any(|setting| setting.is_secret() && setting.path() == path);
        let text = match value {
            None => format!("# {key}: none said"),
            Some(toml::Value::Array(keys)) if secret => format!("# {key}: {} hidden", keys.len()),
            Some(value) => format!("{key} = {value}"),
        };
        lines.push(format!("{text:<44} # {from}"));
    }
    lines
}
