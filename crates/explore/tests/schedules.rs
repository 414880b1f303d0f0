//! Every schedule of the engine's threads, up to a number of preemptions: no task is lost or done
//! twice, nothing is read while it is written, nobody waits for ever.

use std::panic::{AssertUnwindSafe, catch_unwind};

use device::Parallel;
use explore::companion::Companion;
use explore::pool::Pool;
use explore::turns::Turns;
use explore::{reading, writing};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};

/// More would take hours; faults of this kind need one or two.
const PREEMPTIONS: usize = 2;

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // `EXPLORE_PREEMPTIONS=3` looks further, for as long as that takes.
    let asked = std::env::var("EXPLORE_PREEMPTIONS").ok().and_then(|n| n.parse().ok());
    builder.preemption_bound = Some(asked.unwrap_or(PREEMPTIONS));
    builder.check(model);
}

#[test]
fn a_pool_does_every_task_once_before_run_returns() {
    explore(|| {
        let pool = Pool::new(2);
        for _ in 0..2 {
            let done = [const { std::sync::atomic::AtomicUsize::new(0) }; 2];
            pool.run(2, &|task| {
                done[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|d| d.load(Ordering::Relaxed) == 1));
        }
    });
}

#[test]
fn a_pool_that_is_busy_leaves_the_second_caller_to_itself() {
    explore(|| {
        let pool = Arc::new(Pool::new(2));
        let theirs = pool.clone();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let other = loom::thread::spawn(move || {
            theirs.run(2, &|_| {
                counted.fetch_add(1, Ordering::Relaxed);
            });
        });
        pool.run(2, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        other.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 4);
    });
}

#[test]
fn a_companion_is_done_when_beside_returns() {
    explore(|| {
        let mut companion = Companion::new("beside").unwrap();
        for round in 1..3 {
            let (mut theirs, mut mine) = (0, 0);
            companion.beside(|| theirs = round, || mine = round);
            assert_eq!((theirs, mine), (round, round));
        }
    });
}

#[test]
fn a_companion_is_done_also_when_the_work_panics() {
    std::panic::set_hook(Box::new(|info| {
        // What is planted is no news.
        if info.payload().downcast_ref::<&str>() != Some(&"planted") {
            eprintln!("{info}");
        }
    }));
    explore(|| {
        let mut companion = Companion::new("beside").unwrap();
        let mut theirs = 0;
        let work = || -> () { panic!("planted") };
        let both = AssertUnwindSafe(|| companion.beside(|| theirs = 1, work));
        assert!(catch_unwind(both).is_err());
        assert_eq!(theirs, 1, "the closure was left while it ran");
        assert_eq!(companion.beside(|| (), || 7), 7);
    });
}

#[test]
fn readers_and_writers_never_meet() {
    explore(|| {
        let turns = Arc::new(Turns::default());
        let row = Arc::new(loom::cell::UnsafeCell::new(0));
        let (theirs, their_row) = (turns.clone(), row.clone());
        let writer = loom::thread::spawn(move || {
            // SAFETY: one writer, and its turn keeps readers out; loom checks that.
            writing(&theirs, || their_row.with_mut(|row| unsafe { *row += 1 }));
        });
        // SAFETY: the turn keeps the writer out.
        let seen = reading(&turns, || row.with(|row| unsafe { *row }));
        assert!(seen <= 1);
        writer.join().unwrap();
        // SAFETY: as above.
        assert_eq!(reading(&turns, || row.with(|row| unsafe { *row })), 1);
    });
}
