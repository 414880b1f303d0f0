//! Plugin manifests: what is accepted, and the exact line for each thing that is not.

use engine_host::manifest::{ApiVersion, Manifest, ManifestError};
use proptest::prelude::*;

const HASH: &str = "B179C9523D0E6A0F98A330C7562B682750A6F8C8C15E5BC70EA373728110DB53";

const MINIMAL: &str = r#"[plugin]
name = "resource-kv"
version = "0.1.0"
api = "1.0"
library = "libresource_kv.so"
kinds = ["kv"]
"#;

fn error(text: &str) -> ManifestError {
    Manifest::parse("kv.toml", text).unwrap_err()
}

fn problems(text: &str) -> Vec<String> {
    error(text).problems.to_string().lines().map(str::to_owned).collect()
}

/// [`MINIMAL`] with the line of `key` replaced, or the line added.
fn with(key: &str, line: &str) -> String {
    let others = MINIMAL.lines().filter(|l| !l.starts_with(&format!("{key} =")));
    others.chain([line]).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_smallest_manifest() {
    let manifest = Manifest::parse("kv.toml", MINIMAL).unwrap();
    assert_eq!(manifest.name, "resource-kv");
    assert_eq!(manifest.api, ApiVersion { major: 1, minor: 0 });
    assert!(manifest.enabled);
    assert!(manifest.sha256.is_none() && manifest.provides.is_empty());
}

#[test]
fn every_key_is_read() {
    let text = format!(
        r#"{MINIMAL}
provides = ["kv.cache/1", "org.example.pages/2.3"]
requires = ["clock >= 1.2", "x?"]
sha256 = "{HASH}"
enabled = false
variants = [{{ library = "v3.so", target_features = ["avx2", "fma"], sha256 = "{HASH}" }}]
[plugin.x-notes]
anything = 1
[x-packager]
anything = [1]
"#
    );
    let manifest = Manifest::parse("kv.toml", &text).unwrap();
    assert_eq!(manifest.sha256.unwrap().to_string(), HASH.to_lowercase());
    assert_eq!(manifest.provides[1].to_string(), "org.example.pages/2.3");
    assert_eq!(manifest.requires[0].to_string(), "clock >= 1.2");
    assert!(manifest.requires[1].optional);
    assert!(!manifest.enabled);
    assert_eq!(manifest.variants[0].library, "v3.so");
    assert_eq!(manifest.variants[0].target_features, ["avx2", "fma"]);
}

#[test]
fn problems_come_together_with_their_places() {
    assert_eq!(
        problems(
            r#"[plugin]
nmae = "kv"
version = "1.0"
api = "1"
library = "../../evil.so"
kinds = ["kv", "kv", "k v"]
provides = ["kv.cache"]
requires = ["kv.cache > 1.0"]
sha256 = "abc"
enabled = 1
x-tra = 3
[other]
"#
        ),
        [
            "kv.toml:1:1: [plugin] lacks the key \"name\"",
            "kv.toml:2:1: unknown key \"nmae\" in [plugin]; did you mean \"name\"?",
            "kv.toml:3:11: version = \"1.0\" in [plugin] must be a version like \"0.1.0\"",
            "kv.toml:4:7: api = \"1\" in [plugin] must be the contract's \"major.minor\", like \
             \"1.0\"",
            "kv.toml:5:11: library = \"../../evil.so\" in [plugin] must be a file name beside the \
             manifest, without directories",
            "kv.toml:6:16: \"kinds\" in [plugin] names \"kv\" twice",
            "kv.toml:6:22: kinds = \"k v\" in [plugin] must be 1 to 64 letters, digits, '.', '-' \
             and '_', with a letter or digit first",
            "kv.toml:7:13: provides = \"kv.cache\" in [plugin] must be a capability and its \
             version, like \"kv.cache/1\"",
            "kv.toml:8:13: requires = \"kv.cache > 1.0\" in [plugin] must be a capability, with a \
             least version if need be and \"?\" if optional, like \"kv.cache >= 1.0?\"",
            "kv.toml:9:10: sha256 = \"abc\" in [plugin] must be 64 hexadecimal digits",
            "kv.toml:10:11: \"enabled\" in [plugin] must be true or false, not an integer",
            "kv.toml:11:1: unknown key \"x-tra\" in [plugin]; valid here: name, version, api, \
             library, kinds, provides, requires, sha256, variants, enabled",
            "kv.toml:12:2: unknown key \"other\" in the file; valid here: plugin",
        ]
    );
}

#[test]
fn libraries_are_one_normal_path_component() {
    for bad in ["", ".", "..", "/abs/x.so", "a/b.so", "./x.so", "x.so/", "a\\u0000b", "a\\nb"] {
        let found = problems(&with("library", &format!("library = \"{bad}\"")));
        assert!(found[0].contains("must be a file name beside the manifest"), "{bad}: {found:?}");
    }
    assert!(Manifest::parse("x", &with("library", "library = '..so'")).is_ok());
}

#[test]
fn hashes_are_exact() {
    for bad in [&HASH[1..], &format!("{HASH} "), &format!("{HASH}0"), &HASH.replace('B', "G"), ""] {
        let found = problems(&with("sha256", &format!("sha256 = '{bad}'")));
        assert!(found[0].contains("must be 64 hexadecimal digits"), "{bad}: {found:?}");
    }
}

#[test]
fn versions() {
    for good in ["0.1.0", "10.20.30", "1.0.0-rc.1", "1.0.0+build.5"] {
        assert!(Manifest::parse("x", &with("version", &format!("version = '{good}'"))).is_ok());
    }
    for bad in ["", "1", "1.0", "1.0.0.0", "a.b.c", "1.0.-1", "1.0.0-", "+1.0.0", "1.0.0 "] {
        assert!(Manifest::parse("x", &with("version", &format!("version = '{bad}'"))).is_err());
    }
    for bad in ["", "1", "1.", ".1", "1.0.0", "1.-0", "v1.0", "99999999999.0"] {
        assert!(Manifest::parse("x", &with("api", &format!("api = '{bad}'"))).is_err(), "{bad}");
    }
}

#[test]
fn capabilities_are_named_once() {
    let twice = problems(&with("provides", "provides = ['kv/1', 'kv/1.2', 'kv/2']"));
    assert_eq!(twice, ["kv.toml:7:1: \"provides\" in [plugin] names \"kv\" twice"]);
    let twice = problems(&with("requires", "requires = ['kv', 'kv >= 1.0']"));
    assert_eq!(twice, ["kv.toml:7:1: \"requires\" in [plugin] names \"kv\" twice"]);
}

#[test]
fn hostile_text() {
    assert_eq!(problems(""), ["kv.toml:1:1: the file lacks the key \"plugin\""]);
    assert_eq!(
        problems("plugin = 1")[0],
        "kv.toml:1:10: \"plugin\" in the file must be a table, not an integer"
    );
    assert_eq!(
        problems(&format!("\u{feff}{MINIMAL}")),
        ["kv.toml:1:1: starts with a byte-order mark: save it as UTF-8 without one"]
    );
    assert_eq!(problems(&format!("{MINIMAL}api = '1.0'")), ["kv.toml:7:1: duplicate key \"api\""]);
    assert_eq!(problems("[plugin]\n[plugin]\n")[0], "kv.toml:2:2: duplicate key \"plugin\"");
    assert!(problems(&with("kinds", "kinds = []"))[0].contains("must name at least one kind"));
    for deep in ["[", "{a=", "a."] {
        let text = format!("x = {}", deep.repeat(10_000));
        assert!(problems(&text)[0].starts_with("kv.toml:1:"));
        let text = format!("[{}a]", deep.repeat(10_000));
        assert!(problems(&text)[0].starts_with("kv.toml:1:"));
    }
}

#[test]
fn a_broken_manifest_can_still_be_disabled() {
    assert!(error("[plugin]\nenabled = false").disabled);
    assert!(error("[plugin]\nenabled = false\nname = 'a'\nname = 'b'").disabled);
    assert!(!error("[plugin]\nenabled = true").disabled);
    assert!(!error("[plugin]\nenabled = 'false'").disabled);
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*", at in 0usize..200, cut in 0usize..40) {
        let _ = Manifest::parse("x", &text);
        // Damage to a good manifest reaches further than noise does.
        let mut damaged: Vec<char> = MINIMAL.chars().collect();
        let start = at.min(damaged.len());
        let end = (start + cut).min(damaged.len());
        damaged.splice(start..end, text.chars());
        let _ = Manifest::parse("x", &damaged.into_iter().collect::<String>());
    }
}
