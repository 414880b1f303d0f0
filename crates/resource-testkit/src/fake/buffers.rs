//! Buffers that captured graphs read: they grow by a new one beside the old ones.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use resource_api::{BucketKey, CGSlotSpec, Exclusive, ResourceError, Result, SlotLease};

const SLOTS: usize = 16;
const GENERATIONS: usize = 8;

type Buffer = Box<[AtomicU32]>;

/// Per slot a list of buffers that is only ever appended to, and which of them each bucket was
/// sized with: its graph goes on reading that one.
#[derive(Debug, Default)]
pub struct GraphBuffers {
    buffers: [[OnceLock<Buffer>; GENERATIONS]; SLOTS],
    used_by: Exclusive<HashMap<(BucketKey, u32), usize>>,
}

impl GraphBuffers {
    /// Makes sure that each of `specs` has a buffer of at least its tokens and `at_least`.
    pub fn grow(&self, specs: &[CGSlotSpec], at_least: u32) -> Result<()> {
        let mut used_by = self.used_by.lock();
        for spec in specs {
            let Some(slot) = self.buffers.get(spec.slot as usize) else {
                return Err(ResourceError::invalid(format!("slot {} is past {SLOTS}", spec.slot)));
            };
            let len = spec.num_tokens().max(at_least) as usize;
            let made = slot.iter().take_while(|b| b.get().is_some()).count();
            let newest = made.checked_sub(1).and_then(|at| Some((at, slot[at].get()?.len())));
            let at = match newest {
                Some((at, room)) if room >= len => at,
                _ if made == GENERATIONS => {
                    return Err(ResourceError::invalid(format!(
                        "slot {} grew too often",
                        spec.slot
                    )));
                }
                _ => {
                    slot[made].get_or_init(|| (0..len).map(|_| AtomicU32::new(0)).collect());
                    made
                }
            };
            used_by.entry((spec.bucket, spec.slot)).or_insert(at);
        }
        Ok(())
    }

    /// Writes what the graph of the lease's bucket is to read; nothing for an eager step.
    pub fn write(&self, lease: &SlotLease, values: &[u32]) -> Result<()> {
        let Some(bucket) = lease.bucket() else { return Ok(()) };
        let at = self.used_by.lock().get(&(*bucket, lease.slot)).copied();
        let at = at.ok_or_else(|| {
            ResourceError::wrong_state("the bucket has no buffers: build_cuda_graph_buffers first")
        })?;
        let buffer = self.get(lease.slot, at as u32)?;
        if values.len() > buffer.len() {
            let message = format!("{} tokens for a graph of {}", values.len(), buffer.len());
            return Err(ResourceError::invalid(message));
        }
        for (cell, &value) in buffer.iter().zip(values.iter().chain(std::iter::repeat(&0))) {
            cell.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The `at`-th buffer of `slot`.
    pub fn get(&self, slot: u32, at: u32) -> Result<&[AtomicU32]> {
        let buffer = self.buffers.get(slot as usize).and_then(|s| s.get(at as usize)?.get());
        buffer.map(|b| &**b).ok_or_else(|| {
            let message = format!("slot {slot} has no buffer {at}");
            ResourceError::new(resource_api::ErrorKind::NOT_FOUND, message)
        })
    }
}
