//! The label and layer cursors of resources that a layer stack calls, and the binding of a
//! capability to one step that carries them.

use crate::id::LabelId;
use crate::step::StepContext;
use std::ops::Deref;

/// What a caller sets once for a whole stack instead of passing it to every call.
pub trait AttentionResource {
    /// The label that calls without one use.
    fn default_label(&self) -> LabelId;
    /// Back to label `main`, layer 0.
    fn reset_default_cursors(&mut self);
    /// Sets the label.
    fn set_default_label(&mut self, label: LabelId);
    /// Sets the layer.
    fn set_default_layer_idx(&mut self, layer_idx: u32);
}

/// A capability bound to one step. The cursors live here, not in the resource, so that planning
/// step N+1 cannot disturb step N, and a step that never sets them starts from the defaults.
#[derive(Clone, Debug)]
pub struct Bound<'a, H> {
    handle: &'a H,
    ctx: &'a StepContext<'a>,
    label: LabelId,
    layer: u32,
}

impl<'a, H> Bound<'a, H> {
    /// Binds `handle` to the step of `ctx`.
    pub fn new(handle: &'a H, ctx: &'a StepContext<'a>) -> Self {
        Self { handle, ctx, label: LabelId::MAIN, layer: 0 }
    }

    /// The step.
    pub fn ctx(&self) -> &'a StepContext<'a> {
        self.ctx
    }

    /// The explicit label if there is one, else the cursor.
    pub fn label_or(&self, label: Option<LabelId>) -> LabelId {
        label.unwrap_or(self.label)
    }

    /// The explicit layer if there is one, else the cursor.
    pub fn layer_or(&self, layer: Option<u32>) -> u32 {
        layer.unwrap_or(self.layer)
    }
}

macro_rules! bindable {
    ($($handle:ty),*) => {$(
        impl $handle {
            /// Binds to one step; the cursors live in what this returns.
            pub fn bind<'a>(&'a self, ctx: &'a StepContext<'a>) -> Bound<'a, Self> {
                Bound::new(self, ctx)
            }
        }
    )*};
}
bindable!(crate::KvCacheHandle, crate::AttentionHandle, crate::CrossAttentionHandle);

impl<H> Deref for Bound<'_, H> {
    type Target = H;
    fn deref(&self) -> &H {
        self.handle
    }
}

impl<H> AttentionResource for Bound<'_, H> {
    fn default_label(&self) -> LabelId {
        self.label
    }
    fn reset_default_cursors(&mut self) {
        (self.label, self.layer) = (LabelId::MAIN, 0);
    }
    fn set_default_label(&mut self, label: LabelId) {
        self.label = label;
    }
    fn set_default_layer_idx(&mut self, layer_idx: u32) {
        self.layer = layer_idx;
    }
}
