//! Tiny models with random weights, in both formats, holding the same numbers.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::json;

use super::{GgufWriter, Vocabulary};
use crate::config::{
    Activation, Architecture, LocalLayers, ModelConfig, RopeConfig, RopeLayout, RopeScaling,
};
use crate::gguf::Value;
use crate::weights::{LM_HEAD, expected_tensors};

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A model small enough to be computed by hand.
#[derive(Debug, Clone)]
pub struct TinyModel {
    /// As a Hugging Face file would say it: rope is half-split.
    pub config: ModelConfig,
    pub vocabulary: Vocabulary,
    /// In the order of [`expected_tensors`].
    pub tensors: Vec<TinyTensor>,
}

/// One tensor of a [`TinyModel`].
#[derive(Debug, Clone)]
pub struct TinyTensor {
    /// Its name in this workspace.
    pub name: String,
    pub gguf: String,
    pub hf: String,
    /// `[out, in]` or `[n]`.
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl TinyModel {
    /// Two layers, width 32, four heads over two of width 8, tied embeddings. The same `seed` gives
    /// the same weights.
    pub fn new(architecture: Architecture, seed: u64) -> Self {
        let vocabulary = Vocabulary::small(match architecture {
            Architecture::Llama => "smollm",
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => "qwen2",
        });
        let vocab = vocabulary.tokens().len();
        let first_control = (vocab - vocabulary.control.len()) as u32;
        let is_gemma = architecture == Architecture::Gemma3;
        let config = ModelConfig {
            architecture,
            layers: 2,
            hidden: 32,
            ffn: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            vocab,
            rms_eps: 1e-5,
            rope: RopeConfig {
                theta: 10_000.0,
                dim: 8,
                layout: RopeLayout::HalfSplit,
                scaling: RopeScaling::None,
            },
            qkv_bias: architecture == Architecture::Qwen2,
            qk_norm: is_gemma || architecture == Architecture::Qwen3,
            post_norms: is_gemma,
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            embedding_scale: is_gemma.then_some(32f32.sqrt()),
            attention_scale: None,
            attention_softcap: is_gemma.then_some(2.5),
            logit_softcap: is_gemma.then_some(3.0),
            // One layer of each kind; the window is shorter than the texts of tests.
            local: is_gemma.then(|| LocalLayers { layers: vec![0], window: 7, rope_theta: 100.0 }),
            tied_embeddings: true,
            max_position: 128,
            bos: Some(first_control),
            eos: vec![vocab as u32 - 1],
            eot: None,
        };
        Self::with_config(config, vocabulary, seed)
    }

    /// Random weights for a configuration of one's own, whose rope must be half-split.
    pub fn with_config(config: ModelConfig, vocabulary: Vocabulary, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut tensors = Vec::new();
        for expected in expected_tensors(&config) {
            if expected.name == LM_HEAD && config.tied_embeddings {
                continue;
            }
            let count = expected.shape.iter().product();
            // Norms near 1, everything else small, so that activations stay of order 1.
            let centre = if expected.name.contains("norm") { 1.0 } else { 0.0 };
            let spread = 1.0 / (expected.shape.last().copied().unwrap_or(1) as f32).sqrt();
            let values = (0..count).map(|_| centre + spread * random.next()).collect();
            tensors.push(TinyTensor {
                name: expected.name,
                gguf: expected.gguf,
                hf: expected.hf,
                shape: expected.shape,
                values,
            });
        }
        Self { config, vocabulary, tensors }
    }

    /// The values of a tensor, by its name in this workspace.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        self.tensors.iter().find(|t| t.name == name).map(|t| t.values.as_slice())
    }

