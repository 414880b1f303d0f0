//! The real model: its configuration, tokenizer, chat template and detokenizer against outputs of
//! llama.cpp and of the PyPI `tokenizers` package (`data/smollm2.json`).

use std::sync::{Arc, LazyLock};

use device::BlockType;
use model::testing::real_model_path;
use model::{Architecture, ChatInput, Detokenizer, ModelPackage, RopeLayout, RopeScaling};
use serde_json::Value;

static MODEL: LazyLock<ModelPackage> =
    LazyLock::new(|| ModelPackage::open(&real_model_path()).expect("the model opens"));

static REFERENCE: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("data/smollm2.json")).expect("the reference is JSON")
});

fn items() -> &'static [Value] {
    let items = REFERENCE["items"].as_array().expect("items");
    assert_eq!(items.len(), 12);
    items
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

#[test]
fn configuration() {
    let c = &MODEL.config;
    assert_eq!(c.architecture, Architecture::Llama);
    assert_eq!((c.layers, c.hidden, c.ffn), (30, 576, 1536));
    assert_eq!((c.heads, c.kv_heads, c.head_dim), (9, 3, 64));
    assert_eq!((c.vocab, c.max_position), (49_152, 8192));
    assert_eq!((c.rope.theta, c.rope.dim), (100_000.0, 64));
    assert_eq!((c.rope.layout, &c.rope.scaling), (RopeLayout::Interleaved, &RopeScaling::None));
    assert!((c.rms_eps - 1e-5).abs() < 1e-9);
    assert!(c.tied_embeddings && !c.qkv_bias && !c.qk_norm);
    assert_eq!((c.bos, c.eos.as_slice()), (Some(1), [2].as_slice()));
}

#[test]
fn weights() {
    let weights = &MODEL.weights;
    assert_eq!(weights.iter().count(), 30 * 9 + 2);
    let q = weights.get("layers.29.attn.q.weight").expect("q of the last layer");
    assert_eq!((q.dtype, q.shape.as_slice()), (BlockType::Q4_1, [576, 576].as_slice()));
    let head = weights.lm_head().expect("the tied embedding");
    assert_eq!((head.dtype, head.shape.as_slice()), (BlockType::Q8_0, [49_152, 576].as_slice()));
    let norm = weights.get("norm.weight").and_then(|n| n.to_f32()).expect("the last norm");
    assert!(norm.len() == 576 && norm.iter().all(|x| x.is_finite()));
}

#[test]
fn no_text_has_fewer_tokens_than_is_said_at_first_sight() {
    let tokenizer = &MODEL.tokenizer;
    let many = (0..49_152u32).filter_map(|id| tokenizer.token_bytes(id));
    let longest = many.max_by_key(|bytes| bytes.len()).expect("a token");
    let texts = items().iter().map(|item| text(&item["text"]).to_owned());
    let longest = std::str::from_utf8(longest).expect("a text").repeat(100);
    for text in texts.chain([longest, "<|im_start|>".repeat(50), "😀".repeat(99), String::new()])
    {
        let ids = tokenizer.encode(&text, true).expect("an encoding");
        let least = tokenizer.least_tokens(&text);
        assert!(least <= ids.len(), "{least} {} {text:.40}", ids.len());
        assert!(text.is_empty() || least > 0);
    }
}

#[test]
fn prompts_encode_as_by_the_references() {
    for item in items() {
        let parse_special = item["parse_special"].as_bool().expect("parse_special");
        let encode = |special| MODEL.tokenizer.encode(text(&item["text"]), special).expect("ids");
        assert_eq!(encode(parse_special), ids(&item["prompt_ids"]), "{}", item["id"]);
        if let Some(parsed) = item.get("prompt_ids_if_special_parsed") {
            assert!(!parse_special);
            assert_eq!(encode(true), ids(parsed), "{}, special tokens parsed", item["id"]);
        }
    }
}

#[test]
fn prompts_decode_to_themselves() {
    for item in items() {
        assert_eq!(MODEL.tokenizer.decode(&ids(&item["prompt_ids"]), false), text(&item["text"]));
    }
}

#[test]
fn the_file_asks_for_no_bos() {
    let tokenizer = &MODEL.tokenizer;
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.bos(), Some(1));
    assert!(!tokenizer.add_bos());
    assert_eq!(tokenizer.with_bos(vec![504]), [504]);
    assert_eq!(tokenizer.eos_ids(), [0, 2]);
    assert!(tokenizer.is_special(16) && !tokenizer.is_special(17));
    assert_eq!(tokenizer.special_id("<|im_end|>"), Some(2));
    assert_eq!(tokenizer.token_bytes(49_152), None);
}

#[test]
fn conversations_render_as_by_the_reference() {
    let template = MODEL.chat_template().expect("a template");
    let chats: Vec<_> = items().iter().filter(|i| i["kind"] == "chat").collect();
    assert!(!chats.is_empty());
    for item in chats {
        let messages = item["messages"].as_array().expect("messages");
        let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
        assert_eq!(template.render(&input).expect("a rendering"), text(&item["text"]));
    }
}

#[test]
fn generated_ids_stream_into_the_generated_text() {
    for item in items() {
        for run in ["f64", "llama_cpp_q4_1"] {
            let generated = ids(&item[run]["gen_ids"]);
            let expected = text(&item[run]["gen_text"]);
            let mut stream =
                Detokenizer::after(Arc::clone(&MODEL.tokenizer), false, &ids(&item["prompt_ids"]));
            let mut streamed = String::new();
            for &id in &generated {
                streamed += &stream.push(id);
            }
            streamed += &stream.flush();
            assert_eq!(streamed, expected, "{} {run}", item["id"]);
            assert_eq!(MODEL.tokenizer.decode(&generated, false), expected);
        }
    }
}
