//! The paged cache of keys and values on a device.

use std::sync::Arc;

use resource_api::{
    DType, DeviceColumn, HeadTurn, KvFacts, RawTensor, TensorView, TensorViewMut, tensor::MAX_RANK,
};

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::{refuse, shaped, strided};
use crate::attention::SCALE_BYTES;
use crate::error::{Error, Result};

const THREADS: u32 = 128;

/// A head has the lanes of one warp at most, of 16 elements each.
const WIDEST_HEAD: usize = 512;

/// Where a group's tokens lie in a cache: a page and a slot for each.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    /// Page of each token.
    pub page: DeviceColumn<u32>,
    /// Its slot in that page.
    pub slot: DeviceColumn<u32>,
}

/// Keys and values of all pages: zeros until written. Steps share it by `&self`; the order of what they
/// do is that of the stream.
#[derive(Debug)]
pub struct KvPool {
    context: Arc<Context>,
    memory: DeviceBuffer<u8>,
    facts: KvFacts,
    /// By activations: bf16, f32, and the cache's own 2-byte type where it is neither.
    write: Vec<(DType, Kernel)>,
    /// With rotation and norms of heads; by activations: bf16 and f32.
    write_turned: [(DType, Kernel); 2],
    read: Kernel,
}

impl KvPool {
    /// Memory for a cache laid out like this: f32, f16, bf16, fp8, or i8 with a scale behind each row.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Tensor`] for another type, strides that overlap pages, or rows of i8
    /// that are not whole words; as for [`Module::load`].
    pub fn new(context: &Arc<Context>, facts: KvFacts) -> Result<Self> {
        let stored = facts.dtype;
        let known = [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::I8];
        if !known.contains(&stored) {
            let what = format!("is {}, need bf16, f16, f32, fp8 or i8", stored.name());
            return refuse("cache", what);
        }
        let strides = strides_of(&facts);
        let is_words =
            strides.iter().chain([&u64::from(facts.head_dim)]).all(|n| n.is_multiple_of(4));
        if stored == DType::I8 && !is_words {
            let dim = facts.head_dim;
            let what =
                format!("has heads of {dim} i8, which are not whole words: set kv_dtype = \"fp8\"");
            return refuse("cache", what);
        }
        let end = end_of_page(&facts);
        if end.is_none_or(|end| end > facts.page_stride) {
            let what = format!("pages {} elements apart reach into each other", facts.page_stride);
            return refuse("cache", what);
        }
        let bytes =
            facts.page_stride.checked_mul(u64::from(facts.num_pages) * stored.size() as u64);
        let bytes = bytes.and_then(|b| usize::try_from(b).ok());
        let bytes = bytes.ok_or(Error::TooLarge { what: "a cache" })?;
        let module = Module::load(context, &Instance::of("kv.cu"))?;
        let mut sources = vec![DType::BF16, DType::F32];
        if stored == DType::F16 {
            sources.push(DType::F16);
        }
        let kernel = |dtype: DType| {
            let name = format!("kv_write_{}_{}", dtype.name(), stored.name());
            Ok((dtype, module.kernel(&name)?))
        };
        let turned = |dtype: DType| {
            let name = format!("rope_write_{}_{}", dtype.name(), stored.name());
            Ok::<_, Error>((dtype, module.kernel(&name)?))
        };
        Ok(Self {
            context: context.clone(),
            write_turned: [turned(DType::BF16)?, turned(DType::F32)?],
            write: sources.into_iter().map(kernel).collect::<Result<_>>()?,
            read: module.kernel(&format!("kv_read_{}", stored.name()))?,
            memory: DeviceBuffer::zeroed(context, bytes)?,
            facts,
        })
    }

