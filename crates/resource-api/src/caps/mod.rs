//! The capabilities that shipped kinds offer and models call, with the facts, plans and step
//! options that go with them. A third party's own interface has the same parts in its own crate.

mod attention;
mod kv;
mod logits;
mod positions;
mod sampler;

pub use attention::*;
pub use kv::*;
pub use logits::*;
pub use positions::*;
pub use sampler::*;
