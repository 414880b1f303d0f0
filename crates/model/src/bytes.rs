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
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..owner.as_ref().as_ref().len();
        Self { owner, range }
    }

    /// Maps a file into memory. The file must not be changed while it is in use.
    pub fn open(path: &Path) -> Result<Self> {
        let mapped = device::MappedFile::open(path)
            .map_err(|e| Error::new(ErrorKind::Io, format!("cannot read the model: {e}")))?;
        Ok(Self::new(Arc::new(mapped)))
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
        &self.owner.as_ref().as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}
