//! The queues by themselves.

use proptest::prelude::*;

use super::*;

struct Bench {
    scheduler: Scheduler,
    requests: Requests,
    turns: Vec<Turn>,
}

impl Bench {
    fn new(max_batch: usize, max_batch_tokens: usize, prompts: &[usize]) -> Self {
        let mut requests = Requests::default();
        let mut scheduler = Scheduler::new(Limits { max_batch, max_batch_tokens });
        for &len in prompts {
            let rid = requests.next_id();
            requests.insert(Tracked::plain(rid, vec![0; len]));
            scheduler.enqueue(rid);
        }
        Self { scheduler, requests, turns: Vec::new() }
    }

    /// Spans of the next step by request slot, after running it.
    fn step(&mut self) -> Vec<(u32, usize)> {
        self.scheduler.fill(&mut self.requests, &mut self.turns, &[], |_| Join::Runs);
        self.scheduler.ran(&self.turns);
        let turns = self.turns.iter().map(|t| (t.rid.slot, t.span)).collect();
        for turn in &self.turns {
            let request = self.requests.get_mut(turn.rid).unwrap();
            request.computed += turn.span;
            if request.pending() == 0 {
                request.tokens.push(0);
            }
        }
        turns
    }
}

#[test]
fn generating_requests_come_before_long_prompts() {
    let mut bench = Bench::new(8, 10, &[3, 25]);
    assert_eq!(bench.step(), [(0, 3), (1, 7)]);
    assert_eq!(bench.step(), [(0, 1), (1, 9)]);
    assert_eq!(bench.step(), [(0, 1), (1, 9)]);
    assert_eq!(bench.step(), [(0, 1), (1, 1)]);
}

#[test]
fn the_batch_has_a_size() {
    let mut bench = Bench::new(2, 100, &[5, 5, 5]);
    assert_eq!(bench.step(), [(0, 5), (1, 5)]);
    bench.scheduler.remove(RequestId::new(0, 1));
    assert_eq!(bench.step(), [(1, 1), (2, 5)]);
}

#[test]
fn the_youngest_gives_way_and_waits_until_one_ends() {
    let mut bench = Bench::new(8, 100, &[5, 5, 5]);
    bench.step();
    let give_way = |bench: &mut Bench| bench.scheduler.give_way(|_| panic!("not asked"));
    assert_eq!(give_way(&mut bench).unwrap().slot, 2);
    assert_eq!(bench.step(), [(0, 1), (1, 1)]);
    assert_eq!(give_way(&mut bench).unwrap().slot, 1);
    assert_eq!(give_way(&mut bench), None, "the last one stays");
    // The end of one that waits is no room.
    bench.scheduler.remove(RequestId::new(2, 1));
    assert_eq!(bench.step(), [(0, 1)]);
    bench.scheduler.remove(RequestId::new(0, 1));
    assert_eq!(bench.step(), [(1, 1)]);
}

#[test]
fn who_was_left_out_for_longest_gives_way_under_lru() {
    let mut bench = Bench::new(8, 4, &[1, 1, 20, 20]);
    bench.scheduler.victims = Victims::LeastRecent;
    assert_eq!(bench.step(), [(0, 1), (1, 1), (2, 2)]);
    assert_eq!(bench.step(), [(0, 1), (1, 1), (2, 2)]);
    // The last one could join once there were tokens for it.
    bench.scheduler.remove(RequestId::new(1, 1));
    bench.requests.remove(RequestId::new(1, 1));
    bench.requests.get_mut(RequestId::new(2, 1)).unwrap().computed = 18;
    assert_eq!(bench.step(), [(0, 1), (2, 2), (3, 1)]);
    bench.requests.get_mut(RequestId::new(2, 1)).unwrap().computed = 2;
    assert_eq!(bench.step(), [(0, 1), (2, 3)], "of two prompts the older one goes on");
    let give_way = |bench: &mut Bench| bench.scheduler.give_way(|_| panic!("not asked"));
    assert_eq!(give_way(&mut bench).unwrap().slot, 3, "it was not in the last step");
    assert_eq!(give_way(&mut bench).unwrap().slot, 2, "of equals, the youngest");
}

#[test]
fn who_is_least_wanted_gives_way_under_priority() {
    let mut bench = Bench::new(8, 100, &[5, 5, 5]);
    bench.scheduler.victims = Victims::Priority("kv".into());
    bench.step();
    let wishes = [7.0, 1.0, 7.0];
    let wish = |rid: RequestId| wishes[rid.index()];
    assert_eq!(bench.scheduler.give_way(wish).unwrap().slot, 2, "of equals, the youngest");
    assert_eq!(bench.scheduler.give_way(wish).unwrap().slot, 0);
    assert_eq!(bench.step(), [(1, 1)]);
}

