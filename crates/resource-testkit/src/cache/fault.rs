//! Faults that a [`FakeCache`](super::FakeCache) can be told to have.

use serde::{Deserialize, Serialize};

macro_rules! faults {
    ($($name:ident: $doc:literal,)*; $($deadly:ident: $why:literal,)*) => {
        /// A fault to be planted, one at a time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Fault {
            $(#[doc = $doc] $name,)*
            $(#[doc = $why] $deadly,)*
        }

        impl Fault {
            /// Those that the check is to find by itself, with what each does; the others end the process, or
            /// are caught by the host before anything comes of them.
            pub const ALL: &'static [(Fault, &'static str)] = &[$((Fault::$name, $doc)),*];
        }
    };
}

faults! {
    OffByOnePage: "A token is written to the page after its own.",
    OffByOneSlot: "A token is written to the slot after its own.",
    MissingRetain: "Taking over a cached page takes no reference to it.",
    DoubleReference: "A prefix that is asked for again takes references again.",
    ProbeTakesAll: "A hit covers the whole prompt and leaves nothing to compute.",
    WrongTail: "A hit is recorded one page too long.",
    PartWhole: "Of a page that a prompt has in common in part, all tokens count as found.",
    PartAliases: "Where prompts part within a page, the later one goes on in the page of the other.",
    EndKept: "The page in which a prompt ends is kept when its request goes, and counts as used.",
    FoundAway: "A request that is off the device without tokens is looked up all the same.",
    SkippedRollback: "rollback_admit does nothing.",
    RefusedKeeps: "A refused step keeps the pages that it got so far.",
    ReversedRollback: "A rollback returns pages in the wrong order.",
    StaleGeneration: "The generation of a request's id is not looked at.",
    PrematureFree: "A reset that keeps memory also gives it back.",
    LostCancel: "A removal is ignored while a step of the request is in flight.",
    DoublePromote: "Promoting a staged step reserves its tokens once more.",
    LeftoverPlan: "A slot's plan is not laid out again when a step has as many rows as the last.",
    StageKept: "clear_preplan does nothing.",
    IngestResets: "A second ingest_request starts the request anew.",
    DiscardAdvances: "commit = false is ignored.",
    DoubleCommit: "A step may be committed again.",
    SinkHandedOut: "The sink is among the free pages.",
    ForkAliases: "The copy of a stream has the last page of its source.",
    ForkTooEarly: "A copy after the step is one of before it.",
    AbandonedFork: "A copy before the step overwrites its target at once.",
    PaddingWrites: "Padding rows write the pool's last page.",
    PaddingUnread: "Padding rows read nothing instead of the sink.",
    WrongLayer: "All layers are written to the first.",
    SwappedHeads: "Heads of the values are stored the other way round.",
    ReloadLosesTail: "A reload leaves out the last page.",
    ResetKeepsLength: "reset_request leaves the lengths as they are.",
    RewindNothing: "correct_len does nothing.",
    EarlyLength: "A stream's length counts what is only admitted.",
    StrangersAdmitted: "A step of an unknown request is admitted and opens its streams.",
    LeftoverPending: "A rolled back step's tokens still count for the next.",
    PrefixTrimmed: "A window lets go of tokens that are protected.",
    WindowCut: "A window lets go of the page that it begins in.",
    TrimmedUnkept: "A step that is not kept lets go of pages too.",
    CombinedOrder: "A combined label has its sources the other way round.",
    SessionLeaks: "A session that is forgotten keeps its pages.",
    SessionWhole: "A session is adopted whole, however little was asked for.",
    SessionLingers: "A session that was adopted is still there.",
    PublishedTwice: "What is published has every page where the next one belongs.",
    ArrivesShort: "State that arrives from another worker lacks its last token.",
    FactsLie: "The facts have one page more than there is.",
    MemoryKept: "The memory is not given back to the engine.",
    PanicsInCommit: "commit panics when two requests commit together.",
    ;
    PageOutside: "The first token of a step is written to a page that the pool does not have.",
    Aborts: "commit ends the process.",
    Hangs: "commit never comes back.",
    Overflows: "commit recurses until the stack is gone.",
    TakesMemory: "commit takes memory without end.",
}

impl Fault {
    /// Does the deed of a fault that does not leave the process alive.
    pub(super) fn strike(fault: Option<Fault>) {
        fn deeper(at: u64) -> u64 {
            let here = std::hint::black_box([at; 64]);
            if at == u64::MAX { 0 } else { deeper(at + 1) + here[7] }
        }
        match fault {
            Some(Fault::Aborts) => std::process::abort(),
            Some(Fault::Hangs) => loop {
                std::thread::park();
            },
            Some(Fault::Overflows) => {
                std::hint::black_box(deeper(0));
            }
            Some(Fault::TakesMemory) => {
                let mut taken = Vec::new();
                loop {
                    taken.push(vec![1u8; 1 << 24]);
                    std::hint::black_box(&taken);
                    // Not so fast that nobody sees it in time.
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
            _ => {}
        }
    }
}
