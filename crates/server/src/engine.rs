//! The way between the front and the thread that runs the engine.
//!
//! [`channel`] gives both ends. The front [submits](Handle::submit) requests and reads their
//! [`Events`]; the engine's thread takes [`Command`]s from its [`Inbox`] between steps, puts what
//! happens into the request's [`Sink`] and publishes a [`Snapshot`]. The engine's thread never waits for
//! a reader: a sink has room for a fixed number of events, and a request whose reader falls behind by more
//! is ended. Dropping [`Events`] cancels the request. What resources say of themselves takes time to ask
//! for, so that is in the snapshot only when somebody [asked](Handle::ask).

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::Stream;
use model::{FinishReason, GenerateRequest, Token, Usage};
use tokio::sync::{Notify, mpsc as stream};

use crate::metrics::{Counts, TokenTimer};
use crate::snapshot::Snapshot;

/// What happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// So many tokens of the prompt came from a cache; before any token, unless `Finished` says it.
    Cached(u32),
    /// The log-probabilities of the prompt's tokens, where they were asked for; before any token.
    /// The first token has none.
    Prompt(Vec<Option<Token>>),
    /// A token was generated.
    Token(Token),
    /// The request ended well. Nothing follows.
    Finished(FinishReason, Usage),
    /// The request failed. Nothing follows.
    Failed(Failure),
}

/// Why a request was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// HTTP status.
    pub status: u16,
    /// One line for the caller.
    pub message: String,
}

impl Failure {
    /// A failure with its HTTP status.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

/// Names a submitted request; never reused.
pub type Ticket = u64;

/// What the engine's thread is told.
#[derive(Debug)]
pub enum Command {
    /// Take a request in. A refusal is its first and only event.
    Submit(Ticket, Box<GenerateRequest>, Sink),
    /// Let go of a request: nobody reads its events any more. It may have ended already.
    Cancel(Ticket),
    /// Ask the resources, and [answer](Inbox::answer).
    Ask,
    /// Fail all requests with this and come back.
    Stop(Failure),
}

/// Limits of the channel.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most requests that are in the engine or on their way to it.
    pub requests: usize,
    /// Events that wait for one reader at most.
    pub buffered_events: usize,
}

/// Makes both ends.
pub fn channel(limits: Limits) -> (Handle, Inbox) {
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::new(Shared {
        limits,
        tickets: AtomicU64::new(0),
        in_flight: AtomicUsize::new(0),
        snapshot: Mutex::default(),
        is_asked: AtomicBool::new(false),
        answered: Notify::new(),
        counts: Counts::new().expect("the names and borders of our metrics are valid"),
    });
    (Handle { sender, shared: shared.clone() }, Inbox { receiver, shared })
}

#[derive(Debug)]
struct Shared {
    limits: Limits,
    tickets: AtomicU64,
    in_flight: AtomicUsize,
    snapshot: Mutex<Arc<Snapshot>>,
    /// An `Ask` is on its way: one is enough, however many wait for the answer.
    is_asked: AtomicBool,
    answered: Notify,
    counts: Counts,
}

/// The front's end. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    sender: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

impl Handle {
    /// Hands in `requests`, all or none. Never blocks.
    ///
    /// # Errors
    /// 429 when that would be more than the limit, 503 when the engine is gone.
    pub fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Events>, Failure> {
        let (count, most) = (requests.len(), self.shared.limits.requests);
        let more = |n: usize| n.checked_add(count).filter(|&sum| sum <= most);
        let in_flight = &self.shared.in_flight;
        if let Err(now) = in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            self.shared.counts.failed(429);
            return Err(Failure::new(
                429,
                format!("the engine has {now} requests of at most {most}: try again later"),
            ));
        }
        // Each place is given back by its sink.
        let places: Vec<Place> = requests.iter().map(|_| Place(self.shared.clone())).collect();
        let submit = |(request, place)| self.submit_one(request, place);
        requests.into_iter().zip(places).map(submit).collect()
    }

    fn submit_one(&self, request: GenerateRequest, place: Place) -> Result<Events, Failure> {
        let ticket = self.shared.tickets.fetch_add(1, Ordering::Relaxed);
        let (events, reader) = stream::channel(self.shared.limits.buffered_events);
        let reading = Arc::new(Reading::default());
        let timer = TokenTimer::start();
        let sink = Sink { events, reading: reading.clone(), timer, place };
        let gone = |_| Failure::new(503, "the engine has stopped");
        self.sender.send(Command::Submit(ticket, Box::new(request), sink)).map_err(gone)?;
        let room = self.shared.limits.buffered_events;
        let (sender, shared) = (self.sender.clone(), self.shared.clone());
        let started = Instant::now();
        Ok(Events { reader, ticket, sender, shared, started, reading, room, ended: false })
    }

    /// Requests that are in the engine or on their way to it.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Acquire)
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// The engine's state with what resources say of themselves now. Where the engine is in the middle of
    /// a long step, as it was last known after a while.
    pub async fn ask(&self) -> Arc<Snapshot> {
        let answered = self.shared.answered.notified();
        let mut answered = std::pin::pin!(answered);
        // From here on no answer is missed.
        answered.as_mut().enable();
        let is_asked = self.shared.is_asked.swap(true, Ordering::AcqRel);
        if is_asked || self.sender.send(Command::Ask).is_ok() {
            let _ = tokio::time::timeout(ASKING, answered).await;
        }
        self.snapshot()
    }

    /// The engine's latest state. What resources say may be older: see [`Self::ask`].
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts of requests.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Has the engine's thread fail all requests and come back. It may be gone already.
    pub fn stop(&self, why: Failure) {
        let _ = self.sender.send(Command::Stop(why));
    }
}

