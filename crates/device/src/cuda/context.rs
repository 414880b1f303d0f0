//! The primary context of a device.
//!
//! Every library of the process (the host and each plugin has a copy of this crate) retains the same
//! primary context, so that device addresses, streams and events of one are good in all.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use resource_api::Device;

use super::arch::Arch;
use super::check::driver as check;
use super::library::Library;
use crate::error::{Error, Result};

/// Oldest driver that is used: the first of CUDA 12.
const OLDEST_DRIVER: i32 = 12_000;

/// The primary context of a device, kept until the process ends.
#[derive(Debug)]
pub struct Context {
    ordinal: i32,
    raw: sys::CUcontext,
    facts: DeviceFacts,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability.
    pub compute: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Most bytes of shared memory that a block can ask for.
    pub shared_per_block: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// Version of CUDA that the driver speaks, such as 13000.
    pub driver: u32,
}

// SAFETY: a context handle may be used from any thread once it is made current there, which every
// call of this crate does for itself.
unsafe impl Send for Context {}
// SAFETY: as above; the driver's calls are thread safe.
unsafe impl Sync for Context {}

impl Context {
    /// The context of the device with this ordinal; the same one for every call.
    ///
    /// # Errors
    /// [`Error::Library`] where there is no driver or an old one, or no such device.
    pub fn of(ordinal: i32) -> Result<Arc<Self>> {
        static CONTEXTS: Mutex<BTreeMap<i32, Arc<Context>>> = Mutex::new(BTreeMap::new());
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&ordinal) {
            return Ok(context.clone());
        }
        let context = Arc::new(Self::retain(ordinal)?);
        contexts.insert(ordinal, context.clone());
        Ok(context)
    }

    /// The context of a tensor's device.
    ///
    /// # Errors
    /// As [`Context::of`]; [`Error::Tensor`] for memory that is not of a CUDA device.
    pub fn of_device(device: Device) -> Result<Arc<Self>> {
        match device.kind {
            2 => Self::of(device.ordinal),
            _ => Err(Error::Tensor {
                what: "device",
                reason: format!("{device} is not a CUDA device"),
            }),
        }
    }

    fn retain(ordinal: i32) -> Result<Self> {
        let driver = init()?;
        let count = device_count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::Library(format!(
                "there is no CUDA device {ordinal}: the driver shows {count}, counted from 0 \
                 ($CUDA_VISIBLE_DEVICES may hide some)"
            )));
        }
        let (mut device, mut raw) = (0, MaybeUninit::uninit());
        // SAFETY: the driver is initialized; both pointers are to locals.
        let raw = unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
            let retained = sys::cuDevicePrimaryCtxRetain(raw.as_mut_ptr(), device);
            check("cuDevicePrimaryCtxRetain", retained)?;
            raw.assume_init()
        };
        Ok(Self { ordinal, raw, facts: DeviceFacts::read(device, driver)? })
    }

    /// The device as tensors name it.
    pub fn device(&self) -> Device {
        Device::cuda(self.ordinal)
    }

    /// What the device is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The architecture that kernels for this device are compiled for.
    pub fn arch(&self) -> Arch {
        Arch::of_compute(self.facts.compute)
    }

    /// Bytes of device memory that are free now, whoever uses the rest.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn free_memory(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; both pointers are to locals.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    /// Waits until the device has done everything that was given to it. Not under capture.
    ///
    /// # Errors
    /// [`Error::Cuda`]: also the error of a kernel that failed before.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes this the current context of the calling thread. Every operation of this crate starts
    /// with it: another library of the process may have set another one.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the primary context is retained until the process ends.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }
}

/// Number of CUDA devices.
///
/// # Errors
/// [`Error::Library`] where there is no driver or an old one, or no device.
pub fn devices() -> Result<u32> {
    init()?;
    Ok(device_count()? as u32)
}

/// Initializes the driver; answers its version.
fn init() -> Result<i32> {
    Library::Driver.open()?;
    // SAFETY: the library is open, so that cudarc finds it.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(Error::Library(
                "the NVIDIA driver shows no device: run a container with GPU access, look at \
                 $CUDA_VISIBLE_DEVICES, or set device = \"cpu\""
                    .to_owned(),
            ));
        }
        code => check("cuInit", code)?,
    }
    let mut version = 0;
    // SAFETY: as above; the pointer is to a local.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    if version < OLDEST_DRIVER {
        return Err(Error::Library(format!(
            "the NVIDIA driver speaks CUDA {}.{}, which is too old: install one for CUDA {} or \
             newer, or set device = \"cpu\"",
            version / 1000,
            version % 1000 / 10,
            OLDEST_DRIVER / 1000
        )));
    }
    Ok(version)
}

fn device_count() -> Result<c_int> {
    let mut count = 0;
    // SAFETY: called after `init`; the pointer is to a local.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count)
}

impl DeviceFacts {
    fn read(device: sys::CUdevice, driver: i32) -> Result<Self> {
        let attribute = |which: Attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: the driver has handed out this device; the pointer is to a local.
            let code = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
            check("cuDeviceGetAttribute", code)?;
            Ok(value.max(0) as u32)
        };
        let mut name = [0u8; 256];
        let mut memory = 0;
        // SAFETY: as above; the name's buffer is as long as is said.
        unsafe {
            let code = sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device);
            check("cuDeviceGetName", code)?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
        }
        let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
        Ok(Self {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            compute: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            shared_per_block: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )? as usize,
            memory,
            driver: driver as u32,
        })
    }
}
