//! A cursor over a file's bytes that says where it is when something does not fit.

use std::fmt::Display;

use crate::error::{Error, Result, quoted};

/// Longest key, tensor name: the format's own limit for keys.
const MAX_NAME: usize = 65_535;

/// Little-endian reads with bounds checks. `what` names the thing read, for the error line.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, pos: 0 }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    pub(super) fn file_len(&self) -> usize {
        self.bytes.len()
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.pos
    }

    pub(super) fn take(&mut self, len: usize, what: impl Display) -> Result<&'a [u8]> {
        if len > self.left() {
            return Err(Error::format(format!(
                "{what} at byte {} needs {len} bytes, but the file ends after {}",
                self.pos,
                self.left()
            )));
        }
        let taken = &self.bytes[self.pos..self.pos + len];
        self.pos += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: impl Display) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: impl Display) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: impl Display) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// `count` as a usize, if that many things of at least `min_size` bytes can still follow.
    pub(super) fn plausible(
        &self,
        count: u64,
        min_size: usize,
        what: impl Display,
    ) -> Result<usize> {
        let room = self.left() / min_size;
        match usize::try_from(count) {
            Ok(count) if count <= room => Ok(count),
            _ => Err(Error::format(format!(
                "{count} {what} announced before byte {}, but only {} bytes follow",
                self.pos,
                self.left()
            ))),
        }
    }

    /// A string: its length in 8 bytes, then UTF-8.
    pub(super) fn string(&mut self, what: impl Display) -> Result<&'a str> {
        let at = self.pos;
        let len = self.u64(format_args!("the length of {what}"))?;
        if len > self.left() as u64 {
            return Err(Error::format(format!(
                "{what} at byte {at} claims {len} bytes, but only {} bytes follow",
                self.left()
            )));
        }
        let raw = self.take(len as usize, &what)?;
        std::str::from_utf8(raw)
            .map_err(|_| Error::format(format!("{what} at byte {at} is not UTF-8")))
    }

    /// A key or a tensor name: a string of 1 to 65,535 bytes.
    pub(super) fn name(&mut self, what: impl Display) -> Result<&'a str> {
        let at = self.pos;
        let name = self.string(&what)?;
        match name.len() {
            1..=MAX_NAME => Ok(name),
            0 => Err(Error::format(format!("{what} at byte {at} is empty"))),
            len => Err(Error::format(format!(
                "{what} at byte {at}, {}, has {len} bytes; the limit is {MAX_NAME}",
                quoted(name)
            ))),
        }
    }
}
