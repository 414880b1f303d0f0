//! Compiled kernels on disk.
//!
//! First the folder that a release brings (`kernels/` beside the program), then the user's cache
//! (`$XDG_CACHE_HOME/engine-host/kernels`). Several processes may fill the cache at once: a file is
//! written under a name of its own and then renamed, and a reader takes no file whose length or
//! checksum is wrong, so that the worst case is to compile again.
//!
//! A checksum says that a file is whole, not whose it is: machine code that anybody else could have
//! written is not loaded, nor is what is no machine code at all. The release's folder is trusted as the
//! program beside it is.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::arch::Arch;
use super::compile;
use super::source::Instance;
use crate::error::{Error, Result};

/// A folder of compiled kernels in place of the one beside the program.
pub const SHIPPED_ENV: &str = "ENGINE_HOST_KERNELS";

const MAGIC: &[u8; 8] = b"EHKERNL1";
const HEADER: usize = MAGIC.len() + 8 + 32;

/// Where compiled kernels are kept.
#[derive(Debug, Clone)]
pub struct KernelCache {
    /// Brought by the release: keyed without the compiler, never written.
    shipped: Option<PathBuf>,
    /// `None` where the user has no home: everything is compiled anew.
    own: Option<PathBuf>,
}

impl KernelCache {
    /// The folders of this process.
    pub fn of_this_process() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let beside = || Some(std::env::current_exe().ok()?.parent()?.join("kernels"));
        let folder = |name: &str| variable(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        Self {
            shipped: variable(SHIPPED_ENV).map(PathBuf::from).or_else(beside),
            own: caches.map(|c| c.join("engine-host").join("kernels")),
        }
    }

    /// The folders given.
    pub fn in_folders(shipped: Option<PathBuf>, own: Option<PathBuf>) -> Self {
        Self { shipped, own }
    }

    /// The machine code of an instance: shipped, cached, or compiled now and then cached. A cache that
    /// cannot be written costs time, not the run.
    ///
    /// # Errors
    /// [`Error::Library`] where it would have to be compiled and there is no compiler;
    /// [`Error::Kernel`] where it does not compile.
    pub fn cubin(&self, instance: &Instance, arch: Arch) -> Result<Vec<u8>> {
        let shipped = |folder: &PathBuf| Ok(read(&folder.join(shipped_name(instance, arch)?)));
        if let Some(cubin) = self.shipped.as_ref().map(shipped).transpose()?.flatten() {
            return Ok(cubin);
        }
        let compiler = compile::compiler_version().map_err(|e| {
            Error::Library(format!("kernels/{instance} is not compiled for {arch}: {e}"))
        })?;
        let name = file_name(instance, arch, &instance.digest(arch, &compiler)?);
        let own = self.own.as_ref().filter(|folder| !is_open_to_others(folder));
        let path = own.map(|folder| folder.join(name));
        let written_by_us = path.as_deref().filter(|path| !is_open_to_others(path));
        if let Some(cubin) = written_by_us.and_then(read) {
            return Ok(cubin);
        }
        let cubin = compile::compile(instance, arch)?;
        if let Some(path) = path {
            // Another process may have been faster, or the disk is full: the code is good either way.
            let _ = write(&path, &cubin);
        }
        Ok(cubin)
    }

    /// Puts the machine code of an instance into the shipped folder, for a release.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the file cannot be written.
    pub fn ship(&self, instance: &Instance, arch: Arch, cubin: &[u8]) -> Result<PathBuf> {
        let folder = self.shipped.as_ref().ok_or_else(|| {
            Error::Kernel("there is no folder for the kernels of a release".to_owned())
        })?;
        let path = folder.join(shipped_name(instance, arch)?);
        write(&path, cubin)
            .map_err(|e| Error::Kernel(format!("{} cannot be written: {e}", path.display())))?;
        Ok(path)
    }
}

fn shipped_name(instance: &Instance, arch: Arch) -> Result<String> {
    Ok(file_name(instance, arch, &instance.digest(arch, "")?))
}

fn file_name(instance: &Instance, arch: Arch, digest: &str) -> String {
    let stem = instance.source().trim_end_matches(".cu");
    format!("{stem}-{arch}-{digest}.cubin")
}

/// The contents of a complete file; `None` for one that is missing, torn or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (checksum, contents) = rest.split_first_chunk::<32>()?;
    let is_whole = magic == MAGIC
        && u64::from_le_bytes(*len) == contents.len() as u64
        && blake3::hash(contents) == blake3::Hash::from_bytes(*checksum);
    if !is_whole {
        return None;
    }
    bytes.drain(..HEADER);
    is_cubin(&bytes).then_some(bytes)
}

/// Whether these are the sections of an ELF file for NVIDIA's devices. The driver is told no length: it
/// believes what the header says, and takes anything else for text that ends with a zero.
fn is_cubin(bytes: &[u8]) -> bool {
    const ELF_64_BIT: &[u8] = b"\x7fELF\x02\x01";
    const EM_CUDA: u64 = 190;
    let number = |at: usize, len: usize| {
        let mut all = [0; 8];
        all[..len].copy_from_slice(bytes.get(at..at + len)?);
        Some(u64::from_le_bytes(all))
    };
    let ends_at = |table: usize, size: usize| {
        let entries = number(size, 2)?.checked_mul(number(size + 2, 2)?)?;
        number(table, 8)?.checked_add(entries)
    };
    // Program headers and section headers, by the offsets of their place and of the size of one.
    let tables = [ends_at(32, 54), ends_at(40, 58)];
    bytes.len() >= 64
        && bytes.starts_with(ELF_64_BIT)
        && number(18, 2) == Some(EM_CUDA)
        && tables.iter().all(|end| end.is_some_and(|end| end <= bytes.len() as u64))
}

