//! Slots: the buffer sets that plans live in, leased to one step at a time.

use std::collections::VecDeque;

use resource_api::{BucketKey, MAX_SLOTS, SlotLease};

use crate::error::{Error, ErrorKind, Result};

/// Slots of an engine on the CPU: a step is over when it is committed, so that one runs and one is
/// planned meanwhile. A page that begins is written to the table of every slot: more would cost more.
pub const ON_CPU: usize = 2;

/// Slots of an engine on a device, which is behind the host.
pub const ON_DEVICE: usize = 4;

/// Buffer sets of a bucket: one for the step that runs, one for the step that is planned meanwhile.
const PER_BUCKET: u32 = 2;

/// Free slots, the one that has been idle longest first, so that a late reader of a slot's last use
/// has the most time.
#[derive(Debug)]
pub struct Slots {
    free: VecDeque<u32>,
    buckets: Vec<Bucket>,
    generations: Vec<u32>,
}

/// A captured shape, whose slots no other shape uses.
#[derive(Debug)]
struct Bucket {
    key: BucketKey,
    free: VecDeque<u32>,
}

impl Slots {
    /// `count` slots for steps of any shape, all free.
    pub fn new(count: usize) -> Self {
        let count = count.clamp(1, MAX_SLOTS) as u32;
        let generations = vec![0; count as usize];
        Self { free: (0..count).collect(), buckets: Vec::new(), generations }
    }

    /// Adds slots of captured shapes, as many shapes as there is room for; answers how many those are.
    pub fn add_buckets(&mut self, keys: &[BucketKey]) -> usize {
        let room = (MAX_SLOTS - self.generations.len()) / PER_BUCKET as usize;
        let keys = &keys[..keys.len().min(room)];
        for &key in keys {
            let first = self.generations.len() as u32;
            self.buckets.push(Bucket { key, free: (first..first + PER_BUCKET).collect() });
            self.generations.resize((first + PER_BUCKET) as usize, 0);
        }
        keys.len()
    }

    /// Forgets the captured shapes. Their slots must be free.
    pub fn remove_buckets(&mut self) {
        let slots: usize = self.buckets.drain(..).map(|_| PER_BUCKET as usize).sum();
        self.generations.truncate(self.generations.len() - slots);
    }

    /// The slots of all captured shapes.
    pub fn of_buckets(&self) -> impl Iterator<Item = (BucketKey, u32)> {
        self.buckets.iter().flat_map(|b| b.free.iter().map(move |&slot| (b.key, slot)))
    }

    /// Takes a slot: of `bucket` if it is given, known and has one free, otherwise one for any shape.
    ///
    /// # Errors
    /// When all are leased: a step was neither committed nor dropped.
    pub fn lease(&mut self, bucket: Option<&BucketKey>) -> Result<SlotLease> {
        let of_bucket = bucket.and_then(|key| {
            let bucket = self.buckets.iter_mut().find(|b| b.key == *key)?;
            Some((bucket.free.pop_front()?, bucket.key))
        });
        let any = || self.free.pop_front();
        let Some(slot) = of_bucket.map(|(slot, _)| slot).or_else(any) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("all {} slots are leased", self.generations.len()),
            ));
        };
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1);
        let lease = SlotLease::eager(slot, *generation);
        Ok(match of_bucket {
            Some((_, bucket)) => SlotLease { bucket, has_bucket: true, ..lease },
            None => lease,
        })
    }

    /// Gives a slot back. A lease of an earlier generation is ignored.
    pub fn release(&mut self, lease: SlotLease) {
        let current = self.generations.get(lease.slot as usize) == Some(&lease.generation);
        let of_bucket = self.buckets.iter_mut().find(|b| lease.bucket() == Some(&b.key));
        let free = of_bucket.map_or(&mut self.free, |bucket| &mut bucket.free);
        if current && !free.contains(&lease.slot) {
            free.push_back(lease.slot);
        }
    }

    /// How many are free for steps of any shape.
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use resource_api::WalkId;

    #[test]
    fn a_slot_is_leased_once_and_comes_back_once() {
        let mut slots = Slots::new(2);
        let (a, b) = (slots.lease(None).unwrap(), slots.lease(None).unwrap());
        assert_ne!(a.slot, b.slot);
        assert!(slots.lease(None).is_err());
        slots.release(a);
        slots.release(a);
        assert_eq!(slots.free(), 1);
        let again = slots.lease(None).unwrap();
        assert_eq!((again.slot, again.generation), (a.slot, a.generation + 1));
        slots.release(a);
        assert_eq!(slots.free(), 0, "a stale lease frees nothing");
    }

    #[test]
    fn a_captured_shape_has_two_slots_and_then_takes_any() {
        let key = |bs| BucketKey { graph_walk: WalkId(1), bs, num_tokens: bs, cg_key_info: 0 };
        let mut slots = Slots::new(1);
        assert_eq!(slots.add_buckets(&[key(1), key(2)]), 2);
        let of: Vec<_> = slots.of_buckets().map(|(key, slot)| (key.bs, slot)).collect();
        assert_eq!(of, [(1, 1), (1, 2), (2, 3), (2, 4)]);
        let leases: Vec<_> = (0..3).map(|_| slots.lease(Some(&key(2))).unwrap()).collect();
        assert_eq!(leases.iter().map(|l| l.slot).collect::<Vec<_>>(), [3, 4, 0]);
        assert_eq!(leases.iter().map(|l| l.has_bucket).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(slots.free(), 0);
        leases.into_iter().for_each(|l| slots.release(l));
        assert_eq!((slots.free(), slots.of_buckets().count()), (1, 4));
        assert!(!slots.lease(Some(&key(3))).unwrap().has_bucket, "nobody captured that");
        slots.remove_buckets();
        assert!(slots.lease(Some(&key(2))).is_err());
        let many: Vec<_> = (0..500).map(key).collect();
        assert_eq!(Slots::new(4).add_buckets(&many), (MAX_SLOTS - 4) / 2);
    }
}
