//! Where a page, layer, head and slot lie in the cache's memory.

use device::attention::SCALE_BYTES;
use resource_api::{DType, KvFacts, ResourceError, Result};

use crate::spec::Shape;

/// Lays a cache of this shape and number of pages out.
///
/// All layers of a page lie together, so that a page moves to another place as one block; within a
/// layer keys come before values, and a head's slots lie together, so that attention walks a page of
/// one head without gaps: `[page][layer][k, v][head][slot][dim]`. Behind each row of int8 lies its scale: a
/// scale of a whole page would change what earlier tokens hold whenever a later one is larger, and pages that
/// hold the same tokens would differ by how these were cut into steps.
///
/// # Errors
/// When the cache is larger than an address space.
pub(crate) fn lay_out(shape: &Shape, num_pages: u32) -> Result<KvFacts> {
    let slot_stride = u64::from(shape.head_dim) + scale_elements(shape.dtype);
    let too_large = || {
        let what = "a cache of these layers, heads and pages is larger than any memory";
        ResourceError::invalid(what)
    };
    let times = |a: u64, b: u32| a.checked_mul(b.into()).ok_or_else(too_large);
    let head_stride = times(slot_stride, shape.page_size)?;
    let kv_stride = times(head_stride, shape.num_kv_heads)?;
    let layer_stride = times(kv_stride, 2)?;
    let page_stride = times(layer_stride, shape.num_layers)?;
    let bytes = times(times(page_stride, num_pages)?, shape.dtype.size() as u32)?;
    isize::try_from(bytes).map_err(|_| too_large())?;
    Ok(KvFacts {
        num_layers: shape.num_layers,
        num_kv_heads: shape.num_kv_heads,
        num_qo_heads: shape.num_qo_heads,
        head_dim: shape.head_dim,
        page_size: shape.page_size,
        num_pages,
        max_seq_len: shape.max_seq_len,
        dtype: shape.dtype,
        page_stride,
        layer_stride,
        kv_stride,
        head_stride,
        slot_stride,
    })
}

/// Elements behind each row for its scale.
pub(crate) fn scale_elements(dtype: DType) -> u64 {
    if dtype == DType::I8 { SCALE_BYTES as u64 } else { 0 }
}

/// Bytes of all pages.
pub(crate) fn total_bytes(facts: &KvFacts) -> u64 {
    facts.page_stride * u64::from(facts.num_pages) * facts.dtype.size() as u64
}

/// First element of the keys (`v` 0) or values (`v` 1) of a token slot's first head.
pub(crate) fn slot_start(facts: &KvFacts, layer: u32, v: u64, page: u32, slot: u32) -> usize {
    let page = u64::from(page) * facts.page_stride + u64::from(layer) * facts.layer_stride;
    (page + v * facts.kv_stride + u64::from(slot) * facts.slot_stride) as usize
}

/// Token slots of a page, for finding a position's page without a division where that can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageSize {
    size: u32,
    /// `size` is this power of two, or none.
    shift: Option<u32>,
}

impl PageSize {
    pub(crate) fn new(size: u32) -> Self {
        PageSize { size, shift: size.is_power_of_two().then(|| size.trailing_zeros()) }
    }

    /// The page in which a position lies.
    #[inline]
    pub(crate) fn page(self, position: u32) -> u32 {
        match self.shift {
            Some(shift) => position >> shift,
            None => position / self.size,
        }
    }

    /// Its slot in that page.
    #[inline]
    pub(crate) fn slot(self, position: u32) -> u32 {
        position - self.page(position) * self.size
    }

    /// The slots of these positions.
    pub(crate) fn slots(self, positions: &[u32], slots: &mut [u32]) {
        let pairs = slots.iter_mut().zip(positions);
        match self.shift {
            Some(_) => pairs.for_each(|(slot, position)| *slot = position & (self.size - 1)),
            None => pairs.for_each(|(slot, position)| *slot = position % self.size),
        }
    }

    /// Tokens in the last page of streams of these lengths.
    pub(crate) fn last_slots(self, lens: &[u32], tokens: &mut [u32]) {
        self.slots(lens, tokens);
        for (tokens, &len) in tokens.iter_mut().zip(lens) {
            *tokens = if *tokens == 0 && len > 0 { self.size } else { *tokens };
        }
    }

    /// Tokens of so many pages.
    #[inline]
    pub(crate) fn tokens(self, pages: u32) -> u64 {
        u64::from(pages) * u64::from(self.size)
    }

    /// Pages for so many tokens.
    #[inline]
    pub(crate) fn pages(self, tokens: u32) -> u32 {
        match tokens {
            0 => 0,
            _ => self.page(tokens - 1) + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_found_with_and_without_division() {
        for size in 1..20u32 {
            let by = PageSize::new(size);
            for n in [0, 1, size - 1, size, size + 1, 7 * size, 1000, u32::MAX] {
                let wide = u64::from(n);
                assert_eq!((by.page(n), by.slot(n)), (n / size, n % size), "{n} by {size}");
                assert_eq!(u64::from(by.pages(n)), wide.div_ceil(u64::from(size)));
                let (mut slot, mut last) = ([0], [0]);
                by.slots(&[n], &mut slot);
                by.last_slots(&[n], &mut last);
                assert_eq!(slot, [n % size]);
                assert_eq!(last, [if n == 0 { 0 } else { (n - 1) % size + 1 }]);
            }
        }
    }
}
