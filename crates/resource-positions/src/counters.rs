//! The next position of every stream.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, OnceLock};

use resource_api::{LabelId, RequestId, ResourceError, Result, StepId};

/// Requests that a chunk has counters of.
const CHUNK: usize = 1024;
const CHUNKS: usize = 64;
/// Request slots that counters are kept for.
const MAX_REQUESTS: usize = CHUNK * CHUNKS;
/// Streams in one link of a request's chain.
const LINK: usize = 4;

/// Counters of all live requests. Reading takes no lock, so that a capability call in one step's
/// forward never waits for the planning of the next; changes go through [`Counters::edit`].
pub struct Counters {
    chunks: Box<[OnceLock<Box<[Request; CHUNK]>>]>,
    writer: Mutex<Admitted>,
}

/// Where the rows of the step that was admitted last start, so that its plan looks nothing up again.
#[derive(Default)]
pub struct Admitted {
    /// The step, and whether it is only staged. `None` once a counter has changed otherwise.
    step: Option<(StepId, bool)>,
    /// Request of each row.
    requests: Vec<RequestId>,
    /// First position of each row.
    starts: Vec<u32>,
}

impl Admitted {
    /// Forgets the last step, and gives the starts of `rows` rows to be written.
    pub fn begin(&mut self, rows: usize) -> &mut [u32] {
        self.step = None;
        self.starts.resize(rows, 0);
        &mut self.starts
    }

    /// The starts of these rows of a step have been written.
    pub fn end(&mut self, step: StepId, staged: bool, requests: &[RequestId]) {
        self.requests.clear();
        self.requests.extend_from_slice(requests);
        self.step = Some((step, staged));
    }

    /// Where these rows of a step start, if that was noted.
    pub fn starts(&self, step: StepId, staged: bool, requests: &[RequestId]) -> Option<&[u32]> {
        let known =
            self.step == Some((step, staged)) && RequestId::all_equal(&self.requests, requests);
        known.then_some(&self.starts)
    }
}

/// Made on the heap: it is larger than a stack should hold.
fn new_chunk() -> Box<[Request; CHUNK]> {
    let requests: Box<[Request]> = (0..CHUNK).map(|_| Request::default()).collect();
    requests.try_into().unwrap_or_else(|_| unreachable!("as many as were collected"))
}

/// Three cache lines, so that those of many requests do not compete for a few places of the cache.
#[derive(Default)]
#[repr(C, align(64))]
struct Request {
    /// Live generation; 0 when there is none.
    generation: AtomicU32,
    streams: Streams,
}

/// A chain of a few streams each. Links are kept and reused by the slot's next owner.
#[derive(Default)]
struct Streams {
    here: [Stream; LINK],
    next: OnceLock<Box<Streams>>,
}

/// One stream's counter.
#[derive(Default)]
pub struct Stream {
    /// Generation of the owner (high half) and its label; 0 is free. A stream of an earlier
    /// generation is free too.
    key: AtomicU64,
    /// Whether anything has been committed to it. A stream that only an admitted step knows does
    /// not exist yet.
    open: AtomicBool,
    next: AtomicU32,
    pending_step: AtomicU64,
    pending: AtomicU32,
}

fn key(rid: RequestId, label: LabelId) -> u64 {
    u64::from(rid.generation) << 32 | u64::from(label.0)
}

impl Stream {
    /// The next position as of what is committed.
    pub fn next(&self) -> u32 {
        self.next.load(Acquire)
    }

    /// By how much an admitted step other than `step` will advance it.
    pub fn pending_besides(&self, step: StepId) -> u32 {
        match self.pending_step.load(Acquire) == step.0 {
            true => 0,
            false => self.pending.load(Acquire),
        }
    }

    /// Whether `step` was admitted and has ended since.
    fn is_over(&self, step: StepId) -> bool {
        self.pending_step.load(Acquire) == step.0 && self.pending.load(Acquire) == 0
    }

    /// Forgets what `step` was going to add.
    fn forget(&self, step: StepId) {
        if self.pending_step.load(Acquire) == step.0 {
            self.pending.store(0, Release);
        }
    }

