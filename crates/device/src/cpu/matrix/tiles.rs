//! Integer products of 16 vectors with a panel at once, on AMX tiles.
//!
//! A tile product leaves the exact sums of one block, 16 vectors by 16 outputs, and each has scales of its
//! own: so every tile goes through memory into vectors, where the float steps are those of
//! [`int8`](super::int8), to the bit. What the tiles take is hidden behind these steps: the product of a block
//! is under way while the sums of the one before are added up.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use super::activations::ActivationBlock;
use super::format::{BLOCK, QuantizedFormat, ScaleKind, Scales};
use super::int8::{Task, add_sums};
use crate::cpu::features::{CpuFeatures, Level};
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

/// Vectors that a tile holds.
const ROWS: usize = 16;

/// Computes as many whole tiles of the task's vectors as there are, where the CPU has tiles; returns how
/// many vectors that was. Types with a scale for each half of a block go without: two products of half the
/// length cost more than they save.
pub(super) fn multiply<F: QuantizedFormat>(
    features: CpuFeatures,
    task: &Task<'_, F>,
    memory: &Memory,
) -> usize {
    let rows = task.rows / ROWS * ROWS;
    if !takes::<F>(features, rows) {
        return 0;
    }
    let mut part = memory.take();
    dispatch(features, Tiled { task, rows, unpacked: &mut part.unpacked });
    memory.give(part);
    rows
}

/// Whether tiles multiply so many vectors.
pub(super) fn takes<F: QuantizedFormat>(features: CpuFeatures, rows: usize) -> bool {
    features.level() >= Level::Amx && rows >= ROWS && !F::Scale::PER_HALF
}

/// Unpacked weights of every thread that may take part in a product, made by whoever calls for it: a thread
/// that had its own would allocate in the step in which it first comes in time to take part.
#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<Vec<Part>>);

/// What one thread has at a time.
#[derive(Debug, Default)]
struct Part {
    /// Who had it last, and has it in the cache of its processor.
    of: Option<ThreadId>,
    unpacked: Vec<Unpacked>,
}

impl Memory {
    /// Makes room for `threads` to multiply panels of so many inputs, each of them `panels` in one task.
    pub(super) fn fit(&mut self, threads: usize, panels: usize, inputs: usize) {
        let blocks = inputs / BLOCK;
        let need = panels.min(together(blocks)) * blocks;
        let parts = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        parts.resize_with(parts.len().max(threads), Part::default);
        for Part { unpacked, .. } in parts {
            unpacked.resize(unpacked.len().max(need), Unpacked::NOTHING);
        }
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the calling thread had last, or else what nobody has had.
    fn take(&self) -> Part {
        let own = Some(thread::current().id());
        let mut parts = self.parts();
        let had_by = |of| parts.iter().position(|part| part.of == of);
        let at = had_by(own).or_else(|| had_by(None)).or(parts.len().checked_sub(1));
        let part = at.map(|at| parts.swap_remove(at)).unwrap_or_default();
        Part { of: own, ..part }
    }

    fn give(&self, part: Part) {
        self.parts().push(part);
    }

    /// Where each thread's begins.
    #[cfg(test)]
    pub(super) fn places(&self) -> std::collections::BTreeSet<*const u8> {
        self.parts().iter().map(|part| part.unpacked.as_ptr().cast()).collect()
    }
}

/// Panels of so many blocks that are unpacked at a time.
fn together(blocks: usize) -> usize {
    /// Panels that the vectors go through one after another should still be in the cache.
    const CACHED: usize = 512 * 1024;
    (CACHED / (blocks.max(1) * size_of::<Unpacked>())).max(1)
}

/// The task's first vectors, whole tiles of them.
struct Tiled<'a, 'b, F> {
    task: &'a Task<'b, F>,
    rows: usize,
    unpacked: &'a mut Vec<Unpacked>,
}

/// A block of a panel as it is read for every 16 vectors.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Unpacked {
    /// Bits of the codes, one to a byte and signed: a row of the tile for each four inputs.
    codes: [[f32; LANES]; 8],
    scale: [f32; LANES],
    min: [f32; LANES],
}

/// What a tile of sums is stored to.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[u8; 64]; ROWS]);

/// Products under way at a time: what one takes, from the first load to sums that can be read, is longer
/// than adding those of a block up.
const UNDER_WAY: usize = 4;

impl Unpacked {
    const NOTHING: Self = {
        let nothing = [0.0; LANES];
        Self { codes: [nothing; 8], scale: nothing, min: nothing }
    };
}

