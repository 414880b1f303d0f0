//! A whole decode step of a few requests in one launch: from token ids to logits.
//!
//! The kernel states its arguments and what it shares among blocks in `kernels/decode_step.cu`; what is computed
//! here must agree with what it says there.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use half::bf16;
use resource_api::{DType, DeviceColumn, RawTensor, TensorView, TensorViewMut};

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::{refuse, shaped};
use crate::error::{Result, check_len};

/// Most rows: the tensor cores take so many at once.
const MOST_ROWS: usize = 8;

/// Warps that compute; one more brings weights.
const WARPS: usize = 8;
const THREADS: u32 = 32 * (WARPS as u32 + 1);

/// Columns of weights in a stage.
const COLUMNS: u32 = 1024;

/// Bytes of a stage of the ring: eight rows of 1024 weights, each with what keeps rows in different banks.
const STAGE: usize = 8 * (2 * 1024 + 64);
const STAGES: std::ops::RangeInclusive<usize> = 4..=16;

/// Tiles that are summed at once.
const TILES: usize = 6;

/// What the kernel has anyway.
const STATIC_SHARED: usize = 1024;

/// Rounds are numbered from the launches since words were last zeroed; 32 bits hold those of so many launches.
const LAUNCHES: u32 = 1 << 20;
const MOST_LAYERS: u32 = 1 << 11;

/// Head dimension, query heads of a key/value head, and whether a stage has all columns of the residual stream, that
/// releases bring compiled: SmolLM2-135M, Qwen3-0.6B.
const NAMED: [(u32, u32, bool); 2] = [(64, 3, true), (128, 2, true)];

/// Most bytes of a layer's weights: with more, reading them takes so much longer than waiting that kernels of their own,
/// which leave more of a multiprocessor's memory to what is on its way, are as fast.
const MOST_LAYER_BYTES: usize = 64 << 20;

/// The numbers of a decoder with gates, norms before its blocks only, and plain attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeShape {
    /// Decoder layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Width of the gate.
    pub ffn: u32,
    /// Tokens that there are.
    pub vocab: u32,
    /// Whether the gate is GELU in its form with tanh, rather than SiLU.
    pub is_gelu: bool,
    /// Added to mean squares.
    pub eps: f32,
    /// Factor of embeddings.
    pub embed_scale: f32,
}

/// The weights of a layer; matrices are `[outputs, inputs]`.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLayer<'a> {
    /// `[hidden]`.
    pub attn_norm: &'a DeviceBuffer<f32>,
    /// Rows of q, then of k, then of v.
    pub qkv: &'a DeviceBuffer<bf16>,
    /// Likewise.
    pub qkv_bias: Option<&'a DeviceBuffer<f32>>,
    /// `[head_dim]`.
    pub q_norm: Option<&'a DeviceBuffer<f32>>,
    /// `[head_dim]`.
    pub k_norm: Option<&'a DeviceBuffer<f32>>,
    /// `[hidden, heads * head_dim]`.
    pub o: &'a DeviceBuffer<bf16>,
    /// `[hidden]`.
    pub ffn_norm: &'a DeviceBuffer<f32>,
    /// Rows of the gate, then of what it lets through.
    pub gate_up: &'a DeviceBuffer<bf16>,
    /// `[hidden, ffn]`.
    pub down: &'a DeviceBuffer<bf16>,
}

/// All weights.
#[derive(Debug)]
pub struct DecodeWeights<'a> {
    /// By layer.
    pub layers: Vec<DecodeLayer<'a>>,
    /// `[vocab, hidden]`.
    pub embed: &'a DeviceBuffer<bf16>,
    /// `[hidden]`, before the output matrix.
    pub norm: &'a DeviceBuffer<f32>,
    /// `[vocab, hidden]`.
    pub head: &'a DeviceBuffer<bf16>,
}

