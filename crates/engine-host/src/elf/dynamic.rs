//! The dynamic section of an ELF image: what the linker would do to the process beside mapping.

use super::header::{Fields, Image, PT_DYNAMIC, PT_LOAD, Segment};
use crate::suggest;

const DYN_SIZE: u64 = 16;

const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SONAME: u64 = 14;
const DT_RPATH: u64 = 15;
const DT_TEXTREL: u64 = 22;
const DT_RUNPATH: u64 = 29;
const DT_FLAGS: u64 = 30;
const DT_FLAGS_1: u64 = 0x6fff_fffb;
const DT_AUXILIARY: u64 = 0x7fff_fffd;
const DT_FILTER: u64 = 0x7fff_ffff;
const DF_TEXTREL: u64 = 4;
const SYMBOL_SIZE: u64 = 24;
const STB_GNU_UNIQUE: u8 = 10;
const DF_1_PIE: u64 = 0x0800_0000;

/// Libraries that a plugin may need: the C run time, which is in the process anyway, and the GPU
/// driver's. Any other would have to be found by name in the host's search path, where two plugins
/// that bundle different builds under one name both get the first. Entries end where a version
/// may follow.
const ALLOWED_LIBRARIES: &[&str] = &[
    "libc.so",
    "libm.so",
    "libgcc_s.so",
    "libdl.so",
    "libpthread.so",
    "librt.so",
    "libutil.so",
    "libcuda.so",
    "libcudart.so",
    "libnvrtc.so",
    "libcublas.so",
    "libcublasLt.so",
    "libnccl.so",
    "libnvidia-ml.so",
    "ld-linux-x86-64.so",
    "ld-linux-aarch64.so",
];

/// Those of them that the host itself needs: in the process before any plugin is, so that nobody looks for
/// them.
const IN_PROCESS: &[&str] =
    &["libc.so", "libm.so", "libgcc_s.so", "ld-linux-x86-64.so", "ld-linux-aarch64.so"];

/// Entries of the dynamic section, up to its end mark.
pub(super) struct Dynamic(Vec<(u64, u64)>);

impl Dynamic {
    pub(super) fn read(image: &Image<'_>, segments: &[Segment]) -> Result<Self, String> {
        let mut sections = segments.iter().filter(|segment| segment.kind == PT_DYNAMIC);
        let section = sections.next().ok_or("not a shared library: no dynamic section")?;
        // The linker would follow the last one, other tools the first.
        if sections.next().is_some() {
            return Err("corrupt: two dynamic sections".to_owned());
        }
        // The linker reads the section where it is mapped, not where its own header says it is.
        let offset = file_offset(segments, section.address)
            .filter(|&offset| offset == section.offset)
            .ok_or("corrupt: the dynamic section lies outside the loaded segments")?;
        let bytes = image.read("the dynamic section", offset, section.file_size)?;
        let mut entries = Vec::new();
        for entry in bytes.chunks_exact(DYN_SIZE as usize) {
            let fields = Fields(entry);
            match fields.u64(0) {
                DT_NULL => return Ok(Self(entries)),
                tag => entries.push((tag, fields.u64(8))),
            }
        }
        Err("corrupt: the dynamic section has no end".to_owned())
    }

    fn values(&self, tag: u64) -> impl Iterator<Item = u64> {
        self.0.iter().filter(move |entry| entry.0 == tag).map(|entry| entry.1)
    }

    pub(super) fn check_flags(&self) -> Result<(), String> {
        if self.values(DT_FLAGS_1).any(|flags| flags & DF_1_PIE != 0) {
            return Err("a position-independent executable, not a shared library".to_owned());
        }
        let textrel_flag = self.values(DT_FLAGS).any(|flags| flags & DF_TEXTREL != 0);
        if textrel_flag || self.values(DT_TEXTREL).next().is_some() {
            return Err("has text relocations (rebuild with -fPIC)".to_owned());
        }
        Ok(())
    }

    /// Which libraries it brings into the process.
    pub(super) fn check_needed(
        &self,
        image: &Image<'_>,
        segments: &[Segment],
    ) -> Result<(), String> {
        let tags = [DT_NEEDED, DT_AUXILIARY, DT_FILTER];
        if tags.iter().all(|&tag| self.values(tag).next().is_none()) {
            return Ok(());
        }
        let strings = self.strings(image, segments)?;
        let named = |what: &str, tag: u64| -> Result<Vec<String>, String> {
            self.values(tag).map(|at| text_at(&strings, at, what)).collect()
        };
        // Filters are loaded like needed libraries.
        let needed = [DT_NEEDED, DT_AUXILIARY, DT_FILTER].map(|tag| named("a needed library", tag));
        let paths = [DT_RPATH, DT_RUNPATH].map(|tag| named("a search path", tag));
        let mut paths = paths.into_iter().collect::<Result<Vec<_>, _>>()?.concat().into_iter();
        let path = paths.find(|path| !path.is_empty());
        for name in needed.into_iter().collect::<Result<Vec<_>, _>>()?.concat() {
            if !is_one_of(&name, ALLOWED_LIBRARIES) {
                return Err(format!(
                    "needs {name:?}, which is not a library plugins may need ({}): link it \
                     statically",
                    suggest::listed(
                        ALLOWED_LIBRARIES.iter().map(|entry| entry.trim_end_matches(".so"))
                    )
                ));
            }
            if let Some(path) = path.as_ref().filter(|_| !is_one_of(&name, IN_PROCESS)) {
                return Err(format!(
                    "needs {name:?} and says to look for it in {path:?}, where anything could be: link \
                     without -rpath"
                ));
            }
        }
        Ok(())
    }

