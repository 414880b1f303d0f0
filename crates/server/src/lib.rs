//! The HTTP front of an engine: OpenAI's completions and chat completions, and what stands around them.
//!
//! The front knows no engine. [`engine::channel`] makes the two ends of the way to one: the front keeps
//! the [`engine::Handle`], and whoever runs the engine works off the [`engine::Inbox`] on a thread of its
//! own. So the front is tested with engines that are made up.
//!
//! A request's way: [`routes`] and [`guard`] let it in, [`body`] reads it, [`fields`], [`generation`] and
//! [`prompt`] make requests of it, [`running`] gathers what the engine tells of them, [`choice`] makes text
//! of that, and [`completions`] or [`chat`] (with [`message`]) write it, as one object or through [`sse`].

#![forbid(unsafe_code)]

pub mod admin;
pub mod app;
pub mod body;
pub mod chat;
pub mod choice;
pub mod completions;
pub mod engine;
pub mod error;
pub mod fields;
pub mod generation;
pub mod guard;
pub mod listen;
pub mod logprobs;
pub mod message;
pub mod metrics;
pub mod openapi;
pub mod options;
pub mod prompt;
pub mod routes;
pub mod running;
pub mod snapshot;
pub mod sse;
pub mod stall;
pub mod tokens;

pub use app::{App, Model};
pub use options::{ApiKey, Format, ServerOptions, UnknownFields};
