//! Nodes with several labels and walks, and several nodes that use different resources.

mod reader;

use engine_host::labels::RequestLabels;
use engine_host::request::GenerateRequest;
use engine_host::runner::{Live, Runner, Started};
use engine_host::step::{SegmentList, Share, SubmoduleStep};
use reader::{
    DIM, Outcome, Setup, VOCAB, cache_settings, expected, greedy, plan_of, read, resources, run,
    told, write,
};
use resource_api::{
    BucketKey, CombinedLabel, CrossAttention, CrossAttentionHandle, EngineLimits, KvCache,
    KvCacheHandle, KvPlan, KvStepOptions, LabelId, NodeId, PlanVec, RequestId, RequestOverrides,
    Resource, Segment, TensorView, TensorViewMut, WalkId,
};
use serde_json::json;

fn labelled(prompt: &[u32], max_tokens: u32, labels: serde_json::Value) -> GenerateRequest {
    let labels: RequestLabels = serde_json::from_value(labels).unwrap();
    GenerateRequest { labels, ..greedy(prompt, max_tokens) }
}

fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i + 7 * i * seed + seed) % VOCAB as u32).collect()
}

#[test]
fn one_input_under_two_labels_is_kept_and_read_under_both() {
    let guided = |seed, len| labelled(&text(seed, len), 9, json!({"needed": ["main", "uncond"]}));
    for (chunk, pages) in [(2, 64), (3, 64), (7, 64), (64, 64), (64, 13), (5, 14)] {
        for preplan in [true, false] {
            let limits = EngineLimits { max_batch: 8, max_batch_tokens: chunk, max_model_len: 64 };
            let mut engine = Setup { pages, preplan, limits, ..Setup::default() }.build();
            // Plain requests beside them, one of them under another single label.
            let requests = vec![
                guided(1, 9),
                greedy(&text(2, 11), 9),
                guided(3, 16),
                labelled(&text(4, 5), 9, json!({"per_node": {"decoder": ["uncond"]}})),
            ];
            let got = run(&mut engine, requests);
            for (got, (seed, len, labels)) in
                got.iter().zip([(1, 9, 2), (2, 11, 1), (3, 16, 2), (4, 5, 1)])
            {
                assert_eq!(got.failure, None);
                let want = expected(&text(seed, len), 9, labels);
                assert_eq!(got.tokens, want, "chunk {chunk}, {pages} pages, preplan {preplan}");
            }
            assert_eq!(engine.stats().planned_ahead > 0, preplan);
            assert_eq!(engine.stats().preemptions > 0, pages < 64, "{pages} pages");
            let free = told(&engine, "pages.free") + told(&engine, "pages.cached");
            assert_eq!(free, u64::from(pages));
        }
    }
}

#[test]
fn every_label_of_a_prompt_begins_with_what_is_cached() {
    let both = json!({"needed": ["main", "uncond"]});
    let parted = json!({"per_node_walk": {"decoder": {"prefill": ["main", "uncond"]}}});
    let apart = json!({"per_node_walk": {"decoder": {"prefill": ["p", "q"], "decode": ["d"]}}});
    let alone = json!({"per_node": {"decoder": ["uncond"]}});
    for (labels, of_prompt) in [
        (both, &["main", "uncond"][..]),
        (parted, &["main", "uncond"]),
        (apart, &["p", "q"]),
        (alone, &["uncond"]),
    ] {
        for (preplan, run_ahead, pages) in
            [(true, false, 64), (false, false, 64), (true, true, 64), (true, false, 17)]
        {
            let what = format!("{labels}, preplan {preplan}, ahead {run_ahead}, {pages} pages");
            let setup = Setup { preplan, run_ahead, pages, ..Setup::default() };
            let requests = |turn: u32| {
                // The second of a turn parts from the first within a page, the third is of another prompt.
                let prompts =
                    [text(1, 13 + turn), [&text(1, 10)[..], &text(5, 4)].concat(), text(7, 9)];
                prompts.map(|prompt| labelled(&prompt, 6, labels.clone())).to_vec()
            };
            let mut cold = Setup { prefix_cache: false, ..setup.clone() }.build();
            let mut warm = setup.build();
            for turn in 0..3 {
                let (want, got) = (run(&mut cold, requests(turn)), run(&mut warm, requests(turn)));
                for (want, got) in want.iter().zip(&got) {
                    assert_eq!(got.failure, None, "{what}");
                    assert_eq!(got.tokens, want.tokens, "{what}, turn {turn}");
                }
                if turn > 0 && pages == 64 {
                    // Whole pages of 4, with a token left to compute; and up to where it parts within one.
                    let cached = got.iter().map(Outcome::cached).collect::<Vec<_>>();
                    assert_eq!(cached, [12 + turn, 12, 8], "{what}, turn {turn}");
                }
            }
            let hits = |label: &str| told(&warm, &format!("prefix.labels.{label}.hits"));
            let all = told(&warm, "prefix.hits");
            assert!(all >= if pages == 64 { 7 } else { 1 }, "{what}: {all} hits");
            for label in of_prompt {
                assert!(hits(label) >= all, "{what}: {label} has {} of {all} hits", hits(label));
            }
            assert_eq!(told(&warm, "pages.used"), 0, "{what}");
        }
    }
}

