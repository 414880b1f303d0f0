//! The host's threads for kernels.
//!
//! A decode step of a small model runs hundreds of short kernels, so starting one must cost about a
//! microsecond: idle threads look for work for a moment before they sleep. The moment is short, most of
//! it leaves the processor to whoever else wants it, and nobody waits at a barrier: a caller whose
//! helpers are held up does their tasks itself.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::Duration;

use crate::parallel::Parallel;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Cell, Condvar, Mutex, MutexGuard, spin_until};

/// How long a thread looks for work before it sleeps. Two kernels of a step are closer than this.
const SPIN: Duration = Duration::from_micros(50);

/// Threads that are kept; the caller of [`run`](Parallel::run) is one of them.
///
/// A `run` allocates nothing. While one is in progress, a further one (from inside a task, or from
/// another thread) does all its tasks on its own caller. Dropping the pool joins its threads.
pub struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller counted: `threads - 1` are started.
    /// Zero is taken as one.
    ///
    /// # Panics
    /// When the operating system cannot start a thread.
    pub fn new(threads: usize) -> Self {
        Self::starting(threads, |_| ())
    }

    /// As [`new`](Self::new); each thread that is started first calls `begin` with its number, from 1.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn starting(threads: usize, begin: impl Fn(usize) + Clone + Send + 'static) -> Self {
        let state = Arc::new(State::new());
        let workers = (1..threads)
            .map(|i| {
                let (state, begin) = (Arc::clone(&state), begin.clone());
                thread::Builder::new()
                    .name(format!("kernel-{i}"))
                    .spawn(move || {
                        begin(i);
                        state.work_until_stopped();
                    })
                    .expect("cannot start a kernel thread")
            })
            .collect();
        Self { state, workers }
    }
}

impl Parallel for Pool {
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || self.state.busy.swap(true, Ordering::Acquire) {
            return (0..tasks).for_each(f);
        }
        let panic = self.state.run(tasks, f);
        self.state.busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        drop(self.state.lock());
        self.state.work_or_stop.notify_all();
        for worker in self.workers.drain(..) {
            // Tasks' panics are caught, so a worker has none of its own.
            let _ = worker.join();
        }
    }
}