/// The rows of a step, one token each.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRows<'a> {
    /// `[rows]` u32, as [`Ops::embed`](super::Ops::embed) takes them.
    pub ids: &'a TensorView<'a>,
    /// `[samples]` u32.
    pub sampled: &'a TensorView<'a>,
    /// Position of each.
    pub position: DeviceColumn<u32>,
    /// Turns of a pair per position, one for each pair of a head.
    pub phases: DeviceColumn<u64>,
    /// Seat in `table`.
    pub seat: DeviceColumn<u32>,
    /// Tokens of the stream, this one included.
    pub len: DeviceColumn<u32>,
    /// Page that the token's key and value go to.
    pub page: DeviceColumn<u32>,
    /// Slot in that page.
    pub slot: DeviceColumn<u32>,
    /// Pages of the streams, `table_stride` entries a seat.
    pub table: DeviceColumn<u32>,
    /// Entries per seat.
    pub table_stride: u32,
    /// Keys of layer 0, `[pages, slots, kv_heads, head_dim]` in bf16.
    pub k: &'a TensorView<'a>,
    /// Values of layer 0.
    pub v: &'a TensorView<'a>,
    /// Elements from one layer of the cache to the next.
    pub layer_stride: i64,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Most keys that a token sees, itself included; 0 for all.
    pub window: u32,
}

/// The kernel with what its blocks share, for one model.
#[derive(Debug)]
pub struct DecodeStep {
    shape: DecodeShape,
    /// For one row, for up to four, and for up to eight.
    kernels: [Kernel; 3],
    blocks: u32,
    /// Rows by whose number the ring has room: 0 rows are never asked for.
    stages: [u32; MOST_ROWS + 1],
    /// Addresses of the weights by layer, on the device and here.
    table: DeviceBuffer<u64>,
    addresses: Vec<u64>,
    /// Words, the launches since they were zeroed behind them, and the same number as the host counts. One stream at a
    /// time uses them.
    words: Mutex<(DeviceBuffer<u64>, u32)>,
    words_address: u64,
}

impl DecodeStep {
    /// The kernel for a model; `None` where there is none for its shape or on this device. Not under capture.
    ///
    /// # Errors
    /// As for [`Module::load`] and [`DeviceBuffer::new`]; [`Error::Length`](crate::Error::Length) for weights of another size.
    pub fn new(
        context: &Arc<Context>,
        shape: DecodeShape,
        weights: &DecodeWeights<'_>,
    ) -> Result<Option<Self>> {
        let blocks = context.facts().multiprocessors.min(shape.ffn / 8);
        let room = context.facts().shared_per_block.saturating_sub(STATIC_SHARED);
        let stages = stages_of(&shape, blocks, room);
        if !shape.has_kernel() || context.facts().compute != (9, 0) || stages[1] == 0 {
            return Ok(None);
        }
        check_weights(&shape, weights)?;
        let module = Module::load(context, &shape.instance())?;
        let kernels = [
            module.kernel("decode_step_1")?,
            module.kernel("decode_step_4")?,
            module.kernel("decode_step_8")?,
        ];
        kernels.iter().try_for_each(|kernel| kernel.allow_shared(room))?;
        let addresses = addresses_of(weights);
        let words = DeviceBuffer::zeroed(context, shape.words(blocks) + 1)?;
        Ok(Some(Self {
            shape,
            kernels,
            blocks,
            stages,
            table: DeviceBuffer::from_slice(context, &addresses[3..])?,
            addresses,
            words_address: words.address(),
            words: Mutex::new((words, 0)),
        }))
    }

    /// Whether it takes steps of so many rows.
    pub fn takes(&self, rows: usize) -> bool {
        self.stages.get(rows).is_some_and(|&stages| stages > 0)
    }

