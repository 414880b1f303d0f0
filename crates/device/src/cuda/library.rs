//! Finding and opening the driver, NVRTC and cuBLASLt.
//!
//! cudarc asks the loader for these by name, and panics when the loader does not know them. So every
//! library is looked for here first, in more places than the loader looks; once it is open, the
//! loader answers its name with the open one. An absence is an error of one line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, Result};

/// Folders that are searched before all others, separated by colons.
pub const LIBRARY_PATH_ENV: &str = "ENGINE_HOST_CUDA_LIBS";

/// A library that CUDA work needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Everything that touches a device. Comes with the driver, never with the toolkit.
    Driver,
    /// The compiler of kernels; not needed where a release brings compiled ones.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

struct Facts {
    /// Newest first.
    file_names: &'static [&'static str],
    /// Folders of pip packages that have it, under `site-packages`.
    pip_folders: &'static [&'static str],
    what: &'static str,
    how_to_get: &'static str,
}

impl Library {
    fn facts(self) -> Facts {
        match self {
            Self::Driver => Facts {
                file_names: &["libcuda.so.1"],
                pip_folders: &[],
                what: "the NVIDIA driver",
                how_to_get: "install the driver (in a container: run it with GPU access), or set \
                             device = \"cpu\"",
            },
            Self::Nvrtc => Facts {
                file_names: &["libnvrtc.so.13", "libnvrtc.so.12"],
                pip_folders: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
                what: "the kernel compiler NVRTC",
                how_to_get: "install it (`pip install nvidia-cuda-nvrtc`, or the CUDA toolkit), or \
                             use a release that brings compiled kernels",
            },
            Self::CublasLt => Facts {
                file_names: &["libcublasLt.so.13", "libcublasLt.so.12"],
                pip_folders: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
                what: "the matrix library cuBLASLt",
                how_to_get: "install it (`pip install nvidia-cublas`, or the CUDA toolkit)",
            },
        }
    }

    /// Opens the library, once in the life of the process: further calls repeat the first answer.
    ///
    /// # Errors
    /// [`Error::Library`] with what was looked for, where, and how to get it.
    pub fn open(self) -> Result<()> {
        static OPENED: [OnceLock<Result<()>>; 3] = [const { OnceLock::new() }; 3];
        OPENED[self as usize].get_or_init(|| self.open_from(&Places::of_this_machine())).clone()
    }

    fn open_from(self, places: &Places) -> Result<()> {
        let Facts { file_names, what, how_to_get, .. } = self.facts();
        let mut refused = Vec::new();
        for path in self.candidates(places) {
            self.open_companions(&path);
            match open_for_ever(&path) {
                Ok(()) => return Ok(()),
                // A bare name that the loader does not know is the usual case, not worth a word.
                Err(reason) if path.is_absolute() => {
                    refused.push(format!("; {} cannot be opened: {reason}", path.display()));
                }
                Err(_) => {}
            }
        }
        let folders = places.folders(self).iter().filter(|f| f.is_dir()).count();
        Err(Error::Library(format!(
            "{what} is not on this machine: no {} in ${LIBRARY_PATH_ENV}, the loader's path, \
             $CUDA_HOME, the system's folders or Python's packages ({folders} folders searched){}; \
             {how_to_get}",
            file_names.join(" or "),
            refused.concat(),
        )))
    }

    /// What to open, best first: what the user points at, what the loader finds by itself, then every
    /// file that exists in the folders known to have it.
    fn candidates(self, places: &Places) -> Vec<PathBuf> {
        let Facts { file_names, .. } = self.facts();
        let files_in = |folder: &PathBuf| {
            let paths = file_names.iter().map(|name| folder.join(name));
            paths.filter(|path| path.is_file()).collect::<Vec<_>>()
        };
        let mut found: Vec<_> = places.first.iter().flat_map(files_in).collect();
        found.extend(file_names.iter().map(PathBuf::from));
        found.extend(places.folders(self).iter().flat_map(files_in));
        found
    }

