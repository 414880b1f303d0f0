//! Parts of `docs/performance.md` that benchmarks write.

use std::fs;
use std::io::ErrorKind::NotFound;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};

/// A part of the document that one benchmark writes.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// What the marks around it call it.
    pub name: &'static str,
    /// Which benchmark writes it: `bench <command> --report docs`.
    pub command: &'static str,
}

impl Section {
    /// Writes the section into `performance.md` in `docs`, in place of the one that is there.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn write(self, docs: &Path, section: &str) -> Result<()> {
        let path = docs.join("performance.md");
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == NotFound => Ok("# Performance\n".into()),
            other => other,
        };
        text.and_then(|text| fs::write(&path, self.replaced(&text, section)))
            .map_err(|e| failed(&path, &e))
    }

    /// The text with its section replaced, or added at the end.
    fn replaced(self, text: &str, section: &str) -> String {
        let Section { name, command } = self;
        let begin =
            format!("<!-- {name}: written by `engine-host bench {command} --report docs` -->");
        let end = format!("<!-- end of {name} -->");
        let around = text.split_once(&begin).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(&end)?;
            Some((before, after))
        });
        let (before, after) = around.unwrap_or((text, "\n"));
        let gap = if before.ends_with("\n\n") { "" } else { "\n" };
        format!("{before}{gap}{begin}\n{section}{end}{after}")
    }
}

/// A file of the documentation that cannot be read or written.
pub fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(ErrorKind::Internal, format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_is_replaced_and_nothing_else() {
        let one = Section { name: "one", command: "step" };
        let first = one.replaced("# Performance\n\n## Other\n\ntext\n", "one\n");
        assert!(first.starts_with("# Performance\n\n## Other\n\ntext\n\n<!--"), "{first}");
        let two = Section { name: "two", command: "load" };
        let more = two.replaced(&format!("{first}\n## After\n"), "beside\n");
        let second = one.replaced(&more, "another\n");
        assert!(second.contains("another\n") && !second.contains("one\n"), "{second}");
        assert!(second.contains("\n\n## After\n") && second.contains("beside\n"), "{second}");
        assert_eq!(second.matches("written by").count(), 2);
        assert_eq!(one.replaced(&second, "another\n"), second);
    }
}
