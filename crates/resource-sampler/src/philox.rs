//! Philox 4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3" (2011): any number of a sequence, computed from its place alone.

/// The block at `counter` of the sequence with key `key`.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key[0] = key[0].wrapping_add(0x9E37_79B9);
            key[1] = key[1].wrapping_add(0xBB67_AE85);
        }
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
    }
    counter
}

/// The random number for the token at `position` of answer `choice` under `seed`: 53 bits, to be taken
/// as a fraction in [0, 1).
pub fn random_bits(seed: u64, choice: u32, position: u32) -> u64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [a, b, ..] = philox4x32([position, 0, choice, 0], key);
    (u64::from(a) << 32 | u64::from(b)) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of Random123.
    #[test]
    fn published_vectors() {
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        let cases = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([!0; 4], [!0; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (pi, [0xa4093822, 0x299f31d0], [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32(counter, key), want);
        }
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let base = random_bits(1, 2, 3);
        let others = [(1 << 32, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)];
        for (seed, choice, position) in others {
            assert_ne!(base, random_bits(seed, choice, position));
        }
        assert!((0..1000).all(|i| random_bits(7, 0, i) < 1 << 53));
    }
}