    fn set(&self, next: u32) {
        self.next.store(next, Release);
        self.open.store(true, Release);
    }
}

impl Default for Counters {
    fn default() -> Self {
        let chunks = (0..CHUNKS).map(|_| OnceLock::new()).collect();
        Self { chunks, writer: Mutex::default() }
    }
}

impl Counters {
    /// The request, if it is known.
    #[inline]
    pub fn live(&self, rid: RequestId) -> Option<Live<'_>> {
        let chunk = self.chunks.get(rid.index() / CHUNK)?.get()?;
        let request = &chunk[rid.index() % CHUNK];
        let is_live = rid.generation != 0 && request.generation.load(Acquire) == rid.generation;
        is_live.then_some(Live { rid, request })
    }

    /// The next position of a stream; 0 for one that nobody opened.
    pub fn position(&self, rid: RequestId, label: LabelId) -> u32 {
        self.live(rid).and_then(|live| live.find(label)).map_or(0, Stream::next)
    }

    /// Number of live requests.
    pub fn len(&self) -> usize {
        let requests = self.chunks.iter().filter_map(|c| c.get()).flat_map(|c| c.iter());
        requests.filter(|r| r.generation.load(Acquire) != 0).count()
    }

    /// (label, next position) of a request's open streams.
    pub fn streams(&self, rid: RequestId) -> impl Iterator<Item = (LabelId, u32)> {
        let streams = self.live(rid).into_iter().flat_map(|live| live.request.streams.iter());
        streams.filter_map(move |s| {
            let key = s.key.load(Acquire);
            let own = (key >> 32) as u32 == rid.generation && s.open.load(Acquire);
            own.then(|| (LabelId(key as u32), s.next()))
        })
    }

    /// All live requests, by slot.
    pub fn all(&self) -> impl Iterator<Item = RequestId> {
        let chunks = self.chunks.iter().enumerate();
        let requests = chunks.filter_map(|(i, chunk)| Some((i, chunk.get()?)));
        let requests = requests.flat_map(|(i, chunk)| (CHUNK * i..).zip(chunk.iter()));
        requests.filter_map(|(slot, request)| {
            let generation = request.generation.load(Acquire);
            (generation != 0).then(|| RequestId::new(slot as u32, generation))
        })
    }

    /// The right to change counters, for one call.
    pub fn edit(&self) -> Edit<'_> {
        let admitted = self.writer.lock().unwrap_or_else(|e| e.into_inner());
        Edit { counters: self, admitted }
    }
}

impl Streams {
    fn iter(&self) -> impl Iterator<Item = &Stream> {
        std::iter::successors(Some(self), |s| s.next.get().map(|b| &**b)).flat_map(|s| &s.here)
    }
}

/// A live request.
#[derive(Clone, Copy)]
pub struct Live<'a> {
    rid: RequestId,
    request: &'a Request,
}

impl<'a> Live<'a> {
    /// A stream that exists, or that an admitted step is about to open.
    #[inline]
    pub fn find(self, label: LabelId) -> Option<&'a Stream> {
        let wanted = key(self.rid, label);
        // Most requests have one stream.
        let first = &self.request.streams.here[0];
        match first.key.load(Acquire) == wanted {
            true => Some(first),
            false => self.find_further(wanted),
        }
    }

    #[cold]
    fn find_further(self, wanted: u64) -> Option<&'a Stream> {
        self.request.streams.iter().find(|s| s.key.load(Acquire) == wanted)
    }

    /// The stream, taking a free place for it if there is none.
    #[inline]
    fn find_or_take(self, label: LabelId) -> &'a Stream {
        match self.find(label) {
            Some(stream) => stream,
            None => self.take(label),
        }
    }

    #[cold]
    fn take(self, label: LabelId) -> &'a Stream {
        let is_free = |s: &&Stream| (s.key.load(Acquire) >> 32) as u32 != self.rid.generation;
        let mut link = &self.request.streams;
        let stream = loop {
            match link.here.iter().find(is_free) {
                Some(free) => break free,
                None => link = link.next.get_or_init(Box::default),
            }
        };
        stream.open.store(false, Release);
        stream.next.store(0, Release);
        stream.pending.store(0, Release);
        stream.key.store(key(self.rid, label), Release);
        stream
    }
}

