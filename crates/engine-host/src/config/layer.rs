//! Where a value comes from: the file, the environment, or a flag, the later over the earlier.

use std::fmt;

use super::settings::Setting;
use crate::suggest;

/// Where a value comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nobody said anything.
    #[default]
    Default,
    /// Line and column in the file, both from 1.
    File(usize, usize),
    /// An environment variable.
    Environment(String),
    /// A flag, with its dashes.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(line, column) => write!(f, "line {line}, column {column}"),
            Self::Environment(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

/// A value from outside the file.
#[derive(Clone)]
pub struct Override {
    /// What it is for: `engine.max_batch`, `resources.main_kv.pages`.
    pub path: String,
    /// The value as it was typed.
    pub value: String,
    /// How messages name it.
    pub origin: Origin,
}

impl Override {
    /// What `--set PATH=VALUE` means.
    ///
    /// # Errors
    /// One line.
    pub fn from_set(text: &str) -> Result<Self, String> {
        let Some((path, value)) = text.split_once('=') else {
            return Err(format!(
                "--set {text:?} is not PATH=VALUE, such as resources.main_kv.pages=8192"
            ));
        };
        let path = path.trim().to_owned();
        let origin = Origin::Flag(format!("--set {path}"));
        Ok(Self { path, value: value.trim().to_owned(), origin })
    }
}

/// `raw` as the text of a TOML value for a setting, which decides what bare words are.
pub(super) fn toml_of(setting: Option<&Setting>, raw: &str) -> String {
    let is_toml = |text: &str| {
        toml::from_str::<toml::Table>(&format!("v = {text}")).is_ok_and(|t| t.len() == 1)
    };
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    match setting {
        Some(setting) if setting.is_list() && !raw.trim_start().starts_with('[') => {
            let parts = raw.split(',').map(str::trim).filter(|part| !part.is_empty());
            format!("[{}]", parts.map(quoted).collect::<Vec<_>>().join(", "))
        }
        Some(setting) if setting.is_text() => quoted(raw),
        _ if is_toml(raw) => raw.to_owned(),
        _ => quoted(raw),
    }
}

/// The nearest setting to a path that is none, ready to be put at the end of a message.
pub(super) fn nearest_path(path: &str, resources: impl Iterator<Item = String>) -> String {
    let settings = super::SETTINGS.iter().map(Setting::path);
    let all: Vec<String> = settings.chain(resources).collect();
    suggest::did_you_mean(path, all.iter().map(String::as_str))
}
