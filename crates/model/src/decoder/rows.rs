//! What a decoder computes between matrix products, spread over threads by whole rows.

use device::{Parallel, for_each_chunk_mut, ops};

/// Values per task; below this, waking threads costs more than it saves.
const TASK: usize = 16 * 1024;

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, rows as wide as `weight`.
pub(super) fn rms_norm(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
    parallel: &dyn Parallel,
) {
    let task = task_of(weight.len());
    for_each_chunk_mut(parallel, out, task, |i, out| {
        ops::rms_norm(&x[i * task..][..out.len()], weight, eps, out);
    });
}

/// [`rms_norm`] onto `x` itself; `copy` is as long as `x`.
pub(super) fn rms_norm_in_place(
    x: &mut [f32],
    weight: &[f32],
    eps: f32,
    copy: &mut [f32],
    parallel: &dyn Parallel,
) {
    copy.copy_from_slice(x);
    rms_norm(copy, weight, eps, x, parallel);
}

/// `x[r] += row`, rows as wide as `row`.
pub(super) fn add_to_each(x: &mut [f32], row: &[f32], parallel: &dyn Parallel) {
    for_each_chunk_mut(parallel, x, task_of(row.len()), |_, x| {
        x.chunks_exact_mut(row.len()).for_each(|x| ops::add_in_place(x, row));
    });
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32], parallel: &dyn Parallel) {
    for_each_chunk_mut(parallel, x, TASK, |i, x| {
        ops::add_in_place(x, &y[i * TASK..][..x.len()]);
    });
}

/// `gate = silu(gate) * up`.
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32], parallel: &dyn Parallel) {
    for_each_chunk_mut(parallel, gate, TASK, |i, gate| {
        ops::silu_mul(gate, &up[i * TASK..][..gate.len()]);
    });
}

/// `gate = gelu(gate) * up`.
pub(super) fn gelu_tanh_mul(gate: &mut [f32], up: &[f32], parallel: &dyn Parallel) {
    for_each_chunk_mut(parallel, gate, TASK, |i, gate| {
        ops::gelu_tanh_mul(gate, &up[i * TASK..][..gate.len()]);
    });
}

/// Whether there is no NaN and no infinity among them.
pub(super) fn are_finite(values: &[f32]) -> bool {
    // The exponent of both is all ones. One pass without branches, which the compiler makes wide.
    values.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff)) < 0x7f80_0000
}

/// `x = cap * tanh(x / cap)`.
pub(super) fn soft_cap(x: &mut [f32], cap: f32, parallel: &dyn Parallel) {
    for_each_chunk_mut(parallel, x, TASK, |_, x| ops::soft_cap(x, cap));
}

/// Values of the whole rows of `width` that make up a task.
fn task_of(width: usize) -> usize {
    (TASK / width).max(1) * width
}
