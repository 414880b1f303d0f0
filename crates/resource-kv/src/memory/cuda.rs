//! The pool in the memory of a CUDA device, and the copies of plans there.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::Budget;
use device::cuda::{Columns, Context, KvPool, PageTable, PinnedBuffer, Places, Stream, part_of};
use resource_api::{
    Device, EngineResourceInfo, HeadTurn, HostServicesHandle, KvDevicePlan, KvFacts, KvGroup,
    KvLayer, KvPlan, ResourceError, Result, StepContext, TensorView, TensorViewMut, WritePlaces,
};

use super::page_moves::PageMoves;

/// Changes of a page table that go up with a plan; further ones go before it.
const CHANGES: usize = 1024;

/// Columns of a slot, in the order in which they lie on the device: what every step copies comes first.
const SEAT: usize = 0;
const START: usize = 1;
const SPAN: usize = 2;
const LEN: usize = 3;
const TOKEN_START: usize = 4;
const CHANGED: usize = 5;
const WRITE_PAGE: usize = 6;
const WRITE_SLOT: usize = 7;

/// Keys and values of all pages, and the columns of every slot's plan.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    context: Arc<Context>,
    pool: KvPool,
    /// Most rows and tokens of a step.
    room: (usize, usize),
    /// By slot, made at a slot's first use.
    slots: Mutex<Vec<Option<Slot>>>,
    /// The stream of the last step: what is done outside of a step follows it.
    last: Mutex<Option<Stream>>,
    moves: PageMoves,
    device: Device,
    host: HostServicesHandle,
}

/// The plan of a slot on the device.
#[derive(Debug)]
struct Slot {
    columns: Columns,
    table: PageTable,
    /// Pairs of an entry and its page, on their way to `columns`.
    changes: Vec<u32>,
    _budget: Budget,
}

impl CudaMemory {
    /// Memory for a cache laid out like this.
    ///
    /// # Errors
    /// `EXHAUSTED` where the device has no room; `UNSUPPORTED` on a machine without the driver.
    pub(super) fn new(facts: KvFacts, info: &EngineResourceInfo) -> Result<Self> {
        let context = Context::of_device(info.device)?;
        Ok(Self {
            pool: KvPool::new(&context, facts)?,
            moves: PageMoves::new(&context)?,
            context,
            // A request may have a second stream in the same step: a context, a guidance branch.
            room: (
                2 * info.limits.max_batch.max(1) as usize,
                info.limits.max_batch_tokens.max(1) as usize,
            ),
            slots: Mutex::default(),
            last: Mutex::default(),
            device: info.device,
            host: info.host.clone(),
        })
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Option<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn follow(&self, ctx: &StepContext<'_>) -> Result<()> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|stream| stream.handle() != ctx.stream()) {
            *last = Some(Stream::of_step(&self.context, ctx)?);
        }
        Ok(())
    }

    pub(super) fn upload(
        &self,
        ctx: &StepContext<'_>,
        plan: &mut KvPlan,
        changes: &mut Vec<Range<u32>>,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let mut slots = self.slots();
        let at = ctx.slot() as usize;
        if slots.len() <= at {
            slots.resize_with(at + 1, || None);
        }
        let slot = match &mut slots[at] {
            Some(slot) => slot,
            empty => empty.insert(self.new_slot(plan.table.len())?),
        };
        if slot.table.len() < plan.table.len() && ctx.slot_lease().bucket().is_some() {
            // The graph would go on reading the table's old place, which nobody writes any more.
            let message = "more streams than `max_batch` have pages: the page table of a captured step \
                           cannot grow; set cuda_graphs = false";
            return Err(ResourceError::unsupported(message));
        }
        slot.upload(&stream, plan, changes)?;
        plan.device = slot.columns_of(plan)?;
        Ok(())
    }

    fn new_slot(&self, entries: usize) -> Result<Slot> {
        let (rows, tokens) = self.room;
        let room = [rows, rows, rows, rows, rows, 2 * CHANGES, tokens, tokens];
        let bytes = Columns::bytes(&room) + 4 * entries as u64;
        Ok(Slot {
            _budget: Budget::take(&self.host, self.device, bytes)?,
            columns: Columns::new(&self.context, &room)?,
            table: PageTable::new(&self.context, entries)?,
            changes: Vec::with_capacity(2 * CHANGES),
        })
    }

    pub(super) fn write(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        Ok(self.pool.write(&stream, layer, places(plan, group)?, k, v)?)
    }

