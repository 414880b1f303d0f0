//! The engine's configuration: one TOML file, read strictly, all problems reported together.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::document::{self, Problems};
use crate::engine::{OnFault, Queue, Relief, Victims};
use crate::error::{Error, Result};
use crate::probe::Probe;

mod layer;
mod paths;
mod read;
pub mod reference;
mod schema;
mod secret;
mod server;
mod settings;

pub use self::server::{LogConfig, LogFormat, ReasoningParser, ServerConfig, ToolParser};
pub use ::server::UnknownFields;
pub use layer::{Origin, Override};
pub use paths::{DEFAULT_MODEL_FILE, MODEL_ENV, default_model_path, model_cache_dir};
pub use schema::schema;
pub use secret::Secrets;
pub(crate) use settings::texts;
pub use settings::{ENV_PREFIX, SETTINGS, Setting, TABLES};

/// Text of the configuration that is used without `--config`.
pub const DEFAULT_CONFIG: &str = include_str!("config/default.toml");

/// Larger configuration files are refused unread.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The whole configuration, checked for everything that can be known without plugins and model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// How messages name the file.
    pub file: String,
    /// `[engine]`
    pub engine: EngineConfig,
    /// `[model]`
    pub model: ModelConfig,
    /// `[server]`
    pub server: ServerConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[resources.<key>]`, by key.
    pub resources: BTreeMap<String, ResourceConfig>,
    /// Where values come from, by path (`engine.max_batch`); those of resources only if not the file.
    origins: BTreeMap<String, Origin>,
}

/// `[engine]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Where the model runs; default `cpu`.
    pub device: Device,
    /// Element type of the KV cache; default `bf16`.
    pub kv_dtype: KvDtype,
    /// How matrix products treat activations; default `float`.
    pub activations: Activations,
    /// Where plugins are looked for, in order; default `plugins` beside the configuration.
    pub plugin_dirs: Vec<PathBuf>,
    /// Strict rules for who may write plugin directories; default off.
    pub strict: bool,
    /// Which plugins are loaded in a child process first; default those that nothing pins.
    pub probe: Probe,
    /// Threads of the host's pool; default: as many as there are cores.
    pub threads: usize,
    /// Whether threads of the pool are kept to processors of their own where there are as many of them as
    /// cores, or processors, for this process; default on.
    pub pin_threads: bool,
    /// CPU instruction level of all kernels, as [`device::CpuFeatures`] names them; default: the best
    /// that the CPU has.
    pub cpu_features: Option<String>,
    /// Whether a step is planned while the one before it runs; default on.
    pub preplan: bool,
    /// Whether, on a GPU, a step is launched before what the one before it sampled has been read; default on.
    pub run_ahead: bool,
    /// How state moves between engines; default not at all.
    pub transfer: TransferEngine,
    /// Where memory that processes share lies; default `/dev/shm`.
    pub transfer_directory: PathBuf,
    /// What makes room when a step does not fit, in order; default evict, offload, recompute.
    pub pressure: Vec<Relief>,
    /// Which request gives way then; default the youngest.
    pub victims: Victims,
    /// Whether requests may start before one that waits for room; default strict: no.
    pub queue: Queue,
    /// Whether decode steps on a GPU are captured and replayed; default on.
    pub cuda_graphs: bool,
    /// Whether, on a GPU, what a request gets does not depend on what runs beside it, to the bit (on the CPU
    /// it never does); default off.
    pub batch_invariant: bool,
    /// Seconds after which a call that has not come back is logged; 0 for never; default 10.
    pub watchdog: u64,
    /// Requests in one step at most; default 64.
    pub max_batch: usize,
    /// Tokens in one step at most, the budget of chunked prefill; default 512.
    pub max_batch_tokens: usize,
    /// Tokens of one request at most, prompt and completion together; default: the model's limit.
    pub max_model_len: Option<usize>,
}

/// Ways for state to move between engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferEngine {
    /// Not at all.
    Off,
    /// Between engines of one process.
    InProcess,
    /// Between processes of one machine.
    SharedMemory,
}

impl TransferEngine {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("off", Self::Off),
        ("in-process", Self::InProcess),
        ("shared-memory", Self::SharedMemory),
    ];

    /// Name in the configuration; `None` where state does not move.
    pub fn name(self) -> Option<&'static str> {
        let name = Self::NAMES.iter().find(|(_, engine)| *engine == self).map(|(name, _)| *name);
        name.filter(|_| self != Self::Off)
    }
}

/// `[model]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// A GGUF file or a safetensors directory; default: [`default_model_path`].
    pub path: PathBuf,
}

