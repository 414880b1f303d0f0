//! Everything that the step methods change, under one lock; requests come and go.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use resource_api::{
    HostServices, HostServicesHandle, KvFacts, LabelId, RequestId, RequestOverrides, ResourceError,
    Result, StepId,
};

use crate::board::Board;
use crate::branches::Branches;
use crate::chain::LinkBatch;
use crate::declared::Declared;
use crate::geometry::PageSize;
use crate::handover::{Handovers, Transfer};
use crate::memory::KvMemory;
use crate::offload::Journeys;
use crate::pool::PagePool;
use crate::prefix::Prefix;
use crate::seats::Seats;
use crate::sessions::Sessions;
use crate::spill::InFlight;
use crate::step::StepRecord;
use crate::stream::{MAX_REQUESTS, Requests, StreamId};
use crate::tiers::Tiers;

/// What needs no lock.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The resource's key, for counters.
    pub(crate) key: String,
    pub(crate) facts: KvFacts,
    pub(crate) page_size: PageSize,
    /// Shared with reads from other workers, which may outlast their requests.
    pub(crate) memory: Arc<KvMemory>,
    pub(crate) board: Board,
    pub(crate) host: HostServicesHandle,
    /// How pages get to other workers and from them.
    pub(crate) transfer: Option<Transfer>,
    /// Set when the prefix cache is opened.
    pub(crate) prefix: OnceLock<Prefix>,
}

impl Shared {
    /// The last step epoch whose device work is done.
    pub(crate) fn completed_epoch(&self) -> u64 {
        self.host.completed_epoch()
    }

    /// Adds to one of the cache's counters.
    pub(crate) fn count(&self, name: &str, by: u64) {
        if by > 0 {
            self.host.count(&self.key, name, by);
        }
    }

    /// Pages for this many tokens.
    pub(crate) fn pages_for(&self, tokens: u32) -> u32 {
        self.page_size.pages(tokens)
    }
}

/// How the prefix cache was used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefixUse {
    /// Those that asked.
    pub(crate) lookups: u64,
    /// Those of them that found something.
    pub(crate) hits: u64,
    /// Tokens that they found.
    pub(crate) hit_tokens: u64,
}

impl PrefixUse {
    /// One has asked and found so many tokens.
    pub(crate) fn note(&mut self, found: u32) {
        self.lookups += 1;
        self.hits += u64::from(found > 0);
        self.hit_tokens += u64::from(found);
    }
}

/// Records of pages for which there is no memory.
pub(crate) fn no_memory(error: device::Error) -> ResourceError {
    let message = format!("no memory for the records of the pages: {error}");
    ResourceError::new(resource_api::ErrorKind::EXHAUSTED, message)
}

/// Streams, pages and steps in flight.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) requests: Requests,
    pub(crate) pool: PagePool,
    pub(crate) seats: Seats,
    /// Steps between `admit` and `commit`, in order of admission.
    pub(crate) steps: Vec<StepRecord>,
    pub(crate) spare: Vec<StepRecord>,
    /// The last step that was planned to run: it may access any page that was owned so far.
    pub(crate) last_epoch: u64,
    /// Counts admissions.
    pub(crate) admissions: u64,
    /// Pages on their way back to the pool; kept for its memory.
    pub(crate) outgoing: Vec<u32>,
    /// Links of pages whose last token the call that runs has told of; kept for its memory.
    pub(crate) links: LinkBatch,
    /// Streams whose pages have become whole in the call that runs and that are still to be indexed;
    /// kept for its memory.
    pub(crate) ended: Vec<StreamId>,
    /// By requests.
    pub(crate) prefix_use: PrefixUse,
    /// By the streams of each label.
    pub(crate) label_use: Vec<(LabelId, PrefixUse)>,
    /// Where prompts part within a page.
    pub(crate) branches: Branches,
    /// Evictions that the host's counter lacks: a step does not wait for the host's metrics.
    pub(crate) untold_evictions: u64,
    /// Pages that are not in the pool.
    pub(crate) tiers: Tiers,
    /// Requests whose pages are there.
    pub(crate) journeys: Journeys,
    /// What is being copied without the lock.
    pub(crate) in_flight: InFlight,
    /// Pages that the call that runs lacks, and that cached ones will make; see [`State::make_ready`].
    pub(crate) wanted_room: u32,
    /// What is published, and what arrives.
    pub(crate) handovers: Handovers,
    /// Streams without a request.
    pub(crate) sessions: Sessions,
    pub(crate) page_size: u32,
    tables: u64,
}

