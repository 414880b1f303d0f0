//! Which tensors a model has, with their names in each format and their shapes.

use super::{EMBED, LM_HEAD};
use crate::config::ModelConfig;

/// A tensor that the configuration asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// The name used in this workspace.
    pub name: String,
    /// The name in GGUF files.
    pub gguf: String,
    /// The name in Hugging Face files.
    pub hf: String,
    /// `[out, in]` or `[n]`.
    pub shape: Vec<usize>,
}

/// Every tensor of the model, the output matrix included even where it may be absent.
pub fn expected_tensors(c: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut all = Vec::new();
    let mut add = |name: String, gguf: String, hf: String, shape: &[usize]| {
        all.push(ExpectedTensor { name, gguf, hf, shape: shape.to_vec() });
    };
    let (q, kv) = (c.q_width(), c.kv_width());
    let embedding = [c.vocab, c.hidden];
    add(EMBED.into(), "token_embd.weight".into(), "model.embed_tokens.weight".into(), &embedding);
    for n in 0..c.layers {
        let mut layer = |name: &str, gguf: &str, hf: &str, shape: &[usize]| {
            add(
                format!("layers.{n}.{name}"),
                format!("blk.{n}.{gguf}"),
                format!("model.layers.{n}.{hf}"),
                shape,
            );
        };
        layer("attn_norm.weight", "attn_norm.weight", "input_layernorm.weight", &[c.hidden]);
        // Hugging Face's name of the norm before the feed-forward part depends on whether there is
        // one after attention.
        let ffn_norm = match c.post_norms {
            true => "pre_feedforward_layernorm.weight",
            false => "post_attention_layernorm.weight",
        };
        layer("ffn_norm.weight", "ffn_norm.weight", ffn_norm, &[c.hidden]);
        if c.post_norms {
            for (name, gguf, hf) in [
                ("attn_post_norm", "post_attention_norm", "post_attention_layernorm"),
                ("ffn_post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
            ] {
                let weight = |name: &str| format!("{name}.weight");
                layer(&weight(name), &weight(gguf), &weight(hf), &[c.hidden]);
            }
        }
        for (part, out) in [("q", q), ("k", kv), ("v", kv)] {
            let (gguf, hf) = (format!("attn_{part}"), format!("self_attn.{part}_proj"));
            let mut both = |suffix: &str, shape: &[usize]| {
                layer(
                    &format!("attn.{part}.{suffix}"),
                    &format!("{gguf}.{suffix}"),
                    &format!("{hf}.{suffix}"),
                    shape,
                );
            };
            both("weight", &[out, c.hidden]);
            if c.qkv_bias {
                both("bias", &[out]);
            }
        }
        if c.qk_norm {
            for part in ["q_norm", "k_norm"] {
                layer(
                    &format!("attn.{part}.weight"),
                    &format!("attn_{part}.weight"),
                    &format!("self_attn.{part}.weight"),
                    &[c.head_dim],
                );
            }
        }
        layer("attn.o.weight", "attn_output.weight", "self_attn.o_proj.weight", &[c.hidden, q]);
        layer("ffn.gate.weight", "ffn_gate.weight", "mlp.gate_proj.weight", &[c.ffn, c.hidden]);
        layer("ffn.up.weight", "ffn_up.weight", "mlp.up_proj.weight", &[c.ffn, c.hidden]);
        layer("ffn.down.weight", "ffn_down.weight", "mlp.down_proj.weight", &[c.hidden, c.ffn]);
    }
    add("norm.weight".into(), "output_norm.weight".into(), "model.norm.weight".into(), &[c.hidden]);
    add(LM_HEAD.into(), "output.weight".into(), LM_HEAD.into(), &embedding);
    all
}