/// `[resources.<key>]`: what the host reads itself, and the settings that belong to the kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResourceConfig {
    /// The kind, offered by some plugin.
    pub kind: String,
    /// Nodes of the model that use the resource; at least one, each once.
    pub nodes: Vec<String>,
    /// Keys that must be built before, beside those that the kind derives from its settings.
    pub depends_on: Vec<String>,
    /// What happens when the resource has panicked; default `fail_requests`.
    pub on_fault: OnFault,
    /// All other keys, for the kind to deserialize.
    pub settings: toml::Table,
    /// Line and column of the table and, by name, of each key in it, for later messages.
    pub places: Places,
}

impl ResourceConfig {
    /// The settings as TOML text, the form in which they reach the plugin.
    pub fn settings_text(&self) -> String {
        self.settings.to_string()
    }
}

/// Where a table and its keys stand: (line, column), both from 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    /// The table's header.
    pub table: (usize, usize),
    /// Its keys.
    pub keys: BTreeMap<String, (usize, usize)>,
}

impl Places {
    /// Where `key` stands, or the table if it is not there.
    pub fn of(&self, key: &str) -> (usize, usize) {
        self.keys.get(key).copied().unwrap_or(self.table)
    }
}

/// Where the model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's processor.
    Cpu,
    /// A GPU of NVIDIA.
    Cuda {
        /// Its number among the visible ones, from 0.
        ordinal: u32,
    },
}

/// No machine has more GPUs than this; a larger ordinal is a slip.
const MAX_CUDA_ORDINAL: u32 = 255;

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = |digits: &str| {
            let digits_only = digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|&n: &u32| digits_only && n <= MAX_CUDA_ORDINAL)
        };
        match (text, text.strip_prefix("cuda:").and_then(ordinal)) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(ordinal)) => Ok(Self::Cuda { ordinal }),
            _ => Err(format!("device = {text:?} is neither \"cpu\" nor \"cuda:N\"")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
    /// 8 bits, with 4 of exponent and 3 of mantissa; on a GPU.
    Fp8,
    /// 8 bits, and a scale for each token and head; on the CPU.
    I8,
}

impl KvDtype {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("f32", Self::F32),
        ("f16", Self::F16),
        ("bf16", Self::Bf16),
        ("fp8", Self::Fp8),
        ("i8", Self::I8),
    ];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::I8 => "i8",
        }
    }
}

/// How matrix products with quantized weights treat activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As they are: exact up to the rounding of single precision.
    Float,
    /// Rounded to 8 bits in blocks of 32: faster on the CPU, and less exact.
    Int8,
}

impl Activations {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 2] = [("float", Self::Float), ("int8", Self::Int8)];
}

impl Config {
    /// Reads the file at `path`; relative paths in it count from its directory.
    pub fn load(path: &Path) -> Result<Self> {
        Self::with(Some(path), &[])
    }

    /// The embedded default; relative paths count from the working directory.
    pub fn embedded() -> Result<Self> {
        Self::with(None, &[])
    }

    /// Reads the file at `path`, or the embedded default, and puts `overrides` over it in their order.
    /// Relative paths of overrides count from the working directory.
    pub fn with(path: Option<&Path>, overrides: &[Override]) -> Result<Self> {
        let Some(path) = path else {
            return Self::read("default.toml", DEFAULT_CONFIG, Path::new(""), overrides);
        };
        let text = document::read_text(path, MAX_CONFIG_BYTES)
            .map_err(|problem| Error::Config(problem.into()))?;
        let base = path.parent().unwrap_or(Path::new(""));
        Self::read(&document::shown(path), &text, base, overrides)
    }

    /// Parses `text`, which messages call `file`; relative paths in it count from `base`.
    pub fn parse(file: &str, text: &str, base: &Path) -> Result<Self> {
        Self::read(file, text, base, &[])
    }

    fn read(file: &str, text: &str, base: &Path, overrides: &[Override]) -> Result<Self> {
        read::read(file, text, base, overrides)
            .map_err(|problems: Problems| Error::Config(problems))
    }

    /// Where the value under a path such as `engine.max_batch` or `resources.main_kv.pages` comes from.
    pub fn origin(&self, path: &str) -> Origin {
        if let Some(origin) = self.origins.get(path) {
            return origin.clone();
        }
        let of_resource = |(key, resource): (&String, &ResourceConfig)| {
            let name = path.strip_prefix("resources.")?.strip_prefix(key.as_str())?;
            let &(line, column) = resource.places.keys.get(name.strip_prefix('.')?)?;
            Some(Origin::File(line, column))
        };
        self.resources.iter().find_map(of_resource).unwrap_or_default()
    }

    /// The declared `depends_on` of every resource, to which a kind's own dependencies are added.
    pub fn declared_dependencies(&self) -> BTreeMap<String, Vec<String>> {
        let declared = |(key, r): (&String, &ResourceConfig)| (key.clone(), r.depends_on.clone());
        self.resources.iter().map(declared).collect()
    }
}
