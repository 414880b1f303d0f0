//! A decode step of a few requests as one kernel, where the resources say what they would do to it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use device::cuda::{
    Context, DecodeLayer, DecodeRows, DecodeShape, DecodeStep, DecodeWeights, DeviceBuffer,
};
use resource_api::{Attending, Attention, KvCache, Positions, Result, Turning, WritePlaces};

use super::buffers::Buffers;
use super::layer::{Layer, Weight};
use super::{CudaDecoder, Pass};
use crate::config::{Activation, ModelConfig};

/// What attention and positions say of every layer, and the cache of the step.
struct Described {
    attending: Attending,
    turning: Turning,
    places: WritePlaces,
    layer_stride: i64,
}

/// The kernel for a model, where there is one for its shape on this device.
pub(super) fn load(
    config: &ModelConfig,
    context: &Arc<Context>,
    weights: &DecodeWeights<'_>,
) -> device::Result<Option<DecodeStep>> {
    if config.post_norms || config.logit_softcap.is_some() {
        return Ok(None);
    }
    let shape = DecodeShape {
        layers: config.layers as u32,
        hidden: config.hidden as u32,
        heads: config.heads as u32,
        kv_heads: config.kv_heads as u32,
        head_dim: config.head_dim as u32,
        ffn: config.ffn as u32,
        vocab: config.vocab as u32,
        is_gelu: config.activation == Activation::GeluTanh,
        eps: config.rms_eps,
        embed_scale: config.embedding_scale.unwrap_or(1.0),
    };
    DecodeStep::new(context, shape, weights)
}

/// The weights as the kernel takes them.
pub(super) fn weights<'a>(
    layers: &'a [Layer],
    embed: &'a Weight,
    norm: &'a DeviceBuffer<f32>,
    head: Option<&'a Weight>,
) -> DecodeWeights<'a> {
    let layers = layers.iter().map(|layer| DecodeLayer {
        attn_norm: &layer.attn_norm,
        qkv: &layer.qkv.values,
        qkv_bias: layer.qkv_bias.as_ref(),
        q_norm: layer.q_norm.as_ref(),
        k_norm: layer.k_norm.as_ref(),
        o: &layer.o.values,
        ffn_norm: &layer.ffn_norm,
        gate_up: &layer.gate_up.values,
        down: &layer.down.values,
    });
    let (layers, head) = (layers.collect(), head.unwrap_or(embed));
    DecodeWeights { layers, embed: &embed.values, norm, head: &head.values }
}

impl CudaDecoder {
    /// The kernel, if steps of so many tokens may go through it.
    fn whole_for(&self, tokens: usize) -> Option<&DecodeStep> {
        let may = !self.tools.is_batch_invariant();
        self.whole.as_ref().filter(|whole| may && whole.takes(tokens))
    }
}

impl Pass<'_> {
    /// To be called before a step that is not captured, and before a replay.
    pub(super) fn begin_whole(&self) -> Result<()> {
        self.decoder.whole.as_ref().map_or(Ok(()), |whole| Ok(whole.begin(self.stream)?))
    }

    /// From the ids of a step of one token a row, all of them sampled, to their logits, in one kernel. `false`, with
    /// nothing done, where the step or what the resources would do is more than the kernel knows.
    pub(super) fn compute_whole(&self, tokens: usize, buffers: &mut Buffers) -> Result<bool> {
        let decoder = self.decoder;
        if !buffers.layout.is_one_token_each {
            return Ok(false);
        }
        let Some(whole) = decoder.whole_for(tokens) else { return Ok(false) };
        let Some(described) = self.describe(tokens, buffers)? else { return Ok(false) };
        let Described { attending, turning, places, layer_stride } = described;
        let first = self.handles.kv.layer_view(0)?;
        if !whole.takes_cache(&first.k, &first.v, layer_stride) {
            return Ok(false);
        }
        let samples = buffers.sampled_ids.len();
        let (ids, sampled) =
            (buffers.token_ids.view(&[tokens])?, buffers.sampled_ids.view(&[samples])?);
        let rows = DecodeRows {
            ids: &ids,
            sampled: &sampled,
            position: turning.positions,
            phases: turning.phases,
            seat: attending.seat,
            len: attending.len,
            page: places.page,
            slot: places.slot,
            table: attending.table,
            table_stride: attending.table_stride,
            k: &first.k,
            v: &first.v,
            layer_stride,
            scale: attending.scale,
            window: attending.window,
        };
        let CudaDecoder { layers, embed, norm, head, .. } = decoder;
        let weights = weights(layers, embed, norm, head.as_ref());
        let mut logits = buffers.logits.view_mut(&[tokens, decoder.config.vocab])?;
        whole.run(self.stream, &weights, &rows, &mut logits)?;
        decoder.whole_steps.fetch_add(1, Relaxed);
        Ok(true)
    }

    /// What the resources would do, if it is the same in every layer and what the kernel does.
    fn describe(&self, tokens: usize, buffers: &Buffers) -> Result<Option<Described>> {
        let (config, handles, ctx) = (&self.decoder.config, self.handles, self.ctx);
        let [group] = buffers.layout.groups[..] else { return Ok(None) };
        let Some(places) = handles.kv.write_places(ctx, group.label)? else { return Ok(None) };
        let mut all: Option<(Attending, Turning)> = None;
        let mut before = None;
        let mut layer_stride = 0;
        for layer in 0..config.layers as u32 {
            let attending = handles.attention.attending(ctx, layer, group.label)?;
            let turning = handles.positions.turning(ctx, layer, group.label)?;
            let (Some(attending), Some(turning)) = (attending, turning) else { return Ok(None) };
            let keys = handles.kv.layer_view(layer)?.k;
            let address = keys.raw().data as u64;
            let stride = before.map(|before: u64| address.wrapping_sub(before) as i64);
            let is_even = layer < 2 || stride == Some(layer_stride);
            layer_stride = stride.unwrap_or(0);
            before = Some(address);
            let is_same = all.as_ref().is_none_or(|first| is_same(first, &(attending, turning)));
            if !is_even
                || !is_same
                || attending.keys != address
                || !does(config, &attending, &turning)
            {
                return Ok(None);
            }
            all.get_or_insert((attending, turning));
        }
        let Some((attending, turning)) = all else { return Ok(None) };
        let fits = attending.len.len() == tokens && places.page.len() == tokens;
        let layer_stride = layer_stride / size_of::<half::bf16>() as i64;
        Ok(fits.then_some(Described { attending, turning, places, layer_stride }))
    }
}

fn does(config: &ModelConfig, attending: &Attending, turning: &Turning) -> bool {
    attending.softcap == 0.0
        && !turning.is_interleaved
        && 2 * turning.phases.len() == config.head_dim
}

fn is_same(one: &(Attending, Turning), other: &(Attending, Turning)) -> bool {
    let facts = |(a, t): &(Attending, Turning)| {
        let columns = [&a.seat, &a.len, &a.table, &t.positions].map(|c| (c.address(), c.len()));
        (columns, t.phases.address(), a.table_stride, a.scale.to_bits(), a.window, t.is_interleaved)
    };
    facts(one) == facts(other)
}
