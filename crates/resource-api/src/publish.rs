//! State that a request takes along when it moves to another worker.

use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::{RString, RVec};

/// What a resource publishes about a request: named entries with an order, so that merging needs
/// no code of the kind. Self-describing: carries names, never process-local ids.
#[repr(C)]
#[derive(Clone, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct PublishedInfo {
    kind: RString,
    version: u32,
    entries: RVec<Entry>,
}

#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq, StableAbi)]
struct Entry {
    name: RString,
    order: u64,
    body: RVec<u8>,
}

const MAGIC: &[u8; 8] = b"EHPUBL01";

impl PublishedInfo {
    /// No entries yet. `kind` and `version` say how entry bodies are to be read.
    pub fn new(kind: &str, version: u32) -> Self {
        Self { kind: kind.into(), version, entries: RVec::new() }
    }

    /// Kind that published it.
    pub fn kind(&self) -> &str {
        self.kind.as_str()
    }

    /// Version of the bodies' format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Sets an entry. `order` decides which of two versions of an entry survives a merge: the
    /// larger one (a position, a generation).
    pub fn set(&mut self, name: &str, order: u64, body: Vec<u8>) {
        let entry = Entry { name: name.into(), order, body: body.into() };
        match self.entries.binary_search_by(|e| e.name.as_str().cmp(name)) {
            Ok(i) => self.entries[i] = entry,
            Err(i) => self.entries.insert(i, entry),
        }
    }

    /// (order, body) of an entry.
    pub fn get(&self, name: &str) -> Option<(u64, &[u8])> {
        let i = self.entries.binary_search_by(|e| e.name.as_str().cmp(name)).ok()?;
        Some((self.entries[i].order, self.entries[i].body.as_slice()))
    }

    /// (name, order, body) of all entries, by name.
    pub fn entries(&self) -> impl Iterator<Item = (&str, u64, &[u8])> {
        self.entries.iter().map(|e| (e.name.as_str(), e.order, e.body.as_slice()))
    }

    /// Merges `other` in: an entry is replaced by one of the same name whose order is not smaller.
    pub fn update(&mut self, other: &PublishedInfo) {
        for (name, order, body) in other.entries() {
            if self.get(name).is_none_or(|(mine, _)| order >= mine) {
                self.set(name, order, body.to_vec());
            }
        }
        self.kind = other.kind.clone();
        self.version = other.version;
    }

    /// As bytes for the wire, with a checksum.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put(&mut out, self.kind.as_bytes());
        out.extend(self.version.to_le_bytes());
        out.extend((self.entries.len() as u32).to_le_bytes());
        for e in &self.entries {
            put(&mut out, e.name.as_bytes());
            out.extend(e.order.to_le_bytes());
            put(&mut out, &e.body);
        }
        let sum = blake3::hash(&out);
        out.extend(&sum.as_bytes()[..16]);
        out
    }

    /// The inverse of [`PublishedInfo::to_bytes`].
    ///
    /// # Errors
    /// `INVALID` when the bytes are cut short, altered, or of another format.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |what: &str| {
            ResourceError::new(ErrorKind::INVALID, format!("published state is unusable: {what}"))
        };
        let Some((body, sum)) = bytes.split_last_chunk::<16>() else {
            return Err(bad("too short"));
        };
        if blake3::hash(body).as_bytes()[..16] != sum[..] {
            return Err(bad("its checksum does not match"));
        }
        let rest = body.strip_prefix(MAGIC).ok_or_else(|| bad("unknown format"))?;
        let mut reader = Reader(rest);
        let mut read = || -> Option<PublishedInfo> {
            let kind = reader.text()?;
            let version = u32::from_le_bytes(reader.take()?);
            let count = u32::from_le_bytes(reader.take()?);
            let mut info = PublishedInfo::new(&kind, version);
            for _ in 0..count {
                let name = reader.text()?;
                let order = u64::from_le_bytes(reader.take()?);
                info.set(&name, order, reader.bytes()?.to_vec());
            }
            reader.0.is_empty().then_some(info)
        };
        read().ok_or_else(|| bad("it is malformed"))
    }
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = u32::from_le_bytes(self.take()?) as usize;
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> PublishedInfo {
        let mut info = PublishedInfo::new("positions", 1);
        info.set("main", 7, vec![1, 2]);
        info.set("context", 3, vec![]);
        info
    }

    #[test]
    fn a_clone_is_independent() {
        let mut original = sample();
        let mut copy = original.clone();
        copy.set("main", 9, vec![5]);
        assert_eq!(original.get("main"), Some((7, &[1u8, 2][..])));
        original.set("context", 8, vec![6]);
        assert_eq!(copy.get("context"), Some((3, &[][..])));
    }

    #[test]
    fn update_takes_the_larger_order_per_entry() {
        let mut info = sample();
        let mut newer = PublishedInfo::new("positions", 1);
        newer.set("main", 6, vec![9]);
        newer.set("context", 4, vec![8]);
        newer.set("extra", 0, vec![7]);
        info.update(&newer);
        let got: Vec<_> = info.entries().map(|(n, o, b)| (n, o, b.to_vec())).collect();
        let want = vec![("context", 4, vec![8]), ("extra", 0, vec![7]), ("main", 7, vec![1, 2])];
        assert_eq!(got, want);
    }

    #[test]
    fn bytes_come_back_and_any_changed_byte_is_noticed() {
        let bytes = sample().to_bytes();
        assert_eq!(PublishedInfo::from_bytes(&bytes).unwrap(), sample());
        for i in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[i] ^= 1;
            assert!(PublishedInfo::from_bytes(&broken).is_err(), "byte {i}");
            assert!(PublishedInfo::from_bytes(&bytes[..i]).is_err(), "cut at {i}");
        }
    }
}
