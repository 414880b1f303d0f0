//! The floor of a decode step in plain Rust: flat records, preallocated outputs, no dynamic dispatch, no
//! locks, no plugin boundary. It produces what admit, plan and commit of the four resources produce, so
//! its time bounds what a layered design can reach on the same core.
//!
//! - admit: looks every request up by id, counts the pages that the step needs, takes them;
//! - plan: row starts, last page lengths, (page, offset) of the new tokens, position ids, and the sampler's
//!   six columns; `rebuild` also lists all pages of all requests anew, `table` keeps them in a table;
//! - commit: lengths, positions, random offsets, the sampled token; at a page end its key (BLAKE3) and its
//!   entry of the index.
//!
//! Prints one JSON object per shape and mode, microseconds.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Instant;

const PAGE: u32 = 16;
const POPULATIONS: usize = 5;
const STEPS: u32 = 68;
const WARM: u32 = 4;

type Map<K, V> = HashMap<K, V, ahash::RandomState>;

struct Request {
    len: u32,
    position: u32,
    pages: Vec<u32>,
    tail: Vec<u32>,
    key: [u8; 32],
}

#[derive(Default)]
struct Sampling {
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    seed: Vec<i64>,
    penalty: Vec<f32>,
    offset: Vec<i64>,
}

impl Sampling {
    fn clear(&mut self) {
        self.temperature.clear();
        self.top_k.clear();
        self.top_p.clear();
        self.seed.clear();
        self.penalty.clear();
        self.offset.clear();
    }

    fn push(&mut self, from: &Sampling, row: usize) {
        self.temperature.push(from.temperature[row]);
        self.top_k.push(from.top_k[row]);
        self.top_p.push(from.top_p[row]);
        self.seed.push(from.seed[row]);
        self.penalty.push(from.penalty[row]);
        self.offset.push(from.offset[row]);
    }
}

#[derive(Default)]
struct Plan {
    query_start: Vec<i32>,
    page_start: Vec<i32>,
    listed: Vec<u32>,
    last: Vec<i32>,
    page: Vec<i64>,
    offset: Vec<i64>,
    position: Vec<i64>,
    sampling: Sampling,
    table: Vec<u32>,
}

impl Plan {
    fn clear(&mut self) {
        let Plan { query_start, page_start, last, page, offset, position, .. } = self;
        [query_start, page_start, last].into_iter().for_each(Vec::clear);
        [page, offset, position].into_iter().for_each(Vec::clear);
        self.listed.clear();
        self.sampling.clear();
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn run(batch: usize, context: u32, rebuild: bool) {
    let stride = (context as usize + 256) / 16 + 2;
    let total = batch * stride + 8;
    let mut samples = Vec::new();
    for _ in 0..POPULATIONS {
        let mut state = 88_172_645_463_325_252;
        let mut free: Vec<u32> = (0..total as u32).rev().collect();
        for i in (1..free.len()).rev() {
            free.swap(i, (random(&mut state) % (i as u64 + 1)) as usize);
        }
        let mut by_id: Map<u64, usize> = Map::default();
        let mut requests: Vec<Request> = Vec::new();
        for i in 0..batch {
            let len = context - i as u32 % PAGE;
            let held = len.div_ceil(PAGE) as usize;
            let mut pages = Vec::with_capacity(stride);
            pages.extend(free.split_off(free.len() - held));
            by_id.insert((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15), i);
            let tail = vec![7; (len % PAGE) as usize];
            requests.push(Request { len, position: len, pages, tail, key: [i as u8; 32] });
        }
        // Every page that is held is in the index, as in a server that has run for a while.
        let mut index: Map<[u8; 32], u32> = Map::default();
        index.reserve(total);
        for &page in requests.iter().flat_map(|r| &r.pages) {
            let mut key = [0; 32];
            key.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&random(&mut state).to_le_bytes()));
            index.insert(key, page);
        }
        let mut rows = Sampling {
            temperature: vec![0.7; batch],
            top_k: vec![20; batch],
            top_p: vec![0.9; batch],
            seed: vec![1; batch],
            penalty: vec![1.0; batch],
            offset: vec![0; batch],
        };
        let mut plan = Plan { table: vec![0; batch * stride], ..Plan::default() };
        for (row, request) in plan.table.chunks_exact_mut(stride).zip(&requests) {
            row[..request.pages.len()].copy_from_slice(&request.pages);
        }
        let ids: Vec<u64> =
            (0..batch).map(|i| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let mut step: Vec<usize> = Vec::with_capacity(batch);
        for n in 0..STEPS {
            let start = Instant::now();
            step.clear();
            step.extend(ids.iter().map(|id| by_id[id]));
            let short = |r: &Request| ((r.len + 1).div_ceil(PAGE) as usize).saturating_sub(r.pages.len());
            let need: usize = step.iter().map(|&i| short(&requests[i])).sum();
            assert!(need <= free.len(), "the pool is large enough");
            if need > 0 {
                for &i in &step {
                    let request = &mut requests[i];
                    while short(request) > 0 {
                        let page = free.pop().expect("counted above");
                        if !rebuild {
                            plan.table[i * stride + request.pages.len()] = page;
                        }
                        request.pages.push(page);
                    }
                }
            }
            plan.clear();
            plan.query_start.push(0);
            plan.page_start.push(0);
            let mut listed = 0;
            for (row, &i) in step.iter().enumerate() {
                let request = &requests[i];
                let len = request.len + 1;
                let held = len.div_ceil(PAGE) as usize;
                plan.query_start.push(row as i32 + 1);
                listed += held as i32;
                plan.page_start.push(listed);
                if rebuild {
                    plan.listed.extend_from_slice(&request.pages[..held]);
                }
                plan.last.push(((len - 1) % PAGE + 1) as i32);
                plan.page.push(request.pages[held - 1].into());
                plan.offset.push(((len - 1) % PAGE).into());
                plan.position.push(request.position.into());
                plan.sampling.push(&rows, i);
            }
            black_box(&plan.table);
            black_box(&plan.listed);
            for &i in &step {
                let request = &mut requests[i];
                request.len += 1;
                request.position += 1;
                rows.offset[i] += 1;
                request.tail.push(17 + n);
                if request.tail.len() as u32 == PAGE {
                    let bytes = bytemuck::cast_slice(&request.tail);
                    request.key = *blake3::keyed_hash(&request.key, bytes).as_bytes();
                    index.insert(request.key, request.pages[request.pages.len() - 1]);
                    request.tail.clear();
                }
            }
            if n >= WARM {
                samples.push(start.elapsed().as_nanos() as f64 / 1e3);
            }
        }
    }
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share) as usize];
    println!(
        r#"{{"peer":"floor {}","batch":{batch},"context":{context},"us":{{"total":{{"median":{:.3},"p10":{:.3},"p90":{:.3},"p99":{:.3},"max":{:.3}}}}}}}"#,
        if rebuild { "rebuild" } else { "table" },
        at(0.5),
        at(0.1),
        at(0.9),
        at(0.99),
        at(1.0),
    );
}

fn main() {
    for rebuild in [true, false] {
        for context in [512, 4096, 16_384] {
            for batch in [1, 8, 32, 128, 256] {
                run(batch, context, rebuild);
            }
        }
        run(1024, 512, rebuild);
        run(1024, 4096, rebuild);
        run(256, 131_072, rebuild);
    }
}
