//! Attention over a paged cache: which kernel takes which rows, and with what geometry.
//!
//! The kernels state their arguments in `kernels/attention.cuh`; what is computed here must agree with
//! what they say there.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use resource_api::{DeviceColumn, TensorView, TensorViewMut};

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use crate::error::{Error, Result, check_len};

mod shape;
mod tensors;

pub use shape::AttentionShape;
use shape::DecodeGeometry;
pub(super) use shape::named_instances;

/// How queries see keys; fixed for a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRule {
    /// Factor of the products of queries and keys; above 0.
    pub scale: f32,
    /// Whether a token sees only what comes before it, itself included.
    pub causal: bool,
    /// Most keys that a token sees, itself included; 0 for all. With `causal` only.
    pub window: u32,
    /// Bound of the products, by `cap * tanh(x / cap)`; 0 for none.
    pub softcap: f32,
}

/// The streams of a call, one per row.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRows {
    /// Which row of `table` holds the stream's pages.
    pub seat: DeviceColumn<u32>,
    /// Query tokens; 0 for a row without.
    pub span: DeviceColumn<u32>,
    /// Tokens of the stream, the queries' own included.
    pub len: DeviceColumn<u32>,
    /// First query token in `q` and `out`.
    pub token_start: DeviceColumn<u32>,
    /// Pages of the streams, in order, `table_stride` per seat.
    pub table: DeviceColumn<u32>,
    /// Entries per seat.
    pub table_stride: u32,
    /// Whether any row has one query token (or may have, at a replay).
    pub has_single: bool,
    /// Whether any row has several.
    pub has_many: bool,
}

/// Kernels and workspace for one shape.
#[derive(Debug)]
pub struct PagedAttention {
    shape: AttentionShape,
    kernels: Kernels,
}

#[derive(Debug)]
enum Kernels {
    Fast {
        /// `None` where rows of one token are prefilled too.
        decode: Option<Decode>,
        prefill: Kernel,
    },
    /// Any shape, in f32 arithmetic.
    Exact(Kernel),
}

#[derive(Debug)]
struct Decode {
    kernel: Kernel,
    geometry: DecodeGeometry,
    /// Locked while a launch is given to a stream: two streams would share it.
    workspace: Mutex<(DeviceBuffer<f32>, DeviceBuffer<u32>)>,
    blocks: u32,
}

impl PagedAttention {
    /// Loads the kernels and allocates the workspace: seconds where a kernel is not compiled yet. Not
    /// under capture. A workspace belongs to one stream at a time.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a shape that no kernel takes, and those of [`Module::load`].
    pub fn new(context: &Arc<Context>, shape: AttentionShape) -> Result<Self> {
        shape.check()?;
        let load = |instance: &Instance, name| Module::load(context, instance)?.kernel(name);
        if !shape.is_fast() {
            let kernel = load(&shape.exact(), "attention_exact")?;
            return Ok(Self { shape, kernels: Kernels::Exact(kernel) });
        }
        let prefill = load(&shape.prefill(), "attention_prefill")?;
        prefill.allow_shared(shape.prefill_shared())?;
        // Decode deals a stream to as many processors as the batch leaves it, and adds in their order. Prefill
        // adds in the stream's own.
        let decode = (!shape.batch_invariant).then(|| Decode::new(context, &shape)).transpose()?;
        Ok(Self { shape, kernels: Kernels::Fast { decode, prefill } })
    }

    /// Bytes of device memory that [`PagedAttention::new`] takes.
    pub fn bytes(context: &Context, shape: &AttentionShape) -> u64 {
        let is_split = shape.is_fast() && !shape.batch_invariant;
        let (partial, counters) = Decode::room(context, shape);
        if is_split { 4 * (partial + counters) as u64 } else { 0 }
    }

