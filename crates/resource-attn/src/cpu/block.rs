//! One head's share of a block of tokens: scores, softmax and weighted sum, chunk by chunk.

use super::pages::Pages;
use super::state::State;
use super::{CHUNK, Work};
use crate::plan::{Block, Row};
use device::attention::{accumulate_rows, dot_rows};
use device::ops;
use resource_api::{ResourceError, Result};
use std::num::NonZeroU32;
use std::ops::Range;

/// Memory that a thread keeps between blocks.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub tables: Tables,
    chunk: Vec<f32>,
    total: Vec<f32>,
}

/// Queries of one head side by side, and their scores with one chunk of keys.
#[derive(Debug, Default)]
pub(super) struct Tables {
    queries: Vec<f32>,
    scores: Vec<f32>,
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

/// Keys of one page.
struct Run {
    page: u32,
    slot: u32,
    keys: Range<u32>,
}

impl Task<'_> {
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

    /// Computes the block for every head. `out` is `[block's tokens, query heads, head dim]`.
    pub fn whole(&self, scratch: &mut Scratch, out: &mut [f32]) -> Result<()> {
        let (rows, head_dim) = (self.rows(), self.work.cache.head_dim() as usize);
        let chunk = at_least(&mut scratch.chunk, State::len(rows, head_dim));
        let total = at_least(&mut scratch.total, State::len(rows, head_dim));
        let mut state = State::in_memory(total, rows);
        for head in 0..self.work.cache.kv_heads() {
            state.clear();
            for c in self.chunks() {
                self.chunk(c, head, &mut scratch.tables, chunk)?;
                state.merge(chunk);
            }
            self.write(&state, head, out);
        }
        Ok(())
    }

    /// Merges what [`Task::chunk`] left of each chunk, first to last, into the block's output.
    /// `partials` holds them chunk by chunk, and in a chunk head by head.
    pub fn merged(&self, scratch: &mut Scratch, partials: &[f32], out: &mut [f32]) {
        let (rows, heads) = (self.rows(), self.work.cache.kv_heads());
        let len = State::len(rows, self.work.cache.head_dim() as usize);
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

    /// Reduces one chunk of keys for one key/value head into the state kept in `part`.
    ///
    /// A token's result depends on the keys it sees in this chunk alone, not on the block.
    pub fn chunk(
        &self,
        chunk: u32,
        head: usize,
        tables: &mut Tables,
        part: &mut [f32],
    ) -> Result<()> {
        let (group, rows) = (self.group(), self.rows());
        let head_dim = self.work.cache.head_dim() as usize;
        let columns = CHUNK as usize;
        let of_chunk = chunk * CHUNK..(chunk + 1).saturating_mul(CHUNK);
        let keys = intersect(&self.keys(), &of_chunk);
        let queries = at_least(&mut tables.queries, rows * head_dim);
        self.gather(head, queries);
        let scores = at_least(&mut tables.scores, rows * columns);
        let state = State::in_memory(part, rows);

        for run in self.runs(keys.clone()) {
            let count = run.keys.len();
            let k =
                self.k.rows(run.page, run.slot, count, head).ok_or_else(|| self.no_page(&run))?;
            let column = (run.keys.start - of_chunk.start) as usize;
            dot_rows(queries, rows, k, count, &mut scores[column..], columns);
        }
        for r in 0..rows {
            let seen = intersect(&self.visible(r / group), &of_chunk);
            let start = (seen.start - of_chunk.start) as usize;
            let scores = &mut scores[r * columns + start..][..seen.len()];
            if let Some(cap) = self.work.scoring.softcap {
                ops::soft_cap(scores, cap);
            }
            (state.max[r], state.sum[r]) = ops::exponentials(scores);
        }
        state.acc.fill(0.0);
        for run in self.runs(keys) {
            let column = |key: u32| (key - of_chunk.start) as usize;
            let values = |keys: &Range<u32>| {
                let slot = run.slot + (keys.start - run.keys.start);
                let rows = self.v.rows(run.page, slot, keys.len(), head);
                rows.ok_or_else(|| self.no_page(&run))
            };
            // Tokens that see the whole run go together; of the others each takes what it sees,
            // never more: a weight of 0 would not keep a NaN out.
            let tokens = self.block.tokens as usize;
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
                if !seen.is_empty() {
                    let scores = &scores[i * group * columns + column(seen.start)..];
                    let acc = &mut state.acc[i * group * head_dim..next * group * head_dim];
                    let heads = (next - i) * group;
                    accumulate_rows(scores, columns, heads, values(&seen)?, seen.len(), acc);
                }
                i = next;
            }
        }
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
    fn runs(&self, keys: Range<u32>) -> impl Iterator<Item = Run> {
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