impl State {
    /// # Errors
    /// `EXHAUSTED` when the operating system has no room for the records of the pages.
    pub(crate) fn new(facts: &KvFacts, max_batch: u32) -> Result<Self> {
        Ok(State {
            requests: Requests::default(),
            pool: PagePool::new(facts.num_pages).map_err(no_memory)?,
            // No stream has more pages than the pool, however long the model would let it grow.
            seats: Seats::new(
                facts.max_seq_len.div_ceil(facts.page_size).min(facts.num_pages),
                max_batch,
            ),
            steps: Vec::new(),
            spare: Vec::new(),
            last_epoch: 0,
            admissions: 0,
            outgoing: Vec::new(),
            ended: Vec::new(),
            links: LinkBatch::default(),
            prefix_use: PrefixUse::default(),
            label_use: Vec::new(),
            branches: Branches::default(),
            untold_evictions: 0,
            tiers: Tiers::default(),
            journeys: Journeys::default(),
            in_flight: InFlight::default(),
            wanted_room: 0,
            handovers: Handovers::default(),
            sessions: Sessions::default(),
            page_size: facts.page_size,
            tables: 0,
        })
    }

    /// A new identity for a page list.
    pub(crate) fn new_table(&mut self) -> u64 {
        self.tables += 1;
        self.tables
    }

    /// Token slots of a page.
    pub(crate) fn page_size(&self) -> u32 {
        self.page_size
    }

    /// The step in flight with this id.
    pub(crate) fn find(&self, step: StepId) -> Option<usize> {
        self.steps.iter().position(|r| r.step == Some(step))
    }

    /// Makes a request live that is to have these streams. A second time it changes nothing; an id older
    /// than the live one is a late copy, a newer one replaces it.
    pub(crate) fn ingest(
        &mut self,
        shared: &Shared,
        request: RequestId,
        overrides: &RequestOverrides<'_>,
        mut streams: Vec<Declared>,
    ) -> Result<()> {
        if request.is_padding() {
            return Ok(());
        }
        if request.slot >= MAX_REQUESTS || request.generation == 0 {
            return Err(ResourceError::invalid(format!(
                "request {request}: slots go up to {} and generations begin at 1",
                MAX_REQUESTS - 1
            )));
        }
        match self.requests.live(request) {
            Some(live) if live >= request.generation => return Ok(()),
            Some(live) => self.remove(shared, RequestId::new(request.slot, live)),
            None => {}
        }
        self.check_fits(shared, overrides, &streams)?;
        let room = |stream: &Declared| shared.pages_for(stream.tokens) as usize + 1;
        let main = streams.iter().position(|s| s.label == LabelId::MAIN);
        let (pages, chain) = main.map_or(Default::default(), |at| {
            let main = streams.remove(at);
            (room(&main), main.chain)
        });
        self.requests.insert(request, pages, chain);
        let table = self.new_table();
        let id = StreamId { request, label: LabelId::MAIN };
        if let Some(main) = self.requests.get_mut(id) {
            main.table = table;
        }
        shared.board.set(id, 0, 0);
        for stream in streams {
            let (table, pages) = (self.new_table(), room(&stream));
            let id = StreamId { request, label: stream.label };
            self.requests.insert_other(id, table, pages, stream.chain);
            shared.board.set(id, 0, 0);
        }
        Ok(())
    }