    /// To be called before every [`DecodeStep::run`] that is not captured, and before every replay of one that was:
    /// rounds are counted, and begin anew in time.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn begin(&self, stream: &Stream) -> Result<()> {
        let (words, launches) = &mut *self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if *launches == LAUNCHES {
            stream.fill_bytes(words, 0)?;
            *launches = 0;
        }
        *launches += 1;
        Ok(())
    }

    /// Logits `[rows, vocab]` f32 of the tokens that come after those of `rows`, whose keys and values go to the
    /// cache, later. Two launches may not overlap.
    ///
    /// Whatever columns hold, only these tensors are touched: a page that there is not is read as another and not
    /// written, a stream is as long as its seat has entries for, an id that there is not has an embedding of zeros.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor), [`Error::Length`](crate::Error::Length) where tensors or columns do not fit the shape, or weights are not those
    /// that it was made for.
    pub fn run(
        &self,
        stream: &Stream,
        weights: &DecodeWeights<'_>,
        rows: &DecodeRows<'_>,
        logits: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let (shape, context) = (&self.shape, self.kernels[0].context());
        if addresses_of(weights) != self.addresses {
            return refuse("weights", "are not those that the kernel was made for".to_owned());
        }
        let count = rows.len.len();
        if !self.takes(count) {
            return refuse("rows of a decode step", format!("are {count}"));
        }
        for column in [rows.position, rows.seat, rows.page, rows.slot] {
            check_len("column of a decode step", column.len(), count)?;
        }
        check_len("phases", rows.phases.len(), shape.head_dim as usize / 2)?;
        let samples = rows.sampled.shape().first().map_or(0, |&n| n.max(0) as usize);
        let pages = rows.k.shape().first().map_or(0, |&n| n.max(0));
        let page_size = rows.k.shape().get(1).map_or(0, |&n| n.max(0));
        let Some(strides) = self.cache_strides(rows.k.raw(), rows.v.raw(), rows.layer_stride)
        else {
            return refuse("cache of a decode step", "is laid out otherwise".to_owned());
        };
        let seats = rows.table.len().checked_div(rows.table_stride as usize).unwrap_or(0);
        if pages == 0 || page_size == 0 || seats == 0 || rows.scale.is_nan() {
            return refuse("cache of a decode step", format!("has {pages} pages, {seats} seats"));
        }
        let args = StepArgs {
            weights: self.table.address(),
            embed: weights.embed.address(),
            norm: weights.norm.address(),
            head: weights.head.address(),
            logits: shaped(
                "logits",
                context,
                logits.raw(),
                DType::F32,
                &[count, shape.vocab as usize],
            )?,
            ids: shaped("ids", context, rows.ids.raw(), DType::U32, &[count])?,
            sampled: shaped("samples", context, rows.sampled.raw(), DType::U32, &[samples])?,
            keys: rows.k.raw().data as u64,
            seat: rows.seat.address(),
            len: rows.len.address(),
            page: rows.page.address(),
            slot: rows.slot.address(),
            position: rows.position.address(),
            table: rows.table.address(),
            phases: rows.phases.address(),
            words: self.words_address,
            step: self.words_address + 8 * shape.words(self.blocks) as u64,
            layer_stride: rows.layer_stride,
            page_stride: strides[0],
            kv_stride: strides[3],
            head_stride: strides[2],
            slot_stride: strides[1],
            rows: count as u32,
            layers: shape.layers,
            hidden: shape.hidden,
            kv_heads: shape.kv_heads,
            ffn: shape.ffn,
            vocab: shape.vocab,
            samples: samples as u32,
            pages: pages as u32,
            page_size: page_size as u32,
            table_stride: rows.table_stride,
            seats: seats as u32,
            window: rows.window,
            stages: self.stages[count],
            is_gelu: u32::from(shape.is_gelu),
            eps: shape.eps,
            scale: rows.scale,
            embed_scale: shape.embed_scale,
            end: 0,
        };
        let shared = self.stages[count] as usize * STAGE + shape.shared(self.blocks, count);
        let grid =
            Grid { blocks: (self.blocks, 1, 1), threads: (THREADS, 1, 1), shared: shared as u32 };
        let mut all = Args::default();
        all.push(args);
        let kernel = &self.kernels[usize::from(count > 1) + usize::from(count > 4)];
        // SAFETY: the kernel's only parameter is this struct. Weights are alive and of the shape's sizes (checked here
        // and at the beginning), tensors are of this device and of the shapes checked above, words as many as the kernel
        // states; columns are promised by whoever made them to stay allocated, and what they hold is compared by the
        // kernel with the pages and slots that there are. The cache is a view with the strides passed on; that layers are
        // so far apart is what its facts promise.
        unsafe { kernel.launch_together(stream, grid, &all) }
    }

    /// Whether it takes a cache of which these are layer 0's keys and values.
    pub fn takes_cache(&self, k: &TensorView<'_>, v: &TensorView<'_>, layer_stride: i64) -> bool {
        self.cache_strides(k.raw(), v.raw(), layer_stride).is_some()
    }

    /// Strides of pages, slots and heads, and from keys to values, in elements.
    fn cache_strides(&self, k: &RawTensor, v: &RawTensor, layer_stride: i64) -> Option<[i64; 4]> {
        let inner = [i64::from(self.shape.kv_heads), i64::from(self.shape.head_dim)];
        let is_ours = |t: &RawTensor| {
            t.device == self.kernels[0].context().device()
                && t.dtype == DType::BF16
                && t.rank == 4
                && t.shape[2..4] == inner
                && t.strides[3] == 1
                && (t.data as u64).is_multiple_of(16)
        };
        let to_values = (v.data as i64).wrapping_sub(k.data as i64) / size_of::<bf16>() as i64;
        let strides = [k.strides[0], k.strides[1], k.strides[2], to_values];
        let are_wide = strides.iter().chain([&layer_stride]).all(|s| s % 8 == 0 && *s >= 0);
        let are_alike = k.shape[..2] == v.shape[..2] && k.strides[..4] == v.strides[..4];
        (is_ours(k) && is_ours(v) && are_alike && are_wide).then_some(strides)
    }
}

