//! The same tokens on a CUDA device as on the CPU, from the same logits. `cargo xtask device-test` runs
//! what needs a device.

#[allow(dead_code)] // shared with tests of another kind
mod common;

use common::{Engine, Extra, build_on};
use device::cuda::{Context, DeviceBuffer, Stream};
use resource_api::host::PlainHost;
use resource_api::{
    Device, LogitsProcessor, RequestId, Result, Sampled, StepContext, TensorViewMut,
};

#[test]
fn a_machine_without_a_driver_says_so_in_one_line() {
    if Context::of(0).is_ok() {
        return;
    }
    let settings = r#"{"vocab_size": 10}"#;
    let error = build_on(Device::cuda(0), settings, PlainHost::handle()).unwrap_err().to_string();
    assert!(error.contains("[resources.sampler]") && error.contains("libcuda.so.1"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

fn rid(slot: u32) -> RequestId {
    RequestId::new(slot, 1)
}

/// Numbers that look random, the same in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.next() * of.len() as f64) as usize]
    }

    /// Logits of one of several kinds: peaked, flat, with ties, mostly masked, bad.
    fn row(&mut self, n: usize) -> Vec<f32> {
        let kind = (self.next() * 12.0) as u32;
        let spread = self.pick(&[0.3, 2.0, 12.0]);
        let mut row: Vec<f32> = (0..n)
            .map(|_| {
                let x = (self.next() + self.next() + self.next() - 1.5) * spread;
                match kind {
                    0..=2 => (x * 2.0).round() as f32 / 2.0,
                    3 | 4 if self.next() < 0.98 => f32::NEG_INFINITY,
                    _ => x as f32,
                }
            })
            .collect();
        let at = (self.next() * n as f64) as usize;
        row[at] = match kind {
            10 => f32::NAN,
            11 => f32::INFINITY,
            _ => spread as f32,
        };
        row
    }

    fn config(&mut self, n: usize) -> String {
        format!(
            r#"{{"temperature": {}, "top_k": {}, "top_p": {}, "min_p": {}, "repetition_penalty": {},
                "seed": {}, "choice": {}}}"#,
            self.pick(&[0.0, 0.7, 1.0, 2.5, 1e-30, 1e30]),
            self.pick(&[0, 0, 1, 2, 20, n / 3, n - 1]),
            self.pick(&[1.0, 1.0, 0.9, 0.3, 0.9999, 1e-6]),
            self.pick(&[0.0, 0.0, 0.05, 1.0]),
            self.pick(&[1.0, 1.0, 1.3, 0.8]),
            (self.next() * 1e15) as u64,
            (self.next() * 4.0) as u32,
        )
    }
}

/// The same step on both.
struct Both {
    cpu: Engine,
    cuda: Engine,
}

impl Both {
    fn new(vocabulary: usize) -> Self {
        Self { cpu: Engine::new(vocabulary), cuda: Engine::on_device(vocabulary) }
    }

    fn ingest(&self, rid: RequestId, config: &str, prompt: &[u32]) {
        for engine in [&self.cpu, &self.cuda] {
            engine.ingest_prompt(rid, config, prompt).unwrap();
        }
    }

    fn step(&self, rids: &[RequestId], rows: &[&[f32]], tokens: &[Vec<u32>]) -> Vec<Sampled> {
        let extra = || Extra { tokens: tokens.to_vec(), ..Extra::default() };
        let want = self.cpu.step_with(rids, rows, extra());
        let got = self.cuda.step_with(rids, rows, extra());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(
                (got.token, got.status),
                (want.token, want.status),
                "row {i}: {got:?} {want:?}"
            );
            let near = (got.logprob - want.logprob).abs() <= 1e-6 * want.logprob.abs();
            assert!(near || got.logprob == want.logprob, "row {i}: {got:?} {want:?}");
        }
        want
    }
}

#[test]
#[ignore = "needs a GPU"]
fn tokens_are_those_of_the_cpu() {
    let mut noise = Noise(0x1234_5678_9abc_def1);
    for n in [3, 255, 256, 257, 8193, 32_000, 128_256, 151_669] {
        let both = Both::new(n);
        let rids: Vec<RequestId> = (0..48).map(rid).collect();
        let configs: Vec<String> = rids.iter().map(|_| noise.config(n)).collect();
        for (&rid, config) in rids.iter().zip(&configs) {
            let prompt: Vec<u32> = (0..20).map(|_| (noise.next() * n as f64) as u32).collect();
            both.ingest(rid, config, &prompt);
        }
        let mut fed = vec![vec![]; rids.len()];
        for _ in 0..3 {
            let rows: Vec<Vec<f32>> = rids.iter().map(|_| noise.row(n)).collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let sampled = both.step(&rids, &rows, &fed);
            // Sampled tokens are fed, so that they are seen, and one more besides.
            let besides = (noise.next() * n as f64) as u32;
            fed = sampled.iter().map(|s| vec![s.token, besides]).collect();
        }
    }
}

