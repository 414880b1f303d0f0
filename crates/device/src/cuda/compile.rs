//! From CUDA C++ to machine code, by NVRTC. Needs no device.

use std::ffi::{CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

use cudarc::nvrtc::sys::{self, nvrtcResult};

use super::arch::Arch;
use super::library::Library;
use super::source::{HEADERS, Instance};
use crate::error::{Error, Result};

/// What one kernel takes of a multiprocessor, as the assembler reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelUse {
    /// Its name.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack per thread: local arrays and spilled registers.
    pub stack: u32,
    /// Bytes of spilled registers stored and loaded per thread.
    pub spills: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
}

/// NVRTC may be asked from several threads, but compiles one program at a time well.
static COMPILER: Mutex<()> = Mutex::new(());

/// Version of the compiler on this machine, such as `13.0`.
///
/// # Errors
/// [`Error::Library`] where there is none.
pub fn compiler_version() -> Result<String> {
    Library::Nvrtc.open()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is open, so that cudarc finds it; the pointers are to locals.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok(format!("{major}.{minor}"))
}

/// The machine code (a cubin) of all kernels of an instance.
///
/// # Errors
/// [`Error::Library`] without the compiler; [`Error::Kernel`] with its first message.
pub fn compile(instance: &Instance, arch: Arch) -> Result<Vec<u8>> {
    Ok(Program::compile(instance, arch, false)?.cubin)
}

/// As [`compile`], and what each kernel uses. The assembler's report costs a little time.
///
/// # Errors
/// As for [`compile`].
pub fn compile_and_report(instance: &Instance, arch: Arch) -> Result<(Vec<u8>, Vec<KernelUse>)> {
    let program = Program::compile(instance, arch, true)?;
    Ok((program.cubin, read_report(&program.log)))
}

struct Program {
    cubin: Vec<u8>,
    log: String,
}

impl Program {
    fn compile(instance: &Instance, arch: Arch, report: bool) -> Result<Self> {
        let text = c_string(instance.text()?)?;
        compiler_version()?;
        let mut options = instance.options(arch);
        if report {
            options.push("--ptxas-options=-v".to_owned());
        }
        let _one = COMPILER.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = Handle::new(instance.source(), &text)?;
        let options = options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive and the options are C strings that outlive the call.
        let code = unsafe {
            sys::nvrtcCompileProgram(handle.0, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = handle.log();
        match code {
            nvrtcResult::NVRTC_SUCCESS => Ok(Self { cubin: handle.cubin()?, log }),
            code => Err(Error::Kernel(format!(
                "kernels/{instance} does not compile for {arch}: {} ({code:?})",
                first_error(&log)
            ))),
        }
    }
}

/// A program of NVRTC; destroyed with the value.
struct Handle(sys::nvrtcProgram);

impl Handle {
    fn new(name: &str, text: &CString) -> Result<Self> {
        let name = c_string(name)?;
        let strings = |pick: fn(&(&str, &str)) -> String| -> Result<Vec<CString>> {
            HEADERS.iter().map(|header| c_string(&pick(header))).collect()
        };
        let (names, texts) = (strings(|h| h.0.to_owned())?, strings(|h| h.1.to_owned())?);
        let name_pointers: Vec<*const c_char> = names.iter().map(|s| s.as_ptr()).collect();
        let text_pointers: Vec<*const c_char> = texts.iter().map(|s| s.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings outlive the call, which copies them; the pointer is to a local.
        check("nvrtcCreateProgram", unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        })?;
        Ok(Self(program))
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive; the pointer is to a local.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) })?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size just told.
        let code = unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) };
        check("nvrtcGetCUBIN", code)?;
        Ok(cubin)
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive; the pointer is to a local.
        let code = unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) };
        if code != nvrtcResult::NVRTC_SUCCESS || size == 0 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size just told.
        let code = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        if code != nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Kernel("a kernel source has a zero byte".to_owned()))
}

fn check(call: &'static str, code: nvrtcResult) -> Result<()> {
    match code {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(Error::Cuda { call, reason: format!("{other:?}") }),
    }
}

/// The line that says what is wrong.
fn first_error(log: &str) -> &str {
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().find(|line| line.contains("error")).or(lines().next()).unwrap_or("no message")
}

/// Reads the assembler's report. Per kernel:
/// ```text
/// ptxas info    : Compiling entry function 'norm' for 'sm_90a'
/// ptxas info    : Function properties for norm
///     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ptxas info    : Used 32 registers, used 1 barriers, 384 bytes smem, 400 bytes cmem[0]
/// ```
fn read_report(log: &str) -> Vec<KernelUse> {
    let mut kernels: Vec<KernelUse> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(KernelUse { name, ..KernelUse::default() });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        let before = |unit: &str| number_before(line, unit);
        if line.contains("spill stores") {
            kernel.stack = before(" bytes stack frame");
            kernel.spills = before(" bytes spill stores") + before(" bytes spill loads");
        }
        if line.contains(" registers") {
            kernel.registers = before(" registers");
            kernel.shared = before(" bytes smem");
        }
    }
    kernels
}

fn number_before(line: &str, unit: &str) -> u32 {
    let text = line.split(unit).next().filter(|before| before.len() < line.len()).unwrap_or("");
    let digits = text.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or("");
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_assembler_says() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
            ptxas info    : Function properties for a\n    \
            16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, \
            4096 bytes smem\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
            ptxas info    : Function properties for b\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 9 registers, used 0 barriers\n";
        let (a, b) = ("a".to_owned(), "b".to_owned());
        assert_eq!(
            read_report(log),
            [
                KernelUse { name: a, registers: 255, stack: 16, spills: 20, shared: 4096 },
                KernelUse { name: b, registers: 9, ..KernelUse::default() },
            ]
        );
    }

    #[test]
    fn the_error_is_the_compilers_first() {
        let log = "\nfill.cu(3): warning #177-D: unused\nfill.cu(7): error: identifier \"x\"\nmore";
        assert_eq!(first_error(log), "fill.cu(7): error: identifier \"x\"");
        assert_eq!(first_error(""), "no message");
    }
}
