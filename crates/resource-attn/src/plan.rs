//! What a step's plan says: which token reads how much of which stream, in which blocks.

use crate::cuda::RowColumns;
use abi_stable::StableAbi;
use resource_api::{LabelId, PlanVec, ResourceError, Result, Typed};
use std::num::NonZeroU32;
use std::ops::Range;

/// Marks a row that reads no stream, and a block that is not split.
pub(crate) const NONE: u32 = u32::MAX;

/// The layout of a step's attention.
#[repr(C)]
#[derive(Debug, Default, StableAbi)]
pub struct AttentionPlan {
    /// One per plan label.
    pub groups: PlanVec<Group>,
    /// Streams in packed order, grouped.
    pub rows: PlanVec<Row>,
    /// Per group: where each row's tokens begin, with the total at the end.
    pub qo_indptr: PlanVec<u32>,
    /// Units of work in packed order, grouped: together they cover every token once.
    pub blocks: PlanVec<Block>,
    /// Whether a token sees only what comes before it, itself included.
    pub causal: bool,
    /// How often `blocks` was laid out: a step whose rows are those of the slot's last step keeps
    /// its blocks.
    pub layouts: u32,
    /// `rows` on the device.
    pub device: RowColumns,
}

impl Typed for AttentionPlan {
    const TAG: &'static str = "attention.plan";
    const MAJOR: u32 = 1;
}

/// The rows of one plan label.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Group {
    /// The plan label.
    pub label: LabelId,
    /// First row.
    pub first_row: u32,
    /// Number of rows.
    pub num_rows: u32,
    /// Number of tokens.
    pub num_tokens: u32,
    /// First entry in `qo_indptr`; there are `num_rows + 1`.
    pub first_indptr: u32,
    /// First block.
    pub first_block: u32,
    /// Number of blocks.
    pub num_blocks: u32,
    /// Chunks of context that are reduced apart, over all split blocks.
    pub num_partials: u32,
}

/// One stream that tokens of this step read.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Row {
    /// Which group it is in.
    pub group: u32,
    /// Row of the cache's plan whose pages it reads; `u32::MAX` for padding, which gives 0.
    pub kv_row: u32,
    /// Its first token in the group's packed tensors.
    pub first_token: u32,
    /// Number of its tokens.
    pub tokens: u32,
    /// Position of its first token in the stream.
    pub position: u32,
    /// Length of the stream it reads.
    pub keys: u32,
}

impl Row {
    /// The keys that its `token`-th token sees.
    pub(crate) fn visible(
        &self,
        token: u32,
        causal: bool,
        window: Option<NonZeroU32>,
    ) -> Range<u32> {
        let next = self.position + token + 1;
        let end = if causal { next.min(self.keys) } else { self.keys };
        let start = window.map_or(0, |w| next.saturating_sub(w.get()));
        start.min(end)..end
    }
}

/// Tokens of one row that are computed together.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Block {
    /// The row.
    pub row: u32,
    /// Its first token, counted within the row.
    pub token: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Where the results of its chunks are kept until they are merged; `u32::MAX` for a block that
    /// one thread computes from end to end.
    pub first_partial: u32,
}

impl AttentionPlan {
    /// The rows of `label`.
    ///
    /// # Errors
    /// `WRONG_STATE` when the step has no such label, naming those it has.
    pub fn group(&self, label: LabelId, name: impl Fn(LabelId) -> String) -> Result<&Group> {
        self.groups.iter().find(|g| g.label == label).ok_or_else(|| {
            let planned: Vec<_> = self.groups.iter().map(|g| name(g.label)).collect();
            ResourceError::wrong_state(format!(
                "this step plans no tokens of label `{}` (planned: {})",
                name(label),
                if planned.is_empty() { "none".into() } else { planned.join(", ") }
            ))
        })
    }

    /// Where each row's tokens of `group` begin, with the total at the end.
    pub fn indptr(&self, group: &Group) -> &[u32] {
        &self.qo_indptr[group.first_indptr as usize..][..group.num_rows as usize + 1]
    }

    /// The blocks of `group`.
    pub(crate) fn blocks_of(&self, group: &Group) -> &[Block] {
        &self.blocks[group.first_block as usize..][..group.num_blocks as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_sees_what_causality_and_the_window_leave() {
        let row = Row { group: 0, kv_row: 0, first_token: 0, tokens: 3, position: 5, keys: 8 };
        let window = NonZeroU32::new;
        assert_eq!(row.visible(0, true, None), 0..6);
        assert_eq!(row.visible(2, true, None), 0..8);
        assert_eq!(row.visible(0, false, None), 0..8);
        assert_eq!(row.visible(0, true, window(1)), 5..6);
        assert_eq!(row.visible(1, true, window(3)), 4..7);
        assert_eq!(row.visible(0, true, window(100)), 0..6);
        assert_eq!(row.visible(1, false, window(3)), 4..8);
        let empty = Row { keys: 0, ..row };
        assert_eq!(empty.visible(0, false, None), 0..0);
        assert!(empty.visible(2, true, window(2)).is_empty());
    }
}
