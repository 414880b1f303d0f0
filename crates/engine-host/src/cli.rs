//! The command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value, json};

use crate::bench::Linked;
use crate::config::{Config, LogFormat};
use crate::error::{Error, Result};

/// A line on standard output. A reader that has gone (`| head`), or a full disk, ends the program
/// with a failure, never with a panic.
macro_rules! say {
    ($($text:tt)*) => { $crate::cli::print_line(format_args!($($text)*)) };
}
/// A line on standard error, which may be closed.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod bench;
mod bench_model;
mod check;
mod config;
mod doctor;
mod generate;
mod jobs;
mod plugins;
mod prefill;
mod report;
mod serve;
mod settings;

use settings::{EngineFlags, Overrides, misspelt_variables};

#[derive(Parser)]
#[command(name = "engine-host", version, about = "Serves transformer models with plugin resources")]
struct Cli {
    /// Log filter, such as `info` or `engine_host=debug` [env: ENGINE_HOST_LOG] [default: "warn"]
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
    /// How lines of the log are written: text or json [env: ENGINE_HOST_LOG_FORMAT] [default: "text"]
    #[arg(long, global = true, value_name = "FORMAT", id = "log-format")]
    log_format: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text for one prompt, one chat message, or a file of requests
    Generate(Box<GenerateArgs>),
    /// Answer OpenAI's API over HTTP
    Serve(Box<serve::ServeArgs>),
    /// Begin requests and hand them over to another process, which goes on with `generate`
    Prefill(Box<prefill::PrefillArgs>),
    /// What is in the plugin directories
    #[command(subcommand)]
    Plugin(PluginCommand),
    /// What the configuration says, and whether it will do
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// What the host costs beside the model
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

#[derive(Args)]
struct ConfigArg {
    /// Configuration file; without it the built-in one is used
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: EngineFlags,
}

impl ConfigArg {
    fn load(&self) -> Result<Config> {
        self.load_with(&Overrides::default())
    }

    /// With further settings, of tables that not every command reads.
    fn load_with(&self, more: &Overrides) -> Result<Config> {
        // What `--set` says comes last, and counts most.
        let overrides = [more.0.as_slice(), self.flags.0.0.as_slice()].concat();
        let config = Config::with(self.config.as_deref(), &overrides)?;
        misspelt_variables().iter().for_each(|line| tracing::warn!("{line}"));
        Ok(config)
    }

