//! State behind one lock: the easy way to `&mut` in a trait whose methods take `&self`.

use std::sync::{Mutex, MutexGuard};

/// A value that one caller at a time may change.
///
/// A panic while it is locked does not lock it for good: the resource is faulted anyway, and its
/// `Drop` must still run.
#[derive(Debug, Default)]
pub struct Exclusive<T>(Mutex<T>);

impl<T> Exclusive<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value, locked until the guard is dropped. Do not hold it across calls into other
    /// resources or while waiting.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
