//! A request's state as bytes, for another worker.

use resource_api::{PublishedInfo, ResourceError, Result};

use crate::requests::Request;

const KIND: &str = "sampler";
const VERSION: u32 = 1;
const ENTRY: &str = "state";
const COUNTS: &str = "counts";

/// What is published.
pub struct State {
    pub seed: u64,
    pub choice: u32,
    pub position: u32,
    pub seen: Vec<u32>,
    /// How often each token was generated.
    pub counts: Vec<(u32, u32)>,
}

/// The state of a request. Of two, the one that has sampled more survives a merge.
pub fn write(request: &Request) -> PublishedInfo {
    let position = request.position();
    let mut body = request.params.seed.to_le_bytes().to_vec();
    body.extend(request.params.choice.to_le_bytes());
    body.extend(position.to_le_bytes());
    let seen = request.seen.iter().flat_map(|seen| seen.iter());
    body.extend(seen.flat_map(u32::to_le_bytes));
    let mut info = PublishedInfo::new(KIND, VERSION);
    info.set(ENTRY, u64::from(position), body);
    let counts = request.adjust.as_ref().map(|adjust| adjust.counts()).unwrap_or_default();
    if !counts.is_empty() {
        let words = counts.iter().flat_map(|&(token, count)| [token, count]);
        info.set(COUNTS, u64::from(position), words.flat_map(u32::to_le_bytes).collect());
    }
    info
}

/// The inverse.
pub fn read(info: &PublishedInfo) -> Result<State> {
    let unusable = || {
        ResourceError::invalid(format!(
            "brings state of {}/{}, not of {KIND}/{VERSION}",
            info.kind(),
            info.version()
        ))
    };
    if (info.kind(), info.version()) != (KIND, VERSION) {
        return Err(unusable());
    }
    let (_, body) = info.get(ENTRY).ok_or_else(unusable)?;
    let (seed, rest) = body.split_first_chunk().ok_or_else(unusable)?;
    let words = words_of(rest);
    let (&[choice, position], seen) = words.split_first_chunk().ok_or_else(unusable)?;
    let counts = info.get(COUNTS).map(|(_, body)| words_of(body)).unwrap_or_default();
    let counts = counts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    Ok(State { seed: u64::from_le_bytes(*seed), choice, position, seen: seen.to_vec(), counts })
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes)).collect()
}
