//! For tests: the plugin with the fake kinds, built and laid out as an operator would have it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::{env, fs, io};

use serde_json::Value;
use tempfile::TempDir;

/// Package that exports the fake kinds.
const PACKAGE: &str = "testkit-plugin";

/// A directory that holds the library of the fake kinds and its manifest, and nothing else. What
/// was loaded from it stays loaded when it is removed.
///
/// # Errors
/// What cargo or the file system say, in one line.
pub fn plugin_directory() -> io::Result<TempDir> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(PACKAGE);
    let directory = tempfile::Builder::new().prefix("testkit-").tempdir()?;
    let library = plugin_library()?;
    fs::copy(&library, directory.path().join(library.file_name().unwrap_or_default()))?;
    fs::copy(folder.join("plugin.toml"), directory.path().join("testkit.toml"))?;
    Ok(directory)
}

/// The library of the fake kinds, built by cargo at the first call in a process: plain
/// `cargo test` knows no way from a test to a cdylib.
///
/// # Errors
/// What cargo says.
pub fn plugin_library() -> io::Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build().map_err(|e| e.to_string()));
    built.clone().map_err(io::Error::other)
}

fn build() -> io::Result<PathBuf> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--package", PACKAGE, "--message-format=json-render-diagnostics"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    // What cargo tells a test about the test's own package is not for a build of another one.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|p| name.starts_with(p)) {
            command.env_remove(&*name);
        }
    }
    let output = command.output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("building {PACKAGE} failed ({})", output.status)));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let artifacts = messages.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let of_package = |m: &Value| {
        let kinds = m["target"]["kind"].as_array().into_iter().flatten();
        m["reason"] == "compiler-artifact"
            && kinds.into_iter().any(|k| k == "cdylib")
            && m["manifest_path"]
                .as_str()
                .is_some_and(|p| Path::new(p).ends_with("testkit-plugin/Cargo.toml"))
    };
    let built = artifacts.filter(of_package).find_map(|m| {
        let files = m["filenames"].as_array()?;
        files.iter().filter_map(Value::as_str).find(|f| f.ends_with(".so")).map(PathBuf::from)
    });
    built.ok_or_else(|| io::Error::other(format!("cargo built no shared library of {PACKAGE}")))
}
