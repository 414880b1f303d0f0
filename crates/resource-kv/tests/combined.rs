//! Windows, forks, rewinds and tiers together: what each step reads is what a plain list would have, whether
//! its request stays in the pool or leaves it before every step, for host memory, a file, or both.

mod common;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{KvCache, KvPlan, KvStepOptions, LabelId, PlanVec, Resource, Retention};

const PAGE: u32 = 3;
/// Tokens at the front that no window lets go, and tokens that windows keep behind them.
const PROTECTED: u32 = 4;
const BUDGET: u32 = 7;

/// What a stream holds, and whether its front is protected.
#[derive(Clone, Debug, Default)]
struct Stream {
    tokens: Vec<f32>,
    protected: usize,
}

impl Stream {
    /// Lets go of whole pages: none with a protected token, not the last one, and no token of the window.
    fn trim(&mut self) {
        let size = PAGE as usize;
        self.protected = self.protected.max(PROTECTED as usize);
        loop {
            let first = self.protected.div_ceil(size) * size;
            let rest = self.tokens.len().saturating_sub(self.protected + size);
            if rest < BUDGET as usize || first + size >= self.tokens.len() {
                return;
            }
            self.tokens.drain(first..first + size);
        }
    }
}

fn one<T: Clone>(item: T) -> PlanVec<T> {
    let mut list = PlanVec::default();
    list.push(item);
    list
}

/// Runs 60 steps of two requests and gives a digest of all that they read; `moves` is how many of the steps
/// came after a request had left and come back.
fn run(tiers: &str, seed: u64) -> (blake3::Hash, u32) {
    let settings =
        format!(r#""pages": 41, "page_size": {PAGE}, "max_seq_len": 90, "dtype": "f32"{tiers}"#);
    let cache = cache_on(PlainHost::handle(), &settings, PAGE);
    let r = &cache.resource;
    let mut streams: [[Stream; 2]; 2] = Default::default();
    let (mut random, mut moves, mut all) = (seed, 0, blake3::Hasher::new());
    let mut below = |n: u32| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as u32 % n
    };
    (0..2).for_each(|slot| cache.ingest(slot));
    for id in 1..=60u64 {
        let (slot, label, span) = (below(2), below(2), 1 + below(5));
        let (forks, windows, rewinds) = (below(4) == 0, below(2) == 0, below(4) == 0);
        let own = &mut streams[slot as usize];
        let most = own[label as usize].tokens.len() as u32;
        if rewinds && most > 0 {
            // Not into what is protected.
            let len = most - below(4).min(most.saturating_sub(PROTECTED));
            cache.kv.correct_len(rid(slot), LabelId(label), len).unwrap();
            own[label as usize].tokens.truncate(len as usize);
        }
        if !tiers.is_empty() && r.offload(rid(slot)).unwrap() > 0 {
            moves += 1;
            cache.conserved();
            assert!(r.reload(rid(slot)).unwrap(), "nobody else needs the room");
        }
        let mut options = KvStepOptions::default();
        if forks && label == 1 {
            options.pre_forks = one(fork(slot, 0, 1));
            own[1] = Stream { tokens: own[0].tokens.clone(), protected: 0 };
        }
        if windows {
            let (request_id, label) = (rid(slot), LabelId(label));
            let (context_budget, protected_prefix) = (BUDGET, PROTECTED);
            let has = own[label.0 as usize].tokens.len() as u32 + span;
            if has >= PROTECTED {
                options.retention =
                    one(Retention { request_id, label, context_budget, protected_prefix });
            }
        }
        let trims = !options.retention.is_empty();
        let step = Step { options: Some(options), ..Step::new(id, &[(slot, label, span)]) };
        let outcome = cache.admit(&step);
        assert!(outcome.is_ready(), "step {id}: {}", outcome.message());
        let filed = cache.plan(&step).unwrap();
        let fed: Vec<f32> = (0..span).map(|at| (id * 8) as f32 + at as f32).collect();
        cache.write(&step, filed, LabelId(label), &fed);
        let read = cache.history(filed.open::<KvPlan>().unwrap(), 0);
        let stream = &mut own[label as usize];
        stream.tokens.extend(&fed);
        assert_eq!(read, stream.tokens, "step {id} with {tiers:?}");
        for x in &read {
            all.update(&x.to_le_bytes());
        }
        cache.commit(&step).unwrap();
        if trims {
            stream.trim();
        }
        let len = cache.len(slot, label);
        assert_eq!(len as usize, stream.tokens.len(), "after step {id} with {tiers:?}");
        cache.conserved();
    }
    (0..2).for_each(|slot| r.remove_request(rid(slot)).unwrap());
    assert_eq!(cache.kv.free_pages(), 40);
    (all.finalize(), moves)
}

#[test]
fn windows_forks_and_rewinds_read_the_same_wherever_pages_have_been() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..12 {
        let (want, _) = run("", seed);
        let file = |name: &str| {
            let path = dir.path().join(format!("{name}-{seed}"));
            format!(r#", "disk_file": {path:?}, "disk_size": "1MiB""#)
        };
        let both = format!(r#", "host_pages": 3{}"#, file("both"));
        for tiers in [r#", "host_pages": 60"#.to_string(), file("disk"), both] {
            let (got, moves) = run(&tiers, seed);
            assert_eq!(got, want, "seed {seed} with {tiers}");
            assert!(moves > 30, "only {moves} of 60 steps came after a move");
        }
    }
}
