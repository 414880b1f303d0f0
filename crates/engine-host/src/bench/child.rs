//! Runs of this and other programs whose output is results, one JSON object per line.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};

/// Runs a program and reads its results.
///
/// # Errors
/// When it cannot be run, fails, or prints something else.
pub fn results(program: &Path, args: &[&str], env: &[(&str, &str)]) -> Result<Vec<Value>> {
    let shown = program.display();
    let failed = |why: String| Error::new(ErrorKind::Internal, format!("{shown}: {why}"));
    let mut command = Command::new(program);
    command.args(args).envs(env.iter().copied()).stderr(Stdio::inherit());
    let output = command.output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(format!("{} failed: {}", args.join(" "), output.status)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let parse = |line: &str| serde_json::from_str(line).map_err(|e| failed(format!("{e}: {line}")));
    text.lines().map(parse).collect()
}
