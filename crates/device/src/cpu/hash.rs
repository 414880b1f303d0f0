//! BLAKE3 in keyed mode, of messages of one block: 64 bytes, as 16 little-endian words.
//!
//! A chain of such hashes, each the key of the next, waits for every instruction of it, and plain
//! registers answer sooner than vectors. Hashes that do not depend on each other are computed 16 at a
//! time, one in a lane. The `blake3` crate computes the same, longer messages too.

use crate::cpu::features::CpuFeatures;
use crate::cpu::simd::{Kernel, LANES, Simd, dispatch};

/// The first words of the fractional parts of the square roots of the first eight primes.
const IV: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// Words 12 to 15 of the state: counter 0, a whole block, and the flags of a chunk that begins and
/// ends here, is the root, and has a key.
const TAIL: [u32; 4] = [0, 0, 64, 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4];

/// Which words of the message the rounds take, in order.
const SCHEDULE: [[usize; 16]; 7] = {
    const NEXT: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
    let mut all = [[0; 16]; 7];
    let mut i = 0;
    while i < 16 {
        all[0][i] = i;
        i += 1;
    }
    let mut round = 1;
    while round < 7 {
        i = 0;
        while i < 16 {
            all[round][i] = all[round - 1][NEXT[i]];
            i += 1;
        }
        round += 1;
    }
    all
};

/// Columns, then diagonals, that a round mixes.
const MIXED: [[usize; 4]; 8] = [
    [0, 4, 8, 12],
    [1, 5, 9, 13],
    [2, 6, 10, 14],
    [3, 7, 11, 15],
    [0, 5, 10, 15],
    [1, 6, 11, 12],
    [2, 7, 8, 13],
    [3, 4, 9, 14],
];

/// Hashes from which on lanes are used.
const FEW: usize = 4;

/// `$mix` for everything that the rounds mix: words `$m` of the state with words `$x` and `$y` of the
/// message. Unrolled, since indices must be known when compiled for the state to stay in registers.
macro_rules! rounds {
    ($m:ident, $x:ident, $y:ident => $mix:expr) => {
        rounds!(rounds 0 1 2 3 4 5 6, $m, $x, $y => $mix)
    };
    (rounds $($round:literal)*, $m:ident, $x:ident, $y:ident => $mix:expr) => {
        $(rounds!(round $round, 0 1 2 3 4 5 6 7, $m, $x, $y => $mix);)*
    };
    (round $round:literal, $($i:literal)*, $m:ident, $x:ident, $y:ident => $mix:expr) => {
        $({
            let $m = const { MIXED[$i] };
            let $x = const { SCHEDULE[$round][2 * $i] };
            let $y = const { SCHEDULE[$round][2 * $i + 1] };
            $mix
        })*
    };
}

/// The hash of one block.
pub fn keyed_hash(key: &[u32; 8], block: &[u32; 16]) -> [u32; 8] {
    let mut v = [0u32; 16];
    v[..8].copy_from_slice(key);
    v[8..12].copy_from_slice(&IV[..4]);
    v[12..].copy_from_slice(&TAIL);
    rounds!(m, x, y => mix(&mut v, m, block[x], block[y]));
    std::array::from_fn(|i| v[i] ^ v[i + 8])
}

#[inline(always)]
fn mix(v: &mut [u32; 16], [a, b, c, d]: [usize; 4], x: u32, y: u32) {
    v[a] = v[a].wrapping_add(v[b].wrapping_add(x));
    v[d] = (v[d] ^ v[a]).rotate_right(16);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(12);
    v[a] = v[a].wrapping_add(v[b].wrapping_add(y));
    v[d] = (v[d] ^ v[a]).rotate_right(8);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(7);
}

/// The hash of each block under its key.
///
/// # Panics
/// When the slices differ in length.
pub fn keyed_hashes(keys: &[[u32; 8]], blocks: &[[u32; 16]], hashes: &mut [[u32; 8]]) {
    assert!(keys.len() == blocks.len() && keys.len() == hashes.len(), "one key and hash a block");
    let features = CpuFeatures::current();
    let groups = keys.chunks(LANES).zip(blocks.chunks(LANES)).zip(hashes.chunks_mut(LANES));
    for ((keys, blocks), hashes) in groups {
        if keys.len() < FEW {
            let each = keys.iter().zip(blocks).zip(hashes);
            each.for_each(|((key, block), hash)| *hash = keyed_hash(key, block));
            continue;
        }
        let mut words = [[0u32; LANES]; 24];
        for (lane, (key, block)) in keys.iter().zip(blocks).enumerate() {
            let all = key.iter().chain(block);
            words.iter_mut().zip(all).for_each(|(lanes, &word)| lanes[lane] = word);
        }
        let found = dispatch(features, Lanes { words: &words });
        for (lane, hash) in hashes.iter_mut().enumerate() {
            *hash = std::array::from_fn(|i| found[i][lane].to_bits());
        }
    }
}