    /// Geometry.
    pub fn facts(&self) -> &KvFacts {
        &self.facts
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Stores the keys and values `[tokens or more, heads, dim]` of the tokens at `places` in `layer`,
    /// later. A place that the cache does not have is skipped.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a layer that there is not; [`Error::Tensor`] for tensors of another shape
    /// or type.
    pub fn write(
        &self,
        stream: &Stream,
        layer: u32,
        places: Places,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        let tokens = places.page.len().min(places.slot.len());
        let dtype = k.raw().dtype;
        let (k, v) =
            (self.source("k", k.raw(), dtype, tokens)?, self.source("v", v.raw(), dtype, tokens)?);
        let kernel = self.write.iter().find(|(source, _)| *source == dtype);
        let Some((_, kernel)) = kernel else {
            let what = format!(
                "is {}; a cache of {} does not take it",
                dtype.name(),
                self.facts.dtype.name()
            );
            return refuse("k", what);
        };
        let dim = self.facts.head_dim;
        let f = &self.facts;
        let is_wide = dim.is_multiple_of(8)
            && k.is_wide
            && v.is_wide
            && strides_of(f).iter().all(|s| s.is_multiple_of(8));
        let mut args = Args::default();
        for source in [&k, &v] {
            args.push(source.address).push(source.token_stride).push(source.head_stride);
        }
        self.push_places(&mut args, layer, places)?;
        args.push(self.facts.num_kv_heads).push(dim).push(u32::from(is_wide));
        let of_head = match f.dtype {
            // A warp finds the scale of a row.
            DType::I8 => 32,
            _ if is_wide => dim / 8,
            _ => dim,
        };
        let items = 2 * self.facts.num_kv_heads * of_head;
        // SAFETY: the signature is (const T*, i64, i64, const T*, i64, i64, const u32*, const u32*, C*,
        // i64 x 4, u32 x 5). The views promise `tokens` rows of heads, the columns as many places, which
        // the kernel compares with the pages and slots that there are; a page's end is inside its stride.
        unsafe { kernel.launch_early(stream, self.grid(tokens, items), &args) }
    }

    /// Norms and turns the heads of `q` in place and those of `k` on the way, as `how` says, and stores keys and
    /// values as [`KvPool::write`] does, later: one kernel for all of it. `false`, with nothing done, for
    /// what it does not take: other types than bf16 and f32, heads that are not a multiple of 16 elements
    /// wide, not side by side, or not at 16 bytes, and columns of other lengths.
    ///
    /// # Errors
    /// As for [`KvPool::write`].
    #[allow(clippy::too_many_arguments)]
    pub fn write_turned(
        &self,
        stream: &Stream,
        layer: u32,
        places: Places,
        q: &mut TensorViewMut<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
        how: &HeadTurn,
    ) -> Result<bool> {
        let tokens = places.page.len().min(places.slot.len());
        let f = &self.facts;
        let (dtype, dim, pairs) = (k.raw().dtype, f.head_dim as usize, how.turning.phases.len());
        let Some((_, kernel)) = self.write_turned.iter().find(|(source, _)| *source == dtype)
        else {
            return Ok(false);
        };
        let heads = f.num_kv_heads;
        let q_heads = u32::try_from(q.raw().shape().get(1).copied().unwrap_or(0)).unwrap_or(0);
        let q = self.heads_of("q", q.raw(), dtype, tokens, q_heads)?;
        let (k, v) = (
            self.heads_of("k", k.raw(), dtype, tokens, heads)?,
            self.heads_of("v", v.raw(), dtype, tokens, heads)?,
        );
        let to_whole = if f.dtype == DType::I8 { 4 } else { 8 };
        let is_norm = |norm: DeviceColumn<f32>| norm.is_empty() || norm.len() == dim;
        let fits = [&q, &k, &v].iter().all(|s| s.is_wide && s.head_stride == i64::from(f.head_dim))
            && strides_of(f).iter().all(|s| s.is_multiple_of(to_whole))
            && dim.is_multiple_of(16)
            && dim <= WIDEST_HEAD
            && pairs.is_multiple_of(8)
            && 2 * pairs <= dim
            && how.turning.positions.len() == tokens
            && is_norm(how.q_norm)
            && is_norm(how.k_norm);
        if !fits {
            return Ok(false);
        }
        let lanes = (dim / 16).next_power_of_two() as u32;
        let mut args = Args::default();
        args.push(q.address).push(q.token_stride).push(q_heads);
        args.push(k.address).push(k.token_stride).push(v.address).push(v.token_stride);
        args.push(heads).push(f.head_dim).push(lanes);
        args.push(how.q_norm.address()).push(how.k_norm.address()).push(how.eps);
        args.push(how.turning.positions.address()).push(how.turning.phases.address());
        args.push(pairs as u32).push(u32::from(how.turning.is_interleaved));
        self.push_places(&mut args, layer, places)?;
        let items = (q_heads + 2 * heads) * lanes;
        // SAFETY: the signature is (T*, i64, u32, const T*, i64, const T*, i64, u32 x 3, const float* x 2, float,
        // const u32*, const u64*, u32 x 2, const u32* x 2, C*, i64 x 4, u32 x 2). The views promise `tokens`
        // rows of those heads, the columns as many elements as were compared above, and their owners that
        // they are memory of this device; places are compared with what there is, as for `write`.
        unsafe { kernel.launch_early(stream, self.grid(tokens, items), &args)? };
        Ok(true)
    }

    /// Reads what lies at `places` in `layer`, later, into contiguous f32 tensors `[tokens, heads, dim]`
    /// on the device; zeros for a place that the cache does not have.
    ///
    /// # Errors
    /// As for [`KvPool::write`].
    pub fn read(
        &self,
        stream: &Stream,
        layer: u32,
        places: Places,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let tokens = places.page.len().min(places.slot.len());
        let (heads, dim) = (self.facts.num_kv_heads, self.facts.head_dim);
        let shape = [tokens, heads as usize, dim as usize];
        let mut args = Args::default();
        args.push(shaped("k", &self.context, k.raw(), DType::F32, &shape)?);
        args.push(shaped("v", &self.context, v.raw(), DType::F32, &shape)?);
        self.push_places(&mut args, layer, places)?;
        args.push(heads).push(dim);
        // SAFETY: the signature is (float*, float*, const u32*, const u32*, const C*, i64 x 4, u32 x 4);
        // the rest is as for `write`, the outputs being that large (checked).
        unsafe { self.read.launch(stream, self.grid(tokens, 2 * heads * dim), &args) }
    }

    /// As [`KvPool::read`], into contiguous f32 tensors in host memory. Allocates and waits: for tests
    /// and tools.
    ///
    /// # Errors
    /// As for [`KvPool::write`].
    pub fn read_to_host(
        &self,
        stream: &Stream,
        layer: u32,
        places: Places,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let tokens = places.page.len().min(places.slot.len());
        let shape = [tokens, self.facts.num_kv_heads as usize, self.facts.head_dim as usize];
        let elements = shape.iter().product();
        let mut there_k = DeviceBuffer::<f32>::new(&self.context, elements)?;
        let mut there_v = DeviceBuffer::<f32>::new(&self.context, elements)?;
        let (mut k_view, mut v_view) = (there_k.view_mut(&shape)?, there_v.view_mut(&shape)?);
        self.read(stream, layer, places, &mut k_view, &mut v_view)?;
        let to_host = |from: DeviceBuffer<f32>, to: &mut TensorViewMut<'_>| {
            let to = to.as_mut_slice::<f32>().and_then(|to| to.get_mut(..elements));
            let Some(to) = to else {
                let what = format!("need contiguous f32 {shape:?} in host memory");
                return refuse("tensor to read into", what);
            };
            to.copy_from_slice(&from.to_vec()?);
            Ok(())
        };
        to_host(there_k, k)?;
        to_host(there_v, v)
    }

