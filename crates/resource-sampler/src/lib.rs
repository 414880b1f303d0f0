//! Kind `sampler`: from logits to tokens.
//!
//! A row goes through, in this order: the logits processors that resources built later offer, in
//! build order; the request's biases; the repetition penalty; presence and frequency penalties, and minus
//! infinity for tokens that may not come yet (`min_tokens`); temperature; top-k; top-p over what top-k left; min-p over
//! what top-p left. Of the tokens that are left one is drawn, by one random number, along the tokens
//! in the order of their ids. At temperature 0 the best token is taken, of equals the smallest id.
//!
//! The random number is a function of (seed, choice, number of tokens sampled for the request so
//! far) and of nothing else, and a row is computed by itself in a fixed order. So neither the place
//! in the batch, nor the other requests in it, nor the number of threads can change a token.
//!
//! Weights are float32 and their sums whole numbers, which do not depend on an order. That is how a CUDA
//! device draws the same token from the same logits.
//!
//! What was sampled stays sampled: a request that is reset (preempted, to be run again from its
//! prompt and its output) goes on in its sequence of random numbers.

#![forbid(unsafe_code)]

mod adjust;
mod cuda;
mod draw;
mod params;
mod philox;
mod plan;
mod requests;
mod resource;
mod row;
mod seen;
mod spec;
mod truncate;

pub use params::SamplingParams;
pub use philox::{philox4x32, random_bits};
pub use resource::Sampler;
pub use spec::SamplerSpec;
