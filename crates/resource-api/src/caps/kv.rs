//! `kv.cache/1`: a paged cache of keys and values.

use crate::cursor::Bound;
use crate::id::{LabelId, RequestId};
use crate::step::StepContext;
use crate::tensor::{DType, TensorView, TensorViewMut};
use crate::{DeviceColumn, PlanVec, Result, Turning, Typed};
use abi_stable::StableAbi;
use resource_api_macros::capability;

/// Geometry of a built cache. Strides are in elements of `dtype`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct KvFacts {
    /// Layers of the model that write here.
    pub num_layers: u32,
    /// Key/value heads.
    pub num_kv_heads: u32,
    /// Query heads of the model that reads it.
    pub num_qo_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Token slots per page.
    pub page_size: u32,
    /// Pages of the pool, page 0 (the sink, where padding rows write) included.
    pub num_pages: u32,
    /// Longest stream in tokens.
    pub max_seq_len: u32,
    /// Element type.
    pub dtype: DType,
    /// From one page to the next.
    pub page_stride: u64,
    /// From one layer to the next.
    pub layer_stride: u64,
    /// From keys to values.
    pub kv_stride: u64,
    /// From one head to the next.
    pub head_stride: u64,
    /// From one token slot to the next.
    pub slot_stride: u64,
}

impl Typed for KvFacts {
    const TAG: &'static str = "kv.facts";
    const MAJOR: u32 = 1;
}

/// What a cache's `plan` lays out: who reads and writes which pages in this step.
///
/// Rows are (request, label) streams in packed order, grouped by plan label; columns are parallel.
/// The page table is resident per slot: row `r` of the step is row `seat[r]` of the table, and a
/// seat keeps its contents from step to step.
#[repr(C)]
#[derive(Debug, Default, StableAbi)]
pub struct KvPlan {
    /// One per plan label, in order of first appearance in the step.
    pub groups: PlanVec<KvGroup>,
    /// Whose stream each row is.
    pub request: PlanVec<RequestId>,
    /// Seat of each row in `table`.
    pub seat: PlanVec<u32>,
    /// Stream length before this step.
    pub start: PlanVec<u32>,
    /// Tokens this step adds to the stream.
    pub span: PlanVec<u32>,
    /// Stream length that kernels see: `start + span`, and at least 1 for a padding row, which reads
    /// the sink.
    pub len: PlanVec<u32>,
    /// First token of the row in its group's packed tensors.
    pub token_start: PlanVec<u32>,
    /// Tokens in the last page of the row (1..=page size), 0 for an empty stream.
    pub last_page_len: PlanVec<u32>,
    /// Per token of the step, in packed order of groups: the page it is written to.
    pub write_page: PlanVec<u32>,
    /// Per token: the slot in that page.
    pub write_slot: PlanVec<u32>,
    /// Page tables, `table_stride` entries per seat.
    pub table: PlanVec<u32>,
    /// Entries per seat.
    pub table_stride: u32,
    /// The same on the device; empty on the CPU.
    pub device: KvDevicePlan,
}

/// The columns of a [`KvPlan`] that kernels read, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, StableAbi)]
pub struct KvDevicePlan {
    /// Per row, as [`KvPlan::seat`].
    pub seat: DeviceColumn<u32>,
    /// Per row, as [`KvPlan::start`].
    pub start: DeviceColumn<u32>,
    /// Per row, as [`KvPlan::span`].
    pub span: DeviceColumn<u32>,
    /// Per row, as [`KvPlan::len`].
    pub len: DeviceColumn<u32>,
    /// Per row, as [`KvPlan::token_start`].
    pub token_start: DeviceColumn<u32>,
    /// Per token, as [`KvPlan::write_page`].
    pub write_page: DeviceColumn<u32>,
    /// Per token, as [`KvPlan::write_slot`].
    pub write_slot: DeviceColumn<u32>,
    /// As [`KvPlan::table`], with the same stride.
    pub table: DeviceColumn<u32>,
}

