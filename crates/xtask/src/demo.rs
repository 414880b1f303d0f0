//! `cargo xtask demo`: from a fresh checkout to an answer.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, anyhow};

use crate::{model, plugins};

#[derive(clap::Args)]
pub struct DemoOptions {
    /// What to ask
    #[arg(default_value = "Why is the sky blue?")]
    question: String,
    /// Further arguments of `engine-host generate`
    #[arg(last = true)]
    more: Vec<String>,
}

/// Builds, fetches the model and becomes `engine-host generate`, so that signals and the exit code
/// are its own.
pub fn run(options: &DemoOptions) -> Result<ExitCode> {
    let built = plugins::build(&plugins::BuildOptions::default())?;
    let model = model::fetch()?;
    let host = built.host.context("the build made no engine-host binary")?;
    eprintln!("\n==> {}", options.question);
    let error = Command::new(&host)
        .args(["generate", "--chat", &options.question])
        .args(&options.more)
        .env(model::MODEL_ENV, model)
        .current_dir(xtask::workspace_root())
        .exec();
    Err(anyhow!(error).context(format!("cannot run {}", host.display())))
}