#[test]
fn nobody_gives_way_for_one_that_is_let_in() {
    for (queue, left) in [(Queue::Strict, 1), (Queue::Skip(1), 2), (Queue::Skip(2), 3)] {
        let mut bench = Bench::new(8, 100, &[5]);
        bench.scheduler.queue = queue;
        bench.step();
        for len in [50, 1, 1] {
            let rid = bench.requests.next_id();
            bench.requests.insert(Tracked::plain(rid, vec![0; len]));
            bench.scheduler.enqueue(rid);
        }
        let Bench { scheduler, requests, turns } = &mut bench;
        scheduler.fill(requests, turns, &[], |_| Join::Runs);
        assert_eq!(scheduler.running(), 4);
        let away = scheduler.turn_away(RequestId::new(1, 1));
        assert_eq!((away[0].slot, away.len()), (1, 4 - left), "{queue}");
        assert_eq!(bench.step().len(), left, "{queue}");
        assert_eq!(bench.scheduler.turn_away(RequestId::new(2, 1)), [], "it runs now");
    }
    let mut alone = Bench::new(8, 100, &[5, 5]);
    alone.scheduler.fill(&mut alone.requests, &mut alone.turns, &[], |_| Join::Runs);
    assert_eq!(alone.scheduler.turn_away(RequestId::new(0, 1))[0].slot, 1, "somebody is left");
    assert_eq!(alone.scheduler.turn_away(RequestId::new(0, 1)), []);
}

#[test]
fn so_many_pass_one_that_waits_for_room_and_then_nobody() {
    let mut bench = Bench::new(8, 1000, &[5, 5, 1, 1, 1]);
    bench.scheduler.queue = Queue::Skip(2);
    bench.scheduler.limits.max_batch = 2;
    bench.step();
    assert_eq!(bench.scheduler.give_way(|_| 0.0).unwrap().slot, 1);
    bench.scheduler.limits.max_batch = 8;
    assert_eq!(bench.step(), [(0, 1), (2, 1), (3, 1)], "two of three pass it");
    assert!(bench.scheduler.foresee(&mut Vec::new(), |_| (1, 1)), "nobody joins");
    bench.scheduler.remove(RequestId::new(3, 1));
    assert!(!bench.scheduler.foresee(&mut Vec::new(), |_| (1, 1)), "two may join");
    assert_eq!(bench.step(), [(0, 1), (2, 1), (1, 1), (4, 1)]);
}

/// A pool of so many tokens, and what became of each request in it.
struct World {
    bench: Bench,
    room: usize,
    /// Tokens of each in the end, by number.
    sizes: Vec<usize>,
    rids: Vec<RequestId>,
    set_back: Vec<u32>,
    passed: Vec<u32>,
    done: Vec<bool>,
}

impl World {
    fn new(victims: Victims, queue: Queue, room: usize) -> Self {
        let mut bench = Bench::new(6, 16, &[]);
        (bench.scheduler.victims, bench.scheduler.queue) = (victims, queue);
        let (sizes, rids, set_back, passed, done) = Default::default();
        Self { bench, room, sizes, rids, set_back, passed, done }
    }

    fn submit(&mut self, prompt: usize, generated: usize) {
        let rid = self.bench.requests.next_id();
        self.bench.requests.insert(Tracked::plain(rid, vec![0; prompt]));
        self.bench.scheduler.enqueue(rid);
        self.sizes.push(prompt + generated);
        self.rids.push(rid);
        self.set_back.push(0);
        self.passed.push(0);
        self.done.push(false);
    }

    fn number(&self, rid: RequestId) -> usize {
        self.rids.iter().rposition(|&r| r == rid).unwrap()
    }

    fn end(&mut self, number: usize) {
        self.done[number] = true;
        self.bench.scheduler.remove(self.rids[number]);
        self.bench.requests.remove(self.rids[number]);
    }

