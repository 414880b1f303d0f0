//! Rotary position embedding on a device.

use std::f64::consts::TAU;
use std::sync::Arc;

use resource_api::{DType, DeviceColumn, RawTensor, TensorViewMut};

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::{refuse, strided};
use crate::cpu::ops::RopeLayout;
use crate::error::{Error, Result};

const THREADS: u32 = 128;

/// Frequencies on a device, with the kernels that turn heads by them.
#[derive(Debug)]
pub struct RopePhases {
    phases: DeviceBuffer<u64>,
    head_dim: usize,
    layout: RopeLayout,
    /// For bf16 and for f32.
    kernels: [Kernel; 2],
}

impl RopePhases {
    /// For heads of `head_dim`: pair `i` at position `p` is turned by `p * frequencies[i]` radians.
    ///
    /// # Errors
    /// [`Error::Length`] for more pairs than a head has; as for [`Module::load`].
    pub fn new(
        context: &Arc<Context>,
        frequencies: &[f64],
        head_dim: usize,
        layout: RopeLayout,
    ) -> Result<Self> {
        if 2 * frequencies.len() > head_dim || frequencies.is_empty() {
            let (got, need) = (2 * frequencies.len(), head_dim);
            return Err(Error::Length { what: "frequencies", unit: "turning elements", got, need });
        }
        let phases: Vec<u64> = frequencies.iter().map(|&f| phase(f)).collect();
        let module = Module::load(context, &Instance::of("rope.cu"))?;
        Ok(Self {
            phases: DeviceBuffer::from_slice(context, &phases)?,
            head_dim,
            layout,
            kernels: [module.kernel("rope_bf16")?, module.kernel("rope_f32")?],
        })
    }

    /// Turns the heads of `q` and `k` `[tokens, heads, head_dim]` in place, later, by the position of each
    /// token; bf16 or f32, both alike. As many tokens as there are positions; further rows are left
    /// alone.
    ///
    /// # Errors
    /// [`Error::Tensor`] for tensors of another shape or type.
    pub fn turn(
        &self,
        stream: &Stream,
        positions: DeviceColumn<u32>,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let dtype = q.raw().dtype;
        let kernel = match dtype {
            DType::BF16 => &self.kernels[0],
            DType::F32 => &self.kernels[1],
            other => return refuse("q", format!("is {}, need bf16 or f32", other.name())),
        };
        let tokens = positions.len();
        let (q, k) =
            (self.heads("q", q.raw(), dtype, tokens)?, self.heads("k", k.raw(), dtype, tokens)?);
        let pairs = self.phases.len();
        let is_wide =
            q.is_wide && k.is_wide && self.head_dim.is_multiple_of(16) && pairs.is_multiple_of(8);
        let mut args = Args::default();
        for heads in [&q, &k] {
            args.push(heads.address).push(heads.token_stride).push(heads.head_stride);
            args.push(heads.count);
        }
        args.push(positions.address()).push(self.phases.address());
        args.push(pairs as u32).push(self.head_dim as u32);
        args.push(u32::from(self.layout == RopeLayout::Interleaved)).push(u32::from(is_wide));
        let items = (q.count + k.count) * if is_wide { pairs as u32 / 8 } else { pairs as u32 };
        let blocks = (tokens as u32, items.div_ceil(THREADS), 1);
        let grid = Grid { blocks, threads: (THREADS, 1, 1), shared: 0 };
        // SAFETY: the signature is (T*, i64, i64, u32, T*, i64, i64, u32, const u32*, const u64*, u32 x 4);
        // the views promise that many heads for each position, exclusively, and no pair lies past a
        // head's end (checked at `new`).
        unsafe { kernel.launch_early(stream, grid, &args) }
    }

    /// The phases, and whether pairs are neighbours, for kernels that turn heads on the way to somewhere. Whoever
    /// hands the column on keeps this value for as long as it is read.
    pub fn describe(&self) -> (DeviceColumn<u64>, bool) {
        (self.phases.column(), self.layout == RopeLayout::Interleaved)
    }

    fn heads(
        &self,
        what: &'static str,
        raw: &RawTensor,
        dtype: DType,
        tokens: usize,
    ) -> Result<Heads> {
        let address = strided(what, self.phases.context(), raw, dtype)?;
        let dim = self.head_dim as i64;
        match (raw.shape(), raw.strides) {
            (&[n, heads, d], [token_stride, head_stride, 1, ..])
                if n >= tokens as i64 && d == dim && token_stride >= 0 && head_stride >= 0 =>
            {
                let is_wide =
                    address.is_multiple_of(16) && token_stride % 8 == 0 && head_stride % 8 == 0;
                Ok(Heads { address, token_stride, head_stride, count: heads as u32, is_wide })
            }
            (shape, _) => refuse(
                what,
                format!(
                    "has shape {shape:?}; the step needs [{tokens} or more, heads, {dim}] with the \
                     elements of a head together"
                ),
            ),
        }
    }
}

/// The heads of a tensor. Strides count elements.
struct Heads {
    address: u64,
    token_stride: i64,
    head_stride: i64,
    count: u32,
    is_wide: bool,
}

/// Turns a position, in units of 2^-64 turn: the product with a position wraps at whole turns, exactly.
fn phase(frequency: f64) -> u64 {
    let turns = (frequency / TAU).rem_euclid(1.0);
    // Below 2^64, but for a value that rounds to a whole turn.
    (turns * 2f64.powi(64)) as u128 as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The angle as the kernel gets it against a product in float64, at positions where float32 would be
    /// off by many turns.
    #[test]
    fn phases_wrap_at_whole_turns_and_stay_exact_at_large_positions() {
        for frequency in [1.0, 0.3, 1e-3, 7.7e-7, TAU, 12.5] {
            for position in [0u32, 1, 999, 131_072, 1 << 20] {
                let got = phase(frequency).wrapping_mul(u64::from(position));
                let got = got as f64 / 2f64.powi(64) * TAU;
                let want = frequency * f64::from(position);
                let near = |a: f64, b: f64| (a - b).abs() < 1e-8;
                assert!(
                    near(got.cos(), want.cos()) && near(got.sin(), want.sin()),
                    "{frequency} {position}"
                );
            }
        }
        assert_eq!(phase(0.0), 0);
    }
}
