//! The `tojson` filter as Hugging Face defines it: Python's `json.dumps(x, ensure_ascii=False)`.
//!
//! It differs from Jinja's own in that nothing is escaped for HTML; a model reads what this writes.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Options: `indent` (also by position), `sort_keys`, `ensure_ascii`.
pub(super) fn tojson(
    value: &Value,
    indent: Option<Value>,
    options: &Kwargs,
) -> Result<Value, Error> {
    let fail = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    if value.is_undefined() {
        return Err(fail("tojson of an undefined value".into()));
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let mut json = serde_json::to_value(value).map_err(|e| fail(format!("tojson: {e}")))?;
    if sorted == Some(true) {
        json.sort_all_objects();
    }
    let text = match indent.filter(|i| !i.is_none()) {
        None => write(&json, Python { pretty: None }),
        Some(width) => {
            let width = width
                .as_usize()
                .filter(|w| *w <= 64)
                .ok_or_else(|| fail(format!("tojson: indent {width} is not from 0 to 64")))?;
            let spaces = " ".repeat(width);
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            write(&json, Python { pretty: Some(pretty) })
        }
    };
    let text = text.map_err(|e| fail(format!("tojson: {e}")))?;
    Ok(Value::from(if ascii == Some(true) { escape_non_ascii(&text) } else { text }))
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

/// Python's layout: `, ` and `: ` on one line, or `PrettyFormatter`'s, which is Python's too.
struct Python<'a> {
    pretty: Option<PrettyFormatter<'a>>,
}

impl Formatter for Python<'_> {
    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_array(out),
            None => out.write_all(b"["),
        }
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_array(out),
            None => out.write_all(b"]"),
        }
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_array_value(out, first),
            None if first => Ok(()),
            None => out.write_all(b", "),
        }
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_array_value(out),
            None => Ok(()),
        }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_object(out),
            None => out.write_all(b"{"),
        }
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_object(out),
            None => out.write_all(b"}"),
        }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_object_key(out, first),
            None if first => Ok(()),
            None => out.write_all(b", "),
        }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_object_value(out),
            None => Ok(()),
        }
    }
}

/// Python's `repr`: exponents below -4 and from 16 on are written out, with a sign and two digits.
fn python_float(value: f64) -> String {
    let shortest = format!("{value:e}");
    match shortest.split_once('e').and_then(|(m, e)| Some((m, e.parse::<i32>().ok()?))) {
        Some((mantissa, exponent)) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::python_float;

    /// Right-hand sides printed by CPython 3.
    #[test]
    fn floats_print_as_in_python() {
        for (value, python) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (123_456_789.125, "123456789.125"),
        ] {
            assert_eq!(python_float(value), python);
        }
    }
}
