//! From a model's tensors to bf16 matrices on a device.
//!
//! Tensors are decoded piece by piece into two pinned buffers: while one is copied to the device, the
//! next piece is decoded into the other.

use std::sync::{Arc, Mutex};

use device::cuda::{Context, DeviceBuffer, Ops, PinnedBuffer, Stream, fill_random};
use device::{BlockType, Parallel, for_each_chunk_mut};
use half::bf16;
use resource_api::EngineLimits;

use super::CudaDecoder;
use super::buffers::Buffers;
use super::layer::{Layer, Weight};
use super::tools::Tools;
use super::whole;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{EMBED, LM_HEAD, Tensor, Weights};

/// Elements of a piece.
const PIECE: usize = 8 << 20;

/// Elements that one task decodes.
const TASK: usize = 64 << 10;

/// Where values come from.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    File(&'a Weights),
    /// Made on the device, for measurements: the numbers are of the usual size, and mean nothing.
    Random,
}

impl CudaDecoder {
    /// Copies a model to the device and makes the buffers for steps of at most `limits`. The file may
    /// be closed afterwards.
    ///
    /// `progress` is called with the bytes of tensors done so far and in all, from this thread.
    ///
    /// # Errors
    /// One line naming the tensor that is missing, of another shape, or too large for the device; or
    /// what the device lacks.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        context: &Arc<Context>,
        limits: &EngineLimits,
        parallel: &dyn Parallel,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let total = weights.total_bytes();
        // A stored output matrix counts even in a model that calls itself tied.
        let is_tied = config.tied_embeddings && weights.get(LM_HEAD).is_err();
        let source = Source::File(weights);
        Loader::new(source, context, parallel, progress, total)?.decoder(config, limits, is_tied)
    }

    /// A model of this shape with random weights, for measurements.
    ///
    /// # Errors
    /// As for [`CudaDecoder::load`].
    pub fn random(
        config: &ModelConfig,
        context: &Arc<Context>,
        limits: &EngineLimits,
    ) -> Result<Self> {
        let nothing = &mut |_, _| ();
        let loader = Loader::new(Source::Random, context, &device::Serial, nothing, 0)?;
        loader.decoder(config, limits, config.tied_embeddings)
    }
}

struct Loader<'a> {
    source: Source<'a>,
    context: &'a Arc<Context>,
    stream: Stream,
    staging: [PinnedBuffer<bf16>; 2],
    parallel: &'a dyn Parallel,
    progress: &'a mut dyn FnMut(usize, usize),
    /// Of tensors: bytes and number.
    done: usize,
    count: u64,
    total: usize,
}

impl<'a> Loader<'a> {
    fn new(
        source: Source<'a>,
        context: &'a Arc<Context>,
        parallel: &'a dyn Parallel,
        progress: &'a mut dyn FnMut(usize, usize),
        total: usize,
    ) -> Result<Self> {
        let len = if matches!(source, Source::File(_)) { PIECE } else { 0 };
        let piece = || PinnedBuffer::zeroed(context, len).map_err(of_device);
        let staging = [piece()?, piece()?];
        let stream = Stream::new(context).map_err(of_device)?;
        Ok(Self { source, context, stream, staging, parallel, progress, done: 0, count: 0, total })
    }

    fn decoder(
        mut self,
        config: &ModelConfig,
        limits: &EngineLimits,
        is_tied: bool,
    ) -> Result<CudaDecoder> {
        let c = config;
        check(c).map_err(|e| Error::config(format!("on a CUDA device, {e}")))?;
        let embed = self.weight(&[(EMBED, c.vocab)], c.hidden)?;
        let layers = (0..c.layers).map(|n| self.layer(c, n)).collect::<Result<Vec<_>>>()?;
        let norm = self.vector(&["norm.weight"], c.hidden)?;
        let head = match is_tied {
            true => None,
            false => Some(self.weight(&[(LM_HEAD, c.vocab)], c.hidden)?),
        };
        self.stream.synchronize().map_err(of_device)?;
        let context = self.context;
        let tools = Tools::new(context).map_err(of_device)?;
        let weights = whole::weights(&layers, &embed, &norm, head.as_ref());
        let whole = whole::load(c, context, &weights).map_err(of_device)?;
        let buffers = Buffers::new(context, c, limits).map_err(|e| {
            let message = format!("buffers for steps of {} tokens: {e}", limits.max_batch_tokens);
            Error::weights(format!("{message}; lower max_batch_tokens or max_batch"))
        })?;
        Ok(CudaDecoder {
            config: c.clone(),
            context: context.clone(),
            embed,
            layers,
            norm,
            head,
            tools,
            whole,
            whole_steps: Default::default(),
            limits: *limits,
            has_graphs: false,
            handles: Default::default(),
            buffers: Mutex::new(buffers),
        })
    }

