//! Random weights made on the device.

use half::bf16;

use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Module};
use super::source::Instance;
use super::stream::Stream;
use super::tensor::refuse;
use crate::error::Result;

/// Fills a buffer with about normal values around 0, later; element `i` depends on (`seed`, `i`)
/// alone. For benchmarks of shapes whose weights are not at hand.
///
/// # Errors
/// As for [`Module::load`].
pub fn fill_random(
    stream: &Stream,
    out: &mut DeviceBuffer<bf16>,
    deviation: f32,
    seed: u64,
) -> Result<()> {
    let context = stream.context();
    if !std::sync::Arc::ptr_eq(out.context(), context) {
        let (lies, need) = (out.context().device(), context.device());
        return refuse("buffer to fill", format!("lies on {lies}, need {need}"));
    }
    let kernel = Module::load(context, &Instance::of("fill.cu"))?.kernel("fill_random")?;
    let most = context.facts().multiprocessors * 8;
    let mut grid = Grid::for_items(out.len(), 256);
    grid.blocks.0 = grid.blocks.0.min(most);
    let mut args = Args::default();
    args.push(out.address()).push(out.len() as u64).push(deviation).push(seed);
    // SAFETY: the signature is (bf16*, u64, float, u64), and the kernel writes `len` elements.
    unsafe { kernel.launch(stream, grid, &args) }
}
