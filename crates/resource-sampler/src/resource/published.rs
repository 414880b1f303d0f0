//! A request's state as bytes, for another worker.

use resource_api::{PublishedInfo, ResourceError, Result};

use crate::requests::Request;

const KIND: &str = "sampler";
const VERSION: u32 = 1;
const ENTRY: &str = "state";

/// What is published.
pub struct State {
    pub seed: u64,
    pub choice: u32,
    pub position: u32,
    pub seen: Vec<u32>,
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
    let words = rest.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes));
    let words: Vec<u32> = words.collect();
    let (&[choice, position], seen) = words.split_first_chunk().ok_or_else(unusable)?;
    Ok(State { seed: u64::from_le_bytes(*seed), choice, position, seen: seen.to_vec() })
}