    fn layer(&mut self, c: &ModelConfig, n: usize) -> Result<Layer> {
        let names = [
            "attn_norm.weight",
            "attn.q.weight",
            "attn.k.weight",
            "attn.v.weight",
            "attn.q.bias",
            "attn.k.bias",
            "attn.v.bias",
            "attn.q_norm.weight",
            "attn.k_norm.weight",
            "attn.o.weight",
            "attn_post_norm.weight",
            "ffn_norm.weight",
            "ffn.gate.weight",
            "ffn.up.weight",
            "ffn.down.weight",
            "ffn_post_norm.weight",
        ]
        .map(|part| format!("layers.{n}.{part}"));
        let [attn_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, rest @ ..] =
            names.each_ref().map(String::as_str);
        let [attn_post_norm, ffn_norm, gate, up, down, ffn_post_norm] = rest;
        let (q_width, kv_width) = (c.q_width(), c.kv_width());
        let mut norm_if =
            |present: bool, name: &str, len| present.then(|| self.vector(&[name], len)).transpose();
        let (q_norm, k_norm) =
            (norm_if(c.qk_norm, q_norm, c.head_dim)?, norm_if(c.qk_norm, k_norm, c.head_dim)?);
        let attn_post_norm = norm_if(c.post_norms, attn_post_norm, c.hidden)?;
        let ffn_post_norm = norm_if(c.post_norms, ffn_post_norm, c.hidden)?;
        let biases = [(q_bias, q_width), (k_bias, kv_width), (v_bias, kv_width)];
        let qkv_bias = c.qkv_bias.then(|| self.joined(&biases)).transpose()?;
        Ok(Layer {
            attn_norm: self.vector(&[attn_norm], c.hidden)?,
            qkv: self.weight(&[(q, q_width), (k, kv_width), (v, kv_width)], c.hidden)?,
            qkv_bias,
            q_norm,
            k_norm,
            o: self.weight(&[(o, c.hidden)], q_width)?,
            attn_post_norm,
            ffn_norm: self.vector(&[ffn_norm], c.hidden)?,
            gate_up: self.weight(&[(gate, c.ffn), (up, c.ffn)], c.hidden)?,
            down: self.weight(&[(down, c.hidden)], c.ffn)?,
            ffn_post_norm,
        })
    }

    /// One matrix of the rows of several tensors.
    fn weight(&mut self, tensors: &[(&str, usize)], inputs: usize) -> Result<Weight> {
        let outputs = tensors.iter().map(|(_, outputs)| outputs).sum();
        let mut values = DeviceBuffer::new(self.context, outputs * inputs)
            .map_err(|e| Error::weights(format!("tensor {}: {e}", tensors[0].0)))?;
        match self.source {
            Source::File(weights) => {
                let mut first = 0;
                for &(name, outputs) in tensors {
                    let tensor = shaped(weights, name, &[outputs, inputs])?;
                    self.copy(name, tensor, inputs, &mut values, first)?;
                    first += outputs * inputs;
                }
            }
            Source::Random => {
                self.count += 1;
                let deviation = 1.0 / (inputs as f32).sqrt();
                fill_random(&self.stream, &mut values, deviation, self.count).map_err(of_device)?;
            }
        }
        Ok(Weight { values, outputs, inputs })
    }

    /// Decodes a tensor into `values[first..]`.
    fn copy(
        &mut self,
        name: &str,
        tensor: &Tensor,
        inputs: usize,
        values: &mut DeviceBuffer<bf16>,
        mut first: usize,
    ) -> Result<()> {
        let failed = |e: device::Error| Error::weights(format!("tensor {name}: {e}"));
        let row_bytes = tensor.dtype.row_bytes(inputs).map_err(failed)?;
        let rows_of_piece = (PIECE / inputs).max(1);
        if inputs > PIECE {
            return Err(Error::weights(format!("tensor {name} has rows of {inputs} elements")));
        }
        for bytes in tensor.bytes.chunks(rows_of_piece * row_bytes) {
            let len = bytes.len() / row_bytes * inputs;
            // The other buffer's copy goes on meanwhile.
            self.staging.swap(0, 1);
            let staged = &mut self.staging[0];
            let piece = &mut staged.as_mut_slice().map_err(failed)?[..len];
            decode(tensor.dtype, bytes, row_bytes, inputs, piece, self.parallel).map_err(failed)?;
            self.stream.upload(staged, 0, values, first, len).map_err(failed)?;
            first += len;
            self.done += bytes.len();
            (self.progress)(self.done, self.total);
        }
        // What is on the device is read from now on.
        tensor.bytes.release();
        Ok(())
    }

