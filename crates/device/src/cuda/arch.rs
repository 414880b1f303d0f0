//! The architectures that kernels are compiled for.

use std::fmt;

/// A compute capability, with or without the instructions that only it has (`sm_90a`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    major: u32,
    minor: u32,
    is_specific: bool,
}

impl Arch {
    /// Ampere: A100.
    pub const SM_80: Self = Self { major: 8, minor: 0, is_specific: false };
    /// Hopper: H100, H200.
    pub const SM_90A: Self = Self { major: 9, minor: 0, is_specific: true };
    /// Blackwell: B200.
    pub const SM_100A: Self = Self { major: 10, minor: 0, is_specific: true };

    /// What continuous integration compiles every kernel for, and a release brings.
    pub const RELEASED: [Self; 3] = [Self::SM_80, Self::SM_90A, Self::SM_100A];

    /// The one for a device of this compute capability: with its own instructions from 9.0 on.
    pub fn of_compute((major, minor): (u32, u32)) -> Self {
        // A cubin runs on later minors of its major, so that all 8.x share one that is released.
        let minor = if major == 8 { 0 } else { minor };
        Self { major, minor, is_specific: major >= 9 }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.is_specific { "a" } else { "" };
        f.pad(&format!("sm_{}{}{suffix}", self.major, self.minor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_target_that_runs_on_it() {
        let of = |major, minor| Arch::of_compute((major, minor)).to_string();
        assert_eq!([of(8, 0), of(8, 6), of(8, 9)], ["sm_80"; 3]);
        assert_eq!([of(9, 0), of(10, 0), of(12, 0)], ["sm_90a", "sm_100a", "sm_120a"]);
        assert_eq!(Arch::RELEASED.map(|a| a.to_string()), ["sm_80", "sm_90a", "sm_100a"]);
    }
}
