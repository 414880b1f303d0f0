//! Reads that take longer than they may: what still arrives then, and where.

use std::fmt;

use resource_api::host::PlainHost;
use resource_api::{
    Device, FailureReason, NodeResourceSpec, RequestOverrides, Resource, ResourceKind,
    TransferEngineInfo,
};
use transfer::{InProcess, Region, TransferError};

use super::*;

const PAGES: u32 = 8;

/// A peer that answers when the test says so. A read is `None` once it has ended.
#[derive(Clone, Default)]
struct Slow(Arc<Mutex<Vec<Option<PageRead>>>>);

impl fmt::Debug for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a slow peer")
    }
}

impl Slow {
    /// Page `at` of a read arrives, whatever has become of its request.
    fn arrives(&self, read: usize, at: usize, fill: u8) {
        let reads = self.0.lock().unwrap();
        let read = reads[read].as_ref().expect("it goes on");
        let page = vec![fill; read.from.page_bytes as usize];
        read.destination.put(read.pages[at].1, &page).unwrap();
    }

    fn ends(&self, read: usize) {
        self.0.lock().unwrap()[read] = None;
    }
}

impl TransferEngine for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn register(&self, _: u64, _: u32) -> transfer::Result<Arc<dyn Region>> {
        Err(TransferError::Local("it only reads".into()))
    }
    fn read(&self, read: PageRead) -> transfer::Result<ReadId> {
        let mut reads = self.0.lock().unwrap();
        reads.push(Some(read));
        Ok(ReadId(reads.len() as u64 - 1))
    }
    fn poll(&self, read: ReadId) -> ReadState {
        match &self.0.lock().unwrap()[read.0 as usize] {
            Some(_) => ReadState::Pending,
            None => ReadState::Failed(TransferError::Cancelled),
        }
    }
    /// It cannot be stopped in the middle of a page.
    fn cancel(&self, _: ReadId) {}
}

fn build() -> Kv {
    let settings = format!(
        r#"{{"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "pages": {}, "page_size": 4,
            "dtype": "f32", "transfer_timeout": 0.05}}"#,
        PAGES + 1
    );
    let spec = NodeResourceSpec {
        resource_key: "main_kv".into(),
        kind: "kv".into(),
        nodes: Default::default(),
        settings,
    };
    let mut info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    let (engine, endpoint) = (InProcess::NAME.to_string(), String::new());
    info.transfer_engine_info = Some(TransferEngineInfo { engine, endpoint });
    Kv::build(spec.parse().unwrap(), &info).unwrap()
}

const SLOT: fn(u32) -> RequestId = |slot| RequestId::new(slot, 1);

/// Gives a request so many pages of its own, all bytes `fill`.
fn give(kv: &Kv, slot: u32, pages: u32, fill: u8) {
    kv.ingest_request(SLOT(slot), &RequestOverrides::new("", &[], 0)).unwrap();
    kv.with_state(|state, shared| {
        let id = StreamId { request: SLOT(slot), label: LabelId::MAIN };
        let stream = state.requests.get_mut(id).unwrap();
        assert!(state.pool.take(pages, &mut stream.pages), "{pages} pages are free");
        stream.len = pages * 4;
        let bytes = vec![fill; kv.shared.transfer.as_ref().unwrap().page_bytes as usize];
        let stream = state.requests.get(id).unwrap();
        stream.pages.iter().for_each(|&page| shared.memory.write_page(page, &bytes).unwrap());
        state.publish(shared, id);
    });
}

/// Whether all bytes that a request has are `fill`.
fn holds(kv: &Kv, slot: u32, fill: u8) -> bool {
    kv.with_state(|state, shared| {
        let id = StreamId { request: SLOT(slot), label: LabelId::MAIN };
        state.requests.get(id).unwrap().pages.iter().all(|&page| {
            let mut same = false;
            let mut look = |bytes: &[u8]| {
                same = bytes.iter().all(|&byte| byte == fill);
                Ok(())
            };
            shared.memory.read_page(page, &mut look).unwrap();
            same
        })
    })
}

/// (pages free, pages that wait for reads of nobody).
fn pages(kv: &Kv) -> (u32, usize) {
    kv.with_state(|state, _| {
        state.check_conservation().unwrap();
        (state.pool.unowned(), state.handovers.quarantined())
    })
}

#[test]
fn what_arrives_after_the_deadline_lands_where_nobody_else_is() {
    let from = build();
    give(&from, 0, 3, 1);
    let info = from.publish_request(SLOT(0)).unwrap().unwrap();
    let (mut to, slow) = (build(), Slow::default());
    to.shared.transfer.as_mut().unwrap().engine = Arc::new(slow.clone());
    for slot in 0..2 {
        to.ingest_request(SLOT(slot), &RequestOverrides::new("", &[], 0)).unwrap();
        assert!(!to.retrieve_request(SLOT(slot), Some(&info)).is_ready());
    }
    slow.arrives(0, 0, 1);
    std::thread::sleep(Duration::from_millis(60));
    let outcome = to.retrieve_request(SLOT(0), Some(&info));
    assert_eq!(outcome.reason(), FailureReason::RUNTIME_ERROR);
    assert!(outcome.message().contains("longer than `transfer_timeout`"), "{}", outcome.message());
    // Its request goes; its pages stay out of the pool, since the read still writes to them.
    to.remove_request(SLOT(0)).unwrap();
    assert_eq!(pages(&to), (PAGES - 6, 3));
    // Everything else is somebody's who runs on.
    give(&to, 2, PAGES - 6, 9);
    assert_eq!(pages(&to), (0, 3));
    (1..3).for_each(|at| slow.arrives(0, at, 7));
    assert!(holds(&to, 2, 9), "a late page fell into another request");
    assert_eq!(pages(&to), (0, 3));
    // Another generation in the slot has none of it, and waits for room.
    to.ingest_request(RequestId::new(0, 2), &RequestOverrides::new("", &[], 0)).unwrap();
    let again = to.retrieve_request(RequestId::new(0, 2), Some(&info));
    assert_eq!(again.reason(), FailureReason::ALLOCATION_FAILED);
    slow.ends(0);
    assert_eq!(pages(&to), (3, 0));
    // The second one's read ends badly: it fails in its turn, and alone.
    slow.arrives(1, 0, 7);
    slow.ends(1);
    assert_eq!(to.retrieve_request(SLOT(1), Some(&info)).reason(), FailureReason::RUNTIME_ERROR);
    assert_eq!(pages(&to), (6, 0));
    assert!(holds(&to, 2, 9));
    // A cache that goes with a read in progress leaves it its memory.
    assert!(!to.retrieve_request(RequestId::new(0, 2), Some(&info)).is_ready());
    drop(to);
    slow.arrives(2, 0, 7);
    slow.ends(2);
}
