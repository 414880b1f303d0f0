//! Plans: what `plan` hands out, and where a resource keeps it.
//!
//! Plan memory belongs to the resource, one value per slot, kept between steps so that a plan can
//! be updated by difference. A plan may be read until the runner releases the slot's lease.

use crate::step::StepContext;
use crate::typed::{Typed, TypedRef};
use crate::{ResourceError, Result};
use abi_stable::StableAbi;
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most slots a runner leases: two per captured bucket and a few eager ones.
pub const MAX_SLOTS: usize = 256;

/// The opaque answer of `plan`. Only the runner can file it; everyone reads it back through
/// [`StepContext::plan_result`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Plan(TypedRef<'static>);

impl Plan {
    /// Nothing to hand out.
    pub const NONE: Plan = Plan(TypedRef::NONE);

    /// What the runner files in the context.
    pub fn into_result(self) -> TypedRef<'static> {
        self.0
    }

    /// Name of the plan's type; empty when there is none.
    pub fn tag(&self) -> &'static str {
        self.0.tag()
    }
}

/// One plan value per slot.
pub struct PlanSlots<T> {
    slots: [OnceLock<Box<Slot<T>>>; MAX_SLOTS],
}

struct Slot<T> {
    writing: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `writing` lets one thread at a time write a slot; readers come through the context of
// the step that holds the slot's lease, which the runner does not plan again until it is released.
unsafe impl<T: Send + Sync> Sync for PlanSlots<T> {}

impl<T: Typed + Default + Send + Sync + 'static> PlanSlots<T> {
    /// No slot is in use yet; each is made with `T::default()` at its first use.
    pub fn new() -> Self {
        Self { slots: [const { OnceLock::new() }; MAX_SLOTS] }
    }

    /// Writes the plan of the slot that `ctx` leases, starting from what the slot's last use left.
    /// Step thread (or plan thread, for a staged step). Allocates only at a slot's first use.
    ///
    /// # Errors
    /// Those of `write`; `WRONG_STATE` when another thread is planning the same slot, `INVALID`
    /// for a slot past [`MAX_SLOTS`].
    pub fn plan(
        &self,
        ctx: &StepContext<'_>,
        write: impl FnOnce(&mut T) -> Result<()>,
    ) -> Result<Plan> {
        let Some(cell) = self.slots.get(ctx.slot() as usize) else {
            return Err(ResourceError::invalid(format!(
                "slot {} is past the {MAX_SLOTS} slots a resource keeps plans for",
                ctx.slot()
            )));
        };
        let slot = cell.get_or_init(|| {
            Box::new(Slot { writing: AtomicBool::new(false), value: UnsafeCell::new(T::default()) })
        });
        if slot.writing.swap(true, Ordering::Acquire) {
            return Err(ResourceError::wrong_state(format!(
                "slot {} is being planned by another thread",
                ctx.slot()
            )));
        }
        let _done = WriteDone(&slot.writing);
        // SAFETY: `writing` excludes other writers. Readers hold the context of the step that
        // leases this slot; the runner plans a leased slot only for that step, before its forward.
        write(unsafe { &mut *slot.value.get() })?;
        // SAFETY: boxed, never moved or dropped before the resource; `Plan` gives no access except
        // through a context, whose lifetime ends with the lease.
        Ok(Plan(unsafe { TypedRef::new(&*slot.value.get()).extend() }))
    }

    /// Whether the slot has been used.
    pub fn is_used(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(|s| s.get().is_some())
    }

    /// The slots that have been used.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        (0..MAX_SLOTS as u32).filter(|&slot| self.is_used(slot))
    }
}

struct WriteDone<'a>(&'a AtomicBool);

impl Drop for WriteDone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T: Typed + Default + Send + Sync + 'static> Default for PlanSlots<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> std::fmt::Debug for PlanSlots<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = self.slots.iter().filter(|s| s.get().is_some()).count();
        write!(f, "PlanSlots({used} used)")
    }
}