    /// One step, tried again until it fits.
    fn step(&mut self, wish: impl Fn(usize) -> f64) {
        let running = |b: &Bench| b.scheduler.running.iter().map(|p| p.rid).collect::<Vec<_>>();
        let before = running(&self.bench);
        loop {
            let Bench { scheduler, requests, turns } = &mut self.bench;
            scheduler.fill(requests, turns, &[], |_| Join::Runs);
            let after = running(&self.bench);
            let held = |rid: &RequestId| self.bench.requests.get(*rid).unwrap().computed;
            let spans = self.bench.turns.iter().map(|t| t.span).sum::<usize>();
            if after.iter().map(held).sum::<usize>() + spans <= self.room {
                break;
            }
            let numbers: Vec<_> = after.iter().map(|&rid| (rid, self.number(rid))).collect();
            let number = |rid| numbers.iter().find(|(r, _)| *r == rid).unwrap().1;
            // The one whose tokens go past the end lacks room.
            let (mut used, mut culprit) = (after.iter().map(held).sum::<usize>(), None);
            for turn in &self.bench.turns {
                used += turn.span;
                culprit = culprit.or((used > self.room).then_some(turn.rid));
            }
            let mut gone = self.bench.scheduler.turn_away(culprit.unwrap());
            if gone.is_empty() {
                gone.extend(self.bench.scheduler.give_way(|rid| wish(number(rid))));
                self.set_back[number(*gone.first().expect("each fits by itself"))] += 1;
            }
            for rid in gone {
                self.bench.requests.get_mut(rid).unwrap().computed = 0;
            }
        }
        let Bench { scheduler, turns, .. } = &mut self.bench;
        scheduler.ran(turns);
        let now = running(&self.bench);
        for joined in now.iter().filter(|rid| !before.contains(rid)) {
            let joined = self.number(*joined);
            let waits = |n: &usize| !self.done[*n] && !now.contains(&self.rids[*n]);
            for older in (0..joined).filter(waits).collect::<Vec<_>>() {
                self.passed[older] += 1;
            }
        }
        for turn in std::mem::take(&mut self.bench.turns) {
            let request = self.bench.requests.get_mut(turn.rid).unwrap();
            request.computed += turn.span;
            if request.pending() == 0 {
                request.tokens.push(0);
            }
            let (len, number) = (request.tokens.len(), self.number(turn.rid));
            if len > self.sizes[number] {
                self.end(number);
            }
        }
    }
}

fn policies() -> impl Strategy<Value = (Victims, Queue)> {
    let victims = prop_oneof![
        Just(Victims::Youngest),
        Just(Victims::LeastRecent),
        Just(Victims::Priority("kv".into()))
    ];
    let queue = prop_oneof![Just(Queue::Strict), (1u32..4).prop_map(Queue::Skip)];
    (victims, queue)
}

proptest! {
    /// Whatever comes and goes, and whomever the policy hits: all get done, nobody is set back or passed
    /// more often than is promised.
    #[test]
    fn everybody_gets_done_under_every_policy(
        (victims, queue) in policies(),
        room in 20usize..60,
        // When each comes, its prompt and what it generates, how little it is wanted, and whether its client
        // leaves some steps later.
        coming in proptest::collection::vec(
            (0usize..4, 1usize..20, 1usize..20, 0u8..4, proptest::option::weighted(0.2, 1usize..30)),
            1..40,
        ),
    ) {
        let is_youngest = victims == Victims::Youngest;
        let mut world = World::new(victims, queue, room);
        let most = match queue { Queue::Strict => 0, Queue::Skip(most) => most };
        let mut leaving: Vec<(usize, usize)> = Vec::new();
        let (mut now, mut next, mut due) = (0, 0, coming[0].0);
        while next < coming.len() || !world.bench.scheduler.is_idle() {
            while next < coming.len() && due <= now {
                let (_, prompt, generated, _, leaves) = coming[next];
                let prompt = prompt.min(room - 1);
                world.submit(prompt, generated.min(room - prompt));
                leaving.extend(leaves.map(|after| (now + after, next)));
                next += 1;
                due = now + coming.get(next).map_or(0, |c| c.0);
            }
            for &(_, number) in leaving.iter().filter(|(at, _)| *at == now) {
                if !world.done[number] {
                    world.end(number);
                }
            }
            world.step(|number| f64::from(coming[number].3));
            now += 1;
            // In a step at least one token of the oldest who runs is computed, and nobody is set back for ever.
            prop_assert!(now < 40 * 40 * 40, "somebody waits for ever");
        }
        prop_assert!(world.done.iter().all(|&done| done));
        for number in 0..coming.len() {
            prop_assert!(world.passed[number] <= most, "{number} was passed {:?}", world.passed);
            let own = if is_youngest { 0 } else { MOST_SET_BACK };
            let bound = own + number as u32 + most;
            prop_assert!(world.set_back[number] <= bound, "{number} was set back {:?}", world.set_back);
        }
    }
}

/// Ever more requests come that are all wanted more than the first one.
#[test]
fn a_request_that_nobody_wants_gets_done_while_others_keep_coming() {
    for queue in [Queue::Strict, Queue::Skip(2)] {
        let mut world = World::new(Victims::Priority("kv".into()), queue, 30);
        world.submit(10, 15);
        while !world.done[0] {
            world.submit(8, 8);
            world.step(|number| if number == 0 { 1.0 } else { 0.0 });
            assert!(world.done.len() < 300, "set back {} times", world.set_back[0]);
        }
        assert!((1..=MOST_SET_BACK).contains(&world.set_back[0]), "{queue}: {}", world.set_back[0]);
    }
}
