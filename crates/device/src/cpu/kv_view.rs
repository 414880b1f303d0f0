//! A pool's memory as tensors, for readers in other libraries.

use resource_api::tensor::MAX_RANK;
use resource_api::{DType, Device, RawTensor, TensorView};

use crate::cpu::shared_pool::{PoolType, SharedPool};
use crate::error::{Error, Result, product};

impl SharedPool {
    /// The elements from `start` on as a tensor of this shape, with strides in elements.
    ///
    /// The tensor is read without [`Turns`](crate::Turns), which do not cross into another library:
    /// the pool's owner lays steps out so that the rows a kernel reads are written before it and not
    /// during it.
    ///
    /// # Errors
    /// When the tensor reaches beyond the pool, or has more dimensions than tensors can have.
    pub fn tensor(
        &self,
        start: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorView<'_>> {
        const WHAT: &str = "tensor of a pool";
        let len = if shape.contains(&0) {
            0
        } else {
            shape.iter().zip(strides).try_fold(1usize, |len, (&n, &stride)| {
                product(WHAT, n - 1, stride)?.checked_add(len).ok_or(Error::TooLarge { what: WHAT })
            })?
        };
        if shape.len() != strides.len() || shape.len() > MAX_RANK {
            let (index, limit) = (shape.len(), strides.len().min(MAX_RANK));
            return Err(Error::OutOfRange { what: "rank of a tensor of a pool", index, limit });
        }
        let pool = self.as_raw();
        match start.checked_add(len) {
            Some(end) if end <= pool.elements => {}
            _ => {
                let index = start.saturating_add(len);
                let what = "end of a tensor of a pool";
                return Err(Error::OutOfRange { what, index, limit: pool.elements });
            }
        }
        let dtype = match pool.element {
            PoolType::F32 => DType::F32,
            PoolType::F16 => DType::F16,
            PoolType::BF16 => DType::BF16,
            PoolType::I8 => DType::I8,
            PoolType::E4M3 => DType::F8E4M3,
        };
        let mut raw = RawTensor::contiguous(pool.data, Device::CPU, dtype, shape);
        raw.byte_offset = (start * pool.element.bytes()) as u64;
        for (to, &stride) in raw.strides.iter_mut().zip(strides) {
            *to = stride as i64;
        }
        // SAFETY: every element reached lies in the pool, which the result borrows, and is
        // initialised. That rows are not written while they are read is the order of a step: its
        // rows of a layer are stored before they are read, by the thread that starts both.
        Ok(unsafe { TensorView::from_raw(raw) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_shows_what_was_stored() {
        let pool = SharedPool::new(2 * 3 * 4, PoolType::F32).unwrap();
        let row: Vec<f32> = (0..24).map(|i| i as f32).collect();
        pool.view().writer().store(0, &row).unwrap();
        let tensor = pool.tensor(4, &[2, 2, 3], &[12, 4, 1]).unwrap();
        assert_eq!(tensor.shape(), [2, 2, 3]);
        assert_eq!(tensor.window::<f32>(12 + 4, 3).unwrap(), [20.0, 21.0, 22.0]);
        assert!(tensor.window::<f32>(12 + 4, 4).is_none());
        assert!(tensor.window::<u32>(0, 1).is_none());
    }

    #[test]
    fn a_tensor_stays_inside_the_pool() {
        let pool = SharedPool::new(24, PoolType::BF16).unwrap();
        assert!(pool.tensor(0, &[2, 12], &[12, 1]).is_ok());
        assert!(pool.tensor(24, &[0], &[1]).is_ok());
        assert!(pool.tensor(1, &[2, 12], &[12, 1]).is_err());
        assert!(pool.tensor(0, &[3, 12], &[usize::MAX, 1]).is_err());
        assert!(pool.tensor(0, &[1, 1], &[1]).is_err());
        assert!(pool.tensor(0, &[1; 9], &[1; 9]).is_err());
    }
}
