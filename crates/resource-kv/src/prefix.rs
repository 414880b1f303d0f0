//! The prefix cache: whole pages are indexed by what they hold, and requests that begin alike share
//! them.
//!
//! Only `main` streams take part: their tokens are known from the prompt, from the ids that steps
//! feed, and from what was sampled. A stream that anything else has written to is left out until it is
//! reset.

use resource_api::{
    ErrorKind, LabelId, PrefixWalk, RequestId, ResourceError, ResourceStep, Result, StepContext,
    WalkId,
};

use crate::chain::Chain;
use crate::keys::{Key, Link, root};
use crate::state::{Shared, State};
use crate::stream::StreamId;

/// Pages looked up at a time: enough that their memory is waited for together.
const BATCH: u32 = 32;

/// What opens the cache.
#[derive(Debug)]
pub(crate) struct Prefix {
    engine: Vec<u8>,
    salt: String,
    page_size: u32,
    /// Root of requests without a salt of their own.
    plain: Link,
    walk: PrefixWalk,
}

impl Prefix {
    pub(crate) fn new(engine: &[u8], salt: &str, page_size: u32, walk: PrefixWalk) -> Self {
        let plain = Link::default();
        let mut prefix =
            Prefix { engine: engine.into(), salt: salt.into(), page_size, plain, walk };
        prefix.plain = prefix.compute_root("");
        prefix
    }

    /// The root of requests with this salt.
    pub(crate) fn root(&self, salt: &str) -> Link {
        if salt.is_empty() { self.plain } else { self.compute_root(salt) }
    }

    fn compute_root(&self, salt: &str) -> Link {
        root(&[
            ("engine", &self.engine),
            ("kv salt", self.salt.as_bytes()),
            ("page size", &self.page_size.to_le_bytes()),
            ("label", b"main"),
            ("request salt", salt.as_bytes()),
        ])
    }

    fn covers(&self, walk: WalkId) -> bool {
        walk == self.walk.write || walk == self.walk.decode
    }
}

/// What a step says about the tokens of `main` streams.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fed<'a> {
    /// The cache is closed.
    Ignored,
    /// Something that the cache does not know.
    Foreign,
    /// Tokens that it may learn of later.
    Unnamed,
    /// These ids, in the order of the step's segments.
    Ids(&'a [u32]),
}

impl<'a> Fed<'a> {
    pub(crate) fn by(
        shared: &Shared,
        step: &'a ResourceStep<'_>,
        ctx: &StepContext<'_>,
        tokens: usize,
    ) -> Self {
        let Some(prefix) = shared.prefix.get() else { return Fed::Ignored };
        let ids = step.token_ids();
        match () {
            _ if ctx.capture() || !prefix.covers(ctx.graph_walk()) => Fed::Foreign,
            _ if ids.is_empty() => Fed::Unnamed,
            _ if ids.len() == tokens => Fed::Ids(ids),
            _ => Fed::Foreign,
        }
    }
}

impl<'a> Fed<'a> {
    /// Takes the next segment's part off.
    #[inline]
    pub(crate) fn split(&mut self, span: u32) -> Fed<'a> {
        let Fed::Ids(ids) = *self else { return *self };
        let (own, rest) = ids.split_at(span as usize);
        *self = Fed::Ids(rest);
        Fed::Ids(own)
    }

    /// Notes in a stream's chain what a commit has added after its first `start` tokens.
    #[inline]
    pub(crate) fn note(self, chain: &mut Chain, start: u32, span: u32) {
        match self {
            Fed::Ignored => {}
            Fed::Foreign => chain.holds = false,
            Fed::Unnamed => chain.feed(start, span, None),
            Fed::Ids(ids) => chain.feed(start, span, Some(ids)),
        }
    }
}

fn main_of(request: RequestId) -> StreamId {
    StreamId { request, label: LabelId::MAIN }
}

