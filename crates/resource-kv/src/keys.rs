//! Keys of pages: what makes two pages hold the same.
//!
//! A page's key covers its own tokens and, through its parent's key, everything before it. Keys are
//! the same in every process and every build; `docs/prefix-keys.md` has the definition for other
//! implementations, and the vectors that the test below checks.

use device::hash::keyed_hash;

/// A link of the chain, as little-endian words. All of it goes into the next link; the index looks
/// pages up by [`short`].
pub(crate) type Link = [u32; 8];

/// Tokens of a page whose link is one compression.
pub(crate) const BLOCK: usize = 16;

/// What the index keeps of a link.
pub(crate) type Key = u128;

/// Sets these digests apart from all others that blake3 makes.
const CONTEXT: &str = "engine-host 2026-11 kv prefix root";

/// The first 128 bits of a link.
pub(crate) fn short(link: &Link) -> Key {
    link[..4].iter().rev().fold(0, |key, &word| key << 32 | Key::from(word))
}

fn words(digest: &blake3::Hash) -> Link {
    let word = |i: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&digest.as_bytes()[i * 4..][..4]);
        u32::from_le_bytes(bytes)
    };
    std::array::from_fn(word)
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
    words(&hasher.finalize())
}

/// The link of a page with these tokens after `parent`.
pub(crate) fn link(parent: &Link, tokens: &[u32]) -> Link {
    if let Ok(block) = <&[u32; BLOCK]>::try_from(tokens) {
        return keyed_hash(parent, block);
    }
    let mut key = [0; 32];
    key.chunks_exact_mut(4)
        .zip(parent)
        .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    let hash = |bytes: &[u8]| words(&blake3::keyed_hash(&key, bytes));
    if cfg!(target_endian = "little") {
        return hash(bytemuck::cast_slice(tokens));
    }
    hash(&tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn hex(link: &[u32]) -> String {
        bytes(link).iter().map(|b| format!("{b:02x}")).collect()
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
        let key = short(&links[1]).to_le_bytes();
        assert_eq!(key[..], bytes(&links[1])[..16]);
    }

    #[test]
    fn links_of_pages_of_any_size_are_blake3s() {
        for size in [1, 15, 16, 17, 40] {
            let (parent, tokens) = (std::array::from_fn(|i| i as u32 * 7919), numbers(5..5 + size));
            let key: [u8; 32] = bytes(&parent).try_into().unwrap();
            let expected = blake3::keyed_hash(&key, &bytes(&tokens));
            assert_eq!(bytes(&link(&parent, &tokens)), expected.as_bytes());
        }
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
