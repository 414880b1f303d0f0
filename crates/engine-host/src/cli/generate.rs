//! `engine-host generate`: one prompt with streamed text, or a file of requests as one batch.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use model::Detokenizer;
use resource_api::RequestId;
use serde_json::{Map, Value, json};

use super::jobs::{self, Job};
use super::report::{self, Outcome};
use super::{ConfigArg, GenerateArgs};
use crate::error::{Error, ErrorKind, Result};
use crate::request::Event;
use crate::setup::{self, Loaded};

/// Loads, runs, prints.
pub fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let defaults = args.sampling.fields()?;
    let mut loaded = load(&args.config)?;
    match (&args.prompts, single(args)) {
        (Some(path), _) => {
            let jobs = jobs::read_file(path, &defaults, &loaded.model)?;
            let mut output: Box<dyn Write> =
                match &args.output {
                    None => Box::new(std::io::stdout().lock()),
                    Some(path) => Box::new(BufWriter::new(File::create(path).map_err(|e| {
                        Error::usage(format!("cannot write {}: {e}", path.display()))
                    })?)),
                };
            run_batch(&mut loaded, jobs, &mut output)
        }
        (None, fields) => {
            let mut all = defaults;
            all.extend(fields);
            run_single(&mut loaded, all)
        }
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

fn load(config: &ConfigArg) -> Result<Loaded> {
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

fn run_single(loaded: &mut Loaded, fields: Map<String, Value>) -> Result<ExitCode> {
    let request = jobs::request(fields, &loaded.model)?;
    let tokenizer = loaded.model.tokenizer.clone();
    let mut text = Detokenizer::after(tokenizer, true, &request.prompt);
    loaded.engine.submit(request)?;
    let mut out = std::io::stdout().lock();
    let mut failure = None;
    while !loaded.engine.is_idle() {
        for event in loaded.engine.step() {
            let piece = match event {
                Event::Token(_, token) => text.push(token.id),
                Event::Finished(..) => text.flush(),
                Event::Failed(_, message) => {
                    failure = Some(Error::new(ErrorKind::Internal, message.clone()));
                    text.flush()
                }
            };
            write(&mut out, piece.as_bytes())?;
        }
    }
    write(&mut out, b"\n")?;
    drop(out);
    eprintln!("{}", report::figures(&loaded.engine));
    failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Runs all requests as one batch; results come in the order of the input.
fn run_batch(loaded: &mut Loaded, jobs: Vec<Job>, output: &mut dyn Write) -> Result<ExitCode> {
    let tokenizer = loaded.model.tokenizer.clone();
    let mut running: HashMap<RequestId, (usize, Detokenizer)> = HashMap::new();
    let mut results = Vec::with_capacity(jobs.len());
    for (at, job) in jobs.into_iter().enumerate() {
        let mut outcome = Outcome::default();
        let mut logprobs = false;
        let submitted = job.request.and_then(|request| {
            outcome.prompt_ids.clone_from(&request.prompt);
            logprobs = request.logprobs.is_some();
            let text = Detokenizer::after(tokenizer.clone(), true, &request.prompt);
            loaded.engine.submit(request).map(|rid| (rid, text))
        });
        match submitted {
            Ok((rid, text)) => {
                running.insert(rid, (at, text));
            }
            Err(e) => outcome.error = Some(e.to_string()),
        }
        results.push((job.id, outcome, logprobs));
    }
    let bar = progress(results.len() as u64);
    bar.set_position((results.len() - running.len()) as u64);
    while !loaded.engine.is_idle() {
        for event in loaded.engine.step() {
            let (Event::Token(rid, _) | Event::Finished(rid, ..) | Event::Failed(rid, _)) = event;
            let Some((at, text)) = running.get_mut(rid) else { continue };
            let outcome = &mut results[*at].1;
            match event {
                Event::Token(_, token) => {
                    outcome.text.push_str(&text.push(token.id));
                    outcome.tokens.push(token.clone());
                    continue;
                }
                Event::Finished(_, reason, usage) => {
                    outcome.text.push_str(&text.flush());
                    outcome.finish = Some((*reason, *usage));
                }
                Event::Failed(_, message) => outcome.error = Some(message.clone()),
            }
            running.remove(rid);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    for (id, outcome, logprobs) in &results {
        write(output, format!("{}\n", report::line(id, outcome, *logprobs)).as_bytes())?;
    }
    eprintln!("{}", report::figures(&loaded.engine));
    let failed = results.iter().filter(|(_, outcome, _)| outcome.error.is_some()).count();
    if failed > 0 {
        eprintln!("error: {failed} of {} requests failed; their lines say why", results.len());
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
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
