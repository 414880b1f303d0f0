//! What a decoder computes between matrix products, on a device.
//!
//! Tensors are contiguous unless said otherwise, and rows of every operation are computed apart: a
//! row's result does not depend on the others. Widths are multiples of 8.

use std::sync::Arc;

use resource_api::{DType, RawTensor, TensorView, TensorViewMut};

use super::context::Context;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor;
use crate::error::{Error, Result};

/// The kernels, loaded.
#[derive(Debug)]
pub struct Ops {
    embed: Kernel,
    norm_f32_bf16: Kernel,
    add_norm: Kernel,
    head_norm: Kernel,
    add_bias: Kernel,
    silu_mul: Kernel,
    gelu_tanh_mul: Kernel,
    soft_cap: Kernel,
    gather_rows: Kernel,
}

/// Threads of a block of the element-wise kernels.
const THREADS: u32 = 256;

/// 2 times 8 elements in each of 1024 threads.
const WIDEST_NORM: usize = 2 * 8 * 1024;

impl Ops {
    /// Added to the number of a sample, the id of a token that is known on the device only.
    pub const FROM_SAMPLE: u32 = 1 << 31;

    /// Whether rows of such a width can be worked on: a multiple of 8. For whoever loads a model, who can
    /// say so before anything runs.
    ///
    /// # Errors
    /// [`Error::Tensor`], naming `what`.
    pub fn check_width(what: &'static str, width: usize) -> Result<()> {
        eighths(what, width).map(|_| ())
    }

    /// Whether rows of such a width can be normed: a multiple of 8 up to 16,384.
    ///
    /// # Errors
    /// As for [`Ops::check_width`].
    pub fn check_normed_width(what: &'static str, width: usize) -> Result<()> {
        if width > WIDEST_NORM {
            let reason = format!("width {width} exceeds {WIDEST_NORM}");
            return Err(Error::Tensor { what, reason });
        }
        Self::check_width(what, width)
    }

