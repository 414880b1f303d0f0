//! `kv.cache/1`.

use resource_api::{
    ErrorKind, KvCache, KvLayer, KvPlan, LabelId, RequestId, ResourceError, Result, StepContext,
    TensorView, TensorViewMut,
};

use super::FakeCache;
use super::fault::Fault;

fn internal(e: device::Error) -> ResourceError {
    ResourceError::internal(e.to_string())
}

impl FakeCache {
    fn check_layer(&self, layer: u32) -> Result<()> {
        let layers = self.facts.num_layers;
        match layer < layers {
            true => Ok(()),
            false => Err(ResourceError::invalid(format!("layer {layer} of {layers}"))),
        }
    }

    /// Page and slot of each token of a label in this step.
    fn places(&self, ctx: &StepContext<'_>, label: LabelId) -> Result<Vec<(u32, u32)>> {
        let plan = ctx.plan_result::<KvPlan>(self.index)?;
        let Some(group) = plan.group(label) else {
            let message = format!("label {} is not planned in this step", label.0);
            return Err(ResourceError::new(ErrorKind::NOT_FOUND, message));
        };
        let tokens = group.first_token as usize..(group.first_token + group.num_tokens) as usize;
        let places = plan.write_page[tokens.clone()].iter().zip(&plan.write_slot[tokens]);
        Ok(places.map(|(&page, &slot)| (page, slot)).collect())
    }

    fn load(
        &self,
        layer: u32,
        which: u64,
        places: &[(u32, u32)],
        tensor: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let reader = self.memory.view().reader();
        let rows = tensor.as_mut_slice::<f32>().unwrap_or_default();
        let mut rows = places.iter().zip(rows.chunks_exact_mut(self.row()));
        rows.try_for_each(|(&(page, slot), row)| {
            reader.load(self.place(layer, which, page, slot), row).map_err(internal)
        })
    }

    fn row(&self) -> usize {
        self.facts.slot_stride as usize
    }
}

impl KvCache for FakeCache {
    fn write_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        let layer = if self.has(Fault::WrongLayer) { 0 } else { layer };
        let places = self.places(ctx, label)?;
        let (row, dim) = (self.row(), self.facts.head_dim as usize);
        let writer = self.memory.view().writer();
        for (which, tensor) in [(0, k), (1, v)] {
            let rows = tensor.as_slice::<f32>().filter(|all| all.len() >= places.len() * row);
            let rows = rows.ok_or_else(|| {
                let shape = tensor.shape();
                ResourceError::invalid(format!("{shape:?} is not contiguous f32 of all tokens"))
            })?;
            for (&(page, slot), row) in places.iter().zip(rows.chunks_exact(row)) {
                let mut row = row.to_vec();
                if which == 1 && self.has(Fault::SwappedHeads) {
                    row.rotate_left(dim);
                }
                writer.store(self.place(layer, which, page, slot), &row).map_err(internal)?;
            }
        }
        Ok(())
    }

    fn read_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        let places = self.places(ctx, label)?;
        self.load(layer, 0, &places, k)?;
        self.load(layer, 1, &places, v)
    }

    fn layer_view(&self, layer: u32) -> Result<KvLayer<'_>> {
        self.check_layer(layer)?;
        let f = &self.facts;
        let shape = [f.num_pages, f.page_size, f.num_kv_heads, f.head_dim].map(|n| n as usize);
        let strides = [f.page_stride, f.slot_stride, f.head_stride, 1].map(|n| n as usize);
        let tensor = |which| {
            self.memory.tensor(self.place(layer, which, 0, 0), &shape, &strides).map_err(internal)
        };
        Ok(KvLayer { k: tensor(0)?, v: tensor(1)? })
    }

    fn stream_len(&self, rid: RequestId, label: LabelId) -> Result<u32> {
        if self.has(Fault::EarlyLength) {
            return Ok(self.with(|state| state.next_len((rid, label))));
        }
        Ok(self.board.lock().lengths.get(&(rid, label)).copied().unwrap_or(0))
    }

    fn has_room(&self, rid: RequestId, label: LabelId, tokens: u32) -> Result<bool> {
        let len = self.stream_len(rid, label)?;
        let board = self.board.lock();
        let held = board.held.get(&(rid, label)).copied().unwrap_or(0);
        let total = len.saturating_add(tokens);
        let fresh = total.div_ceil(self.facts.page_size).saturating_sub(held);
        Ok(total <= self.facts.max_seq_len && u64::from(fresh) <= board.free)
    }

    fn free_pages(&self) -> u64 {
        self.board.lock().free
    }

    fn correct_len(&self, rid: RequestId, label: LabelId, len: u32) -> Result<()> {
        self.rewind((rid, label), len)
    }
}