    /// Bytes of a page, all layers.
    pub fn page_bytes(&self) -> usize {
        self.facts.page_stride as usize * self.facts.dtype.size()
    }

    /// Where a page begins.
    pub(super) fn page_address(&self, page: u32) -> Result<u64> {
        let (index, limit) = (page as usize, self.facts.num_pages as usize);
        if index >= limit {
            return Err(Error::OutOfRange { what: "page", index, limit });
        }
        Ok(self.memory.address() + u64::from(page) * self.page_bytes() as u64)
    }

    /// The keys and the values of a layer, as tensors `[pages, slots, heads, dim]`; of i8, the scale behind each
    /// row counts to its elements.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a layer that there is not.
    pub fn layer(&self, layer: u32) -> Result<(TensorView<'_>, TensorView<'_>)> {
        let f = &self.facts;
        let keys = self.keys(layer)?;
        let tensor = |address: u64| {
            let start = std::ptr::without_provenance_mut(address as usize);
            let mut raw =
                RawTensor::contiguous(start, self.context.device(), f.dtype, &[1; MAX_RANK]);
            raw.rank = 4;
            let shape = [f.num_pages, f.page_size, f.num_kv_heads, row_of(f)].map(i64::from);
            raw.shape[..4].copy_from_slice(&shape);
            let strides = [f.page_stride, f.slot_stride, f.head_stride, 1].map(|n| n as i64);
            raw.strides[..4].copy_from_slice(&strides);
            raw.strides[4..].fill(0);
            // SAFETY: inside the allocation, which the view borrows. Writes are ordered by the stream
            // with the reads of whoever is given the view.
            unsafe { TensorView::from_raw(raw) }
        };
        Ok((tensor(keys), tensor(keys + f.kv_stride * f.dtype.size() as u64)))
    }

