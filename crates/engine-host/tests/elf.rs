//! The file stage: damaged and foreign libraries are refused in one line, and nothing panics.
//!
//! The sound library is this machine's libm, as every Rust program of this platform needs it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use engine_host::discovery::policy::Policy;
use engine_host::elf::{Sha256Digest, check_file, check_image};
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

struct Bench {
    dir: TempDir,
    policy: Policy,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let policy = Policy::of_directory(dir.path(), false).unwrap();
        Self { dir, policy }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("libx.so")
    }

    /// The reason for which a file of these bytes is refused; `None` if it passes.
    fn refusal(&self, bytes: &[u8]) -> Option<String> {
        fs::write(self.path(), bytes).unwrap();
        self.refusal_of_file()
    }

    fn refusal_of_file(&self) -> Option<String> {
        match check_file(&self.path(), &self.policy, None) {
            Ok(_) => None,
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "{error}");
                Some(error.reason)
            }
        }
    }
}

/// Bytes of a shared library that is mapped into this very process.
fn sound_library() -> Vec<u8> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")))
        .find(|path| {
            let name = Path::new(path).file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with("libm.so") || name.starts_with("libgcc_s.so")
        })
        .expect("the C library's parts are mapped");
    fs::read(path).unwrap()
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()) as usize
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Offsets of the program headers, with their types.
fn program_headers(bytes: &[u8]) -> Vec<(usize, u32)> {
    let first = u64_at(bytes, 32);
    (0..u16_at(bytes, 56))
        .map(|i| first + i * 56)
        .map(|at| (at, u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())))
        .collect()
}

fn header_of(bytes: &[u8], kind: u32) -> usize {
    program_headers(bytes).into_iter().find(|header| header.1 == kind).expect("such a segment").0
}

/// Offset of the value of the first dynamic entry that has `tag`.
fn dynamic_value(bytes: &[u8], tag: usize) -> usize {
    let section = u64_at(bytes, header_of(bytes, PT_DYNAMIC) + 8);
    (section..).step_by(16).find(|&at| u64_at(bytes, at) == tag).unwrap() + 8
}