#[test]
fn a_request_whose_streams_can_never_fit_together_is_refused_at_submission() {
    let setup = Setup { pages: 10, ..Setup::default() };
    let mut engine = setup.build();
    // Of 18 + 4 tokens 21 are computed, 6 pages: alone they fit, under two labels they do not.
    let both = json!({"needed": ["main", "uncond"]});
    let e = engine.submit(labelled(&text(1, 18), 4, both.clone())).unwrap_err();
    assert_eq!(e.kind(), engine_host::error::ErrorKind::Usage);
    let said = e.to_string();
    let need = "in 2 streams need 12 pages of 4 tokens; the pool has 10 in all";
    assert!(said.contains(need) && !said.contains('\n'), "{said}");
    assert!(engine.is_idle());
    // What just fits runs to its end.
    let got = run(&mut engine, vec![labelled(&text(1, 17), 4, both.clone())]);
    assert_eq!((&got[0].tokens, &got[0].failure), (&expected(&text(1, 17), 4, 2), &None));
    // The prompt under two labels, what is generated under one: 7 + 3 pages, and 8 + 3.
    let parts = json!({"per_node_walk": {"decoder": {"prefill": ["main", "uncond"]}}});
    let got = run(&mut engine, vec![labelled(&text(2, 12), 17, parts.clone())]);
    assert_eq!(got[0].failure, None);
    let e = engine.submit(labelled(&text(2, 12), 18, parts)).unwrap_err().to_string();
    assert!(e.contains("in 2 streams need 11 pages"), "{e}");
    assert_eq!(
        run(&mut engine, vec![greedy(&text(3, 9), 3)])[0].tokens,
        expected(&text(3, 9), 3, 1)
    );
}

#[test]
fn labels_may_differ_from_walk_to_walk() {
    // The prompt goes to two streams, what is generated to one.
    let labels = json!({"per_node_walk": {"decoder": {"prefill": ["main", "uncond"]}}});
    let expect = |prompt: &[u32]| {
        let first = expected(prompt, 1, 2);
        let on = [prompt, &first].concat();
        [first, expected(&on, 7, 1)].concat()
    };
    for (chunk, pages) in [(2, 64), (5, 64), (64, 64), (64, 12)] {
        let limits = EngineLimits { max_batch: 8, max_batch_tokens: chunk, max_model_len: 64 };
        let mut engine = Setup { pages, limits, ..Setup::default() }.build();
        let prompts: Vec<_> = [(5, 9), (6, 8), (7, 13)].map(|(s, l)| text(s, l)).into();
        let requests = prompts.iter().map(|p| labelled(p, 8, labels.clone())).collect();
        for (got, prompt) in run(&mut engine, requests).iter().zip(&prompts) {
            assert_eq!(got.tokens, expect(prompt), "chunk {chunk}, {pages} pages");
        }
    }
}

