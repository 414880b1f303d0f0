//! The shapes of attention, and what its kernels are compiled and launched with for each.

use resource_api::DType;

use crate::attention::SCALE_BYTES;
use crate::cuda::source::Instance;
use crate::error::{Error, Result};

/// What is fixed for all calls: kernels are compiled and workspace is allocated for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements per head: a multiple of 4 up to 256; 64, 128 and 256 have fast kernels.
    pub head_dim: u32,
    /// Element type of the cache: bf16, f16, fp8 (e4m3), f32, or i8 with a scale behind each row.
    pub cache: DType,
    /// Element type of queries and results: bf16 or f32.
    pub activations: DType,
    /// Most rows (streams) of a call.
    pub max_rows: u32,
    /// Longest stream, in tokens.
    pub max_len: u32,
    /// Whether a token's result may depend on nothing but its query and the keys and values that it sees, down
    /// to the bit. Long streams of few rows are then slower.
    pub batch_invariant: bool,
}

/// What `attention_decode.cu` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecodeGeometry {
    pub(super) warps: u32,
    pub(super) stages: u32,
    pub(super) group_tile: u32,
    row_bytes: u32,
    head_dim: u32,
}

impl AttentionShape {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Tensor { what: "attention", reason });
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return refuse(format!("{} heads of {} key heads", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(4) || self.head_dim > 256 {
            return refuse(format!(
                "a head dim of {}, not a multiple of 4 up to 256",
                self.head_dim
            ));
        }
        if ![DType::BF16, DType::F32].contains(&self.activations) {
            return refuse(format!("activations in {}", self.activations.name()));
        }
        if kv_type(self.cache).is_none() {
            return refuse(format!("a cache of {}", self.cache.name()));
        }
        // A cache's strides are multiples of a head.
        let head = self.head_dim as usize * self.cache.size();
        if !head.is_multiple_of(16) && !self.is_scaled() {
            let (dim, cache) = (self.head_dim, self.cache.name());
            return refuse(format!(
                "a head of {dim} {cache} is {head} bytes in the cache, not a multiple of 16: set a \
                 wider type"
            ));
        }
        Ok(())
    }

    /// Whether the kernels for tensor cores take it.
    pub(super) fn is_fast(&self) -> bool {
        [64, 128, 256].contains(&self.head_dim) && self.cache != DType::F32 && self.group() <= 16
    }

    /// Whether rows have their scales behind them.
    pub(super) fn is_scaled(&self) -> bool {
        self.cache == DType::I8
    }

    /// Elements of a row of the cache, with those of its scale.
    pub(super) fn row(&self) -> u32 {
        self.head_dim + if self.is_scaled() { SCALE_BYTES as u32 } else { 0 }
    }

    pub(super) fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    pub(super) fn block_m(&self) -> u32 {
        if self.head_dim == 256 { 64 } else { 128 }
    }

    pub(super) fn prefill_shared(&self) -> usize {
        let scales = if self.is_scaled() { 1024 } else { 0 };
        2 * self.head_dim as usize * (self.block_m() as usize + 4 * 64) + 1024 + scales
    }

    /// The fastest geometry that leaves room for the rows in `limit` bytes of shared memory.
    pub(super) fn decode_geometry(&self, limit: usize) -> DecodeGeometry {
        let row_bytes = self.row() * self.cache.size() as u32;
        let group_tile = if self.group() <= 8 { 8 } else { 16 };
        // As measured for the 227 KiB of Hopper; less memory takes stages away, then warps.
        let (mut warps, mut stages) = match (row_bytes, group_tile) {
            (512.., _) => (4, 3),
            (256.., _) => (8, 3),
            (128.., 8) => (12, 4),
            (128.., _) => (8, 6),
            (_, 8) => (12, 7),
            _ => (8, 8),
        };
        let head_dim = self.head_dim;
        let mut geometry = DecodeGeometry { warps, stages, group_tile, row_bytes, head_dim };
        while geometry.shared(self.max_rows) > limit && warps > 1 {
            if stages > 2 {
                stages -= 1
            } else {
                warps /= 2
            }
            geometry = DecodeGeometry { warps, stages, ..geometry };
        }
        geometry
    }

    fn instance(&self, source: &'static str) -> Instance {
        let activations = if self.activations == DType::F32 { "Q_F32" } else { "Q_BF16" };
        Instance::of(source)
            .define("HEAD_DIM", self.head_dim)
            .define("KV_TYPE", kv_type(self.cache).unwrap_or_default())
            .define("Q_TYPE", activations)
    }

    pub(super) fn decode(&self, geometry: DecodeGeometry) -> Instance {
        self.instance("attention_decode.cu")
            .define("GROUP_TILE", geometry.group_tile)
            .define("WARPS", geometry.warps)
            .define("STAGES", geometry.stages)
    }

    pub(super) fn prefill(&self) -> Instance {
        self.instance("attention_prefill.cu")
    }

    pub(super) fn exact(&self) -> Instance {
        self.instance("attention_exact.cu")
    }
}

