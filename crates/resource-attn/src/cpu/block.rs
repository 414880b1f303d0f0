//! Some heads' share of a block of tokens: scores, softmax and weighted sum, chunk by chunk.

use super::pages::Pages;
use super::reads::{Reads, Run};
use super::spans::Spans;
use super::state::State;
use super::{CHUNK, Work};
use crate::cache::{BLOCK_ROWS, Cache};
use crate::plan::{Block, Row};
use device::attention::{Span, accumulate_rows, dot_rows};
use device::ops;
use resource_api::{ResourceError, Result};
use std::num::NonZeroU32;
use std::ops::Range;

/// Memory for the blocks of one thread, kept between steps.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub tables: Tables,
    chunk: Vec<f32>,
    total: Vec<f32>,
}

/// Queries head by head, and their scores with one chunk of keys.
#[derive(Debug, Default)]
pub(super) struct Tables {
    queries: Vec<f32>,
    scores: Vec<f32>,
}

impl Scratch {
    /// Makes room for every block over this cache, so that no later one has to.
    pub fn fit(&mut self, cache: &Cache) {
        let (group, head_dim) = (cache.query_heads() / cache.kv_heads(), cache.head_dim() as usize);
        let rows = (cache.block_tokens() as usize * group).max(BLOCK_ROWS as usize);
        at_least(&mut self.chunk, State::len(rows, head_dim));
        at_least(&mut self.total, State::len(rows, head_dim));
        at_least(&mut self.tables.queries, rows * head_dim);
        at_least(&mut self.tables.scores, rows * CHUNK as usize);
    }
}

/// `len` elements of `memory`, which grows to the largest asked for.
pub(super) fn at_least(memory: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if memory.len() < len {
        memory.resize(len, 0.0);
    }
    &mut memory[..len]
}

/// What all blocks of a layer read.
#[derive(Debug)]
pub(super) struct Inputs<'a> {
    pub work: &'a Work<'a>,
    pub k: Pages<'a>,
    pub v: Pages<'a>,
    /// `[tokens, query heads, head dim]`.
    pub q: &'a [f32],
}

impl<'a> Inputs<'a> {
    /// A block with what it reads.
    pub fn task(&'a self, block: &'a Block) -> Task<'a> {
        let Self { work, k, v, q } = self;
        Task { work, k, v, q, row: &work.plan.rows[block.row as usize], block }
    }
}

/// A block of tokens of one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    work: &'a Work<'a>,
    k: &'a Pages<'a>,
    v: &'a Pages<'a>,
    q: &'a [f32],
    pub row: &'a Row,
    block: &'a Block,
}

impl<'a> Task<'a> {
    /// Query heads that share a key/value head.
    fn group(&self) -> usize {
        self.work.cache.query_heads() / self.work.cache.kv_heads()
    }

    /// (token, query head) rows of one key/value head.
    pub fn rows(&self) -> usize {
        self.block.tokens as usize * self.group()
    }

    fn visible(&self, i: usize) -> Range<u32> {
        self.visible_within(i, self.work.scoring.window)
    }

    fn visible_within(&self, i: usize, window: Option<NonZeroU32>) -> Range<u32> {
        let token = self.block.token + i as u32;
        self.row.visible(token, self.work.plan.causal, window)
    }

    /// The keys that some token of the block sees. What a token sees only moves up with it.
    fn keys(&self) -> Range<u32> {
        self.visible(0).start..self.visible(self.block.tokens as usize - 1).end
    }

    /// The chunks that some token of the block sees.
    pub fn chunks(&self) -> Range<u32> {
        chunks_of(&self.keys())
    }

    /// The chunks of a split block, which has one token, that the plan keeps results of. In a layer
    /// with a window that the plan was not cut for they are more than the token sees.
    pub fn planned_chunks(&self) -> Range<u32> {
        chunks_of(&self.visible_within(0, self.work.planned_window))
    }

    /// Elements of the state of one key/value head.
    pub fn state_len(&self) -> usize {
        State::len(self.rows(), self.work.cache.head_dim() as usize)
    }

