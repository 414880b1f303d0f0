//! What happens while contents are being copied.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use resource_api::host::PlainHost;
use resource_api::{Device, EngineResourceInfo, NodeResourceSpec, Resource, ResourceKind};
use resource_api::{RequestOverrides, ResourceError, Result};

use super::*;
use crate::tiers::{MemoryStore, PageStore, Tier, Tiers};

const SLOTS: u32 = 20;

/// A store whose copies wait to be let go, or fail.
#[derive(Debug)]
struct Held {
    memory: MemoryStore,
    begun: SyncSender<()>,
    go_on: std::sync::Mutex<Receiver<bool>>,
}

impl Held {
    fn wait(&self) -> Result<()> {
        self.begun.send(()).unwrap();
        match self.go_on.lock().unwrap().recv().unwrap() {
            true => Ok(()),
            false => Err(ResourceError::internal("no space left on device")),
        }
    }
}

impl PageStore for Held {
    fn put(&self, slot: u32, key: Option<Key>, page: &[u8]) -> Result<()> {
        self.wait()?;
        self.memory.put(slot, key, page)
    }
    fn get(
        &self,
        slot: u32,
        key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.wait()?;
        self.memory.get(slot, key, take)
    }
}

struct Rig {
    kv: Arc<Kv>,
    begun: Receiver<()>,
    go_on: SyncSender<bool>,
}

const RID: RequestId = RequestId::new(0, 1);

/// A cache with a request of two pages, and a tier that waits.
fn rig() -> Rig {
    let settings = r#"{"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "pages": 9,
        "page_size": 4, "dtype": "f32"}"#;
    let spec = NodeResourceSpec {
        resource_key: "main_kv".into(),
        kind: "kv".into(),
        nodes: Default::default(),
        settings: settings.into(),
    };
    let info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    let kv = Kv::build(spec.parse().unwrap(), &info).unwrap();
    let ((begun, has_begun), (go_on, may_go_on)) = (sync_channel(9), sync_channel(9));
    let memory = MemoryStore::new(SLOTS);
    let store = Held { memory, begun, go_on: std::sync::Mutex::new(may_go_on) };
    kv.ingest_request(RID, &RequestOverrides::new("", &[], 0)).unwrap();
    kv.with_state(|state, shared| {
        state.tiers = Tiers::new(vec![Tier::new("held", Arc::new(store), SLOTS)]);
        let id = StreamId { request: RID, label: LabelId::MAIN };
        let stream = state.requests.get_mut(id).unwrap();
        assert!(state.pool.take(2, &mut stream.pages));
        stream.len = 7;
        state.publish(shared, id);
    });
    let rig = Rig { kv: Arc::new(kv), begun: has_begun, go_on };
    rig.conserved(6, 0);
    rig
}

impl Rig {
    fn conserved(&self, free: u32, held: usize) {
        self.kv.with_state(|state, _| {
            state.check_conservation().unwrap();
            let (_, usage) = state.tiers.usage().next().unwrap();
            assert_eq!((state.pool.unowned(), usage.held), (free, held));
        });
    }

    /// Runs `meanwhile` while the first of two pages is being copied, and then lets the copies end.
    fn during<R: Send + 'static>(
        &self,
        call: fn(&Kv) -> R,
        meanwhile: impl FnOnce(),
        works: bool,
    ) -> R {
        let kv = self.kv.clone();
        let thread = std::thread::spawn(move || call(&kv));
        self.begun.recv().unwrap();
        meanwhile();
        (0..2).for_each(|_| self.go_on.send(works).unwrap());
        let result = thread.join().unwrap();
        // The second copy's mark.
        self.begun.recv().unwrap();
        result
    }
}

fn offload(kv: &Kv) -> u64 {
    kv.offload(RID).unwrap()
}

#[test]
fn a_request_is_away_while_its_copies_are_in_flight_and_others_go_on() {
    let rig = rig();
    let freed = rig.during(
        offload,
        || {
            assert!(rig.kv.is_offloaded(RID).unwrap());
            assert_eq!((rig.kv.reclaimable(RID).unwrap(), rig.kv.offload(RID).unwrap()), (0, 0));
            assert!(!rig.kv.can_reload(RID).unwrap() && !rig.kv.reload(RID).unwrap());
            rig.conserved(6, 2);
            let other = RequestId::new(1, 1);
            rig.kv.ingest_request(other, &RequestOverrides::new("", &[], 0)).unwrap();
            rig.kv.remove_request(other).unwrap();
        },
        true,
    );
    assert_eq!(freed, 2);
    rig.conserved(8, 2);
    let back = rig.during(|kv| kv.reload(RID).unwrap(), || rig.conserved(6, 2), true);
    assert!(back && !rig.kv.is_offloaded(RID).unwrap());
    rig.conserved(6, 0);
}

/// The pool's other pages can be written while a copy waits for a store.
fn write_elsewhere(kv: &Arc<Kv>) {
    let (kv, (done, is_done)) = (kv.clone(), sync_channel(1));
    std::thread::spawn(move || {
        let bytes = kv.shared.memory.copy_of_page(8).unwrap();
        kv.shared.memory.write_page(8, &bytes).unwrap();
        done.send(())
    });
    let waited = is_done.recv_timeout(std::time::Duration::from_secs(60));
    waited.expect("a step that writes waits for the copy of another request");
}

#[test]
fn steps_write_to_the_pool_while_a_store_takes_its_time() {
    let rig = rig();
    assert_eq!(rig.during(offload, || write_elsewhere(&rig.kv), true), 2);
    assert!(rig.during(|kv| kv.reload(RID).unwrap(), || write_elsewhere(&rig.kv), true));
    rig.conserved(6, 0);
}

#[test]
fn a_request_that_goes_while_it_is_copied_leaves_nothing() {
    for remove in [true, false] {
        let go = |rig: &Rig| match remove {
            true => rig.kv.remove_request(RID).unwrap(),
            false => rig.kv.reset_request(RID, true).unwrap(),
        };
        let rig = rig();
        let meanwhile = || {
            go(&rig);
            // Nobody may write to the slots yet, nor to the pages that are read.
            rig.conserved(6, 2);
            assert!(!rig.kv.is_offloaded(RID).unwrap());
        };
        assert_eq!(rig.during(offload, meanwhile, true), 0);
        rig.conserved(8, 0);

        let rig = self::rig();
        assert_eq!(rig.during(offload, || (), true), 2);
        let meanwhile = || {
            go(&rig);
            // Nor to the pages.
            rig.conserved(6, 2);
        };
        assert!(!rig.during(|kv| kv.reload(RID).unwrap(), meanwhile, true));
        rig.conserved(8, 0);
    }
}

#[test]
fn a_copy_that_fails_strands_nothing_and_the_request_is_usable() {
    let rig = rig();
    assert_eq!(rig.during(offload, || (), false), 0);
    assert!(!rig.kv.is_offloaded(RID).unwrap());
    rig.conserved(6, 0);
    assert_eq!(rig.during(offload, || (), true), 2, "the next one works");
    let failed = rig.during(|kv| kv.reload(RID).is_err(), || (), false);
    assert!(failed && rig.kv.is_offloaded(RID).unwrap());
    rig.conserved(8, 2);
    rig.kv.reset_request(RID, true).unwrap();
    rig.conserved(8, 0);
}
