//! Faults planted in a cache: the check must find each, and nothing where none is planted.

use std::fmt::Write;
use std::path::Path;

use resource_testkit::check::{Options, Report, Subject, check_kind};
use resource_testkit::{FakeCache, Fault};

fn check(settings: &str) -> Report {
    let subject = Subject::new(resource_api::kind::<FakeCache>(), settings).unwrap();
    check_kind(&subject, &Options::default())
}

/// The table of `docs/planted-faults.md`; its first lines stay as they are.
const MARK: &str = "<!-- below: written by the test `every_planted_fault_is_found` -->\n";

#[test]
fn nothing_is_found_where_nothing_is_planted() {
    let report = check("{}");
    assert!(report.is_clean(), "{report}");
    let odd = r#"{"page_size": 1, "pages": 9, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}"#;
    let report = check(odd);
    assert!(report.is_clean(), "{report}");
    let report = check(r#"{"page_size": 16, "pages": 3, "host_pages": 0}"#);
    // Nothing fits on the host's side: a request that cannot go is a finding of that one rule.
    let rules: Vec<&str> = report.findings.iter().map(|f| f.check.as_str()).collect();
    assert_eq!(rules, ["a request goes off the device and comes back as it was"], "{report}");
}

#[test]
fn every_planted_fault_is_found() {
    let mut table =
        String::from("| planted | what it does | first rule that finds it | what it says |\n");
    table.push_str("|---|---|---|---|\n");
    let mut missed = Vec::new();
    for (fault, what) in Fault::ALL {
        let name = serde_json::to_value(fault).unwrap().as_str().unwrap().to_string();
        let report = check(&format!(r#"{{"fault": "{name}"}}"#));
        match report.findings.first() {
            None => missed.push(name),
            Some(found) => {
                let rule = &found.check;
                let steps = match found.operations.len() {
                    0 => String::new(),
                    n => format!(" ({n} operations)"),
                };
                writeln!(table, "| `{name}` | {what} | {rule} | {}{steps} |", found.what).unwrap();
            }
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/planted-faults.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, written) = text.split_once(MARK).unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{MARK}{table}")).unwrap();
    } else {
        assert_eq!(written, table, "UPDATE_DOCS=1 writes it anew");
    }
}

#[test]
fn the_same_seed_finds_the_same_and_another_one_finds_it_too() {
    let subject = Subject::new(resource_api::kind::<FakeCache>(), r#"{"fault": "fork_aliases"}"#);
    let subject = subject.unwrap();
    let with = |seed| check_kind(&subject, &Options { seed, ..Options::default() });
    assert_eq!(with(5).to_json(), with(5).to_json());
    for seed in 6..9 {
        let report = with(seed);
        let shown = &report.findings.first().expect("found").operations;
        assert!(!shown.is_empty() && shown.len() < 8, "{report}");
    }
}
