//! The real model through the real plugins against a float64 forward pass of the same weights.

mod support;

use support::{Done, Item, config, greedy, load, reference, run};

const STEPS: u32 = 48;

/// An engine with f32 activations and cache parts from float64 where two tokens are this close.
const MARGIN: f64 = 0.02;

fn requests(items: &[Item]) -> Vec<engine_host::request::GenerateRequest> {
    items.iter().map(|item| greedy(item.prompt_ids.clone(), STEPS)).collect()
}

/// How many leading tokens must agree: up to the first step whose margin is below `margin`.
fn steps_to_agree(item: &Item, margin: f64) -> usize {
    item.margins.iter().position(|&m| m < margin).unwrap_or(item.gen_ids.len())
}

fn worst_logprob_gap(item: &Item, done: &Done) -> f64 {
    let first = &done.tokens[0];
    let gap = |&(id, want): &(u32, f64)| match first.top.iter().find(|(got, _)| *got == id) {
        Some((_, got)) => (f64::from(*got) - want).abs(),
        // The tenth and eleventh may change places; then it is at least as unlikely as our tenth.
        None => (f64::from(first.top[9].1) - want).abs(),
    };
    item.top10.iter().map(gap).fold(0.0, f64::max)
}

#[test]
fn f32_tokens_and_logprobs_equal_the_float64_reference_singly_batched_and_shuffled() {
    let items = reference();
    let mut loaded = load(&config("kv_dtype = \"f32\"", "pages = 1024"));
    let singly: Vec<Done> = requests(&items)
        .into_iter()
        .map(|request| run(&mut loaded.engine, vec![request]).pop().unwrap())
        .collect();
    let mut worst: f64 = 0.0;
    for (item, done) in items.iter().zip(&singly) {
        assert_eq!(done.failure, None, "{}", item.id);
        let steps = steps_to_agree(item, MARGIN);
        assert_eq!(done.ids()[..steps], item.gen_ids[..steps], "{}", item.id);
        let gap = worst_logprob_gap(item, done);
        assert!(gap < 0.02, "{}: a log-probability is off by {gap}", item.id);
        worst = worst.max(gap);
    }
    println!("f32: log-probabilities within {worst:.4}");

    let batched = run(&mut loaded.engine, requests(&items));
    for ((item, alone), together) in items.iter().zip(&singly).zip(&batched) {
        assert_eq!(alone.tokens, together.tokens, "{}: batched differs", item.id);
    }

    // 5 and 12 have no common divisor, so this visits every prompt once.
    let order: Vec<usize> = (0..items.len()).map(|i| (i * 5 + 3) % items.len()).collect();
    let mut ordered = requests(&items);
    let shuffled = order.iter().map(|&i| std::mem::take(&mut ordered[i])).collect();
    let shuffled = run(&mut loaded.engine, shuffled);
    for (&i, done) in order.iter().zip(&shuffled) {
        assert_eq!(singly[i].tokens, done.tokens, "{}: shuffled differs", items[i].id);
    }
}

/// Rounding keys and values moves logits a little: these are the bounds that the README states.
#[test]
fn caches_of_fewer_bits_stay_within_their_stated_bounds() {
    let bounds = [("f16", 0.02, 0.02), ("bf16", 0.15, 0.25), ("i8", 0.25, 0.5), ("fp8", 1.5, 4.0)];
    for (dtype, bound, margin) in bounds {
        let items = reference();
        let mut loaded = load(&config(&format!("kv_dtype = {dtype:?}"), "pages = 1024"));
        let mut worst: f64 = 0.0;
        for (item, done) in items.iter().zip(run(&mut loaded.engine, requests(&items))) {
            let gap = worst_logprob_gap(item, &done);
            worst = worst.max(gap);
            assert!(gap < bound, "{dtype} {}: a log-probability is off by {gap}", item.id);
            let steps = steps_to_agree(item, margin);
            assert_eq!(done.ids()[..steps], item.gen_ids[..steps], "{dtype} {}", item.id);
        }
        println!("{dtype}: log-probabilities within {worst:.4}");
    }
}

#[test]
fn a_small_token_budget_and_a_small_pool_change_no_token() {
    let items: Vec<Item> = reference().into_iter().filter(|i| i.prompt_ids.len() < 60).collect();
    let mut roomy = load(&config("kv_dtype = \"f32\"", "pages = 1024"));
    let want = run(&mut roomy.engine, requests(&items));
    for (engine, pages) in [("max_batch_tokens = 7", 1024), ("max_batch_tokens = 64", 16)] {
        let engine = format!("kv_dtype = \"f32\"\nmax_model_len = 160\n{engine}");
        let mut tight = load(&config(&engine, &format!("pages = {pages}")));
        let got = run(&mut tight.engine, requests(&items));
        for ((item, want), got) in items.iter().zip(&want).zip(&got) {
            assert_eq!(want.tokens, got.tokens, "{} with {engine}, {pages} pages", item.id);
        }
        let preempted = tight.engine.stats().preemptions > 0;
        assert_eq!(preempted, pages == 16, "the small pool must really be too small");
    }
}