    /// The model as a GGUF file in f32. Rope scaling other than linear is left out.
    pub fn gguf(&self) -> GgufWriter {
        let c = &self.config;
        let arch = c.architecture.name();
        let mut file = GgufWriter::new();
        file.set("general.architecture", Value::String(arch.into()));
        for (key, n) in [
            ("block_count", c.layers),
            ("context_length", c.max_position),
            ("embedding_length", c.hidden),
            ("feed_forward_length", c.ffn),
            ("attention.head_count", c.heads),
            ("attention.head_count_kv", c.kv_heads),
            ("attention.key_length", c.head_dim),
            ("attention.value_length", c.head_dim),
            ("rope.dimension_count", c.rope.dim),
            ("vocab_size", c.vocab),
        ] {
            file.set(format!("{arch}.{key}"), Value::U32(n as u32));
        }
        file.set(format!("{arch}.rope.freq_base"), Value::F32(c.rope.theta as f32))
            .set(format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(c.rms_eps));
        if let RopeScaling::Linear { factor } = c.rope.scaling {
            file.set(format!("{arch}.rope.scaling.type"), Value::String("linear".into()))
                .set(format!("{arch}.rope.scaling.factor"), Value::F32(factor as f32));
        }
        for (key, cap) in [
            ("attn_logit_softcapping", c.attention_softcap),
            ("final_logit_softcapping", c.logit_softcap),
        ] {
            if let Some(cap) = cap {
                file.set(format!("{arch}.{key}"), Value::F32(cap));
            }
        }
        if let Some(local) = &c.local {
            let period = local.layers.iter().take_while(|&&n| local.layers[n] == n).count() + 1;
            file.set(format!("{arch}.attention.sliding_window"), Value::U32(local.window as u32))
                .set(format!("{arch}.attention.sliding_window_pattern"), Value::U32(period as u32))
                .set(format!("{arch}.rope.freq_base_swa"), Value::F32(local.rope_theta as f32));
        }
        self.vocabulary.write_gguf(&mut file);
        file.set("tokenizer.chat_template", Value::String(CHATML.into()));
        for tensor in &self.tensors {
            let dims: Vec<u64> = tensor.shape.iter().rev().map(|&d| d as u64).collect();
            let bytes = self.in_gguf_order(tensor).iter().flat_map(|x| x.to_le_bytes()).collect();
            file.tensor(&tensor.gguf, &dims, 0, bytes);
        }
        file
    }

    /// Writes the model as a Hugging Face directory in f32.
    ///
    /// # Errors
    /// The operating system's, or a serializer's.
    pub fn write_hf_dir(&self, dir: &Path) -> io::Result<()> {
        let pattern = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}\
                       | ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
        let byte_level = |use_regex: bool| {
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                    "use_regex": use_regex })
        };
        let steps = match self.config.architecture {
            Architecture::Llama => {
                [json!({ "type": "Digits", "individual_digits": true }), byte_level(true)]
            }
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => [
                json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
                        "invert": false }),
                byte_level(false),
            ],
        };
        let pre = json!({ "type": "Sequence", "pretokenizers": steps });
        let tokenizer = self.vocabulary.tokenizer_json(&pre, false);
        let control = &self.vocabulary.control;
        let tokenizer_config = json!({
            "add_bos_token": false,
            "bos_token": control.first(),
            "eos_token": { "content": control.last() },
            "chat_template": CHATML,
        });
        fs::write(dir.join("config.json"), self.config_json().to_string())?;
        fs::write(dir.join("tokenizer.json"), tokenizer.to_string())?;
        fs::write(dir.join("tokenizer_config.json"), tokenizer_config.to_string())?;
        fs::write(dir.join("model.safetensors"), self.safetensors()?)
    }

    /// The model's `config.json`. Rope scaling other than linear is left out.
    pub fn config_json(&self) -> serde_json::Value {
        let c = &self.config;
        let scaling = match c.rope.scaling {
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            _ => json!(null),
        };
        json!({
            "model_type": c.architecture.name(),
            "num_hidden_layers": c.layers,
            "hidden_size": c.hidden,
            "intermediate_size": c.ffn,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab,
            "rms_norm_eps": c.rms_eps,
            "rope_theta": c.rope.theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": c.tied_embeddings,
            "max_position_embeddings": c.max_position,
            "bos_token_id": c.bos,
            "eos_token_id": c.eos,
            "hidden_act": "silu",
        })
    }

    fn safetensors(&self) -> io::Result<Vec<u8>> {
        use safetensors::{Dtype, tensor::TensorView};
        let bytes: Vec<Vec<u8>> = self
            .tensors
            .iter()
            .map(|t| t.values.iter().flat_map(|x| x.to_le_bytes()).collect())
            .collect();
        let views = self.tensors.iter().zip(&bytes).map(|(t, bytes)| {
            TensorView::new(Dtype::F32, t.shape.clone(), bytes).map(|view| (t.hf.clone(), view))
        });
        let views = views.collect::<Result<Vec<_>, _>>().map_err(io::Error::other)?;
        safetensors::serialize(views, None).map_err(io::Error::other)
    }

    /// GGUF files of `llama` models hold the rows of q and k so that rope turns neighbours.
    fn in_gguf_order(&self, tensor: &TinyTensor) -> Vec<f32> {
        let heads_of_rows =
            tensor.name.ends_with("attn.q.weight") || tensor.name.ends_with("attn.k.weight");
        if self.config.architecture != Architecture::Llama || !heads_of_rows {
            return tensor.values.clone();
        }
        let (d, width) = (self.config.head_dim, tensor.shape[1]);
        let row = |r: usize| &tensor.values[r * width..(r + 1) * width];
        (0..tensor.shape[0])
            .flat_map(|r| {
                let (head, i) = (r / d, r % d);
                row(head * d + i % 2 * (d / 2) + i / 2).iter().copied()
            })
            .collect()
    }
}

/// SplitMix64: plain, and the same on every machine.
struct Random(u64);

impl Random {
    /// Between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