/// Status of a request whose reader fell too far behind.
const TOO_SLOW: u16 = 408;

/// How long an answer of the engine is waited for.
const ASKING: Duration = Duration::from_secs(1);

/// A request's place among those that are in flight.
#[derive(Debug)]
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What both ends of a request's events know of its reader.
#[derive(Debug, Default)]
struct Reading {
    /// It fell too far behind.
    overflowed: AtomicBool,
    /// It has all that it wants, and the request ended well.
    has_enough: AtomicBool,
}

/// The events of one request, in order.
#[derive(Debug)]
pub struct Events {
    reader: stream::Receiver<Event>,
    ticket: Ticket,
    sender: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    started: Instant,
    reading: Arc<Reading>,
    room: usize,
    ended: bool,
}

impl Events {
    /// The request has ended well, whether the engine says so or the front, which needs no more of it.
    pub fn finish(self, reason: FinishReason, usage: Usage) {
        self.shared.counts.finished(self.started.elapsed(), reason, usage);
        self.reading.has_enough.store(true, Ordering::Release);
    }
}

/// The last event is a `Finished` or a `Failed`.
impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match ready!(self.reader.poll_recv(context)) {
            Some(event) => event,
            None if self.reading.overflowed.load(Ordering::Acquire) => Event::Failed(Failure::new(
                TOO_SLOW,
                format!("the answer is read too slowly: more than {} tokens waited", self.room),
            )),
            None => Event::Failed(Failure::new(503, "the engine has stopped")),
        };
        self.ended = matches!(event, Event::Finished(..) | Event::Failed(_));
        Poll::Ready(Some(event))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.sender.send(Command::Cancel(self.ticket));
        }
    }
}

/// Where the engine's thread puts a request's events.
#[derive(Debug)]
pub struct Sink {
    events: stream::Sender<Event>,
    reading: Arc<Reading>,
    timer: TokenTimer,
    place: Place,
}

impl Sink {
    /// Puts an event; `false` when the reader is gone or too far behind: the request should be ended.
    #[must_use]
    pub fn put(&self, event: Event) -> bool {
        let counts = &self.place.0.counts;
        match &event {
            Event::Token(_) => self.timer.token(counts),
            Event::Failed(failure) => counts.failed(failure.status),
            _ => {}
        }
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(stream::error::TrySendError::Full(_)) => {
                self.reading.overflowed.store(true, Ordering::Release);
                counts.failed(TOO_SLOW);
                false
            }
            Err(stream::error::TrySendError::Closed(_)) => false,
        }
    }

    /// Whether the reader is gone because it has all that it wants: the request ended well.
    pub fn has_enough(&self) -> bool {
        self.reading.has_enough.load(Ordering::Acquire)
    }
}

/// The end of the engine's thread.
#[derive(Debug)]
pub struct Inbox {
    receiver: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
}

impl Inbox {
    /// The next command that is there already.
    pub fn try_next(&self) -> Option<Command> {
        self.receiver.try_recv().ok().inspect(|command| self.taken(command))
    }

    /// Waits up to `time` for the next command.
    pub fn wait(&self, time: Duration) -> Option<Command> {
        self.receiver.recv_timeout(time).ok().inspect(|command| self.taken(command))
    }

    /// Who asks from now on wants to know what is so from now on.
    fn taken(&self, command: &Command) {
        if matches!(command, Command::Ask) {
            self.shared.is_asked.store(false, Ordering::Release);
        }
    }

    /// Makes the engine's state known to all who asked for it.
    pub fn answer(&self, snapshot: Snapshot) {
        self.publish(snapshot);
        self.shared.answered.notify_waiters();
    }

