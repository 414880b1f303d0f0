//! `engine-host bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::ConfigArg;
use super::bench_model::{self, ModelArgs};
use crate::bench::{
    Kinds, Linked, Pool, Shape, abi, copies, load, peers, prefix, processes, ratchet, record,
    report, step,
};
use crate::error::{Error, ErrorKind, Result};

#[derive(Subcommand)]
pub enum BenchCommand {
    /// What the resources cost per step, without a model
    Step(StepArgs),
    /// What a cached prompt costs: keys, match, adopt, release
    Prefix(PrefixArgs),
    /// How long loading takes, from the start of the process to resources that are built
    Load(LoadArgs),
    /// How fast the model is computed, in tokens per second
    Model(ModelArgs),
    /// Plugins against the same kinds linked in, in turns
    Abi(AbiArgs),
    /// Steps and nothing else, for a program that counts instructions
    #[command(hide = true)]
    Ratchet(RatchetArgs),
}

#[derive(Args)]
pub struct Common {
    #[command(flatten)]
    config: ConfigArg,
    /// One JSON object per line instead of a table
    #[arg(long)]
    json: bool,
    /// Less of everything: to see that all is well
    #[arg(long)]
    quick: bool,
}

impl Common {
    /// Prints a result.
    fn print(&self, result: &Value) {
        match self.json {
            true => say!("{result}"),
            false => say!("{}", record::line(result)),
        }
    }
}

#[derive(Args)]
pub struct StepArgs {
    #[command(flatten)]
    common: Common,
    /// Only these, such as 256x4k or 256x4kx1M (batch, context, pool of pages)
    #[arg(long, value_name = "BxL[xPOOL]", value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// Only pools of these sizes: `enough`, `1M`, `16M`
    #[arg(long, value_name = "POOL", value_delimiter = ',')]
    pools: Vec<Pool>,
    /// Fresh processes that all of it is measured in; 5 without --shapes and --quick, otherwise 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    processes: Option<u8>,
    /// Runs the programs of other engines in this directory, too (see scripts/peers)
    #[arg(long, value_name = "DIRECTORY")]
    peers: Option<PathBuf>,
    /// Writes DOCS/performance.md and the plots in DOCS/img anew
    #[arg(long, value_name = "DOCS", conflicts_with = "shapes")]
    report: Option<PathBuf>,
}

#[derive(Args)]
pub struct PrefixArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    report: ReportArg,
}

#[derive(Args)]
pub struct LoadArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    report: ReportArg,
    /// This process alone
    #[arg(long, hide = true, conflicts_with = "docs")]
    once: bool,
    /// Instead, so many copies of a plugin, each a library of its own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    copies: Option<u16>,
    /// Threads that load the copies
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    loaders: u8,
}

#[derive(Args)]
struct ReportArg {
    /// Writes this part of DOCS/performance.md anew
    #[arg(long = "report", value_name = "DOCS")]
    docs: Option<PathBuf>,
}

impl ReportArg {
    /// Has the part written, if that is wanted.
    fn write(&self, part: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.docs.as_deref().map_or(Ok(()), part)
    }
}

#[derive(Args)]
pub struct AbiArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    report: ReportArg,
    /// The program with the kinds linked in; without it the one beside this program
    #[arg(long, value_name = "PROGRAM")]
    linked: Option<PathBuf>,
    /// What is compared (batch, context, pool of pages)
    #[arg(long, value_name = "BxL[xPOOL]", default_value = "256x4k")]
    shape: String,
    /// Pairs of runs
    #[arg(long, default_value_t = 11)]
    pairs: usize,
}

#[derive(Args)]
pub struct RatchetArgs {
    #[command(flatten)]
    config: ConfigArg,
    #[arg(long)]
    shape: Shape,
    #[arg(long)]
    steps: u32,
}

