//! Strict reading of one TOML table: typed values, and a complaint about every key nobody asked for.

use std::ops::{Range, RangeInclusive};

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::{Document, value};
use crate::suggest;

/// The header of a table as messages show it: `[resources.main_kv]`.
#[derive(Debug, Clone)]
pub struct Dotted(String);

impl Dotted {
    pub(super) fn top() -> Self {
        Self(String::new())
    }

    fn child(&self, key: &str) -> Self {
        let bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let key = if !key.is_empty() && key.chars().all(bare) {
            key.to_owned()
        } else {
            format!("{key:?}")
        };
        Self(if self.0.is_empty() { key } else { format!("{}.{key}", self.0) })
    }
}

impl std::fmt::Display for Dotted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { f.write_str("the file") } else { write!(f, "[{}]", self.0) }
    }
}

/// Reads one table. Every getter returns `None` for an absent key, and for a value of the wrong
/// type or range after it has recorded the problem.
pub struct TableReader<'d, 't> {
    doc: &'d Document<'t>,
    name: Dotted,
    table: &'d DeTable<'t>,
    span: Range<usize>,
    asked: Vec<&'d str>,
}

impl<'d, 't> TableReader<'d, 't> {
    pub(super) fn new(
        doc: &'d Document<'t>,
        name: Dotted,
        table: &'d DeTable<'t>,
        span: Range<usize>,
    ) -> Self {
        Self { doc, name, table, span, asked: Vec::new() }
    }

    /// The header, for messages.
    pub fn name(&self) -> &Dotted {
        &self.name
    }

    /// Where the table starts.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// The document, to report problems to.
    pub fn doc(&self) -> &'d Document<'t> {
        self.doc
    }

    /// Keys present in the table with their places, asked for or not.
    pub fn keys(&self) -> impl Iterator<Item = (&'d str, Range<usize>)> + use<'d, 't> {
        self.table.iter().map(|(key, _)| (key.get_ref().as_ref(), key.span()))
    }

    /// Reports that a required `key` is absent, unless it is there (with whatever value).
    pub fn require(&self, key: &str) {
        if !self.table.iter().any(|(k, _)| k.get_ref() == key) {
            self.doc.report(&self.span, format!("{} lacks the key {key:?}", self.name));
        }
    }

    fn raw(&mut self, key: &'d str) -> Option<&'d Spanned<DeValue<'t>>> {
        self.asked.push(key);
        self.table.iter().find(|(k, _)| k.get_ref() == key).map(|(_, value)| value)
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'t>>, wanted: &str) {
        let found = value.get_ref().type_str();
        let article = if found.starts_with(['a', 'i']) { "an" } else { "a" };
        self.doc.report(
            &value.span(),
            format!("{key:?} in {} must be {wanted}, not {article} {found}", self.name),
        );
    }

    fn typed<T>(
        &mut self,
        key: &'d str,
        wanted: &str,
        cast: impl FnOnce(&'d DeValue<'t>) -> Option<T>,
    ) -> Option<Spanned<T>> {
        let value = self.raw(key)?;
        let cast = cast(value.get_ref());
        if cast.is_none() {
            self.wrong_type(key, value, wanted);
        }
        cast.map(|cast| Spanned::new(value.span(), cast))
    }

    /// Whether `key` is an array without elements.
    pub fn is_empty_array(&self, key: &str) -> bool {
        let value = self.table.iter().find(|(k, _)| k.get_ref() == key).map(|(_, value)| value);
        value.and_then(|v| v.get_ref().as_array()).is_some_and(|array| array.is_empty())
    }

