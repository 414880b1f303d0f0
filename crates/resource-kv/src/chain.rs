//! What is known of the tokens of a stream, and the keys of their pages.

use device::hash::keyed_hashes;
use device::prefetch;
use resource_api::{RequestId, RequestOverrides};

use crate::declared::Goes;
use crate::keys::{BLOCK, Key, Link, link, short};
use crate::overrides::RequestSettings;
use crate::pool::PagePool;
use crate::state::Shared;
use crate::stream::Requests;
use crate::tokens::Tokens;

/// The tokens that go to a stream: those of the request's prompt, then what it generated, or only the
/// ones or the others. They stay through a reset, since the request stays what it is.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Chain {
    /// With what follows up to `links` in the two cache lines that every step touches.
    tokens: Tokens,
    /// Generation of the request; 0 when there is none.
    generation: u32,
    prompt: u32,
    /// Sampled tokens that the host has told of.
    outputs: u32,
    page_size: u32,
    /// Leading pages of the stream that the index has, or had under another page.
    pub(crate) indexed: u32,
    /// Whether the index has the last of them as the stream's own page: then it is found by whoever
    /// finds those before it.
    pub(crate) tip_is_own: bool,
    /// Whether the tokens are known at all and may be shared.
    keyed: bool,
    /// Whether what the stream holds is these tokens.
    pub(crate) holds: bool,
    /// Whether a step has fed tokens that nobody had named yet: then outputs end pages, too.
    behind: bool,
    /// Whether what the request generates goes to the stream, and may be shared.
    takes_outputs: bool,
    /// Of `main`: whether it goes to others, too.
    pub(crate) has_others: bool,
    /// Tokens that the stream took over from the cache.
    pub(crate) adopted: u32,
    /// The root, then links of pages whose tokens are known, as far as they were needed. Empty where
    /// no tokens are known.
    links: Vec<Link>,
    /// Pages found for the stream that it does not have yet. Each counts it as an owner.
    pub(crate) lease: Vec<u32>,
    /// Tokens of the lease's last page, where that is a copy of a page that goes on differently; else 0.
    pub(crate) part: u32,
}

// An odd number of cache lines: what every step touches of many chains then lies in all sets of the
// processor's cache, and not in some of them.
const _: () = assert!(size_of::<Chain>() == 192);

impl Chain {
    /// The chain of a stream of a new request, with the keys of its pages of the prompt, which are those
    /// of `alike` if that has the prompt, too. Needs no lock.
    pub(crate) fn new(
        shared: &Shared,
        overrides: &RequestOverrides<'_>,
        settings: &RequestSettings,
        goes: Goes,
        alike: Option<&Chain>,
    ) -> Chain {
        let (prompt, wanted) = (overrides.prompt(), settings.prefix_cache);
        let page_size = shared.facts.page_size;
        let (Some(prefix), true, false) = (shared.prefix.get(), wanted, prompt.is_empty()) else {
            return Chain::default();
        };
        let most = shared.facts.max_seq_len as usize;
        if prompt.len() > most {
            return Chain::default();
        }
        let prompt = if goes.prompt { prompt } else { &[] };
        let generated = if goes.outputs { overrides.max_new_tokens() as usize } else { 0 };
        // Steps must not allocate, so there is room for all that may come.
        let capacity = (prompt.len() + generated).min(most);
        // Touched here, as that of the tokens.
        let mut links = vec![prefix.root(&settings.prefix_salt); capacity / page_size as usize + 1];
        links.truncate(1);
        let mut chain = Chain {
            tokens: Tokens::new(prompt, capacity),
            links,
            prompt: prompt.len() as u32,
            page_size,
            keyed: true,
            holds: true,
            tip_is_own: true,
            takes_outputs: goes.outputs,
            ..Chain::default()
        };
        let pages = prompt.len() as u32 / page_size;
        if let Some(links) = alike.and_then(|alike| alike.links.get(1..=pages as usize)) {
            chain.links.extend_from_slice(links);
        }
        chain.extend_links(pages);
        chain
    }

