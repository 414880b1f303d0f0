//! The configuration from a GGUF file's metadata.

use device::BlockType;

use super::{
    Activation, Architecture, Keys, LocalLayers, ModelConfig, default_head_dim, limit, size,
};
use super::{RopeConfig, RopeLayout, RopeScaling};
use crate::error::{Error, Result, quoted};
use crate::gguf::{Gguf, Metadata, Value};

const ARCHITECTURE: &str = "general.architecture";
const EMBEDDING: &str = "token_embd.weight";
const ROPE_FREQS: &str = "rope_freqs.weight";

impl ModelConfig {
    /// Reads and checks the metadata of a GGUF file; errors name the key.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let meta = gguf.metadata();
        let name = meta.str(ARCHITECTURE)?.ok_or_else(|| missing(ARCHITECTURE))?;
        let architecture = Architecture::from_name(ARCHITECTURE, name, Architecture::IN_GGUF)?;
        let file = File { gguf, meta, architecture };
        file.refuse_what_is_unsupported()?;

        let keys = file.keys();
        let hidden = file.required("embedding_length", limit::WIDTH)?;
        let heads = file.head_count("attention.head_count")?.ok_or_else(|| missing(&keys.heads))?;
        let head_dim = match file.optional("attention.key_length", limit::HEAD_DIM)? {
            Some(stated) => stated,
            None => default_head_dim(hidden, heads, &keys)?,
        };
        if let Some(v) = file.optional("attention.value_length", limit::HEAD_DIM)?
            && v != head_dim
        {
            return Err(Error::config(format!(
                "{} = {v} differs from {} = {head_dim}, which is not supported",
                file.key("attention.value_length"),
                keys.head_dim
            )));
        }
        let eps = meta.f64(&keys.rms_eps)?.ok_or_else(|| missing(&keys.rms_eps))?;
        let layers = file.required("block_count", limit::LAYERS)?;
        let is_gemma = architecture == Architecture::Gemma3;
        let cap = |key| if is_gemma { file.cap(key) } else { Ok(None) };
        Self {
            architecture,
            layers,
            hidden,
            ffn: file.required("feed_forward_length", limit::WIDTH)?,
            heads,
            kv_heads: file.head_count("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            vocab: file.vocab()?,
            rms_eps: eps as f32,
            rope: RopeConfig {
                theta: meta.f64(&keys.rope_theta)?.unwrap_or(if is_gemma { 1e6 } else { 1e4 }),
                dim: file.optional("rope.dimension_count", limit::HEAD_DIM)?.unwrap_or(head_dim),
                layout: match architecture {
                    Architecture::Llama => RopeLayout::Interleaved,
                    Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => {
                        RopeLayout::HalfSplit
                    }
                },
                scaling: file.rope_scaling()?,
            },
            qkv_bias: gguf.tensor("blk.0.attn_q.bias").is_some(),
            qk_norm: is_gemma || architecture == Architecture::Qwen3,
            post_norms: is_gemma,
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            embedding_scale: is_gemma.then_some((hidden as f32).sqrt()),
            attention_scale: attention_scale(architecture, layers, hidden, heads),
            attention_softcap: cap(&keys.attention_softcap)?,
            logit_softcap: cap(&keys.logit_softcap)?,
            local: if is_gemma { file.local_layers(layers)? } else { None },
            // GGUF has no flag: a file without an output matrix is a tied one.
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            max_position: file.required("context_length", limit::POSITION)?,
            bos: meta.u32(&keys.bos)?,
            eos: meta.u32(&keys.eos)?.into_iter().collect(),
            eot: meta.u32(&keys.eot)?,
        }
        .checked(&keys)
    }
}

struct File<'a> {
    gguf: &'a Gguf,
    meta: &'a Metadata,
    architecture: Architecture,
}

