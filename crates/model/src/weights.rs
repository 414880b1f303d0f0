//! A model's tensors under one set of names, whichever format they are stored in.
//!
//! | name | shape |
//! |---|---|
//! | `embed.weight` | `[vocab, hidden]` |
//! | `layers.N.attn_norm.weight`, `layers.N.ffn_norm.weight` | `[hidden]` |
//! | `layers.N.attn_post_norm.weight`, `.ffn_post_norm.weight` | `[hidden]`; only with `post_norms` |
//! | `layers.N.attn.q.weight` | `[heads * head_dim, hidden]` |
//! | `layers.N.attn.k.weight`, `.v.weight` | `[kv_heads * head_dim, hidden]` |
//! | `layers.N.attn.q.bias`, `.k.bias`, `.v.bias` | one value per row; only with `qkv_bias` |
//! | `layers.N.attn.q_norm.weight`, `.k_norm.weight` | `[head_dim]`; only with `qk_norm` |
//! | `layers.N.attn.o.weight` | `[hidden, heads * head_dim]` |
//! | `layers.N.ffn.gate.weight`, `.up.weight` | `[ffn, hidden]` |
//! | `layers.N.ffn.down.weight` | `[hidden, ffn]` |
//! | `norm.weight` | `[hidden]` |
//! | `lm_head.weight` | `[vocab, hidden]`; absent in tied models |
//!
//! Loading is strict both ways: a tensor that is missing or of another shape is an error, and so is
//! one that the architecture has no place for, since ignoring it would compute something else than
//! the model.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use device::BlockType;

use crate::bytes::SharedBytes;
use crate::config::ModelConfig;
use crate::error::{Error, Result, quoted};
use crate::gguf::Gguf;

mod expected;
mod safetensors;

pub use expected::{ExpectedTensor, expected_tensors};

/// Name of the output matrix.
pub const LM_HEAD: &str = "lm_head.weight";
/// Name of the embedding.
pub const EMBED: &str = "embed.weight";

/// One tensor: `shape` is `[out, in]` or `[n]`, rows one after another in `bytes`.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub dtype: BlockType,
    pub shape: Vec<usize>,
    /// Borrowed from the file's mapping; may start at any address.
    pub bytes: SharedBytes,
}

impl Tensor {
    /// All values as f32, in order. For small tensors such as norms: it copies.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.shape.iter().product()];
        self.dtype.dequantize(&self.bytes, &mut out).map_err(|e| Error::weights(e.to_string()))?;
        Ok(out)
    }
}

/// Where tensors come from: a format's own names, shapes as here.
type Stored = HashMap<String, Tensor>;

/// All tensors of a model, checked against its configuration.
#[derive(Debug)]
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
    tied: bool,
}

impl Weights {
    /// The tensors of a GGUF file.
    pub fn from_gguf(gguf: &Gguf, config: &ModelConfig) -> Result<Self> {
        let mut stored = Stored::new();
        for info in gguf.tensors() {
            let bytes = gguf.tensor_bytes(info).ok_or_else(|| {
                Error::weights(format!("tensor {} is not within the file", quoted(&info.name)))
            })?;
            let shape = info.dims.iter().rev().copied().collect();
            stored.insert(info.name.clone(), Tensor { dtype: info.dtype, shape, bytes });
        }
        // Part of the configuration: see `RopeScaling::Divisors`.
        stored.remove("rope_freqs.weight");
        Self::take(stored, config, |e| &e.gguf)
    }

    /// The tensors of a Hugging Face directory: `model.safetensors`, or the files that
    /// `model.safetensors.index.json` lists.
    pub fn from_safetensors(dir: &Path, config: &ModelConfig) -> Result<Self> {
        let mut stored = safetensors::read_dir(dir)?;
        // Old conversions stored the rope frequencies, which follow from the configuration.
        stored.retain(|name, _| !name.ends_with("rotary_emb.inv_freq"));
        Self::take(stored, config, |e| &e.hf).map_err(|e| e.within(dir.display()))
    }

    fn take(
        mut stored: Stored,
        config: &ModelConfig,
        name_of: impl Fn(&ExpectedTensor) -> &String,
    ) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for expected in expected_tensors(config) {
            let name = name_of(&expected);
            match stored.remove(name) {
                Some(tensor) if tensor.shape == expected.shape => {
                    tensors.insert(expected.name, tensor);
                }
                Some(tensor) => {
                    return Err(Error::weights(format!(
                        "tensor {name} has shape {:?}, the model's configuration asks for {:?}",
                        tensor.shape, expected.shape
                    )));
                }
                None if expected.name == LM_HEAD && config.tied_embeddings => {}
                None if expected.name == LM_HEAD => {
                    return Err(Error::weights(format!(
                        "tensor {name} is missing, and tie_word_embeddings is not true: without \
                         either the model has no output matrix"
                    )));
                }
                None => return Err(Error::weights(format!("tensor {name} is missing"))),
            }
        }
        if let Some(extra) = stored.keys().min() {
            return Err(Error::weights(format!(
                "tensor {} has no place in a {} model; {} such tensors in all",
                quoted(extra),
                config.architecture.name(),
                stored.len()
            )));
        }
        Ok(Self { tensors, tied: config.tied_embeddings })
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::weights(format!("the model has no tensor {}", quoted(name))))
    }

    /// The output matrix. A stored one always counts, even where the configuration says that it is
    /// tied to the embedding: files that do both exist, and then the two are equal as a rule, while
    /// fine-tuned ones that differ were trained with the stored one.
    pub fn lm_head(&self) -> Result<&Tensor> {
        match self.tensors.get(LM_HEAD) {
            Some(stored) => Ok(stored),
            None if self.tied => self.get(EMBED),
            None => self.get(LM_HEAD),
        }
    }

    /// All tensors by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(|t| t.bytes.len()).sum()
    }
}