    /// # Errors
    /// For a request that would run until a stream or the pool is full, and then fail however long it
    /// waited.
    fn check_fits(
        &self,
        shared: &Shared,
        overrides: &RequestOverrides<'_>,
        streams: &[Declared],
    ) -> Result<()> {
        let prompt = overrides.prompt().len();
        let generated = overrides.max_new_tokens();
        let request = || {
            let in_streams = match streams.len() {
                1 => String::new(),
                n => format!(" in {n} streams"),
            };
            format!(
                "{prompt} prompt tokens and up to {generated} generated ones, the last of them \
                 uncached,{in_streams}"
            )
        };
        let tokens = || streams.iter().map(|stream| stream.tokens);
        let (longest, most) = (tokens().max().unwrap_or(0), shared.facts.max_seq_len);
        if longest > most {
            let message = format!(
                "{} make a stream of {longest} tokens; one may have {most} (`max_seq_len`): shorten \
                 the request",
                request()
            );
            return Err(ResourceError::invalid(message).with_amounts(longest.into(), most.into()));
        }
        let need: u64 = tokens().map(|tokens| u64::from(shared.pages_for(tokens))).sum();
        let have = u64::from(self.pool.usable());
        if need > have {
            let message = format!(
                "{} need {need} pages of {} tokens; the pool has {have} in all: shorten the request, \
                 or raise `pages`",
                request(),
                self.page_size
            );
            return Err(ResourceError::invalid(message).with_amounts(need, have));
        }
        Ok(())
    }

    /// Empties a request's streams; with `free`, or where a page must not be written again, their
    /// pages go too.
    pub(crate) fn reset(&mut self, shared: &Shared, request: RequestId, free: bool) {
        if request.is_padding() || !self.requests.is_live(request) {
            return;
        }
        self.forget(shared, request);
        self.cancel_journey(shared, request);
        self.forget_handover(shared, request);
        self.return_leases(shared, request);
        let mut nth = 0;
        while let Some(label) = self.requests.nth_label(request, nth) {
            let id = StreamId { request, label };
            nth += 1;
            self.note_generated(id);
            if free {
                self.keep_end(id);
            }
            let Some((stream, chain)) = self.requests.get_with_chain(id) else { continue };
            chain.restart();
            (stream.len, stream.pending, stream.in_flight, stream.rewriters) = (0, 0, 0, 0);
            (stream.released, stream.protected) = (0, 0);
            stream.generation += 1;
            let held = &stream.pages;
            if free || held.iter().any(|&p| self.pool.is_sealed(p) || self.pool.owners(p) > 1) {
                let held = held.len();
                self.release_range(shared, id, 0..held);
            }
            self.publish(shared, id);
        }
    }

    /// Forgets a request and frees its pages.
    pub(crate) fn remove(&mut self, shared: &Shared, request: RequestId) {
        if request.is_padding() || !self.requests.is_live(request) {
            return;
        }
        self.reset(shared, request, true);
        let mut nth = 0;
        while let Some(label) = self.requests.nth_label(request, nth) {
            let id = StreamId { request, label };
            nth += 1;
            if let Some(stream) = self.requests.get(id) {
                self.seats.leave(stream.seat);
            }
        }
        self.requests.remove(request);
    }

    /// Takes a request out of the steps in flight: what they reserved for its streams stays with the
    /// streams, and their rows go to the sink.
    fn forget(&mut self, shared: &Shared, request: RequestId) {
        let mut steps = std::mem::take(&mut self.steps);
        for record in &mut steps {
            let mut found = record.rows.sink(request);
            for copy in record.copies.iter_mut().filter(|c| c.fork.request_id == request) {
                let mut pages = std::mem::take(&mut copy.pages);
                self.release(shared, &mut pages);
                copy.alive = false;
                found = true;
            }
            record.opened.retain(|id| id.request != request);
            record.taken.retain(|t| t.id.request != request);
            record.marked.retain(|(id, _)| id.request != request);
            record.stale |= found;
        }
        self.steps = steps;
    }