fn patched(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut copy = bytes.to_vec();
    copy[at..at + with.len()].copy_from_slice(with);
    copy
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_TLS: u32 = 7;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PT_NOTE: u32 = 4;

#[test]
fn a_sound_library_passes_with_its_digest() {
    let (bench, library) = (Bench::new(), sound_library());
    assert_eq!(bench.refusal(&library), None);

    let digest = Sha256Digest(Sha256::digest(&library).into());
    let checked = check_file(&bench.path(), &bench.policy, Some(digest)).unwrap();
    assert_eq!(checked.sha256, digest);

    // Exchanging the file afterwards does not change what is loaded.
    fs::remove_file(bench.path()).unwrap();
    fs::write(bench.path(), "other").unwrap();
    let mut loaded = Vec::new();
    File::open(checked.load_path()).unwrap().read_to_end(&mut loaded).unwrap();
    assert!(loaded == library);

    fs::write(bench.path(), &library).unwrap();
    let wrong = Sha256Digest([0x5a; 32]);
    let error = check_file(&bench.path(), &bench.policy, Some(wrong)).unwrap_err();
    assert!(error.reason.starts_with(&format!("sha256 is {digest}, the manifest pins {wrong}")));
}

#[test]
fn truncated_at_every_segments_end() {
    let (bench, library) = (Bench::new(), sound_library());
    let headers = program_headers(&library);
    // A linker writes the section headers last; without them the file is not whole.
    let sections = u64_at(&library, 40);
    let count = usize::from(u16::from_le_bytes(library[60..62].try_into().unwrap()));
    let last = sections + 64 * count;
    let ends = headers.iter().map(|h| u64_at(&library, h.0 + 8) + u64_at(&library, h.0 + 32));
    let even = (1..24).map(|part| library.len() * part / 24);
    for end in ends.chain(even).collect::<Vec<_>>() {
        for cut in [end.saturating_sub(1), end, end + 1] {
            let cut = cut.min(library.len());
            let refusal = bench.refusal(&library[..cut]);
            assert_eq!(refusal.is_some(), cut < last, "cut at {cut} of {last}: {refusal:?}");
        }
    }
    let reason = bench.refusal(&library[..last - 1]).unwrap();
    assert!(reason.starts_with("truncated: the section header table "), "{reason}");
}

#[test]
fn files_that_are_no_libraries() {
    let bench = Bench::new();
    for text in
        [&b""[..], b"E", b"hello, this is text and long enough to hold an ELF header ......"]
    {
        assert_eq!(bench.refusal(text).as_deref(), Some("not an ELF file"));
    }
    let library = sound_library();
    for len in [4, 63] {
        let reason = bench.refusal(&library[..len]).unwrap();
        assert!(reason.starts_with("not an ELF file: "), "{reason}");
    }
    assert!(bench.refusal(&library[..64]).unwrap().starts_with("truncated: "));

    let host = std::env::current_exe().unwrap();
    fs::copy(host, bench.path()).unwrap();
    let reason = bench.refusal_of_file().unwrap();
    assert!(reason.contains("executable, not a shared library"), "{reason}");
}

#[test]
fn other_machines_and_formats() {
    let (bench, library) = (Bench::new(), sound_library());
    let host = std::env::consts::ARCH;
    let foreign: u16 = if host == "x86_64" { 183 } else { 62 };
    for (at, with, expected) in [
        (4, &[1][..], "a 32-bit library".to_owned()),
        (5, &[2], "a big-endian library".to_owned()),
        (18, &foreign.to_le_bytes(), format!(", the host is {host}: rebuild the plugin")),
        (18, &[0xe7, 0x03], "built for ELF machine 999".to_owned()),
        (16, &[1, 0], "an object file".to_owned()),
        (16, &[2, 0], "an executable".to_owned()),
        (16, &[4, 0], "a core dump".to_owned()),
        (54, &[55, 0], "corrupt: program headers of 55 bytes".to_owned()),
        (56, &[0, 0], "corrupt: 0 program headers".to_owned()),
        (56, &[0xff, 0xff], "corrupt: 65535 program headers".to_owned()),
        (32, &[0xff; 8], "corrupt: the program header table starts at".to_owned()),
    ] {
        let reason = bench.refusal(&patched(&library, at, with)).unwrap();
        assert!(reason.contains(&expected), "{reason}");
    }
}

#[test]
fn executable_stacks_and_text_relocations() {
    let (bench, library) = (Bench::new(), sound_library());
    let stack = header_of(&library, PT_GNU_STACK);
    let reason = bench.refusal(&patched(&library, stack + 4, &[7])).unwrap();
    assert!(reason.starts_with("demands an executable stack"), "{reason}");

    // Without the header the C library decides by machine.
    let missing = bench.refusal(&patched(&library, stack, &PT_NOTE.to_le_bytes()));
    if cfg!(target_arch = "x86_64") {
        assert!(missing.unwrap().starts_with("has no PT_GNU_STACK header"));
    } else {
        assert_eq!(missing, None);
    }

    let hash = dynamic_value(&library, 0x6fff_fef5) - 8;
    for (tag, value, expected) in [
        (22u64, 0u64, "has text relocations"),
        (30, 4, "has text relocations"),
        (0x6fff_fffb, 0x0800_0001, "a position-independent executable"),
    ] {
        let entry = [tag.to_le_bytes(), value.to_le_bytes()].concat();
        let reason = bench.refusal(&patched(&library, hash, &entry)).unwrap();
        assert!(reason.starts_with(expected), "{reason}");
    }
}

#[test]
fn segments_that_do_not_fit_together() {
    let (bench, library) = (Bench::new(), sound_library());
    let loads: Vec<usize> =
        program_headers(&library).into_iter().filter(|h| h.1 == PT_LOAD).map(|h| h.0).collect();
    let (first, second) = (loads[0], loads[1]);
    let long = |n: u64| n.to_le_bytes().to_vec();
    let address = u64_at(&library, second + 16) as u64;
    let tls = [(second, PT_TLS.to_le_bytes().to_vec()), (second + 40, long(1 << 30))];
    for (patches, says) in [
        (&[(second + 4, vec![7])][..], "has memory that is both writable and executable"),
        (&[(second + 16, long(address % 4096))], "begins before the end of the one before it"),
        (&[(second + 16, long(address + 8))], "begins elsewhere in a page than in the file"),
        (&[(second + 40, long(u64::MAX))], "ends beyond the address space"),
        (&[(second + 40, long(1 << 40))], "bytes of memory, which no plugin needs"),
        (&[(first + 48, long(4097))], "is aligned to 4097 bytes"),
        (&tls, "takes 1073741824 bytes of memory in every thread"),
    ] {
        let damaged = patches.iter().fold(library.clone(), |l, (at, with)| patched(&l, *at, with));
        let reason = bench.refusal(&damaged).unwrap_or_else(|| panic!("taken: {says}"));
        assert!(reason.contains(says), "{reason}, and should say {says}");
    }
}

#[test]
fn needed_libraries() {
    let (bench, library) = (Bench::new(), sound_library());
    let (strings, needed) = (dynamic_value(&library, 5), dynamic_value(&library, 1));
    // String table and headers lie in the first segment, whose addresses are file offsets.
    let name = u64_at(&library, strings) + u64_at(&library, needed);
    assert_eq!(&library[name..name + 9], b"libc.so.6");
    let reason = bench.refusal(&patched(&library, name, b"libq.so.6")).unwrap();
    assert!(reason.starts_with("needs \"libq.so.6\", which is not a library"), "{reason}");

    let far = u64::MAX.to_le_bytes();
    let reason = bench.refusal(&patched(&library, needed, &far)).unwrap();
    assert!(reason.starts_with("corrupt: the name of a needed library"), "{reason}");
    let reason = bench.refusal(&patched(&library, strings, &far)).unwrap();
    assert!(reason.starts_with("corrupt: the string table"), "{reason}");
    let size = dynamic_value(&library, 10);
    assert!(bench.refusal(&patched(&library, size, &far)).is_some());
    let reason = bench.refusal(&patched(&library, size, &[0; 8])).unwrap();
    assert!(reason.starts_with("corrupt: the name of a needed library"), "{reason}");
}

#[test]
fn things_that_are_no_regular_files() {
    let bench = Bench::new();
    let refused = || bench.refusal_of_file().unwrap();
    assert!(refused().starts_with("cannot be read: "));

    fs::create_dir(bench.path()).unwrap();
    assert_eq!(refused(), "cannot be read: not a regular file");
    fs::remove_dir(bench.path()).unwrap();

    // Opening a pipe without a writer in the ordinary way waits for ever.
    let status = std::process::Command::new("mkfifo").arg(bench.path()).status();
    assert!(status.expect("mkfifo is installed").success());
    assert_eq!(refused(), "cannot be read: not a regular file");
    fs::remove_file(bench.path()).unwrap();

    let _socket = std::os::unix::net::UnixListener::bind(bench.path()).unwrap();
    assert_eq!(refused(), "cannot be read: not a regular file");
}

#[test]
fn a_file_of_absurd_size_is_refused_unread() {
    let bench = Bench::new();
    // Sparse: takes no space.
    File::create(bench.path()).unwrap().set_len((1 << 30) + 1).unwrap();
    let reason = bench.refusal_of_file().unwrap();
    assert!(reason.starts_with("1073741825 bytes, more than"), "{reason}");
}

fn check_bytes(bytes: &[u8]) -> Result<(), String> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    check_image(&file, bytes.len() as u64).map(drop)
}

