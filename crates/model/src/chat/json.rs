//! The `tojson` filter as Hugging Face defines it: Python's `json.dumps(x, ensure_ascii=False)`.
//!
//! It differs from Jinja's own in that nothing is escaped for HTML; a model reads what this writes.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::python::python_float;

/// Options: `ensure_ascii` (also by position, unlike in Jinja's own filter, where that is `indent`),
/// `indent`, `separators`, `sort_keys`.
pub(super) fn tojson(
    value: &Value,
    ascii: Option<Value>,
    options: &Kwargs,
) -> Result<Value, Error> {
    let fail = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    if value.is_undefined() {
        return Err(fail("tojson of an undefined value".into()));
    }
    let ascii: Option<Value> = match ascii {
        Some(ascii) => Some(ascii),
        None => options.get("ensure_ascii")?,
    };
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let mut json = serde_json::to_value(value).map_err(|e| fail(format!("tojson: {e}")))?;
    if sorted == Some(true) {
        json.sort_all_objects();
    }
    let indent = match indent.filter(|i| !i.is_none()) {
        None => None,
        Some(width) => match width.as_usize() {
            Some(width @ 0..=64) => Some(width),
            _ => return Err(fail(format!("tojson: indent {width} is not from 0 to 64"))),
        },
    };
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(fail("tojson: separators must be two strings".into())),
    };
    let style = Python { indent, item, key, depth: 0, empty: true };
    let text = write(&json, style).map_err(|e| fail(format!("tojson: {e}")))?;
    Ok(Value::from(if ascii.is_some_and(|a| a.is_true()) { escape_non_ascii(&text) } else { text }))
}

fn write(json: &serde_json::Value, style: impl Formatter) -> Result<String, String> {
    let mut out = Vec::new();
    json.serialize(&mut Serializer::with_formatter(&mut out, style)).map_err(|e| e.to_string())?;
    String::from_utf8(out).map_err(|e| e.to_string())
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// Python's layout.
struct Python<'a> {
    /// Spaces per level, each item on a line of its own; `None` for all on one line.
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    depth: usize,
    /// Whether the innermost list or object has no item yet.
    empty: bool,
}

impl Python<'_> {
    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.new_line(out)?;
        }
        self.empty = false;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.new_line(out)
    }

    fn new_line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Python<'_> {
    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}
