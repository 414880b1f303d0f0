//! Capabilities as manifests write them: `kv.cache/1` is offered, `kv.cache >= 1.0?` is wanted.

use std::fmt;

use super::{ApiVersion, decimal, is_name};

/// A capability on offer: `name/major`, or `name/major.minor`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// Dotted name; third parties use reverse-domain names.
    pub name: String,
    /// Different majors are different interfaces.
    pub major: u32,
    /// Minors only add.
    pub minor: u32,
}

impl Capability {
    /// Parses `name/major` (minor 0) or `name/major.minor`.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, version) = text.split_once('/')?;
        let (major, minor) = match version.split_once('.') {
            Some((major, minor)) => (major, decimal(minor)?),
            None => (version, 0),
        };
        let major = decimal(major)?;
        is_name(name).then(|| Self { name: name.to_owned(), major, minor })
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.major)?;
        if self.minor == 0 { Ok(()) } else { write!(f, ".{}", self.minor) }
    }
}

/// A capability that a plugin wants from another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Name of the capability.
    pub name: String,
    /// The major, and the least minor of it; `None`: any version.
    pub least: Option<ApiVersion>,
    /// The plugin works without it too.
    pub optional: bool,
}

impl Requirement {
    /// Parses `name`, `name >= major.minor`, and either with `?` at the end.
    pub fn parse(text: &str) -> Option<Self> {
        let (wanted, optional) = match text.strip_suffix('?') {
            Some(wanted) => (wanted, true),
            None => (text, false),
        };
        let (name, least) = match wanted.split_once(">=") {
            Some((name, version)) => (name, Some(ApiVersion::parse(version.trim())?)),
            None => (wanted, None),
        };
        let name = name.trim();
        is_name(name).then(|| Self { name: name.to_owned(), least, optional })
    }

    /// Whether `offered` will do: the same name and major, and no older a minor.
    pub fn accepts(&self, offered: &Capability) -> bool {
        self.name == offered.name
            && self
                .least
                .is_none_or(|least| least.major == offered.major && least.minor <= offered.minor)
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(least) = self.least {
            write!(f, " >= {least}")?;
        }
        f.write_str(if self.optional { "?" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_parse_and_show() {
        let parsed = Capability::parse("kv.cache/1").unwrap();
        assert_eq!((&*parsed.name, parsed.major, parsed.minor), ("kv.cache", 1, 0));
        assert_eq!(
            Capability::parse("org.example.x/2.3").unwrap().to_string(),
            "org.example.x/2.3"
        );
        for bad in
            ["", "kv.cache", "kv.cache/", "/1", "kv cache/1", "a/b/1", "a/+1", "a/1.", "a/-1"]
        {
            assert_eq!(Capability::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn requirements_parse_and_accept() {
        let parse = |text| Requirement::parse(text).unwrap();
        assert_eq!(parse("kv.cache>=1.2 ?"), parse("kv.cache >= 1.2?"));
        assert_eq!(parse("x?").to_string(), "x?");
        assert!(!parse("x").optional);
        for bad in ["", "?", "x??", "x >=", "x >= 1", "x > 1.0", "x == 1.0", ">= 1.0", "x >= 1.0.0"]
        {
            assert_eq!(Requirement::parse(bad), None, "{bad}");
        }

        let offer = |text| Capability::parse(text).unwrap();
        assert!(parse("kv >= 1.2").accepts(&offer("kv/1.2")));
        assert!(parse("kv >= 1.2").accepts(&offer("kv/1.10")));
        assert!(!parse("kv >= 1.2").accepts(&offer("kv/1.1")));
        assert!(!parse("kv >= 1.2").accepts(&offer("kv/2.3")));
        assert!(!parse("kv").accepts(&offer("kw/1")));
        assert!(parse("kv?").accepts(&offer("kv/7")));
    }
}
