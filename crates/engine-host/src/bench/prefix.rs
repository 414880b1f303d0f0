//! `bench prefix`: what a cached prompt costs, call by call.

use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

use resource_api::{PrefixInputs, RequestId, RequestOverrides, Resource};
use serde_json::{Value, json};

use super::kinds::Kinds;
use super::machine;
use super::record::{number, us};
use super::rig::{Check, Geometry, PAGE, Prompt, Rig};
use super::sections::Section;
use super::stats::Summary;
use crate::error::{Error, ErrorKind, Result};

/// Prompts, in tokens.
const PROMPTS: [u32; 4] = [512, 4096, 16_384, 100_000];
/// Pages of the pool, all of them in the index.
const POOLS: [u32; 2] = [10_000, 1 << 20];
/// A step's share of a prompt that is stored in chunks.
const CHUNK: u32 = 256;
/// A request slot that no rig has given out.
const SLOT: u32 = 1 << 19;

/// What the asked prompt has in common with the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Common {
    All,
    Half,
    Nothing,
}

/// Measures, and hands every result out as soon as it is there.
///
/// # Errors
/// What a resource says; a prompt of which less is found than is stored.
pub fn run(kinds: &Kinds, quick: bool, emit: &mut dyn FnMut(Value)) -> Result<()> {
    let machine = machine::describe(kinds.source());
    let repeats = if quick { 50 } else { 500 };
    for pages in POOLS {
        let max_len = PROMPTS[PROMPTS.len() - 1] + 4 * PAGE;
        let mut rig = Rig::build(kinds, Geometry { pages, max_batch: 16, max_len })?;
        rig.fill()?;
        for len in PROMPTS {
            for (stored, chunk) in [("whole", len), ("chunks", CHUNK)] {
                rig.chunk = chunk;
                let prompt = rig.fresh_prompt(len);
                let mut owner = [rig.begin(prompt, 1)?];
                rig.compute(&mut owner, Check::None)?;
                let mut cases = vec![("held", Common::All)];
                if stored == "whole" {
                    cases.extend([("miss at the middle", Common::Half), ("miss", Common::Nothing)]);
                }
                for (case, common) in cases {
                    let mut record = ask(&mut rig, prompt, common, repeats)?;
                    describe(&mut record, &machine, pages, case, stored);
                    emit(record);
                }
                rig.end_all(&owner)?;
                let mut record = ask(&mut rig, prompt, Common::All, repeats)?;
                describe(&mut record, &machine, pages, "idle", stored);
                emit(record);
            }
        }
    }
    Ok(())
}

fn describe(record: &mut Value, machine: &Value, pages: u32, case: &str, stored: &str) {
    let Some(object) = record.as_object_mut() else { return };
    object.insert("bench".into(), json!("prefix"));
    object.insert("pool".into(), json!(pages));
    object.insert("case".into(), json!(case));
    object.insert("stored".into(), json!(stored));
    object.insert("machine".into(), machine.clone());
}

