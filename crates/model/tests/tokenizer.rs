//! Tokenizers built from GGUF against the `tokenizers` crate on the same small vocabularies: the
//! crate's pipelines use the patterns that the models were published with.

use std::sync::LazyLock;

use model::gguf::{Array, Value};
use model::testing::{GgufWriter, Vocabulary};
use model::{Gguf, Tokenizer};
use proptest::prelude::*;
use serde_json::json;

fn from_gguf(file: &GgufWriter) -> model::Result<Tokenizer> {
    Tokenizer::from_gguf(&Gguf::parse(file.build().into()).expect("a readable file"))
}

fn from_json(json: &serde_json::Value) -> Tokenizer {
    Tokenizer::from_json(json.to_string().as_bytes(), None).expect("a tokenizer")
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: model::Result<T>, parts: &[&str]) {
    let error = result.expect_err("a wrong tokenizer").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

fn llama3(digits: &str) -> String {
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        digits,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    .concat()
}

/// One pair of tokenizers per variant: from GGUF, and from `tokenizer.json`.
static PAIRS: LazyLock<Vec<(&str, Tokenizer, Tokenizer)>> = LazyLock::new(|| {
    let split = |pattern: &str| {
        json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
                "invert": false })
    };
    let bytes = |use_regex: bool| {
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": use_regex })
    };
    let digits = json!({ "type": "Digits", "individual_digits": true });
    [
        ("gpt-2", vec![bytes(true)], false),
        ("smollm", vec![digits, bytes(true)], false),
        ("qwen2", vec![split(&llama3(r"\p{N}")), bytes(false)], false),
        ("llama-bpe", vec![split(&llama3(r"\p{N}{1,3}")), bytes(false)], true),
        (
            "default",
            vec![
                split(r"[\p{P}\$\+<=>\^~\|]+"),
                split(GPT2),
                split(r"\p{N}+"),
                split("[0-9][0-9][0-9]"),
                bytes(false),
            ],
            false,
        ),
    ]
    .map(|(pre, steps, ignore_merges)| {
        let mut vocabulary = Vocabulary::small(pre);
        // Enough merges to tell cuts apart: letters, digits, white space and punctuation together.
        for pair in [
            "e e", "ee e", "1 2", "12 3", "3 4", "Ċ Ċ", "Ġ ĊĊ", "Ġ Ġ", "ĠĠ Ġ", "Ġ !", "! !", "' s",
            "' S", "l l", "' ll", "Ġ '", "č Ċ", "! Ċ", "ĉ ĉ", "ĉ e", "Ġ 1", "( e", "e 1", "Ã ©",
        ] {
            let (a, b) = pair.split_once(' ').expect("a pair");
            if !vocabulary.merges.contains(&(a.to_owned(), b.to_owned())) {
                vocabulary.merges.push((a.to_owned(), b.to_owned()));
            }
        }
        let mut file = GgufWriter::new();
        vocabulary.write_gguf(&mut file);
        let pre_tokenizer = json!({ "type": "Sequence", "pretokenizers": steps });
        let json = vocabulary.tokenizer_json(&pre_tokenizer, ignore_merges);
        (pre, from_gguf(&file).expect("a tokenizer"), from_json(&json))
    })
    .into()
});

/// Text in which every rule of the patterns has something to do.
fn text() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "e",
        "ee",
        "He",
        "the",
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\t\t",
        "\u{a0}",
        "\u{3000}",
        "\u{2028}",
        "1",
        "12",
        "123",
        "12345",
        "½",
        "٣",
        "Ⅷ",
        "!",
        "!!",
        "...",
        "(",
        "$",
        "+",
        "<",
        "|",
        "_",
        "é",
        "e\u{301}",
        "日本",
        "한",
        "😀",
        "👨\u{200d}👩",
        "\u{feff}",
        "\0",
        "<|im_end|>",
        "<|im_",
        "|>",
        "ǅ",
        "ß",
        "İ",
    ]);
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn gguf_and_json_agree(text in text(), parse_special in any::<bool>()) {
        for (pre, gguf, json) in PAIRS.iter() {
            let ids = gguf.encode(&text, parse_special).expect("ids");
            prop_assert_eq!(&ids, &json.encode(&text, parse_special).expect("ids"), "{}", pre);
            prop_assert_eq!(&gguf.decode(&ids, false), &text);
            prop_assert_eq!(&json.decode(&ids, false), &text);
        }
    }
}

