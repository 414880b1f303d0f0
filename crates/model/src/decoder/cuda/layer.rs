//! One decoder layer on a device: its weights, and what it computes around attention.

use device::cuda::{DeviceBuffer, Stream};
use half::bf16;
use resource_api::{DeviceColumn, HeadTurn, Result, TensorView, TensorViewMut, Turning};

use super::buffers::Rows;
use super::tools::{Normed, Tools};
use crate::config::ModelConfig;

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
        let hidden = rows.hidden.view(&[n, config.hidden])?;
        let x = Normed { rows: &hidden, weight: &self.attn_norm, eps: config.rms_eps };
        let mut qkv = rows.qkv.view_mut(&[n, self.qkv.outputs])?;
        let bias = self.qkv_bias.as_ref();
        tools.product_of_normed(stream, x, &mut rows.normed, &self.qkv, bias, &mut qkv)
    }

    /// What is done to queries and keys before attention, for a cache that does it on the way in.
    pub(super) fn head_turn(&self, turning: Turning, eps: f32) -> HeadTurn {
        let weights = |norm: &Option<DeviceBuffer<f32>>| {
            norm.as_ref().map_or(DeviceColumn::EMPTY, DeviceBuffer::column)
        };
        HeadTurn { turning, q_norm: weights(&self.q_norm), k_norm: weights(&self.k_norm), eps }
    }

    /// Norms queries and keys head by head, where the model does.
    pub(super) fn norm_heads(
        &self,
        tools: &Tools,
        config: &ModelConfig,
        stream: &Stream,
        [q, k]: [&mut TensorViewMut<'_>; 2],
    ) -> Result<()> {
        for (norm, x) in [(&self.q_norm, q), (&self.k_norm, k)] {
            if let Some(norm) = norm {
                let weight = norm.view(&[config.head_dim])?;
                tools.ops.head_norm(stream, x, &weight, config.rms_eps)?;
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
        let Rows { hidden, normed, attended, gate_up, gated, update, .. } = rows;
        let add = Add { tools, config, stream, n };
        let attended = attended.view(&[n, config.q_width()])?;
        add.product(&attended, &self.o, &self.attn_post_norm, hidden, update)?;

        let mut out = gated.view_mut(&[n, config.ffn])?;
        let rows = hidden.view(&[n, config.hidden])?;
        let x = Normed { rows: &rows, weight: &self.ffn_norm, eps: config.rms_eps };
        let (room, weight) = ((normed, gate_up), &self.gate_up);
        tools.gated_product_of_normed(stream, x, room, weight, config.activation, &mut out)?;
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
        let Some(norm) = norm else { return tools.product(stream, x, weight, &mut hidden) };
        let mut update = update.view_mut(&shape)?;
        tools.product(stream, x, weight, &mut update)?;
        let norm = norm.view(&[config.hidden])?;
        Ok(tools.ops.add_normed(stream, &mut hidden, &update.view(), &norm, config.rms_eps)?)
    }
}
