//! A range of a file's bytes that keeps the mapping alive.

use std::fmt;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// Bytes shared with whatever owns them, a memory mapping as a rule. Cloning and slicing copy
/// nothing. The bytes of a tensor may start at any address: readers must not assume alignment.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    Mapping(Arc<device::MappedFile>),
    Other(Arc<dyn AsRef<[u8]> + Send + Sync>),
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..owner.as_ref().as_ref().len();
        Self { owner: Owner::Other(owner), range }
    }

    /// Maps a file into memory. The file must not be changed while it is in use.
    pub fn open(path: &Path) -> Result<Self> {
        let mapped = device::MappedFile::open(path)
            .map_err(|e| Error::new(ErrorKind::Io, format!("cannot read the model: {e}")))?;
        let range = 0..mapped.len();
        Ok(Self { owner: Owner::Mapping(Arc::new(mapped)), range })
    }

    /// Says that these bytes are not needed for now: those of a mapping leave the process's memory
    /// until they are read again.
    pub fn release(&self) {
        if let Owner::Mapping(file) = &self.owner {
            file.release(self.range.clone());
        }
    }

    /// The part `range` of these bytes, or `None` when it does not lie within them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end)
            .then(|| Self { owner: self.owner.clone(), range: start..end })
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all = match &self.owner {
            Owner::Mapping(file) => file.as_ref(),
            Owner::Other(owner) => owner.as_ref().as_ref(),
        };
        &all[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}
