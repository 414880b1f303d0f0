//! Page tables that stay on a device from step to step.

use std::sync::Arc;

use resource_api::DeviceColumn;

use super::context::Context;
use super::memory::DeviceBuffer;
use super::module::{Args, Grid, Kernel, Module};
use super::source::Instance;
use super::stream::Stream;
use crate::error::Result;

/// A page table on a device that takes changes.
#[derive(Debug)]
pub struct PageTable {
    entries: DeviceBuffer<u32>,
    retired: Vec<DeviceBuffer<u32>>,
    apply: Kernel,
}

impl PageTable {
    /// A table of so many entries, all 0.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; as for [`Module::load`].
    pub fn new(context: &Arc<Context>, entries: usize) -> Result<Self> {
        let module = Module::load(context, &Instance::of("kv.cu"))?;
        Ok(Self {
            entries: DeviceBuffer::zeroed(context, entries)?,
            retired: Vec::new(),
            apply: module.kernel("table_apply")?,
        })
    }

    /// Makes the table as long as `contents`, and copies them there. The old table stays allocated, for
    /// what may still read it. Waits for the device.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn grow(&mut self, contents: &[u32]) -> Result<()> {
        let grown = DeviceBuffer::from_slice(self.entries.context(), contents)?;
        self.retired.push(std::mem::replace(&mut self.entries, grown));
        Ok(())
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries. Whoever hands the column on keeps this value for as long as it is read.
    pub fn column(&self) -> DeviceColumn<u32> {
        // SAFETY: the whole allocation, which this value keeps.
        unsafe { DeviceColumn::from_raw(self.entries.address(), self.entries.len()) }
    }

    /// Sets entries, later: `changes` is pairs of an entry and its new value. No entry is named twice;
    /// those that there are not are skipped.
    ///
    /// # Errors
    /// As for [`Stream::upload`].
    pub fn apply(&mut self, stream: &Stream, changes: DeviceColumn<u32>) -> Result<()> {
        let count = changes.len() / 2;
        let mut args = Args::default();
        args.push(self.entries.address()).push(self.entries.len() as u32);
        args.push(changes.address()).push(count as u32);
        // SAFETY: the signature is (u32*, u32, const uint2*, u32); entries are compared with the table's
        // length by the kernel, and the column has that many pairs.
        unsafe { self.apply.launch(stream, Grid::for_items(count, 256), &args) }
    }
}
