//! A small byte-level vocabulary, as GGUF metadata and as `tokenizer.json`.

use serde_json::json;

use super::GgufWriter;
use crate::gguf::{Array, Value};

/// A byte-level BPE: the 256 bytes, then what the merges make, then the control tokens.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    /// Name of the pre-tokenizer in GGUF, such as `qwen2`.
    pub pre: String,
    /// Pairs in order of rank, in byte-level characters.
    pub merges: Vec<(String, String)>,
    pub control: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary with a handful of English merges and ChatML's control tokens.
    pub fn small(pre: &str) -> Self {
        let pairs = ["Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "Ġ Ġ", "r e", "Ċ Ċ", "1 2"];
        let merges = pairs.iter().filter_map(|p| p.split_once(' '));
        Self {
            pre: pre.to_owned(),
            merges: merges.map(|(a, b)| (a.to_owned(), b.to_owned())).collect(),
            control: ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned).to_vec(),
        }
    }

    /// All tokens, by id.
    pub fn tokens(&self) -> Vec<String> {
        let bytes = crate::tokenizer::byte_level_characters().map(String::from);
        let merged = self.merges.iter().map(|(a, b)| format!("{a}{b}"));
        bytes.into_iter().chain(merged).chain(self.control.iter().cloned()).collect()
    }

    /// Writes the tokenizer's keys; the last control token is `eos`, the first `bos`.
    pub fn write_gguf(&self, file: &mut GgufWriter) {
        let tokens = self.tokens();
        let first_control = tokens.len() - self.control.len();
        let kinds = (0..tokens.len()).map(|id| if id < first_control { 1 } else { 3 }).collect();
        let merges = self.merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
        file.set("tokenizer.ggml.model", Value::String("gpt2".into()))
            .set("tokenizer.ggml.pre", Value::String(self.pre.clone()))
            .set("tokenizer.ggml.bos_token_id", Value::U32(first_control as u32))
            .set("tokenizer.ggml.eos_token_id", Value::U32(tokens.len() as u32 - 1))
            .set("tokenizer.ggml.add_bos_token", Value::Bool(false))
            .set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
            .set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)))
            .set("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    }

    /// The same tokenizer for the `tokenizers` crate; `pre_tokenizer` in that crate's JSON.
    pub fn tokenizer_json(
        &self,
        pre_tokenizer: &serde_json::Value,
        ignore_merges: bool,
    ) -> serde_json::Value {
        let tokens = self.tokens();
        let first_control = tokens.len() - self.control.len();
        let added: Vec<_> = (first_control..tokens.len())
            .map(|id| {
                json!({ "id": id, "content": tokens[id], "special": true, "single_word": false,
                        "lstrip": false, "rstrip": false, "normalized": false })
            })
            .collect();
        let vocab: serde_json::Map<_, _> = tokens[..first_control]
            .iter()
            .enumerate()
            .map(|(id, token)| (token.clone(), json!(id)))
            .collect();
        json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                         "use_regex": true },
            "model": { "type": "BPE", "vocab": vocab, "merges": self.merges,
                       "ignore_merges": ignore_merges },
        })
    }
}
