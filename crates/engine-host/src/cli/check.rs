//! `engine-host plugin check`.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Args;
use resource_testkit::check::Options;

use crate::error::{Error, ErrorKind, Result};
use crate::plugin_check::{self, Patience, child};

/// Set for the process in between; the index of the kind that it starts with.
const FIRST: &str = "--first-kind";

#[derive(Args)]
pub struct CheckArgs {
    /// The plugin: its .so, or its manifest
    #[arg(value_name = "FILE.so|MANIFEST")]
    file: PathBuf,
    /// Only this kind of it
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Settings of the resource, as TOML or as the path of a TOML file; [dependencies.<key>] tables
    /// with a `kind` say what it is built on
    #[arg(long, value_name = "TOML")]
    settings: Option<String>,
    /// A plugin for what the kind depends on, beside the kit's own cache; may be repeated
    #[arg(long, value_name = "FILE.so|MANIFEST")]
    with: Vec<PathBuf>,
    /// Of the random operations; the same seed repeats them
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Most operations in one random sequence
    #[arg(long, value_name = "N")]
    steps: Option<u32>,
    /// Try for hours instead of seconds
    #[arg(long)]
    long: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Seconds after which the check is given up [default: 300, and a day with --long]
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,
    /// Seconds after which a single call counts as one that never comes back
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    patience: u64,
    /// Gibibytes of memory at which the check is given up
    #[arg(long, value_name = "GIB", default_value_t = 4)]
    memory: u64,
    #[arg(long, hide = true)]
    first_kind: Option<usize>,
}

/// 0 when nothing was found, 1 otherwise.
pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    if let Some(first) = args.first_kind {
        child::run(&request(args, first)?);
        return Ok(ExitCode::SUCCESS);
    }
    // What is wrong with the command line is said by this process.
    request(args, 0)?;
    let internal = |e| Error::new(ErrorKind::Internal, format!("the own program: {e}"));
    let program = std::env::current_exe().map_err(internal)?;
    let again = |first: usize| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg(FIRST).arg(first.to_string());
        command
    };
    let day = 24 * 3600;
    let patience = Patience {
        deadline: Duration::from_secs(args.deadline.unwrap_or(if args.long { day } else { 300 })),
        call: Duration::from_secs(args.patience.max(1)),
        memory: args.memory.max(1),
    };
    let checked = plugin_check::check(again, patience)?;
    if args.json {
        say!("{}", checked.to_json());
    } else {
        checked.reports.iter().for_each(|(text, _)| say!("{}", text.trim_end()));
        checked.notes.iter().for_each(|note| say!("note: {note}"));
        checked.fatal.iter().for_each(|what| say!("finding: {what}"));
        let seed = args.seed;
        match checked.is_clean() {
            true => say!("{}: nothing found (--seed {seed})", args.file.display()),
            false => say!("{}: see the findings (--seed {seed} repeats them)", args.file.display()),
        }
    }
    Ok(if checked.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn request(args: &CheckArgs, first: usize) -> Result<child::Request> {
    let mut options = if args.long { Options::long() } else { Options::default() };
    options.seed = args.seed;
    options.steps = args.steps.unwrap_or(options.steps);
    Ok(child::Request {
        file: args.file.clone(),
        kind: args.kind.clone(),
        settings: settings(args.settings.as_deref().unwrap_or_default())?,
        with: args.with.clone(),
        options,
        first,
    })
}

/// A file's content, where the text is the path of one.
fn settings(text: &str) -> Result<String> {
    if text.contains(['=', '\n', '[']) || text.trim().is_empty() {
        return Ok(text.to_owned());
    }
    std::fs::read_to_string(text).map_err(|e| {
        Error::usage(format!("--settings {text:?} is neither TOML nor a file to be read: {e}"))
    })
}
