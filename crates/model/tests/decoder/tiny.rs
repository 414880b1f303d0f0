//! Tiny models: right in every format, and the same to the bit in every batch.

use std::collections::BTreeMap;

use device::Activations;
use model::testing::{TinyModel, Vocabulary};
use model::{Architecture, Gguf, ModelPackage, Node, RopeScaling, SharedBytes};
use serde_json::{Value, json};

use crate::engine::{BOTH, Engine, Part, Resources, Row};
use crate::reference;

const ARCHITECTURES: [Architecture; 4] =
    [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3];

pub fn from_gguf(model: &TinyModel) -> ModelPackage {
    let gguf = Gguf::parse(SharedBytes::from(model.gguf().build())).expect("the file parses");
    ModelPackage::from_gguf(&gguf).expect("the model opens")
}

fn from_hf_dir(model: &TinyModel) -> ModelPackage {
    let dir = tempfile::tempdir().expect("a directory");
    model.write_hf_dir(dir.path()).expect("the files are written");
    ModelPackage::open(dir.path()).expect("the model opens")
}

/// `n` arbitrary tokens of any vocabulary here.
pub fn tokens(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 7 + i * 31 + seed * 101) % 256).collect()
}

/// Float32 against float64, over two layers: far below what a wrong formula would change.
fn assert_close(got: &[f32], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len());
    let size = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 2e-5 * size, "{what}: logit {i} is {got}, float64 gives {want}");
    }
}

/// Feeds a text one token at a time and compares the logits after each.
fn check_every_position(package: &ModelPackage, model: &TinyModel, what: &str) {
    let text = tokens(40, 3);
    let want = reference::logits(model, &text);
    for on in BOTH {
        let mut engine = Engine::new(package, Activations::Float, on);
        engine.ingest(0, &text);
        for (position, want) in want.iter().enumerate() {
            let part = Part::sampled(0, &text[position..=position]);
            let rows = engine.step(&[part]).expect("the step runs");
            assert_close(&rows[0].logits, want, &format!("{what}, {on:?}, position {position}"));
        }
    }
}

#[test]
fn logits_are_those_of_float64_for_every_architecture_and_format() {
    for architecture in ARCHITECTURES {
        let model = TinyModel::new(architecture, 5);
        check_every_position(&from_gguf(&model), &model, &format!("{architecture:?}, GGUF"));
        if architecture != Architecture::Gemma3 {
            check_every_position(&from_hf_dir(&model), &model, &format!("{architecture:?}, HF"));
        }
    }
}

#[test]
fn an_output_matrix_of_its_own_and_partial_scaled_rope_count() {
    let mut config = TinyModel::new(Architecture::Qwen3, 0).config;
    config.tied_embeddings = false;
    config.head_dim = 12;
    config.rope.dim = 4;
    config.rope.theta = 500.0;
    config.rope.scaling = RopeScaling::Linear { factor: 2.5 };
    let model = TinyModel::with_config(config, Vocabulary::small("qwen2"), 9);
    check_every_position(&from_gguf(&model), &model, "untied");
}

#[test]
fn rope_divisors_of_the_file_count() {
    let divisors = [1.0f32, 1.5, 4.0, 8.0];
    let mut model = TinyModel::new(Architecture::Llama, 6);
    let mut file = model.gguf();
    let bytes = divisors.iter().flat_map(|d| d.to_le_bytes()).collect();
    file.tensor("rope_freqs.weight", &[4], 0, bytes);
    let gguf = Gguf::parse(SharedBytes::from(file.build())).expect("the file parses");
    let package = ModelPackage::from_gguf(&gguf).expect("the model opens");
    model.config.rope.scaling = RopeScaling::Divisors(divisors.to_vec());
    check_every_position(&package, &model, "divisors");
}

#[test]
fn a_tied_embedding_is_packed_once() {
    let tied = TinyModel::new(Architecture::Llama, 1);
    let mut config = tied.config.clone();
    config.tied_embeddings = false;
    let untied = TinyModel::with_config(config, tied.vocabulary.clone(), 1);
    let bytes = |m: &TinyModel| {
        Engine::new(&from_gguf(m), Activations::Float, Resources::Plain).node.weight_bytes()
    };
    let rows = tied.config.vocab.next_multiple_of(16);
    assert_eq!(bytes(&untied) - bytes(&tied), rows * tied.config.hidden * 4);
}

/// What each request sampled, in order: everything that may not depend on the batch.
type History = BTreeMap<u32, Vec<Row>>;

const GENERATED: usize = 6;

