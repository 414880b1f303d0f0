//! Many readers or many writers, not both.

use crate::sync::atomic::{AtomicI64, Ordering};
use crate::sync::pause;

/// Who is at a pool: the number of readers, or minus the number of writers.
///
/// Waiting is by looking again and yielding the core: turns are short, and a side that waits is rare.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Turns(AtomicI64);

impl Turns {
    pub(super) fn start_reading(&self) {
        self.join(|present| present >= 0, 1);
    }

    pub(super) fn stop_reading(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn start_writing(&self) {
        self.join(|present| present <= 0, -1);
    }

    pub(super) fn stop_writing(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Adds `side` once `may_join` is true of who is there.
    fn join(&self, may_join: fn(i64) -> bool, side: i64) {
        let mut attempts = 0u32;
        loop {
            let present = self.0.load(Ordering::Relaxed);
            if may_join(present) {
                let joined = self.0.compare_exchange_weak(
                    present,
                    present + side,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                );
                if joined.is_ok() {
                    return;
                }
            }
            attempts += 1;
            pause(attempts);
        }
    }
}
