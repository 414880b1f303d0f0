//! How streams get to another worker, and those that come from one.
//!
//! What is published says where the pages of each stream are, not what is in them: they lie in a region
//! that the other side reads by itself, under a lease. Pages that a read may still write to belong to
//! nobody else until it has ended, also where its request has gone meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use resource_api::{
    AdmitOutcome, EngineResourceInfo, HostServices, LabelId, PublishedInfo, RequestId,
    ResourceError, Result,
};
use serde::{Deserialize, Serialize};
use transfer::{
    Address, Destination, Leases, PageRead, ReadId, ReadState, RemotePages, TransferEngine,
};

use crate::memory::KvMemory;
use crate::resource::Kv;
use crate::restore::Wanted;
use crate::state::{Shared, State};
use crate::stream::StreamId;

/// Format of what is published: an entry per stream, named after its label, ordered by its length.
pub(crate) const PUBLISHED: (&str, u32) = ("kv", 1);

/// How pages get to other workers and from them.
#[derive(Debug)]
pub(crate) struct Transfer {
    engine: Arc<dyn TransferEngine>,
    /// Made when something is published for the first time.
    leases: Mutex<Option<Leases>>,
    /// Where its region is, once it is made.
    address: OnceLock<Address>,
    settings: TransferSettings,
    page_bytes: u64,
    /// What pages of another cache must be like to be those of this one.
    pub(crate) layout: String,
}

/// What the settings say of transfers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferSettings {
    /// Pages that can be published at a time.
    pub(crate) pages: u32,
    /// How long they are kept for a reader.
    pub(crate) lease: Duration,
    /// How long a read may take.
    pub(crate) timeout: Duration,
}

/// What is published of a stream.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PublishedStream {
    pub(crate) len: u32,
    pub(crate) released: u64,
    pub(crate) protected: u32,
    pub(crate) layout: String,
    pub(crate) pages: RemotePages,
}

/// A stream as it was published last.
#[derive(Debug)]
pub(crate) struct Earlier {
    pub(crate) label: LabelId,
    pub(crate) len: u32,
    pub(crate) generation: u64,
    pub(crate) pages: RemotePages,
}

/// A stream that is being read.
#[derive(Debug)]
struct Arrival {
    label: LabelId,
    len: u32,
    released: u64,
    protected: u32,
    /// All of its pages, those in front perhaps found here.
    pages: Vec<u32>,
    /// `None` once it has ended.
    read: Option<ReadId>,
}

/// The streams of a request that are being read.
#[derive(Debug)]
struct Retrieval {
    arrivals: Vec<Arrival>,
    deadline: Instant,
}

/// What is published, and what arrives.
#[derive(Debug, Default)]
pub(crate) struct Handovers {
    pub(crate) published: HashMap<RequestId, Vec<Earlier>>,
    /// Requests whose pages are being copied to be published, and as what those are in flight.
    pub(crate) publishing: Vec<(RequestId, u64)>,
    arriving: HashMap<RequestId, Retrieval>,
    /// Reads that have not ended, whose request has.
    orphans: Vec<Arrival>,
    /// Requests whose state did not arrive, and why.
    failed: HashMap<RequestId, String>,
}

impl Handovers {
    /// Whether pages wait for reads that nobody polls otherwise.
    #[inline]
    pub(crate) fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Pages that reads write to or have written to.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &u32> {
        let arriving = self.arriving.values().flat_map(|retrieval| &retrieval.arrivals);
        arriving.chain(&self.orphans).flat_map(|arrival| &arrival.pages)
    }

    /// Number of pages whose reads have not ended though their requests have.
    pub(crate) fn quarantined(&self) -> usize {
        self.orphans.iter().map(|arrival| arrival.pages.len()).sum()
    }
}

struct IntoPool(Arc<KvMemory>);

impl Destination for IntoPool {
    fn put(&self, page: u32, bytes: &[u8]) -> std::result::Result<(), String> {
        self.0.write_page(page, bytes).map_err(|e| e.to_string())
    }
}

fn refused(request: RequestId, why: impl std::fmt::Display) -> AdmitOutcome {
    let message = format!("the state of request {request} did not arrive: {why}");
    AdmitOutcome::runtime_error(request, LabelId::MAIN, message)
}

