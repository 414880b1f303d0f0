//! Reads in progress: one thread that takes a page of each in turn, so that a long one holds nobody up.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::{PageRead, ReadId, ReadState, Result, TransferError, digest};

/// Where a read's pages come from.
pub(crate) trait Source: Send {
    /// Puts the contents of a page of the region into `into`; says the lease that it is under.
    fn fetch(&self, page: u32, into: &mut Vec<u8>) -> Result<u64>;

    /// Tells the source that the lease's reader is done.
    fn notify(&self, lease: u64) -> Result<()>;
}

struct Active {
    id: ReadId,
    read: PageRead,
    source: Box<dyn Source>,
    done: usize,
    cancelled: Arc<AtomicBool>,
}

impl Active {
    /// Takes the next page. `None` while more are to come.
    fn advance(&mut self, page: &mut Vec<u8>) -> Option<Result<()>> {
        let PageRead { from, pages, destination, deadline } = &self.read;
        let (done, all) = (self.done, pages.len());
        if self.cancelled.load(Ordering::Acquire) {
            return Some(Err(TransferError::Cancelled));
        }
        let Some(&(at, to)) = pages.get(done) else { return Some(Ok(())) };
        let result = self.source.fetch(from.pages[at], page).and_then(|lease| {
            match digest(page) == from.digests[at] {
                _ if lease != from.lease => Err(TransferError::LeaseEnded { page: from.pages[at] }),
                true => Ok(()),
                false => Err(TransferError::Damaged { page: from.pages[at] }),
            }
        });
        if *deadline <= Instant::now() {
            return Some(Err(TransferError::Late { done, all }));
        }
        match result.and_then(|()| destination.put(to, page).map_err(TransferError::Local)) {
            Ok(()) => {
                self.done += 1;
                None
            }
            Err(e) => Some(Err(e)),
        }
    }
}

type States = Mutex<HashMap<ReadId, (ReadState, Arc<AtomicBool>)>>;

fn lock(states: &States) -> MutexGuard<'_, HashMap<ReadId, (ReadState, Arc<AtomicBool>)>> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reads of an engine.
pub(crate) struct Reads {
    states: Arc<States>,
    last: AtomicU64,
    begin: Option<Sender<Active>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reads({})", lock(&self.states).len())
    }
}

impl Reads {
    pub(crate) fn new() -> Result<Self> {
        let (begin, begun) = channel();
        let states = Arc::new(States::default());
        let shared = states.clone();
        let thread = std::thread::Builder::new()
            .name("page reads".into())
            .spawn(move || work(&begun, &shared))
            .map_err(|e| TransferError::Local(format!("no thread to read pages with: {e}")))?;
        Ok(Reads { states, last: 0.into(), begin: Some(begin), thread: Some(thread) })
    }

    pub(crate) fn begin(&self, read: PageRead, source: Box<dyn Source>) -> Result<ReadId> {
        let list = &read.from;
        let is_inside = |&(at, _): &(usize, u32)| at < list.pages.len();
        if list.pages.len() != list.digests.len() || !read.pages.iter().all(is_inside) {
            return Err(TransferError::Local("the list of pages to read is malformed".into()));
        }
        let id = ReadId(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        let cancelled = Arc::new(AtomicBool::new(false));
        lock(&self.states).insert(id, (ReadState::Pending, cancelled.clone()));
        let active = Active { id, read, source, done: 0, cancelled };
        let is_sent = self.begin.as_ref().is_some_and(|begin| begin.send(active).is_ok());
        if !is_sent {
            lock(&self.states).remove(&id);
            return Err(TransferError::Local("the thread that reads pages has ended".into()));
        }
        Ok(id)
    }

    pub(crate) fn poll(&self, id: ReadId) -> ReadState {
        let mut states = lock(&self.states);
        match states.get(&id).map(|(state, _)| state.clone()) {
            Some(ReadState::Pending) => ReadState::Pending,
            Some(ended) => {
                states.remove(&id);
                ended
            }
            None => ReadState::Failed(TransferError::Local("there is no such read".into())),
        }
    }

    pub(crate) fn cancel(&self, id: ReadId) {
        if let Some((_, cancelled)) = lock(&self.states).get(&id) {
            cancelled.store(true, Ordering::Release);
        }
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        lock(&self.states)
            .values()
            .for_each(|(_, cancelled)| cancelled.store(true, Ordering::Release));
        self.begin = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it was printed there.
            let _ = thread.join();
        }
    }
}

fn work(begun: &Receiver<Active>, states: &States) {
    let mut active: VecDeque<Active> = VecDeque::new();
    let mut page = Vec::new();
    loop {
        if active.is_empty() {
            match begun.recv() {
                Ok(read) => active.push_back(read),
                Err(_) => return,
            }
        }
        while let Ok(read) = begun.try_recv() {
            active.push_back(read);
        }
        let Some(mut read) = active.pop_front() else { continue };
        match read.advance(&mut page) {
            None => active.push_back(read),
            Some(result) => {
                // Also where it failed: nobody comes again for what the source keeps.
                let notified = read.source.notify(read.read.from.lease);
                let result = result.and(notified);
                let state = result.map_or_else(ReadState::Failed, |()| ReadState::Done);
                if let Some(entry) = lock(states).get_mut(&read.id) {
                    entry.0 = state;
                }
            }
        }
    }
}
