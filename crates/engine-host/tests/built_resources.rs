//! The shipped kinds as an engine builds them.

mod support;

use engine_host::request::GenerateRequest;
use resource_api::Resource;
use support::{config, load};

#[test]
fn dependencies_come_first_and_resources_agree_with_their_kinds_about_them() {
    let loaded = load(&config("", "pages = 64"));
    let entries = loaded.engine.resources().entries();
    let keys: Vec<&str> = entries.iter().map(|e| e.key.as_str()).collect();
    assert_eq!(keys, ["main_kv", "attn", "pos", "sampler"]);
    for entry in entries {
        assert_eq!(entry.resource().depends_on(), entry.depends_on, "{}", entry.key);
    }
}

#[test]
fn a_request_that_can_never_fit_is_refused_at_submission_with_the_limit() {
    let mut loaded = load(&config("", "pages = 9"));
    let mut submit = |prompt: usize, max_tokens| {
        let prompt = vec![504; prompt];
        loaded.engine.submit(GenerateRequest { prompt, max_tokens, ..Default::default() })
    };
    // 8 pages of 16 tokens beside the sink.
    assert!(submit(100, 29).is_ok());
    let e = submit(100, 30).unwrap_err();
    assert_eq!(e.exit_code(), 2);
    assert!(e.to_string().contains("need 9 pages") && e.to_string().contains("has 8"), "{e}");
    let e = submit(9000, 1).unwrap_err();
    assert!(e.to_string().contains("max_model_len = 8192"), "{e}");
}