#[test]
fn the_walk_is_asked_for_labels_before_the_node_and_that_before_the_request() {
    let all = [
        (json!({}), vec![("main", 11)]),
        (json!({"needed": ["r"]}), vec![("r", 11)]),
        (json!({"needed": ["r"], "per_node": {"decoder": ["n"]}}), vec![("n", 11)]),
        (
            json!({
                "needed": ["r"],
                "per_node": {"decoder": ["n", "main"]},
                "per_node_walk": {"decoder": {"prefill": ["p"]}}
            }),
            vec![("main", 2), ("n", 2), ("p", 9)],
        ),
        (
            json!({"needed": ["r"], "per_node_walk": {"decoder": {"decode": ["d"]}}}),
            vec![("d", 2), ("r", 9)],
        ),
    ];
    for preplan in [true, false] {
        let mut engine = Setup { preplan, ..Setup::default() }.build();
        for (labels, want) in &all {
            let rid = engine.submit(labelled(&text(2, 9), 8, labels.clone())).unwrap();
            for _ in 0..3 {
                engine.step();
            }
            let (_, kv) = engine.resources().find("main_kv").unwrap();
            let told: serde_json::Value = serde_json::from_str(&kv.resource().inspect()).unwrap();
            let streams = told["streams"].as_array().unwrap().iter();
            let mut got: Vec<(&str, u64)> = streams
                .map(|s| (s["label"].as_str().unwrap(), s["tokens"].as_u64().unwrap()))
                .filter(|&(_, tokens)| tokens > 0)
                .collect();
            got.sort_unstable();
            assert_eq!(got, *want, "{labels}");
            engine.cancel(rid);
        }
    }
}

#[test]
fn a_request_under_other_labels_begins_with_what_main_has_cached() {
    let mut engine = Setup::default().build();
    let prompt = text(3, 17);
    assert_eq!(run(&mut engine, vec![greedy(&prompt, 4)])[0].cached(), 0);
    assert_eq!(run(&mut engine, vec![greedy(&prompt, 4)])[0].cached(), 16);
    for labels in [json!(["uncond"]), json!(["main", "uncond"])] {
        let count = labels.as_array().unwrap().len();
        let request = labelled(&prompt, 4, json!({ "needed": labels }));
        let got: Outcome = run(&mut engine, vec![request]).remove(0);
        assert_eq!((got.cached(), &got.tokens), (16, &expected(&prompt, 4, count)));
    }
}

#[test]
fn a_session_is_taken_up_under_the_labels_that_it_has() {
    let both = json!({"needed": ["main", "uncond"]});
    let parts = json!({"per_node_walk": {"decoder": {"prefill": ["main", "uncond"]}}});
    let plain = json!({});
    let talk = |prompt: &[u32], labels: &serde_json::Value| {
        let session = Some("talk".to_owned());
        GenerateRequest { session, ..labelled(prompt, 4, labels.clone()) }
    };
    let first = text(5, 9);
    let go_on = |labels: &serde_json::Value, then: &serde_json::Value, cut: usize| {
        let mut engine = Setup { prefix_cache: false, ..Setup::default() }.build();
        let said = run(&mut engine, vec![talk(&first, labels)]).remove(0).tokens;
        let mut second = [&first[..], &said, &[3, 4]].concat();
        second.truncate(second.len() - cut);
        let got = run(&mut engine, vec![talk(&second, then)]).remove(0);
        let alone = run(&mut Setup::default().build(), vec![labelled(&second, 4, then.clone())]);
        assert_eq!(got.tokens, alone[0].tokens, "{labels} and then {then}, but {cut}");
        got.cached()
    };
    // 9 tokens and three of four that were generated.
    assert_eq!([go_on(&plain, &plain, 0), go_on(&plain, &plain, 4)], [12, 10]);
    assert_eq!([go_on(&both, &both, 0), go_on(&both, &both, 4)], [12, 0], "whole or not at all");
    for (labels, then) in [(&plain, &both), (&both, &plain), (&parts, &parts), (&both, &parts)] {
        assert_eq!(go_on(labels, then, 0), 0, "{labels} and then {then}");
    }
}

