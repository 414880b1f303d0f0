//! The engine's threads under a schedule explorer.
//!
//! The sources of the pool, of the companion that plans ahead and of the turns at a cache's memory are
//! compiled here a second time, on loom's locks, atomics and threads in place of the standard
//! library's: `tests/` runs them under every schedule and every order of memory that the model
//! allows, up to a number of preemptions. Nothing here is part of the engine.

/// What the sources call for `crate::sync`; see `device`'s for what each is.
pub(crate) mod sync {
    use std::time::Duration;

    pub use loom::sync::atomic;
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub use loom::thread;

    /// A cell that loom watches for access by two threads.
    pub struct Cell<T>(loom::cell::UnsafeCell<T>);

    impl<T: Copy> Cell<T> {
        pub fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        /// # Safety
        /// Nobody writes meanwhile.
        pub unsafe fn get(&self) -> T {
            // SAFETY: promised by the caller, and checked by loom.
            self.0.with(|value| unsafe { *value })
        }

        /// # Safety
        /// Nobody reads or writes meanwhile.
        pub unsafe fn set(&self, new: T) {
            // SAFETY: as above.
            self.0.with_mut(|value| unsafe { *value = new });
        }
    }

    /// Time does not pass in a model: threads look once and go to sleep.
    pub fn spin_until(_most: Duration, condition: impl Fn() -> bool) -> bool {
        condition()
    }

    pub fn pause(_attempt: u32) {
        loom::thread::yield_now();
    }
}

/// What the sources call for `crate::parallel`.
pub(crate) mod parallel {
    pub use device::Parallel;
}

#[path = "../../device/src/cpu/companion.rs"]
pub mod companion;
#[path = "../../device/src/cpu/pool.rs"]
pub mod pool;
#[path = "../../device/src/cpu/shared_pool/turns.rs"]
pub mod turns;

/// Calls `f` in a reader's turn.
pub fn reading<R>(turns: &turns::Turns, f: impl FnOnce() -> R) -> R {
    turns.start_reading();
    let result = f();
    turns.stop_reading();
    result
}

/// Calls `f` in a writer's turn.
pub fn writing<R>(turns: &turns::Turns, f: impl FnOnce() -> R) -> R {
    turns.start_writing();
    let result = f();
    turns.stop_writing();
    result
}
