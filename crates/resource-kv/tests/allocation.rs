//! Steps of a running batch allocate nothing, and looking up keeps nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::*;
use resource_api::{KvCache, PrefixWalk, RequestOverrides, Resource, TensorView, WalkId};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that are not given back yet.
    static HELD: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        let _ = HELD.try_with(|n| n.set(n.get() + layout.size() as i64));
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let _ = HELD.try_with(|n| n.set(n.get() - layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steps_allocate_nothing_once_a_batch_is_running() {
    let cache = cache(4, 400, 200);
    let walk = PrefixWalk { label: MAIN, write: WalkId(0), decode: WalkId(0) };
    assert!(cache.resource.enable_prefix_cache(b"", vec![walk]).unwrap());
    for slot in 0..8 {
        let tokens = [slot; 10];
        let overrides = RequestOverrides::new("", &tokens, 180);
        cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }
    let prompt: Vec<(u32, u32, u32)> = (0..8).map(|slot| (slot, 0, 10)).collect();
    let decode: Vec<(u32, u32, u32)> = (0..8).map(|slot| (slot, 0, 1)).collect();
    let data = vec![0.5f32; 80 * ROW];
    let (wide, narrow) = ([80, HEADS, DIM], [8, HEADS, DIM]);
    let (mut warming_up, mut after_warm_up) = (0, 0);
    for id in 0..150u64 {
        let (rows, shape) = if id == 0 { (&prompt, &wide) } else { (&decode, &narrow) };
        // Built outside of what is counted: the host's part.
        let mut step = Step { slot: (id % 2) as u32, ..Step::new(id, rows) };
        step.token_ids = rows.iter().flat_map(|r| vec![r.0; r.2 as usize]).collect();
        let outputs: Vec<u32> = (0..8).collect();
        let rows = TensorView::from_slice(&data[..shape.iter().product()], shape);
        let before = ALLOCATIONS.get();
        // Every other step is planned ahead first.
        step.preplan = id % 2 == 1;
        if step.preplan {
            assert!(cache.admit(&step).is_ready());
            cache.plan(&step).unwrap();
            step.preplan = false;
        }
        assert!(cache.admit(&step).is_ready());
        let plan = cache.plan(&step).unwrap();
        for layer in 0..LAYERS {
            step.call(&[plan], |_, c| cache.kv.write_kv(c, layer, MAIN, &rows, &rows)).unwrap();
        }
        cache.commit(&step).unwrap();
        step.call(&[], |_, c| cache.resource.on_outputs(c, &step.request, &outputs)).unwrap();
        let counted = if id < 4 { &mut warming_up } else { &mut after_warm_up };
        *counted += ALLOCATIONS.get() - before;
    }
    assert_eq!(cache.len(0, 0), 159);
    assert!(warming_up > 0, "allocations are counted");
    assert_eq!(after_warm_up, 0);
    let state: serde_json::Value = serde_json::from_str(&cache.resource.inspect()).unwrap();
    assert_eq!(state["prefix"]["pages"], 8 * (159 / 4), "every whole page was indexed");
}

#[test]
fn ten_thousand_lookups_of_a_page_keep_no_memory() {
    let cache = cache(4, 20, 200);
    let walk = PrefixWalk { label: MAIN, write: WalkId(0), decode: WalkId(0) };
    assert!(cache.resource.enable_prefix_cache(b"", vec![walk]).unwrap());
    let tokens: Vec<u32> = (0..10).collect();
    let overrides = RequestOverrides::new("", &tokens, 4);
    let first = resource_api::RequestId::new(0, 1);
    cache.resource.ingest_request(first, &overrides).unwrap();
    let step = Step { token_ids: tokens.clone(), ..Step::new(1, &[(0, 0, 10)]) };
    assert!(cache.admit(&step).is_ready());
    cache.plan(&step).unwrap();
    cache.commit(&step).unwrap();
    let mut held = 0;
    for round in 0..10_000u32 {
        let twin = resource_api::RequestId::new(1, 1 + round);
        cache.resource.ingest_request(twin, &overrides).unwrap();
        let found = cache.resource.resolve_cached_prefix(twin, resource_api::NodeId(0), WalkId(0));
        assert_eq!(found.unwrap(), Some(8));
        cache.resource.remove_request(twin).unwrap();
        if round == 10 {
            held = HELD.get();
        }
    }
    assert_eq!(HELD.get(), held, "bytes are kept from lookup to lookup");
    assert_eq!(cache.kv.free_pages(), 20 - 3);
    cache.conserved();
}