    /// Whether a plugin goes by a name that is not its own.
    pub(super) fn check_own_name(
        &self,
        image: &Image<'_>,
        segments: &[Segment],
    ) -> Result<(), String> {
        let Some(at) = self.values(DT_SONAME).last() else { return Ok(()) };
        let name = text_at(&self.strings(image, segments)?, at, "the library")?;
        // The linker answers everybody who needs a library of this name with this one.
        match is_one_of(&name, ALLOWED_LIBRARIES) {
            false => Ok(()),
            true => Err(format!(
                "calls itself {name:?}, and would stand in for that library in the whole process: link \
                 with another -soname"
            )),
        }
    }

    /// What other plugins would share with this one although each is loaded for itself.
    pub(super) fn warnings(&self, image: &Image<'_>, segments: &[Segment]) -> Vec<String> {
        // Damaged tables are not what this is about: the linker, or a child process, finds them.
        match self.unique_symbols(image, segments) {
            Some(count @ 1..) => vec![format!(
                "{count} of its symbols are unique in the process (C++ template statics): plugins that \
                 have the same share them; build with -fno-gnu-unique or hidden visibility"
            )],
            _ => Vec::new(),
        }
    }

    fn unique_symbols(&self, image: &Image<'_>, segments: &[Segment]) -> Option<usize> {
        let (symbols, strings) = (self.values(DT_SYMTAB).last()?, self.values(DT_STRTAB).last()?);
        // Nothing says how many symbols there are; linkers put the strings behind them.
        let len = strings.checked_sub(symbols)? / SYMBOL_SIZE * SYMBOL_SIZE;
        let table = image.read("the symbol table", file_offset(segments, symbols)?, len).ok()?;
        let unique = |symbol: &&[u8]| symbol[4] >> 4 == STB_GNU_UNIQUE;
        Some(table.chunks_exact(SYMBOL_SIZE as usize).filter(unique).count())
    }

    fn strings(&self, image: &Image<'_>, segments: &[Segment]) -> Result<Vec<u8>, String> {
        // The linker follows the last entry of a tag.
        let address = self.values(DT_STRTAB).last();
        let len = self.values(DT_STRSZ).last();
        let (Some(address), Some(len)) = (address, len) else {
            return Err("corrupt: no string table".to_owned());
        };
        let offset = file_offset(segments, address)
            .ok_or("corrupt: the string table lies outside the loaded segments")?;
        image.read("the string table", offset, len)
    }
}

/// Where the byte at virtual `address` lies in the file. Later segments are mapped over earlier
/// ones, so the last that covers the address counts.
fn file_offset(segments: &[Segment], address: u64) -> Option<u64> {
    segments.iter().filter(|segment| segment.kind == PT_LOAD).rev().find_map(|segment| {
        let within = address.checked_sub(segment.address)?;
        if within < segment.file_size { segment.offset.checked_add(within) } else { None }
    })
}

/// The text at this place of the string table.
fn text_at(strings: &[u8], at: u64, of: &str) -> Result<String, String> {
    let rest = usize::try_from(at).ok().and_then(|at| strings.get(at..));
    let text =
        rest.and_then(|rest| rest.split(|&b| b == 0).next().filter(|n| n.len() < rest.len()));
    match text {
        Some(text) => Ok(String::from_utf8_lossy(text).into_owned()),
        None => Err(format!("corrupt: the name of {of} lies outside the string table")),
    }
}

fn is_one_of(name: &str, list: &[&str]) -> bool {
    list.iter().any(|allowed| {
        name.strip_prefix(allowed).is_some_and(|version| {
            version.is_empty()
                || (version.starts_with('.')
                    && version
                        .split('.')
                        .skip(1)
                        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{ALLOWED_LIBRARIES, is_one_of};

    #[test]
    fn allow_list_knows_names_and_versions() {
        for name in
            ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libcuda.so"]
        {
            assert!(is_one_of(name, ALLOWED_LIBRARIES), "{name}");
        }
        for name in [
            "",
            "libc.so.",
            "libc.so.6evil",
            "libcc.so",
            "libcx.so.1",
            "./libc.so.6",
            "libstdc++.so.6",
        ] {
            assert!(!is_one_of(name, ALLOWED_LIBRARIES), "{name}");
        }
    }
}