impl Typed for KvPlan {
    const TAG: &'static str = "kv.plan";
    const MAJOR: u32 = 1;
}

/// The rows of one plan label.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct KvGroup {
    /// The plan label.
    pub label: LabelId,
    /// First row.
    pub first_row: u32,
    /// Number of rows.
    pub num_rows: u32,
    /// First token in the per-token columns.
    pub first_token: u32,
    /// Number of tokens: leading dimension of the group's q, k, v tensors.
    pub num_tokens: u32,
}

impl KvPlan {
    /// The rows of `label`.
    pub fn group(&self, label: LabelId) -> Option<&KvGroup> {
        self.groups.iter().find(|g| g.label == label)
    }

    /// Pages of row `row`, in stream order.
    pub fn pages(&self, row: usize, page_size: u32) -> &[u32] {
        let first = self.seat[row] as usize * self.table_stride as usize;
        &self.table[first..first + self.len[row].div_ceil(page_size) as usize]
    }
}

/// Options of a cache's share of a step.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct KvStepOptions {
    /// Whether `commit` advances the streams. False keeps lengths: the span is overwritten later.
    pub commit: bool,
    /// Copies made before the step: targets see the source without this step.
    pub pre_forks: PlanVec<Fork>,
    /// Copies made after the step: targets see the source with this step.
    pub post_forks: PlanVec<Fork>,
    /// Plan labels that concatenate several streams' rows.
    pub combined_labels: PlanVec<CombinedLabel>,
    /// Windows to keep after the step.
    pub retention: PlanVec<Retention>,
}

impl Default for KvStepOptions {
    fn default() -> Self {
        Self {
            commit: true,
            pre_forks: PlanVec::default(),
            post_forks: PlanVec::default(),
            combined_labels: PlanVec::default(),
            retention: PlanVec::default(),
        }
    }
}

impl Typed for KvStepOptions {
    const TAG: &'static str = "kv.step";
    const MAJOR: u32 = 1;
}

/// A copy of one stream of a request into another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Fork {
    /// Whose streams.
    pub request_id: RequestId,
    /// Copied from.
    pub from: LabelId,
    /// Copied to.
    pub to: LabelId,
}

/// One member of a combined plan label: rows of `source` are part of `combined`'s group.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct CombinedLabel {
    /// The plan label.
    pub combined: LabelId,
    /// A label whose rows it has; members are laid out label by label in this order.
    pub source: LabelId,
}

/// How much of a stream to keep after a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Retention {
    /// Whose stream.
    pub request_id: RequestId,
    /// Which.
    pub label: LabelId,
    /// Tokens to keep at the end, above 0.
    pub context_budget: u32,
    /// Tokens to keep at the front.
    pub protected_prefix: u32,
}

/// Keys and values of one layer as strided tensors `[pages, slots, kv heads, head dim]`. A row of i8 is
/// `head dim` steps and behind them, as four more elements, how large a step is: an `f32` as the machine stores it.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct KvLayer<'a> {
    /// Keys.
    pub k: TensorView<'a>,
    /// Values.
    pub v: TensorView<'a>,
}

// SAFETY: two checked views; the lifetime is vouched for by the caller of `lift`.
unsafe impl<'a> crate::abi::cross::Cross for KvLayer<'a> {
    type Raw = KvLayer<'static>;
    fn lower(self) -> KvLayer<'static> {
        // SAFETY: only the lifetime changes; `lift` puts it back.
        unsafe { std::mem::transmute::<KvLayer<'a>, KvLayer<'static>>(self) }
    }
    unsafe fn lift(raw: KvLayer<'static>) -> Self {
        raw
    }
}

/// What is done to queries and keys on their way to attention and into the cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct HeadTurn {
    /// How they are turned, after the norm.
    pub turning: Turning,
    /// Weights of the norm of each query head, `[head dim]`; empty for none.
    pub q_norm: DeviceColumn<f32>,
    /// The same of key heads.
    pub k_norm: DeviceColumn<f32>,
    /// Added to the mean square of a head that is normed.
    pub eps: f32,
}

