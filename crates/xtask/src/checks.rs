//! `cargo xtask test`: what CI runs, in the order in which it fails fastest.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::step::{Step, cargo, run as run_step, shown};
use crate::{kernels, model, plugins};

/// Runs everything. The test runner comes last and nothing is printed after its summary; its exit
/// code is the task's.
pub fn run() -> Result<ExitCode> {
    run_step("format", &mut cargo(["fmt", "--all", "--check"]))?;
    let lints = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    run_step("lints", &mut cargo(lints))?;
    let mut docs = cargo(["doc", "--workspace", "--no-deps"]);
    run_step("docs", docs.env("RUSTDOCFLAGS", "-D warnings"))?;
    kernels::check_if_possible()?;
    plugins::build(&plugins::BuildOptions::default())?;
    let model = model::fetch()?;
    // In the profile of the plugins, so that little is built for it.
    let counts = ["test", "--release", "--package", "engine-bench"];
    run_step("instructions of a step", &mut cargo(counts))?;

    let mut tests = if has_nextest() {
        let mut doctests = cargo(["test", "--doc", "--workspace"]);
        run_step("doctests", doctests.env(model::MODEL_ENV, &model))?;
        cargo(["nextest", "run", "--workspace", "--no-fail-fast"])
    } else {
        cargo(["test", "--workspace", "--no-fail-fast"])
    };
    let _ = Step::begin("tests");
    let status = tests
        .env(model::MODEL_ENV, &model)
        .status()
        .with_context(|| format!("cannot run {}", shown(&tests)))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the long modes of the fuzz corpora.
pub fn fuzz() -> Result<ExitCode> {
    plugins::build(&plugins::BuildOptions::default())?;
    let mut tests =
        cargo(["test", "--package", "engine-host", "--test", "fuzz", "--", "--nocapture"]);
    run_step("fuzz", tests.env("ENGINE_HOST_FUZZ", "long"))?;
    Ok(ExitCode::SUCCESS)
}

fn has_nextest() -> bool {
    let mut probe: Command = cargo(["nextest", "--version"]);
    probe.stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}
