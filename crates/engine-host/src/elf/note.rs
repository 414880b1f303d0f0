//! What a library says about itself in the note that `export_plugin!` writes, read from the file
//! without running anything of it.

use resource_api::abi::note::{NAME, NAME_LEN, TYPE};

use super::header::{Fields, Image, PT_NOTE, Segment};

pub use resource_api::abi::library::{MOST_KINDS, MOST_NAME_BYTES};

/// Larger notes are not ours.
const MAX_BYTES: u64 = 64 << 10;

/// The content of a plugin's note. All text is the file's own claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginNote {
    /// Name and version of its crate.
    pub plugin: String,
    /// Version of the contract.
    pub api: String,
    /// The compiler.
    pub rustc: String,
    /// `unwind` or `abort`.
    pub panic: String,
    /// `debug` or `release`; empty where it does not say.
    pub profile: String,
    /// Instruction set extensions that all of its code may use.
    pub features: Vec<String>,
    /// Kinds that it builds.
    pub kinds: Vec<String>,
    /// Capabilities of what it builds.
    pub provides: Vec<String>,
}

impl PluginNote {
    /// Finds the note among the segments; `None` when there is none.
    pub(super) fn read(image: &Image<'_>, segments: &[Segment]) -> Result<Option<Self>, String> {
        let mut found: Option<Vec<u8>> = None;
        for segment in segments.iter().filter(|s| s.kind == PT_NOTE && s.file_size <= MAX_BYTES) {
            let bytes = image.read("a note", segment.offset, segment.file_size)?;
            for content in contents(&bytes, segment.align.max(4) as usize) {
                // Two segments may cover the same note; two notes would say two things.
                match &found {
                    Some(known) if known != content => {
                        return Err("corrupt: it carries two RESAPI notes".to_owned());
                    }
                    _ => found = Some(content.to_vec()),
                }
            }
        }
        let Some(content) = found else { return Ok(None) };
        let text = content.split(|&b| b == 0).next().unwrap_or_default();
        let is_plain = |b: &u8| b.is_ascii_graphic() || b" \n".contains(b);
        match std::str::from_utf8(text) {
            Ok(text) if text.bytes().all(|b| is_plain(&b)) => Self::parse(text).map(Some),
            _ => Err("corrupt: its RESAPI note is not plain text".to_owned()),
        }
    }

    /// Keys that are not known are of later versions.
    fn parse(text: &str) -> Result<Self, String> {
        let mut note = Self::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once(' ')) {
            let value = value.to_owned();
            let only = match key {
                "plugin" => &mut note.plugin,
                "api" => &mut note.api,
                "rustc" => &mut note.rustc,
                "panic" => &mut note.panic,
                "profile" => &mut note.profile,
                "feature" => {
                    note.features.push(value);
                    continue;
                }
                "kind" => {
                    note.kinds.push(value);
                    continue;
                }
                "provides" => {
                    note.provides.push(value);
                    continue;
                }
                _ => continue,
            };
            if !only.is_empty() {
                return Err(format!("corrupt: its RESAPI note says {key:?} twice"));
            }
            *only = value;
        }
        Ok(note)
    }

    /// Why this process cannot run the library; one line that says what to do.
    pub fn check(&self) -> Result<(), String> {
        let names = self.kinds.iter().chain(&self.provides);
        if self.kinds.len() > MOST_KINDS || self.provides.len() > MOST_KINDS {
            let (kinds, provides) = (self.kinds.len(), self.provides.len());
            return Err(format!(
                "its note names {kinds} kinds and {provides} capabilities, more than the {MOST_KINDS} \
                 of each that a plugin may have"
            ));
        }
        if let Some(long) = names.map(String::len).find(|&len| len > MOST_NAME_BYTES) {
            return Err(format!("its note has a name of {long} bytes"));
        }
        let host = resource_api::API_VERSION;
        if self.api.split('.').next() != host.split('.').next() {
            return Err(format!(
                "was built against contract {:?}, this host speaks {host}: rebuild it",
                self.api
            ));
        }
        if self.panic != "unwind" {
            return Err(format!(
                "was built with panic={}: a panic in it would end the process; build it with \
                 panic=unwind",
                self.panic
            ));
        }
        let lacking: Vec<&str> =
            self.features.iter().map(String::as_str).filter(|f| !cpu_has(f)).collect();
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "was built for a CPU with {}, which this one lacks: build it without \
                 target-cpu=native",
                lacking.join(", ")
            )),
        }
    }
}

