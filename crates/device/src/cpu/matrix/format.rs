//! How a panel of 16 rows lies in memory.
//!
//! A panel is a sequence of blocks of 32 weights a row. A block of floats is 32 times 16 floats. A
//! quantized block is its scales, 16 of each kind, and then 8 groups of 64 bytes: group `g` has, row
//! by row, the codes of weights `4g..4g + 4`, which is what one integer product takes. Codes of 4 bits
//! share bytes: group `g` in the low halves with group `g + 4` in the high ones. K types have scales
//! that 8 blocks share; these go before the first of the 8.

use std::marker::PhantomData;

use crate::block_type::{self, Codec, six_bit_pair};
use crate::cpu::simd::{LANES, Simd};

/// Weights a row in a block.
pub(super) const BLOCK: usize = 32;

/// Thirty-two weights of each of 16 rows.
pub(super) type Expanded = [[f32; LANES]; BLOCK];

pub(super) trait Format {
    /// Bytes of a panel whose rows have `inputs` weights.
    fn panel_bytes(inputs: usize) -> usize;

    /// Writes a row of the model file into lane `lane` of a zeroed panel.
    fn pack(row: &[u8], lane: usize, panel: &mut [u8]);

    /// Block `block` of a panel as floats, dequantized exactly.
    fn expand<'a, S: Simd>(
        s: S,
        panel: &'a [u8],
        block: usize,
        space: &'a mut Expanded,
    ) -> &'a Expanded;
}

/// Rows of float32.
pub(super) struct F32;

impl Format for F32 {
    fn panel_bytes(inputs: usize) -> usize {
        inputs.next_multiple_of(BLOCK) * LANES * 4
    }

    fn pack(row: &[u8], lane: usize, panel: &mut [u8]) {
        for (weight, lanes) in row.chunks_exact(4).zip(panel.chunks_exact_mut(4 * LANES)) {
            lanes[4 * lane..][..4].copy_from_slice(weight);
        }
    }

    #[inline(always)]
    fn expand<'a, S: Simd>(
        _: S,
        panel: &'a [u8],
        block: usize,
        _: &'a mut Expanded,
    ) -> &'a Expanded {
        let bytes = &panel[block * size_of::<Expanded>()..][..size_of::<Expanded>()];
        // Little-endian as in the file: all targets with a device back end are.
        &bytemuck::cast_slice::<u8, Expanded>(bytes)[0]
    }
}

/// Rows of f16, or of bf16.
pub(super) struct Half<const BF16: bool>;

impl<const BF16: bool> Format for Half<BF16> {
    fn panel_bytes(inputs: usize) -> usize {
        inputs.next_multiple_of(BLOCK) * LANES * 2
    }

    fn pack(row: &[u8], lane: usize, panel: &mut [u8]) {
        for (weight, lanes) in row.chunks_exact(2).zip(panel.chunks_exact_mut(2 * LANES)) {
            lanes[2 * lane..][..2].copy_from_slice(weight);
        }
    }

    #[inline(always)]
    fn expand<'a, S: Simd>(
        s: S,
        panel: &'a [u8],
        block: usize,
        space: &'a mut Expanded,
    ) -> &'a Expanded {
        const BYTES: usize = BLOCK * LANES * 2;
        let steps = bytemuck::cast_slice::<u8, [u16; LANES]>(&panel[block * BYTES..][..BYTES]);
        for (step, floats) in steps.iter().zip(space.iter_mut()) {
            s.store(if BF16 { s.load_bf16(step) } else { s.load_f16(step) }, floats);
        }
        space
    }
}

/// The scales of one block.
pub(super) struct Scales<F> {
    /// Of the first and the second 16 weights.
    pub(super) scale: [F; 2],
    pub(super) min: F,
}

/// Which scales a quantized type has and how a panel stores them.
pub(super) trait ScaleKind {
    const HAS_MIN: bool;
    /// Whether the two halves of a block have scales of their own.
    const PER_HALF: bool;
    /// Blocks that share a header.
    const BLOCKS: usize;
    /// Bytes of the header.
    const HEADER: usize;
    /// Bytes of scales in each block.
    const SCALES: usize;