    /// The chain of a stream that was copied from this one's after `len` tokens, which are known. What
    /// comes next goes to one of them or to both, and steps say which.
    pub(crate) fn copied(&mut self, len: u32) -> Chain {
        let capacity = self.tokens.capacity();
        let mut chain = Chain {
            tokens: Tokens::new(self.tokens.all(), capacity),
            links: Vec::with_capacity(self.links.capacity()),
            page_size: self.page_size,
            keyed: true,
            ..Chain::default()
        };
        chain.links.extend_from_slice(&self.links);
        chain.take_over(len, false);
        chain
    }

    /// Whether the stream's first `len` tokens are known to be the first ones that go to `other`.
    pub(crate) fn agrees(&mut self, other: &mut Chain, len: u32) -> bool {
        let own = self.tokens.all().get(..len as usize);
        self.holds && own.is_some() && own == other.tokens.all().get(..len as usize)
    }

    /// Whether the request has said what goes to the stream; else that is known of a copy at most.
    pub(crate) fn is_declared(&self) -> bool {
        self.takes_prompt() || self.takes_outputs
    }

    /// Number of tokens that are known.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens.len()
    }

    /// Whether the lease has a page of the stream's own for the last of `matched` tokens.
    pub(crate) fn has_own(&self, matched: u32) -> bool {
        let whole = (matched / self.page_size.max(1)) as usize;
        self.part > 0 && whole + 1 == self.lease.len() && !matched.is_multiple_of(self.page_size)
    }

    /// Whether what the request generates goes to the stream, and may be shared.
    pub(crate) fn takes_outputs(&self) -> bool {
        self.takes_outputs
    }

    /// Whether tokens of the prompt go to the stream, and may be shared.
    pub(crate) fn takes_prompt(&self) -> bool {
        self.keyed && self.prompt > 0
    }

    /// Starts again with an empty stream. What was copied to one may be something else next time.
    pub(crate) fn restart(&mut self) {
        if !self.is_declared() {
            *self = Chain {
                generation: self.generation,
                has_others: self.has_others,
                ..Chain::default()
            };
        }
        (self.holds, self.tip_is_own) = (self.keyed, true);
        (self.indexed, self.adopted) = (0, 0);
    }

    /// Gives the chain to a request.
    pub(crate) fn of(self, request: RequestId) -> Self {
        Chain { generation: request.generation, ..self }
    }

    /// Whether it is a request's.
    #[inline]
    pub(crate) fn is_of(&self, request: RequestId) -> bool {
        self.generation == request.generation && request.generation != 0
    }

    /// Notes that `span` tokens went into the stream after the first `start`; `ids` says which, if
    /// anyone knows. Generated ones may be told of later, by [`Chain::output`].
    pub(crate) fn feed(&mut self, start: u32, span: u32, ids: Option<&[u32]>) {
        match ids {
            _ if !self.keyed => {}
            Some(ids) => {
                let Some(known) = self.tokens.all().get(start as usize..) else {
                    return self.diverge(start, ids);
                };
                let same = known.len().min(ids.len());
                if known[..same] != ids[..same] {
                    return self.diverge(start, ids);
                }
                self.tokens.extend(&ids[same..]);
            }
            None => {
                self.holds &= self.takes_outputs && start >= self.prompt && span > 0;
                self.behind = true;
            }
        }
    }

    /// [`Chain::feed`] of one token: nearly always the one that was sampled last, and then the memory of
    /// the tokens is not read.
    #[inline]
    pub(crate) fn feed_one(&mut self, start: u32, id: u32) {
        if id != self.tokens.last() || start + 1 != self.tokens.len() {
            self.feed(start, 1, Some(&[id]));
        }
    }

    /// A step fed something else than what was said to come.
    fn diverge(&mut self, start: u32, ids: &[u32]) {
        if start < self.prompt || start > self.tokens.len() {
            self.holds = false;
            return;
        }
        self.truncate(start);
        self.tokens.extend(ids);
    }

    /// Forgets tokens past the first `len`.
    fn truncate(&mut self, len: u32) {
        self.tokens.truncate(len);
        self.links.truncate((len / self.page_size) as usize + 1);
    }

    /// Learns the next token that was sampled. Says whether it is the last one of a block.
    #[inline]
    pub(crate) fn output(&mut self, id: u32) -> bool {
        let at = self.prompt + self.outputs;
        self.outputs += 1;
        // It may have been fed already, and what was fed counts.
        if at != self.tokens.len() || !self.takes_outputs {
            return false;
        }
        self.tokens.push(id);
        self.tokens.len().is_multiple_of(BLOCK as u32)
    }

    /// Whether the page after those indexed may have become whole by the last token that was named.
    #[inline]
    pub(crate) fn may_have_ended_page(&self) -> bool {
        self.behind && self.tokens.len() == self.next_end()
    }

    /// The stream was cut to `len` tokens: what was only tried out is forgotten.
    pub(crate) fn rewind(&mut self, len: u32) {
        if !self.keyed {
            return;
        }
        let decided = self.prompt.saturating_add(self.outputs).max(len);
        if decided < self.tokens.len() {
            self.truncate(decided);
        }
        let whole = len / self.page_size;
        if whole < self.indexed {
            (self.indexed, self.tip_is_own) = (whole, false);
        }
    }

    /// Tokens with which the page after those indexed is whole.
    #[inline]
    pub(crate) fn next_end(&self) -> u32 {
        (self.indexed + 1) * self.page_size
    }

    /// Asks for the memory that the next link and the next block of tokens go to.
    #[inline]
    pub(crate) fn warm(&mut self) {
        self.links.spare_capacity_mut().first().into_iter().for_each(prefetch);
        self.tokens.warm();
    }

    /// Whether the page after those indexed is whole in a stream of `len` tokens and known.
    #[inline]
    pub(crate) fn has_ended_page(&self, len: u32) -> bool {
        let end = self.next_end();
        self.holds && end <= len && end <= self.tokens.len()
    }

    /// Whole pages of a stream of `len` tokens that are known.
    pub(crate) fn whole_pages(&self, len: u32) -> u32 {
        len.min(self.tokens.len()) / self.page_size
    }

    /// Tokens that the lease holds.
    pub(crate) fn leased(&self) -> u32 {
        let pages = self.lease.len() as u32;
        match self.part {
            0 => pages * self.page_size,
            part => (pages - 1) * self.page_size + part,
        }
    }

    /// The link of the first `pages` pages, which [`Chain::extend_links`] has made, and the tokens after
    /// them.
    pub(crate) fn after(&mut self, pages: u32) -> Option<(&Link, &[u32])> {
        let rest = self.tokens.all().get((pages * self.page_size) as usize..)?;
        Some((self.links.get(pages as usize)?, rest))
    }

    /// Tokens of a page whose link is there, and the link of the one before it.
    #[inline]
    pub(crate) fn page(&mut self, page: u32) -> Option<(&Link, &[u32])> {
        let size = self.page_size as usize;
        let tokens = self.tokens.all().get(page as usize * size..(page as usize + 1) * size)?;
        Some((self.links.get(page as usize)?, tokens))
    }

    /// The link of the prompt's last whole page, and the first token after it, if any.
    pub(crate) fn end_of_prompt(&mut self) -> Option<(&Link, u32)> {
        let (link, rest) = self.after(self.prompt_pages())?;
        Some((link, *rest.first()?))
    }

    /// Whole pages of the prompt.
    pub(crate) fn prompt_pages(&self) -> u32 {
        self.prompt.checked_div(self.page_size).unwrap_or(0)
    }

    /// Whether there are tokens to skip: at least one is left to compute.
    pub(crate) fn can_skip(&self) -> bool {
        self.keyed && self.tokens.len() > 1
    }

    /// Whole pages that can be skipped.
    pub(crate) fn skippable_pages(&self) -> u32 {
        match self.keyed {
            true => self.tokens.len().saturating_sub(1) / self.page_size,
            false => 0,
        }
    }

    /// Whole pages of a stream of `len` tokens that have keys.
    pub(crate) fn keyed_pages(&self, len: u32) -> u32 {
        if self.keyed { self.whole_pages(len) } else { 0 }
    }

    /// The stream has come to hold `len` tokens without steps: the request's own from the first on,
    /// unless some in front were released.
    pub(crate) fn take_over(&mut self, len: u32, is_trimmed: bool) {
        (self.holds, self.indexed) = (self.keyed && !is_trimmed, 0);
        self.tip_is_own = true;
        self.behind |= len > self.tokens.len();
    }

    /// Makes sure that the links of the first `pages` pages, which are whole, are there.
    pub(crate) fn extend_links(&mut self, pages: u32) {
        let size = self.page_size as usize;
        if self.links.len() > pages as usize {
            return;
        }
        let tokens = self.tokens.all();
        while let Some(parent) = self.links.last()
            && self.links.len() <= pages as usize
        {
            let end = self.links.len() * size;
            self.links.push(link(parent, &tokens[end - size..end]));
        }
    }

    /// What the link of the page is made of whose last token is the last one known, where that is the
    /// only link that lacks.
    #[inline]
    fn last_page(&self) -> Option<(&Link, &[u32; BLOCK])> {
        let pages = self.tokens.len() as usize / BLOCK;
        if self.page_size as usize != BLOCK || self.links.len() != pages {
            return None;
        }
        Some((self.links.last()?, self.tokens.last_block()?))
    }

    /// The key of the page after those indexed, where its link is there, and where whoever finds those
    /// indexed finds it, too.
    #[inline]
    pub(crate) fn next_key(&self) -> Option<Key> {
        let link = self.links.get(self.indexed as usize + 1).filter(|_| self.tip_is_own)?;
        Some(short(link))
    }

    /// Keys of pages `from..to`, which [`Chain::extend_links`] has made.
    pub(crate) fn keys(&self, from: u32, to: u32) -> impl DoubleEndedIterator<Item = Key> + '_ {
        // Where there is no root, there is no page with a key either.
        self.links.get(from as usize + 1..to as usize + 1).unwrap_or(&[]).iter().map(short)
    }

    /// Whether these are the first tokens.
    pub(crate) fn starts_with(&mut self, ids: &[u32]) -> bool {
        self.tokens.all().starts_with(ids)
    }
}

