//! The pool in host memory: rows in, rows out, pages copied.

use bytemuck::Pod;
use device::{PoolType, SharedPool};
use half::{bf16, f16};
use resource_api::{
    DType, HostServices, HostServicesHandle, KvFacts, KvGroup, KvLayer, KvPlan, ResourceError,
    Result, TensorView, TensorViewMut,
};

use crate::geometry::{scale_elements, slot_start, total_bytes};
use crate::pool::SINK;

/// From this many elements on, a layer's rows are written by several threads.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// Where a group's tokens lie: one page and slot per token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places<'a> {
    pub(super) page: &'a [u32],
    pub(super) slot: &'a [u32],
}

impl<'a> Places<'a> {
    /// Those of a group of a plan.
    pub(super) fn of(plan: &'a KvPlan, group: &KvGroup) -> Self {
        let first = group.first_token as usize;
        let tokens = first..first + group.num_tokens as usize;
        Self { page: &plan.write_page[tokens.clone()], slot: &plan.write_slot[tokens] }
    }
}

/// Keys and values of all pages. Zeros until written.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pool: SharedPool,
    facts: KvFacts,
}

impl HostMemory {
    /// Memory for a cache laid out like this.
    ///
    /// # Errors
    /// `EXHAUSTED` when the operating system has no room.
    pub(crate) fn new(facts: KvFacts) -> Result<Self> {
        let element = match facts.dtype {
            DType::F32 => PoolType::F32,
            DType::F16 => PoolType::F16,
            DType::I8 => PoolType::I8,
            DType::F8E4M3 => PoolType::E4M3,
            _ => PoolType::BF16,
        };
        let elements = total_bytes(&facts) as usize / facts.dtype.size();
        let pool = SharedPool::new(elements, element).map_err(|e| {
            let kind = resource_api::ErrorKind::EXHAUSTED;
            ResourceError::new(kind, format!("no memory for {} pages: {e}", facts.num_pages))
        })?;
        Ok(Self { pool, facts })
    }

    /// Stores the keys and values of tokens at their places in `layer`. Several threads take part
    /// when there is much to store.
    ///
    /// # Errors
    /// `INVALID` for tensors of another shape or type.
    pub(crate) fn write(
        &self,
        host: &HostServicesHandle,
        layer: u32,
        places: Places<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        let tokens = places.page.len();
        let (k, v) = (self.source("k", k, tokens)?, self.source("v", v, tokens)?);
        let row = self.facts.num_kv_heads as usize * self.facts.head_dim as usize;
        let tasks = match tokens * row * 2 < PARALLEL_ELEMENTS {
            true => 1,
            false => host.threads().clamp(1, tokens as u32),
        };
        if tasks <= 1 {
            return self.store(layer, places, 0..tokens, true, &k, &v);
        }
        let share = tokens.div_ceil(tasks as usize);
        let failed = std::sync::Mutex::new(None);
        host.run(tasks, |task| {
            let first = (task as usize * share).min(tokens);
            let range = first..(first + share).min(tokens);
            if let Err(e) = self.store(layer, places, range, false, &k, &v) {
                *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(e);
            }
        });
        match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Reads back what lies at the places of tokens in `layer`.
    ///
    /// # Errors
    /// `INVALID` for tensors of another shape or type.
    pub(crate) fn read(
        &self,
        layer: u32,
        places: Places<'_>,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        self.load(layer, 0, "k", places, k)?;
        self.load(layer, 1, "v", places, v)
    }

    fn load(
        &self,
        layer: u32,
        which: u64,
        name: &str,
        places: Places<'_>,
        tensor: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let reader = self.pool.view().reader();
        let (heads, dim) = (self.facts.num_kv_heads as usize, self.facts.head_dim as usize);
        self.check_shape(name, tensor.shape(), places.page.len())?;
        let out = tensor.as_mut_slice::<f32>().ok_or_else(|| {
            let what = format!("`{name}` must be a contiguous f32 tensor in host memory");
            ResourceError::invalid(what)
        })?;
        let tokens = places.page.iter().zip(places.slot);
        for ((&page, &slot), row) in tokens.zip(out.chunks_exact_mut(heads * dim)) {
            let start = slot_start(&self.facts, layer, which, page, slot);
            for (head, row) in row.chunks_exact_mut(dim).enumerate() {
                let head = head * self.facts.head_stride as usize;
                reader.load(start + head, row).map_err(internal)?;
            }
        }
        Ok(())
    }

    /// Copies all layers of page `from` to page `to`.
    pub(crate) fn copy_page(&self, from: u32, to: u32) -> Result<()> {
        let page = self.facts.page_stride as usize;
        let start = from as usize * page;
        let writer = self.pool.view().writer();
        writer.copy(start..start + page, to as usize * page).map_err(internal)
    }

    /// Hands out the bytes of a page.
    pub(crate) fn read_page(
        &self,
        page: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let elements = self.facts.page_stride as usize;
        let start = page as usize * elements;
        let reader = self.pool.view().reader();
        take(reader.bytes(start..start + elements).map_err(internal)?)
    }

    /// Stores the bytes of a page.
    pub(crate) fn write_page(&self, page: u32, bytes: &[u8]) -> Result<()> {
        let elements = self.facts.page_stride as usize;
        if bytes.len() != elements * self.facts.dtype.size() {
            let what = format!("a page of {} bytes is to be {elements} elements", bytes.len());
            return Err(ResourceError::internal(what));
        }
        let writer = self.pool.view().writer();
        writer.store_bytes(page as usize * elements, bytes).map_err(internal)
    }

    /// The paged layer, as tensors `[pages, slots, heads, dim]`; of int8, the scale behind each row counts
    /// to its elements.
    ///
    /// # Errors
    /// `INVALID` for a layer that the cache does not have.
    pub(crate) fn layer(&self, layer: u32) -> Result<KvLayer<'_>> {
        self.check_layer(layer)?;
        let f = &self.facts;
        let row = f.head_dim + scale_elements(f.dtype) as u32;
        let shape = [f.num_pages, f.page_size, f.num_kv_heads, row].map(|n| n as usize);
        let strides = [f.page_stride, f.slot_stride, f.head_stride, 1].map(|n| n as usize);
        let tensor =
            |v| self.pool.tensor(slot_start(f, layer, v, 0, 0), &shape, &strides).map_err(internal);
        Ok(KvLayer { k: tensor(0)?, v: tensor(1)? })
    }

