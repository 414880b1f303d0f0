//! Requests that come, move and go.

use std::sync::atomic::{AtomicBool, Ordering};

use resource_api::{PublishedInfo, RequestId, RequestOverrides, Resource, ResourceHandle};

use super::super::bench::{A, B, Bench, NODE, STRANGER, WALK, failed};
use super::super::rig::{Subject, Watch, shown};
use super::{HOLDS, Outcome, skipped};

pub(super) fn plain_step(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3), (B, 2)])?;
    bench.run(&[(A, 1), (B, 1)])?;
    bench.run(&[])?;
    bench.run(&[(B, 1)])?;
    bench.both()?;
    HOLDS
}

pub(super) fn twice_told(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3), (B, 2)])?;
    let before = bench.both()?;
    bench.rig.ingest(A, &[9, 9]).map_err(failed("a second ingest_request"))?;
    bench.same(&before, "a second ingest_request")?;
    bench.run(&[(A, 1)])?;
    HOLDS
}

pub(super) fn unknown_override(subject: &Subject, watch: Watch) -> Outcome {
    let bench = Bench::new(subject, watch)?;
    let rid = RequestId::new(3, 1);
    for text in [r#"{"no_such_setting": 1}"#, "not json"] {
        if bench.rig.ingest_as(rid, &[1], text).is_ok() {
            return Err(format!("`{text}` is accepted for a request"));
        }
        bench.rig.check_fault()?;
    }
    // What was refused has left nothing: the request may come again as it should.
    bench.ingest(rid)?;
    bench.rig.remove(rid).map_err(failed("remove_request"))?;
    HOLDS
}

pub(super) fn unknown_requests(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3), (B, 2)])?;
    let before = bench.both()?;
    let strangers = [STRANGER, RequestId::new(A.slot, A.generation + 5), RequestId::padding(2)];
    for rid in strangers {
        let r = bench.rig.resource();
        bench.rig.say(&format!("methods about {rid}, which is unknown"));
        r.reset_request(rid, true).map_err(failed(format!("reset_request of {rid}")))?;
        r.reset_request(rid, false).map_err(failed(format!("reset_request of {rid}")))?;
        r.remove_request(rid).map_err(failed(format!("remove_request of {rid}")))?;
        r.remove_requests(&[rid, rid]).map_err(failed(format!("remove_requests of {rid}")))?;
        // These may fail; what they say is not to be believed of a stranger.
        if r.reclaimable(rid).is_ok_and(|n| n > 0) || r.offload(rid).is_ok_and(|n| n > 0) {
            return Err(format!("{rid} is unknown, and something of it can be reclaimed"));
        }
        if r.is_offloaded(rid).is_ok_and(|away| away) {
            return Err(format!("{rid} is unknown, and is said to be off the device"));
        }
        if r.resolve_cached_prefix(rid, NODE, WALK).is_ok_and(|n| n.unwrap_or(0) > 0) {
            return Err(format!("{rid} is unknown, and has a cached prefix"));
        }
        let _ = r.publish(rid);
        let _ = r.extend_prefix_chain(rid, NODE, WALK, &[1]);
        let _ = r.can_reload(rid);
        let _ = r.get_offload_priority(rid);
        bench.same(&before, &format!("a method about the unknown {rid}"))?;
    }
    bench.run(&[(A, 1), (B, 1)])?;
    HOLDS
}

pub(super) fn late_ids(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    let fresh = bench.seen(&[A])?;
    bench.run(&[(A, 3), (B, 2)])?;
    bench.rig.remove(A).map_err(failed("remove_request"))?;
    let next = RequestId::new(A.slot, A.generation + 1);
    bench.ingest(next)?;
    let mut own = bench.seen(&[next])?;
    let name = |text: &String| text.replace(&next.to_string(), &A.to_string());
    own = own.iter().map(name).collect();
    let pages = |line: &&String| !line.ends_with("pages free");
    let differs = fresh.iter().zip(&own).filter(|(a, _)| pages(a)).find(|(a, b)| a != b);
    if let Some((was, is)) = differs {
        return Err(format!("the slot's next owner starts with {is}, not with {was}"));
    }
    bench.run(&[(next, 2)])?;
    let before = bench.seen(&[next, B])?;
    let r = bench.rig.resource();
    bench.rig.say(&format!("late calls for {A}"));
    r.remove_request(A).map_err(failed("remove_request"))?;
    r.reset_request(A, true).map_err(failed("reset_request"))?;
    let _ = r.offload(A);
    let late = bench.step(&[(A, 1)]);
    if bench.rig.admit(&late).is_ok_and(|o| o.is_ready()) {
        // A resource without state of its own takes any step.
        bench.rig.rollback(&late).map_err(failed("rollback_admit"))?;
    }
    let now = bench.seen(&[next, B])?;
    match before.iter().zip(&now).find(|(a, b)| a != b) {
        None => HOLDS,
        Some((was, is)) => {
            Err(format!("late calls for {A} change the next owner: {was} became {is}"))
        }
    }
}

