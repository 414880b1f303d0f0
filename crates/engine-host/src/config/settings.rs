//! Every setting there is, once: reading, flags, environment, schema and reference page all go by this
//! list.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::secret::Secrets;
use super::{
    Activations, Config, KvDtype, LogFormat, ReasoningParser, ToolParser, TransferEngine,
    UnknownFields,
};
use crate::probe::Probe;

mod list;

pub use list::{SETTINGS, TABLES};

/// Beginning of the name of every environment variable that is a setting.
pub const ENV_PREFIX: &str = "ENGINE_HOST_";

/// One setting outside `[resources]`, whose settings belong to the kinds.
pub struct Setting {
    /// The table it stands in.
    pub table: &'static str,
    /// Its key there.
    pub key: &'static str,
    /// The flag, without `--`.
    pub flag: &'static str,
    /// What it is for: a sentence without its full stop.
    pub help: &'static str,
    /// What it is when nobody says anything: TOML, or words.
    pub default: &'static str,
    pub(super) access: Access,
}

/// How a setting is reached in [`Config`], by its type.
pub(super) enum Access {
    Boolean(fn(&mut Config) -> &mut bool),
    Integer(RangeInclusive<u64>, fn(&mut Config) -> &mut dyn Count),
    Choice(fn(&mut Config) -> &mut dyn Choice),
    /// The error of the second is one line.
    Text(fn(&Config) -> Option<String>, fn(&mut Config, &str) -> Result<(), String>),
    Path(fn(&mut Config) -> &mut dyn Place),
    Paths(fn(&mut Config) -> &mut Vec<PathBuf>),
    Texts(fn(&mut Config) -> &mut Vec<String>),
    Secrets(fn(&mut Config) -> &mut Secrets),
    /// Names in an order that counts. The error of the second is one line.
    Order(fn(&Config) -> Vec<String>, fn(&mut Config, &[&str]) -> Result<(), String>),
}

/// A whole number that may be absent.
pub(super) trait Count {
    fn get(&self) -> Option<u64>;
    fn set(&mut self, value: u64);
}

macro_rules! counts {
    ($($number:ty),*) => {$(
        impl Count for $number {
            fn get(&self) -> Option<u64> {
                u64::try_from(*self).ok()
            }
            fn set(&mut self, value: u64) {
                *self = <$number>::try_from(value).unwrap_or(<$number>::MAX);
            }
        }
    )*};
}
counts!(u16, u64, usize);

impl Count for Option<usize> {
    fn get(&self) -> Option<u64> {
        self.and_then(|value| value.get())
    }

    fn set(&mut self, value: u64) {
        *self = usize::try_from(value).ok();
    }
}

/// A path that may be absent.
pub(super) trait Place {
    fn get(&self) -> Option<PathBuf>;
    fn set(&mut self, path: PathBuf);
}

impl Place for PathBuf {
    fn get(&self) -> Option<PathBuf> {
        Some(self.clone())
    }

    fn set(&mut self, path: PathBuf) {
        *self = path;
    }
}

impl Place for Option<PathBuf> {
    fn get(&self) -> Option<PathBuf> {
        self.clone()
    }

    fn set(&mut self, path: PathBuf) {
        *self = Some(path);
    }
}

/// One of a few names.
pub(super) trait Choice {
    fn names(&self) -> Vec<&'static str>;
    fn get(&self) -> &'static str;
    /// Names that are none of [`names`](Self::names) change nothing.
    fn set(&mut self, name: &str);
}

macro_rules! choices {
    ($($of:ty),*) => {$(
        impl Choice for $of {
            fn names(&self) -> Vec<&'static str> {
                Self::NAMES.iter().map(|(name, _)| *name).collect()
            }
            fn get(&self) -> &'static str {
                Self::NAMES.iter().find(|(_, value)| value == self).map_or("", |(name, _)| name)
            }
            fn set(&mut self, name: &str) {
                if let Some((_, value)) = Self::NAMES.iter().find(|(n, _)| *n == name) {
                    *self = *value;
                }
            }
        }
    )*};
}
choices!(
    KvDtype,
    Activations,
    Probe,
    LogFormat,
    ToolParser,
    ReasoningParser,
    TransferEngine,
    UnknownFields
);

impl Setting {
    /// The setting with this path, such as `engine.max_batch`.
    pub fn find(path: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.path() == path)
    }

    /// `table.key`
    pub fn path(&self) -> String {
        format!("{}.{}", self.table, self.key)
    }

    /// The environment variable.
    pub fn env(&self) -> String {
        format!("{ENV_PREFIX}{}", self.flag.replace('-', "_").to_uppercase())
    }

    /// Whether it is on or off.
    pub fn is_boolean(&self) -> bool {
        matches!(self.access, Access::Boolean(_))
    }

    /// What a whole number may be.
    pub fn range(&self) -> Option<RangeInclusive<u64>> {
        match &self.access {
            Access::Integer(range, _) => Some(range.clone()),
            _ => None,
        }
    }

    /// Whether it is a list, which outside of files may be written with commas.
    pub fn is_list(&self) -> bool {
        matches!(
            self.access,
            Access::Paths(_) | Access::Texts(_) | Access::Secrets(_) | Access::Order(..)
        )
    }

    /// Whether it is a string, which outside of files needs no quotes.
    pub fn is_text(&self) -> bool {
        matches!(self.access, Access::Text(..) | Access::Path(_) | Access::Choice(_))
    }

    /// Whether nothing may show it.
    pub fn is_secret(&self) -> bool {
        matches!(self.access, Access::Secrets(_))
    }

    /// What the flag's value is called in help.
    pub fn value_name(&self) -> &'static str {
        match self.access {
            Access::Boolean(_) => "BOOL",
            Access::Integer(..) => "N",
            Access::Choice(_) => "NAME",
            Access::Text(..) => "TEXT",
            Access::Path(_) => "PATH",
            Access::Paths(_) => "PATH,...",
            Access::Texts(_) => "TEXT,...",
            Access::Order(..) => "NAME,...",
            Access::Secrets(_) => "KEY,...",
        }
    }

    /// The value in force, as TOML; `None` where there is none. Secrets are counted, not shown.
    pub fn value(&self, config: &Config) -> Option<toml::Value> {
        // The accessors hand out places to write to; a copy is what they may have.
        let config = &mut config.clone();
        Some(match &self.access {
            Access::Boolean(at) => toml::Value::Boolean(*at(config)),
            Access::Integer(_, at) => toml::Value::Integer(i64::try_from(at(config).get()?).ok()?),
            Access::Choice(at) => toml::Value::String(at(config).get().to_owned()),
            Access::Text(get, _) => toml::Value::String(get(config)?),
            Access::Path(at) => toml::Value::String(at(config).get()?.display().to_string()),
            Access::Paths(at) => texts(at(config).iter().map(|p| p.display().to_string())),
            Access::Texts(at) => texts(at(config).iter().cloned()),
            Access::Order(get, _) => texts(get(config).into_iter()),
            Access::Secrets(at) => {
                texts(std::iter::repeat_n("(hidden)".to_owned(), at(config).len()))
            }
        })
    }
}

/// An array of strings.
pub(crate) fn texts(texts: impl Iterator<Item = String>) -> toml::Value {
    toml::Value::Array(texts.map(toml::Value::String).collect())
}
