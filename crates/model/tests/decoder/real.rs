//! SmolLM2 against `data/smollm2.json`, whose `f64` part is the dequantized model in float64.

use std::sync::LazyLock;

use device::Activations;
use model::testing::real_model_path;
use model::{ModelPackage, Node};
use resource_api::DType;
use serde_json::Value;

use crate::cuda::{On, Rig};
use crate::engine::{Engine, Part, Resources, Row};
use crate::plain::best;

static MODEL: LazyLock<ModelPackage> =
    LazyLock::new(|| ModelPackage::open(&real_model_path()).expect("the model opens"));

/// What float64 says of a prompt.
struct Item {
    prompt: Vec<u32>,
    generated: Vec<u32>,
    margins: Vec<f64>,
    top: Vec<(u32, f64)>,
}

fn items(names: &[&str]) -> Vec<Item> {
    let all: Value = serde_json::from_str(include_str!("../data/smollm2.json")).expect("JSON");
    let all = all["items"].as_array().expect("items");
    let read = |name: &&str| {
        let item = all.iter().find(|i| i["id"] == **name).expect("the item exists");
        let f64 = &item["f64"];
        let top = f64["top10"].as_array().expect("a list").iter();
        Item {
            prompt: serde_json::from_value(item["prompt_ids"].clone()).expect("ids"),
            generated: serde_json::from_value(f64["gen_ids"].clone()).expect("ids"),
            margins: serde_json::from_value(f64["margins"].clone()).expect("numbers"),
            top: top
                .map(|t| {
                    (
                        t["id"].as_u64().expect("an id") as u32,
                        t["logprob"].as_f64().expect("a number"),
                    )
                })
                .collect(),
        }
    };
    names.iter().map(read).collect()
}

/// Feeds each prompt in chunks, then float64's own tokens, all requests in one batch. Gives, per
/// request, the rows after which the generated tokens come.
fn follow<N: Node>(engine: &mut Engine<N>, items: &[Item], steps: usize) -> Vec<Vec<Row>> {
    let mut rows = vec![Vec::new(); items.len()];
    (0..).zip(items).for_each(|(slot, item)| engine.ingest(slot, &item.prompt));
    let chunk = 16;
    let longest = items.iter().map(|i| i.prompt.len()).max().expect("there are items");
    for start in (0..longest).step_by(chunk) {
        let parts: Vec<_> = (0..)
            .zip(items)
            .filter(|(_, item)| start < item.prompt.len())
            .map(|(slot, item)| {
                let end = item.prompt.len().min(start + chunk);
                let sample = end == item.prompt.len();
                Part { sample, ..Part::sampled(slot, &item.prompt[start..end]) }
            })
            .collect();
        for row in engine.step(&parts).expect("the step runs") {
            rows[row.request.index()].push(row);
        }
    }
    for step in 0..steps - 1 {
        let parts: Vec<_> = (0..)
            .zip(items)
            .map(|(slot, item)| Part::sampled(slot, &item.generated[step..=step]))
            .collect();
        for row in engine.step(&parts).expect("the step runs") {
            rows[row.request.index()].push(row);
        }
    }
    rows
}

fn worst_top_logprob(row: &Row, item: &Item) -> f64 {
    let all = best(&row.logits, row.logits.len());
    let of = |id: u32| f64::from(all.iter().find(|(i, _)| *i == id).expect("every id").1);
    item.top.iter().map(|&(id, want)| (of(id) - want).abs()).fold(0.0, f64::max)
}

#[test]
fn float_activations_choose_what_float64_chooses() {
    let items = items(&["en-short", "unicode-emoji", "digits-json", "single-space"]);
    let mut engine = Engine::new(&MODEL, Activations::Float, Resources::Kinds);
    let rows = follow(&mut engine, &items, 48);
    for (item, rows) in items.iter().zip(&rows) {
        let chosen: Vec<u32> = rows.iter().map(|r| r.token).collect();
        assert!(item.margins.iter().all(|&m| m > 0.02), "prompts without close calls");
        // Teacher-forced along the same tokens, so equal choices are a greedy run.
        assert_eq!(chosen, item.generated);
        let worst = worst_top_logprob(&rows[0], item);
        assert!(worst < 0.01, "a log-probability is off by {worst}");
    }
}

#[test]
fn int8_activations_stay_within_their_rounding() {
    let items = items(&["en-short", "cjk-ja-zh"]);
    let mut engine = Engine::new(&MODEL, Activations::Int8, Resources::Kinds);
    let rows = follow(&mut engine, &items, 48);
    for (item, rows) in items.iter().zip(&rows) {
        let misses = (0..48).filter(|&i| rows[i].token != item.generated[i]);
        let margins: Vec<f64> = misses.map(|i| item.margins[i]).collect();
        assert!(margins.len() <= 5 && margins.iter().all(|&m| m < 0.5), "{margins:?}");
        let worst = worst_top_logprob(&rows[0], item);
        assert!(worst < 0.6, "a log-probability is off by {worst}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_stays_within_the_rounding_of_bf16() {
    let names = ["en-short", "unicode-emoji", "digits-json", "single-space"];
    let items = items(&names);
    let mut rig = Rig::of_package(&MODEL, On::Kinds(DType::BF16));
    let rows = follow(&mut rig.engine, &items, 48);
    for ((name, item), rows) in names.iter().zip(&items).zip(&rows) {
        let misses = (0..48).filter(|&i| rows[i].token != item.generated[i]);
        let margins: Vec<f64> = misses.map(|i| item.margins[i]).collect();
        let worst = worst_top_logprob(&rows[0], item);
        eprintln!("{name}: {} of 48 differ, log-probabilities by {worst:.3}", margins.len());
        assert!(margins.len() <= 3 && margins.iter().all(|&m| m < 0.2), "{name}: {margins:?}");
        assert!(worst < 0.15, "{name}: a log-probability is off by {worst}");
    }
}