impl DecodeShape {
    fn group(&self) -> u32 {
        self.heads / self.kv_heads.max(1)
    }

    fn widths(&self) -> [usize; 4] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [self.hidden, q, kv, self.ffn].map(|n| n as usize)
    }

    fn has_kernel(&self) -> bool {
        let [hidden, q, _, ffn] = self.widths();
        [64, 128].contains(&self.head_dim)
            && self.heads == self.group() * self.kv_heads
            && (1..=4).contains(&self.group())
            && [hidden, q, ffn].iter().all(|n| *n > 0 && n.is_multiple_of(32))
            && (1..=MOST_LAYERS).contains(&self.layers)
            && self.layer_bytes() <= MOST_LAYER_BYTES
            && self.vocab > 0
    }

    fn layer_bytes(&self) -> usize {
        let [hidden, q, kv, ffn] = self.widths();
        2 * hidden * (q + 2 * kv + q + 3 * ffn)
    }

    fn instance(&self) -> Instance {
        instance(self.head_dim, self.group(), self.hidden <= COLUMNS)
    }

    /// Bytes of shared memory of a block, without the ring.
    fn shared(&self, blocks: u32, rows: usize) -> usize {
        let [hidden, q, _, ffn] = self.widths();
        let (dim, group) = (self.head_dim as usize, self.group() as usize);
        let x = rows * ((2 * hidden.max(q).max(ffn)).next_multiple_of(128) + 64);
        let parts = WARPS * group * (dim + 2) + 3 * group * dim;
        let sums = (2 * WARPS * rows * 8 * TILES).max(parts) + (group + 2) * dim;
        let own = (hidden / 8).div_ceil(blocks as usize) * 8 * rows;
        x + 4 * (sums + own + rows * dim)
    }

    /// Words that blocks share.
    fn words(&self, blocks: u32) -> usize {
        let [hidden, q, kv, ffn] = self.widths();
        let parts = blocks as usize * self.group() as usize * (self.head_dim as usize + 2);
        MOST_ROWS * (2 * hidden + q + 2 * kv + q + ffn) / 2 + parts
    }
}

/// Stages that there is room for beside so many rows; 0 for too few.
fn stages_of(shape: &DecodeShape, blocks: u32, room: usize) -> [u32; MOST_ROWS + 1] {
    std::array::from_fn(|rows| {
        if rows == 0 || blocks == 0 || !shape.has_kernel() {
            return 0;
        }
        let stages = room.saturating_sub(shape.shared(blocks, rows)) / STAGE;
        if stages < *STAGES.start() { 0 } else { stages.min(*STAGES.end()) as u32 }
    })
}

fn instance(head_dim: u32, group: u32, is_narrow: bool) -> Instance {
    Instance::of("decode_step.cu")
        .define("HEAD_DIM", head_dim)
        .define("GROUP", group)
        .define("NARROW", u32::from(is_narrow))
}

/// The instances of the models that the engine knows.
pub(super) fn named_instances() -> Vec<Instance> {
    NAMED.iter().map(|&(head_dim, group, is_narrow)| instance(head_dim, group, is_narrow)).collect()
}

/// Embedding, last norm and output matrix, and then layer by layer in the kernel's order.
fn addresses_of(weights: &DecodeWeights<'_>) -> Vec<u64> {
    let of = |optional: Option<&DeviceBuffer<f32>>| optional.map_or(0, DeviceBuffer::address);
    let ends = [weights.embed.address(), weights.norm.address(), weights.head.address()];
    let layers = weights.layers.iter().flat_map(|layer| {
        [
            layer.attn_norm.address(),
            layer.qkv.address(),
            of(layer.qkv_bias),
            of(layer.q_norm),
            of(layer.k_norm),
            layer.o.address(),
            layer.ffn_norm.address(),
            layer.gate_up.address(),
            layer.down.address(),
        ]
    });
    ends.into_iter().chain(layers).collect()
}