#[test]
fn the_two_say_the_same_about_their_tokens() {
    for (_, gguf, json) in PAIRS.iter() {
        assert_eq!(gguf.vocab_size(), json.vocab_size());
        assert_eq!(gguf.eos_ids(), json.eos_ids());
        for id in 0..gguf.vocab_size() as u32 {
            assert_eq!(gguf.token_bytes(id), json.token_bytes(id));
            assert_eq!(gguf.is_special(id), json.is_special(id));
        }
    }
}

#[test]
fn special_tokens_in_plain_text_stay_text() {
    for (pre, gguf, json) in PAIRS.iter() {
        let end = gguf.special_id("<|im_end|>").expect("a control token");
        for tokenizer in [gguf, json] {
            let plain = tokenizer.encode("a<|im_end|>", false).expect("ids");
            assert!(!plain.iter().any(|&id| tokenizer.is_special(id)), "{pre}");
            assert_eq!(tokenizer.decode(&plain, true), "a<|im_end|>");
            assert_eq!(tokenizer.encode("a<|im_end|>", true).expect("ids"), [97, end]);
        }
    }
}

#[test]
fn a_long_run_of_spaces_is_cut_as_a_short_one() {
    // A backtracking engine gives up here and hands over the rest in one piece.
    let text = format!("{}e", " ".repeat(2_000_000));
    let (_, gguf, _) = &PAIRS[0];
    let ids = gguf.encode(&text, false).expect("ids");
    assert_eq!(gguf.token_bytes(ids[ids.len() - 1]), Some(b"e".as_slice()));
    assert_eq!(gguf.decode(&ids, false).len(), text.len());
}

#[test]
fn unknown_variants_and_inconsistent_lists_are_named() {
    let with = |key: &str, value: Option<Value>| {
        let mut file = GgufWriter::new();
        Vocabulary::small("qwen2").write_gguf(&mut file);
        file.unset(key);
        if let Some(value) = value {
            file.set(key, value);
        }
        from_gguf(&file)
    };
    let strings = |list: &[&str]| {
        Some(Value::Array(Array::String(list.iter().map(|s| (*s).to_owned()).collect())))
    };
    let text = |s: &str| Some(Value::String(s.into()));
    refused(with("tokenizer.ggml.pre", text("falcon")), &["falcon", "llama-bpe", "qwen2"]);
    refused(with("tokenizer.ggml.model", text("bert")), &["bert", "gpt2", "llama"]);
    for key in ["model", "tokens", "merges"] {
        let key = format!("tokenizer.ggml.{key}");
        refused(with(&key, None), &[&key, "missing"]);
    }
    refused(with("tokenizer.ggml.tokens", strings(&[])), &["tokenizer.ggml.tokens", "empty"]);
    for merge in ["ab", "", "a", "a ", " "] {
        refused(with("tokenizer.ggml.merges", strings(&[merge])), &["merges", "entry 0"]);
    }
    refused(with("tokenizer.ggml.merges", strings(&["q z"])), &["merges", "qz"]);
    let kinds = |codes: Vec<i32>| Some(Value::Array(Array::I32(codes)));
    refused(with("tokenizer.ggml.token_type", kinds(vec![1])), &["token_type", "1 entries"]);
    let count = Vocabulary::small("").tokens().len();
    refused(with("tokenizer.ggml.token_type", kinds(vec![9; count])), &["token_type", "9"]);
    refused(with("tokenizer.ggml.token_type", kinds(vec![-1; count])), &["token_type"]);
    refused(with("tokenizer.ggml.eos_token_id", Some(Value::U32(100_000))), &["100000"]);
    refused(with("tokenizer.ggml.bos_token_id", text("<s>")), &["bos_token_id", "a string"]);
    // Without a kind list nothing is special; without a variant, the default one.
    let plain = with("tokenizer.ggml.token_type", None).expect("a tokenizer");
    assert!((0..count as u32).all(|id| !plain.is_special(id)));
    assert!(with("tokenizer.ggml.pre", None).is_ok());
}