impl State {
    /// How many leading tokens of the request are cached; takes a lease on their pages. `None` when
    /// nothing is, or when the request has no part in the cache.
    pub(crate) fn resolve(
        &mut self,
        shared: &Shared,
        request: RequestId,
        walk: WalkId,
    ) -> Option<u32> {
        shared.prefix.get().filter(|p| p.covers(walk))?;
        let (stream, chain) = self.requests.main_and_chain(request)?;
        if !chain.lease.is_empty() {
            return Some(chain.leased());
        }
        if stream.next_len() > 0 {
            return Some(chain.adopted);
        }
        // It may be off the device, with pages and no tokens.
        if stream.in_flight > 0 || !chain.can_skip() {
            return None;
        }
        let most = chain.skippable_pages();
        chain.extend_links(most);
        let mut lease = std::mem::take(&mut chain.lease);
        loop {
            let first = lease.len() as u32;
            let batch = first..most.min(first + BATCH);
            // Each pass waits for memory once, for all of the batch together.
            chain.keys(batch.start, batch.end).for_each(|key| self.pool.warm(key));
            chain.keys(batch.start, batch.end).for_each(|key| self.pool.warm_found(key));
            let pages = chain.keys(batch.start, batch.end).map_while(|key| self.pool.find(key));
            lease.extend(pages);
            lease[first as usize..].iter().for_each(|&page| self.pool.retain(page));
            if lease.len() < batch.end as usize || batch.end == most {
                break;
            }
        }
        if (lease.len() as u32) < most && !self.tiers.is_empty() {
            let missing: Vec<Key> = chain.keys(lease.len() as u32, most).collect();
            self.lease_from_tiers(shared, &missing, &mut lease);
        }
        let part = self.lease_part(shared, request, &mut lease);
        let chain = self.requests.chain_mut(request)?;
        (chain.lease, chain.part) = (lease, part);
        let found = chain.leased();
        self.prefix_use.lookups += 1;
        self.prefix_use.hits += u64::from(found > 0);
        self.prefix_use.hit_tokens += u64::from(found);
        (found > 0).then_some(found)
    }

    /// Goes on with a lease for as long as the pool or a tier has the pages with these keys.
    pub(crate) fn lease_from_tiers(&mut self, shared: &Shared, keys: &[Key], lease: &mut Vec<u32>) {
        for &key in keys {
            let page = match self.pool.find(key) {
                Some(page) => {
                    self.pool.retain(page);
                    Some(page)
                }
                None => self.restore(shared, key),
            };
            let Some(page) = page else { break };
            lease.push(page);
        }
    }

    /// Makes the first `matched` cached tokens the beginning of the request's stream and returns the
    /// rest of the lease.
    ///
    /// # Errors
    /// `WRONG_STATE` where the stream has tokens already or the lease is shorter, `INVALID` where the
    /// inputs are not the request's tokens, `EXHAUSTED` where a page must be copied and none is free.
    /// The lease is returned then, too.
    pub(crate) fn apply(
        &mut self,
        shared: &Shared,
        request: RequestId,
        inputs: &[u32],
        matched: u32,
    ) -> Result<()> {
        let id = main_of(request);
        let size = shared.facts.page_size;
        let Some((stream, chain)) = self.requests.main_and_chain(request) else {
            return Err(ResourceError::new(
                ErrorKind::NOT_FOUND,
                format!("request {request} is to skip {matched} tokens and was not ingested"),
            ));
        };
        if matched == chain.adopted && chain.lease.is_empty() && stream.next_len() == matched {
            return Ok(());
        }
        let held = chain.leased();
        let fault = if stream.next_len() > 0 || stream.in_flight > 0 {
            Some(ResourceError::wrong_state(format!(
                "request {request} is to skip {matched} tokens, but its stream has begun"
            )))
        } else if matched > held {
            Some(ResourceError::wrong_state(format!(
                "request {request} is to skip {matched} tokens of which {held} are cached here"
            )))
        } else if !chain.starts_with(&inputs[..inputs.len().min(matched as usize)]) {
            Some(ResourceError::invalid(format!(
                "request {request} skips tokens that are not those of its prompt"
            )))
        } else {
            None
        };
        if let Some(fault) = fault {
            self.return_lease(shared, request);
            return Err(fault);
        }
        let whole = (matched / size) as usize;
        // A page in the middle of which the stream goes on is written to, so it needs its own.
        let has_own = chain.part > 0 && whole + 1 == chain.lease.len();
        let own = match matched % size {
            0 => None,
            _ if has_own => {
                chain.part = 0;
                chain.lease.pop()
            }
            _ => match self.take_one(shared) {
                Some(page) => Some(page),
                None => {
                    self.return_lease(shared, request);
                    return Err(no_page(request));
                }
            },
        };
        let held = self.requests.get(id).map_or(0, |s| s.pages.len());
        self.release_range(shared, id, 0..held);
        let Some((stream, chain)) = self.requests.main_and_chain(request) else { return Ok(()) };
        stream.pages.extend(chain.lease.drain(..whole));
        if let Some(own) = own {
            let copied = match chain.lease.first().filter(|_| !has_own) {
                Some(&from) => shared.memory.copy_page(from, own),
                None => Ok(()),
            };
            stream.pages.push(own);
            copied?;
        }
        stream.len = matched;
        stream.generation += 1;
        (chain.indexed, chain.tip_is_own) = (whole as u32, true);
        chain.adopted = matched;
        self.return_lease(shared, request);
        self.publish(shared, id);
        Ok(())
    }

