//! The tokenizer inside a GGUF file.

use std::sync::OnceLock;

use super::added::AddedTokens;
use super::bpe::Bpe;
use super::spm::{self, Spm};
use super::vocab::{TokenKind, Vocab};
use super::{END_OF_GENERATION, Encoder, Tokenizer, byte_level, pretokenize};
use crate::error::{Error, Result, quoted};
use crate::gguf::{Array, Gguf, Metadata, Value};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

impl Tokenizer {
    /// Builds the tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) or
    /// SentencePiece (`llama`).
    ///
    /// # Errors
    /// One line naming the key that is missing, inconsistent or unsupported.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let meta = gguf.metadata();
        let tokens = meta.strings(TOKENS)?.ok_or_else(|| missing(TOKENS))?;
        if tokens.is_empty() {
            return Err(Error::tokenizer(format!("{TOKENS} is empty")));
        }
        let kinds = kinds(meta, tokens.len())?;
        let tokenizer = match meta.str(MODEL)?.ok_or_else(|| missing(MODEL))? {
            "gpt2" => bpe(meta, tokens, &kinds),
            "llama" => sentence_piece(meta, tokens, &kinds),
            other => Err(Error::tokenizer(format!(
                "{MODEL} = {} is not supported; supported: gpt2, llama",
                quoted(other)
            ))),
        }?;
        tokenizer.check_ids()?;
        Ok(tokenizer)
    }
}

fn bpe(meta: &Metadata, tokens: &[String], kinds: &[TokenKind]) -> Result<Tokenizer> {
    let variant = pretokenize::variant(meta.str(PRE)?.unwrap_or("default"))?;
    let merges = meta.strings(MERGES)?.ok_or_else(|| missing(MERGES))?;
    let vocab = vocab(tokens, kinds, |id, token| match kinds[id] {
        // A few vocabularies hold entries that are no byte-level text; they stand for themselves.
        TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => {
            byte_level::decode(token).unwrap_or_else(|| token.as_bytes().to_vec())
        }
        TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => {
            token.as_bytes().to_vec()
        }
    });
    let encoder = Encoder::Bpe {
        added: AddedTokens::new(&vocab)?,
        bpe: Bpe::new(tokens, kinds, merges, variant)?,
    };
    finish(meta, vocab, encoder, variant.add_bos, false)
}

fn sentence_piece(meta: &Metadata, tokens: &[String], kinds: &[TokenKind]) -> Result<Tokenizer> {
    let scores = match meta.get(SCORES) {
        Some(Value::Array(Array::F32(scores))) => scores.as_slice(),
        Some(other) => {
            return Err(Error::tokenizer(format!(
                "{SCORES} must be an array of f32, but is {}",
                other.type_name()
            )));
        }
        None => return Err(missing(SCORES)),
    };
    same_length(SCORES, scores.len(), tokens.len())?;
    let unknown = meta.u32("tokenizer.ggml.unknown_token_id")?;
    let space_prefix = meta.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let vocab = vocab(tokens, kinds, |id, token| match kinds[id] {
        TokenKind::Normal | TokenKind::Unused => token.replace(spm::SPACE, " ").into_bytes(),
        TokenKind::Byte => match spm::byte_of(token) {
            Some(byte) => vec![byte],
            None => token.as_bytes().to_vec(),
        },
        TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => {
            token.as_bytes().to_vec()
        }
    });
    let encoder = Encoder::Spm {
        added: AddedTokens::new(&vocab)?,
        spm: Spm::new(tokens, scores, kinds, unknown, space_prefix),
    };
    finish(meta, vocab, encoder, true, space_prefix)
}

fn finish(
    meta: &Metadata,
    vocab: Vocab,
    encoder: Encoder,
    add_bos_by_default: bool,
    strips_leading_space: bool,
) -> Result<Tokenizer> {
    let mut eos: Vec<u32> = vocab.control_ids(&END_OF_GENERATION).collect();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        eos.extend(meta.u32(&format!("tokenizer.ggml.{key}"))?);
    }
    let mut tokenizer = Tokenizer {
        vocab,
        encoder,
        bos: meta.u32("tokenizer.ggml.bos_token_id")?,
        add_bos: meta.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos_by_default),
        eos: Vec::new(),
        strips_leading_space,
        longest: OnceLock::new(),
    };
    tokenizer.add_eos_ids(&eos);
    Ok(tokenizer)
}

fn vocab(
    tokens: &[String],
    kinds: &[TokenKind],
    bytes_of: impl Fn(usize, &str) -> Vec<u8>,
) -> Vocab {
    let mut vocab = Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        vocab.set(id as u32, &bytes_of(id, token), kinds[id]);
    }
    vocab
}

/// The kinds of all tokens; without the key they are all normal ones.
fn kinds(meta: &Metadata, tokens: usize) -> Result<Vec<TokenKind>> {
    let Some(array) = meta.array(KINDS)? else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    let codes = array.to_u64s().ok_or_else(|| {
        Error::tokenizer(format!("{KINDS} must be an array of non-negative integers"))
    })?;
    same_length(KINDS, codes.len(), tokens)?;
    let kind = |(id, code)| match code {
        // 0 is "undefined"; converters wrote it for ordinary tokens.
        0 | 1 => Ok(TokenKind::Normal),
        2 => Ok(TokenKind::Unknown),
        3 => Ok(TokenKind::Control),
        4 => Ok(TokenKind::UserDefined),
        5 => Ok(TokenKind::Unused),
        6 => Ok(TokenKind::Byte),
        other => Err(Error::tokenizer(format!("{KINDS}: token {id} has the unknown type {other}"))),
    };
    codes.into_iter().enumerate().map(kind).collect()
}

fn same_length(key: &str, found: usize, tokens: usize) -> Result<()> {
    if found == tokens {
        return Ok(());
    }
    Err(Error::tokenizer(format!("{key} has {found} entries, {TOKENS} has {tokens}")))
}

fn missing(key: &str) -> Error {
    Error::tokenizer(format!("key {key} is missing"))
}