    /// Loads the kernels; not under capture.
    ///
    /// # Errors
    /// As for [`Module::load`].
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let norm = Module::load(context, &Instance::of("norm.cu"))?;
        let elementwise = Module::load(context, &Instance::of("elementwise.cu"))?;
        Ok(Self {
            embed: elementwise.kernel("embed_bf16_f32")?,
            norm_f32_bf16: norm.kernel("rms_norm_f32_bf16")?,
            add_norm: norm.kernel("add_rms_norm_f32_bf16")?,
            head_norm: norm.kernel("head_norm_bf16")?,
            add_bias: elementwise.kernel("add_bias_bf16")?,
            silu_mul: elementwise.kernel("silu_mul_bf16")?,
            gelu_tanh_mul: elementwise.kernel("gelu_tanh_mul_bf16")?,
            soft_cap: elementwise.kernel("soft_cap_f32")?,
            gather_rows: elementwise.kernel("gather_rows")?,
        })
    }

    /// `out[t] = table[ids[t]] * scale`, zeros for an id past the table: ids u32 `[tokens]`, table bf16
    /// `[vocabulary, width]`, out f32 `[tokens, width]`. An id of [`Ops::FROM_SAMPLE`] or above is that of one
    /// of `sampled`, u32, as earlier work of the stream leaves them.
    ///
    /// # Errors
    /// [`Error::Tensor`] where the tensors do not fit, as everywhere here.
    pub fn embed(
        &self,
        stream: &Stream,
        ids: &TensorView<'_>,
        sampled: &TensorView<'_>,
        table: &TensorView<'_>,
        scale: f32,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let [tokens, width] = matrix("embedding", out.raw())?;
        let [vocabulary, _] = matrix("embedding", table.raw())?;
        let samples = sampled.raw().elements();
        let at = Place { context: stream.context() };
        let ids = at.shaped("token ids", ids.raw(), DType::U32, &[tokens])?;
        let sampled = at.shaped("sampled ids", sampled.raw(), DType::U32, &[samples])?;
        let table = at.shaped("embedding", table.raw(), DType::BF16, &[vocabulary, width])?;
        let out = at.shaped("embedded tokens", out.raw(), DType::F32, &[tokens, width])?;
        let grid = Grid::for_items(tokens * eighths("embedding", width)?, THREADS);
        let mut args = Args::default();
        args.push(ids).push(sampled).push(samples as u32).push(table).push(out);
        args.push(tokens as u32).push(vocabulary as u32).push(width as u32).push(scale);
        // SAFETY: the signature is (const u32* x 2, u32, const bf16*, float*, u32 x 3, float); the shapes are
        // those of the tensors (checked), and an id past the table or the samples reads nothing.
        unsafe { self.embed.launch(stream, grid, &args) }
    }

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`: x f32 `[rows, width]`, weight f32 `[width]`,
    /// out bf16 as `x`.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn rms_norm(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        weight: &TensorView<'_>,
        eps: f32,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let shape @ [rows, width] = matrix("rows of a norm", x.raw())?;
        let at = Place { context: stream.context() };
        let x = at.shaped("rows of a norm", x.raw(), DType::F32, &shape)?;
        let weight = at.shaped("weight of a norm", weight.raw(), DType::F32, &[width])?;
        let out = at.shaped("normed rows", out.raw(), DType::BF16, &shape)?;
        let grid = Grid::new(rows as u32, norm_threads(width)?);
        let mut args = Args::default();
        args.push(x).push(width as i64).push(weight).push(out).push(width as i64);
        args.push(width as u32).push(eps);
        // SAFETY: the signature is (const float*, i64, const float*, bf16*, i64, u32, float); one block
        // per row reads and writes a row of that width (checked).
        unsafe { self.norm_f32_bf16.launch_early(stream, grid, &args) }
    }

    /// `residual[r] += x[r] / sqrt(mean(x[r]²) + eps) * weight`: residual f32 `[rows, width]`, x bf16 as
    /// `residual`, weight f32 `[width]`.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn add_normed(
        &self,
        stream: &Stream,
        residual: &mut TensorViewMut<'_>,
        x: &TensorView<'_>,
        weight: &TensorView<'_>,
        eps: f32,
    ) -> Result<()> {
        let shape @ [rows, width] = matrix("rows of a norm", x.raw())?;
        let at = Place { context: stream.context() };
        let x = at.shaped("rows of a norm", x.raw(), DType::BF16, &shape)?;
        let weight = at.shaped("weight of a norm", weight.raw(), DType::F32, &[width])?;
        let residual = at.shaped("residual stream", residual.raw(), DType::F32, &shape)?;
        let grid = Grid::new(rows as u32, norm_threads(width)?);
        let mut args = Args::default();
        args.push(residual).push(x).push(weight).push(0u64).push(0u64);
        args.push(width as u32).push(eps);
        // SAFETY: the signature is (float*, const bf16*, const float*, const float*, bf16*, u32, float);
        // without the second weight nothing is written to the last pointer. Rows as in `rms_norm`.
        unsafe { self.add_norm.launch_early(stream, grid, &args) }
    }

    /// The norm of every head by itself, in place: x bf16 `[tokens, heads, dim]` with strided tokens and
    /// heads, weight f32 `[dim]`; `dim` at most 256.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn head_norm(
        &self,
        stream: &Stream,
        x: &mut TensorViewMut<'_>,
        weight: &TensorView<'_>,
        eps: f32,
    ) -> Result<()> {
        let what = "heads of a norm";
        let raw = *x.raw();
        let &[tokens, heads, dim] = raw.shape() else {
            return Err(Error::Tensor { what, reason: format!("shape {:?}", raw.shape()) });
        };
        let [tokens, heads, dim] = [tokens, heads, dim].map(|n| n.max(0) as usize);
        let [token_stride, head_stride, element_stride, ..] = raw.strides;
        let is_aligned = token_stride % 8 == 0 && head_stride % 8 == 0 && element_stride == 1;
        if !is_aligned || dim > 256 || token_stride < 0 || head_stride < 0 {
            let reason = format!("shape {:?} with strides {:?}", raw.shape(), &raw.strides[..3]);
            return Err(Error::Tensor { what, reason });
        }
        let at = Place { context: stream.context() };
        let address = tensor::strided(what, at.context, &raw, DType::BF16)?;
        aligned(what, address)?;
        let weight = at.shaped("weight of a norm", weight.raw(), DType::F32, &[dim])?;
        let lanes = eighths(what, dim)?.next_power_of_two();
        let grid = Grid::for_items(tokens * heads * lanes, THREADS);
        let mut args = Args::default();
        args.push(address).push(token_stride).push(head_stride).push(weight);
        args.push(tokens as u32).push(heads as u32).push(dim as u32).push(lanes as u32).push(eps);
        // SAFETY: the signature is (bf16*, i64, i64, const float*, u32, u32, u32, u32, float), and the
        // kernel stays inside the elements that the view describes.
        unsafe { self.head_norm.launch_early(stream, grid, &args) }
    }

    /// `x[r] += bias`: x bf16 `[rows, width]`, bias f32 `[width]`.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn add_bias(
        &self,
        stream: &Stream,
        x: &mut TensorViewMut<'_>,
        bias: &TensorView<'_>,
    ) -> Result<()> {
        let shape @ [rows, width] = matrix("rows of a bias", x.raw())?;
        let at = Place { context: stream.context() };
        let x = at.shaped("rows of a bias", x.raw(), DType::BF16, &shape)?;
        let bias = at.shaped("bias", bias.raw(), DType::F32, &[width])?;
        let grid = Grid::for_items(rows * eighths("rows of a bias", width)?, THREADS);
        let mut args = Args::default();
        args.push(x).push(bias).push(rows as u32).push(width as u32);
        // SAFETY: the signature is (bf16*, const float*, u32, u32), of tensors with these shapes.
        unsafe { self.add_bias.launch_early(stream, grid, &args) }
    }

    /// `out[r] = silu(gate) * up`, where row r of `x` is `width` gates, then `width` ups: x bf16
    /// `[rows, 2 * width]`, out bf16 `[rows, width]`.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn silu_mul(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        gated(&self.silu_mul, stream, x, out)
    }

    /// As [`Ops::silu_mul`] with GELU in its form with tanh.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn gelu_tanh_mul(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        gated(&self.gelu_tanh_mul, stream, x, out)
    }

    /// `x = cap * tanh(x / cap)` for f32 of any shape.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn soft_cap(&self, stream: &Stream, x: &mut TensorViewMut<'_>, cap: f32) -> Result<()> {
        let what = "values to bound";
        let address = tensor::contiguous(what, stream.context(), x.raw(), DType::F32)?;
        aligned(what, address)?;
        let count = x.raw().elements();
        let mut args = Args::default();
        args.push(address).push(count as u64).push(cap);
        let grid = Grid::for_items(count.div_ceil(8), THREADS);
        // SAFETY: the signature is (float*, u64, float), of that many values.
        unsafe { self.soft_cap.launch_early(stream, grid, &args) }
    }

    /// `out[r] = x[rows[r]]` for rows of any type, a multiple of 16 bytes wide: rows u32 `[count]`, each
    /// below the number of rows of `x`.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub fn gather_rows(
        &self,
        stream: &Stream,
        x: &TensorView<'_>,
        rows: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let what = "gathered rows";
        let dtype = x.raw().dtype;
        let [of, width] = matrix(what, x.raw())?;
        let [count, _] = matrix(what, out.raw())?;
        let at = Place { context: stream.context() };
        let x = at.shaped(what, x.raw(), dtype, &[of, width])?;
        let rows = at.shaped(what, rows.raw(), DType::U32, &[count])?;
        let out = at.shaped(what, out.raw(), dtype, &[count, width])?;
        let bytes = width * dtype.size();
        if !bytes.is_multiple_of(16) {
            return Err(Error::Tensor { what, reason: format!("rows of {bytes} bytes") });
        }
        let mut args = Args::default();
        args.push(x).push(out).push(rows).push(count as u32).push(bytes as u64);
        let grid = Grid::for_items(count * bytes / 16, THREADS);
        // SAFETY: the signature is (const u8*, u8*, const u32*, u32, u64), of tensors with these shapes.
        // The row numbers are the caller's, who has them from a step that was checked; a wrong one reads
        // device memory only.
        unsafe { self.gather_rows.launch_early(stream, grid, &args) }
    }
}

fn gated(
    kernel: &Kernel,
    stream: &Stream,
    x: &TensorView<'_>,
    out: &mut TensorViewMut<'_>,
) -> Result<()> {
    let shape @ [rows, width] = matrix("gated values", out.raw())?;
    let at = Place { context: stream.context() };
    let x = at.shaped("gates and values", x.raw(), DType::BF16, &[rows, 2 * width])?;
    let out = at.shaped("gated values", out.raw(), DType::BF16, &shape)?;
    let grid = Grid::for_items(rows * eighths("gated values", width)?, THREADS);
    let mut args = Args::default();
    args.push(x).push(out).push(rows as u32).push(width as u32);
    // SAFETY: the signature is (const bf16*, bf16*, u32, u32), of tensors with these shapes.
    unsafe { kernel.launch_early(stream, grid, &args) }
}

/// Where tensors must lie.
struct Place<'a> {
    context: &'a Context,
}

impl Place<'_> {
    /// Address of a tensor with this type and shape, aligned for the kernels' accesses of 16 bytes.
    fn shaped(
        &self,
        what: &'static str,
        raw: &RawTensor,
        dtype: DType,
        shape: &[usize],
    ) -> Result<u64> {
        let address = tensor::shaped(what, self.context, raw, dtype, shape)?;
        // Ids and row numbers are read one by one.
        if dtype != DType::U32 {
            aligned(what, address)?;
        }
        Ok(address)
    }
}

fn aligned(what: &'static str, address: u64) -> Result<()> {
    match address.is_multiple_of(16) {
        true => Ok(()),
        false => Err(Error::Tensor { what, reason: "does not begin at 16 bytes".to_owned() }),
    }
}

fn matrix(what: &'static str, raw: &RawTensor) -> Result<[usize; 2]> {
    match *raw.shape() {
        // Kernels count rows in 32 bits.
        [rows, width] if (0..1 << 31).contains(&rows) && (0..1 << 31).contains(&width) => {
            Ok([rows as usize, width as usize])
        }
        _ => Err(Error::Tensor { what, reason: format!("shape {:?} is no matrix", raw.shape()) }),
    }
}

fn eighths(what: &'static str, width: usize) -> Result<usize> {
    match width.is_multiple_of(8) {
        true => Ok(width / 8),
        false => {
            Err(Error::Tensor { what, reason: format!("width {width} is not a multiple of 8") })
        }
    }
}

/// Whole warps with 8 elements a thread, until there are 1024 threads.
fn norm_threads(width: usize) -> Result<u32> {
    let what = "rows of a norm";
    Ops::check_normed_width(what, width)?;
    Ok(eighths(what, width)?.next_multiple_of(32).clamp(32, 1024) as u32)
}

/// Instances that decoders use.
pub(super) fn named_instances() -> Vec<Instance> {
    vec![Instance::of("norm.cu"), Instance::of("elementwise.cu")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_has_a_thread_for_8_or_16_elements_in_whole_warps() {
        let threads = |width| norm_threads(width).unwrap();
        assert_eq!([threads(8), threads(576), threads(4096)], [32, 96, 512]);
        assert_eq!([threads(8192), threads(8200), threads(16_384)], [1024; 3]);
        let refused =
            |width| Ops::check_normed_width("hidden size", width).unwrap_err().to_string();
        assert_eq!(refused(100), "hidden size: width 100 is not a multiple of 8");
        assert_eq!(refused(16_392), "hidden size: width 16392 exceeds 16384");
    }
}
