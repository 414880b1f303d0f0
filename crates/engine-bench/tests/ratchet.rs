//! Instructions of a decode step may not grow unnoticed.
//!
//! Callgrind counts them, so the figures do not depend on how busy or fast the machine is. They do
//! depend on the compiler, and only optimised code is worth counting. A change that means to alter
//! them records them anew: `ENGINE_HOST_RATCHET=write cargo test --release -p engine-bench`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Instructions per step, by shape.
type Counts = BTreeMap<String, u64>;

const SHAPES: [&str; 3] = ["1x4096", "32x4096", "256x4096"];
/// Growth that is let pass, in percent.
const TOLERANCE: f64 = 3.0;
/// What is measured is the difference between runs of so many steps.
const STEPS: [u64; 2] = [16, 80];

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ratchet.toml")
}

fn instructions(shape: &str, steps: u64) -> u64 {
    let out = std::env::temp_dir().join(format!("callgrind.{}", std::process::id()));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", &format!("--callgrind-out-file={}", out.display())])
        .arg(env!("CARGO_BIN_EXE_engine-host-static"))
        .args(["bench", "ratchet", "--shape", shape, "--steps", &steps.to_string()])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let _ = std::fs::remove_file(&out);
    assert!(output.status.success(), "{text}");
    // ==123== Collected : 456
    let line = text.lines().find_map(|line| line.split_once("Collected :"));
    let count = line.and_then(|(_, count)| count.trim().parse().ok());
    count.unwrap_or_else(|| panic!("callgrind told no count:\n{text}"))
}

#[test]
fn steps_take_no_more_instructions_than_recorded() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("SKIPPED: valgrind is not installed, so no instructions are counted");
        return;
    }
    if cfg!(debug_assertions) {
        eprintln!("SKIPPED: counts are those of `cargo test --release -p engine-bench`");
        return;
    }
    let text = std::fs::read_to_string(file()).unwrap();
    let mut counts: Counts = toml::from_str(&text).unwrap();
    let write = std::env::var("ENGINE_HOST_RATCHET").is_ok_and(|v| v == "write");
    let mut grown = Vec::new();
    for shape in SHAPES {
        let [few, many] = STEPS.map(|steps| instructions(shape, steps));
        let per_step = (many - few) / (STEPS[1] - STEPS[0]);
        eprintln!("{shape}: {per_step} instructions a step");
        if write {
            counts.insert(shape.into(), per_step);
            continue;
        }
        let known = counts.get(shape).unwrap_or_else(|| panic!("{shape} is not recorded"));
        let change = (per_step as f64 / *known as f64 - 1.0) * 100.0;
        if change > TOLERANCE {
            grown.push(format!("{shape}: {known} -> {per_step} ({change:+.1}%)"));
        } else if change < -TOLERANCE {
            eprintln!("{shape}: {known} -> {per_step} ({change:+.1}%): record the gain");
        }
    }
    if write {
        let head: String = text
            .lines()
            .take_while(|l| l.starts_with('#'))
            .fold(String::new(), |head, line| head + line + "\n");
        let body = toml::to_string(&counts).unwrap();
        std::fs::write(file(), format!("{head}\n{body}")).unwrap();
    }
    assert!(
        grown.is_empty(),
        "a step takes over {TOLERANCE}% more instructions than recorded in ratchet.toml: {}; if that \
         is meant, record it: ENGINE_HOST_RATCHET=write cargo test --release -p engine-bench",
        grown.join(", ")
    );
}
