//! What the model says about the settings of its resources.

use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, RopeLayout, RopeScaling};

pub(super) fn of_kind(config: &ModelConfig, kind: &str) -> Map<String, Value> {
    let settings = match kind {
        "kv" => json!({
            "num_layers": config.layers,
            "num_kv_heads": config.kv_heads,
            "num_qo_heads": config.heads,
            "head_dim": config.head_dim,
            "max_seq_len": config.max_position,
        }),
        "positions" => positions(config),
        "attention" => attention(config),
        "sampler" => json!({ "vocab_size": config.vocab }),
        _ => json!({}),
    };
    match settings {
        Value::Object(settings) => settings,
        _ => Map::new(),
    }
}

/// Only what differs from what the kind does by itself: a scale of `1/sqrt(head dim)`, no bound, no
/// window.
fn attention(config: &ModelConfig) -> Value {
    let mut settings = json!({});
    if let Some(scale) = config.attention_scale {
        settings["sm_scale"] = json!(scale);
    }
    if let Some(cap) = config.attention_softcap {
        settings["logit_softcap"] = json!(cap);
    }
    if let Some(local) = &config.local {
        settings["sliding_window"] = json!(local.window);
        let full = (0..config.layers).filter(|layer| !local.layers.contains(layer));
        settings["full_layers"] = full.collect();
    }
    settings
}

fn positions(config: &ModelConfig) -> Value {
    let rope = &config.rope;
    let mut settings = json!({
        "rotary_dim": rope.dim,
        "rope_theta": rope.theta,
        "interleave": rope.layout == RopeLayout::Interleaved,
    });
    match &rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => settings["rope_scale"] = json!(factor),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            settings["llama3_factor"] = json!(factor);
            settings["llama3_low_freq_factor"] = json!(low_freq_factor);
            settings["llama3_high_freq_factor"] = json!(high_freq_factor);
            settings["llama3_original_max_position"] = json!(original_max_position);
        }
        RopeScaling::Divisors(divisors) => settings["rope_freqs"] = json!(divisors),
    }
    if let Some(local) = &config.local {
        settings["local_rope_theta"] = json!(local.rope_theta);
        settings["local_layers"] = json!(local.layers);
    }
    settings
}
