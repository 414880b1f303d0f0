//! Damaged manifests and libraries, many of them, and many threads at once. The same seeds every time;
//! `ENGINE_HOST_FUZZ=long` runs fifty times as many manifests and ten times as many libraries.

mod support;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use engine_host::discovery::policy::Policy;
use engine_host::discovery::{Options, discover};
use engine_host::manifest::{ApiVersion, Manifest};
use engine_host::probe::{Probe, probe};
use engine_host::{elf, registry};
use support::plugins;

fn is_long() -> bool {
    std::env::var("ENGINE_HOST_FUZZ").is_ok_and(|v| v == "long")
}

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

const MANIFEST: &str = r#"# A plugin.
[plugin]
name = "resource-kv"
version = "0.1.0"
api = "1.0"
library = "libresource_kv.so"
kinds = ["kv", "other"]
provides = ["kv.cache/1"]
requires = ["a.b >= 1.0", "c.d?"]
sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
enabled = true
[[plugin.variants]]
library = "libresource_kv_avx2.so"
target_features = ["avx2", "fma"]
[x-vendor]
anything = { goes = [1, 2.5, "here"] }
"#;

/// Pieces that have broken parsers.
const PIECES: [&str; 14] = [
    "\u{feff}",
    "\0",
    "\"",
    "'''",
    "[",
    "]]",
    "= =",
    "\u{202e}",
    "9999999999999999999999",
    "../..",
    "\r",
    "1979-05-27T07:32:00Z",
    "nan",
    "\\u0000",
];

#[test]
fn damaged_manifests_are_refused_or_read_and_never_panic() {
    let cases = if is_long() { 100_000 } else { 2_000 };
    let mut random = Random(1);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..cases {
        let mut bytes = MANIFEST.as_bytes().to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len());
            match random.below(6) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes.truncate(at),
                2 => {
                    let piece = PIECES[random.below(PIECES.len())];
                    bytes.splice(at..at, piece.bytes());
                }
                3 => {
                    let end = (at + random.below(40)).min(bytes.len());
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
                4 => {
                    let end = (at + random.below(40)).min(bytes.len());
                    bytes.drain(at..end);
                }
                _ => {
                    let nested = "[".repeat(random.below(2_000));
                    bytes.splice(at..at, nested.bytes());
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match Manifest::parse("fuzz.toml", &text) {
            Ok(manifest) => {
                read += 1;
                assert!(!manifest.library.contains('/'), "{:?}", manifest.library);
                assert!(!manifest.kinds.is_empty());
            }
            Err(e) => {
                refused += 1;
                let line = e.problems.one_line();
                assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
                assert!(line.chars().count() < 700, "a message of {} bytes", line.len());
            }
        }
    }
    assert!(read > cases / 100 && refused > cases / 2, "{read} read, {refused} refused");
}

#[test]
fn damaged_libraries_are_refused_or_harm_only_a_child() {
    let cases = if is_long() { 2_000 } else { 200 };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libdamaged.so");
    std::fs::copy(plugins().join("libresource_positions.so"), &path).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let size = file.metadata().unwrap().len();
    let policy = Policy::of_directory(dir.path(), false).unwrap();
    let mut random = Random(2);
    let (mut refused, mut crashed, mut loaded) = (0, 0, 0);
    for case in 0..cases {
        // Headers and tables for the most part: that is where the linker looks.
        let region = [512, 64 << 10, size][case % 3];
        let at = random.below(region.min(size) as usize) as u64;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        let damaged = [byte[0] ^ (1 << random.below(8))];
        file.write_all_at(&damaged, at).unwrap();
        match elf::check_file(&path, &policy, None) {
            Err(e) => {
                refused += 1;
                assert!(!e.to_string().contains('\n'), "{e}");
            }
            Ok(checked) => match probe(&checked) {
                Ok(_) => loaded += 1,
                Err(why) => {
                    crashed += 1;
                    assert!(why.contains("when it is loaded"), "{why}");
                }
            },
        }
        file.write_all_at(&byte, at).unwrap();
    }
    println!("{refused} refused, {crashed} crashed a child, {loaded} loaded");
    assert!(refused > 0 && loaded > 0);
    let whole = elf::check_file(&path, &policy, None).unwrap();
    assert!(probe(&whole).is_ok(), "undamaged again");
}

/// Where segments, sections and the tables of the dynamic section begin and end.
fn extents(bytes: &[u8]) -> Vec<usize> {
    let u16_at = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let mut all = vec![0, 4, 63, 64];
    for (table, size, count, offset) in
        [(u64_at(32), u16_at(54), u16_at(56), 8), (u64_at(40), u16_at(58), u16_at(60), 24)]
    {
        for entry in (0..count).map(|i| table + i * size) {
            let at = u64_at(entry + offset);
            // The size comes two words after the offset in one table, and one after it in the other.
            let len = u64_at(entry + offset + if offset == 8 { 24 } else { 8 });
            all.extend([entry, at, at.saturating_add(len)]);
        }
        all.push(table + count * size);
    }
    all.retain(|&at| at <= bytes.len());
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn libraries_cut_at_every_extent_are_refused_or_harm_only_a_child() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libcut.so");
    let whole = std::fs::read(plugins().join("libresource_positions.so")).unwrap();
    let policy = Policy::of_directory(dir.path(), false).unwrap();
    let step = if is_long() { 1 } else { 3 };
    let (mut refused, mut taken) = (0, 0);
    for at in extents(&whole).into_iter().step_by(step) {
        for cut in [at.saturating_sub(1), at, at + 1] {
            std::fs::write(&path, &whole[..cut.min(whole.len())]).unwrap();
            match elf::check_file(&path, &policy, None) {
                Err(e) => {
                    refused += 1;
                    assert!(!e.to_string().contains('\n'), "{e}");
                }
                Ok(checked) => {
                    taken += 1;
                    // Complete, or cut behind all that anybody maps.
                    probe(&checked).unwrap_or_else(|why| panic!("cut at {cut}: {why}"));
                }
            }
        }
    }
    println!("{refused} refused, {taken} taken");
    assert!(refused > 50, "{refused}");
}

fn copy_plugins(to: &Path) {
    for entry in std::fs::read_dir(plugins()).unwrap() {
        let path = entry.unwrap().path();
        let is_installed = path.extension().is_some_and(|e| e == "toml" || e == "so");
        let name = path.file_name().unwrap().to_owned();
        if path.is_file() && is_installed && !name.as_encoded_bytes().starts_with(b".") {
            std::fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

#[test]
fn many_threads_load_and_list_at_once() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    copy_plugins(one.path());
    copy_plugins(other.path());
    let options = Options {
        strict: false,
        api: ApiVersion { major: 1, minor: 0 },
        probe: Probe::Never,
        use_lock: true,
    };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let dir = if thread % 2 == 0 { one.path() } else { other.path() };
            scope.spawn(move || {
                for _ in 0..10 {
                    let found = discover(&[dir.to_path_buf()], &options).unwrap();
                    assert_eq!(found.plugins.len(), 4);
                    for plugin in &found.plugins {
                        let listed = registry::inspect(plugin);
                        assert_eq!((listed.state, listed.reason), ("loaded", None));
                    }
                }
            });
        }
    });
}
