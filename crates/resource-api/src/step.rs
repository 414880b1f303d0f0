//! What one step of a node is: its segments, its context, its slot.
//!
//! [`ResourceStep`] and [`StepContext`] cross by reference. They start with their own size and
//! grow at the end only: an accessor for a column that came later answers with the default when
//! the other side is older.

use crate::id::{LabelId, NodeId, RequestId, StepId, WalkId};
use crate::typed::{Typed, TypedRef};
use crate::{ResourceError, Result};
use abi_stable::StableAbi;

/// A borrowed column. Built by the owner of the step, read through the accessors below.
#[repr(C)]
#[derive(StableAbi)]
pub(crate) struct Column<T> {
    ptr: *const T,
    len: usize,
}

impl<T> Clone for Column<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Column<T> {}

impl<T> Column<T> {
    const EMPTY: Self = Self { ptr: std::ptr::NonNull::<T>::dangling().as_ptr(), len: 0 };

    fn of(slice: &[T]) -> Self {
        Self { ptr: slice.as_ptr(), len: slice.len() }
    }

    fn get(&self) -> &[T] {
        // SAFETY: made from a slice by `of`; whoever built the step keeps that slice in place
        // while a reference to the step exists (the builders below borrow it).
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

/// One step's addition to one stream. A span of 0 reads the stream without extending it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose stream.
    pub request_id: RequestId,
    /// Which stream of the request.
    pub label: LabelId,
    /// How many tokens this step adds.
    pub span: u32,
}

/// The ordered segments of a step, as columns. This order *is* the packed token layout.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// Request of each segment.
    pub request: &'a [RequestId],
    /// Label of each segment.
    pub label: &'a [LabelId],
    /// Tokens each segment adds.
    pub span: &'a [u32],
}

impl<'a> Segments<'a> {
    /// Number of segments.
    pub fn len(&self) -> usize {
        self.request.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.request.is_empty()
    }

    /// Tokens of all segments together.
    pub fn num_tokens(&self) -> usize {
        self.span.iter().map(|&s| s as usize).sum()
    }

    /// One after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Segment> + use<'a> {
        let Segments { request, label, span } = *self;
        (0..request.len()).map(move |i| Segment {
            request_id: request[i],
            label: label[i],
            span: span[i],
        })
    }
}

/// One resource's share of a step: the segments (usually the batch's), and options of its kind.
#[repr(C)]
#[derive(StableAbi)]
pub struct ResourceStep<'a> {
    size: u32,
    request: Column<RequestId>,
    label: Column<LabelId>,
    span: Column<u32>,
    token_ids: Column<u32>,
    options: TypedRef<'a>,
}

// SAFETY: columns are shared borrows of plain data; see `Column::get`.
unsafe impl Send for ResourceStep<'_> {}
// SAFETY: as above.
unsafe impl Sync for ResourceStep<'_> {}

impl<'a> ResourceStep<'a> {
    /// A step over these segments. Panics when the columns differ in length (a mistake of the
    /// caller: the host builds them side by side).
    pub fn new(segments: Segments<'a>) -> Self {
        let n = segments.request.len();
        assert!(n == segments.label.len() && n == segments.span.len(), "ragged step columns");
        Self {
            size: std::mem::size_of::<Self>() as u32,
            request: Column::of(segments.request),
            label: Column::of(segments.label),
            span: Column::of(segments.span),
            token_ids: Column::EMPTY,
            options: TypedRef::NONE,
        }
    }

    /// Adds the ids of the tokens that the segments add, packed in segment order.
    pub fn with_token_ids(mut self, token_ids: &'a [u32]) -> Self {
        self.token_ids = Column::of(token_ids);
        self
    }

    /// Adds options of the resource's kind.
    pub fn with_options(mut self, options: TypedRef<'a>) -> Self {
        self.options = options;
        self
    }