    /// Gives up pages that a step still running may access.
    pub(crate) fn release(&mut self, shared: &Shared, pages: &mut Vec<u32>) {
        if pages.is_empty() {
            return;
        }
        let completed = shared.completed_epoch();
        // In reverse, so that pages taken together are taken in the same order again.
        for page in pages.drain(..).rev() {
            self.pool.release(page, self.last_epoch, completed);
        }
    }

    /// Moves pages `range` of a stream back to the pool.
    pub(crate) fn release_range(&mut self, shared: &Shared, id: StreamId, range: Range<usize>) {
        let table = self.new_table();
        let Some(stream) = self.requests.get_mut(id) else { return };
        let mut outgoing = std::mem::take(&mut self.outgoing);
        outgoing.extend(stream.pages.drain(range));
        stream.table = table;
        self.release(shared, &mut outgoing);
        self.outgoing = outgoing;
    }

    /// Sets the committed length back to `len` and releases the pages that are no longer needed.
    ///
    /// # Errors
    /// `EXHAUSTED` when the last page left is shared and there is none for a copy; nothing changes.
    pub(crate) fn rewind(&mut self, shared: &Shared, id: StreamId, len: u32) -> Result<()> {
        let needed = shared.pages_for(len) as usize;
        if !len.is_multiple_of(self.page_size) {
            self.make_writable(shared, id, needed - 1)?;
        }
        let Some((stream, chain)) = self.requests.get_with_chain(id) else { return Ok(()) };
        chain.rewind(len);
        stream.len = len;
        stream.generation += 1;
        let held = stream.pages.len();
        if held > needed {
            self.release_range(shared, id, needed..held);
        }
        self.publish(shared, id);
        Ok(())
    }

    /// Sees to it that a page of a stream may be written to.
    fn make_writable(&mut self, shared: &Shared, id: StreamId, at: usize) -> Result<()> {
        let page = self.requests.get(id).and_then(|s| s.pages.get(at)).copied();
        let Some(page) = page.filter(|&page| self.pool.is_sealed(page)) else { return Ok(()) };
        if self.pool.owners(page) == 1 {
            self.pool.unseal(page);
            return Ok(());
        }
        let copy = self.take_one(shared).ok_or_else(|| crate::prefix::no_page(id.request))?;
        if let Err(e) = shared.memory.copy_page(page, copy) {
            self.pool.put_back(copy);
            return Err(e);
        }
        let table = self.new_table();
        if let Some(stream) = self.requests.get_mut(id) {
            stream.pages[at] = copy;
            stream.table = table;
        }
        let completed = shared.completed_epoch();
        self.pool.release(page, self.last_epoch, completed);
        Ok(())
    }

    /// Shows a stream to those without the lock.
    pub(crate) fn publish(&self, shared: &Shared, id: StreamId) {
        let (len, held) = self.requests.get(id).map_or((0, 0), |s| (s.len, s.held()));
        shared.board.set(id, len, held);
    }

    /// The open stream, if no step in flight uses it.
    pub(crate) fn idle_stream(&self, id: StreamId, what: &str) -> Result<&crate::stream::Stream> {
        match self.requests.get(id) {
            None => Err(ResourceError::new(
                resource_api::ErrorKind::NOT_FOUND,
                format!("request {} has no stream with label {}", id.request, id.label.0),
            )),
            Some(_) if self.journeys.is_away(id.request) => {
                Err(ResourceError::wrong_state(format!(
                    "cannot {what} stream {} of request {} while it is off the device",
                    id.label.0, id.request
                )))
            }
            Some(stream) if stream.in_flight > 0 => Err(ResourceError::wrong_state(format!(
                "cannot {what} stream {} of request {} while a step with it is in flight",
                id.label.0, id.request
            ))),
            Some(stream) => Ok(stream),
        }
    }
}
