//! Hugging Face's `tokenizer.json`, encoded by the `tokenizers` crate.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token,
    TokenizerBuilder, TokenizerImpl,
};

use super::vocab::{TokenKind, Vocab};
use super::{END_OF_GENERATION, Encoder, Tokenizer, byte_level, spm};
use crate::error::{Error, Result, quoted};

/// Two pipelines over one model, which differ in what becomes of control tokens' names.
pub(super) struct JsonEncoder {
    parsing_special: Pipeline,
    plain: Pipeline,
}

type Pipeline = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

impl JsonEncoder {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self> {
        let model = SharedModel(Arc::new(tokenizer.get_model().clone()));
        // Neither truncation nor padding: a prompt is encoded as it is.
        let pipeline = |plain| -> Result<Pipeline> {
            let mut built = TokenizerBuilder::new()
                .with_model(model.clone())
                .with_normalizer(tokenizer.get_normalizer().cloned())
                .with_pre_tokenizer(tokenizer.get_pre_tokenizer().cloned())
                .with_post_processor(None)
                .with_decoder(None)
                .with_added_vocabulary(tokenizer.get_added_vocabulary().clone())
                .build()
                .map_err(|e| Error::tokenizer(format!("tokenizer.json: {e}")))?;
            built.set_encode_special_tokens(plain);
            Ok(built)
        };
        Ok(Self { parsing_special: pipeline(false)?, plain: pipeline(true)? })
    }

    pub(super) fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let pipeline = if parse_special { &self.parsing_special } else { &self.plain };
        let encoding = pipeline
            .encode_fast(text, false)
            .map_err(|e| Error::tokenizer(format!("cannot encode the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl Tokenizer {
    /// Builds the tokenizer from the contents of `tokenizer.json` and, where there is one, of
    /// `tokenizer_config.json`, which names the special tokens.
    ///
    /// # Errors
    /// One line, when the file cannot be read or its decoder is of a kind not known here.
    pub fn from_json(json: &[u8], config: Option<&Value>) -> Result<Self> {
        let fail = |e: String| Error::tokenizer(format!("tokenizer.json: {e}"));
        let file: Value = serde_json::from_slice(json).map_err(|e| fail(e.to_string()))?;
        let inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| fail(e.to_string()))?;
        let decoder = TokenDecoder::from_json(file.get("decoder").unwrap_or(&Value::Null))?;

        let added = inner.get_added_tokens_decoder();
        let mut vocab = Vocab::default();
        let tokens = inner.get_vocab(true);
        // The table has a slot for every id up to the largest.
        if let Some((token, id)) = tokens.iter().find(|(_, id)| **id > MAX_ID) {
            return Err(fail(format!("token {} has the absurd id {id}", quoted(token))));
        }
        for (token, id) in tokens {
            if !added.contains_key(&id) {
                vocab.set(id, &decoder.bytes(&token), TokenKind::Normal);
            }
        }
        let mut added: Vec<_> = added.into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        for (id, token) in added {
            let kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
            vocab.set(id, token.content.as_bytes(), kind);
        }

        let named = |key: &str| named_token(config?, key).and_then(|name| inner.token_to_id(name));
        // What the file puts in front of an empty text is its beginning-of-sequence token.
        let first = inner
            .encode_fast("", true)
            .ok()
            .and_then(|encoding| encoding.get_ids().first().copied())
            .filter(|id| vocab.kind(*id) == Some(TokenKind::Control));
        let bos = named("bos_token").or(first);
        let add_bos = match config.and_then(|c| c.get("add_bos_token")).and_then(Value::as_bool) {
            Some(stated) => stated,
            None => bos.is_some() && first == bos,
        };
        let mut eos: Vec<u32> = vocab.control_ids(&END_OF_GENERATION).collect();
        eos.extend(named("eos_token"));
        let mut tokenizer = Self {
            vocab,
            encoder: Encoder::Json(JsonEncoder::new(&inner)?),
            bos,
            add_bos,
            eos: Vec::new(),
            strips_leading_space: decoder.strips_leading_space(),
            longest: OnceLock::new(),
        };
        tokenizer.add_eos_ids(&eos);
        tokenizer.check_ids()?;
        Ok(tokenizer)
    }
}

/// Far above any vocabulary.
const MAX_ID: u32 = 1 << 24;

/// A special token of `tokenizer_config.json`: a string, or an object with `content`.
pub(crate) fn named_token<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// How the file turns a token's name into bytes.
#[derive(Debug, PartialEq, Eq)]
enum TokenDecoder {
    ByteLevel,
    SentencePiece { strips_leading_space: bool },
}

impl TokenDecoder {
    fn from_json(decoder: &Value) -> Result<Self> {
        let kind = |value: &Value| value.get("type").and_then(Value::as_str).map(str::to_owned);
        match kind(decoder).as_deref() {
            Some("ByteLevel") => return Ok(Self::ByteLevel),
            Some("Metaspace") => {
                let never = decoder.get("prepend_scheme").is_some_and(|s| s == "never")
                    || decoder.get("add_prefix_space").is_some_and(|s| s == false);
                return Ok(Self::SentencePiece { strips_leading_space: !never });
            }
            Some("Sequence") => {
                let steps = decoder.get("decoders").and_then(Value::as_array);
                let steps = steps.map_or(&[][..], Vec::as_slice);
                let kinds: Vec<_> = steps.iter().filter_map(kind).collect();
                if kinds.iter().any(|k| k == "ByteFallback") {
                    let strip = steps.iter().any(|s| {
                        kind(s).as_deref() == Some("Strip")
                            && s.get("start").and_then(Value::as_u64).is_some_and(|n| n > 0)
                    });
                    return Ok(Self::SentencePiece { strips_leading_space: strip });
                }
                if kinds == ["ByteLevel"] {
                    return Ok(Self::ByteLevel);
                }
            }
            _ => {}
        }
        Err(Error::tokenizer(format!(
            "tokenizer.json: decoder {} is not supported; supported: ByteLevel, Metaspace, and \
             sequences with ByteFallback",
            quoted(&decoder.to_string())
        )))
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                byte_level::decode(token).unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::SentencePiece { .. } => match spm::byte_of(token) {
                Some(byte) => vec![byte],
                None => token.replace(spm::SPACE, " ").into_bytes(),
            },
        }
    }

    fn strips_leading_space(&self) -> bool {
        matches!(self, Self::SentencePiece { strips_leading_space: true })
    }
}

/// A model that both pipelines use: vocabularies are large.
#[derive(Clone)]
struct SharedModel(Arc<ModelWrapper>);

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        self.0.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> Self::Trainer {
        self.0.get_trainer()
    }
}
