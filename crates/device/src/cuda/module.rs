//! Kernels loaded onto a device.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cudarc::driver::sys;

use super::cache::KernelCache;
use super::check::driver as check;
use super::context::Context;
use super::source::Instance;
use super::stream::Stream;
use crate::error::{Error, Result};

/// The kernels of one instance on one device; loaded once and kept until the process ends.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
    instance: Instance,
}

// SAFETY: the driver's module calls are thread safe, and the module is never unloaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// The module of this instance: from the process's table, the release, the cache on disk, or the
    /// compiler. Load what a step needs when buffers are made: a first use takes seconds, and is not
    /// allowed under capture.
    ///
    /// # Errors
    /// As for [`KernelCache::cubin`]; [`Error::Kernel`] where the device refuses the code.
    pub fn load(context: &Arc<Context>, instance: &Instance) -> Result<Arc<Self>> {
        type Loaded = HashMap<(i32, Instance), Arc<Module>>;
        static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
        let key = (context.device().ordinal, instance.clone());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(module) = loaded.get(&key) {
            return Ok(module.clone());
        }
        let cubin = KernelCache::of_this_process().cubin(instance, context.arch())?;
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current and the image is a whole cubin: compiled now, or read from a file
        // that is ours, as long as its header says, and checked against its checksum. The driver copies it.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) };
        check("cuModuleLoadData", code).map_err(|e| {
            Error::Kernel(format!(
                "kernels/{instance} cannot be loaded onto {}: {e}",
                context.device()
            ))
        })?;
        let module = Arc::new(Self { context: context.clone(), raw, instance: instance.clone() });
        loaded.insert(key, module.clone());
        Ok(module)
    }

    /// The kernel with this name.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the source has none.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel> {
        self.context.bind()?;
        let c_name = CString::new(name)
            .map_err(|_| Error::Kernel("a kernel's name has a zero byte".to_owned()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name is a C string; the pointer is to a local.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, c_name.as_ptr()) };
        check("cuModuleGetFunction", code).map_err(|e| {
            Error::Kernel(format!("kernels/{} has no kernel {name}: {e}", self.instance))
        })?;
        Ok(Kernel { module: self.clone(), raw })
    }
}

/// One kernel, ready to launch.
///
/// How an operation is written on top of it (see `fill.rs` for a whole one):
/// ```ignore
/// let kernel = Module::load(&context, &Instance::of("norm.cu"))?.kernel("rms_norm")?;  // once
/// // per call, after the tensors have been checked with `tensor::shaped`:
/// let mut args = Args::default();
/// args.push(out_address).push(x_address).push(eps).push(width as u32);
/// // SAFETY: the signature is (float*, const float*, float, u32), and the addresses reach ...
/// unsafe { kernel.launch(stream, Grid::new(rows, 256), &args)? };
/// ```
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Arc<Module>,
    raw: sys::CUfunction,
}

// SAFETY: functions live as long as their module, which is never unloaded; launches are thread safe.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Allows launches with up to `bytes` of dynamic shared memory; needed above 48 KiB. Once, where
    /// the kernel is loaded; not under capture.
    ///
    /// # Errors
    /// [`Error::Cuda`] where the device has less.
    pub fn allow_shared(&self, bytes: usize) -> Result<()> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        self.module.context.bind()?;
        // SAFETY: the function is loaded.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, SHARED, bytes as i32) };
        check("cuFuncSetAttribute of shared memory", code)
    }

    /// The context that it runs in.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// Puts a run of the kernel into the stream.
    ///
    /// # Safety
    /// The arguments must be those of the kernel's signature in number, order and type. Whatever the
    /// kernel reads and writes through them, on that grid, must be memory of this device that stays
    /// allocated until the stream has run it, and that no work which is not ordered with the stream
    /// writes, or reads where the kernel writes.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Tensor`] for a stream of another device.
    pub(crate) unsafe fn launch(&self, stream: &Stream, grid: Grid, args: &Args) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(stream, grid, args, None) }
    }

    /// The same for a kernel whose blocks wait for each other: all of them run at once, or none.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    ///
    /// # Errors
    /// As for [`Kernel::launch`]; [`Error::Cuda`] for more blocks than the device can run at once.
    pub(crate) unsafe fn launch_together(
        &self,
        stream: &Stream,
        grid: Grid,
        args: &Args,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(stream, grid, args, Some(cooperative())) }
    }

    /// The same for a kernel that says, as `kernels/overlap.cuh` has it, that it may begin before the one
    /// in front of it has ended. Where devices cannot do that, it begins afterwards.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], and every thread of the kernel waits for the one in front before it
    /// reads what earlier work of the stream writes, and before it writes.
    ///
    /// # Errors
    /// As for [`Kernel::launch`].
    pub(crate) unsafe fn launch_early(
        &self,
        stream: &Stream,
        grid: Grid,
        args: &Args,
    ) -> Result<()> {
        let is_able = self.module.context.facts().compute >= (9, 0);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(stream, grid, args, is_able.then(programmatic_serialization)) }
    }

    /// # Safety
    /// As for [`Kernel::launch`], or for [`Kernel::launch_early`] with that attribute.
    unsafe fn launch_with(
        &self,
        stream: &Stream,
        grid: Grid,
        args: &Args,
        attribute: Option<sys::CUlaunchAttribute>,
    ) -> Result<()> {
        if !Arc::ptr_eq(stream.context(), &self.module.context) {
            let device = self.module.context.device();
            let reason = format!("is of {}, the kernel of {device}", stream.context().device());
            return Err(Error::Tensor { what: "stream", reason });
        }
        let ((gx, gy, gz), (bx, by, bz)) = (grid.blocks, grid.threads);
        if [gx, gy, gz].contains(&0) {
            return Ok(());
        }
        self.module.context.bind()?;
        let mut pointers = args.pointers();
        let mut attributes = attribute;
        let config = sys::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: grid.shared,
            hStream: stream.raw(),
            attrs: attributes.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut),
            numAttrs: u32::from(attribute.is_some()),
        };
        // SAFETY: both handles are alive; `pointers` has one entry per argument, into `args`, which
        // outlives the call (it copies the arguments), as do the attributes. The rest is the caller's
        // promise.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, self.raw, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        check("cuLaunchKernelEx", code)
    }
}

