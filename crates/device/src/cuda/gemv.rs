//! Products of a few rows with a weight matrix, each with what a decoder does before and behind it.

use std::sync::Arc;

use resource_api::{DType, TensorView, TensorViewMut};

use super::context::Context;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor;
use crate::error::{Error, Result};

/// Most rows: with more, the general product is as fast.
const MOST_ROWS: usize = 3;

/// Most elements of more than one row: from there on the general product is as fast.
const MOST_ELEMENTS: usize = 8192;

/// Most inputs of a single row: what a block's memory has room for.
const MOST_INPUTS: usize = 48 << 10;

const THREADS: u32 = 512;
const WARPS: usize = THREADS as usize / 32;

/// Bytes of weights that a block has brought ahead.
const RING: usize = 96 << 10;

const INPUTS_AND_OUTPUTS: [&str; 6] =
    ["plain_bf16", "plain_add", "normed_bf16", "normed_f32", "normed_silu", "normed_gelu"];

/// What is multiplied with the weights.
#[derive(Debug, Clone, Copy)]
pub enum GemvInput<'a> {
    /// Rows of bf16.
    Rows(&'a TensorView<'a>),
    /// Rows of f32, normed first as [`Ops::rms_norm`](super::Ops::rms_norm) does.
    Normed {
        /// `[rows, inputs]` f32.
        rows: &'a TensorView<'a>,
        /// `[inputs]` f32.
        weight: &'a TensorView<'a>,
        /// Added to the mean square.
        eps: f32,
    },
}

/// What becomes of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemvInto {
    /// bf16 values.
    Bf16,
    /// f32 values.
    F32,
    /// It is added to f32 values.
    AddF32,
    /// The weight is the gates' matrix, then that of what they let through: `silu(gate) * up`, bf16.
    Silu,
    /// The same with GELU in its form with tanh.
    GeluTanh,
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Gemv {
    context: Arc<Context>,
    /// By name, then by rows.
    kernels: Vec<[Kernel; MOST_ROWS]>,
    blocks: u32,
}

impl Gemv {
    /// Loads the kernels; not under capture.
    ///
    /// # Errors
    /// As for [`Module::load`].
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, &Instance::of("gemv.cu"))?;
        let room = room_of(context);
        let most = room.min(shared(1, MOST_INPUTS).max(alone(room)));
        let kernel = |name: &str, rows: usize| {
            let kernel = module.kernel(&format!("gemv_{name}_{rows}"))?;
            kernel.allow_shared(most)?;
            Ok(kernel)
        };
        let of = |name| Ok([kernel(name, 1)?, kernel(name, 2)?, kernel(name, 3)?]);
        let kernels = INPUTS_AND_OUTPUTS.into_iter().map(of).collect::<Result<_>>()?;
        Ok(Self { context: context.clone(), kernels, blocks: context.facts().multiprocessors })
    }

    /// Whether a product of so many rows of `inputs` is one for these kernels.
    pub fn takes(&self, rows: usize, inputs: usize) -> bool {
        let most = if rows == 1 { MOST_INPUTS } else { MOST_ELEMENTS };
        (1..=MOST_ROWS).contains(&rows)
            && inputs.is_multiple_of(8)
            && rows.saturating_mul(inputs) <= most
            && shared(rows, inputs) <= room_of(&self.context)
    }

    /// `out = input Wᵀ`, later, or what `into` makes of it: `weight` is bf16 `[outputs, inputs]`, or
    /// `[2 * outputs, inputs]` with gates; `out` is `[rows, outputs]`; `bias`, f32 `[outputs]`, is for
    /// [`GemvInto::Bf16`]. All contiguous and at multiples of 16 bytes. Sums are in f32; a row's result does
    /// not depend on the others. `weight`, `bias` and the norm's weight must not be written by work of the
    /// stream that may still run: they are read ahead of it.
    ///
    /// # Errors
    /// [`Error::Tensor`] where tensors do not fit, for more than [`Gemv::takes`], and for a combination that
    /// has no kernel.
    pub fn run(
        &self,
        stream: &Stream,
        input: GemvInput<'_>,
        weight: &TensorView<'_>,
        bias: Option<&TensorView<'_>>,
        out: &mut TensorViewMut<'_>,
        into: GemvInto,
    ) -> Result<()> {
        let (x, is_normed) = match input {
            GemvInput::Rows(rows) => (rows, false),
            GemvInput::Normed { rows, .. } => (rows, true),
        };
        let (&[rows, inputs], &[out_rows, outputs]) = (x.shape(), out.shape()) else {
            let reason = format!("{:?} into {:?} are not matrices", x.shape(), out.shape());
            return Err(Error::Tensor { what: "product", reason });
        };
        let [rows, inputs, outputs] = [rows, inputs, outputs].map(|n| n.max(0) as usize);
        let name = name_of(is_normed, into);
        let kernel = name.filter(|_| self.takes(rows, inputs) && out_rows as usize == rows);
        let is_biased = bias.is_some() && into != GemvInto::Bf16;
        let Some(name) = kernel.filter(|_| !is_biased && outputs < 1 << 31) else {
            let reason =
                format!("{rows} rows of {inputs} to {outputs} into {into:?} have no kernel");
            return Err(Error::Tensor { what: "product of a few rows", reason });
        };
        let context = &self.context;
        let of = |what, view: &TensorView<'_>, dtype, shape: &[usize]| {
            aligned(what, tensor::shaped(what, context, view.raw(), dtype, shape)?)
        };
        let height = if is_gated(into) { 2 * outputs } else { outputs };
        let weight = of("weight", weight, DType::BF16, &[height, inputs])?;
        let target =
            if matches!(into, GemvInto::F32 | GemvInto::AddF32) { DType::F32 } else { DType::BF16 };
        let out = of("product", &out.view(), target, &[rows, outputs])?;
        let mut args = Args::default();
        match input {
            GemvInput::Rows(x) => {
                args.push(of("rows", x, DType::BF16, &[rows, inputs])?);
            }
            GemvInput::Normed { rows: x, weight, eps } => {
                args.push(of("rows of a norm", x, DType::F32, &[rows, inputs])?);
                args.push(of("weight of a norm", weight, DType::F32, &[inputs])?).push(eps);
            }
        }
        args.push(weight).push(out);
        if into == GemvInto::Bf16 {
            args.push(bias.map_or(Ok(0), |bias| of("bias", bias, DType::F32, &[outputs]))?);
        }
        args.push(inputs as u32).push(outputs as u32);
        let grid = Grid {
            blocks: (self.blocks.min(outputs.div_ceil(WARPS) as u32), 1, 1),
            threads: (THREADS, 1, 1),
            shared: shared(rows, inputs).max(alone(room_of(context))) as u32,
        };
        // SAFETY: the signature is (const bf16*) or (const float*, const float*, float), then (const bf16*
        // weight, out*), a bias or null for bf16, and two u32; the shapes are those of the tensors
        // (checked). The kernel waits for the one in front before it reads its input or writes; weights are
        // the caller's promise.
        unsafe { self.kernels[name][rows - 1].launch_early(stream, grid, &args) }
    }
}

