//! From a model's tensors to packed matrices.

use std::sync::Mutex;

use device::{Matrix, PackOptions, Parallel};

use super::Decoder;
use super::buffers::Buffers;
use super::layer::{Layer, Projection};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{EMBED, LM_HEAD, Tensor, Weights};

impl Decoder {
    /// Packs the weights of a model. They are copied: the file may be closed afterwards.
    ///
    /// `progress` is called with the bytes of tensors done so far and in all, from this thread.
    ///
    /// # Errors
    /// One line naming the tensor that is missing, of another shape, or too large for memory.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        options: PackOptions,
        parallel: &dyn Parallel,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let total = weights.total_bytes();
        let mut loader = Loader { weights, options, parallel, progress, done: 0, total };
        let (c, hidden) = (config, config.hidden);
        let embed = loader.matrix(EMBED, c.vocab, hidden)?;
        let layers = (0..c.layers).map(|n| loader.layer(c, n)).collect::<Result<_>>()?;
        let norm = loader.vector("norm.weight", hidden)?;
        // A stored output matrix counts even in a model that calls itself tied.
        let is_tied = c.tied_embeddings && weights.get(LM_HEAD).is_err();
        let head = match is_tied {
            true => None,
            false => Some(loader.matrix(LM_HEAD, c.vocab, hidden)?),
        };
        Ok(Self {
            embed,
            layers,
            norm,
            head,
            handles: Default::default(),
            buffers: Mutex::new(Buffers::new(config)),
            config: config.clone(),
        })
    }
}

struct Loader<'a> {
    weights: &'a Weights,
    options: PackOptions,
    parallel: &'a dyn Parallel,
    progress: &'a mut dyn FnMut(usize, usize),
    done: usize,
    total: usize,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, c: &ModelConfig, n: usize) -> Result<Layer> {
        let name = |part: &str| format!("layers.{n}.{part}");
        let (q, kv) = (c.q_width(), c.kv_width());
        let mut post_norm =
            |part: &str| c.post_norms.then(|| self.vector(&name(part), c.hidden)).transpose();
        let attn_post_norm = post_norm("attn_post_norm.weight")?;
        let ffn_post_norm = post_norm("ffn_post_norm.weight")?;
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm.weight"), c.hidden)?,
            q: self.projection(c, &name("attn.q"), q, c.qk_norm)?,
            k: self.projection(c, &name("attn.k"), kv, c.qk_norm)?,
            v: self.projection(c, &name("attn.v"), kv, false)?,
            o: self.matrix(&name("attn.o.weight"), c.hidden, q)?,
            attn_post_norm,
            ffn_norm: self.vector(&name("ffn_norm.weight"), c.hidden)?,
            gate: self.matrix(&name("ffn.gate.weight"), c.ffn, c.hidden)?,
            up: self.matrix(&name("ffn.up.weight"), c.ffn, c.hidden)?,
            down: self.matrix(&name("ffn.down.weight"), c.hidden, c.ffn)?,
            ffn_post_norm,
        })
    }

    fn projection(
        &mut self,
        c: &ModelConfig,
        name: &str,
        outputs: usize,
        has_norm: bool,
    ) -> Result<Projection> {
        let mut vector_if =
            |present: bool, name: String, len| present.then(|| self.vector(&name, len)).transpose();
        let bias = vector_if(c.qkv_bias, format!("{name}.bias"), outputs)?;
        let head_norm = vector_if(has_norm, format!("{name}_norm.weight"), c.head_dim)?;
        let weight = self.matrix(&format!("{name}.weight"), outputs, c.hidden)?;
        Ok(Projection { weight, bias, head_norm })
    }

    fn matrix(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Matrix> {
        let tensor = self.tensor(name, &[outputs, inputs])?;
        let (bytes, parallel) = (&tensor.bytes, self.parallel);
        let packed = Matrix::pack(tensor.dtype, outputs, inputs, bytes, self.options, parallel);
        // Its packed copy is read from now on.
        bytes.release();
        self.count(tensor);
        packed.map_err(|e| Error::weights(format!("tensor {name}: {e}")))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name, &[len])?;
        self.count(tensor);
        tensor.to_f32().map_err(|e| e.within(format_args!("tensor {name}")))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<&'a Tensor> {
        let tensor = self.weights.get(name)?;
        if tensor.shape != shape {
            return Err(Error::weights(format!(
                "tensor {name} has shape {:?}, the model's configuration asks for {shape:?}",
                tensor.shape
            )));
        }
        Ok(tensor)
    }

    fn count(&mut self, tensor: &Tensor) {
        self.done += tensor.bytes.len();
        (self.progress)(self.done, self.total);
    }
}