    pub(super) fn write_turned(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        (q, k, v): (&mut TensorViewMut<'_>, &TensorView<'_>, &TensorView<'_>),
        how: &HeadTurn,
    ) -> Result<bool> {
        let stream = Stream::of_step(&self.context, ctx)?;
        Ok(self.pool.write_turned(&stream, layer, places(plan, group)?, q, k, v, how)?)
    }

    pub(super) fn write_places(&self, plan: &KvPlan, group: &KvGroup) -> Result<WritePlaces> {
        let Places { page, slot } = places(plan, group)?;
        Ok(WritePlaces { page, slot })
    }

    pub(super) fn read(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        (plan, group): (&KvPlan, &KvGroup),
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let places = places(plan, group)?;
        if !k.raw().device.is_cpu() {
            return Ok(self.pool.read(&stream, layer, places, k, v)?);
        }
        Ok(self.pool.read_to_host(&stream, layer, places, k, v)?)
    }

    pub(super) fn copy_page(&self, from: u32, to: u32) -> Result<()> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the first step all pages are alike.
        match &*last {
            Some(stream) => Ok(self.pool.copy_page(stream, from, to)?),
            None => Ok(()),
        }
    }

    /// Has copies of pages come after all steps that were given so far.
    pub(super) fn begin_copies(&self) -> Result<()> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map_or(Ok(()), |steps| self.moves.follow(steps))
    }

    pub(super) fn end_copies(&self) -> Result<()> {
        self.moves.wait()
    }

    pub(crate) fn download_page(&self, page: u32, to: &mut PinnedBuffer<u8>) -> Result<()> {
        self.moves.download(&self.pool, page, to)
    }

    pub(crate) fn upload_page(&self, from: &mut PinnedBuffer<u8>, page: u32) -> Result<()> {
        self.moves.upload(&self.pool, from, page)
    }

    pub(super) fn read_page(
        &self,
        page: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.begin_copies()?;
        self.moves.read(&self.pool, page, take)
    }

    pub(super) fn write_page(&self, page: u32, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.pool.page_bytes() {
            let what = format!("a page of {} bytes for {}", bytes.len(), self.pool.page_bytes());
            return Err(ResourceError::internal(what));
        }
        self.begin_copies()?;
        self.moves.write(&self.pool, page, bytes)
    }

    pub(super) fn layer(&self, layer: u32) -> Result<KvLayer<'_>> {
        let (k, v) = self.pool.layer(layer)?;
        Ok(KvLayer { k, v })
    }
}

impl Slot {
    /// Puts the copies of the columns and the changes of the table into the stream.
    fn upload(
        &mut self,
        stream: &Stream,
        plan: &KvPlan,
        changes: &mut Vec<Range<u32>>,
    ) -> Result<()> {
        if self.table.len() < plan.table.len() {
            self.table.grow(&plan.table)?;
            changes.clear();
        }
        self.changes.clear();
        // They stay noted until all are on their way: a table that missed some would name other pages.
        for entry in changes.iter().cloned().flatten() {
            if self.changes.len() == 2 * CHANGES {
                self.columns.upload(stream, &[&[], &[], &[], &[], &[], &self.changes, &[], &[]])?;
                self.table.apply(stream, self.columns.column(CHANGED, 2 * CHANGES)?)?;
                self.changes.clear();
            }
            self.changes.extend([entry, plan.table[entry as usize]]);
        }
        let KvPlan { seat, start, span, len, token_start, write_page, write_slot, .. } = plan;
        self.columns.upload(
            stream,
            &[seat, start, span, len, token_start, &self.changes, write_page, write_slot],
        )?;
        let changed = self.columns.column(CHANGED, self.changes.len())?;
        self.table.apply(stream, changed)?;
        changes.clear();
        Ok(())
    }

    /// Where the plan lies on the device.
    fn columns_of(&self, plan: &KvPlan) -> Result<KvDevicePlan> {
        let (rows, tokens) = (plan.request.len(), plan.write_page.len());
        let column = |which, len| self.columns.column(which, len);
        Ok(KvDevicePlan {
            seat: column(SEAT, rows)?,
            start: column(START, rows)?,
            span: column(SPAN, rows)?,
            len: column(LEN, rows)?,
            token_start: column(TOKEN_START, rows)?,
            write_page: column(WRITE_PAGE, tokens)?,
            write_slot: column(WRITE_SLOT, tokens)?,
            table: self.table.column(),
        })
    }
}

/// Where the tokens of a group lie.
fn places(plan: &KvPlan, group: &KvGroup) -> Result<Places> {
    let (first, tokens) = (group.first_token as usize, group.num_tokens as usize);
    Ok(Places {
        page: part_of(plan.device.write_page, first, tokens)?,
        slot: part_of(plan.device.write_slot, first, tokens)?,
    })
}
