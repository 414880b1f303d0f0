//! Attention on a CUDA device.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use abi_stable::StableAbi;
use device::Budget;
use device::cuda::{
    AttentionRows, AttentionRule, AttentionShape, Columns, Context, LastRows, PagedAttention,
    Stream, part_of,
};
use resource_api::{
    Attending, DType, Device, DeviceColumn, EngineResourceInfo, HostServicesHandle, KvPlan,
    ResourceError, Result, StepContext, TensorView, TensorViewMut,
};

use crate::cache::Cache;
use crate::plan::{AttentionPlan, Group};
use crate::spec::Scoring;

/// The rows of a plan in device memory; empty on the CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct RowColumns {
    /// Seat in the page table of the stream that the row reads.
    pub seat: DeviceColumn<u32>,
    /// Number of its tokens.
    pub span: DeviceColumn<u32>,
    /// Length of the stream that it reads.
    pub len: DeviceColumn<u32>,
    /// Its first token in the group's packed tensors.
    pub token_start: DeviceColumn<u32>,
}

impl RowColumns {
    /// The rows of a cache's plan, which read their own streams.
    pub(crate) fn of(kv: &KvPlan) -> Self {
        let kv = &kv.device;
        Self { seat: kv.seat, span: kv.span, len: kv.len, token_start: kv.token_start }
    }

    fn part(&self, group: &Group) -> Result<Self> {
        let part = |c| part_of(c, group.first_row as usize, group.num_rows as usize);
        Ok(Self {
            seat: part(self.seat)?,
            span: part(self.span)?,
            len: part(self.len)?,
            token_start: part(self.token_start)?,
        })
    }
}

/// What a call computes.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) ctx: &'a StepContext<'a>,
    pub(crate) plan: &'a AttentionPlan,
    pub(crate) group: &'a Group,
    /// Of the cache whose pages are read.
    pub(crate) kv: &'a KvPlan,
    pub(crate) cache: &'a Cache,
    pub(crate) scoring: &'a Scoring,
}

/// Rows that are copied to the device for a slot, rather than read where the cache has them.
#[derive(Debug)]
struct Slot {
    columns: Columns,
    /// Seat, tokens, length and first token of each row.
    values: [Vec<u32>; 4],
    _budget: Budget,
}

/// Kernels with their workspace, which the engine's memory budget knows of.
#[derive(Debug)]
struct Kernels {
    attention: PagedAttention,
    _budget: Budget,
}

impl Kernels {
    fn new(
        context: &Arc<Context>,
        shape: AttentionShape,
        host: &HostServicesHandle,
    ) -> Result<Self> {
        let bytes = PagedAttention::bytes(context, &shape);
        let budget = Budget::take(host, context.device(), bytes)?;
        Ok(Self { attention: PagedAttention::new(context, shape)?, _budget: budget })
    }
}

/// Attention of one resource on a device.
#[derive(Debug)]
pub(crate) struct Cuda {
    context: Arc<Context>,
    /// For bf16 activations.
    bf16: Kernels,
    /// For f32 ones, loaded when they first come.
    f32: OnceLock<Kernels>,
    shape: AttentionShape,
    last: LastRows,
    /// Made at a slot's first use.
    slots: Mutex<Vec<Option<Slot>>>,
    max_rows: usize,
    device: Device,
    host: HostServicesHandle,
}

impl Cuda {
    /// Loads the kernels for a cache, and allocates their workspace.
    ///
    /// # Errors
    /// `UNSUPPORTED` on a machine without the driver, and for a shape without a kernel.
    pub(crate) fn new(info: &EngineResourceInfo, cache: &Cache) -> Result<Self> {
        let context = Context::of_device(info.device)?;
        // A request may have a second stream in the same step: a context, a guidance branch.
        let max_rows = 2 * info.limits.max_batch.max(1);
        let shape = AttentionShape {
            heads: cache.query_heads() as u32,
            kv_heads: cache.kv_heads() as u32,
            head_dim: cache.head_dim(),
            cache: cache.dtype(),
            activations: DType::BF16,
            max_rows,
            max_len: cache.max_seq_len(),
            batch_invariant: info.batch_invariant,
        };
        Ok(Self {
            bf16: Kernels::new(&context, shape, &info.host)?,
            f32: OnceLock::new(),
            shape,
            last: LastRows::new(&context)?,
            slots: Mutex::default(),
            max_rows: max_rows as usize,
            device: info.device,
            host: info.host.clone(),
            context,
        })
    }

