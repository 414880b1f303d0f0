//! Steps of a task: a header, a command, how long it took.

use std::env;
use std::ffi::OsStr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// A running step. Everything about steps goes to stderr: stdout belongs to what a step runs.
pub struct Step {
    title: String,
    started: Instant,
}

impl Step {
    /// Prints the header.
    pub fn begin(title: impl Into<String>) -> Self {
        let title = title.into();
        eprintln!("\n==> {title}");
        Self { title, started: Instant::now() }
    }

    /// Prints how long the step took.
    pub fn end(self) {
        eprintln!("    {} took {:.1} s", self.title, self.started.elapsed().as_secs_f64());
    }
}

/// The cargo that runs this task, at the root of the workspace.
pub fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(xtask::workspace_root());
    command
}

/// Runs `command` as a whole step.
pub fn run(title: &str, command: &mut Command) -> Result<()> {
    let step = Step::begin(title);
    expect_success(command)?;
    step.end();
    Ok(())
}

/// Runs `command`; anything but success is an error that names it.
pub fn expect_success(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
