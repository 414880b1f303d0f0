//! Reading a request's fields one by one, so that what nobody has read is known to be unknown.
//!
//! The rule: a field that is `null` is as if it were absent. A field that the server does not know is
//! refused, naming the nearest one that it knows, unless the configuration says to leave it out. A field
//! of the API whose effect the server cannot have is refused where it asks for that effect.

use serde_json::{Map, Value};

use crate::error::{ApiError, Result};
use crate::options::UnknownFields;

/// The fields of a request that are still to be read.
#[derive(Debug)]
pub struct Fields {
    left: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    pub fn new(fields: Map<String, Value>) -> Self {
        Self { left: fields, known: Vec::new() }
    }

    /// Takes a field; `None` where it is absent or null.
    pub fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        self.left.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field of a type, which `what` describes.
    pub fn read<T>(
        &mut self,
        name: &'static str,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong =
            || ApiError::field(name, format!("{name} must be {what}, got {}", shown(&value)));
        read(&value).map(Some).ok_or_else(wrong)
    }

    pub fn boolean(&mut self, name: &'static str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A whole number below 2^32.
    pub fn count(&mut self, name: &'static str) -> Result<Option<u32>> {
        self.read(name, "a whole number from 0 to 4294967295", whole)
    }

    pub fn string(&mut self, name: &'static str) -> Result<Option<String>> {
        self.read(name, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// A finite number.
    pub fn number(&mut self, name: &'static str) -> Result<Option<f64>> {
        self.read(name, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    /// A number in a range.
    pub fn number_in(&mut self, name: &'static str, low: f64, high: f64) -> Result<Option<f64>> {
        let what = format!("a number from {low} to {high}");
        self.read(name, &what, |v| v.as_f64().filter(|x| (low..=high).contains(x)))
    }

    /// An array of ids of a model with so many.
    pub fn token_ids(&mut self, name: &'static str, vocab: usize) -> Result<Option<Vec<u32>>> {
        let what = "an array of token ids";
        let Some(list) = self.read(name, what, |v| v.as_array().cloned())? else { return Ok(None) };
        token_ids(name, &list, vocab).map(Some)
    }

    /// A field whose effect is not there: `is_harmless` says which values do not ask for it.
    pub fn refuse_unless(
        &mut self,
        name: &'static str,
        why: &str,
        is_harmless: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        match self.take(name) {
            Some(value) if !is_harmless(&value) => {
                Err(ApiError::field(name, format!("{name} = {}: {why}", shown(&value)))
                    .with_code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Fields that change nothing here: who asks, and what is to be kept of the answer elsewhere.
    pub fn without_effect(&mut self, names: &[&'static str]) {
        for name in names {
            self.take(name);
        }
    }

    /// Refuses what is left.
    pub fn finish(self, unknown: UnknownFields) -> Result<()> {
        let left = self.left.iter().find(|(_, value)| !value.is_null());
        let Some((name, _)) = left.filter(|_| unknown == UnknownFields::Refuse) else {
            return Ok(());
        };
        let near = |known: &&&str| strsim::damerau_levenshtein(name, known);
        let hint = match self.known.iter().min_by_key(near) {
            Some(known) if near(&known) <= 1 + name.len() / 4 => {
                format!(": did you mean {known:?}?")
            }
            _ => String::new(),
        };
        let shown: String = name.chars().take(64).collect();
        Err(ApiError::field(&shown, format!("unknown field {shown:?}{hint}"))
            .with_code("unknown_parameter"))
    }
}

/// A whole number, also when it is written as one with a fraction of 0.
pub fn whole(value: &Value) -> Option<u32> {
    let of_float =
        |x: f64| (x.fract() == 0.0 && (0.0..4294967296.0).contains(&x)).then_some(x as u32);
    match value.as_u64() {
        Some(n) => u32::try_from(n).ok(),
        None => value.as_f64().and_then(of_float),
    }
}

/// Token ids of a model with `vocab` of them.
///
/// # Errors
/// Names the first that is none.
pub fn token_ids(name: &str, list: &[Value], vocab: usize) -> Result<Vec<u32>> {
    let id = |(i, value): (usize, &Value)| {
        whole(value).filter(|&id| (id as usize) < vocab).ok_or_else(|| {
            let value = shown(value);
            let message = format!(
                "{name}[{i}] = {value} is no token id: those of this model are 0 to {}",
                vocab.saturating_sub(1)
            );
            ApiError::field(name, message)
        })
    };
    list.iter().enumerate().map(id).collect()
}

/// A value as messages show it: not at any length.
pub fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