/// Where a step writes the tokens of a group, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct WritePlaces {
    /// Page of each token.
    pub page: DeviceColumn<u32>,
    /// Its slot in that page.
    pub slot: DeviceColumn<u32>,
}
crate::cross_value!(WritePlaces);

/// The cache as models and other resources call it. Calls with a `ctx` belong to that step's forward;
/// they and the questions about streams and pages take no lock of the step methods. What changes a
/// stream outside of a step (`protect_prefix`, `release_oldest`, `correct_len`) may take it: it belongs
/// between steps, and is refused while a step with that stream is in flight.
#[capability(id = "kv.cache", major = 1, path = crate)]
pub trait KvCache: Send + Sync {
    /// Writes this step's keys and values, `[tokens of the label's group, kv heads, head dim]` f32
    /// or the cache's dtype (bf16 too on a device), into the planned slots. Rows past the plan's
    /// tokens are ignored.
    fn write_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()>;

    /// Reads back the slots that `write_kv` of this step writes, into f32 tensors of the same
    /// shape.
    fn read_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()>;

    /// The paged layer, for kernels. A plan says which pages may be read in a step.
    fn layer_view(&self, layer: u32) -> Result<KvLayer<'_>>;

    /// Committed length of a stream; 0 for one that nobody opened.
    fn stream_len(&self, rid: RequestId, label: LabelId) -> Result<u32>;

    /// Whether `tokens` more would fit the stream right now.
    fn has_room(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<bool>;

    /// Free pages, without the sink.
    fn free_pages(&self) -> u64;

    /// Keeps the first `tokens` of a stream out of any later release.
    fn protect_prefix(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<()> {
        let _ = (rid, label, tokens);
        Err(crate::ResourceError::unsupported("this cache cannot protect prefixes"))
    }

    /// Releases whole pages at the front of a stream (past what is protected) so that at most
    /// `keep` tokens stay. Answers how many tokens were released.
    fn release_oldest(&self, rid: RequestId, label: LabelId, keep: u32) -> Result<u32> {
        let _ = (rid, label, keep);
        Err(crate::ResourceError::unsupported("this cache cannot release tokens"))
    }

    /// Sets the committed length back to `len` (speculative rewind).
    fn correct_len(&self, rid: RequestId, label: LabelId, len: u32) -> Result<()> {
        let _ = (rid, label, len);
        Err(crate::ResourceError::unsupported("this cache cannot rewind"))
    }

    /// As norms of heads, [`crate::Positions::apply_qk_layer`] and [`write_kv`](Self::write_kv) one after the
    /// other, in one pass over queries, keys and values of a device: `q` is turned in place, `k` stays as it
    /// is. `false`, with nothing done, from a cache that cannot do that to these tensors.
    #[allow(clippy::too_many_arguments)]
    fn write_turned(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &mut TensorViewMut<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        how: &HeadTurn,
    ) -> Result<bool> {
        let _ = (ctx, layer, label, q, k, v, how);
        Ok(false)
    }

    /// Checks the conservation of pages; an error names the first page that is lost or shared
    /// wrongly. Slow; for tests and tools.
    fn assert_pages_conserved(&self) -> Result<()> {
        Ok(())
    }

    /// Where [`write_kv`](Self::write_kv) would write the label's group, for a model whose kernel writes the rows of
    /// every layer there itself, as [`layer_view`](Self::layer_view) has them: rounded to the cache's type, and
    /// nothing where a page or slot is not there. The columns stay where they are for as long as the step's slot is
    /// used. `None` where writing is more than that.
    fn write_places(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<Option<WritePlaces>> {
        let _ = (ctx, label);
        Ok(None)
    }
}

impl Bound<'_, KvCacheHandle> {
    /// [`KvCache::write_kv`] at the cursors, or at an explicit label or layer.
    pub fn write(
        &self,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        label: Option<LabelId>,
        layer: Option<u32>,
    ) -> Result<()> {
        self.write_kv(self.ctx(), self.layer_or(layer), self.label_or(label), k, v)
    }
}