    /// Makes the engine's state known.
    pub fn publish(&self, snapshot: Snapshot) {
        let mut place = self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Arc::new(snapshot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;

    fn pair(requests: usize, buffered_events: usize) -> (Handle, Inbox) {
        channel(Limits { requests, buffered_events })
    }

    fn token(id: u32) -> Event {
        Event::Token(Token { id, logprob: 0.0, top: Vec::new() })
    }

    fn accept(inbox: &Inbox) -> (Ticket, Sink) {
        match inbox.try_next() {
            Some(Command::Submit(ticket, _, sink)) => (ticket, sink),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn what_is_dropped_is_cancelled_and_what_has_ended_is_not() {
        let (handle, inbox) = pair(8, 8);
        let dropped = handle.submit(vec![GenerateRequest::default()]).unwrap();
        let (ticket, sink) = accept(&inbox);
        drop(dropped);
        assert!(matches!(inbox.try_next(), Some(Command::Cancel(t)) if t == ticket));
        assert!(!sink.put(token(1)), "nobody reads");
        let mut ended = handle.submit(vec![GenerateRequest::default()]).unwrap();
        let (_, sink) = accept(&inbox);
        assert!(sink.put(Event::Finished(FinishReason::Stop, Usage::default())));
        assert!(matches!(ended[0].next().await, Some(Event::Finished(..))));
        assert_eq!(ended[0].next().await, None);
        drop(ended);
        assert!(inbox.try_next().is_none());
    }

    #[tokio::test]
    async fn who_has_enough_is_told_apart_from_who_left() {
        let (handle, inbox) = pair(8, 8);
        for ends_well in [true, false] {
            let mut events = handle.submit(vec![GenerateRequest::default()]).unwrap();
            let (ticket, sink) = accept(&inbox);
            assert!(sink.put(token(1)));
            let mut events = events.remove(0);
            assert_eq!(events.next().await, Some(token(1)));
            match ends_well {
                true => events.finish(FinishReason::Stop, Usage::default()),
                false => drop(events),
            }
            assert!(!sink.put(token(2)));
            assert_eq!(sink.has_enough(), ends_well);
            assert!(matches!(inbox.try_next(), Some(Command::Cancel(t)) if t == ticket));
        }
    }

    #[tokio::test]
    async fn many_ask_once_and_nobody_waits_for_ever() {
        let (handle, inbox) = pair(2, 2);
        let running = |running| Snapshot { running, ..Snapshot::default() };
        let ask = |handle: &Handle| {
            let handle = handle.clone();
            tokio::spawn(async move { handle.ask().await.running })
        };
        let both = [ask(&handle), ask(&handle)];
        tokio::task::yield_now().await;
        inbox.publish(running(1));
        tokio::task::yield_now().await;
        assert!(both.iter().all(|asked| !asked.is_finished()), "that is no answer");
        assert!(matches!(inbox.try_next(), Some(Command::Ask)));
        assert!(inbox.try_next().is_none(), "one is enough");
        inbox.answer(running(2));
        for asked in both {
            assert_eq!(asked.await.unwrap(), 2);
        }
        // An engine that does not come back, and one that is gone.
        tokio::time::pause();
        assert_eq!(handle.ask().await.running, 2);
        drop(inbox);
        assert_eq!(handle.ask().await.running, 2);
    }

    #[tokio::test]
    async fn a_reader_that_falls_behind_gets_what_was_buffered_and_then_a_failure() {
        let (handle, inbox) = pair(8, 2);
        let mut events = handle.submit(vec![GenerateRequest::default()]).unwrap();
        let (_, sink) = accept(&inbox);
        assert!(sink.put(token(1)) && sink.put(token(2)));
        assert!(!sink.put(token(3)));
        drop(sink);
        assert_eq!(events[0].next().await, Some(token(1)));
        assert_eq!(events[0].next().await, Some(token(2)));
        match events[0].next().await {
            Some(Event::Failed(why)) => {
                assert_eq!(why.status, 408);
                assert!(why.message.contains("more than 2 tokens"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn places_are_counted_until_the_engine_lets_go() {
        let (handle, inbox) = pair(2, 2);
        let two = || vec![GenerateRequest::default(), GenerateRequest::default()];
        let events = handle.submit(two()).unwrap();
        assert_eq!(handle.submit(vec![GenerateRequest::default()]).unwrap_err().status, 429);
        drop(events);
        assert_eq!(handle.in_flight(), 2, "the engine still has them");
        while inbox.try_next().is_some() {}
        assert_eq!(handle.in_flight(), 0);
        drop(handle.submit(two()).unwrap());
        drop(inbox);
        assert_eq!(handle.submit(two()).unwrap_err().status, 503);
        assert_eq!(handle.in_flight(), 0);
    }
}