    /// The ordered segments.
    pub fn segments(&self) -> Segments<'_> {
        Segments { request: self.request.get(), label: self.label.get(), span: self.span.get() }
    }

    /// Ids of the tokens that the segments add, packed; empty when the inputs are not token ids.
    pub fn token_ids(&self) -> &[u32] {
        self.token_ids.get()
    }

    /// Whether the share has options, of whatever type.
    pub fn has_options(&self) -> bool {
        !self.options.is_none()
    }

    /// Options of the resource's kind; `None` means its defaults.
    ///
    /// # Errors
    /// `INCOMPATIBLE` when the model declared options of another kind.
    pub fn options<T: Typed>(&self) -> Result<Option<&'a T>> {
        match self.options.is_none() {
            true => Ok(None),
            false => self.options.open().map(Some),
        }
    }
}

/// Shape of a captured graph.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct BucketKey {
    /// The walk it was captured for.
    pub graph_walk: WalkId,
    /// Rows.
    pub bs: u32,
    /// Tokens; equal to `bs` for a decode graph.
    pub num_tokens: u32,
    /// Whatever else distinguishes captures of one shape; 0 when nothing does.
    pub cg_key_info: u64,
}

/// The right to use a slot (a set of plan buffers) for one step. Every step has one, eager ones too.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct SlotLease {
    /// Which buffer set; small and dense.
    pub slot: u32,
    /// Counts the uses of the slot.
    pub generation: u32,
    /// Captured shape that the step replays.
    pub bucket: BucketKey,
    /// Whether `bucket` applies; an eager step has none.
    pub has_bucket: bool,
}

impl SlotLease {
    /// A lease of an eager step.
    pub fn eager(slot: u32, generation: u32) -> Self {
        let bucket = BucketKey { graph_walk: WalkId(0), bs: 0, num_tokens: 0, cg_key_info: 0 };
        Self { slot, generation, bucket, has_bucket: false }
    }

    /// The captured shape, if the step replays one.
    pub fn bucket(&self) -> Option<&BucketKey> {
        self.has_bucket.then_some(&self.bucket)
    }
}

/// Key of a buffer that a captured graph reads: one per bucket, slot and label.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct CGSlotKey {
    /// Captured shape.
    pub bucket: BucketKey,
    /// Buffer set.
    pub slot: u32,
    /// Plan label.
    pub label: LabelId,
}

/// One slot that a runner is about to capture into.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct CGSlotSpec {
    /// Captured shape.
    pub bucket: BucketKey,
    /// Buffer set.
    pub slot: u32,
    /// What the capture covers.
    pub config: GraphConfig,
    /// Which of several capture configurations; [`CGSlotSpec::NO_CONFIG_IDX`] when there is one.
    pub config_idx: u32,
}

/// What a captured graph covers. An open set: an unknown number is treated like a piecewise one.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct GraphConfig(pub u32);

impl GraphConfig {
    /// The whole forward pass: the seed's `CudaGraphConfig`.
    pub const FULL: GraphConfig = GraphConfig(0);
    /// One region of it: the seed's `PiecewiseCudaGraphConfig`.
    pub const PIECEWISE: GraphConfig = GraphConfig(1);
}

impl CGSlotSpec {
    /// There is only one capture configuration.
    pub const NO_CONFIG_IDX: u32 = u32::MAX;

    /// Rows of the capture.
    pub fn bs(&self) -> u32 {
        self.bucket.bs
    }

    /// Tokens of the capture.
    pub fn num_tokens(&self) -> u32 {
        self.bucket.num_tokens
    }
}

/// Everything about a step that is the same for all resources.
#[repr(C)]
#[derive(StableAbi)]
pub struct StepContext<'a> {
    size: u32,
    flags: u32,
    step: StepId,
    epoch: u64,
    node: NodeId,
    graph_walk: WalkId,
    lease: SlotLease,
    request_ids: Column<RequestId>,
    padded_request_ids: Column<RequestId>,
    plan_results: Column<TypedRef<'a>>,
    stream: u64,
}

// SAFETY: columns are shared borrows of plain data; see `Column::get`.
unsafe impl Send for StepContext<'_> {}
// SAFETY: as above.
unsafe impl Sync for StepContext<'_> {}

const CAPTURE: u32 = 1;
const PREPLAN: u32 = 2;

