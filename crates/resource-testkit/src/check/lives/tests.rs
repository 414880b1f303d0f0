use super::*;
use crate::FakeCache;
use crate::check::random::Random;

#[test]
fn sequences_get_to_everything() {
    let subject = Subject::new(resource_api::kind::<FakeCache>(), "{}").unwrap();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in 0..150 {
        let mut world = World::new(&subject, |_| {}).unwrap().unwrap();
        for op in sequence(&mut Random::new(seed), 60) {
            let look = |world: &World| {
                let all = world.workers.iter().flat_map(|w| w.live.values());
                let found = all.clone().filter(|r| !r.may_run()).count();
                let away = all.clone().filter(|r| r.away).count();
                let tokens = all.map(|r| r.streams.values().map(|s| s.tokens.len()).sum::<usize>());
                let sessions: usize = world.workers.iter().map(|w| w.sessions.len()).sum();
                (found, away, tokens.sum::<usize>(), sessions, world.mail.len())
            };
            let before = look(&world);
            world.apply(&op).and_then(|()| world.check()).unwrap_or_else(|e| panic!("{op}: {e}"));
            let after = look(&world);
            let mut note =
                |what, happened: bool| *seen.entry(what).or_default() += usize::from(happened);
            match op.1 {
                LifeOp::Probe(_) => note("found", after.0 > before.0),
                LifeOp::Apply(..) => note("taken over", after.0 < before.0),
                LifeOp::Offload(_) => note("away", after.1 > before.1),
                LifeOp::Reload(_) => note("back", after.1 < before.1),
                LifeOp::Step(_) => note("computed", after.2 > before.2),
                LifeOp::Publish(_) => note("published", after.4 > before.4),
                LifeOp::Retrieve(..) => note("arrived", after.2 > before.2),
                LifeOp::Retain(..) => note("kept", after.3 > before.3),
                LifeOp::Adopt(..) => note("adopted", after.2 > before.2),
                _ => {}
            }
        }
    }
    assert!(seen.values().all(|&n| n >= 5), "{seen:?}");
}
