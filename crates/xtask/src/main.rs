//! `cargo xtask`: builds and installs the plugins, fetches the model, compiles kernels, runs the demo, the
//! tests and the long fuzz corpora.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod checks;
mod demo;
mod device_test;
mod kernels;
mod model;
mod plugins;
mod progress;
mod sanitize;
mod step;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of this workspace", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the host and the plugins, and install the plugins into plugins/
    Build(plugins::BuildOptions),
    /// Fetch the model that demo and tests run, unless it is there
    FetchModel,
    /// Ask a real model a question: build, fetch the model, stream the answer
    Demo(demo::DemoOptions),
    /// Pack the tests and benchmarks of the CUDA back end, and run them where there is a GPU
    DeviceTest(device_test::DeviceTestOptions),
    /// Compile the CUDA kernels, which takes no GPU: check them, or make those of a release
    Kernels(kernels::KernelOptions),
    /// Damage manifests and libraries at random and load them, fifty and ten times as many as `test` does
    Fuzz,
    /// Run tests under Miri, a sanitizer or valgrind
    Sanitize(sanitize::SanitizeOptions),
    /// Run what CI runs: format, lints, docs, plugins, model, all tests
    Test,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Build(options) => plugins::build(&options).map(|_| ExitCode::SUCCESS),
        Task::FetchModel => model::fetch().map(|_| ExitCode::SUCCESS),
        Task::Demo(options) => demo::run(&options),
        Task::DeviceTest(options) => device_test::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Kernels(options) => kernels::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Fuzz => checks::fuzz(),
        Task::Sanitize(options) => sanitize::sanitize(&options).map(|()| ExitCode::SUCCESS),
        Task::Test => checks::run(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
