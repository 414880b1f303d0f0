//! One answer: from the engine's events to text.

use std::sync::Arc;

use model::{Detokenizer, FinishReason, ModelPackage, StopStrings, Token, Usage};

use crate::engine::{Event, Failure};
use crate::generation::Generation;

/// What an event adds to an answer.
#[derive(Debug, Default)]
pub struct Delta {
    /// More of the text, perhaps none.
    pub text: String,
    /// The token that it comes from.
    pub token: Option<Token>,
    /// Tokens of the prompt with their log-probabilities.
    pub prompt: Option<Vec<Option<Token>>>,
    /// Set with the last one.
    pub finish: Option<FinishReason>,
}

/// An answer on its way.
#[derive(Debug)]
pub struct Choice {
    package: Arc<ModelPackage>,
    text: Detokenizer,
    stop: StopStrings,
    ignore_eos: bool,
    stop_token_ids: Vec<u32>,
    min_tokens: u32,
    keeps_stop: bool,
    /// The text of generated tokens is not wanted: only the prompt is looked at.
    is_prompt_only: bool,
    usage: Usage,
}

impl Choice {
    pub fn new(package: &Arc<ModelPackage>, generation: &Generation, prompt: &[u32]) -> Self {
        let request = &generation.request;
        let tokenizer = package.tokenizer.clone();
        Self {
            package: package.clone(),
            text: Detokenizer::after(tokenizer, generation.skip_special, prompt),
            stop: StopStrings::new(generation.stops.iter().cloned(), generation.keeps_stop),
            ignore_eos: request.ignore_eos,
            stop_token_ids: request.stop_token_ids.clone(),
            min_tokens: request.min_tokens,
            keeps_stop: generation.keeps_stop,
            is_prompt_only: false,
            usage: Usage { prompt_tokens: prompt.len() as u32, ..Usage::default() },
        }
    }

    /// Leaves out everything that is generated.
    #[must_use]
    pub fn prompt_only(mut self) -> Self {
        self.is_prompt_only = true;
        self
    }

    /// Takes an event in. After a delta with a `finish` the request is of no more use.
    ///
    /// # Errors
    /// The request's failure.
    pub fn take(&mut self, event: Event) -> Result<Delta, Failure> {
        match event {
            Event::Cached(tokens) => {
                self.usage.cached_tokens = tokens;
                Ok(Delta::default())
            }
            Event::Prompt(tokens) => Ok(Delta { prompt: Some(tokens), ..Delta::default() }),
            Event::Token(_) if self.is_prompt_only => {
                Ok(Delta { finish: Some(FinishReason::Length), ..Delta::default() })
            }
            Event::Token(token) => Ok(self.take_token(token)),
            Event::Finished(reason, usage) => {
                self.usage.cached_tokens = usage.cached_tokens;
                let rest = self.text.flush();
                let mut text = self.stop.push(&rest);
                text += &self.stop.flush();
                let found = self.stop.found().is_some();
                let reason = if found { FinishReason::Stop } else { reason };
                Ok(Delta { text, finish: Some(reason), ..Delta::default() })
            }
            Event::Failed(failure) => Err(failure),
        }
    }

    fn take_token(&mut self, token: Token) -> Delta {
        self.usage.completion_tokens += 1;
        let is_eos = !self.ignore_eos && self.package.tokenizer.eos_ids().contains(&token.id);
        let ends = is_eos || self.stop_token_ids.contains(&token.id);
        let piece = match ends && !self.keeps_stop {
            true => String::new(),
            false => self.text.push(token.id),
        };
        let text = match self.usage.completion_tokens > self.min_tokens {
            true => self.stop.push(&piece),
            false => self.stop.pass(&piece),
        };
        let finish = self.stop.found().map(|_| FinishReason::Stop);
        Delta { text, token: Some(token), prompt: None, finish }
    }

    /// The stop string that ended the answer.
    pub fn found_stop(&self) -> Option<&str> {
        self.stop.found()
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }
}