impl Transfer {
    /// The way that the engine's configuration wants, if it wants one.
    ///
    /// # Errors
    /// `INVALID` for an engine that there is none of.
    pub(crate) fn new(
        info: &EngineResourceInfo,
        settings: TransferSettings,
        page_bytes: u64,
        layout: String,
    ) -> Result<Option<Self>> {
        let Some(wanted) = &info.transfer_engine_info else { return Ok(None) };
        let engine = transfer::engine(&wanted.engine, &wanted.endpoint)
            .map_err(|e| ResourceError::invalid(e.to_string()))?;
        Ok(Some(Transfer {
            engine,
            leases: Mutex::default(),
            address: OnceLock::new(),
            settings,
            page_bytes,
            layout,
        }))
    }

    /// Runs `f` with the leases, those that are over ended.
    pub(crate) fn with_leases<R>(&self, f: impl FnOnce(&mut Leases) -> R) -> transfer::Result<R> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        let leases = match &mut *leases {
            Some(leases) => leases,
            none => {
                let region = self.engine.register(self.page_bytes, self.settings.pages)?;
                self.address.get_or_init(|| region.address().clone());
                none.insert(Leases::new(region, self.page_bytes, self.settings.lease))
            }
        };
        leases.settle(Instant::now());
        Ok(f(leases))
    }

    /// (pages free, leases active) of the region, if it was ever used.
    pub(crate) fn usage(&self) -> Option<(usize, usize)> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.as_mut().map(|leases| {
            leases.settle(Instant::now());
            (leases.free(), leases.active())
        })
    }

    fn is_own(&self, pages: &RemotePages) -> bool {
        self.address.get() == Some(&pages.address)
    }
}

impl State {
    /// What the retrieval of a request will look for here.
    fn wanted_by_retrieval(
        &mut self,
        shared: &Shared,
        request: RequestId,
        info: &PublishedInfo,
    ) -> Option<Wanted> {
        shared.prefix.get()?;
        let is_live = self.requests.is_live(request);
        let has_begun =
            !is_live || self.streams_of(request).any(|(_, s)| s.next_len() > 0 || s.in_flight > 0);
        if has_begun || self.handovers.failed.contains_key(&request) {
            return None;
        }
        let label = |name: &str| shared.host.label_id(name);
        let labels: Vec<LabelId> = info.entries().map(|(name, ..)| label(name)).collect();
        let longest = info.entries().map(|(_, len, _)| len).max()?;
        let longest = u32::try_from(longest).unwrap_or(u32::MAX);
        let keys = self.longest(request, &labels, |chain| chain.keyed_pages(longest))?;
        Some(Wanted { keys, streams: Vec::new() })
    }

    /// Begins to read what was published, or says how far that is.
    fn retrieve(
        &mut self,
        shared: &Shared,
        transfer: &Transfer,
        request: RequestId,
        info: &PublishedInfo,
    ) -> AdmitOutcome {
        if let Some(why) = self.handovers.failed.get(&request) {
            return refused(request, why);
        }
        if self.handovers.arriving.contains_key(&request) {
            return self.poll_retrieval(shared, transfer, request);
        }
        match self.begin_retrieval(shared, transfer, request, info) {
            Ok(outcome) => outcome,
            Err(why) => self.fail_retrieval(request, why),
        }
    }

    /// Notes for good that the request's state does not arrive.
    fn fail_retrieval(&mut self, request: RequestId, why: String) -> AdmitOutcome {
        let outcome = refused(request, &why);
        if self.requests.is_live(request) {
            self.handovers.failed.insert(request, why);
        }
        outcome
    }

