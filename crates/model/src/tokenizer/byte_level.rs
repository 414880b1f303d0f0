//! GPT-2's way to write bytes as printable characters, so that a vocabulary is a list of strings.
//!
//! Printable Latin-1 bytes stand for themselves; the other 68 are the characters from U+0100 on, in
//! order: a space is `Ġ`, a line feed `Ċ`.

use std::sync::LazyLock;

/// The character of each byte.
pub(super) static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u8 {
        b @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(b),
        _ => {
            let c = char::from_u32(next).unwrap_or_default();
            next += 1;
            c
        }
    })
});

/// Bytes by character, for the characters below U+0144 that `CHARS` holds.
static BYTES: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
    let mut bytes = [None; 0x144];
    for (byte, &c) in CHARS.iter().enumerate() {
        bytes[c as usize] = Some(byte as u8);
    }
    bytes
});

/// Writes the characters of `text`'s bytes.
pub(super) fn encode(text: &str, out: &mut String) {
    out.extend(text.bytes().map(|b| CHARS[usize::from(b)]));
}

/// The bytes that a vocabulary entry stands for; `None` if some character stands for none.
pub(super) fn decode(token: &str) -> Option<Vec<u8>> {
    token.chars().map(|c| BYTES.get(c as usize).copied().flatten()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_characters() {
        assert_eq!(CHARS[usize::from(b' ')], 'Ġ');
        assert_eq!(CHARS[usize::from(b'\n')], 'Ċ');
        assert_eq!(CHARS[usize::from(b'A')], 'A');
        assert_eq!(CHARS[0xAD], 'Ń');
        assert_eq!(decode("Ġhi").as_deref(), Some(b" hi".as_slice()));
        assert_eq!(decode("日"), None);
    }

    #[test]
    fn same_characters_as_the_tokenizers_crate() {
        let theirs = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let ours: std::collections::HashSet<char> = CHARS.iter().copied().collect();
        assert!(theirs.iter().all(|c| ours.contains(c)));
        assert_eq!(ours.len(), 256);
    }
}
