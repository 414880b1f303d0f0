//! Writes a plan: rows first, then blocks of a size that keeps every thread busy.

use crate::cpu::CHUNK;
use crate::plan::{AttentionPlan, Block, Group, NONE, Row};
use resource_api::LabelId;
use std::num::NonZeroU32;

/// What blocks are cut by, besides the rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Tokens that a token sees at most in any layer, itself included.
    pub window: Option<NonZeroU32>,
    /// Most tokens of a block.
    pub block_tokens: u32,
    /// Threads that take part.
    pub threads: u32,
}

/// Blocks for each thread to take, so that the last ones to finish are not far apart.
pub(crate) const BLOCKS_PER_THREAD: u64 = 4;
/// Keys below which a block is not worth handing to another thread.
const SMALLEST_BLOCK: u64 = 2 * CHUNK as u64;

/// Writes one step's plan over the slot's last one.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    plan: &'a mut AttentionPlan,
    rows: usize,
    changed: bool,
}

impl<'a> Layout<'a> {
    pub fn new(plan: &'a mut AttentionPlan, causal: bool) -> Self {
        let changed = plan.layouts == 0 || plan.causal != causal;
        plan.causal = causal;
        plan.groups.clear();
        plan.qo_indptr.clear();
        Self { plan, rows: 0, changed }
    }

    /// Starts the rows of a label.
    pub fn group(&mut self, label: LabelId) {
        self.plan.groups.push(Group {
            label,
            first_row: self.rows as u32,
            num_rows: 0,
            num_tokens: 0,
            first_indptr: self.plan.qo_indptr.len() as u32,
            first_block: 0,
            num_blocks: 0,
            num_partials: 0,
        });
        self.plan.qo_indptr.push(0);
    }

    /// Adds a row of `tokens` tokens from `position` on that reads `keys` keys of row `kv_row` of
    /// the cache's plan, or nothing when there is none.
    pub fn row(&mut self, kv_row: Option<u32>, tokens: u32, position: u32, keys: u32) {
        let index = self.plan.groups.len() as u32 - 1;
        let Some(group) = self.plan.groups.as_mut_slice().last_mut() else { return };
        let kv_row = kv_row.unwrap_or(NONE);
        let keys = if kv_row == NONE { 0 } else { keys };
        let first_token = group.num_tokens;
        let row = Row { group: index, kv_row, first_token, tokens, position, keys };
        group.num_rows += 1;
        group.num_tokens += tokens;
        let end = group.num_tokens;
        self.plan.qo_indptr.push(end);
        match self.plan.rows.as_mut_slice().get_mut(self.rows) {
            Some(old) if *old == row => {}
            Some(old) => (*old, self.changed) = (row, true),
            None => {
                self.plan.rows.push(row);
                self.changed = true;
            }
        }
        self.rows += 1;
    }

    /// Adds rows as [`Layout::row`] does, all at once.
    pub fn rows(&mut self, rows: impl ExactSizeIterator<Item = (Option<u32>, u32, u32, u32)>) {
        let index = self.plan.groups.len() as u32 - 1;
        let Some(group) = self.plan.groups.as_mut_slice().last_mut() else { return };
        let (first, count) = (self.rows, rows.len());
        if self.plan.rows.len() < first + count {
            self.plan.rows.resize(first + count, NO_ROW);
        }
        let indptr = self.plan.qo_indptr.len();
        let ends = &mut self.plan.qo_indptr.resize(indptr + count, 0)[indptr..];
        let old = &mut self.plan.rows.as_mut_slice()[first..first + count];
        let mut first_token = group.num_tokens;
        for (((kv_row, tokens, position, keys), end), old) in rows.zip(ends).zip(old) {
            let kv_row = kv_row.unwrap_or(NONE);
            let keys = if kv_row == NONE { 0 } else { keys };
            let row = Row { group: index, kv_row, first_token, tokens, position, keys };
            // One that differs is enough: in decode it is the first, and the rest is not compared.
            self.changed = self.changed || *old != row;
            *old = row;
            first_token += tokens;
            *end = first_token;
        }
        group.num_rows += count as u32;
        group.num_tokens = first_token;
        self.rows += count;
    }

