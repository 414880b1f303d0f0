//! The answers to one HTTP request, while the engine works on them.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use model::Usage;
use serde_json::{Value, json};

use crate::app::Model;
use crate::choice::{Choice, Delta};
use crate::engine::{Events, Failure};
use crate::error::{ApiError, Result};
use model::GenerateRequest;

/// Answers with their events. Dropping it cancels those that have not ended.
#[derive(Debug)]
pub struct Running {
    choices: Vec<Choice>,
    /// `None` for those that have ended.
    events: Vec<Option<Events>>,
    /// Who is asked first, so that none comes off badly.
    first: usize,
    /// How many answers belong to one prompt.
    per_prompt: usize,
}

impl Running {
    /// Hands the requests to the engine.
    ///
    /// # Errors
    /// 429 when it has too many, 503 when it is gone.
    pub fn start(
        model: &Model,
        choices: Vec<Choice>,
        requests: Vec<GenerateRequest>,
        per_prompt: usize,
    ) -> Result<Self> {
        let events = model.engine.submit(requests).map_err(|failure| {
            let seconds = retry_after(model);
            ApiError::from(failure).with_retry_after(seconds)
        })?;
        let events = events.into_iter().map(Some).collect();
        Ok(Self { choices, events, first: 0, per_prompt })
    }

    /// The next thing that happens to any answer, with its index; `None` when all have ended.
    ///
    /// # Errors
    /// The failure of one of them; the others are cancelled.
    pub async fn next(&mut self) -> Option<Result<(usize, Delta), Failure>> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<(usize, Delta), Failure>>> {
        let (count, first) = (self.events.len(), self.first);
        let mut is_open = false;
        for i in (0..count).map(|i| (first + i) % count) {
            let Some(events) = &mut self.events[i] else { continue };
            is_open = true;
            let Poll::Ready(event) = Pin::new(events).poll_next(context) else { continue };
            self.first = i + 1;
            let Some(event) = event else {
                self.events[i] = None;
                continue;
            };
            let taken = self.choices[i].take(event);
            match &taken {
                Ok(Delta { finish: Some(reason), .. }) => {
                    if let Some(events) = self.events[i].take() {
                        events.finish(*reason, self.choices[i].usage());
                    }
                }
                Ok(_) => {}
                Err(_) => self.events.iter_mut().for_each(|events| *events = None),
            }
            return Poll::Ready(Some(taken.map(|delta| (i, delta))));
        }
        if is_open { Poll::Pending } else { Poll::Ready(None) }
    }

    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Tokens of all answers; a prompt counts once, however many answers it has.
    pub fn usage(&self) -> Value {
        let mut sum = Usage::default();
        for (i, choice) in self.choices.iter().enumerate() {
            let usage = choice.usage();
            sum.completion_tokens += usage.completion_tokens;
            if i % self.per_prompt == 0 {
                sum.prompt_tokens += usage.prompt_tokens;
                sum.cached_tokens += usage.cached_tokens;
            }
        }
        json!({
            "prompt_tokens": sum.prompt_tokens,
            "completion_tokens": sum.completion_tokens,
            "total_tokens": sum.prompt_tokens + sum.completion_tokens,
            "prompt_tokens_details": { "cached_tokens": sum.cached_tokens },
        })
    }
}

/// Seconds until a place may be free: a guess from how many wait for each place in a step.
fn retry_after(model: &Model) -> u64 {
    let rounds = model.engine.in_flight() as u64 / u64::from(model.max_num_seqs.max(1));
    rounds.clamp(1, 30)
}
