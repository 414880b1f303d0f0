//! References whose type is checked when they are opened: plans, step options, facts.
//!
//! The host hands them around without knowing what they are. `TypeId` never agrees between two
//! libraries, so the check is on a tag, a major version, and the layout that abi_stable derives.

use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::RStr;
use abi_stable::type_layout::TypeLayout;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// A type that may stand behind a [`TypedRef`].
///
/// Within one major version a `repr(C)` type only grows at the end.
///
/// ```
/// use resource_api::{StableAbi, Typed};
/// #[repr(C)]
/// #[derive(StableAbi)]
/// struct MyPlan { rows: u32 }
/// impl Typed for MyPlan {
///     const TAG: &'static str = "org.example.my-plan";
///     const MAJOR: u32 = 1;
/// }
/// ```
pub trait Typed: StableAbi {
    /// Name of the type, with a reverse-domain prefix when it is not one of this crate's.
    const TAG: &'static str;
    /// Changes when the meaning of existing fields does.
    const MAJOR: u32;
}

/// A borrowed value of a type known by name. May be empty.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct TypedRef<'a> {
    tag: RStr<'static>,
    major: u32,
    #[sabi(unsafe_opaque_field)]
    layout: Option<&'static TypeLayout>,
    value: *const (),
    borrow: PhantomData<&'a ()>,
}

// SAFETY: only `Sync` values can be put in (see `new`), and only shared references come out.
unsafe impl Send for TypedRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TypedRef<'_> {}

impl<'a> TypedRef<'a> {
    /// No value.
    pub const NONE: TypedRef<'static> = TypedRef {
        tag: RStr::from_str(""),
        major: 0,
        layout: None,
        value: std::ptr::null(),
        borrow: PhantomData,
    };

    /// A reference to `value`.
    pub fn new<T: Typed + Sync>(value: &'a T) -> Self {
        TypedRef {
            tag: RStr::from_str(T::TAG),
            major: T::MAJOR,
            layout: Some(T::LAYOUT),
            value: value as *const T as *const (),
            borrow: PhantomData,
        }
    }

    /// Whether there is no value.
    pub fn is_none(&self) -> bool {
        self.value.is_null()
    }

    /// Name of the value's type; empty when there is none.
    pub fn tag(&self) -> &'static str {
        self.tag.as_str()
    }

    /// The value, if it is a `T`. Any thread; no lock; the full layout comparison runs once per
    /// pair of libraries.
    ///
    /// # Errors
    /// `INCOMPATIBLE` when the tag, the major or the layout differs, naming both sides.
    pub fn open<T: Typed>(&self) -> Result<&'a T> {
        let Some(layout) = self.layout else {
            return Err(mismatch(format!("expected a {}, found nothing", T::TAG)));
        };
        if self.tag.as_str() != T::TAG || self.major != T::MAJOR {
            return Err(mismatch(format!(
                "expected a {}/{}, found a {}/{}",
                T::TAG,
                T::MAJOR,
                self.tag,
                self.major
            )));
        }
        if !std::ptr::eq(layout, T::LAYOUT) && !is_known_pair(T::LAYOUT, layout) {
            crate::abi::layout::check(T::LAYOUT, layout)
                .map_err(|e| e.within(format!("type {}/{}", T::TAG, T::MAJOR)))?;
            remember_pair(T::LAYOUT, layout);
        }
        // SAFETY: tag, major and layout say that `value` points to a T; `new` borrowed it for 'a.
        Ok(unsafe { &*(self.value as *const T) })
    }

    /// The same reference with a lifetime that the caller vouches for.
    ///
    /// # Safety
    /// The value must stay in place and unwritten for `'b`.
    pub unsafe fn extend<'b>(self) -> TypedRef<'b> {
        TypedRef {
            tag: self.tag,
            major: self.major,
            layout: self.layout,
            value: self.value,
            borrow: PhantomData,
        }
    }
}

impl std::fmt::Debug for TypedRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_none() {
            true => f.write_str("TypedRef(none)"),
            false => write!(f, "TypedRef({}/{})", self.tag, self.major),
        }
    }
}

fn mismatch(message: String) -> ResourceError {
    ResourceError::new(ErrorKind::INCOMPATIBLE, message)
}

/// Pairs of layouts that were compared and fit. Append-only, read without a lock: a step opens a
/// handful of plans, and the number of distinct pairs is that of (type, library pair).
const PAIRS: usize = 256;
static PAIR_A: [AtomicPtr<TypeLayout>; PAIRS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; PAIRS];
static PAIR_B: [AtomicPtr<TypeLayout>; PAIRS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; PAIRS];
static PAIR_COUNT: AtomicUsize = AtomicUsize::new(0);

fn as_ptr(layout: &'static TypeLayout) -> *mut TypeLayout {
    layout as *const TypeLayout as *mut TypeLayout
}

fn is_known_pair(a: &'static TypeLayout, b: &'static TypeLayout) -> bool {
    let count = PAIR_COUNT.load(Ordering::Acquire).min(PAIRS);
    (0..count).any(|i| {
        PAIR_B[i].load(Ordering::Acquire) == as_ptr(b)
            && PAIR_A[i].load(Ordering::Acquire) == as_ptr(a)
    })
}

fn remember_pair(a: &'static TypeLayout, b: &'static TypeLayout) {
    let i = PAIR_COUNT.fetch_add(1, Ordering::AcqRel);
    if i < PAIRS {
        PAIR_A[i].store(as_ptr(a), Ordering::Release);
        // Readers look at B first: a pair counts only once both halves are there.
        PAIR_B[i].store(as_ptr(b), Ordering::Release);
    }
}
