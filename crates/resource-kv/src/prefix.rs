//! The prefix cache: whole pages are indexed by what they hold, and requests that begin alike share
//! them.
//!
//! Those streams take part of which a request has said that its tokens go to them, `main` if it says
//! nothing: their tokens are known from the prompt, from the ids that steps feed, and from what was
//! sampled; and copies of such streams. Which label a stream has is no part of a page's key. A stream
//! that anything else has written to is left out until it is reset.

use resource_api::{
    ErrorKind, LabelId, PrefixInputs, PrefixWalk, RequestId, ResourceError, ResourceStep, Result,
    StepContext, WalkId,
};

use crate::chain::Chain;
use crate::keys::{Key, Link, root};
use crate::restore::Wanted;
use crate::state::{PrefixUse, Shared, State};
use crate::stream::{Requests, Stream, StreamId};

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

/// What a step says about the tokens of its streams.
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

impl State {
    /// How many leading tokens of the request are cached under each label that its prompt goes to; takes a
    /// lease on their pages. `None` when nothing is, or when the request has no part in the cache.
    pub(crate) fn resolve(
        &mut self,
        shared: &Shared,
        request: RequestId,
        walk: WalkId,
    ) -> Option<u32> {
        shared.prefix.get().filter(|p| p.covers(walk))?;
        let labels = self.prompt_labels(request);
        let has_lease = !self.requests.has_no_lease(request);
        let mut least = u32::MAX;
        for &label in &labels {
            let (stream, chain) = self.requests.get_with_chain(StreamId { request, label })?;
            least = least.min(match () {
                _ if has_lease => chain.leased(),
                _ if stream.next_len() > 0 => chain.adopted,
                // It may be off the device, with pages and no tokens.
                _ if stream.in_flight > 0 || !chain.can_skip() => return None,
                _ => continue,
            });
        }
        if least < u32::MAX {
            return Some(least);
        }
        let mut found = labels.iter().map(|&label| {
            let found = self.lease(shared, StreamId { request, label });
            self.use_of(label).note(found);
            found
        });
        let first = found.next()?;
        let found = found.fold(first, u32::min);
        self.prefix_use.note(found);
        if found == 0 {
            self.return_leases(shared, request);
        }
        Some(found).filter(|&found| found > 0)
    }

    /// The labels under which the request's prompt may be cached.
    fn prompt_labels(&mut self, request: RequestId) -> Vec<LabelId> {
        let main = self.requests.main_and_chain(request);
        let main = main.filter(|(_, chain)| chain.takes_prompt()).map(|_| LabelId::MAIN);
        let others = self.requests.others_mut(request);
        let others = others.filter(|(.., chain)| chain.takes_prompt()).map(|(id, ..)| id.label);
        main.into_iter().chain(others).collect()
    }

    fn use_of(&mut self, label: LabelId) -> &mut PrefixUse {
        let at = self.label_use.iter().position(|(known, _)| *known == label);
        let at = at.unwrap_or_else(|| {
            self.label_use.push((label, PrefixUse::default()));
            self.label_use.len() - 1
        });
        &mut self.label_use[at].1
    }

    /// Takes a lease on the pages that begin an empty stream. Says how many tokens they hold.
    fn lease(&mut self, shared: &Shared, id: StreamId) -> u32 {
        let Some(chain) = self.requests.chain_of(id) else { return 0 };
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
        let part = self.lease_part(shared, id, &mut lease);
        let Some(chain) = self.requests.chain_of(id) else { return 0 };
        (chain.lease, chain.part) = (lease, part);
        chain.leased()
    }

