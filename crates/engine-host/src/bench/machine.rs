//! What was measured, where and when.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Versions, processor, revision and day, as they stand in every result.
pub fn describe(source: &str) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "revision": revision(),
        "date": today(),
        "cpu": cpu(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "allowed_cpus": field("/proc/self/status", "Cpus_allowed_list"),
        "load": load(),
        "optimised": !cfg!(debug_assertions),
        "kinds": source,
    })
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Processes that wanted to run in the last minute, on average: above the number of cores, the
/// machine was shared.
fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Name of the processor; where it has none, its numbers.
pub fn cpu() -> String {
    let of = |name| field("/proc/cpuinfo", name).unwrap_or_default();
    let numbers = format!("family {}, model {}", of("cpu family"), field_model());
    format!("{} ({numbers})", of("model name"))
}

/// `model` is also the beginning of `model name`.
fn field_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model").then(|| value.trim().to_owned())
    });
    value.unwrap_or_default()
}

/// When and where results were measured, in words.
pub fn in_words(machine: &Value) -> String {
    let text = |key: &str| machine.get(key).and_then(Value::as_str).unwrap_or("?");
    format!(
        "{}, revision {}; {}, on CPU {}, with {} processes that wanted to run",
        text("date"),
        text("revision"),
        text("cpu"),
        text("allowed_cpus"),
        machine.get("load").and_then(Value::as_f64).unwrap_or(0.0),
    )
}

/// The revision of the sources in the working directory, with `+` when they are changed.
fn revision() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let revision = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { revision } else { revision + "+" })
}

/// The day in UTC, as `2026-11-30`.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86_400)
}

/// Days since 1970 as a date of the Gregorian calendar.
fn date(days: u64) -> String {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < days {
            break;
        }
        left -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (789, "1972-02-29"),
            (11_016, "2000-02-29"),
            (20_453, "2025-12-31"),
            (20_454, "2026-01-01"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