    /// A norm's weights.
    fn vector(&mut self, names: &[&str], len: usize) -> Result<DeviceBuffer<f32>> {
        let parts: Vec<(&str, usize)> = names.iter().map(|&name| (name, len)).collect();
        self.joined(&parts)
    }

    /// Vectors one after another.
    fn joined(&mut self, parts: &[(&str, usize)]) -> Result<DeviceBuffer<f32>> {
        let mut values = Vec::new();
        for &(name, len) in parts {
            match self.source {
                Source::File(weights) => {
                    let tensor = shaped(weights, name, &[len])?;
                    let of_tensor = |e: Error| e.within(format_args!("tensor {name}"));
                    values.extend(tensor.to_f32().map_err(of_tensor)?);
                    self.done += tensor.bytes.len();
                    (self.progress)(self.done, self.total);
                }
                Source::Random => values.resize(values.len() + len, 1.0),
            }
        }
        DeviceBuffer::from_slice(self.context, &values).map_err(of_device)
    }
}

fn shaped<'a>(weights: &'a Weights, name: &str, shape: &[usize]) -> Result<&'a Tensor> {
    let tensor = weights.get(name)?;
    if tensor.shape != shape {
        return Err(Error::weights(format!(
            "tensor {name} has shape {:?}, the model's configuration asks for {shape:?}",
            tensor.shape
        )));
    }
    Ok(tensor)
}

/// What the kernels take of a model's numbers, told before seconds are spent on its weights.
fn check(c: &ModelConfig) -> device::Result<()> {
    Ops::check_normed_width("the hidden size", c.hidden)?;
    Ops::check_width("the feed-forward size", c.ffn)?;
    Ops::check_width("the head dim", c.head_dim)
}

/// Decodes whole rows to the nearest bf16.
fn decode(
    dtype: BlockType,
    bytes: &[u8],
    row_bytes: usize,
    inputs: usize,
    out: &mut [bf16],
    parallel: &dyn Parallel,
) -> device::Result<()> {
    let rows = (TASK / inputs).max(1);
    let failed = Mutex::new(Ok(()));
    for_each_chunk_mut(parallel, out, rows * inputs, |task, out| {
        let len = out.len() / inputs * row_bytes;
        let bytes = &bytes[task * rows * row_bytes..][..len];
        if dtype == BlockType::BF16 {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks().0) {
                *to = bf16::from_le_bytes(*from);
            }
            return;
        }
        let mut values = vec![0.0; out.len()];
        match dtype.dequantize(bytes, &mut values) {
            Ok(()) => out.iter_mut().zip(values).for_each(|(to, v)| *to = bf16::from_f32(v)),
            Err(e) => *failed.lock().unwrap_or_else(|p| p.into_inner()) = Err(e),
        }
    });
    failed.into_inner().unwrap_or_else(|p| p.into_inner())
}

fn of_device(e: device::Error) -> Error {
    Error::weights(e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_decoded_to_the_nearest_bf16_whatever_the_tasks() {
        let (rows, inputs) = (70, 1024);
        let values: Vec<f32> = (0..rows * inputs).map(|i| (i as f32 * 0.7311).sin()).collect();
        let f32_bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let want: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        let bf16_bytes: Vec<u8> = want.iter().flat_map(|v| v.to_le_bytes()).collect();
        for (dtype, bytes) in [(BlockType::F32, &f32_bytes), (BlockType::BF16, &bf16_bytes)] {
            let row_bytes = dtype.row_bytes(inputs).unwrap();
            for parallel in [&device::Serial as &dyn Parallel, &device::Pool::new(2)] {
                let mut out = vec![bf16::ZERO; rows * inputs];
                decode(dtype, bytes, row_bytes, inputs, &mut out, parallel).unwrap();
                assert!(out == want, "{dtype}");
            }
        }
    }
}