#[test]
fn wrong_labels_are_refused_before_anything_is_taken_in() {
    let limits = EngineLimits { max_batch: 4, max_batch_tokens: 2, max_model_len: 64 };
    let mut engine = Setup { limits, ..Setup::default() }.build();
    for (labels, said) in [
        (json!({"per_node": {"encoder": ["a"]}}), "node \"encoder\""),
        (json!({"per_node_walk": {"decoder": {"prefil": ["a"]}}}), "did you mean \"prefill\"?"),
        (json!({"needed": ["a", "b", "c"]}), "room for 2 tokens"),
        (json!({"needed": ["a", "a"]}), "twice"),
    ] {
        let e = engine.submit(labelled(&[1, 2], 2, labels)).unwrap_err().to_string();
        assert!(e.contains(said) && !e.contains('\n'), "{e}");
    }
    assert!(engine.is_idle());
    assert_eq!(run(&mut engine, vec![greedy(&[1, 2], 3)])[0].tokens, expected(&[1, 2], 3, 1));
}

const CONTEXT: LabelId = LabelId(1);
const ENCODER: NodeId = NodeId(1);
const DECODER: NodeId = NodeId(0);

/// An encoder that writes a context and a decoder that reads it, over one cache or two.
struct Pair {
    runner: Runner,
    is_one: bool,
}

impl Pair {
    fn new(page_size: u32, pages: u32, is_one: bool) -> Self {
        let both = &["encoder", "decoder"][..];
        let own = &["decoder"][..];
        let cross = match is_one {
            true => json!({"kv_cache": "main_kv", "query_kv_cache": "main_kv"}),
            false => json!({"kv_cache": "context_kv", "query_kv_cache": "main_kv"}),
        };
        let mut all = vec![
            ("main_kv", "kv", if is_one { both } else { own }, cache_settings(page_size, pages)),
            ("attn", "attention", own, json!({"kv_cache": "main_kv"})),
            ("cross", "cross_attention", own, cross),
        ];
        if !is_one {
            all.push(("context_kv", "kv", both, cache_settings(page_size, pages)));
        }
        let (set, services) = resources(&all, EngineLimits::default());
        for label in ["main", "context"] {
            services.labels.intern(label);
        }
        let runner = Runner::new(set, 4);
        runner.resources().entries().iter().for_each(|e| {
            for slot in 0..4 {
                let overrides = RequestOverrides::new("", &[1], 8);
                e.resource().ingest_request(RequestId::new(slot, 1), &overrides).unwrap();
            }
        });
        Self { runner, is_one }
    }

    fn index(&self, key: &str) -> usize {
        self.runner.resources().find(key).unwrap().0
    }

