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
    /// Whether every segment of the step has exactly one token: rows are then segments.
    pub(super) is_one_token_each: bool,
}

impl Layout {
    pub(super) fn reserve(&mut self, samples: usize) {
        self.kept_rows.reserve(samples.saturating_sub(self.kept_rows.len()));
    }

    /// Finds the groups and the rows to keep of a step that has been checked.
    pub(super) fn lay_out(&mut self, input: &StepInput<'_>) -> Result<()> {
        self.groups.clear();
        self.kept_rows.clear();
        self.is_one_token_each = input.segments.span.iter().all(|&span| span == 1);
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

#[cfg(test)]
mod tests {
    use resource_api::{RequestId, Segments};

    use super::*;
    use crate::node::Score;

    fn lay_out(spans: &[u32], sample: &[u32], score: &[Score]) -> Layout {
        let request = Vec::from_iter((0..spans.len() as u32).map(|slot| RequestId::new(slot, 1)));
        let label = vec![LabelId(0); spans.len()];
        let token_ids = vec![7; spans.iter().sum::<u32>() as usize];
        let input = StepInput {
            segments: Segments { request: &request, label: &label, span: spans },
            token_ids: &token_ids,
            from_sample: &[],
            sample,
            top_logprobs: &[],
            score,
        };
        let mut layout = Layout::default();
        layout.lay_out(&input).unwrap();
        layout
    }

    /// As many rows are kept as there are tokens, and segments: the prompt makes up for the segment without any.
    #[test]
    fn a_step_of_as_many_segments_as_tokens_need_not_have_one_token_each() {
        let score = [0, 1].map(|row| Score { row, target: 3, top: 0 });
        let layout = lay_out(&[0, 2], &[], &score);
        assert_eq!(layout.kept_rows, [0, 1]);
        assert!(!layout.is_one_token_each);
        assert!(!lay_out(&[1, 0], &[0], &[]).is_one_token_each);

        let decode = lay_out(&[1, 1], &[0, 1], &[]);
        assert_eq!(decode.kept_rows, [0, 1]);
        assert!(decode.is_one_token_each);
    }
}
