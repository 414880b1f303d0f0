//! `engine-host prefill`: begins requests, and hands them over to another process.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use resource_api::{RequestId, Resource};
use serde_json::{Map, Value, json};

use super::generate::{self, explain};
use super::jobs;
use super::{ConfigArg, SamplingArgs};
use crate::engine::{Engine, Relay};
use crate::error::{Error, ErrorKind, Result};
use crate::request::Event;

/// How often published state is looked at while this process waits for it to be read.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Args)]
pub struct PrefillArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// Requests, one JSON object per line, as for `generate`
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: PathBuf,
    /// Where requests go, one per line, for `generate --prompts` of another process on this machine. The
    /// file is there once it is complete
    #[arg(long, value_name = "FILE.jsonl")]
    output: PathBuf,
    /// Tokens that are generated here
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tell on standard error whenever a resource has no room: which, how much, and what is done
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// A request that is running: its line, and the tokens it has generated.
struct Begun {
    at: usize,
    fields: Map<String, Value>,
    tokens: Vec<u32>,
}

/// Loads, begins, hands over, and waits until everything was read or its lease is over.
pub fn run(args: &PrefillArgs) -> Result<ExitCode> {
    let defaults = args.sampling.fields()?;
    let config = args.config.load()?;
    if config.engine.transfer.name().is_none() {
        let what = format!(
            "{}: `transfer` is not set in [engine]; with \"shared-memory\" other processes of this machine can \
             read what is handed over",
            config.file
        );
        return Err(Error::usage(what));
    }
    File::open(&args.prompts)
        .map_err(|e| Error::usage(format!("cannot read {}: {e}", args.prompts.display())))?;
    let mut loaded = generate::load(&args.config)?;
    let mut lines: Vec<Option<Value>> = Vec::new();
    let mut begun: HashMap<RequestId, Begun> = HashMap::new();
    let mut failed = 0;
    for (at, mut job) in
        jobs::read_file(&args.prompts, &defaults, &loaded.model)?.into_iter().enumerate()
    {
        let request = std::mem::replace(&mut job.request, Ok(Default::default()));
        let relay = Relay { from: job.handover.take(), after: Some(args.tokens) };
        let submitted = request.and_then(|request| {
            let fields = line(&job.id, std::mem::take(&mut job.fields), &request.prompt);
            let generated = relay.from.as_ref().map_or(Vec::new(), |from| from.tokens.clone());
            let rid = loaded.engine.submit_relayed(request, relay)?;
            Ok((rid, fields, generated))
        });
        lines.push(None);
        match submitted {
            Ok((rid, fields, tokens)) => drop(begun.insert(rid, Begun { at, fields, tokens })),
            Err(e) => lines[at] = Some(failure(&job.id, &job.error(&e), &mut failed)),
        }
    }
    while !loaded.engine.is_idle() {
        let events = loaded.engine.step().to_vec();
        for event in events {
            let rid = event.request();
            match (&event, begun.get_mut(&rid)) {
                (Event::Token(_, token), Some(begun)) => {
                    begun.tokens.push(token.id);
                    continue;
                }
                (Event::Prompt(..), _) => continue,
                _ => {}
            }
            let Some(Begun { at, mut fields, tokens }) = begun.remove(&rid) else { continue };
            let handover = match event {
                Event::HandedOver(_, handover) => *handover,
                // It needs no state any more.
                Event::Finished(_, _, usage) => loaded.engine.hand_over_ended(tokens, usage),
                Event::Failed(_, why) => {
                    lines[at] = Some(failure(&fields["id"], &why.message, &mut failed));
                    continue;
                }
                Event::Token(..) | Event::Prompt(..) => continue,
            };
            fields.insert("handover".into(), handover.to_json());
            lines[at] = Some(Value::Object(fields));
        }
        explain(&loaded, args.explain);
    }
    write_all(&args.output, lines.iter().flatten())?;
    wait_for_readers(&loaded.engine);
    match failed {
        0 => Ok(ExitCode::SUCCESS),
        failed => {
            note!("error: {failed} of {} requests failed; their lines say why", lines.len());
            Ok(ExitCode::FAILURE)
        }
    }
}

/// A request as a line of a file, its prompt as ids.
fn line(id: &Value, mut fields: Map<String, Value>, prompt: &[u32]) -> Map<String, Value> {
    for name in ["prompt", "messages", "tools", "parse_special"] {
        fields.remove(name);
    }
    fields.insert("id".into(), id.clone());
    fields.insert("prompt_ids".into(), json!(prompt));
    fields
}

fn failure(id: &Value, message: &str, failed: &mut usize) -> Value {
    *failed += 1;
    json!({ "id": id, "error": { "message": message } })
}

/// Writes beside the file and puts it there as a whole.
fn write_all<'a>(path: &Path, lines: impl Iterator<Item = &'a Value>) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".part");
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(&beside)?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        file.flush()?;
        std::fs::rename(&beside, path)
    };
    let failed =
        |e| Error::new(ErrorKind::Internal, format!("cannot write {}: {e}", path.display()));
    write().map_err(failed)
}

/// Resources that publish say in what `inspect` gives how many leases there are: `published.leases`.
fn wait_for_readers(engine: &Engine) {
    let leases = || -> u64 {
        let entries = engine.resources().entries().iter();
        let of = |text: String| {
            let state: Value = serde_json::from_str(&text).ok()?;
            state.pointer("/published/leases")?.as_u64()
        };
        entries.filter_map(|entry| of(entry.resource().inspect())).sum()
    };
    while leases() > 0 {
        std::thread::sleep(LOOK);
    }
}
