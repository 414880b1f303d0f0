//! The kinds of this repository pass the check that third parties are given.

use resource_api::{KindHandle, kind};
use resource_testkit::check::{Options, Report, Subject, Verdict, check_kind, spec};
use resource_testkit::{Fake, FakeCache, Panicker};

fn check(kind: KindHandle, settings: &str, cache: Option<(KindHandle, &str, &str)>) -> Report {
    let mut subject = Subject::new(kind, settings).unwrap();
    if let Some((kind, name, settings)) = cache {
        subject.dependencies.push((kind, spec("main_kv", name, settings)));
    }
    check_kind(&subject, &Options::default())
}

fn clean(report: Report) {
    assert!(report.is_clean(), "{report}");
}

/// Clean, and every rule of this interface was tried.
fn clean_at(interface: &str, report: Report) {
    let of = report.rules.iter().filter(|(rule, _)| rule.starts_with(interface));
    let verdicts: Vec<&Verdict> = of.map(|(_, verdict)| verdict).collect();
    assert!(!verdicts.is_empty() && verdicts.iter().all(|v| **v == Verdict::Holds), "{report}");
    clean(report);
}

/// A small pool, so that steps are refused.
const KV: &str = r#"{"num_layers": 2, "num_kv_heads": 2, "num_qo_heads": 4, "head_dim": 8,
    "pages": 15, "page_size": 3}"#;

fn fake_kv() -> (KindHandle, &'static str, &'static str) {
    (kind::<FakeCache>(), "fake_kv", r#"{"head_dim": 8, "pages": 60}"#)
}

#[test]
fn kv_is_clean() {
    let report = check(kind::<resource_kv::Kv>(), KV, None);
    assert!(report.operations > 2000, "{report}");
    clean_at("streams hold", report.clone());
    clean_at("requests that share", report);
}

#[test]
fn kv_of_two_byte_elements_and_odd_pages_is_clean() {
    let settings = |dtype, size| {
        format!(
            r#"{{"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "pages": 19,
                "page_size": {size}, "dtype": "{dtype}"}}"#
        )
    };
    clean(check(kind::<resource_kv::Kv>(), &settings("bf16", 1), None));
    clean(check(kind::<resource_kv::Kv>(), &settings("f16", 7), None));
}

#[test]
fn kv_with_host_memory_is_clean() {
    for tiers in ["\"host_pages\": 40", "\"host_pages\": 4"] {
        let settings = KV.replace("\"pages\"", &format!("{tiers}, \"pages\""));
        let report = check(kind::<resource_kv::Kv>(), &settings, None);
        assert!(report.operations > 2000, "{report}");
        clean_at("a request goes off the device", report.clone());
        clean(report);
    }
}

#[test]
fn kv_of_int8_with_its_scales_is_clean() {
    of_8_bits_is_clean("i8");
}

#[test]
fn kv_of_fp8_is_clean() {
    of_8_bits_is_clean("fp8");
}

fn of_8_bits_is_clean(dtype: &str) {
    for tiers in ["\"host_pages\": 0", "\"host_pages\": 12"] {
        let settings =
            KV.replace("\"pages\"", &format!("\"dtype\": \"{dtype}\", {tiers}, \"pages\""));
        let report = check(kind::<resource_kv::Kv>(), &settings, None);
        clean_at("streams hold", report.clone());
        clean_at("requests that share", report);
    }
}

#[test]
fn attention_is_clean() {
    let settings = r#"{"kv_cache": "main_kv"}"#;
    clean_at(
        "attention/1",
        check(kind::<resource_attn::PagedAttention>(), settings, Some(fake_kv())),
    );
}

#[test]
fn cross_attention_is_clean() {
    let settings = r#"{"kv_cache": "main_kv"}"#;
    clean(check(kind::<resource_attn::PagedCrossAttention>(), settings, Some(fake_kv())));
}

#[test]
fn positions_are_clean() {
    let kv = (kind::<resource_kv::Kv>(), "kv", KV);
    let settings = r#"{"kv_cache": "main_kv"}"#;
    clean_at("positions/1", check(kind::<resource_positions::Positions>(), settings, Some(kv)));
    let settings = r#"{"kv_cache": "main_kv", "scheme": "block", "block_step": 3}"#;
    clean_at(
        "positions/1",
        check(kind::<resource_positions::Positions>(), settings, Some(fake_kv())),
    );
}

#[test]
fn the_sampler_is_clean() {
    clean_at(
        "sampler/1",
        check(kind::<resource_sampler::Sampler>(), r#"{"vocab_size": 40}"#, None),
    );
}

#[test]
fn the_fake_is_clean() {
    clean(check(kind::<Fake>(), "{}", None));
    clean(check(kind::<Fake>(), r#"{"prefix": true, "preplan": false}"#, None));
}

#[test]
fn a_resource_that_panics_everywhere_is_found_out_and_contained() {
    let report = check(kind::<Panicker>(), "{}", None);
    assert!(report.findings.iter().all(|f| f.what.contains("panicked")), "{report}");
    assert!(!report.is_clean());
}