impl<F: QuantizedFormat> Kernel for Tiled<'_, '_, F> {
    type Output = ();

    const HAS_DOTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { task, rows, unpacked: memory } = self;
        let blocks = task.inputs / BLOCK;
        let together = together(blocks);
        let mut tiles = Tiles::configured();
        let mut number = task.first;
        for panels in task.panels.chunks(together * task.panel_bytes) {
            let count = panels.len() / task.panel_bytes;
            if memory.len() < count * blocks {
                memory.resize(count * blocks, Unpacked::NOTHING);
            }
            for i in 0..count {
                let panel = &panels[i * task.panel_bytes..][..task.panel_bytes];
                for block in 0..blocks {
                    unpack::<S, F>(s, panel, block, &mut memory[i * blocks + block]);
                }
            }
            for row in (0..rows).step_by(ROWS) {
                for i in 0..count {
                    let panel = &memory[i * blocks..][..blocks];
                    let sums = multiply_tile::<S, F>(s, &mut tiles, panel, task, row);
                    for (r, sum) in sums.into_iter().enumerate() {
                        task.out.store(s, row + r, number + i, sum);
                    }
                }
            }
            number += count;
        }
        drop(tiles);
    }
}

#[inline(always)]
fn unpack<S: Simd, F: QuantizedFormat>(s: S, panel: &[u8], block: usize, to: &mut Unpacked) {
    let (scales, groups) = F::load(s, panel, block);
    let high = s.splat_i32(i32::from_ne_bytes([0x80; 4]));
    let offset = s.splat_i32(i32::from_ne_bytes([(F::OFFSET & 0x7f) as u8; 4]));
    for (group, to) in groups.into_iter().zip(&mut to.codes) {
        // Each byte less the offset. While the high bit of codes that have none is set, nothing is borrowed
        // from the next byte; an offset of 128 is that bit.
        let signed = match F::OFFSET {
            0 => group,
            128 => s.xor(group, high),
            _ => s.xor(s.sub_i32(s.xor(group, high), offset), high),
        };
        s.store(s.floats(signed), to);
    }
    s.store(scales.scale[0], &mut to.scale);
    if F::Scale::HAS_MIN {
        s.store(scales.min, &mut to.min);
    }
}

/// The sums of vectors `row..row + 16` with one panel.
#[inline(always)]
fn multiply_tile<S: Simd, F: QuantizedFormat>(
    s: S,
    tiles: &mut Tiles,
    panel: &[Unpacked],
    task: &Task<'_, F>,
    row: usize,
) -> [S::F; ROWS] {
    let run = Run { panel, x: task.x, rows: task.rows, row, format: PhantomData::<F> };
    let mut sums = [s.splat(0.0); ROWS];
    run.begin::<0>(tiles, 0);
    run.begin::<1>(tiles, 1);
    run.begin::<2>(tiles, 2);
    tiles.store::<0>();
    tiles.store::<1>();
    for block in (0..panel.len()).step_by(UNDER_WAY) {
        run.begin::<3>(tiles, block + 3);
        tiles.store::<2>();
        run.add::<S, 0>(s, tiles, block, &mut sums);
        run.begin::<0>(tiles, block + 4);
        tiles.store::<3>();
        run.add::<S, 1>(s, tiles, block + 1, &mut sums);
        run.begin::<1>(tiles, block + 5);
        tiles.store::<0>();
        run.add::<S, 2>(s, tiles, block + 2, &mut sums);
        run.begin::<2>(tiles, block + 6);
        tiles.store::<1>();
        run.add::<S, 3>(s, tiles, block + 3, &mut sums);
    }
    sums
}

/// One panel times 16 vectors.
struct Run<'a, F> {
    panel: &'a [Unpacked],
    x: &'a [ActivationBlock],
    rows: usize,
    row: usize,
    format: PhantomData<F>,
}

impl<F: QuantizedFormat> Run<'_, F> {
    #[inline(always)]
    fn vectors(&self, block: usize) -> &[ActivationBlock; ROWS] {
        self.x[block * self.rows + self.row..].first_chunk().expect("rows of this block")
    }

    /// Begins the product of a block, if there is one, in tile `T`.
    #[inline(always)]
    fn begin<const T: usize>(&self, tiles: &mut Tiles, block: usize) {
        if let Some(weights) = self.panel.get(block) {
            tiles.multiply::<T>(self.vectors(block), weights);
        }
    }

    /// Adds what tile `T` has of a block, if there is one.
    #[inline(always)]
    fn add<S: Simd, const T: usize>(
        &self,
        s: S,
        tiles: &Tiles,
        block: usize,
        sums: &mut [S::F; ROWS],
    ) {
        let Some(weights) = self.panel.get(block) else { return };
        let scales = Scales { scale: [s.load(&weights.scale); 2], min: s.load(&weights.min) };
        let (dots, vectors) = (&tiles.sums[T].0, self.vectors(block));
        for r in 0..ROWS {
            let dot = s.load_bytes(&dots[r]);
            sums[r] = add_sums::<S, F>(s, sums[r], &scales, [dot; 2], &vectors[r]);
        }
    }
}

