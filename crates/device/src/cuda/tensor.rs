//! What every operation checks of its tensors before it launches anything.

use bytemuck::Pod;
use cudarc::driver::sys;
use resource_api::{DType, Element, RawTensor, TensorView};

use super::check::driver as check;
use super::context::Context;
use crate::error::{Error, Result};

/// The elements of a contiguous tensor on the device, once it has done everything it was given. Not
/// under capture.
///
/// # Errors
/// [`Error::Tensor`] for a tensor of another type or place.
pub fn read_tensor<T: Element + Pod>(context: &Context, tensor: &TensorView<'_>) -> Result<Vec<T>> {
    let address = contiguous("tensor to read", context, tensor.raw(), T::DTYPE)?;
    let mut values = vec![T::zeroed(); tensor.raw().elements()];
    context.synchronize()?;
    if !values.is_empty() {
        let bytes = size_of_val(values.as_slice());
        // SAFETY: the view promises that many elements; any bytes are a value of T.
        let code = unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, bytes) };
        check("cuMemcpyDtoH", code)?;
    }
    Ok(values)
}

/// Address of a contiguous tensor of this type on the context's device.
///
/// # Errors
/// [`Error::Tensor`] with the first thing that is not so.
pub(crate) fn contiguous(
    what: &'static str,
    context: &Context,
    raw: &RawTensor,
    dtype: DType,
) -> Result<u64> {
    if !raw.is_contiguous() {
        let (shape, strides) = (raw.shape(), &raw.strides[..raw.shape().len()]);
        return refuse(what, format!("shape {shape:?} with strides {strides:?} is not contiguous"));
    }
    strided(what, context, raw, dtype)
}

/// As [`contiguous`], and the tensor has this shape.
///
/// # Errors
/// [`Error::Tensor`].
pub(crate) fn shaped(
    what: &'static str,
    context: &Context,
    raw: &RawTensor,
    dtype: DType,
    shape: &[usize],
) -> Result<u64> {
    if !raw.shape().iter().copied().eq(shape.iter().map(|&n| n as i64)) {
        return refuse(what, format!("shape {:?}, need {shape:?}", raw.shape()));
    }
    contiguous(what, context, raw, dtype)
}

/// Address of a tensor of this type on the context's device, whatever its strides.
///
/// # Errors
/// [`Error::Tensor`].
pub(crate) fn strided(
    what: &'static str,
    context: &Context,
    raw: &RawTensor,
    dtype: DType,
) -> Result<u64> {
    if raw.device != context.device() {
        return refuse(what, format!("lies on {}, need {}", raw.device, context.device()));
    }
    if raw.dtype != dtype {
        return refuse(what, format!("is {}, need {}", raw.dtype.name(), dtype.name()));
    }
    let address = raw.start() as usize as u64;
    if !address.is_multiple_of(dtype.size() as u64) {
        return refuse(what, format!("address {address:#x} is not aligned to its elements"));
    }
    if raw.shape().iter().any(|&n| n < 0) {
        return refuse(what, format!("shape {:?} has a negative size", raw.shape()));
    }
    Ok(address)
}

/// The error of a tensor that is not what it must be.
pub(crate) fn refuse<T>(what: &'static str, reason: String) -> Result<T> {
    Err(Error::Tensor { what, reason })
}
