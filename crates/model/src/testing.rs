//! Model files made on the spot, for tests: valid ones, and ones broken on purpose.

use std::path::PathBuf;

use crate::gguf::{Array, MAGIC, Value};

mod tiny;
mod trimmed;
mod vocabulary;

pub use tiny::{TinyModel, TinyTensor};
pub use trimmed::trimmed;
pub use vocabulary::Vocabulary;

/// Where the small real model lies that tests run on: `ENGINE_HOST_MODEL`, or else the user's cache.
///
/// # Panics
/// When it is not there, saying how to get it: a test that needs the model must not pass without.
pub fn real_model_path() -> PathBuf {
    const FILE: &str = "engine-host/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = match (std::env::var_os("ENGINE_HOST_MODEL"), std::env::var_os("XDG_CACHE_HOME")) {
        (Some(path), _) => PathBuf::from(path),
        (None, Some(cache)) => PathBuf::from(cache).join(FILE),
        (None, None) => {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache").join(FILE)
        }
    };
    assert!(
        path.is_file(),
        "{} is missing: `cargo xtask fetch-model` gets it; ENGINE_HOST_MODEL names another place",
        path.display()
    );
    path
}

/// Writes GGUF files. Nothing is checked, so that broken files can be written too.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    /// Goes into the header as it is.
    pub version: u32,
    /// The multiple at which tensors' bytes are placed. Does not write `general.alignment`.
    pub alignment: usize,
    /// Written in place of the number of metadata entries.
    pub metadata_count: Option<u64>,
    /// Written in place of the number of tensors.
    pub tensor_count: Option<u64>,
    /// Entries in order; [`set`](Self::set) adds one.
    pub metadata: Vec<(String, Value)>,
    /// Records in order; [`tensor`](Self::tensor) adds one.
    pub tensors: Vec<RawTensor>,
}

/// A tensor record, all of whose fields may be wrong.
#[derive(Debug, Clone)]
pub struct RawTensor {
    pub name: String,
    /// Fastest first.
    pub dims: Vec<u64>,
    pub ggml_type: u32,
    /// Offset in the data section; `None` for where the bytes really are.
    pub offset: Option<u64>,
    pub bytes: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self {
            version: 3,
            alignment: 32,
            metadata_count: None,
            tensor_count: None,
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }
}

impl GgufWriter {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry.
    pub fn set(&mut self, key: impl Into<String>, value: Value) -> &mut Self {
        self.metadata.push((key.into(), value));
        self
    }

    /// Removes the metadata entries of that key.
    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(k, _)| k != key);
        self
    }

    /// Adds a tensor; `dims` fastest first, as in the file.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        dims: &[u64],
        ggml_type: u32,
        bytes: Vec<u8>,
    ) -> &mut Self {
        let (name, dims) = (name.into(), dims.to_vec());
        self.tensors.push(RawTensor { name, dims, ggml_type, offset: None, bytes });
        self
    }

    /// Adds a tensor that claims to lie at `offset` of the data section, and adds no bytes.
    pub fn tensor_at(
        &mut self,
        name: impl Into<String>,
        dims: &[u64],
        ggml_type: u32,
        offset: u64,
    ) -> &mut Self {
        let (name, dims) = (name.into(), dims.to_vec());
        let raw = RawTensor { name, dims, ggml_type, offset: Some(offset), bytes: Vec::new() };
        self.tensors.push(raw);
        self
    }

    /// The file.
    pub fn build(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.metadata_count.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            out.extend(value.type_code().to_le_bytes());
            write_value(&mut out, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(tensor.ggml_type.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(n) => out.push(*n),
        Value::I8(n) => out.extend(n.to_le_bytes()),
        Value::U16(n) => out.extend(n.to_le_bytes()),
        Value::I16(n) => out.extend(n.to_le_bytes()),
        Value::U32(n) => out.extend(n.to_le_bytes()),
        Value::I32(n) => out.extend(n.to_le_bytes()),
        Value::F32(x) => out.extend(x.to_le_bytes()),
        Value::Bool(b) => out.push(u8::from(*b)),
        Value::String(s) => string(out, s),
        Value::Array(array) => write_array(out, array),
        Value::U64(n) => out.extend(n.to_le_bytes()),
        Value::I64(n) => out.extend(n.to_le_bytes()),
        Value::F64(x) => out.extend(x.to_le_bytes()),
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    fn all<T>(out: &mut Vec<u8>, code: u32, items: &[T], mut one: impl FnMut(&mut Vec<u8>, &T)) {
        out.extend(code.to_le_bytes());
        out.extend((items.len() as u64).to_le_bytes());
        items.iter().for_each(|item| one(out, item));
    }
    match array {
        Array::U8(v) => all(out, 0, v, |o, n| o.push(*n)),
        Array::I8(v) => all(out, 1, v, |o, n| o.extend(n.to_le_bytes())),
        Array::U16(v) => all(out, 2, v, |o, n| o.extend(n.to_le_bytes())),
        Array::I16(v) => all(out, 3, v, |o, n| o.extend(n.to_le_bytes())),
        Array::U32(v) => all(out, 4, v, |o, n| o.extend(n.to_le_bytes())),
        Array::I32(v) => all(out, 5, v, |o, n| o.extend(n.to_le_bytes())),
        Array::F32(v) => all(out, 6, v, |o, x| o.extend(x.to_le_bytes())),
        Array::Bool(v) => all(out, 7, v, |o, b| o.push(u8::from(*b))),
        Array::String(v) => all(out, 8, v, |o, s| string(o, s)),
        Array::Array(v) => all(out, 9, v, write_array),
        Array::U64(v) => all(out, 10, v, |o, n| o.extend(n.to_le_bytes())),
        Array::I64(v) => all(out, 11, v, |o, n| o.extend(n.to_le_bytes())),
        Array::F64(v) => all(out, 12, v, |o, x| o.extend(x.to_le_bytes())),
    }
}
