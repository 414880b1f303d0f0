//! `cargo xtask device-test`: packs what a machine with a GPU and nothing else needs to test and
//! measure the CUDA back end, runs it where there is a GPU here, and keeps its reports.
//!
//! The pack holds the release build of the host, the plugins, compiled kernels, the test executables
//! with tests that need a GPU, a model and one script.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use toml_edit::DocumentMut;
use xtask::hash;

use crate::step::{Step, cargo, expect_success, shown};
use crate::{kernels, model, plugins};

/// Packages with tests that need a GPU, which are in `tests/cuda*.rs` or in `tests/decoder`.
const PACKAGES: [&str; 5] = ["device", "engine-host", "model", "resource-kv", "resource-sampler"];

#[derive(clap::Args)]
pub struct DeviceTestOptions {
    /// Folder for the pack; replaced
    #[arg(long, value_name = "DIR", default_value = "target/device-test")]
    pack: PathBuf,
    /// Also cut the pack into files PACK.part-* of at most this many MiB, to be joined and unpacked by
    /// `cat PACK.part-* | tar xz`
    #[arg(long, value_name = "MIB")]
    parts: Option<u32>,
    /// Leave out the model: what needs one is not run
    #[arg(long)]
    without_model: bool,
    /// Compile kernels for this architecture only
    #[arg(long, value_name = "ARCH")]
    arch: Option<String>,
    /// Pack nothing, but take over the report that run.sh wrote elsewhere
    #[arg(long, value_name = "RESULTS")]
    report: Option<PathBuf>,
}

/// Packs, and runs where there is a GPU; or takes over a report.
pub fn run(options: &DeviceTestOptions) -> Result<()> {
    if let Some(results) = &options.report {
        return keep_report(results);
    }
    let pack = xtask::workspace_root().join(&options.pack);
    build(&pack, options)?;
    if let Some(mebibytes) = options.parts {
        cut(&pack, mebibytes)?;
    }
    if !Path::new("/dev/nvidiactl").exists() {
        eprintln!("\nno GPU here: take {} to one and call run.sh there", pack.display());
        return Ok(());
    }
    let step = Step::begin("tests and benchmarks on the GPU");
    let results = pack.join("results");
    let ran = expect_success(Command::new(pack.join("run.sh")).arg(&results));
    keep_report(&results)?;
    step.end();
    ran
}

fn build(pack: &Path, options: &DeviceTestOptions) -> Result<()> {
    if pack.exists() {
        fs::remove_dir_all(pack).with_context(|| format!("cannot empty {}", pack.display()))?;
    }
    let built = plugins::build(&plugins::BuildOptions::default())?;
    let host = built.host.context("the build made no engine-host binary")?;
    let (folder, arch) = (pack.join("kernels"), options.arch.clone());
    kernels::run(&kernels::KernelOptions::embedding(folder, arch))?;
    let step = Step::begin("test executables");
    let tests = test_executables()?;
    step.end();

    let step = Step::begin(format!("pack in {}", pack.display()));
    copy_stripped(&host, &pack.join("engine-host"))?;
    let installed = xtask::workspace_root().join("plugins");
    for entry in fs::read_dir(&installed)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") && !name.starts_with('.') {
            pack_plugin(&path, &pack.join("plugins"))?;
        }
    }
    for (name, test) in tests {
        copy_stripped(&test, &pack.join("tests").join(name))?;
    }
    if !options.without_model {
        let model = model::fetch()?;
        copy(&model, &pack.join(model.file_name().unwrap_or_default()))?;
    }
    write(&pack.join("run.sh"), include_str!("device_test/run.sh"), 0o755)?;
    write(&pack.join("prompts.txt"), include_str!("device_test/prompts.txt"), 0o644)?;
    write(&pack.join("commit"), &commit(), 0o644)?;
    step.end();
    Ok(())
}

/// Builds the tests and answers where cargo put them, by package and name.
fn test_executables() -> Result<Vec<(String, PathBuf)>> {
    let mut command = cargo(["test", "--no-run", "--message-format=json"]);
    command.args(["--test", "cuda*", "--test", "decoder"]);
    PACKAGES.iter().for_each(|package| {
        command.args(["--package", package]);
    });
    let output = command.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("{} failed ({})", shown(&command), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executables = messages.filter(|m| m["target"]["kind"][0] == "test").filter_map(|m| {
        let package = Path::new(m["manifest_path"].as_str()?).parent()?.file_name()?;
        let name = format!("{}-{}", package.to_string_lossy(), m["target"]["name"].as_str()?);
        Some((name, PathBuf::from(m["executable"].as_str()?)))
    });
    Ok(executables.collect())
}

/// Copies a plugin's library, and its manifest with the digest of what was copied.
fn pack_plugin(manifest: &Path, to: &Path) -> Result<()> {
    let text = fs::read_to_string(manifest)?;
    let mut document: DocumentMut =
        text.parse().with_context(|| format!("{} is no TOML", manifest.display()))?;
    let library = document["plugin"]["library"].as_str().unwrap_or_default().to_owned();
    copy_stripped(&manifest.with_file_name(&library), &to.join(&library))?;
    if document["plugin"].get("sha256").is_some() {
        let digest = hash::of_file(&to.join(&library))?;
        document["plugin"]["sha256"] = toml_edit::value(digest);
    }
    write(&to.join(manifest.file_name().unwrap_or_default()), &document.to_string(), 0o644)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(Path::new(".")))?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to the pack", from.display()))?;
    Ok(())
}

/// Copies a program without its debug information, which is most of it; with it where there is no
/// `strip`.
fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    copy(from, to)?;
    let mut strip = Command::new("strip");
    let _ = strip.arg(to).stderr(Stdio::null()).status();
    Ok(())
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty"]).current_dir(xtask::workspace_root());
    let output = git.output().ok().filter(|o| o.status.success());
    output.map_or("unknown".into(), |o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
}

/// Makes `PACK.part-aa`, `PACK.part-ab`, ...
fn cut(pack: &Path, mebibytes: u32) -> Result<()> {
    let step = Step::begin(format!("parts of {mebibytes} MiB"));
    let (parent, name) = (pack.parent().unwrap_or(pack), pack.file_name().unwrap_or_default());
    let mut tar = Command::new("tar")
        .args(["czf", "-"])
        .arg(name)
        .current_dir(parent)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let archive = tar.stdout.take().context("tar's output cannot be read")?;
    let mut split = Command::new("split");
    split.args(["-b", &format!("{mebibytes}M"), "-"]).arg(format!("{}.part-", pack.display()));
    expect_success(split.stdin(archive))?;
    let status = tar.wait()?;
    if !status.success() {
        bail!("tar of {} failed ({status})", pack.display());
    }
    step.end();
    Ok(())
}

/// Copies a report to `docs/device/`, named by its first line: the GPU and the day.
fn keep_report(results: &Path) -> Result<()> {
    let path = results.join("report.md");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let title = text.lines().next().and_then(|line| line.strip_prefix("# ")?.split_once(", "));
    let (gpu, day) = title.with_context(|| format!("{} has no title", path.display()))?;
    let gpu = gpu.to_lowercase().replace("nvidia ", "").replace(' ', "-");
    let kept = xtask::workspace_root().join(format!("docs/device/{day}-{gpu}.md"));
    copy(&path, &kept)?;
    eprintln!("    {}", kept.display());
    Ok(())
}
