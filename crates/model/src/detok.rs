//! A stream of token ids as a stream of text.
//!
//! A character may be spread over several tokens. Its bytes are held back until it is whole, so the
//! pieces of text, joined, are what [`Tokenizer::decode`] gives for all ids at once.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Turns ids into text as they come. One per request and choice.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The next text is the first one, and loses a space that encoding would have put there.
    at_start: bool,
    /// The start of a character, at most three bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// For ids that are a text of their own. With `skip_special`, control tokens give no text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let at_start = tokenizer.strips_leading_space();
        Self { tokenizer, skip_special, at_start, pending: Vec::new() }
    }

    /// For ids that go on after `prompt`: a space at their start is kept if the prompt has text.
    pub fn after(tokenizer: Arc<Tokenizer>, skip_special: bool, prompt: &[u32]) -> Self {
        let mut new = Self::new(tokenizer, skip_special);
        new.at_start &= !prompt.iter().any(|&id| new.bytes_of(id).is_some_and(|b| !b.is_empty()));
        new
    }

    /// The text that `id` completes: empty while a character is still open.
    pub fn push(&mut self, id: u32) -> String {
        let tokenizer = self.tokenizer.clone();
        let mut bytes = match tokenizer.token_bytes(id) {
            Some(bytes) if !(self.skip_special && tokenizer.is_special(id)) => bytes,
            _ => return String::new(),
        };
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        self.take_whole_characters()
    }

    /// Whether bytes of an unfinished character are held back.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The end of the text: U+FFFD for a character that never became whole, otherwise nothing.
    pub fn flush(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        let hidden = self.skip_special && self.tokenizer.is_special(id);
        if hidden { None } else { self.tokenizer.token_bytes(id) }
    }

    fn take_whole_characters(&mut self) -> String {
        let mut text = String::new();
        let mut taken = 0;
        loop {
            let rest = &self.pending[taken..];
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    taken = self.pending.len();
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&rest[..valid]));
                    taken += valid;
                    // `None`: more bytes may still make it a character.
                    if let Some(bad) = error.error_len() {
                        text.push(char::REPLACEMENT_CHARACTER);
                        taken += bad;
                        continue;
                    }
                }
            }
            break;
        }
        self.pending.drain(..taken);
        text
    }
}
