//! Slots: the buffer sets that plans live in, leased to one step at a time.

use resource_api::{MAX_SLOTS, SlotLease};

use crate::error::{Error, ErrorKind, Result};

/// Free slots, the one that has been idle longest first, so that a late reader of a slot's last use
/// has the most time.
#[derive(Debug)]
pub struct Slots {
    free: std::collections::VecDeque<u32>,
    generations: Vec<u32>,
}

impl Slots {
    /// `count` slots, all free.
    pub fn new(count: usize) -> Self {
        let count = count.clamp(1, MAX_SLOTS) as u32;
        Self { free: (0..count).collect(), generations: vec![0; count as usize] }
    }

    /// Takes a slot for an eager step.
    ///
    /// # Errors
    /// When all are leased: a step was neither committed nor dropped.
    pub fn lease(&mut self) -> Result<SlotLease> {
        let Some(slot) = self.free.pop_front() else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("all {} slots are leased", self.generations.len()),
            ));
        };
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1);
        Ok(SlotLease::eager(slot, *generation))
    }

    /// Gives a slot back. A lease of an earlier generation is ignored.
    pub fn release(&mut self, lease: SlotLease) {
        let current = self.generations.get(lease.slot as usize) == Some(&lease.generation);
        if current && !self.free.contains(&lease.slot) {
            self.free.push_back(lease.slot);
        }
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_leased_once_and_comes_back_once() {
        let mut slots = Slots::new(2);
        let (a, b) = (slots.lease().unwrap(), slots.lease().unwrap());
        assert_ne!(a.slot, b.slot);
        assert!(slots.lease().is_err());
        slots.release(a);
        slots.release(a);
        assert_eq!(slots.free(), 1);
        let again = slots.lease().unwrap();
        assert_eq!((again.slot, again.generation), (a.slot, a.generation + 1));
        slots.release(a);
        assert_eq!(slots.free(), 0, "a stale lease frees nothing");
    }
}