/// The contents of our notes in a segment of notes.
fn contents(bytes: &[u8], align: usize) -> Vec<&[u8]> {
    let (mut at, mut found) = (0usize, Vec::new());
    while let Some((content, next)) = note_at(bytes, at, align) {
        found.extend(content);
        at = next;
    }
    found
}

/// The note at a place, if it is ours, and where the next one begins.
fn note_at(bytes: &[u8], at: usize, align: usize) -> Option<(Option<&[u8]>, usize)> {
    let fields = Fields(bytes.get(at..at.checked_add(12)?)?);
    let (name_len, content_len) = (fields.u32(0), fields.u32(4));
    let name_at = at + 12;
    // The name is padded to four bytes in every note, whatever the segment's alignment.
    let content_at = name_at.checked_add((name_len as usize).checked_next_multiple_of(4)?)?;
    let content_at = content_at.checked_next_multiple_of(align.min(8))?;
    let end = content_at.checked_add(content_len as usize)?;
    let is_ours = name_len == NAME_LEN
        && fields.u32(8) == TYPE
        && bytes.get(name_at..name_at + NAME.len()) == Some(&NAME[..]);
    let content = if is_ours { Some(bytes.get(content_at..end)?) } else { None };
    Some((content, end.checked_next_multiple_of(align.min(8))?))
}

/// Whether this CPU has what a note names. What the host does not know, the code may rely on all the
/// same, so it counts as missing.
#[cfg(target_arch = "x86_64")]
pub fn cpu_has(feature: &str) -> bool {
    macro_rules! detected {
        ($($name:tt)*) => {
            match feature {
                $($name => std::arch::is_x86_feature_detected!($name),)*
                _ => false,
            }
        };
    }
    resource_api::with_cpu_features!(detected)
}

/// The names are those of x86-64.
#[cfg(not(target_arch = "x86_64"))]
pub fn cpu_has(_feature: &str) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(name: &[u8], kind: u32, content: &[u8], align: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [name.len() as u32, content.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(name);
        bytes.resize(bytes.len().next_multiple_of(4).next_multiple_of(align), 0);
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(align), 0);
        bytes
    }

    #[test]
    fn ours_is_found_among_others() {
        for align in [4, 8] {
            let others = [note(b"GNU\0", 3, &[7; 20], align), note(b"RESAPI\0", 9, b"no", align)];
            let ours = note(b"RESAPI\0", 1, b"kind a\nkind b\nlater x\n\0\0\0", align);
            let all = [others.concat(), ours].concat();
            let [content] = contents(&all, align)[..] else { panic!("one is ours") };
            let text = std::str::from_utf8(content).unwrap().trim_end_matches('\0');
            let note = PluginNote::parse(text).unwrap();
            assert_eq!(note.kinds, ["a", "b"]);
            assert!(contents(&others.concat(), align).is_empty());
            assert_eq!(contents(&[&all[..], &all].concat(), align).len(), 2);
            for end in 0..all.len() {
                // Any cut is either complete or nothing; it never panics.
                let _ = contents(&all[..end], align);
            }
        }
        assert!(contents(&[0xff; 64], 4).is_empty(), "lengths past the end");
        let twice = PluginNote::parse("panic abort\nkind a\npanic unwind\n").unwrap_err();
        assert_eq!(twice, "corrupt: its RESAPI note says \"panic\" twice");
    }

    #[test]
    fn what_cannot_run_here_is_refused_with_what_to_do() {
        let good = PluginNote { api: "1.0".into(), panic: "unwind".into(), ..Default::default() };
        assert_eq!(good.check(), Ok(()));
        let message = |note: PluginNote| note.check().unwrap_err();
        let abort = message(PluginNote { panic: "abort".into(), ..good.clone() });
        assert!(abort.starts_with("was built with panic=abort"), "{abort}");
        let old = message(PluginNote { api: "2.0".into(), ..good.clone() });
        assert!(old.contains("contract \"2.0\", this host speaks 1.0"), "{old}");
        let exotic = message(PluginNote { features: vec!["avx4096".into()], ..good });
        assert!(exotic.contains("a CPU with avx4096"), "{exotic}");
    }
}
