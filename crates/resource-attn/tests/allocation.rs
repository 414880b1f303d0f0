//! Planning and running a step allocate nothing once a batch is running.

mod common;

use common::*;
use resource_api::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steps_allocate_nothing_once_a_batch_is_running() {
    let config = Config::default();
    // One context long enough to be split among threads, and a prompt.
    let streams =
        [Stream::new(1, 3000, 1), Stream::new(2, 0, 40), Stream::padding(0), Stream::new(3, 9, 1)];
    let cache = Arc::new(FakeCache::new(&config, &streams));
    for threads in [1, 2] {
        let mut info = info(&cache, threads);
        info.host = pool_host(threads);
        let spec = spec("attn", "attention", settings(&config));
        let built = build_resource::<resource_attn::PagedAttention>(&spec, &info).unwrap();
        let attention: AttentionHandle = built.capabilities[0].open().unwrap();
        let q = queries(&config, &streams, LabelId::MAIN);
        let mut out = vec![0f32; q.len()];
        let shape = [43, config.heads, config.head_dim];
        let request = streams.map(|s| s.request);
        let label = streams.map(|s| s.label);
        let span = streams.map(|s| s.span);
        let step = ResourceStep::new(Segments { request: &request, label: &label, span: &span });
        let causal =
            [AttentionStepOptions { causal: true }, AttentionStepOptions { causal: false }];
        with_step(None, &cache, &built.resource, &streams, |ctx| {
            let q = TensorView::from_slice(&q, &shape);
            let mut counts = Vec::new();
            for round in 0..6 {
                // The options differ from round to round, so that blocks are laid out each time.
                let options = TypedRef::new(&causal[round % 2]);
                let step = ResourceStep::new(step.segments()).with_options(options);
                let before = ALLOCATIONS.get();
                built.resource.plan(&step, ctx).unwrap();
                let mut out = TensorViewMut::from_slice(&mut out, &shape);
                attention.run(ctx, 1, LabelId::MAIN, &q, &mut out).unwrap();
                counts.push(ALLOCATIONS.get() - before);
            }
            assert!(counts[0] > 0, "the counter does not count");
            assert_eq!(counts[2..], [0; 4], "{threads} threads");
        })
        .unwrap();
    }
}
