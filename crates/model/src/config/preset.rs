//! Shapes of well-known models, for measurements with random weights.

use super::{Activation, Architecture, ModelConfig, RopeConfig, RopeLayout, RopeScaling};

impl ModelConfig {
    /// The names that [`ModelConfig::preset`] knows.
    pub const PRESETS: [&str; 2] = ["llama-3.1-8b", "qwen3-0.6b"];

    /// The numbers of a well-known model, as its `config.json` states them; `None` for a name that is
    /// not one of [`ModelConfig::PRESETS`].
    pub fn preset(name: &str) -> Option<Self> {
        let rope =
            |theta, dim, scaling| RopeConfig { theta, dim, layout: RopeLayout::HalfSplit, scaling };
        let llama = Self {
            architecture: Architecture::Llama,
            layers: 32,
            hidden: 4096,
            ffn: 14336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            rms_eps: 1e-5,
            rope: rope(
                500_000.0,
                128,
                RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_position: 8192.0,
                },
            ),
            qkv_bias: false,
            qk_norm: false,
            post_norms: false,
            activation: Activation::Silu,
            embedding_scale: None,
            attention_scale: None,
            attention_softcap: None,
            logit_softcap: None,
            local: None,
            tied_embeddings: false,
            max_position: 131_072,
            bos: None,
            eos: Vec::new(),
            eot: None,
        };
        match name {
            "llama-3.1-8b" => Some(llama),
            "qwen3-0.6b" => Some(Self {
                architecture: Architecture::Qwen3,
                layers: 28,
                hidden: 1024,
                ffn: 3072,
                heads: 16,
                vocab: 151_936,
                rms_eps: 1e-6,
                rope: rope(1_000_000.0, 128, RopeScaling::None),
                qk_norm: true,
                tied_embeddings: true,
                max_position: 40_960,
                ..llama
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_sizes_that_their_names_state() {
        let parameters = |name: &str| -> usize {
            let config = ModelConfig::preset(name).unwrap();
            let tensors = crate::weights::expected_tensors(&config);
            let stored = tensors
                .iter()
                .filter(|t| t.name != crate::weights::LM_HEAD || !config.tied_embeddings);
            stored.map(|t| t.shape.iter().product::<usize>()).sum()
        };
        assert_eq!(ModelConfig::PRESETS.map(parameters), [8_030_261_248, 596_049_920]);
        assert_eq!(ModelConfig::preset("llama"), None);
    }
}