    /// Computes the block for every head. `out` is `[block's tokens, query heads, head dim]`.
    pub fn whole(&self, scratch: &mut Scratch, out: &mut [f32]) -> Result<()> {
        let (rows, len, all) = (self.rows(), self.state_len(), self.work.cache.kv_heads());
        for heads in ranges(all, heads_together(rows, all)) {
            let chunk = at_least(&mut scratch.chunk, heads.len() * len);
            let total = at_least(&mut scratch.total, heads.len() * len);
            for total in total.chunks_exact_mut(len) {
                State::in_memory(total, rows).clear();
            }
            for c in self.chunks() {
                self.chunk(c, heads.clone(), &mut scratch.tables, chunk)?;
                for (total, chunk) in total.chunks_exact_mut(len).zip(chunk.chunks_exact(len)) {
                    State::in_memory(total, rows).merge(chunk);
                }
            }
            for (head, total) in heads.zip(total.chunks_exact_mut(len)) {
                self.write(&State::in_memory(total, rows), head, out);
            }
        }
        Ok(())
    }

    /// Merges what [`Task::chunk`] left of each chunk, first to last, into the block's output.
    /// `partials` holds them chunk by chunk, and in a chunk head by head.
    pub fn merged(&self, scratch: &mut Scratch, partials: &[f32], out: &mut [f32]) {
        let (rows, len, heads) = (self.rows(), self.state_len(), self.work.cache.kv_heads());
        let mut state = State::in_memory(at_least(&mut scratch.total, len), rows);
        let first = self.planned_chunks().start;
        for head in 0..heads {
            state.clear();
            for c in self.chunks() {
                let c = (c - first) as usize;
                state.merge(&partials[(c * heads + head) * len..][..len]);
            }
            self.write(&state, head, out);
        }
    }

    fn write(&self, state: &State<'_>, head: usize, out: &mut [f32]) {
        let (group, head_dim) = (self.group(), self.work.cache.head_dim() as usize);
        let row = self.work.cache.query_heads() * head_dim;
        for (i, out) in out.chunks_exact_mut(row).enumerate() {
            let out = &mut out[head * group * head_dim..][..group * head_dim];
            for (g, out) in out.chunks_exact_mut(head_dim).enumerate() {
                state.finish(i * group + g, out);
            }
        }
    }

