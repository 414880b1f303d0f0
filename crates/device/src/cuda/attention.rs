//! Attention over a paged cache: which kernel takes which rows, and with what geometry.
//!
//! The kernels state their arguments in `kernels/attention.cuh`; what is computed here must agree with
//! what they say there.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use resource_api::{DType, DeviceColumn, RawTensor, TensorView, TensorViewMut};

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor;
use crate::error::{Error, Result, check_len};

/// What is fixed for all calls: kernels are compiled and workspace is allocated for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements per head: a multiple of 4 up to 256; 64, 128 and 256 have fast kernels.
    pub head_dim: u32,
    /// Element type of the cache: bf16, f16, fp8 (e4m3) or f32.
    pub cache: DType,
    /// Element type of queries and results: bf16 or f32.
    pub activations: DType,
    /// Most rows (streams) of a call.
    pub max_rows: u32,
    /// Longest stream, in tokens.
    pub max_len: u32,
    /// Whether a row's result may depend on nothing but the row, down to the bit.
    pub batch_invariant: bool,
}

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
    /// Pages of the streams, in order, `table_stride` per seat. Each must be a page of the cache.
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
        decode: Decode,
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

/// What `attention_decode.cu` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DecodeGeometry {
    warps: u32,
    stages: u32,
    group_tile: u32,
    row_bytes: u32,
    head_dim: u32,
}

/// Tokens per part of a stream where results must not depend on the batch.
const INVARIANT_CHUNK: u32 = 512;

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
        let limit = context.facts().shared_per_block;
        let geometry = shape.decode_geometry(limit);
        let kernel = load(&shape.decode(geometry), "attention_decode")?;
        kernel.allow_shared(geometry.shared(shape.max_rows))?;
        let prefill = load(&shape.prefill(), "attention_prefill")?;
        prefill.allow_shared(shape.prefill_shared())?;

        let blocks = context.facts().multiprocessors;
        let per_part = geometry.group_tile as usize * (shape.head_dim as usize + 2);
        let (parts, counters) = match shape.chunk() {
            0 => (16 * blocks as usize, 8 * blocks as usize + 2),
            chunk => {
                let heads = shape.max_rows as usize * shape.kv_heads as usize;
                (heads * shape.max_len.div_ceil(chunk) as usize, heads + 2)
            }
        };
        let partial = DeviceBuffer::new(context, parts * per_part)?;
        let workspace = Mutex::new((partial, DeviceBuffer::zeroed(context, counters)?));
        let decode = Decode { kernel, geometry, workspace, blocks };
        Ok(Self { shape, kernels: Kernels::Fast { decode, prefill } })
    }

    /// `out[t] = softmax(scale * q[t] kᵀ) v` over the stream of token t's row, later. `q` and `out` are
    /// `[tokens, heads, head_dim]`, whole tokens any stride apart; `k` and `v` are one layer of the
    /// cache, `[pages, slots, kv_heads, head_dim]`, with its strides. Tokens of no row are left alone.
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
        if count == 0 || tokens == 0 {
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
            chunk: shape.chunk(),
            scale: rule.scale,
            softcap: rule.softcap,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        match &self.kernels {
            Kernels::Exact(kernel) => {
                let blocks = (tokens, shape.heads, 1);
                launch(kernel, stream, Grid { blocks, threads: (128, 1, 1), shared: 0 }, args)
            }
            Kernels::Fast { decode, prefill } => {
                if rows.has_single {
                    decode.run(stream, args)?;
                }
                if rows.has_many {
                    args.min_span = 2;
                    let queries = u64::from(tokens) * u64::from(shape.group());
                    let blocks = queries.div_ceil(u64::from(shape.block_m())) as u32 + count as u32;
                    let grid = Grid {
                        blocks: (blocks, shape.kv_heads, 1),
                        threads: (128, 1, 1),
                        shared: shape.prefill_shared() as u32,
                    };
                    launch(prefill, stream, grid, args)?;
                }
                Ok(())
            }
        }
    }
}

