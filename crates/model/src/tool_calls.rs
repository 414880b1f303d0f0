//! Tool calls in what a model writes: text comes in pieces, content and calls come out.
//!
//! Models write calls as text, each family in its own format. The parser gives content on as soon as
//! it cannot be the beginning of a call, and a call as a whole, once it is complete: only then is it known to be one. What looked like a call and is none comes out as content, to the letter. White
//! space beside a call belongs to the format and is dropped. How the text was cut into pieces makes no
//! difference.

use serde::Deserialize;
use serde_json::value::RawValue;

use self::object::{ObjectScanner, Progress};
use self::tagged::{TaggedScanner, Types};

mod object;
mod tagged;

/// How a family of models writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 and 3, Qwen2.5, Qwen3.
    Hermes,
    /// Llama 3: an answer that is a JSON object with `name` and `parameters`, several with `;` between
    /// them, also after `<|python_tag|>`; and `<function=name>{…}</function>`.
    Llama3,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`:
    /// Qwen3-Coder.
    Qwen3Coder,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// A JSON object, as the model wrote it where it wrote JSON.
    pub arguments: String,
}

/// What a piece of text turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolDelta {
    /// Text for the reader; never empty.
    Content(String),
    /// A complete call.
    Call(ToolCall),
}

impl ToolFormat {
    /// The format that a chat template asks the model for; `None` if it asks for none of these.
    pub fn of_template(source: &str) -> Option<Self> {
        let names = |text: &str| source.contains(text);
        if names("<function=") && names("<parameter=") {
            Some(Self::Qwen3Coder)
        } else if names("<tool_call>") {
            Some(Self::Hermes)
        } else if names("<|python_tag|>") || names("<function=") {
            Some(Self::Llama3)
        } else {
            None
        }
    }

    const fn openers(self) -> &'static [Opener] {
        match self {
            Self::Hermes => &[Opener::ToolCall],
            Self::Llama3 => &[Opener::PythonTag, Opener::Function],
            // The outer mark is forgotten at times.
            Self::Qwen3Coder => &[Opener::Tagged, Opener::TaggedFunction],
        }
    }

    /// Whether a call may stand without any mark, where an answer begins or another call ends.
    const fn has_bare_calls(self) -> bool {
        matches!(self, Self::Llama3)
    }
}

/// What a call begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opener {
    ToolCall,
    PythonTag,
    Function,
    /// The object itself.
    Bare,
    Tagged,
    TaggedFunction,
}

impl Opener {
    const fn text(self) -> &'static str {
        match self {
            Self::ToolCall | Self::Tagged => "<tool_call>",
            Self::PythonTag => "<|python_tag|>",
            Self::Function | Self::TaggedFunction => "<function=",
            Self::Bare => "",
        }
    }

    const fn closer(self) -> &'static str {
        match self {
            Self::ToolCall | Self::Tagged | Self::TaggedFunction => "</tool_call>",
            Self::Function => "</function>",
            Self::PythonTag | Self::Bare => "",
        }
    }
}

/// Reads one answer of a model.
#[derive(Debug)]
pub struct ToolCallParser {
    format: ToolFormat,
    /// What bare text in a call means.
    types: Types,
    /// Text that nothing has been said about yet.
    held: String,
    /// What may be a call, beginning in `held`.
    candidate: Option<Candidate>,
    /// What the last thing was.
    after: After,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Start,
    Content,
    /// A call, whose closer may still come.
    Call(&'static str),
}

#[derive(Debug)]
struct Candidate {
    opener: Opener,
    /// Where the opener begins.
    start: usize,
    /// For `<function=name>`; empty until known, and for the others.
    name: String,
    /// Where the object begins, once it is known.
    object: Option<usize>,
    scanner: ObjectScanner,
    /// For calls that are written with tags.
    tagged: Option<TaggedScanner>,
    /// Up to where `held` was looked at.
    looked: usize,
}

/// What became of a candidate.
enum Verdict {
    Undecided,
    Call(ToolCall, usize),
    NoCall,
}

impl ToolCallParser {
    /// A parser for one answer.
    pub fn new(format: ToolFormat) -> Self {
        let types = Types::default();
        Self { format, types, held: String::new(), candidate: None, after: After::Start }
    }

    /// Tells which tools there are, as in the OpenAI API: some formats do not say what is a text.
    #[must_use]
    pub fn with_tools(mut self, tools: &serde_json::Value) -> Self {
        self.types = Types::of(tools);
        self
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, piece: &str) -> Vec<ToolDelta> {
        self.held.push_str(piece);
        self.advance(false)
    }

    /// Takes the end of the answer, and gives what was held back.
    pub fn finish(&mut self) -> Vec<ToolDelta> {
        self.advance(true)
    }

    /// Content and calls of a whole answer.
    pub fn parse(format: ToolFormat, text: &str) -> (String, Vec<ToolCall>) {
        let mut parser = Self::new(format);
        let mut deltas = parser.push(text);
        deltas.extend(parser.finish());
        let (mut content, mut calls) = (String::new(), Vec::new());
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => content.push_str(&text),
                ToolDelta::Call(call) => calls.push(call),
            }
        }
        (content, calls)
    }

    fn advance(&mut self, at_end: bool) -> Vec<ToolDelta> {
        let mut deltas = Vec::new();
        loop {
            if self.candidate.is_none() && !self.skip_closer(at_end) {
                break;
            }
            if self.candidate.is_none() {
                self.candidate = self.find();
            }
            let Some(candidate) = &mut self.candidate else {
                let keep = if at_end { self.held.len() } else { self.content_end() };
                self.give(keep, &mut deltas);
                if at_end {
                    self.held.clear();
                }
                break;
            };
            match candidate.look(&self.held, &self.types) {
                Verdict::Undecided if !at_end => {
                    let before = self.held[..candidate.start].trim_end().len();
                    self.give(before, &mut deltas);
                    break;
                }
                Verdict::Undecided | Verdict::NoCall => {
                    // The mark is text; what follows it may hold a call all the same.
                    let text = candidate.start + candidate.opener.text().len().max(1);
                    self.candidate = None;
                    self.give(text, &mut deltas);
                }
                Verdict::Call(call, end) => {
                    let (before, closer) =
                        (self.held[..candidate.start].trim_end().len(), candidate.opener.closer());
                    self.give(before, &mut deltas);
                    // `give` took `before` bytes off the front.
                    self.held.drain(..end - before);
                    self.candidate = None;
                    self.after = After::Call(closer);
                    deltas.push(ToolDelta::Call(call));
                }
            }
        }
        deltas
    }

    /// Gives the first `count` bytes that are held as content.
    fn give(&mut self, count: usize, deltas: &mut Vec<ToolDelta>) {
        if count == 0 {
            return;
        }
        let text: String = self.held.drain(..count).collect();
        if let Some(candidate) = &mut self.candidate {
            candidate.shift(count);
        }
        self.after = After::Content;
        match deltas.last_mut() {
            Some(ToolDelta::Content(before)) => before.push_str(&text),
            _ => deltas.push(ToolDelta::Content(text)),
        }
    }

    /// Drops what ends a call and what separates calls. False while it is not known what comes.
    fn skip_closer(&mut self, at_end: bool) -> bool {
        while let After::Call(closer) = self.after {
            let rest = self.held.trim_start();
            let blank = self.held.len() - rest.len();
            let (closed, separated) = (
                !closer.is_empty() && rest.starts_with(closer),
                self.format.has_bare_calls() && rest.starts_with(';'),
            );
            if closed {
                self.held.drain(..blank + closer.len());
                self.after = After::Call("");
            } else if separated {
                self.held.drain(..=blank);
                self.after = After::Call("");
            } else if closer.starts_with(rest) {
                // Nothing yet, or a part of the closer.
                if at_end {
                    self.held.clear();
                }
                return at_end;
            } else {
                self.held.drain(..blank);
                return true;
            }
        }
        true
    }

    /// The next candidate in what is held.
    fn find(&self) -> Option<Candidate> {
        if self.format.has_bare_calls() && self.after != After::Content {
            let start = self.held.len() - self.held.trim_start().len();
            if self.held[start..].starts_with('{') {
                return Some(Candidate::new(Opener::Bare, start));
            }
        }
        let openers = self.format.openers().iter();
        let found = openers.filter_map(|&opener| Some((self.held.find(opener.text())?, opener)));
        found.min_by_key(|(start, _)| *start).map(|(start, opener)| Candidate::new(opener, start))
    }

    /// Up to where what is held cannot belong to a call: neither a part of an opener at its end nor
    /// white space before one.
    fn content_end(&self) -> usize {
        let openers = self.format.openers().iter().map(|opener| opener.text());
        let part = |opener: &str| {
            (1..opener.len()).rev().find(|&n| self.held.ends_with(&opener[..n])).unwrap_or(0)
        };
        let part = openers.map(part).max().unwrap_or(0);
        self.held[..self.held.len() - part].trim_end().len()
    }
}

impl Candidate {
    fn new(opener: Opener, start: usize) -> Self {
        let looked = start + opener.text().len();
        let tagged = match opener {
            Opener::Tagged => Some(TaggedScanner::at(looked)),
            Opener::TaggedFunction => Some(TaggedScanner::at(start)),
            _ => None,
        };
        let (name, scanner) = (String::new(), ObjectScanner::default());
        Self { opener, start, name, object: None, scanner, tagged, looked }
    }

    /// Text before the candidate was taken away.
    fn shift(&mut self, count: usize) {
        self.start -= count;
        self.looked -= count;
        self.object = self.object.map(|at| at - count);
        if let Some(tagged) = &mut self.tagged {
            tagged.shift(count);
        }
    }

    fn look(&mut self, held: &str, types: &Types) -> Verdict {
        if let Some(tagged) = &mut self.tagged {
            return match tagged.look(held) {
                tagged::Progress::Open => Verdict::Undecided,
                tagged::Progress::Invalid => Verdict::NoCall,
                tagged::Progress::Complete(end) => Verdict::Call(tagged.call(types), end),
            };
        }
        if self.opener == Opener::Function && self.name.is_empty() {
            let rest = &held[self.looked..];
            let Some(end) = rest.find('>') else {
                return match rest.chars().all(in_name) {
                    true => Verdict::Undecided,
                    false => Verdict::NoCall,
                };
            };
            if end == 0 || !rest[..end].chars().all(in_name) {
                return Verdict::NoCall;
            }
            rest[..end].clone_into(&mut self.name);
            self.looked += end + 1;
        }
        let object = match self.object {
            Some(object) => object,
            None => {
                let rest = held[self.looked..].trim_start();
                if rest.is_empty() {
                    return Verdict::Undecided;
                }
                self.looked = held.len() - rest.len();
                *self.object.insert(self.looked)
            }
        };
        let progress = self.scanner.push(&held.as_bytes()[self.looked..]);
        match progress {
            Progress::Invalid => Verdict::NoCall,
            Progress::Open => {
                self.looked = held.len();
                // An answer that merely is JSON must not be held back until it ends.
                let bare = self.opener == Opener::Bare;
                match bare && !may_begin_call(&held[object..]) {
                    true => Verdict::NoCall,
                    false => Verdict::Undecided,
                }
            }
            Progress::Complete(length) => {
                let end = self.looked + length;
                match self.call(&held[object..end]) {
                    Some(call) => Verdict::Call(call, end),
                    None => Verdict::NoCall,
                }
            }
        }
    }

    fn call(&self, object: &str) -> Option<ToolCall> {
        if self.opener == Opener::Function {
            // It was scanned; whether it is JSON in every detail is seen here.
            serde_json::from_str::<&RawValue>(object).ok()?;
            return Some(ToolCall { name: self.name.clone(), arguments: object.to_owned() });
        }
        let written: Written<'_> = serde_json::from_str(object).ok()?;
        let arguments = match written.arguments {
            None => "{}".to_owned(),
            Some(raw) if raw.get().starts_with('{') => raw.get().to_owned(),
            // The object once more as a string.
            Some(raw) => {
                let inner: String = serde_json::from_str(raw.get()).ok()?;
                serde_json::from_str::<serde_json::Map<_, _>>(&inner).ok()?;
                inner
            }
        };
        (!written.name.is_empty()).then_some(ToolCall { name: written.name, arguments })
    }
}

/// A call as models write it.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow, default, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Names of tools, as the OpenAI API allows them, and dots.
fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.".contains(c)
}

/// Whether an object without any mark may be a call: by its first key.
fn may_begin_call(object: &str) -> bool {
    let Some(rest) = object.strip_prefix('{') else { return false };
    let rest = rest.trim_start();
    let keys = ["\"name\"", "\"type\"", "\"parameters\"", "\"arguments\"", "\"id\""];
    keys.iter().any(|key| rest.starts_with(key) || key.starts_with(rest))
}