fn programmatic_serialization() -> sys::CUlaunchAttribute {
    use sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as ID;
    sys::CUlaunchAttribute {
        id: ID,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

fn cooperative() -> sys::CUlaunchAttribute {
    use sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_COOPERATIVE as ID;
    sys::CUlaunchAttribute {
        id: ID,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { cooperative: 1 },
    }
}

/// How many threads run a kernel. A grid without blocks does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z; at most 65535 in y and z.
    pub blocks: (u32, u32, u32),
    /// Threads of a block in x, y and z; at most 1024 in all.
    pub threads: (u32, u32, u32),
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

impl Grid {
    /// A row of `blocks` blocks of `threads` threads.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks: (blocks, 1, 1), threads: (threads, 1, 1), shared: 0 }
    }

    /// Enough blocks of `threads` threads for one thread per item.
    pub fn for_items(items: usize, threads: u32) -> Self {
        Self::new(items.div_ceil(threads as usize).min(i32::MAX as usize) as u32, threads)
    }
}

const MAX_ARGS: usize = 40;
const ARG_BYTES: usize = 512;

/// The arguments of a launch, on the stack: plain values, each where its type wants to lie.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub struct Args {
    bytes: [u8; ARG_BYTES],
    starts: [u16; MAX_ARGS],
    count: usize,
    used: usize,
}

impl Default for Args {
    fn default() -> Self {
        Self { bytes: [0; ARG_BYTES], starts: [0; MAX_ARGS], count: 0, used: 0 }
    }
}

impl Args {
    /// Appends a value: an address as `u64`, a number, or a `repr(C)` struct that the kernel takes by
    /// value. Panics past 40 arguments or 512 bytes: a kernel's signature is fixed, so a test finds it.
    pub fn push<T: Pod>(&mut self, value: T) -> &mut Self {
        let start = self.used.next_multiple_of(align_of::<T>());
        let end = start + size_of::<T>();
        assert!(end <= ARG_BYTES && self.count < MAX_ARGS, "too many arguments for a kernel");
        self.bytes[start..end].copy_from_slice(bytemuck::bytes_of(&value));
        self.starts[self.count] = start as u16;
        self.count += 1;
        self.used = end;
        self
    }

    fn pointers(&self) -> [*mut c_void; MAX_ARGS] {
        let start = |at: u16| self.bytes[at as usize..].as_ptr().cast_mut().cast();
        self.starts.map(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_where_their_types_want_them() {
        let mut args = Args::default();
        args.push(1u32).push(0x1122_3344_5566_7788u64).push(2.5f32).push(-1i64);
        assert_eq!(args.starts[..4], [0, 8, 16, 24]);
        let base = args.bytes.as_ptr();
        assert!(base.addr().is_multiple_of(64));
        let pointers = args.pointers();
        assert_eq!(pointers[1].addr() - base.addr(), 8);
        assert_eq!(args.bytes[8..16], 0x1122_3344_5566_7788u64.to_ne_bytes());
        assert_eq!(args.bytes[16..20], 2.5f32.to_ne_bytes());
    }

    #[test]
    fn a_grid_has_a_thread_for_every_item() {
        assert_eq!(Grid::for_items(0, 256).blocks.0, 0);
        assert_eq!(Grid::for_items(256, 256).blocks.0, 1);
        assert_eq!(Grid::for_items(257, 256).blocks.0, 2);
    }
}