pub(super) fn publishing(subject: &Subject, watch: Watch) -> Outcome {
    let mut from = Bench::new(subject, watch)?;
    from.run(&[(A, 3), (B, 1)])?;
    from.run(&[(A, 1)])?;
    let r = from.rig.resource();
    let Some(info) = r.publish(A).map_err(failed("publish"))? else {
        return skipped("it publishes nothing");
    };
    let to = Bench::new(subject, watch)?;
    let before = to.both()?;
    let other = PublishedInfo::new("org.testkit.nobody", 77);
    let r = to.rig.resource();
    to.rig.say("admit_retrieve of another kind's state");
    if r.admit_retrieve(A, NODE, WALK, Some(&other)).is_ok_and(|o| o.is_ok()) {
        return Err("state that another kind published is taken in".into());
    }
    to.same(&before, "state of another kind")?;
    let mut broken = PublishedInfo::new(info.kind(), info.version());
    for (name, order, body) in info.entries() {
        broken.set(name, order, body.iter().take(body.len() / 2).map(|b| b ^ 0x5a).collect());
    }
    to.rig.say("admit_retrieve of damaged state");
    let _ = r.admit_retrieve(B, NODE, WALK, Some(&broken));
    to.rig.check_fault()?;
    for _ in 0..100 {
        to.rig.say("admit_retrieve");
        let outcome =
            r.admit_retrieve(A, NODE, WALK, Some(&info)).map_err(failed("admit_retrieve"))?;
        if !outcome.is_ok() {
            return Err(format!("its own state is refused: {}", outcome.message()));
        }
        if outcome.is_ready() {
            let again = r.publish(A).map_err(failed("publish"))?;
            if again.as_ref() != Some(&info) {
                let (once, again) = (shown(Some(&info)), shown(again.as_ref()));
                return Err(format!("published {once}, taken in and published again: {again}"));
            }
            return HOLDS;
        }
    }
    Err("admit_retrieve of its own state is not ready after 100 calls".into())
}

pub(super) fn offloading(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3), (B, 2)])?;
    let before = bench.both()?;
    let r = bench.rig.resource().clone();
    bench.rig.say("offload");
    if !r.supports_eviction() {
        let freed = r.offload(A).map_err(failed("offload"))?;
        if freed > 0 || r.reclaimable(A).map_err(failed("reclaimable"))? > 0 {
            return Err("it cannot offload, and says that it could".into());
        }
        bench.same(&before, "offload")?;
        return skipped("it does not move requests off the device");
    }
    let could = r.reclaimable(A).map_err(failed("reclaimable"))?;
    let freed = r.offload(A).map_err(failed("offload"))?;
    let away = r.is_offloaded(A).map_err(failed("is_offloaded"))?;
    if could == 0 || freed == 0 || !away {
        return Err(format!("reclaimable {could}, freed {freed}, then away: {away}"));
    }
    if r.reclaimable(A).map_err(failed("reclaimable"))? != 0 {
        return Err("something is reclaimable of a request that is away".into());
    }
    let step = bench.step(&[(A, 1)]);
    if bench.rig.admit(&step).is_ok_and(|o| o.is_ready()) {
        return Err("a step of a request that is away is admitted".into());
    }
    bench.run(&[(B, 1)])?;
    let others = bench.seen(&[B])?;
    if !r.can_reload(A).map_err(failed("can_reload"))? || !r.reload(A).map_err(failed("reload"))? {
        return Err("there is room, and it does not come back".into());
    }
    let back = bench.seen(&[A])?;
    let of = |all: &[String], rid: RequestId| -> Vec<String> {
        all.iter().filter(|l| l.contains(&rid.to_string())).cloned().collect()
    };
    if of(&before, A) != of(&back, A) {
        return Err(format!("it was {:?} and came back as {:?}", of(&before, A), of(&back, A)));
    }
    if of(&others, B) != of(&bench.seen(&[B])?, B) {
        return Err("a reload changes another request".into());
    }
    bench.run(&[(A, 1), (B, 1)])?;
    HOLDS
}

