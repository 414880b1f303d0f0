//! The kinds `attention` and `cross_attention`: softmax attention over the pages of a KV cache.
//!
//! Both depend on a cache by key (`kv_cache`), lay a step out from that cache's plan, and read its
//! pages layer by layer through `kv.cache/1`. Neither keeps state for a request.
//!
//! - [`PagedAttention`] offers `attention/1`: a token attends to its own stream, causally or not,
//!   within a sliding window if one is set.
//! - [`PagedCrossAttention`] offers `cross_attention/1`: a token attends to the whole of another
//!   stream of its request, a context that an earlier step wrote.
//!
//! # Batch invariance
//!
//! On the CPU a token's output is the same to the bit however it came to be computed: alone, inside
//! a prompt, in any chunk of a prompt, beside any other requests, on any number of threads. Its keys
//! are taken in chunks of [`CHUNK`] that are aligned to the start of the stream; a chunk is reduced
//! by itself, and chunks are merged first to last. Blocks of tokens and the share of a thread are
//! made of whole (token, chunk) pairs, so no choice of them can change an order of summation.

#![forbid(unsafe_code)]

mod cache;
mod cpu;
mod cross;
mod cuda;
mod layout;
mod plan;
mod planned;
mod resource;
mod spec;

pub use cpu::CHUNK;
pub use cross::PagedCrossAttention;
pub use cuda::RowColumns;
pub use plan::{AttentionPlan, Block, Group, Row};
pub use resource::PagedAttention;
pub use spec::{AttentionSettings, Backend, CrossAttentionSettings};
