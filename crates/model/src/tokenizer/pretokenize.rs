//! Cuts text into the words inside which a byte-level BPE merges.
//!
//! The patterns are those that the models were trained with. All of them end in `\s+(?!\S)|\s+`: a
//! run of white space leaves its last character to the word that follows. That look-ahead is done by
//! hand here, so that the rest is a regular expression in the strict sense, which is matched in
//! linear time whatever the text; a backtracking engine gives up on a long run of spaces.

use regex_automata::{Input, PatternID, meta::Regex};

use crate::error::{Error, Result, quoted};

/// How a `tokenizer.ggml.pre` cuts text.
pub(super) struct Variant {
    pub(super) names: &'static [&'static str],
    stages: &'static [Stage],
    /// A whole word that is in the vocabulary is that token, even where merging would not lead there.
    pub(super) ignore_merges: bool,
    /// Whether a beginning-of-sequence token is expected when the file does not say.
    pub(super) add_bos: bool,
}

/// One pass over each piece that the passes before it left.
enum Stage {
    /// Matches are pieces, and so is what lies between them.
    Isolate(&'static str),
    /// The same, for a pattern followed by `|\s+(?!\S)|\s+`.
    Words(&'static str),
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+";

/// The known variants, with the names by which converters have called them.
pub(super) const VARIANTS: [Variant; 5] = [
    Variant {
        names: &["llama-bpe", "llama-v3", "llama3"],
        stages: &[Stage::Words(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        )],
        ignore_merges: true,
        add_bos: true,
    },
    Variant {
        names: &["qwen2", "deepseek-r1-qwen"],
        stages: &[Stage::Words(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        )],
        ignore_merges: false,
        add_bos: false,
    },
    Variant {
        names: &["smollm"],
        stages: &[Stage::Isolate(r"\p{N}"), Stage::Words(GPT2)],
        ignore_merges: false,
        add_bos: false,
    },
    Variant {
        names: &["gpt-2"],
        stages: &[Stage::Words(GPT2)],
        ignore_merges: false,
        add_bos: false,
    },
    // What llama.cpp uses for files that do not name theirs.
    Variant {
        names: &["default"],
        stages: &[
            Stage::Isolate(r"[\p{P}\$\+<=>\^~\|]+"),
            Stage::Words(GPT2),
            Stage::Isolate(r"\p{N}+"),
            Stage::Isolate(r"[0-9][0-9][0-9]"),
        ],
        ignore_merges: false,
        add_bos: false,
    },
];

/// Finds a variant by one of its names.
pub(super) fn variant(name: &str) -> Result<&'static Variant> {
    VARIANTS.iter().find(|v| v.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = VARIANTS.iter().flat_map(|v| v.names).copied().collect();
        Error::tokenizer(format!(
            "tokenizer.ggml.pre = {} is not supported; supported: {}",
            quoted(name),
            known.join(", ")
        ))
    })
}

/// A variant, compiled.
pub(super) struct PreTokenizer {
    passes: Vec<Regex>,
}

/// The pattern added to `Stage::Words`; with it the last character is given back.
const WHITE_SPACE: PatternID = PatternID::new_unchecked(1);

impl PreTokenizer {
    pub(super) fn new(variant: &Variant) -> Result<Self> {
        let mut passes = Vec::with_capacity(variant.stages.len());
        for stage in variant.stages {
            let compiled = match stage {
                Stage::Isolate(pattern) => Regex::new(pattern),
                Stage::Words(pattern) => Regex::new_many(&[*pattern, r"\s+"]),
            };
            passes.push(
                compiled.map_err(|e| Error::tokenizer(format!("pre-tokenizer pattern: {e}")))?,
            );
        }
        Ok(Self { passes })
    }

    /// Calls `each` for the pieces of `text`, in order; together they are the whole text.
    pub(super) fn split<'a>(
        &self,
        text: &'a str,
        each: &mut impl FnMut(&'a str) -> Result<()>,
    ) -> Result<()> {
        split(&self.passes, text, each)
    }
}

fn split<'a>(
    passes: &[Regex],
    text: &'a str,
    each: &mut impl FnMut(&'a str) -> Result<()>,
) -> Result<()> {
    let Some((pass, rest)) = passes.split_first() else {
        return each(text);
    };
    let mut done = 0;
    while let Some(found) = pass.find(Input::new(text).range(done..)) {
        if found.is_empty() {
            break;
        }
        let (start, mut end) = (found.start(), found.end());
        if found.pattern() == WHITE_SPACE && end < text.len() {
            let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
            if start < end - last {
                end -= last;
            }
        }
        if done < start {
            split(rest, &text[done..start], each)?;
        }
        split(rest, &text[start..end], each)?;
        done = end;
    }
    if done < text.len() {
        split(rest, &text[done..], each)?;
    }
    Ok(())
}
