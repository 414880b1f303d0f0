//! Steps and nothing else, for counting instructions.

use super::decode::Ends;
use super::kinds::Kinds;
use super::rig::{Check, Rig};
use super::shapes::Shape;
use crate::error::Result;

/// Runs `steps` decode steps in which a sixteenth of the requests ends a page each. Two runs of
/// different length differ by what their steps cost alone.
///
/// # Errors
/// What a resource says.
pub fn run(kinds: &Kinds, shape: &Shape, steps: u32) -> Result<()> {
    // The same requests and the same memory whatever the number of steps.
    const MOST: u32 = 4096;
    let mut rig = Rig::untimed(kinds, shape.geometry(MOST))?;
    let mut streams = rig.population(&Ends::Sixteenth.lens(shape), MOST)?;
    for _ in 0..steps.min(MOST) {
        rig.step(&mut streams, None, Check::None)?;
    }
    Ok(())
}
