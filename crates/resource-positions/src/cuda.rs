//! Position ids and rotation on a CUDA device.

use std::sync::{Arc, Mutex, PoisonError};

use device::Budget;
use device::cuda::{Columns, Context, RopePhases, Stream, part_of};
use device::ops::RopeLayout;
use resource_api::{
    EngineResourceInfo, HostServicesHandle, PositionGroup, PositionsPlan, Result, StepContext,
    TensorViewMut, Turning,
};

/// What the device needs: the ids of every slot's plan, and the frequencies.
pub(crate) struct Cuda {
    context: Arc<Context>,
    turning: RopePhases,
    /// For the layers that turn by frequencies of their own.
    local: Option<RopePhases>,
    /// By slot, made at a slot's first use.
    slots: Mutex<Vec<Option<(Columns, Budget)>>>,
    /// Most tokens of a step.
    max_tokens: usize,
    host: HostServicesHandle,
}

impl Cuda {
    /// Loads the kernel, with these frequencies for heads of `head_dim`.
    ///
    /// # Errors
    /// `UNSUPPORTED` on a machine without the driver.
    pub(crate) fn new(
        info: &EngineResourceInfo,
        head_dim: u32,
        frequencies: &[f64],
        local: Option<&[f64]>,
        interleave: bool,
    ) -> Result<Self> {
        let context = Context::of_device(info.device)?;
        let layout = if interleave { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let phases = |of: &[f64]| RopePhases::new(&context, of, head_dim as usize, layout);
        Ok(Self {
            turning: phases(frequencies)?,
            local: local.map(phases).transpose()?,
            slots: Mutex::default(),
            max_tokens: info.limits.max_batch_tokens.max(1) as usize,
            host: info.host.clone(),
            context,
        })
    }

    /// Puts the copy of a plan's ids into the step's stream, and notes where they will be.
    ///
    /// # Errors
    /// `EXHAUSTED` at the first use of a slot, without memory for it.
    pub(crate) fn upload(&self, ctx: &StepContext<'_>, plan: &mut PositionsPlan) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = ctx.slot() as usize;
        if slots.len() <= slot {
            slots.resize_with(slot + 1, || None);
        }
        let (columns, _) = match &mut slots[slot] {
            Some(columns) => columns,
            empty => {
                let bytes = Columns::bytes(&[self.max_tokens]);
                let budget = Budget::take(&self.host, self.context.device(), bytes)?;
                empty.insert((Columns::new(&self.context, &[self.max_tokens])?, budget))
            }
        };
        columns.upload(&stream, &[&plan.pos_ids])?;
        plan.device = columns.column(0, plan.pos_ids.len())?;
        Ok(())
    }

    /// How a group is turned.
    ///
    /// # Errors
    /// `INTERNAL` for a plan that was not uploaded.
    pub(crate) fn turning(
        &self,
        plan: &PositionsPlan,
        group: &PositionGroup,
        is_local: bool,
    ) -> Result<Turning> {
        let (first, tokens) = (group.first_token as usize, group.num_tokens as usize);
        let (phases, is_interleaved) = self.phases(is_local).describe();
        Ok(Turning { positions: part_of(plan.device, first, tokens)?, phases, is_interleaved })
    }

    fn phases(&self, is_local: bool) -> &RopePhases {
        self.local.as_ref().filter(|_| is_local).unwrap_or(&self.turning)
    }

    /// Turns the queries and keys of a group.
    ///
    /// # Errors
    /// `INTERNAL` for tensors of another shape, type or place.
    pub(crate) fn turn(
        &self,
        ctx: &StepContext<'_>,
        plan: &PositionsPlan,
        group: &PositionGroup,
        is_local: bool,
        q: &mut TensorViewMut<'_>,
        k: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let stream = Stream::of_step(&self.context, ctx)?;
        let (first, tokens) = (group.first_token as usize, group.num_tokens as usize);
        let ids = part_of(plan.device, first, tokens)?;
        Ok(self.phases(is_local).turn(&stream, ids, q, k)?)
    }
}
