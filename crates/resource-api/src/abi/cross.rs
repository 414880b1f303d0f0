//! How the types in an interface's signatures cross between libraries.
//!
//! A [`Cross`] type has a raw form without lifetimes whose layout is checked when a plugin is
//! loaded. Borrowed things cross as pointers; nothing is copied on a hot path.

use crate::{ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::{ROption, RString, RVec};

/// A type that may stand in the signature of a `#[capability]` trait.
///
/// # Safety
/// `lift` after `lower` must give back the same value, also when the two run in different
/// libraries built by different compilers.
pub unsafe trait Cross: Sized {
    /// What is passed.
    type Raw: StableAbi;
    /// Into the raw form.
    fn lower(self) -> Self::Raw;
    /// Out of the raw form.
    ///
    /// # Safety
    /// `raw` comes from `lower` of the same type, and what it borrows is still borrowed.
    unsafe fn lift(raw: Self::Raw) -> Self;
}

/// Gives a raw form another lifetime: raw types differ in nothing else.
///
/// # Safety
/// `A` and `B` are the same type but for lifetimes, and the receiver keeps nothing past the call.
pub unsafe fn erase<A, B>(raw: A) -> B {
    const { assert!(size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>()) }
    let raw = std::mem::ManuallyDrop::new(raw);
    // SAFETY: same type but for lifetimes; moved, not duplicated.
    unsafe { std::mem::transmute_copy::<A, B>(&raw) }
}

/// A borrowed slice.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawSlice<T> {
    ptr: *const T,
    len: usize,
}

/// A borrowed slice that may be written.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawSliceMut<T> {
    ptr: *mut T,
    len: usize,
}

// SAFETY: pointer and length of a slice of a layout-checked type.
unsafe impl<T: StableAbi> Cross for &[T] {
    type Raw = RawSlice<T>;
    fn lower(self) -> RawSlice<T> {
        RawSlice { ptr: self.as_ptr(), len: self.len() }
    }
    unsafe fn lift(raw: RawSlice<T>) -> Self {
        // SAFETY: the caller vouches for the borrow.
        unsafe { std::slice::from_raw_parts(raw.ptr, raw.len) }
    }
}

// SAFETY: as for shared slices.
unsafe impl<T: StableAbi> Cross for &mut [T] {
    type Raw = RawSliceMut<T>;
    fn lower(self) -> RawSliceMut<T> {
        RawSliceMut { ptr: self.as_mut_ptr(), len: self.len() }
    }
    unsafe fn lift(raw: RawSliceMut<T>) -> Self {
        // SAFETY: the caller vouches for the exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(raw.ptr, raw.len) }
    }
}

// SAFETY: a string is a slice of bytes that are UTF-8 on both sides.
unsafe impl Cross for &str {
    type Raw = RawSlice<u8>;
    fn lower(self) -> RawSlice<u8> {
        self.as_bytes().lower()
    }
    unsafe fn lift(raw: RawSlice<u8>) -> Self {
        // SAFETY: lowered from a str.
        unsafe { std::str::from_utf8_unchecked(<&[u8]>::lift(raw)) }
    }
}

// SAFETY: a pointer to a layout-checked type.
unsafe impl<T: StableAbi> Cross for &T {
    type Raw = *const T;
    fn lower(self) -> *const T {
        self
    }
    unsafe fn lift(raw: *const T) -> Self {
        // SAFETY: the caller vouches for the borrow.
        unsafe { &*raw }
    }
}

// SAFETY: a pointer to a layout-checked type.
unsafe impl<T: StableAbi> Cross for &mut T {
    type Raw = *mut T;
    fn lower(self) -> *mut T {
        self
    }
    unsafe fn lift(raw: *mut T) -> Self {
        // SAFETY: the caller vouches for the exclusive borrow.
        unsafe { &mut *raw }
    }
}

// SAFETY: carried by ROption, whose layout is fixed.
unsafe impl<C: Cross> Cross for Option<C> {
    type Raw = ROption<C::Raw>;
    fn lower(self) -> ROption<C::Raw> {
        self.map(C::lower).into()
    }
    unsafe fn lift(raw: ROption<C::Raw>) -> Self {
        // SAFETY: handed on.
        raw.into_option().map(|raw| unsafe { C::lift(raw) })
    }
}

