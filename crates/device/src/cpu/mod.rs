//! The CPU back end.

pub(crate) mod features;
pub(crate) mod matrix;
pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod simd;
