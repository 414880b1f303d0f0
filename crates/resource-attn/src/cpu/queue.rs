//! Hands parts of one buffer to whichever thread asks next.

use std::sync::{Mutex, PoisonError};

/// Tasks in order, each with its own part of a buffer. Parts may differ in size, which is why this
/// is no `chunks_mut`; taking one is a short lock, and nothing is allocated.
#[derive(Debug)]
pub(super) struct Queue<'a, I>(Mutex<(I, &'a mut [f32])>);

impl<'a, T, I: Iterator<Item = (T, usize)>> Queue<'a, I> {
    /// Tasks with the lengths of their parts, laid out one after the other in `buffer`.
    pub fn new(tasks: I, buffer: &'a mut [f32]) -> Self {
        Self(Mutex::new((tasks, buffer)))
    }

    /// The next task and its part; `None` when all are taken or the buffer is used up.
    pub fn next(&self) -> Option<(T, &'a mut [f32])> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (task, len) = state.0.next()?;
        let (part, rest) = std::mem::take(&mut state.1).split_at_mut_checked(len)?;
        state.1 = rest;
        Some((task, part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_goes_to_one_taker() {
        let lens = [3usize, 0, 1, 5, 2];
        let mut buffer = [0.0f32; 11];
        let queue = Queue::new(lens.iter().copied().enumerate(), &mut buffer);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while let Some((task, part)) = queue.next() {
                        assert_eq!(part.len(), lens[task]);
                        part.iter_mut().for_each(|x| *x += (task + 1) as f32);
                    }
                });
            }
        });
        assert_eq!(buffer, [1.0, 1.0, 1.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 5.0, 5.0]);
    }
}
