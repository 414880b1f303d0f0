//! What the kit writes into a cache, and how it knows what it reads back.
//!
//! A token's keys and values follow from a digest of everything in its stream up to it, so that a
//! wrong page, slot, layer or stale contents show in what is read, whatever the counts say. All
//! values are whole numbers below 256, which f32, f16 and bf16 hold exactly and fp8 rounds; of a cache of int8,
//! whose rows have their scales behind them, a value is within half a step.

use device::E4m3;
use device::attention::SCALE_BYTES;
use half::{bf16, f16};
use resource_api::{DType, KvCache, KvCacheHandle, KvFacts, KvPlan, LabelId, TensorView, TypedRef};

use super::random::mix;
use super::rig::{Rig, told};
use super::step::Step;

/// Digest of a stream that goes on with token `id` after `history`.
pub fn extend(history: u64, id: u32) -> u64 {
    mix(history ^ mix(u64::from(id) + 1))
}

/// The element at `at` of a token's row in a layer; `which` is 0 for keys, 1 for values.
fn element(token: u64, layer: u32, which: usize, at: usize) -> f32 {
    let place = (u64::from(layer) << 32) | ((at as u64) << 1) | which as u64;
    (mix(token ^ mix(place)) & 0xff) as f32
}

fn row(facts: &KvFacts, token: u64, layer: u32, which: usize) -> impl Iterator<Item = f32> {
    let elements = (facts.num_kv_heads * facts.head_dim) as usize;
    (0..elements).map(move |at| element(token, layer, which, at))
}

/// A cache with its geometry.
pub struct Cells {
    /// The cache.
    pub kv: KvCacheHandle,
    /// Its geometry.
    pub facts: KvFacts,
    /// Where its plans are filed.
    pub index: usize,
}

impl Cells {
    /// The cache of the rig; `None` where nothing offers one.
    ///
    /// # Errors
    /// When it offers `kv.cache/1` and does not describe itself, or in a way that cannot be.
    pub fn of(rig: &Rig) -> Result<Option<Cells>, String> {
        let Some((index, kv)) = rig.capability::<KvCacheHandle>() else { return Ok(None) };
        let facts = resource_api::Resource::describe(rig.part(index));
        let facts = facts.iter().find_map(|f| f.open::<KvFacts>().ok().copied());
        let Some(facts) = facts else {
            return Err("it offers kv.cache/1 and `describe` has no kv.facts/1".into());
        };
        let KvFacts { num_layers, num_kv_heads, head_dim, page_size, num_pages, .. } = facts;
        if [num_layers, num_kv_heads, head_dim, page_size].contains(&0) || num_pages < 2 {
            return Err(format!("its geometry cannot be: {facts:?}"));
        }
        Ok(Some(Cells { kv, facts, index }))
    }

