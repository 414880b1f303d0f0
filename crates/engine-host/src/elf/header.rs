//! Checks of an ELF image against what the dynamic linker takes on trust.
//!
//! The linker maps segments without asking whether the file is long enough (a truncated file is a
//! SIGBUS later), obeys a request for an executable stack, and loads whatever other libraries the
//! file names. All reads here are checked against the size of the file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::dynamic::Dynamic;
use super::note::PluginNote;

const EHDR_SIZE: u64 = 64;
const PHDR_SIZE: u64 = 56;

const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const EM_AARCH64: u16 = 183;
const PN_XNUM: u16 = 0xffff;

pub(super) const PT_LOAD: u32 = 1;
pub(super) const PT_DYNAMIC: u32 = 2;
pub(super) const PT_NOTE: u32 = 4;
const PT_TLS: u32 = 7;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

/// Sections that are read whole are refused beyond this; a real plugin's are a few KiB.
const MAX_TABLE_BYTES: u64 = 64 << 20;

/// More memory than this no plugin's statics need.
const MAX_MEMORY_BYTES: u64 = 4 << 30;

/// Thread-local memory comes once for every thread of the process.
const MAX_TLS_BYTES: u64 = 16 << 20;

/// The smallest pages there are: where a segment begins within one, it must begin in the file too.
const PAGE_SIZE: u64 = 4096;

/// Checks that `file`, of `size` bytes, is a shared library that this process can map safely, and
/// reads its note. The error is one line without the file's name.
pub fn check_image(file: &File, size: u64) -> Result<Option<PluginNote>, String> {
    examine(file, size).map(|(note, _)| note)
}

/// As [`check_image`], with what is allowed and may surprise.
pub(super) fn examine(file: &File, size: u64) -> Result<(Option<PluginNote>, Vec<String>), String> {
    let image = Image { file, size };
    let header = Header::read(&image)?;
    let segments = header.segments(&image)?;
    check_loads(&segments)?;
    check_thread_locals(&segments)?;
    check_stack(&segments)?;
    let dynamic = Dynamic::read(&image, &segments)?;
    dynamic.check_flags()?;
    dynamic.check_needed(&image, &segments)?;
    let note = PluginNote::read(&image, &segments)?;
    if note.is_some() {
        dynamic.check_own_name(&image, &segments)?;
    }
    Ok((note, dynamic.warnings(&image, &segments)))
}

/// The file with its size; every read stays inside.
pub(super) struct Image<'f> {
    file: &'f File,
    size: u64,
}

impl Image<'_> {
    pub(super) fn read(&self, what: &str, offset: u64, len: u64) -> Result<Vec<u8>, String> {
        self.contains(what, offset, len)?;
        if len > MAX_TABLE_BYTES {
            return Err(format!("{what} has {len} bytes, which no plugin needs"));
        }
        let mut bytes = vec![0; usize::try_from(len).map_err(|e| e.to_string())?];
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|error| format!("{what} cannot be read: {error}"))?;
        Ok(bytes)
    }

    fn contains(&self, what: &str, offset: u64, len: u64) -> Result<(), String> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(()),
            Some(end) => Err(format!(
                "truncated: {what} ends at byte {end}, the file has {}: copy it again",
                self.size
            )),
            None => Err(format!("corrupt: {what} starts at byte {offset} and has {len} bytes")),
        }
    }
}

/// Little-endian fields of a record; a field outside reads as 0, which no caller's layout allows.
pub(super) struct Fields<'b>(pub(super) &'b [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..at + N).and_then(|b| b.try_into().ok()).unwrap_or([0; N])
    }
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }
    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }
    pub(super) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }
}

struct Header {
    segments_at: u64,
    segment_count: u16,
}

impl Header {
    fn read(image: &Image<'_>) -> Result<Self, String> {
        let magic = image.read("the magic number", 0, image.size.min(4))?;
        if magic != *b"\x7fELF" {
            return Err("not an ELF file".to_owned());
        }
        if image.size < EHDR_SIZE {
            return Err(format!("not an ELF file: {} bytes are too few for a header", image.size));
        }
        let bytes = image.read("the ELF header", 0, EHDR_SIZE)?;
        let fields = Fields(&bytes);
        let [class, data, version] = fields.bytes(4);
        if class != 2 {
            return Err("a 32-bit library, the host is 64-bit: rebuild the plugin".to_owned());
        }
        if data != 1 {
            return Err("a big-endian library, the host is little-endian".to_owned());
        }
        if version != 1 {
            return Err(format!("ELF version {version}, only 1 is known"));
        }
        let machine = fields.u16(18);
        if Some(machine) != host_machine() {
            return Err(format!(
                "built for {}, the host is {}: rebuild the plugin",
                machine_name(machine),
                std::env::consts::ARCH
            ));
        }
        match fields.u16(16) {
            ET_DYN => {}
            1 => return Err("an object file, not a shared library (link a cdylib)".to_owned()),
            2 => return Err("an executable, not a shared library".to_owned()),
            4 => return Err("a core dump, not a shared library".to_owned()),
            other => return Err(format!("ELF type {other}, not a shared library")),
        }
        let (entry_size, segment_count) = (fields.u16(54), fields.u16(56));
        if u64::from(entry_size) != PHDR_SIZE {
            return Err(format!("corrupt: program headers of {entry_size} bytes"));
        }
        if segment_count == 0 || segment_count == PN_XNUM {
            return Err(format!("corrupt: {segment_count} program headers"));
        }
        // Nobody maps the section headers, but they are the end of what a linker writes: a file that
        // lacks them was cut.
        let (sections_at, count, size) = (fields.u64(40), fields.u16(60), fields.u16(58));
        if sections_at != 0 {
            let len = u64::from(count) * u64::from(size);
            image.contains("the section header table", sections_at, len)?;
        }
        Ok(Self { segments_at: fields.u64(32), segment_count })
    }

