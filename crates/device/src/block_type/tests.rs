//! Random blocks against the formulas of the ggml specification, written out in float64.

use half::f16;

use super::*;

/// A small generator, so that a failing case can be run again.
struct Lcg(u64);

impl Lcg {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 56) as u8
    }
}

/// Random bytes whose f16 fields hold numbers of ordinary size.
fn random_block(block_type: BlockType, rng: &mut Lcg) -> Vec<u8> {
    let mut block: Vec<u8> = (0..block_type.block_bytes()).map(|_| rng.byte()).collect();
    let halves: &[usize] = match block_type {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q6_K => &[208],
        _ => &[],
    };
    for &at in halves {
        let value = f16::from_f32(f32::from(rng.byte() as i8) / 977.0);
        block[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
    block
}

fn half64(b: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f64()
}

/// Weight `i` of block `b`, straight from the definition of the format.
fn weight(block_type: BlockType, b: &[u8], i: usize) -> f64 {
    let nibble = |byte: u8, high: bool| f64::from(if high { byte >> 4 } else { byte & 15 });
    match block_type {
        BlockType::Q4_0 => half64(b, 0) * (nibble(b[2 + i % 16], i >= 16) - 8.0),
        BlockType::Q4_1 => half64(b, 0) * nibble(b[4 + i % 16], i >= 16) + half64(b, 2),
        BlockType::Q5_0 => {
            let fifth = u32::from_le_bytes(b[2..6].try_into().unwrap()) >> i & 1;
            half64(b, 0) * (nibble(b[6 + i % 16], i >= 16) + 16.0 * f64::from(fifth) - 16.0)
        }
        BlockType::Q5_1 => {
            let fifth = u32::from_le_bytes(b[4..8].try_into().unwrap()) >> i & 1;
            half64(b, 0) * (nibble(b[8 + i % 16], i >= 16) + 16.0 * f64::from(fifth)) + half64(b, 2)
        }
        BlockType::Q8_0 => half64(b, 0) * f64::from(b[2 + i] as i8),
        BlockType::Q4_K | BlockType::Q5_K => {
            let (s, j) = (&b[4..16], i / 32);
            let (scale, min) = match j {
                0..4 => (s[j] & 63, s[j + 4] & 63),
                _ => ((s[j + 4] & 15) + 16 * (s[j - 4] >> 6), (s[j + 4] >> 4) + 16 * (s[j] >> 6)),
            };
            let five = block_type == BlockType::Q5_K;
            let low = if five { &b[48..] } else { &b[16..] };
            let mut code = nibble(low[i / 64 * 32 + i % 32], i % 64 >= 32);
            if five {
                code += 16.0 * f64::from(b[16 + i % 32] >> j & 1);
            }
            half64(b, 0) * f64::from(scale) * code - half64(b, 2) * f64::from(min)
        }
        BlockType::Q6_K => {
            let (half, rest) = (i / 128, i % 128);
            let low = nibble(b[64 * half + rest % 64], rest >= 64);
            let high = b[128 + 32 * half + rest % 32] >> (rest / 32 * 2) & 3;
            let scale = b[192 + i / 16] as i8;
            half64(b, 208) * f64::from(scale) * (low + 16.0 * f64::from(high) - 32.0)
        }
        _ => unreachable!("not a quantized type"),
    }
}

#[test]
fn every_quantized_weight_is_the_nearest_float() {
    let mut rng = Lcg(7);
    for block_type in BlockType::ALL.into_iter().filter(|t| t.block_len() > 1) {
        let blocks: Vec<Vec<u8>> = (0..50).map(|_| random_block(block_type, &mut rng)).collect();
        let mut out = vec![f32::NAN; 50 * block_type.block_len()];
        block_type.dequantize(&blocks.concat(), &mut out).unwrap();
        for (b, out) in blocks.iter().zip(out.chunks(block_type.block_len())) {
            for (i, &got) in out.iter().enumerate() {
                let want = weight(block_type, b, i) as f32;
                assert!(got == want, "{block_type} weight {i}: {got} for {want}");
            }
        }
    }
}

#[test]
fn float_types_keep_their_values() {
    let values = [0.0f32, -1.5, 3.0e-5, 65504.0, f32::INFINITY];
    let mut out = [0.0; 5];
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    BlockType::F32.dequantize(&bytes, &mut out).unwrap();
    assert_eq!(out, values);

    // 1.0, -2.0, the largest finite and the smallest subnormal f16, infinity.
    let bits = [0x3c00u16, 0xc000, 0x7bff, 0x0001, 0x7c00];
    let bytes: Vec<u8> = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
    BlockType::F16.dequantize(&bytes, &mut out).unwrap();
    assert_eq!(out, [1.0, -2.0, 65504.0, 2f32.powi(-24), f32::INFINITY]);

    let bits = [0x3f80u16, 0xc000, 0x7f80, 0x0001, 0x4049];
    let bytes: Vec<u8> = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
    BlockType::BF16.dequantize(&bytes, &mut out).unwrap();
    assert_eq!(out, [1.0, -2.0, f32::INFINITY, 2f32.powi(-133), 3.140625]);
}

#[test]
fn numbers_and_sizes_are_ggmls() {
    for (id, name, len, bytes) in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (30, "BF16", 1, 2),
    ] {
        let t = BlockType::from_ggml(id).unwrap();
        assert_eq!((t.name(), t.block_len(), t.block_bytes(), t.to_ggml()), (name, len, bytes, id));
    }
    assert_eq!(BlockType::from_ggml(9), None);
    assert_eq!(BlockType::from_ggml(u32::MAX), None);
}

#[test]
fn wrong_sizes_are_refused_in_one_line() {
    let error = BlockType::Q4_K.row_bytes(576).unwrap_err();
    assert_eq!(error.to_string(), "a row of 576 weights is not whole Q4_K blocks of 256");
    assert_eq!(BlockType::Q4_1.row_bytes(576), Ok(360));
    let error = BlockType::Q8_0.dequantize(&[0; 33], &mut [0.0; 32]).unwrap_err();
    assert_eq!(error.to_string(), "bytes of weights: got 33 elements, need 34");
    assert!(BlockType::F32.row_bytes(usize::MAX).is_err());
}
