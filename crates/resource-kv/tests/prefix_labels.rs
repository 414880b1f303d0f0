//! The prefix cache under several labels: every stream that begins with known tokens begins with cached
//! pages, whatever its label.

mod common;

use common::*;
use resource_api::{
    HostServices, KvCache, KvPlan, KvStepOptions, LabelId, NodeId, PlanVec, PrefixInputs,
    PrefixWalk, RequestOverrides, Resource, Result, WalkId,
};
use serde_json::{Value, json};

const WALK: WalkId = WalkId(0);

/// Token values double as contents, so that what a stream reads shows which tokens it holds.
struct Run {
    cache: Cache,
    next_step: u64,
    labels: Vec<LabelId>,
    /// Most tokens that a request generates.
    most: u32,
}

impl Run {
    /// A cache of pages of 4 tokens, and four labels, `main` the first.
    fn new(pages: u32) -> Self {
        let host = resource_api::host::PlainHost::handle();
        let labels = ["main", "b", "c", "d"].map(|name| host.label_id(name)).to_vec();
        assert_eq!(labels[0], MAIN);
        let settings = format!(
            r#""pages": {}, "page_size": 4, "max_seq_len": 256, "dtype": "f32""#,
            pages + 1
        );
        let cache = cache_on(host, &settings, 4);
        let walk = PrefixWalk { label: MAIN, write: WALK, decode: WALK };
        assert!(cache.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
        Run { cache, next_step: 1, labels, most: 20 }
    }

    fn ingest(&self, slot: u32, prompt: &[u32], of_prompt: &[&str], of_generated: &[&str]) {
        let labels = json!({ "labels": { "prompt": of_prompt, "generated": of_generated } });
        let labels = labels.to_string();
        let overrides = RequestOverrides::new(&labels, prompt, self.most);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

    fn resolve(&self, slot: u32) -> Option<u32> {
        let found = self.cache.resource.resolve_cached_prefix(rid(slot), NodeId(0), WALK).unwrap();
        let again = self.cache.resource.resolve_cached_prefix(rid(slot), NodeId(0), WALK);
        assert_eq!(again.unwrap(), found, "asked again");
        self.cache.conserved();
        found
    }

    fn apply(&self, slot: u32, labels: &[usize], tokens: &[u32], matched: u32) -> Result<()> {
        let labels: Vec<LabelId> = labels.iter().map(|&at| self.labels[at]).collect();
        let inputs = PrefixInputs::new(tokens).with_labels(&labels);
        let resource = &self.cache.resource;
        let applied = resource.apply_cached_prefix(rid(slot), NodeId(0), WALK, &inputs, matched);
        self.cache.conserved();
        applied
    }

    /// Feeds the tokens to each of these streams and answers what those read then.
    fn feed(&mut self, slot: u32, labels: &[usize], tokens: &[u32]) -> Vec<Vec<u32>> {
        let parts: Vec<(usize, &[u32])> = labels.iter().map(|&at| (at, tokens)).collect();
        self.feed_each(slot, &parts, None)
    }

    fn feed_each(
        &mut self,
        slot: u32,
        parts: &[(usize, &[u32])],
        options: Option<KvStepOptions>,
    ) -> Vec<Vec<u32>> {
        self.next_step += 1;
        let rows: Vec<(u32, u32, u32)> = parts
            .iter()
            .map(|&(at, tokens)| (slot, self.labels[at].0, tokens.len() as u32))
            .collect();
        let ids: Vec<u32> = parts.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
        let step = Step { token_ids: ids, options, ..Step::new(self.next_step, &rows) };
        let outcome = self.cache.admit(&step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        let filed = self.cache.plan(&step).unwrap();
        for &(at, tokens) in parts {
            let values: Vec<f32> = tokens.iter().map(|&t| t as f32).collect();
            self.cache.write(&step, filed, self.labels[at], &values);
        }
        let plan = filed.open::<KvPlan>().unwrap();
        let read = |row| self.cache.history(plan, row).iter().map(|&v| v as u32).collect();
        let read = (0..parts.len()).map(read).collect();
        self.cache.commit(&step).unwrap();
        self.cache.conserved();
        read
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }

    fn inspect(&self, path: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}: {state}"))
    }

    fn len(&self, slot: u32, label: usize) -> u32 {
        self.cache.kv.stream_len(rid(slot), self.labels[label]).unwrap()
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn each_label_of_a_prompt_begins_with_the_same_cached_pages() {
    let mut run = Run::new(32);
    let prompt = tokens(1..12);
    run.ingest(0, &prompt, &["main", "b"], &["main", "b"]);
    assert_eq!(run.resolve(0), None);
    let read = run.feed(0, &[0, 1], &prompt);
    assert_eq!(read, [prompt.clone(), prompt.clone()]);
    assert_eq!(run.inspect("/prefix/pages"), 2, "what both have is kept once");
    // Other labels find it, those that nobody has written to among them.
    for (slot, names, labels) in
        [(1, &["main", "b"][..], &[0, 1][..]), (2, &["c"], &[2]), (3, &["d", "main"], &[3, 0])]
    {
        run.ingest(slot, &prompt, names, names);
        assert_eq!(run.resolve(slot), Some(8), "{names:?}");
        run.apply(slot, labels, &prompt, 8).unwrap();
        assert!(labels.iter().all(|&label| run.len(slot, label) == 8));
        let read = run.feed(slot, labels, &prompt[8..]);
        assert!(read.iter().all(|read| *read == prompt), "{names:?} reads {read:?}");
    }
    for (label, lookups, hits) in [("main", 4, 2), ("b", 3, 1), ("c", 1, 1), ("d", 1, 1)] {
        let of = |what: &str| run.inspect(&format!("/prefix/labels/{label}/{what}"));
        assert_eq!([of("lookups"), of("hits"), of("hit_tokens")], [lookups, hits, 8 * hits]);
    }
    let of = |what: &str| run.inspect(&format!("/prefix/{what}"));
    assert_eq!(
        [of("lookups"), of("hits"), of("hit_tokens")],
        [5, 3, 24],
        "by requests, each time that one asks and finds nothing"
    );
    (0..4).for_each(|slot| run.end(slot));
    assert_eq!(run.cache.kv.free_pages(), 32);
}

#[test]
fn what_is_generated_extends_the_chain_of_each_label_that_it_goes_to() {
    let mut run = Run::new(32);
    let prompt = tokens(1..7);
    // The prompt goes to `b` alone, what follows it to `c` and `d`.
    run.ingest(0, &prompt, &["b"], &["c", "d"]);
    run.feed(0, &[1], &prompt);
    let generated = tokens(50..59);
    for &token in &generated {
        run.cache.resource.extend_prefix_chain(rid(0), NodeId(0), WALK, &[token]).unwrap();
        run.feed(0, &[2, 3], &[token]);
    }
    assert_eq!([1, 2, 3].map(|label| run.len(0, label)), [6, 9, 9]);
    assert_eq!(run.inspect("/prefix/pages"), 1 + 2);
    run.end(0);
    // Nobody has gone on from the prompt with it: what was generated is a beginning of its own.
    run.ingest(1, &[prompt.clone(), generated.clone()].concat(), &["main"], &["main"]);
    assert_eq!(run.resolve(1), Some(6));
    run.ingest(2, &generated, &["main", "c"], &["main"]);
    assert_eq!(run.resolve(2), Some(8));
    run.apply(2, &[0, 2], &generated, 8).unwrap();
    assert_eq!(run.feed(2, &[0, 2], &generated[8..]), [&generated[..]; 2]);
}

#[test]
fn what_nobody_names_while_it_is_fed_is_known_once_it_was_sampled() {
    let mut run = Run::new(32);
    let prompt = tokens(1..4);
    run.ingest(0, &prompt, &["main", "b"], &["b"]);
    run.feed(0, &[0, 1], &prompt);
    for token in 20..26 {
        run.next_step += 1;
        let step = Step::new(run.next_step, &[(0, run.labels[1].0, 1)]);
        assert!(run.cache.admit(&step).is_ready());
        let filed = run.cache.plan(&step).unwrap();
        run.cache.write(&step, filed, run.labels[1], &[token as f32]);
        run.cache.commit(&step).unwrap();
        run.cache.resource.extend_prefix_chain(rid(0), NodeId(0), WALK, &[token]).unwrap();
        run.cache.conserved();
    }
    assert_eq!(run.inspect("/prefix/pages"), 2);
    let all = [prompt, tokens(20..26)].concat();
    run.ingest(1, &all, &["main"], &["main"]);
    assert_eq!(run.resolve(1), Some(8));
    run.apply(1, &[0], &all, 8).unwrap();
    assert_eq!(run.feed(1, &[0], &all[8..]), [all]);
}

#[test]
fn the_label_that_finds_least_decides_and_nothing_is_held_for_the_others() {
    let mut run = Run { most: 1, ..Run::new(6) };
    let (prompt, other) = (tokens(1..12), [&tokens(1..7)[..], &[90, 91, 92, 93, 94]].concat());
    run.ingest(0, &prompt, &["main"], &["main"]);
    run.feed(0, &[0], &prompt);
    // It parts within the second page: each label needs a copy of that, and there is room for both.
    run.ingest(1, &other, &["main", "b"], &["main"]);
    assert_eq!((run.resolve(1), run.cache.kv.free_pages()), (Some(6), 1));
    run.end(1);
    // Room for one.
    run.ingest(2, &tokens(70..78), &["main"], &["main"]);
    run.feed(2, &[0], &tokens(70..78));
    assert_eq!(run.cache.kv.free_pages(), 1);
    run.ingest(1, &other, &["main", "b"], &["main"]);
    assert_eq!(run.resolve(1), Some(4));
    run.apply(1, &[0, 1], &other, 4).unwrap();
    assert_eq!((run.len(1, 0), run.len(1, 1), run.cache.kv.free_pages()), (4, 4, 1));
    // What is wrong with one of them changes none.
    run.end(1);
    run.ingest(1, &prompt, &["main", "b"], &["main"]);
    assert_eq!(run.resolve(1), Some(8));
    let e = run.apply(1, &[0, 1, 3], &prompt, 8).unwrap_err();
    assert!(e.message().contains("was not ingested"), "{e}");
    assert_eq!((run.len(1, 0), run.len(1, 1)), (0, 0));
    assert_eq!(run.resolve(1), Some(8));
    // A cut within a page needs a page for each.
    let e = run.apply(1, &[0, 1], &prompt, 7).unwrap_err();
    assert!(e.message().contains("no page is free for a copy"), "{e}");
    assert_eq!((run.len(1, 0), run.len(1, 1), run.cache.kv.free_pages()), (0, 0, 1));
}

#[test]
fn a_copy_goes_on_with_the_chain_of_what_it_is_a_copy_of() {
    for before in [true, false] {
        let mut run = Run::new(32);
        let prompt = tokens(1..7);
        run.ingest(0, &prompt, &["main"], &["main"]);
        let (main, b) = (run.labels[0].0, run.labels[1].0);
        let mut forks = PlanVec::default();
        forks.push(fork(0, main, b));
        let (first, second): (&[u32], &[u32]) = (&[30], &[40]);
        match before {
            true => {
                run.feed(0, &[0], &prompt);
                let options = KvStepOptions { pre_forks: forks, ..Default::default() };
                run.feed_each(0, &[(0, first), (1, second)], Some(options));
            }
            false => {
                let options = KvStepOptions { post_forks: forks, ..Default::default() };
                run.feed_each(0, &[(0, &prompt)], Some(options));
                run.feed_each(0, &[(0, first), (1, second)], None);
            }
        }
        let read = run.feed_each(0, &[(0, &[31, 32]), (1, &[41, 42])], None);
        let ends = [[30, 31, 32], [40, 41, 42]].map(|own| [&prompt[..], &own].concat());
        assert_eq!(read, ends);
        assert_eq!(run.inspect("/prefix/pages"), 3, "a common page, and what came of each");
        run.end(0);
        for (slot, end) in (1..).zip(&ends) {
            run.ingest(slot, end, &["main"], &["main"]);
            assert_eq!(run.resolve(slot), Some(8), "{end:?}");
            run.apply(slot, &[0], end, 8).unwrap();
            assert_eq!(run.feed(slot, &[0], &end[8..]), [&end[..]]);
        }
        // After a reset nothing is known of what is copied next.
        run.ingest(5, &prompt, &["main"], &["main"]);
        run.cache.resource.reset_request(rid(1), true).unwrap();
        assert_eq!(run.resolve(1), Some(8));
        run.cache.conserved();
    }
}

#[test]
fn a_stream_that_no_request_has_named_takes_no_part() {
    let mut run = Run::new(32);
    let prompt = tokens(1..10);
    // An encoder's states, say, for the same tokens and under the same walk.
    run.ingest(0, &tokens(60..69), &["main"], &["main"]);
    run.feed(0, &[1], &prompt);
    assert_eq!(run.inspect("/prefix/pages"), 0);
    run.ingest(1, &prompt, &["main", "b"], &["main"]);
    assert_eq!(run.resolve(1), None);
    run.end(0);
    assert_eq!(run.inspect("/pages/cached"), 0);
    // `main` itself takes none where a request leaves it out.
    run.ingest(2, &prompt, &["b"], &["b"]);
    run.feed(2, &[0], &prompt);
    assert_eq!(run.inspect("/prefix/pages"), 0);
}

#[test]
fn wrong_labels_are_told_in_one_line() {
    let run = Run::new(8);
    for (text, said) in [
        (r#"{"labels": {"prompt": ["main", "b", "b"], "generated": []}}"#, "\"b\" twice"),
        (r#"{"labels": {"prompt": ["main"]}}"#, "missing field `generated`"),
        (
            r#"{"labels": {"prompt": [], "generated": [], "all": []}}"#,
            "labels.all: unknown key `all`",
        ),
    ] {
        let overrides = RequestOverrides::new(text, &[1, 2, 3], 2);
        let e = run.cache.resource.ingest_request(rid(0), &overrides).unwrap_err();
        assert!(e.message().contains(said) && !e.message().contains('\n'), "{e}");
    }
}

#[test]
fn streams_of_several_labels_leave_and_come_back_with_their_chains() {
    let host = resource_api::host::PlainHost::handle();
    let b = host.label_id("b");
    let settings =
        r#""pages": 17, "page_size": 4, "max_seq_len": 64, "dtype": "f32", "host_pages": 16"#;
    let cache = cache_on(host, settings, 4);
    let walk = PrefixWalk { label: MAIN, write: WALK, decode: WALK };
    assert!(cache.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
    let mut run = Run { cache, next_step: 1, labels: vec![MAIN, b], most: 9 };
    let prompt = tokens(1..8);
    run.ingest(0, &prompt, &["main", "b"], &["b"]);
    run.feed(0, &[0, 1], &prompt);
    assert!(run.cache.resource.offload(rid(0)).unwrap() > 0);
    run.cache.conserved();
    assert!(run.cache.resource.reload(rid(0)).unwrap());
    run.cache.conserved();
    let all = [&prompt[..], &[80, 81]].concat();
    assert_eq!(run.feed(0, &[1], &all[7..]), [&all[..]]);
    run.end(0);
    run.ingest(1, &all, &["main"], &["main"]);
    assert_eq!(run.resolve(1), Some(8), "a page that became whole after it was back");
}
