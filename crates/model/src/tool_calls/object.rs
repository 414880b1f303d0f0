//! Finds the end of a JSON object that comes in pieces, or that it is none.

/// How far the object has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// More must come.
    Open,
    /// It ended after this many bytes of the last piece.
    Complete(usize),
    /// It is no JSON object.
    Invalid,
}

/// Follows brackets, strings and the order of what stands between them. Numbers and escapes are only
/// looked at from afar: whoever parses the object sees the rest.
#[derive(Debug)]
pub(super) struct ObjectScanner {
    /// Open brackets.
    open: Vec<u8>,
    expect: Expect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    String {
        key: bool,
        escaped: bool,
    },
    /// In a number, `true`, `false` or `null`.
    Word,
}

impl Default for ObjectScanner {
    fn default() -> Self {
        Self { open: Vec::new(), expect: Expect::Value }
    }
}

/// Deeper nesting is no call; parsers refuse it, too.
const MAX_DEPTH: usize = 100;

impl ObjectScanner {
    pub(super) fn push(&mut self, piece: &[u8]) -> Progress {
        for (i, &byte) in piece.iter().enumerate() {
            if !self.take(byte) || self.open.len() > MAX_DEPTH {
                return Progress::Invalid;
            }
            if self.open.is_empty() {
                return Progress::Complete(i + 1);
            }
        }
        Progress::Open
    }

    /// False if `byte` cannot stand here.
    fn take(&mut self, byte: u8) -> bool {
        if let Expect::String { key, escaped } = self.expect {
            self.expect = match byte {
                _ if escaped => Expect::String { key, escaped: false },
                b'\\' => Expect::String { key, escaped: true },
                b'"' if key => Expect::Colon,
                b'"' => Expect::CommaOrEnd,
                0..0x20 => return false,
                _ => self.expect,
            };
            return true;
        }
        if self.expect == Expect::Word {
            if byte.is_ascii_alphanumeric() || b"+-.".contains(&byte) {
                return true;
            }
            self.expect = Expect::CommaOrEnd;
        }
        if byte.is_ascii_whitespace() {
            return true;
        }
        let in_object = self.open.last() == Some(&b'{');
        self.expect = match (self.expect, byte) {
            (Expect::Value | Expect::ValueOrEnd, b'{') => {
                self.open.push(b'{');
                Expect::KeyOrEnd
            }
            // What is scanned is an object, so something is open before any other value.
            (Expect::Value | Expect::ValueOrEnd, _) if self.open.is_empty() => return false,
            (Expect::Value | Expect::ValueOrEnd, b'[') => {
                self.open.push(b'[');
                Expect::ValueOrEnd
            }
            (Expect::Value | Expect::ValueOrEnd, b'"') => {
                Expect::String { key: false, escaped: false }
            }
            (Expect::Value | Expect::ValueOrEnd, b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
                Expect::Word
            }
            (Expect::Key | Expect::KeyOrEnd, b'"') => Expect::String { key: true, escaped: false },
            (Expect::Colon, b':') => Expect::Value,
            (Expect::CommaOrEnd, b',') if in_object => Expect::Key,
            (Expect::CommaOrEnd, b',') => Expect::Value,
            (Expect::CommaOrEnd | Expect::KeyOrEnd, b'}') if in_object => self.close(),
            (Expect::CommaOrEnd | Expect::ValueOrEnd, b']') if !in_object => self.close(),
            _ => return false,
        };
        true
    }

    fn close(&mut self) -> Expect {
        self.open.pop();
        Expect::CommaOrEnd
    }
}
