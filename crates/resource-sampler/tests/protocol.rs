//! Requests and steps: what is checked, kept, planned, thrown away and handed on.

#[allow(dead_code)] // each test file uses its part
mod common;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{NodeId, PublishedInfo, RequestId, Resource as _, Sampler as _, WalkId};

const A: RequestId = RequestId::new(0, 1);
const B: RequestId = RequestId::new(9, 4);

fn refusal(config: &str) -> String {
    Engine::new(100).ingest_prompt(A, config, &[]).unwrap_err().to_string()
}

#[test]
fn a_wrong_field_is_named_with_its_value() {
    let cases = [
        (r#"{"temperature": -0.5}"#, "temperature = -0.5 must be 0 or above"),
        (r#"{"temperature": 1e300}"#, "must be 0 or above"),
        (r#"{"top_p": 0}"#, "top_p = 0 must be above 0 and at most 1"),
        (r#"{"top_p": 1.5}"#, "top_p = 1.5 must be above 0 and at most 1"),
        (r#"{"min_p": 1.01}"#, "min_p = 1.01 must be at least 0 and at most 1"),
        (r#"{"top_k": -2}"#, "top_k = -2 must be 0 or -1 (off) or above"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty = 0 must be above 0"),
        (r#"{"temprature": 1}"#, "unknown key `temprature`; did you mean `temperature`?"),
        (r#"{"seed": 1.5}"#, "seed must be a 64-bit integer"),
        (r#"{"temperature": null}"#, "invalid type: null"),
    ];
    for (config, want) in cases {
        let got = refusal(config);
        assert!(got.contains(want) && !got.contains('\n'), "{config}: {got}");
    }
}

#[test]
fn what_is_switched_off_names_its_setting() {
    let settings = r#"{"vocab_size": 10, "enable_repetition_penalty": false}"#;
    let built = build(settings, PlainHost::handle()).unwrap();
    let ingest = |config| {
        let overrides = resource_api::RequestOverrides::new(config, &[], 1);
        built.resource.ingest_request(A, &overrides).map_err(|e| e.to_string())
    };
    assert_eq!(
        ingest(r#"{"min_p": 0.1}"#).unwrap_err(),
        "min_p = 0.1 is switched off in this sampler: set enable_min_p = true in its settings"
    );
    assert_eq!(
        ingest(r#"{"repetition_penalty": 1.1}"#).unwrap_err(),
        "repetition_penalty = 1.1 is switched off in this sampler: set enable_repetition_penalty = \
         true in its settings"
    );
    ingest(r#"{"min_p": 0, "repetition_penalty": 1.0, "ignore_eos": true}"#).unwrap();
    let e = build("{}", PlainHost::handle()).unwrap_err().to_string();
    assert!(e.contains("[resources.sampler]") && e.contains("`vocab_size`"), "{e}");
}

#[test]
fn defaults_are_the_seed_apis() {
    let e = Engine::new(100);
    e.ingest(A, "");
    let got = e.plan(&[A], 0, false, |p| {
        (p.temperature[1], p.top_k[1], p.top_p[1], p.min_p[1], p.repetition_penalty[1], p.seed[1])
    });
    assert_eq!(got, (0.6, 0, 1.0, 0.0, 1.0, 0));
}

#[test]
fn a_plan_holds_every_requests_parameters_in_its_seat() {
    let e = Engine::new(100);
    e.ingest(A, r#"{"temperature": 0.5, "top_k": 7, "seed": 11}"#);
    e.ingest(B, r#"{"temperature": 0.25, "top_p": 0.5, "choice": 3}"#);
    let row = noise(1, 100);
    e.run(B, &row, 3);
    let rids = [B, RequestId::padding(1), A];
    let (version_a, seats) = e.plan(&rids, 0, false, |p| {
        assert_eq!(&p.request[..], rids);
        let seats: Vec<usize> = p.seat.iter().map(|&s| s as usize).collect();
        let [b, pad, a] = seats[..] else { panic!() };
        assert_eq!((p.temperature[a], p.top_k[a], p.seed[a], p.position[a]), (0.5, 7, 11, 0));
        assert_eq!((p.temperature[b], p.top_p[b], p.choice[b], p.position[b]), (0.25, 0.5, 3, 3));
        assert_eq!((p.temperature[pad], p.version[pad]), (0.0, 0));
        assert_eq!((p.row[a], p.row[b]), (2, 0));
        (p.version[a], seats)
    });
    // The same slot with its rows in another order: the same seats.
    e.plan(&[A, B], 0, false, |p| {
        assert_eq!(&p.seat[..], [seats[2] as u32, seats[0] as u32]);
        assert_eq!(p.version[seats[2]], version_a);
    });
    // The slot's next owner, with another config.
    e.resource.remove_request(A).unwrap();
    let next = RequestId::new(A.slot, 2);
    e.ingest(next, r#"{"temperature": 2}"#);
    e.plan(&[next], 0, false, |p| {
        let seat = p.seat[0] as usize;
        assert_eq!((p.temperature[seat], p.top_k[seat], p.seed[seat]), (2.0, 0, 0));
        assert_ne!(p.version[seat], version_a);
    });
}

#[test]
fn a_staged_step_holds_parameters_and_is_completed_when_it_is_promoted() {
    let e = Engine::new(50);
    e.ingest(A, r#"{"temperature": 1, "seed": 5}"#);
    let row = noise(2, 50);
    let want = {
        let plain = Engine::new(50);
        plain.ingest(A, r#"{"temperature": 1, "seed": 5}"#);
        plain.run(A, &row, 4)
    };
    let mut got = e.run(A, &row, 1);
    for _ in 0..3 {
        e.plan(&[A], 0, true, |p| assert_eq!(p.seed[p.seat[0] as usize], 5));
        e.resource.clear_preplan(None).unwrap();
        got.extend(e.run(A, &row, 1));
    }
    assert_eq!(got, want);
}

#[test]
fn a_discarded_sample_is_not_counted() {
    let row = noise(3, 80);
    let config = r#"{"temperature": 1, "repetition_penalty": 2}"#;
    let (plain, e) = (Engine::new(80), Engine::new(80));
    plain.ingest(A, config);
    e.ingest(A, config);
    let want = plain.run(A, &row, 5);
    let mut got = e.run(A, &row, 2);
    let mut extra = Extra::default();
    extra.options.discarded.push(A);
    assert_eq!(e.step_with(&[A], &[&row], extra)[0].token, want[2]);
    got.extend(e.run(A, &row, 3));
    assert_eq!(got, want);
}

#[test]
fn a_second_ingest_changes_nothing_and_a_late_copy_hits_nobody() {
    let row = noise(4, 80);
    let e = Engine::new(80);
    e.ingest(A, r#"{"temperature": 1}"#);
    let first = e.run(A, &row, 3);
    e.ingest(A, r#"{"temperature": 0}"#);
    e.plan(&[A], 0, false, |p| assert_eq!((p.position[1], p.temperature[1]), (3, 1.0)));
    e.resource.remove_request(A).unwrap();
    e.resource.remove_request(A).unwrap();
    e.resource.reset_request(B, true).unwrap();
    let next = RequestId::new(A.slot, 2);
    e.ingest(next, r#"{"temperature": 1}"#);
    e.resource.remove_requests(&[A]).unwrap();
    assert_eq!(e.run(next, &row, 3), first, "same seed, same sequence, from its start");
    assert!(e.ingest_prompt(A, "", &[]).unwrap_err().to_string().contains("r0.1 is out of date"));
}

#[test]
fn another_worker_goes_on_where_this_one_stopped() {
    let row = noise(5, 90);
    let config = r#"{"temperature": 1, "seed": 77, "repetition_penalty": 1.3}"#;
    let (whole, from, to) = (Engine::new(90), Engine::new(90), Engine::new(90));
    for e in [&whole, &from] {
        e.ingest_prompt(A, config, &[4, 5]).unwrap();
    }
    // The other worker was not told the seed.
    to.ingest(B, r#"{"temperature": 1, "repetition_penalty": 1.3}"#);
    let want = whole.run(A, &row, 10);
    let mut got = from.run(A, &row, 4);
    let early = from.resource.publish(A).unwrap().unwrap();
    got.extend(from.run(A, &row, 2));
    let late = from.resource.publish(A).unwrap().unwrap();
    for info in [late, early] {
        let info = PublishedInfo::from_bytes(&info.to_bytes()).unwrap();
        let outcome = to.resource.admit_retrieve(B, NodeId(0), WalkId(0), Some(&info)).unwrap();
        assert!(outcome.is_ready());
    }
    got.extend(to.run(B, &row, 4));
    assert_eq!(got, want);
    let foreign = PublishedInfo::new("positions", 1);
    let refused = to.resource.admit_retrieve(B, NodeId(0), WalkId(0), Some(&foreign)).unwrap();
    assert!(refused.message().contains("positions/1, not of sampler/1"), "{}", refused.message());
}

#[test]
fn prompt_tokens_are_seen_from_the_start_whether_or_not_a_step_feeds_them() {
    let e = Engine::new(4);
    // A cached prefix is never fed: what it held comes with the request.
    e.ingest_prompt(A, r#"{"temperature": 0, "repetition_penalty": 4}"#, &[0, 1]).unwrap();
    assert_eq!(e.step(&[A], &[&[4.0, 3.0, 2.0, 1.5]])[0].token, 2);
}

#[test]
fn steps_that_begin_before_the_last_ones_output_draw_what_they_draw_without() {
    let config = r#"{"temperature": 1.3, "seed": 5}"#;
    let (one, other) = (Engine::new(200), Engine::new(200));
    for engine in [&one, &other] {
        engine.ingest(A, config);
        engine.ingest(B, r#"{"temperature": 0.9, "top_k": 50, "seed": 6}"#);
    }
    let rids = [A, B];
    let rows = |n: u64| vec![noise(n, 200), noise(n + 100, 200)];
    let steps: Vec<_> = (0..9).map(rows).collect();
    let plain = |rows: &Vec<Vec<f32>>| one.step(&rids, &[&rows[0], &rows[1]]);
    let want: Vec<_> = steps.iter().map(plain).collect();
    assert_eq!(other.run_ahead(&rids, &steps), want);
    // What follows goes on from there.
    let rows = rows(77);
    assert_eq!(other.step(&rids, &[&rows[0], &rows[1]]), one.step(&rids, &[&rows[0], &rows[1]]));
}

#[test]
fn requests_that_draw_by_their_tokens_cannot_begin_ahead() {
    let engine = Engine::new(100);
    engine.ingest(A, r#"{"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}"#);
    assert!(engine.api.can_begin(&[A]));
    let cases = [
        r#"{"repetition_penalty": 1.2}"#,
        r#"{"presence_penalty": 0.5}"#,
        r#"{"frequency_penalty": 0.5}"#,
        r#"{"min_tokens": 3, "end_token_ids": [1]}"#,
    ];
    for config in cases {
        engine.ingest(B, config);
        assert!(!engine.api.can_begin(&[A, B]), "{config}");
        engine.resource.remove_request(B).unwrap();
        assert!(engine.api.can_begin(&[A, B]));
    }
    struct Idle;
    impl resource_api::LogitsProcessor for Idle {
        fn process(
            &self,
            _: &resource_api::StepContext<'_>,
            _: &[RequestId],
            _: &mut resource_api::TensorViewMut<'_>,
        ) -> resource_api::Result<()> {
            Ok(())
        }
    }
    engine.bind_all([Idle]);
    assert!(!engine.api.can_begin(&[A]), "nobody knows what a processor looks at");
}