impl File<'_> {
    fn key(&self, rest: &str) -> String {
        format!("{}.{rest}", self.architecture.name())
    }

    fn keys(&self) -> Keys {
        Keys {
            hidden: self.key("embedding_length"),
            heads: self.key("attention.head_count"),
            kv_heads: self.key("attention.head_count_kv"),
            head_dim: self.key("attention.key_length"),
            rms_eps: self.key("attention.layer_norm_rms_epsilon"),
            rope_theta: self.key("rope.freq_base"),
            rope_dim: self.key("rope.dimension_count"),
            local_rope_theta: self.key("rope.freq_base_swa"),
            attention_softcap: self.key("attn_logit_softcapping"),
            logit_softcap: self.key("final_logit_softcapping"),
            vocab: self.key("vocab_size"),
            bos: "tokenizer.ggml.bos_token_id".into(),
            eos: "tokenizer.ggml.eos_token_id".into(),
            eot: "tokenizer.ggml.eot_token_id".into(),
        }
    }

    fn optional(&self, rest: &str, max: u64) -> Result<Option<usize>> {
        let key = self.key(rest);
        self.meta.u64(&key)?.map(|v| size(&key, v, max)).transpose()
    }

    fn required(&self, rest: &str, max: u64) -> Result<usize> {
        self.optional(rest, max)?.ok_or_else(|| missing(&self.key(rest)))
    }

    /// A head count, which some files give per layer.
    fn head_count(&self, rest: &str) -> Result<Option<usize>> {
        let key = self.key(rest);
        let Some(Value::Array(array)) = self.meta.get(&key) else {
            return self.optional(rest, limit::HEADS);
        };
        match array.to_u64s().as_deref() {
            Some([first, rest @ ..]) if rest.iter().all(|n| n == first) => {
                size(&key, *first, limit::HEADS).map(Some)
            }
            _ => Err(Error::config(format!(
                "{key} differs between layers or holds no counts, which is not supported"
            ))),
        }
    }

    fn vocab(&self) -> Result<usize> {
        let key = self.key("vocab_size");
        let stated = self.optional("vocab_size", limit::VOCAB)?;
        let rows = self.gguf.tensor(EMBEDDING).and_then(|t| t.dims.get(1)).copied();
        match (stated, rows) {
            (Some(stated), Some(rows)) if stated != rows => Err(Error::config(format!(
                "{key} = {stated}, but tensor {EMBEDDING} has {rows} rows"
            ))),
            (Some(n), _) => Ok(n),
            (None, Some(n)) => {
                size(&format!("the row count of {EMBEDDING}"), n as u64, limit::VOCAB)
            }
            (None, None) => Err(missing(&key)),
        }
    }

    /// A bound of scores or logits; converters write 0 for none.
    fn cap(&self, key: &str) -> Result<Option<f32>> {
        Ok(self.meta.f64(key)?.filter(|&cap| cap != 0.0).map(|cap| cap as f32))
    }

    /// Gemma 3's layers with a window: five of six, unless the file says otherwise. Its converters
    /// leave the pattern and the base of the frequencies out.
    fn local_layers(&self, layers: usize) -> Result<Option<LocalLayers>> {
        let Some(window) = self.optional("attention.sliding_window", limit::POSITION)? else {
            return Ok(None);
        };
        let period = self.optional("attention.sliding_window_pattern", limit::LAYERS)?.unwrap_or(6);
        let theta = self.meta.f64(&self.keys().local_rope_theta)?.unwrap_or(10_000.0);
        let layers = (0..layers).filter(|layer| (layer + 1) % period != 0).collect();
        Ok(Some(LocalLayers { layers, window, rope_theta: theta }))
    }

    fn rope_scaling(&self) -> Result<RopeScaling> {
        if let Some(info) = self.gguf.tensor(ROPE_FREQS) {
            let bytes = self.gguf.tensor_bytes(info).filter(|_| info.dtype == BlockType::F32);
            let Some(bytes) = bytes else {
                return Err(Error::config(format!("{ROPE_FREQS} is {}, not F32", info.dtype)));
            };
            let divisors = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            return Ok(RopeScaling::Divisors(divisors));
        }
        let kind_key = self.key("rope.scaling.type");
        let factor_key = self.key("rope.scaling.factor");
        let old_factor = self.meta.f64(&self.key("rope.scale_linear"))?;
        let factor = self.meta.f64(&factor_key)?.or(old_factor);
        match (self.meta.str(&kind_key)?, factor) {
            (Some("none"), _) | (None, None) => Ok(RopeScaling::None),
            // llama.cpp takes a factor of 0 as "not set".
            (None | Some("linear"), Some(0.0)) => Ok(RopeScaling::None),
            (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some("linear"), None) => Err(missing(&factor_key)),
            (Some(other), _) => Err(Error::config(format!(
                "{kind_key} = {} is not supported; supported: none, linear, and Llama 3 scaling \
                 stored as tensor {ROPE_FREQS}",
                quoted(other)
            ))),
        }
    }

    fn refuse_what_is_unsupported(&self) -> Result<()> {
        let experts = self.key("expert_count");
        if let Some(n @ 1..) = self.meta.u64(&experts)? {
            return Err(Error::config(format!("{experts} = {n}: experts are not supported")));
        }
        if let Some(n @ 2..) = self.meta.u64("split.count")? {
            return Err(Error::config(format!(
                "split.count = {n}: split files are not read; merge them with `llama-gguf-split \
                 --merge`"
            )));
        }
        Ok(())
    }
}

/// The 27B size of Gemma 3 scales by its width per head, which is not the width of its heads. No key
/// says so; the number of layers tells the sizes apart, as in llama.cpp.
fn attention_scale(
    architecture: Architecture,
    layers: usize,
    hidden: usize,
    heads: usize,
) -> Option<f32> {
    let is_27b = architecture == Architecture::Gemma3 && layers == 62;
    is_27b.then(|| (heads as f32 / hidden as f32).sqrt())
}

fn missing(key: &str) -> Error {
    Error::config(format!("key {key} is missing"))
}
