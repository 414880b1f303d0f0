//! What threads meet at. The files that use it (`pool`, `companion`, `turns`) name nothing of `std::sync`
//! otherwise: the crate `explore` compiles them a second time, on a model of these.

use std::cell::UnsafeCell;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic;
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;

/// A value whose users keep out of each other's way by other means.
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T: Copy> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// Nobody writes meanwhile.
    pub(crate) unsafe fn get(&self) -> T {
        // SAFETY: promised by the caller.
        unsafe { *self.0.get() }
    }

    /// # Safety
    /// Nobody reads or writes meanwhile.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: promised by the caller.
        unsafe { *self.0.get() = value }
    }
}

/// Looks for `condition` for as long as `most`; true when it came about.
///
/// Does not offer the processor to others between looks: where somebody takes it, the system counts that as
/// a turn forgone, and threads that need each other come to have theirs one after the other.
pub(crate) fn spin_until(most: Duration, condition: impl Fn() -> bool) -> bool {
    if condition() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..8 {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > most {
            return false;
        }
    }
}

/// Between two looks at what somebody else will change soon.
pub(crate) fn pause(attempt: u32) {
    if attempt.is_multiple_of(64) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}