    /// NVRTC opens its builtins by name when it first compiles, which fails where its folder is not
    /// on the loader's path; once open, they are found.
    fn open_companions(self, path: &Path) {
        let folder = path.parent().filter(|f| f.is_absolute());
        if let (Self::Nvrtc, Some(folder)) = (self, folder) {
            for builtins in sorted_matches(folder, "libnvrtc-builtins.so.") {
                // Without them the compiler itself says what is missing.
                let _ = open_for_ever(&builtins);
            }
        }
    }
}

/// Opens a library and leaves it open until the process ends.
fn open_for_ever(path: &Path) -> std::result::Result<(), String> {
    // SAFETY: opening runs the initializers of NVIDIA's libraries, which are made to be opened this
    // way; the paths come from the environment and the system's folders, as for the loader itself.
    match unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(handle) => {
            let _ = handle.into_raw();
            Ok(())
        }
        Err(e) => Err(e.to_string()),
    }
}

/// Where libraries may lie. A value, so that tests can lay out a machine of their own.
#[derive(Debug)]
struct Places {
    /// Searched before the loader is asked.
    first: Vec<PathBuf>,
    /// Toolkit folders named by the environment.
    toolkits: Vec<PathBuf>,
    /// Python installations: folders that have a `bin` and a `lib`.
    pythons: Vec<PathBuf>,
    /// `/`, except in tests.
    root: PathBuf,
}

impl Places {
    fn of_this_machine() -> Self {
        Self::of(&|name| std::env::var_os(name).filter(|v| !v.is_empty()), Path::new("/"))
    }