#[test]
fn a_byte_without_a_token_is_an_error_not_a_gap() {
    let mut file = GgufWriter::new();
    let tokens = ["a", "b"].map(str::to_owned).to_vec();
    file.set("tokenizer.ggml.model", Value::String("gpt2".into()))
        .set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .set("tokenizer.ggml.merges", Value::Array(Array::String(vec![])));
    let tokenizer = from_gguf(&file).expect("a tokenizer");
    assert_eq!(tokenizer.encode("abba", false).expect("ids"), [0, 1, 1, 0]);
    refused(tokenizer.encode("abc", false), &["0x63"]);
}

/// SentencePiece: unknown, the control tokens, the bytes, then pieces from the best score down.
struct Pieces {
    tokens: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<i32>,
}

fn pieces() -> Pieces {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut kinds = vec![2, 3, 3];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([6; 256]);
    let best_first = "▁t he in er ▁the ▁a on ▁▁ re ing ▁in at ▁at the her here ▁here <s ▁ e t a o \
                      h n i r s g < > / 日 本 日本";
    tokens.extend(best_first.split(' ').map(str::to_owned));
    kinds.resize(tokens.len(), 1);
    let scores = (0..tokens.len()).map(|id| if id < 259 { 0.0 } else { -(id as f32) }).collect();
    Pieces { tokens, scores, kinds }
}

fn sentence_piece(pieces: &Pieces, space_prefix: bool) -> Tokenizer {
    let mut file = GgufWriter::new();
    file.set("tokenizer.ggml.model", Value::String("llama".into()))
        .set("tokenizer.ggml.tokens", Value::Array(Array::String(pieces.tokens.clone())))
        .set("tokenizer.ggml.scores", Value::Array(Array::F32(pieces.scores.clone())))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(pieces.kinds.clone())))
        .set("tokenizer.ggml.add_space_prefix", Value::Bool(space_prefix))
        .set("tokenizer.ggml.bos_token_id", Value::U32(1))
        .set("tokenizer.ggml.eos_token_id", Value::U32(2))
        .set("tokenizer.ggml.unknown_token_id", Value::U32(0));
    from_gguf(&file).expect("a tokenizer")
}

/// The same pieces as Hugging Face converts them: every way to make a piece is a merge, in the order
/// of the pieces' scores.
fn sentence_piece_json(pieces: &Pieces) -> serde_json::Value {
    let vocab: serde_json::Map<_, _> =
        pieces.tokens.iter().enumerate().map(|(id, t)| (t.clone(), json!(id))).collect();
    let mut merges = Vec::new();
    for piece in &pieces.tokens[259..] {
        for (at, _) in piece.char_indices().skip(1) {
            let (a, b) = piece.split_at(at);
            if vocab.contains_key(a) && vocab.contains_key(b) {
                merges.push(json!([a, b]));
            }
        }
    }
    let added = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false })
    };
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" } ] },
        "pre_tokenizer": null,
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } },
                       { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>",
                   "byte_fallback": true, "fuse_unk": true, "ignore_merges": false },
    })
}

