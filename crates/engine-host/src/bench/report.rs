//! Results of `bench step` as a section of the documentation, with plots.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::machine;
use super::peers::{PEERS, Peer, SHAPES, measured};
use super::plot::{Series, chart};
use super::processes::spread;
use super::record::{number, us};
use super::sections::{Section, failed};
use crate::error::Result;

const SECTION: Section = Section { name: "step cost", command: "step" };

/// Writes the plots into `docs/img` and the section into `docs/performance.md`, in place of the one
/// that is there.
///
/// # Errors
/// When a file cannot be written.
pub fn write(docs: &Path, records: &[Value]) -> Result<()> {
    let images = docs.join("img");
    fs::create_dir_all(&images).map_err(|e| failed(&images, &e))?;
    for (name, svg) in plots(records) {
        let path = images.join(name);
        fs::write(&path, svg).map_err(|e| failed(&path, &e))?;
    }
    SECTION.write(docs, &section(records))
}

fn of<'a>(record: &'a Value, key: &str) -> Option<&'a Value> {
    record.get(key).filter(|v| !v.is_null())
}

fn int(record: &Value, key: &str) -> u32 {
    of(record, key).and_then(Value::as_f64).map_or(0, |x| x as u32)
}

fn text<'a>(record: &'a Value, key: &str) -> &'a str {
    of(record, key).and_then(Value::as_str).unwrap_or("")
}

fn is(record: &Value, what: &str) -> bool {
    text(record, "what") == what
}

/// Decode results at this shape: median total without and with page ends.
fn decode(records: &[Value], batch: u32, context: u32, pool: &str) -> [Option<f64>; 2] {
    let mut found = [None; 2];
    let here = |r: &&Value| {
        is(r, "decode")
            && (int(r, "batch"), int(r, "context")) == (batch, context)
            && text(r, "pool") == pool
    };
    for record in records.iter().filter(here) {
        let ends = of(record, "page_ends").and_then(Value::as_f64).is_some_and(|e| e > 0.0);
        found[usize::from(ends)] = number(record, "total", "median");
    }
    found
}