/// Links of pages of different requests: they do not depend on each other and are computed together.
#[derive(Debug, Default)]
pub(crate) struct LinkBatch {
    of: Vec<RequestId>,
    parents: Vec<Link>,
    blocks: Vec<[u32; BLOCK]>,
    links: Vec<Link>,
}

impl LinkBatch {
    /// Adds the page of a request whose last token has just become known, if it is the only one that
    /// lacks its link.
    #[inline]
    pub(crate) fn add(&mut self, request: RequestId, chain: &Chain) {
        if let Some((parent, block)) = chain.last_page() {
            self.of.push(request);
            self.parents.push(*parent);
            self.blocks.push(*block);
        }
    }

    /// Computes the links, gives them to the chains, and asks for what indexing the pages will touch.
    pub(crate) fn finish(&mut self, requests: &mut Requests, pool: &PagePool) {
        if self.of.is_empty() {
            return;
        }
        self.links.resize(self.of.len(), Link::default());
        keyed_hashes(&self.parents, &self.blocks, &mut self.links);
        for (&request, link) in self.of.iter().zip(&self.links) {
            if let Some(chain) = requests.chain_mut(request) {
                chain.links.push(*link);
                pool.warm(short(link));
            }
        }
        self.of.clear();
        self.parents.clear();
        self.blocks.clear();
    }
}
