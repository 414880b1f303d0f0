//! The two products of attention, over rows of cached keys or values stored as f32, f16, bf16, fp8 or int8.
//!
//! Rows are those of one head in one page; several query heads may share them, and each row is then
//! read and widened once for all. A score sums its row in one fixed order; a weighted sum adds rows
//! one after the other. So neither the number of heads taken together nor the division of a context
//! into pages changes a bit. All run on the calling thread with the instructions of
//! [`CpuFeatures::current`].

mod rows;
mod scaled;
mod scores;
mod spans;
mod sums;

pub(crate) use self::rows::{Element, Slice, store_elements};
pub use self::rows::{Rows, Storage, load_row, store_row};
pub use self::scaled::SCALE_BYTES;
pub(crate) use self::scaled::steps_of;
pub use self::scores::dot_rows;
pub use self::spans::Span;
pub use self::sums::accumulate_rows;
#[cfg(doc)]
use crate::CpuFeatures;

#[cfg(test)]
pub(crate) mod tests;