    fn begin_retrieval(
        &mut self,
        shared: &Shared,
        transfer: &Transfer,
        request: RequestId,
        info: &PublishedInfo,
    ) -> std::result::Result<AdmitOutcome, String> {
        if !self.requests.is_live(request) {
            return Err("it is not known here".into());
        }
        let mut wanted = Vec::new();
        for (name, _, body) in info.entries() {
            let stream: PublishedStream = serde_json::from_slice(body)
                .map_err(|e| format!("what was published of stream {name} is malformed: {e}"))?;
            let id = StreamId { request, label: shared.host.label_id(name) };
            crate::board::Board::check(id).map_err(|e| e.message().to_string())?;
            let here = self.requests.get(id).map_or(0, |s| s.len);
            if here >= stream.len || transfer.is_own(&stream.pages) {
                continue;
            }
            if stream.layout != transfer.layout {
                return Err(format!(
                    "its pages are {}, those of this cache {}",
                    stream.layout, transfer.layout
                ));
            }
            let needed = shared.pages_for(stream.len) as usize;
            if stream.len > shared.facts.max_seq_len || needed > self.pool.usable() as usize {
                return Err(format!("{} tokens do not fit into this cache", stream.len));
            }
            if stream.pages.pages.len() != needed || stream.protected > stream.len {
                return Err(format!("what was published of stream {name} contradicts itself"));
            }
            if here > 0 || self.requests.get(id).is_some_and(|s| s.in_flight > 0) {
                return Err(format!("stream {name} has begun here with other tokens"));
            }
            wanted.push((id, stream));
        }
        if wanted.is_empty() {
            return Ok(AdmitOutcome::OK);
        }
        let found: Vec<Vec<u32>> = wanted
            .iter()
            .map(|(id, stream)| self.find_leading_pages(shared, *id, stream.len))
            .collect();
        let needed: usize = wanted.iter().map(|(_, stream)| stream.pages.pages.len()).sum();
        let fresh = (needed - found.iter().map(Vec::len).sum::<usize>()) as u32;
        self.pool.settle(shared.completed_epoch());
        while fresh > self.pool.ready() + self.pool.cached() && self.drop_oldest_session(shared) {}
        let (lacking, mut taken) = (fresh.saturating_sub(self.pool.ready()), Vec::new());
        if !self.make_ready(shared, lacking) || !self.pool.take(fresh, &mut taken) {
            let mut found: Vec<u32> = found.into_iter().flatten().collect();
            self.release(shared, &mut found);
            let ready = self.pool.ready() + self.pool.cached();
            let (need, label) = (u64::from(fresh), wanted[0].0.label);
            return Ok(AdmitOutcome::allocation_failed(request, label, need, ready.into()));
        }
        let deadline = Instant::now() + transfer.settings.timeout;
        let mut taken = taken.into_iter();
        let mut retrieval = Retrieval { arrivals: Vec::new(), deadline };
        let mut fault = None;
        for ((id, stream), mut pages) in wanted.into_iter().zip(found) {
            let first = pages.len();
            pages.extend(taken.by_ref().take(stream.pages.pages.len() - first));
            let to = pages.iter().copied().enumerate().skip(first).collect();
            let destination = Arc::new(IntoPool(shared.memory.clone()));
            let read = PageRead { from: stream.pages, pages: to, destination, deadline };
            let read = match fault {
                None => transfer.engine.read(read).map_err(|e| fault = Some(e.to_string())).ok(),
                Some(_) => None,
            };
            let PublishedStream { len, released, protected, .. } = stream;
            let label = id.label;
            retrieval.arrivals.push(Arrival { label, len, released, protected, pages, read });
            if self.requests.get(id).is_none() {
                let table = self.new_table();
                self.requests.open(id, table);
            }
            if let Some(stream) = self.requests.get_mut(id) {
                stream.in_flight += 1;
                stream.rewriters += 1;
            }
        }
        self.handovers.arriving.insert(request, retrieval);
        match fault {
            None => Ok(AdmitOutcome::NOT_READY),
            Some(why) => {
                self.cancel_retrieval(shared, request);
                Err(why)
            }
        }
    }

    /// Leading pages of a stream that are here already, under their keys; they have the caller as an
    /// owner.
    fn find_leading_pages(&mut self, shared: &Shared, id: StreamId, len: u32) -> Vec<u32> {
        let mut found = Vec::new();
        if shared.prefix.get().is_none() {
            return found;
        }
        let Some(chain) = self.requests.chain_of(id) else { return found };
        let whole = chain.keyed_pages(len);
        if whole == 0 {
            return found;
        }
        chain.extend_links(whole);
        let here = chain.keys(0, whole).map_while(|key| self.pool.find(key));
        found.extend(here);
        found.iter().for_each(|&page| self.pool.retain(page));
        found
    }

    fn poll_retrieval(
        &mut self,
        shared: &Shared,
        transfer: &Transfer,
        request: RequestId,
    ) -> AdmitOutcome {
        let Some(retrieval) = self.handovers.arriving.get_mut(&request) else {
            return AdmitOutcome::OK;
        };
        let mut fault = None;
        for arrival in &mut retrieval.arrivals {
            let Some(read) = arrival.read else { continue };
            match transfer.engine.poll(read) {
                ReadState::Pending => continue,
                ReadState::Done => {}
                ReadState::Failed(why) => fault = Some(why.to_string()),
            }
            arrival.read = None;
        }
        let pending = retrieval.arrivals.iter().any(|arrival| arrival.read.is_some());
        if fault.is_none() && pending && retrieval.deadline <= Instant::now() {
            let seconds = transfer.settings.timeout.as_secs_f32();
            fault = Some(format!("it took longer than `transfer_timeout`, {seconds} seconds"));
        }
        match fault {
            Some(why) => {
                self.cancel_retrieval(shared, request);
                shared.count("failed_retrievals", 1);
                self.fail_retrieval(request, why)
            }
            None if pending => AdmitOutcome::NOT_READY,
            None => {
                self.finish_retrieval(shared, request);
                AdmitOutcome::OK
            }
        }
    }