    /// Cuts the rows into blocks, unless they are those of the slot's last step.
    pub fn finish(self, shape: &Shape) {
        let Self { plan, rows, mut changed } = self;
        if plan.rows.len() > rows {
            plan.rows.resize(rows, NO_ROW);
            changed = true;
        }
        if changed {
            plan.blocks.clear();
            plan.layouts = plan.layouts.wrapping_add(1).max(1);
        }
        let mut first_block = 0;
        for g in 0..plan.groups.len() {
            let mut group = plan.groups[g];
            group.first_block = first_block;
            if changed {
                group.num_partials = cut(plan, &group, shape);
                group.num_blocks = plan.blocks.len() as u32 - first_block;
            } else {
                let of_group = |b: &&Block| plan.rows[b.row as usize].group == g as u32;
                let blocks = &plan.blocks[first_block as usize..];
                group.num_blocks = blocks.iter().take_while(of_group).count() as u32;
                let split = blocks[..group.num_blocks as usize].iter();
                let split = split.filter(|b| b.first_partial != NONE);
                let chunks =
                    split.map(|b| chunks(&plan.rows[b.row as usize], b, plan.causal, shape));
                group.num_partials = chunks.sum();
            }
            first_block += group.num_blocks;
            plan.groups.as_mut_slice()[g] = group;
        }
    }
}

const NO_ROW: Row =
    Row { group: NONE, kv_row: NONE, first_token: 0, tokens: 0, position: 0, keys: 0 };

/// Chunks that the first token of a block reads.
fn chunks(row: &Row, block: &Block, causal: bool, shape: &Shape) -> u32 {
    let seen = row.visible(block.token, causal, shape.window);
    match seen.is_empty() {
        true => 0,
        false => (seen.end - 1) / CHUNK - seen.start / CHUNK + 1,
    }
}

