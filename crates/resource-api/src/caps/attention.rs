//! `attention/1` and `cross_attention/1`: attention over a paged cache, layer by layer.

use crate::cursor::Bound;
use crate::id::LabelId;
use crate::step::StepContext;
use crate::tensor::{TensorView, TensorViewMut};
use crate::{DeviceColumn, Result, Typed};
use abi_stable::StableAbi;
use resource_api_macros::capability;

/// Options of an attention resource's share of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct AttentionStepOptions {
    /// Whether a token sees only what comes before it in its stream, itself included.
    pub causal: bool,
}

impl Default for AttentionStepOptions {
    fn default() -> Self {
        Self { causal: true }
    }
}

impl Typed for AttentionStepOptions {
    const TAG: &'static str = "attention.step";
    const MAJOR: u32 = 1;
}

/// What [`Attention::run`] does to a group on a device, for a model that does it in one kernel with what lies
/// around it: plain paged attention of the group's rows, over the pages that the columns name.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Attending {
    /// Row of `table` of each row of the group.
    pub seat: DeviceColumn<u32>,
    /// Query tokens of each row.
    pub span: DeviceColumn<u32>,
    /// Tokens of the stream that it reads, this step's included.
    pub len: DeviceColumn<u32>,
    /// Its first token in the group's packed tensors.
    pub token_start: DeviceColumn<u32>,
    /// Pages of the streams, `table_stride` entries a seat.
    pub table: DeviceColumn<u32>,
    /// Entries per seat.
    pub table_stride: u32,
    /// Address of the layer's keys: those of [`crate::KvCache::layer_view`] of the cache that is read.
    pub keys: u64,
    /// Factor of the products of queries and keys, above 0.
    pub scale: f32,
    /// Bound of the products, by `cap * tanh(x / cap)`; 0 for none.
    pub softcap: f32,
    /// Most keys that a token sees, itself included; 0 for all.
    pub window: u32,
    /// Whether a token sees only what comes before it, itself included.
    pub is_causal: bool,
}
crate::cross_value!(Attending);

/// Self-attention over the streams of a step.
#[capability(id = "attention", major = 1, path = crate)]
pub trait Attention: Send + Sync {
    /// `out[t] = softmax(q[t] k^T * scale) v` over the pages of token t's stream. `q` and `out` are
    /// f32 `[tokens of the label's group, query heads, head dim]`; on a device bf16 too, both alike. The layer's keys and values of
    /// this step must have been written. Rows that read an empty stream give 0.
    fn run(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()>;

    /// Copies into `indptr` where each row's tokens begin in the packed tensors, with the total at
    /// the end: rows + 1 entries, whose number it answers. `INVALID` when they do not fit.
    fn qo_indptr(&self, ctx: &StepContext<'_>, label: LabelId, indptr: &mut [u32]) -> Result<u32>;

    /// Copies the hidden state of each row's last token: `[tokens, hidden]` to `[rows, hidden]`,
    /// f32. Rows that add no token are left alone.
    fn select_last_hidden(
        &self,
        ctx: &StepContext<'_>,
        label: LabelId,
        hidden: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()>;

    /// What [`run`](Self::run) does to the label's group in this layer, for a model that does it itself. The
    /// columns stay where they are for as long as the step's slot is used. `None` where it is more than that, or
    /// where sums must have the order that `run` gives them.
    fn attending(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
    ) -> Result<Option<Attending>> {
        let _ = (ctx, layer, label);
        Ok(None)
    }
}

/// Attention of a step's tokens over another stream (a context written once), not causal.
#[capability(id = "cross_attention", major = 1, path = crate)]
pub trait CrossAttention: Send + Sync {
    /// As [`Attention::run`], over the pages of each request's context stream.
    fn run(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()>;
}

impl Bound<'_, AttentionHandle> {
    /// [`Attention::run`] at the cursors, or at an explicit label or layer.
    pub fn attend(
        &self,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
        label: Option<LabelId>,
        layer: Option<u32>,
    ) -> Result<()> {
        self.run(self.ctx(), self.layer_or(layer), self.label_or(label), q, out)
    }
}

impl Bound<'_, CrossAttentionHandle> {
    /// [`CrossAttention::run`] at the cursors, or at an explicit label or layer.
    pub fn attend(
        &self,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
        label: Option<LabelId>,
        layer: Option<u32>,
    ) -> Result<()> {
        self.run(self.ctx(), self.layer_or(layer), self.label_or(label), q, out)
    }
}