    fn context_key(&self) -> &'static str {
        if self.is_one { "main_kv" } else { "context_kv" }
    }

    fn handle(&self, key: &str) -> KvCacheHandle {
        self.runner.resources().find(key).unwrap().1.capabilities()[0].open().unwrap()
    }

    fn step(&self, node: NodeId, name: &str, rows: &[(u32, LabelId, u32)]) -> SubmoduleStep {
        let own = self.runner.resources().of_node(name);
        let mut step = SubmoduleStep::new(node, WalkId(0), own);
        step.segments = list(rows);
        for &(slot, ..) in rows {
            let rid = RequestId::new(slot, 1);
            if !step.request_ids.contains(&rid) {
                step.request_ids.push(rid);
            }
        }
        step
    }

    fn start(&mut self, step: SubmoduleStep) -> Live {
        match self.runner.start(step).unwrap() {
            Started::Live(live) => live,
            Started::Refused(why, _) => panic!("{}", why.outcome.message()),
        }
    }

    fn finish(&mut self, live: Live) {
        let (done, committed) = self.runner.commit(live);
        committed.unwrap();
        self.runner.finish(done);
    }

    /// Writes the contexts of requests, in a step of the encoder.
    fn encode(&mut self, contexts: &[(u32, Vec<u32>)]) {
        let rows: Vec<_> =
            contexts.iter().map(|(slot, c)| (*slot, CONTEXT, c.len() as u32)).collect();
        let live = self.start(self.step(ENCODER, "encoder", &rows));
        let key = self.context_key();
        let tokens: Vec<u32> = contexts.iter().flat_map(|(_, c)| c).copied().collect();
        let ctx = live.ctx();
        assert!(ctx.plan_result::<KvPlan>(self.index("attn") as u32).is_err(), "not of this node");
        let plan: &KvPlan = ctx.plan_result(self.index(key) as u32).unwrap();
        write(&self.handle(key), &ctx, plan, &tokens).unwrap();
        self.finish(live);
    }

    /// Adds a token to each request's own stream, and gives what it then reads: of itself, of its
    /// context, and what cross-attention makes of that.
    fn decode(&mut self, tokens: &[(u32, u32)]) -> Vec<(Vec<u32>, Vec<u32>, Vec<f32>)> {
        let own: Vec<_> = tokens.iter().map(|&(slot, _)| (slot, LabelId::MAIN, 1)).collect();
        let read_only: Vec<_> = tokens.iter().map(|&(slot, _)| (slot, CONTEXT, 0)).collect();
        let both = [own.clone(), read_only.clone()].concat();
        let mut step = self.step(DECODER, "decoder", &both);
        if !self.is_one {
            // Each cache has the segments of its own streams.
            let share = |rows: &[_]| Share { segments: Some(list(rows)), options: None };
            step.shares.insert(self.index("main_kv"), share(&own));
            step.shares.insert(self.index("context_kv"), share(&read_only));
        }
        let live = self.start(step);
        let ctx = live.ctx();
        let (key, kv) = (self.context_key(), self.handle("main_kv"));
        let plan: &KvPlan = ctx.plan_result(self.index("main_kv") as u32).unwrap();
        let ids: Vec<u32> = tokens.iter().map(|&(_, id)| id).collect();
        write(&kv, &ctx, plan, &ids).unwrap();
        let context: &KvPlan = ctx.plan_result(self.index(key) as u32).unwrap();
        let cross = self.runner.resources().find("cross").unwrap().1;
        let cross: CrossAttentionHandle = cross.capabilities()[0].open().unwrap();
        let queries = vec![0.0; tokens.len() * DIM];
        let mut out = vec![f32::NAN; queries.len()];
        let shape = [tokens.len(), 1, DIM];
        let q = TensorView::from_slice(&queries, &shape);
        let mut seen = TensorViewMut::from_slice(&mut out, &shape);
        cross.run(&ctx, 0, LabelId::MAIN, &q, &mut seen).unwrap();
        let row = |plan: &KvPlan, slot: u32, label| {
            let group = plan.group(label).unwrap();
            let rows = group.first_row..group.first_row + group.num_rows;
            let own = rows.map(|r| r as usize).find(|&r| plan.request[r].slot == slot);
            own.expect("it has a row")
        };
        let found = tokens.iter().enumerate().map(|(i, &(slot, _))| {
            let main = read(&kv, plan, row(plan, slot, LabelId::MAIN)).unwrap();
            let far = read(&self.handle(key), context, row(context, slot, CONTEXT)).unwrap();
            (main, far, out[i * DIM..][..DIM].to_vec())
        });
        let found = found.collect();
        self.finish(live);
        found
    }
}

fn list(rows: &[(u32, LabelId, u32)]) -> SegmentList {
    let mut segments = SegmentList::default();
    for &(slot, label, span) in rows {
        segments.push(Segment { request_id: RequestId::new(slot, 1), label, span });
    }
    segments
}

#[test]
fn an_encoder_and_a_decoder_never_meet_in_a_page() {
    // A context of one and a half pages and five tokens of one's own, for pages of any size, in one
    // cache for both or in one for each.
    for is_one in [true, false] {
        for page_size in [1, 2, 3, 4, 7] {
            let mut pair = Pair::new(page_size, 40, is_one);
            let contexts = vec![(0, vec![1, 2, 3, 4, 5, 6]), (1, vec![11, 12, 13, 14, 15, 16])];
            pair.encode(&contexts);
            for turn in 1..=5u32 {
                let got = pair.decode(&[(0, 20 + turn), (1, 30 + turn)]);
                for (slot, (own, context, seen)) in got.into_iter().enumerate() {
                    let first = 20 + 10 * slot as u32;
                    assert_eq!(own, (first + 1..=first + turn).collect::<Vec<_>>());
                    assert_eq!(context, contexts[slot].1);
                    // Queries of zeros weigh all alike: the mean of the values.
                    let mean = -(contexts[slot].1.iter().sum::<u32>() as f32) / 6.0;
                    assert!((seen[0] - mean).abs() < 1e-5 && (seen[1] + 2.5).abs() < 1e-5);
                }
                for key in ["main_kv", pair.context_key()] {
                    pair.handle(key).assert_pages_conserved().unwrap();
                }
            }
            let cross = pair.runner.resources().find("cross").unwrap().1.resource().inspect();
            let cross: serde_json::Value = serde_json::from_str(&cross).unwrap();
            assert_eq!(cross["planned"]["plans"], json!(5));
            assert_eq!(cross["planned"]["last"]["rows"], json!(2));
            for slot in 0..4 {
                for entry in pair.runner.resources().entries() {
                    entry.resource().remove_request(RequestId::new(slot, 1)).unwrap();
                }
            }
            pair.runner.resources().entries().iter().for_each(|e| {
                e.resource().post_warmup_validate().unwrap();
            });
            for key in ["main_kv", pair.context_key()] {
                pair.handle(key).assert_pages_conserved().unwrap();
            }
        }
    }
}