/// The calling thread's tiles, set up, and what they were stored to; given back when dropped.
struct Tiles {
    sums: [Sums; UNDER_WAY],
    /// They belong to the thread.
    _not_send: PhantomData<*mut ()>,
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Tiles 0 to 3 take sums, 4 and 5 vectors, 6 and 7 weights.
    ///
    /// Reached only at [`Level::Amx`], which exists where CPU and operating system have tiles.
    #[inline(always)]
    fn configured() -> Self {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let (rows, groups) = (ROWS as u8, (BLOCK / 4) as u8);
        let shape = |i: usize| match i {
            0..4 => (rows, 64),
            4..6 => (rows, BLOCK as u16),
            _ => (groups, 64),
        };
        for i in 0..8 {
            (config.rows[i], config.row_bytes[i]) = shape(i);
        }
        // SAFETY: the thread may use tiles, see above, and the shapes are within those of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self { sums: [Sums([[0; 64]; ROWS]); UNDER_WAY], _not_send: PhantomData }
    }

    /// Begins the integer products of 16 vectors with a block, in tile `T`.
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, vectors: &[ActivationBlock; ROWS], weights: &Unpacked) {
        macro_rules! product {
            ($sums:literal, $x:literal, $w:literal) => {
                // SAFETY: the tiles are set up. Their shapes say how far they reach: 32 bytes of the
                // codes of 16 vectors, a stride apart, and 8 rows of 64 bytes, which are the block's.
                unsafe {
                    asm!(
                        concat!("tileloadd tmm", $x, ", [{x} + {x_stride}*1]"),
                        concat!("tileloadd tmm", $w, ", [{w} + {stride}*1]"),
                        concat!("tilezero tmm", $sums),
                        concat!("tdpbssd tmm", $sums, ", tmm", $x, ", tmm", $w),
                        x = in(reg) (&raw const *vectors).cast::<u8>().add(CODES),
                        x_stride = in(reg) size_of::<ActivationBlock>(),
                        w = in(reg) &raw const weights.codes,
                        stride = in(reg) 64usize,
                        options(nostack, readonly, preserves_flags),
                    )
                }
            };
        }
        /// Where the codes of a vector's block begin.
        const CODES: usize = std::mem::offset_of!(ActivationBlock, codes);
        match T {
            0 => product!("0", "4", "6"),
            1 => product!("1", "5", "7"),
            2 => product!("2", "4", "6"),
            _ => product!("3", "5", "7"),
        }
    }

    /// Stores tile `T` to where its sums are read: what it has of the last product, once that is done.
    #[inline(always)]
    fn store<const T: usize>(&mut self) {
        macro_rules! store {
            ($sums:literal) => {
                // SAFETY: the tiles are set up, and a tile of sums is 16 rows of 64 bytes.
                unsafe {
                    asm!(
                        concat!("tilestored [{to} + {stride}*1], tmm", $sums),
                        to = in(reg) &raw mut self.sums[T],
                        stride = in(reg) 64usize,
                        options(nostack, preserves_flags),
                    )
                }
            };
        }
        match T {
            0 => store!("0"),
            1 => store!("1"),
            2 => store!("2"),
            _ => store!("3"),
        }
    }
}

impl Drop for Tiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: as for setting them up; nothing uses what they hold.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_the_memory_again_that_it_had_last() {
        let mut memory = Memory::default();
        memory.fit(2, 1, BLOCK);
        let turn = |memory: &Memory| {
            let part = memory.take();
            let place = part.unpacked.as_ptr().addr();
            memory.give(part);
            place
        };
        let own = turn(&memory);
        let others = thread::scope(|s| s.spawn(|| [(); 3].map(|()| turn(&memory))).join().unwrap());
        assert_ne!(others[0], own);
        assert_eq!((others, turn(&memory)), ([others[0]; 3], own));
        // More than there is room for take what is there, and nobody waits.
        let both = [memory.take(), memory.take(), memory.take()];
        assert_eq!(both.map(|part| part.unpacked.len()), [1, 1, 0]);
    }
}
