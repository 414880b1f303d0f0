//! The sources of kernels, which every binary carries as text, and their instances.
//!
//! A file under `kernels/` is written once for many shapes: what an *instance* defines (a head
//! dimension, an element type) is known to the compiler. NVRTC has no headers of the toolkit, so the
//! files include only each other.

use std::fmt;

use super::arch::Arch;
use crate::error::{Error, Result};

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../kernels/", $name)))),*]
    };
}

/// Files that others include, by the name they are included by.
pub(super) const HEADERS: &[(&str, &str)] = sources![
    "async_copy.cuh",
    "attention.cuh",
    "decode_load.cuh",
    "decode_parts.cuh",
    "decode_tile.cuh",
    "decode_work.cuh",
    "mma.cuh",
    "overlap.cuh",
    "rope.cuh",
    "sample.cuh",
    "sample_entries.cuh",
    "sample_pick.cuh",
    "step_attention.cuh",
    "step_products.cuh",
    "step_words.cuh",
    "types.cuh",
];

/// Files with kernels.
const SOURCES: &[(&str, &str)] = sources![
    "attention_decode.cu",
    "attention_exact.cu",
    "attention_prefill.cu",
    "decode_step.cu",
    "elementwise.cu",
    "fill.cu",
    "gemv.cu",
    "kv.cu",
    "norm.cu",
    "rope.cu",
    "sample.cu",
];

/// The instances that the engine uses for the models it knows. Continuous integration compiles each
/// for every [released architecture](Arch::RELEASED); a release brings them compiled. Others are
/// compiled at first use.
pub fn named_instances() -> Vec<Instance> {
    let mut named = super::attention::named_instances();
    named.extend(super::decode_step::named_instances());
    named.extend(super::ops::named_instances());
    named.extend(["fill.cu", "gemv.cu", "kv.cu", "rope.cu", "sample.cu"].map(Instance::of));
    named
}

/// A source with what is defined for it: one compiled module.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    source: &'static str,
    defines: Vec<(&'static str, String)>,
}

impl Instance {
    /// The instance of a file under `kernels/` that defines nothing.
    pub fn of(source: &'static str) -> Self {
        Self { source, defines: Vec::new() }
    }

    /// Defines a macro for the whole source.
    #[must_use]
    pub fn define(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Name of the source file.
    pub fn source(&self) -> &'static str {
        self.source
    }

    /// The source's text.
    ///
    /// # Errors
    /// [`Error::Kernel`] where this build has no such file.
    pub(super) fn text(&self) -> Result<&'static str> {
        let found = SOURCES.iter().find(|(name, _)| *name == self.source);
        found.map(|(_, text)| *text).ok_or_else(|| {
            Error::Kernel(format!("there is no kernel source {:?} in this build", self.source))
        })
    }

    /// The compiler's options.
    pub(super) fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={arch}"), "--std=c++17".to_owned()];
        options.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }

    /// What the machine code depends on, apart from the compiler: 128 bits in hexadecimal. Equal in
    /// every build from the same sources.
    pub(super) fn digest(&self, arch: Arch, compiler: &str) -> Result<String> {
        let mut hash = blake3::Hasher::new_derive_key("engine-host kernel 1");
        let mut part = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        };
        part(compiler);
        part(self.source);
        part(self.text()?);
        for (name, text) in HEADERS {
            part(name);
            part(text);
        }
        self.options(arch).iter().for_each(|option| part(option));
        Ok(hash.finalize().to_hex()[..32].to_owned())
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.source)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_the_code_changes_the_digest() {
        let plain = Instance::of("fill.cu");
        let digests = [
            plain.digest(Arch::SM_80, "13.0"),
            plain.digest(Arch::SM_90A, "13.0"),
            plain.digest(Arch::SM_80, "12.9"),
            plain.clone().define("A", 1).digest(Arch::SM_80, "13.0"),
            plain.clone().define("A", 2).digest(Arch::SM_80, "13.0"),
        ];
        let different: std::collections::BTreeSet<_> =
            digests.into_iter().map(Result::unwrap).collect();
        assert_eq!(different.len(), 5);
    }

    #[test]
    fn every_named_instance_has_a_source_and_is_named_once() {
        let named = named_instances();
        assert!(named.iter().all(|i| i.text().is_ok()), "{named:?}");
        let different: std::collections::BTreeSet<_> = named.iter().collect();
        assert_eq!(different.len(), named.len(), "{named:?}");
        let unused: Vec<_> =
            SOURCES.iter().filter(|(s, _)| named.iter().all(|i| i.source != *s)).collect();
        assert!(unused.is_empty(), "no instance of {unused:?} is ever checked");
        let e = Instance::of("no.cu").text().unwrap_err();
        assert_eq!(e.to_string(), "there is no kernel source \"no.cu\" in this build");
    }
}
