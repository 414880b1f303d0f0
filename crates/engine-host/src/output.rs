//! The program's own standard output, kept apart from what plugins print.
//!
//! A plugin has its own copy of every run-time library, and code that prints when it is loaded: in the
//! middle of what a command says, as JSON perhaps. So the program takes standard output for itself, and
//! leaves standard error in its place.

use std::fs::File;
use std::io::{LineWriter, Write};
use std::sync::OnceLock;

static OWN: OnceLock<Option<File>> = OnceLock::new();

/// From now on [`out`] is the only way to standard output. Without descriptors to spare, nothing changes.
pub fn claim() {
    OWN.get_or_init(|| {
        let own = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3).ok()?;
        rustix::stdio::dup2_stdout(std::io::stderr()).ok()?;
        Some(File::from(own))
    });
}

/// Standard output. What is written is there at the end of every line, and when this is dropped.
pub fn out() -> Box<dyn Write> {
    match OWN.get().and_then(Option::as_ref) {
        Some(own) => Box::new(LineWriter::new(own)),
        None => Box::new(std::io::stdout()),
    }
}