impl Decode {
    fn run(&self, stream: &Stream, mut args: AttentionArgs) -> Result<()> {
        let workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        (args.partial, args.counter) = (workspace.0.address(), workspace.1.address());
        let grid = Grid {
            blocks: (self.blocks, 1, 1),
            threads: (32 * self.geometry.warps, 1, 1),
            shared: self.geometry.shared(args.rows) as u32,
        };
        launch(&self.kernel, stream, grid, args)
    }
}

fn launch(kernel: &Kernel, stream: &Stream, grid: Grid, args: AttentionArgs) -> Result<()> {
    let mut all = Args::default();
    all.push(args);
    // SAFETY: the kernels' only parameter is this struct. Queries, results and the cache are views of
    // this device with the strides and sizes passed on (checked by `run`), the columns are promised by
    // whoever made them to stay allocated, and the workspace is as large as the kernel states for this
    // geometry. Page numbers are the cache's own.
    unsafe { kernel.launch(stream, grid, &all) }
}

impl AttentionShape {
    fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Tensor { what: "attention", reason });
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return refuse(format!("{} heads of {} key heads", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(4) || self.head_dim > 256 {
            return refuse(format!(
                "a head dim of {}, not a multiple of 4 up to 256",
                self.head_dim
            ));
        }
        if ![DType::BF16, DType::F32].contains(&self.activations) {
            return refuse(format!("activations in {}", self.activations.name()));
        }
        match kv_type(self.cache) {
            Some(_) => Ok(()),
            None => refuse(format!("a cache of {}", self.cache.name())),
        }
    }

    /// Whether the kernels for tensor cores take it.
    fn is_fast(&self) -> bool {
        [64, 128, 256].contains(&self.head_dim) && self.cache != DType::F32 && self.group() <= 16
    }

    fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    fn chunk(&self) -> u32 {
        if self.batch_invariant { INVARIANT_CHUNK } else { 0 }
    }

    fn block_m(&self) -> u32 {
        if self.head_dim == 256 { 64 } else { 128 }
    }

    fn prefill_shared(&self) -> usize {
        2 * self.head_dim as usize * (self.block_m() as usize + 4 * 64) + 1024
    }

    /// The fastest geometry that leaves room for the rows in `limit` bytes of shared memory.
    fn decode_geometry(&self, limit: usize) -> DecodeGeometry {
        let row_bytes = self.head_dim * self.cache.size() as u32;
        let group_tile = if self.group() <= 8 { 8 } else { 16 };
        // As measured for the 227 KiB of Hopper; less memory takes stages away, then warps.
        let (mut warps, mut stages) = match (row_bytes, group_tile) {
            (512.., _) => (4, 3),
            (256.., _) => (8, 3),
            (128.., 8) => (12, 4),
            (128.., _) => (8, 6),
            (_, 8) => (12, 8),
            _ => (8, 8),
        };
        let head_dim = self.head_dim;
        let mut geometry = DecodeGeometry { warps, stages, group_tile, row_bytes, head_dim };
        while geometry.shared(self.max_rows) > limit && warps > 1 {
            if stages > 2 {
                stages -= 1
            } else {
                warps /= 2
            }
            geometry = DecodeGeometry { warps, stages, ..geometry };
        }
        geometry
    }

    fn instance(&self, source: &'static str) -> Instance {
        let activations = if self.activations == DType::F32 { "Q_F32" } else { "Q_BF16" };
        Instance::of(source)
            .define("HEAD_DIM", self.head_dim)
            .define("KV_TYPE", kv_type(self.cache).unwrap_or_default())
            .define("Q_TYPE", activations)
    }

    fn decode(&self, geometry: DecodeGeometry) -> Instance {
        self.instance("attention_decode.cu")
            .define("GROUP_TILE", geometry.group_tile)
            .define("WARPS", geometry.warps)
            .define("STAGES", geometry.stages)
    }

    fn prefill(&self) -> Instance {
        self.instance("attention_prefill.cu")
    }

    fn exact(&self) -> Instance {
        self.instance("attention_exact.cu")
    }

    /// Address, token stride and number of tokens of queries or results.
    fn tokens(
        &self,
        what: &'static str,
        context: &Context,
        raw: &RawTensor,
    ) -> Result<(u64, i64, u32)> {
        let address = tensor::strided(what, context, raw, self.activations)?;
        let (heads, dim) = (i64::from(self.heads), i64::from(self.head_dim));
        let &[tokens, its_heads, its_dim] = raw.shape() else {
            return Err(Error::Tensor { what, reason: format!("shape {:?}", raw.shape()) });
        };
        let stride = raw.strides[0];
        let is_whole = raw.strides[2] == 1 && (raw.strides[1] == dim || heads == 1);
        let is_apart = tokens <= 1 || stride == heads * dim || stride % 8 == 0 && stride > 0;
        if (its_heads, its_dim) != (heads, dim) || !is_whole || !is_apart {
            let (shape, strides) = (raw.shape(), &raw.strides[..3]);
            let reason = format!(
                "shape {shape:?} with strides {strides:?}, need [tokens, {heads}, {dim}], whole tokens"
            );
            return Err(Error::Tensor { what, reason });
        }
        let tokens = u32::try_from(tokens).map_err(|_| Error::TooLarge { what })?;
        aligned(what, address, 16)?;
        Ok((address, stride, tokens))
    }

    fn cache_strides(&self, context: &Context, k: &RawTensor, v: &RawTensor) -> Result<Cache> {
        let what = "cache of attention";
        let address = [
            tensor::strided(what, context, k, self.cache)?,
            tensor::strided(what, context, v, self.cache)?,
        ];
        let refuse = |reason: String| Err(Error::Tensor { what, reason });
        let &[_, slots, heads, dim] = k.shape() else {
            return refuse(format!("shape {:?}", k.shape()));
        };
        let (need_heads, need_dim) = (i64::from(self.kv_heads), i64::from(self.head_dim));
        if (heads, dim) != (need_heads, need_dim) || k.strides[3] != 1 {
            let (shape, strides) = (k.shape(), &k.strides[..4]);
            return refuse(format!(
                "shape {shape:?} with strides {strides:?}, need [pages, slots, {need_heads}, {need_dim}]"
            ));
        }
        if (v.shape(), v.strides) != (k.shape(), k.strides) {
            return refuse("keys and values are laid out differently".to_owned());
        }
        let [page, slot, head, _] = k.strides[..4] else { return refuse("rank".to_owned()) };
        for bytes in [page, slot, head].map(|stride| stride as u64 * self.cache.size() as u64) {
            aligned(what, bytes, 16)?;
        }
        aligned(what, address[0] | address[1], 16)?;
        let page_size = u32::try_from(slots).map_err(|_| Error::TooLarge { what })?;
        Ok(Cache { k: address[0], v: address[1], page, slot, head, page_size })
    }
}

