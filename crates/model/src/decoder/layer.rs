//! One decoder layer: its weights, and what it computes around attention.

use device::{Matrix, Parallel, matmul_all};
use resource_api::Result;

use super::buffers::{AttentionBuffers, Buffers};
use super::{device_error, rows};
use crate::config::{Activation, ModelConfig};

/// The weights of a layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    pub(super) q: Projection,
    pub(super) k: Projection,
    pub(super) v: Projection,
    pub(super) o: Matrix,
    pub(super) attn_post_norm: Option<Vec<f32>>,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
    pub(super) ffn_post_norm: Option<Vec<f32>>,
}

/// From the residual stream to the heads of q, k or v.
#[derive(Debug)]
pub(super) struct Projection {
    pub(super) weight: Matrix,
    pub(super) bias: Option<Vec<f32>>,
    /// Norm of each head, after the bias.
    pub(super) head_norm: Option<Vec<f32>>,
}

impl Projection {
    /// `copy` is as long as `x` where there is a norm.
    fn finish(&self, x: &mut [f32], eps: f32, copy: &mut [f32], parallel: &dyn Parallel) {
        if let Some(bias) = &self.bias {
            rows::add_to_each(x, bias, parallel);
        }
        if let Some(norm) = &self.head_norm {
            let copy = &mut copy[..x.len()];
            rows::rms_norm_in_place(x, norm, eps, copy, parallel);
        }
    }
}

impl Layer {
    pub(super) fn packed_bytes(&self) -> usize {
        let Self { q, k, v, o, gate, up, down, .. } = self;
        let all = [&q.weight, &k.weight, &v.weight, o, gate, up, down];
        all.into_iter().map(Matrix::packed_bytes).sum()
    }

    /// From the first `n` rows of the residual stream to their queries, keys and values.
    pub(super) fn project_qkv(
        &self,
        config: &ModelConfig,
        buffers: &mut Buffers,
        n: usize,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let normed = buffers.normed.first_mut(n);
        let hidden = buffers.hidden.first(n);
        rows::rms_norm(hidden, &self.attn_norm, config.rms_eps, normed, parallel);
        let AttentionBuffers { q, k, v, .. } = &mut buffers.attention;
        let (q, k, v) = (q.first_mut(n), k.first_mut(n), v.first_mut(n));
        let products =
            [(&self.q.weight, &mut *q), (&self.k.weight, &mut *k), (&self.v.weight, &mut *v)];
        matmul_all(products, normed, n, &mut buffers.scratch, parallel).map_err(device_error)?;
        let copy = buffers.unnormed.first_mut(n);
        for (projection, x) in [(&self.q, q), (&self.k, k), (&self.v, v)] {
            projection.finish(x, config.rms_eps, copy, parallel);
        }
        Ok(())
    }

    /// Adds the results of attention and of the feed-forward part to the first `n` rows of the
    /// residual stream.
    pub(super) fn finish(
        &self,
        config: &ModelConfig,
        buffers: &mut Buffers,
        n: usize,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let hidden = buffers.hidden.first_mut(n);
        let update = buffers.update.first_mut(n);
        let scratch = &mut buffers.scratch;
        self.o
            .matmul(buffers.attention.out.first(n), n, update, scratch, parallel)
            .map_err(device_error)?;
        let normed = buffers.normed.first_mut(n);
        add_update(hidden, update, &self.attn_post_norm, config.rms_eps, normed, parallel);

        rows::rms_norm(hidden, &self.ffn_norm, config.rms_eps, normed, parallel);
        let (gate, up) = (buffers.gate.first_mut(n), buffers.up.first_mut(n));
        let products = [(&self.gate, &mut *gate), (&self.up, &mut *up)];
        matmul_all(products, normed, n, scratch, parallel).map_err(device_error)?;
        match config.activation {
            Activation::Silu => rows::silu_mul(gate, up, parallel),
            Activation::GeluTanh => rows::gelu_tanh_mul(gate, up, parallel),
        }
        self.down.matmul(gate, n, update, scratch, parallel).map_err(device_error)?;
        add_update(hidden, update, &self.ffn_post_norm, config.rms_eps, normed, parallel);
        Ok(())
    }
}

/// Adds `update` to the residual stream, through `norm` if there is one; `normed` is as long as both.
fn add_update(
    hidden: &mut [f32],
    update: &[f32],
    norm: &Option<Vec<f32>>,
    eps: f32,
    normed: &mut [f32],
    parallel: &dyn Parallel,
) {
    let update = match norm {
        None => update,
        Some(norm) => {
            rows::rms_norm(update, norm, eps, normed, parallel);
            normed
        }
    };
    rows::add(hidden, update, parallel);
}
