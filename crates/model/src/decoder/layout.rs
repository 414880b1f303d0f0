//! How the rows of a step are laid out: which belong to which label, and which are sampled.

use resource_api::{LabelId, ResourceError, Result};

use crate::node::StepInput;

/// The tokens of one label: a range of the packed rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) label: LabelId,
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// The layout of one step. Keeps its memory from step to step.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// The labels of the step that have tokens.
    pub(super) groups: Vec<Group>,
    /// The token rows that are sampled, ascending, and behind them those that are scored, ascending.
    pub(super) kept_rows: Vec<usize>,
}

impl Layout {
    pub(super) fn reserve(&mut self, samples: usize) {
        self.kept_rows.reserve(samples.saturating_sub(self.kept_rows.len()));
    }

    /// Finds the groups and the rows to keep of a step that has been checked.
    pub(super) fn lay_out(&mut self, input: &StepInput<'_>) -> Result<()> {
        self.groups.clear();
        self.kept_rows.clear();
        let mut sample = input.sample.iter().copied().peekable();
        let mut first = 0;
        for (index, segment) in input.segments.iter().enumerate() {
            let tokens = segment.span as usize;
            if tokens == 0 {
                continue;
            }
            let label = segment.label;
            match self.groups.iter().position(|g| g.label == label) {
                None => self.groups.push(Group { label, first, tokens }),
                Some(at) if at + 1 == self.groups.len() => self.groups[at].tokens += tokens,
                Some(_) => {
                    return Err(ResourceError::invalid(format!(
                        "the segments of label {} do not lie side by side in the step",
                        label.0
                    )));
                }
            }
            first += tokens;
            if sample.next_if_eq(&(index as u32)).is_some() {
                self.kept_rows.push(first - 1);
            }
        }
        self.kept_rows.extend(input.score.iter().map(|score| score.row as usize));
        Ok(())
    }
}
