//! What is known of the tokens of a request's `main` stream, and the keys of their pages.

use device::hash::keyed_hashes;
use device::prefetch;
use resource_api::{RequestId, RequestOverrides, Result};
use serde::Deserialize;

use crate::keys::{BLOCK, Key, Link, link, short};
use crate::state::Shared;

/// What a request may say about the cache.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestSettings {
    /// Whether its pages are shared with other requests.
    #[serde(default = "yes")]
    prefix_cache: bool,
    /// Only requests with the same salt share pages.
    #[serde(default)]
    prefix_salt: String,
}

fn yes() -> bool {
    true
}

/// The tokens of a request: its prompt, then what it generated. They stay through a reset, since the
/// request stays what it is.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Chain {
    /// Generation of the request; 0 when there is none. With what follows up to `links` in the
    /// cache line that every step touches.
    generation: u32,
    /// The last of the tokens.
    last: u32,
    tokens: Vec<u32>,
    prompt: u32,
    /// Sampled tokens that the host has told of.
    outputs: u32,
    page_size: u32,
    /// Leading pages of the stream that the index has, or had under another page.
    pub(crate) indexed: u32,
    /// Whether the tokens are known at all and may be shared.
    keyed: bool,
    /// Whether what the stream holds is these tokens.
    pub(crate) holds: bool,
    /// Whether a step has fed tokens that nobody had named yet: then outputs end pages, too.
    behind: bool,
    /// Tokens that the stream took over from the cache.
    pub(crate) adopted: u32,
    /// Links of whole pages, as far as they were needed.
    links: Vec<Link>,
    /// Pages found for the request that the stream does not have yet. Each counts it as an owner.
    pub(crate) lease: Vec<u32>,
    root: Link,
}

impl Chain {
    /// The chain of a new request, with the keys of its prompt's pages. Needs no lock.
    ///
    /// # Errors
    /// `INVALID` naming the setting of the request.
    pub(crate) fn new(shared: &Shared, overrides: &RequestOverrides<'_>) -> Result<Chain> {
        let settings: Option<RequestSettings> = overrides.parse()?;
        let prompt = overrides.prompt();
        let page_size = shared.facts.page_size;
        let salt = settings.as_ref().map_or("", |s| &s.prefix_salt);
        let wanted = settings.as_ref().is_none_or(|s| s.prefix_cache);
        let (Some(prefix), true, false) = (shared.prefix.get(), wanted, prompt.is_empty()) else {
            return Ok(Chain::default());
        };
        let most = shared.facts.max_seq_len as usize;
        if prompt.len() > most {
            return Ok(Chain::default());
        }
        // Steps must not allocate, so there is room for all that may come.
        let capacity = (prompt.len() + overrides.max_new_tokens() as usize).min(most);
        let mut tokens = Vec::with_capacity(capacity);
        tokens.extend_from_slice(prompt);
        let mut chain = Chain {
            root: prefix.root(salt),
            last: prompt.last().copied().unwrap_or(0),
            tokens,
            links: Vec::with_capacity(capacity / page_size as usize),
            prompt: prompt.len() as u32,
            page_size,
            keyed: true,
            holds: true,
            ..Chain::default()
        };
        chain.extend_links(prompt.len() as u32 / page_size);
        Ok(chain)
    }

    /// Starts again with an empty stream.
    pub(crate) fn restart(&mut self) {
        self.holds = self.keyed;
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
        let from = start as usize;
        match ids {
            Some(ids) => {
                let known = self.tokens.get(from..).unwrap_or(&[]);
                let same = known.len().min(ids.len());
                if known[..same] != ids[..same] || from > self.tokens.len() {
                    return self.diverge(start, ids);
                }
                self.extend(&ids[same..]);
            }
            None => {
                self.holds &= start >= self.prompt && span > 0;
                self.behind = true;
            }
        }
    }

    /// [`Chain::feed`] of one token: nearly always the one that was sampled last, and then the memory of
    /// the tokens is not read.
    #[inline]
    pub(crate) fn feed_one(&mut self, start: u32, id: u32) {
        if id != self.last || start as usize + 1 != self.tokens.len() {
            self.feed(start, 1, Some(&[id]));
        }
    }

    fn extend(&mut self, ids: &[u32]) {
        self.tokens.extend_from_slice(ids);
        self.last = self.tokens.last().copied().unwrap_or(0);
    }

    /// A step fed something else than what was said to come.
    fn diverge(&mut self, start: u32, ids: &[u32]) {
        if start < self.prompt || start as usize > self.tokens.len() {
            self.holds = false;
            return;
        }
        self.truncate(start);
        self.extend(ids);
    }

    /// Forgets tokens past the first `len`.
    fn truncate(&mut self, len: u32) {
        self.tokens.truncate(len as usize);
        self.links.truncate((len / self.page_size) as usize);
        self.last = self.tokens.last().copied().unwrap_or(0);
    }

