//! Many threads at one cache: no page is handed out twice, and none is lost.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use resource_api::{KvCache, KvPlan, Resource};

#[test]
fn threads_that_take_and_give_back_never_share_a_page() {
    const PAGES: u32 = 24;
    let cache = cache(2, PAGES, 40);
    let next = AtomicU64::new(1);
    (0..6).for_each(|slot| cache.ingest(slot));
    std::thread::scope(|threads| {
        for slot in 0..6u32 {
            let (cache, next) = (&cache, &next);
            threads.spawn(move || {
                for round in 0..120u32 {
                    let id = next.fetch_add(1, Ordering::Relaxed);
                    let span = 1 + (round * 7 + slot) % 9;
                    let step = Step { slot, ..Step::new(id, &[(slot, 0, span)]) };
                    if !cache.admit(&step).is_ready() {
                        cache.resource.reset_request(rid(slot), true).unwrap();
                        continue;
                    }
                    let filed = cache.plan(&step).unwrap();
                    let plan = filed.open::<KvPlan>().unwrap();
                    // Whoever else had one of these pages would write its own value there.
                    let len = plan.len[0] as usize;
                    let values = vec![slot as f32 + 1.0; span as usize];
                    cache.write(&step, filed, MAIN, &values);
                    std::thread::yield_now();
                    assert_eq!(cache.history(plan, 0), vec![slot as f32 + 1.0; len]);
                    match round % 4 {
                        0 => cache.rollback(&step),
                        _ => cache.commit(&step).unwrap(),
                    }
                    if round % 11 == 10 {
                        cache.resource.reset_request(rid(slot), true).unwrap();
                    }
                }
            });
        }
    });
    cache.conserved();
    (0..6).for_each(|slot| cache.resource.remove_request(rid(slot)).unwrap());
    cache.conserved();
    assert_eq!(cache.kv.free_pages(), u64::from(PAGES));
}
