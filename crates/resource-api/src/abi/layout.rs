//! Comparison of layouts and of method lists, with one-line answers.

use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::check_layout_compatibility;
use abi_stable::std_types::{RSlice, RStr};
use abi_stable::type_layout::TypeLayout;

/// The layout that abi_stable derived for `T`.
pub const fn layout_of<T: StableAbi>() -> &'static TypeLayout {
    T::LAYOUT
}

/// One method of an interface, as its library was compiled.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct MethodDesc {
    /// Name in the trait.
    pub name: RStr<'static>,
    /// Raw types of the arguments.
    pub params: RSlice<'static, &'static TypeLayout>,
    /// Raw type of the answer.
    pub ret: &'static TypeLayout,
    /// Has a default body: a side that lacks the method still works.
    pub optional: bool,
}

/// Whether `found` can be used where `expected` was compiled in.
///
/// # Errors
/// `INCOMPATIBLE`, one line with the path to the first difference.
pub fn check(expected: &'static TypeLayout, found: &'static TypeLayout) -> Result<()> {
    if std::ptr::eq(expected, found) {
        return Ok(());
    }
    match check_layout_compatibility(expected, found) {
        Ok(()) => Ok(()),
        Err(errors) => Err(incompatible(first_difference(&errors.to_string()))),
    }
}

/// abi_stable's text runs to hundreds of lines. What a person needs is the innermost expectation.
fn first_difference(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let value_after = |head: &str| {
        let at = lines.iter().position(|l| l.starts_with(head))?;
        let same = lines[at][head.len()..].trim();
        if same.is_empty() { lines.get(at + 1).copied() } else { Some(same) }
    };
    match (value_after("Expected:"), value_after("Found:")) {
        (Some(expected), Some(found)) => format!("expected {expected}, found {found}"),
        _ => lines.first().map_or("layouts differ".into(), |l| l.to_string()),
    }
}

/// Whether a library that knows `expected` can use an implementation that has `found`. Methods are
/// only ever appended, so one list must be a prefix of the other, and what the shorter one lacks
/// must have a default.
///
/// # Errors
/// `INCOMPATIBLE`, one line: interface, method, which part differs, what both sides have.
pub fn check_methods(interface: &str, expected: &[MethodDesc], found: &[MethodDesc]) -> Result<()> {
    for (i, (e, f)) in expected.iter().zip(found).enumerate() {
        let here = format!("{interface}: method {i} `{}`", e.name);
        if e.name != f.name {
            return Err(incompatible(format!("{here}: expected that name, found `{}`", f.name)));
        }
        if e.params.len() != f.params.len() {
            return Err(incompatible(format!(
                "{here}: expected {} arguments, found {}",
                e.params.len(),
                f.params.len()
            )));
        }
        for (p, (want, got)) in e.params.iter().zip(f.params.iter()).enumerate() {
            check(want, got).map_err(|err| err.within(format!("{here} > argument {}", p + 1)))?;
        }
        check(e.ret, f.ret).map_err(|err| err.within(format!("{here} > answer")))?;
    }
    let missing = expected.iter().skip(found.len()).find(|m| !m.optional);
    match missing {
        None => Ok(()),
        Some(m) => Err(incompatible(format!(
            "{interface}: the implementation lacks method `{}`, which has no default: rebuild the \
             plugin against this version of resource-api",
            m.name
        ))),
    }
}

fn incompatible(message: String) -> ResourceError {
    ResourceError::new(ErrorKind::INCOMPATIBLE, message)
}