    /// What [`State::resolve`] will ask for, where it looks anything up.
    pub(crate) fn wanted_by_lookup(
        &mut self,
        shared: &Shared,
        request: RequestId,
        walk: WalkId,
    ) -> Option<Wanted> {
        shared.prefix.get().filter(|p| p.covers(walk))?;
        let labels = self.prompt_labels(request);
        let is_new = |(_, s): (StreamId, &Stream)| s.next_len() == 0 && s.in_flight == 0;
        let is_asked = labels.is_empty() || !self.requests.has_no_lease(request);
        if is_asked || !self.streams_of(request).all(is_new) {
            return None;
        }
        let keys = self.longest(request, &labels, Chain::skippable_pages)?;
        let streams = labels.into_iter().map(|label| StreamId { request, label }).collect();
        Some(Wanted { keys, streams })
    }

    /// The keys of the longest of a request's streams. They begin with those of the others.
    pub(crate) fn longest(
        &mut self,
        request: RequestId,
        labels: &[LabelId],
        pages: impl Fn(&Chain) -> u32,
    ) -> Option<Vec<Key>> {
        let mut most: Option<Vec<Key>> = None;
        for &label in labels {
            let Some(chain) = self.requests.chain_of(StreamId { request, label }) else { continue };
            let pages = pages(chain);
            if most.as_ref().is_none_or(|most| most.len() < pages as usize) {
                chain.extend_links(pages);
                most = Some(chain.keys(0, pages).collect());
            }
        }
        most
    }

    /// Makes the first `matched` cached tokens the beginning of the streams that the inputs name and
    /// returns the rest of the leases.
    ///
    /// # Errors
    /// `WRONG_STATE` where a stream has tokens already or its lease is shorter, `INVALID` where the
    /// inputs are not the tokens that go to it, `EXHAUSTED` where a page must be copied and none is free.
    /// No stream has changed then, and the leases are returned, too.
    pub(crate) fn apply(
        &mut self,
        shared: &Shared,
        request: RequestId,
        inputs: &PrefixInputs<'_>,
        matched: u32,
    ) -> Result<()> {
        let mut own = Vec::new();
        let ready = self.ready_to_apply(shared, request, inputs, matched, &mut own);
        let mut own = own.into_iter();
        let applied = ready.and_then(|labels| {
            let mut labels = labels.into_iter();
            labels.try_for_each(|label| {
                let id = StreamId { request, label };
                self.apply_to(shared, id, matched, own.next().flatten())
            })
        });
        own.rev().flatten().for_each(|page| self.pool.put_back(page));
        if applied.is_err() && self.waits_for_room() {
            // It is called again, with the leases.
            return applied;
        }
        self.return_leases(shared, request);
        applied
    }

    /// The streams that do not have their first `matched` tokens yet; `own` gets for each the page in the
    /// middle of which it is to go on, where it is to and has none.
    fn ready_to_apply(
        &mut self,
        shared: &Shared,
        request: RequestId,
        inputs: &PrefixInputs<'_>,
        matched: u32,
        own: &mut Vec<Option<u32>>,
    ) -> Result<Vec<LabelId>> {
        let size = shared.facts.page_size;
        let ids = &inputs.token_ids()[..inputs.token_ids().len().min(matched as usize)];
        let (mut labels, mut copies) = (Vec::new(), Vec::new());
        for &label in inputs.labels() {
            let id = StreamId { request, label };
            let Some((stream, chain)) = self.requests.get_with_chain(id) else {
                return Err(ResourceError::new(
                    ErrorKind::NOT_FOUND,
                    format!("request {request} is to skip {matched} tokens and was not ingested"),
                ));
            };
            if matched == chain.adopted && chain.lease.is_empty() && stream.next_len() == matched {
                continue;
            }
            let held = chain.leased();
            if stream.next_len() > 0 || stream.in_flight > 0 {
                return Err(ResourceError::wrong_state(format!(
                    "request {request} is to skip {matched} tokens, but its stream has begun"
                )));
            }
            if matched > held {
                return Err(ResourceError::wrong_state(format!(
                    "request {request} is to skip {matched} tokens, {held} are held for it"
                )));
            }
            if !chain.starts_with(ids) {
                return Err(ResourceError::invalid(format!(
                    "request {request} skips tokens that are not those of its prompt"
                )));
            }
            labels.push(label);
            // A page in the middle of which the stream goes on is written to, so it needs its own.
            copies.push(!matched.is_multiple_of(size) && !chain.has_own(matched));
        }
        for is_needed in copies {
            let page = is_needed.then(|| self.take_one(shared).ok_or_else(|| no_page(request)));
            own.push(page.transpose()?);
        }
        Ok(labels)
    }

