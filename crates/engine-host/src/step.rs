//! A step as its node declares it: segments, and each resource's share.

use std::collections::BTreeMap;
use std::fmt;

use resource_api::{
    BucketKey, LabelId, NodeId, RequestId, ResourceStep, Segment, Segments, Typed, TypedRef, WalkId,
};

/// Owned segment columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentList {
    request: Vec<RequestId>,
    label: Vec<LabelId>,
    span: Vec<u32>,
}

impl SegmentList {
    /// Empties it, keeping memory.
    pub fn clear(&mut self) {
        self.request.clear();
        self.label.clear();
        self.span.clear();
    }

    /// Appends a segment.
    pub fn push(&mut self, segment: Segment) {
        self.request.push(segment.request_id);
        self.label.push(segment.label);
        self.span.push(segment.span);
    }

    /// Whether every segment adds one token.
    pub fn all_of_one_token(&self) -> bool {
        self.span.iter().all(|&span| span == 1)
    }

    /// As the columns that cross the boundary.
    pub fn view(&self) -> Segments<'_> {
        Segments { request: &self.request, label: &self.label, span: &self.span }
    }
}

/// Options of some kind for a resource's share of a step; any [`Typed`] value.
pub trait StepOptions: Send + Sync {
    /// As what the resource opens.
    fn typed(&self) -> TypedRef<'_>;
}

impl<T: Typed + Send + Sync> StepOptions for T {
    fn typed(&self) -> TypedRef<'_> {
        TypedRef::new(self)
    }
}

/// One resource's share of a step; the default inherits the batch's segments and has no options.
#[derive(Default)]
pub struct Share {
    /// Own segments in place of the batch's.
    pub segments: Option<SegmentList>,
    /// Options of the resource's kind.
    pub options: Option<Box<dyn StepOptions>>,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.options.as_ref().map(|o| o.typed());
        f.debug_struct("Share")
            .field("segments", &self.segments)
            .field("options", &options)
            .finish()
    }
}

/// What a node declares for one step: the seed's `SubmoduleStep`.
#[derive(Debug)]
pub struct SubmoduleStep {
    /// The node that runs.
    pub node: NodeId,
    /// The walk it runs in.
    pub graph_walk: WalkId,
    /// The requests, each once, in packed order; without padding.
    pub request_ids: Vec<RequestId>,
    /// The batch's segments.
    pub segments: SegmentList,
    /// Ids of the tokens that the segments add, packed; empty when the inputs are not token ids.
    pub token_ids: Vec<u32>,
    /// Per segment, how many tokens its stream has already; empty where the caller keeps no account.
    pub starts: Vec<u32>,
    /// The captured shape that the step is padded to, if any; then `segments` and `token_ids` hold the
    /// padding rows too, behind the others.
    pub bucket: Option<BucketKey>,
    /// The requests with the padding rows; empty where there are none.
    pub padded_request_ids: Vec<RequestId>,
    /// Indices of the resources that take part, in build order.
    pub resources: Vec<usize>,
    /// Shares that differ from the default, by resource index.
    pub shares: BTreeMap<usize, Share>,
}

impl SubmoduleStep {
    /// An empty step of `node` over `resources`.
    pub fn new(node: NodeId, graph_walk: WalkId, resources: Vec<usize>) -> Self {
        Self {
            node,
            graph_walk,
            request_ids: Vec::new(),
            segments: SegmentList::default(),
            token_ids: Vec::new(),
            starts: Vec::new(),
            bucket: None,
            padded_request_ids: Vec::new(),
            resources,
            shares: BTreeMap::new(),
        }
    }

    /// Empties it for the next step, keeping memory, node and resources.
    pub fn clear(&mut self) {
        self.request_ids.clear();
        self.segments.clear();
        self.token_ids.clear();
        self.starts.clear();
        self.bucket = None;
        self.padded_request_ids.clear();
        self.shares.clear();
    }

    /// Adds rows of nobody, of one token each, until the step has the shape of `bucket`.
    pub fn pad_to(&mut self, bucket: BucketKey) {
        self.bucket = Some(bucket);
        self.padded_request_ids.clear();
        self.padded_request_ids.extend_from_slice(&self.request_ids);
        for row in self.request_ids.len() as u32..bucket.bs {
            let request_id = RequestId::padding(row);
            self.padded_request_ids.push(request_id);
            self.segments.push(Segment { request_id, label: LabelId::MAIN, span: 1 });
            self.token_ids.push(0);
            self.starts.push(0);
        }
    }

    /// The requests with the padding rows.
    pub fn all_request_ids(&self) -> &[RequestId] {
        if self.padded_request_ids.is_empty() {
            &self.request_ids
        } else {
            &self.padded_request_ids
        }
    }

    /// What the streams of this share have already, as far as that is known.
    pub fn starts_of(&self, resource: usize) -> &[u32] {
        match self.shares.get(&resource) {
            Some(Share { segments: Some(_), .. }) => &[],
            _ => &self.starts,
        }
    }

    /// The share of the resource with this index.
    pub fn share(&self, resource: usize) -> ResourceStep<'_> {
        let share = self.shares.get(&resource);
        let own = share.and_then(|s| s.segments.as_ref());
        let step = ResourceStep::new(own.unwrap_or(&self.segments).view());
        let step = match own {
            Some(_) => step,
            None => step.with_token_ids(&self.token_ids),
        };
        match share.and_then(|s| s.options.as_ref()) {
            Some(options) => step.with_options(options.typed()),
            None => step,
        }
    }
}
