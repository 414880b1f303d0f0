//! The first layers of a model: small enough to carry about, and to compute in float64 on the spot.

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};

use super::GgufWriter;

/// A file with the first `layers` layers of a model, or as many as it has, and all that is not of a layer.
///
/// # Errors
/// For a file without an architecture or a number of layers.
pub fn trimmed(gguf: &Gguf, layers: usize) -> Result<GgufWriter> {
    let missing = |key: &str| Error::config(format!("the file has no {key}"));
    let metadata = gguf.metadata();
    let arch = metadata.str("general.architecture")?;
    let key = format!("{}.block_count", arch.ok_or_else(|| missing("general.architecture"))?);
    let count = metadata.u32(&key)?.ok_or_else(|| missing(&key))?;
    let kept = layers.min(count as usize);
    let mut file = GgufWriter::new();
    if let Some(alignment) = metadata.u64(crate::gguf::ALIGNMENT_KEY)? {
        file.alignment = alignment as usize;
    }
    for (name, value) in metadata.iter() {
        let value = if name == key { Value::U32(kept as u32) } else { value.clone() };
        file.set(name, value);
    }
    for info in gguf.tensors() {
        let layer = info.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        let is_kept = layer.is_none_or(|n| n.parse().is_ok_and(|n: usize| n < kept));
        let bytes = gguf.tensor_bytes(info).filter(|_| is_kept);
        let Some(bytes) = bytes else { continue };
        let dims: Vec<u64> = info.dims.iter().map(|&d| d as u64).collect();
        file.tensor(&info.name, &dims, info.dtype.to_ggml(), bytes.to_vec());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TinyModel;
    use crate::{Architecture, ModelPackage, SharedBytes};

    #[test]
    fn the_first_layers_are_a_model_of_their_own() {
        let whole = TinyModel::new(Architecture::Qwen3, 7);
        let parsed = |file: &GgufWriter| Gguf::parse(SharedBytes::from(file.build())).unwrap();
        let trimmed = |layers| parsed(&trimmed(&parsed(&whole.gguf()), layers).unwrap());
        let one = ModelPackage::from_gguf(&trimmed(1)).unwrap();
        assert_eq!((one.config.layers, one.config.vocab), (1, whole.config.vocab));
        let all = ModelPackage::from_gguf(&parsed(&whole.gguf())).unwrap();
        for (name, tensor) in all.weights.iter() {
            let kept = one.weights.get(name).ok().map(|tensor| tensor.to_f32().unwrap());
            let want = (!name.starts_with("layers.1.")).then(|| tensor.to_f32().unwrap());
            assert_eq!(kept, want, "{name}");
        }
        assert_eq!(ModelPackage::from_gguf(&trimmed(9)).unwrap().config.layers, 2);
    }
}
