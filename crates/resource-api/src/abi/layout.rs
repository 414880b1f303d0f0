//! Comparison of layouts and of method lists, with one-line answers.

use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::{AbiInstabilityErrors, check_layout_compatibility};
use abi_stable::std_types::{RSlice, RStr};
use abi_stable::type_layout::{TLFieldOrFunction, TypeLayout};
use std::collections::HashSet;

/// The layout that abi_stable derived for `T`.
pub const fn layout_of<T: StableAbi>() -> &'static TypeLayout {
    T::LAYOUT
}

/// One method of an interface, as its library was compiled.
///
/// Layouts are opaque in the layout of this: how they are written down themselves is abi_stable's
/// own version, which the header is refused for.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct MethodDesc {
    /// Name in the trait.
    pub name: RStr<'static>,
    /// Raw types of the arguments.
    #[sabi(unsafe_opaque_field)]
    pub params: RSlice<'static, &'static TypeLayout>,
    /// Raw type of the answer.
    #[sabi(unsafe_opaque_field)]
    pub ret: &'static TypeLayout,
    /// Has a default body: a side that lacks the method still works.
    pub optional: bool,
}

/// Pairs of layouts that were found to fit. The methods of an interface name few types many times,
/// and each comparison walks all that a type holds.
#[derive(Default)]
pub struct Fitting(HashSet<(*const TypeLayout, *const TypeLayout)>);

impl Fitting {
    /// As [`check`], remembering what fits.
    ///
    /// # Errors
    /// As [`check`].
    pub fn check(
        &mut self,
        expected: &'static TypeLayout,
        found: &'static TypeLayout,
    ) -> Result<()> {
        let pair = (std::ptr::from_ref(expected), std::ptr::from_ref(found));
        if !self.0.contains(&pair) {
            check(expected, found)?;
            self.0.insert(pair);
        }
        Ok(())
    }
}

/// Whether `found` can be used where `expected` was compiled in.
///
/// # Errors
/// `INCOMPATIBLE`, one line with the path to the first difference; its details are abi_stable's text.
pub fn check(expected: &'static TypeLayout, found: &'static TypeLayout) -> Result<()> {
    if std::ptr::eq(expected, found) {
        return Ok(());
    }
    match check_layout_compatibility(expected, found) {
        Ok(()) => Ok(()),
        Err(errors) => {
            Err(incompatible(first_difference(&errors)).with_details(errors.to_string()))
        }
    }
}

/// abi_stable's text runs to hundreds of lines. What a person needs is the way to the innermost
/// difference, and what was expected and found there.
fn first_difference(errors: &AbiInstabilityErrors) -> String {
    // A difference shows again in everything around it, as sizes and counts.
    let deepest = errors.errors.iter().rev().max_by_key(|e| e.stack_trace.len());
    let Some(deepest) = deepest else { return "layouts differ".into() };
    let name = |place: &TLFieldOrFunction| match place {
        TLFieldOrFunction::Field(field) => field.name(),
        TLFieldOrFunction::Function(function) => function.name.as_str(),
    };
    let mut path = errors.interface.name().to_string();
    for place in &deepest.stack_trace {
        path.push_str(" > ");
        path.push_str(name(&place.expected));
    }
    format!("{path}: {}", expected_and_found(&deepest.to_string()))
}

/// The sentence at the end of abi_stable's text about one place.
fn expected_and_found(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let after = |head: &str| {
        let at = lines.iter().position(|l| l.starts_with(head))?;
        let same = lines[at][head.len()..].trim();
        if same.is_empty() { lines.get(at + 1).copied() } else { Some(same) }
    };
    let shown = |head| after(head).map(|text| text.trim_start_matches("field_name:"));
    match (after("Error:"), shown("Expected:"), shown("Found:")) {
        (Some("mismatched type"), Some(expected), Some(found)) => {
            format!("expected {expected}, found {found}")
        }
        (Some(what), Some(expected), Some(found)) => {
            format!("{what}: expected {expected}, found {found}")
        }
        _ => after("Extra:").unwrap_or("layouts differ").to_string(),
    }
}