/// Keys and blocks, word by word.
struct Lanes<'a> {
    words: &'a [[u32; LANES]; 24],
}

impl Kernel for Lanes<'_> {
    /// Bits of the hashes, word by word.
    type Output = [[f32; LANES]; 8];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (keys, block) = self.words.split_at(8);
        let mut v = [s.splat_i32(0); 16];
        for i in 0..8 {
            v[i] = load(s, &keys[i]);
        }
        for i in 0..4 {
            v[8 + i] = s.splat_i32(IV[i] as i32);
            v[12 + i] = s.splat_i32(TAIL[i] as i32);
        }
        rounds!(m, x, y => mix_lanes(s, &mut v, m, load(s, &block[x]), load(s, &block[y])));
        let mut out = [[0.0; LANES]; 8];
        for (i, out) in out.iter_mut().enumerate() {
            s.store(s.floats(s.xor(v[i], v[i + 8])), out);
        }
        out
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, words: &[u32; LANES]) -> S::I {
    s.load_bytes(bytemuck::cast_ref(words))
}

#[inline(always)]
fn mix_lanes<S: Simd>(s: S, v: &mut [S::I; 16], [a, b, c, d]: [usize; 4], x: S::I, y: S::I) {
    v[a] = s.add_i32(v[a], s.add_i32(v[b], x));
    v[d] = rotate::<S, 16, 16>(s, s.xor(v[d], v[a]));
    v[c] = s.add_i32(v[c], v[d]);
    v[b] = rotate::<S, 12, 20>(s, s.xor(v[b], v[c]));
    v[a] = s.add_i32(v[a], s.add_i32(v[b], y));
    v[d] = rotate::<S, 8, 24>(s, s.xor(v[d], v[a]));
    v[c] = s.add_i32(v[c], v[d]);
    v[b] = rotate::<S, 7, 25>(s, s.xor(v[b], v[c]));
}

/// By `RIGHT` bits; `LEFT` is what is left of 32.
#[inline(always)]
fn rotate<S: Simd, const RIGHT: u32, const LEFT: u32>(s: S, x: S::I) -> S::I {
    s.xor(s.shr::<RIGHT>(x), s.shl::<LEFT>(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::features::set_cpu_features;

    fn job(n: u32) -> ([u32; 8], [u32; 16]) {
        let word = |i: u32| (n * 31 + i + 1).wrapping_mul(0x9e37_79b9);
        (std::array::from_fn(|i| word(i as u32)), std::array::from_fn(|i| word(99 + i as u32)))
    }

    /// By the crate of BLAKE3's authors.
    fn reference((key, block): ([u32; 8], [u32; 16])) -> [u32; 8] {
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        let key: [u8; 32] = bytes(&key).try_into().unwrap();
        let hash = blake3::keyed_hash(&key, &bytes(&block));
        std::array::from_fn(|i| {
            u32::from_le_bytes(hash.as_bytes()[i * 4..][..4].try_into().unwrap())
        })
    }

    #[test]
    fn hashes_are_those_of_blake3_on_all_instructions() {
        for features in CpuFeatures::supported() {
            set_cpu_features(features.name()).unwrap();
            for count in [0, 1, FEW as u32 - 1, FEW as u32, 15, 16, 17, 40] {
                let jobs: Vec<_> = (0..count).map(job).collect();
                let (keys, blocks): (Vec<_>, Vec<_>) = jobs.iter().copied().unzip();
                let mut hashes = vec![[0; 8]; jobs.len()];
                keyed_hashes(&keys, &blocks, &mut hashes);
                for (&job, hash) in jobs.iter().zip(&hashes) {
                    assert_eq!(*hash, reference(job), "{count} on {}", features.name());
                    assert_eq!(keyed_hash(&job.0, &job.1), *hash);
                }
            }
        }
        set_cpu_features(CpuFeatures::detected().name()).unwrap();
    }
}
