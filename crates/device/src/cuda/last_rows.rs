//! The last token of each row of a step.

use std::sync::Arc;

use resource_api::{DeviceColumn, TensorView, TensorViewMut};

use super::context::Context;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::{contiguous, refuse};
use crate::error::Result;

/// Picks the last token of each row out of the packed tokens of a step.
#[derive(Debug)]
pub struct LastRows {
    context: Arc<Context>,
    kernel: Kernel,
}

impl LastRows {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As for [`Module::load`].
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, &Instance::of("elementwise.cu"))?;
        Ok(Self { context: context.clone(), kernel: module.kernel("gather_last")? })
    }

    /// `out[r] = x[token_start[r] + span[r] - 1]`, later: `x` `[tokens, width]`, `out` `[rows, width]` of
    /// the same type, contiguous, a row a multiple of 16 bytes. Rows of span 0, and those whose last
    /// token `x` does not have, leave `out` alone; so are rows past the columns.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) for tensors that do not fit together.
    pub fn pick(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        token_start: DeviceColumn<u32>,
        span: DeviceColumn<u32>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let (x, out) = (x.raw(), out.raw());
        let from = contiguous("hidden states", &self.context, x, x.dtype)?;
        let to = contiguous("last hidden states", &self.context, out, x.dtype)?;
        let (&[tokens, width], &[rows, out_width]) = (x.shape(), out.shape()) else {
            let shapes = format!("{:?} and {:?}, need rows", x.shape(), out.shape());
            return refuse("hidden states", shapes);
        };
        let bytes = width as usize * x.dtype.size();
        let is_aligned = [from, to, bytes as u64].iter().all(|n| n.is_multiple_of(16));
        if width != out_width || !is_aligned {
            let what = format!(
                "rows of {width} {} at {from:#x} to rows of {out_width} at {to:#x}, need equal \
                 multiples of 16 bytes",
                x.dtype.name()
            );
            return refuse("hidden states", what);
        }
        let count = token_start.len().min(span.len()).min(rows as usize);
        let mut args = Args::default();
        args.push(from).push(to).push(token_start.address()).push(span.address());
        args.push(tokens as u32).push(count as u32).push(bytes as u64);
        // SAFETY: the signature is (const u8*, u8*, const u32*, const u32*, u32, u32, u64); the kernel
        // compares tokens with the `tokens` that there are, and `out` and both columns have `count` rows.
        unsafe { self.kernel.launch(stream, Grid::for_items(count * bytes / 16, 256), &args) }
    }
}
