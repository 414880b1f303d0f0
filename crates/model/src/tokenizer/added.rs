//! Finds control and user-defined tokens in a text before the rest of it is encoded.

use aho_corasick::{AhoCorasick, MatchKind};

use super::vocab::{TokenKind, Vocab};
use crate::error::{Error, Result};

/// Searches for a set of token names: the leftmost match counts, the longest of those.
pub(super) struct AddedTokens {
    /// Control tokens too.
    all: Finder,
    /// Only user-defined tokens, which are text of a kind.
    user_defined: Finder,
}

/// A part of a text.
pub(super) enum Piece<'a> {
    Text(&'a str),
    Token(u32),
}

struct Finder {
    search: AhoCorasick,
    ids: Vec<u32>,
}

impl AddedTokens {
    pub(super) fn new(vocab: &Vocab) -> Result<Self> {
        Ok(Self {
            all: Finder::new(vocab, |_| true)?,
            user_defined: Finder::new(vocab, |kind| kind == TokenKind::UserDefined)?,
        })
    }

    /// Calls `each` for every part of `text`, in order; no text part is empty.
    pub(super) fn split<'a>(
        &self,
        text: &'a str,
        parse_special: bool,
        mut each: impl FnMut(Piece<'a>) -> Result<()>,
    ) -> Result<()> {
        let finder = if parse_special { &self.all } else { &self.user_defined };
        let mut done = 0;
        for found in finder.search.find_iter(text) {
            if done < found.start() {
                each(Piece::Text(&text[done..found.start()]))?;
            }
            each(Piece::Token(finder.ids[found.pattern().as_usize()]))?;
            done = found.end();
        }
        if done < text.len() {
            each(Piece::Text(&text[done..]))?;
        }
        Ok(())
    }
}

impl Finder {
    fn new(vocab: &Vocab, wanted: impl Fn(TokenKind) -> bool) -> Result<Self> {
        // An empty name would match everywhere.
        let (names, ids): (Vec<&str>, Vec<u32>) = vocab
            .added()
            .filter(|(_, name, kind)| !name.is_empty() && wanted(*kind))
            .map(|(id, name, _)| (name, id))
            .unzip();
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(names)
            .map_err(|e| Error::tokenizer(format!("special tokens: {e}")))?;
        Ok(Self { search, ids })
    }
}