// SAFETY: RString brings the allocator it was made with.
unsafe impl Cross for String {
    type Raw = RString;
    fn lower(self) -> RString {
        self.into()
    }
    unsafe fn lift(raw: RString) -> Self {
        raw.into()
    }
}

// SAFETY: RVec brings the allocator it was made with.
unsafe impl<C: Cross> Cross for Vec<C> {
    type Raw = RVec<C::Raw>;
    fn lower(self) -> RVec<C::Raw> {
        self.into_iter().map(C::lower).collect()
    }
    unsafe fn lift(raw: RVec<C::Raw>) -> Self {
        // SAFETY: handed on.
        raw.into_iter().map(|raw| unsafe { C::lift(raw) }).collect()
    }
}

/// Lets `StableAbi` types that are their own raw form stand in `#[capability]` signatures by value.
#[macro_export]
macro_rules! cross_value {
    ($($t:ty),* $(,)?) => {$(
        // SAFETY: the type is its own raw form; its layout is derived and checked.
        unsafe impl $crate::abi::cross::Cross for $t {
            type Raw = $t;
            fn lower(self) -> $t {
                self
            }
            unsafe fn lift(raw: $t) -> $t {
                raw
            }
        }
    )*};
}

cross_value!((), bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64);
cross_value!(crate::RequestId, crate::LabelId, crate::WalkId, crate::NodeId, crate::StepId);
cross_value!(crate::AdmitOutcome, crate::DType, crate::Device, crate::Plan, crate::PublishedInfo);
cross_value!(crate::Capability);

// SAFETY: a TypedRef is a checked pointer; its lifetime is vouched for by the caller of `lift`.
unsafe impl<'a> Cross for crate::TypedRef<'a> {
    type Raw = crate::TypedRef<'static>;
    fn lower(self) -> crate::TypedRef<'static> {
        // SAFETY: `lift` puts the lifetime back.
        unsafe { self.extend() }
    }
    unsafe fn lift(raw: crate::TypedRef<'static>) -> Self {
        raw
    }
}

/// Return types: a [`Cross`] type, or a `Result` of one.
///
/// A plain return type cannot carry an error. If the call fails at the boundary (the plugin
/// panicked), the caller sees the type's default and the resource is marked faulted.
pub trait CrossReturn: Sized {
    /// What is returned when nothing fails.
    type Raw: StableAbi;
    /// Into the raw form.
    fn lower_return(self) -> Result<Self::Raw>;
    /// Out of the raw form.
    ///
    /// # Safety
    /// As for [`Cross::lift`].
    unsafe fn lift_return(raw: Result<Self::Raw>) -> Self;
}

impl<C: Cross> CrossReturn for Result<C, ResourceError> {
    type Raw = C::Raw;
    fn lower_return(self) -> Result<C::Raw> {
        self.map(C::lower)
    }
    unsafe fn lift_return(raw: Result<C::Raw>) -> Self {
        // SAFETY: handed on.
        raw.map(|raw| unsafe { C::lift(raw) })
    }
}

macro_rules! plain_return {
    ($([$($g:tt)*] $t:ty),* $(,)?) => {$(
        impl<$($g)*> CrossReturn for $t {
            type Raw = <$t as Cross>::Raw;
            fn lower_return(self) -> Result<Self::Raw> {
                Ok(self.lower())
            }
            unsafe fn lift_return(raw: Result<Self::Raw>) -> Self {
                match raw {
                    // SAFETY: handed on.
                    Ok(raw) => unsafe { <$t as Cross>::lift(raw) },
                    Err(_) => Default::default(),
                }
            }
        }
    )*};
}

plain_return!(
    [] (), [] bool, [] u32, [] u64, [] usize, [] i64, [] f32, [] f64, [] String,
    [C: Cross] Option<C>, [C: Cross] Vec<C>, [] crate::AdmitOutcome,
    ['a, T: StableAbi] &'a [T], ['a] &'a str,
);