/// A column of a plan: plain data that the resource owns and dependents read.
///
/// Keeps its memory from step to step. Growing leaves old buffers in place while a captured graph
/// may still read them, so that an address once handed out stays valid.
#[repr(C)]
#[derive(StableAbi)]
pub struct PlanVec<T> {
    ptr: *const T,
    len: usize,
    owner: *mut Storage<T>,
}

/// The owner's side of a [`PlanVec`]; never touched by another library.
#[repr(C)]
#[derive(StableAbi)]
#[doc(hidden)]
pub struct Storage<T> {
    vec: abi_stable::std_types::RVec<T>,
    retired: abi_stable::std_types::RVec<abi_stable::std_types::RVec<T>>,
}

// SAFETY: owns its storage; readers only see `ptr` and `len`.
unsafe impl<T: Send> Send for PlanVec<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PlanVec<T> {}

impl<T> Default for PlanVec<T> {
    fn default() -> Self {
        Self { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0, owner: std::ptr::null_mut() }
    }
}

impl<T> Drop for PlanVec<T> {
    fn drop(&mut self) {
        if !self.owner.is_null() {
            // SAFETY: made by Box::into_raw in `edit`, freed once.
            drop(unsafe { Box::from_raw(self.owner) });
        }
    }
}

impl<T: Clone> PlanVec<T> {
    fn storage(&mut self) -> &mut Storage<T> {
        if self.owner.is_null() {
            let empty = Storage { vec: Default::default(), retired: Default::default() };
            self.owner = Box::into_raw(Box::new(empty));
        }
        // SAFETY: non-null, owned by us, and we have `&mut self`.
        unsafe { &mut *self.owner }
    }

    /// Makes room for `capacity` elements. When `keep_old` is set the old buffer stays allocated
    /// (a captured graph may read it); it is freed with the column.
    pub fn reserve(&mut self, capacity: usize, keep_old: bool) {
        let storage = self.storage();
        if storage.vec.capacity() >= capacity {
            return;
        }
        let mut grown = abi_stable::std_types::RVec::with_capacity(capacity);
        grown.extend(storage.vec.iter().cloned());
        let old = std::mem::replace(&mut storage.vec, grown);
        if keep_old && old.capacity() > 0 {
            storage.retired.push(old);
        }
        self.sync();
    }

    /// Sets the length, filling new elements with `fill`, and gives the elements to write.
    pub fn resize(&mut self, len: usize, fill: T) -> &mut [T] {
        self.storage().vec.resize(len, fill);
        self.sync();
        self.as_mut_slice()
    }

    /// Empties the column, keeping its memory.
    pub fn clear(&mut self) {
        self.storage().vec.clear();
        self.sync();
    }

    /// Appends an element.
    #[inline]
    pub fn push(&mut self, value: T) {
        let storage = self.storage();
        storage.vec.push(value);
        self.sync();
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        self.storage().vec.as_mut_slice()
    }

    #[inline]
    fn sync(&mut self) {
        // SAFETY: `storage` made the owner.
        let vec = unsafe { &(*self.owner).vec };
        (self.ptr, self.len) = (vec.as_ptr(), vec.len());
    }
}

impl<T> std::ops::Deref for PlanVec<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `ptr` and `len` describe the storage's elements (or nothing).
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for PlanVec<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&**self, f)
    }
}

/// A column of a plan in device memory: where it lies and how long it is. Empty on the CPU.
///
/// The resource that planned keeps the memory. It is written by work on the step's stream, so that
/// later work on that stream sees this step's values; its address is the same in every step that
/// leases the same slot of the same bucket, so that a captured graph may read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct DeviceColumn<T> {
    address: u64,
    len: u64,
    element: std::marker::PhantomData<T>,
}

impl<T> DeviceColumn<T> {
    /// No elements.
    pub const EMPTY: Self = Self { address: 0, len: 0, element: std::marker::PhantomData };

    /// `len` elements at a device address.
    ///
    /// # Safety
    /// The elements must stay allocated for as long as the plan may be read, and a graph replayed.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len: len as u64, element: std::marker::PhantomData }
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> Default for DeviceColumn<T> {
    fn default() -> Self {
        Self::EMPTY
    }
}