/// Runs a benchmark with plugins, or with the kinds that the program has linked in.
pub fn run(command: &BenchCommand, linked: Option<Linked>) -> Result<ExitCode> {
    match command {
        BenchCommand::Step(args) => run_step(args, linked)?,
        BenchCommand::Prefix(PrefixArgs { common, report }) => {
            let kinds = Kinds::load(&common.config.load()?, linked)?;
            let mut results = Vec::new();
            prefix::run(&kinds, common.quick, &mut |result| {
                common.print(&result);
                results.push(result);
            })?;
            report.write(|docs| prefix::report(docs, &results))?;
        }
        BenchCommand::Load(LoadArgs { common, copies: Some(count), loaders, .. }) => {
            let (count, threads) = (usize::from(*count), usize::from(*loaders));
            common.print(&copies::run(&common.config.load()?, count, threads)?);
        }
        BenchCommand::Load(LoadArgs { common, once: true, .. }) => {
            say!("{}", load::once(|| common.config.load())?);
        }
        BenchCommand::Load(LoadArgs { common, once: false, report, .. }) => {
            let result = load::run(common.config.path(), common.quick)?;
            common.print(&result);
            report.write(|docs| load::report(docs, &result))?;
        }
        BenchCommand::Model(args) => bench_model::run(args)?,
        BenchCommand::Abi(args) => {
            args.shape.parse::<Shape>().map_err(Error::usage)?;
            let (linked, config) = (args.linked.as_deref(), args.common.config.path());
            let result = abi::run(linked, config, &args.shape, args.pairs, args.common.quick)?;
            match args.common.json {
                true => say!("{result}"),
                false => say!("{}", abi::line(&result)),
            }
            args.report.write(|docs| abi::report(docs, &result))?;
        }
        BenchCommand::Ratchet(args) => {
            ratchet::run(&Kinds::load(&args.config.load()?, linked)?, &args.shape, args.steps)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_step(args: &StepArgs, linked: Option<Linked>) -> Result<()> {
    let mut options = match (args.shapes.is_empty(), args.common.quick) {
        (false, quick) => step::Options::only(args.shapes.clone(), quick),
        (true, true) => step::Options::quick(),
        (true, false) => step::Options::full(),
    };
    if !args.pools.is_empty() {
        options.shapes.retain(|shape| args.pools.contains(&shape.pool));
    }
    options.processes = args.processes.map_or(options.processes, usize::from);
    if !args.common.json {
        say!("{}", record::heading());
    }
    let peers = || args.peers.as_deref().map_or(Ok(Vec::new()), peers::run);
    let mut results = match options.processes {
        1 => {
            let kinds = Kinds::load(&args.common.config.load()?, linked)?;
            let mut results = Vec::new();
            step::run(&kinds, &options, &mut |result| {
                args.common.print(&result);
                results.push(result);
            })?;
            let peers = peers()?;
            peers.iter().for_each(|result| args.common.print(result));
            results.extend(peers);
            results
        }
        count => {
            let results = in_processes(args, count, peers)?;
            results.iter().for_each(|result| args.common.print(result));
            results
        }
    };
    if let Some(fit) = step::fit_of(&results) {
        args.common.print(&fit);
        results.push(fit);
    }
    match &args.report {
        Some(docs) => report::write(docs, &results),
        None => Ok(()),
    }
}

/// The same in fresh processes of this program.
fn in_processes(
    args: &StepArgs,
    count: usize,
    peers: impl FnOnce() -> Result<Vec<Value>>,
) -> Result<Vec<Value>> {
    let program = std::env::current_exe()
        .map_err(|e| Error::new(ErrorKind::Internal, format!("no path of this program: {e}")))?;
    let mut words: Vec<String> =
        ["bench", "step", "--json", "--processes", "1"].map(Into::into).into();
    if args.common.quick {
        words.push("--quick".into());
    }
    if let Some(path) = args.common.config.path() {
        words.extend(["--config".into(), path.display().to_string()]);
    }
    for (name, list) in [
        ("--shapes", args.shapes.iter().map(Shape::spelled).collect::<Vec<_>>()),
        ("--pools", args.pools.iter().map(ToString::to_string).collect()),
    ] {
        if !list.is_empty() {
            words.extend([name.into(), list.join(",")]);
        }
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut results = processes::run(&program, &words, count, peers)?;
    // Each process has fitted its own figures; the fit over all of them follows.
    results.retain(|result| result.get("what").is_none_or(|what| what != "fit"));
    Ok(results)
}