    fn keys(&self, layer: u32) -> Result<u64> {
        let (index, limit) = (layer as usize, self.facts.num_layers as usize);
        if index >= limit {
            return Err(Error::OutOfRange { what: "layer", index, limit });
        }
        let first = u64::from(layer) * self.facts.layer_stride;
        Ok(self.memory.address() + first * self.facts.dtype.size() as u64)
    }

    /// The arguments from the places on that all kernels have.
    fn push_places(&self, args: &mut Args, layer: u32, places: Places) -> Result<()> {
        let f = &self.facts;
        args.push(places.page.address()).push(places.slot.address()).push(self.keys(layer)?);
        for stride in [f.page_stride, f.kv_stride, f.head_stride, f.slot_stride] {
            args.push(stride as i64);
        }
        args.push(f.num_pages).push(f.page_size);
        Ok(())
    }

    fn grid(&self, tokens: usize, items: u32) -> Grid {
        Grid {
            blocks: (tokens as u32, items.div_ceil(THREADS), 1),
            threads: (THREADS, 1, 1),
            shared: 0,
        }
    }

    /// Checks a tensor to be stored.
    fn source(
        &self,
        what: &'static str,
        raw: &RawTensor,
        dtype: DType,
        tokens: usize,
    ) -> Result<Source> {
        self.heads_of(what, raw, dtype, tokens, self.facts.num_kv_heads)
    }

    /// Checks a tensor of heads.
    fn heads_of(
        &self,
        what: &'static str,
        raw: &RawTensor,
        dtype: DType,
        tokens: usize,
        heads: u32,
    ) -> Result<Source> {
        let address = strided(what, &self.context, raw, dtype)?;
        let (heads, dim) = (i64::from(heads), i64::from(self.facts.head_dim));
        match (raw.shape(), raw.strides) {
            (&[n, h, d], [token_stride, head_stride, 1, ..])
                if n >= tokens as i64
                    && (h, d) == (heads, dim)
                    && token_stride >= 0
                    && head_stride >= 0 =>
            {
                let bytes = |stride: i64| stride * dtype.size() as i64 % 16 == 0;
                let is_wide =
                    address.is_multiple_of(16) && bytes(token_stride) && bytes(head_stride);
                Ok(Source { address, token_stride, head_stride, is_wide })
            }
            (shape, strides) => refuse(
                what,
                format!(
                    "has shape {shape:?} and strides {:?}; the step needs [{tokens} or more, {heads}, {dim}] \
                     with the elements of a head together",
                    &strides[..shape.len()]
                ),
            ),
        }
    }
}

/// A tensor of heads. Strides count elements.
struct Source {
    address: u64,
    token_stride: i64,
    head_stride: i64,
    /// Whether 16-byte accesses can read it.
    is_wide: bool,
}

/// Elements of a row, with those of its scale.
fn row_of(f: &KvFacts) -> u32 {
    f.head_dim + if f.dtype == DType::I8 { SCALE_BYTES as u32 } else { 0 }
}

fn strides_of(f: &KvFacts) -> [u64; 5] {
    [f.page_stride, f.layer_stride, f.kv_stride, f.head_stride, f.slot_stride]
}

/// The end of a page's last element, in elements from its first.
fn end_of_page(f: &KvFacts) -> Option<u64> {
    let last = [
        (f.num_layers, f.layer_stride),
        (2, f.kv_stride),
        (f.num_kv_heads, f.head_stride),
        (f.page_size, f.slot_stride),
        (row_of(f), 1),
    ];
    last.into_iter().try_fold(1u64, |end, (count, stride)| {
        end.checked_add(u64::from(count.checked_sub(1)?).checked_mul(stride)?)
    })
}
