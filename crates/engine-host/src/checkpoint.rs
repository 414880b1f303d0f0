//! What identifies a checkpoint, so that cached keys and values are only read by the model that
//! wrote them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};

/// Files up to this size are read whole.
const WHOLE: u64 = 4 << 20;
/// Of larger files: this many samples of this size, evenly spread, the first and last bytes included.
/// Two checkpoints that differ in nearly all weights differ in these too, and a file of many
/// gigabytes does not delay the start.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 64 << 10;

/// How a model is computed, as far as keys and values depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Arithmetic {
    /// On the CPU, activations in float32.
    Float = 0,
    /// On the CPU, activations rounded to 8 bits.
    Int8 = 1,
    /// On a CUDA device, weights and activations in bf16.
    Cuda = 2,
}

/// A digest of the model's files and of how they are computed with. Does not depend on where the
/// files lie.
///
/// # Errors
/// A file that cannot be read.
pub fn identity(path: &Path, arithmetic: Arithmetic) -> Result<[u8; 32]> {
    let mut hash = blake3::Hasher::new_derive_key("engine-host checkpoint 1");
    hash.update(&[arithmetic as u8]);
    for file in files(path).map_err(|e| unreadable(path, e))? {
        add(&mut hash, &file).map_err(|e| unreadable(&file, e))?;
    }
    Ok(*hash.finalize().as_bytes())
}

fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let file = entry?.path();
        let of_model = |ext: &std::ffi::OsStr| ext == "json" || ext == "safetensors";
        if file.is_file() && file.extension().is_some_and(of_model) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn add(hash: &mut blake3::Hasher, path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    hash.update(&len.to_le_bytes());
    let (count, size) = if len <= WHOLE { (1, len) } else { (SAMPLES, SAMPLE) };
    let mut buffer = vec![0; size as usize];
    for i in 0..count {
        let at = if count == 1 { 0 } else { (len - size) * i / (count - 1) };
        file.read_exact_at(&mut buffer, at)?;
        hash.update(&buffer);
    }
    Ok(())
}

fn unreadable(path: &Path, e: io::Error) -> Error {
    Error::new(ErrorKind::NotFound, format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_sampled_byte_and_the_length_count_and_the_place_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes: Vec<u8> = (0..(9u32 << 20)).map(|i| (i % 251) as u8).collect();
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            identity(&dir.path().join(name), Arithmetic::Float).unwrap()
        };
        let first = write("a", &bytes);
        assert_eq!(write("b", &bytes), first);
        *bytes.last_mut().unwrap() ^= 1;
        let changed = write("c", &bytes);
        assert_ne!(changed, first);
        bytes.push(0);
        assert_ne!(write("d", &bytes), changed);
        assert_ne!(identity(&dir.path().join("a"), Arithmetic::Int8).unwrap(), first);
        assert!(identity(&dir.path().join("none"), Arithmetic::Float).is_err());
    }
}