fn distinct(records: &[Value], key: &str) -> Vec<u32> {
    let mut all: Vec<u32> =
        records.iter().filter(|r| is(r, "decode")).map(|r| int(r, key)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn pools(records: &[Value]) -> Vec<String> {
    let mut pools: Vec<String> = Vec::new();
    for record in records.iter().filter(|r| is(r, "decode")) {
        let pool = text(record, "pool").to_owned();
        if !pools.contains(&pool) {
            pools.push(pool);
        }
    }
    pools
}

const NAMES: [&str; 2] = ["engine-host", "engine-host, B/16 page ends"];

/// Our two lines over some shapes.
fn own(records: &[Value], shapes: &[(f64, u32, u32, &str)]) -> Vec<Series> {
    let line = |ends: usize| {
        let point = |&(x, batch, context, pool): &(f64, u32, u32, &str)| {
            Some((x, decode(records, batch, context, pool)[ends]?))
        };
        let points = shapes.iter().filter_map(point).collect();
        Series { name: NAMES[ends].into(), points, own: true }
    };
    vec![line(0), line(1)]
}

fn peers(records: &[Value], x: impl Fn(u32, u32) -> Option<f64>) -> impl Iterator<Item = Series> {
    PEERS.iter().filter(|p| p.plotted).map(move |peer: &Peer| {
        let point = |(&(batch, context), &us): (&(u32, u32), &f64)| {
            let us = measured(records, peer, (batch, context)).unwrap_or(us);
            Some((x(batch, context)?, us))
        };
        let points = SHAPES.iter().zip(&peer.us).filter_map(point).collect();
        Series { name: peer.short.into(), points, own: false }
    })
}

fn plots(records: &[Value]) -> Vec<(&'static str, String)> {
    let y = "microseconds a step (median)";
    let over: Vec<_> = distinct(records, "batch")
        .into_iter()
        .map(|batch| (f64::from(batch), batch, 4096, "enough"))
        .collect();
    let mut batch = own(records, &over);
    batch.extend(peers(records, |batch, context| (context == 4096).then_some(batch.into())));
    let over: Vec<_> = distinct(records, "context")
        .into_iter()
        .map(|context| (f64::from(context), 256, context, "enough"))
        .collect();
    let mut context = own(records, &over);
    context.extend(peers(records, |batch, context| (batch == 256).then_some(context.into())));
    let pages = |pool: &str| match pool.strip_suffix('M') {
        Some(digits) => digits.parse::<f64>().map_or(1.0, |n| n * 1_048_576.0),
        None => 256.0 * 273.0,
    };
    let pools = pools(records);
    let mut pool = Vec::new();
    for context in distinct(records, "context") {
        let over: Vec<_> =
            pools.iter().map(|pool| (pages(pool), 256, context, pool.as_str())).collect();
        for (mut line, ends) in own(records, &over).into_iter().zip(["", ", page ends"]) {
            line.name = format!("L = {context}{ends}");
            line.own = ends.is_empty();
            pool.push(line);
        }
    }
    vec![
        ("step-batch.svg", chart("Decode step, 4,096 tokens each", "requests", y, &batch)),
        ("step-context.svg", chart("Decode step, 256 requests", "tokens of each", y, &context)),
        ("step-pool.svg", chart("Decode step, 256 requests", "pages of the pool", y, &pool)),
    ]
}

fn section(records: &[Value]) -> String {
    let mut out = String::from("## Step cost\n\n");
    let machine = records.first().and_then(|r| of(r, "machine")).cloned().unwrap_or_default();
    let _ = writeln!(
        out,
        "What the host and its four resources (kv with its prefix index, attention, positions, sampler) cost \
         per step beside the model: plugins through dlopen, no forward pass, page size 16. Measured on {} \
         (medians of a machine that others use too: take them as upper bounds). Figures are medians over {} \
         fresh processes. Microseconds; a step is admit, plan, commit and outputs through the runner. One plan \
         in {} was compared, entry by entry, with a record kept apart from the resources.\n",
        machine::in_words(&machine),
        records.first().map_or(1, |r| int(r, "processes").max(1)),
        super::decode::PERIOD,
    );
    out.push_str(
        "![cost against batch](img/step-batch.svg)\n![cost against context](img/step-context.svg)\n\
         ![cost against pool](img/step-pool.svg)\n\n",
    );
    table_of_shapes(&mut out, records);
    table_of_methods(&mut out, records);
    publishing(&mut out, records);
    other_steps(&mut out, records);
    table_of_peers(&mut out, records);
    out
}

/// What it costs to publish every request of a step, which no other phase contains.
fn publishing(out: &mut String, records: &[Value]) {
    let here = |r: &&Value| {
        is(r, "decode")
            && (int(r, "context"), text(r, "pool")) == (4096, "enough")
            && of(r, "page_ends").and_then(Value::as_f64) == Some(0.0)
    };
    let each: Vec<String> = records
        .iter()
        .filter(here)
        .filter_map(|r| {
            Some(format!("{} at B = {}", us(number(r, "publish", "median")?), int(r, "batch")))
        })
        .collect();
    if !each.is_empty() {
        let _ = writeln!(
            out,
            "Publishing every request of a step, a phase of its own: {}.\n",
            each.join(", ")
        );
    }
}

fn table_of_shapes(out: &mut String, records: &[Value]) {
    out.push_str("Median without a page end / with B/16 of them (p99 of the latter; how far the processes' medians of \
         the former lie apart):\n\n| B | L |");
    let pools = pools(records);
    for pool in &pools {
        let _ = match pool.as_str() {
            "enough" => write!(out, " pool just enough |"),
            pool => write!(out, " {pool} pages |"),
        };
    }
    let _ = writeln!(out, "\n|---|---|{}", "---|".repeat(pools.len()));
    for batch in distinct(records, "batch") {
        for context in distinct(records, "context") {
            let _ = write!(out, "| {batch} | {context} |");
            for pool in &pools {
                let cell = decode(records, batch, context, pool);
                let p99 = records.iter().find(|r| {
                    is(r, "decode")
                        && (int(r, "batch"), int(r, "context")) == (batch, context)
                        && text(r, "pool") == pool
                        && of(r, "page_ends").and_then(Value::as_f64) > Some(0.0)
                });
                let p99 = p99.and_then(|r| number(r, "total", "p99")).unwrap_or(0.0);
                let apart = apart(records, batch, context, pool);
                let _ = match cell {
                    [Some(none), Some(ends)] => {
                        write!(out, " {} / {} ({}{apart}) |", us(none), us(ends), us(p99))
                    }
                    _ => write!(out, " - |"),
                };
            }
            out.push('\n');
        }
    }
    out.push('\n');
}

/// How far the medians of the processes lie apart at a shape without page ends.
fn apart(records: &[Value], batch: u32, context: u32, pool: &str) -> String {
    let found = records.iter().find(|r| {
        is(r, "decode")
            && (int(r, "batch"), int(r, "context")) == (batch, context)
            && text(r, "pool") == pool
    });
    found.and_then(spread).map_or(String::new(), |share| format!("; {:.0}%", share * 100.0))
}

fn table_of_methods(out: &mut String, records: &[Value]) {
    let at = |ends: bool| {
        records.iter().find(|r| {
            is(r, "decode")
                && (int(r, "batch"), int(r, "context")) == (256, 4096)
                && (of(r, "page_ends").and_then(Value::as_f64) > Some(0.0)) == ends
        })
    };
    let methods = |record: Option<&Value>| record.and_then(|r| of(r, "methods_us")).cloned();
    let (Some(none), Some(ends)) = (methods(at(false)), methods(at(true))) else { return };
    out.push_str(
        "Where it goes at B = 256, L = 4096 (medians, each method timed by itself, without / with 16 page \
         ends):\n\n| resource | admit | plan | commit | on_outputs |\n|---|---|---|---|---|\n",
    );
    for (key, _) in none.as_object().into_iter().flatten() {
        let _ = write!(out, "| {key} |");
        for method in super::phases::METHODS {
            let of = |v: &Value| v.get(key)?.get(method)?.get("median")?.as_f64();
            let show = |v: &Value| of(v).map_or("-".into(), us);
            let _ = write!(out, " {} / {} |", show(&none), show(&ends));
        }
        out.push('\n');
    }
    out.push('\n');
}

fn other_steps(out: &mut String, records: &[Value]) {
    out.push_str(
        "Other steps (the engine's own scheduling and book-keeping is the turn without resources; the other \
         turn is a step of all resources as well):\n\n",
    );
    for record in records.iter().filter(|r| !is(r, "decode") && !is(r, "peer")) {
        let line = super::record::line(record);
        line.lines().for_each(|line| {
            let _ = writeln!(out, "- {line}");
        });
    }
    out.push('\n');
}

fn table_of_peers(out: &mut String, records: &[Value]) {
    out.push_str(
        "Others, decode step, medians in microseconds; only rows that cover the same four resources do the \
         same work. Those marked * ran in the same run on the same core; the rest was measured in November \
         2026 on two cores of a Sapphire Rapids server.\n\n| | covers |",
    );
    for (batch, context) in SHAPES {
        let _ = write!(out, " B={batch} L={context} |");
    }
    let _ = writeln!(out, "\n|---|---|{}", "---|".repeat(SHAPES.len()));
    for (ends, name) in NAMES.iter().enumerate() {
        let _ = write!(out, "| **{name}** | kv with prefix index, attention, positions, sampler |");
        for (batch, context) in SHAPES {
            let time = decode(records, batch, context, "enough")[ends];
            let _ = write!(out, " {} |", time.map_or("-".into(), us));
        }
        out.push('\n');
    }
    for peer in PEERS {
        let _ = write!(out, "| {} | {} |", peer.name, peer.covers);
        for (&shape, &known) in SHAPES.iter().zip(&peer.us) {
            let _ = match measured(records, &peer, shape) {
                Some(here) => write!(out, " {}* |", us(here)),
                None => write!(out, " {} |", us(known)),
            };
        }
        out.push('\n');
    }
}
