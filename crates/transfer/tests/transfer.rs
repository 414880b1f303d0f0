//! Pages that go from one engine to another, and everything that can come between.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use transfer::{
    Address, Destination, InProcess, Lease, Leases, PageRead, ReadId, ReadState, RemotePages,
    SharedMemory, TransferEngine, TransferError,
};

const PAGE: usize = 96;
const LIFE: Duration = Duration::from_secs(60);

/// Takes pages, and waits before each until it may.
#[derive(Default)]
struct Taken {
    pages: Mutex<HashMap<u32, Vec<u8>>>,
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Taken {
    fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }
    fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }
    fn count(&self) -> usize {
        self.pages.lock().unwrap().len()
    }
}

impl Destination for Taken {
    fn put(&self, page: u32, bytes: &[u8]) -> Result<(), String> {
        let closed = self.closed.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
        match page {
            99 => Err("page 99 cannot be written".into()),
            _ => {
                self.pages.lock().unwrap().insert(page, bytes.to_vec());
                Ok(())
            }
        }
    }
}

struct Pair {
    source: Arc<dyn TransferEngine>,
    reader: Arc<dyn TransferEngine>,
    directory: tempfile::TempDir,
}

fn pairs() -> Vec<Pair> {
    let directory = || tempfile::tempdir().unwrap();
    let shared = directory();
    let open = |dir: &tempfile::TempDir| Arc::new(SharedMemory::new(dir.path()).unwrap());
    let in_process = || Arc::new(InProcess::new().unwrap());
    vec![
        Pair { source: in_process(), reader: in_process(), directory: directory() },
        Pair { source: open(&shared), reader: open(&shared), directory: shared },
    ]
}

impl Pair {
    fn leases(&self, pages: u32) -> Leases {
        Leases::new(self.source.register(PAGE as u64, pages).unwrap(), PAGE as u64, LIFE)
    }

    fn begin(
        &self,
        from: &RemotePages,
        to: &[(usize, u32)],
        into: &Arc<Taken>,
        time: Duration,
    ) -> Result<ReadId, TransferError> {
        self.reader.read(PageRead {
            from: from.clone(),
            pages: to.to_vec(),
            destination: into.clone(),
            deadline: Instant::now() + time,
        })
    }

    fn end(&self, read: ReadId) -> ReadState {
        let begun = Instant::now();
        loop {
            match self.reader.poll(read) {
                ReadState::Pending if begun.elapsed() < Duration::from_secs(30) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                state => return state,
            }
        }
    }

    fn read(&self, from: &RemotePages) -> (Result<ReadState, TransferError>, Arc<Taken>) {
        let taken = Arc::new(Taken::default());
        let to: Vec<(usize, u32)> = (0..from.pages.len()).map(|i| (i, 10 + i as u32)).collect();
        let read = self.begin(from, &to, &taken, LIFE);
        (read.map(|read| self.end(read)), taken)
    }
}

/// Why a read has failed, at once or later.
fn failure(read: Result<ReadState, TransferError>) -> TransferError {
    match read {
        Err(why) | Ok(ReadState::Failed(why)) => why,
        Ok(other) => panic!("it has not failed: {other:?}"),
    }
}

fn page(n: u8) -> Vec<u8> {
    (0..PAGE as u8).map(|i| i.wrapping_mul(n)).collect()
}

fn offer(leases: &mut Leases, contents: &[u8]) -> RemotePages {
    leases.offer(contents.len(), Instant::now(), |i, put| put(&page(contents[i]))).unwrap()
}

#[test]
fn pages_arrive_and_the_source_frees_them_when_told() {
    for pair in pairs() {
        let mut leases = pair.leases(5);
        let offered = offer(&mut leases, &[3, 5, 7]);
        assert_eq!((leases.free(), leases.active()), (2, 1));
        let (state, taken) = pair.read(&offered);
        assert_eq!(state, Ok(ReadState::Done));
        let pages = taken.pages.lock().unwrap();
        assert_eq!([10, 11, 12].map(|p| pages[&p].clone()), [page(3), page(5), page(7)]);
        assert_eq!(leases.settle(Instant::now()), (1, 0));
        assert_eq!((leases.free(), leases.active()), (5, 0));
        // Told once.
        assert_eq!(leases.settle(Instant::now()), (0, 0));
    }
}

