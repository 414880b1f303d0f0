//! Progress of a download that another program does, seen by the growth of its files.

use std::fs;
use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

/// Shows bytes and rate: a moving bar on a terminal, a line every few seconds elsewhere.
pub struct Download {
    bar: ProgressBar,
    total: u64,
    started: Instant,
    last_line: Instant,
}

const BETWEEN_LINES: Duration = Duration::from_secs(5);

impl Download {
    /// Begins a download of about `total` bytes.
    pub fn begin(total: u64) -> Self {
        let style = ProgressStyle::with_template(
            "    {bar:30} {decimal_bytes:>10} of {decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left",
        );
        let bar = ProgressBar::new(total);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, total, started: Instant::now(), last_line: Instant::now() }
    }

    /// Looks at what has arrived in `dir`.
    pub fn look(&mut self, dir: &Path) {
        // Never past the whole: for a moment there may be two copies of the file.
        let bytes = bytes_under(dir).min(self.total);
        self.bar.set_position(bytes);
        if !stderr().is_terminal() && self.last_line.elapsed() >= BETWEEN_LINES {
            self.last_line = Instant::now();
            eprintln!("    {} of {}", self.rate(bytes), DecimalBytes(self.total));
        }
    }

    /// Ends with a line that says what arrived and how fast.
    pub fn end(self, bytes: u64) {
        self.bar.finish_and_clear();
        eprintln!("    {}", self.rate(bytes));
    }

    fn rate(&self, bytes: u64) -> String {
        let seconds = self.started.elapsed().as_secs_f64();
        let per_second = DecimalBytes((bytes as f64 / seconds.max(1e-3)) as u64);
        format!("{} in {seconds:.1} s, {per_second}/s", DecimalBytes(bytes))
    }
}

/// Bytes of all files under `dir`. What vanishes while it is being counted does not count.
fn bytes_under(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => 0,
        })
        .sum()
}