    /// Gives an empty stream its first `matched` tokens, the last of them in the page `own` where that is
    /// not in the lease.
    fn apply_to(
        &mut self,
        shared: &Shared,
        id: StreamId,
        matched: u32,
        own: Option<u32>,
    ) -> Result<()> {
        let whole = (matched / shared.facts.page_size) as usize;
        let held = self.requests.get(id).map_or(0, |s| s.pages.len());
        self.release_range(shared, id, 0..held);
        let Some((stream, chain)) = self.requests.get_with_chain(id) else { return Ok(()) };
        let copied = match (own, chain.lease.get(whole)) {
            (Some(own), Some(&from)) => shared.memory.copy_page(from, own),
            _ => Ok(()),
        };
        let from_lease = (own.is_none() && chain.has_own(matched)).then(|| {
            chain.part = 0;
            chain.lease.pop()
        });
        stream.pages.extend(chain.lease.drain(..whole));
        stream.pages.extend(own.or(from_lease.flatten()));
        copied?;
        stream.len = matched;
        stream.generation += 1;
        (chain.indexed, chain.tip_is_own) = (whole as u32, true);
        chain.adopted = matched;
        self.publish(shared, id);
        Ok(())
    }

    /// Gives back pages that were found for the request and not taken over.
    pub(crate) fn return_leases(&mut self, shared: &Shared, request: RequestId) {
        let mut nth = 0;
        while let Some(label) = self.requests.nth_label(request, nth) {
            nth += 1;
            let Some(chain) = self.requests.chain_of(StreamId { request, label }) else { return };
            if chain.lease.is_empty() {
                continue;
            }
            let mut lease = std::mem::take(&mut chain.lease);
            chain.part = 0;
            self.release(shared, &mut lease);
        }
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
                ended.push(StreamId { request, label: LabelId::MAIN });
            }
            if chain.has_others {
                tell_others(requests, ended, request, token);
            }
        }
        links.finish(requests, pool);
        self.index_ended();
    }

    /// Indexes the pages that have become whole.
    pub(crate) fn index_ended(&mut self) {
        let State { requests, pool, ended, branches, tiers, .. } = self;
        for id in ended.drain(..) {
            let Some((stream, chain)) = requests.get_with_chain(id) else { continue };
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

    /// Notes that a stream no longer holds its tokens from the first one on.
    pub(crate) fn break_chain(&mut self, id: StreamId) {
        if let Some(chain) = self.requests.chain_of(id) {
            chain.holds = false;
        }
    }

    /// Notes that a stream has come to hold the first `len` tokens of another one of its request.
    pub(crate) fn copy_chain(&mut self, from: StreamId, to: StreamId, len: u32) {
        let Some(source) = self.requests.chain_of(from) else { return self.break_chain(to) };
        let mut source = std::mem::take(source);
        let is_known = source.holds && len <= source.tokens();
        if let Some(chain) = self.requests.chain_of(to) {
            match chain.is_declared() {
                true if source.agrees(chain, len) => chain.take_over(len, false),
                false if is_known => *chain = source.copied(len),
                _ => chain.holds = false,
            }
            if chain.has_ended_page(len) {
                self.ended.push(to);
            }
        }
        if let Some(chain) = self.requests.chain_of(from) {
            *chain = source;
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

/// Tells the streams other than `main` that what is generated goes to.
#[cold]
fn tell_others(requests: &mut Requests, ended: &mut Vec<StreamId>, request: RequestId, token: u32) {
    for (id, _, chain) in requests.others_mut(request).filter(|(.., c)| c.takes_outputs()) {
        chain.output(token);
        if chain.may_have_ended_page() {
            ended.push(id);
        }
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
