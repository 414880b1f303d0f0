//! Loading a plugin in a child process first. A library runs code as soon as it is mapped; what
//! crashes, ends, hangs or changes the process then does so in the child.

use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process_group,
    set_parent_process_death_signal, setrlimit, waitid,
};

use crate::elf::CheckedFile;

mod process;

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
const THROUGH: &str = "through\n";

/// The child says no more than that, or what has changed.
const MOST_SAID: usize = 256;

/// Loads the checked file in a child process. Answers how long it took.
///
/// # Errors
/// One line: how the child ended, or that it did not, or what it would change in this process.
pub fn probe(file: &CheckedFile) -> Result<Duration, String> {
    let program = program()?;
    let unprobed = |e: io::Error| format!("cannot be probed: no child process: {e}");
    let descriptor = file.file.try_clone().map_err(unprobed)?;
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(["plugin", "probe"])
        .stdin(Stdio::from(descriptor))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // A signal to the child's group is not for this process, and its own children can be found.
        .process_group(0)
        .spawn()
        .map_err(unprobed)?;
    let ended = wait(&child, start);
    // Before the child is forgotten, so that its number is still its own.
    let group = kill_process_group(Pid::from_child(&child), Signal::KILL);
    // It may have left its group.
    let _ = child.kill();
    let status = child.wait().map_err(unprobed)?;
    ended?;
    if let Err(e) = group {
        tracing::debug!("what {} may have started goes on: {e}", file.path.display());
    }
    judge(status, &said(&mut child)).map(|()| start.elapsed())
}

/// Waits for the end of a child that is not forgotten yet.
fn wait(child: &Child, start: Instant) -> Result<(), String> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    loop {
        match waitid(WaitId::Pid(Pid::from_child(child)), look) {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if start.elapsed() < DEADLINE => thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                return Err(format!(
                    "hangs when it is loaded: a child process was not through after {} seconds",
                    DEADLINE.as_secs()
                ));
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(format!("cannot be probed: {e}")),
        }
    }
}

/// What the child has said. Whoever else holds its end of the pipe is not waited for.
fn said(child: &mut Child) -> String {
    let mut bytes = [0; MOST_SAID];
    let read = child.stdout.take().and_then(|mut out| {
        fcntl_setfl(&out, OFlags::NONBLOCK).ok()?;
        out.read(&mut bytes).ok()
    });
    String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]).into_owned()
}

fn judge(status: ExitStatus, said: &str) -> Result<(), String> {
    let is_through = said == THROUGH;
    match (status.code(), status.signal()) {
        (Some(0), _) if is_through => Ok(()),
        (Some(0), _) if said.starts_with(CHANGES) => Err(said.trim_end().to_owned()),
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

/// How the child begins what it says about what has changed.
const CHANGES: &str = "changes the process when it is loaded: ";

/// The child: loads what standard input is, and looks at what that has changed.
pub fn child() -> ExitCode {
    give_way();
    let before = process::State::now();
    let _ = resource_api::abi::library::load_trusted(Path::new("/proc/self/fd/0"));
    let changes = before.changes(&process::State::now());
    let text = match changes.is_empty() {
        true => THROUGH.to_owned(),
        false => format!("{CHANGES}{}\n", changes.join(", ")),
    };
    let mut out = crate::output::out();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Most bytes that a library may make of memory while it is loaded.
const MOST_MEMORY: u64 = 2 << 30;

/// Whatever happens to this process is no loss: it takes little memory, goes first when memory runs out,
/// leaves no core, and does not outlive its parent. Where the system does not know how, nothing is lost
/// either.
fn give_way() {
    let memory = Some(MOST_MEMORY);
    let _ = setrlimit(Resource::Data, Rlimit { current: memory, maximum: memory });
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}