    /// Gives what has arrived to its streams.
    fn finish_retrieval(&mut self, shared: &Shared, request: RequestId) {
        let Some(retrieval) = self.handovers.arriving.remove(&request) else { return };
        for arrival in retrieval.arrivals {
            let id = StreamId { request, label: arrival.label };
            let table = self.new_table();
            let Some(stream) = self.requests.get_mut(id) else { continue };
            let mut old = std::mem::replace(&mut stream.pages, arrival.pages);
            stream.len = arrival.len;
            (stream.released, stream.protected) = (arrival.released, arrival.protected);
            (stream.table, stream.in_flight, stream.rewriters) = (table, 0, 0);
            stream.generation += 1;
            self.release(shared, &mut old);
            self.publish(shared, id);
            self.took_over(id, arrival.len, arrival.released);
        }
        self.index_ended();
        self.pool.note_peak();
        shared.count("retrieved_requests", 1);
    }

    /// Notes what a stream has come to hold: its pages are to be indexed.
    pub(crate) fn took_over(&mut self, id: StreamId, len: u32, released: u64) {
        let Some(chain) = self.requests.chain_of(id) else { return };
        chain.take_over(len, released > 0);
        if chain.has_ended_page(len) {
            self.ended.push(id);
        }
    }

    /// Forgets what a request has published and what arrives for it. Pages of reads that have not ended
    /// stay out of the pool until they have.
    pub(crate) fn forget_handover(&mut self, shared: &Shared, request: RequestId) {
        self.handovers.published.remove(&request);
        self.handovers.publishing.retain(|(of, _)| *of != request);
        self.handovers.failed.remove(&request);
        self.cancel_retrieval(shared, request);
    }

    fn cancel_retrieval(&mut self, shared: &Shared, request: RequestId) {
        let Some(retrieval) = self.handovers.arriving.remove(&request) else { return };
        for arrival in retrieval.arrivals {
            if let Some(stream) = self.requests.get_mut(StreamId { request, label: arrival.label })
            {
                stream.in_flight = stream.in_flight.saturating_sub(1);
                stream.rewriters = stream.rewriters.saturating_sub(1);
            }
            self.handovers.orphans.push(arrival);
        }
        self.settle_reads(shared);
    }

    /// Frees the pages of orphaned reads that have ended.
    pub(crate) fn settle_reads(&mut self, shared: &Shared) {
        let Some(transfer) = &shared.transfer else { return };
        let orphans = std::mem::take(&mut self.handovers.orphans);
        for mut arrival in orphans {
            let pending = arrival.read.is_some_and(|read| {
                transfer.engine.cancel(read);
                transfer.engine.poll(read) == ReadState::Pending
            });
            match pending {
                true => self.handovers.orphans.push(arrival),
                false => self.release(shared, &mut arrival.pages),
            }
        }
    }
}

impl Kv {
    /// See [`resource_api::Resource::admit_retrieve`].
    pub(crate) fn retrieve_request(
        &self,
        request: RequestId,
        published: Option<&PublishedInfo>,
    ) -> AdmitOutcome {
        let Some(info) = published else { return AdmitOutcome::OK };
        if (info.kind(), info.version()) != PUBLISHED {
            let (kind, version) = (info.kind(), info.version());
            return refused(request, format!("it is state of {kind}/{version}, not of kv/1"));
        }
        let Some(transfer) = &self.shared.transfer else {
            let why = "this engine takes no state from others: `transfer` is not set in [engine]";
            return refused(request, why);
        };
        let wanted =
            |state: &mut State, shared: &Shared| state.wanted_by_retrieval(shared, request, info);
        self.with_pages(wanted, |_, _| ());
        self.with_room(|state, shared| state.retrieve(shared, transfer, request, info))
    }
}

#[cfg(test)]
mod tests;