/// The function and number of tasks of the run in progress.
#[derive(Clone, Copy)]
struct Job {
    f: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

/// A counter alone on its cache lines: every thread writes it.
#[repr(align(128))]
struct Alone<T>(T);

struct State {
    /// Held by the caller whose run is in progress.
    busy: AtomicBool,
    /// Tasks of the run that nobody has taken yet. Taking one is the right to read `job`.
    untaken: Alone<AtomicUsize>,
    /// Tasks of the run that are not finished. The run's borrow of `f` ends after this is 0.
    unfinished: Alone<AtomicUsize>,
    job: Cell<Job>,
    /// A task of this run has panicked: the rest are skipped.
    failed: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleep: Mutex<()>,
    work_or_stop: Condvar,
    sleeping_workers: AtomicUsize,
    finished: Condvar,
    caller_sleeps: AtomicBool,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the holder of `busy`
// while `untaken` and `unfinished` are 0, and read only by a thread that has taken a task and not yet
// finished it; the release store to `untaken` and the acquire of taking order the two, as do the
// release of finishing and the caller's acquire of `unfinished`.
unsafe impl Sync for State {}
// SAFETY: the pointer in `job` is to a `Sync` function and is followed only as said above.
unsafe impl Send for State {}

impl State {
    fn new() -> Self {
        fn nothing(_: usize) {}
        Self {
            busy: AtomicBool::new(false),
            untaken: Alone(AtomicUsize::new(0)),
            unfinished: Alone(AtomicUsize::new(0)),
            job: Cell::new(Job { f: &(nothing as fn(usize)), tasks: 0 }),
            failed: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleep: Mutex::new(()),
            work_or_stop: Condvar::new(),
            sleeping_workers: AtomicUsize::new(0),
            finished: Condvar::new(),
            caller_sleeps: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.sleep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs all tasks; called by the holder of `busy`. Returns the first panic.
    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) -> Option<Box<dyn Any + Send>> {
        // SAFETY: only the lifetime changes. This function returns after every task has finished, and
        // nobody follows the pointer later, so the borrow is not outlived.
        let f = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f)
        };
        // SAFETY: no task is taken or unfinished, so no other thread accesses `job`.
        unsafe { self.job.set(Job { f, tasks }) };
        self.failed.store(false, Ordering::Relaxed);
        self.unfinished.0.store(tasks, Ordering::Relaxed);
        self.untaken.0.store(tasks, Ordering::Release);
        // Pairs with the fence of a worker about to sleep: one of the two sees the other's store.
        fence(Ordering::SeqCst);
        if self.sleeping_workers.load(Ordering::Relaxed) > 0 {
            drop(self.lock());
            self.work_or_stop.notify_all();
        }
        self.work();
        self.wait_until_finished();
        if self.failed.load(Ordering::Relaxed) { self.take_panic() } else { None }
    }

    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Does tasks until none is left to take; true when it did any.
    fn work(&self) -> bool {
        let mut worked = false;
        while let Ok(untaken) =
            self.untaken
                .0
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |untaken| untaken.checked_sub(1))
        {
            worked = true;
            // SAFETY: this thread has taken a task and not finished it.
            let job = unsafe { self.job.get() };
            if !self.failed.load(Ordering::Relaxed) {
                // SAFETY: the run that owns the function returns only after this task is finished.
                let f = unsafe { &*job.f };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(job.tasks - untaken))) {
                    let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                    first.get_or_insert(panic);
                    self.failed.store(true, Ordering::Relaxed);
                }
            }
            if self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1 {
                // Pairs with the fence of a caller about to sleep.
                fence(Ordering::SeqCst);
                if self.caller_sleeps.load(Ordering::Relaxed) {
                    drop(self.lock());
                    self.finished.notify_all();
                }
            }
        }
        worked
    }

    fn wait_until_finished(&self) {
        let finished = || self.unfinished.0.load(Ordering::Acquire) == 0;
        if spin_until(SPIN, finished) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = self.lock();
        while !finished() {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.caller_sleeps.store(false, Ordering::Relaxed);
    }

    fn work_until_stopped(&self) {
        let stopped = || self.stop.load(Ordering::SeqCst);
        let has_work = || self.untaken.0.load(Ordering::Relaxed) > 0;
        while !stopped() {
            if self.work() || spin_until(SPIN, || has_work() || stopped()) {
                continue;
            }
            let mut guard = self.lock();
            self.sleeping_workers.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            while !has_work() && !stopped() {
                guard = self.work_or_stop.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping_workers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 5] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads.max(1));
            for tasks in [0, 1, 2, 3, 64, 1000] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_runs_and_runs_after_sleep() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        for round in 0..2000 {
            if round % 500 == 0 {
                std::thread::sleep(Duration::from_millis(2)); // the workers fall asleep
            }
            pool.run(7, &|i| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 2000 * 28);
    }

    #[test]
    fn a_caller_sleeps_while_a_long_task_runs() {
        let pool = Pool::new(2);
        let done = AtomicUsize::new(0);
        for _ in 0..5 {
            pool.run(2, &|_| {
                std::thread::sleep(Duration::from_millis(1));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(done.into_inner(), 10);
    }

    #[test]
    fn a_nested_run_is_done_by_its_caller() {
        let pool = Pool::new(3);
        let count = AtomicUsize::new(0);
        pool.run(8, &|_| {
            let caller = std::thread::current().id();
            pool.run(8, &|_| {
                assert_eq!(std::thread::current().id(), caller);
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 64);
    }

    #[test]
    fn callers_on_many_threads_do_not_disturb_each_other() {
        let pool = Pool::new(2);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..300 {
                        let count = AtomicUsize::new(0);
                        pool.run(5, &|_| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                        assert_eq!(count.into_inner(), 5);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
        let pool = Pool::new(3);
        for bad in [0, 5, 19] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|i| assert!(i != bad, "task {i} failed"));
            }));
            let message = result.unwrap_err();
            assert_eq!(message.downcast_ref::<String>().unwrap(), &format!("task {bad} failed"));
            let count = AtomicUsize::new(0);
            pool.run(20, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 20);
        }
    }
}
