//! CUDA devices: memory, streams, graphs, kernels, matrix products.
//!
//! Nothing here is needed to build, and where there is no driver everything answers with one clear
//! [`Error`](crate::Error): [`Context::of`] is where to begin. Kernels are CUDA C++ under `kernels/`,
//! compiled at first use or brought by a release.
//!
//! What the borrow checker sees is the order in which work is *given* to streams. What runs later is
//! ordered by the streams: two of them are ordered by an [`Event`], and device memory in use is kept
//! alive by waiting where it is dropped, or by a [`Quarantine`]. No call of this module records events
//! behind the caller's back, which would break a capture.

mod arch;
mod attention;
mod blas;
mod budget;
mod cache;
mod check;
mod columns;
mod compile;
mod context;
mod event;
mod fill;
mod graph;
mod kv;
mod last_rows;
mod library;
mod memory;
mod module;
mod ops;
mod quarantine;
mod rope;
mod sample;
mod source;
mod stream;
mod tensor;

pub use arch::Arch;
pub use attention::{AttentionRows, AttentionRule, AttentionShape, PagedAttention};
pub use blas::{Blas, Into};
pub use budget::Budget;
pub use cache::{KernelCache, SHIPPED_ENV};
pub use columns::{Columns, part_of, read_column};
pub use compile::{KernelUse, compile, compile_and_report, compiler_version};
pub use context::{Context, DeviceFacts, devices};
pub use event::Event;
pub use fill::fill_random;
pub use graph::Graph;
pub use kv::{KvPool, PageTable, Places};
pub use last_rows::LastRows;
pub use library::{LIBRARY_PATH_ENV, Library};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Args, Grid, Kernel, Module};
pub use ops::Ops;
pub use quarantine::Quarantine;
pub use rope::RopePhases;
pub use sample::{RowSampler, SampleRow, SampledRow};
pub use source::{Instance, named_instances};
pub use stream::Stream;
pub use tensor::read_tensor;
