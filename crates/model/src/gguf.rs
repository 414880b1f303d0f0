//! GGUF files, versions 2 and 3, little-endian: metadata, and where each tensor's bytes lie.
//!
//! The format: magic, version, two counts, the metadata entries, one record per tensor, then the
//! tensors' bytes, each at a multiple of `general.alignment` from the start of the data section.

use std::collections::HashMap;
use std::path::Path;

use device::BlockType;

use crate::bytes::SharedBytes;
use crate::error::{Error, Result, quoted};

mod metadata;
mod reader;
mod tensors;
mod value;

pub use metadata::Metadata;
pub use value::{Array, Value};

use reader::Reader;

/// Key of the multiple at which tensors' bytes start.
pub const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;
/// `GGUF`, as the four bytes a file starts with.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// How its values are stored.
    pub dtype: BlockType,
    /// Dimensions as the file lists them, fastest first: a `[out, in]` matrix reads `[in, out]`.
    pub dims: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A GGUF file whose whole header has been read and checked.
#[derive(Debug)]
pub struct Gguf {
    bytes: SharedBytes,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl Gguf {
    /// Maps and reads a file. Errors name the file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(SharedBytes::open(path)?).map_err(|e| e.within(path.display()))
    }

    /// Reads a file that is already in memory.
    pub fn parse(bytes: SharedBytes) -> Result<Self> {
        let mut reader = Reader::new(&bytes);
        let version = read_version(&mut reader)?;
        // A metadata entry takes at least 13 bytes and a tensor record at least 24: counts are
        // checked against what the file can hold before anything is reserved.
        let tensor_count = reader.u64("the number of tensors")?;
        let metadata_count = reader.u64("the number of metadata entries")?;
        let metadata_count = reader.plausible(metadata_count, 13, "metadata entries")?;
        let metadata = Metadata::read(&mut reader, metadata_count)?;
        let alignment = alignment(&metadata)?;
        let tensor_count = reader.plausible(tensor_count, 24, "tensors")?;
        let tensors = tensors::read(&mut reader, tensor_count, alignment)?;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { version, metadata, tensors, by_name, bytes })
    }

    /// Version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata, in the file's order.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The bytes of a tensor of this file, or `None` when `info` is from another, longer one.
    pub fn tensor_bytes(&self, info: &TensorInfo) -> Option<SharedBytes> {
        self.bytes.slice(info.offset..info.offset.checked_add(info.len)?)
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32> {
    let magic = reader.take(4, "the magic")?;
    if magic != MAGIC {
        return Err(Error::format(format!(
            "not a GGUF file: it starts with {magic:02x?}, not with \"GGUF\""
        )));
    }
    match reader.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        1 => Err(Error::format("GGUF version 1 is not read; convert the model again")),
        v if matches!(v.swap_bytes(), 1..=3) => {
            Err(Error::format("a big-endian GGUF file; only little-endian ones are read"))
        }
        v => Err(Error::format(format!("GGUF version {v} is not known; 2 and 3 are read"))),
    }
}

fn alignment(metadata: &Metadata) -> Result<usize> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(n)) if n.is_power_of_two() => Ok(n as usize),
        Some(&Value::U32(n)) => Err(Error::format(format!(
            "key {} is {n}; it must be a power of two",
            quoted(ALIGNMENT_KEY)
        ))),
        Some(other) => Err(Error::format(format!(
            "key {} is {}; it must be a u32",
            quoted(ALIGNMENT_KEY),
            other.type_name()
        ))),
    }
}