#[test]
fn some_of_the_pages_or_none_may_be_read() {
    for pair in pairs() {
        let mut leases = pair.leases(8);
        let (a, b) = (offer(&mut leases, &[1, 2, 3]), offer(&mut leases, &[4]));
        let taken = Arc::new(Taken::default());
        let some = pair.begin(&a, &[(2, 40)], &taken, LIFE).unwrap();
        let none = pair.begin(&b, &[], &taken, LIFE).unwrap();
        assert_eq!((pair.end(some), pair.end(none)), (ReadState::Done, ReadState::Done));
        assert_eq!(*taken.pages.lock().unwrap(), HashMap::from([(40, page(3))]));
        assert_eq!((leases.settle(Instant::now()), leases.free()), ((2, 0), 8));
    }
}

#[test]
fn a_read_after_the_lease_fails_loudly() {
    for pair in pairs() {
        let mut leases = pair.leases(2);
        let offered = offer(&mut leases, &[3, 5]);
        assert_eq!(leases.settle(Instant::now() + LIFE), (0, 1));
        let ended =
            |state| matches!(state, Ok(ReadState::Failed(TransferError::LeaseEnded { .. })));
        assert!(ended(pair.read(&offered).0), "free");
        let other = offer(&mut leases, &[8, 9]);
        let (state, taken) = pair.read(&offered);
        assert!(ended(state.clone()), "given to somebody else: {state:?}");
        assert_eq!(taken.count(), 0, "nothing of the other's");
        assert_eq!(pair.read(&other).0, Ok(ReadState::Done));
    }
}

#[test]
fn a_region_that_is_full_says_so_and_leases_nothing() {
    for pair in pairs() {
        let mut leases = pair.leases(3);
        let first = offer(&mut leases, &[1, 2]);
        let full = leases.offer(2, Instant::now(), |_, put| put(&page(1)));
        assert_eq!(full, Err(TransferError::Full { need: 2, free: 1 }));
        let failed = leases
            .offer(1, Instant::now(), |_, _| Err(TransferError::Local("it went meanwhile".into())));
        assert!(failed.is_err());
        assert_eq!((leases.free(), leases.active()), (1, 1));
        assert!(leases.end(Lease(first.lease)) && !leases.end(Lease(first.lease)));
        assert_eq!(leases.free(), 3);
    }
}

#[test]
fn a_late_read_fails_and_writes_nothing_once_it_has_ended() {
    for pair in pairs() {
        let mut leases = pair.leases(3);
        let offered = offer(&mut leases, &[1, 2, 3]);
        let taken = Arc::new(Taken::default());
        taken.close();
        let to = [(0, 1), (1, 2), (2, 3)];
        let read = pair.begin(&offered, &to, &taken, Duration::from_millis(20)).unwrap();
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(pair.reader.poll(read), ReadState::Pending, "it may still write");
        taken.open();
        let late = TransferError::Late { done: 1, all: 3 };
        assert_eq!(pair.end(read), ReadState::Failed(late));
        assert_eq!(taken.count(), 1);
        assert!(matches!(pair.reader.poll(read), ReadState::Failed(TransferError::Local(_))));
        // One that was too late from the start, and one that is called off.
        let read = pair.begin(&offered, &to, &taken, Duration::ZERO).unwrap();
        assert!(matches!(pair.end(read), ReadState::Failed(TransferError::Late { done: 0, .. })));
        taken.close();
        let read = pair.begin(&offered, &to, &taken, LIFE).unwrap();
        pair.reader.cancel(read);
        taken.open();
        assert_eq!(pair.end(read), ReadState::Failed(TransferError::Cancelled));
    }
}