    /// `out[t] = softmax(scale * q[t] kᵀ) v` over the stream of token t's row, later. `q` and `out` are
    /// `[tokens, heads, head_dim]`, whole tokens any stride apart; `k` and `v` are one layer of the
    /// cache, `[pages, slots, kv_heads, head_dim]`, with its strides. Tokens of no row are left alone.
    ///
    /// Whatever the columns hold, only these tensors are touched: a row whose seat or tokens there are not
    /// is left alone, a page that there is not is taken for another, and a stream is as long as its seat
    /// has entries for.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::Length`] where tensors or columns do not fit the shape.
    #[allow(clippy::too_many_arguments)] // a call of the contract has as many parts
    pub fn run(
        &self,
        stream: &Stream,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        rows: &AttentionRows,
        rule: AttentionRule,
    ) -> Result<()> {
        let shape = &self.shape;
        let context = stream.context();
        let count = rows.span.len();
        if count as u64 > u64::from(shape.max_rows) {
            let (index, limit) = (count, shape.max_rows as usize);
            return Err(Error::OutOfRange { what: "rows of attention", index, limit });
        }
        let columns = [rows.seat.len(), rows.len.len(), rows.token_start.len()];
        for len in columns {
            check_len("column of attention", len, count)?;
        }
        let (q_address, q_stride, tokens) = shape.tokens("queries", context, q.raw())?;
        let (out_address, out_stride, out_tokens) = shape.tokens("results", context, out.raw())?;
        check_len("results of attention", out_tokens as usize, tokens as usize)?;
        let cache = shape.cache_strides(context, k.raw(), v.raw())?;
        let is_rule = rule.scale > 0.0 && rule.softcap >= 0.0 && (rule.causal || rule.window == 0);
        if !is_rule {
            return Err(Error::Tensor { what: "attention", reason: format!("{rule:?}") });
        }
        let most = u64::from(rows.table_stride) * u64::from(cache.page_size);
        if most > u64::from(u32::MAX) {
            return Err(Error::TooLarge { what: "a row of the page table" });
        }
        if count == 0 || tokens == 0 || most == 0 {
            return Ok(());
        }
        let mut args = AttentionArgs {
            q: q_address,
            out: out_address,
            k: cache.k,
            v: cache.v,
            seat: rows.seat.address(),
            span: rows.span.address(),
            len: rows.len.address(),
            token_start: rows.token_start.address(),
            table: rows.table.address(),
            partial: 0,
            counter: 0,
            page_stride: cache.page,
            head_stride: cache.head,
            slot_stride: cache.slot,
            q_stride,
            out_stride,
            rows: count as u32,
            tokens,
            kv_heads: shape.kv_heads,
            group: shape.group(),
            page_size: cache.page_size,
            table_stride: rows.table_stride,
            window: rule.window,
            causal: u32::from(rule.causal),
            min_span: 2,
            chunk: 0,
            pages: cache.pages,
            seats: (rows.table.len() / rows.table_stride as usize).min(u32::MAX as usize) as u32,
            scale: rule.scale,
            softcap: rule.softcap,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        match &self.kernels {
            Kernels::Exact(kernel) => {
                let blocks = (tokens, shape.heads, 1);
                launch(
                    kernel,
                    stream,
                    Grid { blocks, threads: (128, 1, 1), shared: 0 },
                    args,
                    false,
                )
            }
            Kernels::Fast { decode, prefill } => {
                if let Some(decode) = decode.as_ref().filter(|_| rows.has_single) {
                    decode.run(stream, args)?;
                }
                args.min_span = if decode.is_some() { 2 } else { 1 };
                if rows.has_many || decode.is_none() {
                    let queries = u64::from(tokens) * u64::from(shape.group());
                    let blocks = queries.div_ceil(u64::from(shape.block_m())) as u32 + count as u32;
                    let grid = Grid {
                        blocks: (blocks, shape.kv_heads, 1),
                        threads: (128, 1, 1),
                        shared: shape.prefill_shared() as u32,
                    };
                    launch(prefill, stream, grid, args, false)?;
                }
                Ok(())
            }
        }
    }
}

impl Decode {
    fn new(context: &Arc<Context>, shape: &AttentionShape) -> Result<Self> {
        let limit = context.facts().shared_per_block;
        let geometry = shape.decode_geometry(limit);
        let (need, rows) = (geometry.shared(shape.max_rows), shape.max_rows);
        if need > limit {
            let reason = format!(
                "{rows} rows at once take {need} bytes of a multiprocessor's memory, {} has {limit}: \
                 lower max_batch",
                context.device()
            );
            return Err(Error::Tensor { what: "attention", reason });
        }
        let module = Module::load(context, &shape.decode(geometry))?;
        let kernel = module.kernel("attention_decode")?;
        kernel.allow_shared(need)?;
        let (partial, counters) = Self::room(context, shape);
        let partial = DeviceBuffer::new(context, partial)?;
        let workspace = Mutex::new((partial, DeviceBuffer::zeroed(context, counters)?));
        Ok(Self { kernel, geometry, workspace, blocks: context.facts().multiprocessors })
    }

