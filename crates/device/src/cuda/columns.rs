//! The columns of a plan in device memory.

use std::sync::Arc;

use cudarc::driver::sys;
use resource_api::DeviceColumn;

use super::check::driver as check;
use super::context::Context;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::stream::Stream;
use crate::error::{Error, Result};

/// A column begins at a multiple of so many elements: 16 bytes.
const ALIGN: usize = 4;

/// Columns of `u32` at places that never change, filled by one copy from pinned memory. One for each
/// slot of a resource's plans: graphs that were captured with a slot read its columns.
///
/// A column that outgrows its room moves everything to a larger buffer. The old one stays allocated,
/// since a captured graph may still read it.
#[derive(Debug)]
pub struct Columns {
    context: Arc<Context>,
    staging: PinnedBuffer<u32>,
    device: DeviceBuffer<u32>,
    retired: Vec<DeviceBuffer<u32>>,
    /// Most elements of each column.
    room: Vec<usize>,
    /// Where each begins, and the end of the last.
    starts: Vec<usize>,
}

impl Columns {
    /// Columns of up to so many elements each. What is first in the list is copied in every step;
    /// what is last and long costs only what is used of it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(context: &Arc<Context>, room: &[usize]) -> Result<Self> {
        let mut starts = vec![0];
        for &len in room {
            let start = starts[starts.len() - 1];
            starts.push(start + len.next_multiple_of(ALIGN));
        }
        let len = starts[room.len()];
        Ok(Self {
            context: context.clone(),
            staging: PinnedBuffer::zeroed(context, len)?,
            device: DeviceBuffer::zeroed(context, len)?,
            retired: Vec::new(),
            room: room.to_vec(),
            starts,
        })
    }

    /// Bytes that columns of this room take, on the device and again on the host.
    pub fn bytes(room: &[usize]) -> u64 {
        room.iter().map(|len| len.next_multiple_of(ALIGN) as u64 * 4).sum()
    }

    /// Copies the columns to the device, later. Waits until the last upload has been done.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of columns; [`Error::OutOfMemory`] where they outgrow their
    /// room; [`Error::Cuda`] under capture.
    pub fn upload(&mut self, stream: &Stream, columns: &[&[u32]]) -> Result<()> {
        crate::error::check_len("columns to upload", columns.len(), self.room.len())?;
        if columns.iter().zip(&self.room).any(|(column, room)| column.len() > *room) {
            self.grow(columns)?;
        }
        let staging = self.staging.as_mut_slice()?;
        let mut end = 0;
        for (column, &start) in columns.iter().zip(&self.starts) {
            staging[start..start + column.len()].copy_from_slice(column);
            if !column.is_empty() {
                end = start + column.len();
            }
        }
        stream.upload(&mut self.staging, 0, &mut self.device, 0, end)
    }

    fn grow(&mut self, columns: &[&[u32]]) -> Result<()> {
        let room = self.room.iter().zip(columns);
        let room: Vec<_> = room.map(|(&room, c)| room.max(c.len().next_power_of_two())).collect();
        let grown = Self::new(&self.context, &room)?;
        let old = std::mem::replace(self, grown);
        self.retired = old.retired;
        self.retired.push(old.device);
        Ok(())
    }

    /// The first `len` elements of a column. Whoever hands it on keeps this value for as long as it is
    /// read.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the column's room.
    pub fn column(&self, which: usize, len: usize) -> Result<DeviceColumn<u32>> {
        let Some(&room) = self.room.get(which) else {
            let (index, limit) = (which, self.room.len());
            return Err(Error::OutOfRange { what: "column", index, limit });
        };
        if len > room {
            return Err(Error::OutOfRange { what: "end of a column", index: len, limit: room });
        }
        let address = self.device.address() + 4 * self.starts[which] as u64;
        // SAFETY: inside the allocation (checked), which this value keeps.
        Ok(unsafe { DeviceColumn::from_raw(address, len) })
    }
}

/// A column's elements, once the device has done everything it was given. For tests and tools; not under
/// capture.
///
/// # Errors
/// [`Error::Cuda`].
pub fn read_column(context: &Context, column: DeviceColumn<u32>) -> Result<Vec<u32>> {
    let mut values = vec![0u32; column.len()];
    context.synchronize()?;
    if !values.is_empty() {
        let to = values.as_mut_ptr().cast();
        // SAFETY: the column promises that many elements, and so has `values`.
        let code = unsafe { sys::cuMemcpyDtoH_v2(to, column.address(), 4 * column.len()) };
        check("cuMemcpyDtoH", code)?;
    }
    Ok(values)
}

/// Elements `first..first + len` of a column.
///
/// # Errors
/// [`Error::OutOfRange`].
pub fn part_of(column: DeviceColumn<u32>, first: usize, len: usize) -> Result<DeviceColumn<u32>> {
    match first.checked_add(len) {
        Some(end) if end <= column.len() => {
            let address = column.address() + 4 * first as u64;
            // SAFETY: inside the elements that the column promises.
            Ok(unsafe { DeviceColumn::from_raw(address, len) })
        }
        end => {
            let index = end.unwrap_or(usize::MAX);
            Err(Error::OutOfRange { what: "end of a column", index, limit: column.len() })
        }
    }
}
