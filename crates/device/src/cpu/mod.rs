//! The CPU back end.

pub mod attention;
pub(crate) mod companion;
pub(crate) mod cpus;
pub(crate) mod features;
pub mod hash;
pub(crate) mod kv_view;
pub(crate) mod matrix;
pub(crate) mod memory;
pub mod ops;
pub(crate) mod pool;
pub(crate) mod shared_pool;
pub(crate) mod simd;
pub(crate) mod table;
