//! A token's output is the same to the bit however it came to be computed.

mod common;

use common::*;
use resource_api::DType;

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The outputs of a whole prompt computed at once by one thread, alone.
fn whole(config: &Config, seed: u32, len: u32) -> Vec<u32> {
    bits(&attend(&Config { threads: 1, ..config.clone() }, &[Stream::new(seed, 0, len)])[0])
}

fn configs() -> impl Iterator<Item = Config> {
    [DType::F32, DType::BF16, DType::F8E4M3, DType::I8].into_iter().flat_map(|dtype| {
        [None, Some(70)].into_iter().flat_map(move |window| {
            [16, 24].into_iter().map(move |page_size| Config {
                dtype,
                window,
                page_size,
                head_dim: 33,
                ..Config::default()
            })
        })
    })
}

#[test]
fn chunks_of_a_prompt() {
    const LEN: u32 = 600;
    for config in configs() {
        let want = whole(&config, 3, LEN);
        let width = want.len() / LEN as usize;
        for (chunk, threads) in [(7, 1), (7, 3), (64, 2), (512, 1), (512, 2)] {
            let config = Config { threads, ..config.clone() };
            let mut start = 0;
            while start < LEN {
                let span = chunk.min(LEN - start);
                let got = &attend(&config, &[Stream::new(3, start, span)])[0];
                let want = &want[start as usize * width..][..span as usize * width];
                assert!(bits(got) == want, "{start}..{} by {chunk}; {config:?}", start + span);
                // Every chunk costs a cache of its own here: some are enough.
                start += if chunk < 64 { 5 * chunk } else { chunk };
            }
        }
    }
}

#[test]
fn decode_alone_and_on_any_number_of_threads() {
    for config in configs() {
        let want = whole(&config, 3, 1100);
        let width = want.len() / 1100;
        for position in [0, 1, 15, 16, 254, 255, 256, 257, 511, 512, 700, 1099] {
            for threads in [1, 2, 5] {
                let config = Config { threads, ..config.clone() };
                let got = &attend(&config, &[Stream::new(3, position, 1)])[0];
                let want = &want[position as usize * width..][..width];
                assert!(bits(got) == want, "position {position}; {config:?}");
            }
        }
    }
}

#[test]
fn beside_other_requests_at_any_place_in_the_batch() {
    let others = [
        Stream::new(10, 2500, 1),
        Stream::padding(0),
        Stream::new(11, 0, 130),
        Stream::new(12, 90, 0),
        Stream::new(13, 40, 9),
    ];
    for config in configs() {
        let want = whole(&config, 3, 600);
        let width = want.len() / 600;
        for (start, span) in [(0, 600), (599, 1), (300, 40), (511, 2)] {
            for place in 0..=others.len() {
                let mut streams = others.to_vec();
                streams.insert(place, Stream::new(3, start, span));
                let config = Config { threads: 1 + place as u32 % 3, ..config.clone() };
                let got = &attend(&config, &streams)[place];
                let want = &want[start as usize * width..][..span as usize * width];
                assert!(bits(got) == want, "{start}+{span} at {place}; {config:?}");
            }
        }
    }
}

/// How a cache lays its pages out is not part of a result either.
#[test]
fn over_any_page_size_and_order_of_strides() {
    let config = Config { head_dim: 80, ..Config::default() };
    let want = whole(&config, 3, 300);
    for page_size in [1, 10, 128, 1024] {
        for slot_major in [false, true] {
            let config = Config { page_size, slot_major, ..config.clone() };
            assert!(whole(&config, 3, 300) == want, "{config:?}");
        }
    }
}