/// The fields a host fills in to make a [`StepContext`].
#[derive(Clone, Copy, Debug)]
pub struct StepHead {
    /// Identity of the step.
    pub step: StepId,
    /// Position in the order of steps of this engine; memory freed in a step is reusable once its
    /// epoch has completed.
    pub epoch: u64,
    /// The node that runs.
    pub node: NodeId,
    /// The walk it runs in.
    pub graph_walk: WalkId,
    /// The buffer set it uses.
    pub lease: SlotLease,
    /// A graph is being captured: no allocation, free or synchronisation on the device.
    pub capture: bool,
    /// The step is only staged: `admit` and `plan` are called ahead of time.
    pub is_preplan: bool,
    /// The device stream that the step's work is put on, as the driver's handle (`CUstream`); 0 on
    /// the CPU.
    pub stream: u64,
}

impl<'a> StepContext<'a> {
    /// A context. `plan_results` holds one entry per resource of the engine, by its index;
    /// entries that are not filed yet are [`TypedRef::NONE`].
    pub fn new(
        head: StepHead,
        request_ids: &'a [RequestId],
        padded_request_ids: &'a [RequestId],
        plan_results: &'a [TypedRef<'a>],
    ) -> Self {
        Self {
            size: std::mem::size_of::<Self>() as u32,
            flags: if head.capture { CAPTURE } else { 0 }
                | if head.is_preplan { PREPLAN } else { 0 },
            step: head.step,
            epoch: head.epoch,
            node: head.node,
            graph_walk: head.graph_walk,
            lease: head.lease,
            request_ids: Column::of(request_ids),
            padded_request_ids: Column::of(padded_request_ids),
            plan_results: Column::of(plan_results),
            stream: head.stream,
        }
    }

    /// Identity of the step.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// Position in the order of steps.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The node that runs.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The walk it runs in.
    pub fn graph_walk(&self) -> WalkId {
        self.graph_walk
    }

    /// The buffer set of this step.
    pub fn slot_lease(&self) -> &SlotLease {
        &self.lease
    }

    /// Index of the buffer set.
    pub fn slot(&self) -> u32 {
        self.lease.slot
    }

    /// Whether a graph is being captured.
    pub fn capture(&self) -> bool {
        self.flags & CAPTURE != 0
    }

    /// Whether the step is only staged.
    pub fn is_preplan(&self) -> bool {
        self.flags & PREPLAN != 0
    }

    /// The device stream of the step, as the driver's handle (`CUstream`); 0 on the CPU. Everything
    /// that a resource does on the device for this step, its plan's uploads included, is put on this
    /// stream and nothing waits for it, unless the answer is a value of the host's.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// The requests of the step, without padding.
    pub fn request_ids(&self) -> &[RequestId] {
        self.request_ids.get()
    }

    /// The requests including padding rows; equal to `request_ids` unless a replay padded it.
    pub fn padded_request_ids(&self) -> &[RequestId] {
        self.padded_request_ids.get()
    }

    /// Whether `rid` only pads a captured batch.
    pub fn is_padding_row(&self, rid: RequestId) -> bool {
        rid.is_padding()
    }

    /// The plan that the resource with this index made for this step.
    ///
    /// # Errors
    /// `WRONG_STATE` when that resource has not planned this step; `INCOMPATIBLE` when its plan is
    /// of another type.
    pub fn plan_result<T: Typed>(&self, resource: u32) -> Result<&T> {
        match self.plan_results.get().get(resource as usize) {
            Some(plan) if !plan.is_none() => plan.open(),
            _ => Err(ResourceError::wrong_state(format!(
                "resource {resource} has no {} for this step: it is not part of the step, or not \
                 planned yet (is it in depends_on?)",
                T::TAG
            ))),
        }
    }
}

impl std::fmt::Debug for StepContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepContext")
            .field("step", &self.step)
            .field("node", &self.node)
            .field("graph_walk", &self.graph_walk)
            .field("lease", &self.lease)
            .field("capture", &self.capture())
            .field("is_preplan", &self.is_preplan())
            .field("request_ids", &self.request_ids())
            .finish_non_exhaustive()
    }
}
