//! How weights are stored in a model file: GGUF's block types.

mod codec;

use half::{bf16, f16};

use crate::error::{Error, Result, check_len};
pub(crate) use codec::{Codec, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, six_bit_pair};

/// The storage of a tensor's weights, as GGUF numbers and names it.
///
/// A row is a sequence of blocks; each holds [`block_len`](Self::block_len) weights in
/// [`block_bytes`](Self::block_bytes) bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(non_camel_case_types)] // the names every tool prints
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl BlockType {
    /// Every type this crate reads.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The type with ggml's number `id`; `None` for a type this crate does not read.
    pub fn from_ggml(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.facts().ggml == id)
    }

    /// The number GGUF files use for this type.
    pub fn to_ggml(self) -> u32 {
        self.facts().ggml
    }

    /// The name that tools print, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Weights in a block.
    pub fn block_len(self) -> usize {
        self.facts().len
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.facts().bytes
    }

    /// Bytes of a row of `n` weights.
    ///
    /// # Errors
    /// When `n` is not a whole number of blocks, or the size overflows.
    pub fn row_bytes(self, n: usize) -> Result<usize> {
        let Facts { name, len, bytes, .. } = self.facts();
        if !n.is_multiple_of(len) {
            return Err(Error::PartialBlock { name, len: n, block_len: len });
        }
        crate::error::product("a row of weights", n / len, bytes)
    }

    /// Writes the weights stored in `bytes` to `out`.
    ///
    /// Each weight is the float32 nearest to what the format defines.
    ///
    /// # Errors
    /// When `out` is not whole blocks or `bytes` is not [`row_bytes`](Self::row_bytes) of its length.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        check_len("bytes of weights", bytes.len(), self.row_bytes(out.len())?)?;
        match self {
            Self::F32 => {
                for (w, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *w = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (w, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *w = f16::from_le_bytes(*b).to_f32();
                }
            }
            Self::BF16 => {
                for (w, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *w = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Self::Q4_0 => codec::dequantize::<Q4_0>(bytes, out),
            Self::Q4_1 => codec::dequantize::<Q4_1>(bytes, out),
            Self::Q5_0 => codec::dequantize::<Q5_0>(bytes, out),
            Self::Q5_1 => codec::dequantize::<Q5_1>(bytes, out),
            Self::Q8_0 => codec::dequantize::<Q8_0>(bytes, out),
            Self::Q4_K => codec::dequantize::<Q4K>(bytes, out),
            Self::Q5_K => codec::dequantize::<Q5K>(bytes, out),
            Self::Q6_K => codec::dequantize::<Q6K>(bytes, out),
        }
        Ok(())
    }

    fn facts(self) -> Facts {
        let (ggml, name, len, bytes) = match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::BF16 => (30, "BF16", 1, 2),
            Self::Q4_0 => (2, "Q4_0", 32, 18),
            Self::Q4_1 => (3, "Q4_1", 32, 20),
            Self::Q5_0 => (6, "Q5_0", 32, 22),
            Self::Q5_1 => (7, "Q5_1", 32, 24),
            Self::Q8_0 => (8, "Q8_0", 32, 34),
            Self::Q4_K => (12, "Q4_K", 256, 144),
            Self::Q5_K => (13, "Q5_K", 256, 176),
            Self::Q6_K => (14, "Q6_K", 256, 210),
        };
        Facts { ggml, name, len, bytes }
    }
}

impl std::fmt::Display for BlockType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

struct Facts {
    ggml: u32,
    name: &'static str,
    len: usize,
    bytes: usize,
}

#[cfg(test)]
mod tests;
