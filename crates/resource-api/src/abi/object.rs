//! A reference-counted object of some interface, made in one library and used in another.

use super::fault::{Fault, FaultCell};
use super::guard::guard;
use super::layout::{Fitting, MethodDesc, check_methods};
use crate::{ErrorKind, ResourceError, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::{RResult, RSlice, RStr};
use std::sync::Arc;

/// The part that all vtables start with.
#[repr(C)]
#[derive(StableAbi)]
pub struct VTableHead {
    /// Interface name, such as `kv.cache`.
    pub id: RStr<'static>,
    /// Interface major version.
    pub major: u32,
    /// The implementation's methods, in order.
    pub methods: RSlice<'static, MethodDesc>,
    /// Rust type behind it, for logs.
    pub type_name: RStr<'static>,
    /// Adds a reference.
    pub retain: unsafe extern "C" fn(*const ()),
    /// Drops a reference; the last one drops the object.
    pub release: unsafe extern "C" fn(*const ()) -> RResult<(), ResourceError>,
}

/// Implementation of a head for objects held in an `Arc<T>`.
#[derive(Debug)]
pub struct Instance<T>(std::marker::PhantomData<T>);

impl<T: Send + Sync + 'static> Instance<T> {
    /// The head of a vtable for `T`.
    pub const fn head(
        id: &'static str,
        major: u32,
        methods: &'static [MethodDesc],
        type_name: &'static str,
    ) -> VTableHead {
        VTableHead {
            id: RStr::from_str(id),
            major,
            methods: RSlice::from_slice(methods),
            type_name: RStr::from_str(type_name),
            retain: retain::<T>,
            release: release::<T>,
        }
    }
}

unsafe extern "C" fn retain<T>(data: *const ()) {
    // SAFETY: `data` came from Arc::<T>::into_raw in this library, and the caller holds a reference.
    unsafe { Arc::increment_strong_count(data as *const T) }
}

unsafe extern "C" fn release<T>(data: *const ()) -> RResult<(), ResourceError> {
    guard("Drop", || {
        // SAFETY: gives back the reference that the caller held; `data` came from Arc::into_raw.
        drop(unsafe { Arc::from_raw(data as *const T) });
        Ok(())
    })
    .into()
}

/// `data` as the `T` it was made from.
///
/// # Safety
/// `data` came from `Arc::<T>::into_raw` in this library and is still referenced.
pub unsafe fn instance<'a, T>(data: *const ()) -> &'a T {
    // SAFETY: as promised.
    unsafe { &*(data as *const T) }
}

/// A counted reference to an object of some interface. Typed handles wrap one.
#[repr(C)]
#[derive(StableAbi)]
pub struct Object {
    data: *const (),
    vtable: &'static VTableHead,
    fault: Fault,
}

// SAFETY: interfaces require Send + Sync of every implementation, and the counts are atomic.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Wraps a value.
    ///
    /// # Safety
    /// `vtable` is the head of a vtable made for `T`.
    pub unsafe fn new<T: Send + Sync + 'static>(
        value: Arc<T>,
        vtable: &'static VTableHead,
    ) -> Object {
        let fault = FaultCell::shared(vtable.type_name.as_str());
        Object { data: Arc::into_raw(value) as *const (), vtable, fault }
    }

    /// The object's address, for calls through its vtable.
    pub fn data(&self) -> *const () {
        self.data
    }

    /// Head of its vtable.
    pub fn head(&self) -> &'static VTableHead {
        self.vtable
    }

    /// Its fault mark.
    pub fn fault(&self) -> &Fault {
        &self.fault
    }

    /// Replaces the fault mark, so that all handles to one resource share one.
    pub fn share_fault(&mut self, fault: Fault) {
        self.fault = fault;
    }

    /// Fails if the object has panicked before.
    #[inline]
    pub fn check_fault(&self) -> Result<()> {
        if self.fault.is_set() { Err(self.poisoned()) } else { Ok(()) }
    }

    #[cold]
    fn poisoned(&self) -> ResourceError {
        ResourceError::new(
            ErrorKind::POISONED,
            format!("`{}` panicked earlier and is out of use", self.fault.owner()),
        )
    }

    /// Marks the object when the answer says that it panicked.
    #[inline]
    pub fn note<R>(&self, answer: RResult<R, ResourceError>) -> Result<R> {
        match answer {
            RResult::ROk(value) => Ok(value),
            RResult::RErr(e) => Err(self.note_error(e)),
        }
    }

    #[cold]
    fn note_error(&self, e: ResourceError) -> ResourceError {
        if e.kind() == ErrorKind::PANICKED {
            self.fault.set();
        }
        e
    }

    /// The answer for a method that the other side is too old to have and that has no default.
    #[cold]
    pub fn unsupported(&self, method: &str) -> ResourceError {
        ResourceError::unsupported(format!(
            "{}/{} of `{}` lacks `{method}`",
            self.vtable.id,
            self.vtable.major,
            self.fault.owner()
        ))
    }
}

impl Clone for Object {
    fn clone(&self) -> Self {
        // SAFETY: we hold a reference.
        unsafe { (self.vtable.retain)(self.data) };
        Object { data: self.data, vtable: self.vtable, fault: self.fault.clone() }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: gives back our reference.
        if let RResult::RErr(e) = unsafe { (self.vtable.release)(self.data) } {
            self.note_error(e);
        }
    }
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} of {}", self.vtable.id, self.vtable.major, self.fault.owner())
    }
}

/// A typed handle: what `#[capability]` generates for a trait.
pub trait Interface: Sized {
    /// Interface name.
    const ID: &'static str;
    /// Interface major version.
    const MAJOR: u32;
    /// The methods as this library knows them.
    const METHODS: &'static [MethodDesc];

    /// Wraps an object whose vtable was checked by [`open`].
    ///
    /// # Safety
    /// The vtable behind `object` is this interface's, with methods that fit `METHODS`.
    unsafe fn from_object_unchecked(object: Object) -> Self;

    /// The object inside.
    fn object(&self) -> &Object;

    /// The object inside, given up.
    fn into_object(self) -> Object;
}

/// Turns an object into a typed handle.
///
/// # Errors
/// `INCOMPATIBLE` when it is of another interface or major, or a method differs.
pub fn open<I: Interface>(object: Object) -> Result<I> {
    open_knowing(object, &mut Fitting::default())
}

/// As [`open`], for one of several objects of a library.
pub(super) fn open_knowing<I: Interface>(object: Object, fitting: &mut Fitting) -> Result<I> {
    let head = object.head();
    if head.id != I::ID || head.major != I::MAJOR {
        return Err(ResourceError::new(
            ErrorKind::INCOMPATIBLE,
            format!(
                "expected {}/{}, found {}/{} of `{}`",
                I::ID,
                I::MAJOR,
                head.id,
                head.major,
                object.fault().owner()
            ),
        ));
    }
    check_methods(I::ID, I::METHODS, head.methods.as_slice(), fitting)?;
    // SAFETY: id, major and every method fit.
    Ok(unsafe { I::from_object_unchecked(object) })
}
