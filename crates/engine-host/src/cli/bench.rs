//! `engine-host bench`.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::ConfigArg;
use crate::bench::{Kinds, Linked, Pool, Shape, record, step};
use crate::error::Result;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// What the resources cost per step, without a model
    Step(StepArgs),
}

#[derive(Args)]
pub struct StepArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// One JSON object per line instead of a table
    #[arg(long)]
    json: bool,
    /// Few shapes and few steps
    #[arg(long)]
    quick: bool,
    /// Only these, such as 256x4k or 256x4kx1M (batch, context, pool of pages)
    #[arg(long, value_name = "BxL[xPOOL]", value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// Only pools of these sizes: `enough`, `1M`, `16M`
    #[arg(long, value_name = "POOL", value_delimiter = ',')]
    pools: Vec<Pool>,
}

/// Runs a benchmark with plugins, or with the kinds that the program has linked in.
pub fn run(command: &BenchCommand, linked: Option<Linked>) -> Result<ExitCode> {
    match command {
        BenchCommand::Step(args) => run_step(args, linked),
    }
}

fn run_step(args: &StepArgs, linked: Option<Linked>) -> Result<ExitCode> {
    let mut options = match (args.shapes.is_empty(), args.quick) {
        (false, quick) => step::Options::only(args.shapes.clone(), quick),
        (true, true) => step::Options::quick(),
        (true, false) => step::Options::full(),
    };
    if !args.pools.is_empty() {
        options.shapes.retain(|shape| args.pools.contains(&shape.pool));
    }
    let kinds = Kinds::load(&args.config.load()?, linked)?;
    if !args.json {
        println!("{}", record::heading());
    }
    step::run(&kinds, &options, &mut |record| match args.json {
        true => println!("{record}"),
        false => println!("{}", record::line(&record)),
    })?;
    Ok(ExitCode::SUCCESS)
}
