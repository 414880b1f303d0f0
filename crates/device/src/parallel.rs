//! How kernels spread work over threads without owning any.

use std::sync::atomic::{AtomicUsize, Ordering};

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
/// may not trust the indices it is given. Here each call takes the next index itself; what is left
/// over runs at the end.
pub(crate) fn run_once_each(parallel: &dyn Parallel, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
    if tasks == 1 {
        return f(0);
    }
    let next = AtomicUsize::new(0);
    parallel.run(tasks, &|_| {
        let task = next.fetch_add(1, Ordering::Relaxed);
        if task < tasks {
            f(task);
        }
    });
    (next.into_inner().min(tasks)..tasks).for_each(f);
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