/// Doubles all logits where it is given them: wherever they are, or on the host alone.
struct Doubling {
    takes_device: bool,
}

impl LogitsProcessor for Doubling {
    fn process(
        &self,
        ctx: &StepContext<'_>,
        _rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        if let Some(all) = logits.as_mut_slice::<f32>() {
            all.iter_mut().for_each(|x| *x *= 2.0);
            return Ok(());
        }
        assert!(self.takes_device, "it has said that it does not");
        let context = Context::of_device(logits.raw().device)?;
        let stream = Stream::of_step(&context, ctx)?;
        stream.synchronize()?;
        let mut values: Vec<f32> = device::cuda::read_tensor(&context, &logits.view())?;
        values.iter_mut().for_each(|x| *x *= 2.0);
        let doubled = DeviceBuffer::from_slice(&context, &values)?;
        let shape: Vec<usize> = logits.shape().iter().map(|&n| n as usize).collect();
        stream.copy(&doubled.view(&shape)?, logits)?;
        Ok(stream.synchronize()?)
    }

    fn takes_device(&self) -> bool {
        self.takes_device
    }
}

#[test]
#[ignore = "needs a GPU"]
fn processors_change_the_choice_and_not_the_log_probability() {
    let (mut noise, n) = (Noise(77), 5000);
    for kinds in [&[true][..], &[false], &[false, false, true, false]] {
        let both = Both::new(n);
        for engine in [&both.cpu, &both.cuda] {
            engine.bind_all(kinds.iter().map(|&takes_device| Doubling { takes_device }));
        }
        let rids: Vec<RequestId> = (0..6).map(rid).collect();
        for &rid in &rids {
            both.ingest(rid, r#"{"temperature": 1.0, "top_p": 0.9}"#, &[]);
        }
        let rows: Vec<Vec<f32>> =
            rids.iter().map(|_| (0..n).map(|_| (noise.next() * 9.0) as f32).collect()).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        both.step(&rids, &rows, &[]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn steps_that_begin_before_the_last_ones_output_draw_what_the_cpu_draws() {
    let vocab = 20_001;
    let (cpu, cuda) = (Engine::new(vocab), Engine::on_device(vocab));
    let rids = [rid(0), rid(1), rid(2)];
    let mut random = Noise(99);
    for (i, &rid) in rids.iter().enumerate() {
        let top_k = [0, 20, 0][i];
        let config = format!(
            r#"{{"temperature": {}, "top_k": {top_k}, "top_p": 0.9, "seed": {i}}}"#,
            [0.0, 1.0, 1.5][i]
        );
        cpu.ingest(rid, &config);
        cuda.ingest(rid, &config);
    }
    // A bad row would be the end of its request.
    let is_good = |row: &Vec<f32>| !row.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    let mut rows = std::iter::repeat_with(|| random.row(vocab)).filter(is_good);
    let steps: Vec<Vec<Vec<f32>>> = (0..20).map(|_| rows.by_ref().take(3).collect()).collect();
    for (rows, got) in steps.iter().zip(cuda.run_ahead(&rids, &steps)) {
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        for (want, got) in cpu.step(&rids, &rows).iter().zip(&got) {
            assert_eq!((want.status, want.token), (got.status, got.token));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn requests_with_biases_and_penalties_draw_what_they_draw_on_the_cpu() {
    let vocab = 5_003;
    let (cpu, cuda) = (Engine::new(vocab), Engine::on_device(vocab));
    let configs = [
        r#"{"temperature": 0, "logit_bias": {"7": 100, "8": -100}}"#,
        r#"{"temperature": 1.1, "seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.5}"#,
        r#"{"temperature": 0, "min_tokens": 6, "end_token_ids": [1, 2, 3], "logit_bias": {"2": 90}}"#,
        r#"{"temperature": 0.8, "seed": 9, "top_k": 12}"#,
    ];
    let rids: Vec<_> = (0..configs.len() as u32).map(rid).collect();
    for (&rid, config) in rids.iter().zip(configs) {
        cpu.ingest(rid, config);
        cuda.ingest(rid, config);
    }
    let mut random = Noise(7);
    let is_good = |row: &Vec<f32>| !row.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    let mut ends = Vec::new();
    for step in 0..12 {
        let rows = std::iter::repeat_with(|| random.row(vocab)).filter(is_good);
        let rows: Vec<Vec<f32>> = rows.take(rids.len()).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let (want, got) = (cpu.step(&rids, &rows), cuda.step(&rids, &rows));
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            let (want, got) = ((want.status, want.token), (got.status, got.token));
            assert_eq!(want, got, "step {step}, request {i}");
        }
        ends.push(got[2].token == 2);
    }
    // The bias shows, once the end is allowed.
    assert!(ends[..6].iter().all(|is_end| !is_end) && ends[6..].contains(&true), "{ends:?}");
}