#[test]
fn a_read_that_fails_leaves_others_alone() {
    for pair in pairs() {
        let mut leases = pair.leases(4);
        let offered = offer(&mut leases, &[1, 2]);
        let taken = Arc::new(Taken::default());
        taken.close();
        let bad = pair.begin(&offered, &[(0, 99)], &taken, LIFE).unwrap();
        let good = pair.begin(&offered, &[(0, 1), (1, 2)], &taken, LIFE).unwrap();
        taken.open();
        let why = TransferError::Local("page 99 cannot be written".into());
        assert_eq!((pair.end(bad), pair.end(good)), (ReadState::Failed(why), ReadState::Done));
    }
}

#[test]
fn what_is_published_is_checked() {
    for pair in pairs() {
        let mut leases = pair.leases(4);
        let offered = offer(&mut leases, &[1, 2]);
        let mut damaged = offered.clone();
        damaged.digests[1][3] ^= 1;
        let page = offered.pages[1];
        let why = TransferError::Damaged { page };
        assert_eq!(pair.read(&damaged).0, Ok(ReadState::Failed(why)));
        let mut short = offered.clone();
        short.digests.pop();
        assert!(matches!(pair.read(&short).0, Err(TransferError::Local(_))));
        let mut outside = offered.clone();
        outside.pages[0] = 1000;
        assert!(matches!(pair.read(&outside).0, Ok(ReadState::Failed(_))));
        let address = Address { engine: "carrier-pigeon".into(), ..offered.address.clone() };
        let other = RemotePages { address, ..offered.clone() };
        assert!(matches!(pair.read(&other).0, Err(TransferError::Local(_))));
        assert_eq!(pair.read(&offered).0, Ok(ReadState::Done));
        drop(leases);
        assert!(matches!(failure(pair.read(&offered).0), TransferError::Unreachable { .. }));
    }
}

#[test]
fn files_that_were_cut_replaced_or_are_something_else() {
    let pair = pairs().pop().unwrap();
    let mut leases = pair.leases(4);
    let offered = offer(&mut leases, &[1, 2, 3]);
    let path = offered.address.endpoint.clone();
    let whole = std::fs::read(&path).unwrap();
    for cut in [0, 20, 4096, 36_900, whole.len() - 150] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        match pair.read(&offered).0 {
            Ok(ReadState::Failed(TransferError::Unreachable { why, .. })) => {
                assert_eq!(why, "it was cut short", "at {cut}");
            }
            other if cut > 36_900 => assert_eq!(other, Ok(ReadState::Done)),
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
    let mut later = whole.clone();
    later[16] ^= 1;
    std::fs::write(&path, &later).unwrap();
    assert!(matches!(failure(pair.read(&offered).0), TransferError::Restarted { .. }));
    std::fs::write(&path, vec![7; whole.len()]).unwrap();
    assert!(matches!(failure(pair.read(&offered).0), TransferError::Unreachable { .. }));
    let secret = pair.directory.path().join("secret");
    std::fs::write(&secret, &whole).unwrap();
    let mut elsewhere = offered.clone();
    elsewhere.address.endpoint = secret.to_string_lossy().into_owned();
    assert!(matches!(pair.read(&elsewhere).0, Err(TransferError::Unreachable { .. })));
}

#[test]
fn files_whose_owner_has_gone_are_removed_and_others_are_not() {
    let pair = pairs().pop().unwrap();
    let leases = pair.leases(4);
    let dead = pair.directory.path().join("engine-host-0123.pages");
    std::fs::write(&dead, "left over").unwrap();
    let other = pair.directory.path().join("letter.pages");
    std::fs::write(&other, "somebody's").unwrap();
    let more = pair.leases(4);
    assert!(!dead.exists() && other.exists());
    assert_eq!(std::fs::read_dir(pair.directory.path()).unwrap().count(), 3, "two regions");
    drop((leases, more));
    assert_eq!(std::fs::read_dir(pair.directory.path()).unwrap().count(), 1);
    let nowhere = pair.directory.path().join("no/such");
    assert!(SharedMemory::new(&nowhere).unwrap_err().to_string().contains("is not a directory"));
    assert!(
        transfer::engine("carrier-pigeon", "").unwrap_err().to_string().contains("shared-memory")
    );
}