/// Asks the cache for a prompt and one more token, again and again.
fn ask(rig: &mut Rig, stored: Prompt, common: Common, repeats: u32) -> Result<Value> {
    let set = rig.runner.resources().clone();
    let missing = || Error::new(ErrorKind::Internal, "no resource \"kv\"");
    let kv = set.find("kv").ok_or_else(missing)?.1.resource();
    let mut samples = [const { Vec::<u64>::new() }; 4];
    let mut found = 0;
    for generation in 1..=repeats + repeats / 10 {
        let prompt = match common {
            Common::All => Prompt { len: stored.len + 1, ..stored },
            Common::Half => Prompt {
                common: stored.seed,
                shared: stored.len / 2,
                ..rig.fresh_prompt(stored.len + 1)
            },
            Common::Nothing => rig.fresh_prompt(stored.len + 1),
        };
        let tokens = prompt.tokens();
        rig.generation += 1;
        let rid = RequestId::new(SLOT, rig.generation);
        let start = Instant::now();
        kv.ingest_request(rid, &RequestOverrides::new("", &tokens, 1))?;
        let ingested = Instant::now();
        let matched = kv.resolve_cached_prefix(rid, rig.node, rig.prefill)?.unwrap_or(0);
        let resolved = Instant::now();
        if matched > 0 {
            let inputs = PrefixInputs::new(&tokens);
            kv.apply_cached_prefix(rid, rig.node, rig.prefill, &inputs, matched)?;
        }
        let applied = Instant::now();
        kv.remove_request(rid)?;
        let removed = Instant::now();
        if generation > repeats / 10 {
            let times = [start, ingested, resolved, applied, removed];
            for (samples, pair) in samples.iter_mut().zip(times.windows(2)) {
                samples.push(rig.nanos(pair[0], pair[1]));
            }
        }
        let expected = match common {
            Common::All => stored.len,
            Common::Half => stored.len / 2,
            Common::Nothing => 0,
        } / PAGE
            * PAGE;
        found = matched;
        if matched != expected {
            let message = format!("{matched} tokens of a prompt are cached, not {expected}");
            return Err(Error::new(ErrorKind::Internal, message));
        }
    }
    let [keys, matching, adopt, release] = samples.each_mut().map(|s| Summary::of(s, 1.0));
    Ok(json!({
        "what": format!("prompt of {} + 1", stored.len),
        "prompt": stored.len,
        "cached": found,
        "us": {
            "keys": keys.to_json(),
            "match": matching.to_json(),
            "adopt": adopt.to_json(),
            "release": release.to_json(),
        },
        "ns_per_token": {
            "keys": keys.median * 1e3 / f64::from(stored.len),
            "match and adopt": (matching.median + adopt.median) * 1e3 / f64::from(stored.len),
        },
    }))
}

const SECTION: Section = Section { name: "prefix cost", command: "prefix" };

/// Writes the results into `docs/performance.md`.
///
/// # Errors
/// When the file cannot be written.
pub fn report(docs: &Path, records: &[Value]) -> Result<()> {
    SECTION.write(docs, &section(records))
}

fn section(records: &[Value]) -> String {
    let mut out = String::from("## Cached prompts\n\n");
    let machine = records.first().map(|r| machine::in_words(&r["machine"])).unwrap_or_default();
    let _ = writeln!(
        out,
        "A prompt and one more token, through the plugin, with every page of the pool in the index. Keys are \
         made when a request is taken in. Stored by one step, or by chunks of {CHUNK} tokens; held by another \
         request, or by nobody. Measured on {machine}.\n\n\
         | pages | prompt | keys | match and adopt: held | idle | held, chunks | idle, chunks | release, us | \
         miss at the middle, us | miss at the first page, us |\n|---|---|---|---|---|---|---|---|---|---|\n\
         | | tokens | ns a token | ns a token | ns a token | ns a token | ns a token | idle | match | match |"
    );
    for pages in POOLS {
        for len in PROMPTS {
            let of = |case: &str, stored: &str| {
                records.iter().find(|r| {
                    r["pool"] == pages
                        && r["prompt"] == len
                        && r["case"] == case
                        && r["stored"] == stored
                })
            };
            let per_token = |case: &str, stored: &str, what: &str| {
                let value = of(case, stored).and_then(|r| r["ns_per_token"][what].as_f64());
                value.map_or_else(|| "-".into(), |ns| format!("{ns:.2}"))
            };
            let took = |case: &str, what: &str| {
                let value = of(case, "whole").and_then(|r| number(r, what, "median"));
                value.map_or_else(|| "-".into(), us)
            };
            let found = |case: &str, stored: &str| per_token(case, stored, "match and adopt");
            let _ = writeln!(
                out,
                "| {pages} | {len} | {} | {} | {} | {} | {} | {} | {} | {} |",
                per_token("held", "whole", "keys"),
                found("held", "whole"),
                found("idle", "whole"),
                found("held", "chunks"),
                found("idle", "chunks"),
                took("idle", "release"),
                took("miss at the middle", "match"),
                took("miss", "match"),
            );
        }
    }
    out
}
