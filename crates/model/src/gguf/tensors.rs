//! The tensor records of a GGUF file, each checked against the file's size and the others.

use std::collections::HashSet;

use device::BlockType;

use super::TensorInfo;
use super::reader::Reader;
use crate::error::{Error, Result, quoted};

/// ggml's own limit.
const MAX_DIMS: u32 = 4;

/// Reads `count` records; their offsets in the result are those from the start of the file.
pub(super) fn read(
    reader: &mut Reader<'_>,
    count: usize,
    alignment: usize,
) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for i in 0..count {
        let at = reader.pos();
        let name = reader.name(format_args!("the name of tensor {i}"))?;
        let place = || format!("tensor {} at byte {at}", quoted(name));
        if !names.insert(name) {
            return Err(Error::format(format!("{} appears twice", place())));
        }
        let info = read_one(reader, name, alignment).map_err(|e| e.within(place()))?;
        tensors.push(info);
    }
    place_in_file(&mut tensors, reader, alignment)?;
    Ok(tensors)
}

fn read_one(reader: &mut Reader<'_>, name: &str, alignment: usize) -> Result<TensorInfo> {
    let rank = reader.u32("the number of dimensions")?;
    if rank == 0 || rank > MAX_DIMS {
        return Err(Error::format(format!("{rank} dimensions; 1 to {MAX_DIMS} are possible")));
    }
    let mut dims = Vec::with_capacity(rank as usize);
    for d in 0..rank {
        let dim = reader.u64(format_args!("dimension {d}"))?;
        match usize::try_from(dim) {
            Ok(dim) if dim > 0 => dims.push(dim),
            _ => return Err(Error::format(format!("dimension {d} is {dim}"))),
        }
    }
    let code = reader.u32("the tensor's type")?;
    let offset = reader.u64("the tensor's offset")?;
    let dtype = BlockType::from_ggml(code).ok_or_else(|| {
        Error::format(format!("tensor type {code} is not supported, or no ggml type at all"))
    })?;
    if dims[0] % dtype.block_len() != 0 {
        return Err(Error::format(format!(
            "rows of {} values are not whole blocks of {} ({dtype})",
            dims[0],
            dtype.block_len()
        )));
    }
    let len = dims
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .and_then(|n| (n / dtype.block_len()).checked_mul(dtype.block_bytes()))
        .ok_or_else(|| Error::format(format!("dimensions {dims:?} overflow")))?;
    let offset = usize::try_from(offset)
        .ok()
        .filter(|o| o % alignment == 0)
        .ok_or_else(|| Error::format(format!("offset {offset} is no multiple of {alignment}")))?;
    Ok(TensorInfo { name: name.to_owned(), dtype, dims, offset, len })
}

/// Turns offsets in the data section into offsets in the file, and checks that every tensor lies
/// in the file and that no two share a byte.
fn place_in_file(tensors: &mut [TensorInfo], reader: &Reader<'_>, alignment: usize) -> Result<()> {
    let data = reader.pos().checked_next_multiple_of(alignment);
    for t in tensors.iter_mut() {
        let start = data.and_then(|d| d.checked_add(t.offset));
        let end = start.and_then(|s| s.checked_add(t.len));
        match (start, end) {
            (Some(start), Some(end)) if end <= reader.file_len() => t.offset = start,
            _ => {
                return Err(Error::format(format!(
                    "tensor {}: {} bytes at offset {} of the data section, but the file has {} \
                     bytes in all; is it a partial download?",
                    quoted(&t.name),
                    t.len,
                    t.offset,
                    reader.file_len()
                )));
            }
        }
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            return Err(Error::format(format!(
                "tensors {} and {} overlap at byte {}",
                quoted(&pair[0].name),
                quoted(&pair[1].name),
                pair[1].offset
            )));
        }
    }
    Ok(())
}
