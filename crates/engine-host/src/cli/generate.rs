//! `engine-host generate`: one prompt with streamed text, or a file of requests as one batch.

use std::collections::HashMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use model::{Detokenizer, StopStrings};
use resource_api::RequestId;
use serde_json::{Map, Value, json};

use super::jobs::{self, Job};
use super::report::{self, Outcome};
use super::{ConfigArg, GenerateArgs};
use crate::engine::Relay;
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Event, FinishReason};
use crate::setup::{self, Loaded};

/// Loads, runs, prints.
pub fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let defaults = args.sampling.fields()?;
    check(args)?;
    let Some(path) = &args.prompts else {
        let mut all = defaults;
        all.extend(single(args));
        let mut loaded = load(&args.config)?;
        let done = run_single(&mut loaded, all, args.explain);
        return done.inspect(|_| stats(&loaded, args.stats));
    };
    // Before the model is loaded: a name that is wrong should not take seconds to be told.
    File::open(path).map_err(|e| Error::usage(format!("cannot read {}: {e}", path.display())))?;
    let mut output: Box<dyn Write> = match &args.output {
        None => crate::output::out(),
        Some(path) => Box::new(
            File::create(path)
                .map_err(|e| Error::usage(format!("cannot write {}: {e}", path.display())))?,
        ),
    };
    let mut loaded = load(&args.config)?;
    let jobs = jobs::read_file(path, &defaults, &loaded.model)?;
    let done = run_batch(&mut loaded, jobs, &mut output, args.explain);
    done.inspect(|_| stats(&loaded, args.stats))
}

/// What clap cannot say of these arguments.
fn check(args: &GenerateArgs) -> Result<()> {
    let wrong = |what: &str| Err(Error::usage(what));
    match args {
        _ if args.sampling.max_tokens == 0 => wrong("--max-tokens must be at least 1"),
        _ if args.output.is_some() && args.prompts.is_none() => wrong("--output needs --prompts"),
        _ if args.parse_special && args.prompt.is_none() => wrong("--parse-special needs --prompt"),
        _ if args.sampling.logprobs.is_some() && args.prompts.is_none() => {
            wrong("--logprobs needs --prompts: its results hold them")
        }
        _ => Ok(()),
    }
}

/// The fields that `--prompt` or `--chat` stand for.
fn single(args: &GenerateArgs) -> Map<String, Value> {
    let mut fields = Map::new();
    if let Some(text) = &args.prompt {
        fields.insert("prompt".into(), json!(text));
        fields.insert("parse_special".into(), json!(args.parse_special));
    }
    if let Some(text) = &args.chat {
        fields.insert("messages".into(), json!([{ "role": "user", "content": text }]));
    }
    fields
}

pub(super) fn load(config: &ConfigArg) -> Result<Loaded> {
    let config = config.load()?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = "loading model {bar:30} {bytes}/{total_bytes} {bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    let loaded = setup::load(&config, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    loaded
}

