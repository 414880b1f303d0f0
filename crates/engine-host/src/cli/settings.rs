//! Settings as flags and environment variables, made from the list of settings.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, error::ErrorKind};

use crate::config::{ENV_PREFIX, Origin, Override, SETTINGS, Setting};
use crate::error::{Error, Result};
use crate::suggest;

/// What flags and variables say about some tables.
#[derive(Clone, Default)]
pub struct Overrides(pub Vec<Override>);

/// Flags of the tables that every command with a configuration reads.
pub struct EngineFlags(pub Overrides);
/// Flags of `[server]`.
pub struct ServerFlags(pub Overrides);

const ENGINE_TABLES: &[&str] = &["engine", "model"];
const SERVER_TABLES: &[&str] = &["server"];
/// Flags that stand before or after the command, and are declared there.
const GLOBAL_TABLES: &[&str] = &["log"];
const SET: &str = "set";

fn of_tables(tables: &'static [&'static str]) -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| tables.contains(&setting.table))
}

fn declare(command: Command, tables: &'static [&'static str], heading: &'static str) -> Command {
    command.args(of_tables(tables).map(|setting| {
        let help =
            format!("{} [env: {}] [default: {}]", setting.help, setting.env(), setting.default);
        let arg = Arg::new(setting.flag)
            .long(setting.flag)
            .value_name(setting.value_name())
            .allow_negative_numbers(true)
            .help_heading(heading)
            .help(help);
        match (setting.is_boolean(), setting.is_list()) {
            (true, _) => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
            (_, true) => arg.action(clap::ArgAction::Append),
            _ => arg,
        }
    }))
}

/// Of each setting the flag, else the variable.
fn read(
    matches: &ArgMatches,
    tables: &'static [&'static str],
) -> Result<Vec<Override>, clap::Error> {
    let mut overrides = Vec::new();
    for setting in of_tables(tables) {
        // A command without the flag has no such id.
        let given = matches.try_get_many::<String>(setting.flag).ok().flatten();
        let flag = given.map(|values| values.map(String::as_str).collect::<Vec<_>>().join(","));
        let (value, origin) = match flag {
            Some(value) => (value, Origin::Flag(format!("--{}", setting.flag))),
            None => match variable(&setting.env())? {
                Some(value) => (value, Origin::Environment(setting.env())),
                None => continue,
            },
        };
        overrides.push(Override { path: setting.path(), value, origin });
    }
    Ok(overrides)
}

/// What the flags before the command and their variables say about the log.
pub fn log(filter: Option<&str>, format: Option<&str>) -> Result<Overrides> {
    let mut overrides = Vec::new();
    for (setting, flag) in of_tables(GLOBAL_TABLES).zip([filter, format]) {
        let flag = flag.map(|text| (text.to_owned(), Origin::Flag(format!("--{}", setting.flag))));
        let variable = variable(&setting.env())
            .map_err(|e| Error::usage(e.to_string().trim_end().to_owned()))?
            .map(|text| (text, Origin::Environment(setting.env())));
        if let Some((value, origin)) = flag.or(variable) {
            overrides.push(Override { path: setting.path(), value, origin });
        }
    }
    Ok(Overrides(overrides))
}

fn variable(name: &str) -> Result<Option<String>, clap::Error> {
    match std::env::var_os(name).filter(|value| !value.is_empty()) {
        None => Ok(None),
        Some(value) => value.into_string().map(Some).map_err(|_| {
            clap::Error::raw(ErrorKind::InvalidUtf8, format!("{name} is not UTF-8\n"))
        }),
    }
}

/// `ENGINE_HOST_RESOURCES__MAIN_KV__PAGES` and its like.
fn of_resources() -> Result<Vec<Override>, clap::Error> {
    let prefix = format!("{ENV_PREFIX}RESOURCES__");
    let mut overrides = Vec::new();
    for (name, _) in std::env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        let Some(rest) = name.strip_prefix(&prefix) else { continue };
        let Some(value) = variable(name)? else { continue };
        let path = format!("resources.{}", rest.replacen("__", ".", 1));
        overrides.push(Override { path, value, origin: Origin::Environment(name.to_owned()) });
    }
    Ok(overrides)
}

/// Variables that look like settings and are none, each with the setting that was probably meant.
pub fn misspelt_variables() -> Vec<String> {
    const OTHERS: [&str; 3] = ["ENGINE_HOST_MODEL", "ENGINE_HOST_CUDA_LIBS", "ENGINE_HOST_KERNELS"];
    let known: Vec<String> = SETTINGS.iter().map(Setting::env).collect();
    let given = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let strange = given.filter(|name| {
        name.starts_with(ENV_PREFIX)
            && !known.contains(name)
            && !OTHERS.contains(&name.as_str())
            && !name.starts_with("ENGINE_HOST_RESOURCES__")
    });
    let bare = |name: &str| name.strip_prefix(ENV_PREFIX).unwrap_or(name).to_owned();
    let bare_known: Vec<String> = known.iter().map(|name| bare(name)).collect();
    let near = |name: String| {
        let near = suggest::nearest(&bare(&name), bare_known.iter().map(String::as_str))?;
        Some(format!("{name} is no setting; did you mean {ENV_PREFIX}{near}?"))
    };
    strange.filter_map(near).collect()
}

impl FromArgMatches for EngineFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut overrides = read(matches, ENGINE_TABLES)?;
        overrides.extend(read(matches, GLOBAL_TABLES)?);
        overrides.extend(of_resources()?);
        for text in matches.get_many::<String>(SET).into_iter().flatten() {
            let each = Override::from_set(text)
                .map_err(|message| clap::Error::raw(ErrorKind::ValueValidation, message + "\n"))?;
            overrides.push(each);
        }
        Ok(Self(Overrides(overrides)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for EngineFlags {
    fn augment_args(command: Command) -> Command {
        let set = Arg::new(SET)
            .long(SET)
            .value_name("PATH=VALUE")
            .action(clap::ArgAction::Append)
            .help_heading("Settings")
            .help("Any setting by its path, such as resources.main_kv.pages=8192; may come more than once");
        declare(command.arg(set), ENGINE_TABLES, "Settings")
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServerFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(Overrides(read(matches, SERVER_TABLES)?)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ServerFlags {
    fn augment_args(command: Command) -> Command {
        declare(command, SERVER_TABLES, "Settings of the server")
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