/// Runs all prompts to the end. In each step `share(step, slot)` says how many prompt tokens a
/// request may add (0: it sits the step out), and `order` sorts the step's parts.
fn generate(
    package: &ModelPackage,
    on: Resources,
    prompts: &[Vec<u32>],
    share: impl Fn(usize, u32) -> usize,
    order: impl Fn(&mut Vec<Part<'_>>),
) -> History {
    let mut engine = Engine::new(package, Activations::Float, on);
    let mut texts: Vec<Vec<u32>> = prompts.to_vec();
    let mut done = vec![0; prompts.len()];
    let mut history = History::new();
    (0..prompts.len()).for_each(|i| engine.ingest(i as u32, &prompts[i]));
    for step in 0.. {
        let mut parts = Vec::new();
        for (slot, text) in texts.iter().enumerate() {
            let (prompt, at) = (prompts[slot].len(), done[slot]);
            let most = if at < prompt { share(step, slot as u32) } else { 1 };
            let tokens = &text[at..(at + most).min(text.len())];
            if tokens.is_empty() || text.len() == prompt + GENERATED {
                continue;
            }
            let sample = at + tokens.len() >= prompt;
            parts.push(Part { sample, ..Part::sampled(slot as u32, tokens) });
        }
        if parts.is_empty() {
            assert!(texts.iter().zip(prompts).all(|(t, p)| t.len() == p.len() + GENERATED));
            return history;
        }
        order(&mut parts);
        for part in &parts {
            done[part.request.index()] += part.tokens.len();
        }
        let rows = engine.step(&parts).expect("the step runs");
        for row in rows {
            texts[row.request.index()].push(row.token);
            history.entry(row.request.slot).or_default().push(row);
        }
    }
    unreachable!("the loop ends by returning")
}

/// Each prompt alone, in one go, compared with float64 as well.
fn generate_alone(model: &TinyModel, on: Resources, prompts: &[Vec<u32>]) -> History {
    let package = from_gguf(model);
    let mut history = History::new();
    for (slot, prompt) in (0..).zip(prompts) {
        let mut engine = Engine::new(&package, Activations::Float, on);
        engine.ingest(slot, prompt);
        let (mut text, mut at) = (prompt.clone(), 0);
        let mut rows = Vec::new();
        for _ in 0..GENERATED {
            rows.extend(engine.step(&[Part::sampled(slot, &text[at..])]).expect("the step runs"));
            at = text.len();
            text.push(rows[rows.len() - 1].token);
        }
        let want = reference::logits(model, &text[..at]);
        for (row, want) in rows.iter().zip(&want[prompt.len() - 1..]) {
            assert_close(&row.logits, want, &format!("{on:?}, request {slot}"));
        }
        history.insert(slot, rows);
    }
    history
}

#[test]
fn chunks_batches_and_order_change_no_bit() {
    for (architecture, on) in ARCHITECTURES.into_iter().flat_map(|a| BOTH.map(|on| (a, on))) {
        let model = TinyModel::new(architecture, 11);
        let package = from_gguf(&model);
        let prompts: Vec<Vec<u32>> =
            [70, 1, 19, 33].iter().zip(1..).map(|(&n, seed)| tokens(n, seed)).collect();
        let alone = generate_alone(&model, on, &prompts);

        for chunk in [1, 7, 64, 1000] {
            let batched = generate(&package, on, &prompts, |_, _| chunk, |_| ());
            assert!(batched == alone, "{architecture:?}, {on:?}: chunks of {chunk} change a bit");
        }
        // Requests begin at different steps, take unequal shares, and lie in another order.
        let uneven = |step: usize, slot: u32| match step < slot as usize * 3 {
            true => 0,
            false => 1 + (step * 5 + slot as usize * 3) % 11,
        };
        let shuffled = generate(&package, on, &prompts, uneven, |parts| {
            let by = parts.len() / 2;
            parts.rotate_left(by);
            parts.reverse();
        });
        assert!(shuffled == alone, "{architecture:?}, {on:?}: the batch changes a bit");
    }
}

#[test]
fn labels_are_streams_of_their_own() {
    let model = TinyModel::new(Architecture::Llama, 2);
    let package = from_gguf(&model);
    let other = resource_api::LabelId(4);
    let (text, branch) = (tokens(9, 1), tokens(5, 2));
    let want = [&text, &branch].map(|t| reference::logits(&model, t).pop().expect("a position"));
    for on in BOTH {
        let mut engine = Engine::new(&package, Activations::Float, on);
        engine.ingest(0, &text);
        engine.ingest(1, &branch);
        let rows = engine
            .step(&[
                Part::sampled(0, &text),
                Part { sample: false, ..Part::sampled(1, &branch) },
                Part { label: other, ..Part::sampled(0, &branch) },
            ])
            .expect("the step runs");
        assert_close(&rows[0].logits, &want[0], "main");
        assert_close(&rows[1].logits, &want[1], "the other label");

        let apart = [
            Part::sampled(0, &text[..1]),
            Part { label: other, ..Part::sampled(0, &text[..1]) },
            Part::sampled(1, &text[..1]),
        ];
        let e = engine.step(&apart).expect_err("labels are mixed");
        assert!(e.message().contains("label 0 do not lie side by side"), "{e}");
    }
}

#[test]
fn defaults_name_only_keys_of_the_kind() {
    let model = TinyModel::new(Architecture::Qwen2, 2);
    let engine = Engine::new(&from_gguf(&model), Activations::Float, Resources::Plain);
    let keys = |kind: &str| {
        let defaults = engine.node.resource_defaults(kind);
        defaults.keys().cloned().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(keys("kv"), "num_layers num_kv_heads num_qo_heads head_dim max_seq_len");
    assert_eq!(keys("positions"), "rotary_dim rope_theta interleave");
    assert_eq!(keys("sampler"), "vocab_size");
    assert_eq!(keys("attention") + &keys("of a third party"), "");
    let gemma = TinyModel::new(Architecture::Gemma3, 2);
    let gemma = Engine::new(&from_gguf(&gemma), Activations::Float, Resources::Plain);
    let attention = gemma.node.resource_defaults("attention");
    let expected = json!({ "logit_softcap": 2.5, "sliding_window": 7, "full_layers": [1] });
    assert_eq!(Value::Object(attention), expected);
    let positions = gemma.node.resource_defaults("positions");
    assert_eq!(positions["local_rope_theta"], 100.0);
    assert_eq!(positions["local_layers"], json!([0]));
    assert_eq!(engine.node.resource_defaults("kv")["num_kv_heads"], 2);
    assert_eq!(engine.node.resource_defaults("sampler")["vocab_size"], model.config.vocab);
}
