//! A plugin's manifest: the TOML file beside its library. Read without opening the library.

use std::fmt;
use std::path::{Component, Path};

use toml::Spanned;

use crate::document::{Document, Problems, TableReader};
use crate::elf::Sha256Digest;

mod capability;

pub use capability::{Capability, Requirement};

/// Larger manifests are refused unread.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 10;

/// What a plugin says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Name of the plugin, unique among the plugins of an engine.
    pub name: String,
    /// Version of the plugin, `major.minor.patch` with an optional suffix.
    pub version: String,
    /// Version of the contract that it was built against.
    pub api: ApiVersion,
    /// File name of the library, beside the manifest: one normal path component.
    pub library: String,
    /// Kinds of resources that it builds; at least one, each once.
    pub kinds: Vec<String>,
    /// Capabilities that its resources offer.
    pub provides: Vec<Capability>,
    /// Capabilities that its resources want from others.
    pub requires: Vec<Requirement>,
    /// What the library's content must hash to.
    pub sha256: Option<Sha256Digest>,
    /// Other builds of the library, for CPUs with more features.
    pub variants: Vec<Variant>,
    /// `false`: known, listed, and never opened.
    pub enabled: bool,
}

/// Another build of a plugin's library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// File name, as [`Manifest::library`].
    pub library: String,
    /// CPU features that it needs, in the names of `std::is_x86_feature_detected`.
    pub target_features: Vec<String>,
    /// What its content must hash to.
    pub sha256: Option<Sha256Digest>,
}

/// Version of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ApiVersion {
    /// Different majors do not work together.
    pub major: u32,
    /// Minors only add.
    pub minor: u32,
}

impl ApiVersion {
    /// Parses `major.minor`.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Self { major: decimal(major)?, minor: decimal(minor)? })
    }
}

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why a manifest is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problems}")]
pub struct ManifestError {
    /// Every problem found, in the order of their places.
    pub problems: Problems,
    /// The manifest could be read far enough to see `enabled = false`.
    pub disabled: bool,
}

impl Manifest {
    /// The build for this CPU, with its pin: the first variant all of whose features it has, otherwise
    /// the library itself.
    pub fn build(&self) -> (&str, Option<Sha256Digest>) {
        let fits =
            |v: &&Variant| v.target_features.iter().all(|feature| crate::elf::cpu_has(feature));
        match self.variants.iter().find(fits) {
            Some(variant) => (&variant.library, variant.sha256),
            None => (&self.library, self.sha256),
        }
    }

    /// Parses the text of a manifest; `file` is how messages name it. All problems are reported.
    pub fn parse(file: &str, text: &str) -> Result<Self, ManifestError> {
        let doc = Document::new(file, text);
        let root = doc.parse();
        if doc.has_problems() {
            // After a syntax error half a table may be missing: further complaints would mislead.
            let plugin = root.get_ref().get("plugin");
            let enabled =
                plugin.and_then(|plugin| plugin.get_ref().get("enabled")?.get_ref().as_bool());
            return Err(ManifestError {
                problems: doc.into_problems(),
                disabled: enabled == Some(false),
            });
        }
        // TOML tolerates the mark; other readers of the same file need not.
        if text.starts_with('\u{feff}') {
            doc.report(&(0..0), "starts with a byte-order mark: save it as UTF-8 without one");
        }
        let mut top = doc.top(&root);
        top.require("plugin");
        let plugin = top.table("plugin");
        top.finish(is_extension);
        let manifest = plugin.map(read_plugin);
        let disabled = manifest.as_ref().is_some_and(|manifest| !manifest.enabled);
        match manifest {
            Some(manifest) if !doc.has_problems() => Ok(manifest),
            _ => Err(ManifestError { problems: doc.into_problems(), disabled }),
        }
    }
}

/// Tables named `x-...` belong to whoever wrote them.
fn is_extension(reader: &TableReader<'_, '_>, key: &str) -> bool {
    key.len() > 2 && key.starts_with("x-") && reader.is_table(key)
}

