//! Plain memory standing in for a device's: slots of one token each.

use std::collections::BTreeSet;

/// A pool. The lowest free slot goes first, so that a slot that is given back leaves no trace in
/// the order in which others are taken.
#[derive(Debug)]
pub struct Pool {
    memory: Vec<u32>,
    free: BTreeSet<u32>,
}

impl Pool {
    /// A pool of `capacity` slots beside slot 0, the sink.
    pub fn new(capacity: u32) -> Self {
        Self { memory: vec![0; capacity as usize + 1], free: (1..=capacity).collect() }
    }

    /// How many slots are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The free slots.
    pub fn free_slots(&self) -> &BTreeSet<u32> {
        &self.free
    }

    /// Takes a slot.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop_first()
    }

    /// Takes `count` slots, or none when there are fewer.
    pub fn take_all(&mut self, count: usize) -> Option<Vec<u32>> {
        (self.free.len() >= count).then(|| (0..count).filter_map(|_| self.take()).collect())
    }

    /// Gives slots back.
    pub fn give_back(&mut self, slots: impl IntoIterator<Item = u32>) {
        self.free.extend(slots);
    }

    /// Writes a slot.
    pub fn write(&mut self, slot: u32, token: u32) {
        self.memory[slot as usize] = token;
    }

    /// Reads slots.
    pub fn read(&self, slots: &[u32]) -> Vec<u32> {
        slots.iter().map(|&slot| self.memory[slot as usize]).collect()
    }
}
