//! Element types, devices and tensor views, with DLPack's codes.
//!
//! A view never owns: it borrows memory that somebody else keeps alive. It converts to and from
//! DLPack's `DLTensor` without copying data, since it has the same fields with the same codes.

use abi_stable::StableAbi;
use std::marker::PhantomData;

/// Largest rank a view can have; shapes and strides are stored inline.
pub const MAX_RANK: usize = 8;

/// Element type: DLPack's type code, bits, and lanes. An open set: a code unknown to a reader is
/// refused by it, not matched blindly.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct DType {
    /// DLPack `DLDataTypeCode`: 0 int, 1 uint, 2 float, 4 bfloat, 10 float8 e4m3fn, ...
    pub code: u8,
    /// Bits per element.
    pub bits: u8,
    /// Vector lanes, 1 for plain elements.
    pub lanes: u16,
}

impl DType {
    /// 32-bit float.
    pub const F32: DType = DType { code: 2, bits: 32, lanes: 1 };
    /// 16-bit IEEE float.
    pub const F16: DType = DType { code: 2, bits: 16, lanes: 1 };
    /// bfloat16.
    pub const BF16: DType = DType { code: 4, bits: 16, lanes: 1 };
    /// 8-bit float e4m3 (finite, one NaN).
    pub const F8E4M3: DType = DType { code: 10, bits: 8, lanes: 1 };
    /// Signed byte.
    pub const I8: DType = DType { code: 0, bits: 8, lanes: 1 };
    /// Signed 32-bit integer.
    pub const I32: DType = DType { code: 0, bits: 32, lanes: 1 };
    /// Unsigned 32-bit integer.
    pub const U32: DType = DType { code: 1, bits: 32, lanes: 1 };

    /// Bytes per element.
    pub const fn size(self) -> usize {
        (self.bits as usize * self.lanes as usize).div_ceil(8)
    }

    /// The name used in configs: `f32`, `f16`, `bf16`, `fp8`, `i8`, `i32`, `u32`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "fp8",
            DType::I8 => "i8",
            DType::I32 => "i32",
            DType::U32 => "u32",
            _ => "unknown",
        }
    }

    /// The inverse of [`DType::name`].
    pub fn parse(name: &str) -> Option<DType> {
        let all = [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::I8, Self::I32, Self::U32];
        all.into_iter().find(|d| d.name() == name)
    }
}

/// Where memory lives: DLPack's device type and the ordinal.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct Device {
    /// DLPack `DLDeviceType`: 1 CPU, 2 CUDA.
    pub kind: i32,
    /// Which one.
    pub ordinal: i32,
}

impl Device {
    /// Host memory.
    pub const CPU: Device = Device { kind: 1, ordinal: 0 };

    /// The CUDA device of this ordinal.
    pub const fn cuda(ordinal: i32) -> Device {
        Device { kind: 2, ordinal }
    }

    /// Whether this is host memory.
    pub const fn is_cpu(self) -> bool {
        self.kind == 1
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            1 => f.write_str("cpu"),
            2 => write!(f, "cuda:{}", self.ordinal),
            other => write!(f, "device{other}:{}", self.ordinal),
        }
    }
}

/// The raw fields of a view. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct RawTensor {
    /// Start of the allocation.
    pub data: *mut u8,
    /// Where the first element lies, in bytes from `data`.
    pub byte_offset: u64,
    /// Device the data lives on.
    pub device: Device,
    /// Element type.
    pub dtype: DType,
    /// Number of dimensions in use.
    pub rank: u32,
    /// Sizes; entries past `rank` are 1.
    pub shape: [i64; MAX_RANK],
    /// Element strides; entries past `rank` are 0.
    pub strides: [i64; MAX_RANK],
    /// A device event that completes when the data may be read; 0 when it already may.
    pub ready: u64,
}

