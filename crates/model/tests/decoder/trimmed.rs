//! The first layers of the real model against float64, computed here from the file's own weights.

use device::Activations;
use half::bf16;
use model::testing::{TinyModel, TinyTensor, Vocabulary, real_model_path, trimmed};
use model::{Gguf, ModelPackage, SharedBytes};
use resource_api::DType;

use crate::cuda::{On, Rig, relative_error};
use crate::engine::{Engine, Part, Resources, Row};
use crate::reference;

const LAYERS: usize = 3;

/// The same model for the engine and for the reference.
fn model() -> (ModelPackage, TinyModel) {
    let gguf = Gguf::open(&real_model_path()).expect("the file opens");
    let file = trimmed(&gguf, LAYERS).expect("it is a model's").build();
    let gguf = Gguf::parse(SharedBytes::from(file)).expect("the file parses");
    let package = ModelPackage::from_gguf(&gguf).expect("the model opens");
    let tensor = |(name, tensor): (&str, &model::Tensor)| TinyTensor {
        name: name.into(),
        gguf: String::new(),
        hf: String::new(),
        shape: tensor.shape.clone(),
        values: tensor.to_f32().expect("values"),
    };
    let tensors = package.weights.iter().map(tensor).collect();
    let vocabulary = Vocabulary::small("smollm");
    let model = TinyModel { config: package.config.clone(), vocabulary, tensors };
    (package, model)
}

/// Arbitrary tokens of the whole vocabulary.
fn text(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 977 + i * 131 + 7) % 49_152).collect()
}

fn row(mut rows: Vec<Row>) -> Row {
    rows.pop().expect("a sampled row")
}

#[test]
fn the_first_layers_of_the_real_model_are_those_of_float64() {
    let (package, model) = model();
    let text = text(12);
    let want = reference::logits(&model, &text);
    let mut engine = Engine::new(&package, Activations::Float, Resources::Kinds);
    engine.ingest(0, &text);
    for range in [0..7, 7..8, 8..12] {
        let last = range.end - 1;
        let step = engine.step(&[Part::sampled(0, &text[range])]).expect("the step runs");
        let error = relative_error(&row(step).logits, &want[last]);
        assert!(error < 1e-4, "position {last}: {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn on_a_device_they_are_within_the_rounding_of_bf16() {
    let (package, mut model) = model();
    // The device has the weights in bf16: what is left to differ is arithmetic.
    for tensor in model.tensors.iter_mut().filter(|t| t.shape.len() == 2) {
        tensor.values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    }
    let text = text(60);
    let want = reference::logits(&model, &text);
    for on in [On::Kinds(DType::BF16), On::Invariant] {
        let mut rig = Rig::of_package(&package, on);
        let engine = &mut rig.engine;
        engine.capture(2).expect("captures");
        engine.ingest(0, &text);
        let mut worst = 0f64;
        let mut at = 0;
        for (i, tokens) in [40, 1, 1, 3, 1, 2, 1, 4, 1, 1, 5].into_iter().enumerate() {
            let part = [Part::sampled(0, &text[at..at + tokens])];
            at += tokens;
            let step = match tokens == 1 && i % 2 == 0 {
                true => engine.step_captured(&part, 2),
                false => engine.step(&part),
            };
            let got = row(step.expect("the step runs"));
            worst = worst.max(relative_error(&got.logits, &want[at - 1]));
        }
        eprintln!("{LAYERS} layers, {on:?}: {worst:.2e} at most");
        assert!(worst < 0.01, "{on:?}: {worst}");
    }
}
