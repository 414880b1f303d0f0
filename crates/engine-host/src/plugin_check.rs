//! Runs the conformance check ([`resource_testkit::check`]) on a plugin file, in a process of its own:
//! a plugin that ends the process, or never comes back, is a finding like any other.
//!
//! The process in between is this program again ([`child::run`]). It says on its standard output, one
//! JSON object per line, which operation is about to begin and what was found; so the last line of one
//! that died tells where.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};

pub mod child;
mod subject;

/// How much a plugin may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time of the whole check.
    pub deadline: Duration,
    /// Time of any single call.
    pub call: Duration,
    /// Gibibytes of memory.
    pub memory: u64,
}

/// How often the memory of the process is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What was found out about a plugin.
#[derive(Debug, Default)]
pub struct Checked {
    /// What the check says about each kind, as text and as [`resource_testkit::check::Report::to_json`].
    pub reports: Vec<(String, Value)>,
    /// What ended the process, or kept it from starting: one line each.
    pub fatal: Vec<String>,
    /// What is worth knowing and no fault.
    pub notes: Vec<String>,
}

impl Checked {
    /// Whether nothing was found, and something was tried.
    pub fn is_clean(&self) -> bool {
        let clean = |(_, report): &(String, Value)| report["clean"] == true;
        self.fatal.is_empty() && !self.reports.is_empty() && self.reports.iter().all(clean)
    }

    /// As JSON: `clean`, `fatal`, `notes`, `kinds`.
    pub fn to_json(&self) -> Value {
        let kinds: Vec<&Value> = self.reports.iter().map(|(_, report)| report).collect();
        json!({ "clean": self.is_clean(), "fatal": self.fatal, "notes": self.notes, "kinds": kinds })
    }
}

/// Checks the plugin kind by kind. `command` makes this program again as the process in between that
/// starts with the kind of this index.
///
/// # Errors
/// When that process cannot be started, or what was asked for cannot be done (`usage`).
pub fn check(command: impl Fn(usize) -> Command, patience: Patience) -> Result<Checked> {
    let mut checked = Checked::default();
    let end = Instant::now() + patience.deadline;
    let mut first = 0;
    // A kind that ends the process does not keep the others from their turn.
    while let Some(next) = check_from(command(first), patience, end, &mut checked)? {
        first = next;
    }
    Ok(checked)
}

/// Where a process in between is.
#[derive(Default)]
struct Progress {
    kind: Option<(usize, String)>,
    operation: String,
    done: bool,
}

/// One process in between. Gives the kind to go on with, where the process did not reach the end.
fn check_from(
    mut command: Command,
    patience: Patience,
    end: Instant,
    checked: &mut Checked,
) -> Result<Option<usize>> {
    let failed = |e| Error::new(ErrorKind::Internal, format!("the check cannot be started: {e}"));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let lines = lines_of(child.stdout.take());
    let mut progress = Progress::default();
    let (mut heard, mut looked) = (Instant::now(), Instant::now());
    let late = loop {
        match lines.recv_timeout(LOOK) {
            Ok(line) => {
                note(&line, &mut progress, checked)?;
                heard = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() >= end {
            break Some("the deadline passed".to_owned());
        }
        if heard.elapsed() >= patience.call {
            break Some("it did not come back".to_owned());
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            if resident_kib(child.id()) > patience.memory.saturating_mul(1 << 20) {
                break Some(format!("it took more than {} GiB of memory", patience.memory));
            }
        }
    };
    let how = end_of(&mut child, late.as_deref())?;
    if progress.done && late.is_none() {
        return Ok(None);
    }
    let kind = progress.kind.as_ref().map_or(String::new(), |(_, kind)| format!("kind {kind}: "));
    checked.fatal.push(format!("{kind}{how} in: {}", progress.operation));
    let over = Instant::now() >= end;
    Ok(progress.kind.filter(|_| !over).map(|(index, _)| index + 1))
}

/// Memory that a process has; 0 where the system does not tell.
fn resident_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn lines_of(output: Option<ChildStdout>) -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        let reader = output.into_iter().flat_map(|o| BufReader::new(o).split(b'\n'));
        for line in reader.map_while(std::result::Result::ok) {
            if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    lines
}

/// Takes in a line. What is not ours is the plugin's own output.
fn note(line: &str, progress: &mut Progress, checked: &mut Checked) -> Result<()> {
    let Ok(Value::Object(said)) = serde_json::from_str::<Value>(line) else { return Ok(()) };
    let text = |name: &str| said.get(name).and_then(Value::as_str).map(str::to_owned);
    if let Some(operation) = text("begin") {
        progress.operation = operation;
    } else if let (Some(kind), Some(index)) = (text("kind"), said.get("index")) {
        progress.kind = Some((index.as_u64().unwrap_or(0) as usize, kind));
    } else if let (Some(shown), Some(report)) = (text("text"), said.get("report")) {
        checked.reports.push((shown, report.clone()));
    } else if let Some(note) = text("note") {
        checked.notes.push(note);
    } else if let Some(refusal) = text("refused") {
        checked.fatal.push(refusal);
    } else if let Some(usage) = text("usage") {
        return Err(Error::usage(usage));
    } else if said.contains_key("done") {
        progress.done = true;
    }
    Ok(())
}

/// Waits for the process, or ends it, and says how it went.
fn end_of(child: &mut Child, late: Option<&str>) -> Result<String> {
    let failed = |e| Error::new(ErrorKind::Internal, format!("the process of the check: {e}"));
    if let Some(why) = late {
        child.kill().map_err(failed)?;
        child.wait().map_err(failed)?;
        return Ok(why.to_string());
    }
    let status = child.wait().map_err(failed)?;
    Ok(match status.signal() {
        Some(signal) => format!("the process died of signal {signal}"),
        None => format!("the process ended ({status})"),
    })
}