// SAFETY: a RawTensor is an address with a description; using the address needs `unsafe`, and the
// safe views below carry the lifetime of the borrowed memory.
unsafe impl Send for RawTensor {}
// SAFETY: as above.
unsafe impl Sync for RawTensor {}

impl RawTensor {
    /// A contiguous row-major description of `shape`. Panics if `shape` has more than
    /// [`MAX_RANK`] dimensions, which is a mistake in the calling code.
    pub fn contiguous(data: *mut u8, device: Device, dtype: DType, shape: &[usize]) -> Self {
        assert!(shape.len() <= MAX_RANK, "a tensor has at most {MAX_RANK} dimensions");
        let mut t = RawTensor {
            data,
            byte_offset: 0,
            device,
            dtype,
            rank: shape.len() as u32,
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
            ready: 0,
        };
        let mut stride = 1i64;
        for (i, &n) in shape.iter().enumerate().rev() {
            t.shape[i] = n as i64;
            t.strides[i] = stride;
            stride *= n as i64;
        }
        t
    }

    /// The sizes in use.
    pub fn shape(&self) -> &[i64] {
        &self.shape[..(self.rank as usize).min(MAX_RANK)]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape().iter().map(|&n| n.max(0) as usize).product()
    }

    /// Whether the elements lie back to back in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let mut expect = 1i64;
        for i in (0..self.shape().len()).rev() {
            if self.shape[i] != 1 && self.strides[i] != expect {
                return false;
            }
            expect *= self.shape[i];
        }
        true
    }

    /// How many elements lie between the first one and the end of the last one.
    pub fn extent(&self) -> usize {
        if self.elements() == 0 {
            return 0;
        }
        let dims = self.shape().iter().zip(&self.strides);
        1 + dims.map(|(&n, &s)| (n - 1) as usize * s.max(0) as usize).sum::<usize>()
    }

    /// Address of the first element.
    pub fn start(&self) -> *mut u8 {
        self.data.wrapping_add(self.byte_offset as usize)
    }
}

/// Plain element types a CPU view can be read as.
///
/// # Safety
/// `DTYPE` must describe exactly this type, and every bit pattern must be a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The matching element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        // SAFETY: the dtype names this very type, which has no invalid bit pattern.
        unsafe impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
element!(f32 => F32, i32 => I32, u32 => U32, i8 => I8, half::f16 => F16, half::bf16 => BF16);

/// A borrowed tensor that may be read.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct TensorView<'a> {
    raw: RawTensor,
    memory: PhantomData<&'a ()>,
}

/// A borrowed tensor that may be written.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct TensorViewMut<'a> {
    raw: RawTensor,
    memory: PhantomData<&'a mut ()>,
}

fn check_shape<T>(data: &[T], shape: &[usize]) {
    let n: usize = shape.iter().product();
    assert!(data.len() == n, "shape {shape:?} has {n} elements, the slice {}", data.len());
}

impl<'a> TensorView<'a> {
    /// A contiguous view of host memory. Panics if the shape does not match the slice's length.
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Self {
        check_shape(data, shape);
        let raw = RawTensor::contiguous(data.as_ptr() as *mut u8, Device::CPU, T::DTYPE, shape);
        Self { raw, memory: PhantomData }
    }

    /// A view of described memory.
    ///
    /// # Safety
    /// Every element that the description reaches must be readable on `raw.device` for `'a`, and
    /// nobody may write it meanwhile.
    pub unsafe fn from_raw(raw: RawTensor) -> Self {
        Self { raw, memory: PhantomData }
    }

    /// The description.
    pub fn raw(&self) -> &RawTensor {
        &self.raw
    }

    /// The sizes.
    pub fn shape(&self) -> &[i64] {
        self.raw.shape()
    }