    fn segments(&self, image: &Image<'_>) -> Result<Vec<Segment>, String> {
        let len = u64::from(self.segment_count) * PHDR_SIZE;
        let table = image.read("the program header table", self.segments_at, len)?;
        let segments: Vec<Segment> =
            table.chunks_exact(PHDR_SIZE as usize).map(Segment::parse).collect();
        for (i, segment) in segments.iter().enumerate() {
            let what = format!("segment {i}");
            image.contains(&what, segment.offset, segment.file_size)?;
            let is_memory = [PT_LOAD, PT_TLS].contains(&segment.kind);
            if is_memory && segment.file_size > segment.memory_size {
                return Err(format!("corrupt: {what} is larger in the file than in memory"));
            }
            if is_memory && segment.align > 1 && !segment.align.is_power_of_two() {
                return Err(format!("corrupt: {what} is aligned to {} bytes", segment.align));
            }
        }
        if !segments.iter().any(|segment| segment.kind == PT_LOAD) {
            return Err("corrupt: nothing to load".to_owned());
        }
        Ok(segments)
    }
}

fn host_machine() -> Option<u16> {
    match std::env::consts::ARCH {
        "x86_64" => Some(EM_X86_64),
        "aarch64" => Some(EM_AARCH64),
        _ => None,
    }
}

fn machine_name(machine: u16) -> String {
    match machine {
        3 => "x86 (32-bit)".to_owned(),
        40 => "arm (32-bit)".to_owned(),
        EM_X86_64 => "x86_64".to_owned(),
        EM_AARCH64 => "aarch64".to_owned(),
        21 => "powerpc64".to_owned(),
        22 => "s390x".to_owned(),
        243 => "riscv".to_owned(),
        other => format!("ELF machine {other}"),
    }
}

pub(super) struct Segment {
    pub(super) kind: u32,
    flags: u32,
    pub(super) offset: u64,
    pub(super) address: u64,
    pub(super) file_size: u64,
    memory_size: u64,
    pub(super) align: u64,
}

impl Segment {
    fn parse(bytes: &[u8]) -> Self {
        let fields = Fields(bytes);
        Self {
            kind: fields.u32(0),
            flags: fields.u32(4),
            offset: fields.u64(8),
            address: fields.u64(16),
            file_size: fields.u64(32),
            memory_size: fields.u64(40),
            align: fields.u64(48),
        }
    }
}

/// The linker sizes one mapping by the first and the last segment, and puts the others inside.
fn check_loads(segments: &[Segment]) -> Result<(), String> {
    let (mut end, mut first) = (0, None);
    for (i, segment) in segments.iter().enumerate().filter(|(_, s)| s.kind == PT_LOAD) {
        if segment.address < end {
            return Err(format!("corrupt: segment {i} begins before the end of the one before it"));
        }
        if segment.address % PAGE_SIZE != segment.offset % PAGE_SIZE {
            return Err(format!(
                "corrupt: segment {i} begins elsewhere in a page than in the file"
            ));
        }
        if segment.flags & PF_W != 0 && segment.flags & PF_X != 0 {
            return Err("has memory that is both writable and executable (link without -N)".into());
        }
        end = segment
            .address
            .checked_add(segment.memory_size)
            .ok_or_else(|| format!("corrupt: segment {i} ends beyond the address space"))?;
        let size = end - *first.get_or_insert(segment.address);
        if size > MAX_MEMORY_BYTES {
            return Err(format!("takes {size} bytes of memory, which no plugin needs"));
        }
    }
    Ok(())
}

fn check_thread_locals(segments: &[Segment]) -> Result<(), String> {
    let mut all = segments.iter().filter(|segment| segment.kind == PT_TLS);
    match (all.next(), all.next()) {
        (Some(_), Some(_)) => Err("corrupt: two segments of thread-local memory".to_owned()),
        (Some(one), None) if one.memory_size > MAX_TLS_BYTES => Err(format!(
            "takes {} bytes of memory in every thread, which no plugin needs",
            one.memory_size
        )),
        _ => Ok(()),
    }
}

/// glibc makes the stacks of the whole process executable when a library asks for it. On x86-64 it
/// reads a missing PT_GNU_STACK as such a wish; on aarch64 stacks are not executable by default.
fn check_stack(segments: &[Segment]) -> Result<(), String> {
    let stack = segments.iter().rfind(|segment| segment.kind == PT_GNU_STACK);
    match stack {
        Some(stack) if stack.flags & PF_X == 0 => Ok(()),
        Some(_) => Err("demands an executable stack (link with -z noexecstack)".to_owned()),
        None if cfg!(target_arch = "aarch64") => Ok(()),
        None => Err("has no PT_GNU_STACK header, which means an executable stack (link with \
                     -z noexecstack)"
            .to_owned()),
    }
}
