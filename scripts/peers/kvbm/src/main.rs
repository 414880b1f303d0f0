//! NVIDIA Dynamo's block manager (kvbm-logical) on the same decode steps: `schedule_decode` is admit,
//! `apply_decode` is commit, and listing the block ids is the page list of a plan. Attention, positions
//! and sampler are not its business.
//!
//! Prints one JSON object per shape, without and with the list, microseconds.

use std::hint::black_box;
use std::time::Instant;

use kvbm_logical::manager::{BlockManager, FrequencyTrackingCapacity};
use kvbm_logical::{BlockRegistry, SchedulableSequence};

#[derive(Clone, Copy)]
struct G1;

const PAGE: usize = 16;
const POPULATIONS: usize = 3;
const STEPS: usize = 64;
const WARM: usize = 4;

fn manager(blocks: usize) -> BlockManager<G1> {
    let registry = BlockRegistry::builder()
        .frequency_tracker(FrequencyTrackingCapacity::Medium.create_tracker())
        .build();
    let builder = BlockManager::<G1>::builder().block_count(blocks).block_size(PAGE).registry(registry);
    builder.with_lru_backend().build().expect("a block manager")
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 32_000) as u32
    };
    (0..count).map(next).collect()
}

fn tell(peer: &str, batch: usize, context: usize, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share) as usize];
    println!(
        r#"{{"peer":"{peer}","batch":{batch},"context":{context},"us":{{"total":{{"median":{:.3},"p10":{:.3},"p90":{:.3},"p99":{:.3},"max":{:.3}}}}}}}"#,
        at(0.5),
        at(0.1),
        at(0.9),
        at(0.99),
        at(1.0),
    );
}

fn run(batch: usize, context: usize) {
    let (mut plain, mut listed) = (Vec::new(), Vec::new());
    for _ in 0..POPULATIONS {
        let manager = manager(batch * ((context + 256) / PAGE + 3) + 8);
        let mut sequences: Vec<SchedulableSequence<G1>> = (0..batch)
            .map(|i| {
                let prompt = tokens(context - i % PAGE, 100 + i as u64);
                SchedulableSequence::new(prompt, 1 << 20, PAGE as u32, None)
            })
            .collect();
        for sequence in &mut sequences {
            let count = sequence.num_input_tokens();
            sequence.schedule_prefill(count, &manager).expect("room for the prompts");
            sequence.apply_prefill(Some(17), &manager).expect("room for the prompts");
        }
        for n in 0..STEPS + WARM {
            let start = Instant::now();
            for sequence in &mut sequences {
                sequence.schedule_decode(&manager).expect("room for a token");
            }
            let scheduled = Instant::now();
            let mut ids: Vec<usize> = Vec::new();
            for sequence in &sequences {
                ids.extend(sequence.inner().assignments().all_block_ids());
            }
            black_box(&ids);
            let list = Instant::now();
            for sequence in &mut sequences {
                black_box(sequence.apply_decode(17, &manager).expect("a token"));
            }
            let end = Instant::now();
            if n >= WARM {
                let us = |from: Instant, to: Instant| (to - from).as_nanos() as f64 / 1e3;
                plain.push(us(start, scheduled) + us(list, end));
                listed.push(us(start, end));
            }
        }
    }
    tell("kvbm", batch, context, plain);
    tell("kvbm listed", batch, context, listed);
}

fn main() {
    for context in [512, 4096, 16_384] {
        for batch in [1, 8, 32, 128, 256] {
            run(batch, context);
        }
    }
}
