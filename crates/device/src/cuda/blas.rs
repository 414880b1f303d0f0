//! Matrix products by cuBLASLt.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use resource_api::{DType, TensorView, TensorViewMut};

use super::check::blas as check;
use super::context::Context;
use super::library::Library;
use super::memory::DeviceBuffer;
use super::stream::Stream;
use super::tensor;
use crate::error::{Error, Result};

/// Bytes of workspace: what the library's best kernels for Hopper ask for.
const WORKSPACE: usize = 32 << 20;

/// The number of rows that a batch-invariant product's kernel is chosen for.
const INVARIANT_ROWS: usize = 64;

/// What the library takes for granted of every matrix when it chooses a kernel.
const ALIGNMENT: u64 = 256;

/// Products of activations and weights on one stream at a time.
#[derive(Debug)]
pub struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer<i8>,
    plans: Mutex<HashMap<Shape, Arc<Plan>>>,
    is_batch_invariant: bool,
}

// SAFETY: the library's calls with one handle are thread safe. The workspace is used by one product
// after the other on one stream, which `matmul` asks of its caller.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// What a product writes to its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Into {
    /// The product.
    Set,
    /// Its sum with what was there.
    Add,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    inputs: usize,
    outputs: usize,
    out: DType,
    into: Into,
}

impl Blas {
    /// A handle with its workspace. Not under capture.
    ///
    /// # Errors
    /// [`Error::Library`] where the library is missing.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Library::CublasLt.open()?;
        context.bind()?;
        let workspace = DeviceBuffer::new(context, WORKSPACE)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is open, a context is current, and the pointer is to a local.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(Self {
            context: context.clone(),
            handle,
            workspace,
            plans: Mutex::default(),
            is_batch_invariant: false,
        })
    }

    /// Has every product of a weight use one kernel, whatever the number of rows, that sums each output in one
    /// sequence: then a row's bits depend on the row alone. Slower for few rows and for many.
    pub fn set_batch_invariant(&mut self, on: bool) {
        self.is_batch_invariant = on;
        self.plans.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// `out = x Wᵀ` or `out += x Wᵀ`, later: `x` is `[rows, inputs]` bf16, `weight`
    /// `[outputs, inputs]` bf16, `out` `[rows, outputs]` bf16 or f32, each beginning at a
    /// multiple of 256 bytes, as buffers do. Sums are in f32. All products of a handle must be given to
    /// streams that are ordered with each other, since they share its workspace.
    ///
    /// The first product of a shape asks the library for its best kernel (tens of microseconds).
    ///
    /// # Errors
    /// [`Error::Tensor`] where the shapes or types do not fit.
    pub fn matmul(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        weight: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
        into: Into,
    ) -> Result<()> {
        let (&[rows, inputs], &[outputs, weight_inputs]) = (x.shape(), weight.shape()) else {
            let reason = format!("{:?} times {:?} are not two matrices", x.shape(), weight.shape());
            return Err(Error::Tensor { what: "product", reason });
        };
        if inputs != weight_inputs || ![DType::BF16, DType::F32].contains(&out.raw().dtype) {
            let reason = format!(
                "rows of {inputs} by a weight of [{outputs}, {weight_inputs}] into {}",
                out.raw().dtype.name()
            );
            return Err(Error::Tensor { what: "product", reason });
        }
        let [rows, inputs, outputs] = [rows, inputs, outputs].map(|n| n.max(0) as usize);
        let context = &self.context;
        let shape = Shape { rows, inputs, outputs, out: out.raw().dtype, into };
        let a = tensor::shaped("weight", context, weight.raw(), DType::BF16, &[outputs, inputs])?;
        let b = tensor::shaped("activations", context, x.raw(), DType::BF16, &[rows, inputs])?;
        let d = tensor::shaped("product", context, out.raw(), shape.out, &[rows, outputs])?;
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        if [a, b, d].iter().any(|address| !address.is_multiple_of(ALIGNMENT)) {
            let reason =
                format!("matrices at {a:#x}, {b:#x}, {d:#x}, need multiples of {ALIGNMENT}");
            return Err(Error::Tensor { what: "product", reason });
        }
        if inputs == 0 || !Arc::ptr_eq(stream.context(), context) {
            let reason = "has no inputs, or its stream is of another device".to_owned();
            return Err(Error::Tensor { what: "product", reason });
        }
        let plan = self.plan(shape)?;
        let alpha = 1.0f32;
        let beta = if into == Into::Add { 1.0f32 } else { 0.0 };
        let pointer = |address: u64| address as usize as *mut c_void;
        context.bind()?;
        // SAFETY: handle, descriptors and algorithm are alive and belong together; the three matrices
        // lie contiguously on this device with the sizes that the layouts state (checked above), `out`
        // exclusively; the workspace is as large as is said, and ordered by the caller's stream.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.product,
                (&raw const alpha).cast(),
                pointer(a),
                plan.weight,
                pointer(b),
                plan.x,
                (&raw const beta).cast(),
                pointer(d),
                plan.out,
                pointer(d),
                plan.out,
                &plan.algorithm,
                pointer(self.workspace.address()),
                WORKSPACE,
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", status)
    }

    fn plan(&self, shape: Shape) -> Result<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&shape) {
            return Ok(plan.clone());
        }
        self.context.bind()?;
        let plan = Arc::new(Plan::new(self.handle, shape, self.is_batch_invariant)?);
        plans.insert(shape, plan.clone());
        Ok(plan)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: ours, destroyed once, after the last product is done.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

