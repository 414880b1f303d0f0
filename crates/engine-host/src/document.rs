//! A TOML text with a name and places: what the readers of the configuration and of manifests share.
//!
//! Problems are collected while reading goes on, so that a person sees all of them at once.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use toml::Spanned;
use toml::de::DeTable;

mod table;
mod value;

pub use table::{Dotted, TableReader};

/// One problem of one file. Displays as `file:line:column: message`, without the place where a
/// problem has none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, as the user named it.
    pub file: String,
    /// Line and column, both from 1; columns count characters.
    pub place: Option<(usize, usize)>,
    /// One line, complete in itself.
    pub message: String,
}

impl Problem {
    /// A problem of a whole file.
    pub fn of_file(file: impl Into<String>, message: impl Into<String>) -> Self {
        Self { file: file.into(), place: None, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = shortened(&self.message);
        let message = plain(&message);
        match self.place {
            Some((line, column)) => write!(f, "{}:{line}:{column}: {message}", self.file),
            None => write!(f, "{}: {message}", self.file),
        }
    }
}

/// Longer messages quote what somebody else wrote: its middle is left out, since what to do about it
/// stands at the end.
const SHOWN_CHARACTERS: usize = 600;

fn shortened(message: &str) -> Cow<'_, str> {
    let count = message.chars().count();
    if count <= SHOWN_CHARACTERS {
        return message.into();
    }
    let start: String = message.chars().take(SHOWN_CHARACTERS / 2).collect();
    let end: String = message.chars().skip(count - SHOWN_CHARACTERS / 2).collect();
    format!("{start} ... {end}").into()
}

/// Problems reported together; displays as one line for each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

/// A broken file can have thousands of problems; nobody reads more than these.
const SHOWN_PROBLEMS: usize = 20;

impl Problems {
    /// All problems in one line, for listings: the first in full, the others counted.
    pub fn one_line(&self) -> String {
        match self.0.as_slice() {
            [] => String::new(),
            [only] => only.to_string(),
            [first, rest @ ..] => format!("{first} (and {} more)", rest.len()),
        }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().take(SHOWN_PROBLEMS).enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            write!(f, "{newline}{problem}")?;
        }
        match self.0.len().checked_sub(SHOWN_PROBLEMS) {
            Some(more @ 1..) => write!(f, "\n... and {more} more problems"),
            _ => Ok(()),
        }
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

/// A TOML text under a name, and the problems found in it so far.
pub struct Document<'t> {
    file: String,
    text: &'t str,
    /// Whether lines and columns mean something to the user.
    placed: bool,
    problems: RefCell<Vec<Problem>>,
}

impl<'t> Document<'t> {
    /// `file` is how messages name the text.
    pub fn new(file: impl Into<String>, text: &'t str) -> Self {
        Self { file: file.into(), text, placed: true, problems: RefCell::default() }
    }

    /// A text made of a value that was typed elsewhere, which `name` tells: a flag, a variable.
    pub fn outside(name: impl Into<String>, text: &'t str) -> Self {
        Self { placed: false, ..Self::new(name, text) }
    }

    /// Whether lines and columns of the text mean something to the user.
    pub fn has_places(&self) -> bool {
        self.placed
    }

    /// Parses as much as can be parsed; what cannot is recorded as problems.
    pub fn parse(&self) -> Spanned<DeTable<'t>> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in errors {
            let span = error.span().unwrap_or(0..0);
            // The parser says that a key is a duplicate, but not which key.
            let culprit = self.text.get(span.clone()).map(str::trim).unwrap_or_default();
            let message = match error.message() {
                "duplicate key" if !culprit.is_empty() => format!("duplicate key {culprit:?}"),
                other => other.lines().collect::<Vec<_>>().join("; "),
            };
            self.report(&span, message);
        }
        root
    }

    /// A reader of the table `root`, the top level of this document.
    pub fn top<'d>(&'d self, root: &'d Spanned<DeTable<'t>>) -> TableReader<'d, 't> {
        TableReader::new(self, Dotted::top(), root.get_ref(), root.span())
    }

    /// Records a problem at the start of `span` (bytes of the text).
    pub fn report(&self, span: &Range<usize>, message: impl Into<String>) {
        let problem = Problem {
            file: self.file.clone(),
            place: self.placed.then(|| self.place(span.start)),
            message: message.into(),
        };
        self.problems.borrow_mut().push(problem);
    }

    /// Line and column, both from 1, of a byte of the text; columns count characters.
    pub fn place(&self, offset: usize) -> (usize, usize) {
        place_in(self.text.as_bytes(), offset)
    }

    /// Whether any problem was recorded.
    pub fn has_problems(&self) -> bool {
        !self.problems.borrow().is_empty()
    }

    /// The problems recorded, in the order of their places.
    pub fn into_problems(self) -> Problems {
        let mut problems = self.problems.into_inner();
        problems.sort();
        problems.dedup();
        Problems(problems)
    }
}

