//! CUDA devices: memory, streams, graphs, kernels, matrix products.
//!
//! Nothing here is needed to build, and where there is no driver everything answers with one clear
//! [`Error`](crate::Error): [`Context::of`] is where to begin. Kernels are CUDA C++ under `kernels/`,
//! compiled at first use or brought by a release.
//!
//! What the borrow checker sees is the order in which work is *given* to streams. What runs later is
//! ordered by the streams: two of them are ordered by an [`Event`], and device memory in use is kept
//! alive by waiting where it is dropped. No call of this module records events behind the caller's back,
//! which would break a capture.
//!
//! Every operation checks device, type, shape, strides and alignment of its tensors before anything is
//! launched. Three things it cannot see, and whoever makes them answers for them:
//! - what a device column *holds*. The cache and the table skip pages, slots and entries that there are
//!   not, and sampling and embedding skip ids; attention trusts seats, lengths, first tokens and pages;
//! - that a column, which is an address and a length, outlives its [`Columns`] or [`PageTable`];
//! - that what a [`Graph`] uses is still allocated when it is replayed.
//!
//! A read of memory that is gone stops the device: its calls answer with errors from then on. A write
//! to it can hit whatever lies there now.

mod arch;
mod attention;
mod blas;
mod cache;
mod check;
mod columns;
mod compile;
mod context;
mod decode_step;
mod event;
mod fill;
mod gemv;
mod graph;
mod kv;
mod last_rows;
mod library;
mod memory;
mod module;
mod ops;
mod page_table;
mod pages;
mod rope;
mod sample;
mod source;
mod stream;
mod tensor;

pub use arch::Arch;
pub use attention::{AttentionRows, AttentionRule, AttentionShape, PagedAttention};
pub use blas::{Blas, Into};
pub use cache::{KernelCache, SHIPPED_ENV};
pub use columns::{Columns, part_of, read_column};
pub use compile::{KernelUse, compile, compile_and_report, compiler_version};
pub use context::{Context, DeviceFacts, devices};
pub use decode_step::{DecodeLayer, DecodeRows, DecodeShape, DecodeStep, DecodeWeights};
pub use event::Event;
pub use fill::fill_random;
pub use gemv::{Gemv, GemvInput, GemvInto};
pub use graph::Graph;
pub use kv::{KvPool, Places};
pub use last_rows::LastRows;
pub use library::{LIBRARY_PATH_ENV, Library};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Args, Grid, Kernel, Module};
pub use ops::Ops;
pub use page_table::PageTable;
pub use rope::RopePhases;
pub use sample::{RowSampler, SampleRow, SampledRow};
pub use source::{Instance, named_instances};
pub use stream::Stream;
pub use tensor::read_tensor;
