//! The configuration from both formats, and rope frequencies against an independent computation.

use model::gguf::{Array, Value};
use model::testing::{GgufWriter, TinyModel};
use model::{Architecture, Gguf, ModelConfig, RopeLayout, RopeScaling};
use serde_json::json;

const ALL: [Architecture; 3] = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3];

fn from_gguf(file: &GgufWriter) -> model::Result<ModelConfig> {
    ModelConfig::from_gguf(&Gguf::parse(file.build().into()).expect("a readable file"))
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: model::Result<T>, parts: &[&str]) {
    let error = result.expect_err("a wrong configuration").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn both_formats_say_the_same() {
    for architecture in ALL {
        let tiny = TinyModel::new(architecture, 3);
        let mut gguf = from_gguf(&tiny.gguf()).expect("from GGUF");
        let hf = ModelConfig::from_hf(&tiny.config_json(), None).expect("from config.json");
        assert_eq!(hf, tiny.config);
        let interleaved = gguf.rope.layout == RopeLayout::Interleaved;
        assert_eq!(interleaved, architecture == Architecture::Llama);
        gguf.rope.layout = RopeLayout::HalfSplit;
        assert_eq!(gguf, hf);
    }
}

#[test]
fn zero_and_absurd_numbers_name_their_key() {
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "vocab_size",
    ] {
        for value in [Value::U32(0), Value::U64(1 << 40), Value::I32(-1), Value::String("8".into())]
        {
            let key = format!("qwen2.{key}");
            let mut file = TinyModel::new(Architecture::Qwen2, 0).gguf();
            file.unset(&key).set(&key, value);
            refused(from_gguf(&file), &[&key]);
        }
    }
    for key in [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ] {
        for value in [json!(0), json!(1u64 << 40), json!(-1), json!("8"), json!(1.5)] {
            let mut config = TinyModel::new(Architecture::Llama, 0).config_json();
            config[key] = value;
            refused(ModelConfig::from_hf(&config, None), &[key]);
        }
    }
    for (key, value) in [
        ("rms_norm_eps", json!(0.0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("rope_theta", json!(0)),
        ("partial_rotary_factor", json!(0)),
        ("bos_token_id", json!(1_000_000)),
        ("eos_token_id", json!([1, 1_000_000])),
        ("eos_token_id", json!("</s>")),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(7)),
        ("model_type", json!("gpt_neox")),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("use_sliding_window", json!(true)),
    ] {
        let mut config = TinyModel::new(Architecture::Llama, 0).config_json();
        config[key] = value;
        refused(ModelConfig::from_hf(&config, None), &[key]);
    }
}

#[test]
fn missing_keys_are_named_and_optional_ones_have_defaults() {
    let mut config = TinyModel::new(Architecture::Llama, 0).config_json();
    let map = config.as_object_mut().expect("an object");
    for key in ["num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"] {
        map.remove(key);
    }
    let read = ModelConfig::from_hf(&config, None).expect("defaults");
    assert_eq!((read.kv_heads, read.head_dim, read.rope.theta), (4, 8, 10_000.0));

    let map = config.as_object_mut().expect("an object");
    map.remove("hidden_size");
    refused(ModelConfig::from_hf(&config, None), &["hidden_size", "missing"]);

    let mut file = TinyModel::new(Architecture::Qwen3, 0).gguf();
    file.unset("qwen3.block_count");
    refused(from_gguf(&file), &["qwen3.block_count", "missing"]);
}

#[test]
fn more_end_tokens_come_from_the_generation_config() {
    let mut config = TinyModel::new(Architecture::Llama, 0).config_json();
    config["eos_token_id"] = json!(5);
    let generation = json!({ "eos_token_id": [5, 9] });
    let read = ModelConfig::from_hf(&config, Some(&generation)).expect("a configuration");
    assert_eq!(read.eos, [5, 9]);
}

#[test]
fn gguf_files_that_are_not_supported_say_so() {
    let with = |key: &str, value: Value| {
        let mut file = TinyModel::new(Architecture::Llama, 0).gguf();
        file.unset(key).set(key, value);
        from_gguf(&file)
    };
    refused(with("general.architecture", Value::String("mamba".into())), &["mamba", "qwen3"]);
    refused(with("llama.expert_count", Value::U32(8)), &["llama.expert_count"]);
    refused(with("split.count", Value::U16(3)), &["split.count", "--merge"]);
    refused(with("llama.rope.scaling.type", Value::String("yarn".into())), &["scaling", "yarn"]);
    refused(with("llama.vocab_size", Value::U32(7)), &["llama.vocab_size", "token_embd.weight"]);
    let per_layer =
        |counts: Vec<u32>| with("llama.attention.head_count_kv", Value::Array(Array::U32(counts)));
    refused(per_layer(vec![2, 4]), &["llama.attention.head_count_kv"]);
    assert_eq!(per_layer(vec![2, 2]).expect("equal counts").kv_heads, 2);
}

/// The published Llama 3.1 rule, written out as its reference implementation does.
fn llama3_frequency(base: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * std::f64::consts::PI / base;
    if wavelength < original / high {
        base
    } else if wavelength > original / low {
        base / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * base / factor + smooth * base
    }
}

#[test]
fn llama3_scaling_is_honoured_in_every_spelling() {
    let (theta, dim) = (500_000.0f64, 128);
    let expected: Vec<f64> = (0..dim / 2)
        .map(|i| theta.powf(-(2 * i) as f64 / dim as f64))
        .map(|base| llama3_frequency(base, 8.0, 1.0, 4.0, 8192.0))
        .collect();
    let near = |got: &[f64]| {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(&expected) {
            assert!((g * 10_000.0 - e * 10_000.0).abs() < 1e-5, "{g} {e}");
        }
    };
    let numbers = json!({ "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192 });
    let mut base = TinyModel::new(Architecture::Llama, 0).config_json();
    base["head_dim"] = json!(dim);
    for (place, spelling) in
        [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
    {
        let mut config = base.clone();
        config[place] = numbers.clone();
        config[place][spelling] = json!("llama3");
        if place == "rope_parameters" {
            config[place]["rope_theta"] = json!(theta);
        } else {
            config["rope_theta"] = json!(theta);
        }
        let read = ModelConfig::from_hf(&config, None).expect("a configuration");
        near(&read.rope.frequencies());
        for key in ["factor", "low_freq_factor", "original_max_position_embeddings"] {
            let mut broken = config.clone();
            broken[place].as_object_mut().expect("an object").remove(key);
            refused(ModelConfig::from_hf(&broken, None), &[place, key, "missing"]);
            broken[place][key] = json!(-1.0);
            refused(ModelConfig::from_hf(&broken, None), &[key]);
        }
    }
    let mut config = base.clone();
    config["rope_scaling"] = json!({ "factor": 4.0 });
    refused(ModelConfig::from_hf(&config, None), &["rope_scaling.rope_type", "missing"]);
    config["rope_scaling"] = json!({ "type": "dynamic", "factor": 4.0 });
    refused(ModelConfig::from_hf(&config, None), &["dynamic", "llama3"]);
}

#[test]
fn llama3_scaling_as_a_gguf_tensor() {
    let mut tiny = TinyModel::new(Architecture::Llama, 0);
    tiny.config.rope.theta = 500_000.0;
    let plain = tiny.config.rope.frequencies();
    let scaled: Vec<f64> =
        plain.iter().map(|&f| llama3_frequency(f, 8.0, 1.0, 4.0, 8192.0)).collect();
    assert_ne!(plain, scaled);
    let divisors = |n: usize| -> Vec<u8> {
        let divisors = plain.iter().zip(&scaled).map(|(p, s)| (p / s) as f32).take(n);
        divisors.flat_map(|d| d.to_le_bytes()).collect()
    };
    let mut file = tiny.gguf();
    file.tensor("rope_freqs.weight", &[4], 0, divisors(4));
    let read = from_gguf(&file).expect("a configuration");
    for (got, expected) in read.rope.frequencies().iter().zip(&scaled) {
        assert!((got / expected - 1.0).abs() < 1e-6);
    }
    let mut short = tiny.gguf();
    short.tensor("rope_freqs.weight", &[3], 0, divisors(3));
    refused(from_gguf(&short), &["rope_freqs.weight", "3", "4"]);
    let mut zero = tiny.gguf();
    zero.tensor("rope_freqs.weight", &[4], 0, vec![0; 16]);
    refused(from_gguf(&zero), &["rope_freqs.weight", "0"]);
}

#[test]
fn linear_scaling() {
    let mut tiny = TinyModel::new(Architecture::Qwen2, 0);
    let plain = tiny.config.rope.frequencies();
    tiny.config.rope.scaling = RopeScaling::Linear { factor: 4.0 };
    for read in [from_gguf(&tiny.gguf()), ModelConfig::from_hf(&tiny.config_json(), None)] {
        let frequencies = read.expect("a configuration").rope.frequencies();
        let expected: Vec<f64> = plain.iter().map(|f| f / 4.0).collect();
        assert_eq!(frequencies, expected);
    }
}
