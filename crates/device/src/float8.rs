//! 8-bit floats of 4 exponent and 3 mantissa bits: finite, one NaN, at most 448.

use bytemuck::{Pod, Zeroable};
use resource_api::{DType, Element};

/// What DLPack and others call `float8_e4m3fn`, in the bits that CUDA devices convert to and from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

// SAFETY: the type is one byte of any value, and DLPack's code for its format is this one.
unsafe impl Element for E4m3 {
    const DTYPE: DType = DType::F8E4M3;
}

impl E4m3 {
    /// The not-a-number that conversions give.
    pub const NAN: Self = Self(0x7f);

    /// The nearest to `x`, ties to even; the greatest of its sign where `x` is greater, infinity included.
    /// Any NaN becomes [`NAN`](Self::NAN).
    pub fn from_f32(x: f32) -> Self {
        // In steps of the subnormals a sum with this has no fraction left.
        const SUBNORMAL: f32 = 16384.0;
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let size = x.abs();
        let code = match size {
            _ if x.is_nan() => return Self::NAN,
            448.0.. => 0x7e,
            0.015625.. => {
                let bits = size.to_bits();
                ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
            }
            _ => (size + SUBNORMAL).to_bits() - SUBNORMAL.to_bits(),
        };
        Self(sign | code as u8)
    }

    /// Exactly.
    pub const fn to_f32(self) -> f32 {
        // Times 2^120: what the exponent of an f32 is above that of these. Subnormals become normal by it.
        const SCALE: f32 = f32::from_bits((127 + 120) << 23);
        let (sign, rest) = ((self.0 as u32 & 0x80) << 24, self.0 as u32 & 0x7f);
        if rest == 0x7f { f32::NAN } else { f32::from_bits(sign | rest << 20) * SCALE }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What a code stands for, by the format's definition.
    pub(crate) fn value(code: u8) -> Option<f64> {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let size = match exponent {
            15 if code & 7 == 7 => return None,
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        Some(if code & 0x80 == 0 { size } else { -size })
    }

    /// The code nearest to `x` among all, by search.
    pub(crate) fn nearest(x: f32) -> u8 {
        if x.is_nan() {
            return 0x7f;
        }
        let size = f64::from(x.abs()).min(448.0);
        let apart = |code: u8| (value(code).unwrap() - size).abs();
        // Of two as near the even one is taken.
        let best =
            (0..0x7f_u8).min_by(|&a, &b| apart(a).total_cmp(&apart(b)).then((a & 1).cmp(&(b & 1))));
        best.unwrap() | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    /// Floats of all signs and sizes: dense where the format has numbers, both sides of every tie, and others.
    pub(crate) fn grid() -> Vec<f32> {
        let mut all = vec![0.0, f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-45, 464.0];
        // Exponents from below half of the least number to above the greatest, 512 of each.
        all.extend((100 << 9..140_u32 << 9).map(|high| f32::from_bits(high << 14)));
        for code in 0..0x7e_u8 {
            let (low, high) = (value(code).unwrap(), value(code + 1).unwrap());
            let middle = ((low + high) / 2.0) as f32;
            all.extend([low as f32, middle, middle.next_up(), middle.next_down()]);
        }
        let negative: Vec<f32> = all.iter().map(|x| -x).collect();
        all.extend(negative);
        all
    }

    #[test]
    fn all_codes_are_what_the_format_says() {
        for code in 0..=255 {
            let got = E4m3(code).to_f32();
            match value(code) {
                Some(want) => {
                    assert_eq!(f64::from(got).to_bits(), want.to_bits(), "{code:#x}");
                    assert_eq!(E4m3::from_f32(got), E4m3(code));
                }
                None => assert!(got.is_nan(), "{code:#x}"),
            }
        }
    }

    #[test]
    fn floats_are_rounded_to_the_nearest_even_code() {
        for x in grid() {
            assert_eq!(E4m3::from_f32(x).0, nearest(x), "{x:e}");
        }
    }
}