static SPM: LazyLock<(Tokenizer, Tokenizer)> = LazyLock::new(|| {
    let pieces = pieces();
    (sentence_piece(&pieces, true), from_json(&sentence_piece_json(&pieces)))
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn sentence_piece_agrees_with_the_tokenizers_crate(
        text in "[aehinorst]{0,3}( ?(the|in|here|at|ing|日本|é|😀|\n|x|<s>|[aehinorst ]{1,4})){0,8}",
    ) {
        let (gguf, json) = &*SPM;
        let ids = gguf.encode(&text, false).expect("ids");
        prop_assert_eq!(&ids, &json.encode(&text, false).expect("ids"));
        prop_assert_eq!(&gguf.decode(&ids, false), &text);
        prop_assert_eq!(&json.decode(&ids, false), &text);
    }
}

#[test]
fn sentence_piece_special_tokens_and_spaces() {
    let (gguf, json) = &*SPM;
    for tokenizer in [gguf, json] {
        assert_eq!((tokenizer.bos(), tokenizer.add_bos()), (Some(1), true));
        assert_eq!(tokenizer.with_bos(vec![9]), [1, 9]);
        assert_eq!(tokenizer.with_bos(vec![1, 9]), [1, 9]);
        assert_eq!(tokenizer.eos_ids(), [2]);
        assert!(tokenizer.encode("", true).expect("ids").is_empty());
        // `<s` and `>` are pieces: without care they would merge into the control token.
        assert!(!tokenizer.encode("<s>", false).expect("ids").contains(&1));
        assert_eq!(tokenizer.token_bytes(3 + 0xE9), Some([0xE9].as_slice()));
    }
    let piece = |name: &str| {
        pieces().tokens.iter().position(|t| t == name).map(|id| id as u32).expect("a piece")
    };
    // As llama.cpp does: a space in front of text that follows a token.
    let ids = gguf.encode("the<s>the", true).expect("ids");
    assert_eq!(ids, [piece("▁the"), 1, piece("▁the")]);
    let bare = sentence_piece(&pieces(), false);
    assert_eq!(bare.encode("the", false).expect("ids"), [piece("the")]);
    assert_eq!(bare.decode(&[piece("▁the")], false), " the");
}

#[test]
fn generated_text_keeps_its_space_after_a_prompt() {
    use model::Detokenizer;
    let tokenizer = std::sync::Arc::new(sentence_piece(&pieces(), true));
    let the = tokenizer.encode("the", false).expect("ids");
    let mut first = Detokenizer::new(tokenizer.clone(), true);
    assert_eq!(first.push(the[0]), "the");
    assert_eq!(first.push(the[0]), " the");
    let mut after = Detokenizer::after(tokenizer.clone(), true, &the);
    assert_eq!(after.push(the[0]), " the");
    // A prompt of control tokens alone has no text to be separated from.
    let mut after_bos = Detokenizer::after(tokenizer, true, &[1]);
    assert_eq!(after_bos.push(the[0]), "the");
}

#[test]
fn sentence_piece_without_a_token_for_the_text() {
    let mut few = pieces();
    few.kinds[3 + 0x78] = 5;
    few.tokens[3 + 0x78] = "unused".into();
    let tokenizer = sentence_piece(&few, true);
    assert!(tokenizer.encode("x", false).expect("ids").contains(&0));
}

#[test]
fn unusual_decoders_and_broken_json_are_refused() {
    let mut json = sentence_piece_json(&pieces());
    json["decoder"] = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
    refused(Tokenizer::from_json(json.to_string().as_bytes(), None), &["WordPiece", "ByteLevel"]);
    let mut json = sentence_piece_json(&pieces());
    json["model"]["vocab"]["far"] = json!(u32::MAX);
    refused(Tokenizer::from_json(json.to_string().as_bytes(), None), &["far", "4294967295"]);
    refused(Tokenizer::from_json(b"{", None), &["tokenizer.json"]);
    refused(Tokenizer::from_json(b"{}", None), &["tokenizer.json"]);
}

#[test]
fn the_tokenizer_configuration_names_special_tokens() {
    let json = sentence_piece_json(&pieces()).to_string();
    let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "<unk>",
                         "add_bos_token": false });
    let tokenizer = Tokenizer::from_json(json.as_bytes(), Some(&config)).expect("a tokenizer");
    assert_eq!((tokenizer.bos(), tokenizer.add_bos()), (Some(1), false));
    assert_eq!(tokenizer.eos_ids(), [0, 2]);
}
