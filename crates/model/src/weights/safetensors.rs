//! The tensors of a Hugging Face directory, one file or several.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use device::BlockType;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{Stored, Tensor};
use crate::bytes::SharedBytes;
use crate::error::{Error, ErrorKind, Result, quoted};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of the directory, under its Hugging Face name.
pub(super) fn read_dir(dir: &Path) -> Result<Stored> {
    let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
    if single.is_file() {
        return read_file(&single);
    }
    if !index.is_file() {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{} holds neither {SINGLE} nor {INDEX}", dir.display()),
        ));
    }
    read_sharded(dir, &index).map_err(|e| e.within(index.display()))
}

/// Reads the files that the index names. The index decides which file a tensor is taken from.
fn read_sharded(dir: &Path, index: &Path) -> Result<Stored> {
    let index: Value = crate::package::read_json(index)?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(Error::format("key weight_map is missing or no object"));
    };
    let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().filter(|f| is_plain_name(f)).ok_or_else(|| {
            let shown = quoted(&file.to_string());
            Error::format(format!("tensor {}: {shown} is no file name", quoted(tensor)))
        })?;
        by_file.entry(file).or_default().push(tensor);
    }
    let mut stored = Stored::new();
    for (file, tensors) in by_file {
        let mut shard = read_file(&dir.join(file))?;
        for name in tensors {
            let tensor = shard.remove(name).ok_or_else(|| {
                Error::format(format!("tensor {} is not in {file}", quoted(name)))
            })?;
            stored.insert(name.to_owned(), tensor);
        }
    }
    Ok(stored)
}

fn read_file(path: &Path) -> Result<Stored> {
    parse(&SharedBytes::open(path)?).map_err(|e| e.within(path.display()))
}

fn parse(bytes: &SharedBytes) -> Result<Stored> {
    let (header, metadata) = SafeTensors::read_metadata(bytes)
        .map_err(|e| Error::format(format!("not a readable safetensors file: {e}")))?;
    let data = size_of::<u64>() + header;
    let mut stored = Stored::new();
    for (name, info) in metadata.tensors() {
        let dtype = match info.dtype {
            Dtype::F32 => BlockType::F32,
            Dtype::F16 => BlockType::F16,
            Dtype::BF16 => BlockType::BF16,
            other => {
                return Err(Error::format(format!(
                    "tensor {} is {other:?}; F32, F16 and BF16 are read",
                    quoted(&name)
                )));
            }
        };
        let (start, end) = info.data_offsets;
        let bytes = bytes
            .slice(data + start..data + end)
            .ok_or_else(|| Error::format(format!("tensor {} leaves the file", quoted(&name))))?;
        stored.insert(name, Tensor { dtype, shape: info.shape.clone(), bytes });
    }
    Ok(stored)
}

/// Whether a name leads to a file in the same directory and nowhere else.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}
