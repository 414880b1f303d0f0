//! Files for processes of the program: what tests give them, and how they are run.
#![allow(dead_code)] // each test file uses its own part

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{model_path, plugins};

/// A directory with a configuration, requests and what comes of them.
pub struct Files {
    dir: tempfile::TempDir,
    pub config: PathBuf,
}

impl Files {
    /// `more` and `kv` are further lines of the sections; SHARED in them is a directory for regions.
    pub fn new(more: &str, kv: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        let (plugins, model) = (plugins(), model_path());
        let text = format!(
            "[engine]\nplugin_dirs = [{plugins:?}]\nkv_dtype = \"f32\"\nmax_model_len = 160\n{more}\n\
             [model]\npath = {model:?}\n\
             [resources.main_kv]\nkind = \"kv\"\nnodes = [\"decoder\"]\npages = 100\n{kv}\n\
             [resources.attn]\nkind = \"attention\"\nnodes = [\"decoder\"]\nkv_cache = \"main_kv\"\n\
             [resources.pos]\nkind = \"positions\"\nnodes = [\"decoder\"]\nkv_cache = \"main_kv\"\n\
             [resources.sampler]\nkind = \"sampler\"\nnodes = [\"decoder\"]\n"
        );
        let text = text.replace("SHARED", &format!("{shared:?}"));
        let config = dir.path().join("engine.toml");
        std::fs::write(&config, text).unwrap();
        Files { dir, config }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `engine-host NAME` over these requests.
    pub fn command(&self, name: &str, prompts: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_engine-host"));
        command.arg(name).arg("--config").arg(&self.config).arg("--prompts").arg(prompts);
        command.stdin(Stdio::null());
        command
    }

    /// Runs `generate`, and gives the lines that it printed.
    pub fn generate(&self, prompts: &Path) -> (Output, Vec<Value>) {
        let output = self.command("generate", prompts).output().unwrap();
        let lines = lines(&output.stdout);
        (output, lines)
    }

    /// Replaces a part of the configuration.
    pub fn configure(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        assert!(text.contains(from), "{from}");
        std::fs::write(&self.config, text.replace(from, to)).unwrap();
    }

    /// The only region that is published.
    pub fn region(&self) -> PathBuf {
        let mut entries = std::fs::read_dir(self.path("shared")).unwrap();
        entries.next().unwrap().unwrap().path()
    }

    /// Begins the requests in a process of its own and waits until they are handed over.
    pub fn prefill(&self, prompts: &Path, output: &Path, tokens: &str) -> Child {
        let mut command = self.command("prefill", prompts);
        command.arg("--output").arg(output).args(["--tokens", tokens]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while !output.exists() {
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing is handed over");
            assert!(child.try_wait().unwrap().is_none_or(|status| status.success()), "it failed");
            std::thread::sleep(Duration::from_millis(10));
        }
        child
    }
}

/// What was printed, a JSON value a line.
pub fn lines(printed: &[u8]) -> Vec<Value> {
    let text = String::from_utf8_lossy(printed).into_owned();
    let value = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    text.lines().map(value).collect()
}

/// Whether a process ends within that time.
pub fn ended(child: &mut Child, within: Duration) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < within {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Sends a signal, such as "-STOP".
pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").arg(name).arg(child.id().to_string()).status().unwrap();
    assert!(status.success());
}
