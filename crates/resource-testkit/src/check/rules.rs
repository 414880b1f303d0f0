//! What any resource must do, judged by the contract alone.

use super::report::Verdict;
use super::rig::{Subject, Watch};

mod load;
mod requests;
mod steps;

/// A rule that is judged without randomness.
pub type Rule = (&'static str, fn(&Subject, Watch) -> Result<Verdict, String>);

/// A rule that takes random numbers, of this seed.
pub type SeededRule = (&'static str, fn(&Subject, Watch, u64) -> Result<Verdict, String>);

/// The rule without which there is nothing to check.
pub const BUILDS: &str = "it builds, and agrees with its kind about itself";

/// All of them.
pub const RULES: &[Rule] = &[
    (BUILDS, load::builds),
    ("settings with an unknown key are refused in one line", load::unknown_setting),
    ("two of it, built alike, describe themselves alike", load::describes_alike),
    ("a plain step runs", requests::plain_step),
    ("a request may be told of twice", requests::twice_told),
    ("settings of a request with an unknown key are refused", requests::unknown_override),
    ("unknown requests are accepted, and hit nobody", requests::unknown_requests),
    ("an id whose request has gone hits nobody", requests::late_ids),
    ("a refused or abandoned step changes nothing", steps::abandoned_steps),
    ("a staged step that is dropped changes nothing", steps::dropped_stages),
    ("a staged step is promoted once, to the same plan", steps::promotion),
    ("calls out of order are answered, and leave it at work", steps::out_of_order),
    ("padding rows have no state", steps::padding),
    ("a request that goes in the middle of a step leaves nothing behind", steps::cancelled),
    ("what is published can be taken in, and nothing else", requests::publishing),
    ("a request goes off the device and comes back as it was", requests::offloading),
    ("buffers of captured steps stay where they are", load::captured_buffers),
    ("the same calls give the same answers", requests::determinism),
    ("after the last request it is as it was at first", requests::starts_over),
    ("all memory goes back when it is dropped", load::memory),
];

/// The one whose order of calls is not the same each time. It comes last, so that what can be
/// repeated is found first.
pub const LAST: Rule = (
    "requests come and go on one thread while steps of others run on another",
    requests::overlapping,
);

type Outcome = Result<Verdict, String>;
const HOLDS: Outcome = Ok(Verdict::Holds);

fn skipped(why: &str) -> Outcome {
    Ok(Verdict::Skipped(why.into()))
}

/// Whether a built resource offers the interface.
pub fn offers(subject: &Subject, id: &str) -> bool {
    let built = subject.build(|_| {});
    built.is_ok_and(|rig| rig.capabilities().iter().any(|c| c.id() == id && c.major() == 1))
}
