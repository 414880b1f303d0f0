//! The numbers that describe a model, whichever file they came from.

use crate::error::{Error, Result};

mod gguf;
mod hf;
mod preset;
mod rope;

pub use rope::{RopeConfig, RopeLayout, RopeScaling};

/// Families of decoder that are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 1 to 3 and whatever is built the same way, SmolLM2 among them.
    Llama,
    /// Qwen 2 and 2.5: Llama with biases on q, k and v.
    Qwen2,
    /// Qwen 3: Llama with an RMS norm on each head of q and k.
    Qwen3,
    /// Gemma 3, text: norms after attention and feed-forward too, GELU, and layers that see only a
    /// window. Read from GGUF files.
    Gemma3,
}

impl Architecture {
    /// Those that GGUF files are read of.
    const IN_GGUF: &[Self] = &[Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3];
    /// Those that Hugging Face directories are read of. Gemma 3 stores its norms as differences
    /// from 1 there.
    const IN_HF: &[Self] = &[Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The name in GGUF's `general.architecture` and in Hugging Face's `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    fn from_name(key: &str, name: &str, known: &[Self]) -> Result<Self> {
        known.iter().copied().find(|a| a.name() == name).ok_or_else(|| {
            let known: Vec<_> = known.iter().map(|a| a.name()).collect();
            let known = known.join(", ");
            let name = crate::error::quoted(name);
            Error::config(format!("{key} = {name} is not supported; supported: {known}"))
        })
    }
}

/// A decoder's dimensions and constants. Every value has been checked: no zero where something is
/// divided, no size whose products overflow.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of one head, even. `heads * head_dim` need not equal `hidden`.
    pub head_dim: usize,
    /// Rows of the embedding, which may be more than the tokenizer has tokens.
    pub vocab: usize,
    pub rms_eps: f32,
    pub rope: RopeConfig,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether each head of q and k goes through an RMS norm before rope.
    pub qk_norm: bool,
    /// Whether what attention and the feed-forward part give goes through an RMS norm before it is
    /// added to the residual stream.
    pub post_norms: bool,
    /// What the gate of the feed-forward part goes through.
    pub activation: Activation,
    /// What rows of the embedding are multiplied with on their way in.
    pub embedding_scale: Option<f32>,
    /// Factor of attention's scores; `1 / sqrt(head_dim)` when absent.
    pub attention_scale: Option<f32>,
    /// Bound of attention's scores: `cap * tanh(score / cap)`.
    pub attention_softcap: Option<f32>,
    /// Bound of the logits, in the same form.
    pub logit_softcap: Option<f32>,
    /// Layers that see only the tokens just before, if the model has such layers.
    pub local: Option<LocalLayers>,
    /// Whether the output matrix is the embedding. What the file says; when it says so and stores an
    /// output matrix all the same, [`Weights::lm_head`](crate::Weights::lm_head) gives the stored one.
    pub tied_embeddings: bool,
    /// Longest sequence the model was made for.
    pub max_position: usize,
    pub bos: Option<u32>,
    /// Ids that end a generation according to the model's files. The tokenizer may know more:
    /// [`Tokenizer::eos_ids`](crate::Tokenizer::eos_ids).
    pub eos: Vec<u32>,
    /// End of turn, where the file names it apart from `eos`.
    pub eot: Option<u32>,
}

/// The function of a feed-forward gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its form with tanh.
    GeluTanh,
}

/// Layers whose tokens see a window instead of everything before them.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalLayers {
    /// Which ones, ascending.
    pub layers: Vec<usize>,
    /// Tokens that a token sees there, itself included.
    pub window: usize,
    /// Base of their rope frequencies, to which no scaling applies.
    pub rope_theta: f64,
}

/// Largest accepted sizes. Far above any model; their products stay within 64 bits.
mod limit {
    pub const LAYERS: u64 = 4096;
    pub const WIDTH: u64 = 1 << 20;
    pub const HEADS: u64 = 1 << 14;
    pub const HEAD_DIM: u64 = 1 << 13;
    pub const VOCAB: u64 = 1 << 24;
    pub const POSITION: u64 = 1 << 31;
}

/// What the keys are called in the file at hand, for error lines.
struct Keys {
    hidden: String,
    heads: String,
    kv_heads: String,
    head_dim: String,
    rms_eps: String,
    rope_theta: String,
    rope_dim: String,
    local_rope_theta: String,
    attention_softcap: String,
    logit_softcap: String,
    vocab: String,
    bos: String,
    eos: String,
    eot: String,
}

impl ModelConfig {
    /// Width of q: `heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of k and of v: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// What no single key can tell.
    fn checked(self, keys: &Keys) -> Result<Self> {
        let fail = |message: String| Err(Error::config(message));
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!(
                "{} = {} is no multiple of {} = {}",
                keys.heads, self.heads, keys.kv_heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail(format!("{} = {} is odd", keys.head_dim, self.head_dim));
        }
        let rope = &self.rope;
        if rope.dim == 0 || rope.dim > self.head_dim || !rope.dim.is_multiple_of(2) {
            return fail(format!(
                "{} = {} must be even and at most the head width, {}",
                keys.rope_dim, rope.dim, self.head_dim
            ));
        }
        if !(rope.theta.is_finite() && rope.theta > 0.0) {
            return fail(format!("{} = {} must be above 0", keys.rope_theta, rope.theta));
        }
        if !(self.rms_eps > 0.0 && self.rms_eps < 1.0) {
            return fail(format!("{} = {} must be between 0 and 1", keys.rms_eps, self.rms_eps));
        }
        rope.check()?;
        if let Some(theta) = self.local.as_ref().map(|l| l.rope_theta)
            && !(theta.is_finite() && theta > 0.0)
        {
            return fail(format!("{} = {theta} must be above 0", keys.local_rope_theta));
        }
        for (key, cap) in [
            (&keys.attention_softcap, self.attention_softcap),
            (&keys.logit_softcap, self.logit_softcap),
        ] {
            if let Some(cap) = cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
                return fail(format!("{key} = {cap} must be above 0"));
            }
        }
        let ids = [(&keys.bos, self.bos), (&keys.eot, self.eot)];
        let eos = self.eos.iter().map(|&id| (&keys.eos, Some(id)));
        for (key, id) in ids.into_iter().chain(eos) {
            if let Some(id) = id.filter(|&id| id as usize >= self.vocab) {
                return fail(format!(
                    "{key} = {id} is outside the vocabulary ({} = {})",
                    keys.vocab, self.vocab
                ));
            }
        }
        Ok(self)
    }
}

/// `heads` parts of `hidden`, for files that do not state the head width.
fn default_head_dim(hidden: usize, heads: usize, keys: &Keys) -> Result<usize> {
    if !hidden.is_multiple_of(heads) {
        return Err(Error::config(format!(
            "{} = {hidden} is no multiple of {} = {heads}, and there is no {}",
            keys.hidden, keys.heads, keys.head_dim
        )));
    }
    Ok(hidden / heads)
}

/// `value` as a size from 1 to `max`.
fn size(key: &str, value: u64, max: u64) -> Result<usize> {
    match value {
        0 => Err(Error::config(format!("{key} is 0"))),
        v if v > max => Err(Error::config(format!("{key} = {v} is absurd; the limit is {max}"))),
        v => Ok(v as usize),
    }
}
