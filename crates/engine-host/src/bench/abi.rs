//! `bench abi`: the same steps with plugins and with the same kinds linked in, in turns.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::sections::Section;
use super::stats::median;
use super::{child, machine, record};
use crate::error::{Error, ErrorKind, Result};

/// Name of the program that has the kinds linked in.
pub const LINKED_PROGRAM: &str = "engine-host-static";

/// Compares the medians of pairs of runs.
///
/// # Errors
/// When one of the two programs is missing or fails.
pub fn run(
    linked: Option<&Path>,
    config: Option<&Path>,
    shape: &str,
    pairs: usize,
    quick: bool,
) -> Result<Value> {
    let own = std::env::current_exe()
        .map_err(|e| Error::new(ErrorKind::Internal, format!("no path of this program: {e}")))?;
    let linked = linked.map_or_else(|| own.with_file_name(LINKED_PROGRAM), PathBuf::from);
    if !linked.exists() {
        let message = format!(
            "{} does not exist: `cargo build --release -p engine-bench` builds it, and --linked \
             names another place",
            linked.display()
        );
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    let config = config.map(|path| path.display().to_string());
    let mut args = vec!["bench", "step", "--json", "--shapes", shape];
    if quick {
        args.push("--quick");
    }
    let linked_args = args.clone();
    args.extend(config.iter().flat_map(|path| ["--config", path.as_str()]));
    let mut ratios: [Vec<f64>; 2] = Default::default();
    let mut times: [Vec<[f64; 2]>; 2] = Default::default();
    for pair in 0..pairs {
        let run = |first: bool| match first {
            true => totals(&own, &args),
            false => totals(&linked, &linked_args),
        };
        // Whoever comes second finds the machine as the first has left it.
        let (plugins, linked) = match pair % 2 {
            0 => {
                let plugins = run(true)?;
                (plugins, run(false)?)
            }
            _ => {
                let linked = run(false)?;
                (run(true)?, linked)
            }
        };
        for i in 0..2 {
            ratios[i].push(plugins[i] / linked[i]);
            times[i].push([plugins[i], linked[i]]);
        }
    }
    let of = |i: usize| {
        let column = |j: usize| median(&times[i].iter().map(|t| t[j]).collect::<Vec<_>>());
        let (low, high) =
            ratios[i].iter().fold((f64::MAX, 0.0f64), |(low, high), &r| (low.min(r), high.max(r)));
        json!({
            "plugins_us": column(0), "linked_us": column(1),
            "ratio": median(&ratios[i]), "lowest": low, "highest": high, "pairs": pairs,
        })
    };
    Ok(json!({
        "bench": "abi",
        "what": "plugins over linked",
        "shape": shape,
        "without_page_ends": of(0),
        "with_page_ends": of(1),
        "machine": machine::describe("both"),
    }))
}

/// The result as a line.
pub fn line(result: &Value) -> String {
    let of = |part: &str, key: &str| {
        result.get(part).and_then(|p| p.get(key)?.as_f64()).unwrap_or(f64::NAN)
    };
    let part = |part: &str, name: &str| {
        format!(
            "{name} {:.2} us over {:.2} us = {:.3} ({:.3} to {:.3})",
            of(part, "plugins_us"),
            of(part, "linked_us"),
            of(part, "ratio"),
            of(part, "lowest"),
            of(part, "highest")
        )
    };
    format!(
        "plugins over linked, {}, {} pairs: {}; {}",
        result.get("shape").and_then(Value::as_str).unwrap_or("?"),
        of("with_page_ends", "pairs"),
        part("without_page_ends", "no page ends"),
        part("with_page_ends", "page ends")
    )
}

const SECTION: Section = Section { name: "plugin boundary", command: "abi" };

/// Writes the result into `docs/performance.md`.
///
/// # Errors
/// When the file cannot be written.
pub fn report(docs: &Path, result: &Value) -> Result<()> {
    let text = format!(
        "## The plugin boundary\n\nThe same kinds as plugins and linked into the program, in pairs of fresh \
         processes that take turns at being first: medians, and the median, lowest and highest of the pairs' \
         ratios. Measured on {}.\n\n{}\n",
        machine::in_words(&result["machine"]),
        line(result),
    );
    SECTION.write(docs, &text)
}

/// Median microseconds of a step without page ends, and with them.
fn totals(program: &Path, args: &[&str]) -> Result<[f64; 2]> {
    let results = child::results(program, args, &[])?;
    let mut totals = results
        .iter()
        .filter(|r| r.get("what").and_then(Value::as_str) == Some("decode"))
        .filter_map(|r| record::number(r, "total", "median"));
    match (totals.next(), totals.next()) {
        (Some(none), Some(ends)) => Ok([none, ends]),
        _ => {
            let message = format!("{} measured no decode step", program.display());
            Err(Error::new(ErrorKind::Internal, message))
        }
    }
}