    fn of(variable: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Self {
        let paths = |name: &str| -> Vec<PathBuf> {
            variable(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
        };
        let mut pythons = paths("VIRTUAL_ENV");
        // Both sides of the link that a virtual environment's interpreter is: packages lie in either.
        let on_path = paths("PATH").into_iter().map(|bin| bin.join("python3"));
        for python in on_path.filter(|p| p.is_file()).take(1) {
            let target = python.canonicalize().unwrap_or_else(|_| python.clone());
            let home = |p: &Path| p.parent().and_then(Path::parent).map(Path::to_owned);
            pythons.extend([home(&python), home(&target)].into_iter().flatten());
        }
        pythons.push(root.join("usr/local"));
        Self {
            first: paths(LIBRARY_PATH_ENV),
            toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().flat_map(paths).collect(),
            pythons,
            root: root.to_owned(),
        }
    }

    /// The folders to search for `library` after the loader's own, best first.
    fn folders(&self, library: Library) -> Vec<PathBuf> {
        let system = [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib64",
            "usr/lib",
            "usr/local/nvidia/lib64",
            "usr/lib/wsl/lib",
            "run/opengl-driver/lib",
        ];
        let mut folders: Vec<_> = system.iter().map(|f| self.root.join(f)).collect();
        if library == Library::Driver {
            return folders;
        }
        let mut toolkits = self.toolkits.clone();
        toolkits.push(self.root.join("usr/local/cuda"));
        toolkits.extend(sorted_matches(&self.root.join("usr/local"), "cuda-"));
        let in_toolkit = ["lib64", "targets/x86_64-linux/lib", "lib"];
        // A toolkit that the environment names comes before whatever the system has.
        let of_toolkits = toolkits.iter().flat_map(|t| in_toolkit.iter().map(|f| t.join(f)));
        folders.splice(0..0, of_toolkits);
        for python in &self.pythons {
            for version in sorted_matches(&python.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let packages = version.join(packages);
                    folders.extend(library.facts().pip_folders.iter().map(|f| packages.join(f)));
                }
            }
        }
        folders
    }
}

/// Entries of `folder` whose names begin with `prefix`, the highest version first.
fn sorted_matches(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .map(|e| e.path())
        .collect();
    let version = |path: &PathBuf| -> Vec<u32> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name[prefix.len()..].split('.').map(|n| n.parse().unwrap_or(0)).collect()
    };
    found.sort_by_key(|path| std::cmp::Reverse(version(path)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine's file tree with empty files at `files`.
    fn machine(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
        }
        root
    }

    fn found(library: Library, root: &Path, variables: &[(&str, &str)]) -> Vec<String> {
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(n, _)| *n == name)?;
            let paths = std::env::split_paths(value).map(|p| root.join(p));
            Some(std::env::join_paths(paths).unwrap())
        };
        let candidates = library.candidates(&Places::of(&variable, root));
        let relative = candidates.iter().map(|p| p.strip_prefix(root).unwrap_or(p));
        relative.map(|p| p.display().to_string()).collect()
    }

    #[test]
    fn what_the_user_points_at_comes_before_the_loader_and_that_before_the_rest() {
        let root = machine(&[
            "mine/libnvrtc.so.13",
            "usr/local/cuda-12.4/lib64/libnvrtc.so.12",
            "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
            "opt/toolkit/lib64/libnvrtc.so.12",
            "usr/lib64/libnvrtc.so.12",
        ]);
        let variables = [(LIBRARY_PATH_ENV, "mine"), ("CUDA_HOME", "opt/toolkit")];
        let expected = [
            "mine/libnvrtc.so.13",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "opt/toolkit/lib64/libnvrtc.so.12",
            "usr/local/cuda-13.0/lib64/libnvrtc.so.13",
            "usr/local/cuda-12.4/lib64/libnvrtc.so.12",
            "usr/lib64/libnvrtc.so.12",
        ];
        assert_eq!(found(Library::Nvrtc, root.path(), &variables), expected);
    }

    #[test]
    fn packages_of_the_python_on_the_path_are_found_without_running_it() {
        let packages = "venv/lib/python3.12/site-packages/nvidia";
        let root = machine(&[
            "venv/bin/python3",
            &format!("{packages}/cu13/lib/libcublasLt.so.13"),
            &format!("{packages}/cublas/lib/libcublasLt.so.12"),
            "usr/local/lib/python3.11/dist-packages/nvidia/cublas/lib/libcublasLt.so.12",
        ]);
        let found = found(Library::CublasLt, root.path(), &[("PATH", "nothing:venv/bin")]);
        let expected = [
            "libcublasLt.so.13".to_owned(),
            "libcublasLt.so.12".to_owned(),
            format!("{packages}/cu13/lib/libcublasLt.so.13"),
            format!("{packages}/cublas/lib/libcublasLt.so.12"),
            "usr/local/lib/python3.11/dist-packages/nvidia/cublas/lib/libcublasLt.so.12".to_owned(),
        ];
        let mut found = found;
        // The interpreter is no link here, so its folder is seen from both sides.
        found.dedup();
        found.retain({
            let mut seen = std::collections::BTreeSet::new();
            move |path| seen.insert(path.clone())
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn the_driver_never_comes_from_a_toolkit() {
        let root =
            machine(&["usr/local/cuda/lib64/libcuda.so.1", "usr/local/nvidia/lib64/libcuda.so.1"]);
        let found = found(Library::Driver, root.path(), &[("CUDA_HOME", "usr/local/cuda")]);
        assert_eq!(found, ["libcuda.so.1", "usr/local/nvidia/lib64/libcuda.so.1"]);
    }

    #[test]
    fn an_absence_says_what_is_missing_and_how_to_get_it() {
        let root = machine(&["broken/libcublasLt.so.13"]);
        let mut places = Places::of(&|_| None, root.path());
        places.first.push(root.path().join("broken"));
        let facts = Library::CublasLt.facts();
        let loader_knows = facts.file_names.iter().any(|n| open_for_ever(Path::new(n)).is_ok());
        if loader_knows {
            return; // a machine that has it
        }
        let error = Library::CublasLt.open_from(&places).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        for part in
            ["libcublasLt.so.13", "nvidia-cublas", "broken/libcublasLt.so.13 cannot be opened"]
        {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }
}
