//! SHA-256 of files and of source trees, in hexadecimal.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Digest of a file's content.
pub fn of_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// Digest of what a build of `sources` (files and package directories, relative to `root`) reads:
/// names and contents of all files, without tests, benchmarks, examples and hidden files.
pub fn of_sources(root: &Path, sources: &[String]) -> io::Result<String> {
    let mut files = Vec::new();
    for source in sources {
        let path = root.join(source);
        if path.is_dir() { walk(&path, true, &mut files)? } else { files.push(path) }
    }
    files.sort();
    files.dedup();
    let mut hasher = Sha256::new();
    for file in files {
        let content = fs::read(&file)?;
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        // Lengths in front, so that no two trees give the same bytes.
        for part in [name.as_bytes(), &content] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Directories of a package that are no part of its library.
const NOT_BUILT: [&str; 4] = ["target", "tests", "benches", "examples"];

fn walk(dir: &Path, is_package: bool, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') || name.ends_with('~') {
            continue;
        }
        if entry.file_type()?.is_dir() {
            if !(is_package && NOT_BUILT.contains(&&*name)) {
                walk(&entry.path(), false, files)?;
            }
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_a_file_is_that_of_the_standard() {
        // FIPS 180-2, appendix B.1.
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("abc"), "abc").unwrap();
        assert_eq!(
            of_file(&dir.path().join("abc")).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn sources_are_what_a_build_reads() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let digest = || of_sources(dir.path(), &["lock".into(), "a".into()]).unwrap();
        write("lock", "1");
        write("a/src/lib.rs", "x");
        let first = digest();

        for unread in ["a/tests/t.rs", "a/target/x", "a/src/.lib.rs.swp", "b/src/lib.rs"] {
            write(unread, "y");
            assert_eq!(digest(), first, "{unread}");
        }
        let mut all = vec![first];
        for (read, text) in [
            ("lock", "2"),
            ("a/src/lib.rs", "xx"),
            ("a/src/tests/mod.rs", ""),
            ("a/kernels/k.cu", ""),
        ] {
            write(read, text);
            assert!(!all.contains(&digest()), "{read}");
            all.push(digest());
        }
    }
}