    /// Gives back pages that were found for the request and not taken over.
    pub(crate) fn return_lease(&mut self, shared: &Shared, request: RequestId) {
        let Some((_, chain)) = self.requests.main_and_chain(request) else { return };
        if chain.lease.is_empty() {
            return;
        }
        let mut lease = std::mem::take(&mut chain.lease);
        chain.part = 0;
        self.release(shared, &mut lease);
    }

    /// Learns what was sampled, and indexes the pages that this completes.
    pub(crate) fn outputs(
        &mut self,
        shared: &Shared,
        walk: WalkId,
        outputs: impl Iterator<Item = (RequestId, u32)>,
    ) {
        if !shared.prefix.get().is_some_and(|p| p.covers(walk)) {
            return;
        }
        let State { requests, pool, links, ended, .. } = self;
        for (request, token) in outputs {
            let Some(chain) = requests.chain_mut(request) else { continue };
            if chain.output(token) {
                links.add(request, chain);
            }
            if chain.may_have_ended_page() {
                ended.push(request);
            }
        }
        links.finish(requests, pool);
        self.index_ended();
    }

    /// Indexes the pages that have become whole.
    pub(crate) fn index_ended(&mut self) {
        let State { requests, pool, ended, branches, tiers, .. } = self;
        for request in ended.drain(..) {
            let Some((stream, chain)) = requests.main_and_chain(request) else { continue };
            if !chain.has_ended_page(stream.len) {
                continue;
            }
            let whole = chain.whole_pages(stream.len);
            // The request may be off the device.
            if (stream.held() as usize) < whole as usize {
                continue;
            }
            chain.extend_links(whole);
            chain.keys(chain.indexed.min(whole), whole).for_each(|key| pool.warm(key));
            // Where another page has a parent's key it may have been evicted since: then the stream's
            // own takes its place, so that the new page can be found.
            let mut first = chain.indexed.min(whole);
            while first > 0 && !pool.is_indexed(stream.pages[first as usize - 1]) {
                let parent = chain.keys(first - 1, first).next();
                if parent.is_none_or(|key| pool.find(key).is_some()) {
                    break;
                }
                first -= 1;
            }
            // Those that the request generates are noted when it ends: until then a step does not pay for them.
            branches.note_pages(tiers, chain, first..whole.min(chain.prompt_pages()));
            let own = &stream.pages[first as usize..whole as usize];
            for (key, &page) in chain.keys(first, whole).zip(own) {
                if !pool.is_indexed(page) {
                    pool.insert(key, page);
                }
            }
            chain.indexed = whole;
            chain.tip_is_own =
                stream.pages[..whole as usize].last().is_none_or(|&p| pool.is_indexed(p));
        }
    }

    /// Notes that a stream no longer holds its request's tokens from the first one on.
    pub(crate) fn break_chain(&mut self, id: StreamId) {
        if let Some((_, chain)) =
            self.requests.main_and_chain(id.request).filter(|_| id.label == LabelId::MAIN)
        {
            chain.holds = false;
        }
    }

    /// A page for one owner, from the free or the cached ones.
    pub(crate) fn take_one(&mut self, shared: &Shared) -> Option<u32> {
        let completed = shared.completed_epoch();
        self.pool.settle(completed);
        if self.pool.ready() == 0 && !self.make_ready(shared, 1) {
            return None;
        }
        let mut page = std::mem::take(&mut self.outgoing);
        self.pool.take(1, &mut page);
        let taken = page.pop();
        self.outgoing = page;
        taken
    }
}

pub(crate) fn no_page(request: RequestId) -> ResourceError {
    ResourceError::new(
        ErrorKind::EXHAUSTED,
        format!(
            "request {request} shares the page it would write to, and no page is free for a copy"
        ),
    )
}
