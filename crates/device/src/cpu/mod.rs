//! The CPU back end.

pub(crate) mod pool;
