//! The memory of the pool, wherever the engine runs.

mod cuda;
mod host;
mod page_moves;

use std::ops::Range;

use resource_api::{
    EngineResourceInfo, HeadTurn, HostServicesHandle, KvFacts, KvGroup, KvLayer, KvPlan,
    ResourceError, Result, StepContext, TensorView, TensorViewMut, WritePlaces,
};

use self::cuda::CudaMemory;
use self::host::{HostMemory, Places};

/// Keys and values of all pages. Zeros until written.
#[derive(Debug)]
pub(crate) enum KvMemory {
    Host(HostMemory),
    Cuda(Box<CudaMemory>),
}

impl KvMemory {
    /// Memory for a cache laid out like this.
    ///
    /// # Errors
    /// `EXHAUSTED` where there is no room; `UNSUPPORTED` for a device that this machine does not have.
    pub(crate) fn new(facts: KvFacts, info: &EngineResourceInfo) -> Result<Self> {
        match info.device.is_cpu() {
            true => HostMemory::new(facts).map(Self::Host),
            false => CudaMemory::new(facts, info).map(|memory| Self::Cuda(Box::new(memory))),
        }
    }

    /// Whether page tables have a copy on a device, which takes what changes in them.
    pub(crate) fn takes_changes(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    /// Has what is done from now on follow the device work of this step.
    ///
    /// # Errors
    /// `INTERNAL` for a step without a stream on an engine with a device.
    pub(crate) fn follow(&self, ctx: &StepContext<'_>) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(memory) => memory.follow(ctx),
        }
    }

    /// Copies a plan to the device, whose table differs by `changes` from what it was told before.
    ///
    /// # Errors
    /// `EXHAUSTED` at the first use of a slot, without memory for it.
    pub(crate) fn upload(
        &self,
        ctx: &StepContext<'_>,
        plan: &mut KvPlan,
        changes: &mut Vec<Range<u32>>,
    ) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(memory) => memory.upload(ctx, plan, changes),
        }
    }

    /// Stores the keys and values of a group's tokens at their places in `layer`.
    ///
    /// # Errors
    /// `INVALID` for tensors of another shape or type.
    pub(crate) fn write(
        &self,
        ctx: &StepContext<'_>,
        host: &HostServicesHandle,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        match self {
            Self::Host(memory) => memory.write(host, layer, Places::of(plan, group), k, v),
            Self::Cuda(memory) => memory.write(ctx, layer, (plan, group), k, v),
        }
    }

    /// Turns queries and keys as `how` says and stores keys and values, in one pass; `false` where that cannot
    /// be done.
    ///
    /// # Errors
    /// As for [`KvMemory::write`].
    pub(crate) fn write_turned(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        (q, k, v): (&mut TensorViewMut<'_>, &TensorView<'_>, &TensorView<'_>),
        how: &HeadTurn,
    ) -> Result<bool> {
        match self {
            Self::Host(_) => Ok(false),
            Self::Cuda(memory) => memory.write_turned(ctx, layer, (plan, group), (q, k, v), how),
        }
    }

    /// Where a group is written; `None` in host memory.
    ///
    /// # Errors
    /// `INTERNAL` for a plan that was not uploaded.
    pub(crate) fn write_places(
        &self,
        plan: &KvPlan,
        group: &KvGroup,
    ) -> Result<Option<WritePlaces>> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Cuda(memory) => memory.write_places(plan, group).map(Some),
        }
    }

    /// Reads back what lies at the places of a group's tokens in `layer`.
    ///
    /// # Errors
    /// As for [`KvMemory::write`].
    pub(crate) fn read(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        match self {
            Self::Host(memory) => memory.read(layer, Places::of(plan, group), k, v),
            Self::Cuda(memory) => memory.read(ctx, layer, (plan, group), k, v),
        }
    }

    /// Copies all layers of page `from` to page `to`.
    pub(crate) fn copy_page(&self, from: u32, to: u32) -> Result<()> {
        match self {
            Self::Host(memory) => memory.copy_page(from, to),
            Self::Cuda(memory) => memory.copy_page(from, to),
        }
    }

    /// Hands out the bytes of page `page`, all layers, as steps have left them that were given before.
    pub(crate) fn read_page(
        &self,
        page: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Host(memory) => memory.read_page(page, take),
            Self::Cuda(memory) => memory.read_page(page, take),
        }
    }

    /// The bytes of page `page`. While [`KvMemory::read_page`] hands them out no step writes to the pool: this
    /// is for those who take longer than a copy.
    pub(crate) fn copy_of_page(&self, page: u32) -> Result<Vec<u8>> {
        let mut copy = Vec::new();
        self.read_page(page, &mut |bytes| {
            copy.try_reserve_exact(bytes.len())
                .map_err(|e| ResourceError::internal(format!("no memory for a page: {e}")))?;
            copy.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(copy)
    }

    /// Stores what [`KvMemory::read_page`] handed out; steps that are given later find it.
    ///
    /// # Errors
    /// `INTERNAL` for bytes that are not one page.
    pub(crate) fn write_page(&self, page: u32, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.write_page(page, bytes),
            Self::Cuda(memory) => memory.write_page(page, bytes),
        }
    }

    /// Has copies that begin now come after the steps that were given before.
    pub(crate) fn begin_copies(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(memory) => memory.begin_copies(),
        }
    }

    /// Waits for all copies that were begun.
    pub(crate) fn end_copies(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(memory) => memory.end_copies(),
        }
    }

    /// The paged layer, as tensors `[pages, slots, heads, dim]`.
    ///
    /// # Errors
    /// `INVALID` for a layer that the cache does not have.
    pub(crate) fn layer(&self, layer: u32) -> Result<KvLayer<'_>> {
        match self {
            Self::Host(memory) => memory.layer(layer),
            Self::Cuda(memory) => memory.layer(layer),
        }
    }
}
