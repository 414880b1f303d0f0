//! `engine-host bench model`: how fast a configuration computes its model, in tokens per second.

use std::collections::BTreeSet;
use std::time::Instant;

use clap::Args;
use device::CpuFeatures;
use resource_api::RequestId;
use serde_json::{Map, Value, json};

use self::limits::{Limits, Step};
use super::ConfigArg;
use crate::config::{Activations, Config, Device};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Event, GenerateRequest};
use crate::setup::{self, Loaded};

mod limits;

/// Tokens of the prompts whose prefill is timed.
const PREFILL: [usize; 1] = [512];

/// The same on a GPU.
const PREFILL_ON_GPU: [usize; 2] = [512, 4096];

/// Decode steps that are timed: requests, tokens of each prompt, steps.
const DECODE: [Shape; 4] = [
    Shape { batch: 1, context: 64, steps: 128 },
    Shape { batch: 8, context: 64, steps: 64 },
    Shape { batch: 32, context: 64, steps: 32 },
    Shape { batch: 1, context: 4096, steps: 32 },
];

/// The same on a GPU.
const DECODE_ON_GPU: [Shape; 6] = [
    Shape { batch: 1, context: 64, steps: 128 },
    Shape { batch: 1, context: 4096, steps: 64 },
    Shape { batch: 8, context: 64, steps: 64 },
    Shape { batch: 32, context: 64, steps: 64 },
    Shape { batch: 64, context: 1024, steps: 64 },
    Shape { batch: 256, context: 64, steps: 64 },
];

#[derive(Args)]
pub struct ModelArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// As one JSON object
    #[arg(long)]
    json: bool,
    /// Timed runs of each figure, after one that does not count; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Random weights in the shape of a well-known model, on a CUDA device: llama-3.1-8b, qwen3-0.6b
    #[arg(long, value_name = "MODEL")]
    random_weights: Option<String>,
}

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    context: usize,
    steps: usize,
}

/// Tokens per second, of every run and in the middle.
struct Rates(Vec<f64>);

impl Rates {
    fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        match sorted.len() % 2 {
            1 => sorted[half],
            _ => (sorted[half - 1] + sorted[half]) / 2.0,
        }
    }

    fn json(&self) -> Value {
        json!({ "median": self.median(), "all": self.0 })
    }

    fn line(&self, what: &str) -> String {
        let least = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.0.iter().copied().fold(0.0, f64::max);
        format!("{what:<24} {:>9.1} tokens/s  ({least:.1} to {most:.1})", self.median())
    }
}

