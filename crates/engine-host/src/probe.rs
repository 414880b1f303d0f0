//! Loading a plugin in a child process first. A library runs code as soon as it is mapped; what
//! crashes, ends or hangs the process then does so in the child.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::elf::CheckedFile;

/// Which plugins are probed before they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Probe {
    /// All.
    Always,
    /// Those whose content neither the manifest nor `plugins.lock` names.
    #[default]
    Unpinned,
    /// None.
    Never,
}

impl Probe {
    /// The names used in configurations.
    pub const NAMES: [(&'static str, Self); 3] =
        [("always", Self::Always), ("unpinned", Self::Unpinned), ("never", Self::Never)];
}

/// How long a plugin may take to be loaded.
const DEADLINE: Duration = Duration::from_secs(10);

/// What the child says once it is through. An exit code would not do: initialisers can end the child
/// with any. That the contract does not fit is no matter here: the parent will find the same, and say why.
const THROUGH: &[u8] = b"through\n";

/// Loads the checked file in a child process. Answers how long it took.
///
/// # Errors
/// One line: how the child ended, or that it did not.
pub fn probe(file: &CheckedFile) -> Result<Duration, String> {
    let program = program()?;
    let descriptor = file.file.try_clone().map_err(|e| format!("cannot be probed: {e}"))?;
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(["plugin", "probe"])
        .stdin(Stdio::from(descriptor))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("cannot be probed: no child process: {e}"))?;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let mut said = [0; THROUGH.len()];
                let answer = child.stdout.take().map(|mut out| out.read_exact(&mut said));
                let is_through = matches!(answer, Some(Ok(()))) && said == THROUGH;
                return judge(status, is_through).map(|()| start.elapsed());
            }
            Ok(None) if start.elapsed() < DEADLINE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!(
                    "hangs when it is loaded: a child process was not through after {} seconds",
                    DEADLINE.as_secs()
                ));
            }
            Err(e) => return Err(format!("cannot be probed: {e}")),
        }
    }
}

fn judge(status: ExitStatus, is_through: bool) -> Result<(), String> {
    match (status.code(), status.signal()) {
        (Some(0), _) if is_through => Ok(()),
        (Some(code), _) if is_through => {
            Err(format!("spoils the end of the process: a child exited with code {code}"))
        }
        (Some(code), _) => {
            Err(format!("ends the process when it is loaded: a child exited with code {code}"))
        }
        (None, signal) => Err(format!(
            "crashes when it is loaded: a child was ended by signal {}",
            signal.unwrap_or_default()
        )),
    }
}

/// This program, or the one beside the program that uses the library.
fn program() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|e| format!("cannot be probed: {e}"))?;
    let is_host = |p: &Path| p.file_stem().is_some_and(|stem| stem == "engine-host");
    let beside = own.ancestors().skip(1).take(2).map(|dir| dir.join("engine-host"));
    std::iter::once(own.clone())
        .chain(beside)
        .find(|path| is_host(path) && path.is_file())
        .ok_or_else(|| {
            "cannot be probed: no program engine-host is here to do it; pin its sha256 in the \
             manifest, or set probe = \"never\""
                .to_owned()
        })
}

/// The child: loads what standard input is.
pub fn child() -> ExitCode {
    let _ = resource_api::abi::library::load_trusted(Path::new("/proc/self/fd/0"));
    let mut out = crate::output::out();
    match out.write_all(THROUGH).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
