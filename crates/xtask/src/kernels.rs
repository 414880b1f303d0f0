//! `cargo xtask kernels`: compiles the kernels that the engine uses, without a GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;
use clap::Args;

use crate::step::{Step, cargo, expect_success, run as run_step};

/// The same variable that the host reads.
const LIBRARY_PATH_ENV: &str = "ENGINE_HOST_CUDA_LIBS";

/// The compiler that a release's kernels are made with.
const COMPILER: &str = "nvidia-cuda-nvrtc==13.0.88";

#[derive(Args)]
pub struct KernelOptions {
    /// Compile every named kernel for every released architecture and fail on spilled registers
    /// (what is done without any option)
    #[arg(long)]
    check: bool,
    /// Write the compiled kernels into a folder, which the host finds as kernels/ beside the program
    #[arg(long, value_name = "DIR")]
    embed: Option<PathBuf>,
    /// Only for this architecture of the released ones
    #[arg(long, value_name = "ARCH")]
    arch: Option<String>,
}

impl KernelOptions {
    /// Compiles into a folder, for all released architectures or for one.
    pub fn embedding(folder: PathBuf, arch: Option<String>) -> Self {
        Self { check: false, embed: Some(folder), arch }
    }
}

/// Compiles, checks and, if asked to, writes.
pub fn run(options: &KernelOptions) -> Result<()> {
    let mut command =
        cargo(["run", "--quiet", "--package", "device", "--example", "kernels", "--"]);
    if let Some(folder) = &options.embed {
        command.arg("--embed").arg(std::path::absolute(folder)?);
    }
    if let Some(arch) = &options.arch {
        command.args(["--arch", arch]);
    }
    if options.check || options.embed.is_none() {
        command.arg("--check");
    }
    if let Some(folder) = compiler() {
        command.env(LIBRARY_PATH_ENV, folder);
    }
    run_step("kernels", &mut command)
}

/// What continuous integration does: the check where the compiler can be had, a word where not.
pub fn check_if_possible() -> Result<()> {
    if compiler().is_none() {
        eprintln!("    no kernel is checked: pip cannot install {COMPILER} here");
        return Ok(());
    }
    run(&KernelOptions { check: true, embed: None, arch: None })
}

/// The folder of NVRTC: what the user names, else a package of pip's kept under target/. `None` where
/// there is neither; the host's own search may still find one.
fn compiler() -> Option<PathBuf> {
    if let Some(folders) = std::env::var_os(LIBRARY_PATH_ENV).filter(|v| !v.is_empty()) {
        return Some(folders.into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| xtask::workspace_root().join("target"));
    let packages = target.join("kernel-compiler");
    let folder = packages.join("nvidia/cu13/lib");
    if !folder.join("libnvrtc.so.13").is_file() {
        let step = Step::begin("kernel compiler");
        install(&packages).ok()?;
        step.end();
    }
    folder.is_dir().then_some(folder)
}

fn install(packages: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"])
        .args(["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--target"])
        .arg(packages)
        .arg(COMPILER)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    expect_success(&mut pip)
}
