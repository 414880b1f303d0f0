//! The reference page of all settings, `docs/configuration.md`.

use std::fmt::Write;

use super::settings::{SETTINGS, Setting, TABLES};

const HEAD: &str = "\
# Configuration

<!-- Written by `engine-host config reference`; what is changed by hand is lost. -->

Every setting can be said in three places; a later one counts more:

1. in the file that `--config` names (TOML; without it the built-in
   [`default.toml`](../crates/engine-host/src/config/default.toml)),
2. in the environment,
3. as a flag.

Unknown keys, wrong types and values out of range are errors that name the place and the nearest valid
name; all of them are told at once. Relative paths count from the file's directory, in flags and
variables from the working directory. Lists are written `a,b` in flags and variables. An empty variable
is none.

`engine-host config check` reads a configuration and looks at plugins and model without starting
anything, `config show` prints every value in force and where it comes from, `config schema` prints a
JSON Schema for editors. All take `--config`, flags and variables like the commands that run.
";

const RESOURCES: &str = "
## `[resources.<key>]`: what holds state for requests

| key | meaning | default |
|---|---|---|
| `kind` | the kind, offered by some plugin | required |
| `nodes` | nodes of the model that use the resource | required |
| `depends_on` | keys that must be built before, beside those that the kind finds in its settings | `[]` |
| `on_fault` | `\"fail_requests\"`, `\"restart\"` or `\"stop\"`: what happens when it has broken | `\"fail_requests\"` |

All other keys are settings of the kind, told in its plugin's documentation. `--set resources.main_kv.pages=8192`
and `ENGINE_HOST_RESOURCES__MAIN_KV__PAGES=8192` change one; `--set` takes any other setting, too.

## Variables that are no settings

| variable | meaning |
|---|---|
| `ENGINE_HOST_MODEL` | the model that is run when nobody says `model.path` |
| `ENGINE_HOST_CUDA_LIBS` | directories in which the CUDA libraries are looked for first |
";

/// The page, in Markdown.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for (table, about) in TABLES {
        let _ = write!(page, "\n## `[{table}]`: {}\n\n", lower_first(about));
        page.push_str("| key | flag | variable | meaning | default |\n|---|---|---|---|---|\n");
        for setting in SETTINGS.iter().filter(|setting| setting.table == *table) {
            let _ = writeln!(
                page,
                "| `{}` | `--{}` | `{}` | {} | {} |",
                setting.key,
                setting.flag,
                setting.env(),
                meaning(setting),
                default(setting)
            );
        }
    }
    page + RESOURCES
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

fn meaning(setting: &Setting) -> String {
    let help = lower_first(setting.help).replace('|', "\\|");
    let choices = setting.choices();
    match (choices.is_empty(), setting.range()) {
        (false, _) => format!("{help} (`{}`)", choices.join("`, `")),
        (_, Some(range)) => format!("{help} ({} to {})", range.start(), range.end()),
        _ => help,
    }
}

/// TOML as code, words as words.
fn default(setting: &Setting) -> String {
    match toml::from_str::<toml::Table>(&format!("v = {}", setting.default)) {
        Ok(_) => format!("`{}`", setting.default),
        Err(_) => setting.default.to_owned(),
    }
}
