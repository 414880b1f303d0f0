//! The CPU back end: blocks of a plan over the host's threads.

mod block;
mod hidden;
mod pages;
mod queue;
mod reads;
mod spans;
mod state;

pub(crate) use hidden::select_last;

use crate::cache::Cache;
use crate::layout::BLOCKS_PER_THREAD;
use crate::plan::{AttentionPlan, Group, NONE};
use crate::spec::Scoring;
use block::{Inputs, Scratch, at_least, heads_together, ranges};
use pages::Pages;
use queue::Queue;
use resource_api::{
    HostServices, HostServicesHandle, KvPlan, ResourceError, Result, TensorView, TensorViewMut,
};
use state::State;
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};

/// Keys that are reduced together, counted from the start of a stream. Part of what an output is to
/// the bit: it does not follow the page size, the batch or the machine.
pub const CHUNK: u32 = 256;

/// One group's attention in one step.
#[derive(Debug)]
pub(crate) struct Work<'a> {
    pub plan: &'a AttentionPlan,
    pub group: &'a Group,
    pub kv: &'a KvPlan,
    pub cache: &'a Cache,
    /// How this layer's scores are made.
    pub scoring: &'a Scoring,
    /// The window that the plan was cut for: this layer's, or none.
    pub planned_window: Option<NonZeroU32>,
    pub host: &'a HostServicesHandle,
}

thread_local! {
    /// One for each thread that takes part, all made by the thread that starts them: one that had its own
    /// would allocate in the step in which it first comes in time to take part.
    static SCRATCH: RefCell<Vec<Mutex<Scratch>>> = const { RefCell::new(Vec::new()) };
    static PARTIALS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes `out` for the tokens of the group; what `out` has beyond them becomes 0.
///
/// # Errors
/// `INVALID` for tensors of another shape or type, `INTERNAL` for a plan that points outside of the
/// cache, and those of the cache.
pub(crate) fn attend(
    work: &Work<'_>,
    layer: u32,
    q: &TensorView<'_>,
    out: &mut TensorViewMut<'_>,
) -> Result<()> {
    let tokens = work.group.num_tokens as usize;
    let width = work.cache.query_heads() * work.cache.head_dim() as usize;
    check(work, "q", q)?;
    check(work, "out", &out.view())?;
    let (Some(q), Some(out)) = (q.as_slice::<f32>(), out.as_mut_slice::<f32>()) else {
        return Err(ResourceError::invalid("q and out must be contiguous f32 on the CPU"));
    };
    let (out, beyond) = out.split_at_mut(tokens * width);
    beyond.fill(0.0);
    if tokens == 0 {
        return Ok(());
    }
    let layer = work.cache.layer(layer)?;
    let (k, v) = (Pages::new(layer.k, work.cache)?, Pages::new(layer.v, work.cache)?);
    let inputs = Inputs { work, k, v, q };

    let rows = work.cache.query_heads() / work.cache.kv_heads();
    let part = State::len(rows, work.cache.head_dim() as usize);
    let heads = work.cache.kv_heads();
    let blocks = work.plan.blocks_of(work.group);
    let mut scratch = SCRATCH.take();
    scratch.resize_with(scratch.len().max(work.host.threads() as usize), Mutex::default);
    scratch
        .iter_mut()
        .for_each(|s| s.get_mut().unwrap_or_else(PoisonError::into_inner).fit(work.cache));
    let mut kept = PARTIALS.take();
    let wanted = work.group.num_partials as usize * heads * part;
    if wanted > kept.capacity() {
        // At once what the longest stream needs: by a chunk at a time, steps would allocate later.
        let longest = work.cache.max_seq_len().div_ceil(CHUNK) as usize * heads * part;
        kept.reserve_exact(wanted.max(longest) - kept.len());
    }
    let partials = at_least(&mut kept, wanted);
    let mut done = Ok(());
    if !partials.is_empty() {
        let split = blocks.iter().filter(|b| b.first_partial != NONE);
        let chunks = split.flat_map(|b| inputs.task(b).planned_chunks().map(move |c| (b, c)));
        // As many heads in one task as leave enough tasks for the threads.
        let tasks = work.host.threads() as usize * BLOCKS_PER_THREAD as usize;
        let all = work.group.num_partials as usize * heads;
        let together = (all / tasks.max(1)).clamp(1, heads_together(rows, heads));
        let units = chunks.flat_map(|(b, c)| {
            ranges(heads, together).map(move |heads| {
                let len = heads.len() * part;
                ((b, c, heads), len)
            })
        });
        done = spread(work.host, &scratch, all.div_ceil(together), units, partials, {
            |(block, chunk, heads), scratch, parts| {
                let task = inputs.task(block);
                if !task.chunks().contains(&chunk) {
                    return Ok(());
                }
                task.chunk(chunk, heads, &mut scratch.tables, parts)
            }
        });
    }
    if done.is_ok() {
        let partials = &*partials;
        let units = blocks.iter().map(|b| (b, b.tokens as usize * width));
        done = spread(work.host, &scratch, blocks.len(), units, out, |block, scratch, out| {
            let task = inputs.task(block);
            if task.row.kv_row == NONE {
                out.fill(0.0);
                return Ok(());
            }
            if block.first_partial == NONE {
                return task.whole(scratch, out);
            }
            let first = block.first_partial as usize * heads * part;
            task.merged(scratch, &partials[first..], out);
            Ok(())
        });
    }
    PARTIALS.set(kept);
    SCRATCH.set(scratch);
    done
}

/// Runs `body` once for each of `count` tasks with its part of `buffer`, on the host's threads.
/// After an error no further task starts.
fn spread<T: Send, I: Iterator<Item = (T, usize)> + Send>(
    host: &HostServicesHandle,
    scratch: &[Mutex<Scratch>],
    count: usize,
    tasks: I,
    buffer: &mut [f32],
    body: impl Fn(T, &mut Scratch, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
    let queue = Queue::new(tasks, buffer);
    let failure = Mutex::new(None);
    let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner);
    let workers = scratch.len().min(count).max(1) as u32;
    host.run(workers, |i| {
        let Some(scratch) = scratch.get(i as usize) else { return };
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((task, part)) = queue.next() {
            if let Err(e) = body(task, &mut scratch, part) {
                *failed() = Some(e);
            }
        }
    });
    let failure = failed().take();
    failure.map_or(Ok(()), Err)
}

/// Whether `tensor` is `[tokens of the group or more, query heads, head dim]`.
fn check(work: &Work<'_>, name: &str, tensor: &TensorView<'_>) -> Result<()> {
    let (tokens, heads) = (work.group.num_tokens as i64, work.cache.query_heads() as i64);
    let head_dim = i64::from(work.cache.head_dim());
    match *tensor.shape() {
        [n, h, d] if n >= tokens && h == heads && d == head_dim => Ok(()),
        ref shape => Err(ResourceError::invalid(format!(
            "{name} is {shape:?}; this step needs [{tokens}, {heads}, {head_dim}]"
        ))),
    }
}