impl DecodeGeometry {
    /// Bytes of dynamic shared memory for `rows` rows.
    fn shared(&self, rows: u32) -> usize {
        let [warps, stages, tile, row, rows] =
            [self.warps, self.stages, self.group_tile, self.row_bytes, rows].map(|n| n as usize);
        // Many queries of many elements do not stay in registers.
        let queries = if self.head_dim == 256 && self.group_tile == 16 { 8192 } else { 0 };
        let stages = warps * stages * (2 * (16 * row + 128) + 8);
        stages + warps * (tile * 8 + 1024) + 4 * (rows + 1) + 512 + queries
    }
}

/// Where a layer of the cache lies; strides in elements.
struct Cache {
    k: u64,
    v: u64,
    page: i64,
    slot: i64,
    head: i64,
    page_size: u32,
}

fn aligned(what: &'static str, bytes: u64, to: u64) -> Result<()> {
    match bytes.is_multiple_of(to) {
        true => Ok(()),
        false => Err(Error::Tensor {
            what,
            reason: format!("addresses or strides are not multiples of {to} bytes"),
        }),
    }
}

/// The kernels' name of a cache's element type.
fn kv_type(dtype: DType) -> Option<&'static str> {
    let names = [
        (DType::BF16, "KV_BF16"),
        (DType::F16, "KV_F16"),
        (DType::F8E4M3, "KV_E4M3"),
        (DType::F32, "KV_F32"),
    ];
    names.into_iter().find(|(d, _)| *d == dtype).map(|(_, name)| name)
}