    /// The plan in `plans`.
    ///
    /// # Errors
    /// When there is none, or columns disagree.
    pub fn plan<'a>(&self, plans: &[TypedRef<'a>]) -> Result<&'a KvPlan, String> {
        let plan = plans[self.index].open::<KvPlan>().map_err(|e| told(&e))?;
        let rows = plan.request.len();
        let of_rows = [
            plan.seat.len(),
            plan.start.len(),
            plan.span.len(),
            plan.len.len(),
            plan.token_start.len(),
            plan.last_page_len.len(),
        ];
        let grouped: u32 = plan.groups.iter().map(|g| g.num_rows).sum();
        let tokens: u32 = plan.groups.iter().map(|g| g.num_tokens).sum();
        if of_rows.iter().any(|&n| n != rows) || grouped as usize != rows {
            return Err(format!("columns of its plan disagree: {rows} requests, {of_rows:?}"));
        }
        if plan.write_page.len() != tokens as usize || plan.write_slot.len() != tokens as usize {
            return Err(format!("its plan writes {} of {tokens} tokens", plan.write_page.len()));
        }
        let size = self.facts.page_size;
        for row in 0..rows {
            let first = plan.seat[row] as usize * plan.table_stride as usize;
            let last = first + plan.len[row].div_ceil(size) as usize;
            let known = |page: &u32| *page < self.facts.num_pages;
            if !plan.table.get(first..last).is_some_and(|pages| pages.iter().all(known)) {
                return Err(format!("the page table of row {row} is cut short or out of the pool"));
            }
            let (len, tail) = (plan.len[row], plan.last_page_len[row]);
            let want = if len == 0 { 0 } else { (len - 1) % size + 1 };
            if tail != want {
                return Err(format!("row {row} of {len} tokens: last_page_len is {tail}"));
            }
        }
        Ok(plan)
    }

    /// Writes the tokens of a step, given by digest in the order of its rows, through `write_kv`.
    ///
    /// # Errors
    /// What `write_kv` says.
    pub fn write(
        &self,
        rig: &Rig,
        step: &Step,
        plans: &[TypedRef<'static>],
        tokens: &[u64],
    ) -> Result<(), String> {
        for label in step.plan_labels() {
            let mine = of_label(step, tokens, label);
            if mine.is_empty() {
                continue;
            }
            let (heads, dim) = (self.facts.num_kv_heads as usize, self.facts.head_dim as usize);
            for layer in 0..self.facts.num_layers {
                rig.say(&format!("write_kv layer {layer} label {} of {step}", label.0));
                let all = |which| -> Vec<f32> {
                    mine.iter().flat_map(|&t| row(&self.facts, t, layer, which)).collect()
                };
                let (mut k, mut v) = (all(0), all(1));
                let shape = [mine.len(), heads, dim];
                let done = rig.call(step, self.index, plans, |_, ctx| {
                    let k = TensorView::from_slice(&k, &shape);
                    let v = TensorView::from_slice(&v, &shape);
                    self.kv.write_kv(ctx, layer, label, &k, &v)
                });
                // A cache that kept the view would read these.
                k.fill(f32::NAN);
                v.fill(f32::NAN);
                done.map_err(|e| format!("write_kv: {}", told(&e)))?;
            }
        }
        Ok(())
    }

    /// Compares what row `row` of a plan reads, through its page table and the strides of the layer
    /// views, with the tokens that it should read.
    ///
    /// # Errors
    /// The first place that differs.
    pub fn compare(&self, plan: &KvPlan, row: usize, want: &[u64]) -> Result<(), String> {
        let whose = format!("row {row} ({})", plan.request[row]);
        if plan.len[row] as usize != want.len() {
            return Err(format!("{whose} reads {} tokens, not {}", plan.len[row], want.len()));
        }
        let pages = plan.pages(row, self.facts.page_size);
        let row_of = |token, layer, which| self::row(&self.facts, token, layer, which);
        for layer in 0..self.facts.num_layers {
            let view = self.kv.layer_view(layer).map_err(|e| told(&e))?;
            for (at, &token) in want.iter().enumerate() {
                let page = pages[at / self.facts.page_size as usize];
                let slot = at % self.facts.page_size as usize;
                for (which, tensor) in [(0, &view.k), (1, &view.v)] {
                    let found = self.load(tensor, page, slot).ok_or_else(|| {
                        format!("layer {layer}: page {page} lies outside of the layer's view")
                    })?;
                    let want: Vec<f32> = row_of(token, layer, which).collect();
                    if !self.is_row(&found, &want) {
                        let name = ["keys", "values"][which];
                        return Err(format!(
                            "{whose}: position {at} (page {page}, slot {slot}) of layer {layer} \
                             holds other {name} than were written for it"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether what was read of a token's row is what was written, as exactly as the cache keeps it.
    fn is_row(&self, found: &[f32], want: &[f32]) -> bool {
        match self.facts.dtype {
            DType::I8 => {}
            DType::F8E4M3 => {
                return want.iter().map(|&x| E4m3::from_f32(x).to_f32()).eq(found.iter().copied());
            }
            _ => return found == want,
        }
        let dim = self.facts.head_dim as usize;
        found.len() == want.len()
            && found.chunks(dim).zip(want.chunks(dim)).all(|(found, want)| {
                let half = want.iter().fold(0.0, |most: f32, x| most.max(x.abs())) / 254.0 * 1.0001;
                found.iter().zip(want).all(|(a, b)| (a - b).abs() <= half)
            })
    }

    /// One token's row, by the strides of the view.
    fn load(&self, tensor: &TensorView<'_>, page: u32, slot: usize) -> Option<Vec<f32>> {
        let strides = tensor.raw().strides;
        let stride = |axis: usize| usize::try_from(strides[axis]).ok();
        let dim = self.facts.head_dim as usize;
        let mut all = Vec::new();
        for head in 0..self.facts.num_kv_heads as usize {
            let start = page as usize * stride(0)? + slot * stride(1)? + head * stride(2)?;
            match tensor.raw().dtype {
                DType::F32 => all.extend(tensor.window::<f32>(start, dim)?),
                DType::I8 => {
                    let row = tensor.window::<i8>(start, dim + SCALE_BYTES)?;
                    let (elements, scale) = row.split_last_chunk::<SCALE_BYTES>()?;
                    let scale = f32::from_ne_bytes(scale.map(|byte| byte as u8));
                    all.extend(elements.iter().map(|&x| f32::from(x) * scale));
                }
                DType::F8E4M3 => {
                    all.extend(tensor.window::<E4m3>(start, dim)?.iter().map(|x| x.to_f32()))
                }
                DType::F16 => {
                    all.extend(tensor.window::<f16>(start, dim)?.iter().map(|x| x.to_f32()))
                }
                _ => all.extend(tensor.window::<bf16>(start, dim)?.iter().map(|x| x.to_f32())),
            }
        }
        Some(all)
    }
}

/// The tokens of one plan label's rows, in packed order.
fn of_label(step: &Step, tokens: &[u64], label: LabelId) -> Vec<u64> {
    let mut ends = Vec::new();
    for row in &step.rows {
        ends.push(ends.last().unwrap_or(&0) + row.span as usize);
    }
    let own = |row: usize| &tokens[ends[row] - step.rows[row].span as usize..ends[row]];
    step.rows_of(label).into_iter().flat_map(own).copied().collect()
}

/// The row of a plan that is this row of its step: groups take rows label by label.
pub fn planned_row(step: &Step, plan: &KvPlan, row: usize) -> Option<usize> {
    let wanted = step.rows[row];
    let label = step.plan_label(wanted.label);
    let group = plan.group(label)?;
    let rows = group.first_row as usize..(group.first_row + group.num_rows) as usize;
    let at = rows.start + step.rows_of(label).iter().position(|&r| r == row)?;
    (rows.contains(&at) && plan.request[at] == wanted.rid).then_some(at)
}
