//! Small operations on float32 slices, between the matrix products of a model.
//!
//! A function for many rows treats each by itself and in one fixed order, so a row's result does not
//! depend on the others. All use the instructions of [`CpuFeatures::current`] and run on the calling
//! thread; callers spread rows over threads with [`for_each_chunk_mut`](crate::for_each_chunk_mut).
//!
//! # Panics
//! Every function panics when the lengths of its slices do not fit together as it says.

mod elementwise;
mod norm;
mod rope;
mod softmax;

pub use self::elementwise::{add_in_place, gelu_tanh_mul, scale, silu_mul, soft_cap};
pub use self::norm::rms_norm;
pub use self::rope::{RopeLayout, rope};
pub use self::softmax::{argmax, exp, exponentials, softmax};
#[cfg(doc)]
use crate::CpuFeatures;
use crate::cpu::simd::{LANES, Simd};

/// `x` in vectors; the last may be a part, filled up with `fill`.
#[inline(always)]
fn load_filled<S: Simd>(s: S, x: &[f32], fill: f32) -> S::F {
    match x.first_chunk() {
        Some(all) => s.load(all),
        None => {
            let mut lanes = [fill; LANES];
            lanes[..x.len()].copy_from_slice(x);
            s.load(&lanes)
        }
    }
}

/// Stores as many lanes as `to` has, at most 16.
#[inline(always)]
fn store_some<S: Simd>(s: S, x: S::F, to: &mut [f32]) {
    match to.first_chunk_mut() {
        Some(all) => s.store(x, all),
        None => s.store_part(x, to),
    }
}

#[cfg(test)]
pub(crate) mod tests;
