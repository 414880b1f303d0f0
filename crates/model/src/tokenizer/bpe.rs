//! Byte-level BPE as GGUF files hold it. The merging itself is the `tokenizers` crate's.

use std::collections::HashSet;

use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Merges, Vocab as BpeVocab};

use super::byte_level;
use super::pretokenize::{PreTokenizer, Variant};
use super::vocab::TokenKind;
use crate::error::{Error, Result, quoted};

/// Encodes text that holds no special tokens.
pub(super) struct Bpe {
    model: BPE,
    pre: PreTokenizer,
    /// Bytes for which the vocabulary has no token: the model would drop them without a word.
    missing: Vec<u8>,
}

impl Bpe {
    /// `tokens` and `merges` as in the file; `kinds` one per token.
    pub(super) fn new(
        tokens: &[String],
        kinds: &[TokenKind],
        merges: &[String],
        variant: &Variant,
    ) -> Result<Self> {
        // Control tokens stay out: no text may turn into one by merging.
        let is_text = |id: usize| !matches!(kinds[id], TokenKind::Control | TokenKind::Unknown);
        let mut vocab = BpeVocab::with_capacity(tokens.len());
        let mut control = HashSet::new();
        for (id, token) in tokens.iter().enumerate() {
            if is_text(id) {
                vocab.entry(token.clone()).or_insert(id as u32);
            } else {
                control.insert(token.as_str());
            }
        }
        let missing = (0..=u8::MAX)
            .filter(|&b| {
                !vocab.contains_key(byte_level::CHARS[usize::from(b)].to_string().as_str())
            })
            .collect();
        let merges = parse_merges(merges, &control)?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(variant.ignore_merges)
            .build()
            .map_err(|e| Error::tokenizer(format!("tokenizer.ggml.merges: {e}")))?;
        Ok(Self { model, pre: PreTokenizer::new(variant)?, missing })
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if !self.missing.is_empty()
            && let Some(byte) = text.bytes().find(|b| self.missing.contains(b))
        {
            return Err(Error::tokenizer(format!(
                "the vocabulary has no token for byte {byte:#04x} of the text"
            )));
        }
        let mut word = String::new();
        self.pre.split(text, &mut |piece| {
            word.clear();
            byte_level::encode(piece, &mut word);
            let tokens = self
                .model
                .tokenize(&word)
                .map_err(|e| Error::tokenizer(format!("cannot encode {}: {e}", quoted(piece))))?;
            ids.extend(tokens.iter().map(|t| t.id));
            Ok(())
        })
    }
}

/// Splits `a b` into a pair. The first character belongs to the left part even if it is a space.
/// Merges that make a control token are left out with it.
fn parse_merges(merges: &[String], control: &HashSet<&str>) -> Result<Merges> {
    let mut pairs = Merges::with_capacity(merges.len());
    for (i, merge) in merges.iter().enumerate() {
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let parts =
            merge[first..].find(' ').map(|at| (&merge[..first + at], &merge[first + at + 1..]));
        match parts {
            Some((a, b)) if !b.is_empty() => {
                let makes_control = !control.is_empty()
                    && [a, b, &format!("{a}{b}")].iter().any(|part| control.contains(part));
                if !makes_control {
                    pairs.push((a.to_owned(), b.to_owned()));
                }
            }
            _ => {
                return Err(Error::tokenizer(format!(
                    "tokenizer.ggml.merges: entry {i}, {}, is no pair",
                    quoted(merge)
                )));
            }
        }
    }
    Ok(pairs)
}