    /// The elements as a slice, if this is contiguous host memory of `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        slice_parts::<T>(&self.raw)?;
        // SAFETY: contiguous, aligned, on the host and of this type (checked); readable for 'a by
        // the promise made to `from_raw`, or because it came from a slice.
        Some(unsafe {
            std::slice::from_raw_parts(self.raw.start() as *const T, self.raw.elements())
        })
    }

    /// Memory of a strided view, by element offset from its first element: how kernels walk pages.
    /// `None` outside of the view, for another type, or off the host.
    pub fn window<T: Element>(&self, start: usize, len: usize) -> Option<&'a [T]> {
        let fits = self.raw.device.is_cpu() && self.raw.dtype == T::DTYPE;
        let inside = start.checked_add(len).is_some_and(|end| end <= self.raw.extent());
        let address = (self.raw.start() as *const T).wrapping_add(start);
        if !(fits && inside && address.is_aligned()) || address.is_null() {
            return None;
        }
        // SAFETY: inside the elements that the view describes, which are readable for 'a.
        Some(unsafe { std::slice::from_raw_parts(address, len) })
    }
}

impl<'a> TensorViewMut<'a> {
    /// A contiguous view of host memory. Panics if the shape does not match the slice's length.
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Self {
        check_shape(data, shape);
        let raw = RawTensor::contiguous(data.as_mut_ptr() as *mut u8, Device::CPU, T::DTYPE, shape);
        Self { raw, memory: PhantomData }
    }

    /// A view of described memory.
    ///
    /// # Safety
    /// Every element that the description reaches must be writable on `raw.device` for `'a`, and
    /// nobody else may touch it meanwhile.
    pub unsafe fn from_raw(raw: RawTensor) -> Self {
        Self { raw, memory: PhantomData }
    }

    /// The description.
    pub fn raw(&self) -> &RawTensor {
        &self.raw
    }

    /// The sizes.
    pub fn shape(&self) -> &[i64] {
        self.raw.shape()
    }

    /// A read-only view of the same memory.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { raw: self.raw, memory: PhantomData }
    }

    /// The elements as a slice, if this is contiguous host memory of `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        slice_parts::<T>(&self.raw)?;
        // SAFETY: contiguous, aligned, on the host and of this type (checked); exclusively ours
        // for the borrow of self by the promise made to `from_raw`.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.raw.start() as *mut T, self.raw.elements())
        })
    }
}

fn slice_parts<T: Element>(raw: &RawTensor) -> Option<()> {
    let fits = raw.device.is_cpu() && raw.dtype == T::DTYPE && raw.is_contiguous();
    let aligned = (raw.start() as usize).is_multiple_of(std::mem::align_of::<T>());
    (fits && aligned && !raw.start().is_null()).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_comes_back_only_as_its_own_type() {
        let mut data = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let view = TensorView::from_slice(&data, &[2, 3]);
        assert_eq!(view.as_slice::<f32>().unwrap(), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(view.as_slice::<u32>().is_none());
        assert_eq!(view.raw().strides[..2], [3, 1]);
        let mut view = TensorViewMut::from_slice(&mut data, &[6]);
        view.as_mut_slice::<f32>().unwrap()[5] = 9.0;
        assert_eq!(data[5], 9.0);
    }

    #[test]
    fn a_strided_view_is_not_a_slice() {
        let data = [0f32; 6];
        let mut raw = *TensorView::from_slice(&data, &[2, 3]).raw();
        raw.shape[1] = 2;
        assert!(!raw.is_contiguous());
        // SAFETY: the description stays inside `data`.
        let view = unsafe { TensorView::from_raw(raw) };
        assert!(view.as_slice::<f32>().is_none());
    }

    #[test]
    fn dtype_names_come_back() {
        for name in ["f32", "f16", "bf16", "fp8", "i8", "i32", "u32"] {
            assert_eq!(DType::parse(name).unwrap().name(), name);
        }
        assert_eq!(DType::parse("f64"), None);
        assert_eq!((DType::F8E4M3.size(), DType::BF16.size(), DType::F32.size()), (1, 2, 4));
    }
}