/// Instances for the shapes of the models that the engine knows, on devices with Hopper's memory.
pub(super) fn named_instances() -> Vec<Instance> {
    let hopper = 227 << 10;
    let shape = |head_dim, group, cache, activations| AttentionShape {
        heads: group,
        kv_heads: 1,
        head_dim,
        cache,
        activations,
        max_rows: 256,
        max_len: 1 << 17,
        batch_invariant: false,
    };
    let mut named = Vec::new();
    for head_dim in [64, 128, 256] {
        for cache in [DType::BF16, DType::F8E4M3] {
            let shape = shape(head_dim, 8, cache, DType::BF16);
            named.push(shape.decode(shape.decode_geometry(hopper)));
            named.push(shape.prefill());
        }
    }
    named.push(shape(64, 8, DType::F32, DType::BF16).exact());
    named.push(shape(128, 8, DType::F32, DType::BF16).exact());
    named
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
    scale: f32,
    softcap: f32,
    k_scale: f32,
    v_scale: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        cache: DType::BF16,
        activations: DType::BF16,
        max_rows: 256,
        max_len: 8192,
        batch_invariant: false,
    };

    #[test]
    fn the_geometry_fits_the_devices_shared_memory() {
        for head_dim in [64, 128, 256] {
            for cache in [DType::BF16, DType::F8E4M3] {
                for (limit, kv_heads) in [(99 << 10, 8), (163 << 10, 8), (227 << 10, 2)] {
                    let shape = AttentionShape { head_dim, cache, kv_heads, ..LLAMA };
                    let geometry = shape.decode_geometry(limit);
                    assert!(geometry.shared(256) <= limit, "{geometry:?} in {limit}");
                    assert!(geometry.warps >= 1 && geometry.stages >= 2, "{geometry:?}");
                }
            }
        }
        let hopper = LLAMA.decode_geometry(227 << 10);
        assert_eq!((hopper.warps, hopper.stages, hopper.group_tile), (8, 3, 8));
        // 8 * 3 * (2 * (16 * 256 + 128) + 8) + 8 * (8 * 8 + 1024) + 4 * 257 + 512
        assert_eq!(hopper.shared(256), 213_188);
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let refused = |shape: AttentionShape| shape.check().unwrap_err().to_string();
        assert!(refused(AttentionShape { heads: 30, ..LLAMA }).contains("30 heads of 8"));
        assert!(refused(AttentionShape { head_dim: 130, ..LLAMA }).contains("130"));
        assert!(refused(AttentionShape { cache: DType::I8, ..LLAMA }).contains("i8"));
        assert!(refused(AttentionShape { activations: DType::F16, ..LLAMA }).contains("f16"));
        assert!(LLAMA.is_fast());
        for slow in [
            AttentionShape { head_dim: 96, ..LLAMA },
            AttentionShape { cache: DType::F32, ..LLAMA },
            AttentionShape { kv_heads: 1, ..LLAMA },
        ] {
            assert!(slow.check().is_ok() && !slow.is_fast(), "{slow:?}");
        }
    }

    #[test]
    fn the_arguments_have_the_kernels_layout() {
        assert_eq!(size_of::<AttentionArgs>(), 11 * 8 + 5 * 8 + 10 * 4 + 4 * 4);
        assert_eq!(std::mem::offset_of!(AttentionArgs, rows), 128);
        assert_eq!(std::mem::offset_of!(AttentionArgs, scale), 168);
    }
}
