//! Values as Python prints them, where the template engine prints them otherwise: floats.

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

/// Lists deeper than this are printed as the engine prints them.
const MAX_DEPTH: usize = 32;

/// How `{{ value }}` is written.
pub(super) fn format(
    out: &mut minijinja::Output,
    state: &mut State,
    value: &Value,
) -> Result<(), Error> {
    match printed(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    }
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> Value {
    match printed(value) {
        Some(text) => Value::from(text),
        None if value.kind() == ValueKind::String => value.clone(),
        None => Value::from(value.to_string()),
    }
}

/// `None`: as the engine prints it.
fn printed(value: &Value) -> Option<String> {
    has_odd_float(value, 0).then(|| repr(value))
}

/// Whether there is a float in it that the engine prints in its own way.
fn has_odd_float(value: &Value, depth: usize) -> bool {
    let inner = |items: minijinja::value::ValueIter| {
        items.into_iter().any(|item| {
            let of_key = value.kind() == ValueKind::Map
                && value.get_item(&item).is_ok_and(|v| has_odd_float(&v, depth + 1));
            of_key || has_odd_float(&item, depth + 1)
        })
    };
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).is_ok_and(|x| python_float(x) != value.to_string())
        }
        ValueKind::Seq | ValueKind::Map if depth < MAX_DEPTH => value.try_iter().is_ok_and(inner),
        _ => false,
    }
}

fn repr(value: &Value) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), python_float)
        }
        ValueKind::Seq => {
            format!("[{}]", items().map(|item| repr(&item)).collect::<Vec<_>>().join(", "))
        }
        ValueKind::Map => {
            let entry = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&item))
            };
            format!("{{{}}}", items().map(entry).collect::<Vec<_>>().join(", "))
        }
        // In a list strings have their quotes.
        _ => {
            let list = Value::from(vec![value.clone()]).to_string();
            list[1..list.len() - 1].to_owned()
        }
    }
}

/// Python's `repr`: exponents below -4 and from 16 on are written out, with a sign and two digits.
pub(super) fn python_float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
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