    /// Writes the shared scales of a block of the model file.
    fn pack_header(source: &[u8], lane: usize, header: &mut [u8]);
    /// Writes the scales of its `block`th run of 32.
    fn pack_scales(source: &[u8], block: usize, lane: usize, scales: &mut [u8]);
    fn load<S: Simd>(s: S, header: &[u8], scales: &[u8]) -> Scales<S::F>;
}

fn copy_half(source: &[u8], from: usize, lane: usize, to: &mut [u8]) {
    to[2 * lane..][..2].copy_from_slice(&source[from..from + 2]);
}

#[inline(always)]
fn load_halves<S: Simd>(s: S, bytes: &[u8], at: usize) -> S::F {
    s.load_f16(&bytemuck::cast_slice::<u8, [u16; LANES]>(&bytes[at..at + 2 * LANES])[0])
}

#[inline(always)]
fn lane_bytes(bytes: &[u8], at: usize) -> &[u8; LANES] {
    bytes[at..].first_chunk().expect("a block has its scales")
}

/// One f16 scale for 32 weights.
pub(super) struct One;

impl ScaleKind for One {
    const HAS_MIN: bool = false;
    const PER_HALF: bool = false;
    const BLOCKS: usize = 1;
    const HEADER: usize = 0;
    const SCALES: usize = 2 * LANES;

    fn pack_header(_: &[u8], _: usize, _: &mut [u8]) {}

    fn pack_scales(source: &[u8], _: usize, lane: usize, scales: &mut [u8]) {
        copy_half(source, 0, lane, scales);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, _: &[u8], scales: &[u8]) -> Scales<S::F> {
        Scales { scale: [load_halves(s, scales, 0); 2], min: s.splat(0.0) }
    }
}

/// One f16 scale and one f16 minimum for 32 weights.
pub(super) struct Pair;

impl ScaleKind for Pair {
    const HAS_MIN: bool = true;
    const PER_HALF: bool = false;
    const BLOCKS: usize = 1;
    const HEADER: usize = 0;
    const SCALES: usize = 4 * LANES;

    fn pack_header(_: &[u8], _: usize, _: &mut [u8]) {}

    fn pack_scales(source: &[u8], _: usize, lane: usize, scales: &mut [u8]) {
        copy_half(source, 0, lane, scales);
        copy_half(source, 2, lane, &mut scales[2 * LANES..]);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, _: &[u8], scales: &[u8]) -> Scales<S::F> {
        let min = load_halves(s, scales, 2 * LANES);
        Scales { scale: [load_halves(s, scales, 0); 2], min }
    }
}

/// Six-bit scales and minimums of 32 weights each, in units that 256 weights share.
pub(super) struct SixBit;

impl ScaleKind for SixBit {
    const HAS_MIN: bool = true;
    const PER_HALF: bool = false;
    const BLOCKS: usize = 8;
    const HEADER: usize = 4 * LANES;
    const SCALES: usize = 2 * LANES;

    fn pack_header(source: &[u8], lane: usize, header: &mut [u8]) {
        copy_half(source, 0, lane, header);
        copy_half(source, 2, lane, &mut header[2 * LANES..]);
    }

    fn pack_scales(source: &[u8], block: usize, lane: usize, scales: &mut [u8]) {
        (scales[lane], scales[LANES + lane]) = six_bit_pair(&source[4..16], block);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, header: &[u8], scales: &[u8]) -> Scales<S::F> {
        let scale = s.to_f32(s.widen_u8(lane_bytes(scales, 0)));
        let min = s.to_f32(s.widen_u8(lane_bytes(scales, LANES)));
        let unit = s.sub(s.splat(0.0), load_halves(s, header, 2 * LANES));
        Scales { scale: [s.mul(load_halves(s, header, 0), scale); 2], min: s.mul(unit, min) }
    }
}

/// Eight-bit signed scales of 16 weights each, in a unit that 256 weights share.
pub(super) struct EightBit;

