//! What a library can change in a process by being loaded, and everybody in it then has to live with:
//! what signals do, limits, standard streams, the working directory, floating-point modes.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// A process as far as a library has no business changing it.
#[derive(Debug)]
pub struct State(BTreeMap<&'static str, String>);

/// Lines of `/proc/self/status`, with what they are about.
const STATUS: [(&str, &str); 6] = [
    ("SigBlk:", "blocked signals"),
    ("SigIgn:", "ignored signals"),
    ("SigCgt:", "handled signals"),
    ("Uid:", "its user"),
    ("Gid:", "its group"),
    ("Umask:", "the mode of new files"),
];

impl State {
    /// What is so now, as far as the system tells.
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let of_status = STATUS.iter().map(|(key, what)| {
            let line = status.lines().find(|line| line.starts_with(key));
            (*what, line.unwrap_or_default().to_owned())
        });
        let link = |path: &Path| format!("{:?}", fs::read_link(path).ok());
        let streams = ["0", "1", "2"].map(|n| link(&PathBuf::from("/proc/self/fd").join(n)));
        let others = [
            ("its limits", fs::read_to_string("/proc/self/limits").unwrap_or_default()),
            ("its working directory", link(Path::new("/proc/self/cwd"))),
            ("standard streams", streams.join(" ")),
            ("rounding", rounding()),
            ("numbers near zero", near_zero()),
        ];
        Self(of_status.chain(others).collect())
    }

    /// What is different afterwards.
    pub fn changes(&self, after: &Self) -> Vec<&'static str> {
        let differs = |what: &&&'static str| self.0.get(**what) != after.0.get(**what);
        self.0.keys().filter(differs).copied().collect()
    }
}

/// What a division gives in the rounding mode that is set.
fn rounding() -> String {
    let thirds = [1.0f32, -1.0].map(|one| black_box(one) / black_box(3.0));
    format!("{thirds:?}")
}

/// Code built for fast arithmetic has the processor take numbers near zero for zero, in the whole thread.
fn near_zero() -> String {
    let halved = iter::successors(Some(f32::MIN_POSITIVE), |n| Some(black_box(*n) / 2.0));
    format!("{:?}", halved.take(3).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_has_changed_by_itself_and_what_has_is_named() {
        // What a test beside this one would do in between.
        device::let_large_files_fail();
        let before = State::now();
        assert!(before.changes(&State::now()).is_empty());
        assert!(before.0.values().all(|value| !value.is_empty()), "{before:?}");
        let mut after = State::now();
        after.0.insert("rounding", "up".to_owned());
        assert_eq!(before.changes(&after), ["rounding"]);
    }
}
