//! Who gives way and who may pass whom, as an operator says it.

use std::fmt;
use std::str::FromStr;

use crate::suggest::nearest;

/// Which running request gives way when a step does not fit. Among equals it is the youngest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Victims {
    /// The one that was taken in last.
    #[default]
    Youngest,
    /// The one that has not been part of a step for longest, counted in steps.
    LeastRecent,
    /// The one that the resource with this key wants gone most, by its `get_offload_priority`.
    Priority(String),
}

impl Victims {
    /// The resource that is asked.
    pub fn resource(&self) -> Option<&str> {
        match self {
            Self::Priority(key) => Some(key),
            Self::Youngest | Self::LeastRecent => None,
        }
    }
}

impl FromStr for Victims {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "youngest" => Ok(Self::Youngest),
            None if text == "lru" => Ok(Self::LeastRecent),
            Some(("priority", key)) if !key.is_empty() => Ok(Self::Priority(key.into())),
            _ => Err(format!(
                "there is no {text:?}{} (there are \"youngest\", \"lru\" and \"priority:KEY\", KEY being \
                 that of a resource)",
                hint(text, ["youngest", "lru", "priority:KEY"])
            )),
        }
    }
}

impl fmt::Display for Victims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Youngest => f.write_str("youngest"),
            Self::LeastRecent => f.write_str("lru"),
            Self::Priority(key) => write!(f, "priority:{key}"),
        }
    }
}

/// Whether requests may start before one that came earlier and waits for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queue {
    /// Nobody passes it.
    #[default]
    Strict,
    /// So many may; then nobody does.
    Skip(u32),
}

impl Queue {
    /// Whether one more may pass a request that so many have passed.
    pub(super) fn lets_pass(self, passed: u32) -> bool {
        match self {
            Self::Strict => false,
            Self::Skip(most) => passed < most,
        }
    }
}

impl FromStr for Queue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let most = |digits: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|&n: &u32| is_number && n > 0)
        };
        match (text, text.strip_prefix("skip:").and_then(most)) {
            ("strict", _) => Ok(Self::Strict),
            (_, Some(most)) => Ok(Self::Skip(most)),
            _ => Err(format!(
                "there is no {text:?}{} (there are \"strict\" and \"skip:N\", N being how many requests may \
                 pass one that waits)",
                hint(text, ["strict", "skip:N"])
            )),
        }
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strict => f.write_str("strict"),
            Self::Skip(most) => write!(f, "skip:{most}"),
        }
    }
}

/// The nearest name, by the part before the colon.
fn hint<const N: usize>(text: &str, known: [&'static str; N]) -> String {
    let stem = |text: &str| text.split(':').next().unwrap_or_default().to_owned();
    let stems = known.map(stem);
    let near = nearest(&stem(text), stems.iter().map(String::as_str));
    let name = stems.iter().position(|stem| near == Some(stem)).map(|at| known[at]);
    name.map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_again() {
        for victims in
            [Victims::Youngest, Victims::LeastRecent, Victims::Priority("main_kv".into())]
        {
            assert_eq!(victims.to_string().parse(), Ok(victims));
        }
        for queue in [Queue::Strict, Queue::Skip(1), Queue::Skip(u32::MAX)] {
            assert_eq!(queue.to_string().parse(), Ok(queue));
        }
    }

    #[test]
    fn what_is_wrong_names_the_nearest_and_all_there_are() {
        let victims = |text: &str| text.parse::<Victims>().unwrap_err();
        assert!(victims("yungest").contains("did you mean \"youngest\"?"));
        assert!(victims("priorty:main_kv").contains("did you mean \"priority:KEY\"?"));
        for text in ["", "priority", "priority:", "lru:3", "LRU", "oldest"] {
            let said = victims(text);
            assert!(said.contains("\"youngest\", \"lru\" and \"priority:KEY\""), "{said}");
            assert!(!said.contains('\n'), "{said}");
        }
        let queue = |text: &str| text.parse::<Queue>().unwrap_err();
        assert!(queue("strikt").contains("did you mean \"strict\"?"));
        assert!(queue("skip").contains("did you mean \"skip:N\"?"));
        for text in ["", "skip:0", "skip:-1", "skip:+1", "skip:1.5", "skip:4294967296", "strict:1"]
        {
            let said = queue(text);
            assert!(said.contains("\"strict\" and \"skip:N\""), "{said}");
        }
    }
}
