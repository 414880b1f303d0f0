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

/// How long a waiting thread keeps its processor to itself. What waits longer may be what another thread
/// needs this processor for.
const ALONE: Duration = Duration::from_micros(10);

/// Waits at most `most` for `condition`; true when it came about.
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
        let waited = start.elapsed();
        if waited > most {
            return false;
        }
        if waited > ALONE {
            std::thread::yield_now();
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