#[test]
fn an_empty_context_gives_zeros_and_no_nan() {
    for is_one in [true, false] {
        let mut pair = Pair::new(4, 16, is_one);
        pair.encode(&[(0, vec![3; 9])]);
        // The other request's context was never written.
        let got = pair.decode(&[(0, 5), (1, 6)]);
        assert_eq!((got[1].1.len(), &got[1].2[..]), (0, &[0.0, 0.0][..]));
        assert!((got[0].2[0] + 3.0).abs() < 1e-5, "{:?}", got[0]);
    }
}

#[test]
fn a_node_hears_nothing_of_what_another_nodes_resources_refuse() {
    // The decoder's cache is full; the encoder has its own and goes on.
    let mut pair = Pair::new(4, 3, false);
    let mut step = pair.step(DECODER, "decoder", &[(0, LabelId::MAIN, 13)]);
    step.shares
        .insert(pair.index("context_kv"), Share { segments: Some(list(&[])), options: None });
    let Started::Refused(why, _) = pair.runner.start(step).unwrap() else {
        panic!("it is too long")
    };
    assert_eq!(why.failed_resource.as_deref(), Some("main_kv"));
    pair.encode(&[(0, vec![1, 2, 3])]);
    assert_eq!(pair.handle("context_kv").free_pages(), 2);
    assert_eq!(pair.handle("main_kv").free_pages(), 3);
}

#[test]
fn a_combined_label_lays_the_streams_of_two_one_after_the_other() {
    let mut pair = Pair::new(4, 16, true);
    let (other, all) = (LabelId(2), LabelId(3));
    let mut step = pair.step(
        DECODER,
        "decoder",
        &[(0, LabelId::MAIN, 3), (1, LabelId::MAIN, 2), (0, other, 3), (1, other, 2)],
    );
    step.resources = vec![pair.index("main_kv"), pair.index("attn")];
    let mut combined = PlanVec::default();
    for source in [LabelId::MAIN, other] {
        combined.push(CombinedLabel { combined: all, source });
    }
    let options = KvStepOptions { combined_labels: combined, ..KvStepOptions::default() };
    let share = Share { segments: None, options: Some(Box::new(options)) };
    step.shares.insert(pair.index("main_kv"), share);
    let live = pair.start(step);
    let ctx = live.ctx();
    let plan = plan_of(&ctx);
    let group = plan.group(all).expect("the combined label");
    assert_eq!((plan.groups.len(), group.num_rows, group.num_tokens), (1, 4, 10));
    let kv = pair.handle("main_kv");
    write(&kv, &ctx, plan, &[1, 2, 3, 4, 5, 11, 12, 13, 14, 15]).unwrap();
    let reads: Vec<Vec<u32>> = (0..4).map(|row| read(&kv, plan, row).unwrap()).collect();
    assert_eq!(reads, [vec![1, 2, 3], vec![4, 5], vec![11, 12, 13], vec![14, 15]]);
    pair.finish(live);
    for (label, len) in [(LabelId::MAIN, [3, 2]), (other, [3, 2])] {
        for (slot, len) in len.into_iter().enumerate() {
            assert_eq!(kv.stream_len(RequestId::new(slot as u32, 1), label).unwrap(), len);
        }
    }
}