    fn check_layer(&self, layer: u32) -> Result<()> {
        match layer < self.facts.num_layers {
            true => Ok(()),
            false => Err(ResourceError::invalid(format!(
                "layer {layer} does not exist: the cache has {}",
                self.facts.num_layers
            ))),
        }
    }

    fn check_shape(&self, name: &str, shape: &[i64], tokens: usize) -> Result<()> {
        let (heads, dim) = (i64::from(self.facts.num_kv_heads), i64::from(self.facts.head_dim));
        match *shape {
            [n, h, d] if n >= tokens as i64 && h == heads && d == dim => Ok(()),
            _ => Err(ResourceError::invalid(format!(
                "`{name}` has shape {shape:?}; the step needs [{tokens} or more, {heads}, {dim}]"
            ))),
        }
    }

    /// Checks a tensor to be stored and finds its elements.
    fn source<'a>(&self, name: &str, tensor: &TensorView<'a>, tokens: usize) -> Result<Source<'a>> {
        self.check_shape(name, tensor.shape(), tokens)?;
        let raw = tensor.raw();
        let strides = [raw.strides[0], raw.strides[1]].map(|s| usize::try_from(s).ok());
        let ([Some(token), Some(head)], 1) = (strides, raw.strides[2]) else {
            let what = format!(
                "`{name}` has strides {:?}; a head's elements must lie together",
                &raw.strides[..3]
            );
            return Err(ResourceError::invalid(what));
        };
        let all = raw.extent();
        let elements = match self.facts.dtype {
            _ if all == 0 => Elements::Empty,
            stored => match raw.dtype {
                DType::F32 => tensor.window(0, all).map_or(Elements::Other, Elements::F32),
                DType::F16 if stored == DType::F16 => {
                    tensor.window::<f16>(0, all).map_or(Elements::Other, |x| bytes(x))
                }
                DType::BF16 if stored == DType::BF16 => {
                    tensor.window::<bf16>(0, all).map_or(Elements::Other, |x| bytes(x))
                }
                _ => Elements::Other,
            },
        };
        if let Elements::Other = elements {
            let taken = match self.facts.dtype {
                DType::F32 | DType::I8 | DType::F8E4M3 => "f32".into(),
                own => format!("f32 or {}", own.name()),
            };
            return Err(ResourceError::invalid(format!(
                "`{name}` is {} on {}; this cache takes {taken} in host memory",
                raw.dtype.name(),
                raw.device,
            )));
        }
        Ok(Source { elements, token, head })
    }

    /// Stores tokens `range`. Padding tokens share the sink's slots, so only a store that is alone
    /// (`with_sink`) keeps theirs: nobody reads them, and two threads would mix two tokens in a row.
    fn store(
        &self,
        layer: u32,
        places: Places<'_>,
        range: std::ops::Range<usize>,
        with_sink: bool,
        k: &Source<'_>,
        v: &Source<'_>,
    ) -> Result<()> {
        let writer = self.pool.view().writer();
        let dim = self.facts.head_dim as usize;
        for token in range {
            let (page, slot) = (places.page[token], places.slot[token]);
            if page == SINK && !with_sink {
                continue;
            }
            for (which, source) in [(0, k), (1, v)] {
                let start = slot_start(&self.facts, layer, which, page, slot);
                for head in 0..self.facts.num_kv_heads as usize {
                    let to = start + head * self.facts.head_stride as usize;
                    let from = token * source.token + head * source.head;
                    match source.elements {
                        Elements::F32(x) => writer.store(to, &x[from..from + dim]),
                        Elements::Bytes(x) => {
                            writer.store_bytes(to, &x[from * 2..(from + dim) * 2])
                        }
                        Elements::Empty | Elements::Other => Ok(()),
                    }
                    .map_err(internal)?;
                }
            }
        }
        Ok(())
    }
}

/// A tensor to be stored.
struct Source<'a> {
    elements: Elements<'a>,
    /// Elements from one token to the next.
    token: usize,
    /// Elements from one head to the next.
    head: usize,
}

#[derive(Clone, Copy)]
enum Elements<'a> {
    F32(&'a [f32]),
    /// Of the cache's own 2-byte type.
    Bytes(&'a [u8]),
    Empty,
    Other,
}

fn bytes<T: Pod>(elements: &[T]) -> Elements<'_> {
    Elements::Bytes(bytemuck::cast_slice(elements))
}

/// Places come from a plan, so an address outside of the pool is our own fault.
fn internal(error: device::Error) -> ResourceError {
    ResourceError::internal(format!("the cache's memory: {error}"))
}
