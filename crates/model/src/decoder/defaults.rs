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
        "sampler" => json!({ "vocab_size": config.vocab }),
        // Attention scales by 1/sqrt(head dim) in these models, as it does by itself.
        _ => json!({}),
    };
    match settings {
        Value::Object(settings) => settings,
        _ => Map::new(),
    }
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
    settings
}