    /// Reduces one chunk of keys for some key/value heads into their states, kept in `parts` one after
    /// the other.
    ///
    /// A token's result depends on the keys it sees in this chunk alone, not on the block, and a
    /// head's not on the others.
    pub fn chunk(
        &self,
        chunk: u32,
        heads: Range<usize>,
        tables: &mut Tables,
        parts: &mut [f32],
    ) -> Result<()> {
        let (group, rows) = (self.group(), self.rows());
        let head_dim = self.work.cache.head_dim() as usize;
        let columns = CHUNK as usize;
        let of_chunk = chunk * CHUNK..(chunk + 1).saturating_mul(CHUNK);
        let keys = intersect(&self.keys(), &of_chunk);
        let queries = at_least(&mut tables.queries, heads.len() * rows * head_dim);
        for (head, queries) in heads.clone().zip(queries.chunks_exact_mut(rows * head_dim)) {
            self.gather(head, queries);
        }
        let scores = at_least(&mut tables.scores, heads.len() * rows * columns);
        let len = self.state_len();
        let mut reads = Reads::new(self.k, self.v, self.runs(keys.clone()), heads.clone());

        let column = |key: u32| (key - of_chunk.start) as usize;
        let mut spans = Spans::new();
        for run in self.runs(keys.clone()) {
            for (h, _) in heads.clone().enumerate() {
                let k = reads.next().ok_or_else(|| self.no_page(&run))?;
                let column = column(run.keys.start);
                let span = Span { query: h * rows, column, ..Span::new(k, run.keys.len(), rows) };
                spans.push(span, |spans| dot_rows(queries, head_dim, spans, scores, columns));
            }
        }
        spans.finish(|spans| dot_rows(queries, head_dim, spans, scores, columns));
        for (scores, part) in
            scores.chunks_exact_mut(rows * columns).zip(parts.chunks_exact_mut(len))
        {
            let state = State::in_memory(part, rows);
            for (r, scores) in scores.chunks_exact_mut(columns).enumerate() {
                let seen = intersect(&self.visible(r / group), &of_chunk);
                let start = (seen.start - of_chunk.start) as usize;
                let scores = &mut scores[start..][..seen.len()];
                if let Some(cap) = self.work.scoring.softcap {
                    ops::soft_cap(scores, cap);
                }
                (state.max[r], state.sum[r]) = ops::exponentials(scores);
            }
            state.acc.fill(0.0);
        }
        let (scores, tokens) = (&*scores, self.block.tokens as usize);
        let sum_of =
            |h: usize, token: usize| h * len + State::acc_start(rows) + token * group * head_dim;
        let mut spans = Spans::new();
        let mut add = |spans: &[Span<'_>]| accumulate_rows(scores, columns, head_dim, spans, parts);
        for run in self.runs(keys) {
            for (h, head) in heads.clone().enumerate() {
                let all = reads.next().ok_or_else(|| self.no_page(&run))?;
                // Tokens that see the whole run go together; of the others each takes what it sees,
                // never more: a weight of 0 would not keep a NaN out.
                let mut i = 0;
                while i < tokens {
                    let seen = intersect(&self.visible(i), &run.keys);
                    let mut next = i + 1;
                    while seen == run.keys
                        && next < tokens
                        && intersect(&self.visible(next), &run.keys) == seen
                    {
                        next += 1;
                    }
                    let values = match seen == run.keys {
                        true => all,
                        false if seen.is_empty() => {
                            i = next;
                            continue;
                        }
                        false => {
                            let slot = run.slot + (seen.start - run.keys.start);
                            let rows = self.v.rows(run.page, slot, seen.len(), head);
                            rows.ok_or_else(|| self.no_page(&run))?
                        }
                    };
                    let span = Span {
                        query: h * rows + i * group,
                        column: column(seen.start),
                        sum: sum_of(h, i),
                        ..Span::new(values, seen.len(), (next - i) * group)
                    };
                    spans.push(span, &mut add);
                    i = next;
                }
            }
        }
        spans.finish(add);
        Ok(())
    }

    /// Copies the block's queries of one key/value head together, scaled.
    fn gather(&self, head: usize, queries: &mut [f32]) {
        let cache = self.work.cache;
        let (row, width) = (
            cache.query_heads() * cache.head_dim() as usize,
            self.group() * cache.head_dim() as usize,
        );
        let first = (self.row.first_token + self.block.token) as usize;
        for (i, to) in queries.chunks_exact_mut(width).enumerate() {
            to.copy_from_slice(&self.q[(first + i) * row + head * width..][..width]);
        }
        ops::scale(queries, self.work.scoring.scale);
    }

    /// `keys` page by page.
    fn runs(&self, keys: Range<u32>) -> impl Iterator<Item = Run> + Clone + use<'a> {
        let page_size = self.work.cache.page_size();
        let pages = self.work.kv.pages(self.row.kv_row as usize, page_size);
        let mut key = keys.start;
        std::iter::from_fn(move || {
            if key >= keys.end {
                return None;
            }
            let slot = key % page_size;
            let end = keys.end.min(key - slot + page_size);
            let run = Run { page: pages[(key / page_size) as usize], slot, keys: key..end };
            key = end;
            Some(run)
        })
    }

    fn no_page(&self, run: &Run) -> ResourceError {
        let request = self.work.kv.request[self.row.kv_row as usize];
        ResourceError::internal(format!(
            "page {} of {request} (keys {}..{}) is not in the cache's pool",
            run.page, run.keys.start, run.keys.end
        ))
    }
}

/// Key/value heads that one walk through the pages serves: all where the query rows of each are few,
/// so that what lies together is read together, and one where their scores alone fill the cache.
pub(super) fn heads_together(rows: usize, heads: usize) -> usize {
    (BLOCK_ROWS as usize / rows.max(1)).clamp(1, heads)
}

/// `0..all`, `most` at a time.
pub(super) fn ranges(all: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..all).step_by(most).map(move |first| first..all.min(first + most))
}

fn chunks_of(keys: &Range<u32>) -> Range<u32> {
    match keys.is_empty() {
        true => 0..0,
        false => keys.start / CHUNK..(keys.end - 1) / CHUNK + 1,
    }
}

fn intersect(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end.max(start))
}