/// Whether a library that knows `expected` can use an implementation that has `found`. Methods are
/// only ever appended, so one list must be a prefix of the other, and what the shorter one lacks
/// must have a default.
///
/// # Errors
/// `INCOMPATIBLE`, one line: interface, method, which part differs, what both sides have.
pub fn check_methods(
    interface: &str,
    expected: &[MethodDesc],
    found: &[MethodDesc],
    fitting: &mut Fitting,
) -> Result<()> {
    for (i, (e, f)) in expected.iter().zip(found).enumerate() {
        let here = || format!("{interface}: method {i} `{}`", e.name);
        if e.name != f.name {
            return Err(incompatible(format!(
                "{}: expected that name, found `{}`",
                here(),
                f.name
            )));
        }
        if e.params.len() != f.params.len() {
            return Err(incompatible(format!(
                "{}: expected {} arguments, found {}",
                here(),
                e.params.len(),
                f.params.len()
            )));
        }
        for (p, (want, got)) in e.params.iter().zip(f.params.iter()).enumerate() {
            fitting
                .check(want, got)
                .map_err(|err| err.within(format!("{} > argument {}", here(), p + 1)))?;
        }
        fitting.check(e.ret, f.ret).map_err(|err| err.within(format!("{} > answer", here())))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two types of one name that differ in `$field`.
    macro_rules! versions {
        ($module:ident { $($field:ident: $type:ty),* }) => {
            mod $module {
                #[repr(C)]
                #[derive(abi_stable::StableAbi)]
                pub struct Inner { $(pub $field: $type),* }
                #[repr(C)]
                #[derive(abi_stable::StableAbi)]
                pub struct Outer { pub before: u8, pub inner: Inner, pub after: u64 }
            }
        };
    }
    versions!(base { pages: u64, heads: u32 });
    versions!(narrower { pages: u32, heads: u32 });
    versions!(renamed { leaves: u64, heads: u32 });
    versions!(reordered { heads: u32, pages: u64 });
    versions!(longer { pages: u64, heads: u32, more: u64 });
    versions!(shorter { pages: u64 });

    #[repr(C)]
    #[derive(StableAbi)]
    pub struct Choices<T>(T);
    mod two {
        #[repr(u8)]
        #[derive(abi_stable::StableAbi)]
        #[allow(dead_code)]
        pub enum Choice {
            A,
            B,
        }
    }
    mod three {
        #[repr(u8)]
        #[derive(abi_stable::StableAbi)]
        #[allow(dead_code)]
        pub enum Choice {
            A,
            B,
            C,
        }
    }

    fn difference(found: &'static TypeLayout) -> ResourceError {
        let e = check(base::Outer::LAYOUT, found).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::INCOMPATIBLE);
        assert!(!e.message().contains('\n') && e.message().len() < 300, "{e}");
        assert!(e.details().lines().count() > 20, "the whole text is in the details");
        e
    }

    #[test]
    fn a_difference_is_one_line_with_the_path_to_it() {
        assert!(check(base::Outer::LAYOUT, base::Outer::LAYOUT).is_ok());
        for (found, says) in [
            (narrower::Outer::LAYOUT, "Outer > inner > pages: expected u64, found u32"),
            (renamed::Outer::LAYOUT, "Outer > inner: unexpected field: expected pages"),
            (reordered::Outer::LAYOUT, "Outer > inner: unexpected field: expected pages"),
            (longer::Outer::LAYOUT, "Outer > inner: "),
            (shorter::Outer::LAYOUT, "Outer > inner: "),
        ] {
            let e = difference(found);
            assert!(e.message().starts_with(says), "{e}");
            assert!(e.message().contains("expected ") && e.message().contains(", found "), "{e}");
        }
    }

    #[test]
    fn another_variant_of_an_enum_is_a_difference() {
        let (two, three) = (<Choices<two::Choice>>::LAYOUT, <Choices<three::Choice>>::LAYOUT);
        for (expected, found) in [(two, three), (three, two)] {
            let e = check(expected, found).unwrap_err();
            assert!(e.message().starts_with("Choices"), "{e}");
            assert!(e.message().contains("variants: expected "), "{e}");
        }
    }

    const fn method(name: &'static str, params: &'static [&'static TypeLayout]) -> MethodDesc {
        let (name, params) = (RStr::from_str(name), RSlice::from_slice(params));
        MethodDesc { name, params, ret: <()>::LAYOUT, optional: false }
    }

    #[test]
    fn methods_may_only_grow_at_the_end() {
        const NUMBER: &[&TypeLayout] = &[<u64 as StableAbi>::LAYOUT];
        const SMALL: &[&TypeLayout] = &[<u32 as StableAbi>::LAYOUT];
        const TEXT: &[&TypeLayout] = &[<RStr<'static> as StableAbi>::LAYOUT];
        let ours = [method("put", NUMBER), method("take", &[])];
        let message = |found: &[MethodDesc]| {
            check_methods("org.x", &ours, found, &mut Fitting::default())
                .unwrap_err()
                .message()
                .to_string()
        };
        let optional = MethodDesc { optional: true, ..method("more", TEXT) };
        let fits = |expected: &[MethodDesc], found: &[MethodDesc]| {
            check_methods("org.x", expected, found, &mut Fitting::default()).is_ok()
        };
        assert!(fits(&ours, &[ours[0], ours[1], method("new", TEXT)]));
        assert!(fits(&[ours[0], ours[1], optional], &ours));
        for (found, says) in [
            (vec![ours[0]], "org.x: the implementation lacks method `take`"),
            (vec![ours[1], ours[0]], "org.x: method 0 `put`: expected that name, found `take`"),
            (
                vec![method("put", SMALL), ours[1]],
                "org.x: method 0 `put` > argument 1: u64: expected u64, found u32",
            ),
            (
                vec![method("put", &[]), ours[1]],
                "org.x: method 0 `put`: expected 1 arguments, found 0",
            ),
            (
                vec![MethodDesc { ret: <u8>::LAYOUT, ..ours[0] }, ours[1]],
                "org.x: method 0 `put` > answer: ",
            ),
        ] {
            assert!(message(&found).starts_with(says), "{}", message(&found));
        }
    }
}