fn place_in(bytes: &[u8], offset: usize) -> (usize, usize) {
    let before = &bytes[..offset.min(bytes.len())];
    let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |newline| newline + 1);
    let line = 1 + before.iter().filter(|&&b| b == b'\n').count();
    (line, 1 + String::from_utf8_lossy(&before[line_start..]).chars().count())
}

/// Opens `path` for reading if it is a regular file.
///
/// Never blocks: opening a named pipe or a device in the ordinary way could hang for ever.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            // What opening a socket or a device without a driver answers.
            Some(libc::ENXIO | libc::ENODEV) => io::Error::other(NOT_REGULAR),
            _ => error,
        })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other(NOT_REGULAR)) }
}

const NOT_REGULAR: &str = "not a regular file";

/// Text of a regular file of at most `max_bytes`, in UTF-8.
pub(crate) fn read_text(path: &Path, max_bytes: u64) -> Result<String, Problem> {
    let open = open_regular(path);
    let file = open.map_err(|e| Problem::of_file(shown(path), format!("cannot be read: {e}")))?;
    read_text_from(&file, path, max_bytes)
}

/// As [`read_text`], from an open file; `path` is how messages name it.
pub(crate) fn read_text_from(file: &File, path: &Path, max_bytes: u64) -> Result<String, Problem> {
    let problem = |message: String| Problem::of_file(shown(path), message);
    let mut bytes = Vec::new();
    file.take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| problem(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > max_bytes {
        return Err(problem(format!("larger than the {} KiB allowed", max_bytes / 1024)));
    }
    String::from_utf8(bytes).map_err(|error| Problem {
        file: shown(path),
        place: Some(place_in(error.as_bytes(), error.utf8_error().valid_up_to())),
        message: "not valid UTF-8".to_owned(),
    })
}

/// A path as messages show it.
pub(crate) fn shown(path: &Path) -> String {
    plain(&path.display().to_string()).into_owned()
}

/// Text that somebody else wrote, as part of one line: what would start another one, move the cursor, or
/// turn the direction of writing is escaped.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    let acts = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(acts) {
        return text.into();
    }
    let escaped = |c: char| if acts(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escaped).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_lines_and_characters() {
        let doc = Document::new("x.toml", "a\näö = 1\r\nb");
        assert_eq!(doc.place(0), (1, 1));
        assert_eq!(doc.place(1), (1, 2));
        assert_eq!(doc.place(2), (2, 1));
        assert_eq!(doc.place("a\näö".len()), (2, 3));
        assert_eq!(doc.place(usize::MAX), (3, 2));
    }

    #[test]
    fn syntax_problems_come_together_and_in_order() {
        let doc = Document::new("x.toml", "a = 1\na = 2\n[t]\nb = \nc = 'x\n");
        doc.parse();
        let shown = doc.into_problems().to_string();
        assert!(shown.starts_with("x.toml:2:1: duplicate key \"a\"\n"), "{shown}");
        assert!(shown.contains("\nx.toml:4:"), "{shown}");
        assert!(shown.contains("\nx.toml:5:"), "{shown}");
    }

    #[test]
    fn what_others_wrote_stays_in_its_line() {
        let problem = Problem::of_file("f", "unknown key \u{1b}[2J\r\nerror: \u{202e}x");
        let line = problem.to_string();
        assert_eq!(line, "f: unknown key \\u{1b}[2J\\r\\nerror: \\u{202e}x");
        assert_eq!(shown(Path::new("a\nb/ä.toml")), "a\\nb/ä.toml");
        assert!(matches!(plain("nothing in ä 漢"), Cow::Borrowed(_)));
    }

    #[test]
    fn many_problems_are_counted() {
        let problems = Problems(vec![Problem::of_file("f", "bad"); 23]);
        assert!(problems.to_string().ends_with("f: bad\n... and 3 more problems"));
        assert_eq!(problems.one_line(), "f: bad (and 22 more)");
    }
}