pub(super) fn determinism(subject: &Subject, watch: Watch) -> Outcome {
    let life = || -> Result<Vec<String>, String> {
        let mut bench = Bench::new(subject, watch)?;
        bench.run(&[(A, 3), (B, 2)])?;
        let step = bench.step(&[(A, 2)]);
        bench.admit(&step)?;
        bench.rig.rollback(&step).map_err(failed("rollback_admit"))?;
        bench.run(&[(B, 1), (A, 1)])?;
        let reset = |r: &ResourceHandle| r.reset_request(B, true);
        bench.rig.each("reset_request", reset).map_err(failed("reset_request"))?;
        bench.run(&[(B, 4)])?;
        bench.both()
    };
    let (one, two) = (life()?, life()?);
    match one.iter().zip(&two).find(|(a, b)| a != b) {
        None => HOLDS,
        Some((a, b)) => Err(format!("once {a}, once {b}")),
    }
}

pub(super) fn starts_over(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    let first = bench.both()?;
    for round in 0..3 {
        bench.run(&[(A, 3 + round), (B, 2)])?;
        let mut step = bench.step(&[(A, 1)]);
        if bench.rig.can_stage() {
            step.staged = true;
            bench.admit(&step)?;
        }
        bench.rig.remove(A).map_err(failed("remove_request"))?;
        bench.rig.remove(B).map_err(failed("remove_request"))?;
        bench.rig.clear(&step).map_err(failed("clear_preplan"))?;
        bench.ingest(A)?;
        bench.ingest(B)?;
        bench.same(&first, "a life of two requests")?;
    }
    HOLDS
}

/// The host's main thread and its step thread, each at its own work.
pub(super) fn overlapping(subject: &Subject, watch: Watch) -> Outcome {
    let (mut crowded, mut alone) = (Bench::new(subject, watch)?, Bench::new(subject, watch)?);
    let parts = 0..=crowded.rig.index();
    let handles: Vec<ResourceHandle> = parts.map(|i| crowded.rig.part(i).clone()).collect();
    let stop = AtomicBool::new(false);
    let steps = |bench: &mut Bench| -> Result<(), String> {
        for round in 0..60 {
            bench.run(&[(A, 1), (B, round % 2)])?;
            if round % 4 == 3 {
                for rid in [A, B] {
                    let reset = |r: &ResourceHandle| r.reset_request(rid, true);
                    bench.rig.each("reset_request", reset).map_err(failed("reset_request"))?;
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|threads| {
        let others = threads.spawn(|| come_and_go(&handles, &stop));
        let ran = steps(&mut crowded);
        stop.store(true, Ordering::Release);
        let others = others.join().unwrap_or_else(|_| Err("the check itself panicked".into()));
        ran.and(others)
    })?;
    steps(&mut alone)?;
    let (now, want) = (crowded.both()?, alone.both()?);
    match now.iter().zip(&want).find(|(a, b)| a != b) {
        None => HOLDS,
        Some((is, was)) => Err(format!("beside others that come and go: {is}; alone: {was}")),
    }
}

/// Lives of requests that never run, until told to stop.
fn come_and_go(handles: &[ResourceHandle], stop: &AtomicBool) -> Result<(), String> {
    let Some(own) = handles.last() else { return Ok(()) };
    for generation in 1.. {
        if generation > 20 && stop.load(Ordering::Acquire) {
            break;
        }
        let rid = RequestId::new(20 + generation % 3, generation);
        for handle in handles {
            let overrides = RequestOverrides::new("", &[1, 2, 3], 2);
            handle.ingest_request(rid, &overrides).map_err(failed("ingest_request"))?;
        }
        own.resolve_cached_prefix(rid, NODE, WALK).map_err(failed("resolve_cached_prefix"))?;
        own.publish(rid).map_err(failed("publish"))?;
        own.reclaimable(rid).map_err(failed("reclaimable"))?;
        own.is_offloaded(rid).map_err(failed("is_offloaded"))?;
        own.inspect();
        own.reset_request(rid, true).map_err(failed("reset_request"))?;
        for handle in handles.iter().rev() {
            handle.remove_request(rid).map_err(failed("remove_request"))?;
        }
    }
    Ok(())
}
