//! Answers as a stream of server-sent events.
//!
//! A failure before anything was generated is an ordinary HTTP error: the head of the response waits for
//! the first event, though not for ever. Later it is an event of its own, and the stream ends after it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;

use crate::choice::{Choice, Delta};
use crate::engine::Failure;
use crate::error::{ApiError, Result};
use crate::running::Running;

/// How long the head of a response waits for the first event.
const HEAD_WAITS: Duration = Duration::from_secs(10);
/// A comment is sent when nothing else was for so long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How a route writes its chunks.
pub trait Chunks: Send + 'static {
    /// Chunks before anything is generated.
    fn first(&mut self) -> VecDeque<Value>;
    /// What an answer has become; `None` when there is nothing to tell.
    fn chunk(&mut self, index: usize, delta: Delta, choice: &Choice) -> Option<Value>;
    /// The chunk after the last answer has ended.
    fn last(&mut self, usage: Value) -> Option<Value>;
}

struct State<C> {
    chunks: C,
    running: Running,
    queue: VecDeque<Event>,
    has_ended: bool,
}

/// Streams the answers.
///
/// # Errors
/// A failure before the first event.
pub async fn respond(chunks: impl Chunks, running: Running) -> Result<Response> {
    let mut state = State { chunks, running, queue: VecDeque::new(), has_ended: false };
    state.queue.extend(state.chunks.first().iter().map(event));
    if let Ok(next) = tokio::time::timeout(HEAD_WAITS, state.running.next()).await {
        let next = next.transpose().map_err(ApiError::from)?;
        state.take(next.map(Ok));
    }
    let events = stream::unfold(state, |mut state| async {
        let event = state.next().await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    let events = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = events.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of one kind buffer answers unless they are told.
    let buffering = HeaderName::from_static("x-accel-buffering");
    headers.insert(buffering, HeaderValue::from_static("no"));
    Ok(response)
}

impl<C: Chunks> State<C> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.has_ended {
                return None;
            }
            let next = self.running.next().await;
            self.take(next);
        }
    }

    fn take(&mut self, next: Option<Result<(usize, Delta), Failure>>) {
        match next {
            Some(Ok((i, delta))) => {
                let chunk = self.chunks.chunk(i, delta, &self.running.choices()[i]);
                self.queue.extend(chunk.as_ref().map(event));
            }
            Some(Err(failure)) => {
                self.queue.push_back(event(&ApiError::from(failure).to_json()));
                self.end();
            }
            None => {
                let last = self.chunks.last(self.running.usage());
                self.queue.extend(last.as_ref().map(event));
                self.end();
            }
        }
    }

    fn end(&mut self) {
        self.queue.push_back(Event::default().data("[DONE]"));
        self.has_ended = true;
    }
}

fn event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}
