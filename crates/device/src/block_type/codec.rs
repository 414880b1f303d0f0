//! The bit layouts of the quantized block types.
//!
//! In all of them a weight is `scale * (code - OFFSET) + min`: an unsigned code of a few bits for each
//! weight, a scale and a minimum shared by each run of 16 or 32. Dequantizing and repacking both read
//! blocks through [`Codec`], so a layout is written down once.

use half::f16;

/// One quantized block type.
pub(crate) trait Codec {
    /// Weights in a block.
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// What is taken off a code before it is scaled.
    const OFFSET: i32;

    /// The code of each weight of a block, in order.
    fn codes(block: &[u8], codes: &mut [u8]);

    /// Scale and minimum of the run of 16 weights that starts at weight `16 * run`.
    ///
    /// Both are exact in float32: an f16 has 11 significant bits, its factor here at most 8.
    fn scale_and_min(block: &[u8], run: usize) -> (f32, f32);
}

/// `bytes` holds whole blocks of `C` for exactly the weights of `out`.
pub(super) fn dequantize<C: Codec>(bytes: &[u8], out: &mut [f32]) {
    let mut codes = [0; 256];
    for (block, weights) in bytes.chunks_exact(C::BYTES).zip(out.chunks_exact_mut(C::LEN)) {
        C::codes(block, &mut codes[..C::LEN]);
        for (run, (weights, codes)) in
            weights.chunks_exact_mut(16).zip(codes.chunks_exact(16)).enumerate()
        {
            let (scale, min) = C::scale_and_min(block, run);
            for (w, &code) in weights.iter_mut().zip(codes) {
                *w = scale * (i32::from(code) - C::OFFSET) as f32 + min;
            }
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Sixteen bytes hold 32 codes: the low halves are the first 16 weights, the high halves the rest.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((&b, l), h) in bytes.iter().zip(low).zip(high) {
        *l = b & 0xf;
        *h = b >> 4;
    }
}

/// Adds the fifth bits of 32 codes, bit `j` of the little-endian word `bits` being weight `j`'s.
fn add_fifth_bits(bits: &[u8], codes: &mut [u8]) {
    for (j, code) in codes.iter_mut().enumerate() {
        *code |= (bits[j / 8] >> (j % 8) & 1) << 4;
    }
}

/// The 6-bit scale and minimum of the run of 32 weights `run` of a Q4_K or Q5_K block.
///
/// Twelve bytes hold eight of each: the low six bits of bytes 0..4 and 4..8 are the first four scales
/// and minimums; the other four have their low halves in bytes 8..12 and their two high bits in the
/// top of bytes 0..8.
pub(crate) fn six_bit_pair(packed: &[u8], run: usize) -> (u8, u8) {
    if run < 4 {
        (packed[run] & 63, packed[run + 4] & 63)
    } else {
        (
            packed[run + 4] & 0xf | packed[run - 4] >> 6 << 4,
            packed[run + 4] >> 4 | packed[run] >> 6 << 4,
        )
    }
}

/// `d: f16, codes: 4 bits * 32`.
pub(crate) struct Q4_0;

impl Codec for Q4_0 {
    const LEN: usize = 32;
    const BYTES: usize = 18;
    const OFFSET: i32 = 8;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[2..], codes);
    }

    fn scale_and_min(block: &[u8], _: usize) -> (f32, f32) {
        (half_at(block, 0), 0.0)
    }
}

/// `d: f16, m: f16, codes: 4 bits * 32`.
pub(crate) struct Q4_1;

impl Codec for Q4_1 {
    const LEN: usize = 32;
    const BYTES: usize = 20;
    const OFFSET: i32 = 0;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[4..], codes);
    }

    fn scale_and_min(block: &[u8], _: usize) -> (f32, f32) {
        (half_at(block, 0), half_at(block, 2))
    }
}

/// `d: f16, fifth bits: u32, low bits: 4 bits * 32`.
pub(crate) struct Q5_0;

impl Codec for Q5_0 {
    const LEN: usize = 32;
    const BYTES: usize = 22;
    const OFFSET: i32 = 16;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[6..], codes);
        add_fifth_bits(&block[2..6], codes);
    }

    fn scale_and_min(block: &[u8], _: usize) -> (f32, f32) {
        (half_at(block, 0), 0.0)
    }
}

/// `d: f16, m: f16, fifth bits: u32, low bits: 4 bits * 32`.
pub(crate) struct Q5_1;

impl Codec for Q5_1 {
    const LEN: usize = 32;
    const BYTES: usize = 24;
    const OFFSET: i32 = 0;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[8..], codes);
        add_fifth_bits(&block[4..8], codes);
    }

    fn scale_and_min(block: &[u8], _: usize) -> (f32, f32) {
        (half_at(block, 0), half_at(block, 2))
    }
}

/// `d: f16, weights: i8 * 32`.
pub(crate) struct Q8_0;

impl Codec for Q8_0 {
    const LEN: usize = 32;
    const BYTES: usize = 34;
    const OFFSET: i32 = 128;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (code, b) in codes.iter_mut().zip(&block[2..]) {
            *code = b ^ 0x80;
        }
    }

    fn scale_and_min(block: &[u8], _: usize) -> (f32, f32) {
        (half_at(block, 0), 0.0)
    }
}

/// `d: f16, dmin: f16, scales and minimums: 6 bits * 16, codes: 4 bits * 256`.
pub(crate) struct Q4K;

impl Codec for Q4K {
    const LEN: usize = 256;
    const BYTES: usize = 144;
    const OFFSET: i32 = 0;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (bytes, codes) in block[16..].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            nibbles(bytes, codes);
        }
    }

    fn scale_and_min(block: &[u8], run: usize) -> (f32, f32) {
        let (scale, min) = six_bit_pair(&block[4..16], run / 2);
        (half_at(block, 0) * f32::from(scale), -half_at(block, 2) * f32::from(min))
    }
}

/// `d: f16, dmin: f16, scales and minimums: 6 bits * 16, fifth bits: 256, low bits: 4 bits * 256`.
pub(crate) struct Q5K;

impl Codec for Q5K {
    const LEN: usize = 256;
    const BYTES: usize = 176;
    const OFFSET: i32 = 0;

    fn codes(block: &[u8], codes: &mut [u8]) {
        let fifths = &block[16..48];
        for (bytes, codes) in block[48..].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            nibbles(bytes, codes);
        }
        for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(fifths) {
                *code |= (byte >> run & 1) << 4;
            }
        }
    }

    fn scale_and_min(block: &[u8], run: usize) -> (f32, f32) {
        Q4K::scale_and_min(block, run)
    }
}

/// `low bits: 4 bits * 256, high bits: 2 bits * 256, scales: i8 * 16, d: f16`.
pub(crate) struct Q6K;

impl Codec for Q6K {
    const LEN: usize = 256;
    const BYTES: usize = 210;
    const OFFSET: i32 = 32;

    fn codes(block: &[u8], codes: &mut [u8]) {
        let (low, high) = (&block[..128], &block[128..192]);
        for ((low, high), codes) in
            low.chunks_exact(64).zip(high.chunks_exact(32)).zip(codes.chunks_exact_mut(128))
        {
            nibbles(low, codes);
            for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
                for (code, byte) in codes.iter_mut().zip(high) {
                    *code |= (byte >> (2 * run) & 3) << 4;
                }
            }
        }
    }

    fn scale_and_min(block: &[u8], run: usize) -> (f32, f32) {
        (half_at(block, 208) * f32::from(block[192 + run] as i8), 0.0)
    }
}