/// Changes to the counters. Unknown requests are left alone.
pub struct Edit<'a> {
    counters: &'a Counters,
    /// What was noted of the step admitted last. Changes outside of steps forget it.
    pub admitted: MutexGuard<'a, Admitted>,
}

impl Edit<'_> {
    /// Takes a request on, with an empty `main` stream. One that is live already stays as it is.
    pub fn ingest(&mut self, rid: RequestId) -> Result<()> {
        let Some(chunk) = self.counters.chunks.get(rid.index() / CHUNK) else {
            return Err(ResourceError::invalid(format!(
                "request {rid}: positions are kept for {MAX_REQUESTS} request slots"
            ))
            .with_amounts(u64::from(rid.slot) + 1, MAX_REQUESTS as u64));
        };
        let chunk = chunk.get_or_init(new_chunk);
        let request = &chunk[rid.index() % CHUNK];
        let live = request.generation.load(Acquire);
        if rid.generation < live || rid.generation == 0 {
            return Err(ResourceError::wrong_state(format!(
                "request {rid} is out of date: generation {live} owns its slot"
            )));
        }
        if live != rid.generation {
            request.generation.store(rid.generation, Release);
            self.set(rid, LabelId::MAIN, 0);
        }
        Ok(())
    }

    /// Forgets a request.
    pub fn remove(&mut self, rid: RequestId) {
        self.admitted.step = None;
        if let Some(live) = self.counters.live(rid) {
            live.request.generation.store(0, Release);
            live.request.streams.iter().for_each(|s| s.key.store(0, Release));
        }
    }

    /// Makes all streams of a request empty.
    pub fn reset(&mut self, rid: RequestId) {
        if let Some(live) = self.counters.live(rid) {
            live.request.streams.iter().for_each(|s| s.key.store(0, Release));
            self.set(rid, LabelId::MAIN, 0);
        }
    }

    /// Sets a stream's next position, opening it.
    pub fn set(&mut self, rid: RequestId, label: LabelId, next: u32) {
        self.admitted.step = None;
        if let Some(live) = self.counters.live(rid) {
            live.find_or_take(label).set(next);
        }
    }

    /// Takes back what [`admit`] noted for `step`.
    pub fn roll_back(&self, rid: RequestId, label: LabelId, step: StepId) {
        let Some(stream) = self.counters.live(rid).and_then(|live| live.find(label)) else {
            return;
        };
        stream.forget(step);
        if stream.pending.load(Acquire) == 0 && !stream.open.load(Acquire) {
            stream.key.store(0, Release);
        }
    }

    /// Adds what `step` has added to a stream of `live`, once: a step that was committed or rolled back
    /// adds nothing more.
    #[inline]
    pub fn commit(&self, live: Live<'_>, label: LabelId, step: StepId, advance: u32) {
        if advance == 0 {
            return self.roll_back(live.rid, label, step);
        }
        let stream = live.find_or_take(label);
        if stream.is_over(step) {
            return;
        }
        stream.forget(step);
        stream.set(stream.next().saturating_add(advance));
    }

    /// Copies a counter to another stream. A source that nobody opened leaves the target alone, as
    /// a cache does.
    pub fn fork(&mut self, rid: RequestId, from: LabelId, to: LabelId) {
        let source = self.counters.live(rid).and_then(|live| live.find(from));
        if let Some(next) = source.filter(|s| s.open.load(Acquire)).map(Stream::next) {
            self.set(rid, to, next);
        }
    }
}

/// Notes what `step` will add to a stream; `found` is what [`Live::find`] says. The caller has the right
/// to change counters.
#[inline]
pub fn admit(live: Live<'_>, found: Option<&Stream>, label: LabelId, step: StepId, advance: u32) {
    // A step that adds nothing to a stream that nobody opened leaves no trace of it.
    if advance == 0 && found.is_none() {
        return;
    }
    let stream = found.unwrap_or_else(|| live.find_or_take(label));
    stream.pending_step.store(step.0, Release);
    stream.pending.store(advance, Release);
}
