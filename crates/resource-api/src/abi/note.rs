//! The ELF note of a plugin: what it says about itself to those who have not run any of it yet.
//!
//! A note named `RESAPI` of type 1, whose content is text, one `key value` per line, in a block of
//! fixed size filled up with zeros. Readers skip keys that they do not know.
//!
//! | key | value |
//! |---|---|
//! | `plugin` | name and version of the crate |
//! | `api` | version of the contract |
//! | `rustc` | the compiler |
//! | `panic` | `unwind` or `abort` |
//! | `profile` | `debug` or `release` |
//! | `feature` | an instruction set extension that all of the code may use; one line each |
//! | `kind` | a kind that it builds; one line each |
//! | `provides` | a capability of what it builds; one line each |

/// Name of the note, with its closing zero.
pub const NAME: [u8; 8] = *b"RESAPI\0\0";
/// Length of the name in the note's header: without the padding.
pub const NAME_LEN: u32 = 7;
/// Type of the note.
pub const TYPE: u32 = 1;
/// Longest content, with its closing zero.
const MOST: usize = 4096;

/// Calls `$with!` with the names of all instruction set extensions that a note can tell of, so that
/// plugins and hosts have one list. Those that every CPU of the architecture has are not in it.
#[macro_export]
#[doc(hidden)]
macro_rules! with_cpu_features {
    ($($with:tt)+) => {
        $($with)+!(
            "sse3" "ssse3" "sse4.1" "sse4.2" "popcnt" "avx" "avx2" "fma" "f16c" "bmi1" "bmi2" "lzcnt"
            "movbe" "adx" "aes" "pclmulqdq" "sha" "gfni" "vaes" "vpclmulqdq" "rdrand" "rdseed" "xsave"
            "xsavec" "xsaveopt" "xsaves" "avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl"
            "avx512ifma" "avx512vbmi" "avx512vbmi2" "avx512vnni" "avx512bitalg" "avx512vpopcntdq"
            "avx512bf16" "avx512fp16" "avx512vp2intersect" "avxvnni" "avxifma" "avxneconvert"
            "avxvnniint8" "avxvnniint16" "cmpxchg16b" "sha512" "sm3" "sm4" "kl" "widekl" "sse4a" "tbm"
        )
    };
}

/// Names of [`with_cpu_features`], each with whether the compiler may use the extension everywhere in
/// the calling crate.
#[macro_export]
#[doc(hidden)]
macro_rules! enabled_cpu_features {
    ($($name:tt)*) => { &[$(($name, cfg!(target_feature = $name))),*] };
}

/// The note as it lies in the file: `N` is [`content_len`] of what it says.
#[repr(C, align(4))]
#[derive(Debug)]
pub struct Note<const N: usize> {
    name_len: u32,
    content_len: u32,
    kind: u32,
    name: [u8; 8],
    content: [u8; N],
}

/// What `export_plugin!` knows about the library it is in.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// Name of the crate.
    pub name: &'a str,
    /// Its version.
    pub version: &'a str,
    /// Whether panics unwind.
    pub unwinds: bool,
    /// Instruction set extensions, and whether the compiler may use them everywhere.
    pub features: &'a [(&'a str, bool)],
    /// Whether it was built with debug assertions.
    pub is_debug: bool,
    /// Its kinds.
    pub kinds: &'a [&'a str],
    /// For each kind, what it provides.
    pub provides: &'a [&'a [&'a str]],
}

/// Bytes of the content, a multiple of four and closed by zero. Fails to compile above 4 KiB.
pub const fn content_len(about: &About<'_>) -> usize {
    text(about).len / 4 * 4 + 4
}

impl<const N: usize> Note<N> {
    /// The note that says this.
    pub const fn new(about: &About<'_>) -> Self {
        let text = text(about);
        let mut content = [0; N];
        let mut i = 0;
        while i < text.len {
            content[i] = text.bytes[i];
            i += 1;
        }
        Self { name_len: NAME_LEN, content_len: N as u32, kind: TYPE, name: NAME, content }
    }
}

const fn text(about: &About<'_>) -> Text {
    let mut text = Text { bytes: [0; MOST], len: 0 };
    text = text.more("plugin ").more(about.name).more(" ").more(about.version).more("\n");
    text = text.line("api ", super::root::API_VERSION);
    text = text.line("rustc ", env!("RESOURCE_API_RUSTC"));
    text = text.line("panic ", if about.unwinds { "unwind" } else { "abort" });
    text = text.line("profile ", if about.is_debug { "debug" } else { "release" });
    let mut i = 0;
    while i < about.features.len() {
        if about.features[i].1 {
            text = text.line("feature ", about.features[i].0);
        }
        i += 1;
    }
    let mut i = 0;
    while i < about.kinds.len() {
        text = text.line("kind ", about.kinds[i]);
        i += 1;
    }
    let mut i = 0;
    while i < about.provides.len() {
        let mut j = 0;
        while j < about.provides[i].len() {
            text = text.line("provides ", about.provides[i][j]);
            j += 1;
        }
        i += 1;
    }
    text
}

struct Text {
    bytes: [u8; MOST],
    len: usize,
}

impl Text {
    const fn line(self, key: &str, value: &str) -> Self {
        self.more(key).more(value).more("\n")
    }

    const fn more(mut self, piece: &str) -> Self {
        let piece = piece.as_bytes();
        assert!(self.len + piece.len() + 4 < MOST, "the plugin's kinds do not fit into its note");
        let mut i = 0;
        while i < piece.len() {
            self.bytes[self.len] = piece[i];
            self.len += 1;
            i += 1;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_lines_of_text() {
        const ABOUT: About<'_> = About {
            name: "resource-x",
            version: "0.1.0",
            unwinds: true,
            features: &[("avx2", true), ("avx512f", false)],
            is_debug: false,
            kinds: &["a", "b"],
            provides: &[&["x.a/1"], &["x.b/1", "x.c/2"]],
        };
        let note = Note::<{ content_len(&ABOUT) }>::new(&ABOUT);
        let text = std::str::from_utf8(&note.content).unwrap().trim_end_matches('\0');
        let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with("rustc ")).collect();
        assert_eq!(
            lines,
            [
                "plugin resource-x 0.1.0",
                "api 1.0",
                "panic unwind",
                "profile release",
                "feature avx2",
                "kind a",
                "kind b",
                "provides x.a/1",
                "provides x.b/1",
                "provides x.c/2"
            ]
        );
        assert!(text.contains("\nrustc rustc 1."), "{text}");
        // As `readelf -n` expects it: the header, then the name padded to four bytes.
        assert_eq!(std::mem::offset_of!(Note<8>, content), 12 + 8);
        assert_eq!(std::mem::size_of_val(&note), 20 + note.content.len());
        assert_eq!(note.content.last(), Some(&0));
    }
}