    /// Learns the next token that was sampled.
    #[inline]
    pub(crate) fn output(&mut self, id: u32) {
        let at = self.prompt as usize + self.outputs as usize;
        self.outputs += 1;
        // It may have been fed already, and what was fed counts.
        if at == self.tokens.len() && self.keyed {
            self.tokens.push(id);
            self.last = id;
        }
    }

    /// Whether the page after those indexed may have become whole by the last token that was named.
    #[inline]
    pub(crate) fn may_have_ended_page(&self) -> bool {
        self.behind && self.tokens.len() == self.next_end() as usize
    }

    /// The stream was cut to `len` tokens: what was only tried out is forgotten.
    pub(crate) fn rewind(&mut self, len: u32) {
        if !self.keyed {
            return;
        }
        let decided = self.prompt.saturating_add(self.outputs).max(len);
        if (decided as usize) < self.tokens.len() {
            self.truncate(decided);
        }
        self.indexed = self.indexed.min(len / self.page_size);
    }

    /// Tokens with which the page after those indexed is whole.
    #[inline]
    pub(crate) fn next_end(&self) -> u32 {
        (self.indexed + 1) * self.page_size
    }

    /// Asks for the memory that the next link and the next page's tokens go to.
    pub(crate) fn warm_next_link(&mut self) {
        if let Some(place) = self.links.spare_capacity_mut().first() {
            prefetch(place);
        }
        if let Some(place) = self.tokens.spare_capacity_mut().get(2) {
            prefetch(place);
        }
    }

    /// Whether the page after those indexed is whole in a stream of `len` tokens and known.
    #[inline]
    pub(crate) fn has_ended_page(&self, len: u32) -> bool {
        let end = self.next_end();
        self.holds && end <= len && end as usize <= self.tokens.len()
    }

    /// Whole pages of a stream of `len` tokens that are known.
    pub(crate) fn whole_pages(&self, len: u32) -> u32 {
        len.min(self.tokens.len() as u32) / self.page_size
    }

    /// Pages that can be skipped: at least one token is left to compute.
    pub(crate) fn skippable_pages(&self) -> u32 {
        match self.keyed {
            true => (self.tokens.len() as u32).saturating_sub(1) / self.page_size,
            false => 0,
        }
    }

    /// Makes sure that the links of the first `pages` pages, which are whole, are there.
    pub(crate) fn extend_links(&mut self, pages: u32) {
        let size = self.page_size as usize;
        for page in self.links.len()..pages as usize {
            let parent = self.links.last().unwrap_or(&self.root);
            self.links.push(link(parent, &self.tokens[page * size..(page + 1) * size]));
        }
    }

    /// Leaves the link of the page that has just become whole to a batch, if it is the only one that
    /// lacks; makes the links of the first `pages` pages otherwise.
    pub(crate) fn extend_links_in(
        &mut self,
        batch: &mut LinkBatch,
        request: RequestId,
        pages: u32,
    ) {
        let last = self.links.len();
        let block = self.tokens.get(last * BLOCK..(last + 1) * BLOCK);
        match block.and_then(|tokens| tokens.try_into().ok()) {
            Some(block) if self.page_size as usize == BLOCK && last + 1 == pages as usize => {
                batch.of.push((request, last));
                batch.keys.push(*self.links.last().unwrap_or(&self.root));
                batch.blocks.push(block);
            }
            _ => self.extend_links(pages),
        }
    }

    /// Adds a link that a batch has computed for page `at`; says its key.
    pub(crate) fn push_link(&mut self, at: usize, link: Link) -> Key {
        if at == self.links.len() {
            self.links.push(link);
        }
        short(&link)
    }

    /// Keys of pages `from..to`, which [`Chain::extend_links`] has made.
    pub(crate) fn keys(&self, from: u32, to: u32) -> impl DoubleEndedIterator<Item = Key> + '_ {
        self.links[from as usize..to as usize].iter().map(short)
    }

    /// Whether these are the first tokens.
    pub(crate) fn starts_with(&self, ids: &[u32]) -> bool {
        self.tokens.starts_with(ids)
    }
}

/// Links of pages of different requests: they do not depend on each other and are computed together.
#[derive(Debug, Default)]
pub(crate) struct LinkBatch {
    /// Whose links, and of which page.
    of: Vec<(RequestId, usize)>,
    keys: Vec<Link>,
    blocks: Vec<[u32; BLOCK]>,
    links: Vec<Link>,
}

impl LinkBatch {
    /// Computes the links and empties the batch; keeps its memory.
    pub(crate) fn finish(&mut self) -> impl Iterator<Item = ((RequestId, usize), Link)> + '_ {
        self.links.clear();
        self.links.resize(self.keys.len(), Link::default());
        keyed_hashes(&self.keys, &self.blocks, &mut self.links);
        self.keys.clear();
        self.blocks.clear();
        self.of.drain(..).zip(self.links.iter().copied())
    }
}
