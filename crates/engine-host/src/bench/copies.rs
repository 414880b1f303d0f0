//! `bench load --copies N`: many plugins at once.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::machine;
use super::stats::Summary;
use crate::config::Config;
use crate::discovery::policy::Policy;
use crate::error::{Error, ErrorKind, Result};
use crate::setup;
use crate::{elf, registry};

/// Loads `count` copies of one of the configured plugins, each a library of its own to the linker, with
/// `threads` threads; tells how long hashing, all checks of the file, and checks and loading took.
///
/// # Errors
/// When there is no plugin, no room for the copies, or one is refused.
pub fn run(config: &Config, count: usize, threads: usize) -> Result<Value> {
    let discovery = setup::discover(config)?;
    let library = discovery.usable().find_map(|(plugin, _)| plugin.library_path());
    let library =
        library.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no plugin to copy"))?;
    let directory = Directory::new()?;
    let copies = (0..count).map(|n| directory.copy(&library, n)).collect::<Result<Vec<_>>>()?;
    let policy = Policy::of_directory(&directory.0, false).map_err(Error::usage)?;
    let options = setup::discovery_options(config);
    // Before the others, so that what all of them take together is loading and nothing else.
    let alone = copies.iter().map(|path| alone(path, &policy)).collect::<Result<Vec<_>>>()?;
    let next = AtomicUsize::new(0);
    let started = Instant::now();
    let loads = std::thread::scope(|scope| {
        let work = || -> Result<Vec<u64>> {
            let mut loads = Vec::new();
            while let Some(path) = copies.get(next.fetch_add(1, Ordering::Relaxed)) {
                let clock = Instant::now();
                registry::load_file(path, &options)?;
                loads.push(nanos(clock));
            }
            Ok(loads)
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(|t| {
            t.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a thread panicked")))
        });
        ended.collect::<Result<Vec<_>>>()
    })?;
    let took = started.elapsed();
    let summary = |mut of: Vec<u64>| Summary::of(&mut of, 1.0).to_json();
    let each = took.as_micros() as u64 / count.max(1) as u64;
    Ok(json!({
        "bench": "load",
        "what": format!("{count} copies, {threads} threads"),
        "us": {
            "hash": summary(alone.iter().map(|(hash, _)| *hash).collect()),
            "file checks": summary(alone.iter().map(|(_, checks)| *checks).collect()),
            "checked and loaded": summary(loads.concat()),
        },
        "note": {
            "bytes": std::fs::metadata(&library).map_or(0, |m| m.len()),
            "all_ms": took.as_millis() as u64,
            "each_us": each,
        },
        "machine": machine::describe("plugins"),
    }))
}

fn nanos(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}

/// Nanoseconds that hashing a file and all checks of it take.
fn alone(path: &Path, policy: &Policy) -> Result<(u64, u64)> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let clock = Instant::now();
    std::hint::black_box(crate::discovery::lock::digest_of(&bytes));
    let hashed = nanos(clock);
    let clock = Instant::now();
    elf::check_file(path, policy, None)?;
    Ok((hashed, nanos(clock)))
}

/// A directory that goes with the value.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("engine-host-bench.{}", std::process::id()));
        std::fs::create_dir(&path).map_err(failed(&path))?;
        Ok(Self(path))
    }

    /// A copy that differs in its last byte, behind all that is mapped.
    fn copy(&self, library: &Path, n: usize) -> Result<PathBuf> {
        let path = self.0.join(format!("libcopy{n}.so"));
        std::fs::copy(library, &path).map_err(failed(&path))?;
        let mut file =
            std::fs::OpenOptions::new().append(true).open(&path).map_err(failed(&path))?;
        file.write_all(&n.to_le_bytes()).map_err(failed(&path))?;
        Ok(path)
    }
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |e| Error::new(ErrorKind::Internal, format!("{}: {e}", path.display()))
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