/// The bytes of all pages but the sink.
fn contents(kv: &KvCacheHandle, pages: usize, page_size: usize) -> Vec<f32> {
    let view = kv.layer_view(0).unwrap();
    let strides = view.k.raw().strides;
    let mut all = Vec::new();
    for page in 1..=pages {
        for slot in 0..page_size {
            let at = page * strides[0] as usize + slot * strides[1] as usize;
            all.extend_from_slice(view.k.window(at, DIM).unwrap());
            all.extend_from_slice(view.v.window(at, DIM).unwrap());
        }
    }
    all
}

#[test]
fn padding_rows_write_no_page_of_anybody_also_when_none_is_free() {
    let (page_size, pages) = (4usize, 6usize);
    let mut pair = Pair::new(page_size as u32, pages as u32, true);
    let bucket = BucketKey { graph_walk: WalkId(0), bs: 4, num_tokens: 4, cg_key_info: 0 };
    assert_eq!(pair.runner.add_buckets(&[bucket]), 1);
    // Three requests have all pages, the last of the pool among them, and room for a token each.
    for slot in 0..3 {
        let mut step = pair.step(DECODER, "decoder", &[(slot, LabelId::MAIN, 7)]);
        step.resources = vec![pair.index("main_kv"), pair.index("attn")];
        let live = pair.start(step);
        let tokens: Vec<u32> = (0..7).map(|i| 10 * (slot + 1) + i).collect();
        write(&pair.handle("main_kv"), &live.ctx(), plan_of(&live.ctx()), &tokens).unwrap();
        pair.finish(live);
    }
    let kv = pair.handle("main_kv");
    assert_eq!(kv.free_pages(), 0);
    let before = contents(&kv, pages, page_size);
    for _ in 0..2 {
        // A step of two of them, padded to four rows.
        let rows = [(0, LabelId::MAIN, 1), (1, LabelId::MAIN, 1)];
        let mut step = pair.step(DECODER, "decoder", &rows);
        step.resources = vec![pair.index("main_kv"), pair.index("attn")];
        step.token_ids = vec![51, 52];
        step.pad_to(bucket);
        let live = pair.start(step);
        let ctx = live.ctx();
        assert_eq!(ctx.slot_lease().bucket(), Some(&bucket), "the captured shape is used");
        let plan = plan_of(&ctx);
        assert_eq!(plan.write_page[2..], [0, 0], "padding writes the sink");
        write(&kv, &ctx, plan, &[51, 52, 63, 63]).unwrap();
        assert_eq!(read(&kv, plan, 0).unwrap(), [10, 11, 12, 13, 14, 15, 16, 51]);
        let after = contents(&kv, pages, page_size);
        let changed: Vec<usize> =
            (0..after.len()).filter(|&i| after[i].to_bits() != before[i].to_bits()).collect();
        assert_eq!(changed.len(), 2 * 2 * DIM, "a token each of two requests: {changed:?}");
        pair.runner.abandon(live);
    }
}

#[test]
fn a_plan_is_not_touched_while_its_step_runs_slowly() {
    // Every forward pass outlasts the planning of the step after it, which is for other lengths.
    let slow = |_: &resource_api::StepContext<'_>| {
        std::thread::sleep(std::time::Duration::from_millis(2));
    };
    let limits = EngineLimits { max_batch: 8, max_batch_tokens: 9, max_model_len: 64 };
    for page_size in [1, 3, 4] {
        let meanwhile: reader::Meanwhile = std::sync::Arc::new(slow);
        let setup =
            Setup { page_size, pages: 150, meanwhile: Some(meanwhile), limits, ..Setup::default() };
        let mut engine = setup.build();
        let prompts: Vec<_> = (1..7).map(|i| text(i, 4 * i + i % 3)).collect();
        let got = run(&mut engine, prompts.iter().map(|p| greedy(p, 12)).collect());
        for (got, prompt) in got.iter().zip(&prompts) {
            assert_eq!(got.tokens, expected(prompt, 12, 1), "pages of {page_size}");
        }
        assert!(engine.stats().planned_ahead > 10, "{:?}", engine.stats());
    }
}
