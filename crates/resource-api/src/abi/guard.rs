//! Keeps panics inside the library that raised them.
//!
//! Each library has its own copy of std, so only the library itself can catch its panics: a panic
//! that reaches an `extern "C"` boundary ends the process.

use crate::{ErrorKind, ResourceError, Result};
use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LOCATION: RefCell<(String, String)> =
        const { RefCell::new((String::new(), String::new())) };
}

/// Runs `f`; a panic in it becomes an error of kind `PANICKED` that says where.
#[inline]
pub fn guard<R>(what: &'static str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    DEPTH.with(|d| d.set(d.get() + 1));
    // Whatever `f` left half-done belongs to a resource that is faulted from now on.
    let outcome = catch_unwind(AssertUnwindSafe(f));
    DEPTH.with(|d| d.set(d.get() - 1));
    match outcome {
        Ok(Err(e)) if e.kind() == ErrorKind::PANICKED => Err(handed_on(e)),
        Ok(result) => result,
        Err(payload) => Err(panicked(what, payload)),
    }
}

/// The panic of another resource, which this one was told of and hands on: it is not its own.
#[cold]
fn handed_on(e: ResourceError) -> ResourceError {
    e.with_kind(ErrorKind::POISONED)
}

#[cold]
fn panicked(what: &'static str, payload: Box<dyn Any + Send>) -> ResourceError {
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(s), _) => (*s).to_string(),
        (_, Some(s)) => s.clone(),
        _ => "(payload is not text)".to_string(),
    };
    // A payload may panic in its own Drop. Dropped in a second catch; what that one throws leaks.
    if let Err(second) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
        std::mem::forget(second);
    }
    let (location, backtrace) = LOCATION.with(|l| std::mem::take(&mut *l.borrow_mut()));
    ResourceError::new(ErrorKind::PANICKED, format!("{what} panicked: {message}"))
        .at(location)
        .with_details(backtrace)
}

/// Makes panics inside [`guard`] silent and remembers where they came from, with a backtrace if
/// `RUST_BACKTRACE` is set. Once per library.
pub fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if DEPTH.with(Cell::get) == 0 {
                return previous(info);
            }
            if let Some(location) = info.location() {
                // Of this library's own frames, when RUST_BACKTRACE asks for it.
                let trace = Backtrace::capture();
                let trace = match trace.status() {
                    BacktraceStatus::Captured => trace.to_string(),
                    _ => String::new(),
                };
                LOCATION.with(|l| *l.borrow_mut() = (location.to_string(), trace));
            }
        }));
    });
}
