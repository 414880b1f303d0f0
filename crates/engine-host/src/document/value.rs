//! Plain TOML values from parsed ones with places.

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::Document;

/// `value` without places. A number that does not fit is recorded, and `None`.
pub(super) fn plain(doc: &Document<'_>, value: &Spanned<DeValue<'_>>) -> Option<Value> {
    let too_large = |shown: &dyn std::fmt::Display| {
        doc.report(&value.span(), format!("the number {shown} does not fit into 64 bits"));
    };
    Some(match value.get_ref() {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Boolean(boolean) => Value::Boolean(*boolean),
        DeValue::Datetime(datetime) => Value::Datetime(*datetime),
        DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(integer) => Value::Integer(integer),
            Err(_) => {
                too_large(integer);
                return None;
            }
        },
        DeValue::Float(float) => match float.as_str().parse() {
            Ok(float) => Value::Float(float),
            Err(_) => {
                too_large(float);
                return None;
            }
        },
        DeValue::Array(array) => {
            Value::Array(array.iter().filter_map(|element| plain(doc, element)).collect())
        }
        DeValue::Table(table) => Value::Table(plain_table(doc, table, |_| true)),
    })
}

/// The keys of `table` that pass `wanted`, without places.
pub(super) fn plain_table(
    doc: &Document<'_>,
    table: &DeTable<'_>,
    wanted: impl Fn(&str) -> bool,
) -> Table {
    table
        .iter()
        .filter(|(key, _)| wanted(key.get_ref()))
        .filter_map(|(key, value)| Some((key.get_ref().to_string(), plain(doc, value)?)))
        .collect()
}
