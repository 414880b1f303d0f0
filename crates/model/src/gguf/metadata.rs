//! The metadata table of a GGUF file, with getters whose errors name the key.

use std::collections::HashMap;

use super::reader::Reader;
use super::value::{Array, Value};
use crate::error::{Error, Result, quoted};

/// Metadata entries by key, in the file's order.
#[derive(Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn read(reader: &mut Reader<'_>, count: usize) -> Result<Self> {
        let mut metadata = Self::default();
        for i in 0..count {
            let at = reader.pos();
            let key = reader.name(format_args!("the key of metadata entry {i}"))?;
            let place = || format!("key {} at byte {at}", quoted(key));
            let value = Value::read(reader).map_err(|e| e.within(place()))?;
            if metadata.by_key.insert(key.to_owned(), metadata.entries.len()).is_some() {
                return Err(Error::format(format!("{} appears twice", place())));
            }
            metadata.entries.push((key.to_owned(), value));
        }
        Ok(metadata)
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// All entries, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key` as a string, an error if it has another type.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |v| match v {
            Value::String(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// The value of `key` as a bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |v| match v {
            Value::Bool(b) => Some(*b),
            _ => None,
        })
    }

    /// The value of `key` as a non-negative integer of any width.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    /// The value of `key` as a u32: a token id.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a non-negative integer below 2^32", |v| v.as_u64()?.try_into().ok())
    }

    /// The value of `key` as a float of either width.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a float", Value::as_f64)
    }

    /// The value of `key` as an array.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", |v| match v {
            Value::Array(a) => Some(a),
            _ => None,
        })
    }

    /// The value of `key` as an array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::String(a)) => Some(a.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        pick: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => pick(value).map(Some).ok_or_else(|| {
                let found = match value.as_u64() {
                    Some(n) => n.to_string(),
                    None => value.type_name().to_owned(),
                };
                Error::format(format!("key {} must be {wanted}, but is {found}", quoted(key)))
            }),
        }
    }
}
