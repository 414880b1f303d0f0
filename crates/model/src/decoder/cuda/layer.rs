//! One decoder layer on a device: its weights, and what it computes around attention.

use device::cuda::{DeviceBuffer, Into, Stream};
use half::bf16;
use resource_api::{Result, TensorView};

use super::Tools;
use super::buffers::Rows;
use crate::config::{Activation, ModelConfig};

/// A matrix `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Weight {
    pub(super) values: DeviceBuffer<bf16>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// The weights of a layer. Matrices with the same input are one.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: DeviceBuffer<f32>,
    /// Rows of q, then of k, then of v; biases and norms of heads likewise.
    pub(super) qkv: Weight,
    pub(super) qkv_bias: Option<DeviceBuffer<f32>>,
    pub(super) q_norm: Option<DeviceBuffer<f32>>,
    pub(super) k_norm: Option<DeviceBuffer<f32>>,
    pub(super) o: Weight,
    pub(super) attn_post_norm: Option<DeviceBuffer<f32>>,
    pub(super) ffn_norm: DeviceBuffer<f32>,
    /// Rows of the gate, then of what it lets through.
    pub(super) gate_up: Weight,
    pub(super) down: Weight,
    pub(super) ffn_post_norm: Option<DeviceBuffer<f32>>,
}

impl Weight {
    pub(super) fn view(&self) -> Result<TensorView<'_>> {
        Ok(self.values.view(&[self.outputs, self.inputs])?)
    }

    pub(super) fn bytes(&self) -> usize {
        self.values.len() * size_of::<bf16>()
    }
}

impl Layer {
    pub(super) fn bytes(&self) -> usize {
        [&self.qkv, &self.o, &self.gate_up, &self.down].into_iter().map(Weight::bytes).sum()
    }

    /// From the first `n` rows of the residual stream to their queries, keys and values.
    pub(super) fn project_qkv(
        &self,
        tools: &Tools,
        config: &ModelConfig,
        stream: &Stream,
        rows: &mut Rows,
        n: usize,
    ) -> Result<()> {
        let shape = [n, config.hidden];
        let weight = self.attn_norm.view(&[config.hidden])?;
        let mut normed = rows.normed.view_mut(&shape)?;
        let hidden = rows.hidden.view(&shape)?;
        tools.ops.rms_norm(stream, &hidden, &weight, config.rms_eps, &mut normed)?;
        let mut qkv = rows.qkv.view_mut(&[n, self.qkv.outputs])?;
        tools.blas.matmul(stream, &normed.view(), &self.qkv.view()?, &mut qkv, Into::Set)?;
        if let Some(bias) = &self.qkv_bias {
            tools.ops.add_bias(stream, &mut qkv, &bias.view(&[self.qkv.outputs])?)?;
        }
        let (heads, kv_heads, dim) = (config.heads, config.kv_heads, config.head_dim);
        let parts = [[heads, dim], [kv_heads, dim], [kv_heads, dim]];
        let [mut q, mut k, _] = rows.qkv.parts_mut(0, n, parts)?;
        for (norm, x) in [(&self.q_norm, &mut q), (&self.k_norm, &mut k)] {
            if let Some(norm) = norm {
                tools.ops.head_norm(stream, x, &norm.view(&[dim])?, config.rms_eps)?;
            }
        }
        Ok(())
    }

    /// Adds the results of attention and of the feed-forward part to the first `n` rows of the
    /// residual stream.
    pub(super) fn finish(
        &self,
        tools: &Tools,
        config: &ModelConfig,
        stream: &Stream,
        rows: &mut Rows,
        n: usize,
    ) -> Result<()> {
        let shape = [n, config.hidden];
        let Rows { hidden, normed, attended, gate_up, gated, update, .. } = rows;
        let add = Add { tools, config, stream, n };
        let attended = attended.view(&[n, config.q_width()])?;
        add.product(&attended, &self.o, &self.attn_post_norm, hidden, update)?;

        let weight = self.ffn_norm.view(&[config.hidden])?;
        let mut normed = normed.view_mut(&shape)?;
        tools.ops.rms_norm(stream, &hidden.view(&shape)?, &weight, config.rms_eps, &mut normed)?;
        let mut both = gate_up.view_mut(&[n, 2 * config.ffn])?;
        tools.blas.matmul(stream, &normed.view(), &self.gate_up.view()?, &mut both, Into::Set)?;
        let mut out = gated.view_mut(&[n, config.ffn])?;
        match config.activation {
            Activation::Silu => tools.ops.silu_mul(stream, &both.view(), &mut out)?,
            Activation::GeluTanh => tools.ops.gelu_tanh_mul(stream, &both.view(), &mut out)?,
        }
        add.product(&out.view(), &self.down, &self.ffn_post_norm, hidden, update)
    }
}

/// How results are added to the residual stream.
struct Add<'a> {
    tools: &'a Tools,
    config: &'a ModelConfig,
    stream: &'a Stream,
    n: usize,
}

impl Add<'_> {
    /// `hidden += x Wᵀ`, through `norm` if there is one.
    fn product(
        &self,
        x: &TensorView<'_>,
        weight: &Weight,
        norm: &Option<DeviceBuffer<f32>>,
        hidden: &mut DeviceBuffer<f32>,
        update: &mut DeviceBuffer<bf16>,
    ) -> Result<()> {
        let Self { tools, config, stream, n } = *self;
        let shape = [n, config.hidden];
        let mut hidden = hidden.view_mut(&shape)?;
        let weight = weight.view()?;
        let Some(norm) = norm else {
            return Ok(tools.blas.matmul(stream, x, &weight, &mut hidden, Into::Add)?);
        };
        let mut update = update.view_mut(&shape)?;
        tools.blas.matmul(stream, x, &weight, &mut update, Into::Set)?;
        let norm = norm.view(&[config.hidden])?;
        Ok(tools.ops.add_normed(stream, &mut hidden, &update.view(), &norm, config.rms_eps)?)
    }
}