impl ScaleKind for EightBit {
    const HAS_MIN: bool = false;
    const PER_HALF: bool = true;
    const BLOCKS: usize = 8;
    const HEADER: usize = 2 * LANES;
    const SCALES: usize = 2 * LANES;

    fn pack_header(source: &[u8], lane: usize, header: &mut [u8]) {
        copy_half(source, 208, lane, header);
    }

    fn pack_scales(source: &[u8], block: usize, lane: usize, scales: &mut [u8]) {
        scales[lane] = source[192 + 2 * block];
        scales[LANES + lane] = source[193 + 2 * block];
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, header: &[u8], scales: &[u8]) -> Scales<S::F> {
        let unit = load_halves(s, header, 0);
        let first = s.to_f32(s.widen_i8(lane_bytes(scales, 0)));
        let second = s.to_f32(s.widen_i8(lane_bytes(scales, LANES)));
        Scales { scale: [s.mul(unit, first), s.mul(unit, second)], min: s.splat(0.0) }
    }
}

/// A panel of a quantized type: its codec, its scales, and bits a code takes in the panel, 4 or 8.
pub(super) struct Quantized<C, K, const BITS: usize>(PhantomData<(C, K)>);

pub(super) type Q4_0 = Quantized<block_type::Q4_0, One, 4>;
pub(super) type Q4_1 = Quantized<block_type::Q4_1, Pair, 4>;
pub(super) type Q5_0 = Quantized<block_type::Q5_0, One, 8>;
pub(super) type Q5_1 = Quantized<block_type::Q5_1, Pair, 8>;
pub(super) type Q8_0 = Quantized<block_type::Q8_0, One, 8>;
pub(super) type Q4K = Quantized<block_type::Q4K, SixBit, 4>;
pub(super) type Q5K = Quantized<block_type::Q5K, SixBit, 8>;
pub(super) type Q6K = Quantized<block_type::Q6K, EightBit, 8>;

/// What the integer kernel asks of a panel.
pub(super) trait QuantizedFormat: Format {
    type Scale: ScaleKind;
    /// What is taken off each code.
    const OFFSET: i32;

    /// The scales and the 8 groups of codes of a block.
    fn load<S: Simd>(s: S, panel: &[u8], block: usize) -> (Scales<S::F>, [S::I; 8]);
}

impl<C: Codec, K: ScaleKind, const BITS: usize> Quantized<C, K, BITS> {
    const CODES: usize = BLOCK * LANES * BITS / 8;
    const BLOCK_BYTES: usize = K::SCALES + Self::CODES;
    const SPAN_BYTES: usize = K::HEADER + K::BLOCKS * Self::BLOCK_BYTES;

    /// Header, scales and codes of a block.
    #[inline(always)]
    fn parts(panel: &[u8], block: usize) -> (&[u8], &[u8], &[u8]) {
        let span = &panel[block / K::BLOCKS * Self::SPAN_BYTES..][..Self::SPAN_BYTES];
        let (header, blocks) = span.split_at(K::HEADER);
        let block = &blocks[block % K::BLOCKS * Self::BLOCK_BYTES..][..Self::BLOCK_BYTES];
        let (scales, codes) = block.split_at(K::SCALES);
        (header, scales, codes)
    }
}

impl<C: Codec, K: ScaleKind, const BITS: usize> Format for Quantized<C, K, BITS> {
    fn panel_bytes(inputs: usize) -> usize {
        inputs / C::LEN * Self::SPAN_BYTES
    }

