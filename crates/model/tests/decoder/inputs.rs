//! Wrong inputs and wrong resources are refused by name, and leave no trace.

use std::sync::Arc;

use device::{Activations, PackOptions, Serial};
use model::testing::TinyModel;
use model::{Architecture, Decoder, Node, NodeResource, NodeResources, StepInput};
use resource_api::{BuiltResource, EngineLimits, ErrorKind, LabelId, RequestId, Segments};

use crate::engine::{Engine, Part, Resources};
use crate::plain::{Recorder, best, plain};
use crate::tiny::{from_gguf, tokens};

fn engine() -> Engine {
    let model = TinyModel::new(Architecture::Llama, 3);
    Engine::new(&from_gguf(&model), Activations::Float, Resources::Plain)
}

#[test]
fn a_step_that_contradicts_itself_is_refused_and_changes_nothing() {
    let mut engine = engine();
    let vocab = engine.node.config().vocab as u32;
    let text = tokens(6, 1);
    let first = engine.step(&[Part::sampled(3, &text)]).expect("the step runs");
    let request = [RequestId::new(3, 1), RequestId::new(4, 1)];
    let label = [LabelId::MAIN; 2];
    let segments = Segments { request: &request, label: &label, span: &[2, 1] };
    let good = StepInput {
        segments,
        token_ids: &[1, 2, 3],
        sample: &[1],
        top_logprobs: &[],
        score: &[],
        from_sample: &[],
    };
    let bad = [
        (StepInput { token_ids: &[1, 2], ..good }, "add 3 tokens, but there are 2 token ids"),
        (StepInput { token_ids: &[1, vocab, 3], ..good }, "token id 270 of request r3.1"),
        (StepInput { token_ids: &[1, 2, u32::MAX], ..good }, "token id 4294967295 of request r4.1"),
        (StepInput { sample: &[2], ..good }, "segment 2 to sample after is past the step's 2"),
        (StepInput { sample: &[1, 0], ..good }, "not in ascending order"),
        (StepInput { sample: &[1, 1], ..good }, "not in ascending order"),
        (StepInput { top_logprobs: &[1, 1], ..good }, "1 samples, but 2 numbers"),
        (
            StepInput { segments: Segments { span: &[3, 0], ..segments }, ..good },
            "request r4.1 adds no token to sample after",
        ),
    ];
    for (input, said) in bad {
        let e = engine.run(&input).expect_err(said);
        assert_eq!(e.kind(), ErrorKind::INVALID);
        assert!(e.message().contains(said), "{e}");
    }
    // The streams are as they were: the same continuation as without the refusals.
    let next = [first[0].token];
    let after = engine.step(&[Part::sampled(3, &next)]).expect("the step runs");
    let mut fresh = self::engine();
    fresh.step(&[Part::sampled(3, &text)]).expect("the step runs");
    assert_eq!(fresh.step(&[Part::sampled(3, &next)]).expect("the step runs"), after);
}

#[test]
fn steps_without_tokens_or_samples_give_nothing() {
    let mut engine = engine();
    let text = tokens(6, 1);
    assert_eq!(engine.step(&[]).expect("an empty step runs"), []);
    let silent = Part { sample: false, ..Part::sampled(0, &[]) };
    assert_eq!(engine.step(&[silent]).expect("a step of span 0 runs"), []);
    let unsampled = Part { sample: false, ..Part::sampled(0, &text[..5]) };
    assert_eq!(engine.step(&[silent, unsampled]).expect("the step runs"), []);
    let rows = engine.step(&[Part::sampled(0, &text[5..])]).expect("the step runs");
    let mut whole = self::engine();
    assert_eq!(whole.step(&[Part::sampled(0, &text)]).expect("the step runs"), rows);
}

#[test]
fn log_probabilities_come_for_those_who_ask() {
    let mut engine = engine();
    let vocab = engine.node.config().vocab;
    let texts = [tokens(3, 1), tokens(4, 2), tokens(5, 3)];
    let parts: Vec<_> = (0..).zip(&texts).map(|(slot, t)| Part::sampled(slot, t)).collect();
    let rows = engine.step_with_top(&parts, &[2, 0, u32::MAX]).expect("the step runs");
    for (i, k) in [2, 0, vocab].into_iter().enumerate() {
        let (ids, logprobs) = engine.out.top(i);
        let got: Vec<_> = ids.iter().copied().zip(logprobs.iter().copied()).collect();
        assert_eq!(got, best(&rows[i].logits, k));
    }
    engine.step(&[Part::sampled(0, &[1])]).expect("the step runs");
    assert!(engine.out.top(0).0.is_empty() && engine.out.top(9).1.is_empty());
}

#[test]
fn resources_must_offer_each_capability_once() {
    let package = from_gguf(&TinyModel::new(Architecture::Llama, 3));
    let (config, weights) = (&package.config, &package.weights);
    let options = PackOptions::new(Activations::Float);
    let node = Decoder::load(config, weights, options, &Serial, &mut |_, _| ()).expect("loads");
    let plain = || plain(&node);
    let sampler = || Arc::new(Recorder::default()).built();
    let attach = |built: &[(&'static str, BuiltResource)]| {
        let listed = built.iter().map(|(key, built)| NodeResource {
            key,
            kind: "any",
            capabilities: &built.capabilities,
        });
        let resources = NodeResources::new("decoder", listed.collect());
        node.attach(&resources, &EngineLimits::default())
    };

    let e = attach(&[("main", plain())]).expect_err("there is no sampler");
    assert_eq!(e.kind(), ErrorKind::NOT_FOUND);
    assert_eq!(
        e.message(),
        "node `decoder` needs a resource that offers sampler/1, such as one of kind `sampler`, and \
         none of its resources does ([resources.main] (kind any) offers kv.cache/1, attention/1, \
         positions/1); add a [resources.<key>] section with kind = \"sampler\" and nodes = \
         [\"decoder\"]"
    );
    let e = attach(&[]).expect_err("there is nothing");
    assert!(e.message().contains("it has no resources"), "{e}");
    let e = attach(&[("main", plain()), ("a", sampler()), ("b", sampler())]).expect_err("two");
    assert_eq!(
        e.message(),
        "[resources.a] and [resources.b] both offer sampler/1 to node `decoder`, which uses one; \
         take \"decoder\" out of the `nodes` of the other"
    );
    attach(&[("main", plain()), ("s", sampler())]).expect("all are there");
    let e = attach(&[("main", plain()), ("s", sampler())]).expect_err("once is enough");
    assert_eq!(e.kind(), ErrorKind::WRONG_STATE);
}