    /// A string.
    pub fn string(&mut self, key: &'d str) -> Option<Spanned<&'d str>> {
        self.typed(key, "a string", |value| value.as_str())
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, key: &'d str) -> Option<bool> {
        self.typed(key, "true or false", |value| value.as_bool()).map(Spanned::into_inner)
    }

    /// An integer within `range`.
    pub fn integer(&mut self, key: &'d str, range: RangeInclusive<u64>) -> Option<u64> {
        let (low, high) = (*range.start(), *range.end());
        let wanted = format!("an integer from {low} to {high}");
        let integer = self.typed(key, &wanted, |value| value.as_integer())?;
        let (span, integer) = (integer.span(), integer.into_inner());
        let value = u64::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .filter(|value| range.contains(value));
        if value.is_none() {
            let name = &self.name;
            self.doc.report(
                &span,
                format!("{key} = {integer} in {name} is out of range: it must be {low} to {high}"),
            );
        }
        value
    }

    /// One of `choices`, by name.
    pub fn choice<T: Copy>(&mut self, key: &'d str, choices: &[(&str, T)]) -> Option<T> {
        let given = self.string(key)?;
        let names = || choices.iter().map(|(name, _)| *name);
        let found = choices.iter().find(|(name, _)| name == given.get_ref());
        if found.is_none() {
            let (given, span) = (*given.get_ref(), given.span());
            let hint = suggest::did_you_mean(given, names());
            let valid = suggest::listed(names());
            self.doc.report(
                &span,
                format!("{key} = {given:?} in {} is not one of {valid}{hint}", self.name),
            );
        }
        found.map(|(_, value)| *value)
    }

    fn array(&mut self, key: &'d str, wanted: &str) -> Option<&'d DeArray<'t>> {
        self.typed(key, wanted, |value| value.as_array()).map(Spanned::into_inner)
    }

    /// An array of strings, none of them twice. Bad elements are recorded and left out.
    pub fn strings(&mut self, key: &'d str) -> Option<Vec<Spanned<&'d str>>> {
        self.texts(key, |text| format!("names {text:?}"))
    }

    /// As [`strings`](Self::strings), for what no message may quote.
    pub fn secrets(&mut self, key: &'d str) -> Option<Vec<Spanned<&'d str>>> {
        self.texts(key, |_| "has the same one".to_owned())
    }

    fn texts(
        &mut self,
        key: &'d str,
        names: impl Fn(&str) -> String,
    ) -> Option<Vec<Spanned<&'d str>>> {
        let array = self.array(key, "an array of strings")?;
        let mut strings: Vec<Spanned<&'d str>> = Vec::with_capacity(array.len());
        for element in array.iter() {
            match element.get_ref().as_str() {
                None => self.wrong_type(key, element, "an array of strings"),
                Some(text) if strings.iter().any(|seen| *seen.get_ref() == text) => {
                    let message = format!("{key:?} in {} {} twice", self.name, names(text));
                    self.doc.report(&element.span(), message);
                }
                Some(text) => strings.push(Spanned::new(element.span(), text)),
            }
        }
        Some(strings)
    }

    /// A table.
    pub fn table(&mut self, key: &'d str) -> Option<TableReader<'d, 't>> {
        let table = self.typed(key, "a table", |value| value.as_table())?;
        let name = self.name.child(key);
        Some(TableReader::new(self.doc, name, table.get_ref(), table.span()))
    }

    /// An array of tables. Elements that are no tables are recorded and left out.
    pub fn tables(&mut self, key: &'d str) -> Option<Vec<TableReader<'d, 't>>> {
        let array = self.array(key, "an array of tables")?;
        let name = self.name.child(key);
        let mut readers = Vec::with_capacity(array.len());
        for element in array.iter() {
            match element.get_ref().as_table() {
                Some(t) => readers.push(Self::new(self.doc, name.clone(), t, element.span())),
                None => self.wrong_type(key, element, "an array of tables"),
            }
        }
        Some(readers)
    }

    /// Whether the value under `key` is a table. Does not count as asking for it.
    pub fn is_table(&self, key: &str) -> bool {
        self.table.iter().any(|(k, value)| k.get_ref() == key && value.get_ref().is_table())
    }

    /// Every key that no getter asked for, as plain values: for tables whose keys are someone
    /// else's.
    pub fn rest(self) -> toml::Table {
        value::plain_table(self.doc, self.table, |key| !self.asked.contains(&key))
    }

    /// Records a problem for every key that no getter asked for, unless `extension` allows it.
    pub fn finish(self, extension: impl Fn(&Self, &str) -> bool) {
        for (key, span) in self.keys() {
            if self.asked.contains(&key) || extension(&self, key) {
                continue;
            }
            let hint = suggest::did_you_mean(key, self.asked.iter().copied());
            let valid = suggest::listed(self.asked.iter().copied());
            let hint = if hint.is_empty() { format!("; valid here: {valid}") } else { hint };
            self.doc.report(&span, format!("unknown key {key:?} in {}{hint}", self.name));
        }
    }
}