fn run_single(loaded: &mut Loaded, fields: Map<String, Value>, tell: bool) -> Result<ExitCode> {
    let request = jobs::request(fields, &loaded.model)?;
    let tokenizer = loaded.model.tokenizer.clone();
    let mut text = Detokenizer::after(tokenizer, true, &request.prompt);
    loaded.engine.submit(request)?;
    let mut out = crate::output::out();
    let mut failure = None;
    while !loaded.engine.is_idle() {
        for event in loaded.engine.step() {
            let piece = match event {
                Event::Prompt(..) => String::new(),
                Event::Token(_, token) => text.push(token.id),
                Event::Finished(..) | Event::HandedOver(..) => text.flush(),
                Event::Failed(_, why) => {
                    failure = Some(Error::new(why.kind, why.message.clone()));
                    text.flush()
                }
            };
            write(&mut out, piece.as_bytes())?;
        }
        explain(loaded, tell);
    }
    write(&mut out, b"\n")?;
    drop(out);
    note!("{}", report::figures(&loaded.engine));
    failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// A request of a batch on its way to a result line.
struct Slot {
    id: Value,
    outcome: Outcome,
    logprobs: bool,
    min_tokens: usize,
    done: bool,
}

/// The text of a request on its way.
struct Text {
    detokenizer: Detokenizer,
    stop: StopStrings,
}

/// Runs all requests as one batch. Results come in the order of the input, each as soon as it and
/// all before it are there.
fn run_batch(
    loaded: &mut Loaded,
    jobs: Vec<Job>,
    output: &mut dyn Write,
    tell: bool,
) -> Result<ExitCode> {
    let tokenizer = loaded.model.tokenizer.clone();
    let mut running: HashMap<RequestId, (usize, Text)> = HashMap::new();
    let mut slots = Vec::with_capacity(jobs.len());
    for (at, mut job) in jobs.into_iter().enumerate() {
        let request = std::mem::replace(&mut job.request, Ok(Default::default()));
        let mut outcome = Outcome::default();
        let (mut logprobs, mut min_tokens) = (false, 0);
        let submitted = request.and_then(|request| {
            outcome.prompt_ids.clone_from(&request.prompt);
            logprobs = request.logprobs.is_some();
            min_tokens = request.min_tokens as usize;
            let detokenizer = Detokenizer::after(tokenizer.clone(), true, &request.prompt);
            let stop = StopStrings::new(std::mem::take(&mut job.stop), false);
            let mut text = Text { detokenizer, stop };
            let relay = Relay { from: job.handover.take(), after: None };
            for &id in relay.from.iter().flat_map(|handover| &handover.tokens) {
                let piece = text.detokenizer.push(id);
                outcome.text.push_str(&text.stop.push(&piece));
                outcome.handed_over.push(id);
            }
            loaded.engine.submit_relayed(request, relay).map(|rid| (rid, text))
        });
        let done = submitted.is_err();
        match submitted {
            Ok((rid, text)) => {
                running.insert(rid, (at, text));
            }
            Err(e) => outcome.error = Some(job.error(&e)),
        }
        slots.push(Slot { id: job.id, outcome, logprobs, min_tokens, done });
    }
    let bar = progress(slots.len() as u64);
    bar.set_position((slots.len() - running.len()) as u64);
    let mut written = 0;
    loop {
        while let Some(slot) = slots.get(written).filter(|slot| slot.done) {
            let line = report::line(&slot.id, &slot.outcome, slot.logprobs);
            write(output, format!("{line}\n").as_bytes())?;
            written += 1;
        }
        if loaded.engine.is_idle() {
            break;
        }
        for event in loaded.engine.step().to_vec() {
            let rid = event.request();
            let Some((at, text)) = running.get_mut(&rid) else { continue };
            let slot = &mut slots[*at];
            match event {
                Event::Prompt(_, tokens) => {
                    slot.outcome.prompt_tokens = tokens;
                    continue;
                }
                Event::Token(_, token) => {
                    let piece = text.detokenizer.push(token.id);
                    slot.outcome.tokens.push(token);
                    let is_early = slot.outcome.tokens.len() <= slot.min_tokens;
                    let certain =
                        if is_early { text.stop.pass(&piece) } else { text.stop.push(&piece) };
                    slot.outcome.text.push_str(&certain);
                    // An end that the engine does not know of, unless it has ended the request just now.
                    let found = text.stop.found().and_then(|_| loaded.engine.usage_of(rid));
                    let Some(usage) = found else { continue };
                    loaded.engine.cancel(rid);
                    slot.outcome.finish = Some((FinishReason::Stop, usage));
                }
                Event::Finished(_, reason, usage) => {
                    let rest = text.detokenizer.flush();
                    slot.outcome.text.push_str(&text.stop.push(&rest));
                    slot.outcome.text.push_str(&text.stop.flush());
                    let stopped = text.stop.found().map(|_| FinishReason::Stop);
                    slot.outcome.finish = Some((stopped.unwrap_or(reason), usage));
                }
                // Not asked for here.
                Event::HandedOver(..) => {}
                Event::Failed(_, why) => slot.outcome.error = Some(why.message),
            }
            slot.done = true;
            running.remove(&rid);
            bar.inc(1);
        }
        explain(loaded, tell);
    }
    bar.finish_and_clear();
    note!("{}", report::figures(&loaded.engine));
    let failed = slots.iter().filter(|slot| slot.outcome.error.is_some()).count();
    if failed > 0 {
        note!("error: {failed} of {} requests failed; their lines say why", slots.len());
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn explain(loaded: &Loaded, tell: bool) {
    for refusal in loaded.engine.refusals().iter().filter(|_| tell) {
        note!("{refusal}");
    }
}

fn stats(loaded: &Loaded, tell: bool) {
    if tell {
        report::usage(&loaded.engine).iter().for_each(|line| note!("{line}"));
    }
}

fn progress(requests: u64) -> ProgressBar {
    let hidden = requests < 2 || !std::io::stderr().is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(requests), target);
    if let Ok(style) = ProgressStyle::with_template("generating {bar:30} {pos}/{len} requests") {
        bar.set_style(style);
    }
    bar
}

fn write(out: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(|e| Error::new(ErrorKind::Internal, format!("cannot write the output: {e}")))
}
