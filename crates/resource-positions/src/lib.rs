//! Kind `positions`: which position every token of a step has, and rotary embedding by it.
//!
//! One counter for each stream says which position comes next. A plan gives every token its id, in
//! the row order of the cache that the resource depends on: explicit ids win; otherwise they count
//! up from the counter (`scheme = "sequential"`), or the whole span of a step shares one
//! (`scheme = "block"`, for tokens such as an image's that have no order among themselves).
//!
//! A plan depends on the counters and on the step alone, so laying a staged step out again costs no
//! more than checking whether it still fits. The only trace of a staged step is therefore in its
//! slot's buffers, and promoting or dropping it needs no book-keeping. What an admitted step will
//! add is noted on its streams, so that the step staged behind it starts at the right place.

#![forbid(unsafe_code)]

mod counters;
mod cuda;
mod layout;
mod resource;
mod rotary;
mod spec;

pub use resource::Positions;
pub use rotary::{RopeTable, frequencies};
pub use spec::{PositionsSpec, Scheme};
