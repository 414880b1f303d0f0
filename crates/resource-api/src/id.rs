//! Small identifiers that cross the boundary in every step.
//!
//! All of them are local to one process: whatever leaves the process (published state, digests)
//! carries names instead.

use abi_stable::StableAbi;

/// Name of a built resource, unique in an engine (`main_kv`).
pub type ResourceKey = String;

/// First slot of the range that padding rows of a captured graph use.
const FIRST_PADDING_SLOT: u32 = 0xffff_0000;

/// A request: a dense slot, so that plugins index arrays by it, and the generation of that slot,
/// so that a late copy of an id cannot hit the slot's next owner.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct RequestId {
    /// Dense index, reused after the request is removed.
    pub slot: u32,
    /// Counts the owners of `slot`; starts at 1.
    pub generation: u32,
}

impl RequestId {
    /// The id of generation `generation` of `slot`.
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// The id of the `row`-th padding row of a captured graph (`row` below 65,536).
    pub const fn padding(row: u32) -> Self {
        assert!(row < 0x1_0000, "a batch has at most 65,536 padding rows");
        Self { slot: FIRST_PADDING_SLOT + row, generation: 0 }
    }

    /// Whether this is a padding row: it has no state anywhere, and its writes go to a sink.
    pub const fn is_padding(self) -> bool {
        self.slot >= FIRST_PADDING_SLOT
    }

    /// Whether two columns of requests are equal. Looks at all of both, which compilers turn into wide
    /// compares: quicker than `==` where they nearly always are.
    pub fn all_equal(a: &[Self], b: &[Self]) -> bool {
        let differ = |any: u32, (a, b): (&Self, &Self)| {
            any | (a.slot ^ b.slot) | (a.generation ^ b.generation)
        };
        a.len() == b.len() && a.iter().zip(b).fold(0, differ) == 0
    }

    /// `slot` as an index.
    pub const fn index(self) -> usize {
        self.slot as usize
    }
}

impl std::fmt::Debug for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_padding() {
            write!(f, "pad{}", self.slot - FIRST_PADDING_SLOT)
        } else {
            write!(f, "r{}.{}", self.slot, self.generation)
        }
    }
}

macro_rules! interned {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
        pub struct $name(pub u32);

        impl $name {
            /// As an index.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

interned! {
    /// An interned stream label (`main`, `context`, ...). The host turns it back into its name.
    LabelId
}

impl LabelId {
    /// The default label, `main`. The host interns it first, always.
    pub const MAIN: LabelId = LabelId(0);

    /// Whether all of a column are this label.
    pub fn is_all(self, column: &[Self]) -> bool {
        column.iter().fold(0, |any, label| any | (label.0 ^ self.0)) == 0
    }
}

interned! {
    /// An interned walk name (`prefill`, `decode`, ...).
    WalkId
}

interned! {
    /// An interned node name (`decoder`, ...).
    NodeId
}

/// Identity of one step, unique in the life of an engine. A staged (pre-planned) step is promoted
/// by it and dropped by it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct StepId(pub u64);