    /// Elements of the workspace: parts of streams, and counters.
    fn room(context: &Context, shape: &AttentionShape) -> (usize, usize) {
        let blocks = context.facts().multiprocessors as usize;
        let geometry = shape.decode_geometry(context.facts().shared_per_block);
        let per_part = geometry.group_tile as usize * (shape.head_dim as usize + 2);
        (16 * blocks * per_part, 8 * blocks + 2)
    }

    fn run(&self, stream: &Stream, mut args: AttentionArgs) -> Result<()> {
        let workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        (args.partial, args.counter) = (workspace.0.address(), workspace.1.address());
        let grid = Grid {
            blocks: (self.blocks, 1, 1),
            threads: (32 * self.geometry.warps, 1, 1),
            shared: self.geometry.shared(args.rows) as u32,
        };
        launch(&self.kernel, stream, grid, args, true)
    }
}

fn launch(
    kernel: &Kernel,
    stream: &Stream,
    grid: Grid,
    args: AttentionArgs,
    is_early: bool,
) -> Result<()> {
    let mut all = Args::default();
    all.push(args);
    // SAFETY: the kernels' only parameter is this struct. Queries, results and the cache are views of
    // this device with the strides and sizes passed on (checked by `run`), which the kernels compare with
    // what the columns hold; the columns are promised by whoever made them to stay allocated, and the
    // workspace is as large as the kernel states for this geometry. Decode waits for the kernel in front.
    unsafe {
        match is_early {
            true => kernel.launch_early(stream, grid, &all),
            false => kernel.launch(stream, grid, &all),
        }
    }
}

/// As `AttentionArgs` of `attention.cuh`; pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct AttentionArgs {
    q: u64,
    out: u64,
    k: u64,
    v: u64,
    seat: u64,
    span: u64,
    len: u64,
    token_start: u64,
    table: u64,
    partial: u64,
    counter: u64,
    page_stride: i64,
    head_stride: i64,
    slot_stride: i64,
    q_stride: i64,
    out_stride: i64,
    rows: u32,
    tokens: u32,
    kv_heads: u32,
    group: u32,
    page_size: u32,
    table_stride: u32,
    window: u32,
    causal: u32,
    min_span: u32,
    chunk: u32,
    pages: u32,
    seats: u32,
    scale: f32,
    softcap: f32,
    k_scale: f32,
    v_scale: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_have_the_kernels_layout() {
        assert_eq!(size_of::<AttentionArgs>(), 11 * 8 + 5 * 8 + 12 * 4 + 4 * 4);
        assert_eq!(std::mem::offset_of!(AttentionArgs, rows), 128);
        assert_eq!(std::mem::offset_of!(AttentionArgs, scale), 176);
    }
}
