//! Memory, threads and kernels behind a safe interface.
//!
//! Beside `resource-api` this is the only crate of the workspace with `unsafe` code: what it exports
//! is safe to call with any input, and every wrong input is an [`Error`] or a documented panic. What
//! addresses on a device stand for cannot all be checked: [`cuda`] says what is left to its callers.
//!
//! Kernels choose their instructions at run time by [`CpuFeatures`]. At one feature level a row's
//! result depends on that row alone: every reduction has one fixed order, so neither the number of
//! rows, nor a row's place among them, nor the number of threads changes a single bit.

mod block_type;
mod budget;
mod cpu;
pub mod cuda;
mod error;
mod float8;
mod mapped_file;
mod parallel;
mod signals;
mod sync;

pub use block_type::BlockType;
pub use budget::Budget;
pub use cpu::companion::Companion;
pub use cpu::cpus::{Cpus, default_threads, pinned_pool};
pub use cpu::features::{CpuFeatures, set_cpu_features, use_features_of};
pub use cpu::matrix::{Activations, Matrix, PackOptions, Scratch, matmul_all};
pub use cpu::memory::{AlignedBuffer, prefer_large_pages};
pub use cpu::pool::Pool;
pub use cpu::shared_pool::{
    PoolReader, PoolType, PoolView, PoolWriter, RawPool, SharedPool, Turns,
};
pub use cpu::table::{Table, prefetch, prefetch_at};
pub use cpu::{attention, hash, ops};
pub use error::{Error, Result};
pub use float8::E4m3;
pub use mapped_file::MappedFile;
pub use parallel::{Parallel, Serial, for_each_chunk_mut};
pub use signals::let_large_files_fail;