fn check_weights(shape: &DecodeShape, weights: &DecodeWeights<'_>) -> Result<()> {
    let [hidden, q, kv, ffn] = shape.widths();
    let (vocab, dim) = (shape.vocab as usize, shape.head_dim as usize);
    let check = |len: usize, want: usize| check_len("weights of a decode step", len, want);
    check(weights.layers.len(), shape.layers as usize)?;
    check(weights.embed.len(), vocab * hidden)?;
    check(weights.head.len(), vocab * hidden)?;
    check(weights.norm.len(), hidden)?;
    for layer in &weights.layers {
        check(layer.attn_norm.len(), hidden)?;
        check(layer.ffn_norm.len(), hidden)?;
        check(layer.qkv.len(), (q + 2 * kv) * hidden)?;
        check(layer.o.len(), hidden * q)?;
        check(layer.gate_up.len(), 2 * ffn * hidden)?;
        check(layer.down.len(), hidden * ffn)?;
        layer.qkv_bias.map_or(Ok(()), |bias| check(bias.len(), q + 2 * kv))?;
        for norm in [layer.q_norm, layer.k_norm].into_iter().flatten() {
            check(norm.len(), dim)?;
        }
    }
    Ok(())
}

/// As `StepArgs` of `decode_step.cu`; pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct StepArgs {
    weights: u64,
    embed: u64,
    norm: u64,
    head: u64,
    logits: u64,
    ids: u64,
    sampled: u64,
    keys: u64,
    seat: u64,
    len: u64,
    page: u64,
    slot: u64,
    position: u64,
    table: u64,
    phases: u64,
    words: u64,
    step: u64,
    layer_stride: i64,
    page_stride: i64,
    kv_stride: i64,
    head_stride: i64,
    slot_stride: i64,
    rows: u32,
    layers: u32,
    hidden: u32,
    kv_heads: u32,
    ffn: u32,
    vocab: u32,
    samples: u32,
    pages: u32,
    page_size: u32,
    table_stride: u32,
    seats: u32,
    window: u32,
    stages: u32,
    is_gelu: u32,
    eps: f32,
    scale: f32,
    embed_scale: f32,
    /// Up to the next multiple of 8 bytes.
    end: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-0.6B on a device with 132 multiprocessors of 227 KiB.
    const QWEN: DecodeShape = DecodeShape {
        layers: 28,
        hidden: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        ffn: 3072,
        vocab: 151_936,
        is_gelu: false,
        eps: 1e-6,
        embed_scale: 1.0,
    };
    const ROOM: usize = (227 << 10) - STATIC_SHARED;

    #[test]
    fn the_arguments_have_the_kernels_layout() {
        assert_eq!(size_of::<StepArgs>(), 17 * 8 + 5 * 8 + 18 * 4);
        assert_eq!(std::mem::offset_of!(StepArgs, rows), 176);
        assert_eq!(std::mem::offset_of!(StepArgs, eps), 232);
    }

    #[test]
    fn the_ring_has_what_rows_leave_of_shared_memory() {
        let stages = stages_of(&QWEN, 132, ROOM);
        assert_eq!(stages[0], 0);
        assert!(stages[1] >= 11, "{stages:?}");
        assert!(stages[1..].is_sorted_by(|a, b| a >= b) && stages[8] >= 8, "{stages:?}");
        for (rows, &stages) in stages.iter().enumerate().skip(1) {
            assert!(stages as usize * STAGE + QWEN.shared(132, rows) <= ROOM);
        }
        // Eight rows of so many inputs alone are more than there is.
        let wide = DecodeShape { hidden: 512, ffn: 14_336, ..QWEN };
        let stages = stages_of(&wide, 132, ROOM);
        assert!(stages[1] >= 4 && stages[8] == 0, "{stages:?}");
    }

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        assert!(QWEN.has_kernel());
        for other in [
            DecodeShape { head_dim: 256, ..QWEN },
            DecodeShape { heads: 64, ..QWEN },
            DecodeShape { heads: 12, ..QWEN },
            DecodeShape { ffn: 3080, ..QWEN },
            DecodeShape { kv_heads: 0, ..QWEN },
            // Llama-3.1-8B.
            DecodeShape { layers: 32, hidden: 4096, heads: 32, ffn: 14_336, ..QWEN },
        ] {
            assert!(!other.has_kernel(), "{other:?}");
            assert_eq!(stages_of(&other, 132, ROOM), [0; MOST_ROWS + 1]);
        }
    }
}
