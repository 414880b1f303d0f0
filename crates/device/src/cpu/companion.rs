//! A thread that does one piece of work beside the caller's own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};

/// A parked thread for work that would wait behind something longer, such as planning a step while
/// another one computes. Borrowed work is fine: [`Companion::beside`] returns when both are done.
pub struct Companion {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Idle,
    Given(Job),
    Running,
    Done(Option<Box<dyn Any + Send>>),
    Stop,
}

/// The caller's closure, without its lifetime.
struct Job(*mut (dyn FnMut() + Send));

// SAFETY: the closure behind it is `Send`, and its owner waits for the thread to be through with it.
unsafe impl Send for Job {}

impl Companion {
    /// A companion called `name`.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(name: &str) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::new(State::Idle), changed: Condvar::new() });
        let theirs = shared.clone();
        let thread = thread::Builder::new().name(name.into()).spawn(move || theirs.serve())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Runs `job` on the companion and `work` here; returns when both are done. Allocates nothing.
    ///
    /// # Panics
    /// With the panic of either; that of `work` when both do.
    pub fn beside<R>(&mut self, mut job: impl FnMut() + Send, work: impl FnOnce() -> R) -> R {
        let job: &mut (dyn FnMut() + Send) = &mut job;
        let job: *mut (dyn FnMut() + Send + '_) = job;
        // SAFETY: only the lifetime changes. `Waiting` does not let this call end, by return or by
        // panic, before the thread has left the closure; `&mut self` keeps other calls out.
        let job = unsafe {
            std::mem::transmute::<*mut (dyn FnMut() + Send + '_), *mut (dyn FnMut() + Send)>(job)
        };
        self.shared.set(State::Given(Job(job)));
        let mut waiting = Waiting { shared: &self.shared, is_over: false };
        let result = work();
        if let Some(payload) = waiting.finish() {
            resume_unwind(payload);
        }
        result
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    fn serve(&self) {
        loop {
            let mut state = self.lock();
            let job = loop {
                match std::mem::replace(&mut *state, State::Running) {
                    State::Given(job) => break job,
                    State::Stop => return,
                    other => *state = other,
                }
                state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
            };
            drop(state);
            // SAFETY: given by `beside`, which waits for `Done` before the closure goes.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)() }));
            self.set(State::Done(done.err()));
        }
    }
}

/// A job that the companion has been given and may still be running.
struct Waiting<'a> {
    shared: &'a Shared,
    is_over: bool,
}

impl Waiting<'_> {
    /// Waits; gives the panic of the job, if it had one.
    fn finish(&mut self) -> Option<Box<dyn Any + Send>> {
        let mut state = self.shared.lock();
        loop {
            match std::mem::replace(&mut *state, State::Idle) {
                State::Done(panic) => {
                    self.is_over = true;
                    return panic;
                }
                other => *state = other,
            }
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.finish();
        }
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        self.shared.set(State::Stop);
        if let Some(thread) = self.thread.take() {
            // Panics of jobs were caught and handed to their callers.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Companion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Companion")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_run_on_threads_of_their_own() {
        let mut companion = Companion::new("beside").unwrap();
        for round in 0..100 {
            let (mut theirs, here) = (None, std::thread::current().id());
            let mine = companion.beside(
                || theirs = Some((round, std::thread::current().id())),
                || std::thread::current().id(),
            );
            let (seen, there) = theirs.unwrap();
            assert_eq!((seen, mine), (round, here));
            assert_ne!(there, here);
        }
    }

    #[test]
    fn a_panic_of_either_comes_out_when_both_are_done() {
        let mut companion = Companion::new("beside").unwrap();
        let mut ran = false;
        let job =
            catch_unwind(AssertUnwindSafe(|| companion.beside(|| panic!("job"), || ran = true)));
        assert_eq!(job.unwrap_err().downcast_ref(), Some(&"job"));
        assert!(ran);
        let mut done = false;
        let job = || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            done = true;
        };
        let work = catch_unwind(AssertUnwindSafe(|| companion.beside(job, || panic!("work"))));
        assert_eq!(work.unwrap_err().downcast_ref(), Some(&"work"));
        assert!(done, "the closure was left while it ran");
        assert_eq!(companion.beside(|| (), || 7), 7, "and the companion goes on");
    }
}
