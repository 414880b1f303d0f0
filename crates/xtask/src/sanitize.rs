//! `cargo xtask sanitize`: tests of the crates with unsafe code and threads, under a tool that watches
//! memory and races.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::step::{cargo, expect_success, run, shown};

#[derive(Args)]
pub struct SanitizeOptions {
    /// The tool
    tool: Tool,
    /// Crates whose tests run; those that the tool can take when none is named
    #[arg(long = "package", short = 'p')]
    packages: Vec<String>,
    /// Only tests whose name has this
    #[arg(long)]
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tool {
    /// Undefined behaviour, by interpretation: a nightly toolchain with `miri`
    Miri,
    /// Data races: a nightly toolchain with `rust-src`
    Thread,
    /// Memory errors: a nightly toolchain
    Address,
    /// Memory errors: valgrind, any toolchain
    Memcheck,
}

impl Tool {
    /// What is worth the time and what the tool can run: Miri takes no foreign code, so no plugin, no
    /// file mapping and no vector instruction.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Miri => &["resource-api"],
            _ => &["resource-api", "device", "resource-kv"],
        }
    }
}

/// Runs the tests under the tool.
pub fn sanitize(options: &SanitizeOptions) -> Result<()> {
    let tool = options.tool;
    let mut packages: Vec<String> = options.packages.clone();
    if packages.is_empty() {
        packages.extend(tool.packages().iter().map(|name| name.to_string()));
    }
    let packages = packages.iter().flat_map(|name| ["--package", name]);
    let filter = options.filter.iter().map(String::as_str);
    match tool {
        Tool::Miri => {
            need(&["+nightly", "miri", "--version"], "rustup +nightly component add miri")?;
            let mut tests = nightly(["miri", "test", "--lib", "--tests"]);
            tests.args(packages).arg("--").args(filter);
            // Layouts of the boundary are compared by address, and files are read.
            run("miri", tests.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-ignore-leaks"))
        }
        Tool::Thread | Tool::Address => {
            let name = if tool == Tool::Thread { "thread" } else { "address" };
            need(&["+nightly", "--version"], "rustup toolchain add nightly")?;
            let mut tests = nightly(["test", "--lib", "--tests", "--target", &host()?]);
            if tool == Tool::Thread {
                // Otherwise what the standard library does looks like a race.
                need_sources()?;
                tests.arg("-Zbuild-std");
            }
            tests.args(packages).arg("--").args(filter);
            // Libraries are never unloaded, so what they are known by stays.
            tests.env("ASAN_OPTIONS", "detect_leaks=0");
            run(name, tests.env("RUSTFLAGS", format!("-Zsanitizer={name}")))
        }
        Tool::Memcheck => {
            let mut probe = Command::new("valgrind");
            probe.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            if !probe.status().is_ok_and(|status| status.success()) {
                bail!("valgrind is not there: install it with the system's packages");
            }
            for binary in test_binaries(packages)? {
                let mut tests = Command::new("valgrind");
                // Not helgrind: it takes the standard library's locks, which are futexes, for races.
                tests.args([
                    "--quiet",
                    "--error-exitcode=99",
                    "--tool=memcheck",
                    "--leak-check=no",
                ]);
                tests.arg(&binary).args(filter.clone()).arg("--test-threads=1");
                tests.current_dir(xtask::workspace_root());
                let file = binary.file_name().unwrap_or_default().to_string_lossy().into_owned();
                run(&format!("memcheck {file}"), &mut tests)?;
            }
            Ok(())
        }
    }
}

fn need_sources() -> Result<()> {
    let output = Command::new("rustc").args(["+nightly", "--print", "sysroot"]).output()?;
    let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match PathBuf::from(sysroot).join("lib/rustlib/src/rust/library").is_dir() {
        true => Ok(()),
        false => bail!(
            "the nightly toolchain lacks the standard library's sources: `rustup +nightly \
             component add rust-src` gets them"
        ),
    }
}

/// The target that the nightly toolchain builds for by itself: with a target named, build scripts and
/// macros are built without the sanitizer.
fn host() -> Result<String> {
    let output = Command::new("rustc").args(["+nightly", "-vV"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).context("rustc does not say what it builds for")
}

/// A rustup proxy's cargo: the one that runs this task has no other toolchains.
fn nightly<const N: usize>(args: [&str; N]) -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").args(args).current_dir(xtask::workspace_root());
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
        command.env_remove(name);
    }
    command
}

fn need(args: &[&str], install: &str) -> Result<()> {
    let mut probe = Command::new("cargo");
    probe.args(args).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    probe.stdout(Stdio::null()).stderr(Stdio::null());
    match probe.status().is_ok_and(|status| status.success()) {
        true => Ok(()),
        false => bail!("`{}` does not work here: `{install}` makes it", shown(&probe)),
    }
}

/// The test programs of packages, built.
fn test_binaries<'a>(packages: impl Iterator<Item = &'a str>) -> Result<Vec<PathBuf>> {
    let mut build = cargo(["test", "--no-run", "--lib", "--tests"]);
    build.args(packages).arg("--message-format=json-render-diagnostics");
    build.stdout(Stdio::piped()).stderr(Stdio::inherit());
    let output = build.output()?;
    if !output.status.success() {
        expect_success(&mut build)?;
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |m: Value| m["executable"].as_str().map(PathBuf::from);
    Ok(messages.filter(|m| m["profile"]["test"] == true).filter_map(program).collect())
}
