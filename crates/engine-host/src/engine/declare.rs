//! What a step consists of: the segments of its requests' streams.

use resource_api::{LabelId, Segment};

use crate::request::{Requests, Tracked};
use crate::scheduler::Turn;
use crate::step::SubmoduleStep;

/// Adds the requests of `turns` to `step`, with a segment for each of their streams; those of one label
/// lie side by side. `begins` says from which of its tokens on a request goes.
pub(super) fn declare(
    requests: &Requests,
    turns: &[Turn],
    begins: impl Fn(&Tracked) -> usize,
    step: &mut SubmoduleStep,
) {
    let mut plain = true;
    for turn in turns {
        let Some(request) = requests.get(turn.rid) else { continue };
        plain &= request.labels.is_none();
        step.request_ids.push(turn.rid);
    }
    let parts = || turns.iter().filter_map(|t| Some((t.span as u32, requests.get(t.rid)?)));
    if plain {
        for (span, request) in parts() {
            let label = LabelId::MAIN;
            step.segments.push(Segment { request_id: request.rid, label, span });
            step.starts.push(begins(request) as u32);
        }
        return;
    }
    let labels = |r| Tracked::labels_at(r, begins(r)).iter().copied();
    let mut seen: Vec<LabelId> = Vec::new();
    for label in parts().flat_map(|(_, request)| labels(request)) {
        if !seen.contains(&label) {
            seen.push(label);
        }
    }
    for label in seen {
        for (span, request) in parts().filter(|(_, r)| labels(r).any(|own| own == label)) {
            step.segments.push(Segment { request_id: request.rid, label, span });
        }
    }
}
