//! Products and what stands before and behind them: for a few rows one kernel does both.

use std::sync::Arc;

use device::cuda::{Blas, Context, DeviceBuffer, Gemv, GemvInput, GemvInto, Into, Ops, Stream};
use half::bf16;
use resource_api::{DType, Result, TensorView, TensorViewMut};

use super::layer::Weight;
use crate::config::Activation;

/// What computes.
pub(super) struct Tools {
    pub(super) blas: Blas,
    pub(super) ops: Ops,
    few: Gemv,
    /// Whether the number of rows may not decide how they are computed.
    is_batch_invariant: bool,
}

/// Rows of the residual stream that are normed before a product.
#[derive(Clone, Copy)]
pub(super) struct Normed<'a> {
    pub(super) rows: &'a TensorView<'a>,
    pub(super) weight: &'a DeviceBuffer<f32>,
    pub(super) eps: f32,
}

impl Normed<'_> {
    fn shape(&self) -> [usize; 2] {
        let count = |i: usize| self.rows.shape().get(i).map_or(0, |&n| n.max(0) as usize);
        [count(0), count(1)]
    }
}

impl Tools {
    pub(super) fn new(context: &Arc<Context>) -> device::Result<Self> {
        Ok(Self {
            blas: Blas::new(context)?,
            ops: Ops::load(context)?,
            few: Gemv::load(context)?,
            is_batch_invariant: false,
        })
    }

    pub(super) fn set_batch_invariant(&mut self, on: bool) {
        self.blas.set_batch_invariant(on);
        self.is_batch_invariant = on;
    }

    pub(super) fn is_batch_invariant(&self) -> bool {
        self.is_batch_invariant
    }

    /// The kernels for so many rows of `inputs`, where they are few.
    fn few(&self, rows: usize, inputs: usize) -> Option<&Gemv> {
        (!self.is_batch_invariant && self.few.takes(rows, inputs)).then_some(&self.few)
    }

    /// `out = norm(x) Wᵀ + bias`, bf16, or f32 without a bias. `room` has room for the normed rows.
    pub(super) fn product_of_normed(
        &self,
        stream: &Stream,
        x: Normed<'_>,
        room: &mut DeviceBuffer<bf16>,
        weight: &Weight,
        bias: Option<&DeviceBuffer<f32>>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let [rows, width] = x.shape();
        let norm = x.weight.view(&[width])?;
        let bias = bias.map(|bias| bias.view(&[weight.outputs])).transpose()?;
        let weight = weight.view()?;
        if let Some(few) = self.few(rows, width) {
            let input = GemvInput::Normed { rows: x.rows, weight: &norm, eps: x.eps };
            let is_f32 = out.raw().dtype == DType::F32;
            let into = if is_f32 { GemvInto::F32 } else { GemvInto::Bf16 };
            return Ok(few.run(stream, input, &weight, bias.as_ref(), out, into)?);
        }
        let mut normed = room.view_mut(&[rows, width])?;
        self.ops.rms_norm(stream, x.rows, &norm, x.eps, &mut normed)?;
        self.blas.matmul(stream, &normed.view(), &weight, out, Into::Set)?;
        bias.map_or(Ok(()), |bias| Ok(self.ops.add_bias(stream, out, &bias)?))
    }

    /// `out = activation(gate) * up`, of the two halves of `norm(x) Wᵀ`. `room` has room for the normed rows,
    /// `both` for the two halves.
    pub(super) fn gated_product_of_normed(
        &self,
        stream: &Stream,
        x: Normed<'_>,
        (room, both): (&mut DeviceBuffer<bf16>, &mut DeviceBuffer<bf16>),
        weight: &Weight,
        activation: Activation,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let [rows, width] = x.shape();
        if let Some(few) = self.few(rows, width) {
            let norm = x.weight.view(&[width])?;
            let input = GemvInput::Normed { rows: x.rows, weight: &norm, eps: x.eps };
            let into = match activation {
                Activation::Silu => GemvInto::Silu,
                Activation::GeluTanh => GemvInto::GeluTanh,
            };
            return Ok(few.run(stream, input, &weight.view()?, None, out, into)?);
        }
        let mut both = both.view_mut(&[rows, weight.outputs])?;
        self.product_of_normed(stream, x, room, weight, None, &mut both)?;
        match activation {
            Activation::Silu => Ok(self.ops.silu_mul(stream, &both.view(), out)?),
            Activation::GeluTanh => Ok(self.ops.gelu_tanh_mul(stream, &both.view(), out)?),
        }
    }

    /// `out = x Wᵀ` in bf16, or `out += x Wᵀ` in f32.
    pub(super) fn product(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        weight: &Weight,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let is_sum = out.raw().dtype == DType::F32;
        let rows = x.shape().first().map_or(0, |&n| n.max(0) as usize);
        let (inputs, weight) = (weight.inputs, weight.view()?);
        if let Some(few) = self.few(rows, inputs) {
            let into = if is_sum { GemvInto::AddF32 } else { GemvInto::Bf16 };
            return Ok(few.run(stream, GemvInput::Rows(x), &weight, None, out, into)?);
        }
        let into = if is_sum { Into::Add } else { Into::Set };
        Ok(self.blas.matmul(stream, x, &weight, out, into)?)
    }
}