/// Appends the blocks of `group`; says into how many chunks split ones are cut.
fn cut(plan: &mut AttentionPlan, group: &Group, shape: &Shape) -> u32 {
    let rows = group.first_row as usize..(group.first_row + group.num_rows) as usize;
    let causal = plan.causal;
    let seen =
        |row: &Row, token: u32| u64::from(row.visible(token, causal, shape.window).len() as u32);
    let cost = |row: &Row| u64::from(row.tokens) * seen(row, row.tokens.saturating_sub(1));
    let share = match shape.threads {
        0 | 1 => u64::MAX,
        threads => {
            let total: u64 = plan.rows[rows.clone()].iter().map(cost).sum();
            (total / (u64::from(threads) * BLOCKS_PER_THREAD)).max(SMALLEST_BLOCK)
        }
    };
    let mut partials = 0;
    if group.num_tokens == group.num_rows
        && plan.rows[rows.clone()].iter().all(|row| row.tokens == 1)
    {
        // A decode step: a block a row, known without a division.
        let first = plan.blocks.len();
        let none = Block { row: 0, token: 0, tokens: 1, first_partial: NONE };
        let blocks = &mut plan.blocks.resize(first + rows.len(), none)[first..];
        blocks.iter_mut().zip(rows.start as u32..).for_each(|(block, r)| block.row = r);
        if share == u64::MAX {
            return 0;
        }
        for (row, block) in plan.rows[rows].iter().zip(blocks) {
            if seen(row, 0) > share {
                block.first_partial = partials;
                partials += chunks(row, block, causal, shape);
            }
        }
        return partials;
    }
    for r in rows {
        let row = plan.rows[r];
        let mut token = 0;
        while token < row.tokens {
            let keys = seen(&row, token).max(1);
            let most = u64::from(shape.block_tokens.min(row.tokens - token));
            let tokens = (share / keys).clamp(1, most) as u32;
            let mut block = Block { row: r as u32, token, tokens, first_partial: NONE };
            if tokens == 1 && keys > share {
                block.first_partial = partials;
                partials += chunks(&row, &block, causal, shape);
            }
            plan.blocks.push(block);
            token += tokens;
        }
    }
    partials
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(threads: u32) -> Shape {
        Shape { window: None, block_tokens: 16, threads }
    }

    fn lay_out(plan: &mut AttentionPlan, rows: &[(u32, u32)], threads: u32) {
        let mut layout = Layout::new(plan, true);
        layout.group(LabelId::MAIN);
        for (r, &(position, tokens)) in rows.iter().enumerate() {
            layout.row(Some(r as u32), tokens, position, position + tokens);
        }
        layout.finish(&shape(threads));
    }

    /// Blocks cover each token once, in packed order.
    fn check_cover(plan: &AttentionPlan) {
        let mut next = 0;
        for block in plan.blocks.iter() {
            let row = &plan.rows[block.row as usize];
            assert_eq!(row.first_token + block.token, next);
            assert!(block.tokens > 0 && block.token + block.tokens <= row.tokens);
            next += block.tokens;
        }
        assert_eq!(next, plan.groups[0].num_tokens);
        assert_eq!(plan.groups[0].num_blocks as usize, plan.blocks.len());
    }

    #[test]
    fn blocks_cover_every_token_once_whatever_the_threads() {
        let batches: [&[(u32, u32)]; 5] =
            [&[(0, 1)], &[(0, 513), (40, 0), (7, 1)], &[(8000, 1); 3], &[(60_000, 1)], &[]];
        for rows in batches {
            for threads in [1, 2, 7, 64] {
                let mut plan = AttentionPlan::default();
                lay_out(&mut plan, rows, threads);
                check_cover(&plan);
                assert_eq!(plan.indptr(&plan.groups[0]).len(), rows.len() + 1);
            }
        }
    }

    #[test]
    fn one_long_context_is_split_among_threads_and_a_short_one_is_not() {
        let mut plan = AttentionPlan::default();
        lay_out(&mut plan, &[(4095, 1)], 2);
        assert_eq!((plan.blocks[0].first_partial, plan.groups[0].num_partials), (0, 4096 / CHUNK));
        lay_out(&mut plan, &[(4095, 1)], 1);
        assert_eq!(plan.groups[0].num_partials, 4096 / CHUNK, "the same rows keep their blocks");
        lay_out(&mut plan, &[(100, 1)], 2);
        assert_eq!((plan.blocks[0].first_partial, plan.groups[0].num_partials), (NONE, 0));
    }

    #[test]
    fn the_blocks_of_a_long_request_are_no_larger_than_a_threads_share() {
        let mut plan = AttentionPlan::default();
        lay_out(&mut plan, &[(20_000, 1), (10, 1), (10, 1), (0, 300)], 4);
        check_cover(&plan);
        let long = plan.blocks[0];
        assert_ne!(long.first_partial, NONE);
        assert_eq!(plan.groups[0].num_partials, 20_001u32.div_ceil(CHUNK));
    }

    #[test]
    fn unchanged_rows_are_not_laid_out_again() {
        let mut plan = AttentionPlan::default();
        lay_out(&mut plan, &[(0, 40), (3, 1)], 2);
        let (blocks, groups) = (plan.blocks.to_vec(), plan.groups.to_vec());
        lay_out(&mut plan, &[(0, 40), (3, 1)], 2);
        assert_eq!(plan.layouts, 1);
        assert_eq!((plan.blocks.to_vec(), plan.groups.to_vec()), (blocks, groups));
        lay_out(&mut plan, &[(0, 40), (4, 1)], 2);
        assert_eq!(plan.layouts, 2);
        lay_out(&mut plan, &[(0, 40)], 2);
        assert_eq!((plan.layouts, plan.rows.len()), (3, 1));
        check_cover(&plan);
    }
}
