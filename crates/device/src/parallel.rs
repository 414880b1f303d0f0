//! How kernels spread work over threads without owning any.

use std::sync::atomic::{AtomicU64, Ordering};

/// Threads that kernels may use. The host owns them; plugins reach them through its services.
pub trait Parallel: Send + Sync {
    /// How many threads take part in a [`run`](Self::run), the caller included; at least 1.
    fn threads(&self) -> usize;

    /// Calls `f(i)` once for each `i` below `tasks`, on any thread and in any order, and returns when
    /// all are done. A panic in `f` reaches the caller.
    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync));
}

/// Everything on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(f);
    }
}

/// Calls `f` once for each index below `tasks`, even where `parallel` does not keep its promise.
///
/// [`Parallel`] is safe to implement, so code that hands out disjoint parts of memory by task index
/// may not trust the indices it is given. Here each call takes tasks itself; what is left over runs at
/// the end. Tasks that are neighbours go to the same thread, as far as threads come along equally well: what
/// they read lies side by side, and memory is fast where it is read in order.
pub(crate) fn run_once_each(parallel: &dyn Parallel, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
    let threads = parallel.threads().clamp(1, MOST_SHARES).min(tasks);
    if threads <= 1 {
        return (0..tasks).for_each(f);
    }
    let shares = Shares::new(tasks, threads);
    parallel.run(threads, &|thread| shares.work(thread % threads, f));
    shares.work(0, f);
}

/// More threads than this share shares.
const MOST_SHARES: usize = 16;

/// Tasks in order, divided among threads.
struct Shares {
    /// Of each share the tasks that nobody has taken: the first in the low half, the end in the high one.
    left: [Share; MOST_SHARES],
    threads: usize,
}

/// Alone on its cache lines: its thread writes it for each task.
#[repr(align(128))]
struct Share(AtomicU64);

impl Shares {
    fn new(tasks: usize, threads: usize) -> Self {
        let bound = |i: usize| (i * tasks / threads) as u64;
        let left = |i: usize| match i < threads {
            true => bound(i) | bound(i + 1) << 32,
            false => 0,
        };
        assert!(u32::try_from(tasks).is_ok(), "{tasks} tasks in one go");
        Self { left: std::array::from_fn(|i| Share(AtomicU64::new(left(i)))), threads }
    }

    /// Does what is left of share `own` from its beginning, then what is left of others from their ends.
    fn work(&self, own: usize, f: &(dyn Fn(usize) + Sync)) {
        while let Some(task) = self.take(own, |first, end| (first, first + 1, end)) {
            f(task);
        }
        for other in (1..self.threads).map(|i| (own + i) % self.threads) {
            while let Some(task) = self.take(other, |first, end| (end - 1, first, end - 1)) {
                f(task);
            }
        }
    }

    /// A task of a share, by what `divide` makes of the share's first and end: the task, and what is left.
    fn take(&self, share: usize, divide: fn(u64, u64) -> (u64, u64, u64)) -> Option<usize> {
        let left = &self.left[share].0;
        // Relaxed: a task is what its number says, and what `parallel` promises orders the results.
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            let (first, end) = (left & u64::from(u32::MAX), left >> 32);
            let (_, first, end) = (first < end).then(|| divide(first, end))?;
            Some(first | end << 32)
        });
        let left = before.ok()?;
        Some(divide(left & u64::from(u32::MAX), left >> 32).0 as usize)
    }
}

/// A mutable slice whose disjoint parts go to different tasks.
pub(crate) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    _owner: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out `&mut [T]` parts, which `get` requires to be disjoint: sharing it is
// sending those parts, so `T: Send` is enough.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), _owner: std::marker::PhantomData }
    }

    /// The elements `start..start + len`, checked against the slice's end.
    ///
    /// # Safety
    /// No other part that overlaps these elements may be alive while this one is.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's duty
    pub(crate) unsafe fn get(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part out of range");
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

/// Splits `data` into chunks of `chunk` elements (the last may be shorter) and calls `f(i, chunk i)`
/// for each, spread over the threads of `parallel`.
///
/// # Panics
/// When `chunk` is 0.
pub fn for_each_chunk_mut<T: Send>(
    parallel: &dyn Parallel,
    data: &mut [T],
    chunk: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    assert!(chunk > 0, "a chunk must have at least one element");
    let len = data.len();
    let shared = Shared::new(data);
    run_once_each(parallel, len.div_ceil(chunk), &|i| {
        let start = i * chunk;
        // SAFETY: each index comes up once, and chunks of different indices do not overlap.
        f(i, unsafe { shared.get(start, chunk.min(len - start)) });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Breaks every promise: repeats some tasks, leaves out others.
    struct Liar;

    impl Parallel for Liar {
        fn threads(&self) -> usize {
            2
        }

        fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|s| {
                for _ in 0..2 {
                    s.spawn(|| (0..tasks / 4).for_each(|_| f(0)));
                }
            });
        }
    }

    #[test]
    fn neighbours_go_to_one_thread_and_what_is_left_to_whoever_comes() {
        let seen = std::sync::Mutex::new(Vec::new());
        let shares = Shares::new(10, 3);
        shares.take(2, |first, end| (first, first + 1, end)).unwrap();
        shares.work(1, &|task| seen.lock().unwrap().push(task));
        assert_eq!(*seen.lock().unwrap(), [3, 4, 5, 9, 8, 7, 2, 1, 0]);
    }

    #[test]
    fn each_chunk_comes_up_once_whatever_the_implementation_does() {
        for parallel in [&Serial as &dyn Parallel, &Liar, &crate::Pool::new(3)] {
            for len in [0, 1, 6, 7, 100] {
                let mut data = vec![0usize; len];
                for_each_chunk_mut(parallel, &mut data, 7, |i, part| {
                    assert!(part.len() == 7 || i == len / 7);
                    part.iter_mut().for_each(|x| *x += i + 1);
                });
                let want: Vec<usize> = (0..len).map(|i| i / 7 + 1).collect();
                assert_eq!(data, want);
            }
        }
    }
}