proptest! {
    /// Flips among the headers and the dynamic section, where they change what is parsed.
    #[test]
    fn no_damage_panics(flips in prop::collection::vec((any::<u32>(), any::<u8>()), 1..8)) {
        let mut library = sound_library();
        let headers = 64 + 56 * u16_at(&library, 56);
        let dynamic = header_of(&library, PT_DYNAMIC);
        let (at, len) = (u64_at(&library, dynamic + 8), u64_at(&library, dynamic + 32));
        for (place, value) in flips {
            let place = place as usize % (headers + len);
            library[if place < headers { place } else { at + place - headers }] ^= value;
        }
        let _ = check_bytes(&library);
    }

    #[test]
    fn no_noise_panics(noise in prop::collection::vec(any::<u8>(), 0..512), whole in any::<bool>()) {
        let mut bytes = noise;
        if whole && bytes.len() >= 64 {
            let library = sound_library();
            bytes[..64].copy_from_slice(&library[..64]);
        }
        prop_assert!(check_bytes(&bytes).is_err());
    }
}

#[test]
fn what_was_checked_is_what_will_be_loaded() {
    let (bench, library) = (Bench::new(), sound_library());
    fs::write(bench.path(), &library).unwrap();
    let checked = check_file(&bench.path(), &bench.policy, None).unwrap();
    // Overwritten in place and cut short, as by a careless copy; and then replaced.
    fs::write(bench.path(), b"short").unwrap();
    assert!(fs::read(checked.load_path()).unwrap() == library, "overwritten in place");
    fs::write(bench.dir.path().join("other"), b"another").unwrap();
    fs::rename(bench.dir.path().join("other"), bench.path()).unwrap();
    assert!(fs::read(checked.load_path()).unwrap() == library, "replaced");
    fs::remove_file(bench.path()).unwrap();
    assert!(fs::read(checked.load_path()).unwrap() == library, "removed");
    let mut copy = fs::OpenOptions::new().write(true).open(checked.load_path());
    let written = copy.as_mut().map(|file| file.write(b"x"));
    assert!(!matches!(written, Ok(Ok(_))), "nobody writes into it: {written:?}");
}
