//! Caches of 8 bits: what their rows hold, and that scales go wherever their pages go.

mod common;

use std::time::{Duration, Instant};

use common::*;
use device::E4m3;
use device::attention::SCALE_BYTES;
use resource_api::host::PlainHost;
use resource_api::{
    Device, EngineResourceInfo, KvCache, KvCacheHandle, KvPlan, KvStepOptions, NodeId, PlanVec,
    PrefixInputs, PrefixWalk, RequestOverrides, Resource, TensorView, TransferEngineInfo, WalkId,
    build_resource,
};
use resource_kv::Kv;

const PAGE: u32 = 4;
const TYPES: [&str; 2] = ["i8", "fp8"];

/// An element of a token's row; rows differ in size by orders of magnitude.
fn element(token: u32, layer: u32, which: usize, i: usize) -> f32 {
    let noise = (token * 31 + layer * 7 + which as u32 * 3 + i as u32) as f32 * 12.9898;
    (noise.sin() * 43_758.547).fract() * 10f32.powi(token as i32 % 9 - 4)
}

struct Run {
    cache: Cache,
    dtype: &'static str,
    next: u64,
}

impl Run {
    fn new(dtype: &'static str, pages: u32, more: &str) -> Self {
        let settings = format!(
            r#""pages": {}, "page_size": {PAGE}, "max_seq_len": 4096, "dtype": "{dtype}"{more}"#,
            pages + 1
        );
        let mut info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
        let (engine, endpoint) = ("in-process".to_string(), String::new());
        info.transfer_engine_info = Some(TransferEngineInfo { engine, endpoint });
        let built = build_resource::<Kv>(&spec(&settings), &info).unwrap();
        let kv = built.capabilities[0].open::<KvCacheHandle>().unwrap();
        let walk = PrefixWalk { label: MAIN, write: WalkId(0), decode: WalkId(0) };
        assert!(built.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
        let cache = Cache { resource: built.resource, kv, page_size: PAGE };
        Run { cache, dtype, next: 1 }
    }

    fn ingest(&self, slot: u32, prompt: &[u32]) {
        let overrides = RequestOverrides::new("", prompt, 0);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

    fn step(&mut self, slot: u32, label: u32, ids: &[u32]) -> Step {
        self.next += 1;
        let step = Step::new(self.next, &[(slot, label, ids.len() as u32)]);
        Step { token_ids: ids.to_vec(), ..step }
    }

    /// Whether a row is read as written, as exactly as the type keeps it.
    fn holds(&self, read: &[f32], written: &[f32]) -> bool {
        let most = written.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        let half = most / 254.0 * (1.0 + 1e-5);
        read.iter().zip(written).all(|(a, b)| match self.dtype {
            "i8" => (a - b).abs() <= half,
            _ => *a == E4m3::from_f32(*b).to_f32(),
        })
    }

    /// Runs a step, checks what it has stored, and answers all bytes that it reads.
    fn run(&mut self, step: &Step) -> Vec<u8> {
        let outcome = self.cache.admit(step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        let filed = self.cache.plan(step).unwrap();
        let label = step.label[0];
        for layer in 0..LAYERS {
            let rows = |which| -> Vec<f32> {
                let of = |&token: &u32| (0..ROW).map(move |i| element(token, layer, which, i));
                step.token_ids.iter().flat_map(of).collect()
            };
            let (k, v) = (rows(0), rows(1));
            let shape = [step.token_ids.len(), HEADS, DIM];
            let views = [&k, &v].map(|x| TensorView::from_slice(x, &shape));
            let kv = &self.cache.kv;
            step.call(&[filed], |_, c| kv.write_kv(c, layer, label, &views[0], &views[1])).unwrap();
            if label == MAIN {
                let read = self.cache.read(step, filed, layer, step.token_ids.len());
                for (read, written) in read.iter().zip([&k, &v]) {
                    for (read, written) in read.chunks(DIM).zip(written.chunks(DIM)) {
                        assert!(self.holds(read, written), "{}", self.dtype);
                    }
                }
            }
        }
        let bytes = self.bytes(filed.open::<KvPlan>().unwrap());
        self.cache.commit(step).unwrap();
        self.cache.conserved();
        bytes
    }

    fn feed(&mut self, slot: u32, label: u32, ids: &[u32]) -> Vec<u8> {
        let step = self.step(slot, label, ids);
        self.run(&step)
    }

    /// Rows and scales of the plan's only stream, in order of its tokens.
    fn bytes(&self, plan: &KvPlan) -> Vec<u8> {
        let (pages, mut all) = (plan.pages(0, PAGE), Vec::new());
        let row = DIM + if self.dtype == "i8" { SCALE_BYTES } else { 0 };
        for position in 0..plan.len[0] {
            for layer in 0..LAYERS {
                let view = self.cache.kv.layer_view(layer).unwrap();
                assert_eq!(view.k.shape()[3] as usize, row);
                let strides = view.k.raw().strides.map(|s| s as usize);
                for head in 0..HEADS {
                    let page = pages[(position / PAGE) as usize] as usize * strides[0];
                    let at = page + (position % PAGE) as usize * strides[1] + head * strides[2];
                    for half in [&view.k, &view.v] {
                        match self.dtype {
                            "i8" => all.extend(
                                half.window(at, row).unwrap().iter().map(|&x: &i8| x as u8),
                            ),
                            _ => {
                                all.extend(half.window(at, row).unwrap().iter().map(|x: &E4m3| x.0))
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// A prompt with what is cached skipped; how much that was, and all bytes that it reads.
    fn prompt(&mut self, slot: u32, prompt: &[u32]) -> (u32, Vec<u8>) {
        self.ingest(slot, prompt);
        let (r, node) = (&self.cache.resource, NodeId(0));
        let found = r.resolve_cached_prefix(rid(slot), node, WalkId(0)).unwrap().unwrap_or(0);
        if found > 0 {
            let inputs = PrefixInputs::new(prompt);
            r.apply_cached_prefix(rid(slot), node, WalkId(0), &inputs, found).unwrap();
        }
        (found, self.feed(slot, 0, &prompt[found as usize..]))
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn what_is_kept_and_moved_is_what_was_computed_to_the_byte() {
    TYPES.into_iter().for_each(kept_and_moved);
}

fn kept_and_moved(dtype: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let disk = format!(r#", "disk_file": {:?}, "disk_size": "1MiB""#, dir.path().join("pages"));
    let prompt = tokens(0..11);
    let (_, want) = Run::new(dtype, 16, "").prompt(0, &prompt);
    for tiers in [r#", "host_pages": 16"#, disk.as_str()] {
        let mut run = Run::new(dtype, 4, tiers);
        assert_eq!(run.prompt(0, &prompt), (0, want.clone()));
        // The whole request, and then cached pages, go and come back; others write where they were.
        assert_eq!(run.cache.resource.offload(rid(0)).unwrap(), 3);
        run.prompt(1, &tokens(500..516));
        run.end(1);
        assert!(run.cache.resource.reload(rid(0)).unwrap());
        let next = run.feed(0, 0, &[11]);
        assert_eq!(next[..want.len()], want, "{dtype}{tiers}");
        run.end(0);
        run.prompt(2, &tokens(600..616));
        run.end(2);
        assert_eq!(run.prompt(3, &prompt), (8, want.clone()), "{tiers}");
        run.end(3);
        // Where prompts part within a page.
        let parted = [tokens(0..6), vec![90, 91]].concat();
        let (found, bytes) = run.prompt(4, &parted);
        let common = want.len() / 11 * 6;
        assert_eq!((found, &bytes[..common]), (6, &want[..common]), "{tiers}");
        run.end(4);
    }
    // A later process finds them.
    assert_eq!(Run::new(dtype, 8, &disk).prompt(0, &prompt), (8, want));
}

#[test]
fn forks_and_rewinds_copy_scales() {
    TYPES.into_iter().for_each(forks_and_rewinds);
}

fn forks_and_rewinds(dtype: &'static str) {
    let mut run = Run::new(dtype, 16, "");
    let prompt = tokens(0..9);
    let (_, want) = run.prompt(0, &prompt);
    let mut pre_forks = PlanVec::default();
    pre_forks.push(fork(0, 0, 1));
    let options = KvStepOptions { pre_forks, ..Default::default() };
    let step = Step { options: Some(options), ..run.step(0, 1, &[70]) };
    let forked = run.run(&step);
    assert_eq!(forked[..want.len()], want);
    // Another one shares the page that is cut.
    assert_eq!(run.prompt(1, &prompt).0, 8);
    run.cache.kv.correct_len(rid(0), MAIN, 6).unwrap();
    let cut = run.feed(0, 0, &[80]);
    let kept = want.len() / 9 * 6;
    assert_eq!(cut[..kept], want[..kept]);
    assert_eq!(run.feed(1, 0, &[9])[..want.len()], want);
    assert_eq!(run.feed(0, 1, &[71])[..want.len()], want);
}

#[test]
fn another_worker_reads_the_same_bytes() {
    TYPES.into_iter().for_each(another_worker);
}

fn another_worker(dtype: &'static str) {
    let (mut from, mut to) = (Run::new(dtype, 16, ""), Run::new(dtype, 16, ""));
    let prompt = tokens(0..10);
    let (_, want) = from.prompt(0, &prompt);
    let info = from.cache.resource.publish(rid(0)).unwrap().unwrap();
    to.ingest(5, &prompt);
    let begun = Instant::now();
    let ask = |run: &Run| {
        let r = &run.cache.resource;
        r.admit_retrieve(rid(5), NodeId(0), WalkId(0), Some(&info)).unwrap()
    };
    while !ask(&to).is_ready() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it never arrives");
    }
    assert_eq!(to.feed(5, 0, &[10])[..want.len()], want);
}
