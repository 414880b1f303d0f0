//! Keys that nothing shows: no log, no message, no `config show`.

use std::fmt;

/// API keys. `Debug` tells only how many there are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// How many there are; none means that no key is asked for.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys: to compare with, never to show.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    pub(super) fn push(&mut self, key: &str) {
        self.0.push(key.to_owned());
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hidden", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_never_shown() {
        let mut keys = Secrets::default();
        assert!(keys.is_empty());
        keys.push("sk-one");
        keys.push("sk-two");
        assert_eq!(keys.iter().collect::<Vec<_>>(), ["sk-one", "sk-two"]);
        assert_eq!(format!("{keys:?}"), "2 hidden");
    }
}
