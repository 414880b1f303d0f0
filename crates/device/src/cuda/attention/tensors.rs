//! What the tensors of an attention call must be, and where they lie.

use resource_api::RawTensor;

use super::shape::AttentionShape;
use crate::attention::SCALE_BYTES;
use crate::cuda::context::Context;
use crate::cuda::tensor;
use crate::error::{Error, Result};

/// Where a layer of the cache lies; strides in elements.
pub(super) struct Cache {
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) page: i64,
    pub(super) slot: i64,
    pub(super) head: i64,
    pub(super) page_size: u32,
    pub(super) pages: u32,
}

impl AttentionShape {
    /// Address, token stride and number of tokens of queries or results.
    pub(super) fn tokens(
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

    pub(super) fn cache_strides(
        &self,
        context: &Context,
        k: &RawTensor,
        v: &RawTensor,
    ) -> Result<Cache> {
        let what = "cache of attention";
        let address = [
            tensor::strided(what, context, k, self.cache)?,
            tensor::strided(what, context, v, self.cache)?,
        ];
        let refuse = |reason: String| Err(Error::Tensor { what, reason });
        let &[pages, slots, heads, dim] = k.shape() else {
            return refuse(format!("shape {:?}", k.shape()));
        };
        let (need_heads, need_dim) = (i64::from(self.kv_heads), i64::from(self.row()));
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
        let to = if self.is_scaled() { SCALE_BYTES as u64 } else { 16 };
        for bytes in [page, slot, head].map(|stride| stride as u64 * self.cache.size() as u64) {
            aligned(what, bytes, to)?;
        }
        aligned(what, address[0] | address[1], to)?;
        let page_size = u32::try_from(slots).map_err(|_| Error::TooLarge { what })?;
        let pages = u32::try_from(pages).map_err(|_| Error::TooLarge { what })?;
        if page_size == 0 || pages == 0 {
            return refuse("there are no pages, or they have no slots".to_owned());
        }
        Ok(Cache { k: address[0], v: address[1], page, slot, head, page_size, pages })
    }
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
