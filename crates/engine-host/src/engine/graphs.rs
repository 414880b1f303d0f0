//! Captured decode steps.
//!
//! A decode step on a device is some hundred launches of a few microseconds. Captured once per number
//! of rows, it costs the host one launch. Steps between two captured sizes are padded with rows of
//! nobody; what was not captured runs launch by launch.

use resource_api::{BucketKey, CGSlotSpec, GraphConfig, Resource};

use super::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::runner::Started;
use crate::step::SubmoduleStep;

impl Engine {
    /// Has every resource and the node prepare for decode steps of fixed sizes, if the node captures.
    /// Where that fails, steps run launch by launch, and one warning says why.
    pub(super) fn capture_graphs(&mut self) {
        if !self.node.captures() {
            return;
        }
        let most = self.limits.max_batch.min(self.limits.max_batch_tokens);
        let key = |bs| BucketKey { graph_walk: self.decode, bs, num_tokens: bs, cg_key_info: 0 };
        let keys: Vec<_> = sizes(most).into_iter().map(key).collect();
        let count = self.runner.add_buckets(&keys);
        self.buckets = keys[..count].to_vec();
        if let Err(e) = self.capture_all() {
            tracing::warn!("decode steps are not captured, and run launch by launch: {e}");
            self.buckets.clear();
            self.runner.remove_buckets();
        }
    }

    fn capture_all(&mut self) -> Result<()> {
        let slots: Vec<_> = self.runner.bucket_slots().collect();
        let spec = |&(bucket, slot)| CGSlotSpec {
            bucket,
            slot,
            config: GraphConfig::FULL,
            config_idx: CGSlotSpec::NO_CONFIG_IDX,
        };
        let specs: Vec<_> = slots.iter().map(spec).collect();
        let most = self.buckets.last().map_or(0, |b| b.bs);
        let max_len = self.limits.max_model_len;
        for entry in self.runner.resources().entries() {
            entry.resource().build_cuda_graph_buffers(&specs, most, max_len).map_err(|e| {
                Error::from(e.within(format!("resource `{}`, build_cuda_graph_buffers", entry.key)))
            })?;
        }
        // The largest first: what a library allocates for it serves the others.
        for (bucket, _) in slots.into_iter().rev() {
            let Some(mut step) = self.spare.pop() else { continue };
            step.clear();
            step.graph_walk = self.decode;
            step.pad_to(bucket);
            let captured = self.capture(step);
            captured.map_err(|e| Error::new(e.kind(), format!("{} rows: {e}", bucket.bs)))?;
        }
        Ok(())
    }

    /// Captures the forward pass of a step of padding rows, and gives its slot back.
    fn capture(&mut self, step: SubmoduleStep) -> Result<()> {
        let live = match self.runner.start(step) {
            Ok(Started::Live(live)) => live,
            Ok(Started::Refused(why, step)) => {
                self.spare.push(step);
                return Err(Error::new(ErrorKind::Internal, why.outcome.message().to_owned()));
            }
            Err(failed) => {
                self.spare.push(*failed.step);
                return Err(failed.error);
            }
        };
        let input = model::StepInput {
            segments: live.step().segments.view(),
            token_ids: &live.step().token_ids,
            from_sample: &[],
            sample: &[],
            top_logprobs: &[],
            score: &[],
        };
        let (output, pool) = (&mut self.work.output, self.services.pool());
        let captured = self.node.forward(&live.capturing_ctx(), &input, output, pool);
        self.services.complete_epoch(self.runner.epoch());
        self.spare.push(self.runner.abandon(live));
        captured.map_err(Error::from)
    }

    /// Pads a decode step to the next captured size, if there is one and every row adds one token.
    pub(super) fn pad(&self, step: &mut SubmoduleStep) {
        let rows = step.request_ids.len();
        let bucket = self.buckets.iter().find(|b| b.bs as usize >= rows);
        let is_decode = step.graph_walk == self.decode && step.segments.all_of_one_token();
        if let (Some(&bucket), true) = (bucket, is_decode) {
            step.pad_to(bucket);
        }
    }
}

/// Numbers of rows that are captured: close enough that padding costs little, few enough that
/// capturing does.
fn sizes(most: u32) -> Vec<u32> {
    let all = [1, 2, 4, 8].into_iter().chain((16..=128).step_by(8)).chain((144..=512).step_by(16));
    let mut sizes: Vec<u32> = all.filter(|&n| n < most).collect();
    if most <= 512 {
        sizes.push(most);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_end_with_the_largest_step() {
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(6), [1, 2, 4, 6]);
        assert_eq!(sizes(32), [1, 2, 4, 8, 16, 24, 32]);
        assert_eq!(sizes(1000).last(), Some(&512));
        assert!(sizes(512).is_sorted_by(|a, b| a < b));
    }
}
