//! The table of tokens: each id's bytes and kind.

use std::collections::HashMap;

/// What a token is, as GGUF numbers it from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    /// Stands for what cannot be encoded.
    Unknown,
    /// Stands for no text: turn markers and the like.
    Control,
    /// Text that is always one token.
    UserDefined,
    Unused,
    /// One byte, for text without a better token.
    Byte,
}

impl TokenKind {
    /// Whether encoding looks for the token's name before anything else.
    pub(super) fn is_added(self) -> bool {
        matches!(self, Self::Control | Self::UserDefined | Self::Unknown)
    }
}

/// All tokens, their bytes in one buffer. Ids may have gaps.
#[derive(Debug, Default)]
pub(super) struct Vocab {
    bytes: Vec<u8>,
    tokens: Vec<Option<Token>>,
    added: HashMap<String, u32>,
}

#[derive(Debug, Clone)]
struct Token {
    start: usize,
    end: usize,
    kind: TokenKind,
}

impl Vocab {
    /// Sets the token `id`, whose bytes are its name if it is an added one.
    pub(super) fn set(&mut self, id: u32, bytes: &[u8], kind: TokenKind) {
        let slot = id as usize;
        if self.tokens.len() <= slot {
            self.tokens.resize(slot + 1, None);
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.tokens[slot] = Some(Token { start, end: self.bytes.len(), kind });
        if kind.is_added()
            && let Ok(name) = std::str::from_utf8(bytes)
        {
            self.added.entry(name.to_owned()).or_insert(id);
        }
    }

    /// One more than the largest id.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.token(id).map(|t| &self.bytes[t.start..t.end])
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.token(id).map(|t| t.kind)
    }

    pub(super) fn find_added(&self, name: &str) -> Option<u32> {
        self.added.get(name).copied()
    }

    /// Control, user-defined and unknown tokens with their ids, in the order of the ids.
    pub(super) fn added(&self) -> impl Iterator<Item = (u32, &str, TokenKind)> {
        self.tokens.iter().enumerate().filter_map(|(id, token)| {
            let token = token.as_ref().filter(|t| t.kind.is_added())?;
            let name = std::str::from_utf8(&self.bytes[token.start..token.end]).ok()?;
            Some((id as u32, name, token.kind))
        })
    }

    /// The control tokens whose names are in `names`.
    pub(super) fn control_ids<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = u32> + 'a {
        names
            .iter()
            .filter_map(|name| self.find_added(name))
            .filter(|&id| self.kind(id) == Some(TokenKind::Control))
    }

    fn token(&self, id: u32) -> Option<&Token> {
        self.tokens.get(id as usize)?.as_ref()
    }
}