/// Whether another user than this process's or root owns a file or folder, or everybody may write to it.
/// What does not exist is nobody's.
fn is_open_to_others(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let Ok(facts) = fs::metadata(path) else { return false };
    // SAFETY: takes nothing and always succeeds.
    let own = unsafe { libc::geteuid() };
    facts.mode() & 0o002 != 0 || ![0, own].contains(&facts.uid())
}

/// Writes a file so that others see all of it or nothing.
fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Random: processes of several containers have the same numbers, and so have the copies of this
    // crate that plugins bring.
    let unique = RandomState::new().build_hasher().finish();
    let temporary = folder.join(format!(".{name}.{unique:016x}"));
    let mut file = fs::File::create_new(&temporary)?;
    let written = (|| {
        file.write_all(MAGIC)?;
        file.write_all(&(contents.len() as u64).to_le_bytes())?;
        file.write_all(blake3::hash(contents).as_bytes())?;
        file.write_all(contents)?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of machine code without sections, then `contents`.
    fn machine_code(contents: &[u8]) -> Vec<u8> {
        let mut code = b"\x7fELF\x02\x01\x01".to_vec();
        code.resize(18, 0);
        code.extend(190u16.to_le_bytes());
        code.resize(64, 0);
        code.extend(contents);
        code
    }

    #[test]
    fn what_is_written_is_read_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/kernel.cubin");
        let contents: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let contents = machine_code(&contents);
        assert_eq!(read(&path), None);
        write(&path, &contents).unwrap();
        assert_eq!(read(&path).unwrap(), contents);

        let whole = fs::read(&path).unwrap();
        for len in [0, 3, HEADER - 1, HEADER, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(read(&path), None, "cut to {len} bytes");
        }
        for at in [0, 9, 20, HEADER, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path), None, "byte {at} changed");
        }
        let mut longer = whole.clone();
        longer.push(0);
        fs::write(&path, &longer).unwrap();
        assert_eq!(read(&path), None, "a byte too many");
        write(&path, &contents).unwrap();
        assert_eq!(read(&path).unwrap(), contents, "a bad file is replaced");
    }

    #[test]
    fn writers_at_once_leave_one_whole_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel.cubin");
        let contents = |writer: u8| machine_code(&vec![writer; 100_000]);
        std::thread::scope(|s| {
            for writer in 0..8u8 {
                let path = &path;
                s.spawn(move || {
                    for _ in 0..20 {
                        write(path, &contents(writer)).unwrap();
                        let seen = read(path).expect("a rename is atomic");
                        assert!(seen[64..].iter().all(|&b| b == seen[64]));
                        assert_eq!(seen.len(), 100_064);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_shipped_kernel_needs_no_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folders(Some(folder.path().to_owned()), None);
        let instance = Instance::of("fill.cu");
        let code = machine_code(b"instructions");
        let path = cache.ship(&instance, Arch::SM_90A, &code).unwrap();
        assert_eq!(cache.cubin(&instance, Arch::SM_90A).unwrap(), code);
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("fill-sm_90a-"));
    }

    #[test]
    fn what_is_no_machine_code_is_not_loaded_though_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel.cubin");
        let code = machine_code(b"");
        let with = |at: usize, bytes: &[u8]| {
            let mut code = code.clone();
            code[at..at + bytes.len()].copy_from_slice(bytes);
            code
        };
        let far = u64::MAX.to_le_bytes();
        let bad = [
            b"".to_vec(),
            b".version 8.0 and no zero".to_vec(),
            code[..63].to_vec(),
            with(4, &[1]),
            with(18, &62u16.to_le_bytes()),
            with(40, &65u64.to_le_bytes()),
            with(32, &far),
            // 64 sections of 64 bytes, in a file of 64 bytes.
            with(58, &[64, 0, 64, 0]),
        ];
        for contents in bad {
            write(&path, &contents).unwrap();
            assert_eq!(read(&path), None, "{contents:?}");
        }
        write(&path, &code).unwrap();
        assert!(read(&path).is_some());
    }

    #[test]
    fn what_the_compiler_makes_is_machine_code() {
        for arch in Arch::RELEASED {
            match compile::compile(&Instance::of("fill.cu"), arch) {
                Ok(code) => assert!(is_cubin(&code), "{arch}"),
                Err(Error::Library(why)) => return eprintln!("not checked: {why}"),
                Err(e) => panic!("{e}"),
            }
        }
    }

    #[test]
    fn what_anybody_may_write_is_open_to_others() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let open = |mode| {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
            is_open_to_others(folder.path())
        };
        assert_eq!([open(0o700), open(0o755), open(0o777)], [false, false, true]);
        // The sticky bit keeps a file from being replaced, not from being put there first.
        assert!(open(0o1777));
        assert!(!is_open_to_others(&folder.path().join("missing")));
    }
}
