//! Which instructions kernels may use: found once at run time, lowered on request.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use resource_api::{HostServices, HostServicesHandle, ResourceError};

use crate::error::{Error, Result};

/// Instruction sets in ascending order. Every CPU that has one has those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    Portable,
    Avx2,
    Avx512,
    Avx512Vnni,
    Avx512Bf16,
    Amx,
}

impl Level {
    const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }
}

/// A level of instructions that this CPU has; the type's existence is the proof.
///
/// | name | instructions |
/// |---|---|
/// | `portable` | what the compiler's target guarantees |
/// | `avx2` | AVX2, FMA, F16C |
/// | `avx512` | AVX-512 F, BW, DQ, VL |
/// | `avx512vnni` | and VNNI |
/// | `avx512bf16` | and BF16 |
/// | `amx` | and AMX tiles with int8 and bf16, which the operating system lets this process use |
///
/// A kernel that has no version for a level runs the one of the next lower level it has. Results are
/// reproducible to the bit within a level, not between levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuFeatures(Level);

/// The level set by [`set_cpu_features`]; [`NOT_SET`] before.
static CURRENT: AtomicU8 = AtomicU8::new(NOT_SET);
const NOT_SET: u8 = u8::MAX;

impl CpuFeatures {
    /// The best level of this CPU.
    pub fn detected() -> Self {
        static DETECTED: OnceLock<Level> = OnceLock::new();
        Self(*DETECTED.get_or_init(detect))
    }

    /// The level in use: the best, or what [`set_cpu_features`] last set.
    pub fn current() -> Self {
        let set = CURRENT.load(Ordering::Relaxed);
        match Level::ALL.get(usize::from(set)) {
            Some(&level) => Self(level),
            None => Self::detected(),
        }
    }

    /// Every level of this CPU, ascending; the first is `portable`.
    pub fn supported() -> impl Iterator<Item = Self> {
        Level::ALL.into_iter().filter(|&l| l <= Self::detected().0).map(Self)
    }

    /// The level called `name`.
    ///
    /// # Errors
    /// When there is no such level, or this CPU lacks it; the message lists those it has.
    pub fn parse(name: &str) -> Result<Self> {
        let found = Level::ALL.into_iter().find(|l| l.name() == name);
        match found {
            Some(level) if level <= Self::detected().0 => Ok(Self(level)),
            _ => {
                let why = if found.is_some() { "this CPU does not have" } else { "there are no" };
                let have: Vec<_> = Self::supported().map(Self::name).collect();
                Err(Error::CpuFeatures(format!(
                    "{why} CPU features '{name}'; choose one of {}",
                    have.join(", ")
                )))
            }
        }
    }

    /// The name that [`parse`](Self::parse) reads.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    pub(crate) fn level(self) -> Level {
        self.0
    }
}

/// Sets the level used from now on, for the whole process. A [`Matrix`](crate::Matrix) keeps the level
/// it was packed at.
///
/// # Errors
/// As [`CpuFeatures::parse`].
pub fn set_cpu_features(name: &str) -> Result<()> {
    CURRENT.store(CpuFeatures::parse(name)?.0 as u8, Ordering::Relaxed);
    Ok(())
}

/// Sets the level that the host asks for. A plugin has its own copy of this crate: its kinds call this
/// when they are built. A host that names none changes nothing.
///
/// # Errors
/// `INVALID` as [`CpuFeatures::parse`].
pub fn use_features_of(host: &HostServicesHandle) -> resource_api::Result<()> {
    let name = host.cpu_features();
    match name.is_empty() {
        true => Ok(()),
        false => set_cpu_features(&name).map_err(|e| ResourceError::invalid(e.to_string())),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c")) {
        Level::Portable
    } else if !(has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl")) {
        Level::Avx2
    } else if !has!("avx512vnni") {
        Level::Avx512
    } else if !has!("avx512bf16") {
        Level::Avx512Vnni
    } else if !has_amx() {
        Level::Avx512Bf16
    } else {
        Level::Amx
    }
}

/// Whether CPU and operating system have tiles with int8 and bf16 products. The standard library's
/// detection of AMX is not stable yet.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid_count, _xgetbv};

    const TILE_INT8_BF16: u32 = 1 << 24 | 1 << 25 | 1 << 22;
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;

    #[target_feature(enable = "xsave")]
    fn enabled_state() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }
    // Leaf 7 exists on every CPU with AVX2, which was asked for before.
    #[allow(unused_unsafe)] // unsafe before Rust 1.94
    // SAFETY: x86-64 has the instruction.
    let edx = unsafe { __cpuid_count(7, 0) }.edx;
    // SAFETY: AVX was detected, and that includes the operating system's use of xsave.
    let has = edx & TILE_INT8_BF16 == TILE_INT8_BF16
        && unsafe { enabled_state() } & TILE_STATE == TILE_STATE;
    has && tiles_are_permitted()
}

/// Asks the operating system for tiles, which Linux gives a process only once it has been asked.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_are_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but what the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_are_permitted() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_and_named() {
        let levels: Vec<_> = CpuFeatures::supported().collect();
        assert_eq!(levels[0].name(), "portable");
        assert_eq!(*levels.last().unwrap(), CpuFeatures::detected());
        assert!(levels.is_sorted());
        for level in levels {
            assert_eq!(CpuFeatures::parse(level.name()), Ok(level));
        }
    }

    #[test]
    fn an_unknown_level_is_refused_with_those_there_are() {
        let message = CpuFeatures::parse("sse9").unwrap_err().to_string();
        assert!(message.starts_with("there are no CPU features 'sse9'; choose one of portable"));
        assert!(!message.contains('\n'));
    }
}