/// The library's descriptors of one shape, and the kernel it chose.
///
/// The library counts in columns: what is `[rows, n]` row by row for us is a matrix of n rows and
/// `rows` columns for it. So `outᵀ = W xᵀ`, with W given transposed.
#[derive(Debug)]
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are plain memory of the library, not written after they are made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, shape: Shape, is_batch_invariant: bool) -> Result<Self> {
        let chosen_for = Shape { rows: INVARIANT_ROWS, ..shape };
        let like = is_batch_invariant && shape.rows != INVARIANT_ROWS;
        let like = like.then(|| Self::new(handle, chosen_for, true)).transpose()?;
        let Shape { rows, inputs, outputs, out, .. } = shape;
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        let f32 = sys::cudaDataType::CUDA_R_32F;
        let out = if out == DType::F32 { f32 } else { bf16 };
        let failed = |e: result::CublasError| Error::Cuda {
            call: "cublasLt",
            reason: format!("no kernel for {rows} rows of {inputs} to {outputs}: {:?}", e.0),
        };
        let layout = |kind, length: usize, count: usize| {
            result::create_matrix_layout(kind, length as u64, count as u64, length as i64)
        };
        let (weight, x, out) =
            (layout(bf16, inputs, outputs), layout(bf16, inputs, rows), layout(out, outputs, rows));
        let product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, f32);
        // A failure here leaks what was made before it: a few bytes, and the engine does not start.
        let mut plan = Self {
            product: product.map_err(failed)?,
            weight: weight.map_err(failed)?,
            x: x.map_err(failed)?,
            out: out.map_err(failed)?,
            // SAFETY: plain numbers, all zero until chosen below.
            algorithm: unsafe { std::mem::zeroed() },
        };
        // `CUBLAS_OP_T` of cublas_api.h, which cudarc's bindings of this library leave out.
        let transposed = 1i32;
        let workspace = if is_batch_invariant { 0 } else { WORKSPACE };
        let one_sequence = 0u32;
        // SAFETY: all descriptors were just made; attributes have the types that the library states.
        unsafe {
            result::set_matmul_desc_attribute(
                plan.product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
            .map_err(failed)?;
            if let Some(like) = like {
                plan.algorithm = like.algorithm;
                return plan.checked(handle, shape);
            }
            let preference = result::create_matmul_pref().map_err(failed)?;
            let chosen = result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )
            .and_then(|()| match is_batch_invariant {
                // No sums that several blocks have parts of.
                true => result::set_matmul_pref_attribute(
                    preference,
                    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    (&raw const one_sequence).cast(),
                    size_of_val(&one_sequence),
                ),
                false => Ok(()),
            })
            .and_then(|()| {
                result::get_matmul_algo_heuristic(
                    handle,
                    plan.product,
                    plan.weight,
                    plan.x,
                    plan.out,
                    plan.out,
                    preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            plan.algorithm = chosen.map_err(failed)?.algo;
        }
        Ok(plan)
    }

    /// The same, if its kernel can compute its shape.
    fn checked(self, handle: sys::cublasLtHandle_t, shape: Shape) -> Result<Self> {
        // SAFETY: plain numbers, which the library fills in.
        let mut found = unsafe { std::mem::zeroed() };
        // SAFETY: handle, descriptors and algorithm are alive; the pointers are to locals.
        let code = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.product,
                self.weight,
                self.x,
                self.out,
                self.out,
                &self.algorithm,
                &mut found,
            )
        };
        check("cublasLtMatmulAlgoCheck", code).map_err(|e| Error::Cuda {
            call: "cublasLt",
            reason: format!("a batch-invariant product of {shape:?}: {e}"),
        })?;
        Ok(self)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once. A product that was started has read them.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.weight, self.x, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
