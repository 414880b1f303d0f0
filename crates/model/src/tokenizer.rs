//! Text to token ids and back.
//!
//! Two sources: the vocabulary inside a GGUF file ([`Tokenizer::from_gguf`]) and a Hugging Face
//! `tokenizer.json` ([`Tokenizer::from_json`]). Both give the same interface, and every token has
//! bytes, so that a stream of ids can be turned into text without looking back
//! (see [`Detokenizer`](crate::Detokenizer)).

use std::borrow::Cow;
use std::sync::OnceLock;

use crate::error::{Error, Result};

mod added;
mod bpe;
mod byte_level;
mod gguf;
mod json;
mod pretokenize;
mod spm;
mod vocab;

use added::AddedTokens;
pub(crate) use json::named_token;
use vocab::{TokenKind, Vocab};

/// A model's tokenizer. Immutable, and shared between threads.
pub struct Tokenizer {
    vocab: Vocab,
    encoder: Encoder,
    bos: Option<u32>,
    add_bos: bool,
    eos: Vec<u32>,
    strips_leading_space: bool,
    /// Bytes of the longest token, once somebody has asked.
    longest: OnceLock<usize>,
}

enum Encoder {
    Bpe { added: AddedTokens, bpe: bpe::Bpe },
    Spm { added: AddedTokens, spm: spm::Spm },
    Json(json::JsonEncoder),
}

/// Tokens that end a generation wherever they are control tokens, whatever the file says about
/// `eos`: chat fine-tunes often keep the base model's `eos` and end turns with another token.
const END_OF_GENERATION: [&str; 11] = [
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<EOT>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
];

impl Tokenizer {
    /// Encodes `text`. Never adds a beginning-of-sequence token: see [`with_bos`](Self::with_bos).
    ///
    /// With `parse_special`, the strings of control tokens become those tokens: for text that a chat
    /// template has rendered. Without it they are plain text like any other: for what a user typed.
    /// Tokens that the file calls user-defined are not control tokens, and always recognised.
    ///
    /// # Errors
    /// When the vocabulary lacks a token for a byte or character of the text.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        match &self.encoder {
            Encoder::Bpe { added, bpe } => {
                added.split(text, parse_special, |piece| match piece {
                    added::Piece::Token(id) => {
                        ids.push(id);
                        Ok(())
                    }
                    added::Piece::Text(text) => bpe.encode(text, &mut ids),
                })?;
            }
            Encoder::Spm { added, spm } => {
                // The space goes in front of each text that starts the input or follows a token.
                let mut prefix = true;
                added.split(text, parse_special, |piece| match piece {
                    added::Piece::Token(id) => {
                        ids.push(id);
                        prefix = true;
                        Ok(())
                    }
                    added::Piece::Text(text) => {
                        spm.encode(text, std::mem::take(&mut prefix), &mut ids)
                    }
                })?;
            }
            Encoder::Json(json) => ids = json.encode(text, parse_special)?,
        }
        Ok(ids)
    }

    /// No encoding of `text` has fewer tokens than this, which takes no time to say: where nothing is
    /// changed or left out on the way, no token stands for more bytes than the longest one.
    pub fn least_tokens(&self, text: &str) -> usize {
        if matches!(self.encoder, Encoder::Json(_)) {
            return 0;
        }
        let longest = self.longest.get_or_init(|| {
            let bytes = |id| self.token_bytes(id).map_or(0, <[u8]>::len);
            (0..self.vocab_size() as u32).map(bytes).max().unwrap_or(0)
        });
        text.len().div_ceil((*longest).max(1))
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary give
    /// nothing. With `skip_special`, neither do control tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        let text = match bytes.as_slice() {
            [b' ', rest @ ..] if self.strips_leading_space => rest,
            all => all,
        };
        match String::from_utf8_lossy(text) {
            Cow::Owned(text) => text,
            Cow::Borrowed(text) => text.to_owned(),
        }
    }

    /// The bytes that a token stands for: part of a character at times. A control token gives its
    /// name. `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// The id of the control or user-defined token of that name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.vocab.find_added(name)
    }

    /// Whether `id` is a control token: one that stands for no text.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Number of ids that may have a token. The model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The beginning-of-sequence token, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether the model expects [`bos`](Self::bos) in front of every prompt.
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Puts `bos` in front where the model expects it and it is not there yet: a chat template may
    /// have written it already, and a second one would spoil the answer.
    pub fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.bos.filter(|_| self.add_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        ids
    }

    /// The tokens that end a generation, in ascending order: what the file names, and well-known
    /// control tokens such as `<|im_end|>`.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Adds end-of-generation ids that other files of the model name.
    pub fn add_eos_ids(&mut self, ids: &[u32]) {
        self.eos.extend_from_slice(ids);
        self.eos.sort_unstable();
        self.eos.dedup();
    }

    /// Whether text starts with a space that the encoder put there and decoding takes away.
    pub fn strips_leading_space(&self) -> bool {
        self.strips_leading_space
    }

    fn check_ids(&self) -> Result<()> {
        let size = self.vocab.len();
        for id in self.bos.iter().chain(&self.eos) {
            if *id as usize >= size {
                return Err(Error::tokenizer(format!(
                    "special token id {id} is outside the vocabulary of {size}"
                )));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("add_bos", &self.add_bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// The characters by which byte-level vocabularies write the 256 bytes.
#[cfg(feature = "testing")]
pub(crate) fn byte_level_characters() -> [char; 256] {
    *byte_level::CHARS
}