impl DecodeGeometry {
    /// Bytes of dynamic shared memory for `rows` rows.
    pub(super) fn shared(&self, rows: u32) -> usize {
        let [warps, stages, tile, row, rows] =
            [self.warps, self.stages, self.group_tile, self.row_bytes, rows].map(|n| n as usize);
        // Many queries of many elements do not stay in registers.
        let queries = if self.head_dim == 256 && self.group_tile == 16 { 8192 } else { 0 };
        let stages = warps * stages * (2 * (16 * row + 128) + 8);
        stages + warps * (tile * 8 + 1024) + 4 * (rows + 1) + 512 + queries
    }
}

/// The kernels' name of a cache's element type.
fn kv_type(dtype: DType) -> Option<&'static str> {
    let names = [
        (DType::BF16, "KV_BF16"),
        (DType::F16, "KV_F16"),
        (DType::F8E4M3, "KV_E4M3"),
        (DType::I8, "KV_I8"),
        (DType::F32, "KV_F32"),
    ];
    names.into_iter().find(|(d, _)| *d == dtype).map(|(_, name)| name)
}

/// Instances for the shapes of the models that the engine knows, on devices with Hopper's memory.
pub(in crate::cuda) fn named_instances() -> Vec<Instance> {
    let hopper = 227 << 10;
    let shape = |head_dim, group, cache, activations| AttentionShape {
        heads: group,
        kv_heads: 1,
        head_dim,
        cache,
        activations,
        max_rows: 256,
        max_len: 1 << 17,
        batch_invariant: false,
    };
    let mut named = Vec::new();
    for head_dim in [64, 128, 256] {
        for cache in [DType::BF16, DType::F8E4M3, DType::I8] {
            let shape = shape(head_dim, 8, cache, DType::BF16);
            named.push(shape.decode(shape.decode_geometry(hopper)));
            named.push(shape.prefill());
        }
    }
    named.push(shape(64, 8, DType::F32, DType::BF16).exact());
    named.push(shape(128, 8, DType::F32, DType::BF16).exact());
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        cache: DType::BF16,
        activations: DType::BF16,
        max_rows: 256,
        max_len: 8192,
        batch_invariant: false,
    };

    #[test]
    fn the_geometry_fits_the_devices_shared_memory() {
        for head_dim in [64, 128, 256] {
            for cache in [DType::BF16, DType::F8E4M3, DType::I8] {
                for (limit, kv_heads) in [(99 << 10, 8), (163 << 10, 8), (227 << 10, 2)] {
                    let shape = AttentionShape { head_dim, cache, kv_heads, ..LLAMA };
                    let geometry = shape.decode_geometry(limit);
                    assert!(geometry.shared(256) <= limit, "{geometry:?} in {limit}");
                    assert!(geometry.warps >= 1 && geometry.stages >= 2, "{geometry:?}");
                }
            }
        }
        let hopper = LLAMA.decode_geometry(227 << 10);
        assert_eq!((hopper.warps, hopper.stages, hopper.group_tile), (8, 3, 8));
        // 8 * 3 * (2 * (16 * 256 + 128) + 8) + 8 * (8 * 8 + 1024) + 4 * 257 + 512
        assert_eq!(hopper.shared(256), 213_188);
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let refused = |shape: AttentionShape| shape.check().unwrap_err().to_string();
        assert!(refused(AttentionShape { heads: 30, ..LLAMA }).contains("30 heads of 8"));
        assert!(refused(AttentionShape { head_dim: 130, ..LLAMA }).contains("130"));
        assert!(refused(AttentionShape { cache: DType::I32, ..LLAMA }).contains("i32"));
        assert!(refused(AttentionShape { activations: DType::F16, ..LLAMA }).contains("f16"));
        let of_fp8 = refused(AttentionShape { head_dim: 72, cache: DType::F8E4M3, ..LLAMA });
        assert!(of_fp8.contains("a head of 72 fp8 is 72 bytes"), "{of_fp8}");
        assert!(refused(AttentionShape { head_dim: 100, ..LLAMA }).contains("200 bytes"));
        assert!(LLAMA.is_fast());
        for slow in [
            AttentionShape { head_dim: 96, ..LLAMA },
            AttentionShape { cache: DType::F32, ..LLAMA },
            AttentionShape { kv_heads: 1, ..LLAMA },
        ] {
            assert!(slow.check().is_ok() && !slow.is_fast(), "{slow:?}");
        }
    }
}