/// Runs the benchmark and prints its result.
///
/// # Errors
/// What loading says, or a request that fails.
pub fn run(args: &ModelArgs) -> Result<()> {
    let config = args.config.load()?;
    let mut load_ms = Vec::new();
    let mut loaded = None;
    for _ in 0..args.runs {
        // One model at a time: the peak of memory must be that of one.
        drop(loaded.take());
        let start = Instant::now();
        loaded = Some(match &args.random_weights {
            None => setup::load(&config, &mut |_, _| ())?,
            Some(name) => setup::load_random(&config, name)?,
        });
        load_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let Some(loaded) = loaded else { return Ok(()) };
    let mut bench = Bench { loaded, runs: args.runs, prompts: 0 };
    let load = Rates(load_ms);

    let on_gpu = matches!(config.engine.device, Device::Cuda { .. });
    let (prefills, shapes): (&[usize], &[Shape]) = match on_gpu {
        false => (&PREFILL, &DECODE),
        true => (&PREFILL_ON_GPU, &DECODE_ON_GPU),
    };
    let mut prefill = Vec::new();
    for &tokens in prefills {
        prefill.push((tokens, bench.prefill(tokens)?));
    }
    let after_prefill = peak_memory_mb();
    let mut decode = Vec::new();
    for &shape in shapes {
        if shape.fits(&bench.loaded.engine) {
            decode.push((shape, bench.decode(shape)?));
        }
    }
    let peak = peak_memory_mb();
    let limits = match on_gpu {
        false => Some(bench.limits(&config, &decode)?),
        true => None,
    };
    if args.json {
        let decode: Map<String, Value> =
            decode.iter().map(|(shape, rates)| (shape.key(), rates.json())).collect();
        let mut result = about(args, &config);
        result["runs"] = json!(args.runs);
        result["load_ms"] = load.json();
        for (tokens, rates) in &prefill {
            result[format!("prefill_{tokens}")] = rates.json();
        }
        result["decode"] = Value::Object(decode);
        result["memory_mb"] = json!({ "after_prefill": after_prefill, "peak": peak });
        if let Some(limits) = &limits {
            result["limits"] = limits.json();
        }
        say!("{result}");
        return Ok(());
    }
    let about = about(args, &config);
    let text = |key: &str| about[key].as_str().unwrap_or_default().to_owned();
    say!(
        "{} on {}: {} threads, {}, {} activations, {} cache; medians of {}",
        text("model"),
        text("device"),
        about["threads"],
        text("cpu_features"),
        text("activations"),
        text("kv_dtype"),
        args.runs
    );
    say!("{:<24} {:>9.1} ms", "load", load.median());
    for (tokens, rates) in &prefill {
        say!("{}", rates.line(&format!("prefill of {tokens} tokens")));
    }
    for (shape, rates) in &decode {
        say!("{}", rates.line(&shape.name()));
    }
    if let (Some(after_prefill), Some(peak)) = (after_prefill, peak) {
        say!("{:<24} {after_prefill:>9.1} MB after prefill, {peak:.1} MB at most", "memory");
    }
    if let Some(limits) = &limits {
        limits.lines().iter().for_each(|line| say!("{line}"));
    }
    Ok(())
}

fn about(args: &ModelArgs, config: &Config) -> Value {
    let activations = Activations::NAMES.iter().find(|(_, a)| *a == config.engine.activations);
    let file = config.model.path.file_name().unwrap_or(config.model.path.as_os_str());
    let model = match &args.random_weights {
        None => file.to_string_lossy().into_owned(),
        Some(name) => format!("{name} (random weights)"),
    };
    json!({
        "what": "model",
        "version": env!("CARGO_PKG_VERSION"),
        "model": model,
        "device": config.engine.device.to_string(),
        "threads": config.engine.threads,
        "cpu_features": CpuFeatures::current().name(),
        "activations": activations.map(|(name, _)| name),
        "kv_dtype": config.engine.kv_dtype.name(),
    })
}

impl Shape {
    fn fits(&self, engine: &Engine) -> bool {
        let limits = engine.limits();
        self.batch <= limits.max_batch as usize
            && self.context + self.steps < limits.max_model_len as usize
    }

    fn key(&self) -> String {
        match self.context > 64 {
            true => format!("b{}_at_{}", self.batch, self.context),
            false => format!("b{}", self.batch),
        }
    }

    fn name(&self) -> String {
        match self.context > 64 {
            true => format!("decode B={} at {} tokens", self.batch, self.context),
            false => format!("decode B={}", self.batch),
        }
    }
}

struct Bench {
    loaded: Loaded,
    runs: u32,
    prompts: u32,
}

impl Bench {
    fn prefill(&mut self, tokens: usize) -> Result<Rates> {
        self.rates(|bench| {
            bench.submit(tokens, 1)?;
            let start = Instant::now();
            let mut started = BTreeSet::new();
            while started.is_empty() {
                bench.step(&mut started)?;
            }
            Ok(tokens as f64 / start.elapsed().as_secs_f64())
        })
    }

    fn decode(&mut self, shape: Shape) -> Result<Rates> {
        self.rates(|bench| {
            // Those that are through their prompt first go on meanwhile, and must not end early.
            let ahead = shape.batch * shape.context.div_ceil(16);
            let rids = (0..shape.batch)
                .map(|_| bench.submit(shape.context, shape.steps + 1 + ahead))
                .collect::<Result<Vec<_>>>()?;
            let mut started = BTreeSet::new();
            while started.len() < shape.batch {
                bench.step(&mut started)?;
            }
            let start = Instant::now();
            let mut tokens = 0;
            for _ in 0..shape.steps {
                tokens += bench.step(&mut started)?;
            }
            let seconds = start.elapsed().as_secs_f64();
            rids.into_iter().for_each(|rid| bench.loaded.engine.cancel(rid));
            Ok(tokens as f64 / seconds)
        })
    }

    /// What memory allows, measured now, beside what decoding one request came to.
    fn limits(&self, config: &Config, decode: &[(Shape, Rates)]) -> Result<Limits> {
        let alone = |is_long: bool| {
            let of = |(shape, rates): &(Shape, Rates)| {
                let is_it = shape.batch == 1 && (shape.context > 64) == is_long;
                // The context grows by a token a step while it is timed.
                let tokens = shape.context + shape.steps / 2;
                is_it.then(|| Step { tokens, seconds: 1.0 / rates.median() })
            };
            decode.iter().find_map(of)
        };
        Limits::measure(config, &self.loaded.model, alone(false), alone(true))
    }

    /// `one` again and again; the first time does not count.
    fn rates(&mut self, one: impl Fn(&mut Self) -> Result<f64>) -> Result<Rates> {
        one(self)?;
        (0..self.runs).map(|_| one(self)).collect::<Result<_>>().map(Rates)
    }

    /// A request with a prompt of its own, so that no cached prefix serves it.
    fn submit(&mut self, tokens: usize, max_tokens: usize) -> Result<RequestId> {
        self.prompts += 1;
        let vocab = self.loaded.model.tokenizer.vocab_size().max(2) as u64;
        let mut state = u64::from(self.prompts) << 32 | 0x9E37_79B9;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x14_057B_7EF7);
            ((state >> 33) % vocab) as u32
        };
        let request = GenerateRequest {
            prompt: (0..tokens).map(|_| next()).collect(),
            max_tokens: max_tokens as u32,
            ignore_eos: true,
            sampling: Map::from_iter([("temperature".to_owned(), json!(0))]),
            ..GenerateRequest::default()
        };
        self.loaded.engine.submit(request)
    }

    /// One step; answers how many tokens it generated, and adds to `started` who got one.
    fn step(&mut self, started: &mut BTreeSet<RequestId>) -> Result<usize> {
        let engine = &mut self.loaded.engine;
        if engine.is_idle() {
            return Err(Error::new(ErrorKind::Internal, "the engine ran out of work early"));
        }
        let mut made = 0;
        for event in engine.step() {
            match event {
                Event::Token(rid, _) => {
                    made += 1;
                    started.insert(*rid);
                }
                Event::Finished(_, _, usage) if usage.cached_tokens > 0 => {
                    let message = "a prompt was read from the cache instead of being computed";
                    return Err(Error::new(ErrorKind::Internal, message));
                }
                Event::Finished(..) | Event::Prompt(..) | Event::HandedOver(..) => {}
                Event::Failed(_, why) => return Err(Error::new(why.kind, why.message.clone())),
            }
        }
        Ok(made)
    }
}

/// The most memory this process has had, where the system tells.
fn peak_memory_mb() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib / 1024.0)
}
