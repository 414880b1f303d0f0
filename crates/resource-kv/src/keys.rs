//! Keys of pages: what makes two pages hold the same.
//!
//! A page's key covers its own tokens and, through its parent's key, everything before it. Keys are
//! the same in every process and every build; `docs/prefix-keys.md` has the definition for other
//! implementations, and the vectors that the test below checks.

/// A link of the chain. All 32 bytes go into the next link; the index looks pages up by [`short`].
pub(crate) type Link = [u8; 32];

/// What the index keeps of a link.
pub(crate) type Key = u128;

/// Sets these digests apart from all others that blake3 makes.
const CONTEXT: &str = "engine-host 2026-11 kv prefix root";

/// The first 128 bits of a link.
pub(crate) fn short(link: &Link) -> Key {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&link[..16]);
    Key::from_le_bytes(bytes)
}

/// Makes the link that a stream's first page hangs on. Every part has a tag and a length, so that no
/// two lists of parts read alike.
pub(crate) fn root(parts: &[(&str, &[u8])]) -> Link {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    for (tag, value) in parts {
        for bytes in [tag.as_bytes(), value] {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        }
    }
    *hasher.finalize().as_bytes()
}

/// The link of a page with these tokens after `parent`: one compression for up to 16 tokens.
pub(crate) fn link(parent: &Link, tokens: &[u32]) -> Link {
    let hasher = |bytes: &[u8]| *blake3::keyed_hash(parent, bytes).as_bytes();
    if cfg!(target_endian = "little") {
        return hasher(bytemuck::cast_slice(tokens));
    }
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    hasher(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn numbers(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    #[test]
    fn links_are_those_of_the_document() {
        let root = root(&[
            ("engine", b"root"),
            ("kv salt", b""),
            ("page size", &16u32.to_le_bytes()),
            ("label", b"main"),
            ("request salt", b""),
        ]);
        let mut links = vec![root];
        for page in 0..4 {
            links.push(link(&links[page as usize], &numbers(page * 16..page * 16 + 16)));
        }
        let document = include_str!("../../../docs/prefix-keys.md");
        for (i, link) in links.iter().enumerate() {
            let line = format!("| {i} | `{}` |", hex(link));
            assert!(document.contains(&line), "docs/prefix-keys.md lacks {line}");
        }
        assert_eq!(hex(&short(&links[1]).to_le_bytes()), hex(&links[1])[..32]);
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let roots = [
            root(&[("adapter", b"X"), ("salt", b"")]),
            root(&[("adapter", b""), ("salt", b"X")]),
            root(&[("adapter", b"X")]),
            root(&[("adapte", b"rX")]),
            root(&[("adapter", b"Xsalt")]),
        ];
        for (i, a) in roots.iter().enumerate() {
            assert!(roots[..i].iter().all(|b| a != b));
        }
    }
}
