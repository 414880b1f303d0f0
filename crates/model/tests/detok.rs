//! Streaming detokenization: whole characters only, and the same text as decoding at once.

use std::sync::Arc;

use model::gguf::{Array, Value};
use model::testing::{GgufWriter, Vocabulary};
use model::{Detokenizer, Gguf, Tokenizer};
use proptest::prelude::*;

/// A vocabulary whose first 256 ids are the bytes.
fn byte_level() -> Arc<Tokenizer> {
    let mut file = GgufWriter::new();
    Vocabulary::small("gpt-2").write_gguf(&mut file);
    build(&file)
}

fn build(file: &GgufWriter) -> Arc<Tokenizer> {
    let gguf = Gguf::parse(file.build().into()).expect("a readable file");
    Arc::new(Tokenizer::from_gguf(&gguf).expect("a tokenizer"))
}

fn stream(detokenizer: &mut Detokenizer, ids: &[u32]) -> Vec<String> {
    let mut deltas: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    deltas.push(detokenizer.flush());
    deltas
}

#[test]
fn characters_split_over_tokens_come_out_once() {
    // Tokens of several bytes: F0 9F, then 98 80; 20 E4 BD, then A0.
    let pieces: [&[u8]; 4] = [b"\xF0\x9F", b"\x98\x80", b"\x20\xE4\xBD", b"\xA0"];
    let characters = Vocabulary::small("gpt-2").tokens();
    let tokens: Vec<String> = pieces
        .iter()
        .map(|bytes| bytes.iter().map(|&b| characters[usize::from(b)].as_str()).collect())
        .collect();
    let mut file = GgufWriter::new();
    file.set("tokenizer.ggml.model", Value::String("gpt2".into()))
        .set("tokenizer.ggml.pre", Value::String("gpt-2".into()))
        .set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .set("tokenizer.ggml.merges", Value::Array(Array::String(vec![])));
    let mut detokenizer = Detokenizer::new(build(&file), true);
    assert_eq!(stream(&mut detokenizer, &[0, 1, 2, 3]), ["", "😀", " ", "你", ""]);
}

#[test]
fn invalid_bytes_become_one_replacement_once_that_is_certain() {
    let tokenizer = byte_level();
    let deltas = |bytes: &[u8]| {
        let ids: Vec<u32> = bytes.iter().map(|&b| b.into()).collect();
        stream(&mut Detokenizer::new(tokenizer.clone(), true), &ids)
    };
    assert_eq!(deltas(b"\xF0\x9F!"), ["", "", "\u{FFFD}!", ""]);
    assert_eq!(deltas(b"\xE4\xBD"), ["", "", "\u{FFFD}"]);
    assert_eq!(deltas(b"\xFFa"), ["\u{FFFD}", "a", ""]);
    assert_eq!(deltas(b"\xC3\xC3\xA9"), ["", "\u{FFFD}", "é", ""]);
}

#[test]
fn control_tokens_are_text_only_on_demand() {
    let tokenizer = byte_level();
    let end = tokenizer.special_id("<|im_end|>").expect("a control token");
    let ids = [u32::from(b'a'), end, 1_000_000, u32::from(b'b')];
    assert_eq!(stream(&mut Detokenizer::new(tokenizer.clone(), true), &ids).concat(), "ab");
    assert_eq!(tokenizer.decode(&ids, true), "ab");
    let shown = stream(&mut Detokenizer::new(tokenizer.clone(), false), &ids).concat();
    assert_eq!(shown, "a<|im_end|>b");
    // A control token in the middle of a character does not tear it apart.
    let ids = [0xC3, end, 0xA9];
    assert_eq!(stream(&mut Detokenizer::new(tokenizer, true), &ids), ["", "", "é", ""]);
}

proptest! {
    #[test]
    fn deltas_joined_are_the_decoded_text(
        ids in prop::collection::vec(0u32..280, 0..60),
        skip_special in any::<bool>(),
    ) {
        let tokenizer = byte_level();
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
        let deltas = stream(&mut detokenizer, &ids);
        prop_assert_eq!(deltas.concat(), tokenizer.decode(&ids, skip_special));
        prop_assert!(!detokenizer.has_pending());
    }

    #[test]
    fn bytes_decode_as_the_standard_library_does(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let ids: Vec<u32> = bytes.iter().map(|&b| b.into()).collect();
        let expected = String::from_utf8_lossy(&bytes);
        prop_assert_eq!(stream(&mut Detokenizer::new(byte_level(), true), &ids).concat(), expected);
    }
}
