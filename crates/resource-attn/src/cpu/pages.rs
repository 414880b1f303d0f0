//! Keys or values of a layer as rows that the kernels read.

use crate::cache::Cache;
use device::attention::{Rows, SCALE_BYTES};
use resource_api::{DType, ResourceError, Result, TensorView};

/// One half of a paged layer, its strides checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages<'a> {
    view: TensorView<'a>,
    page_stride: usize,
    slot_stride: usize,
    head_stride: usize,
    /// Elements of a row, with those of a scale behind it.
    row: usize,
}

impl<'a> Pages<'a> {
    /// Takes a view of `[pages, slots, kv heads, head dim]`.
    ///
    /// # Errors
    /// `INCOMPATIBLE` when it is not what the cache's facts say, or a head's elements are apart.
    pub fn new(view: TensorView<'a>, cache: &Cache) -> Result<Self> {
        let scale = if cache.dtype() == DType::I8 { SCALE_BYTES } else { 0 };
        let row = cache.head_dim() as usize + scale;
        let expected = [cache.page_size() as usize, cache.kv_heads(), row];
        let raw = view.raw();
        let as_expected = raw.rank == 4
            && raw.device.is_cpu()
            && raw.shape[1..4].iter().zip(expected).all(|(&have, want)| have == want as i64)
            && raw.strides[..4].iter().all(|&s| s >= 0)
            && (raw.strides[3] == 1 || row == 1);
        if !as_expected {
            let message = format!(
                "the cache's layer is {:?} with strides {:?} on {}, not [pages, {}, {}, {}] with \
                 a head's elements together on the CPU",
                view.shape(),
                &raw.strides[..view.shape().len()],
                raw.device,
                expected[0],
                expected[1],
                expected[2],
            );
            return Err(ResourceError::new(resource_api::ErrorKind::INCOMPATIBLE, message));
        }
        let stride = |i: usize| raw.strides[i] as usize;
        let (page_stride, slot_stride, head_stride) = (stride(0), stride(1), stride(2));
        Ok(Self { view, page_stride, slot_stride, head_stride, row })
    }

    /// Bytes of one head in a page.
    pub fn run_bytes(&self) -> usize {
        let raw = self.view.raw();
        raw.shape[1] as usize * self.row * raw.dtype.size()
    }

    /// The rows of one head in slots `slot..slot + count` of a page. Reaches for no other slot.
    /// `None` when the page is not in the pool.
    pub fn rows(&self, page: u32, slot: u32, count: usize, head: usize) -> Option<Rows<'a>> {
        let start = (page as usize).checked_mul(self.page_stride)?
            + slot as usize * self.slot_stride
            + head * self.head_stride;
        let len = count.checked_sub(1)? * self.slot_stride + self.row;
        let stride = self.slot_stride;
        match self.view.raw().dtype {
            DType::F32 => Some(Rows::f32(self.view.window(start, len)?, stride)),
            DType::F16 => Some(Rows::f16(self.view.window(start, len)?, stride)),
            DType::BF16 => Some(Rows::bf16(self.view.window(start, len)?, stride)),
            DType::F8E4M3 => Some(Rows::e4m3(self.view.window(start, len)?, stride)),
            DType::I8 => Some(Rows::i8(self.view.window(start, len)?, stride)),
            _ => None,
        }
    }
}
