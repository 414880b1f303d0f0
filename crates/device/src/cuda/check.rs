//! From result codes of CUDA's libraries to errors.

use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::sys::CUresult;

use crate::error::{Error, Result};

/// The error of a driver call that did not succeed. `call` names the call and, where it helps, what
/// it was for.
pub(super) fn driver(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let error = cudarc::driver::DriverError(code);
    let text = |found: std::result::Result<&std::ffi::CStr, _>| match found {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(cudarc::driver::DriverError(code)) => format!("error {}", code as u32),
    };
    let reason = format!("{} ({})", text(error.error_string()), text(error.error_name()));
    Err(Error::Cuda { call, reason })
}

/// The error of a cuBLASLt call that did not succeed.
pub(super) fn blas(call: &'static str, status: cublasStatus_t) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(Error::Cuda { call, reason: format!("{other:?}") }),
    }
}
