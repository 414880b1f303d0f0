//! The conformance check for authors of kinds: what any resource must do whatever it is for, and,
//! for the interfaces of the contract that it offers, what those promise.
//!
//! [`check_kind`] builds the resource again and again and plays the host with it: small pools, ids
//! that come late, steps that are refused, given up, planned ahead and dropped. A paged cache is
//! compared with a reference interpreter over random sequences (`ops`, `model`): every token is
//! written as a digest of its stream's history and read back through the page tables, so that a
//! wrong page shows and not only a wrong count. A sequence that shows a fault is shortened before it
//! is told. The same seed performs the same operations.
//!
//! Interfaces are found by what a resource offers, never by the name of its kind. The kit knows the
//! contract and no kind: what a resource under check is built on comes with the [`Subject`].
//!
//! ```
//! use resource_testkit::check::{Options, Subject, check_kind};
//! use resource_testkit::Fake;
//!
//! let subject = Subject::new(resource_api::kind::<Fake>(), "{}")?;
//! let report = check_kind(&subject, &Options::default());
//! assert!(report.is_clean(), "{report}");
//! # Ok::<(), resource_api::ResourceError>(())
//! ```

mod attention;
mod bench;
mod host;
mod lives;
mod model;
mod ops;
mod play;
mod positions;
mod random;
mod report;
mod rig;
mod rules;
mod sampler;
mod shrink;
mod step;
mod values;

use std::fmt::Display;

use random::Random;
pub use report::{Finding, Report, Verdict};
pub use rig::{Subject, Watch, spec, unmarked};

/// How much to try.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of the random sequences.
    pub seed: u64,
    /// How many sequences, each of up to [`Options::steps`] operations.
    pub sequences: u32,
    /// Operations of a sequence.
    pub steps: u32,
    /// Is told of every operation before it begins: where a resource ends the process or never comes
    /// back, that is the one to look at.
    pub watch: Watch,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 0, sequences: 100, steps: 60, watch: |_| {} }
    }
}

impl Options {
    /// For hours of machine time instead of seconds.
    pub fn long() -> Self {
        Self { sequences: 4000, steps: 120, ..Self::default() }
    }
}

/// How a rule fared: the fault and the operations that show it where it is broken.
type Tried = Result<Verdict, (String, Vec<String>)>;

/// Checks a kind. Any thread; builds and drops many resources.
pub fn check_kind(subject: &Subject, options: &Options) -> Report {
    let spec = &subject.spec;
    let mut report = Report { kind: spec.kind.clone(), seed: options.seed, ..Report::default() };
    for (rule, check) in rules::RULES {
        (options.watch)(&format!("rule: {rule}"));
        let done = check(subject, options.watch);
        let stop = *rule == rules::BUILDS && done.is_err();
        report.note(rule, done.map_err(|what| (what, Vec::new())));
        if stop {
            return report;
        }
    }
    streams(subject, options, &mut report);
    whole_lives(subject, options, &mut report);
    for (rule, check) in positions::RULES.iter().chain(attention::RULES).chain(sampler::RULES) {
        (options.watch)(&format!("rule: {rule}"));
        let done = check(subject, options.watch, options.seed);
        report.note(rule, done.map_err(|what| (what, Vec::new())));
    }
    let (rule, check) = rules::LAST;
    (options.watch)(&format!("rule: {rule}"));
    report.note(rule, check(subject, options.watch).map_err(|what| (what, Vec::new())));
    report
}

fn streams(subject: &Subject, options: &Options, report: &mut Report) {
    let rule = "streams hold what was written, whatever happens to steps";
    (options.watch)(&format!("rule: {rule}"));
    let has = rules::offers(subject, "kv.cache");
    let outcome = match has {
        false => Ok(Verdict::Skipped("it offers no kv.cache/1".into())),
        true => random_sequences(options, report, ops::sequence, |ops| {
            play::perform(subject, ops, options.watch)
        }),
    };
    report.note(rule, outcome);
}

fn whole_lives(subject: &Subject, options: &Options, report: &mut Report) {
    let rule = "requests that share, move, leave and come back hold their own tokens";
    (options.watch)(&format!("rule: {rule}"));
    let outcome = match rules::offers(subject, "kv.cache") {
        false => Ok(Verdict::Skipped("it offers no kv.cache/1".into())),
        true => random_sequences(options, report, lives::sequence, |ops| {
            lives::perform(subject, ops, options.watch)
        }),
    };
    report.note(rule, outcome);
}

fn random_sequences<T: Clone + Display>(
    options: &Options,
    report: &mut Report,
    generate: impl Fn(&mut Random, usize) -> Vec<T>,
    perform: impl Fn(&[T]) -> Result<usize, (usize, String)>,
) -> Tried {
    for sequence in 0..options.sequences {
        let mut random = Random::new(options.seed ^ (u64::from(sequence) << 32));
        // From short to long: a fault that shows in few operations is found in few.
        let count =
            2 + options.steps as usize * (sequence as usize + 1) / options.sequences as usize;
        let ops = generate(&mut random, count);
        report.operations += ops.len() as u64;
        if let Err((at, what)) = perform(&ops) {
            let shown = ops[..=at.min(ops.len() - 1)].to_vec();
            let again = |ops: &[T]| perform(ops).err().map(|(_, what)| what);
            let (shortest, what) = match again(&shown) {
                Some(what) => shrink::shrink(shown, what, again),
                // It takes the end of the sequence to show.
                None => shrink::shrink(ops, what, again),
            };
            return Err((what, shortest.iter().map(T::to_string).collect()));
        }
    }
    Ok(Verdict::Holds)
}