    fn path(&self) -> Option<&std::path::Path> {
        self.config.as_deref()
    }
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
struct GenerateArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// Text to complete
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Option<String>,
    /// A message to answer, put through the model's chat template
    #[arg(long, value_name = "TEXT", group = "input")]
    chat: Option<String>,
    /// Requests, one JSON object per line, decoded as one continuous batch
    #[arg(long, value_name = "FILE.jsonl", group = "input")]
    prompts: Option<PathBuf>,
    /// Where results of --prompts go, one JSON object per line; without it to standard output
    #[arg(long, value_name = "FILE.jsonl")]
    output: Option<PathBuf>,
    /// Control-token strings in --prompt become those tokens
    #[arg(long)]
    parse_special: bool,
    /// Tell on standard error whenever a resource has no room: which, how much, and what is done
    #[arg(long)]
    explain: bool,
    /// Tell on standard error what each resource has taken
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Defaults for every request; a line of a --prompts file overrides them.
#[derive(Args)]
struct SamplingArgs {
    /// Most tokens to generate per request
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// 0 picks the likeliest token; the sampler's default is 0.6
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Keep the K likeliest tokens; 0 or -1 keeps all
    #[arg(long, allow_negative_numbers = true)]
    top_k: Option<i64>,
    /// Keep the likeliest tokens that reach this probability together
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Keep tokens at least this likely relative to the likeliest
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Above 1 makes tokens that were seen less likely
    #[arg(long, allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// Seed of the random choice
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds that a request may take, waiting included
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    timeout: Option<f64>,
    /// Go on after end-of-generation tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Report the K likeliest tokens with each generated one
    #[arg(long, value_name = "K")]
    logprobs: Option<u32>,
}

impl SamplingArgs {
    /// As the fields of a request line.
    fn fields(&self) -> Result<Map<String, Value>> {
        let mut fields = Map::new();
        let mut number = |name: &str, value: Option<f64>| -> Result<()> {
            let Some(value) = value else { return Ok(()) };
            // JSON has no NaN or infinity; the sampler would never see what was typed.
            let json = serde_json::Number::from_f64(value).ok_or_else(|| {
                Error::usage(format!("--{name} must be a finite number, got {value}"))
            })?;
            fields.insert(name.replace('-', "_"), Value::Number(json));
            Ok(())
        };
        number("temperature", self.temperature)?;
        number("top-p", self.top_p)?;
        number("min-p", self.min_p)?;
        number("repetition-penalty", self.repetition_penalty)?;
        number("timeout", self.timeout)?;
        fields.insert("max_tokens".into(), json!(self.max_tokens));
        fields.extend(self.top_k.map(|k| ("top_k".into(), json!(k))));
        fields.extend(self.seed.map(|s| ("seed".into(), json!(s))));
        fields.extend(self.ignore_eos.then(|| ("ignore_eos".into(), json!(true))));
        fields.extend(self.logprobs.map(|k| ("logprobs".into(), json!(k))));
        Ok(fields)
    }
}

#[derive(Args)]
struct ListArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// All that is known about a contract that does not fit
    #[arg(long)]
    verbose: bool,
    /// Run a short request through the configured engine, and tell what each plugin has taken
    #[arg(long)]
    stats: bool,
}

#[derive(Subcommand)]
enum PluginCommand {
    /// Every manifest found, with what became of it
    List(ListArgs),
    /// Every stage that a plugin goes through until it is loaded, and how it fares
    Doctor {
        #[command(flatten)]
        config: ConfigArg,
        /// Directories, manifests or libraries; without any, those of the configuration
        #[arg(value_name = "FILE|DIR")]
        paths: Vec<PathBuf>,
        /// As JSON
        #[arg(long)]
        json: bool,
        /// All that is known about a contract that does not fit
        #[arg(long)]
        verbose: bool,
    },
    /// Writes plugins.lock: from then on only the plugins that are there now are loaded
    Trust {
        #[command(flatten)]
        config: ConfigArg,
    },
    /// Loads the library on standard input: what the host does in a child process
    #[command(hide = true)]
    Probe,
    /// Try a plugin against the contract: its rules, and random operations
    Check(Box<check::CheckArgs>),
}

/// Runs the program: 0 for success, 1 for failure, 2 for wrong usage.
pub fn main() -> ExitCode {
    main_with(None)
}

/// Likewise, for a program that has the measured kinds linked in: `bench` uses them.
pub fn main_with(linked: Option<Linked>) -> ExitCode {
    let cli = Cli::parse();
    crate::output::claim();
    device::let_large_files_fail();
    if let Err(e) = start_log(&cli) {
        return fail(&e);
    }
    let done = match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Prefill(args) => prefill::run(args),
        Command::Plugin(command) => match command {
            PluginCommand::List(args) => plugins::list(args),
            PluginCommand::Doctor { config, paths, json, verbose } => {
                doctor::doctor(config, paths, *json, *verbose)
            }
            PluginCommand::Trust { config } => doctor::trust(config),
            PluginCommand::Probe => Ok(crate::probe::child()),
            PluginCommand::Check(args) => check::run(args),
        },
        Command::Config(command) => config::run(command),
        Command::Bench(command) => bench::run(command, linked),
    };
    match done {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

/// What flags, variables and the configuration file say about the log. A file that cannot be read is
/// told by the command that reads it.
fn start_log(cli: &Cli) -> Result<()> {
    let file = match &cli.command {
        Command::Generate(args) => args.config.path(),
        Command::Serve(args) => args.config_path(),
        _ => None,
    };
    let said = settings::log(cli.log.as_deref(), cli.log_format.as_deref())?;
    let log = match Config::with(file, &said.0) {
        Ok(config) => config.log,
        Err(_) => Config::with(None, &said.0)?.log,
    };
    let filter = tracing_subscriber::EnvFilter::try_new(&log.filter)
        .map_err(|e| Error::usage(format!("log filter {:?}: {e}", log.filter)))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_writer(std::io::stderr);
    match log.format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().init(),
    }
    Ok(())
}

fn print_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let mut out = crate::output::out();
    if let Err(e) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        note!("error: cannot write the output: {e}");
        std::process::exit(1);
    }
}

fn fail(error: &Error) -> ExitCode {
    for line in error.to_string().lines() {
        note!("error: {line}");
    }
    ExitCode::from(error.exit_code())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// No two flags of a command have the same name.
    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