    fn pack(row: &[u8], lane: usize, panel: &mut [u8]) {
        let mut codes = [0; 256];
        for (source, span) in
            row.chunks_exact(C::BYTES).zip(panel.chunks_exact_mut(Self::SPAN_BYTES))
        {
            C::codes(source, &mut codes[..C::LEN]);
            let (header, blocks) = span.split_at_mut(K::HEADER);
            K::pack_header(source, lane, header);
            for (block, (codes, bytes)) in codes[..C::LEN]
                .chunks_exact(BLOCK)
                .zip(blocks.chunks_exact_mut(Self::BLOCK_BYTES))
                .enumerate()
            {
                let (scales, groups) = bytes.split_at_mut(K::SCALES);
                K::pack_scales(source, block, lane, scales);
                for (g, four) in codes.as_chunks::<4>().0.iter().enumerate() {
                    let (group, shift) = if BITS == 4 { (g % 4, g / 4 * 4) } else { (g, 0) };
                    for (to, code) in groups[group * 64 + 4 * lane..].iter_mut().zip(four) {
                        *to |= code << shift;
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn expand<'a, S: Simd>(
        s: S,
        panel: &'a [u8],
        block: usize,
        space: &'a mut Expanded,
    ) -> &'a Expanded {
        let (scales, groups) = Self::load(s, panel, block);
        let (low, offset) = (s.splat_i32(0xff), s.splat_i32(C::OFFSET));
        for (g, group) in groups.into_iter().enumerate() {
            let bytes = [group, s.shr::<8>(group), s.shr::<16>(group), s.shr::<24>(group)];
            for (j, byte) in bytes.into_iter().enumerate() {
                let q = s.to_f32(s.sub_i32(s.and(byte, low), offset));
                // As the codec computes it: the product is exact wherever a minimum follows.
                let w = if K::HAS_MIN {
                    s.fma(scales.scale[g / 4], q, scales.min)
                } else {
                    s.mul(scales.scale[g / 4], q)
                };
                s.store(w, &mut space[4 * g + j]);
            }
        }
        space
    }
}

impl<C: Codec, K: ScaleKind, const BITS: usize> QuantizedFormat for Quantized<C, K, BITS> {
    type Scale = K;
    const OFFSET: i32 = C::OFFSET;

    #[inline(always)]
    fn load<S: Simd>(s: S, panel: &[u8], block: usize) -> (Scales<S::F>, [S::I; 8]) {
        let (header, scales, codes) = Self::parts(panel, block);
        let scales = K::load(s, header, scales);
        let groups = codes.as_chunks::<64>().0;
        let mut out = [s.splat_i32(0); 8];
        if BITS == 4 {
            let low = s.splat_i32(0x0f0f_0f0f);
            for g in 0..4 {
                let both = s.load_bytes(&groups[g]);
                out[g] = s.and(both, low);
                out[g + 4] = s.and(s.shr::<4>(both), low);
            }
        } else {
            for g in 0..8 {
                out[g] = s.load_bytes(&groups[g]);
            }
        }
        (scales, out)
    }
}

/// Evaluates `$body` with `$F` as the panel format of a quantized type, else `$float`.
macro_rules! with_quantized {
    ($block_type:expr, $F:ident => $body:expr, else $float:expr) => {{
        use crate::block_type::BlockType as T;
        use crate::cpu::matrix::format as f;
        match $block_type {
            T::Q4_0 => with_quantized!(@ f::Q4_0, $F, $body),
            T::Q4_1 => with_quantized!(@ f::Q4_1, $F, $body),
            T::Q5_0 => with_quantized!(@ f::Q5_0, $F, $body),
            T::Q5_1 => with_quantized!(@ f::Q5_1, $F, $body),
            T::Q8_0 => with_quantized!(@ f::Q8_0, $F, $body),
            T::Q4_K => with_quantized!(@ f::Q4K, $F, $body),
            T::Q5_K => with_quantized!(@ f::Q5K, $F, $body),
            T::Q6_K => with_quantized!(@ f::Q6K, $F, $body),
            T::F32 | T::F16 | T::BF16 => $float,
        }
    }};
    (@ $format:ty, $F:ident, $body:expr) => {{
        type $F = $format;
        $body
    }};
}
pub(super) use with_quantized;

/// Evaluates `$body` with `$F` as the panel format of any type.
macro_rules! with_format {
    ($block_type:expr, $F:ident => $body:expr) => {
        with_quantized!($block_type, $F => $body, else match $block_type {
            BlockType::F32 => { type $F = format::F32; $body }
            BlockType::F16 => { type $F = format::Half<false>; $body }
            _ => { type $F = format::Half<true>; $body }
        })
    };
}
pub(super) use with_format;
