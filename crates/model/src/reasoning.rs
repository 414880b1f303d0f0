//! What a model thinks before it answers, told apart from the answer.
//!
//! Such models write `<think>…</think>` before the answer; some templates write the first mark themselves,
//! at the end of the prompt. White space beside a mark belongs to the format and is dropped. Only what may
//! still become a mark, or white space beside one, is held back. A mark anywhere else is text: thoughts
//! stand at the beginning of an answer, once.

const OPENER: &str = "<think>";
const CLOSER: &str = "</think>";

/// How a family of models writes its thoughts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// `<think>…</think>`: DeepSeek-R1, Qwen3, QwQ.
    Think,
}

impl ReasoningFormat {
    /// The format that a chat template shows; `None` if it shows none.
    pub fn of_template(source: &str) -> Option<Self> {
        source.contains(CLOSER).then_some(Self::Think)
    }
}

/// What a piece of text turned out to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReasoningDelta {
    pub reasoning: String,
    pub content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// An opener may come; with `true`, thoughts come in any case.
    Start(bool),
    /// After the opener, before the first letter.
    Opened,
    Thoughts,
    /// After the closer, before the answer's first letter.
    Gap,
    Content,
}

/// Reads one answer of a model.
#[derive(Debug)]
pub struct ReasoningParser {
    state: State,
    /// Text that nothing has been said about yet.
    held: String,
}

impl ReasoningParser {
    /// A parser for an answer to `prompt`, which may have opened the thoughts already.
    pub fn after(_: ReasoningFormat, prompt: &str) -> Self {
        let is_open = prompt.trim_end().ends_with(OPENER);
        Self { state: State::Start(is_open), held: String::new() }
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, piece: &str) -> ReasoningDelta {
        self.held.push_str(piece);
        self.advance(false)
    }

    /// Takes the end of the answer, and gives what was held back.
    pub fn finish(&mut self) -> ReasoningDelta {
        self.advance(true)
    }

    fn advance(&mut self, at_end: bool) -> ReasoningDelta {
        let mut delta = ReasoningDelta::default();
        loop {
            let rest = self.held.trim_start();
            let blank = self.held.len() - rest.len();
            match self.state {
                State::Start(_) if rest.starts_with(OPENER) => {
                    self.held.drain(..blank + OPENER.len());
                    self.state = State::Opened;
                }
                State::Start(_) if !at_end && OPENER.starts_with(rest) => break,
                State::Start(true) => self.state = State::Opened,
                State::Start(false) => self.state = State::Content,
                State::Opened | State::Gap if rest.is_empty() => {
                    self.held.clear();
                    break;
                }
                State::Opened | State::Gap => {
                    self.held.drain(..blank);
                    let is_open = self.state == State::Opened;
                    self.state = if is_open { State::Thoughts } else { State::Content };
                }
                State::Thoughts => match self.held.find(CLOSER) {
                    Some(end) => {
                        delta.reasoning += self.held[..end].trim_end();
                        self.held.drain(..end + CLOSER.len());
                        self.state = State::Gap;
                    }
                    None => {
                        let keep = if at_end { self.held.len() } else { self.thoughts_end() };
                        delta.reasoning.extend(self.held.drain(..keep));
                        break;
                    }
                },
                State::Content => {
                    delta.content += &std::mem::take(&mut self.held);
                    break;
                }
            }
        }
        delta
    }

    /// Up to where what is held can be neither a part of the closer nor white space before it.
    fn thoughts_end(&self) -> usize {
        let part = (1..CLOSER.len()).rev().find(|&n| self.held.ends_with(&CLOSER[..n]));
        self.held[..self.held.len() - part.unwrap_or(0)].trim_end().len()
    }
}
