//! SentencePiece's BPE as GGUF files hold it: pieces with scores, merged best first.
//!
//! A text starts as its characters; again and again the neighbouring pair whose union is the piece
//! with the highest score is joined, the leftmost such pair first. What remains and is no piece is
//! written byte by byte.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::vocab::TokenKind;
use crate::error::{Error, Result, quoted};

/// How SentencePiece writes a space.
pub(super) const SPACE: char = '▁';

/// Encodes text that holds no special tokens.
pub(super) struct Spm {
    pieces: HashMap<String, (u32, f32)>,
    /// Ids of the single-byte tokens `<0x00>` to `<0xFF>`.
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
    space_prefix: bool,
}

impl Spm {
    /// `tokens`, `scores` and `kinds` as in the file, one of each per id.
    pub(super) fn new(
        tokens: &[String],
        scores: &[f32],
        kinds: &[TokenKind],
        unknown: Option<u32>,
        space_prefix: bool,
    ) -> Self {
        let mut pieces = HashMap::with_capacity(tokens.len());
        let mut bytes = [None; 256];
        for (id, token) in tokens.iter().enumerate() {
            match kinds[id] {
                TokenKind::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[usize::from(byte)] = Some(id as u32);
                    }
                }
                // No text may turn into a control token by merging.
                TokenKind::Control | TokenKind::Unknown => {}
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused => {
                    pieces.entry(token.clone()).or_insert((id as u32, scores[id]));
                }
            }
        }
        Self { pieces, bytes, unknown, space_prefix }
    }

    /// Appends the ids of `text`; `at_start` puts the space of the first word in front.
    pub(super) fn encode(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) -> Result<()> {
        let mut escaped = String::with_capacity(text.len() + 3);
        if at_start && self.space_prefix {
            escaped.push(SPACE);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        for piece in self.merge(&escaped) {
            self.push(piece, ids)?;
        }
        Ok(())
    }

    fn push(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        if let Some(&(id, _)) = self.pieces.get(piece) {
            ids.push(id);
            return Ok(());
        }
        let bytes: Option<Vec<u32>> = piece.bytes().map(|b| self.bytes[usize::from(b)]).collect();
        match (bytes, self.unknown) {
            (Some(bytes), _) => ids.extend(bytes),
            (None, Some(unknown)) => ids.push(unknown),
            (None, None) => {
                return Err(Error::tokenizer(format!(
                    "the vocabulary has no token for {} of the text, and no unknown token",
                    quoted(piece)
                )));
            }
        }
        Ok(())
    }

    /// The pieces that merging leaves, in order.
    fn merge<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        for (start, c) in text.char_indices() {
            let i = symbols.len();
            let previous = i.checked_sub(1);
            symbols.push(Symbol { start, end: start + c.len_utf8(), previous, next: Some(i + 1) });
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.propose(text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(Merge { left, right, end, .. }) = queue.pop() {
            // A symbol that has been joined meanwhile is empty or longer than it was.
            let stale = symbols[left].is_empty()
                || symbols[left].next != Some(right)
                || symbols[right].end != end;
            if stale {
                continue;
            }
            symbols[left].end = end;
            symbols[left].next = symbols[right].next;
            symbols[right].end = symbols[right].start;
            if let Some(next) = symbols[left].next {
                symbols[next].previous = Some(left);
                self.propose(text, &symbols, left, next, &mut queue);
            }
            if let Some(previous) = symbols[left].previous {
                self.propose(text, &symbols, previous, left, &mut queue);
            }
        }
        symbols.iter().filter(|s| !s.is_empty()).map(|s| &text[s.start..s.end]).collect()
    }

    fn propose(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Merge>,
    ) {
        let (start, end) = (symbols[left].start, symbols[right].end);
        if let Some(&(_, score)) = self.pieces.get(&text[start..end]) {
            queue.push(Merge { score, left, right, end });
        }
    }
}

/// The byte of a token named `<0x41>`.
pub(super) fn byte_of(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// A piece of the text in a doubly linked list; joined ones are empty.
struct Symbol {
    start: usize,
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

impl Symbol {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// A possible join of two neighbours, with the end it had when it was proposed.
struct Merge {
    score: f32,
    left: usize,
    right: usize,
    end: usize,
}

impl Ord for Merge {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Merge {}