/// Reads `[plugin]`. What is wrong is recorded, and stands for an empty value in the result.
fn read_plugin(mut plugin: TableReader<'_, '_>) -> Manifest {
    for key in ["name", "version", "api", "library", "kinds"] {
        plugin.require(key);
    }
    let manifest = Manifest {
        name: checked(&mut plugin, "name", NAME_RULE, name).unwrap_or_default(),
        version: checked(&mut plugin, "version", "must be a version like \"0.1.0\"", version)
            .unwrap_or_default(),
        api: checked(
            &mut plugin,
            "api",
            "must be the contract's \"major.minor\", like \"1.0\"",
            ApiVersion::parse,
        )
        .unwrap_or(ApiVersion { major: 0, minor: 0 }),
        library: checked(&mut plugin, "library", LIBRARY_RULE, file_name).unwrap_or_default(),
        kinds: checked_list(&mut plugin, "kinds", NAME_RULE, name),
        provides: checked_list(
            &mut plugin,
            "provides",
            "must be a capability and its version, like \"kv.cache/1\"",
            Capability::parse,
        ),
        requires: checked_list(
            &mut plugin,
            "requires",
            "must be a capability, with a least version if need be and \"?\" if optional, like \
             \"kv.cache >= 1.0?\"",
            Requirement::parse,
        ),
        sha256: checked(&mut plugin, "sha256", SHA256_RULE, Sha256Digest::parse),
        variants: plugin
            .tables("variants")
            .unwrap_or_default()
            .into_iter()
            .map(read_variant)
            .collect(),
        enabled: plugin.boolean("enabled").unwrap_or(true),
    };
    let kinds = plugin.keys().find(|(key, _)| *key == "kinds");
    if let Some((_, span)) = kinds.filter(|_| plugin.is_empty_array("kinds")) {
        plugin.doc().report(&span, "\"kinds\" in [plugin] must name at least one kind");
    }
    unique_capabilities(&plugin, &manifest);
    plugin.finish(is_extension);
    manifest
}

fn read_variant(mut variant: TableReader<'_, '_>) -> Variant {
    variant.require("library");
    variant.require("target_features");
    let read = Variant {
        library: checked(&mut variant, "library", LIBRARY_RULE, file_name).unwrap_or_default(),
        target_features: checked_list(&mut variant, "target_features", NAME_RULE, name),
        sha256: checked(&mut variant, "sha256", SHA256_RULE, Sha256Digest::parse),
    };
    variant.finish(is_extension);
    read
}

/// The same capability twice under two spellings: two majors are fine, two minors of one are not.
fn unique_capabilities(plugin: &TableReader<'_, '_>, manifest: &Manifest) {
    let report = |key: &str, name: &str| {
        let span = plugin.keys().find(|(k, _)| *k == key).map_or(plugin.span(), |found| found.1);
        plugin.doc().report(&span, format!("{key:?} in [plugin] names {name:?} twice"));
    };
    for (i, capability) in manifest.provides.iter().enumerate() {
        let same = |c: &Capability| c.name == capability.name && c.major == capability.major;
        if manifest.provides[..i].iter().any(same) {
            report("provides", &capability.name);
        }
    }
    for (i, requirement) in manifest.requires.iter().enumerate() {
        if manifest.requires[..i].iter().any(|earlier| earlier.name == requirement.name) {
            report("requires", &requirement.name);
        }
    }
}

const NAME_RULE: &str =
    "must be 1 to 64 letters, digits, '.', '-' and '_', with a letter or digit first";
const LIBRARY_RULE: &str = "must be a file name beside the manifest, without directories";
const SHA256_RULE: &str = "must be 64 hexadecimal digits";

/// The string under `key`, put through `parse`; `rule` says what it should have been.
fn checked<'d, T>(
    table: &mut TableReader<'d, '_>,
    key: &'d str,
    rule: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let text = table.string(key)?;
    checked_text(table, key, rule, &text, parse)
}

/// As [`checked`], for every string of an array; the bad ones are left out.
fn checked_list<'d, T>(
    table: &mut TableReader<'d, '_>,
    key: &'d str,
    rule: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Vec<T> {
    let texts = table.strings(key).unwrap_or_default();
    texts.iter().filter_map(|text| checked_text(table, key, rule, text, &parse)).collect()
}

fn checked_text<T>(
    table: &TableReader<'_, '_>,
    key: &str,
    rule: &str,
    text: &Spanned<&str>,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let parsed = parse(text.get_ref());
    if parsed.is_none() {
        let shown = text.get_ref();
        let message = format!("{key} = {shown:?} in {} {rule}", table.name());
        table.doc().report(&text.span(), message);
    }
    parsed
}

fn name(text: &str) -> Option<String> {
    is_name(text).then(|| text.to_owned())
}

/// Whether `text` can name a plugin, a kind or a capability.
fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn version(text: &str) -> Option<String> {
    let number_end = text.find(['-', '+']).unwrap_or(text.len());
    let (numbers, suffix) = text.split_at(number_end);
    let parts: Vec<_> = numbers.split('.').map(decimal).collect();
    let suffix_ok = suffix.is_empty()
        || suffix.len() > 1
            && suffix.bytes().all(|b| b.is_ascii_alphanumeric() || b".-+".contains(&b));
    (parts.len() == 3 && parts.iter().all(Option::is_some) && suffix_ok).then(|| text.to_owned())
}

fn file_name(text: &str) -> Option<String> {
    let mut components = Path::new(text).components();
    let one_normal = matches!(
        (components.next(), components.next()),
        (Some(Component::Normal(only)), None) if only == text
    );
    (one_normal && text.len() <= 255 && !text.contains(char::is_control)).then(|| text.to_owned())
}

/// A number in plain decimal digits; unlike `str::parse`, no sign.
fn decimal(text: &str) -> Option<u32> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}
