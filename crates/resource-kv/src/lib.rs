//! Kind `kv`: a paged cache of keys and values.
//!
//! Tokens of a stream (a request's label) lie in pages of a fixed number of slots, taken from one
//! pool. `admit` reserves what a step's spans need, all or nothing; `plan` writes the step's page
//! table and write addresses; the model stores each layer's keys and values through
//! [`resource_api::KvCache`]; `commit` makes the new tokens part of the streams. Page 0 is the sink,
//! which belongs to nobody: padding rows write and read there.
//!
//! The work of a step depends on its rows and new tokens only, not on how long the streams or how
//! large the pool are: page tables stay from step to step and only what is new is written.
//!
//! | file | holds |
//! |---|---|
//! | `spec` | settings and how many pages they mean |
//! | `geometry` | where a page, layer, head and slot lie in memory |
//! | `memory` | that memory |
//! | `pool` | which page is free, how many owners the others have, and which are kept for what they hold |
//! | `keys`, `index` | what a page holds, as a digest, and the page that has it |
//! | `tokens`, `chain`, `prefix` | the known tokens of a request, and sharing the pages of those that begin alike |
//! | `branches` | where prompts part within a page |
//! | `overrides` | what a request may say to the cache |
//! | `stream` | streams of requests |
//! | `step`, `rows` | what a step in flight has reserved; its segments as columns |
//! | `state` | all of that under one lock: requests come and go |
//! | `tiers` | pages in host memory and in a file |
//! | `offload`, `spill` | requests, and cached pages, that go there and come back |
//! | `handover` | streams that go to another worker or come from one |
//! | `sessions` | streams that outlive their request |
//! | `admit`, `reserve`, `undo` | taking what a step needs, all or nothing, and giving it back |
//! | `plan`, `commit` | laying a step out, and making it part of its streams |
//! | `seats` | page tables that stay from step to step |
//! | `audit` | the state for people, and its check |
//! | `board` | what capability calls read without the lock |
//! | `cache` | the capability `kv.cache/1` |
#![forbid(unsafe_code)]

mod admit;
mod audit;
mod board;
mod branches;
mod cache;
mod chain;
mod commit;
mod copies;
mod declared;
mod geometry;
mod handover;
mod index;
mod keys;
mod memory;
mod offload;
mod overrides;
mod plan;
mod pool;
mod prefix;
mod publish;
mod reserve;
mod resource;
mod restore;
mod rows;
mod seats;
mod sessions;
mod spec;
mod spill;
mod state;
mod step;
mod stream;
mod tiers;
mod tokens;
mod undo;

pub use resource::Kv;
pub use spec::KvSpec;
