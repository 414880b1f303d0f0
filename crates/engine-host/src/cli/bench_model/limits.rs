//! What reading memory allows a model on the CPU, beside which `bench model` shows what it does.

use std::time::{Duration, Instant};

use device::{AlignedBuffer, Parallel, Pool};
use model::ModelPackage;
use resource_api::DType;
use serde_json::{Value, json};

use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};

/// A decode step of one request: the tokens it attends to, and how long it takes.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub tokens: usize,
    pub seconds: f64,
}

/// How fast memory is read, and what a step has to read of it.
pub(super) struct Limits {
    /// Bytes a second, of as many bytes as the weights are.
    rate: f64,
    /// Bytes of the weights, which every step reads once.
    weights: usize,
    longer: Option<Longer>,
}

/// What a longer context costs a step.
struct Longer {
    tokens: usize,
    /// Bytes that it has to read more.
    bytes: usize,
    /// Seconds that reading the weights and these takes longer than reading the weights. More than their
    /// share where a cache of the processor held the weights before.
    reading: f64,
    /// Seconds that it takes more.
    seconds: f64,
}

impl Limits {
    /// Reads memory with the threads of `config`, and compares the two steps.
    ///
    /// # Errors
    /// When there is no memory to read.
    pub fn measure(
        config: &Config,
        model: &ModelPackage,
        short: Option<Step>,
        long: Option<Step>,
    ) -> Result<Self> {
        let weights = model.weights.total_bytes();
        let element = DType::parse(config.engine.kv_dtype.name()).map_or(2, DType::size);
        let numbers = &model.config;
        // Keys and values of a layer, of as many tokens as one of its steps reads.
        let cache = |tokens: usize| {
            let (all, local) = (numbers.layers, numbers.local.as_ref());
            let few = local.map_or(0, |l| l.layers.len() * tokens.min(l.window));
            let rows = few + (all - local.map_or(0, |l| l.layers.len())) * tokens;
            2 * rows * numbers.kv_heads * numbers.head_dim * element
        };
        let threads = config.engine.threads.max(1);
        let alone = read_seconds(weights, threads)?;
        let longer = short.zip(long).map(|(short, long)| {
            let bytes = cache(long.tokens) - cache(short.tokens);
            let reading = read_seconds(weights + bytes, threads)? - alone;
            let seconds = long.seconds - short.seconds;
            Ok::<_, Error>(Longer { tokens: long.tokens, bytes, reading, seconds })
        });
        Ok(Self { rate: weights as f64 / alone, weights, longer: longer.transpose()? })
    }

    pub fn json(&self) -> Value {
        let mut value = json!({
            "read_gb_per_s": self.rate / 1e9,
            "weights_mb": self.weights as f64 / 1e6,
            "decode_b1": self.rate / self.weights as f64,
        });
        if let Some(Longer { tokens, bytes, reading, seconds }) = self.longer {
            value["context"] = json!({
                "tokens": tokens,
                "cache_mb": bytes as f64 / 1e6,
                "read_ms": reading * 1e3,
                "costs_ms": seconds * 1e3,
            });
        }
        value
    }

    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "{:<24} {:>9.1} GB/s: {:.1} MB of weights at most {:.0} times a second",
            "reading memory",
            self.rate / 1e9,
            self.weights as f64 / 1e6,
            self.rate / self.weights as f64
        )];
        if let Some(Longer { tokens, bytes, reading, seconds }) = self.longer {
            lines.push(format!(
                "{:<24} {:>9.2} ms a token more; reading {:.1} MB of cache, too, takes {:.2}",
                format!("context of {tokens}"),
                seconds * 1e3,
                bytes as f64 / 1e6,
                reading * 1e3
            ));
        }
        lines
    }
}

/// Seconds in which `threads` threads read this many bytes, at best.
fn read_seconds(bytes: usize, threads: usize) -> Result<f64> {
    const PART: usize = 256 * 1024;
    /// Long enough for the system to put each thread on a processor of its own.
    const LONG: Duration = Duration::from_millis(300);
    let mut memory = AlignedBuffer::zeroed(bytes.next_multiple_of(PART), true)
        .map_err(|e| Error::new(ErrorKind::Exhausted, e.to_string()))?;
    memory.fill(1);
    let parts = memory.len() / PART;
    let pool = Pool::new(threads);
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while begin.elapsed() < LONG {
        let start = Instant::now();
        // A share for each thread, as products divide weights.
        pool.run(threads, &|i| {
            for part in i * parts / threads..(i + 1) * parts / threads {
                let words = memory[part * PART..][..PART].as_chunks::<8>().0;
                let mut sums = [0u64; 32];
                for words in words.as_chunks::<32>().0 {
                    for (sum, word) in sums.iter_mut().zip(words) {
                        *sum ^= u64::from_ne_bytes(*word);
                    }
                }
                std::hint::black_box(sums);
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