    /// The kernels for activations of this type.
    fn kernels(&self, activations: DType) -> Result<&PagedAttention> {
        match activations {
            DType::BF16 => Ok(&self.bf16.attention),
            DType::F32 => {
                if let Some(kernels) = self.f32.get() {
                    return Ok(&kernels.attention);
                }
                let shape = AttentionShape { activations, ..self.shape };
                let kernels = Kernels::new(&self.context, shape, &self.host)?;
                Ok(&self.f32.get_or_init(|| kernels).attention)
            }
            other => Err(ResourceError::invalid(format!(
                "queries are {}; attention on a device takes bf16 and f32",
                other.name()
            ))),
        }
    }

    /// Attention of a group's tokens over the pages of `layer`.
    ///
    /// # Errors
    /// `INVALID` or `INTERNAL` for tensors of another shape, type or place.
    pub(crate) fn run(
        &self,
        work: &Work<'_>,
        layer: u32,
        q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let Work { ctx, plan, group, kv, cache, scoring } = *work;
        let stream = Stream::of_step(&self.context, ctx)?;
        let pages = cache.layer(layer)?;
        let columns = plan.device.part(group)?;
        let rows = &plan.rows[group.first_row as usize..][..group.num_rows as usize];
        // A captured graph runs with other rows than those it was captured with.
        let is_kept = ctx.slot_lease().bucket().is_some();
        let rows = AttentionRows {
            seat: columns.seat,
            span: columns.span,
            len: columns.len,
            token_start: columns.token_start,
            table: kv.device.table,
            table_stride: kv.table_stride,
            has_single: is_kept || rows.iter().any(|row| row.tokens == 1),
            has_many: rows.iter().any(|row| row.tokens > 1),
        };
        let rule = AttentionRule {
            scale: scoring.scale,
            causal: plan.causal,
            window: scoring.window.map_or(0, |window| window.get()),
            softcap: scoring.softcap.unwrap_or(0.0),
        };
        let kernels = self.kernels(q.raw().dtype)?;
        Ok(kernels.run(&stream, q, out, &pages.k, &pages.v, &rows, rule)?)
    }

    /// What [`Cuda::run`] computes, for who does it himself; `None` where sums must have the prefill kernel's order.
    ///
    /// # Errors
    /// As for [`Cuda::run`].
    pub(crate) fn describe(&self, work: &Work<'_>, layer: u32) -> Result<Option<Attending>> {
        let Work { plan, group, kv, cache, scoring, .. } = *work;
        if self.shape.batch_invariant {
            return Ok(None);
        }
        let RowColumns { seat, span, len, token_start } = plan.device.part(group)?;
        Ok(Some(Attending {
            seat,
            span,
            len,
            token_start,
            table: kv.device.table,
            table_stride: kv.table_stride,
            keys: cache.layer(layer)?.k.raw().data as u64,
            scale: scoring.scale,
            softcap: scoring.softcap.unwrap_or(0.0),
            window: scoring.window.map_or(0, |window| window.get()),
            is_causal: plan.causal,
        }))
    }

    /// The last token of each row of a group.
    ///
    /// # Errors
    /// As for [`Cuda::run`].
    pub(crate) fn select_last(
        &self,
        ctx: &StepContext<'_>,
        plan: &AttentionPlan,
        group: &Group,
        hidden: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let RowColumns { token_start, span, .. } = plan.device.part(group)?;
        Ok(self.last.pick(&stream, hidden, token_start, span, out)?)
    }

    /// Copies the rows of a plan to the device, where they read other streams than the rows of `kv`.
    ///
    /// # Errors
    /// `EXHAUSTED` at the first use of a slot, without memory for it.
    pub(crate) fn upload(
        &self,
        ctx: &StepContext<'_>,
        plan: &mut AttentionPlan,
        kv: &KvPlan,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ctx.slot() as usize;
        if slots.len() <= at {
            slots.resize_with(at + 1, || None);
        }
        let slot = match &mut slots[at] {
            Some(slot) => slot,
            empty => empty.insert(self.new_slot()?),
        };
        slot.values.iter_mut().for_each(Vec::clear);
        let [seat, span, len, token_start] = &mut slot.values;
        for row in plan.rows.iter() {
            seat.push(kv.seat.get(row.kv_row as usize).copied().unwrap_or(0));
            span.push(row.tokens);
            len.push(row.keys);
            token_start.push(row.first_token);
        }
        slot.columns.upload(&stream, &[seat, span, len, token_start])?;
        let column = |which| slot.columns.column(which, plan.rows.len());
        plan.device = RowColumns {
            seat: column(0)?,
            span: column(1)?,
            len: column(2)?,
            token_start: column(3)?,
        };
        Ok(())
    }

    fn new_slot(&self) -> Result<Slot> {
        let room = [self.max_rows; 4];
        Ok(Slot {
            _budget: Budget::take(&self.host, self.device, Columns::bytes(&room))?,
            columns: Columns::new(&self.context, &room)?,
            values: std::array::from_fn(|_| Vec::with_capacity(self.max_rows)),
        })
    }
}