/// Bytes of its memory that a block may ask for at a launch: all but what the kernels have anyway.
fn room_of(context: &Context) -> usize {
    context.facts().shared_per_block.saturating_sub(1024)
}

/// So many bytes that no multiprocessor has room for a second block. Blocks that begin early go to where the
/// kernel in front has ended first: two of them there would leave other multiprocessors without.
fn alone(room: usize) -> usize {
    room / 2 + 1024
}

/// Bytes that it needs.
fn shared(rows: usize, inputs: usize) -> usize {
    RING + 2 * rows * inputs
}

fn is_gated(into: GemvInto) -> bool {
    matches!(into, GemvInto::Silu | GemvInto::GeluTanh)
}

/// Place in [`INPUTS_AND_OUTPUTS`].
fn name_of(is_normed: bool, into: GemvInto) -> Option<usize> {
    match (is_normed, into) {
        (false, GemvInto::Bf16) => Some(0),
        (false, GemvInto::AddF32) => Some(1),
        (true, GemvInto::Bf16) => Some(2),
        (true, GemvInto::F32) => Some(3),
        (true, GemvInto::Silu) => Some(4),
        (true, GemvInto::GeluTanh) => Some(5),
        _ => None,
    }
}

fn aligned(what: &'static str, address: u64) -> Result<u64> {
    match address.is_multiple_of(16) {
        true => Ok(address),
        false => Err(Error::Tensor { what, reason: "does not begin at 16 bytes".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_of_a_decoder_have_a_kernel_of_that_name() {
        let name = |normed, into| name_of(normed, into).map(|i| INPUTS_AND_OUTPUTS[i]);
        assert_eq!(name(false, GemvInto::Bf16), Some("plain_bf16"));
        assert_eq!(name(false, GemvInto::AddF32), Some("plain_add"));
        assert_eq!(name(true, GemvInto::Bf16), Some("normed_bf16"));
        assert_eq!(name(true, GemvInto::F32), Some("normed_f32"));
        assert_eq!(name(true, GemvInto::Silu), Some("normed_silu"));
        assert_eq!(name(true, GemvInto::GeluTanh), Some("normed_gelu"));
        assert_eq!(name(false, GemvInto::F32), None);
    }
}
